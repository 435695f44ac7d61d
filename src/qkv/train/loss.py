"""Label-smoothed cross-entropy (paper, section 5.4), as a sum over tokens; the trainer divides once by the count.

The fused path projects to the vocabulary in parts and takes their gradients at once, so that the logits of a whole
batch never exist; the plain path is the definition. They are tested equal in value and gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024  # tokens projected at once: logits of this many rows stay in cache on a CPU, and small on a GPU


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The definition: targets (1 − ε)·one-hot + ε/V. Returns that loss and −log p of the labels, both summed."""
    log_probs = F.linear(hidden, weight).float().log_softmax(-1)  # (tokens, vocab)
    nll = -log_probs.gather(-1, labels[:, None]).sum()
    uniform = -log_probs.mean(-1).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()


def smoothed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Loss and −log p summed over the real tokens: hidden (batch, target, d_model), labels (batch, target)."""
    real = labels != pad
    hidden, labels = hidden[real], labels[real]  # (tokens, d_model), (tokens,)
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
    vocab = len(weight)
    loss = hidden.new_zeros((), dtype=torch.float32)
    nll = loss.clone()
    d_hidden = torch.empty_like(hidden) if needs_grad else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
    for part in range(0, len(hidden), ROWS):
        h, y = hidden[part : part + ROWS], labels[part : part + ROWS, None]
        logits = (h @ weight.T).float()  # (rows, vocab)
        log_z = logits.logsumexp(-1, keepdim=True)
        part_nll = (log_z - logits.gather(-1, y)).sum()
        uniform = (log_z.squeeze(-1) - logits.mean(-1)).sum()
        loss += (1 - smoothing) * part_nll + smoothing * uniform
        nll += part_nll
        if d_hidden is not None and d_weight is not None:
            # d loss / d logits = softmax − targets
            d_logits = logits.sub_(log_z).exp_().sub_(smoothing / vocab)
            d_logits.scatter_add_(-1, y, d_logits.new_full(y.shape, smoothing - 1))
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[part : part + ROWS] = d_logits @ weight
            d_weight += d_logits.T @ h
    return loss, nll, d_hidden, d_weight
