"""The ASGI application: routes, the web page from memory, and errors in the format of each API."""

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
from qkv.server.document_jobs import JobStore
from qkv.server.middleware import JSON_HINT, Refusal, RequestMiddleware, refuse_foreign_origin, refuse_malformed
from qkv.server.service import Service, is_openai

LOG = logging.getLogger("uvicorn.error")
PAGE = Path(__file__).parent / "page"
EXPLORER = Path(__file__).parents[1] / "explain" / "page"
OPENAI_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
TRANSLATE_ROUTE = next(
    route for route in libretranslate_routes.router.routes if isinstance(route, APIRoute) and route.path == "/translate"
)


class App(FastAPI):
    """FastAPI inside `RequestMiddleware`; the busiest route, /translate, skips FastAPI's work around a request."""

    middleware_app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.middleware_app(scope, receive, send)

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request that passed the middleware."""
        if scope["type"] != "http" or scope["path"] != TRANSLATE_ROUTE.path or scope["method"] != "POST":
            await super().__call__(scope, receive, send)
            return
        scope["app"], scope["route"] = self, TRANSLATE_ROUTE
        request = Request(scope, receive)
        try:
            await refuse_foreign_origin(request)
            response = await libretranslate_routes.translate(request)
        except HTTPException as error:
            response = await _error_response(request, error)
        except Exception as error:
            LOG.exception("a translation failed")
            response = await _internal_error(request, error)
        await response(scope, receive, send)


def create_app(service: Service, *, origins: Collection[str] = ()) -> App:
    """Build the application; the service's scheduler starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        # The first detection loads the tables of the language detector.
        loading = asyncio.create_task(asyncio.to_thread(served_models.detect_languages, "warm"))
        yield
        await loading
        await service.scheduler.close()

    app = App(
        title="qkv",
        version=__version__,
        description="Translation and text completion with trained runs.",
        docs_url=None,  # that page loads scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(refuse_foreign_origin)],
    )
    app.state.service = service
    app.state.job_store = JobStore(service)
    for router in (libretranslate_routes.router, openai_routes.router, native_routes.router):
        app.include_router(router)
    _add_pages(app)
    app.add_exception_handler(HTTPException, _error_response)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _internal_error)
    inner: ASGIApp = app.route
    if origins:
        inner = CORSMiddleware(inner, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.middleware_app = RequestMiddleware(inner, limits=service.limits, metrics=service.metrics, origins=set(origins))
    return app


def _add_pages(app: FastAPI) -> None:
    """Read the web page and its files into memory; request paths never reach the file system."""
    files = {f"/page/{path.name}": path for path in sorted(PAGE.glob("*.*"))}
    files |= {f"/page/explorer/{path.name}": path for path in sorted(EXPLORER.glob("*.*")) if path.suffix != ".html"}
    if (PAGE / "index.html").exists():
        files["/"] = PAGE / "index.html"
    contents = {url: (path.read_bytes(), mimetypes.guess_type(path.name)[0]) for url, path in files.items()}

    async def page(request: Request) -> Response:
        data, media_type = contents[request.url.path]
        return Response(data, media_type=media_type, headers={"Cache-Control": "no-cache"})

    for url in contents:
        app.add_api_route(url, page, methods=["GET"], include_in_schema=False)


# ---- errors ----------------------------------------------------------------------------------------------------------


async def _error_response(request: Request, error: Exception) -> Response:
    """The JSON of an error: OpenAI's format under /v1/, elsewhere {"error": …, "pointer": …}."""
    assert isinstance(error, HTTPException)
    status = 422 if error.status_code == 400 and not isinstance(error, Refusal) else error.status_code
    body: dict[str, Any]
    pointer, message = getattr(error, "pointer", ""), error.detail
    if status in (404, 405) and not isinstance(error, Refusal):
        message = f"{message}: /openapi.json lists every route"
    if is_openai(request):
        kind = OPENAI_ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = pointer.lstrip("/").replace("/", ".") or None
        body = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    else:
        body = {"error": message} | ({"pointer": pointer} if pointer else {})
    return JSONResponse(body, status, headers=dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    try:
        if errors[0]["loc"] == ("body",) and not request.headers.get("content-type", "").startswith("application/json"):
            raise Refusal(422, f"the body is not JSON, or its Content-Type header is missing: {JSON_HINT}")
        refuse_malformed(errors)
    except Refusal as refusal:
        return await _error_response(request, refusal)


async def _internal_error(request: Request, error: Exception) -> Response:
    """An unexpected error: the traceback goes to the log, not to the client."""
    return await _error_response(request, HTTPException(500, "internal error: the server's log has the traceback"))
