"""Residual sum, dropout and norm in one pass over memory, forward and backward.

z = x + dropout(y + bias) and its norm. Post-norm layers use only the norm, pre-norm layers also z. The backward pass
computes the mean and variance of z again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv.engines.cuda_decoding.inference_kernels import tl, triton
from qkv.engines.cuda_training.elementwise_kernels import DropoutHash, drop

if triton is not None:
    from qkv.engines.cuda_training.elementwise_kernels import _keep

PROGRAMS = 264  # programs of the backward pass, which divide the rows: two for each core of an H200


class Sums(NamedTuple):
    """Gradients of the norm's weight and bias and of y's bias, summed over the rows: (width,) in fp32 each."""

    weight: Tensor
    shift: Tensor | None
    bias: Tensor | None


class Scale(NamedTuple):
    """Weight and bias of a LayerNorm; without a bias, weight of an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


def add_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, scale: Scale, dropout: DropoutHash
) -> tuple[Tensor, Tensor]:
    """Return z = x + dropout(y + bias), or x without y, and the norm of z: (rows, width) each."""
    if triton is not None and x.is_cuda:
        return add_norm_kernel(x, y, bias, scale, dropout)
    z = x
    if y is not None:
        z = (x.float() + drop(y.float() if bias is None else y.float() + bias.float(), dropout)).to(x.dtype)
    hat, _ = _standardize(z, scale)
    normed = hat * scale.weight
    return z, (normed if scale.bias is None else normed + scale.bias).to(x.dtype)


