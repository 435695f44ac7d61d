"""LibreTranslate's API, for its existing clients: JSON or forms, `api_key` in the body, errors as {"error": …}."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Field
from starlette.datastructures import UploadFile

from qkv.documents import FORMATS
from qkv.server import served_models
from qkv.server.document_jobs import job_store
from qkv.server.middleware import MULTIPART, PARSED, Refusal, body_schema, check_limit, json_response, parse_body
from qkv.server.service import service_of

router = APIRouter(tags=["LibreTranslate"])

MAX_TEXT = 1_000_000  # characters of a text in the schema; the server's own limit applies too
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(max_length=10_000)]
Code = Annotated[str, Field(min_length=1, max_length=32)]
BINARY = {"type": "string", "format": "binary"}
ApiKeyField = Annotated[str, Field(max_length=256, description="Only if the server requires keys.")]


def _parse_count(value: Any) -> Any:
    """Forms have no numbers: convert digits."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value


class Translate(BaseModel):
    """One text to translate, or several."""

    q: Text | Texts
    source: Code = "auto"
    target: Code
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, strict=True), BeforeValidator(_parse_count)] = 0
    api_key: ApiKeyField = ""
    model: Annotated[str, Field(max_length=64, description="Selects one of several models for the languages.")] = ""


class Detect(BaseModel):
    """A text to detect the language of."""

    q: Text
    api_key: ApiKeyField = ""


class Language(BaseModel):
    """A language and its target languages."""

    code: str
    name: str
    targets: list[str]


class Guess(BaseModel):
    """A possible language of a text, with its probability in per cent."""

    confidence: float
    language: str


class Failed(BaseModel):
    """The reason why a request was refused, and a JSON pointer to the invalid part."""

    error: str
    pointer: str = ""


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": why, "model": Failed}
    for code, why in {
        400: "Language not available.",
        401: "No valid API key.",
        403: "No valid API key.",
        404: "Not found.",
        408: "The body arrived too slowly.",
        413: "Too large.",
        422: "Malformed; the pointer names the invalid part.",
        429: "The queue is full or the rate limit is exceeded; retry after the seconds in Retry-After.",
        503: "The server is loading or stopping, or the model process died.",
        504: "Time limit exceeded.",
    }.items()
}


@router.post("/translate", openapi_extra=body_schema(Translate.model_json_schema(), *PARSED), responses=ERRORS)
async def translate(request: Request) -> Response:
    """Translate a text, or a list of texts."""
    body, service = await parse_body(request, Translate), service_of(request)
    client = service.authorize(request, body.api_key)
    texts = [body.q] if isinstance(body.q, str) else body.q
    service.check_size(texts, "/q")
    if body.alternatives > service.limits.alternatives:
        limit = service.limits.alternatives
        reason = f"alternatives: {body.alternatives:,}, but at most {limit} are allowed: request fewer"
        raise Refusal(422, reason, pointer="/alternatives")
    service.scheduler.check_accepting()
    model, confidence = service.models.choose(body.source, body.target, texts, body.model or None)
    n_best = body.alternatives + 1
    if body.format == "html":
        work = service.translate_html(client, model, body.target, texts, n_best)
    else:
        work = service.translate(client, model, body.target, texts, n_best=n_best)
    results = await service.run(request, work)
    response: dict[str, Any] = {
        "translatedText": [result.texts[0] for result in results],
        "details": [result.details for result in results],
    }
    if body.alternatives:
        response["alternatives"] = [result.texts[1:] for result in results]
    if body.source == "auto":
        response["detectedLanguage"] = [{"confidence": confidence, "language": model.source}] * len(texts)
    if isinstance(body.q, str):
        response = {name: value[0] for name, value in response.items()}
    return json_response(response)


@router.post("/detect", openapi_extra=body_schema(Detect.model_json_schema(), *PARSED), responses=ERRORS)
async def detect(request: Request) -> list[Guess]:
    """Return the most likely languages of a text, most likely first."""
    body, service = await parse_body(request, Detect), service_of(request)
    service.authorize(request, body.api_key)
    service.check_size([body.q], "/q")
    return [Guess(confidence=percent, language=code) for code, percent in served_models.detect_languages(body.q)]


@router.get("/languages")
async def all_languages(request: Request) -> list[Language]:
    """List the languages of all models."""
    languages = service_of(request).models.languages()
    return [
        Language(code=code, name=served_models.language_name(code), targets=targets)
        for code, targets in languages.items()
    ]


@router.get("/frontend/settings")
async def settings(request: Request) -> dict[str, Any]:
    """Return the settings of a web page."""
    service = service_of(request)
    model = next((model for model in service.models.values() if model.translates), None)
    codes = {"source": model.source, "target": model.targets[0]} if model else {}
    language = {side: {"code": code, "name": served_models.language_name(code)} for side, code in codes.items()}
    return {
        "apiKeys": bool(service.keys),
        "keyRequired": bool(service.keys),
        "charLimit": service.limits.characters,
        "filesTranslation": True,
        "frontendTimeout": 500,
        "suggestions": False,
        "supportedFilesFormat": [f".{suffix}" for suffix in FORMATS],
        "language": language,
    }


FILE_FIELDS: dict[str, Any] = {
    "file": BINARY,
    "source": {"type": "string", "maxLength": 32},
    "target": {"type": "string", "maxLength": 32},
    "api_key": {"type": "string", "maxLength": 256},
}
FILE = {"type": "object", "required": ["file", "target"], "properties": FILE_FIELDS}


@router.post("/translate_file", openapi_extra=body_schema(FILE, MULTIPART), responses=ERRORS)
async def translate_file(request: Request) -> dict[str, str]:
    """Translate a document and return the URL of the result."""
    service = service_of(request)
    if not request.headers.get("content-type", "").startswith(MULTIPART):
        raise Refusal(422, "not a form: send the document as multipart/form-data, in a field called file")
    async with request.form(max_files=1, max_fields=8) as form:
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        service.authorize(request, fields.get("api_key", ""))
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refusal(422, "file: no document in the form: send it in a field called file", pointer="/file")
        data = await file.read()
    check_limit("bytes", len(data), service.limits.file, "/file")
    store = job_store(request)
    job = await store.submit(file.filename or "", data, fields.get("source", "auto"), fields.get("target", ""))
    await service.run(request, store.wait(job))
    if job.error:
        raise Refusal(422, job.error, pointer="/file")
    return {"translatedFileUrl": f"{str(request.base_url).rstrip('/')}/download_file/{job.id}"}
