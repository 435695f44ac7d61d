"""Elementwise kernels: dropout, activations, rotary positions, and the layout of sentences and heads for attention.

Dropout stores no mask: a hash of element index, seed and layer decides, equal in the forward and backward pass and on
any device. The integer hash has three rounds, a fifth of the work of the usual generator (Philox), and is
uniform and uncorrelated enough for dropout.

The feed-forward activations are max(0, x) and SwiGLU with their dropout and gradients; GELU uses PyTorch's operations.

Rotary positions rotate queries and keys in place. The gradient is the inverse rotation, so the backward pass needs no
saved tensors.
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
    seed: Tensor  # (2,) int32, drawn for every pass
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
        """Factor on the kept elements, which preserves the mean."""
        return 1 / (1 - self.rate)


def kept(dropout: DropoutHash, index: Tensor) -> Tensor:
    """Return the mask of kept elements for these indices (int32, overwritten): the plain version of `_keep`.

    PyTorch's words are signed, so each shift masks the sign bits. In place, to save memory bandwidth.
    """
    x, scratch = index, torch.empty_like(index)
    start, second = dropout.seed.unbind()
    x ^= start + dropout.salt
    _mix(x, scratch, 16).mul_(_signed(FIRST))
    _mix(x, scratch, 15).add_(second)
    _mix(x, scratch, 17).mul_(_signed(SECOND))
    _mix(x, scratch, 15).mul_(_signed(THIRD))
    _mix(x, scratch, 16)
    x ^= SIGN  # flipping the sign bit makes the signed order equal to the unsigned order
    return x >= dropout.threshold + SIGN


def _mix(x: Tensor, scratch: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, with an unsigned shift."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def drop(x: Tensor, dropout: DropoutHash, index: Tensor | None = None) -> Tensor:
    """Apply dropout to a tensor; `index` numbers its elements, by default in memory order."""
    if not dropout.rate:
        return x
    if index is None:
        index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    return (x * dropout.scale).masked_fill_(kept(dropout, index).logical_not_(), 0.0)


if triton is not None:
    _FIRST, _SECOND, _THIRD = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(THIRD)

    @triton.jit  # type: ignore[untyped-decorator]
    def _keep(index, seed, salt, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return whether dropout keeps the elements with these indices (`DropoutHash`)."""
        x = index.to(tl.uint32) ^ (tl.load(seed).to(tl.uint32) + salt.to(tl.uint32))
        x = (x ^ (x >> 16)) * _FIRST
        x = (x ^ (x >> 15)) + tl.load(seed + 1).to(tl.uint32)
        x = (x ^ (x >> 17)) * _SECOND
        x = (x ^ (x >> 15)) * _THIRD
        return (x ^ (x >> 16)) >= threshold


# ---- activations -----------------------------------------------------------------------------------------------------

PROGRAMS = 128  # programs that divide the rows of a block of columns
ROWS, COLUMNS = 16, 256
BLOCK = 1024  # elements for each program, in memory order


def relu_dropout(x: Tensor, dropout: DropoutHash) -> Tensor:
    """Compute dropout(max(0, x)) in place."""
    if triton is not None and x.is_cuda and dropout.rate:
        return relu_dropout_kernel(x, dropout)
    return drop(x.relu_(), dropout)


def relu_dropout_kernel(x: Tensor, dropout: DropoutHash) -> Tensor:
    _relu_dropout[(triton.cdiv(x.numel(), BLOCK),)](
        x, dropout.seed, dropout.salt, x.numel(), dropout.scale, block=BLOCK, threshold=dropout.threshold
    )
    return x


def relu_dropout_backward(d_hidden: Tensor, hidden: Tensor, dropout: DropoutHash, into: Tensor) -> None:
    """Replace the gradient of `hidden` (rows, d_ff) by that of x, and add its sum over the rows to `into` (d_ff,).

    `hidden` is positive exactly where x was positive and kept, so the dropout mask is not computed again.
    """
    if triton is not None and hidden.is_cuda:
        return relu_dropout_backward_kernel(d_hidden, hidden, dropout, into)
    gradient = torch.where(hidden > 0, d_hidden.float() * dropout.scale, 0.0)
    d_hidden.copy_(gradient)
    into += gradient.sum(0)


