"""`qkv serve` in a subprocess at a free port, for tests; it ends with the test."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qkv
from conftest import PATIENCE, sentences, tiny_config
from qkv.options import Config, CorpusConfig, DataConfig, DecoderOnlyConfig, TokenizerConfig

ENDLESS = 10**9  # tokens of a completion that ends only when it is stopped
JSON = {"Content-Type": "application/json"}
PLACE = ("--port", "0", "--device", "cpu")
# The limits in seconds are out of reach, so that a slow machine changes no answer; a test of a limit sets its own.
UNHURRIED = ("--timeout", PATIENCE, "--patience", PATIENCE, "--drain", 5)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


# Run `qkv`, but make each model process open a named pipe first: the call blocks until a writer opens the pipe.
LOAD_AFTER = """
import sys
from qkv.cli import main
from qkv.server import worker_supervisor

worker_supervisor.START = f"open({sys.argv.pop(1)!r}).close(); {worker_supervisor.START}"
main()
"""


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request on a new connection; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if isinstance(body, bytes | None) else JSON
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            line.request(method or ("GET" if body is None else "POST"), path, data, kind | (headers or {}))
            response = line.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
        finally:
            line.close()

    def translate(self, text: str | list[str], **more: Any) -> Any:
        response = self.request("/translate", {"q": text, "source": "en", "target": "it", **more})
        assert response.status == 200, response.data
        return response.json["translatedText"]

    def metric(self, name: str) -> float:
        lines = self.request("/metrics").data.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)

    @property
    def workers(self) -> list[int]:
        """The processes with the model."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for children in threads for pid in children.read_text().split()]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    @property
    def accepted(self) -> int:
        """Number of sentences that were accepted and are not answered."""
        health = self.request("/health").json
        return int(health["waiting"] + health["running"])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Suspend the model processes, so that accepted work stays unanswered until the block ends."""
        workers = self.workers
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def until(self, true: Any) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)


@contextmanager
def serving(*arguments: object, ready: bool = True, load_after: Path | None = None) -> Iterator[Server]:
    """Run `qkv serve` with these arguments; `ready=False` does not wait for its models.

    `load_after` is a named pipe: the model processes load nothing before a writer opens it.
    """
    program = ["-c", LOAD_AFTER, str(load_after)] if load_after else ["-m", "qkv"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *program, "serve", *map(str, [*UNHURRIED, *arguments, *PLACE])],
                stderr=stream,
                preexec_fn=_end_with_parent,
            )
        server = Server(process, 0, log)
        try:
            server.until(lambda: b" serves " in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            server.port = int(log.read_text().split("/ serves")[0].rsplit(":", 1)[1])
            if ready:
                server.until(lambda: server.request("/health/ready").status == 200)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def documented(language: str) -> list[str]:
    """The examples in a language on the page about serving."""
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def train_language_model(folder: Path) -> Path:
    """The run of a small language model, letter by letter."""
    lines = [source for source, _ in sentences(300, seed=5)]
    (folder / "text.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    spec = tiny_config("", "", steps=60, validate_every=60, label_smoothing=0.0, average=0)
    data = DataConfig(train=(CorpusConfig(text=str(folder / "text.txt")),), max_length=32)
    model = DecoderOnlyConfig(d_model=32, d_ff=64, heads=2, layers=1, norm="pre", positions="rotary", dropout=0.0)
    made = Config(data, TokenizerConfig(kind="char"), model, spec.train, spec.decode)
    return qkv.train(made, folder / "run").path
