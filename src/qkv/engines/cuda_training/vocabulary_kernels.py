"""Kernels over the vocabulary, forward and backward: embedding and loss.

Embedding × √d_model plus positions, then dropout (sections 3.4, 3.5 and 5.4). The label-smoothed loss (section 5.4)
replaces the logits by their gradient, in place. R-Drop (Wu et al., 2021) has two logits for each token, from passes
with different dropout; `qkv.training.regularization` has its definition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.cuda_decoding.inference_kernels import tl, triton
from qkv.engines.cuda_training.elementwise_kernels import DropoutHash, drop, kept

if triton is not None:
    from qkv.engines.cuda_training.elementwise_kernels import _keep

# ---- embedding -------------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """Token ids of an embedding lookup, their positions, and the dropout of the result."""

    ids: Tensor  # (tokens,) int32
    places: Tensor  # (tokens,): their positions in the sentences
    scale: float  # √d_model
    dropout: DropoutHash  # dropout on the sum of embedding and position
    unseen: DropoutHash  # token dropout: zeroes embeddings, but not positions


def embed(tokens: Tokens, table: Tensor, positions: Tensor | None) -> Tensor:
    """Return the embeddings (tokens, d_model) in the table's precision."""
    if triton is not None and table.is_cuda:
        return embed_kernel(tokens, table, positions)
    x = _apply_token_dropout(table[tokens.ids.long()].float() * tokens.scale, tokens.unseen)
    if positions is not None:
        x = x + positions[tokens.places.long()].float()
    return drop(x, tokens.dropout).to(table.dtype)


def embed_backward(d_x: Tensor, tokens: Tokens, d_table: Tensor, d_positions: Tensor | None) -> None:
    """Add to the gradients of the table and, if positions are learned, of the positions."""
    if triton is not None and d_x.is_cuda:
        return embed_backward_kernel(d_x, tokens, d_table, d_positions)
    d_x = drop(d_x.float(), tokens.dropout)
    d_table.index_add_(0, tokens.ids.long(), _apply_token_dropout(d_x * tokens.scale, tokens.unseen))
    if d_positions is not None:
        d_positions.index_add_(0, tokens.places.long(), d_x)


def _apply_token_dropout(x: Tensor, unseen: DropoutHash) -> Tensor:
    if not unseen.rate:
        return x
    return x * kept(unseen, torch.arange(len(x), dtype=torch.int32, device=x.device))[:, None]


def embed_kernel(tokens: Tokens, table: Tensor, positions: Tensor | None) -> Tensor:
    x = table.new_empty(len(tokens.ids), table.shape[1])
    _embed[(len(x),)](x, table, table if positions is None else positions, **_arguments(tokens, table, positions))
    return x


def embed_backward_kernel(d_x: Tensor, tokens: Tokens, d_table: Tensor, d_positions: Tensor | None) -> None:
    learned = d_table if d_positions is None else d_positions
    _embed_backward[(len(d_x),)](d_x, d_table, learned, **_arguments(tokens, d_table, d_positions))


