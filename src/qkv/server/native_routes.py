"""Routes of our own: scores, attention, other words, documents, model cards, health and metrics."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from qkv import __version__
from qkv.server.document_jobs import desk
from qkv.server.libretranslate_routes import ERRORS, Code, Text
from qkv.server.middleware import Refusal
from qkv.server.served_models import Served, card_of
from qkv.server.service import Service, service

router = APIRouter(tags=["qkv"])

ModelName = Annotated[str | None, Field(max_length=64)]
Head = str | Annotated[tuple[str, int], Field()]


class Score(BaseModel):
    """A pair to score."""

    source: Text
    target: Text
    model: ModelName = None


class Words(BaseModel):
    """A place of a translation where another word is wanted; words are counted from 0, punctuation apart."""

    source: Text
    target: Text
    position: Annotated[int, Field(ge=0, le=10_000)]
    n: Annotated[int, Field(ge=1, le=20)] = 5
    model: ModelName = None


class Attention(BaseModel):
    """A sentence to look into, and what to change about its translation."""

    text: Text
    target: Text | None = None
    model: ModelName = None
    without: Annotated[list[Head], Field(max_length=1000)] = []
    force: tuple[Annotated[int, Field(ge=0, le=10_000)], Annotated[str, Field(max_length=100)] | int] | None = None
    drop: Annotated[list[Annotated[int, Field(ge=0, le=10_000)]], Field(max_length=1000)] = []
    replace: Annotated[
        dict[Annotated[int, Field(ge=0, le=10_000)], Annotated[str, Field(max_length=100)]], Field()
    ] = {}


class Failed(BaseModel):
    """Why a request was refused, and which part of it is at fault."""

    error: str
    pointer: str = ""


def _sentence(served: Service, texts: list[str], pointer: str) -> None:
    served.check_size(texts, pointer)
    served.engine.check_open()


def _cost(model: Served, *texts: str) -> int:
    return sum(1 + len(text) // 3 for text in texts)


@router.post("/score", responses=ERRORS)
async def score(request: Request, asked: Score) -> dict[str, Any]:
    """How likely a model finds a translation: the log-probability of the whole and of every token, </s> last."""
    served = service(request)
    client, model = served.admit(request), served.models.named(asked.model, translates=True)
    _sentence(served, [asked.source, asked.target], "/source")
    job = {"source": asked.source, "target": asked.target, "tag": model.tag("")}
    cost = _cost(model, asked.source, asked.target)
    found = await served.answered(request, served.engine.one(client, "score", model.name, job, cost))
    return found | {"model": model.name}


@router.post("/alternatives", responses=ERRORS)
async def alternatives(request: Request, asked: Words) -> dict[str, Any]:
    """The likeliest other words at a place of a translation, each with the best way to go on from there."""
    served = service(request)
    client, model = served.admit(request), served.models.named(asked.model, translates=True)
    _sentence(served, [asked.source, asked.target], "/source")
    job = {
        "source": asked.source,
        "translation": asked.target,
        "position": asked.position,
        "n": asked.n,
        "tag": model.tag(""),
    }
    cost = _cost(model, asked.source, asked.target) * asked.n
    found = await served.answered(request, served.engine.one(client, "alternatives", model.name, job, cost))
    return found | {"model": model.name}


@router.post("/attention", responses=ERRORS)
async def attention(request: Request, asked: Attention) -> dict[str, Any]:
    """What the attention explorer draws of a sentence: weights, roles of heads, steps, the beam; and a what-if."""
    served = service(request)
    client, model = served.admit(request), served.models.named(asked.model, translates=True)
    _sentence(served, [asked.text, asked.target or ""], "/text")
    changes = asked.model_dump(include={"without", "force", "drop", "replace"}, exclude_defaults=True)
    job = {"text": asked.text, "target": asked.target, "changes": changes or None, "tag": model.tag("")}
    cost = 4 * _cost(model, asked.text)
    found = await served.answered(request, served.engine.one(client, "attention", model.name, job, cost))
    return found | {"model": model.name}


# ---- documents -------------------------------------------------------------------------------------------------------

DOCUMENT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/documents", status_code=202, openapi_extra=DOCUMENT, responses=ERRORS)
async def upload(
    request: Request,
    name: Annotated[str, Query(min_length=1, max_length=255, description="Its name: the ending says what it is.")],
    source: Code = "auto",
    target: Annotated[str, Query(max_length=32)] = "",
    model: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """Begin to translate a document, which is the body."""
    client = service(request).admit(request)
    paper = await desk(request).accept(client, name, await request.body(), source, target, model)
    return paper.told()


@router.get("/documents/{id}", responses=ERRORS)
async def progress(request: Request, id: str) -> dict[str, Any]:
    """How far it is: running, done or failed, and how many segments of how many."""
    return desk(request).find(id).told()


@router.get("/documents/{id}/file", responses=ERRORS)
@router.get("/download_file/{id}", responses=ERRORS, tags=["LibreTranslate"])
async def download(request: Request, id: str) -> Response:
    """The translated document."""
    paper = desk(request).find(id)
    if paper.state != "done":
        raise Refusal(409, paper.error or "the document is still being translated: ask again", pointer="/id")
    paper.fetched = True
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(paper.name, safe='')}"}
    return Response(paper.result, media_type=paper.media_type, headers=headers)


@router.delete("/documents/{id}", status_code=204, responses=ERRORS)
async def delete(request: Request, id: str) -> Response:
    """Forget a document."""
    desk(request).drop(id)
    return Response(status_code=204)


# ---- the server itself -----------------------------------------------------------------------------------------------


@router.get("/models", responses=ERRORS)
async def models(request: Request) -> dict[str, list[dict[str, Any]]]:
    """What each model is: languages, kind, parameters, scores, and its card as Markdown."""
    served = service(request)
    served.admit(request)
    cards = served.engine.cards
    return {"models": [card_of(model, cards.get(name, {})) for name, model in served.models.items()]}


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """Whether the server runs: if this is not answered, start it again."""
    return {"status": "ok"}


@router.get("/health/ready", responses={503: ERRORS[503]})
async def ready(request: Request) -> dict[str, Any]:
    """Whether it takes requests now."""
    service(request).engine.check_open()
    return {"status": "ok"}


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """The state of the server in figures."""
    engine = service(request).engine
    loaded = "ok" if engine.ready else "loading"
    return {
        "status": "draining" if engine.draining else loaded,
        "version": __version__,
        "workers": sum(worker.ready.is_set() for worker in engine.workers),
        "waiting": engine.waiting,
        "running": engine.running,
    }


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    served = service(request)
    served.metrics.waiting.set(served.engine.waiting)
    served.metrics.waiting_tokens.set(served.engine.sentences.cost)
    served.metrics.ready.set(sum(worker.ready.is_set() for worker in served.engine.workers))
    return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
