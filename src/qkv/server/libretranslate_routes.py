"""LibreTranslate's API, as its clients speak it: JSON or forms, `api_key` in the body, errors as {"error": …}."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Field
from starlette.datastructures import UploadFile

from qkv.documents import FORMATS
from qkv.server import served_models
from qkv.server.document_jobs import desk
from qkv.server.middleware import Refusal, read, schema, too_many
from qkv.server.service import service

router = APIRouter(tags=["LibreTranslate"])
ENCODER = json.JSONEncoder(ensure_ascii=False)

MOST = 1_000_000  # characters of a text, whatever the server's own limit
Text = Annotated[str, Field(max_length=MOST)]
Texts = Annotated[list[Text], Field(max_length=10_000)]
Code = Annotated[str, Field(min_length=1, max_length=32)]
ApiKey = Annotated[str, Field(max_length=256, description="Only where the server asks for keys.")]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value


class Translate(BaseModel):
    """What to translate: one text, or several."""

    q: Text | Texts
    source: Code = "auto"
    target: Code
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, strict=True), BeforeValidator(_whole)] = 0
    api_key: ApiKey = ""
    model: Annotated[str, Field(max_length=64, description="Which model, where several fit.")] = ""


class Detect(BaseModel):
    """A text whose language is asked for."""

    q: Text
    api_key: ApiKey = ""


class Language(BaseModel):
    """A language, and those it is translated into."""

    code: str
    name: str
    targets: list[str]


class Guess(BaseModel):
    """A language that a text may be in, in per cent."""

    confidence: float
    language: str


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": why, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Failed"}}}}
    for code, why in {
        400: "A language that is not served.",
        401: "No valid API key.",
        403: "No valid API key.",
        404: "No such thing.",
        408: "The body came too slowly.",
        413: "Too large.",
        422: "Malformed, with a pointer to where.",
        429: "Too much is waiting, or too many requests: Retry-After says when to come again.",
        503: "Loading or stopping, or the model process died.",
        504: "It took too long.",
    }.items()
}


@router.post("/translate", openapi_extra=schema(Translate, form=True), responses=ERRORS)
async def translate(request: Request) -> Response:
    """Translate a text, or a list of texts."""
    asked, served = await read(request, Translate), service(request)
    client = served.admit(request, asked.api_key)
    texts = [asked.q] if isinstance(asked.q, str) else asked.q
    served.check_size(texts, "/q")
    if asked.alternatives > served.limits.alternatives:
        limit = served.limits.alternatives
        why = f"alternatives: {asked.alternatives:,}, and at most {limit} are given: ask for fewer"
        raise Refusal(422, why, pointer="/alternatives")
    served.engine.check_open()
    model, sure = served.models.choose(asked.source, asked.target, texts, asked.model or None)
    n_best = asked.alternatives + 1
    if asked.format == "html":
        work = served.translate_html(client, model, asked.target, texts, n_best)
    else:
        work = served.translate(client, model, asked.target, texts, n_best=n_best)
    found = await served.answered(request, work)
    answer: dict[str, Any] = {
        "translatedText": [each.texts[0] for each in found],
        "details": [each.details for each in found],
    }
    if asked.alternatives:
        answer["alternatives"] = [each.texts[1:] for each in found]
    if asked.source == "auto":
        answer["detectedLanguage"] = [{"confidence": sure, "language": model.source}] * len(texts)
    if isinstance(asked.q, str):
        answer = {name: value[0] for name, value in answer.items()}
    return Response(ENCODER.encode(answer), media_type="application/json")


@router.post("/detect", openapi_extra=schema(Detect, form=True), responses=ERRORS)
async def detect(request: Request) -> list[Guess]:
    """The languages that a text may be in, likeliest first."""
    asked, served = await read(request, Detect), service(request)
    served.admit(request, asked.api_key)
    served.check_size([asked.q], "/q")
    return [Guess(confidence=likely, language=code) for code, likely in served_models.detect(asked.q)]


@router.get("/languages")
async def all_languages(request: Request) -> list[Language]:
    """The languages served."""
    known = service(request).models.languages()
    return [Language(code=code, name=served_models.name(code), targets=known[code]) for code in known]


@router.get("/frontend/settings")
async def settings(request: Request) -> dict[str, Any]:
    """What a page needs to know."""
    served = service(request)
    model = next((model for model in served.models.values() if model.translates), None)
    codes = {"source": model.source, "target": model.targets[0]} if model else {}
    return {
        "apiKeys": bool(served.keys),
        "keyRequired": bool(served.keys),
        "charLimit": served.limits.characters,
        "filesTranslation": True,
        "frontendTimeout": 500,
        "suggestions": False,
        "supportedFilesFormat": [f".{ending}" for ending in FORMATS],
        "language": {side: {"code": code, "name": served_models.name(code)} for side, code in codes.items()},
    }


FILE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "target"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "source": {"type": "string", "maxLength": 32},
                        "target": {"type": "string", "maxLength": 32},
                        "api_key": {"type": "string", "maxLength": 256},
                    },
                }
            }
        },
    }
}


@router.post("/translate_file", openapi_extra=FILE, responses=ERRORS)
async def translate_file(request: Request) -> dict[str, str]:
    """Translate a document; the answer says where to fetch it."""
    served = service(request)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(422, "a document comes as multipart/form-data, in a field called file")
    async with request.form(max_files=1, max_fields=8) as form:
        texts = {name: value for name, value in form.items() if isinstance(value, str)}
        client = served.admit(request, texts.get("api_key", ""))
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refusal(422, "file: no document in the form: send it in a field called file", pointer="/file")
        data = await file.read()
    too_many("bytes", len(data), served.limits.file, "/file")
    place = desk(request)
    paper = await place.accept(client, file.filename or "", data, texts.get("source", "auto"), texts.get("target", ""))
    await served.answered(request, place.wait(paper))
    if paper.error:
        raise Refusal(422, paper.error, pointer="/file")
    return {"translatedFileUrl": f"{str(request.base_url).rstrip('/')}/download_file/{paper.id}"}
