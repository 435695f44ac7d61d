"""Triton kernels for inference on a GPU, each with a plain PyTorch version for CPUs and machines without Triton.

`lookup` is attention of one query per row to a KV cache with an indirection table: the table gives, for each position,
the row that stores its key and value, so reordering beams copies nothing. The plain version gathers the keys; the
kernel reads them in place, and only as many as the row has.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

triton: Any = None
tl: Any = None
if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:  # importing Triton takes half a second
    with suppress(ImportError):  # not available on every platform
        triton, tl = import_module("triton"), import_module("triton.language")

BLOCK, WARPS = 32, 1  # positions that `lookup` loads at a time, and warps per program
CHUNK = 64  # vocabulary entries in a chunk; `scan_kernel` computes the maximum of each chunk
New = tuple[Tensor, Tensor]  # the newest key and value of each row: (rows, heads, width)


class RowCache(NamedTuple):
    """KV cache with an indirection table: position t of row r is stored at [origin[r, t], t]."""

    keys: Tensor  # (places, capacity, heads, d_k)
    values: Tensor  # (places, capacity, heads, d_v)
    origin: Tensor  # (rows, capacity)
    length: Tensor  # (rows,): positions of each row


def lookup(q: Tensor, cache: RowCache, *, scale: float, window: int = 0, new: New | None = None) -> Tensor:
    """softmax(q · keys) · values for queries q (rows, heads, d_k): (rows, heads, d_v).

    A `window` restricts attention to the last position and `window` positions before it. `new` keys and values are
    first stored at position `length[r]`.
    """
    if triton is not None and q.is_cuda:
        return lookup_kernel(q, cache, scale=scale, window=window, new=new)
    keys, values, origin, length = cache
    if new is not None:
        row = torch.arange(len(q), device=q.device)
        keys[row, length], values[row, length] = new
        length = length + 1
    place = torch.arange(keys.shape[1], device=keys.device)
    k, v = (cache[origin.long(), place].transpose(1, 2) for cache in (keys, values))  # (rows, heads, capacity, width)
    allowed = place < length[:, None]
    if window:
        allowed &= place >= length[:, None] - 1 - window
    return F.scaled_dot_product_attention(q[:, :, None], k, v, allowed[:, None, None], scale=scale).squeeze(2)


def lookup_kernel(q: Tensor, cache: RowCache, *, scale: float, window: int, new: New | None) -> Tensor:
    keys, values, origin, length = cache
    (rows, heads, d_k), d_v = q.shape, values.shape[3]
    output = q.new_empty(rows, heads, d_v)
    q, new_k, new_v = (x if x.stride(1) == x.shape[2] else x.contiguous() for x in (q, *(new or (q, q))))
    _lookup[(rows, heads)](
        q,
        new_k,
        new_v,
        keys,
        values,
        origin,
        length,
        output,
        scale * math.log2(math.e),
        window,
        heads,
        keys.shape[1],
        *(x.stride(0) for x in (q, new_k, new_v)),
        *origin.stride(),
        d_k=d_k,
        d_v=d_v,
        width_k=triton.next_power_of_2(d_k),
        width_v=triton.next_power_of_2(d_v),
        has_new=new is not None,
        block=BLOCK,
        num_warps=WARPS,
    )
    return output


def reorder(origin: Tensor, rows: Tensor, length: Tensor, beam: int) -> None:
    """Reorder the cache indirection table `origin` (rows, capacity) in place: row r continues row `rows[r]`.

    Both rows belong to the same sentence of `beam` rows. Positions before `length[r]` are copied; the position
    `length[r]` is stored in row r itself.
    """
    if triton is not None and origin.is_cuda:
        return reorder_kernel(origin, rows, length, beam)
    origin.copy_(origin.index_select(0, rows))
    origin.scatter_(1, length[:, None], torch.arange(len(origin), device=origin.device, dtype=origin.dtype)[:, None])


def reorder_kernel(origin: Tensor, rows: Tensor, length: Tensor, beam: int) -> None:
    count, block_rows = len(origin) // beam, triton.next_power_of_2(beam)
    _reorder[(count,)](
        origin, rows, length, origin.shape[1], beam, block_rows=block_rows, block=64, num_warps=1, num_stages=1
    )


def add_norm_kernel(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Tensor:
    """norm(x + y) of a LayerNorm, without gradients."""
    x, y = x.contiguous(), y.contiguous()
    normed, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    rows = x.numel() // width
    _add_norm[(rows,)](x, y, norm.weight, norm.bias, normed, norm.eps, width, block=block, num_warps=4)
    return normed


def scan_kernel(logits: Tensor, never: Tensor, early: Tensor | None, eos: int) -> tuple[Tensor, Tensor]:
    """Run `_scan`, the kernel of `search_kernels.scan`: log Σ exp of each row and the maximum of each chunk."""
    rows, vocab = logits.shape
    total = logits.new_empty(rows, dtype=torch.float)
    largest = logits.new_empty(rows, -(-vocab // CHUNK), dtype=torch.float)
    step = math.gcd(vocab, logits.stride(0), 8)  # a known divisor of the strides allows vectorised loads
    _scan[(rows,)](
        logits,
        never,
        never if early is None else early,
        total,
        largest,
        vocab // step,
        largest.shape[1],
        eos,
        logits.stride(0) // step,
        has_early=early is not None,
        step=step,
        chunk=CHUNK,
        chunks=64,
        num_warps=8,
    )
    return total, largest


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _scan(  # type: ignore[no-untyped-def]
        logits,
        never,
        early,
        total,
        largest,
        vocab,
        count,
        eos,
        logits_row,
        has_early: tl.constexpr,
        step: tl.constexpr,
        chunk: tl.constexpr,
        chunks: tl.constexpr,
    ):
        """One program per row: online log Σ exp with a running maximum and sum for each chunk of a block."""
        row = tl.program_id(0).to(tl.int64)
        vocab *= step
        logits += row * logits_row * step
        largest += row * count
        inside = tl.arange(0, chunks)[:, None] * chunk + tl.arange(0, chunk)
        highest = tl.full((chunks,), -1e30, tl.float32)  # not -inf: -inf - (-inf) is NaN
        summed = tl.zeros((chunks,), tl.float32)
        for start in range(0, count, chunks):
            token = start * chunk + inside
            value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            block_maximum = tl.max(value, axis=1)
            index = start + tl.arange(0, chunks)
            tl.store(largest + index, block_maximum, mask=index < count)
            new_highest = tl.maximum(highest, block_maximum)
            summed = summed * tl.exp(highest - new_highest) + tl.sum(tl.exp(value - new_highest[:, None]), axis=1)
            highest = new_highest
        overall = tl.max(highest, axis=0)
        tl.store(total + row, overall + tl.log(tl.sum(summed * tl.exp(highest - overall), axis=0)))
        # Set forbidden tokens to -inf, and compute the maximum of their chunks again.
        first, second = tl.load(never).to(tl.int32), tl.load(never + 1).to(tl.int32)
        third = first
        if has_early:
            third = tl.where(tl.load(early + row) != 0, eos, first)
        tl.debug_barrier()  # all logits are read and all chunk maxima are stored
        forbidden = tl.full((), float("-inf"), logits.dtype.element_ty)
        tl.store(logits + first, forbidden)
        tl.store(logits + second, forbidden)
        tl.store(logits + third, forbidden)
        tl.debug_barrier()
        for i in tl.static_range(3):
            changed = (first if i == 0 else second if i == 1 else third) // chunk
            tokens = changed * chunk + tl.arange(0, chunk)
            values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
            tl.store(largest + changed, tl.max(values, axis=0))

    @triton.jit  # type: ignore[untyped-decorator]
    def _lookup(  # type: ignore[no-untyped-def]
        q,
        new_k,
        new_v,
        keys,
        values,
        origin,
        length,
        output,
        scale,
        window,
        heads,
        capacity,
        q_row,
        new_k_row,
        new_v_row,
        origin_row,
        origin_position,
        d_k: tl.constexpr,
        d_v: tl.constexpr,
        width_k: tl.constexpr,
        width_v: tl.constexpr,
        has_new: tl.constexpr,
        block: tl.constexpr,
    ):
        """One program per row and head: online softmax over blocks of positions."""
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        in_k, in_v = tl.arange(0, width_k), tl.arange(0, width_v)
        real_k, real_v = in_k < d_k, in_v < d_v
        query = tl.load(q + row * q_row + head * d_k + in_k, mask=real_k, other=0.0).to(tl.float32)
        count = tl.load(length + row).to(tl.int32)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        mean = tl.zeros((width_v,), tl.float32)
        first = 0
        if has_new:
            newest_k = tl.load(new_k + row * new_k_row + head * d_k + in_k, mask=real_k, other=0.0)
            newest_v = tl.load(new_v + row * new_v_row + head * d_v + in_v, mask=real_v, other=0.0)
            end = (row * capacity + count) * heads + head
            tl.store(keys + end * d_k + in_k, newest_k, mask=real_k)
            tl.store(values + end * d_v + in_v, newest_v, mask=real_v)
            largest = tl.sum(newest_k.to(tl.float32) * query, axis=0) * scale
            total += 1.0
            mean += newest_v.to(tl.float32)
            if window > 0:
                first = tl.maximum(0, count - window)
        elif window > 0:
            first = tl.maximum(0, count - 1 - window)
        for start in range(first, count, block):
            position = start + tl.arange(0, block)
            real = position < count
            source = tl.load(origin + row * origin_row + position * origin_position, mask=real, other=0).to(tl.int64)
            place = (source * capacity + position) * heads + head
            k = tl.load(keys + (place * d_k)[:, None] + in_k, mask=real[:, None] & real_k, other=0.0).to(tl.float32)
            v = tl.load(values + (place * d_v)[:, None] + in_v, mask=real[:, None] & real_v, other=0.0).to(tl.float32)
            score = tl.where(real, tl.sum(k * query, axis=1) * scale, float("-inf"))
            highest = tl.maximum(largest, tl.max(score, axis=0))
            shrink = tl.exp2(largest - highest)  # scores are exponents of 2
            weight = tl.exp2(score - highest)
            total = total * shrink + tl.sum(weight, axis=0)
            mean = mean * shrink + tl.sum(v * weight[:, None], axis=0)
            largest = highest
        result = (mean / total).to(output.dtype.element_ty)
        tl.store(output + (row * heads + head) * d_v + in_v, result, mask=real_v)

    @triton.jit  # type: ignore[untyped-decorator]
    def _reorder(origin, rows, length, capacity, beam, block_rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program per sentence, with rows of equal length: load a block of all rows, then store it."""
        first = tl.program_id(0).to(tl.int64) * beam
        real = tl.arange(0, block_rows) < beam
        row = first + tl.arange(0, block_rows)
        source = tl.load(rows + row, mask=real, other=0)
        count = tl.load(length + first).to(tl.int32)
        for start in range(0, count, block):
            position = start + tl.arange(0, block)
            inside = real[:, None] & (position < count)[None, :]
            entries = tl.load(origin + source[:, None] * capacity + position[None, :], mask=inside, other=0)
            tl.debug_barrier()
            tl.store(origin + row[:, None] * capacity + position[None, :], entries, mask=inside)
        tl.store(origin + row * capacity + count, row.to(tl.int32), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_norm(x, y, weight, bias, normed, eps, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program per position."""
        row = tl.program_id(0).to(tl.int64) * width
        inside = tl.arange(0, block)
        real = inside < width
        total = tl.load(x + row + inside, mask=real, other=0.0).to(tl.float32)
        total += tl.load(y + row + inside, mask=real, other=0.0).to(tl.float32)
        mean = tl.sum(total, axis=0) / width
        centred = tl.where(real, total - mean, 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
        result = centred * scale * tl.load(weight + inside, mask=real, other=0.0).to(tl.float32)
        result += tl.load(bias + inside, mask=real, other=0.0).to(tl.float32)
        tl.store(normed + row + inside, result.to(normed.dtype.element_ty), mask=real)
