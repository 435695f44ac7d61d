"""What the native decoder remembers: pages of keys and values for each sentence, and a table of who wrote them.

Nothing is ever moved. When beams go on from one another only the table changes; when a sentence leaves, its pages serve
another.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = 16  # positions of a sentence in one piece of memory; native.h has the same

Numbers = NDArray[np.int64]


def _wider(table: NDArray[Any], columns: int) -> NDArray[Any]:
    """The table with so many columns, zeros in the new ones."""
    wide = np.zeros((len(table), columns), table.dtype)
    wide[:, : table.shape[1]] = table
    return wide


class Pages:
    """Memory in pieces of one size, which are used again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free: list[int] = []
        self.held: list[Tensor] = []  # what the pieces are cut from

    def take(self, count: int) -> list[int]:
        if len(self.free) < count:
            more = count - len(self.free)
            self.held.append(torch.empty(more * self.size, dtype=torch.uint8))
            first = self.held[-1].data_ptr()
            self.free += range(first, first + more * self.size, self.size)
        left = len(self.free) - count
        taken = self.free[left:]
        del self.free[left:]
        return taken


@dataclass
class NativeMemory:
    """Keys and values of sources for all layers: where each lies, how long it is, and what holds it."""

    place: Numbers
    length: Numbers
    held: list[Tensor]

    def select(self, stay: Numbers) -> NativeMemory:
        return NativeMemory(self.place[stay], self.length[stay], [self.held[i] for i in stay])


@dataclass
class NativeState:
    """Sentences of `beam` rows each; those of a language model are counted when the first tokens come."""

    memory: NativeMemory | None
    beam: int
    arena: Pages
    lengths: Numbers = field(init=False)  # (sentences,): tokens so far
    pages: Numbers = field(init=False)  # (sentences, pages of the longest)
    filled: Numbers = field(init=False)  # (sentences,): pages that each has
    origin: NDArray[np.int32] = field(init=False)  # (rows, positions)
    spare: int = field(init=False)  # positions that every sentence has room for
    alive: NDArray[np.bool_] | None = None  # (rows,): those that the next step computes, if not all; others get zeros

    @property
    def length(self) -> int:
        """Tokens so far, of the longest row."""
        return int(self.lengths.max(initial=0))

    def __post_init__(self) -> None:
        self.begin(len(self.memory.length) if self.memory else 0)

    def begin(self, sentences: int) -> None:
        self.spare = 0
        self.lengths, self.filled = np.zeros((2, sentences), np.int64)
        self.pages, self.origin = np.zeros((sentences, 0), np.int64), np.zeros((sentences * self.beam, 0), np.int32)

    def make_room(self, n: int) -> None:
        """Let every row have n more positions."""
        self.spare -= n
        if self.spare >= 0:
            return
        wanted = -(-(self.lengths + n) // PAGE)
        most = int(wanted.max(initial=0))
        if most > self.pages.shape[1]:
            self.pages, self.origin = _wider(self.pages, most), _wider(self.origin, most * PAGE)
        missing = (np.arange(most) >= self.filled[:, None]) & (np.arange(most) < wanted[:, None])
        self.pages[:, :most][missing] = self.arena.take(int(missing.sum()))
        self.filled = np.maximum(self.filled, wanted)
        self.spare = int((self.filled * PAGE - self.lengths).min(initial=PAGE)) - n

    def select(self, rows: Tensor) -> NativeState:
        if self.memory is None and not len(self.lengths):
            return self
        chosen = rows.numpy()
        stay = chosen[:: self.beam] // self.beam
        if not np.array_equal(stay, np.arange(len(self.lengths))):
            self._keep(stay)
        self.origin = self.origin[chosen]
        return self

    def _keep(self, stay: Numbers) -> None:
        """Go on with these sentences; one that is there twice gets pages of its own."""
        times = np.bincount(stay, minlength=len(self.lengths))
        for i in np.flatnonzero(times == 0):
            self.arena.free += self.pages[i, : self.filled[i]].tolist()
        again = np.setdiff1d(np.arange(len(stay)), np.unique(stay, return_index=True)[1]) if times.max() > 1 else ()
        self.memory = self.memory and self.memory.select(stay)
        self.lengths, self.filled, self.pages = self.lengths[stay], self.filled[stay], self.pages[stay]
        for i in again:
            own = self.arena.take(int(self.filled[i]))
            for new, old in zip(own, self.pages[i].tolist(), strict=False):
                ctypes.memmove(new, old, self.arena.size)
            self.pages[i, : len(own)] = own
