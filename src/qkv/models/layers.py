"""The parts around the attentions (paper, sections 3.1, 3.3 to 3.5): embedding, positions, feed-forward, residual."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.engines.cuda_decoding.inference_kernels import add_norm
from qkv.engines.cuda_training.elementwise_kernels import DropoutHash
from qkv.engines.cuda_training.vocabulary_kernels import Tokens, embed
from qkv.models.rows import Rows


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

    def forward(self, start: int | Tensor, length: int) -> Tensor:
        """Those of `length` positions from `start` on: (length, d_model), or (rows, length, d_model) of several starts.

        Several starts must lie inside the table: nobody asks the device where they are.
        """
        table = self.table
        if isinstance(start, Tensor):
            return table[_from(start, length)]
        if start + length > len(table):
            with torch.inference_mode(False):  # a table that grew while nobody trained must serve training too
                table = sinusoids(2 * (start + length), table.shape[1]).to(table.device, table.dtype)
            self.table = table
        return table[start : start + length]


class LearnedPositions(nn.Module):
    """A learned vector for each position (Table 3, row E); what was not learned is refused."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, d_model).normal_(std=d_model**-0.5))

    def forward(self, start: int | Tensor, length: int) -> Tensor:
        if isinstance(start, Tensor):
            return self.table[_from(start, length)]
        if start + length > len(self.table):
            raise UsageError(
                f"a sequence of {start + length} tokens, but model.max_positions = {len(self.table)}: "
                f"learned positions end there; split the text, or train with more or with sinusoidal positions"
            )
        return self.table[start : start + length]


def _from(starts: Tensor, length: int) -> Tensor:
    return starts[:, None] + torch.arange(length, device=starts.device)  # (rows, length)


class Dropout(nn.Dropout):
    """torch's, but for the mask on a CPU: 16 random bits for a number are enough, and drawn four times as fast."""

    def forward(self, x: Tensor) -> Tensor:
        out_of = 2**16
        dropped = round(self.p * out_of)
        if not self.training or not x.is_cpu or not 0 < dropped < out_of:
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = torch.ge(bits[: x.numel()].view(x.shape), dropped - out_of // 2, out=torch.empty_like(x))
        return x * kept.mul_(out_of / (out_of - dropped))


class Embedding(nn.Module):
    """Token embedding × √d_model plus positions, if any, then dropout (sections 3.4, 3.5 and 5.4).

    With `unseen` (token cutoff, Shen et al., 2020) so many tokens are in training nothing but their position.
    """

    def __init__(
        self, vocab: int, d_model: int, positions: nn.Module | None, dropout: float, unseen: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        # After the factor √d_model an embedding has unit variance; as output weights they give unit-sized logits.
        nn.init.normal_(self.tokens.weight, std=d_model**-0.5)
        self.positions = positions
        self.scale = math.sqrt(d_model)
        self.dropout, self.unseen = Dropout(dropout), unseen

    def forward(self, ids: Tensor, start: int | Tensor = 0, rows: Rows | None = None) -> Tensor:
        """Ids (batch, length), or of `rows` laid end to end (1, tokens), which all begin at 0."""
        if isinstance(start, Tensor) and not self.training:  # a token for each row: one kernel
            table: Tensor | None = getattr(self.positions, "table", None)
            silent = DropoutHash(0.0, start, 0)
            tokens = Tokens(ids.squeeze(1), start, self.scale, silent, silent)
            return embed(tokens, self.tokens.weight, table)[:, None]
        x = self.tokens(ids) * self.scale  # (batch, length, d_model)
        if self.training and self.unseen:
            x = x * (torch.rand(ids.shape, device=x.device) >= self.unseen)[..., None]
        if self.positions is not None:
            table = self.positions(start, ids.shape[1]) if rows is None else rows.each(self.positions)
            x = x + table.to(x.dtype)
        dropped: Tensor = self.dropout(x)
        return dropped


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2), at each position alike; GELU may take the place of the maximum.

    SwiGLU (Shazeer, 2020) is (SiLU(xW₁) ⊙ xV)W₂: a third matrix, and no biases.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, activation: str = "relu") -> None:
        super().__init__()
        gated = activation == "swiglu"
        self.activation = ACTIVATIONS[activation]
        self.inner = nn.Linear(d_model, d_ff, bias=not gated)
        self.outer = nn.Linear(d_ff, d_model, bias=not gated)
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.dropout = dropout
        for linear in filter(None, (self.inner, self.outer, self.gate)):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._inside(x)  # (batch, length, d_ff)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout, self.training)
        mapped: Tensor = self.outer(hidden)
        return mapped

    def _inside(self, x: Tensor) -> Tensor:
        """The inner product and its activation; on a GPU the maximum is part of the product where nobody trains."""
        if x.is_cuda and self.activation is F.relu and not torch.is_grad_enabled():
            flat = torch._addmm_activation(self.inner.bias, x.flatten(0, -2), self.inner.weight.t())
            hidden: Tensor = flat.unflatten(0, x.shape[:-1])
            return hidden
        return self.activation(self.inner(x))


def make_norm(d_model: int, rms: bool) -> nn.Module:
    """LayerNorm as in the paper, or RMSNorm (Zhang & Sennrich, 2019): no mean, no bias."""
    return nn.RMSNorm(d_model, eps=1e-5) if rms else nn.LayerNorm(d_model)


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) as in the paper; x + Dropout(Sublayer(LayerNorm(x))) with `norm = "pre"`."""

    def __init__(self, d_model: int, norm: str, dropout: float, rms: bool = False) -> None:
        super().__init__()
        self.norm = make_norm(d_model, rms)
        self.pre = norm == "pre"
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            summed: Tensor = x + self.dropout(sublayer(self.norm(x)))
            return summed
        return add_norm(x, self.dropout(sublayer(x)), self.norm)
