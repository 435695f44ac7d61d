"""What a request may ask for, and how one that is refused is told so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Limits:
    """Every bound of the server; what exceeds one is refused, never cut."""

    characters: int = 20_000  # of all texts in a request
    texts: int = 1_000  # in a request
    alternatives: int = 10
    body: int = 1 << 20  # bytes of a request
    file: int = 10 << 20  # bytes of a document
    documents: int = 32  # kept at once
    kept: float = 900.0  # seconds that a finished document waits for its reader
    queue: int = 4096  # sentences that wait
    streams: int = 64  # completions that wait or run
    tokens: int = 2048  # of a completion
    seconds: float = 60.0  # from a request to its answer
    patience: float = 10.0  # seconds for the head of a request, and again for its body
    drain: float = 30.0  # seconds for what was accepted, once the server is told to stop


class Refusal(HTTPException):
    """A request that is not answered as asked: the status, one line of why, and a pointer to the part at fault."""

    def __init__(self, status: int, why: str, *, pointer: str = "", retry_after: float = 0) -> None:
        headers = {"Retry-After": str(max(1, round(retry_after)))} if retry_after or status in (429, 503) else None
        super().__init__(status, why, headers)
        self.pointer = pointer


class Wait:
    """What is waited for inside ends with a refusal after so many seconds, or when somebody calls `end`."""

    def __init__(self, seconds: float, status: int, why: str) -> None:
        self.seconds, self.status, self.why = seconds, status, why  # {} in `why` is where the seconds are told
        self.refusal: Refusal | None = None

    def __enter__(self) -> Wait:
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[object] | None = task
        self.clock = task.get_loop().call_later(self.seconds, self.end, self.status, self.why)
        return self

    def end(self, status: int, why: str) -> None:
        if self.task is not None and self.refusal is None:
            self.refusal = Refusal(status, why.format(self.seconds))
            self.task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clock.cancel()
        task, self.task = self.task, None
        if self.refusal is not None and task is not None and kind is asyncio.CancelledError:
            task.uncancel()
            raise self.refusal from None


def too_many(what: str, count: int, limit: int, pointer: str = "") -> None:
    """Refuse with 413 what is larger than a limit."""
    if count > limit:
        raise Refusal(413, f"{count:,} {what}, and at most {limit:,} are taken: send less at once", pointer=pointer)


# ---- What the server counts, for Prometheus; every server has a registry of its own ----------------------------------


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters by name; none holds anything of a text, a client or a key."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("qkv_requests", "Requests answered.", ["route", "status"], registry=own)
        self.seconds = Histogram("qkv_request_seconds", "Until the answer.", ["route"], registry=own, buckets=SECONDS)
        self.waiting = Gauge("qkv_queue_sentences", "Sentences that wait.", registry=own)
        self.waiting_tokens = Gauge("qkv_queue_tokens", "Their tokens.", registry=own)
        self.ready = Gauge("qkv_workers_ready", "Model processes that can answer.", registry=own)
        self.restarts = Counter("qkv_worker_restarts", "Model processes that died.", registry=own)
        self.refused = Counter("qkv_refused", "Requests refused: full, rate, key.", ["why"], registry=own)
        self.cancelled = Counter("qkv_cancelled", "Requests whose sender left or whose time was up.", registry=own)
        self.sentences = Counter("qkv_sentences", "Sentences answered.", ["model"], registry=own)
        self.tokens = Counter(
            "qkv_tokens", "Tokens read of translations, written of completions.", ["model"], registry=own
        )
        self.batch_size = Histogram("qkv_batch_sentences", "Sentences in a batch.", registry=own, buckets=SIZES)
        self.batch_seconds = Histogram("qkv_batch_seconds", "Time of a batch.", registry=own, buckets=SECONDS)

        self._request = cache(lambda route, status: (self.requests.labels(route, status), self.seconds.labels(route)))

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        count, time = self._request(route, status)
        count.inc()
        time.observe(seconds)

    def batch(self, model: str, sentences: int, tokens: int, seconds: float) -> None:
        """A batch was answered."""
        self.sentences.labels(model).inc(sentences)
        self.tokens.labels(model).inc(tokens)
        self.batch_size.observe(sentences)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


# ---- Around every route: limits on the body, no scripts of other sites, headers that keep browsers safe,  ------------


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


# ---- Bodies of requests: read within limits of size and time, as JSON or as a form, and checked against a ------------


B = TypeVar("B", bound=BaseModel)
FIELDS = 2000  # of a form
FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
AS_JSON = "send it with the header Content-Type: application/json"


async def read(request: Request, model: type[B]) -> B:
    """The body as the model has it; anything else is refused with a pointer to what is wrong."""
    kind = header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if kind == PARTS:
        async with request.form(max_files=0, max_fields=FIELDS) as form:
            plain = _gathered(form.multi_items())
    else:
        data = await request.scope["gate"].data()
        plain = _form(data) if kind == FORM else _json(data)
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        malformed(error.errors())


def _json(data: bytes) -> Any:
    try:
        return DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refusal(422, f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    except RecursionError:
        raise Refusal(422, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(422, f"the body is not JSON: {str(error)[:200]}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def _form(data: bytes) -> dict[str, Any]:
    if data.lstrip().startswith((b"{", b"[")):
        raise Refusal(422, f"the body is JSON but came as a form: {AS_JSON}")
    try:
        fields = parse_qsl(data.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS)
    except ValueError as error:  # bytes that are not UTF-8 are one too
        raise Refusal(422, f"the form cannot be read: {str(error)[:200]}") from None
    return _gathered(fields)


def _gathered(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Fields by name; one that comes several times is a list."""
    found: dict[str, list[Any]] = {}
    for name, value in fields:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def malformed(errors: Any) -> NoReturn:
    """Refuse with the first thing that is wrong, and where it is; of a union, with what its nearest branch says."""
    alike = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(alike, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    place = [part for part in first["loc"] if part not in ("body", "query", "path") and not _is_branch(part)]
    pointer = "".join(f"/{part}" for part in place)
    status = 413 if first["type"] in ("string_too_long", "too_long") else 422
    why = first["msg"].removeprefix("Value error, ")
    raise Refusal(status, f"{pointer.lstrip('/') or 'body'}: {why}", pointer=pointer)


def _is_branch(part: Any) -> bool:
    """Whether a part of a place names a branch of a union (`str`, `list[str]`), and nothing in the body."""
    return isinstance(part, str) and (part in ("str", "constrained-str", "int", "float", "bool") or "[" in part)


def schema(model: type[BaseModel], *, form: bool = False) -> dict[str, Any]:
    """What OpenAPI says of a body that `read` takes."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    if form:
        content[FORM] = content[PARTS] = content["application/json"]
    return {"requestBody": {"required": True, "content": content}}
