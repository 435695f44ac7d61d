"""What every kind of model is to training and to the search, and what those that translate have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.models.layers import Embedding, LearnedPositions, SinusoidalPositions
from qkv.options import AttentionModelConfig, TranslationConfig


class Model(nn.Module):
    """A model is trained through `hidden`, whose arguments are a batch's inputs, and the matrix that makes logits."""

    output: nn.Linear  # (vocab, d_model), without a bias
    hidden: Callable[..., Tensor]  # (batch, length, d_model): the loss projects it, so that it can do so in parts

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits for every position: (batch, length, vocab)."""
        return self.project(self.hidden(*inputs))

    def hidden_at(self, real: Tensor, *inputs: Tensor) -> Tensor:
        """What `hidden` is at the positions that are `real` (batch, length): (tokens, d_model), padding left out."""
        return self.hidden(*inputs)[real]

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output.weight)

    def add_output(self, vocab: int, d_model: int, tied: Embedding | None) -> None:
        """The output matrix: its own, or that of an embedding (section 3.4)."""
        self.output = nn.Linear(d_model, vocab, bias=False)
        nn.init.normal_(self.output.weight, std=d_model**-0.5)
        if tied is not None:
            self.output.weight = tied.tokens.weight


class TranslationModel(Model):
    """Source ids (batch, source), their lengths (batch,) and target ids (batch, target) to logits over the target.

    Each kind offers the search what `qkv.models.state.StepModel` describes.
    """

    encode: Callable[[Tensor, Tensor], Any]
    start: Callable[..., Any]
    step: Callable[[Tensor, Any], tuple[Tensor, Any]]

    def add_embeddings(
        self,
        spec: TranslationConfig,
        src_vocab: int,
        tgt_vocab: int,
        positions: str = "none",
        max_positions: int = 0,
    ) -> None:
        if spec.tie == "all" and src_vocab != tgt_vocab:
            raise UsageError(
                f'model.tie = "all" makes one matrix of vocabularies of {src_vocab} and {tgt_vocab} tokens: '
                f'share the vocabulary, or set model.tie = "output"'
            )
        unseen = spec.token_dropout if isinstance(spec, AttentionModelConfig) else 0.0
        self.source, self.target = (
            Embedding(vocab, spec.d_model, make_positions(positions, spec.d_model, max_positions), spec.dropout, unseen)
            for vocab in (src_vocab, tgt_vocab)
        )

    def tie(self, spec: TranslationConfig, tgt_vocab: int) -> None:
        self.add_output(tgt_vocab, spec.d_model, None if spec.tie == "none" else self.target)
        if spec.tie == "all":
            self.source.tokens.weight = self.target.tokens.weight


def make_positions(kind: str, d_model: int, length: int) -> nn.Module | None:
    """What is added to embeddings; rotary positions are not, nor is the lack of any."""
    if kind == "learned":
        return LearnedPositions(d_model, length)
    return SinusoidalPositions(d_model) if kind == "sinusoidal" else None


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
