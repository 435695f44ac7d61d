"""The listening process: sockets, time limits on connections, and a shutdown that finishes accepted requests."""

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
from qkv.server.document_jobs import JobStore
from qkv.server.middleware import Metrics, RequestLimits
from qkv.server.scheduler import Scheduler, SchedulerOptions
from qkv.server.served_models import ServedModels
from qkv.server.service import ApiKey, Service

MAX_CONNECTIONS = 1024  # at once; further requests get 503
MIN_SEND_SECONDS = 1  # at least, at shutdown, for finished responses to reach their clients


class CoalescingTransport:
    """A transport that joins the writes of one event loop iteration: head and body of a response in one packet."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self.loop = inner, loop
        self.buffer: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        if not self.buffer:
            self.loop.call_soon(self.flush)
        self.buffer.append(data)

    def flush(self) -> None:
        if self.buffer and not self.inner.is_closing():
            self.inner.write(b"".join(self.buffer))
        self.buffer.clear()

    def close(self) -> None:
        self.flush()
        self.inner.close()


class HttpProtocol(HttpToolsProtocol):
    """HTTP with a time limit for the head of a request, after which the connection is closed.

    The state of each request has a future, `disconnected`, which is done when the client closes the connection.
    """

    receive_timeout = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop)))
        self.disconnected = self.loop.create_future()
        self.head_timer = self.loop.call_later(self.receive_timeout, transport.close)

    def on_message_begin(self) -> None:
        self.head_timer.cancel()
        self.head_timer = self.loop.call_later(self.receive_timeout, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.head_timer.cancel()
        self.scope["state"]["disconnected"] = self.disconnected
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:  # uvicorn pauses reading after a large body; without reading, a disconnect is not noticed
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head_timer.cancel()
        self.disconnected.set_result(None)
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Server with two stop signals: the first one drains accepted requests, the second one ends it at once."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.service: Service = app.state.service
        self.job_store: JobStore = app.state.job_store
        self.stop_signals = 0
        self.drain_until = 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    @property
    def busy(self) -> bool:
        """Whether an accepted request is not done, or a translated document not downloaded."""
        return not self.scheduler.idle or any(self.job_store.unfinished)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stop_signals:
            super().handle_exit(sig, frame)
        self.stop_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second by uvicorn; returns whether the main loop should end."""
        now = asyncio.get_running_loop().time()
        if self.scheduler.failure and not self.scheduler.ready:
            self.should_exit = True
        if self.stop_signals and not self.scheduler.draining:
            self.scheduler.draining = True
            drain = self.service.limits.drain
            self.drain_until = now + drain
            if self.busy and not self.should_exit:
                say(f"stopping: waiting for {self._unfinished()}, at most {drain:g} s; Ctrl-C again ends at once")
        if self.scheduler.draining:
            self.should_exit |= not self.busy or now > self.drain_until
        return await super().on_tick(counter)

    def _unfinished(self) -> str:
        """Describe the unfinished work, for example "2 requests and 1 document"."""
        running, finished = self.job_store.unfinished
        counts = [
            (len(self.server_state.tasks), "request", ""),
            (running, "document", ""),
            (finished, "document", " to be downloaded"),
        ]
        parts = [f"{count} {noun}{'s' if count > 1 else ''}{suffix}" for count, noun, suffix in counts if count]
        return " and ".join(parts) or "the last batch"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse unfinished work; finished responses get the rest of the drain time, or a second after two signals."""
        if self.busy:
            say(f"stopping without {self._unfinished()}")
        self.scheduler.stop()
        left = 0.0 if self.stop_signals > 1 else self.drain_until - asyncio.get_running_loop().time()
        self.config.timeout_graceful_shutdown = max(MIN_SEND_SECONDS, math.ceil(left))
        await super().shutdown(sockets)


def open_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Open a listening socket; with `reuse_port`, several processes may share one port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise UsageError(f"{host}, port {port}: cannot listen: {reason}: choose another --port or --host") from None
    listening.setblocking(False)
    return listening


def serve(
    models: ServedModels,
    options: SchedulerOptions,
    limits: RequestLimits,
    listening: socket.socket,
    *,
    keys: Mapping[str, ApiKey] | None = None,
    rate: int = 0,
    origins: Collection[str] = (),
) -> None:
    """Print the address and serve models until a stop signal."""
    metrics = Metrics()
    service = Service(models, Scheduler(options, limits, metrics), limits, metrics, keys or {}, rate)
    host, port = listening.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/ serves {', '.join(models)}")
    for model in models.values():
        if not model.has_languages:
            say(
                f"{model.name} has no language codes, so clients must use {model.source} and "
                f"{', '.join(model.targets)}: set src_lang and tgt_lang under [data] in {model.path}/config.toml"
            )
    run(create_app(service, origins=origins), listening)


def run(app: FastAPI, listening: socket.socket) -> None:
    """Run the event loop until a stop signal; a run that cannot be loaded is an error."""
    HttpProtocol.receive_timeout = app.state.service.limits.receive_timeout
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=75,
    )
    server = Server(config, app)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
    if server.scheduler.failure and not server.stop_signals:
        raise QkvError(str(server.scheduler.failure))
