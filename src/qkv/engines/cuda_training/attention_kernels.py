"""Attention (equation 1) inside packed sentences, forward and backward: one tile for each sentence and head.

Most sentences are short: all scores of a sentence fit into the registers of one core. So there are no blocks, the
backward pass needs the inputs only, and each element is read and written once. Sentences of similar length share a
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

WARPS = {16: 1, 32: 2, 64: 4, 128: 8}  # of tiles that are computed whole
WIDEST = 256  # bytes in a row of such a tile: its scores must fit into a core


def attend(qkv: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> Tensor:
    """softmax(qkᵀ · scale)v inside each row: (queries, heads · d_v)."""
    chosen = attend_kernel if triton is not None and qkv[0].is_cuda else attend_plain
    return chosen(qkv, rows, heads, noise)


def attend_backward(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> None:
    """Write the gradients of q, k and v into tensors with the same layout."""
    chosen = attend_backward_kernel if triton is not None and d_out.is_cuda else attend_backward_plain
    chosen(d_out, qkv, into, rows, heads, noise)


def attend_plain(qkv: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> Tensor:
    out = qkv[0].new_zeros(len(qkv[0]), heads.count * heads.d_v)
    for square in _squares(rows):
        q, k, v = square.cut(qkv, heads)
        mixed = square.dropped(square.weights(q, k, heads), heads, noise) @ v
        out[square.queries[square.real_queries]] = _joined(mixed)[square.real_queries].to(out.dtype)
    return out


def attend_backward_plain(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> None:
    for square in _squares(rows):
        q, k, v = square.cut(qkv, heads)
        given = _split(d_out[square.queries] * square.real_queries[..., None], heads)
        weights = square.weights(q, k, heads)
        d_v = square.dropped(weights, heads, noise).mT @ given
        d_weights = square.dropped(given @ v.mT, heads, noise)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * heads.scale
        found = (d_scores @ k, d_scores.mT @ q, d_v)
        places = ((square.queries, square.real_queries), *[(square.keys, square.real_keys)] * 2)
        for whole, part, (where, real) in zip(into, found, places, strict=True):
            whole[where[real]] = _joined(part)[real].to(whole.dtype)


@dataclass(frozen=True)
class _Square:
    """All rows of one tile, padded to the longest of them."""

    tile: int
    first: int  # row
    queries: Tensor  # (rows, side): their places; those beyond the end of a row are not real
    keys: Tensor
    real_queries: Tensor
    real_keys: Tensor

    def cut(self, qkv: QKV, heads: Heads) -> QKV:
        """The projections of these rows, (rows, heads, side, width) each."""
        q, k, v = (_split(x[at], heads) for x, at in zip(qkv, (self.queries, self.keys, self.keys), strict=True))
        return q, k, v

    def weights(self, q: Tensor, k: Tensor, heads: Heads) -> Tensor:
        """(rows, heads, side, side), 0 where there is no key."""
        seen = self.real_keys[:, None, None]
        if heads.causal:
            seen = seen & seen.new_ones(seen.shape[-1], seen.shape[-1]).tril()
        scores = (q @ k.mT).mul_(heads.scale).masked_fill_(~seen, -1e30)
        return scores.softmax(-1).masked_fill_(~seen, 0.0)

    def dropped(self, weights: Tensor, heads: Heads, noise: DropoutHash) -> Tensor:
        """Apply dropout to weights or their gradients; elements are numbered in the order of the tiles."""
        if not noise.rate:
            return weights
        rows, count, side, _ = weights.shape
        row, head, i, j = (torch.arange(n, device=weights.device) for n in (rows, count, side, side))
        tiles = (self.first + row[:, None]) * heads.count + head
        index = (tiles[..., None, None] * self.tile + i[:, None]) * self.tile + j
        return drop(weights, noise, index.to(torch.int32))  # larger numbers wrap around, as in a kernel


def _squares(rows: Rows) -> Iterator[_Square]:
    first = rows.first.tolist()
    for tile, start, end in zip(TILES, first, first[1:], strict=False):
        if start == end:
            continue
        both = rows.queries.long(), rows.keys.long()
        bounds = [(starts[start:end, None], starts[start + 1 : end + 1, None]) for starts in both]
        inside = torch.arange(int(max((stop - begin).max() for begin, stop in bounds)), device=rows.first.device)
        sides = [(begin + inside, begin + inside < stop) for begin, stop in bounds]
        (queries, real_queries), (keys, real_keys) = sides
        last = [int(starts[-1]) - 1 for starts in both]
        yield _Square(tile, start, queries.clamp(max=last[0]), keys.clamp(max=last[1]), real_queries, real_keys)


def _split(x: Tensor, heads: Heads) -> Tensor:
    """(rows, side, heads · width) → (rows, heads, side, width)"""
    split: Tensor = x.float().unflatten(2, (heads.count, -1))
    return split.transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend_kernel(qkv: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> Tensor:
    out = qkv[0].new_empty(len(qkv[0]), heads.count * heads.d_v)
    for number, tile in enumerate(TILES):
        if not rows.most[number]:
            continue
        given = *qkv, out, *arguments(qkv, number, rows, heads, noise)
        if tile * out.itemsize > WIDEST:
            long_attention_kernels.attend(given, rows.most[number], constants(tile, heads, noise))
        else:
            _attend[(rows.most[number], heads.count)](*given, **constants(tile, heads, noise), num_warps=WARPS[tile])
    return out


def attend_backward_kernel(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: DropoutHash) -> None:
    strides = [x.stride(0) for x in into]
    for number, tile in enumerate(TILES):
        if not rows.most[number]:
            continue
        given = d_out, *qkv, *into, *arguments(qkv, number, rows, heads, noise), *strides
        if tile * d_out.itemsize > WIDEST:
            long_attention_kernels.attend_backward(given, len(d_out), rows.most[number], constants(tile, heads, noise))
        else:
            _attend_backward[(rows.most[number], heads.count)](
                *given, **constants(tile, heads, noise), num_warps=WARPS[tile]
            )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _softmax(query, key, scale, at, k_count, causal: tl.constexpr):  # type: ignore[no-untyped-def]
        """The weights (tile, tile) of a whole row, 0 where there is no key."""
        score, seen = scores(query, key, scale, at, at, k_count, causal)
        weight = tl.where(seen, tl.exp2(score - tl.max(score, axis=1)[:, None]), 0.0)
        total = tl.sum(weight, axis=1)[:, None]
        return weight / tl.where(total > 0, total, 1.0)  # a row of padding may have no key at all

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
        found = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        write(out, found, q_start, at, q_count, heads * d_v, head * d_v, d_v, width_v)

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
        given = read(d_out, q_start, at, q_count, heads * d_v, head * d_v, d_v, width_v)
        weight = _softmax(query, key, scale, at, k_count, causal)
        d_weight = tl.dot(given, tl.trans(value), input_precision="ieee")  # (queries, keys)
        dropped = weight
        if threshold > 0:
            index = ((row * heads + head) * tile + at[:, None]) * tile + at[None]
            stays = _keep(index, seed, salt, threshold)
            dropped = tl.where(stays, weight * factor, 0.0)
            d_weight = tl.where(stays, d_weight * factor, 0.0)
        gradient = tl.dot(tl.trans(dropped.to(given.dtype)), given, input_precision="ieee")
        write(d_v_out, gradient, k_start, at, k_count, d_v_row, head * d_v, d_v, width_v)
        # Softmax: a score's gradient is its weight times (gradient of the weight − mean gradient).
        d_score = weight * (d_weight - tl.sum(weight * d_weight, axis=1)[:, None])
        d_score = (d_score * (scale * LN_2)).to(query.dtype)
        gradient_q = tl.dot(d_score, key, input_precision="ieee")
        write(d_q, gradient_q, q_start, at, q_count, d_q_row, head * d_k, d_k, width_k)
        gradient_k = tl.dot(tl.trans(d_score), query, input_precision="ieee")
        write(d_k_out, gradient_k, k_start, at, k_count, d_k_row, head * d_k, d_k, width_k)
