"""Going on with a text: one token after another from a language model, for as long as anybody asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.errors import QkvError, UsageError
from qkv.models.transformer import DecoderOnly


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; all limits hold together, on the probabilities after `temperature`.

    A token may be drawn if it is among the `top_k` likeliest, in the smallest set of likeliest ones that holds `top_p`
    of the probability, and at least `min_p` times as likely as the likeliest. Temperature 0 is greedy.
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
        """What each token is drawn with: (rows, vocab) from logits of that shape; the likeliest always remains."""
        if not self.temperature:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # The largest logit becomes 0 first: however low the temperature, nothing overflows.
        shifted = logits.float() - logits.float().max(-1, keepdim=True).values
        ranked, order = (shifted / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        allowed = ranked >= self.min_p * ranked[:, :1]
        if self.top_p < 1:
            allowed &= ranked.cumsum(-1) - ranked < self.top_p  # what comes before it does not yet hold top_p
        if self.top_k:
            allowed[:, self.top_k :] = False
        allowed[:, 0] = True
        kept = ranked.masked_fill(~allowed, 0.0)
        return torch.zeros_like(kept).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Drawn:
    """One token for each row, and the model's own log-probability of it, whatever it was drawn with."""

    tokens: list[int]
    logprobs: list[float]


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
) -> Iterator[Drawn]:
    """Go on with a prompt, without end, in `rows` independent ways.

    The model sees at most `context` tokens. When that many are cached, the older half is forgotten and the rest read
    again from position 0 on: a token's own place in the cache is part of what was computed for it.
    """
    if not prompt:
        raise UsageError("a prompt needs at least one token: give the newline that text begins with")
    draws = torch.Generator()  # its own, so that nobody else's random numbers change
    draws.seed() if sampling.seed is None else draws.manual_seed(sampling.seed)
    history = torch.tensor([list(prompt[-context:])] * rows, device=device)  # (rows, tokens)
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=device)
    logits, state = model.step(history, model.start(beam=rows))
    while True:
        log_probs = logits[:, -1].float().log_softmax(-1)
        last = log_probs.index_fill(-1, banned, -math.inf)
        if not bool(torch.isfinite(last.max(-1).values).all()):
            raise QkvError("the model's probabilities are not numbers: its weights are damaged; use another step's")
        token = _draw(sampling.probabilities(last), draws)
        logprobs = log_probs.gather(-1, token[:, None]).squeeze(-1)
        yield Drawn(token.tolist(), logprobs.tolist())
        history = torch.cat([history, token[:, None]], dim=1)[:, -context:]
        if state.length >= context:
            logits, state = model.step(history[:, -max(1, context // 2) :], model.start(beam=rows))
        else:
            logits, state = model.step(token[:, None], state)


def _draw(probabilities: Tensor, draws: torch.Generator) -> Tensor:
    """A token for each row: where the running sum of probabilities passes a number drawn on the CPU, on any device."""
    number = torch.rand(len(probabilities), 1, generator=draws, dtype=torch.float64).to(probabilities.device)
    running = probabilities.double().cumsum(-1)
    drawn = torch.searchsorted(running, number * running[:, -1:], right=True).squeeze(-1)
    return drawn.clamp(max=probabilities.shape[-1] - 1)
