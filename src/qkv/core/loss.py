"""Label-smoothed cross-entropy (paper, section 5.4), summed over tokens; the trainer divides once by their number.

`reference_loss` is the definition. `label_smoothed_loss` computes the same in parts: it projects some hundred tokens at
a time to the vocabulary and takes the gradients at once, so that the logits of a whole batch never exist. Tests compare
the values and the gradients of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from qkv.core.batches import Batch
    from qkv.core.transformer import Model

ROWS = 512  # tokens projected at once: their logits stay in the cache of a CPU; a GPU takes twice as many


def reference_loss(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss for targets (1 − ε)·one-hot + ε/V, and −log p of the labels, both summed over the tokens."""
    return smoothed_cross_entropy(F.linear(hidden, weight).float().log_softmax(-1), labels, smoothing)


def smoothed_cross_entropy(log_probs: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the same from log-probabilities: (tokens, vocab)."""
    nll = -log_probs.gather(-1, labels[:, None]).sum()
    uniform = -log_probs.mean(-1).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()


def label_smoothed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Return loss and −log p, summed over the real tokens: hidden (batch, target, d_model), labels (batch, target).

    `hidden` may also hold the real tokens only, (tokens, d_model).
    """
    real = labels != pad
    hidden, labels = hidden[real] if hidden.dim() > labels.dim() else hidden, labels[real]  # (tokens, d_model)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, nll = _LossInParts.apply(hidden, weight, labels, smoothing, needs_grad)  # type: ignore[no-untyped-call]
    return loss, nll


class SmoothedObjective:
    """Objective of the paper: label-smoothed cross-entropy, summed over the tokens of a batch."""

    def __init__(self, smoothing: float, pad: int) -> None:
        self.smoothing, self.pad = smoothing, pad

    def __call__(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = model.hidden_at(batch.labels != self.pad, *batch.inputs)  # (tokens, d_model)
        return label_smoothed_loss(hidden, model.output.weight, batch.labels, smoothing=self.smoothing, pad=self.pad)


class _LossInParts(torch.autograd.Function):
    """Computes the gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return loss and −log p; the softmax is in fp32, whatever the inputs are."""
        ctx.dtypes, device = (hidden.dtype, weight.dtype), hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            hidden, weight = hidden.to(compute), weight.to(compute)
            loss = hidden.new_zeros((), dtype=torch.float32)
            nll = loss.clone()
            mean = weight.float().mean(0)  # its product with a hidden state is the mean of the logits
            d_hidden = torch.empty_like(hidden) if needs_grad else None
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
            parts = max(1, round(len(hidden) / (ROWS if hidden.is_cpu else 2 * ROWS)))
            rows = max(
                1, -(-len(hidden) // parts)
            )  # equal parts: a short last part would pass over all of d_weight too
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
                    # d loss / d logits = softmax − targets; the ε/V of every target is subtracted through the mean
                    d_logits = p.div_(z).scatter_add_(-1, y, p.new_full(y.shape, smoothing - 1)).to(hidden.dtype)
                    d_hidden[part] = d_logits @ weight - smoothing * mean
                    if h.dtype == torch.float32:  # not `addmm_`, which torch's operation counter misses
                        torch.addmm(d_weight, d_logits.T, h, out=d_weight)
                    else:
                        d_weight += d_logits.T @ h
            if d_weight is not None:
                d_weight -= smoothing / len(weight) * hidden.float().sum(0)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(ctx.dtypes[0]), (d_weight * d_loss).to(ctx.dtypes[1]), None, None, None
