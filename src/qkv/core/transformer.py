"""The Transformer (paper, section 3): embedding, feed-forward, residual connections, layers, encoder and decoder.

Training computes all positions at once (`hidden`), search one step at a time (`encode`, `start`, `step`). Both use the
same layers: a *context* passed to a layer decides which keys its attentions use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import CachedDecoding, Context, EncoderOutput, MultiHeadAttention, WholeSequence, padding_mask
from qkv.core.config import AttentionModelConfig, TransformerConfig
from qkv.core.errors import UsageError

# ---- the parts of a layer (sections 3.1, 3.3 to 3.5) -----------------------------------------------------------------


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same: (length, d_model)."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = position * frequency  # (length, d_model / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


class Positions(nn.Module):
    """A table with a vector for each position."""

    table: Tensor
    reach: Callable[[int], None]  # make sure that the table has so many positions

    def forward(self, position: int | Tensor, length: int) -> Tensor:
        """The rows of the table for `length` tokens; for `position` see `Embedding.forward`."""
        if isinstance(position, int):
            self.reach(position + length)
            return self.table[position : position + length]
        # Positions in a tensor must be inside the table: a check would wait for the device.
        if position.dim() == 2:
            return self.table.index_select(0, position[0])
        return self.table[position[:, None] + torch.arange(length, device=position.device)]


class SinusoidalPositions(Positions):
    """Table of sinusoids, extended for longer sequences."""

    def __init__(self, d_model: int, length: int = 512) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(length, d_model), persistent=False)

    def reach(self, length: int) -> None:
        if length > len(self.table):
            with torch.inference_mode(False):  # a table that grew during inference must also work in training
                larger = sinusoids(2 * length, self.table.shape[1]).to(self.table.device, self.table.dtype)
            self.table = larger


class Embedding(nn.Module):
    """Token embedding × √d_model, plus positions, then dropout (sections 3.4, 3.5 and 5.4)."""

    def __init__(self, vocab: int, d_model: int, positions: Positions | None, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        # After the factor √d_model an embedding has unit variance; as output weights they give unit-sized logits.
        nn.init.normal_(self.tokens.weight, std=d_model**-0.5)
        self.positions = positions
        self.scale = math.sqrt(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, position: int | Tensor = 0) -> Tensor:
        """Vectors of ids (batch, length): (batch, length, d_model).

        `position` is that of the first token, of all rows or (batch,) of each; or (1, length), that of each token.
        """
        x = self.tokens(ids) * self.scale
        if self.positions is not None:
            x = x + self.positions(position, ids.shape[1]).to(x.dtype)
        return self.dropout(x)


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2), the same at each position."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x)))  # (batch, length, d_ff) in between


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x)))."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return self.norm(x + self.dropout(sublayer(x)))


class Layers:
    """Constructors of the parts of a stack, as in the paper; variants override them."""

    implemented = frozenset(field.name for field in dataclasses.fields(TransformerConfig))

    def __init__(self, config: AttentionModelConfig) -> None:
        self.config = config
        for name, value in vars(config).items():
            if name not in self.implemented and value != getattr(type(config), name):  # other than its default
                raise UsageError(f"model.{name} = {value}: not an option of the paper's layers: use `build_model`")

    def embedding(self, vocab: int) -> Embedding:
        return Embedding(vocab, self.config.d_model, self.positions(), self.config.dropout)

    def positions(self) -> Positions | None:
        if self.config.positions != "sinusoidal":
            raise UsageError(f"model.positions = {self.config.positions}: not an option of the paper's layers")
        return SinusoidalPositions(self.config.d_model)

    def attention(self, name: str, *, cross: bool) -> MultiHeadAttention:
        c = self.config
        return MultiHeadAttention(c.d_model, c.heads, c.key_width, c.value_width, name=name)

    def feed_forward(self) -> nn.Module:
        return FeedForward(self.config.d_model, self.config.d_ff)

    def residual(self) -> nn.Module:
        return Residual(nn.LayerNorm(self.config.d_model), self.config.dropout)

    def final_norm(self) -> nn.Module:
        """The norm after the last layer: a post-norm stack already ends in one."""
        return nn.Identity()


# ---- layers ----------------------------------------------------------------------------------------------------------


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention (only to a source) and feed-forward, each inside a residual connection."""

    def __init__(self, layers: Layers, stack: str, number: int, *, cross: bool) -> None:
        super().__init__()
        self.number = number
        self.attention = layers.attention(f"{stack}.{number}.self", cross=False)
        self.cross_attention = layers.attention(f"{stack}.{number}.cross", cross=True) if cross else None
        self.feed_forward: Any = layers.feed_forward()
        self.residuals = nn.ModuleList(layers.residual() for _ in range(3 if cross else 2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cross = self.cross_attention
        x = self.residuals[0](x, lambda y: context.self_attention(self.number, self.attention, y))
        if cross is not None:
            x = self.residuals[1](x, lambda y: context.cross_attention(self.number, cross, y))
        return self.residuals[-1](x, self.feed_forward)  # (rows, n, d_model)


def stack(layers: Layers, name: str, depth: int, *, cross: bool) -> Any:
    return nn.ModuleList(TransformerLayer(layers, name, number, cross=cross) for number in range(depth))


def run_stack(embedding: nn.Module, layers: Sequence[nn.Module], norm: nn.Module, ids: Tensor, context: Any) -> Tensor:
    """Ids (rows, n) through an embedding, all layers and the final norm: (rows, n, d_model)."""
    x = embedding(ids, context.position)
    for layer in layers:
        x = layer(x, context)
    return norm(x)


# ---- models ----------------------------------------------------------------------------------------------------------


class StepModel(Protocol):
    """What search needs of a model, an ensemble or an engine. A state that was passed on must not be used again.

    `state.select(rows)` is the state of these rows, in that order; rows of a sentence stay together, `beam` at a time.
    """

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        """Run the encoder: ids (batch, source), row i with `lengths[i]` tokens and then padding."""

    def start(self, encoded: Any, beam: int = 1) -> Any:
        """The state before the first token, with `beam` rows for each sentence."""

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), free to be overwritten, and the new state."""


class Model(nn.Module):
    """What training needs of a model: `hidden` of a batch's inputs, and the matrix that makes logits of it."""

    config: Any  # the dataclass of its kind, or a ring's extension of it
    output: nn.Linear  # (vocab, d_model), without a bias
    hidden: Callable[..., Tensor]  # inputs -> (batch, length, d_model); the loss projects it in parts

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits for every position: (batch, length, vocab)."""
        return self.project(self.hidden(*inputs))

    def hidden_at(self, real: Tensor, *inputs: Tensor) -> Tensor:
        """`hidden` at the positions that are `real` (batch, length), without padding: (tokens, d_model)."""
        return self.hidden(*inputs)[real]

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output.weight)

    def add_output(self, vocab: int, embedding: Embedding) -> None:
        """The output matrix: its own, or that of the embedding (section 3.4)."""
        self.output = nn.Linear(self.config.d_model, vocab, bias=False)
        nn.init.normal_(self.output.weight, std=self.config.d_model**-0.5)
        if self.config.tie != "none":
            self.output.weight = embedding.tokens.weight


class TranslationModel(Model):
    """Source ids (batch, source), their lengths (batch,) and target ids (batch, target) to logits over the target."""

    source: Embedding
    target: Embedding
    encode: Callable[[Tensor, Tensor], Any]
    start: Callable[..., Any]
    step: Callable[[Tensor, Any], tuple[Tensor, Any]]

    def add_embeddings(self, embedding: Callable[[int], Embedding], src_vocab: int, tgt_vocab: int) -> None:
        if self.config.tie == "all" and src_vocab != tgt_vocab:
            raise UsageError(
                f'model.tie = "all" makes one matrix of vocabularies of {src_vocab} and {tgt_vocab} tokens: '
                f'share the vocabulary, or set model.tie = "output"'
            )
        self.source, self.target = embedding(src_vocab), embedding(tgt_vocab)
        if self.config.tie == "all":
            self.source.tokens.weight = self.target.tokens.weight


class Transformer(TranslationModel):
    """Encoder-decoder (figure 1); `layers` builds the parts, by default the paper's."""

    encoder: Sequence[TransformerLayer]
    decoder: Sequence[TransformerLayer]

    def __init__(self, config: TransformerConfig, src_vocab: int, tgt_vocab: int, layers: Layers | None = None) -> None:
        super().__init__()
        self.config = config
        layers = layers or Layers(config)
        self.add_embeddings(layers.embedding, src_vocab, tgt_vocab)
        self.encoder = stack(layers, "encoder", config.encoder_layers, cross=False)
        self.decoder = stack(layers, "decoder", config.decoder_layers, cross=True)
        self.encoder_norm, self.decoder_norm = layers.final_norm(), layers.final_norm()
        self.add_output(tgt_vocab, self.target)

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """The decoder's last layer (batch, target, d_model), each position from the source and the target before it."""
        return self.run_decoder(target, WholeSequence(encoded=self.encode(source, lengths)))

    def encode(self, source: Tensor, lengths: Tensor) -> EncoderOutput:
        mask = padding_mask(source.shape[1], lengths)  # (batch, 1, 1, source)
        x = run_stack(self.source, self.encoder, self.encoder_norm, source, WholeSequence(mask))
        return EncoderOutput(x, mask)

    def start(self, encoded: EncoderOutput, beam: int = 1) -> CachedDecoding:
        crosses = [layer.cross_attention for layer in self.decoder if layer.cross_attention is not None]
        sources = [cross.project_memory(encoded.values) for cross in crosses]
        return CachedDecoding([layer.attention.new_cache() for layer in self.decoder], sources, encoded.mask, beam)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits = self.project(self.run_decoder(tokens, state))
        state.advance(tokens.shape[1])
        return logits, state

    def run_decoder(self, target: Tensor, context: Context) -> Tensor:
        return run_stack(self.target, self.decoder, self.decoder_norm, target, context)
