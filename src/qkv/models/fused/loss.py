"""The label-smoothed loss over the vocabulary (section 5.4) from logits, which become its gradient where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.models.kernels import tl, triton


def loss_and_gradient(logits: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    """Loss and −log p of each label, (rows,) in fp32, 0 where the label is padding; logits (rows, vocab) are replaced.

    In their place comes d loss / d logits = softmax − targets, with targets (1 − ε)·one-hot + ε/V.
    """
    chosen = loss_kernel if triton is not None and logits.is_cuda else loss_plain
    return chosen(logits, labels, smoothing, pad)


def loss_plain(logits: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    labels = labels.long()
    real = labels != pad
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(1, labels[:, None]).squeeze(1) * real
    loss = (1 - smoothing) * nll - smoothing * log_probs.mean(1) * real
    gradient = log_probs.exp_().sub_(smoothing / logits.shape[1])
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), smoothing - 1))
    logits.copy_(gradient * real[:, None])
    return loss, nll


def loss_kernel(logits: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    loss, nll = logits.new_empty(2, rows, dtype=torch.float).unbind()
    step = 8 if vocab % 8 == 0 else 1  # told to the compiler, which then reads so many at once
    _loss[(rows,)](logits, labels, loss, nll, vocab // step, pad, smoothing, step=step, block=8192, num_warps=8)
    return loss, nll


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _loss(logits, labels, loss, nll, vocab, pad, smoothing, step: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program a row, read twice: the second time it comes from the cache."""
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
            above = tl.maximum(highest, tl.max(value, axis=0))
            total = total * tl.exp(highest - above) + tl.exp(value - above)
            added += tl.where(real, value, 0.0)
            highest = above
        log_z = highest + tl.log(tl.sum(total, axis=0))
        own = log_z - tl.load(logits + label).to(tl.float32)
        mean = log_z - tl.sum(added, axis=0) / vocab
        tl.store(loss + row, (1 - smoothing) * own + smoothing * mean)
        tl.store(nll + row, own)
        tl.debug_barrier()  # the label's logit has been read
        for start in range(0, vocab, block):
            real = start + inside < vocab
            value = tl.load(logits + start + inside, mask=real, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(value - log_z) - smoothing / vocab
            gradient = tl.where(start + inside == label, gradient - (1 - smoothing), gradient)
            tl.store(logits + start + inside, gradient.to(logits.dtype.element_ty), mask=real)
