"""Regularisation beyond the paper: R-Drop and guided alignment as objectives, and a moving average of the weights.

R-Drop (Wu et al., 2021) passes each batch twice, under different dropout, and draws the two predictions together.

Guided alignment (Chen et al., 2016; Garg et al., 2019) teaches one cross-attention head to follow given word
alignments: the first head of the decoder's last layer but one, or of its only layer. The query that predicts a token
should spread its weight evenly over the source tokens aligned with that token; the cross-entropy between the two is
added to the loss. Tokens without alignment are left out. Only the weights of this head are computed explicitly, from
the queries and keys of the fused path, so that the extra cost is one head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkv.core.attention import Attend, MultiHeadAttention, around_attention
from qkv.core.batches import Batch
from qkv.core.loss import smoothed_cross_entropy
from qkv.core.transformer import Model, Transformer
from qkv.data.pair_updates import AlignedBatch
from qkv.models.variants import attention_scores, score_of
from qkv.training.unpadded import ROWS, loss_in_parts

# ---- R-Drop ----------------------------------------------------------------------------------------------------------


class RDropObjective:
    """Objective of two passes through each batch; `alpha` weights the divergence between their predictions."""

    def __init__(self, *, smoothing: float, alpha: float, pad: int) -> None:
        self.smoothing, self.alpha, self.pad = smoothing, alpha, pad

    def __call__(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return loss and −log p, summed over the tokens of the batch."""
        real = batch.labels != self.pad
        first, second = (model.hidden_at(real, *batch.inputs) for _ in range(2))  # (tokens, d_model)
        # Read after the passes: before them, sharded weights are not whole.
        weight = model.output.weight
        return r_drop_loss(
            first, second, weight, batch.labels, smoothing=self.smoothing, alpha=self.alpha, pad=self.pad
        )


def r_drop_loss(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, alpha: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Return the R-Drop loss and −log p of two passes, (tokens, d_model) each, both summed over the real tokens.

    With p and q the two predictions of a token, its loss is the mean of their losses plus α/4 (KL(p‖q) + KL(q‖p)): half
    of the sum in the R-Drop paper, so that it compares with the loss of one pass.
    """
    labels = labels[labels != pad]
    sums = torch.zeros(2, device=labels.device)
    for part in torch.arange(len(labels), device=labels.device).split(ROWS):  # the backward pass repeats their logits
        sums = sums + checkpoint(
            _r_drop_part, first[part], second[part], weight, labels[part], smoothing, alpha, use_reentrant=False
        )
    return sums[0], sums[1].detach()


def _r_drop_part(
    first: Tensor, second: Tensor, weight: Tensor, labels: Tensor, smoothing: float, alpha: float
) -> Tensor:
    log_p, log_q = (F.linear(hidden, weight).float().log_softmax(-1) for hidden in (first, second))  # (tokens, vocab)
    losses, nlls = zip(*(smoothed_cross_entropy(each, labels, smoothing) for each in (log_p, log_q)), strict=True)
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p‖q) + KL(q‖p)
    return torch.stack([sum(losses) / 2 + alpha / 4 * divergence, sum(nlls) / 2])


# ---- guided alignment ------------------------------------------------------------------------------------------------

HEAD = 0


def guided_layer(layers: int) -> int:
    """Return the layer of the guided head: low enough to know the source word, with one layer above to use it."""
    return max(0, layers - 2)


def guided_loss(log_weights: Tensor, links: Tensor) -> Tensor:
    """Return −Σ p·log a over all aligned target tokens, p = 1/n for each of the n source tokens of a token.

    `log_weights` (batch, target, source) belong to the queries that predict the tokens; `links` is a batch's alignment.
    """
    row, source, target = links.unbind(1)
    count = log_weights.new_zeros(log_weights.shape[:2])  # (batch, target)
    count.index_put_((row, target), log_weights.new_ones(len(links)), accumulate=True)
    return -(log_weights[row, target, source] / count[row, target]).sum()


class GuidedAlignment:
    """Objective of label-smoothed cross-entropy plus `weight` times the alignment loss of the guided head."""

    def __init__(self, model: Model, *, weight: float, smoothing: float, pad: int) -> None:
        assert isinstance(model, Transformer)
        attention = model.decoder[guided_layer(len(model.decoder))].cross_attention
        assert attention is not None
        self.attention: MultiHeadAttention = attention
        self.weight, self.smoothing, self.pad = weight, smoothing, pad

    def __call__(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return loss and −log p, summed over the batch; `hidden` keeps whole rows of queries and keys."""
        assert isinstance(batch, AlignedBatch)
        with self.recording() as seen:
            hidden = model.hidden(*batch.inputs)  # (batch, target, d_model)
        loss, nll = loss_in_parts(hidden, model.output.weight, batch.labels, smoothing=self.smoothing, pad=self.pad)
        return loss + self.weight * guided_loss(self.log_weights(*seen), batch.alignment), nll

    @contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """Record the queries, keys and mask of the attention computed inside the block."""
        seen: list[Any] = []

        def keep(
            attention: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
        ) -> Tensor:
            if attention is self.attention:
                seen[:] = q, k, mask
            return attend(q, k, v, mask, causal)

        with around_attention(keep):
            yield seen

    def log_weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return log softmax(QKᵀ/√d_k) of the head, in fp32: (batch, target, source)."""
        own = slice(HEAD, HEAD + 1)
        score, weight = score_of(self.attention)
        with torch.autocast(q.device.type, enabled=False):
            scores = attention_scores(
                q[:, own].float(), k[:, own].float(), score, None if weight is None else weight[own]
            )  # (batch, 1, target, source)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.log_softmax(dim=-1)[:, 0]


# ---- moving average --------------------------------------------------------------------------------------------------


class Ema:
    """Exponential moving average of the weights; a young average forgets faster, so that the start does not linger."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()]

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def __call__(self, step: int, model: nn.Module) -> None:
        """Move the average towards the weights after update number `step`."""
        torch._foreach_lerp_(self.weights, [p.detach() for p in model.parameters()], 1 - self.decay_at(step))

    def tensors(self) -> dict[str, Tensor]:
        """Return the average itself, by parameter name."""
        return dict(zip(self.names, self.weights, strict=True))
