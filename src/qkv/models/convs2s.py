"""ConvS2S (Gehring et al., 2017): gated convolutions in both stacks, and an attention in every layer of the decoder.

A convolution gathers the inputs of each position and multiplies them by one matrix. On a CPU, and in bf16 on a GPU,
this is as fast as PyTorch's convolution for full sentences, and on a CPU twice as fast for single steps; it needs no
padding for any dilation. Only the depthwise part of separable convolutions uses PyTorch's convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import attend, kept_sentences, padding_mask
from qkv.core.transformer import Embedding, Positions, SinusoidalPositions, TranslationModel
from qkv.models.variants import LearnedPositions, ScoredAttention
from qkv.options import ConvS2SConfig

REACH = 1024  # largest span of the dilations of a deep stack; then they start at 1 again
EMBEDDING_STD = 0.1  # initial standard deviation of embeddings, as published; larger ones made deep stacks diverge
ROOT_HALF = math.sqrt(0.5)  # factor on a sum of two terms that keeps the variance of one

Weights = tuple[Tensor, ...]  # normalised matrices of a layer


class WeightNorm(nn.Module):
    """A matrix kept as the length and the direction of each row: w = g · v / ‖v‖ (Salimans & Kingma, 2016)."""

    def __init__(self, inputs: int, outputs: int, *, variance: float = 1.0, bias: bool = True) -> None:
        """Initialise so that independent inputs give outputs of `variance` times their variance."""
        super().__init__()
        self.direction = nn.Parameter(torch.empty(outputs, inputs).normal_(std=math.sqrt(variance / inputs)))
        self.gain = nn.Parameter(self.direction.detach().norm(dim=1))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def weight(self) -> Tensor:
        """Return the normalised matrix (outputs, inputs)."""
        scale: Tensor = self.gain / self.direction.norm(dim=1)
        return self.direction * scale[:, None]  # (outputs, inputs)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight() if weight is None else weight, self.bias)


class GatedConvolution(nn.Module):
    """A ⊗ σ(B), where A and B are two convolutions of the same inputs (GLU; Dauphin et al., 2017).

    The `kernel` inputs of a position are `dilation` apart; the position itself is the last of them if `causal`,
    otherwise the middle one. Separable: a depthwise convolution, then a matrix over the channels, k·n·d + n·d².
    """

    def __init__(self, config: ConvS2SConfig, dilation: int, *, causal: bool) -> None:
        super().__init__()
        d, k = config.d_model, config.kernel
        last = 0 if causal else -(k // 2)
        self.offsets = [dilation * (last + k - 1 - j) for j in range(k)]  # distance of each input to the left
        kept = 1 - config.dropout  # dropout divides by it, which increases the variance of the inputs
        separable = config.convolution == "separable"
        self.depthwise = WeightNorm(k, d, variance=kept, bias=False) if separable else None
        # Initially the gate is about 0.5, which reduces the variance to a quarter.
        self.mixture = WeightNorm(d, 2 * d, variance=4) if separable else WeightNorm(k * d, 2 * d, variance=4 * kept)

    def weights(self) -> Weights:
        """Return the normalised matrices, for all steps of a search."""
        mixture = (self.mixture.weight(),)
        return mixture if self.depthwise is None else (self.depthwise.weight(), *mixture)

    def forward(self, x: Tensor, n: int, weights: Weights) -> Tensor:
        """Convolve the last n positions of x (batch, length, d_model): (batch, n, d_model)."""
        if self.depthwise is None:
            inputs = torch.cat([neighbours(x, offset, n) for offset in self.offsets], dim=-1)  # (…, kernel × d_model)
        else:
            span = neighbours(x, self.offsets[-1], n + len(self.offsets) - 1).transpose(1, 2)
            inputs = F.conv1d(span, weights[0][:, None], groups=len(weights[0])).transpose(1, 2)  # (batch, n, d_model)
        return F.glu(self.mixture(inputs, weights[-1]), dim=-1)


def neighbours(x: Tensor, offset: int, n: int) -> Tensor:
    """Return the n inputs that end `offset` positions before the end of x, zeros outside x: (batch, n, d_model)."""
    length = x.shape[1]
    first = min(max(length - n - offset, -n), length)
    start, end = max(first, 0), min(max(first + n, 0), length)
    return F.pad(x[:, start:end], (0, 0, start - first, first + n - end))


def dilations(config: ConvS2SConfig, layers: int) -> Iterator[int]:
    """Yield the dilation of each layer: 1, kernel, kernel² … up to a span of `REACH`, then from 1 again."""
    dilation = 1
    for _ in range(layers):
        yield dilation
        if config.convolution == "dilated":
            dilation = dilation * config.kernel if dilation * config.kernel**2 <= REACH else 1


@dataclass
class ConvEncoderOutput:
    """Encoder output: attention keys z and scaled values z + e, (sentences, 1, source, d_model) each."""

    keys: Tensor
    values: Tensor
    mask: Tensor  # (sentences, 1, 1, source)

    def select(self, sentences: Tensor) -> ConvEncoderOutput:
        return ConvEncoderOutput(*(part.index_select(0, sentences) for part in (self.keys, self.values, self.mask)))


@dataclass
class ConvState:
    """Decoder state: the previous inputs of each convolution, and the encoder output shared by a sentence's beams."""

    encoded: ConvEncoderOutput
    weights: list[Weights]  # of each layer, normalised once
    past: list[Tensor | None]  # last inputs of each layer (rows, positions, d_model)
    beam: int
    length: int = 0

    def select(self, rows: Tensor) -> ConvState:
        if (kept := kept_sentences(rows, self.beam, len(self.encoded.mask))) is not None:
            self.encoded = self.encoded.select(kept)
        self.past = [None if past is None else past.index_select(0, rows) for past in self.past]
        return self


