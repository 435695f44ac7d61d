"""Variants of the Transformer: its stacks by themselves; other scores, windows, positions, norms and activations.

`DecoderOnly` is a language model, `EncoderOnly` fills in hidden tokens. `VariantLayers` builds the paper's part where
an option has its default value, and a part of this module otherwise.
A new variant is a class here, a branch in `VariantLayers` and a choice among the options.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import (
    Attend,
    CachedDecoding,
    Context,
    KVCache,
    MultiHeadAttention,
    WholeSequence,
    around_attention,
    causal_mask,
    padding_mask,
)
from qkv.core.errors import UsageError
from qkv.core.transformer import (
    Embedding,
    Layers,
    Model,
    Positions,
    Residual,
    SinusoidalPositions,
    TransformerLayer,
    run_stack,
    stack,
)
from qkv.options import AttentionModelConfig, DecoderOnlyConfig, EncoderOnlyConfig


class VariantLayers(Layers):
    """Constructors for every option of an attention model."""

    config: AttentionModelConfig

    def __init__(self, config: AttentionModelConfig) -> None:
        self.config = config  # none of its options is refused

    def embedding(self, vocab: int) -> Embedding:
        c = self.config
        if c.token_dropout:
            return TokenDropoutEmbedding(vocab, c.d_model, self.positions(), c.dropout, c.token_dropout)
        return super().embedding(vocab)

    def positions(self) -> Positions | None:
        if self.config.positions == "learned":
            return LearnedPositions(self.config.d_model, self.config.max_positions)
        return None if self.config.positions in ("rotary", "none") else super().positions()

    def attention(self, name: str, *, cross: bool) -> MultiHeadAttention:
        c = self.config
        rotary, window = c.positions == "rotary", c.window
        if cross:  # source and target have no common distance
            rotary, window = False, 0
        widths = c.d_model, c.heads, c.key_width, c.value_width
        if c.attention == "scaled" and not (rotary or window or c.attention_dropout):
            return MultiHeadAttention(*widths, bias=c.bias, name=name)
        return VariantAttention(
            *widths,
            score=c.attention,
            rotary=rotary,
            window=window,
            bias=c.bias,
            dropout=c.attention_dropout,
            name=name,
        )

    def feed_forward(self) -> nn.Module:
        c = self.config
        if c.activation == "relu" and not c.activation_dropout:
            return super().feed_forward()
        return VariantFeedForward(c.d_model, c.d_ff, c.activation_dropout, c.activation)

    def residual(self) -> nn.Module:
        part = PreNormResidual if self.config.norm == "pre" else Residual
        return part(self.norm(), self.config.dropout)

    def final_norm(self) -> nn.Module:
        return self.norm() if self.config.norm == "pre" else super().final_norm()

    def norm(self) -> nn.Module:
        """LayerNorm, or RMSNorm (Zhang & Sennrich, 2019): no mean, no bias."""
        d_model = self.config.d_model
        return nn.RMSNorm(d_model, eps=1e-5) if self.config.rms_norm else nn.LayerNorm(d_model)


# ---- positions -------------------------------------------------------------------------------------------------------


class LearnedPositions(Positions):
    """A learned vector for each position (Table 3, row E); a longer sequence is refused."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, d_model).normal_(std=d_model**-0.5))

    def reach(self, length: int) -> None:
        if length > len(self.table):
            raise UsageError(
                f"a sequence of {length} tokens, but model.max_positions = {len(self.table)}: "
                f"learned positions end there; split the text, or train with more or with sinusoidal positions"
            )


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn each pair (2i, 2i + 1) of x by the angle of its position.

    `table` holds the sinusoids, (length, d_k), or (rows, 1, length, d_k) with one table per row: sines and cosines of
    the same angles. The product of a query and a key then depends on the distance between them alone.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(table[..., 1::2].float(), table[..., 0::2].float())
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_scores(q: Tensor, k: Tensor, score: str = "scaled", weight: Tensor | None = None) -> Tensor:
    """How well each key matches each query, before the softmax: (…, queries, keys).

    `scaled` is qᵀk/√d_k (equation 1) and `dot` qᵀk. With learned weights, `general` is qᵀWk (Luong et al., 2015) and
    `additive` wᵀtanh(q + k) (Bahdanau et al., 2015); its two matrices are the projections of q and k.
    """
    if score == "additive":
        assert weight is not None
        together = (q[..., :, None, :] + k[..., None, :, :]).tanh()  # (…, queries, keys, d_k)
        return (together @ weight[..., None, :, None]).squeeze(-1)
    if score == "general":
        assert weight is not None
        q = q @ weight
    scores = q @ k.transpose(-2, -1)
    return scores / math.sqrt(q.shape[-1]) if score == "scaled" else scores


