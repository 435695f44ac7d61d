"""Completions as they grow: one event for each token of each continuation, with what else could have come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qkv.api.completer import Completer, TextDecoder
from qkv.decode.complete import generate
from qkv.decode.sampling import Sampling
from qkv.models.language_models import DecoderOnly

Event = dict[str, Any]


class Overheard:
    """A model whose last logits are kept, for those who ask how likely other tokens were."""

    def __init__(self, model: DecoderOnly) -> None:
        self.model, self.start = model, model.start
        self.last: Tensor | None = None

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = self.model.step(tokens, state)
        self.last = logits[:, -1]  # (rows, vocab)
        return logits, state


class Row:
    """One continuation; its text comes out as soon as it cannot be the beginning of a stop text."""

    def __init__(self, decoder: TextDecoder, stop: Sequence[str]) -> None:
        self.decoder, self.stop = decoder, [word for word in stop if word]
        self.held = ""
        self.finish: str | None = None

    def add(self, token: int, last: bool) -> str:
        """The text that is certain with this token."""
        text = self.held + self.decoder.feed(token)
        found = [place for place in map(text.find, self.stop) if place >= 0]
        if found:
            self.finish = "stop"
            return text[: min(found)]
        if last:
            self.finish = "length"
            return text + self.decoder.close()
        kept = max((_overlap(text, word) for word in self.stop), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of a text are a beginning of the word."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)


@torch.inference_mode()
def continuations(
    model: Completer,
    prompt: str,
    *,
    max_tokens: int,
    n: int = 1,
    stop: Sequence[str] = (),
    top: int = 0,
    **draws: Any,
) -> Iterator[Event]:
    """The length of the prompt, then for each step the tokens of all continuations that have not ended."""
    tokenizer = model.tokenizer
    rows = [Row(TextDecoder(tokenizer, prompt), stop) for _ in range(n)]
    ids = [tokenizer.newline, *tokenizer.encode_text(prompt)]
    yield {"prompt_tokens": len(ids) - 1}
    watched = Overheard(model.model)
    never = (tokenizer.pad, tokenizer.bos, tokenizer.eos)
    drawn = generate(
        cast("DecoderOnly", watched),
        ids,
        Sampling(**draws),
        context=model.context,
        rows=n,
        forbidden=never,
        device=model.device,
    )
    for number, step in enumerate(drawn, 1):
        likely = _likeliest(watched, top, never, tokenizer.bytes_of) if top else [[]] * n
        events = []
        for i, row in enumerate(rows):
            if row.finish is None:
                token = step.tokens[i]
                event = {"row": i, "text": row.add(token, number == max_tokens), "logprob": step.logprobs[i]}
                events.append(
                    {**event, "token": _text(tokenizer.bytes_of(token)), "top": likely[i], "finish": row.finish}
                )
        yield {"tokens": events}
        if all(row.finish for row in rows):
            return


def _text(written: bytes) -> str:
    return written.decode("utf-8", "replace")


def _likeliest(watched: Overheard, top: int, never: Sequence[int], bytes_of: Any) -> list[list[tuple[str, float]]]:
    """The likeliest tokens of each row, with their log-probabilities."""
    assert watched.last is not None
    logprobs = watched.last.float().log_softmax(-1)
    allowed = logprobs.index_fill(-1, torch.tensor(never, device=logprobs.device), -torch.inf)
    best = allowed.topk(min(top, allowed.shape[-1] - len(never)))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(_text(bytes_of(i)), value) for i, value in zip(ids, values, strict=True)] for ids, values in rows]
