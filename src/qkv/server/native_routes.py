"""Native routes: scores, attention, alternatives, document jobs, model cards, health and metrics."""

from __future__ import annotations

import secrets
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field

from qkv import __version__
from qkv.server.document_jobs import job_store
from qkv.server.libretranslate_routes import BINARY, ERRORS, Code, Text
from qkv.server.middleware import Refusal, body_schema
from qkv.server.service import service_of

router = APIRouter(tags=["qkv"])

ModelName = Annotated[str | None, Field(max_length=64)]
Head = str | Annotated[tuple[str, int], Field()]


class Score(BaseModel):
    """A source text and a translation to score."""

    source: Text
    target: Text
    model: ModelName = None


class Words(BaseModel):
    """A word of a translation to replace; words are counted from 0, punctuation marks separately."""

    source: Text
    target: Text
    position: Annotated[int, Field(ge=0, le=10_000)]
    n: Annotated[int, Field(ge=1, le=20)] = 5
    model: ModelName = None


class Attention(BaseModel):
    """A sentence to explain, and optional changes for a what-if."""

    text: Text
    target: Text | None = None
    model: ModelName = None
    without: Annotated[list[Head], Field(max_length=1000)] = []
    force: tuple[Annotated[int, Field(ge=0, le=10_000)], Annotated[str, Field(max_length=100)] | int] | None = None
    drop: Annotated[list[Annotated[int, Field(ge=0, le=10_000)]], Field(max_length=1000)] = []
    replace: Annotated[
        dict[Annotated[int, Field(ge=0, le=10_000)], Annotated[str, Field(max_length=100)]], Field()
    ] = {}


async def _submit_job(
    request: Request, kind: str, model_name: str | None, texts: list[str], pointer: str, weight: int, **job: Any
) -> dict[str, Any]:
    """Run one job of a translation model; its cost in the queue is the estimated tokens of the texts times `weight`."""
    service = service_of(request)
    client, model = service.authorize(request), service.models.by_name(model_name, translates=True)
    service.check_size(texts, pointer)
    service.scheduler.check_accepting()
    cost = weight * sum(1 + len(text) // 3 for text in texts)
    group = (kind, model.name, secrets.token_hex(8))  # of its own: an invalid job fails its batch
    work = service.scheduler.submit(client, group, [{**job, "tag": model.tag("")}], [cost])
    (result,) = await service.run(request, work)
    return result | {"model": model.name}


@router.post("/score", responses=ERRORS)
async def score(request: Request, body: Score) -> dict[str, Any]:
    """Score a translation: its log-probability, in total and for every token, </s> last."""
    texts = [body.source, body.target]
    return await _submit_job(request, "score", body.model, texts, "/source", 1, source=body.source, target=body.target)


@router.post("/alternatives", responses=ERRORS)
async def alternatives(request: Request, body: Words) -> dict[str, Any]:
    """Return the most likely other words at a position, each with the best continuation of the translation."""
    texts, job = [body.source, body.target], body.model_dump(include={"source", "position", "n"})
    return await _submit_job(
        request, "alternatives", body.model, texts, "/source", body.n, translation=body.target, **job
    )


@router.post("/attention", responses=ERRORS)
async def attention(request: Request, body: Attention) -> dict[str, Any]:
    """Return the data of the attention explorer: weights, roles of heads, steps, the beam; and a what-if."""
    changes = body.model_dump(include={"without", "force", "drop", "replace"}, exclude_defaults=True)
    texts, job = [body.text, body.target or ""], body.model_dump(include={"text", "target"})
    return await _submit_job(request, "attention", body.model, texts, "/text", 4, **job, changes=changes or None)


# ---- documents -------------------------------------------------------------------------------------------------------

DOCUMENT = body_schema(BINARY, "application/octet-stream")


@router.post("/documents", status_code=202, openapi_extra=DOCUMENT, responses=ERRORS)
async def upload(
    request: Request,
    name: Annotated[str, Query(min_length=1, max_length=255, description="File name; its suffix gives the format.")],
    source: Code = "auto",
    target: Annotated[str, Query(max_length=32)] = "",
    model: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """Start the translation of a document, sent as the body."""
    service_of(request).authorize(request)
    job = await job_store(request).submit(name, await request.body(), source, target, model)
    return job.status()


@router.get("/documents/{id}", responses=ERRORS)
async def progress(request: Request, id: str) -> dict[str, Any]:
    """Return the state of a document (running, done or failed) and its progress in segments."""
    return job_store(request).get(id).status()


@router.get("/documents/{id}/file", responses=ERRORS)
@router.get("/download_file/{id}", responses=ERRORS, tags=["LibreTranslate"])
async def download(request: Request, id: str) -> Response:
    """Return the translated document."""
    job = job_store(request).get(id)
    if job.state != "done":
        raise Refusal(409, job.error or "the document is still being translated: try again later", pointer="/id")
    job.downloaded = True
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(job.name, safe='')}"}
    return Response(job.result, media_type=job.media_type, headers=headers)


@router.delete("/documents/{id}", status_code=204, responses=ERRORS)
async def delete(request: Request, id: str) -> Response:
    """Delete a document."""
    job_store(request).delete(id)
    return Response(status_code=204)


# ---- the server itself -----------------------------------------------------------------------------------------------


@router.get("/models", responses=ERRORS)
async def models(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Describe each model: languages, kind, parameters, scores, and its model card as Markdown."""
    service = service_of(request)
    service.authorize(request)
    cards = service.scheduler.model_cards  # empty while the models are loaded
    entries = [
        {
            **cards.get(name, {}),
            "name": model.name,
            "does": "translate" if model.translates else "complete",
            "targets": model.targets,
            "source": model.source if model.translates else "",
        }
        for name, model in service.models.items()
    ]
    return {"models": entries}


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """Liveness: without a response the server should be restarted."""
    return {"status": "ok"}


@router.get("/health/ready", responses={503: ERRORS[503]})
async def ready(request: Request) -> dict[str, Any]:
    """Readiness: whether requests are accepted now."""
    service_of(request).scheduler.check_accepting()
    return {"status": "ok"}


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Return the state of the server in numbers."""
    scheduler = service_of(request).scheduler
    loaded = "ok" if scheduler.ready else "loading"
    return {
        "status": "draining" if scheduler.draining else loaded,
        "version": __version__,
        "workers": sum(worker.ready.is_set() for worker in scheduler.workers),
        "waiting": scheduler.waiting,
        "running": scheduler.running,
    }


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus format."""
    service = service_of(request)
    service.metrics.waiting.set(service.scheduler.waiting)
    service.metrics.waiting_tokens.set(service.scheduler.queue.cost)
    service.metrics.ready.set(sum(worker.ready.is_set() for worker in service.scheduler.workers))
    return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")
