"""Attention (equation 1) inside packed sentences, forward and backward: one tile for each sentence and head.

Most sentences are short: all scores of a sentence fit into the registers of one core. No blocks are needed, the
backward pass needs only the inputs, and each element is read and written once. Sentences of similar length share a
launch, because a tile is a square for the longest of them. `long_attention_kernels` computes longer sentences block by
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.engines.cuda_decoding.inference_kernels import tl, triton
from qkv.engines.cuda_training import long_attention_kernels
from qkv.engines.cuda_training.elementwise_kernels import QKV, DropoutHash, Heads, Rows, arguments, constants, drop
from qkv.engines.cuda_training.packed_batch import TILES

if triton is not None:
    from qkv.engines.cuda_training.elementwise_kernels import LN_2, _keep, read, scores, write

WARPS = {16: 1, 32: 2, 64: 4, 128: 8}  # warps per program, by tile size
WIDEST = 256  # bytes in a row of a tile; the scores of larger tiles exceed the registers of a core


def attend(qkv: QKV, rows: Rows, heads: Heads, dropout: DropoutHash) -> Tensor:
    """Return softmax(qkᵀ · scale)v inside each row: (queries, heads · d_v)."""
    if triton is not None and qkv[0].is_cuda:
        return attend_kernel(qkv, rows, heads, dropout)
    out = qkv[0].new_zeros(len(qkv[0]), heads.count * heads.d_v)
    for square in _squares(rows):
        q, k, v = square.cut(qkv, heads)
        mixed = square.dropped(square.weights(q, k, heads), heads, dropout) @ v
        out[square.queries[square.real_queries]] = _joined(mixed)[square.real_queries].to(out.dtype)
    return out


def attend_backward(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, dropout: DropoutHash) -> None:
    """Write the gradients of q, k and v into tensors with the same layout."""
    if triton is not None and d_out.is_cuda:
        return attend_backward_kernel(d_out, qkv, into, rows, heads, dropout)
    for square in _squares(rows):
        q, k, v = square.cut(qkv, heads)
        d_output = _split(d_out[square.queries] * square.real_queries[..., None], heads)
        weights = square.weights(q, k, heads)
        d_v = square.dropped(weights, heads, dropout).mT @ d_output
        d_weights = square.dropped(d_output @ v.mT, heads, dropout)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * heads.scale
        gradients = (d_scores @ k, d_scores.mT @ q, d_v)
        places = ((square.queries, square.real_queries), *[(square.keys, square.real_keys)] * 2)
        for target, part, (indices, real) in zip(into, gradients, places, strict=True):
            target[indices[real]] = _joined(part)[real].to(target.dtype)


@dataclass(frozen=True)
class _Square:
    """All rows of one tile, padded to the longest of them."""

    tile: int
    first: int  # row
    queries: Tensor  # (rows, side): token indices; positions after the end of a row are not real
    keys: Tensor
    real_queries: Tensor
    real_keys: Tensor

    def cut(self, qkv: QKV, heads: Heads) -> QKV:
        """Gather q, k and v of these rows, (rows, heads, side, width) each."""
        return tuple(_split(x[at], heads) for x, at in zip(qkv, (self.queries, self.keys, self.keys), strict=True))

    def weights(self, q: Tensor, k: Tensor, heads: Heads) -> Tensor:
        """Return the attention weights (rows, heads, side, side), 0 for masked keys."""
        visible = self.real_keys[:, None, None]
        if heads.causal:
            visible = visible & visible.new_ones(visible.shape[-1], visible.shape[-1]).tril()
        scores = (q @ k.mT).mul_(heads.scale).masked_fill_(~visible, -1e30)
        return scores.softmax(-1).masked_fill_(~visible, 0.0)

    def dropped(self, weights: Tensor, heads: Heads, dropout: DropoutHash) -> Tensor:
        """Apply dropout to weights or their gradients, with the kernel's mask: elements are numbered by tile."""
        if not dropout.rate:
            return weights
        rows, count, side, _ = weights.shape
        row, head, i, j = (torch.arange(n, device=weights.device) for n in (rows, count, side, side))
        tiles = (self.first + row[:, None]) * heads.count + head
        index = (tiles[..., None, None] * self.tile + i[:, None]) * self.tile + j
        return drop(weights, dropout, index.to(torch.int32))  # larger indices wrap around, as in the kernel


def _squares(rows: Rows) -> Iterator[_Square]:
    """Yield the rows of each tile as padded squares."""
    first = rows.first.tolist()
    for tile, start, end in zip(TILES, first, first[1:], strict=False):
        if start == end:
            continue
        starts_of_sides = rows.queries.long(), rows.keys.long()
        bounds = [(starts[start:end, None], starts[start + 1 : end + 1, None]) for starts in starts_of_sides]
        inside = torch.arange(int(max((stop - begin).max() for begin, stop in bounds)), device=rows.first.device)
        sides = [(begin + inside, begin + inside < stop) for begin, stop in bounds]
        (queries, real_queries), (keys, real_keys) = sides
        last = [int(starts[-1]) - 1 for starts in starts_of_sides]
        yield _Square(tile, start, queries.clamp(max=last[0]), keys.clamp(max=last[1]), real_queries, real_keys)


def _split(x: Tensor, heads: Heads) -> Tensor:
    """(rows, side, heads · width) → (rows, heads, side, width)"""
    split: Tensor = x.float().unflatten(2, (heads.count, -1))
    return split.transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """(rows, heads, side, width) → (rows, side, heads · width)"""
    return x.transpose(1, 2).flatten(2)


