"""Elementwise kernels: dropout, activations, rotary positions, and the layout of sentences and heads for attention.

Dropout keeps no mask in memory: a hash of element index, seed and layer decides, equal in the forward and the backward
pass and on any device. The integer hash has three rounds, a fifth of the work of the usual generator (Philox), and is
uniform and uncorrelated enough for dropout.

The feed-forward activations are max(0, x) and SwiGLU with their dropout and gradients; GELU uses PyTorch's operations.

Rotary positions rotate queries and keys in place. The inverse rotation undoes it and is its gradient too, so the
backward pass needs nothing from the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.engines.cuda_decoding.inference_kernels import tl, triton

# ---- dropout ---------------------------------------------------------------------------------------------------------

FIRST, SECOND, THIRD = 0x21F0AAAD, 0xD35A2D97, 0xAC564B05
SIGN = -(2**31)


@dataclass(frozen=True)
class DropoutHash:
    """Dropout of one layer: its rate, and the source of its random bits."""

    rate: float
    seed: Tensor  # (2,) int32, drawn anew for every pass
    site: int  # a different number for every dropout layer

    @property
    def threshold(self) -> int:
        return round(self.rate * 2**32)

    @property
    def salt(self) -> int:
        """Initial bits of the hash, from the layer's number."""
        return self.site * FIRST & 0x7FFFFFFF

    @property
    def scale(self) -> float:
        """Factor on the kept elements, so that the mean stays."""
        return 1 / (1 - self.rate)


