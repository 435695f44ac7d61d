"""Streamed completions: events with the new token of each continuation and the most likely alternatives to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qkv.api.completer import LanguageModel, TextDecoder
from qkv.data.subwords import encode_text, newline_of
from qkv.decoding.logits_processors import Sampling, generate
from qkv.models.variants import DecoderOnly

Event = dict[str, Any]


class LogitsRecorder:
    """A model that keeps its last logits, for the log-probabilities of alternative tokens."""

    def __init__(self, model: DecoderOnly) -> None:
        self.model, self.start = model, model.start
        self.logits: Tensor | None = None

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = self.model.step(tokens, state)
        self.logits = logits[:, -1]  # (rows, vocab)
        return logits, state


class Continuation:
    """One continuation; holds back text that may be the beginning of a stop text."""

    def __init__(self, decoder: TextDecoder, stop: Sequence[str]) -> None:
        self.decoder, self.stop = decoder, [text for text in stop if text]
        self.held_back = ""
        self.finish_reason: str | None = None

    def add(self, token: int, last: bool) -> str:
        """Add a token and return the text that is now final."""
        text = self.held_back + self.decoder.feed(token)
        places = [place for place in map(text.find, self.stop) if place >= 0]
        if places:
            self.finish_reason = "stop"
            return text[: min(places)]
        if last:
            self.finish_reason = "length"
            return text + self.decoder.close()
        held_back = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held_back = text[len(text) - held_back :]
        return text[: len(text) - held_back]


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of a text that are a beginning of the stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


@torch.inference_mode()
def stream_completions(
    model: LanguageModel,
    prompt: str,
    *,
    max_tokens: int,
    n: int = 1,
    stop: Sequence[str] = (),
    top: int = 0,
    **sampling: Any,
) -> Iterator[Event]:
    """Yield the length of the prompt, then for each step the new tokens of the unfinished continuations."""
    tokenizer = model.tokenizer
    continuations = [Continuation(TextDecoder(tokenizer, prompt), stop) for _ in range(n)]
    ids = [newline_of(tokenizer), *encode_text(tokenizer, prompt)]
    yield {"prompt_tokens": len(ids) - 1}
    recorder = LogitsRecorder(model.model)
    forbidden = (tokenizer.pad, tokenizer.bos, tokenizer.eos)
    steps = generate(
        cast("DecoderOnly", recorder),
        ids,
        Sampling(**sampling),
        context=model.context,
        rows=n,
        forbidden=forbidden,
        device=model.device,
    )
    for number, step in enumerate(steps, 1):
        likeliest = _likeliest_tokens(recorder, top, forbidden, tokenizer.bytes_of) if top else [[]] * n
        events = []
        for i, continuation in enumerate(continuations):
            if continuation.finish_reason is None:
                token = step.tokens[i]
                text = continuation.add(token, number == max_tokens)
                event = {"row": i, "text": text, "logprob": step.logprobs[i], "token": _text(tokenizer.bytes_of(token))}
                events.append(event | {"top": likeliest[i], "finish": continuation.finish_reason})
        yield {"tokens": events}
        if all(continuation.finish_reason for continuation in continuations):
            return


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")


def _likeliest_tokens(
    recorder: LogitsRecorder, top: int, forbidden: Sequence[int], bytes_of: Any
) -> list[list[tuple[str, float]]]:
    """The most likely tokens of each row, with their log-probabilities."""
    assert recorder.logits is not None
    logprobs = recorder.logits.float().log_softmax(-1)
    allowed = logprobs.index_fill(-1, torch.tensor(forbidden, device=logprobs.device), -torch.inf)
    best = allowed.topk(min(top, allowed.shape[-1] - len(forbidden)))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(_text(bytes_of(i)), value) for i, value in zip(ids, values, strict=True)] for ids, values in rows]
