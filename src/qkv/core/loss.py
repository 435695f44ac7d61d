"""Label-smoothed cross-entropy (paper, section 5.4), summed over tokens; the trainer divides once by their number."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from qkv.core.batches import Batch
from qkv.core.transformer import Model

# Hidden states, output matrix, labels, smoothing, id of <pad> → loss and −log p: `label_smoothed_loss` or a faster one.
Loss = Callable[[Tensor, Tensor, Tensor, float, int], tuple[Tensor, Tensor]]


def label_smoothed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Return loss and −log p, summed over the real labels (batch, target); hidden (tokens, d_model) is theirs alone."""
    return smoothed_cross_entropy(F.linear(hidden, weight).float().log_softmax(-1), labels[labels != pad], smoothing)


def smoothed_cross_entropy(log_probs: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss for targets (1 − ε)·one-hot + ε/V, and −log p of the labels; log_probs: (tokens, vocab)."""
    nll = -log_probs.gather(-1, labels[:, None]).sum()
    uniform = -log_probs.mean(-1).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()


class SmoothedObjective:
    """Objective of the paper: label-smoothed cross-entropy, summed over the tokens of a batch."""

    def __init__(self, smoothing: float, pad: int, loss: Loss = label_smoothed_loss) -> None:
        self.smoothing, self.pad, self.loss = smoothing, pad, loss

    def __call__(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = model.hidden_at(batch.labels != self.pad, *batch.inputs)  # (tokens, d_model)
        return self.loss(hidden, model.output.weight, batch.labels, self.smoothing, self.pad)
