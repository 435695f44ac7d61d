"""Bodies of requests: read within limits of size and time, as JSON or as a form, and checked against a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from qkv.serve.gate import header
from qkv.serve.limits import Refusal

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