def attend_kernel(qkv: QKV, rows: Rows, heads: Heads, dropout: DropoutHash) -> Tensor:
    out = qkv[0].new_empty(len(qkv[0]), heads.count * heads.d_v)
    for number, tile in enumerate(TILES):
        if not rows.most[number]:
            continue
        inputs = *qkv, out, *arguments(qkv, number, rows, heads, dropout)
        if tile * out.itemsize > WIDEST:
            long_attention_kernels.attend(inputs, rows.most[number], constants(tile, heads, dropout))
        else:
            _attend[(rows.most[number], heads.count)](*inputs, **constants(tile, heads, dropout), num_warps=WARPS[tile])
    return out


def attend_backward_kernel(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, dropout: DropoutHash) -> None:
    strides = [x.stride(0) for x in into]
    for number, tile in enumerate(TILES):
        if not rows.most[number]:
            continue
        inputs = d_out, *qkv, *into, *arguments(qkv, number, rows, heads, dropout), *strides
        if tile * d_out.itemsize > WIDEST:
            long_attention_kernels.attend_backward(
                inputs, len(d_out), rows.most[number], constants(tile, heads, dropout)
            )
        else:
            _attend_backward[(rows.most[number], heads.count)](
                *inputs, **constants(tile, heads, dropout), num_warps=WARPS[tile]
            )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _softmax(query, key, scale, at, k_count, causal: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the attention weights (tile, tile) of a row, 0 for masked keys."""
        score, visible = scores(query, key, scale, at, at, k_count, causal)
        weight = tl.where(visible, tl.exp2(score - tl.max(score, axis=1)[:, None]), 0.0)
        total = tl.sum(weight, axis=1)[:, None]
        return weight / tl.where(total > 0, total, 1.0)  # a row of padding may have no keys

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _attend(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        out,
        queries,
        keys,
        first,
        seed,
        salt,
        scale,
        factor,
        q_row,
        k_row,
        v_row,
        heads: tl.constexpr,
        d_k: tl.constexpr,
        d_v: tl.constexpr,
        width_k: tl.constexpr,
        width_v: tl.constexpr,
        causal: tl.constexpr,
        tile: tl.constexpr,
        threshold: tl.constexpr,
    ):
        row, head = tl.load(first) + tl.program_id(0), tl.program_id(1)
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        at = tl.arange(0, tile)
        query = read(q, q_start, at, q_count, q_row, head * d_k, d_k, width_k)
        key = read(k, k_start, at, k_count, k_row, head * d_k, d_k, width_k)
        value = read(v, k_start, at, k_count, v_row, head * d_v, d_v, width_v)
        weight = _softmax(query, key, scale, at, k_count, causal)
        if threshold > 0:
            index = ((row * heads + head) * tile + at[:, None]) * tile + at[None]
            weight = tl.where(_keep(index, seed, salt, threshold), weight * factor, 0.0)
        output = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        write(out, output, q_start, at, q_count, heads * d_v, head * d_v, d_v, width_v)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _attend_backward(  # type: ignore[no-untyped-def]
        d_out,
        q,
        k,
        v,
        d_q,
        d_k_out,
        d_v_out,
        queries,
        keys,
        first,
        seed,
        salt,
        scale,
        factor,
        q_row,
        k_row,
        v_row,
        d_q_row,
        d_k_row,
        d_v_row,
        heads: tl.constexpr,
        d_k: tl.constexpr,
        d_v: tl.constexpr,
        width_k: tl.constexpr,
        width_v: tl.constexpr,
        causal: tl.constexpr,
        tile: tl.constexpr,
        threshold: tl.constexpr,
    ):
        row, head = tl.load(first) + tl.program_id(0), tl.program_id(1)
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        at = tl.arange(0, tile)
        query = read(q, q_start, at, q_count, q_row, head * d_k, d_k, width_k)
        key = read(k, k_start, at, k_count, k_row, head * d_k, d_k, width_k)
        value = read(v, k_start, at, k_count, v_row, head * d_v, d_v, width_v)
        d_output = read(d_out, q_start, at, q_count, heads * d_v, head * d_v, d_v, width_v)
        weight = _softmax(query, key, scale, at, k_count, causal)
        d_weight = tl.dot(d_output, tl.trans(value), input_precision="ieee")  # (queries, keys)
        dropped = weight
        if threshold > 0:
            index = ((row * heads + head) * tile + at[:, None]) * tile + at[None]
            stays = _keep(index, seed, salt, threshold)
            dropped = tl.where(stays, weight * factor, 0.0)
            d_weight = tl.where(stays, d_weight * factor, 0.0)
        gradient = tl.dot(tl.trans(dropped.to(d_output.dtype)), d_output, input_precision="ieee")
        write(d_v_out, gradient, k_start, at, k_count, d_v_row, head * d_v, d_v, width_v)
        # Softmax: a score's gradient is its weight times (gradient of the weight − mean gradient).
        d_score = weight * (d_weight - tl.sum(weight * d_weight, axis=1)[:, None])
        d_score = (d_score * (scale * LN_2)).to(query.dtype)
        gradient_q = tl.dot(d_score, key, input_precision="ieee")
        write(d_q, gradient_q, q_start, at, q_count, d_q_row, head * d_k, d_k, width_k)
        gradient_k = tl.dot(tl.trans(d_score), query, input_precision="ieee")
        write(d_k_out, gradient_k, k_start, at, k_count, d_k_row, head * d_k, d_k, width_k)
