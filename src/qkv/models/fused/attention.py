"""Attention (equation 1) inside sentences that lie end to end, forward and backward: one tile a sentence and head.

Sentences are short: all scores of one fit into the registers of a core, so nothing is computed in blocks, nothing is
kept for the backward pass but what came in, and each element is read and written once. Sentences of like length share a
launch, because a tile is a square with room for the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.data.ragged import TILES
from qkv.models.fused.noise import Noise, drop
from qkv.models.kernels import tl, triton

if triton is not None:
    from qkv.models.fused.noise import _keep

QKV = tuple[Tensor, Tensor, Tensor]  # (tokens, heads · width) each
WARPS = {16: 1, 32: 2, 64: 4, 128: 8}


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


def attend(qkv: QKV, rows: Rows, heads: Heads, noise: Noise) -> Tensor:
    """softmax(qkᵀ · scale)v inside each row: (queries, heads · d_v)."""
    chosen = attend_kernel if triton is not None and qkv[0].is_cuda else attend_plain
    return chosen(qkv, rows, heads, noise)


def attend_backward(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: Noise) -> None:
    """The gradients of q, k and v, written into tensors that lie like them."""
    chosen = attend_backward_kernel if triton is not None and d_out.is_cuda else attend_backward_plain
    chosen(d_out, qkv, into, rows, heads, noise)


def attend_plain(qkv: QKV, rows: Rows, heads: Heads, noise: Noise) -> Tensor:
    out = qkv[0].new_zeros(len(qkv[0]), heads.count * heads.d_v)
    for square in _squares(rows):
        q, k, v = square.cut(qkv, heads)
        mixed = square.dropped(square.weights(q, k, heads), heads, noise) @ v
        out[square.queries[square.real_queries]] = _joined(mixed)[square.real_queries].to(out.dtype)
    return out


def attend_backward_plain(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: Noise) -> None:
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
    """All rows of one tile, padded to its side."""

    first: int  # row
    queries: Tensor  # (rows, tile): their places; those beyond the end of a row are not real
    keys: Tensor
    real_queries: Tensor
    real_keys: Tensor

    def cut(self, qkv: QKV, heads: Heads) -> QKV:
        """The projections of these rows, (rows, heads, tile, width) each."""
        q, k, v = (_split(x[at], heads) for x, at in zip(qkv, (self.queries, self.keys, self.keys), strict=True))
        return q, k, v

    def weights(self, q: Tensor, k: Tensor, heads: Heads) -> Tensor:
        """(rows, heads, tile, tile), 0 where there is no key."""
        seen = self.real_keys[:, None, None]
        if heads.causal:
            seen = seen & seen.new_ones(seen.shape[-1], seen.shape[-1]).tril()
        scores = (q @ k.mT).mul_(heads.scale).masked_fill_(~seen, -1e30)
        return scores.softmax(-1).masked_fill_(~seen, 0.0)

    def dropped(self, weights: Tensor, heads: Heads, noise: Noise) -> Tensor:
        """Dropout of weights, or of their gradients; they are numbered as the tiles lie."""
        return drop(weights, noise, first=self.first * heads.count * weights.shape[-1] ** 2)


def _squares(rows: Rows) -> Iterator[_Square]:
    first = rows.first.tolist()
    for tile, start, end in zip(TILES, first, first[1:], strict=False):
        if start == end:
            continue
        inside, sides = torch.arange(tile, device=rows.first.device), []
        for starts in (rows.queries, rows.keys):
            begin, stop = starts[start:end, None].long(), starts[start + 1 : end + 1, None].long()
            sides.append((begin + inside, begin + inside < stop))
        (queries, real_queries), (keys, real_keys) = sides
        last = [int(starts[-1]) - 1 for starts in (rows.queries, rows.keys)]
        yield _Square(start, queries.clamp(max=last[0]), keys.clamp(max=last[1]), real_queries, real_keys)


def _split(x: Tensor, heads: Heads) -> Tensor:
    """(rows, tile, heads · width) → (rows, heads, tile, width)"""
    split: Tensor = x.float().unflatten(2, (heads.count, -1))
    return split.transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend_kernel(qkv: QKV, rows: Rows, heads: Heads, noise: Noise) -> Tensor:
    out = qkv[0].new_empty(len(qkv[0]), heads.count * heads.d_v)
    for number, tile in enumerate(TILES):
        if rows.most[number]:
            _attend[(rows.most[number], heads.count)](
                *qkv,
                out,
                *_common(qkv, number, rows, heads, noise),
                **_sizes(tile, heads, noise),
                num_warps=WARPS[tile],
            )
    return out


def attend_backward_kernel(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: Noise) -> None:
    for number, tile in enumerate(TILES):
        if rows.most[number]:
            _attend_backward[(rows.most[number], heads.count)](
                d_out,
                *qkv,
                *into,
                *_common(qkv, number, rows, heads, noise),
                *(x.stride(0) for x in into),
                **_sizes(tile, heads, noise),
                num_warps=WARPS[tile],
            )


def _common(qkv: QKV, number: int, rows: Rows, heads: Heads, noise: Noise) -> tuple[object, ...]:
    strides = (x.stride(0) for x in qkv)
    scale = heads.scale * math.log2(math.e)
    return (rows.queries, rows.keys, rows.first[number:], noise.seed, noise.salt, scale, noise.scale, *strides)


def _sizes(tile: int, heads: Heads, noise: Noise) -> dict[str, object]:
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

    @triton.jit  # type: ignore[untyped-decorator]
    def _softmax(query, key, scale, q_count, k_count, tile: tl.constexpr, causal: tl.constexpr):  # type: ignore[no-untyped-def]
        """The weights (tile, tile) of a whole row, 0 where there is no key."""
        i, j = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None]
        seen = j < k_count
        if causal:
            seen = seen & (j <= i)
        score = tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30)
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
        at = tl.arange(0, tile)[:, None]
        in_k, in_v = tl.arange(0, width_k)[None], tl.arange(0, width_v)[None]
        q_real, k_real, v_real = (
            (at < q_count) & (in_k < d_k),
            (at < k_count) & (in_k < d_k),
            (at < k_count) & (in_v < d_v),
        )
        query = tl.load(q + (q_start + at) * q_row + head * d_k + in_k, mask=q_real, other=0.0)
        key = tl.load(k + (k_start + at) * k_row + head * d_k + in_k, mask=k_real, other=0.0)
        value = tl.load(v + (k_start + at) * v_row + head * d_v + in_v, mask=v_real, other=0.0)
        weight = _softmax(query, key, scale, q_count, k_count, tile, causal)
        if threshold > 0:
            index = ((row * heads + head) * tile + at) * tile + tl.arange(0, tile)[None]
            weight = tl.where(_keep(index, seed, salt, threshold), weight * factor, 0.0)
        found = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        place = out + (q_start + at) * (heads * d_v) + head * d_v + in_v
        tl.store(place, found.to(out.dtype.element_ty), mask=(at < q_count) & (in_v < d_v))

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
        at = tl.arange(0, tile)[:, None]
        in_k, in_v = tl.arange(0, width_k)[None], tl.arange(0, width_v)[None]
        q_real, k_real, v_real = (
            (at < q_count) & (in_k < d_k),
            (at < k_count) & (in_k < d_k),
            (at < k_count) & (in_v < d_v),
        )
        query = tl.load(q + (q_start + at) * q_row + head * d_k + in_k, mask=q_real, other=0.0)
        key = tl.load(k + (k_start + at) * k_row + head * d_k + in_k, mask=k_real, other=0.0)
        value = tl.load(v + (k_start + at) * v_row + head * d_v + in_v, mask=v_real, other=0.0)
        o_real = (at < q_count) & (in_v < d_v)
        given = tl.load(d_out + (q_start + at) * (heads * d_v) + head * d_v + in_v, mask=o_real, other=0.0)
        weight = _softmax(query, key, scale, q_count, k_count, tile, causal)
        d_weight = tl.dot(given, tl.trans(value), input_precision="ieee")  # (queries, keys)
        dropped = weight
        if threshold > 0:
            index = ((row * heads + head) * tile + at) * tile + tl.arange(0, tile)[None]
            stays = _keep(index, seed, salt, threshold)
            dropped = tl.where(stays, weight * factor, 0.0)
            d_weight = tl.where(stays, d_weight * factor, 0.0)
        gradient = tl.dot(tl.trans(dropped.to(given.dtype)), given, input_precision="ieee")
        tl.store(
            d_v_out + (k_start + at) * d_v_row + head * d_v + in_v, gradient.to(d_v_out.dtype.element_ty), mask=v_real
        )
        # Through the softmax: each score's gradient is its weight times how far its own lies above the mean.
        d_score = weight * (d_weight - tl.sum(weight * d_weight, axis=1)[:, None])
        d_score = (d_score * (scale * 0.6931471805599453)).to(query.dtype)  # the scale was in powers of 2
        gradient_q = tl.dot(d_score, key, input_precision="ieee")
        tl.store(d_q + (q_start + at) * d_q_row + head * d_k + in_k, gradient_q.to(d_q.dtype.element_ty), mask=q_real)
        gradient_k = tl.dot(tl.trans(d_score), query, input_precision="ieee")
        tl.store(
            d_k_out + (k_start + at) * d_k_row + head * d_k + in_k, gradient_k.to(d_k_out.dtype.element_ty), mask=k_real
        )
