"""The Transformer on a CPU, for the search alone: the same four calls as its plain original, made of few operations.

What is different from the original, and why:

- Every matrix is packed (`packed_linear`), and those by which all decoder layers read the source are one.
- Attention of few queries is two batched products and a softmax, which is faster here than the fused kernel.
- The beams of a sentence share one cache, position by position. When the search reorders them nothing is copied: each
  hypothesis remembers which of the entries are its own, and a mask leaves it those. What all of them have in common is
  kept once.

No weights are recorded here and no heads muted: that is what the original is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import MultiHeadAttention, attention_mask, kept_sentences
from qkv.core.transformer import Embedding, FeedForward, Transformer
from qkv.models.language_models import DecoderOnly
from qkv.models.variants import ACTIVATIONS, PreNormResidual, rotary_of, rotate, score_of

ROOM = 8  # positions by which a cache grows
SHORT = 128  # tokens up to which a sentence's attention to itself is faster as two products
BLOCK = 512  # source tokens that are encoded at a time

Product = Callable[..., Tensor]
Pack = Callable[[Tensor, Tensor | None], Product]  # a weight (outputs, inputs) and a bias to their product
KeysValues = tuple[Tensor, Tensor]


# ---- what is remembered ----------------------------------------------------------------------------------------------


@dataclass
class PackedMemory:
    """The source as each layer reads it: keys (sentences · heads, d_k, source) and values (…, source, d_v)."""

    layers: list[KeysValues]
    mask: Tensor | None  # 0 or -inf (sentences, 1, 1, source); None if no sentence is padded
    sentences: int

    def select(self, stay: Tensor) -> PackedMemory:
        def chosen(x: Tensor) -> Tensor:
            whole: Tensor = x.unflatten(0, (self.sentences, -1))
            return whole.index_select(0, stay).flatten(0, 1)

        mask = None if self.mask is None else self.mask.index_select(0, stay)
        return PackedMemory([(chosen(k), chosen(v)) for k, v in self.layers], mask, len(stay))


@dataclass
class PackedState:
    """What the decoder remembers: its own past, and the source once for all beams of a sentence.

    A cache has one entry for each of the first `settled` positions, where all beams of a sentence have the same past,
    and `beam` entries for every later one. Attention goes over the whole of it, whose kernels want it in one piece;
    what is another's or not filled is masked.
    """

    memory: PackedMemory | None
    beam: int
    dtype: torch.dtype = torch.float32  # of keys and values
    position: int = 0
    settled: int = 0
    past: list[Tensor] = field(default_factory=list)  # of each layer keys, values (2, sentences, heads, entries, width)
    own: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # 0 for a row's own, else -inf (rows, entries)

    def entry(self, position: int) -> int:
        """The first entry of a position that is not settled."""
        return self.settled + (position - self.settled) * self.beam

    def select(self, rows: Tensor) -> PackedState:
        sentences = self.past[0].shape[1] if self.past else self.memory.sentences if self.memory else 0
        if sentences and (stay := kept_sentences(rows, self.beam, sentences)) is not None:
            self.past = [both.index_select(1, stay) for both in self.past]
            self.memory = self.memory and self.memory.select(stay)
        if self.past:
            self.own = self.own.index_select(0, rows)
        return self

    def make_room(self, rows: int, n: int, shapes: list[tuple[int, int]]) -> None:
        """Let the caches hold n more positions of each row; `shapes` are heads and width of every layer."""
        end = self.position + n
        if self.entry(end) > self.own.shape[1]:
            self._grow(rows, end, shapes)
        entries = self.own[:, self.settled :].unflatten(1, (-1, self.beam)).unflatten(0, (-1, self.beam))
        entries[:, :, self.position - self.settled : end - self.settled].diagonal(dim1=1, dim2=3).zero_()

    def _grow(self, rows: int, end: int, shapes: list[tuple[int, int]]) -> None:
        before, filled, shared = self.settled, self.entry(self.position), self._settle()  # (sentences, newly settled)
        first = before + shared.shape[1] * self.beam  # of the old entries that are not settled
        behind = slice(self.settled, self.entry(self.position))
        capacity = self.entry(end + ROOM - 1)
        own = torch.full((rows, capacity), -math.inf, dtype=self.dtype)
        larger = [torch.empty(2, rows // self.beam, h, capacity, width, dtype=self.dtype) for h, width in shapes]
        for buffer in larger:
            buffer[:, :, :, behind.stop :] = 0  # masked, but what is multiplied by zero must be a number
        if self.past:
            own[:, : self.settled] = 0
            own[:, behind] = self.own[:, first:filled]
            for buffer, old in zip(larger, self.past, strict=True):
                buffer[:, :, :, :before] = old[:, :, :, :before]
                index = shared[None, :, None, :, None].expand(2, -1, old.shape[2], -1, old.shape[4])
                buffer[:, :, :, before : self.settled] = old.gather(3, index)
                buffer[:, :, :, behind] = old[:, :, :, first:filled]
        self.past, self.own = larger, own

    def _settle(self) -> Tensor:
        """Count the positions where all beams of every sentence have one past by now; the entries that hold it."""
        rows, sentences = len(self.own), len(self.own) // self.beam
        if self.beam == 1 or not rows:
            return torch.empty(sentences, 0, dtype=torch.long)
        entries = self.own[:, self.settled : self.entry(self.position)].unflatten(1, (-1, self.beam))
        whose = entries.argmax(-1).unflatten(0, (sentences, self.beam))  # (sentences, beam, positions)
        alike = (whose == whose[:, :1]).flatten(0, 1).all(0)
        newly = int(alike.long().cumprod(0).sum())
        shared: Tensor = self.settled + torch.arange(newly) * self.beam + whose[:, 0, :newly]
        self.settled += newly
        return shared

    def mask(self, n: int) -> Tensor:
        """What the newest n queries of each beam may see: 0 or -inf (sentences, 1, beam · n, entries)."""
        mask = self.own[:, None]  # (rows, 1, entries)
        if n > 1:
            entry = torch.arange(self.own.shape[1])
            position = torch.where(entry < self.settled, entry, self.settled + (entry - self.settled) // self.beam)
            later = position > torch.arange(self.position, self.position + n)[:, None]  # (n, entries)
            mask = mask.masked_fill(later, -math.inf)
        return mask.reshape(-1, 1, self.beam * n, self.own.shape[1])


# ---- parts -----------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Equation 1 for few scaled queries (sentences · heads, queries, d_k); keys (sentences · heads, d_k, keys)."""
    scores = torch.bmm(q, k)  # (sentences · heads, queries, keys)
    if mask is not None:
        scores.view(len(mask), -1, *scores.shape[1:]).add_(mask)
    return torch.bmm(scores.softmax(-1), v)