def _arguments(tokens: Tokens, table: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """Return the arguments shared by both kernels."""
    dropout, unseen, width = tokens.dropout, tokens.unseen, table.shape[1]
    return {
        "ids": tokens.ids,
        "places": tokens.places,
        "seed": dropout.seed,
        "salt": dropout.salt,
        "unseen_salt": unseen.salt,
        "scale": tokens.scale,
        "factor": dropout.scale,
        "has_positions": positions is not None,
        "width": width,
        "block": triton.next_power_of_2(width),
        "threshold": dropout.threshold,
        "unseen": unseen.threshold,
        "num_warps": 2,
    }


if triton is not None:

    @triton.jit(do_not_specialize=["salt", "unseen_salt"])  # type: ignore[untyped-decorator]
    def _embed(  # type: ignore[no-untyped-def]
        x,
        table,
        positions,
        ids,
        places,
        seed,
        salt,
        unseen_salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
        unseen: tl.constexpr,
    ):
        """One program per token."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        embedding = tl.load(table + tl.load(ids + token) * width + inside, mask=real, other=0.0).to(tl.float32) * scale
        if unseen > 0:
            embedding = tl.where(_keep(token, seed, unseen_salt, unseen), embedding, 0.0)
        if has_positions:
            at = tl.load(places + token) * width
            embedding += tl.load(positions + at + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            embedding = tl.where(_keep(token * width + inside, seed, salt, threshold), embedding * factor, 0.0)
        tl.store(x + token * width + inside, embedding.to(x.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["salt", "unseen_salt"])  # type: ignore[untyped-decorator]
    def _embed_backward(  # type: ignore[no-untyped-def]
        d_x,
        d_table,
        d_positions,
        ids,
        places,
        seed,
        salt,
        unseen_salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
        unseen: tl.constexpr,
    ):
        """One program per token; several may add to the same row of the table, so the sums are atomic."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        gradient = tl.load(d_x + token * width + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            gradient = tl.where(_keep(token * width + inside, seed, salt, threshold), gradient * factor, 0.0)
        if has_positions:
            at = tl.load(places + token) * width
            tl.atomic_add(d_positions + at + inside, gradient, mask=real, sem="relaxed")
        if unseen > 0:
            gradient = tl.where(_keep(token, seed, unseen_salt, unseen), gradient, 0.0)
        tl.atomic_add(d_table + tl.load(ids + token) * width + inside, gradient * scale, mask=real, sem="relaxed")


# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_and_gradient(logits: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    """Return loss and −log p of each label, (rows,) in fp32, 0 for padding; replace the logits by their gradient.

    The gradient of logits (rows, vocab) is softmax − targets, with targets (1 − ε)·one-hot + ε/V.
    """
    if triton is not None and logits.is_cuda:
        return loss_kernel(logits, labels, smoothing, pad)
    labels = labels.long()
    real = labels != pad
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(1, labels[:, None]).squeeze(1) * real
    loss = (1 - smoothing) * nll - smoothing * log_probs.mean(1) * real
    gradient = log_probs.exp_().sub_(smoothing / logits.shape[1])
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), smoothing - 1))
    logits.copy_(gradient * real[:, None])
    return loss, nll


def r_drop_loss_and_gradients(
    first: Tensor, second: Tensor, labels: Tensor, smoothing: float, alpha: float, pad: int
) -> tuple[Tensor, Tensor]:
    """R-Drop: mean loss and −log p of two passes, with α/4 (KL(p‖q) + KL(q‖p)) added to the loss; logits as above."""
    if triton is not None and first.is_cuda:
        return r_drop_loss_kernel(first, second, labels, smoothing, alpha, pad)
    log_p, log_q = first.float().log_softmax(-1), second.float().log_softmax(-1)
    sums = [loss_and_gradient(logits, labels, smoothing, pad) for logits in (first, second)]
    loss, nll = ((one + other) / 2 for one, other in zip(*sums, strict=True))
    real, p, q, log_ratio = (labels != pad)[:, None], log_p.exp(), log_q.exp(), log_p - log_q
    forth, back = (p * log_ratio).sum(1, keepdim=True), -(q * log_ratio).sum(1, keepdim=True)
    first.copy_(first / 2 + alpha / 4 * real * (p * (log_ratio - forth) + p - q))
    second.copy_(second / 2 + alpha / 4 * real * (q * (-log_ratio - back) + q - p))
    return loss + alpha / 4 * (real * (forth + back)).squeeze(1), nll


def loss_kernel(logits: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    loss, nll = logits.new_empty(2, rows, dtype=torch.float).unbind()
    step = 8 if vocab % 8 == 0 else 1  # a compile-time divisor of the vocabulary allows vectorised loads
    _loss[(rows,)](logits, labels, loss, nll, vocab // step, pad, smoothing, step=step, block=8192, num_warps=8)
    return loss, nll


def r_drop_loss_kernel(
    first: Tensor, second: Tensor, labels: Tensor, smoothing: float, alpha: float, pad: int
) -> tuple[Tensor, Tensor]:
    rows, vocab = first.shape
    loss, nll = first.new_empty(2, rows, dtype=torch.float).unbind()
    step = 8 if vocab % 8 == 0 else 1
    _r_drop_loss[(rows,)](
        first, second, labels, loss, nll, vocab // step, pad, smoothing, alpha, step=step, block=4096, num_warps=8
    )
    return loss, nll


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _loss(logits, labels, loss, nll, vocab, pad, smoothing, step: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program per row, which is read twice; the second read hits the cache."""
        row = tl.program_id(0).to(tl.int64)
        vocab *= step
        logits += row * vocab
        label = tl.load(labels + row)
        inside = tl.arange(0, block)
        if label == pad:
            for start in range(0, vocab, block):
                tl.store(
                    logits + start + inside, tl.zeros((block,), logits.dtype.element_ty), mask=start + inside < vocab
                )
            tl.store(loss + row, 0.0)
            tl.store(nll + row, 0.0)
            return
        highest = tl.full((), -1e30, tl.float32)
        total = tl.zeros((block,), tl.float32)
        added = tl.zeros((block,), tl.float32)
        for start in range(0, vocab, block):
            real = start + inside < vocab
            value = tl.load(logits + start + inside, mask=real, other=float("-inf")).to(tl.float32)
            new_highest = tl.maximum(highest, tl.max(value, axis=0))
            total = total * tl.exp(highest - new_highest) + tl.exp(value - new_highest)
            added += tl.where(real, value, 0.0)
            highest = new_highest
        log_z = highest + tl.log(tl.sum(total, axis=0))
        label_nll = log_z - tl.load(logits + label).to(tl.float32)
        mean = log_z - tl.sum(added, axis=0) / vocab
        tl.store(loss + row, (1 - smoothing) * label_nll + smoothing * mean)
        tl.store(nll + row, label_nll)
        tl.debug_barrier()  # the label's logit is loaded
        for start in range(0, vocab, block):
            real = start + inside < vocab
            value = tl.load(logits + start + inside, mask=real, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(value - log_z) - smoothing / vocab
            gradient = tl.where(start + inside == label, gradient - (1 - smoothing), gradient)
            tl.store(logits + start + inside, gradient.to(logits.dtype.element_ty), mask=real)

    @triton.jit  # type: ignore[untyped-decorator]
    def _r_drop_loss(  # type: ignore[no-untyped-def]
        first, second, labels, loss, nll, vocab, pad, smoothing, alpha, step: tl.constexpr, block: tl.constexpr
    ):
        """One program per pair of rows; the divergences are accumulated online, so that two reads are enough."""
        row = tl.program_id(0).to(tl.int64)
        vocab *= step
        first += row * vocab
        second += row * vocab
        label = tl.load(labels + row)
        inside = tl.arange(0, block)
        if label == pad:
            for start in range(0, vocab, block):
                real = start + inside < vocab
                tl.store(first + start + inside, tl.zeros((block,), first.dtype.element_ty), mask=real)
                tl.store(second + start + inside, tl.zeros((block,), second.dtype.element_ty), mask=real)
            tl.store(loss + row, 0.0)
            tl.store(nll + row, 0.0)
            return
        highest_a, highest_b = tl.full((), -1e30, tl.float32), tl.full((), -1e30, tl.float32)
        total_a, total_b = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
        apart_a, apart_b = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)  # Σ eᵃ(a − b), Σ eᵇ(a − b)
        added = tl.zeros((block,), tl.float32)
        for start in range(0, vocab, block):
            real = start + inside < vocab
            a = tl.load(first + start + inside, mask=real, other=float("-inf")).to(tl.float32)
            b = tl.load(second + start + inside, mask=real, other=float("-inf")).to(tl.float32)
            difference = tl.where(real, a - b, 0.0)
            above_a, above_b = tl.maximum(highest_a, tl.max(a, axis=0)), tl.maximum(highest_b, tl.max(b, axis=0))
            shrink_a, shrink_b = tl.exp(highest_a - above_a), tl.exp(highest_b - above_b)
            e_a, e_b = tl.exp(a - above_a), tl.exp(b - above_b)
            total_a, total_b = total_a * shrink_a + e_a, total_b * shrink_b + e_b
            apart_a, apart_b = apart_a * shrink_a + e_a * difference, apart_b * shrink_b + e_b * difference
            added += tl.where(real, a + b, 0.0)
            highest_a, highest_b = above_a, above_b
        z_a, z_b = tl.sum(total_a, axis=0), tl.sum(total_b, axis=0)
        log_a, log_b = highest_a + tl.log(z_a), highest_b + tl.log(z_b)
        forth = tl.sum(apart_a, axis=0) / z_a - (log_a - log_b)  # KL(p‖q)
        back = log_a - log_b - tl.sum(apart_b, axis=0) / z_b  # KL(q‖p)
        label_nll = (log_a - tl.load(first + label).to(tl.float32) + log_b - tl.load(second + label).to(tl.float32)) / 2
        mean = (log_a + log_b - tl.sum(added, axis=0) / vocab) / 2
        tl.store(loss + row, (1 - smoothing) * label_nll + smoothing * mean + alpha / 4 * (forth + back))
        tl.store(nll + row, label_nll)
        tl.debug_barrier()  # the label's logits are loaded
        for start in range(0, vocab, block):
            real = start + inside < vocab
            log_p = tl.load(first + start + inside, mask=real, other=float("-inf")).to(tl.float32) - log_a
            log_q = tl.load(second + start + inside, mask=real, other=float("-inf")).to(tl.float32) - log_b
            p, q = tl.exp(log_p), tl.exp(log_q)
            log_ratio = tl.where(real, log_p - log_q, 0.0)
            target = tl.where(start + inside == label, 1 - smoothing, 0.0) + smoothing / vocab
            d_a = (p - target) / 2 + alpha / 4 * (p * (log_ratio - forth) + p - q)
            d_b = (q - target) / 2 + alpha / 4 * (q * (-log_ratio - back) + q - p)
            tl.store(first + start + inside, d_a.to(first.dtype.element_ty), mask=real)
            tl.store(second + start + inside, d_b.to(second.dtype.element_ty), mask=real)
