"""What the native decoder remembers: pages of keys and values for each sentence, and a table of who wrote them.

Nothing is ever moved. When beams go on from one another only the table changes; when a sentence leaves, its pages serve
another.

The Transformer on a CPU by the C of this package: the same four calls, each of them one call of the library.
"""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from qkv.core.transformer import LearnedPositions, SinusoidalPositions, Transformer
from qkv.engines.cpu.native_library import Encode, Layout, Step
from qkv.models.language_models import DecoderOnly
from qkv.models.variants import rotary_of

# ---- its memory ------------------------------------------------------------------------------------------------------

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
    def position(self) -> int:
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


# ---- the model -------------------------------------------------------------------------------------------------------


class Table:
    """Positions as far as anybody asked for, (positions, width)."""

    def __init__(self, positions: nn.Module | None, width: int) -> None:
        self.positions, self.width = copy.deepcopy(positions), width
        self.growing = threading.Lock()
        self.made = [torch.empty(0, width)]  # the longest last; calls of other threads may still read the others

    @property
    def limit(self) -> float:
        """Where they end."""
        return len(self.positions.table) if isinstance(self.positions, LearnedPositions) else math.inf

    def reaching(self, end: int) -> Tensor | None:
        """Those before `end`; learned ones are refused where they end."""
        if not isinstance(self.positions, LearnedPositions | SinusoidalPositions):
            return None
        with self.growing:
            if end > len(self.made[-1]):
                self.positions.reach(end)
                table = self.positions.table.detach()
                self.made.append(F.pad(table, (0, self.width - table.shape[1])))
            return self.made[-1]


class Scratch(threading.local):
    """What the layers write to meanwhile; threads have their own."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> int:
        if len(self.memory) < size:
            self.memory = torch.empty(size + size // 4, dtype=torch.uint8)
        return self.memory.data_ptr()


class NativeTransformer(nn.Module):
    """A Transformer, or its decoder alone as a language model, with weights as the library reads them.

    Who puts a callable in the place of `output` gets its product instead: hidden (rows, n, d_model) to logits.
    """

    output: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Transformer | DecoderOnly, library: ctypes.CDLL, *, rounded: bool) -> None:
        """`rounded`: weights are bytes, and keys and values are kept as bf16, which halves the memory that is read."""
        super().__init__()
        self.config, self.library = model.config, library
        self.layout = Layout(library.qkv_lanes(), library.qkv_panel(), rounded)
        self.native = self.layout.model(model, half=rounded)
        self.vocabulary, self.bytes = self.native.target_vocabulary, 2 if rounded else 4
        self.target = Table(model.target.positions, self.native.width)
        self.source = Table(getattr(getattr(model, "source", None), "positions", None), self.native.width)
        self.rotary = Table(rotary_of(model.decoder[0].attention), self.native.head)
        self.scratch = Scratch()
        for name in ("qkv_step", "qkv_step_size", "qkv_encode", "qkv_encode_size", "qkv_source_size", "qkv_advance"):
            getattr(library, name).restype = ctypes.c_int64

    def encode(self, source: Tensor, lengths: Tensor) -> NativeMemory:
        """Run the encoder once, and read its output for all layers of the decoder: source ids (batch, source)."""
        length = lengths.numpy().astype(np.int64)
        tokens = source.numpy()[np.arange(source.shape[1]) < length[:, None]].astype(np.int64)  # end to end
        start = np.concatenate([[0], np.cumsum(length)])
        of, which = np.unique(length, return_inverse=True)
        native = ctypes.byref(self.native)
        size = np.array([self.library.qkv_source_size(native, ctypes.c_int64(each)) for each in of], np.int64)[which]
        held = torch.empty(int(size.sum()), dtype=torch.uint8)
        place = held.data_ptr() + np.cumsum(size) - size
        longest = int(length.max(initial=0))
        tables = self.source.reaching(longest), self.rotary.reaching(longest)
        call = Encode(len(length), _at(tokens), _at(start), _at(place), *map(_where, tables), torch.get_num_threads())
        call.scratch = self.scratch.of(self.library.qkv_encode_size(native, ctypes.byref(call)))
        if self.library.qkv_encode(native, ctypes.byref(call)):
            raise IndexError(f"a source token that is not one of {self.native.source_vocabulary}")
        return NativeMemory(place, length, [held] * len(length))

    def start(self, memory: NativeMemory | None = None, beam: int = 1) -> NativeState:
        """The state before the first token, with `beam` rows for each sentence."""
        each = self.native.decoder_layers * beam * PAGE * 2 * self.native.heads * self.native.head
        return NativeState(memory, beam, Pages(each * self.bytes))

    def step(self, tokens: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        """Feed n tokens to each row (rows, n): logits (rows, n, vocab), and the state after them."""
        rows, n = tokens.shape
        self.prepare(state, rows, n)
        output, tokens = self.output, tokens.long().contiguous()
        made = torch.empty(rows, n, self.native.d_model if output else self.vocabulary)
        some = np.arange(rows) if state.alive is None or n > 1 else np.flatnonzero(state.alive)
        state.alive = None
        call = self.call(state, tokens, n)
        call.count, call.rows = len(some), _at(some)
        setattr(call, "hidden" if output else "logits", made.data_ptr())
        if self.library.qkv_step(ctypes.byref(self.native), ctypes.byref(call)):
            raise IndexError(f"a target token that is not one of {self.vocabulary}")
        state.lengths = state.lengths + n
        return output(made) if output else made, state

    def prepare(self, state: NativeState, rows: int, n: int) -> None:
        """Let the state take n tokens more."""
        if state.memory is None and not len(state.lengths):
            state.begin(rows // state.beam)
        if rows != len(state.origin):
            raise ValueError(f"tokens of {rows} rows for a state of {len(state.origin)}")
        state.make_room(n)

    def call(self, state: NativeState, tokens: Tensor, n: int, steps: int = 1) -> Step:
        """What the library is told for n tokens of each row, as often as there are steps."""
        end = state.position + n * steps
        tables = self.target.reaching(end), self.rotary.reaching(end)
        call = Step(
            sentences=len(state.lengths), beam=state.beam, n=n, threads=torch.get_num_threads(),
            tokens=tokens.data_ptr(), length=_at(state.lengths), origin=_at(state.origin),
            capacity=state.origin.shape[1], pages=_at(state.pages), pages_each=state.pages.shape[1],
        )  # fmt: skip
        if state.memory is not None:
            call.source, call.source_length = _at(state.memory.place), _at(state.memory.length)
        call.positions, call.rotary = map(_where, tables)
        size = self.library.qkv_step_size(ctypes.byref(self.native), ctypes.byref(call))
        call.scratch = self.scratch.of(size)
        return call


def _at(numbers: Any) -> int:
    """Where an array of numpy lies."""
    place: int = numbers.ctypes.data
    return place


def _where(table: Tensor | None) -> int | None:
    return None if table is None else table.data_ptr()
