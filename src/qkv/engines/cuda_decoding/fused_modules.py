"""Fused modules for inference on a GPU: one kernel replaces several; the parameters are those of the plain modules.

`use_fused_modules` changes the class of a model's modules in place, so that parameters and their names stay. A fused
module uses the plain code where gradients are needed, on a CPU, and without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from qkv.core.transformer import Embedding, FeedForward, Residual, SinusoidalPositions
from qkv.engines.cuda_decoding.inference_kernels import add_norm_kernel, triton
from qkv.engines.cuda_training.elementwise_kernels import DropoutHash
from qkv.engines.cuda_training.vocabulary_kernels import Tokens, embed
from qkv.models.variants import LearnedPositions, TokenDropoutEmbedding, VariantFeedForward

ModelT = TypeVar("ModelT", bound=nn.Module)


def use_fused_modules(model: ModelT) -> ModelT:
    """Replace the plain modules of a model by fused ones, in place."""
    for module in model.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    return model


def runs_fused(x: Tensor) -> bool:
    """Whether the fused operations may be used for x: on a GPU, without gradients."""
    return x.is_cuda and not torch.is_grad_enabled()


class FusedEmbedding(Embedding):
    """Embedding of one token per row, each at its own position, as one kernel."""

    def forward(self, ids: Tensor, position: int | Tensor = 0) -> Tensor:
        if self.training or not isinstance(position, Tensor) or position.dim() != 1:
            return super().forward(ids, position)
        if not isinstance(self.positions, SinusoidalPositions | LearnedPositions | None):
            return super().forward(ids, position)  # the kernel adds rows of a table, and knows no other positions
        table: Tensor | None = getattr(self.positions, "table", None)
        no_dropout = DropoutHash(0.0, position, 0)
        tokens = Tokens(ids.squeeze(1).contiguous(), position, self.scale, no_dropout, no_dropout)
        return embed(tokens, self.tokens.weight, table)[:, None]


class FusedTokenDropoutEmbedding(FusedEmbedding, TokenDropoutEmbedding):
    """Fused embedding for a model trained with token dropout, which inference ignores."""


class FusedResidual(Residual):
    """LayerNorm(x + Sublayer(x)) with the sum and the norm as one kernel."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if triton is None or not runs_fused(x) or not isinstance(self.norm, nn.LayerNorm):
            return super().forward(x, sublayer)
        return add_norm_kernel(x, self.dropout(sublayer(x)), self.norm)


class FusedFeedForward(FeedForward):
    """Feed-forward (equation 2) with the ReLU fused into the first product."""

    def forward(self, x: Tensor) -> Tensor:
        if not runs_fused(x):
            return super().forward(x)
        return self.outer(product_with_relu(x, self.inner))


class FusedVariantFeedForward(VariantFeedForward):
    """Fused ReLU for the variant with activation dropout; other activations use the plain code."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.activation != "relu" or not runs_fused(x):
            return super().forward(x)
        return self.outer(product_with_relu(x, self.inner))


def product_with_relu(x: Tensor, linear: nn.Linear) -> Tensor:
    """max(0, xWᵀ + b) as one operation."""
    flat = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t())
    return flat.unflatten(0, x.shape[:-1])


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Embedding: FusedEmbedding,
    TokenDropoutEmbedding: FusedTokenDropoutEmbedding,
    Residual: FusedResidual,
    FeedForward: FusedFeedForward,
    VariantFeedForward: FusedVariantFeedForward,
}
