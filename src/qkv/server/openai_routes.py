"""OpenAI's API: completions of language models, and translation as a chat, as its clients speak it.

What the models cannot do is refused by name, never passed over: a client that asks for it would wait for it in vain.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from qkv.server.libretranslate_routes import ERRORS, Text
from qkv.server.middleware import Limits, Refusal, too_many
from qkv.server.served_models import Served
from qkv.server.service import leaving, service

router = APIRouter(prefix="/v1", tags=["OpenAI"])

Name = Annotated[str, Field(min_length=1, max_length=64)]
Stop = Annotated[str, Field(max_length=100)]
Temperature = Annotated[float | None, Field(ge=0, le=2)]
TopP = Annotated[float | None, Field(gt=0, le=1)]
Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**63)]


class StreamOptions(BaseModel):
    """What else comes with a stream."""

    include_usage: bool | None = False


class Completion(BaseModel):
    """A prompt to go on with."""

    model: Name
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=16)] = ""
    max_tokens: Annotated[int | None, Field(ge=1)] = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    n: Annotated[int | None, Field(ge=1, le=16)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Seed = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: Annotated[str | None, Field(max_length=100)] = None
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    logit_bias: dict[str, float] | None = None
    user: Annotated[str | None, Field(max_length=256)] = None


class TextPart(BaseModel):
    """A part of a message."""

    type: Name
    text: Text = ""


class ChatMessage(BaseModel):
    """One message; the last is what is translated."""

    role: Name
    content: Text | Annotated[list[TextPart], Field(max_length=100)] | None = None


class Chat(BaseModel):
    """Messages, of which the last is translated: by a beam, or drawn where a temperature is given."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Temperature = None
    top_p: TopP = None
    n: Annotated[int | None, Field(ge=1, le=16)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: Seed = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    logprobs: bool | None = False
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    user: Annotated[str | None, Field(max_length=256)] = None


def _refuse(asked: BaseModel, *names: str) -> None:
    """Refuse options that are given and that no model here has."""
    for name in names:
        if getattr(asked, name):
            raise Refusal(400, f"{name}: the models here do not have it: leave it out", pointer=f"/{name}")


# ---- models ----------------------------------------------------------------------------------------------------------


def _card(model: Served) -> dict[str, Any]:
    created = 0
    with suppress(ValueError):
        created = int(datetime.fromisoformat(model.begun).timestamp())
    return {"id": model.name, "object": "model", "created": created, "owned_by": "qkv"}


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The models served."""
    served = service(request)
    served.admit(request)
    return {"object": "list", "data": [_card(model) for model in served.models.values()]}


@router.get("/models/{name}", responses=ERRORS)
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    served = service(request)
    served.admit(request)
    return _card(served.models.named(name))


# ---- completions -----------------------------------------------------------------------------------------------------


@router.post("/completions", responses=ERRORS)
async def completions(request: Request, asked: Completion) -> Response:
    """Go on with a prompt, or with several; all of it at once, or as it is written."""
    served = service(request)
    client = served.admit(request)
    _refuse(asked, "echo", "suffix", "frequency_penalty", "presence_penalty", "logit_bias")
    if asked.best_of not in (None, 1, asked.n):
        _refuse(asked, "best_of")
    model = served.models.named(asked.model, translates=False)
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    served.check_size(prompts, "/prompt")
    too_many("tokens", asked.max_tokens or 16, served.limits.tokens, "/max_tokens")
    served.engine.check_open()
    job = _job(asked)
    sources = [served.engine.stream(client, "complete", model.name, {"prompt": prompt, **job}) for prompt in prompts]
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head["model"] = model.name
    written = _written(sources, job["n"], served.limits)
    if asked.stream:
        first = await anext(written)  # so that a refusal has its own status
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return EventStream(_completion_events(first, written, head, asked, usage), written)
    return _json(await served.answered(request, _whole(written, head, asked)))


def _job(asked: Completion) -> dict[str, Any]:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return {
        "max_tokens": asked.max_tokens or 16,
        "n": asked.n or 1,
        "stop": stop,
        "top": asked.logprobs or 0,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "seed": asked.seed,
    }


async def _written(sources: list[AsyncIterator[Any]], n: int, limits: Limits) -> AsyncIterator[dict[str, Any]]:
    """The events of several prompts as one stream, in which every row has its own number: the prompts grow together."""
    events = asyncio.Queue[Any]()

    async def pump(number: int, source: AsyncIterator[Any]) -> None:
        try:
            async for event in source:
                events.put_nowait((number, event))
            events.put_nowait((number, None))
        except Refusal as error:
            events.put_nowait((number, error))

    pumps = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    left = len(pumps)
    try:
        async with asyncio.timeout(limits.seconds):
            while left:
                number, event = await events.get()
                if isinstance(event, Refusal):
                    raise event
                if event is None:
                    left -= 1
                    continue
                if "prompt_tokens" in event:
                    yield event
                for each in event.get("tokens", ()):
                    yield {**each, "row": number * n + each["row"]}
    except TimeoutError:
        raise Refusal(504, f"not done within {limits.seconds:g} s: ask for fewer tokens") from None
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _usage(read: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _logprobs(tokens: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Of some tokens in a row, as the completions API writes them."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [dict(token["top"]) for token in tokens] if any(token["top"] for token in tokens) else None,
        "text_offset": offsets,
    }


async def _whole(written: AsyncIterator[dict[str, Any]], head: dict[str, Any], asked: Completion) -> dict[str, Any]:
    """All continuations, when they are finished."""
    rows: dict[int, list[dict[str, Any]]] = {}
    read = 0
    async with aclosing(written) as events:  # type: ignore[type-var]
        async for event in events:
            read += event.get("prompt_tokens", 0)
            if "row" in event:
                rows.setdefault(event["row"], []).append(event)
    choices = [
        {
            "index": number,
            "text": "".join(token["text"] for token in tokens),
            "finish_reason": tokens[-1]["finish"],
            "logprobs": None if asked.logprobs is None else _logprobs(tokens, 0),
        }
        for number, tokens in sorted(rows.items())
    ]
    return {**head, "choices": choices, "usage": _usage(read, sum(map(len, rows.values())))}


async def _completion_events(
    first: dict[str, Any], written: AsyncIterator[dict[str, Any]], head: dict[str, Any], asked: Completion, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    read, tokens = first["prompt_tokens"], 0
    offsets: dict[int, int] = {}
    async for event in written:
        read += event.get("prompt_tokens", 0)
        if "row" not in event:
            continue
        tokens += 1
        offset = offsets.get(event["row"], 0)
        offsets[event["row"]] = offset + len(event["token"])
        choice = {
            "index": event["row"],
            "text": event["text"],
            "finish_reason": event["finish"],
            "logprobs": None if asked.logprobs is None else _logprobs([event], offset),
        }
        yield {**head, "choices": [choice]}
    if usage:
        yield {**head, "choices": [], "usage": _usage(read, tokens)}


# ---- chat ------------------------------------------------------------------------------------------------------------


@router.post("/chat/completions", responses=ERRORS)
async def chat(request: Request, asked: Chat) -> Response:
    """Translate the last message."""
    served = service(request)
    client = served.admit(request)
    _refuse(asked, "stop", "logprobs", "tools", "response_format", "frequency_penalty", "presence_penalty")
    model = served.models.named(asked.model, translates=True)
    text, n = _message(asked), asked.n or 1
    served.check_size([text], "/messages")
    too_many("choices", n, served.limits.alternatives + 1, "/n")
    served.engine.check_open()
    how = _how(asked, served.limits)
    lines = text.splitlines(keepends=True) if asked.stream and n == 1 else [text]
    found = served.translate(client, model, "", [line.rstrip("\r\n") for line in lines], n_best=n, **how)
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
    results = await served.answered(request, found)
    usage = _usage(sum(each.read for each in results), sum(each.written for each in results))
    reason = "length" if any(each.truncated for each in results) else "stop"
    if not asked.stream:
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": each, "refusal": None},
                "finish_reason": reason,
                "logprobs": None,
            }
            for number, each in enumerate(results[0].texts)
        ]
        return _json({**head, "object": "chat.completion", "choices": choices, "usage": usage})
    head["object"] = "chat.completion.chunk"
    wanted = bool(asked.stream_options and asked.stream_options.include_usage)
    ends = [line[len(line.rstrip("\r\n")) :] for line in lines]
    pieces = [[each.texts[0] + end for each, end in zip(results, ends, strict=True)]] if n == 1 else []
    pieces = pieces or [[text] for text in results[0].texts]
    return EventStream(_chat_events(head, pieces, reason, usage if wanted else None))


def _message(asked: Chat) -> str:
    """The text of the last message."""
    content = asked.messages[-1].content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise Refusal(422, "messages: only text can be translated", pointer="/messages")
        content = "".join(part.text for part in content)
    return content or ""


def _how(asked: Chat, limits: Limits) -> dict[str, Any]:
    """Options of the search; a temperature above 0 asks for a drawn translation."""
    longest = asked.max_completion_tokens or asked.max_tokens
    too_many("tokens", longest or 0, limits.tokens, "/max_tokens")
    how: dict[str, Any] = {"max_length": longest}
    if asked.temperature:
        return {**how, "sample": True, "temperature": asked.temperature, "top_p": asked.top_p, "seed": asked.seed}
    return how


async def _chat_events(
    head: dict[str, Any], pieces: list[list[str]], reason: str, usage: dict[str, int] | None
) -> AsyncIterator[dict[str, Any]]:
    for number, texts in enumerate(pieces):
        for i, text in enumerate(texts):
            delta = {"content": text} | ({"role": "assistant"} if i == 0 else {})
            yield {**head, "choices": [{"index": number, "delta": delta, "finish_reason": None, "logprobs": None}]}
        yield {**head, "choices": [{"index": number, "delta": {}, "finish_reason": reason, "logprobs": None}]}
    if usage is not None:
        yield {**head, "choices": [], "usage": usage}


# ---- answers ---------------------------------------------------------------------------------------------------------


def _json(plain: Any) -> Response:
    return Response(json.dumps(plain, ensure_ascii=False), media_type="application/json")


class EventStream(Response):
    """Server-sent events, until there are no more or the client leaves; what goes wrong on the way is the last one."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], *inner: AsyncIterator[Any]) -> None:
        self.events, self.inner = events, inner
        self.background = None
        self.status_code = 200
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait({writing, leaving(scope)}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            for each in (self.events, *self.inner):
                await each.aclose()  # type: ignore[attr-defined]

    async def _write(self, send: Send) -> None:
        async def tell(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        try:
            async for event in self.events:
                await tell(json.dumps(event, ensure_ascii=False))
        except Refusal as error:
            await tell(
                json.dumps({"error": {"message": error.detail, "type": "server_error", "code": error.status_code}})
            )
        await tell("[DONE]", more=False)
