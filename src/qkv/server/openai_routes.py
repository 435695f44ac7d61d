"""OpenAI's API, for its existing clients: completions by language models, and translation as chat completions.

Options without an implementation are refused by name instead of being ignored.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from datetime import datetime
from itertools import accumulate
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from qkv.server.libretranslate_routes import ERRORS, Text
from qkv.server.middleware import Refusal, RequestLimits, check_limit, json_response
from qkv.server.served_models import ServedModel
from qkv.server.service import run_until_disconnect, service_of

router = APIRouter(prefix="/v1", tags=["OpenAI"])

Name = Annotated[str, Field(min_length=1, max_length=64)]
Stop = Annotated[str, Field(max_length=100)]
Temperature = Annotated[float | None, Field(ge=0, le=2)]
TopP = Annotated[float | None, Field(gt=0, le=1)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool | None = False


class CommonOptions(BaseModel):
    """The options that completions and chats share."""

    model: Name
    top_p: TopP = None
    n: Annotated[int | None, Field(ge=1, le=16)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    user: Annotated[str | None, Field(max_length=256)] = None

    @property
    def with_usage(self) -> bool:
        """Whether the last event of a stream has the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(CommonOptions):
    """One prompt to continue, or several."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=16)] = ""
    max_tokens: Annotated[int | None, Field(ge=1)] = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: Annotated[str | None, Field(max_length=100)] = None
    logit_bias: dict[str, float] | None = None


class TextPart(BaseModel):
    """One part of a message's content."""

    type: Name
    text: Text = ""


class ChatMessage(BaseModel):
    """One message of a chat."""

    role: Name
    content: Text | Annotated[list[TextPart], Field(max_length=100)] | None = None


class Chat(CommonOptions):
    """Messages; the last one is translated, by beam search, or by sampling if the temperature is above 0."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Temperature = None
    logprobs: bool | None = False
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


def _refuse_options(body: BaseModel, *names: str) -> None:
    """Refuse options that are set but not supported."""
    for name in names:
        if getattr(body, name):
            raise Refusal(400, f"{name}: not supported by this server: omit it", pointer=f"/{name}")


# ---- models ----------------------------------------------------------------------------------------------------------


def _model_entry(model: ServedModel) -> dict[str, Any]:
    created = 0
    with suppress(ValueError):
        created = int(datetime.fromisoformat(model.created).timestamp())
    return {"id": model.name, "object": "model", "created": created, "owned_by": "qkv"}


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """List the models."""
    service = service_of(request)
    service.authorize(request)
    return {"object": "list", "data": [_model_entry(model) for model in service.models.values()]}


@router.get("/models/{name}", responses=ERRORS)
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe one model."""
    service = service_of(request)
    service.authorize(request)
    return _model_entry(service.models.by_name(name))


# ---- completions -----------------------------------------------------------------------------------------------------


@router.post("/completions", responses=ERRORS)
async def completions(request: Request, body: Completion) -> Response:
    """Continue one prompt or several, as one response or as a stream."""
    service = service_of(request)
    client = service.authorize(request)
    _refuse_options(body, "echo", "suffix", "frequency_penalty", "presence_penalty", "logit_bias")
    if body.best_of not in (None, 1, body.n):
        _refuse_options(body, "best_of")
    model = service.models.by_name(body.model, translates=False)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    service.check_size(prompts, "/prompt")
    check_limit("tokens", body.max_tokens or 16, service.limits.tokens, "/max_tokens")
    service.scheduler.check_accepting()
    n = body.n or 1
    options = {
        "max_tokens": body.max_tokens or 16,
        "n": n,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "top": body.logprobs or 0,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "seed": body.seed,
    }
    streams = [
        service.scheduler.stream(client, "complete", model.name, {"prompt": prompt, **options}) for prompt in prompts
    ]
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head["model"] = model.name
    events = _merge_streams(streams, n, service.limits)
    if body.stream:
        first = await anext(events)  # before the response starts, so that a refusal has its own status
        return EventStream(_completion_chunks(first, events, head, body), events)
    return json_response(await service.run(request, _complete_response(events, head, body)))


