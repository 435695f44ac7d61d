"""Limits, refusals, metrics, the middleware around every route, and the parsing of request bodies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class RequestLimits:
    """Every limit of the server; a request above one is refused, never truncated."""

    characters: int = 20_000  # of all texts in a request
    texts: int = 1_000  # in a request
    alternatives: int = 10
    body: int = 1 << 20  # bytes of a request
    file: int = 10 << 20  # bytes of a document
    documents: int = 32  # in memory at once
    retention: float = 900.0  # seconds that a finished document is kept
    queue: int = 4096  # sentences in the queue
    streams: int = 64  # completions in the queue or running
    tokens: int = 2048  # of a completion
    timeout: float = 60.0  # seconds from a request to its response
    receive_timeout: float = 10.0  # seconds to receive the head of a request, and again for its body
    drain: float = 30.0  # seconds to finish accepted requests after a stop signal


class Refusal(HTTPException):
    """A refused request: status, one line of reason, and a JSON pointer to the invalid part."""

    def __init__(self, status: int, reason: str, *, pointer: str = "", retry_after: float = 0) -> None:
        headers = {"Retry-After": str(max(1, round(retry_after)))} if retry_after or status in (429, 503) else None
        super().__init__(status, reason, headers)
        self.pointer = pointer


def check_limit(unit: str, count: int, limit: int, pointer: str = "") -> None:
    """Refuse a count above its limit with 413."""
    if count > limit:
        raise Refusal(413, f"{count:,} {unit}, but at most {limit:,} are allowed: send less at once", pointer=pointer)


# ---- metrics for Prometheus; every server has its own registry -------------------------------------------------------

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters, gauges and histograms; none contains texts, client names or keys."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("qkv_requests", "Responses sent.", ["route", "status"])
        self.seconds = histogram("qkv_request_seconds", "Time from request to response.", ["route"], buckets=SECONDS)
        self.waiting = gauge("qkv_queue_sentences", "Sentences in the queue.")
        self.waiting_tokens = gauge("qkv_queue_tokens", "Tokens of the sentences in the queue.")
        self.ready = gauge("qkv_workers_ready", "Model processes that accept jobs.")
        self.restarts = counter("qkv_worker_restarts", "Restarts of model processes.")
        self.refused = counter("qkv_refused", "Requests refused: queue full, rate limit, invalid key.", ["why"])
        self.cancelled = counter("qkv_cancelled", "Requests ended by a disconnect or the time limit.")
        self.sentences = counter("qkv_sentences", "Sentences translated.", ["model"])
        tokens = "Source tokens of translations, output tokens of completions."
        self.tokens = counter("qkv_tokens", tokens, ["model"])
        self.batch_size = histogram("qkv_batch_sentences", "Sentences in a batch.", buckets=SIZES)
        self.batch_seconds = histogram("qkv_batch_seconds", "Time of a batch.", buckets=SECONDS)
        self._request = cache(lambda route, status: (self.requests.labels(route, status), self.seconds.labels(route)))

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        counter, histogram = self._request(route, status)
        counter.inc()
        histogram.observe(seconds)

    def batch(self, model: str, sentences: int, tokens: int, seconds: float) -> None:
        """Count a finished batch."""
        self.sentences.labels(model).inc(sentences)
        self.tokens.labels(model).inc(tokens)
        self.batch_size.observe(sentences)
        self.batch_seconds.observe(seconds)


# ---- the middleware: limits on the body, security headers, requests from other sites ---------------------------------

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
SAME_ORIGIN_HEADERS = [*RAW_HEADERS, (b"cross-origin-resource-policy", b"same-origin")]
CROSS_ORIGIN_HEADERS = [*RAW_HEADERS, (b"cross-origin-resource-policy", b"cross-origin")]  # for an allowed site
NO_STORE = (b"cache-control", b"no-store")
FILE_ROUTES = ("/documents", "/translate_file")  # whole documents: `RequestLimits.file` applies
MAX_DISCARDED = 64 << 20  # bytes of a too large body that are read and dropped, so that the client gets the response
SLOWEST_UPLOAD = 1 << 18  # bytes per second: the time limit of a body grows with the limit of its size


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, limits: RequestLimits, metrics: Metrics, origins: Collection[str] = ()) -> None:
        self.app, self.limits, self.metrics, self.origins = app, limits, metrics, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        security = CROSS_ORIGIN_HEADERS if origin in self.origins else SAME_ORIGIN_HEADERS

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                has_cache_control = any(name == b"cache-control" for name, _ in message["headers"])
                message["headers"] = [*message["headers"], *security, *([] if has_cache_control else [NO_STORE])]
            await send(message)

        limit = self.limits.file if scope["path"].startswith(FILE_ROUTES) else self.limits.body
        body = BodyReader(receive, limit, self.limits.receive_timeout)
        try:
            # A browser names the site of a script: only our page and the allowed sites may use the server.
            if origin and origin not in self.origins and origin.split("://")[-1] != headers.get("host", ""):
                scope["refusal"] = Refusal(403, "this origin is refused: start qkv serve with --allow-origin ORIGIN")
            await self.app(scope, body.receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.request(route, status, time.perf_counter() - began)


async def refuse_foreign_origin(request: Request) -> None:
    """Raise the middleware's refusal inside the route, where it gets the error format of its API."""
    if refusal := request.scope.get("refusal"):
        raise refusal


