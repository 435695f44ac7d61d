"""What passes between a model and the search: the encoder's memory, and what a decoder remembers.

Every model offers the same four calls, and the search knows nothing else:

    memory         = model.encode(source, lengths)
    state          = model.start(memory, beam)      beam rows for each sentence
    logits, state  = model.step(tokens, state)      tokens (rows, n): one new token, or a whole prefix
    state          = state.select(rows)             reorder or repeat rows, let whole sentences leave

A state that was stepped or selected from is used up: its memory may have become the new one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from qkv.models.attention import MultiHeadAttention, attention_mask

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

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits and the state behind the tokens; the logits are the caller's, who may write into them."""
        ...


@dataclass
class Memory:
    """The encoder's output (batch, source, d_model), and which of its positions are words rather than padding."""

    values: Tensor
    mask: Tensor  # (batch, 1, 1, source)


class Cache:
    """Keys and values of the tokens so far in one layer: (rows, heads, capacity, width), filled from the left."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []  # keys, values
        self.spare: list[Tensor] = []  # as large, for `select` to write to: fresh memory costs more than the copy

    def append(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store k and v behind the `length` positions already held; return all of them."""
        end = length + k.shape[2]
        if not self.kept or end > self.kept[0].shape[2]:
            larger = [new.new_empty(*new.shape[:2], end + SPARE, new.shape[3]) for new in (k, v)]
            for buffer, old in zip(larger, self.kept, strict=False):
                buffer[:, :, :length] = old[:, :, :length]
            self.kept, self.spare = larger, []
        keys, values = self.kept
        keys[:, :, length:end], values[:, :, length:end] = k, v
        return keys[:, :, :end], values[:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Hold these rows from now on."""
        if not self.spare or len(self.spare[0]) < len(rows):
            self.spare = [old.new_empty(len(rows), *old.shape[1:]) for old in self.kept]
        chosen = [buffer[: len(rows)] for buffer in self.spare]
        for buffer, old in zip(chosen, self.kept, strict=True):
            torch.index_select(old, 0, rows, out=buffer)
        self.kept, self.spare = chosen, self.kept


def staying(rows: Tensor, beam: int, sentences: int) -> Tensor | None:
    """Which sentences the selected rows belong to; None if all stay where they are, and nothing has to move."""
    stay = rows[::beam] // beam
    return None if torch.equal(stay, torch.arange(sentences, device=rows.device)) else stay


class DecoderState(Protocol):
    """What the layers of a Transformer's decoder need of its memory, whatever holds it."""

    length: Any  # tokens so far: of all rows an int, or of each a tensor (rows,)

    def attend_to_past(self, layer: int, attention: MultiHeadAttention, y: Tensor, window: int) -> Tensor:
        """Self-attention of the newest positions y (rows, n, d_model), which are remembered."""
        ...

    def attend_to_source(self, layer: int, attention: MultiHeadAttention, y: Tensor) -> Tensor: ...

    def move(self, n: int) -> None:
        """Stand behind n more tokens."""
        ...


@dataclass
class TransformerState:
    """The decoder's memory: its own past, and the source as keys and values, held once for all beams of a sentence.

    A language model has no source: no memory, and no mask.
    """

    caches: list[Cache]
    memory: Sequence[tuple[Tensor, Tensor] | None]  # for each layer: keys, values (sentences, heads, source, width)
    mask: Tensor | None  # (sentences, 1, 1, source)
    beam: int
    length: int = 0

    def attend_to_past(self, layer: int, attention: MultiHeadAttention, y: Tensor, window: int) -> Tensor:
        q, k, v = attention.project(y, start=self.length)
        k, v = self.caches[layer].append(k, v, self.length)
        n = q.shape[2]
        if window:  # nobody looks further back
            k, v = k[:, :, -(window + n) :], v[:, :, -(window + n) :]
        mask = None
        if n > 1 or window:
            mask = attention_mask(n, k.shape[2], causal=True, window=window, device=q.device)
        attended: Tensor = attention(q, k, v, mask)
        return attended

    def attend_to_source(self, layer: int, attention: MultiHeadAttention, y: Tensor) -> Tensor:
        # All beams of a sentence read the same source, so they are queries of one attention: nothing is copied.
        memory = self.memory[layer]
        assert memory is not None
        rows, n, width = y.shape
        q = attention.project_query(y.reshape(rows // self.beam, self.beam * n, width))
        attended: Tensor = attention(q, *memory, self.mask)
        return attended.reshape(rows, n, width)

    def move(self, n: int) -> None:
        self.length += n

    def select(self, rows: Tensor) -> TransformerState:
        if self.mask is not None and (stay := staying(rows, self.beam, len(self.mask))) is not None:
            kept = [pair for pair in self.memory if pair is not None]
            self.memory = [(k.index_select(0, stay), v.index_select(0, stay)) for k, v in kept]
            self.mask = self.mask.index_select(0, stay)
        for cache in self.caches:
            cache.select(rows)
        return self
