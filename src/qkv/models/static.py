"""A decoder's memory in buffers of fixed size, where each row has a position of its own.

A step over it never asks the device for a value and always touches the same addresses, so it can be captured as a
graph. Beams are reordered by a table of whose row holds each position: no key or value is ever copied. And sentences
come and go: a slot that is free takes the next one, whatever positions the others are at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.models.attention import MultiHeadAttention
from qkv.models.kernels import New, lookup, reorder
from qkv.models.state import Memory
from qkv.models.transformer import Transformer


def can_hold(model: object) -> bool:
    """Whether a model's decoder can work on fixed buffers: a Transformer whose scores are products."""
    return isinstance(model, Transformer) and model.spec.attention != "additive"


class StaticState:
    """The state of `sentences` × `beam` rows, each with room for `capacity` tokens and a source of `source` tokens."""

    def __init__(self, model: Transformer, sentences: int, beam: int, capacity: int, source: int) -> None:
        self.model, self.beam = model, beam
        weight, rows = model.output.weight, sentences * beam
        self.keys, self.values = [], []
        self.source_keys, self.source_values = [], []
        for layer in model.decoder:
            own, cross = layer.attention, layer.cross_attention
            assert cross is not None
            self.keys.append(weight.new_zeros(rows, capacity, own.heads, own.d_k))
            self.values.append(weight.new_zeros(rows, capacity, own.heads, own.d_v))
            self.source_keys.append(weight.new_zeros(sentences, source, cross.heads, cross.d_k))
            self.source_values.append(weight.new_zeros(sentences, source, cross.heads, cross.d_v))
        device = weight.device
        row = torch.arange(rows, dtype=torch.int, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.origin = row[:, None].repeat(1, capacity)  # whose row holds each position; the newest is a row's own
        self.sentence = (row // beam)[:, None].expand(-1, source)
        self.source_length = torch.ones(rows, dtype=torch.long, device=device)
        if model.target.positions is not None:  # as many as the buffers have room for, or a clear refusal
            model.target.positions(0, capacity)
        for layer in model.decoder:
            if layer.attention.rotary is not None:
                layer.attention.rotary(0, capacity)

    def admit(self, slots: Tensor, memory: Memory) -> None:
        """Begin sentences in these slots with what the encoder made of them."""
        rows = (slots[:, None] * self.beam + torch.arange(self.beam, device=slots.device)).flatten()
        self.length.index_fill_(0, rows, 0)
        self.origin[:, 0].index_copy_(0, rows, rows.int())
        self.source_length.index_copy_(0, rows, memory.mask.sum(dim=(1, 2, 3)).repeat_interleave(self.beam))
        for i, layer in enumerate(self.model.decoder):
            assert layer.cross_attention is not None
            k, v = layer.cross_attention.project_memory(memory.values)
            for held, new in ((self.source_keys[i], k), (self.source_values[i], v)):
                held[:, : new.shape[2]].index_copy_(0, slots, new.transpose(1, 2))

    def attend_to_past(self, layer: int, attention: MultiHeadAttention, y: Tensor, window: int) -> Tensor:
        q, k, v = attention.project(y, start=self.length)  # (rows, heads, 1, width)
        new = k.squeeze(2), v.squeeze(2)
        return self._look_up(attention, q, self.keys[layer], self.values[layer], self.origin, self.length, window, new)

    def attend_to_source(self, layer: int, attention: MultiHeadAttention, y: Tensor) -> Tensor:
        keys, values = self.source_keys[layer], self.source_values[layer]
        return self._look_up(attention, attention.project_query(y), keys, values, self.sentence, self.source_length)

    def _look_up(
        self,
        attention: MultiHeadAttention,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        origin: Tensor,
        length: Tensor,
        window: int = 0,
        new: New | None = None,
    ) -> Tensor:
        q = q.squeeze(2)
        if attention.score_weight is not None:  # general: qᵀW takes the place of the query
            q = torch.einsum("rhd,hde->rhe", q, attention.score_weight)
        scale = 1 / math.sqrt(attention.d_k) if attention.score == "scaled" else 1.0
        heads = lookup(q, keys, values, origin, length, scale=scale, window=window, new=new)
        return attention.merge(heads[:, :, None])

    def move(self, n: int) -> None:
        self.length.add_(n).clamp_(max=self.origin.shape[1] - 1)  # a slot that is free goes on counting

    def select(self, rows: Tensor) -> StaticState:
        """Let each row go on from one of the same sentence."""
        reorder(self.origin, rows, self.length, self.beam)
        return self