class EncoderLayer(nn.Module):
    """Encoder layer: a centred gated convolution with a residual connection."""

    def __init__(self, config: ConvS2SConfig, dilation: int) -> None:
        super().__init__()
        self.convolution = GatedConvolution(config, dilation, causal=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        inputs = self.dropout(x).masked_fill(padding, 0)  # padding is zero, like positions outside the sentence
        h: Tensor = self.convolution(inputs, x.shape[1], self.convolution.weights())
        return (x + h) * ROOT_HALF


class DecoderLayer(nn.Module):
    """Decoder layer: a causal gated convolution and attention to the source, with a residual connection."""

    def __init__(self, config: ConvS2SConfig, dilation: int, name: str) -> None:
        super().__init__()
        self.convolution = GatedConvolution(config, dilation, causal=True)
        self.query = WeightNorm(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.name = f"{name}.cross"

    def weights(self) -> Weights:
        return (self.query.weight(), *self.convolution.weights())

    def forward(
        self, x: Tensor, target: Tensor, past: Tensor | None, weights: Weights, encoded: ConvEncoderOutput
    ) -> tuple[Tensor, Tensor]:
        """Compute n new positions x (rows, n, d_model) with token embeddings `target`; return them and the new past."""
        n = x.shape[1]
        inputs = self.dropout(x)
        if past is not None:
            inputs = torch.cat([past, inputs], dim=1)
        h = self.convolution(inputs, n, weights[1:])
        query = (self.query(h, weights[0]) + target) * ROOT_HALF
        h = (h + self._attend(query, encoded)) * ROOT_HALF
        reach = self.convolution.offsets[0]
        return (x + h) * ROOT_HALF, inputs[:, max(0, inputs.shape[1] - reach) :]

    def _attend(self, query: Tensor, encoded: ConvEncoderOutput) -> Tensor:
        # The beams of a sentence share its keys: they are queries of one attention, and the source is not copied.
        q = query.reshape(len(encoded.mask), 1, -1, query.shape[-1])  # (sentences, 1, beam × n, d_model)
        context = attend(ScoredAttention("dot", None, self.name), q, encoded.keys, encoded.values, encoded.mask)
        return context.reshape(query.shape)


class ConvS2S(TranslationModel):
    """Encoder-decoder: source ids (batch, source) and target ids (batch, target) to logits (batch, target, vocab)."""

    def __init__(self, config: ConvS2SConfig, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.config = config

        def embedding(vocab: int) -> Embedding:
            positions: Positions | None = None
            if config.positions == "learned":
                positions = LearnedPositions(config.d_model, config.max_positions)
            elif config.positions == "sinusoidal":
                positions = SinusoidalPositions(config.d_model)
            return Embedding(vocab, config.d_model, positions, config.dropout)

        self.add_embeddings(embedding, src_vocab, tgt_vocab)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(config, dilation) for dilation in dilations(config, config.encoder_layers)
        )
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config, dilation, f"decoder.{i}")
            for i, dilation in enumerate(dilations(config, config.decoder_layers))
        )
        self.last = WeightNorm(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.add_output(tgt_vocab, self.target)

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the last hidden states (batch, target, d_model), given the source and the target up to each."""
        return self._decode(target, self.start(self.encode(source, lengths)))

    def encode(self, source: Tensor, lengths: Tensor) -> ConvEncoderOutput:
        """Encode source ids (batch, source), each row `lengths[i]` tokens and then padding."""
        mask = padding_mask(source.shape[1], lengths)  # (batch, 1, 1, source)
        x = embedded = self.source(source) * EMBEDDING_STD  # (batch, source, d_model)
        for layer in self.encoder:
            x = layer(x, ~mask[:, 0, 0, :, None])
        # Scale the gradient, which is a sum over all decoder layers, as in the paper; x is unchanged.
        x = torch.lerp(x.detach(), x, 0.5 / len(self.decoder))
        # The mean of m vectors has 1/m of their variance: the factor √m, as in the paper, restores it.
        scale = (0.5 * lengths.to(x.dtype)).sqrt()[:, None, None]
        return ConvEncoderOutput(x[:, None], ((x + embedded) * scale)[:, None], mask)

    def start(self, encoded: ConvEncoderOutput, beam: int = 1) -> ConvState:
        """Return the decoder state before the first token, with `beam` rows for each sentence."""
        return ConvState(encoded, [layer.weights() for layer in self.decoder], [None for _ in self.decoder], beam)

    def step(self, tokens: Tensor, state: ConvState) -> tuple[Tensor, ConvState]:
        """Decode n tokens of each row (rows, n); return logits (rows, n, vocab) and the new state."""
        return self.project(self._decode(tokens, state)), state

    def _decode(self, tokens: Tensor, state: ConvState) -> Tensor:
        x = embedded = self.target(tokens, state.length) * EMBEDDING_STD  # (rows, n, d_model)
        for i, layer in enumerate(self.decoder):
            x, state.past[i] = layer(x, embedded, state.past[i], state.weights[i], state.encoded)
        state.length += tokens.shape[1]
        return self.dropout(self.last(x))
