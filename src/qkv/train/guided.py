"""Guided alignment (Chen et al., 2016; Garg et al., 2019): one head learns to look where given alignments point.

The head is the first of the decoder's last layer but one, or of its only layer. Its query that writes a token should
spread its weight evenly over the source tokens linked with that token; the cross-entropy between the two is added to
the loss. Tokens without a link are left out. Only this head's weights are written out, from the queries and keys of the
fused path, so that training pays for one head more and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkv.core.batches import Batch
from qkv.models.attention import MultiHeadAttention, attention_scores
from qkv.models.base import Model
from qkv.models.transformer import Transformer

HEAD = 0


def guided_layer(layers: int) -> int:
    """The layer of the guided head: low enough to know the source word, with one layer above to use it."""
    return max(0, layers - 2)


def guided_loss(log_weights: Tensor, links: Tensor) -> Tensor:
    """−Σ p·log a over all linked target tokens, p = 1/n for each of a token's n source tokens: a sum, as the loss is.

    `log_weights` (batch, target, source) are those of the queries that write the tokens; `links` as in a Batch.
    """
    row, source, target = links.unbind(1)
    count = log_weights.new_zeros(log_weights.shape[:2])  # (batch, target)
    count.index_put_((row, target), log_weights.new_ones(len(links)), accumulate=True)
    return -(log_weights[row, target, source] / count[row, target]).sum()


class Guide:
    """Watches the guided head of a model, and says how far it looks from where it should."""

    def __init__(self, model: Model, weight: float) -> None:
        assert isinstance(model, Transformer)
        attention = model.decoder[guided_layer(len(model.decoder))].cross_attention
        assert attention is not None
        self.attention: MultiHeadAttention = attention
        self.weight = weight
        self.seen: tuple[Tensor, Tensor, Tensor | None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the queries, keys and mask of the attention computed inside the block."""

        def keep(_: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
            self.seen = inputs[0], inputs[1], inputs[3]

        handle = self.attention.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def loss(self, batch: Batch) -> Tensor:
        """The weighted objective, summed over the batch, for what was seen last."""
        assert self.seen is not None
        assert batch.alignment is not None
        return self.weight * guided_loss(self.log_weights(), batch.alignment)

    def log_weights(self) -> Tensor:
        """log softmax(QKᵀ/√d_k) of the head, in fp32: (batch, target, source)."""
        assert self.seen is not None
        (q, k, mask), self.seen = self.seen, None  # the graph must not outlive the step
        own = slice(HEAD, HEAD + 1)
        weight = self.attention.score_weight
        with torch.autocast(q.device.type, enabled=False):
            scores = attention_scores(
                q[:, own].float(), k[:, own].float(), self.attention.score, None if weight is None else weight[own]
            )  # (batch, 1, target, source)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        log_weights: Tensor = scores.log_softmax(dim=-1)[:, 0]
        return log_weights