async def _merge_streams(
    streams: list[AsyncIterator[Any]], n: int, limits: RequestLimits
) -> AsyncIterator[dict[str, Any]]:
    """Merge the events of several prompts, which grow concurrently; rows are numbered over all prompts."""
    queue = asyncio.Queue[Any]()

    async def forward(number: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for event in stream:
                queue.put_nowait((number, event))
            queue.put_nowait((number, None))
        except Refusal as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    unfinished = len(tasks)
    try:
        async with asyncio.timeout(limits.timeout):
            while unfinished:
                number, event = await queue.get()
                if isinstance(event, Refusal):
                    raise event
                if event is None:
                    unfinished -= 1
                    continue
                if "prompt_tokens" in event:
                    yield event
                for token in event.get("tokens", ()):
                    yield {**token, "row": number * n + token["row"]}
    except TimeoutError:
        raise Refusal(504, f"not done within {limits.timeout:g} s: request fewer tokens") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    total = prompt_tokens + new_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def _completion_choice(body: Completion, number: int, tokens: list[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """Return the API's `choice` object of consecutive tokens; `offset` is the place of the first one in the text."""
    lengths = [len(token["token"]) for token in tokens]
    logprobs = {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [dict(token["top"]) for token in tokens] if any(token["top"] for token in tokens) else None,
        "text_offset": [*accumulate(lengths[:-1], initial=offset)],
    }
    return {
        "index": number,
        "text": "".join(token["text"] for token in tokens),
        "finish_reason": tokens[-1]["finish"],
        "logprobs": None if body.logprobs is None else logprobs,
    }


async def _complete_response(
    events: AsyncIterator[dict[str, Any]], head: dict[str, Any], body: Completion
) -> dict[str, Any]:
    """Collect all continuations into one response."""
    rows: dict[int, list[dict[str, Any]]] = {}
    prompt_tokens = 0
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for event in open_events:
            prompt_tokens += event.get("prompt_tokens", 0)
            if "row" in event:
                rows.setdefault(event["row"], []).append(event)
    choices = [_completion_choice(body, number, tokens) for number, tokens in sorted(rows.items())]
    return {**head, "choices": choices, "usage": _usage(prompt_tokens, sum(map(len, rows.values())))}


async def _completion_chunks(
    first: dict[str, Any], events: AsyncIterator[dict[str, Any]], head: dict[str, Any], body: Completion
) -> AsyncIterator[dict[str, Any]]:
    """Yield one chunk for each token, and the usage at the end if it was requested."""
    prompt_tokens, new_tokens = first["prompt_tokens"], 0
    offsets: Counter[int] = Counter()
    async for event in events:
        prompt_tokens += event.get("prompt_tokens", 0)
        if "row" in event:
            row = event["row"]
            yield {**head, "choices": [_completion_choice(body, row, [event], offsets[row])]}
            new_tokens += 1
            offsets[row] += len(event["token"])
    if body.with_usage:
        yield {**head, "choices": [], "usage": _usage(prompt_tokens, new_tokens)}


# ---- chat ------------------------------------------------------------------------------------------------------------


@router.post("/chat/completions", responses=ERRORS)
async def chat(request: Request, body: Chat) -> Response:
    """Translate the last message."""
    service = service_of(request)
    client = service.authorize(request)
    _refuse_options(body, "stop", "logprobs", "tools", "response_format", "frequency_penalty", "presence_penalty")
    model = service.models.by_name(body.model, translates=True)
    content = body.messages[-1].content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise Refusal(422, "messages: only text can be translated: send parts of type text", pointer="/messages")
        content = "".join(part.text for part in content)
    text, n = content or "", body.n or 1
    service.check_size([text], "/messages")
    check_limit("choices", n, service.limits.alternatives + 1, "/n")
    service.scheduler.check_accepting()
    max_tokens = body.max_completion_tokens or body.max_tokens
    check_limit("tokens", max_tokens or 0, service.limits.tokens, "/max_tokens")
    options: dict[str, Any] = {"max_length": max_tokens}
    if body.temperature:
        options |= {"sample": True, "temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
    lines = text.splitlines(keepends=True) if body.stream and n == 1 else [text]
    work = service.translate(client, model, "", [line.rstrip("\r\n") for line in lines], n_best=n, **options)
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
    results = await service.run(request, work)
    usage = _usage(sum(each.source_tokens for each in results), sum(each.target_tokens for each in results))
    reason = "length" if any(each.truncated for each in results) else "stop"
    if not body.stream:
        choices = [
            _chat_choice(number, reason, message={"role": "assistant", "content": each, "refusal": None})
            for number, each in enumerate(results[0].texts)
        ]
        return json_response({**head, "object": "chat.completion", "choices": choices, "usage": usage})
    head["object"] = "chat.completion.chunk"
    if n == 1:
        line_ends = [line[len(line.rstrip("\r\n")) :] for line in lines]
        pieces = [[each.texts[0] + end for each, end in zip(results, line_ends, strict=True)]]
    else:
        pieces = [[text] for text in results[0].texts]
    return EventStream(_chat_chunks(head, pieces, reason, usage if body.with_usage else None))


def _chat_choice(number: int, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": number, **content, "finish_reason": reason, "logprobs": None}


async def _chat_chunks(
    head: dict[str, Any], pieces: list[list[str]], reason: str, usage: dict[str, int] | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield one chunk for each line of each choice."""
    for number, texts in enumerate(pieces):
        for i, text in enumerate(texts):
            delta = {"content": text} | ({"role": "assistant"} if i == 0 else {})
            yield {**head, "choices": [_chat_choice(number, None, delta=delta)]}
        yield {**head, "choices": [_chat_choice(number, reason, delta={})]}
    if usage is not None:
        yield {**head, "choices": [], "usage": usage}


# ---- responses -------------------------------------------------------------------------------------------------------


class EventStream(Response):
    """Server-sent events, until the last one or a disconnect; an error is sent as the last event."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], *inner: AsyncIterator[Any]) -> None:
        self.events, self.inner = events, inner
        self.background = None
        self.status_code = 200
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            with suppress(Refusal):  # the client disconnected
                await run_until_disconnect(scope, self._write(send))
        finally:
            for events in (self.events, *self.inner):
                await events.aclose()  # type: ignore[attr-defined]

    async def _write(self, send: Send) -> None:
        async def send_event(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        try:
            async for event in self.events:
                await send_event(json.dumps(event, ensure_ascii=False))
        except Refusal as refusal:
            error = {"message": refusal.detail, "type": "server_error", "code": refusal.status_code}
            await send_event(json.dumps({"error": error}))
        await send_event("[DONE]", more=False)