class ScoredAttention:
    """Attention with any score function, by heads that are projected elsewhere: see `MultiHeadAttention`."""

    training, dropout = False, 0.0  # `VariantAttention` has its own

    def __init__(self, score: str, weight: Tensor | None, name: str, window: int = 0) -> None:
        self.score, self.score_weight, self.name, self.window = score, weight, name, window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """By PyTorch's fused kernel, but for additive scores, which are no product of matrices."""
        if self.score == "additive":
            return F.dropout(self.weights(q, k, mask, causal), self.dropout, self.training) @ v
        if self.score_weight is not None:  # general: qᵀW takes the place of the query
            q = q @ self.score_weight
        dropout = self.dropout if self.training else 0.0
        scale, window = None if self.score == "scaled" else 1.0, self._window(q, mask)
        if window and q.shape[-2] > 2 * window:  # in a shorter sequence the blocks would overlap most of it
            return attend_in_window(q, k, v, mask, window, causal=causal, dropout=dropout, scale=scale)
        if window or (causal and mask is not None):
            mask, causal = self.whole_mask(q, k, mask, causal), False
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal, scale=scale)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        scores = attention_scores(q, k, self.score, self.score_weight)
        mask = self.whole_mask(q, k, mask, causal)
        return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(dim=-1)

    def whole_mask(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
        """The mask of the keys, the causal one and the window in one."""
        if not (window := self._window(q, mask)):
            if not causal:
                return mask
            allowed = causal_mask(q.shape[-2], k.shape[-2], q.device)
            return allowed if mask is None else allowed & mask
        allowed = window_mask(q.shape[-2], k.shape[-2], window, causal=causal, device=q.device)
        return allowed if mask is None else with_padding(allowed, mask)

    def _window(self, q: Tensor, mask: Tensor | None) -> int:
        """The window still to be applied: a mask that has a row for each query, from a cache, already contains it."""
        return self.window if mask is None or mask.shape[-2] != q.shape[-2] else 0


class VariantAttention(ScoredAttention, MultiHeadAttention):
    """Multi-head attention with another score, rotary positions, a window, or dropout on the weights."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_k: int,
        d_v: int,
        *,
        score: str = "scaled",
        rotary: bool = False,
        window: int = 0,
        bias: bool = False,
        dropout: float = 0.0,
        name: str = "",
    ) -> None:
        MultiHeadAttention.__init__(self, d_model, heads, d_k, d_v, bias=bias, name=name)
        self.score, self.window, self.dropout = score, window, dropout
        self.rotary = SinusoidalPositions(d_k) if rotary else None
        self.score_weight: nn.Parameter | None = None
        if score == "general":
            self.score_weight = nn.Parameter(torch.empty(heads, d_k, d_k).normal_(std=d_k**-1.0))
        elif score == "additive":
            self.score_weight = nn.Parameter(torch.empty(heads, d_k).normal_(std=d_k**-0.5))

    def project(self, x: Tensor, position: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        if self.rotary is not None:
            table = self.rotary(position, x.shape[1])
            table = table[:, None] if table.dim() == 3 else table  # a table for each row, alike for all heads
            q, k = rotate(q, table), rotate(k, table)
        return q, k, v

    def new_cache(self) -> KVCache:
        return WindowCache(self.window) if self.window else KVCache()


@contextmanager
def record_attention() -> Iterator[dict[str, list[Tensor]]]:
    """Collect the weights of every attention inside the block, computed as printed.

    By name, e.g. `decoder.2.cross`: one tensor (batch, heads, queries, keys) for each call.
    """
    recorded: dict[str, list[Tensor]] = defaultdict(list)

    def wrap(
        attention: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        weights = attention.weights(q, k, mask, causal)
        recorded[attention.name].append(weights.detach())
        if attend != attention.attend:  # another wrapper is inside
            return attend(q, k, v, mask, causal)
        return F.dropout(weights, getattr(attention, "dropout", 0.0), getattr(attention, "training", True)) @ v

    with around_attention(wrap):
        yield recorded


def score_of(attention: MultiHeadAttention) -> tuple[str, nn.Parameter | None]:
    """Return the name of an attention's score function and the matrix that it multiplies by, if it has one."""
    return (attention.score, attention.score_weight) if isinstance(attention, VariantAttention) else ("scaled", None)


def rotary_of(attention: MultiHeadAttention) -> SinusoidalPositions | None:
    """The sinusoids of rotary positions; None without them."""
    return attention.rotary if isinstance(attention, VariantAttention) else None


# ---- windows: restricted self-attention (paper, section 4) -----------------------------------------------------------


def window_mask(
    queries: int, keys: int, window: int, *, causal: bool = False, device: torch.device | None = None
) -> Tensor:
    """Mask (1, 1, queries, keys): True for keys at most `window` positions away, and not later if `causal`."""
    key = torch.arange(keys, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - key  # (queries, keys)
    allowed = distance.abs() <= window
    return (allowed & (distance >= 0) if causal else allowed)[None, None]


def with_padding(allowed: Tensor, real: Tensor) -> Tensor:
    """Mask out padding keys too; every query keeps its own position, so that no row is empty."""
    queries, keys = allowed.shape[-2:]
    own = torch.eye(keys, dtype=torch.bool, device=allowed.device)[keys - queries :]
    return (allowed & real) | own


def attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: int,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention to a window in O(window · n): blocks of `window` queries, each with the keys around it.

    The keys of a block are its own, those of the block before and, unless causal, after it. Blocks become rows of the
    batch, so that the kernel works on (batch · blocks, heads, window, 3 · window) and nothing is n × n.
    """
    batch, n = q.shape[0], q.shape[2]
    blocks = -(-n // window)
    after = 0 if causal else window
    ends = (window, blocks * window - n + after)  # keys before the first block, and behind the last

    def around(x: Tensor) -> Tensor:  # (batch, heads, n, width) → (batch · blocks, heads, keys around a block, width)
        cut = F.pad(x, (0, 0, *ends)).unfold(2, 2 * window + after, window)  # (batch, heads, blocks, width, keys)
        return cut.permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = F.pad(q, (0, 0, 0, blocks * window - n)).unflatten(2, (blocks, window))
    query = query.transpose(1, 2).flatten(0, 1)  # (batch · blocks, heads, window, d_k)
    real = q.new_ones(1, n, dtype=torch.bool) if mask is None else mask[:, 0, 0]
    real = F.pad(real, ends).unfold(1, 2 * window + after, window)  # (batch or 1, blocks, keys)
    real = real.expand(batch, -1, -1).flatten(0, 1)[:, None, None]
    distance = torch.arange(window, device=q.device)[:, None] + window - torch.arange(real.shape[-1], device=q.device)
    near = (distance <= window) & (distance >= (0 if causal else -window))  # (window, keys)
    allowed = (near & real) | (distance == 0)
    heads: Tensor = F.scaled_dot_product_attention(query, around(k), around(v), allowed, dropout_p=dropout, scale=scale)
    heads = heads.unflatten(0, (batch, blocks))
    return heads.transpose(1, 2).flatten(2, 3)[:, :, :n]


class WindowCache(KVCache):
    """KV cache that returns only the keys within a window of the newest queries."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values, _ = super().append(k, v)
        n = k.shape[2]
        keys, values = keys[:, :, -(self.window + n) :], values[:, :, -(self.window + n) :]
        return keys, values, window_mask(n, keys.shape[2], self.window, causal=True, device=k.device)


# ---- embedding, feed-forward, residual -------------------------------------------------------------------------------


class TokenDropoutEmbedding(Embedding):
    """Token cutoff (Shen et al., 2020): in training, some tokens have a zero embedding plus their position."""

    def __init__(self, vocab: int, d_model: int, positions: Positions | None, dropout: float, rate: float) -> None:
        super().__init__(vocab, d_model, positions, dropout)
        self.rate = rate

    def forward(self, ids: Tensor, position: int | Tensor = 0) -> Tensor:
        x = self.tokens(ids) * self.scale  # (batch, length, d_model)
        if self.training:
            x = x * (torch.rand(ids.shape, device=x.device) >= self.rate)[..., None]
        if self.positions is not None:
            x = x + self.positions(position, ids.shape[1]).to(x.dtype)
        return self.dropout(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


class VariantFeedForward(nn.Module):
    """Feed-forward with another activation, or with dropout after it.

    SwiGLU (Shazeer, 2020) is (SiLU(xW₁) ⊙ xV)W₂: a third matrix, and no biases.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, activation: str = "relu") -> None:
        super().__init__()
        gated = activation == "swiglu"
        self.activation, self.dropout = activation, dropout
        self.inner = nn.Linear(d_model, d_ff, bias=not gated)
        self.outer = nn.Linear(d_ff, d_model, bias=not gated)
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        for linear in filter(None, (self.inner, self.outer, self.gate)):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.activation](self.inner(x))  # (batch, length, d_ff)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout, self.training)
        return self.outer(hidden)


class PreNormResidual(Residual):
    """x + Dropout(Sublayer(LayerNorm(x))): easier to train when deep; the stack then needs a norm at its end."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


# ---- the stacks by themselves ----------------------------------------------------------------------------------------


class DecoderOnly(Model):
    """A language model: ids (batch, length) to logits of the next token at every position (batch, length, vocab)."""

    config: DecoderOnlyConfig
    decoder: Sequence[TransformerLayer]

    def __init__(self, config: DecoderOnlyConfig, vocab: int, layers: Layers) -> None:
        super().__init__()
        self.config = config
        self.target = layers.embedding(vocab)
        self.decoder = stack(layers, "decoder", config.layers, cross=False)
        self.decoder_norm = layers.final_norm()
        self.add_output(vocab, self.target)

    def hidden(self, target: Tensor) -> Tensor:
        return self.run_decoder(target, WholeSequence())

    def start(self, encoded: None = None, beam: int = 1) -> CachedDecoding:
        """The state before the first token: without a source, it takes any number of rows."""
        return CachedDecoding([layer.attention.new_cache() for layer in self.decoder], [], None, beam)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        logits = self.project(self.run_decoder(tokens, state))
        state.advance(tokens.shape[1])
        return logits, state

    def run_decoder(self, target: Tensor, context: Context) -> Tensor:
        return run_stack(self.target, self.decoder, self.decoder_norm, target, context)


class EncoderOnly(Model):
    """Ids (batch, length), some of them hidden, to logits of the token at every position."""

    config: EncoderOnlyConfig
    encoder: Sequence[TransformerLayer]

    def __init__(self, config: EncoderOnlyConfig, vocab: int, layers: Layers) -> None:
        super().__init__()
        self.config = config
        self.source = layers.embedding(vocab)
        self.encoder = stack(layers, "encoder", config.layers, cross=False)
        self.encoder_norm = layers.final_norm()
        self.add_output(vocab, self.source)

    def hidden(self, source: Tensor, lengths: Tensor) -> Tensor:
        mask = padding_mask(source.shape[1], lengths)  # (batch, 1, 1, source)
        return run_stack(self.source, self.encoder, self.encoder_norm, source, WholeSequence(mask))
