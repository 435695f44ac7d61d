"""Around every route: limits on the body, no scripts of other sites, headers that keep browsers safe, counting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.serve.limits import Limits, Refusal, Wait
from qkv.serve.metrics import Metrics

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
RAW = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
OWN = [*RAW, (b"cross-origin-resource-policy", b"same-origin")]
SHARED = [*RAW, (b"cross-origin-resource-policy", b"cross-origin")]  # with a site that may ask
NOT_KEPT = (b"cache-control", b"no-store")
FILES = ("/documents", "/translate_file")  # routes that take whole documents
SWALLOWED = 64 << 20  # bytes of a body that is too large which are read all the same, so that its sender hears why

SLOWEST = 1 << 18  # bytes a second, in which a large body must come


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, origins: Collection[str] = ()) -> None:
        self.app, self.limits, self.metrics, self.origins = app, limits, metrics, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        origin = header(scope, b"origin")
        ours = SHARED if origin in self.origins else OWN

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, given = message["status"], message["headers"]
                kept = any(name == b"cache-control" for name, _ in given)
                message["headers"] = [*given, *ours] if kept else [*given, *ours, NOT_KEPT]
            await send(message)

        scope["gate"] = Body(receive, self.limits, self._most(scope))
        try:
            self._check_origin(scope, origin)
            await self.app(scope, scope["gate"].receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.request(route, status, time.perf_counter() - began)

    def _most(self, scope: Scope) -> int:
        return self.limits.file if scope["path"].startswith(FILES) else self.limits.body

    def _check_origin(self, scope: Scope, origin: str) -> None:
        """A browser says which site a script is of: only our own page and the sites allowed may use the server."""
        if origin and origin not in self.origins and origin.split("://")[-1] != header(scope, b"host"):
            scope["refused"] = Refusal(403, "scripts of other sites are not allowed here (--allow-origin allows one)")


class Body:
    """The body of one request as it comes in: not more than allowed, and not slower."""

    def __init__(self, receive: Receive, limits: Limits, most: int) -> None:
        self.inner, self.most = receive, most
        self.size = 0
        self.whole = False
        self.seconds = limits.patience + most / SLOWEST
        self.clock = asyncio.get_running_loop().time
        self.until = self.clock() + self.seconds

    async def receive(self) -> Message:
        if self.whole:
            return await self.inner()
        message = await self._next()
        while self.size > self.most and not self.whole and self.size <= SWALLOWED:
            message = await self._next()
        if self.size > self.most:
            raise Refusal(413, f"the body is larger than {self.most:,} bytes: send less at once")
        return message

    async def data(self) -> bytes:
        """All of it."""
        parts: list[bytes] = []
        while not self.whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Refusal(499, "the client has left")
            parts.append(message.get("body", b""))
        return b"".join(parts)

    async def _next(self) -> Message:
        with Wait(max(0.0, self.until - self.clock()), 408, f"the body did not arrive within {self.seconds:.0f} s"):
            message = await self.inner()
        self.size += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        return message


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name that a request has, or nothing."""
    for own, value in scope["headers"]:
        if own == name:
            found: str = value.decode("latin-1")
            return found
    return ""


async def check(request: Request) -> None:
    """Refuse what the gate found wrong, where the error is told in the right shape."""
    if refused := request.scope.get("refused"):
        raise refused