class BodyReader:
    """Reads the body of one request within its limits of size and time."""

    def __init__(self, receive: Receive, limit: int, receive_timeout: float) -> None:
        self.inner, self.limit = receive, limit
        self.size = 0
        self.complete = False
        self.seconds = receive_timeout + limit / SLOWEST_UPLOAD
        self.until = asyncio.get_running_loop().time() + self.seconds

    async def receive(self) -> Message:
        if self.complete:
            return await self.inner()
        message = await self._next()
        while self.size > self.limit and not self.complete and self.size <= MAX_DISCARDED:
            message = await self._next()
        if self.size > self.limit:
            raise Refusal(413, f"the body is larger than {self.limit:,} bytes: send less at once")
        return message

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self.until):
                message = await self.inner()
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self.seconds:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise Refusal(499, "the client disconnected")
        self.size += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        return message


# ---- bodies: JSON or a form, checked against a pydantic model; JSON responses ----------------------------------------

B = TypeVar("B", bound=BaseModel)
MAX_FIELDS = 2000  # of a form
JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
PARSED = (JSON, FORM, MULTIPART)  # media types that `parse_body` reads
JSON_HINT = "send it with the header Content-Type: application/json"


async def parse_body(request: Request, model: type[B]) -> B:
    """Parse the body as a `model`; an invalid body is refused with a pointer to the invalid part."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == MULTIPART:
        async with request.form(max_files=0, max_fields=MAX_FIELDS) as form:
            values = _collect_fields(form.multi_items())
    else:
        data = await request.body()
        values = parse_form(data) if kind == FORM else parse_json(data)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        refuse_malformed(error.errors())


def parse_json(data: bytes) -> Any:
    try:
        return DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refusal(422, f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    except RecursionError:
        raise Refusal(422, "the body is nested too deeply: send flatter JSON") from None
    except ValueError as error:
        raise Refusal(422, f"the body is not JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # NaN and Infinity are no JSON
ENCODER = json.JSONEncoder(ensure_ascii=False)


def parse_form(data: bytes) -> dict[str, Any]:
    if data.lstrip().startswith((b"{", b"[")):
        raise Refusal(422, f"the body is JSON but was sent as a form: {JSON_HINT}")
    try:
        fields = parse_qsl(data.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:  # also raised for invalid UTF-8
        raise Refusal(422, f"the form cannot be parsed: {str(error)[:200]}") from None
    return _collect_fields(fields)


def _collect_fields(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Fields by name; a repeated field becomes a list."""
    values: dict[str, list[Any]] = {}
    for name, value in fields:
        values.setdefault(name, []).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


def refuse_malformed(errors: Any) -> NoReturn:
    """Refuse with the first of pydantic's errors; for a union, with the error of the closest branch."""
    same_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same_field, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    # A string in brackets or the name of a type is a branch of a union, such as `str` or `list[str]`.
    hidden = ("body", "query", "path", "str", "constrained-str", "int", "float", "bool")
    place = [part for part in first["loc"] if part not in hidden and "[" not in str(part)]
    pointer = "".join(f"/{part}" for part in place)
    status = 413 if first["type"] in ("string_too_long", "too_long") else 422
    reason = first["msg"].removeprefix("Value error, ")
    raise Refusal(status, f"{pointer.lstrip('/') or 'body'}: {reason}", pointer=pointer)


def json_response(body: Any) -> Response:
    """Return a response with JSON in UTF-8, without escapes."""
    return Response(ENCODER.encode(body), media_type=JSON)


def body_schema(schema: dict[str, Any], *media_types: str) -> dict[str, Any]:
    """The OpenAPI description of a body that a route reads by itself."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in media_types}}}
