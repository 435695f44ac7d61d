"""Weights as the C of this package reads them: the structs of native.h, filled from a model.

Widths are padded with zeros to a multiple of `panel`, a head's to a multiple of `lanes`; padding stays zero through
every layer. The factor √d_model is in the embeddings and 1/√d_k in W^Q.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qkv.models.attention import MultiHeadAttention
from qkv.models.layers import Embedding
from qkv.models.packed_transformer import scaled
from qkv.models.transformer import DecoderOnly, Transformer

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
KINDS = ("relu", "gelu", "swiglu")  # as native.h counts them


class Matrix(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("scale", POINTER), ("bias", POINTER), ("inputs", INTEGER), ("outputs", INTEGER)]


class Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double)]


class Layer(ctypes.Structure):
    _fields_ = [(name, Matrix) for name in "project output ask read found inner gate outer".split()] + [
        (name, Norm) for name in "attention cross feed_forward".split()
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        *((name, INTEGER) for name in "encoder_layers decoder_layers".split()),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("output", Matrix),
        *((name, POINTER) for name in "source target".split()),
        *((name, INTEGER) for name in "source_vocabulary target_vocabulary".split()),
        ("real", POINTER),
        *((name, INTEGER) for name in "d_model width heads head inner pre activation half".split()),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, INTEGER) for name in "sentences beam n count".split()),
        *((name, POINTER) for name in "rows tokens length origin".split()),
        ("capacity", INTEGER),
        ("pages", POINTER),
        ("pages_each", INTEGER),
        *((name, POINTER) for name in "source source_length positions rotary hidden logits".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


class Encode(ctypes.Structure):
    _fields_ = [
        ("sentences", INTEGER),
        *((name, POINTER) for name in "tokens start source positions rotary".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass
class Layout:
    """How wide things are, and the tensors that the structs point into."""

    lanes: int
    panel: int
    bytes: bool  # weights are rounded to bytes
    held: list[Tensor] = field(default_factory=list)

    def hold(self, x: Tensor) -> int:
        """Where a copy of it lies, as long as this is held."""
        self.held.append(x.detach().contiguous().clone())
        return self.held[-1].data_ptr()

    def padded(self, x: Tensor, *sizes: int) -> Tensor:
        """Zeros behind x in every dimension."""
        wide = x.new_zeros(sizes)
        wide[tuple(slice(0, size) for size in x.shape)] = x.detach()
        return wide

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A weight (outputs, inputs) in panels."""
        outputs, inputs = (up(size, self.panel) for size in weight.shape)
        whole = self.padded(weight.float(), outputs, inputs)
        made = Matrix(inputs=inputs, outputs=outputs)
        if bias is not None:
            made.bias = self.hold(self.padded(bias.float(), outputs))
        panels = whole.view(-1, self.panel, inputs)
        if self.bytes:
            scale = whole.abs().amax(1).clamp_min(1e-12) / 127
            rounded = (whole / scale[:, None]).round().add_(128).to(torch.uint8)
            made.scale = self.hold(scale)
            made.weight = self.hold(rounded.view(-1, self.panel, inputs // 4, 4).transpose(1, 2))
        else:
            made.weight = self.hold(panels.transpose(1, 2))
        return made

    def norm(self, norm: nn.Module, width: int) -> Norm:
        if isinstance(norm, nn.Identity):
            return Norm()
        weight, bias = norm.weight, getattr(norm, "bias", None)
        assert isinstance(weight, Tensor)
        made = Norm(weight=self.hold(self.padded(weight, width)), eps=norm.eps)
        if isinstance(bias, Tensor):
            made.bias = self.hold(self.padded(bias, width))
        return made

    def heads(self, attention: MultiHeadAttention) -> tuple[int, int]:
        """How many heads of which width, padding among them, lie side by side."""
        width, count = up(attention.d_k, self.lanes), attention.heads
        while count * width % self.panel:
            count += 1
        return count, width

    def attention(self, attention: MultiHeadAttention) -> tuple[list[tuple[Tensor, Tensor | None]], Matrix]:
        """W^Q, W^K and W^V with their biases, their outputs padded head by head, and W^O with its inputs."""
        count, width = self.heads(attention)
        shape = (attention.heads, attention.d_k)
        weight, bias = scaled(attention)

        def spread(part: Tensor) -> Tensor:  # (heads · d_k, …) to (padded heads · padded width, …)
            rest = part.shape[1:]
            return self.padded(part.view(*shape, *rest), count, width, *rest).flatten(0, 1)

        weights = [spread(part) for part in weight.chunk(3)]
        biases = [None] * 3 if bias is None else [spread(part) for part in bias.chunk(3)]
        output = spread(attention.output.weight.t().contiguous()).t()
        return list(zip(weights, biases, strict=True)), self.matrix(output, attention.output.bias)

    def together(self, parts: list[tuple[Tensor, Tensor | None]]) -> Matrix:
        """Several projections of the same as one matrix."""
        weights, biases = zip(*parts, strict=True)
        return self.matrix(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def layer(self, layer: Any, width: int) -> Layer:
        made = Layer()
        parts, made.output = self.attention(layer.attention)
        made.project = self.together(parts)
        cross = getattr(layer, "cross_attention", None)
        if cross is not None:
            (query, *read), made.found = self.attention(cross)
            made.ask, made.read = self.matrix(*query), self.together(read)
            made.cross = self.norm(layer.residuals[1].norm, width)
        forward = layer.feed_forward
        made.inner = self.matrix(forward.inner.weight, forward.inner.bias)
        made.outer = self.matrix(forward.outer.weight, forward.outer.bias)
        if forward.gate is not None:
            made.gate = self.matrix(forward.gate.weight, None)
        made.attention = self.norm(layer.residuals[0].norm, width)
        made.feed_forward = self.norm(layer.residuals[-1].norm, width)
        return made

    def embedding(self, embedding: Embedding, width: int) -> int:
        return self.hold(
            self.padded(embedding.tokens.weight.float() * embedding.scale, len(embedding.tokens.weight), width)
        )

    def model(self, model: Transformer | DecoderOnly, *, half: bool) -> Model:
        """All of it; `half` keeps keys and values as bf16."""
        spec = model.spec
        width = up(spec.d_model, self.panel)
        decoder = [self.layer(layer, width) for layer in model.decoder]
        heads, head = self.heads(model.decoder[0].attention)
        made = Model(
            decoder=(Layer * len(decoder))(*decoder),
            decoder_layers=len(decoder),
            decoder_norm=self.norm(model.decoder_norm, width),
            output=self.matrix(model.output.weight, None),
            target=self.embedding(model.target, width),
            target_vocabulary=len(model.target.tokens.weight),
            real=self.hold(self.padded(torch.ones(spec.d_model), width)),
            d_model=spec.d_model,
            width=width,
            heads=heads,
            head=head,
            inner=decoder[0].inner.outputs,
            pre=spec.norm == "pre",
            activation=KINDS.index(spec.activation),
            half=half,
        )
        if isinstance(model, Transformer):
            encoder = [self.layer(layer, width) for layer in model.encoder]
            made.encoder, made.encoder_layers = (Layer * len(encoder))(*encoder), len(encoder)
            made.encoder_norm = self.norm(model.encoder_norm, width)
            shared = model.source.tokens.weight is model.target.tokens.weight
            made.source = made.target if shared else self.embedding(model.source, width)
            made.source_vocabulary = len(model.source.tokens.weight)
        return made
