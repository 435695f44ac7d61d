"""The application: routes, pages from memory, and errors in the shape that the client of a route expects."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv import __version__
from qkv.server import libretranslate_routes, native_routes, openai_routes, served_models
from qkv.server.document_jobs import Desk
from qkv.server.middleware import AS_JSON, Gate, Refusal, check, malformed
from qkv.server.service import Service, is_openai

LOG = logging.getLogger("uvicorn.error")
PAGE = Path(__file__).parent / "page"
EXPLORER = Path(__file__).parents[1] / "explain" / "page"
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
HOT = next(
    each for each in libretranslate_routes.router.routes if isinstance(each, APIRoute) and each.path == "/translate"
)


class App(FastAPI):
    """FastAPI behind the gate, but for the route that is asked most: that one does without what it does around each."""

    gate: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate(scope, receive, send)

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What has come through the gate."""
        if scope["type"] == "http" and scope["path"] == HOT.path and scope["method"] == "POST":
            await self._translate(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _translate(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"], scope["route"] = self, HOT
        request = Request(scope, receive)
        try:
            await check(request)
            answer = await libretranslate_routes.translate(request)
        except HTTPException as error:
            answer = await _failed(request, error)
        except Exception as error:
            LOG.exception("a translation failed")
            answer = await _unforeseen(request, error)
        await answer(scope, receive, send)


def create_app(served: Service, *, origins: Collection[str] = ()) -> App:
    """The application of a service, which starts and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.engine.start()
        reading = asyncio.create_task(
            asyncio.to_thread(served_models.detect, "warm")
        )  # its tables, before they are needed
        yield
        await reading
        await served.engine.close()

    app = App(
        title="qkv",
        version=__version__,
        description="Translation and completion by trained runs.",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(check)],
    )
    app.state.service = served
    app.state.desk = Desk(served)
    for router in (libretranslate_routes.router, openai_routes.router, native_routes.router):
        app.include_router(router)
    _add_pages(app)
    app.add_exception_handler(HTTPException, _failed)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(Exception, _unforeseen)
    inside: ASGIApp = app.inside
    if origins:
        inside = CORSMiddleware(inside, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.gate = Gate(inside, limits=served.limits, metrics=served.metrics, origins=set(origins))
    return app


def _add_pages(app: FastAPI) -> None:
    """The page and what it loads, read once: no request names a file."""
    files = {f"/page/{path.name}": path for path in sorted(PAGE.glob("*.*"))}
    files |= {f"/page/explorer/{path.name}": path for path in sorted(EXPLORER.glob("*.*")) if path.suffix != ".html"}
    if (PAGE / "index.html").exists():
        files["/"] = PAGE / "index.html"
    held = {place: (path.read_bytes(), mimetypes.guess_type(path.name)[0]) for place, path in files.items()}

    async def page(request: Request) -> Response:
        data, kind = held[request.url.path]
        return Response(data, media_type=kind, headers={"Cache-Control": "no-cache"})

    for place in held:
        app.add_api_route(place, page, methods=["GET"], include_in_schema=False)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = 422 if error.status_code == 400 and not isinstance(error, Refusal) else error.status_code
    plain: dict[str, Any]
    pointer, why = getattr(error, "pointer", ""), error.detail
    if status in (404, 405) and not isinstance(error, Refusal):
        why = f"{why}: /openapi.json has every route"
    if is_openai(request):
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = pointer.lstrip("/").replace("/", ".") or None
        plain = {"error": {"message": why, "type": kind, "param": param, "code": None}}
    else:
        plain = {"error": why} | ({"pointer": pointer} if pointer else {})
    return JSONResponse(plain, status, headers=dict(error.headers or {}))


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    try:
        if errors[0]["loc"] == ("body",) and not request.headers.get("content-type", "").startswith("application/json"):
            raise Refusal(422, f"the body is not JSON, or does not say so: {AS_JSON}")
        malformed(errors)
    except Refusal as refusal:
        return await _failed(request, refusal)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """Something of ours is broken: the log has the traceback, the client no more than that."""
    return await _failed(request, HTTPException(500, "something went wrong here, and was written to the log"))