class PackedAttention:
    """The matrices of one attention; 1/√d_k is part of W^Q, and what encoder-decoder attention reads is not here."""

    def __init__(self, attention: MultiHeadAttention, pack: Pack, *, cross: bool = False) -> None:
        self.heads, self.width, self.rotary = attention.heads, attention.d_k, rotary_of(attention)
        self.parts = 1 if cross else 3
        weight, bias = scaled(attention)
        rows = slice(0, self.parts * self.heads * self.width)
        self.project = pack(weight[rows], None if bias is None else bias[rows])
        self.output = pack(attention.output.weight, attention.output.bias)

    def split(self, y: Tensor, beam: int, start: int) -> Tensor:
        """Queries, keys and values of y (rows, n, d_model), or queries: (3 or 1, sentences, heads, beam, n, width)."""
        rows, n, _ = y.shape
        parts = (
            self.project(y).view(rows // beam, beam, n, self.parts, self.heads, self.width).permute(3, 0, 4, 1, 2, 5)
        )
        if self.rotary is not None:
            parts = torch.cat([rotate(parts[:2], self.rotary(start, n)), parts[2:]])
        return parts

    def within(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """Whole sentences y (batch, length, d_model) attend to themselves."""
        q, k, v = self.split(y, 1, 0)[:, :, :, 0]  # (batch, heads, length, width)
        if y.shape[1] > SHORT:
            found = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        else:
            k = k.transpose(2, 3)
            found = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask).view(q.shape)
        return self.output(found.transpose(1, 2).flatten(2))

    def to_past(self, y: Tensor, past: Tensor, state: PackedState, mask: Tensor) -> Tensor:
        """The newest n positions attend to those of their own hypothesis: y (rows, n, d_model)."""
        n = y.shape[1]
        parts = self.split(y, state.beam, state.position)
        new = past[:, :, :, state.entry(state.position) : state.entry(state.position + n)]
        if n == 1:
            new.copy_(parts[1:, :, :, :, 0])
        else:
            new.unflatten(3, (n, state.beam)).copy_(parts[1:].transpose(3, 4))
        k, v = past.flatten(1, 2)  # (sentences · heads, entries, width)
        return self._found(parts[0], k.transpose(1, 2), v, state, mask)

    def to_source(self, y: Tensor, read: KeysValues, state: PackedState) -> Tensor:
        """All beams of a sentence read the same source, so they are queries of one attention: nothing is copied."""
        assert state.memory is not None
        return self._found(self.split(y, state.beam, 0)[0], *read, state, state.memory.mask)

    def _found(self, q: Tensor, k: Tensor, v: Tensor, state: PackedState, mask: Tensor | None) -> Tensor:
        """What queries (sentences, heads, beam, n, width) find: (rows, n, d_model)."""
        sentences, _, beam, n, _ = q.shape
        q = q.reshape(-1, beam * n, self.width).to(state.dtype)
        if n == 1:
            found = attend(q, k, v, mask)
        else:  # as many queries as there are in forced decoding would need too much memory for their scores
            q, k, v = (part.unflatten(0, (sentences, -1)) for part in (q, k.transpose(1, 2).contiguous(), v))
            found = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        found = found.view(sentences, self.heads, beam, n, self.width).permute(0, 2, 3, 1, 4)
        return self.output(found.reshape(sentences * beam, n, -1).float())


def scaled(attention: MultiHeadAttention) -> tuple[Tensor, Tensor | None]:
    """The joint matrix and bias of queries, keys and values, the queries over √d_k if they are to be."""
    factor = attention.d_k**-0.5 if score_of(attention)[0] == "scaled" else 1.0
    outputs = attention.qkv.weight.new_ones(len(attention.qkv.weight))
    outputs[: attention.heads * attention.d_k] = factor
    bias = attention.qkv.bias
    return attention.qkv.weight * outputs[:, None], None if bias is None else bias * outputs


class PackedFeedForward:
    def __init__(self, layer: FeedForward, pack: Pack) -> None:
        self.inner, self.outer = pack(layer.inner.weight, layer.inner.bias), pack(layer.outer.weight, layer.outer.bias)
        gate = getattr(layer, "gate", None)
        self.gate = None if gate is None else pack(gate.weight, None)
        activation = getattr(layer, "activation", "relu")
        self.activation = ACTIVATIONS[activation]
        self.relu = activation == "relu"  # the product does it on its way

    def __call__(self, x: Tensor) -> Tensor:
        hidden = self.inner(x, relu=True) if self.relu else self.activation(self.inner(x))  # (rows, n, d_ff)
        return self.outer(hidden if self.gate is None else hidden * self.gate(x))


def lean(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm without what a module does around it: there are many, and the steps are short."""
    if not isinstance(norm, nn.LayerNorm):
        return norm
    shape, weight, bias, eps = list(norm.normalized_shape), norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


class PackedLayer:
    """A layer of either stack."""

    def __init__(self, layer: Any, pack: Pack) -> None:
        self.attention = PackedAttention(layer.attention, pack)
        cross = getattr(layer, "cross_attention", None)
        self.cross = None if cross is None else PackedAttention(cross, pack, cross=True)
        self.feed_forward = PackedFeedForward(layer.feed_forward, pack)
        self.norms = [lean(residual.norm) for residual in layer.residuals]
        self.pre = isinstance(layer.residuals[0], PreNormResidual)

    def whole(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self._residual(0, x, lambda y: self.attention.within(y, mask))
        return self._residual(-1, x, self.feed_forward)

    def step(self, x: Tensor, number: int, state: PackedState, mask: Tensor) -> Tensor:
        x = self._residual(0, x, lambda y: self.attention.to_past(y, state.past[number], state, mask))
        cross, memory = self.cross, state.memory
        if cross is not None and memory is not None:
            x = self._residual(1, x, lambda y: cross.to_source(y, memory.layers[number], state))
        return self._residual(-1, x, self.feed_forward)

    def _residual(self, number: int, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.norms[number]
        summed: Tensor = x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))
        return summed


# ---- the model -------------------------------------------------------------------------------------------------------


class PackedTransformer(nn.Module):
    """A Transformer, or its decoder alone as a language model, with packed matrices."""

    def __init__(self, model: Transformer | DecoderOnly, pack: Pack, kept: torch.dtype = torch.float32) -> None:
        """`kept` is the type of the keys and values that are remembered."""
        super().__init__()
        self.config, self.kept = model.config, kept
        self.target, self.target_norm = model.target, model.decoder_norm
        self.decoder = [PackedLayer(layer, pack) for layer in model.decoder]
        self.shapes = [(layer.attention.heads, layer.attention.d_k) for layer in model.decoder]
        self.widths = [heads * width for heads, width in self.shapes for _ in range(2)]  # of what is read of a source
        self.output = pack(model.output.weight, None)
        if isinstance(model, Transformer):
            self.source, self.source_norm = model.source, model.encoder_norm
            self.encoder = [PackedLayer(layer, pack) for layer in model.encoder]
            self.read = _reader([layer.cross_attention for layer in model.decoder if layer.cross_attention], pack)

    def encode(self, source: Tensor, lengths: Tensor) -> PackedMemory:
        """Run the encoder once, and read its output for all layers of the decoder: source ids (batch, source).

        A few sentences at a time: what is computed of them stays near the processor, and they are padded less.
        """
        batch, width = source.shape
        read = [
            tuple(torch.zeros(batch, heads, *shape, dtype=self.kept) for shape in ((size, width), (width, size)))
            for heads, size in self.shapes
        ]
        for rows in torch.arange(batch).split(max(1, BLOCK // width)):
            some = slice(int(rows[0]), int(rows[-1]) + 1)
            longest = int(lengths[some].max())
            mask = _mask(lengths[some], longest)
            x = embed(self.source, source[some, :longest], 0)
            for layer in self.encoder:
                x = layer.whole(x, mask)
            parts = iter(self.read(self.source_norm(x)).split(self.widths, dim=-1))
            for keys, values in read:
                k, v = (
                    next(parts).unflatten(-1, (keys.shape[1], -1)) for _ in range(2)
                )  # (batch, source, heads, width)
                keys[some, :, :, :longest] = k.permute(0, 2, 3, 1)
                values[some, :, :longest] = v.transpose(1, 2)
        mask = _mask(lengths, width)
        layers = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in read]
        return PackedMemory(layers, None if mask is None else mask.to(self.kept), batch)

    def start(self, memory: PackedMemory | None = None, beam: int = 1) -> PackedState:
        """The state before the first token, with `beam` rows for each sentence."""
        return PackedState(memory, beam, self.kept)

    def step(self, tokens: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        rows, n = tokens.shape
        state.make_room(rows, n, self.shapes)
        mask = state.mask(n)
        x = embed(self.target, tokens, state.position)
        for number, layer in enumerate(self.decoder):
            x = layer.step(x, number, state, mask)
        state.position += n
        return self.output(self.target_norm(x)), state


def embed(embedding: Embedding, ids: Tensor, start: int) -> Tensor:
    """As the embedding itself does it, in one operation fewer."""
    x = F.embedding(ids, embedding.tokens.weight)  # (rows, n, d_model)
    if embedding.positions is None:
        return x * embedding.scale
    return torch.add(embedding.positions(start, ids.shape[1]), x, alpha=embedding.scale)


def _mask(lengths: Tensor, width: int) -> Tensor | None:
    """0 or -inf (batch, 1, 1, width); None if nothing is padded."""
    if int(lengths.min()) == width:
        return None
    real = attention_mask(1, width, lengths)
    return torch.zeros(real.shape).masked_fill_(~real, -math.inf)


def _reader(attentions: list[MultiHeadAttention], pack: Pack) -> Product:
    """Keys and values of all decoder layers in one product."""
    weights, biases = zip(*((a.qkv.weight, a.qkv.bias) for a in attentions), strict=True)
    skip = [a.heads * a.d_k for a in attentions]
    weight = torch.cat([w[queries:] for w, queries in zip(weights, skip, strict=True)])
    biased = biases[0] is not None
    return pack(weight, torch.cat([b[queries:] for b, queries in zip(biases, skip, strict=True)]) if biased else None)


def fits(model: nn.Module) -> bool:
    """Whether the model is one of these: attention to all positions, by products, with heads of one width."""
    return (
        isinstance(model, Transformer | DecoderOnly)
        and not model.config.window
        and model.config.attention in ("scaled", "dot")
        and model.config.key_width == model.config.value_width
    )
