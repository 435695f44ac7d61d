"""The verbs serve and export: make a trained model available to other programs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from qkv.cli.arguments import Device, Dtype, RunArgument, Tag, Weights, option
from qkv.core.errors import UsageError

PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client", "py3langid", "python_multipart")


def serve(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...", help="Run folders; NAME=FOLDER sets the name of the model.", show_default=False
        ),
    ] = None,
    host: Annotated[str, option("Address to listen on; 0.0.0.0: all network interfaces.")] = "127.0.0.1",
    port: Annotated[int, option("Port; 0: any free port.")] = 8000,
    device: Device = "auto",
    dtype: Dtype = "auto",
    workers: Annotated[int, option("Model processes; 0: one per core, or one on a GPU.", min=0)] = 0,
    keys: Annotated[Path | None, option("API key file; requests without a valid key are rejected.")] = None,
    new_key: Annotated[
        str, option("Print a new API key and its line for the --keys file, and exit.", metavar="NAME")
    ] = "",
    rate: Annotated[int, option("Requests per minute for each key or address; 0: no limit.", min=0)] = 0,
    allow_origin: Annotated[
        list[str] | None,
        option("CORS origin that may send requests, e.g. https://example.org; repeatable.", metavar="ORIGIN"),
    ] = None,
    reuse_port: Annotated[bool, option("Share the port with other processes (SO_REUSEPORT).", "--reuse-port")] = False,
    batch_tokens: Annotated[int, option("Source tokens per batch; 0: chosen by the device.", min=0)] = 0,
    wait_ms: Annotated[float, option("Batching delay in milliseconds.", min=0)] = 3.0,
    timeout: Annotated[float, option("Request timeout in seconds.", min=0.1)] = 60.0,
    patience: Annotated[
        float, option("Seconds for the head, and then for the body, of a request to arrive.", min=0.1)
    ] = 10.0,
    drain: Annotated[float, option("Seconds to finish accepted requests at shutdown.", min=0)] = 30.0,
    max_queue: Annotated[int, option("Maximum queued sentences.", min=1)] = 4096,
    max_characters: Annotated[int, option("Maximum characters of all texts of a request.", min=1)] = 20_000,
    max_texts: Annotated[int, option("Maximum texts per request.", min=1)] = 1_000,
    max_alternatives: Annotated[int, option("Maximum alternatives per translation.", min=0)] = 10,
    max_tokens: Annotated[int, option("Maximum tokens per completion.", min=1)] = 2048,
    max_body: Annotated[int, option("Maximum request size in bytes.", min=1)] = 1 << 20,
    max_file: Annotated[int, option("Maximum document size in bytes.", min=1)] = 10 << 20,
    max_documents: Annotated[int, option("Maximum number of stored documents.", min=1)] = 32,
) -> None:
    """Serve models over HTTP: web page and JSON APIs.

    The APIs are qkv's own, LibreTranslate's and OpenAI's. Ctrl-C or SIGTERM finishes accepted requests, then exits.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"a server needs {', '.join(missing)}: pip install 'qkv[serve]'")
    from qkv.server.listener import open_socket
    from qkv.server.listener import serve as serve_models
    from qkv.server.middleware import RequestLimits
    from qkv.server.scheduler import SchedulerOptions
    from qkv.server.served_models import ServedModels
    from qkv.server.service import new_key as make_key
    from qkv.server.service import read_keys

    if new_key:
        if not new_key.isascii() or any(c.isspace() or c == "#" for c in new_key):
            raise UsageError(f"--new-key {new_key}: use one ASCII word without spaces and #")
        print("key:   {}\nline:  {}".format(*make_key(new_key)))
        return
    models = ServedModels.open(runs or [])
    maxima = {name.removeprefix("max_"): value for name, value in context.params.items() if name.startswith("max_")}
    limits = RequestLimits(timeout=timeout, receive_timeout=patience, drain=drain, **maxima)
    folders = {name: model.path for name, model in models.items()}
    options = SchedulerOptions(folders, device, dtype, workers, batch_tokens, batching_delay=wait_ms / 1000)
    api_keys = read_keys(keys) if keys else {}
    listening = open_socket(host, port, reuse_port=reuse_port)
    serve_models(models, options, limits, listening, keys=api_keys, rate=rate, origins=allow_origin or [])


# ---- export ----------------------------------------------------------------------------------------------------------


def export(
    run: RunArgument,
    to: Annotated[
        Literal["ctranslate2", "huggingface"], option("Format of the exported folder.", case_sensitive=False)
    ],
    output: Annotated[Path, option("Folder to create.", "--output", "-o")],
    tag: Tag = "",
    weights: Weights = "",
) -> None:
    """Export a model for CTranslate2 or Hugging Face.

    Writes weights, tokenizer and a README.md; the folder works without qkv.
    """
    from qkv.interop import export as write

    folder = write(run, to=to, output=output, weights=weights, tag=tag)
    print(f"{folder}: see {folder / 'README.md'} for how to use it")
