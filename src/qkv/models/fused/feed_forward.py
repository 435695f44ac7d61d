"""What the feed-forward layers do between their matrices: max(0, x) or SwiGLU with its dropout, and the way back.

GELU is written with PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.models.fused.noise import Noise, drop
from qkv.models.kernels import tl, triton

if triton is not None:
    from qkv.models.fused.noise import _keep

PROGRAMS = 128  # that share the rows for each block of columns
ROWS, COLUMNS = 16, 256
BLOCK = 1024  # numbers of a program that takes them as they lie


def rectify(x: Tensor, noise: Noise) -> Tensor:
    """dropout(max(0, x)), in place of x."""
    chosen = rectify_kernel if triton is not None and x.is_cuda and noise.rate else rectify_plain
    return chosen(x, noise)


def rectify_plain(x: Tensor, noise: Noise) -> Tensor:
    return drop(x.relu_(), noise)


def rectify_kernel(x: Tensor, noise: Noise) -> Tensor:
    _rectify[(triton.cdiv(x.numel(), BLOCK),)](
        x, noise.seed, noise.salt, x.numel(), noise.scale, block=BLOCK, threshold=noise.threshold
    )
    return x


def rectify_backward(d_hidden: Tensor, hidden: Tensor, noise: Noise, into: Tensor) -> None:
    """The gradient of x in place of that of `hidden` (rows, d_ff), its sum over the rows added to `into` (d_ff,).

    What was kept and positive is what is positive now: nothing has to be drawn again.
    """
    chosen = rectify_backward_kernel if triton is not None and hidden.is_cuda else rectify_backward_plain
    chosen(d_hidden, hidden, noise, into)


def rectify_backward_plain(d_hidden: Tensor, hidden: Tensor, noise: Noise, into: Tensor) -> None:
    found = torch.where(hidden > 0, d_hidden.float() * noise.scale, 0.0)
    d_hidden.copy_(found)
    into += found.sum(0)


def rectify_backward_kernel(d_hidden: Tensor, hidden: Tensor, noise: Noise, into: Tensor) -> None:
    rows, width = hidden.shape
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    _rectify_backward[(programs, triton.cdiv(width, COLUMNS))](
        d_hidden, hidden, into, rows, width, programs, noise.scale, some=ROWS, block=COLUMNS, num_warps=4
    )


def gelu(x: Tensor, noise: Noise) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """dropout(gelu(x)), and the way back."""

    def back(gradient: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_backward(drop(gradient, noise), x)
        return found

    return drop(F.gelu(x), noise), back


def swiglu(a: Tensor, b: Tensor, noise: Noise) -> Tensor:
    """dropout(silu(a) ⊙ b), of (rows, d_ff) each."""
    chosen = swiglu_kernel if triton is not None and a.is_cuda else swiglu_plain
    return chosen(a, b, noise)


def swiglu_backward(d_hidden: Tensor, a: Tensor, b: Tensor, noise: Noise) -> None:
    """The gradients of a and b in place of them."""
    chosen = swiglu_backward_kernel if triton is not None and a.is_cuda else swiglu_backward_plain
    chosen(d_hidden, a, b, noise)


def swiglu_plain(a: Tensor, b: Tensor, noise: Noise) -> Tensor:
    return drop(F.silu(a) * b, noise)


def swiglu_backward_plain(d_hidden: Tensor, a: Tensor, b: Tensor, noise: Noise) -> None:
    given = drop(d_hidden, noise)
    d_a = torch.ops.aten.silu_backward(given * b, a)
    torch.mul(given, F.silu(a), out=b)
    a.copy_(d_a)


def swiglu_kernel(a: Tensor, b: Tensor, noise: Noise) -> Tensor:
    hidden, count = torch.empty_like(a), a.numel()
    _swiglu[(triton.cdiv(count, BLOCK),)](
        hidden, a, b, noise.seed, noise.salt, count, noise.scale, block=BLOCK, threshold=noise.threshold
    )
    return hidden


def swiglu_backward_kernel(d_hidden: Tensor, a: Tensor, b: Tensor, noise: Noise) -> None:
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