def kept(noise: DropoutHash, index: Tensor) -> Tensor:
    """Return a mask of the kept elements for these indices (int32, overwritten): the plain twin of `_keep`.

    Words are signed here, so each shift masks the sign bits; in place, because memory bandwidth is the limit.
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


def drop(x: Tensor, noise: DropoutHash, index: Tensor | None = None) -> Tensor:
    """Apply dropout to a tensor; `index` numbers its elements, by default in memory order."""
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


# ---- activations -----------------------------------------------------------------------------------------------------

PROGRAMS = 128  # that share the rows for each block of columns
ROWS, COLUMNS = 16, 256
BLOCK = 1024  # elements for each program, in memory order


def rectify(x: Tensor, noise: DropoutHash) -> Tensor:
    """dropout(max(0, x)), in place of x."""
    chosen = rectify_kernel if triton is not None and x.is_cuda and noise.rate else rectify_plain
    return chosen(x, noise)


def rectify_plain(x: Tensor, noise: DropoutHash) -> Tensor:
    return drop(x.relu_(), noise)


def rectify_kernel(x: Tensor, noise: DropoutHash) -> Tensor:
    _rectify[(triton.cdiv(x.numel(), BLOCK),)](
        x, noise.seed, noise.salt, x.numel(), noise.scale, block=BLOCK, threshold=noise.threshold
    )
    return x


def rectify_backward(d_hidden: Tensor, hidden: Tensor, noise: DropoutHash, into: Tensor) -> None:
    """The gradient of x in place of that of `hidden` (rows, d_ff), its sum over the rows added to `into` (d_ff,).

    Kept positive elements are still positive, so dropout need not be computed again.
    """
    chosen = rectify_backward_kernel if triton is not None and hidden.is_cuda else rectify_backward_plain
    chosen(d_hidden, hidden, noise, into)


def rectify_backward_plain(d_hidden: Tensor, hidden: Tensor, noise: DropoutHash, into: Tensor) -> None:
    found = torch.where(hidden > 0, d_hidden.float() * noise.scale, 0.0)
    d_hidden.copy_(found)
    into += found.sum(0)


def rectify_backward_kernel(d_hidden: Tensor, hidden: Tensor, noise: DropoutHash, into: Tensor) -> None:
    rows, width = hidden.shape
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    _rectify_backward[(programs, triton.cdiv(width, COLUMNS))](
        d_hidden, hidden, into, rows, width, programs, noise.scale, some=ROWS, block=COLUMNS, num_warps=4
    )


def gelu(x: Tensor, noise: DropoutHash) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """dropout(gelu(x)), and the way back."""

    def back(gradient: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_backward(drop(gradient, noise), x)
        return found

    return drop(F.gelu(x), noise), back


def swiglu(a: Tensor, b: Tensor, noise: DropoutHash) -> Tensor:
    """dropout(silu(a) ⊙ b), of (rows, d_ff) each."""
    chosen = swiglu_kernel if triton is not None and a.is_cuda else swiglu_plain
    return chosen(a, b, noise)


def swiglu_backward(d_hidden: Tensor, a: Tensor, b: Tensor, noise: DropoutHash) -> None:
    """The gradients of a and b in place of them."""
    chosen = swiglu_backward_kernel if triton is not None and a.is_cuda else swiglu_backward_plain
    chosen(d_hidden, a, b, noise)


def swiglu_plain(a: Tensor, b: Tensor, noise: DropoutHash) -> Tensor:
    return drop(F.silu(a) * b, noise)


def swiglu_backward_plain(d_hidden: Tensor, a: Tensor, b: Tensor, noise: DropoutHash) -> None:
    given = drop(d_hidden, noise)
    d_a = torch.ops.aten.silu_backward(given * b, a)
    torch.mul(given, F.silu(a), out=b)
    a.copy_(d_a)


def swiglu_kernel(a: Tensor, b: Tensor, noise: DropoutHash) -> Tensor:
    hidden, count = torch.empty_like(a), a.numel()
    _swiglu[(triton.cdiv(count, BLOCK),)](
        hidden, a, b, noise.seed, noise.salt, count, noise.scale, block=BLOCK, threshold=noise.threshold
    )
    return hidden


def swiglu_backward_kernel(d_hidden: Tensor, a: Tensor, b: Tensor, noise: DropoutHash) -> None:
    count = a.numel()
    _swiglu_backward[(triton.cdiv(count, BLOCK),)](
        d_hidden, a, b, noise.seed, noise.salt, count, noise.scale, block=BLOCK, threshold=noise.threshold
    )


if triton is not None:

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _rectify(x, seed, salt, count, factor, block: tl.constexpr, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0) * block + tl.arange(0, block)
        value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
        stays = _keep(place, seed, salt, threshold) & (value > 0)
        tl.store(x + place, tl.where(stays, value * factor, 0.0).to(x.dtype.element_ty), mask=place < count)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _swiglu(hidden, a, b, seed, salt, count, factor, block: tl.constexpr, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0) * block + tl.arange(0, block)
        real = place < count
        value = tl.load(a + place, mask=real, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * tl.load(b + place, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            value = tl.where(_keep(place, seed, salt, threshold), value * factor, 0.0)
        tl.store(hidden + place, value.to(hidden.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _swiglu_backward(d_hidden, a, b, seed, salt, count, factor, block: tl.constexpr, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0) * block + tl.arange(0, block)
        real = place < count
        given = tl.load(d_hidden + place, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            given = tl.where(_keep(place, seed, salt, threshold), given * factor, 0.0)
        value = tl.load(a + place, mask=real, other=0.0).to(tl.float32)
        beside = tl.load(b + place, mask=real, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(value)
        tl.store(b + place, (given * value * sigmoid).to(b.dtype.element_ty), mask=real)
        slope = sigmoid * (1 + value * (1 - sigmoid))
        tl.store(a + place, (given * beside * slope).to(a.dtype.element_ty), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def _rectify_backward(  # type: ignore[no-untyped-def]
        d_hidden, hidden, d_bias, rows, width, programs, factor, some: tl.constexpr, block: tl.constexpr
    ):
        """Each program takes every `programs`-th group of rows of some columns, and adds its sum to all others'."""
        column = tl.program_id(1) * block + tl.arange(0, block)[None]
        total = tl.zeros((some, block), tl.float32)
        for first in range(tl.program_id(0) * some, rows, programs * some):
            row = first + tl.arange(0, some)[:, None]
            real = (row < rows) & (column < width)
            place = row * width + column
            value = tl.load(hidden + place, mask=real, other=0.0)
            given = tl.load(d_hidden + place, mask=real, other=0.0).to(tl.float32)
            given = tl.where(value > 0, given * factor, 0.0)
            tl.store(d_hidden + place, given.to(d_hidden.dtype.element_ty), mask=real)
            total += given
        out = tl.program_id(1) * block + tl.arange(0, block)
        tl.atomic_add(d_bias + out, tl.sum(total, axis=0), mask=out < width, sem="relaxed")


