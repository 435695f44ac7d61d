"""Logits processors, sampling, and generation by a language model.

A processor changes the log-probabilities of the next token in place, before the choice
(`qkv.core.search.LogitsProcessor`). Its result depends on these and the search state alone.

Random numbers are drawn before the search, on the CPU, from the seed, the number of the sentence in the input and the
row: a sentence gets the same tokens alone, in any batch, in any order and on any device.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from qkv.core.errors import QkvError, UsageError
from qkv.core.search import GreedySearch, SearchState
from qkv.core.tokenizer import Tokenizer
from qkv.models.variants import DecoderOnly


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbid the token that would write the same n tokens a second time; </s> is always allowed."""

    n: int
    changes_score: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        before, length = self.n - 1, state.length[:, None, None]
        starts = state.tokens.shape[2] - before
        if starts <= 1:
            return
        # Every place where n tokens may have begun, and whether their first n - 1 are the newest of the row.
        place = torch.arange(starts, device=state.tokens.device)
        again = ((place >= 1) & (place + before <= length)).expand(*state.tokens.shape[:2], starts)
        for i in range(before):
            newest = state.tokens.gather(2, (length - before + 1 + i).clamp(min=0).expand(*state.tokens.shape[:2], 1))
            again = again & (state.tokens[:, :, i : i + starts] == newest)
        # Where nothing is forbidden, <s> is written instead, which is never chosen.
        last = torch.where(again, state.tokens[:, :, before:], state.tokens[:, :, :1])
        log_probs.scatter_(2, last, -math.inf)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Multiply the log-probability of every token that was written already (Keskar et al., 2019, on log p)."""

    factor: float
    changes_score: ClassVar[bool] = False
    capturable: ClassVar[bool] = True

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        place = torch.arange(state.tokens.shape[2], device=state.tokens.device)
        # Beyond the length, <s> is taken instead, which is never chosen.
        written = torch.where(place <= state.length[:, None, None], state.tokens, state.tokens[:, :, :1])
        log_probs.scatter_(2, written, self.factor * log_probs.gather(2, written))


# ---- sampling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; all limits hold together, on the probabilities after `temperature`.

    A token may be drawn if it is among the `top_k` most probable, in the smallest set of tokens with cumulative
    probability `top_p`, and at least `min_p` times as probable as the first. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: another text each time

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, math.inf), ("top_k", 0, math.inf), ("top_p", 0, 1), ("min_p", 0, 1)):
            value = getattr(self, name)
            if not low <= value <= high or not math.isfinite(value):
                limit = f"between {low} and {high}" if math.isfinite(high) else f"at least {low}"
                raise UsageError(f"{name} = {value}: must be {limit}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities to draw with: (…, vocab), from logits of that shape; the best token always stays."""
        if not self.temperature:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # The largest logit becomes 0 first, so that no temperature overflows.
        shifted = logits.float() - logits.float().amax(-1, keepdim=True)
        likely = (shifted / self.temperature).softmax(-1)
        if not self.top_k and self.top_p == 1:  # nothing to rank
            kept = likely.masked_fill(likely < self.min_p * likely.amax(-1, keepdim=True), 0.0)
            return kept / kept.sum(-1, keepdim=True)
        ranked, order = likely.sort(dim=-1, descending=True, stable=True)
        allowed = ranked >= self.min_p * ranked[..., :1]
        if self.top_p < 1:
            allowed &= ranked.cumsum(-1) - ranked < self.top_p  # the tokens before it do not reach top_p yet
        if self.top_k:
            allowed[..., self.top_k :] = False
        allowed[..., 0] = True
        kept = ranked.masked_fill(~allowed, 0.0)
        return torch.zeros_like(kept).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def draw(log_probs: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Return a token for each row of log-probabilities (…, vocab) by its number (…) in [0, 1): the inverse CDF."""
    running = sampling.probabilities(log_probs).double().cumsum(-1)
    drawn = torch.searchsorted(running, numbers[..., None] * running[..., -1:], right=True).squeeze(-1)
    return drawn.clamp(max=log_probs.shape[-1] - 1)


def uniform_numbers(sampling: Sampling, sentences: Sequence[int], rows: int, length: int) -> Tensor:
    """Return the random numbers of `rows` samples of each sentence: (sentences, rows, length) in [0, 1), double.

    `sentences` are numbers in the whole input. A greater length begins with the same numbers.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    drawn = [[np.random.default_rng((seed % 2**64, s, row)).random(length) for row in range(rows)] for s in sentences]
    return torch.from_numpy(np.array(drawn, np.float64).reshape(len(sentences), rows, length))


class Sampler(GreedySearch):
    """Draw the next token of each row instead of taking the most probable one."""

    def __init__(self, model: Any, options: Any, tgt: Tokenizer, *, capacity: int, **sizes: Any) -> None:
        super().__init__(model, replace(options, beam=1), tgt, capacity=capacity, **sizes)  # a row for each sample
        self.first.zero_()  # each begins by itself
        self.sampling: Sampling = options.sampling
        drawn = uniform_numbers(self.sampling, self.numbers, self.rows, capacity)
        self.uniform = drawn.to(self.state.done.device)  # (sentences, rows, capacity)

    def choose(self, values: Tensor) -> Tensor:
        place = self.state.length[:, None, None].expand(-1, self.rows, 1)
        numbers = self.uniform.gather(2, place).flatten()
        return draw(values.flatten(0, 1), self.sampling, numbers).unflatten(0, (-1, self.rows))

    def keep(self, slots: list[int]) -> None:
        super().keep(slots)
        self.uniform = self.uniform[torch.tensor(slots, device=self.uniform.device)]


# ---- language models -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedToken:
    """One token for each row, and the model's own log-probability of it, whatever it was drawn with."""

    tokens: list[int]
    logprobs: list[float]
    ranked: Tensor  # (rows, vocab): log-probabilities of all tokens, −inf for forbidden ones


@torch.inference_mode()
def generate(
    model: DecoderOnly,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    context: int,
    rows: int = 1,
    forbidden: Sequence[int] = (),
    device: torch.device | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens that continue a prompt, without end, in `rows` independent ways.

    The model reads at most `context` tokens. When that many are cached, the older half is dropped and the rest computed
    again from position 0: cached keys and values depend on the positions of their tokens.
    """
    if not prompt:
        raise UsageError("a prompt needs at least one token: give the newline that text begins with")
    draws = torch.Generator()  # its own, so that the global random numbers stay the same
    draws.seed() if sampling.seed is None else draws.manual_seed(sampling.seed)
    history = torch.tensor([list(prompt[-context:])] * rows, device=device)  # (rows, tokens)
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=device)
    logits, state = model.step(history, model.start(beam=rows))
    while True:
        log_probs = logits[:, -1].float().log_softmax(-1)
        last = log_probs.index_fill(-1, banned, -math.inf)
        if not bool(torch.isfinite(last.max(-1).values).all()):
            raise QkvError("the model's probabilities are not numbers: its weights are damaged; use another step's")
        token = draw(last, sampling, torch.rand(rows, generator=draws, dtype=torch.float64).to(last.device))
        logprobs = log_probs.gather(-1, token[:, None]).squeeze(-1)
        yield GeneratedToken(token.tolist(), logprobs.tolist(), last)
        history = torch.cat([history, token[:, None]], dim=1)[:, -context:]
        if state.position >= context:
            logits, state = model.step(history[:, -max(1, context // 2) :], model.start(beam=rows))
        else:
            logits, state = model.step(token[:, None], state)
