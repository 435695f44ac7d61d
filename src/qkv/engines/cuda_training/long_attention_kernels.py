"""Attention inside sentences too long for one tile, forward and backward: online softmax, block by block.

These sentences are packed with the others and belong to the same pass. The backward pass computes the scores three
times: for the sums of the softmax, for the gradients of the queries, and for the gradients of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.cuda_decoding.inference_kernels import tl, triton

if triton is not None:
    from qkv.engines.cuda_training.elementwise_kernels import LN_2, _keep, read, scores, write


def attend(inputs: tuple[Any, ...], row_count: int, constants: dict[str, Any]) -> None:
    """Launch the forward kernel, with the arguments of `attention_kernels._attend`."""
    block = _block(inputs[0])
    _attend[(row_count, constants["heads"], constants["tile"] // block)](*inputs, **constants, block=block, num_warps=4)


def attend_backward(inputs: tuple[Any, ...], tokens: int, row_count: int, constants: dict[str, Any]) -> None:
    """Launch the backward kernels for `tokens` queries, with the arguments of `attention_kernels._attend_backward`."""
    d_out, block, heads = inputs[0], _block(inputs[0]), constants["heads"]
    # Sums: log₂ of the sum of the softmax, and mean gradient of the weights.
    sums = torch.empty(2, tokens, heads, device=d_out.device)
    grid = row_count, heads, constants["tile"] // block
    for kernel in (_sums, _by_queries, _by_keys):
        kernel[grid](sums[0], sums[1], *inputs, **constants, block=block, num_warps=4)


def _block(x: Tensor) -> int:
    """Return the number of queries or keys in a block."""
    return 64 if x.itemsize == 2 else 32


if triton is not None:

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
        block: tl.constexpr,
    ):
        """One program per row, head and block of queries."""
        row, head, begin = tl.load(first) + tl.program_id(0), tl.program_id(1), tl.program_id(2) * block
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        if begin >= q_count:
            return
        i = begin + tl.arange(0, block)
        query = read(q, q_start, i, q_count, q_row, head * d_k, d_k, width_k)
        highest = tl.full((block,), -1e30, tl.float32)
        total = tl.zeros((block,), tl.float32)
        output = tl.zeros((block, width_v), tl.float32)
        end = tl.minimum(k_count, begin + block) if causal else k_count
        for at in range(0, end, block):
            j = at + tl.arange(0, block)
            key = read(k, k_start, j, k_count, k_row, head * d_k, d_k, width_k)
            value = read(v, k_start, j, k_count, v_row, head * d_v, d_v, width_v)
            score, seen = scores(query, key, scale, i, j, k_count, causal)
            above = tl.maximum(highest, tl.max(score, axis=1))
            shrink = tl.exp2(highest - above)
            weight = tl.where(seen, tl.exp2(score - above[:, None]), 0.0)
            total = total * shrink + tl.sum(weight, axis=1)
            if threshold > 0:
                index = ((row * heads + head) * tile + i[:, None]) * tile + j[None]
                weight = tl.where(_keep(index, seed, salt, threshold), weight * factor, 0.0)
            mixed = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            output = output * shrink[:, None] + mixed
            highest = above
        output /= tl.where(total > 0, total, 1.0)[:, None]
        write(out, output, q_start, i, q_count, heads * d_v, head * d_v, d_v, width_v)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _sums(  # type: ignore[no-untyped-def]
        log_total,
        mean,
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
        block: tl.constexpr,
    ):
        """One program per block of queries: sums over their visible keys."""
        row, head, begin = tl.load(first) + tl.program_id(0), tl.program_id(1), tl.program_id(2) * block
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        if begin >= q_count:
            return
        i = begin + tl.arange(0, block)
        query = read(q, q_start, i, q_count, q_row, head * d_k, d_k, width_k)
        d_output = read(d_out, q_start, i, q_count, heads * d_v, head * d_v, d_v, width_v)
        highest = tl.full((block,), -1e30, tl.float32)
        total = tl.zeros((block,), tl.float32)
        moved = tl.zeros((block,), tl.float32)
        end = tl.minimum(k_count, begin + block) if causal else k_count
        for at in range(0, end, block):
            j = at + tl.arange(0, block)
            key = read(k, k_start, j, k_count, k_row, head * d_k, d_k, width_k)
            value = read(v, k_start, j, k_count, v_row, head * d_v, d_v, width_v)
            score, seen = scores(query, key, scale, i, j, k_count, causal)
            d_weight = tl.dot(d_output, tl.trans(value), input_precision="ieee")
            if threshold > 0:
                index = ((row * heads + head) * tile + i[:, None]) * tile + j[None]
                d_weight = tl.where(_keep(index, seed, salt, threshold), d_weight * factor, 0.0)
            above = tl.maximum(highest, tl.max(score, axis=1))
            shrink = tl.exp2(highest - above)
            weight = tl.where(seen, tl.exp2(score - above[:, None]), 0.0)
            total = total * shrink + tl.sum(weight, axis=1)
            moved = moved * shrink + tl.sum(weight * d_weight, axis=1)
            highest = above
        total = tl.where(total > 0, total, 1.0)
        place = (q_start + i) * heads + head
        tl.store(log_total + place, highest + tl.log2(total), mask=i < q_count)
        tl.store(mean + place, moved / total, mask=i < q_count)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _by_queries(  # type: ignore[no-untyped-def]
        log_total,
        mean,
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
        block: tl.constexpr,
    ):
        """One program per block of queries: gradients of the queries."""
        row, head, begin = tl.load(first) + tl.program_id(0), tl.program_id(1), tl.program_id(2) * block
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        if begin >= q_count:
            return
        i = begin + tl.arange(0, block)
        query = read(q, q_start, i, q_count, q_row, head * d_k, d_k, width_k)
        d_output = read(d_out, q_start, i, q_count, heads * d_v, head * d_v, d_v, width_v)
        place = (q_start + i) * heads + head
        log = tl.load(log_total + place, mask=i < q_count, other=0.0)
        middle = tl.load(mean + place, mask=i < q_count, other=0.0)
        end = tl.minimum(k_count, begin + block) if causal else k_count
        gradient = tl.zeros((block, width_k), tl.float32)
        for at in range(0, end, block):
            j = at + tl.arange(0, block)
            key = read(k, k_start, j, k_count, k_row, head * d_k, d_k, width_k)
            value = read(v, k_start, j, k_count, v_row, head * d_v, d_v, width_v)
            score, seen = scores(query, key, scale, i, j, k_count, causal)
            weight = tl.where(seen, tl.exp2(score - log[:, None]), 0.0)
            d_weight = tl.dot(d_output, tl.trans(value), input_precision="ieee")
            if threshold > 0:
                index = ((row * heads + head) * tile + i[:, None]) * tile + j[None]
                d_weight = tl.where(_keep(index, seed, salt, threshold), d_weight * factor, 0.0)
            d_score = weight * (d_weight - middle[:, None]) * (scale * LN_2)
            gradient += tl.dot(d_score.to(key.dtype), key, input_precision="ieee")
        write(d_q, gradient, q_start, i, q_count, d_q_row, head * d_k, d_k, width_k)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _by_keys(  # type: ignore[no-untyped-def]
        log_total,
        mean,
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
        block: tl.constexpr,
    ):
        """One program per block of keys: gradients of keys and values, summed over the queries that attend to them."""
        row, head, begin = tl.load(first) + tl.program_id(0), tl.program_id(1), tl.program_id(2) * block
        if row >= tl.load(first + 1):
            return
        q_start, k_start = tl.load(queries + row), tl.load(keys + row)
        q_count, k_count = tl.load(queries + row + 1) - q_start, tl.load(keys + row + 1) - k_start
        if begin >= k_count:
            return
        j = begin + tl.arange(0, block)
        key = read(k, k_start, j, k_count, k_row, head * d_k, d_k, width_k)
        value = read(v, k_start, j, k_count, v_row, head * d_v, d_v, width_v)
        gradient_k = tl.zeros((block, width_k), tl.float32)
        gradient_v = tl.zeros((block, width_v), tl.float32)
        start = begin if causal else 0
        for at in range(start, q_count, block):
            i = at + tl.arange(0, block)
            query = read(q, q_start, i, q_count, q_row, head * d_k, d_k, width_k)
            d_output = read(d_out, q_start, i, q_count, heads * d_v, head * d_v, d_v, width_v)
            place = (q_start + i) * heads + head
            log = tl.load(log_total + place, mask=i < q_count, other=0.0)
            middle = tl.load(mean + place, mask=i < q_count, other=0.0)
            score, seen = scores(query, key, scale, i, j, k_count, causal)
            seen = seen & (i < q_count)[:, None]
            weight = tl.where(seen, tl.exp2(score - log[:, None]), 0.0)
            d_weight = tl.dot(d_output, tl.trans(value), input_precision="ieee")
            dropped = weight
            if threshold > 0:
                index = ((row * heads + head) * tile + i[:, None]) * tile + j[None]
                stays = _keep(index, seed, salt, threshold)
                dropped = tl.where(stays, weight * factor, 0.0)
                d_weight = tl.where(stays, d_weight * factor, 0.0)
            gradient_v += tl.dot(tl.trans(dropped.to(d_output.dtype)), d_output, input_precision="ieee")
            d_score = weight * (d_weight - middle[:, None]) * (scale * LN_2)
            gradient_k += tl.dot(tl.trans(d_score.to(query.dtype)), query, input_precision="ieee")
        write(d_v_out, gradient_v, k_start, j, k_count, d_v_row, head * d_v, d_v, width_v)
        write(d_k_out, gradient_k, k_start, j, k_count, d_k_row, head * d_k, d_k, width_k)