# ---- rotary positions ------------------------------------------------------------------------------------------------


def turn(x: Tensor, places: Tensor, table: Tensor, *, back: bool = False) -> None:
    """Turn the heads beside each other in x (tokens, heads · d_k) by the angles of `places` (tokens,), or back.

    `table` (positions, d_k) is that of the sinusoids: sines and cosines of the angles in turn.
    """
    chosen = turn_kernel if triton is not None and x.is_cuda else turn_plain
    chosen(x, places, table, back)


def turn_plain(x: Tensor, places: Tensor, table: Tensor, back: bool) -> None:
    from qkv.models.variants import rotate

    angles = table[places.long()]
    if back:
        angles[:, 0::2].neg_()  # the sines
    x.copy_(rotate(x.unflatten(1, (-1, table.shape[1])), angles[:, None]).flatten(1))


def turn_kernel(x: Tensor, places: Tensor, table: Tensor, back: bool) -> None:
    pairs = x.shape[1] // 2
    _turn[(len(x),)](
        x, places, table, x.stride(0), pairs=pairs, d_k=table.shape[1], block=triton.next_power_of_2(pairs), back=back
    )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn(  # type: ignore[no-untyped-def]
        x, places, table, stride, pairs: tl.constexpr, d_k: tl.constexpr, block: tl.constexpr, back: tl.constexpr
    ):
        """One program a token; both numbers of a pair are one thread's, so neither is overwritten before it is read."""
        token, pair = tl.program_id(0), tl.arange(0, block)
        real = pair < pairs
        angle = table + tl.load(places + token) * d_k + pair * 2 % d_k
        sin, cos = tl.load(angle, mask=real, other=0.0), tl.load(angle + 1, mask=real, other=1.0)
        if back:
            sin = -sin
        place = x + token.to(tl.int64) * stride + pair * 2
        even = tl.load(place, mask=real, other=0.0).to(tl.float32)
        odd = tl.load(place + 1, mask=real, other=0.0).to(tl.float32)
        tl.store(place, (even * cos - odd * sin).to(x.dtype.element_ty), mask=real)
        tl.store(place + 1, (even * sin + odd * cos).to(x.dtype.element_ty), mask=real)


# ---- access to the rows and heads of attention -----------------------------------------------------------------------

QKV = tuple[Tensor, Tensor, Tensor]  # (tokens, heads · width) each


@dataclass(frozen=True)
class Rows:
    """Position of each sentence: row r has the queries starts[r] … starts[r + 1], and keys in the same way.

    Rows are ordered by tile; those of tile i are first[i] … first[i + 1], and at most most[i] of them.
    """

    queries: Tensor  # (rows + 1,) int32
    keys: Tensor  # (rows + 1,) int32
    first: Tensor  # (tiles + 1,) int32
    most: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """Columns of each head in q, k and v (tokens, heads · width)."""

    count: int
    d_k: int
    d_v: int
    scale: float
    causal: bool


def arguments(qkv: QKV, number: int, rows: Rows, heads: Heads, noise: DropoutHash) -> tuple[object, ...]:
    """Return the arguments of all kernels for the rows of a tile; scores are exponents of 2."""
    scale = heads.scale * math.log2(math.e)
    strides = (x.stride(0) for x in qkv)
    return (rows.queries, rows.keys, rows.first[number:], noise.seed, noise.salt, scale, noise.scale, *strides)


def constants(tile: int, heads: Heads, noise: DropoutHash) -> dict[str, object]:
    """Return the compile-time constants of the kernels."""
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
        """Load d columns of a head for the tokens `at` of a row; tokens past its end are 0."""
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
        """Return qkᵀ of queries i and keys j of a row, −1e30 for masked pairs, and the mask."""
        seen = (j[None] < k_count) & (i[:, None] >= 0)  # of both, so that it is a square
        if causal:
            seen = seen & (j[None] <= i[:, None])
        return tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30), seen
