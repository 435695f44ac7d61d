"""Training without padding: the tokens of a batch are one long row, padded to rows inside attention alone.

Embedding, projections, feed-forward and norms work on (1, tokens, d_model), so that no time is spent on padding. Inside
attention, the heads are padded to (batch, heads, length, width) and packed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core.attention import EncoderOutput, MultiHeadAttention, attend, padding_mask
from qkv.core.transformer import Embedding, Residual, Transformer, run_stack
from qkv.engines import LAYERS, AllowList, number
from qkv.models.variants import reach_positions
from qkv.options import ModelConfig, TransformerConfig

MODEL = AllowList(
    "model",
    TransformerConfig,
    **LAYERS,
    kind=("transformer",),
    attention=("scaled", "dot", "additive", "general"),
    window=number,
)


def supports(config: ModelConfig) -> str | None:
    """Return None if a model of this config can be trained without padding, else the reason why not."""
    return MODEL.refusal(config)


class ShortDropout(nn.Dropout):
    """Dropout with 16 random bits per number for its mask on a CPU, drawn four times as fast as PyTorch's mask."""

    def forward(self, x: Tensor) -> Tensor:
        out_of = 2**16
        dropped = round(self.p * out_of)
        if not self.training or not x.is_cpu or not 0 < dropped < out_of:
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = torch.ge(bits[: x.numel()].view(x.shape), dropped - out_of // 2, out=torch.empty_like(x))
        return x * kept.mul_(out_of / (out_of - dropped))


def use_short_dropout(model: nn.Module) -> None:
    """Replace the dropout of embeddings and residual connections, in place."""
    for module in model.modules():
        if isinstance(module, Embedding | Residual):
            module.dropout.__class__ = ShortDropout


class UnpaddedTransformer(Transformer):
    """The Transformer, trained without padding."""

    def hidden_at(self, real: Tensor, *inputs: Tensor) -> Tensor:
        source, lengths, target = inputs
        mask = padding_mask(source.shape[1], lengths)  # (batch, 1, 1, source)
        read, written = Unpadded(mask[:, 0, 0]), Unpadded(real)
        reach_positions(self.source, self.encoder, read.length)
        reach_positions(self.target, self.decoder, written.length)
        reading = UnpaddedContext(read, mask)
        values = run_stack(self.source, self.encoder, self.encoder_norm, read.pack_ids(source), reading)
        encoded = EncoderOutput(values, mask)
        return self.run_decoder(written.pack_ids(target), UnpaddedContext(written, None, read, encoded))[0]


class Unpadded:
    """The places of the tokens of a batch: `real` (batch, length), in each row from the left."""

    def __init__(self, real: Tensor) -> None:
        self.batch, self.length = real.shape
        flat = real.flatten()
        self.places = flat.nonzero().squeeze(1)  # (tokens,): the place of each in (batch · length)
        # (batch · length,): the token at each place, or the last before
        self.tokens = (flat.cumsum(0) - 1).clamp(min=0)
        self.positions = (self.places % self.length)[None]  # (1, tokens): the position of each in its row

    def pack_ids(self, ids: Tensor) -> Tensor:
        """Ids (batch, length) without padding: (1, tokens)."""
        return ids.flatten()[self.places][None]

    def pad(self, heads: Tensor) -> Tensor:
        """Heads (1, heads, tokens, width) in padded rows: (batch, heads, length, width)."""
        flat = heads[0].transpose(0, 1).flatten(1)  # (tokens, heads · width)
        padded: Tensor = _Pad.apply(flat, self.tokens, self.places)  # type: ignore[no-untyped-call]
        return padded.view(self.batch, self.length, heads.shape[1], heads.shape[3]).transpose(1, 2)

    def pack(self, heads: Tensor) -> Tensor:
        """The reverse: (batch, heads, length, width) to (1, heads, tokens, width)."""
        flat = heads.transpose(1, 2).flatten(2).flatten(0, 1)  # (batch · length, heads · width)
        packed: Tensor = _Pack.apply(flat, self.places)  # type: ignore[no-untyped-call]
        return packed.view(1, len(packed), heads.shape[1], heads.shape[3]).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Padding repeats the token before it, which costs less than zeros; its gradient is never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens) if len(x) else x.new_zeros(len(tokens), x.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Pack(torch.autograd.Function):
    """Each place is taken once, so gradients are copied back without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, places, gradient), None


@dataclass
class UnpaddedContext:
    """Context of either stack over unpadded tokens (1, tokens, d_model); a decoder also has the encoder's output."""

    own: Unpadded
    mask: Tensor | None  # of the encoder's self-attention; a decoder's is causal
    source: Unpadded | None = None
    encoded: EncoderOutput | None = None  # its values are unpadded too

    def __post_init__(self) -> None:
        self.position = self.own.positions

    def self_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        q, k, v = map(self.own.pad, attention.project(x, self.position))
        heads = attend(attention, q, k, v, self.mask, self.source is not None)
        return attention.merge(self.own.pack(heads))

    def cross_attention(self, layer: int, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        assert self.source is not None
        assert self.encoded is not None
        k, v = map(self.source.pad, attention.project_memory(self.encoded.values))
        heads = attend(attention, self.own.pad(attention.project_query(x)), k, v, self.encoded.mask)
        return attention.merge(self.own.pack(heads))
