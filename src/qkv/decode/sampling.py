"""Drawing the next token: with which probabilities, and by which random numbers.

The numbers are made before the search, on the CPU, from the seed, the number of the sentence in the input and the row:
the same sentence draws the same tokens alone, in any batch, in any order and on any device.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.core.errors import UsageError


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
        """What each token is drawn with: (…, vocab) from logits of that shape; the likeliest always remains."""
        if not self.temperature:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # The largest logit becomes 0 first: however low the temperature, nothing overflows.
        shifted = logits.float() - logits.float().amax(-1, keepdim=True)
        likely = (shifted / self.temperature).softmax(-1)
        if not self.top_k and self.top_p == 1:  # nothing to rank
            kept = likely.masked_fill(likely < self.min_p * likely.amax(-1, keepdim=True), 0.0)
            return kept / kept.sum(-1, keepdim=True)
        ranked, order = likely.sort(dim=-1, descending=True, stable=True)
        allowed = ranked >= self.min_p * ranked[..., :1]
        if self.top_p < 1:
            allowed &= ranked.cumsum(-1) - ranked < self.top_p  # what comes before it does not yet hold top_p
        if self.top_k:
            allowed[..., self.top_k :] = False
        allowed[..., 0] = True
        kept = ranked.masked_fill(~allowed, 0.0)
        return torch.zeros_like(kept).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def draw(log_probs: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """A token for each row of log-probabilities (…, vocab): where their running sum passes its number (…) in [0, 1)."""
    running = sampling.probabilities(log_probs).double().cumsum(-1)
    drawn = torch.searchsorted(running, numbers[..., None] * running[..., -1:], right=True).squeeze(-1)
    return drawn.clamp(max=log_probs.shape[-1] - 1)


def uniform_numbers(sampling: Sampling, sentences: Sequence[int], rows: int, length: int) -> Tensor:
    """What `rows` draws of each sentence are made of: (sentences, rows, length) in [0, 1), double.

    `sentences` are numbers in the whole input; a greater length begins with the same numbers.
    """
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    drawn = [[np.random.default_rng((seed % 2**64, s, row)).random(length) for row in range(rows)] for s in sentences]
    return torch.from_numpy(np.array(drawn, np.float64).reshape(len(sentences), rows, length))