def add_norm_backward(
    d_z: Tensor | None, d_normed: Tensor, z: Tensor, scale: Scale, dropout: DropoutHash, into: Sums
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and y, given d_z and d_normed; add those of the parameters to `into`."""
    if triton is not None and z.is_cuda:
        return add_norm_backward_kernel(d_z, d_normed, z, scale, dropout, into)
    hat, deviation = _standardize(z, scale)
    d_output = d_normed.float()
    slope = d_output * scale.weight
    d_x = slope - hat * (slope * hat).mean(-1, keepdim=True)
    if scale.bias is not None:
        d_x = d_x - slope.mean(-1, keepdim=True)
    d_x = d_x * deviation
    if d_z is not None:
        d_x = d_x + d_z.float()
    d_y = drop(d_x, dropout)
    for total, part in zip(into, (d_output * hat, d_output, d_y), strict=True):
        if total is not None:
            total += part.sum(0)
    return d_x.to(z.dtype), d_y.to(z.dtype)


def _standardize(z: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """Return z normalised, before weight and bias, and the reciprocal of its standard deviation."""
    z = z.float()
    if scale.bias is not None:
        z = z - z.mean(-1, keepdim=True)
    deviation = torch.rsqrt(z.square().mean(-1, keepdim=True) + scale.eps)
    return z * deviation, deviation


def add_norm_kernel(
    x: Tensor, y: Tensor | None, bias: Tensor | None, scale: Scale, dropout: DropoutHash
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    z, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    row_block = _rows_at_once(block)
    _add_norm[(triton.cdiv(rows, row_block),)](
        x,
        x if y is None else y,
        x if bias is None else bias,
        scale.weight,
        scale.weight if scale.bias is None else scale.bias,
        z,
        normed,
        dropout.seed,
        dropout.salt,
        rows,
        scale.eps,
        dropout.scale,
        width=width,
        block=block,
        row_block=row_block,
        has_y=y is not None,
        has_bias=bias is not None,
        has_mean=scale.bias is not None,
        threshold=dropout.threshold,
        num_warps=4,
    )
    return z, normed


def add_norm_backward_kernel(
    d_z: Tensor | None, d_normed: Tensor, z: Tensor, scale: Scale, dropout: DropoutHash, into: Sums
) -> tuple[Tensor, Tensor]:
    rows, width = z.shape
    block = triton.next_power_of_2(width)
    row_block = _rows_at_once(block)
    programs = min(PROGRAMS, triton.cdiv(rows, row_block))
    d_x = torch.empty_like(z)
    d_y = torch.empty_like(z) if dropout.rate else d_x
    _add_norm_backward[(programs,)](
        d_normed if d_z is None else d_z,
        d_normed,
        z,
        scale.weight,
        d_x,
        d_y,
        *(into.weight if total is None else total for total in into),
        dropout.seed,
        dropout.salt,
        rows,
        programs,
        scale.eps,
        dropout.scale,
        width=width,
        block=block,
        row_block=row_block,
        has_z=d_z is not None,
        has_mean=scale.bias is not None,
        has_bias=into.bias is not None,
        threshold=dropout.threshold,
        num_warps=4,
    )
    return d_x, d_y


def _rows_at_once(block: int) -> int:
    return max(1, 2048 // block)


if triton is not None:

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _add_norm(  # type: ignore[no-untyped-def]
        x,
        y,
        bias,
        weight,
        shift,
        z,
        normed,
        seed,
        salt,
        rows,
        eps,
        factor,
        width: tl.constexpr,
        block: tl.constexpr,
        row_block: tl.constexpr,
        has_y: tl.constexpr,
        has_bias: tl.constexpr,
        has_mean: tl.constexpr,
        threshold: tl.constexpr,
    ):
        """Add y with bias and dropout to x, and normalise the sum: `row_block` rows per program."""
        row = tl.program_id(0) * row_block + tl.arange(0, row_block)[:, None]
        inside = tl.arange(0, block)[None]
        place = row * width + inside
        real = (row < rows) & (inside < width)
        total = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        if has_y:
            added = tl.load(y + place, mask=real, other=0.0).to(tl.float32)
            if has_bias:
                added += tl.load(bias + inside, mask=inside < width, other=0.0).to(tl.float32)
            if threshold > 0:
                added = tl.where(_keep(place, seed, salt, threshold), added * factor, 0.0)
            total = (total + added).to(z.dtype.element_ty)
            tl.store(z + place, total, mask=real)
            total = total.to(tl.float32)
        if has_mean:
            total = tl.where(real, total - (tl.sum(total, axis=1) / width)[:, None], 0.0)
        deviation = tl.rsqrt(tl.sum(total * total, axis=1) / width + eps)[:, None]
        result = total * deviation * tl.load(weight + inside, mask=inside < width, other=0.0).to(tl.float32)
        if has_mean:
            result += tl.load(shift + inside, mask=inside < width, other=0.0).to(tl.float32)
        tl.store(normed + place, result.to(normed.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _add_norm_backward(  # type: ignore[no-untyped-def]
        d_z,
        d_normed,
        z,
        weight,
        d_x,
        d_y,
        d_weight,
        d_shift,
        d_bias,
        seed,
        salt,
        rows,
        programs,
        eps,
        factor,
        width: tl.constexpr,
        block: tl.constexpr,
        row_block: tl.constexpr,
        has_z: tl.constexpr,
        has_mean: tl.constexpr,
        has_bias: tl.constexpr,
        threshold: tl.constexpr,
    ):
        """Each program takes every `programs`-th group of rows, and adds its sums over them to all others'."""
        inside = tl.arange(0, block)[None]
        scale = tl.load(weight + inside, mask=inside < width, other=0.0).to(tl.float32)
        sum_weight = tl.zeros((row_block, block), tl.float32)
        sum_shift = tl.zeros((row_block, block), tl.float32)
        sum_bias = tl.zeros((row_block, block), tl.float32)
        for first in range(tl.program_id(0) * row_block, rows, programs * row_block):
            row = first + tl.arange(0, row_block)[:, None]
            place = row * width + inside
            real = (row < rows) & (inside < width)
            hat = tl.load(z + place, mask=real, other=0.0).to(tl.float32)
            d_output = tl.load(d_normed + place, mask=real, other=0.0).to(tl.float32)
            if has_mean:
                hat = tl.where(real, hat - (tl.sum(hat, axis=1) / width)[:, None], 0.0)
            deviation = tl.rsqrt(tl.sum(hat * hat, axis=1) / width + eps)[:, None]
            hat = hat * deviation
            slope = d_output * scale
            result = slope - hat * (tl.sum(slope * hat, axis=1) / width)[:, None]
            if has_mean:
                result -= (tl.sum(slope, axis=1) / width)[:, None]
            result = result * deviation
            if has_z:
                result += tl.load(d_z + place, mask=real, other=0.0).to(tl.float32)
            tl.store(d_x + place, result.to(d_x.dtype.element_ty), mask=real)
            if threshold > 0:
                result = tl.where(_keep(place, seed, salt, threshold), result * factor, 0.0)
                tl.store(d_y + place, result.to(d_y.dtype.element_ty), mask=real)
            sum_weight += d_output * hat
            sum_shift += d_output
            sum_bias += tl.where(real, result, 0.0)
        column = tl.arange(0, block)
        in_width = column < width
        tl.atomic_add(d_weight + column, tl.sum(sum_weight, axis=0), mask=in_width, sem="relaxed")
        if has_mean:
            tl.atomic_add(d_shift + column, tl.sum(sum_shift, axis=0), mask=in_width, sem="relaxed")
        if has_bias:
            tl.atomic_add(d_bias + column, tl.sum(sum_bias, axis=0), mask=in_width, sem="relaxed")
