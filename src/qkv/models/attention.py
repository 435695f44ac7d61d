"""Attention (paper, section 3.2): masks, scaled dot-product, multi-head, and a recorder for the weights.

Two paths compute the same thing. The written-out one is equation 1 as printed and can hand its weights to a recorder;
the fused one is PyTorch's kernel. Outside a `record()` block only the fused path runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention_mask(
    queries: int,
    keys: int,
    key_lengths: Tensor | None = None,
    *,
    causal: bool = False,
    window: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """The one mask of the project: boolean, (batch or 1, 1, queries, keys), True where a query may attend to a key.

    The last query stands at the last key, so the same call serves a whole sequence and the newest part of one.
    `window` = r leaves each query the keys at most r positions away (restricted self-attention, section 4).
    """
    device = key_lengths.device if key_lengths is not None else device
    key = torch.arange(keys, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - key  # (queries, keys)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed = allowed & (distance >= 0)
    if window:
        allowed = allowed & (distance.abs() <= window)
    if key_lengths is None:
        return allowed[None, None]
    return allowed & (key < key_lengths[:, None])[:, None, None]  # (batch, 1, queries, keys)


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """Attention weights by name, e.g. `decoder.2.cross`: one tensor (batch, heads, queries, keys) for each call."""

    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, weights: Tensor) -> None:
        self.weights.setdefault(name, []).append(weights.detach())


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record() -> Iterator[Recording]:
    """Collect the weights of every attention computed inside the block."""
    token = _recording.set(Recording())
    try:
        yield _recording.get()  # type: ignore[misc]
    finally:
        _recording.reset(token)


# ---- equation 1 ------------------------------------------------------------------------------------------------------


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(QKᵀ/√d_k): (batch, heads, queries, keys); masked-out keys get exactly zero."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    name: str = "",
) -> Tensor:
    """Scaled dot-product attention (equation 1) for q, k (batch, heads, length, d_k) and v (batch, heads, length, d_v).

    `causal` is the mask of a whole sequence attending to itself, apart because the fused kernel then needs no mask.
    """
    recording = _recording.get()
    if recording is None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal)
    if causal:
        mask = attention_mask(q.shape[-2], k.shape[-2], causal=True, device=q.device)
    weights = attention_weights(q, k, mask)
    recording.add(name, weights)
    return F.dropout(weights, dropout) @ v


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h)·W^O with head_i = Attention(Q·W_i^Q, K·W_i^K, V·W_i^V) (section 3.2.2)."""

    def __init__(
        self, d_model: int, heads: int, d_k: int, d_v: int, *, bias: bool = False, dropout: float = 0.0, name: str = ""
    ) -> None:
        super().__init__()
        self.heads, self.d_k, self.d_v = heads, d_k, d_v
        self.dropout = dropout
        self.name = name
        # W^Q, W^K and W^V of all heads lie in one matrix: self-attention is then a single product.
        self.qkv = nn.Linear(d_model, heads * (2 * d_k + d_v), bias=bias)
        self.output = nn.Linear(heads * d_v, d_model, bias=bias)
        for part in self.qkv.weight.split([heads * d_k, heads * d_k, heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        if bias:
            nn.init.zeros_(self.qkv.bias)
            nn.init.zeros_(self.output.bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, length, d_model): each (batch, heads, length, d_k or d_v)."""
        widths = [self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v]
        q, k, v = self.qkv(x).split(widths, dim=-1)
        return self._split_heads(q), self._split_heads(k), self._split_heads(v)

    def project_query(self, x: Tensor) -> Tensor:
        """Only the queries of x."""
        rows = slice(0, self.heads * self.d_k)
        return self._split_heads(F.linear(x, self.qkv.weight[rows], self._bias(rows)))

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Only the keys and values: what encoder-decoder attention needs of the encoder's output."""
        rows = slice(self.heads * self.d_k, None)
        kv = F.linear(memory, self.qkv.weight[rows], self._bias(rows))
        k, v = kv.split([self.heads * self.d_k, self.heads * self.d_v], dim=-1)
        return self._split_heads(k), self._split_heads(v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Attend with projected heads and map back to (batch, queries, d_model)."""
        dropout = self.dropout if self.training else 0.0
        heads = attend(q, k, v, mask, causal=causal, dropout=dropout, name=self.name)
        mapped: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return mapped

    def _split_heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)  # (batch, heads, length, width)

    def _bias(self, rows: slice) -> Tensor | None:
        return None if self.qkv.bias is None else self.qkv.bias[rows]
