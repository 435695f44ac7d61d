"""The parts around the attentions (paper, sections 3.1, 3.3 to 3.5): embedding, positions, feed-forward, residual."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.errors import UsageError


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same: (length, d_model)."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = position * frequency  # (length, d_model / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids; the table grows by itself when a longer sequence comes."""

    table: Tensor

    def __init__(self, d_model: int, length: int = 512) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(length, d_model), persistent=False)

    def forward(self, start: int, length: int) -> Tensor:
        if start + length > len(self.table):
            longer = sinusoids(2 * (start + length), self.table.shape[1])
            self.table = longer.to(self.table)
        return self.table[start : start + length]


class LearnedPositions(nn.Module):
    """A learned vector for each position (Table 3, row E); what was not learned is refused."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, d_model).normal_(std=d_model**-0.5))

    def forward(self, start: int, length: int) -> Tensor:
        if start + length > len(self.table):
            raise UsageError(
                f"a sequence of {start + length} tokens, but model.max_positions = {len(self.table)}: "
                f"learned positions end there; split the text, or train with more or with sinusoidal positions"
            )
        return self.table[start : start + length]


class Embedding(nn.Module):
    """Token embedding × √d_model plus positions, then dropout (sections 3.4, 3.5 and 5.4)."""

    def __init__(self, vocab: int, d_model: int, positions: nn.Module, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        # After the factor √d_model an embedding has unit variance; as output weights they give unit-sized logits.
        nn.init.normal_(self.tokens.weight, std=d_model**-0.5)
        self.positions = positions
        self.scale = math.sqrt(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.tokens(ids) * self.scale  # (batch, length, d_model)
        x = x + self.positions(start, ids.shape[1]).to(x.dtype)
        dropped: Tensor = self.dropout(x)
        return dropped


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2), at each position alike."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = dropout
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.inner(x))  # (batch, length, d_ff)
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout, self.training)
        mapped: Tensor = self.outer(hidden)
        return mapped


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) as in the paper; x + Dropout(Sublayer(LayerNorm(x))) with `norm = "pre"`."""

    def __init__(self, d_model: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.pre = norm == "pre"
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            summed: Tensor = x + self.dropout(sublayer(self.norm(x)))
            return summed
        normed: Tensor = self.norm(x + self.dropout(sublayer(x)))
        return normed
