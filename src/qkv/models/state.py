"""What passes between a model and the search: the encoder's memory, and what a decoder remembers.

Every model offers the same four calls, and the search knows nothing else:

    memory         = model.encode(source, lengths)
    state          = model.start(memory, beam)      beam rows for each sentence
    logits, state  = model.step(tokens, state)      tokens (rows, n): one new token, or a whole prefix
    state          = state.select(rows)             reorder within sentences, or let whole sentences leave
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

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
    mask: Tensor | None  # (batch, 1, 1, source), None when nothing is padded


class Cache:
    """Keys and values of the tokens decoded so far in one layer: (rows, heads, capacity, width), filled from the left."""

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

    def select(self, rows: Tensor, length: int) -> Cache:
        chosen = Cache()
        if self.keys is not None and self.values is not None:
            chosen.keys = _select(self.keys, rows, length)
            chosen.values = _select(self.values, rows, length)
        return chosen


def _room(buffer: Tensor | None, new: Tensor, length: int, end: int) -> Tensor:
    """The buffer, or a larger copy of it when `end` positions do not fit; doubling keeps the copies few."""
    if buffer is not None and end <= buffer.shape[2]:
        return buffer
    rows, heads, _, width = new.shape
    larger = new.new_empty(rows, heads, max(16, 2 * end), width)
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


def _select(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
    chosen[:, :, :length] = buffer[:, :, :length].index_select(0, rows)
    return chosen


@dataclass
class TransformerState:
    """The decoder's memory: its own past, and the source as keys and values, held once for all beams of a sentence."""

    caches: list[Cache]
    memory: list[tuple[Tensor, Tensor]]  # for each layer: keys, values (sentences, heads, source, width)
    mask: Tensor | None  # (sentences, 1, 1, source)
    beam: int
    length: int = 0

    def select(self, rows: Tensor) -> TransformerState:
        sentences = len(rows) // self.beam
        memory, mask = self.memory, self.mask
        if sentences != len(memory[0][0]):
            stay = torch.div(rows[:: self.beam], self.beam, rounding_mode="floor")
            memory = [(k.index_select(0, stay), v.index_select(0, stay)) for k, v in memory]
            mask = None if mask is None else mask.index_select(0, stay)
        caches = [cache.select(rows, self.length) for cache in self.caches]
        return TransformerState(caches, memory, mask, self.beam, self.length)
