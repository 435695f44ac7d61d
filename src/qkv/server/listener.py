"""The server: it listens, lets no connection dawdle, and when told to stop finishes what it has accepted."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qkv.console import say
from qkv.core.errors import QkvError, UsageError
from qkv.server.app import create_app
from qkv.server.auth import Key
from qkv.server.document_jobs import Desk
from qkv.server.middleware import Limits, Metrics
from qkv.server.scheduler import Engine, Setup
from qkv.server.served_models import Models
from qkv.server.service import Service

CONNECTIONS = 1024  # at once; more are told to come again
SENDING = 1  # seconds, at least, for answers that are ready to reach their clients


class Joined:
    """A transport that sends what is written in one turn of the loop together: an answer's head and its body."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self.loop = inner, loop
        self.held: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        if not self.held:
            self.loop.call_soon(self.flush)
        self.held.append(data)

    def flush(self) -> None:
        if self.held and not self.inner.is_closing():
            self.inner.write(b"".join(self.held))
        self.held.clear()

    def close(self) -> None:
        self.flush()
        self.inner.close()


class Protocol(HttpToolsProtocol):
    """HTTP, with a limit on how long the head of a request may take: a connection that says nothing is closed.

    Whoever answers a request finds in its state a future, `left`, which is done when the client has gone.
    """

    patience = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Joined(transport, self.loop)))
        self.left = self.loop.create_future()
        self.impatient = self.loop.call_later(self.patience, transport.close)

    def on_message_begin(self) -> None:
        self.impatient.cancel()
        self.impatient = self.loop.call_later(self.patience, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.impatient.cancel()
        self.scope["state"]["left"] = self.left
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:  # behind a large body nobody reads on, and would see the client leave
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.impatient.cancel()
        self.left.set_result(None)
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Told to stop, it refuses what comes and finishes what it has; told again, it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.service: Service = app.state.service
        self.desk: Desk = app.state.desk
        self.told = 0  # times to stop
        self.until = 0.0

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def busy(self) -> bool:
        """Whether something that was accepted is not done, or not fetched."""
        return not self.engine.idle or any(self.desk.busy)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.told:
            super().handle_exit(sig, frame)
        self.told += 1

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave the main loop now."""
        now = asyncio.get_running_loop().time()
        if self.engine.failed and not self.engine.ready:
            self.should_exit = True
        if self.told and not self.engine.draining:
            self.engine.draining = True
            self.until = now + self.service.limits.drain
            if self.busy and not self.should_exit:
                drain = self.service.limits.drain
                say(f"stopping: waiting for {self._open()}, at most {drain:g} s; Ctrl-C again ends at once")
        if self.engine.draining:
            self.should_exit |= not self.busy or now > self.until
        return await super().on_tick(counter)

    def _open(self) -> str:
        """What is not done yet, in words."""
        running, done = self.desk.busy
        parts = [
            _counted(len(self.server_state.tasks), "request"),
            _counted(running, "document"),
            _counted(done, "document", " to be fetched"),
        ]
        return " and ".join(filter(None, parts)) or "the last batch"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give up what is not done; what is has the rest of the time to reach its client, or if told twice a moment."""
        if self.busy:
            say(f"given up: {self._open()}")
        self.engine.give_up()
        left = 0.0 if self.told > 1 else self.until - asyncio.get_running_loop().time()
        self.config.timeout_graceful_shutdown = max(SENDING, math.ceil(left))
        await super().shutdown(sockets)


def _counted(count: int, what: str, more: str = "") -> str:
    return f"{count} {what}{'s' if count > 1 else ''}{more}" if count else ""


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens; `shared`, other processes may listen at the same port, and the system divides the work."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise UsageError(
            f"{host}, port {port}: cannot listen there: {reason}: choose another --port or --host"
        ) from None
    found.setblocking(False)
    return found


def start(
    models: Models,
    setup: Setup,
    limits: Limits,
    listening: socket.socket,
    *,
    keys: Mapping[str, Key] | None = None,
    rate: int = 0,
    origins: Collection[str] = (),
) -> None:
    """Serve models, and say where."""
    metrics = Metrics()
    service = Service(models, Engine(setup, limits, metrics), limits, metrics, keys or {}, rate)
    host, port = listening.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/ serves {', '.join(models)}")
    for model in models.values():
        if not model.knows_languages:
            say(
                f"{model.name} does not know its languages, and clients must call them {model.source} and "
                f"{', '.join(model.targets)}: set src_lang and tgt_lang under [data] in {model.path}/config.toml"
            )
    run(create_app(service, origins=origins), listening)


def run(app: FastAPI, listening: socket.socket) -> None:
    """Serve until told to stop; a run that cannot be loaded is an error."""
    options: dict[str, Any] = {"http": Protocol, "ws": "none", "access_log": False, "log_level": "warning"}
    limits = app.state.service.limits
    Protocol.patience = limits.patience
    config = uvicorn.Config(
        app,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=75,
        **options,
    )
    server = Server(config, app)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
    if server.engine.failed and not server.told:
        raise QkvError(str(server.engine.failed))
