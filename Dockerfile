# A server for run folders: docker build -t qkv . && docker run -p 127.0.0.1:8000:8000 -v ./runs:/runs:ro qkv serve /runs/demo --host 0.0.0.0
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/qkv
ENV PATH=/opt/qkv/bin:$PATH
COPY constraints.txt ./
# The CPU build of torch; for a GPU, take another index: --build-arg TORCH=https://download.pytorch.org/whl/cu128
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH" torch setuptools
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt --no-build-isolation '.[serve]'

FROM python:3.12-slim
# The CPU engine is compiled for the processor that it meets, on first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/qkv /opt/qkv
ENV PATH=/opt/qkv/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/tmp
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin qkv
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready')"]
ENTRYPOINT ["qkv"]
CMD ["serve", "--help"]
