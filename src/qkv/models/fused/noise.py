"""Dropout without a mask in memory: whether an element is kept follows from its index, a seed and its place.

The forward and the backward pass ask the same question and get the same answer, on any device. The answer is an integer
hash of three rounds, a fifth of the work of the usual generator (Philox), and even and uncorrelated enough to drop by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.models.kernels import tl, triton

FIRST, SECOND, THIRD = 0x21F0AAAD, 0xD35A2D97, 0xAC564B05
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """Dropout of one place: its rate, and where its random bits come from."""

    rate: float
    seed: Tensor  # (2,) int32, drawn anew for every pass
    site: int  # a number of its own for every place that drops

    @property
    def threshold(self) -> int:
        return round(self.rate * 2**32)

    @property
    def salt(self) -> int:
        """The place as bits to begin with."""
        return self.site * FIRST & 0x7FFFFFFF

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by, so that the mean stays."""
        return 1 / (1 - self.rate)


def kept(noise: Noise, index: Tensor) -> Tensor:
    """Which elements stay, by their index: the plain twin of `_keep`."""
    first, second = (part & WORD for part in noise.seed.long().unbind())
    x = (index ^ (first + noise.salt)) & WORD
    x = ((x ^ (x >> 16)) * FIRST) & WORD
    x = ((x ^ (x >> 15)) + second) & WORD
    x = ((x ^ (x >> 17)) * SECOND) & WORD
    x = ((x ^ (x >> 15)) * THIRD) & WORD
    return (x ^ (x >> 16)) >= noise.threshold


def drop(x: Tensor, noise: Noise) -> Tensor:
    """Dropout of a whole tensor, whose elements are numbered as they lie."""
    if not noise.rate:
        return x
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return torch.where(kept(noise, index), x * noise.scale, 0.0).to(x.dtype)


if triton is not None:
    _FIRST, _SECOND, _THIRD = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(THIRD)

    @triton.jit  # type: ignore[untyped-decorator]
    def _keep(index, seed, salt, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
        x = index.to(tl.uint32) ^ (tl.load(seed).to(tl.uint32) + salt.to(tl.uint32))
        x = (x ^ (x >> 16)) * _FIRST
        x = (x ^ (x >> 15)) + tl.load(seed + 1).to(tl.uint32)
        x = (x ^ (x >> 17)) * _SECOND
        x = (x ^ (x >> 15)) * _THIRD
        return (x ^ (x >> 16)) >= threshold
