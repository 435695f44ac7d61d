"""What passes between a model and the search: the encoder's memory, and what a decoder remembers.

Every model offers the same four calls, and the search knows nothing else:

    memory         = model.encode(source, lengths)
    state          = model.start(memory, beam)      beam rows for each sentence
    logits, state  = model.step(tokens, state)      tokens (rows, n): one new token, or a whole prefix
    state          = state.select(rows)             reorder rows, or let whole sentences leave
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

SPARE = 16  # positions by which a cache grows

State = TypeVar("State", bound="SelectableState")


class SelectableState(Protocol):
    def select(self: State, rows: Tensor) -> State:
        """The state of the given rows, in that order; rows of one sentence stay together, `beam` at a time."""
        ...


MemoryT = TypeVar("MemoryT")


class StepModel(Protocol[MemoryT, State]):
    """What search needs of a model, an ensemble or an exported engine."""

    def encode(self, source: Tensor, lengths: Tensor) -> MemoryT: ...

    def start(self, memory: MemoryT, beam: int = 1) -> State: ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]: ...


@dataclass
class Memory:
    """The encoder's output (batch, source, d_model), and which of its positions are words rather than padding."""

    values: Tensor
    mask: Tensor  # (batch, 1, 1, source)


class Cache:
    """Keys and values of the tokens so far in one layer: (rows, heads, capacity, width), filled from the left."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store k and v behind the `length` positions already held; return all of them."""
        end = length + k.shape[2]
        self.keys = _room(self.keys, k, length, end)
        self.values = _room(self.values, v, length, end)
        self.keys[:, :, length:end] = k
        self.values[:, :, length:end] = v
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, rows: Tensor) -> Cache:
        chosen = Cache()
        if self.keys is not None and self.values is not None:
            chosen.keys, chosen.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        return chosen


def _room(buffer: Tensor | None, new: Tensor, length: int, end: int) -> Tensor:
    """The buffer, or a copy with room for some more when `end` positions do not fit; selecting copies that room too."""
    if buffer is not None and end <= buffer.shape[2]:
        return buffer
    rows, heads, _, width = new.shape
    larger = new.new_empty(rows, heads, end + SPARE, width)
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


@dataclass
class TransformerState:
    """The decoder's memory: its own past, and the source as keys and values, held once for all beams of a sentence."""

    caches: list[Cache]
    memory: list[tuple[Tensor, Tensor]]  # for each layer: keys, values (sentences, heads, source, width)
    mask: Tensor  # (sentences, 1, 1, source)
    beam: int
    length: int = 0

    def select(self, rows: Tensor) -> TransformerState:
        memory, mask = self.memory, self.mask
        sentences = rows[:: self.beam] // self.beam
        if not torch.equal(sentences, torch.arange(len(mask), device=rows.device)):
            memory = [(k.index_select(0, sentences), v.index_select(0, sentences)) for k, v in memory]
            mask = mask.index_select(0, sentences)
        caches = [cache.select(rows) for cache in self.caches]
        return TransformerState(caches, memory, mask, self.beam, self.length)