def relu_dropout_backward_kernel(d_hidden: Tensor, hidden: Tensor, dropout: DropoutHash, into: Tensor) -> None:
    rows, width = hidden.shape
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    _relu_dropout_backward[(programs, triton.cdiv(width, COLUMNS))](
        d_hidden, hidden, into, rows, width, programs, dropout.scale, row_block=ROWS, block=COLUMNS, num_warps=4
    )


def gelu(x: Tensor, dropout: DropoutHash) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return dropout(gelu(x)) and its backward function."""

    def back(gradient: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(drop(gradient, dropout), x)

    return drop(F.gelu(x), dropout), back


def swiglu(a: Tensor, b: Tensor, dropout: DropoutHash) -> Tensor:
    """Return dropout(silu(a) ⊙ b) for a and b (rows, d_ff)."""
    if triton is not None and a.is_cuda:
        return swiglu_kernel(a, b, dropout)
    return drop(F.silu(a) * b, dropout)


def swiglu_backward(d_hidden: Tensor, a: Tensor, b: Tensor, dropout: DropoutHash) -> None:
    """Replace a and b by their gradients."""
    if triton is not None and a.is_cuda:
        return swiglu_backward_kernel(d_hidden, a, b, dropout)
    d_output = drop(d_hidden, dropout)
    d_a = torch.ops.aten.silu_backward(d_output * b, a)
    torch.mul(d_output, F.silu(a), out=b)
    a.copy_(d_a)


def swiglu_kernel(a: Tensor, b: Tensor, dropout: DropoutHash) -> Tensor:
    hidden, count = torch.empty_like(a), a.numel()
    _swiglu[(triton.cdiv(count, BLOCK),)](
        hidden, a, b, dropout.seed, dropout.salt, count, dropout.scale, block=BLOCK, threshold=dropout.threshold
    )
    return hidden


def swiglu_backward_kernel(d_hidden: Tensor, a: Tensor, b: Tensor, dropout: DropoutHash) -> None:
    count = a.numel()
    _swiglu_backward[(triton.cdiv(count, BLOCK),)](
        d_hidden, a, b, dropout.seed, dropout.salt, count, dropout.scale, block=BLOCK, threshold=dropout.threshold
    )


if triton is not None:

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _relu_dropout(x, seed, salt, count, factor, block: tl.constexpr, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
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
        d_output = tl.load(d_hidden + place, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            d_output = tl.where(_keep(place, seed, salt, threshold), d_output * factor, 0.0)
        value = tl.load(a + place, mask=real, other=0.0).to(tl.float32)
        gate = tl.load(b + place, mask=real, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(value)
        tl.store(b + place, (d_output * value * sigmoid).to(b.dtype.element_ty), mask=real)
        slope = sigmoid * (1 + value * (1 - sigmoid))
        tl.store(a + place, (d_output * gate * slope).to(a.dtype.element_ty), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def _relu_dropout_backward(  # type: ignore[no-untyped-def]
        d_hidden, hidden, d_bias, rows, width, programs, factor, row_block: tl.constexpr, block: tl.constexpr
    ):
        """One program per block of columns and share of the rows; it adds its sums to d_bias atomically."""
        column = tl.program_id(1) * block + tl.arange(0, block)[None]
        total = tl.zeros((row_block, block), tl.float32)
        for first in range(tl.program_id(0) * row_block, rows, programs * row_block):
            row = first + tl.arange(0, row_block)[:, None]
            real = (row < rows) & (column < width)
            place = row * width + column
            value = tl.load(hidden + place, mask=real, other=0.0)
            d_output = tl.load(d_hidden + place, mask=real, other=0.0).to(tl.float32)
            d_output = tl.where(value > 0, d_output * factor, 0.0)
            tl.store(d_hidden + place, d_output.to(d_hidden.dtype.element_ty), mask=real)
            total += d_output
        out = tl.program_id(1) * block + tl.arange(0, block)
        tl.atomic_add(d_bias + out, tl.sum(total, axis=0), mask=out < width, sem="relaxed")


# ---- rotary positions ------------------------------------------------------------------------------------------------


def rotate_heads(x: Tensor, places: Tensor, table: Tensor, *, back: bool = False) -> None:
    """Rotate the heads of x (tokens, heads · d_k) in place by the angles of the positions `places` (tokens,).

    `table` (positions, d_k) alternates sines and cosines of the angles; `back` rotates by the negative angles.
    """
    if triton is not None and x.is_cuda:
        return rotate_heads_kernel(x, places, table, back)
    from qkv.models.variants import rotate

    angles = table[places.long()]
    if back:
        angles[:, 0::2].neg_()  # the sines
    x.copy_(rotate(x.unflatten(1, (-1, table.shape[1])), angles[:, None]).flatten(1))


def rotate_heads_kernel(x: Tensor, places: Tensor, table: Tensor, back: bool) -> None:
    pairs = x.shape[1] // 2
    _rotate_heads[(len(x),)](
        x, places, table, x.stride(0), pairs=pairs, d_k=table.shape[1], block=triton.next_power_of_2(pairs), back=back
    )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _rotate_heads(  # type: ignore[no-untyped-def]
        x, places, table, stride, pairs: tl.constexpr, d_k: tl.constexpr, block: tl.constexpr, back: tl.constexpr
    ):
        """One program per token; one thread loads both numbers of a pair before it stores them."""
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

QKV = tuple[Tensor, ...]  # three: (tokens, heads · width) each


@dataclass(frozen=True)
class Rows:
    """Token ranges of the sentences: row r has the queries queries[r] … queries[r + 1], and keys in the same way.

    Rows are sorted by tile; tile i has the rows first[i] … first[i + 1], at most most[i] of them.
    """

    queries: Tensor  # (rows + 1,) int32
    keys: Tensor  # (rows + 1,) int32
    first: Tensor  # (tiles + 1,) int32
    most: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """Number and widths of the heads in q, k and v (tokens, heads · width), and options of their scores."""

    count: int
    d_k: int
    d_v: int
    scale: float
    causal: bool


def arguments(qkv: QKV, number: int, rows: Rows, heads: Heads, dropout: DropoutHash) -> tuple[object, ...]:
    """Return the arguments shared by the attention kernels for the rows of a tile; scores are exponents of 2."""
    scale = heads.scale * math.log2(math.e)
    strides = (x.stride(0) for x in qkv)
    return (rows.queries, rows.keys, rows.first[number:], dropout.seed, dropout.salt, scale, dropout.scale, *strides)


def constants(tile: int, heads: Heads, dropout: DropoutHash) -> dict[str, object]:
    """Return the compile-time constants of the attention kernels."""
    return {
        "heads": heads.count,
        "d_k": heads.d_k,
        "d_v": heads.d_v,
        "width_k": max(16, triton.next_power_of_2(heads.d_k)),
        "width_v": max(16, triton.next_power_of_2(heads.d_v)),
        "causal": heads.causal,
        "tile": tile,
        "threshold": dropout.threshold,
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
        """Store d columns of a head for the tokens `at` of a row; tokens past its end are skipped."""
        inside = tl.arange(0, width)[None]
        real = (at[:, None] < count) & (inside < d)
        place = x + (start + at[:, None]) * stride + column + inside
        tl.store(place, value.to(x.dtype.element_ty), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def scores(query, key, scale, i, j, k_count, causal: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return qkᵀ of queries i and keys j of a row, −1e30 for masked pairs, and the mask."""
        visible = (j[None] < k_count) & (i[:, None] >= 0)  # depends on i and j, so that its shape is a square
        if causal:
            visible = visible & (j[None] <= i[:, None])
        return tl.where(visible, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30), visible
