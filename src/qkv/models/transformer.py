"""The Transformer (paper, section 3): encoder and decoder stacks, whole for training and step by step for search.

Both stacks also stand alone: the decoder as a language model, the encoder as a model that fills in hidden tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from qkv.models.attention import MultiHeadAttention, attention_mask
from qkv.models.base import Model, TranslationModel, make_positions
from qkv.models.layers import Embedding, FeedForward, Residual, SinusoidalPositions, make_norm
from qkv.models.rows import Rows
from qkv.models.state import Cache, DecoderState, Memory, TransformerState
from qkv.options import AttentionModelConfig, DecoderOnlyConfig, EncoderOnlyConfig, TransformerConfig

StateT = TypeVar("StateT", bound=DecoderState)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each inside a residual connection."""

    def __init__(self, spec: AttentionModelConfig, name: str) -> None:
        super().__init__()
        self.window = spec.window
        self.attention = _attention(spec, f"{name}.self")
        self.feed_forward = FeedForward(spec.d_model, spec.d_ff, spec.activation_dropout, spec.activation)
        self.residuals = _residuals(spec, 2)

    def forward(self, x: Tensor, mask: Tensor | None, rows: Rows | None = None) -> Tensor:
        """All source positions at once: x (batch, source, d_model), or `rows` laid end to end (1, tokens, d_model)."""
        own, both = self.attention, rows and (rows, rows)
        x = self.residuals[0](x, lambda y: own(*own.project(y, rows=rows), mask, window=self.window, rows=both))
        x = self.residuals[1](x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Masked self-attention, encoder-decoder attention and feed-forward, each inside a residual connection.

    A language model has no encoder, and its layers no attention to one.
    """

    def __init__(self, spec: AttentionModelConfig, name: str, *, cross: bool = True) -> None:
        super().__init__()
        self.window = spec.window
        self.attention = _attention(spec, f"{name}.self")
        self.cross_attention = _attention(spec, f"{name}.cross") if cross else None
        self.feed_forward = FeedForward(spec.d_model, spec.d_ff, spec.activation_dropout, spec.activation)
        self.residuals = _residuals(spec, 3 if cross else 2)

    def forward(self, x: Tensor, memory: Memory | None = None, rows: tuple[Rows, Rows] | None = None) -> Tensor:
        """All target positions at once (teacher forcing): x (batch, target, d_model).

        With `rows`, of target and source, x and the memory are these laid end to end (1, tokens, d_model).
        """
        own, cross = self.attention, self.cross_attention
        target, both = rows and rows[0], rows and (rows[0], rows[0])
        x = self.residuals[0](
            x, lambda y: own(*own.project(y, rows=target), causal=True, window=self.window, rows=both)
        )
        if cross is not None and memory is not None:
            k, v = cross.project_memory(memory.values)
            x = self.residuals[1](x, lambda y: cross(cross.project_query(y), k, v, memory.mask, rows=rows))
        x = self.residuals[-1](x, self.feed_forward)
        return x

    def step(self, x: Tensor, state: DecoderState, layer: int) -> Tensor:
        """The newest n target positions: x (rows, n, d_model), rows = sentences × beam; the state knows the others."""
        x = self.residuals[0](x, lambda y: state.attend_to_past(layer, self.attention, y, self.window))
        cross = self.cross_attention
        if cross is not None:
            x = self.residuals[1](x, lambda y: state.attend_to_source(layer, cross, y))
        x = self.residuals[-1](x, self.feed_forward)
        return x


class Transformer(TranslationModel):
    """Encoder-decoder: source ids (batch, source) and target ids (batch, target) to logits (batch, target, vocab)."""

    def __init__(self, spec: TransformerConfig, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.spec = spec
        self.add_embeddings(spec, src_vocab, tgt_vocab, spec.positions, spec.max_positions)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(spec, f"encoder.{i}") for i in range(spec.encoder_layers)
        )
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(spec, f"decoder.{i}") for i in range(spec.decoder_layers)
        )
        self.encoder_norm, self.decoder_norm = _last_norm(spec), _last_norm(spec)
        self.tie(spec, tgt_vocab)

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor, real: Tensor | None = None) -> Tensor:
        """The decoder's last layer (batch, target, d_model), each position from the source and the target before it.

        `real` (batch, target) says which positions of the target are tokens, in each row from the left. Then padding is
        computed on neither side, and the result is that of the tokens, end to end (1, tokens, d_model).
        """
        rows = None
        if real is not None:
            rows = Rows(real), Rows(attention_mask(1, source.shape[1], lengths)[:, 0, 0])
            source, target = rows[1].lay(source), rows[0].lay(target)
        memory = self.encode(source, lengths, rows and rows[1])
        x = self.target(target, rows=rows and rows[0])
        for layer in self.decoder:
            x = layer(x, memory, rows)
        normed: Tensor = self.decoder_norm(x)
        return normed

    def hidden_at(self, real: Tensor, *inputs: Tensor) -> Tensor:
        source, lengths, target = inputs
        return self.hidden(source, lengths, target, real)[0]

    def encode(self, source: Tensor, lengths: Tensor, rows: Rows | None = None) -> Memory:
        """Run the encoder once: source ids (batch, source), each row `lengths[i]` tokens and then padding.

        Or `rows` of them laid end to end, (1, tokens).
        """
        mask = attention_mask(1, rows.length if rows else source.shape[1], lengths)  # (batch, 1, 1, source)
        x = self.source(source, rows=rows)
        for layer in self.encoder:
            x = layer(x, mask, rows)
        return Memory(self.encoder_norm(x), mask)

    def start(self, memory: Memory, beam: int = 1) -> TransformerState:
        """The state before the first token, with `beam` rows for each sentence."""
        projected = [
            layer.cross_attention.project_memory(memory.values) for layer in self.decoder if layer.cross_attention
        ]
        return TransformerState([Cache() for _ in self.decoder], projected, memory.mask, beam)

    def step(self, tokens: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        return self.project(_newest(self, tokens, state)), state


class DecoderOnly(Model):
    """A language model: ids (batch, length) to logits of the next token at every position (batch, length, vocab)."""

    def __init__(self, spec: DecoderOnlyConfig, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        positions = make_positions(spec.positions, spec.d_model, spec.max_positions)
        self.target = Embedding(vocab, spec.d_model, positions, spec.dropout, spec.token_dropout)
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(spec, f"decoder.{i}", cross=False) for i in range(spec.layers)
        )
        self.decoder_norm = _last_norm(spec)
        self.add_output(vocab, spec.d_model, self.target if spec.tie == "output" else None)

    def hidden(self, target: Tensor) -> Tensor:
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x)
        normed: Tensor = self.decoder_norm(x)
        return normed

    def start(self, memory: None = None, beam: int = 1) -> TransformerState:
        """The state before the first token; there is no source, so nothing to remember, and any number of rows."""
        return TransformerState([Cache() for _ in self.decoder], [None for _ in self.decoder], None, beam)

    def step(self, tokens: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        return self.project(_newest(self, tokens, state)), state


class EncoderOnly(Model):
    """Ids (batch, length), of which some may be hidden, to logits of the token at every position."""

    def __init__(self, spec: EncoderOnlyConfig, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        positions = make_positions(spec.positions, spec.d_model, spec.max_positions)
        self.source = Embedding(vocab, spec.d_model, positions, spec.dropout, spec.token_dropout)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(spec, f"encoder.{i}") for i in range(spec.layers)
        )
        self.encoder_norm = _last_norm(spec)
        self.add_output(vocab, spec.d_model, self.source if spec.tie == "output" else None)

    def hidden(self, source: Tensor, lengths: Tensor) -> Tensor:
        mask = attention_mask(1, source.shape[1], lengths)  # (batch, 1, 1, source)
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, mask)
        normed: Tensor = self.encoder_norm(x)
        return normed


def _newest(model: Transformer | DecoderOnly, tokens: Tensor, state: DecoderState) -> Tensor:
    """The decoder's last layer at n more tokens of each row; the state moves behind them."""
    x = model.target(tokens, start=state.length)
    for i, layer in enumerate(model.decoder):
        x = layer.step(x, state, i)
    state.move(tokens.shape[1])
    normed: Tensor = model.decoder_norm(x)
    return normed


def _attention(spec: AttentionModelConfig, name: str) -> MultiHeadAttention:
    rotary = spec.positions == "rotary" and not name.endswith("cross")  # source and target have no common distance
    return MultiHeadAttention(
        spec.d_model,
        spec.heads,
        spec.key_width,
        spec.value_width,
        score=spec.attention,
        rotary=SinusoidalPositions(spec.key_width) if rotary else None,
        bias=spec.bias,
        dropout=spec.attention_dropout,
        name=name,
    )


def _residuals(spec: AttentionModelConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(Residual(spec.d_model, spec.norm, spec.dropout, spec.rms_norm) for _ in range(count))


def _last_norm(spec: AttentionModelConfig) -> nn.Module:
    """Post-norm stacks end in a norm already; pre-norm ones need a last one."""
    return make_norm(spec.d_model, spec.rms_norm) if spec.norm == "pre" else nn.Identity()
