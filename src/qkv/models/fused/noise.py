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
SIGN = -(2**31)


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
    """Which elements of these numbers (int32, not to be used again) stay: the plain twin of `_keep`.

    Words are signed here, so shifts are of what is left of the sign; in place, because memory is what this waits for.
    """
    x, scratch = index, torch.empty_like(index)
    start, second = noise.seed.unbind()
    x ^= start + noise.salt
    _mix(x, scratch, 16).mul_(_signed(FIRST))
    _mix(x, scratch, 15).add_(second)
    _mix(x, scratch, 17).mul_(_signed(SECOND))
    _mix(x, scratch, 15).mul_(_signed(THIRD))
    _mix(x, scratch, 16)
    x ^= SIGN  # unsigned words are in the order of signed ones with the other sign
    return x >= noise.threshold + SIGN


def _mix(x: Tensor, scratch: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, as if it had no sign."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def drop(x: Tensor, noise: Noise, index: Tensor | None = None) -> Tensor:
    """Dropout of a whole tensor, whose elements are numbered by `index`, or as they lie."""
    if not noise.rate:
        return x
    if index is None:
        index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    return (x * noise.scale).masked_fill_(kept(noise, index).logical_not_(), 0.0)


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
