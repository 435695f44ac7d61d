"""The Transformer (paper, section 3): encoder and decoder stacks, whole for training and step by step for search."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from qkv import config
from qkv.errors import UsageError
from qkv.models.attention import MultiHeadAttention, attention_mask
from qkv.models.layers import Embedding, FeedForward, LearnedPositions, Residual, SinusoidalPositions
from qkv.models.state import Cache, Memory, TransformerState


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each inside a residual connection."""

    def __init__(self, spec: config.Transformer, name: str) -> None:
        super().__init__()
        self.attention = _attention(spec, f"{name}.self")
        self.feed_forward = FeedForward(spec.d_model, spec.d_ff, spec.activation_dropout)
        self.residuals = _residuals(spec, 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.residuals[0](x, lambda y: self.attention(*self.attention.project(y), mask))
        x = self.residuals[1](x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Masked self-attention, encoder-decoder attention and feed-forward, each inside a residual connection."""

    def __init__(self, spec: config.Transformer, name: str) -> None:
        super().__init__()
        self.attention = _attention(spec, f"{name}.self")
        self.cross_attention = _attention(spec, f"{name}.cross")
        self.feed_forward = FeedForward(spec.d_model, spec.d_ff, spec.activation_dropout)
        self.residuals = _residuals(spec, 3)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """All target positions at once (teacher forcing): x (batch, target, d_model)."""
        k, v = self.cross_attention.project_memory(memory.values)
        x = self.residuals[0](x, lambda y: self.attention(*self.attention.project(y), causal=True))
        x = self.residuals[1](
            x, lambda y: self.cross_attention(self.cross_attention.project_query(y), k, v, memory.mask)
        )
        x = self.residuals[2](x, self.feed_forward)
        return x

    def step(self, x: Tensor, cache: Cache, memory: tuple[Tensor, Tensor], state: TransformerState) -> Tensor:
        """The newest n target positions: x (rows, n, d_model), rows = sentences × beam."""

        def attend_to_past(y: Tensor) -> Tensor:
            q, k, v = self.attention.project(y)
            k, v = cache.append(k, v, state.length)
            n, past = q.shape[2], k.shape[2]
            mask = None if n == 1 else attention_mask(n, past, causal=True, device=q.device)
            attended: Tensor = self.attention(q, k, v, mask)
            return attended

        def attend_to_source(y: Tensor) -> Tensor:
            # All beams of a sentence read the same source, so they are queries of one attention: nothing is copied.
            rows, n, width = y.shape
            q = self.cross_attention.project_query(y.reshape(rows // state.beam, state.beam * n, width))
            attended: Tensor = self.cross_attention(q, *memory, state.mask)
            return attended.reshape(rows, n, width)

        x = self.residuals[0](x, attend_to_past)
        x = self.residuals[1](x, attend_to_source)
        x = self.residuals[2](x, self.feed_forward)
        return x


class Transformer(nn.Module):
    """Encoder-decoder: source ids (batch, source) and target ids (batch, target) to logits (batch, target, vocab)."""

    def __init__(self, spec: config.Transformer, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        if spec.tie == "all" and src_vocab != tgt_vocab:
            raise UsageError(
                f'model.tie = "all" makes one matrix of vocabularies of {src_vocab} and {tgt_vocab} tokens: '
                f'share the vocabulary, or set model.tie = "output"'
            )
        self.spec = spec
        self.source = Embedding(src_vocab, spec.d_model, _positions(spec), spec.dropout)
        self.target = Embedding(tgt_vocab, spec.d_model, _positions(spec), spec.dropout)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(spec, f"encoder.{i}") for i in range(spec.encoder_layers)
        )
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(spec, f"decoder.{i}") for i in range(spec.decoder_layers)
        )
        # Post-norm stacks end in a norm already; pre-norm ones need a last one.
        pre = spec.norm == "pre"
        self.encoder_norm = nn.LayerNorm(spec.d_model) if pre else nn.Identity()
        self.decoder_norm = nn.LayerNorm(spec.d_model) if pre else nn.Identity()
        self.output = nn.Linear(spec.d_model, tgt_vocab, bias=False)
        nn.init.normal_(self.output.weight, std=spec.d_model**-0.5)
        if spec.tie in ("all", "output"):
            self.output.weight = self.target.tokens.weight
        if spec.tie == "all":
            self.source.tokens.weight = self.target.tokens.weight

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Logits for every target position, each from the source and the target before it."""
        return self.project(self.hidden(source, lengths, target))

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """The decoder's last layer (batch, target, d_model): the loss projects it, so that it can do so in parts."""
        memory = self.encode(source, lengths)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory)
        normed: Tensor = self.decoder_norm(x)
        return normed

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output.weight)

    def encode(self, source: Tensor, lengths: Tensor) -> Memory:
        """Run the encoder once: source ids (batch, source), each row `lengths[i]` tokens and then padding."""
        mask = attention_mask(1, source.shape[1], lengths)  # (batch, 1, 1, source)
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return Memory(self.encoder_norm(x), mask)

    def start(self, memory: Memory, beam: int = 1) -> TransformerState:
        """The state before the first token, with `beam` rows for each sentence."""
        projected = [layer.cross_attention.project_memory(memory.values) for layer in self.decoder]
        return TransformerState([Cache() for _ in self.decoder], projected, memory.mask, beam)

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        x = self.target(tokens, start=state.length)
        for layer, cache, memory in zip(self.decoder, state.caches, state.memory, strict=True):
            x = layer.step(x, cache, memory, state)
        state.length += tokens.shape[1]
        return self.project(self.decoder_norm(x)), state


def build(spec: config.Model, src_vocab: int, tgt_vocab: int) -> Transformer:
    """The model that a config describes, freshly initialised from torch's random state."""
    return Transformer(spec, src_vocab, tgt_vocab)


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _attention(spec: config.Transformer, name: str) -> MultiHeadAttention:
    d_k, d_v = spec.d_k or spec.d_model // spec.heads, spec.d_v or spec.d_model // spec.heads
    return MultiHeadAttention(
        spec.d_model, spec.heads, d_k, d_v, bias=spec.bias, dropout=spec.attention_dropout, name=name
    )


def _residuals(spec: config.Transformer, count: int) -> nn.ModuleList:
    return nn.ModuleList(Residual(spec.d_model, spec.norm, spec.dropout) for _ in range(count))


def _positions(spec: config.Transformer) -> nn.Module:
    if spec.positions == "learned":
        return LearnedPositions(spec.d_model, spec.max_positions)
    return SinusoidalPositions(spec.d_model)
