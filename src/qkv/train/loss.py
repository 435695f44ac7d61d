"""Label-smoothed cross-entropy (paper, section 5.4), as a sum over tokens; the trainer divides once by the count.

The fused path projects to the vocabulary in parts and takes their gradients at once, so that the logits of a whole
batch never exist; the plain path is the definition. They are tested equal in value and gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 512  # tokens projected at once: their logits stay in cache on a CPU; on a GPU twice as many, still small


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The definition: targets (1 − ε)·one-hot + ε/V. Returns that loss and −log p of the labels, both summed."""
    return _smoothed(_log_probs(hidden, weight), labels, smoothing)


def _log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1)  # (tokens, vocab)


def _smoothed(log_probs: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    nll = -log_probs.gather(-1, labels[:, None]).sum()
    uniform = -log_probs.mean(-1).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()


def agreeing_loss(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, alpha: float, pad: int
) -> tuple[Tensor, Tensor]:
    """R-Drop (Wu et al., 2021): two passes under different dropout, (tokens, d_model) each, are to say the same.

    With p and q what they say of a token, its loss is the mean of theirs and α/4 (KL(p‖q) + KL(q‖p)): half of the sum
    that their paper writes, so that it compares with the loss of one pass. Returned are this loss and −log p, summed.
    """
    labels = labels[labels != pad]
    sums = torch.zeros(2, device=labels.device)
    for part in torch.arange(len(labels), device=labels.device).split(ROWS):  # whose logits are computed again
        sums = sums + checkpoint(
            _agreeing, first[part], second[part], weight, labels[part], smoothing, alpha, use_reentrant=False
        )
    return sums[0], sums[1].detach()


def _agreeing(first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, smoothing: float, alpha: float) -> Tensor:
    log_p, log_q = _log_probs(first, weight), _log_probs(second, weight)
    losses, nlls = zip(*(_smoothed(log_probs, labels, smoothing) for log_probs in (log_p, log_q)), strict=True)
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p‖q) + KL(q‖p)
    return torch.stack([sum(losses) / 2 + alpha / 4 * divergence, sum(nlls) / 2])


def smoothed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Loss and −log p summed over the real tokens: hidden (batch, target, d_model), labels (batch, target).

    From `Model.hidden_at` hidden is that of the real tokens already, (tokens, d_model).
    """
    real = labels != pad
    hidden, labels = hidden[real] if hidden.dim() > labels.dim() else hidden, labels[real]  # (tokens, d_model)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, nll = _FusedLoss.apply(hidden, weight, labels, smoothing, needs_grad)  # type: ignore[no-untyped-call]
    return loss, nll


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            loss, nll, d_hidden, d_weight = _in_parts(
                hidden.to(compute), weight.to(compute), labels, smoothing, needs_grad
            )
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(ctx.dtypes[0]), (d_weight * d_loss).to(ctx.dtypes[1]), None, None, None


def _in_parts(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Loss, −log p, and the gradients of the loss, some rows at a time: the softmax in fp32 whatever the inputs are."""
    loss = hidden.new_zeros((), dtype=torch.float32)
    nll = loss.clone()
    mean = weight.float().mean(0)  # its product with a hidden state is the mean of the logits
    d_hidden = torch.empty_like(hidden) if needs_grad else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
    parts = max(1, round(len(hidden) / (ROWS if hidden.is_cpu else 2 * ROWS)))
    rows = max(1, -(-len(hidden) // parts))  # alike in all parts: one of a few rows would pass over all of d_weight too
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        h, y = hidden[part], labels[part, None]
        logits = (h @ weight.T).float()  # (rows, vocab)
        own, largest = logits.gather(-1, y), logits.amax(-1, keepdim=True)  # (rows, 1)
        p = logits.sub_(largest).exp_()
        z = p.sum(-1, keepdim=True)
        log_z = largest + z.log()
        part_nll = (log_z - own).sum()
        loss += (1 - smoothing) * part_nll + smoothing * (log_z.sum() - (h.float() @ mean).sum())
        nll += part_nll
        if d_hidden is not None and d_weight is not None:
            # d loss / d logits = softmax − targets; that ε/V is part of every target is left to the mean
            d_logits = p.div_(z).scatter_add_(-1, y, p.new_full(y.shape, smoothing - 1)).to(hidden.dtype)
            d_hidden[part] = d_logits @ weight - smoothing * mean
            if h.dtype == torch.float32:
                torch.addmm(d_weight, d_logits.T, h, out=d_weight)  # `addmm_` would escape the counter of operations
            else:
                d_weight += d_logits.T @ h
    if d_weight is not None:
        d_weight -= smoothing / len(weight) * hidden.float().sum(0)
    return loss, nll, d_hidden, d_weight
