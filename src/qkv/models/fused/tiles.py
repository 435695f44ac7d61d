"""Where sentences and heads lie, for the kernels of attention: what they are told, and how they read and write."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qkv.models.fused.noise import Noise
from qkv.models.kernels import tl, triton

QKV = tuple[Tensor, Tensor, Tensor]  # (tokens, heads · width) each


@dataclass(frozen=True)
class Rows:
    """Where the sentences lie: queries of row r at starts[r] … starts[r + 1], its keys likewise.

    Rows are ordered by tile; those of tile i are first[i] … first[i + 1], and at most most[i] of them.
    """

    queries: Tensor  # (rows + 1,) int32
    keys: Tensor  # (rows + 1,) int32
    first: Tensor  # (tiles + 1,) int32
    most: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """How the columns of q, k and v (tokens, heads · width) are shared by the heads."""

    count: int
    d_k: int
    d_v: int
    scale: float
    causal: bool


def arguments(qkv: QKV, number: int, rows: Rows, heads: Heads, noise: Noise) -> tuple[object, ...]:
    """What all kernels are told of the rows of a tile; scores are in powers of 2."""
    scale = heads.scale * math.log2(math.e)
    strides = (x.stride(0) for x in qkv)
    return (rows.queries, rows.keys, rows.first[number:], noise.seed, noise.salt, scale, noise.scale, *strides)


def constants(tile: int, heads: Heads, noise: Noise) -> dict[str, object]:
    """What they are compiled for."""
    return {
        "heads": heads.count,
        "d_k": heads.d_k,
        "d_v": heads.d_v,
        "width_k": max(16, triton.next_power_of_2(heads.d_k)),
        "width_v": max(16, triton.next_power_of_2(heads.d_v)),
        "causal": heads.causal,
        "tile": tile,
        "threshold": noise.threshold,
    }


if triton is not None:
    LN_2 = tl.constexpr(math.log(2))

    @triton.jit  # type: ignore[untyped-decorator]
    def read(x, start, at, count, stride, column, d: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
        """The part of a head, d columns from `column` on, of those tokens `at` of a row that there are; else 0."""
        inside = tl.arange(0, width)[None]
        real = (at[:, None] < count) & (inside < d)
        return tl.load(x + (start + at[:, None]) * stride + column + inside, mask=real, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def write(x, value, start, at, count, stride, column, d: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
        inside = tl.arange(0, width)[None]
        real = (at[:, None] < count) & (inside < d)
        place = x + (start + at[:, None]) * stride + column + inside
        tl.store(place, value.to(x.dtype.element_ty), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def scores(query, key, scale, i, j, k_count, causal: tl.constexpr):  # type: ignore[no-untyped-def]
        """Of queries i and keys j of a row: qkᵀ, far below all others where there is none to be seen; and which are."""
        seen = (j[None] < k_count) & (i[:, None] >= 0)  # of both, so that it is a square
        if causal:
            seen = seen & (j[None] <= i[:, None])
        return tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30), seen
