"""Training without padding, and without the logits of a whole batch: plain PyTorch, for every device.

The tokens of a batch are one long row, padded to rows inside attention alone. Embedding, projections, feed-forward and
norms work on (1, tokens, d_model), so that no time is spent on padding. Inside attention, the heads are padded to
(batch, heads, length, width) and packed again.

The loss is computed in parts: `loss_in_parts` projects some hundred tokens at a time to the vocabulary and takes the
gradients at once, so that the logits of a whole batch never exist. Values and gradients are those of the core's loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core.attention import EncoderOutput, MultiHeadAttention, attend, padding_mask
from qkv.core.transformer import Embedding, Residual, Transformer, TransformerLayer, run_stack
from qkv.options import FLAG, SIZES, AllowList, ModelConfig, TransformerConfig, number

MODEL = AllowList(
    "model",
    TransformerConfig,
    **SIZES,
    norm=("post", "pre"),
    rms_norm=FLAG,
    activation=("relu", "gelu", "swiglu"),
    positions=("sinusoidal", "learned", "rotary", "none"),
    bias=FLAG,
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
    """Replace the dropout of embeddings and residual connections by `ShortDropout`, in place."""
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


def reach_positions(embedding: Embedding, layers: Iterable[TransformerLayer], length: int) -> None:
    """Grow the tables of positions of a stack to this length; a table that cannot grow refuses."""
    for positions in (embedding.positions, *(getattr(layer.attention, "rotary", None) for layer in layers)):
        if positions is not None:
            positions.reach(length)


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
    """Attention context over unpadded tokens (1, tokens, d_model); a decoder's also has the encoder's output."""

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


# ---- the loss in parts -----------------------------------------------------------------------------------------------

ROWS = 512  # tokens projected at once: their logits stay in the cache of a CPU; a GPU takes twice as many


def loss_in_parts(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    """Return what `label_smoothed_loss` of the core returns, in less time and memory; `hidden` may be padded, too."""
    real = labels != pad
    hidden, labels = hidden[real] if hidden.dim() > labels.dim() else hidden, labels[real]  # (tokens, d_model)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, nll = _LossInParts.apply(hidden, weight, labels, smoothing, needs_grad)  # type: ignore[no-untyped-call]
    return loss, nll


class _LossInParts(torch.autograd.Function):
    """Computes the gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return loss and −log p; the softmax is in fp32, whatever the inputs are."""
        ctx.dtypes, device = (hidden.dtype, weight.dtype), hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            hidden, weight = hidden.to(compute), weight.to(compute)
            loss = hidden.new_zeros((), dtype=torch.float32)
            nll = loss.clone()
            mean = weight.float().mean(0)  # its product with a hidden state is the mean of the logits
            d_hidden = torch.empty_like(hidden) if needs_grad else None
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
            parts = max(1, round(len(hidden) / (ROWS if hidden.is_cpu else 2 * ROWS)))
            # Equal parts: a short last part would pass over all of d_weight too.
            rows = max(1, -(-len(hidden) // parts))
            for first in range(0, len(hidden), rows):
                part = slice(first, first + rows)
                h, y = hidden[part], labels[part, None]
                logits = (h @ weight.T).float()  # (rows, vocab)
                own, largest = logits.gather(-1, y), logits.amax(-1, keepdim=True)  # (rows, 1)
                p = logits.sub_(largest).exp_()
                z = p.sum(-1, keepdim=True)
                log_z = largest + z.log()
                part_nll = (log_z - own).sum()
                loss += (1 - smoothing) * part_nll + smoothing * (log_z.sum() - (h.float() @ mean).sum())
                nll += part_nll
                if d_hidden is not None and d_weight is not None:
                    # d loss / d logits = softmax − targets; the ε/V of every target is subtracted through the mean
                    d_logits = p.div_(z).scatter_add_(-1, y, p.new_full(y.shape, smoothing - 1)).to(hidden.dtype)
                    d_hidden[part] = d_logits @ weight - smoothing * mean
                    if h.dtype == torch.float32:  # not `addmm_`, which torch's operation counter misses
                        torch.addmm(d_weight, d_logits.T, h, out=d_weight)
                    else:
                        d_weight += d_logits.T @ h
            if d_weight is not None:
                d_weight -= smoothing / len(weight) * hidden.float().sum(0)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(ctx.dtypes[0]), (d_weight * d_loss).to(ctx.dtypes[1]), None, None, None
