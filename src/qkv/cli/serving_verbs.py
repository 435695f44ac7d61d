"""The verb serve: runs as a service."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.arguments import Device, Dtype, RunArgument, Tag, Weights
from qkv.core.errors import UsageError

PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client", "py3langid", "python_multipart")


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def _unset(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **more)


Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN...", help="Run folders; NAME=FOLDER calls one otherwise.", show_default=False),
]
Host = Annotated[str, _option("Address to listen at; 0.0.0.0 is every one, for all to reach.")]
Port = Annotated[int, _option("Port; 0 is any that is free.")]
Workers = Annotated[int, _option("Model processes; 0: one for each core, or one on a GPU.", min=0)]
Keys = Annotated[Path | None, _unset("File of API keys; without one of them nobody is answered.")]
NewKey = Annotated[str, _unset("Make an API key, show it and its line for --keys, and end.", metavar="NAME")]
Rate = Annotated[int, _option("Requests a minute of each key, or address; 0: no limit.", min=0)]
AllowOrigin = Annotated[
    list[str] | None, _unset("Another site whose scripts may ask: https://example.org", metavar="ORIGIN")
]
ReusePort = Annotated[bool, _option("Let other processes listen at the same port too.", "--reuse-port")]
BatchTokens = Annotated[int, _option("Source tokens that go through a model at once; 0: as the device likes.", min=0)]
WaitMs = Annotated[float, _option("Milliseconds that a sentence waits for company.", min=0)]
Timeout = Annotated[float, _option("Seconds until a request must be answered.", min=0.1)]
Patience = Annotated[float, _option("Seconds for a request to arrive: its head, then its body.", min=0.1)]
Drain = Annotated[float, _option("Seconds for accepted work, when told to stop.", min=0)]
MaxQueue = Annotated[int, _option("Sentences that may wait.", min=1)]
MaxCharacters = Annotated[int, _option("Characters of all texts of a request.", min=1)]
MaxTexts = Annotated[int, _option("Texts of a request.", min=1)]
MaxAlternatives = Annotated[int, _option("Alternatives of a translation.", min=0)]
MaxTokens = Annotated[int, _option("Tokens of a completion.", min=1)]
MaxBody = Annotated[int, _option("Bytes of a request.", min=1)]
MaxFile = Annotated[int, _option("Bytes of a document.", min=1)]
MaxDocuments = Annotated[int, _option("Documents kept at once.", min=1)]


def serve(
    context: typer.Context,
    runs: Runs = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "auto",
    dtype: Dtype = "auto",
    workers: Workers = 0,
    keys: Keys = None,
    new_key: NewKey = "",
    rate: Rate = 0,
    allow_origin: AllowOrigin = None,
    reuse_port: ReusePort = False,
    batch_tokens: BatchTokens = 0,
    wait_ms: WaitMs = 3.0,
    timeout: Timeout = 60.0,
    patience: Patience = 10.0,
    drain: Drain = 30.0,
    max_queue: MaxQueue = 4096,
    max_characters: MaxCharacters = 20_000,
    max_texts: MaxTexts = 1_000,
    max_alternatives: MaxAlternatives = 10,
    max_tokens: MaxTokens = 2048,
    max_body: MaxBody = 1 << 20,
    max_file: MaxFile = 10 << 20,
    max_documents: MaxDocuments = 32,
) -> None:
    """Serve runs: a page, LibreTranslate's API and OpenAI's; Ctrl-C or SIGTERM finishes what was accepted."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"a server needs {', '.join(missing)}: pip install 'qkv[serve]'")
    from qkv.server.auth import read_keys
    from qkv.server.listener import listen, start
    from qkv.server.middleware import Limits
    from qkv.server.scheduler import Setup
    from qkv.server.served_models import Models

    if new_key:
        _make_key(new_key)
        return
    models = Models.open(runs or [])
    most = {name.removeprefix("max_"): value for name, value in context.params.items() if name.startswith("max_")}
    limits = Limits(seconds=timeout, patience=patience, drain=drain, **most)
    folders = {name: model.path for name, model in models.items()}
    setup = Setup(folders, device, dtype, workers, batch_tokens=batch_tokens, wait=wait_ms / 1000)
    known = read_keys(keys) if keys else {}
    listening = listen(host, port, shared=reuse_port)
    start(models, setup, limits, listening, keys=known, rate=rate, origins=allow_origin or [])


def _make_key(name: str) -> None:
    from qkv.server.auth import new_key

    if not name.isascii() or any(c.isspace() or c == "#" for c in name):
        raise UsageError(f"{name}: a name for a key is one word")
    key, line = new_key(name)
    print(f"key:   {key}\nline:  {line}")


# ---- The verb that gives a trained model away: export ----------------------------------------------------------------


class Format(StrEnum):
    """What other engines read."""

    ctranslate2 = "ctranslate2"
    huggingface = "huggingface"


def export(
    run: RunArgument,
    to: Annotated[Format, typer.Option(help="Whose format.", show_default=False, case_sensitive=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.", show_default=False)],
    tag: Tag = "",
    weights: Weights = "",
) -> None:
    """Write a Transformer for another engine: weights, a tokenizer and a README.md; nothing of qkv is needed then."""
    from qkv.api import export as write

    folder = write(run, to=to, output=output, weights=weights, tag=tag)
    print(f"{folder}: how to use it is in {folder / 'README.md'}")
