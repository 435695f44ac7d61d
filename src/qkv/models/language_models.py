"""The Transformer's stacks by themselves: the decoder as a language model, the encoder to fill in hidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qkv.core.attention import CachedDecoding, Context, WholeSequence, attention_mask
from qkv.core.transformer import Layers, Model, TransformerLayer, run_stack, stack
from qkv.options import DecoderOnlyConfig, EncoderOnlyConfig


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
        mask = attention_mask(1, source.shape[1], lengths)  # (batch, 1, 1, source)
        return run_stack(self.source, self.encoder, self.encoder_norm, source, WholeSequence(mask))
