"""Attention (equation 1) inside sentences that lie end to end, forward and backward: one tile a sentence and head.

Sentences are short: all scores of one fit into the registers of a core, so nothing is computed in blocks, nothing is
kept for the backward pass but what came in, and each element is read and written once. Sentences of like length share a
launch, because a tile is a square with room for the longest of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.models.fused.noise import Noise, kept
from qkv.models.kernels import tl, triton

if triton is not None:
    from qkv.models.fused.noise import _keep

TILES = (16, 32, 64, 128)  # sides of a tile; longer sentences are for other means
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
    q, k, v = qkv
    out = q.new_zeros(len(q), heads.count * heads.d_v)
    for row, tile, queries, keys in _each(rows):
        part, _ = _weights(q[queries], k[keys], row, tile, heads, noise)
        mixed = part @ v[keys].float().unflatten(1, (heads.count, -1)).transpose(0, 1)
        out[queries] = mixed.transpose(0, 1).flatten(1).to(out.dtype)
    return out


def attend_backward_plain(d_out: Tensor, qkv: QKV, into: QKV, rows: Rows, heads: Heads, noise: Noise) -> None:
    q, k, v = qkv
    for row, tile, queries, keys in _each(rows):
        with torch.enable_grad():
            own = [x.detach().float().requires_grad_() for x in (q[queries], k[keys], v[keys])]
            part, _ = _weights(own[0], own[1], row, tile, heads, noise)
            mixed = part @ own[2].unflatten(1, (heads.count, -1)).transpose(0, 1)
            found = torch.autograd.grad(mixed.transpose(0, 1).flatten(1), own, d_out[queries].float())
        for place, where, gradient in zip(into, (queries, keys, keys), found, strict=True):
            place[where] = gradient.to(place.dtype)


def _each(rows: Rows):  # type: ignore[no-untyped-def]
    """Number, tile and places of every row."""
    first, queries, keys = rows.first.tolist(), rows.queries.tolist(), rows.keys.tolist()
    for tile, start, end in zip(TILES, first, first[1:], strict=False):
        for row in range(start, end):
            yield row, tile, slice(queries[row], queries[row + 1]), slice(keys[row], keys[row + 1])


def _weights(q: Tensor, k: Tensor, row: int, tile: int, heads: Heads, noise: Noise) -> tuple[Tensor, Tensor]:
    """The weights of one row after and before dropout: (heads, queries, keys)."""
    q, k = (x.float().unflatten(1, (heads.count, -1)).transpose(0, 1) for x in (q, k))
    scores = q @ k.transpose(1, 2) * heads.scale
    if heads.causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1)
    if not noise.rate:
        return weights, weights
    head, query, key = (torch.arange(n, device=q.device) for n in weights.shape)
    index = ((row * heads.count + head)[:, None, None] * tile + query[:, None]) * tile + key
    return torch.where(kept(noise, index), weights * noise.scale, 0.0), weights


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
