"""Transformer on a CPU: `encode`, `start` and `step` as calls of the C library, with a paged KV cache.

Each sentence has pages of keys and values, and a cache indirection table gives the beam that stores each position of a
row. Reordering beams changes the table and copies no keys or values; the pages of a finished sentence are used again.
"""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from qkv.core.transformer import SinusoidalPositions, Transformer
from qkv.engines.cpu.native_library import DecoderStep, EncoderBatch, WeightPacking
from qkv.models.variants import DecoderOnly, LearnedPositions, rotary_of

# ---- the KV cache ----------------------------------------------------------------------------------------------------

PAGE = 16  # positions of a sentence in one page; the same as in native.h

Numbers = NDArray[np.int64]


class PageAllocator:
    """Allocator for pages of one size; freed pages are used again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free: list[int] = []
        self.held: list[Tensor] = []  # memory blocks that contain the pages

    def take(self, count: int) -> list[int]:
        """Return the addresses of `count` pages."""
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
class NativeSource:
    """Keys and values of the sources for all decoder layers."""

    address: Numbers  # (sentences,)
    length: Numbers  # (sentences,): source tokens
    held: list[Tensor]  # memory block that contains each sentence

    def select(self, kept: Numbers) -> NativeSource:
        return NativeSource(self.address[kept], self.length[kept], [self.held[i] for i in kept])


@dataclass
class NativeState:
    """Paged KV cache with `beam` rows per sentence; a language model sets the number of sentences at its first step."""

    memory: NativeSource | None
    beam: int
    allocator: PageAllocator
    lengths: Numbers = field(init=False)  # (sentences,): tokens so far
    pages: Numbers = field(init=False)  # (sentences, most pages): addresses
    filled: Numbers = field(init=False)  # (sentences,): pages of each sentence
    origin: NDArray[np.int32] = field(init=False)  # (rows, positions): beam that stores each position
    spare: int = field(init=False)  # positions that still fit into the pages of every sentence
    alive: NDArray[np.bool_] | None = None  # (rows,): rows that the next step computes; None: all

    @property
    def position(self) -> int:
        """Return the number of tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    def __post_init__(self) -> None:
        self.begin(len(self.memory.length) if self.memory else 0)

    def begin(self, sentences: int) -> None:
        """Empty the cache for this number of sentences."""
        self.spare = 0
        self.lengths, self.filled = np.zeros((2, sentences), np.int64)
        self.pages, self.origin = np.zeros((sentences, 0), np.int64), np.zeros((sentences * self.beam, 0), np.int32)

    def allocate_positions(self, n: int) -> None:
        """Allocate pages for n more positions of every row."""
        self.spare -= n
        if self.spare >= 0:
            return
        needed = -(-(self.lengths + n) // PAGE)
        columns = int(needed.max(initial=0))
        if (more := columns - self.pages.shape[1]) > 0:
            self.pages = np.pad(self.pages, ((0, 0), (0, more)))
            self.origin = np.pad(self.origin, ((0, 0), (0, more * PAGE)))
        missing = (np.arange(columns) >= self.filled[:, None]) & (np.arange(columns) < needed[:, None])
        self.pages[:, :columns][missing] = self.allocator.take(int(missing.sum()))
        self.filled = np.maximum(self.filled, needed)
        self.spare = int((self.filled * PAGE - self.lengths).min(initial=PAGE)) - n

    def select(self, rows: Tensor) -> NativeState:
        """Let each row continue `rows[i]`; a sentence without rows is removed and its pages are freed."""
        if self.memory is None and not len(self.lengths):
            return self
        chosen = rows.numpy()
        kept = chosen[:: self.beam] // self.beam
        if not np.array_equal(kept, np.arange(len(self.lengths))):
            self._keep(kept)
        self.origin = self.origin[chosen]
        return self

    def _keep(self, kept: Numbers) -> None:
        """Keep these sentences; the second copy of a sentence gets copies of its pages."""
        times = np.bincount(kept, minlength=len(self.lengths))
        for i in np.flatnonzero(times == 0):
            self.allocator.free += self.pages[i, : self.filled[i]].tolist()
        indices = np.arange(len(kept))
        again = np.setdiff1d(indices, np.unique(kept, return_index=True)[1]) if times.max() > 1 else ()
        self.memory = self.memory and self.memory.select(kept)
        self.lengths, self.filled, self.pages = self.lengths[kept], self.filled[kept], self.pages[kept]
        for i in again:
            copies = self.allocator.take(int(self.filled[i]))
            for new, old in zip(copies, self.pages[i].tolist(), strict=False):
                ctypes.memmove(new, old, self.allocator.size)
            self.pages[i, : len(copies)] = copies


# ---- the model -------------------------------------------------------------------------------------------------------


class PositionTable:
    """Position encodings (positions, width), extended when a longer sentence needs them."""

    def __init__(self, positions: nn.Module | None, width: int) -> None:
        self.positions, self.width = copy.deepcopy(positions), width
        self.growing = threading.Lock()
        self.tables = [torch.empty(0, width)]  # the longest last; other threads may still read the shorter ones

    @property
    def limit(self) -> float:
        """Return the number of positions, infinite unless they are learned."""
        return len(self.positions.table) if isinstance(self.positions, LearnedPositions) else math.inf

    def at_least(self, end: int) -> Tensor | None:
        """Return a table with at least `end` positions, None without positions; learned ones raise at their limit."""
        if not isinstance(self.positions, LearnedPositions | SinusoidalPositions):
            return None
        with self.growing:
            if end > len(self.tables[-1]):
                self.positions.reach(end)
                table = self.positions.table.detach()
                self.tables.append(F.pad(table, (0, self.width - table.shape[1])))
            return self.tables[-1]


class Scratch(threading.local):
    """Scratch memory for the activations of a call, one block for each thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> int:
        """Return the address of the buffer, which has at least `size` bytes."""
        if len(self.memory) < size:
            self.memory = torch.empty(size + size // 4, dtype=torch.uint8)
        return self.memory.data_ptr()


class NativeTransformer(nn.Module):
    """Transformer or decoder-only language model with packed weights, computed by the C library.

    If `output` is set, it computes the logits from the hidden states (rows, n, d_model) in place of the C library.
    """

    output: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Transformer | DecoderOnly, library: ctypes.CDLL, *, int8: bool) -> None:
        """With `int8`, weights are quantised to int8 and the KV cache is bf16, which halves the memory traffic."""
        super().__init__()
        self.config, self.library = model.config, library
        self.packing = WeightPacking(library.qkv_lanes(), library.qkv_panel(), int8)
        self.native = self.packing.model(model, bf16_cache=int8)
        self.vocabulary, self.bytes = self.native.target_vocabulary, 2 if int8 else 4
        self.target = PositionTable(model.target.positions, self.native.width)
        self.source = PositionTable(getattr(getattr(model, "source", None), "positions", None), self.native.width)
        self.rotary = PositionTable(rotary_of(model.decoder[0].attention), self.native.head_width)
        self.scratch = Scratch()
        for name in ("qkv_step", "qkv_step_size", "qkv_encode", "qkv_encode_size", "qkv_source_size", "qkv_advance"):
            getattr(library, name).restype = ctypes.c_int64

    def encode(self, source: Tensor, lengths: Tensor) -> NativeSource:
        """Run the encoder on source ids (batch, source); return keys and values for all decoder layers."""
        length = lengths.numpy().astype(np.int64)
        tokens = source.numpy()[np.arange(source.shape[1]) < length[:, None]].astype(np.int64)  # packed without padding
        starts = np.concatenate([[0], np.cumsum(length)])
        distinct, inverse = np.unique(length, return_inverse=True)
        native = ctypes.byref(self.native)
        sizes = [self.library.qkv_source_size(native, ctypes.c_int64(each)) for each in distinct]
        size = np.array(sizes, np.int64)[inverse]
        memory = torch.empty(int(size.sum()), dtype=torch.uint8)
        address = memory.data_ptr() + np.cumsum(size) - size
        longest = int(length.max(initial=0))
        tables = self.source.at_least(longest), self.rotary.at_least(longest)
        arguments = EncoderBatch(
            len(length), tokens.ctypes.data, starts.ctypes.data, address.ctypes.data,
            *map(_tensor_address, tables), torch.get_num_threads(),
        )  # fmt: skip
        arguments.scratch = self.scratch.reserve(self.library.qkv_encode_size(native, ctypes.byref(arguments)))
        if self.library.qkv_encode(native, ctypes.byref(arguments)):
            raise IndexError(f"a source token id is outside the vocabulary of {self.native.source_vocabulary} tokens")
        return NativeSource(address, length, [memory] * len(length))

    def start(self, memory: NativeSource | None = None, beam: int = 1) -> NativeState:
        """Return the decoder state before the first token, with `beam` rows for each sentence."""
        page_numbers = self.native.decoder_layers * beam * PAGE * 2 * self.native.heads * self.native.head_width
        return NativeState(memory, beam, PageAllocator(page_numbers * self.bytes))

    def step(self, tokens: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        """Decode n tokens of each row (rows, n); return logits (rows, n, vocab) and the new state."""
        rows, n = tokens.shape
        self.prepare(state, rows, n)
        output, tokens = self.output, tokens.long().contiguous()
        result = torch.empty(rows, n, self.native.d_model if output else self.vocabulary)
        computed = np.arange(rows) if state.alive is None or n > 1 else np.flatnonzero(state.alive)
        state.alive = None
        arguments = self.step_arguments(state, tokens, n)
        arguments.row_count, arguments.rows = len(computed), computed.ctypes.data
        setattr(arguments, "hidden" if output else "logits", result.data_ptr())
        if self.library.qkv_step(ctypes.byref(self.native), ctypes.byref(arguments)):
            raise IndexError(f"a target token id is outside the vocabulary of {self.vocabulary} tokens")
        state.lengths = state.lengths + n
        return output(result) if output else result, state

    def prepare(self, state: NativeState, rows: int, n: int) -> None:
        """Allocate cache pages for n more tokens of each row."""
        if state.memory is None and not len(state.lengths):
            state.begin(rows // state.beam)
        if rows != len(state.origin):
            raise ValueError(f"got tokens of {rows} rows for a state of {len(state.origin)} rows")
        state.allocate_positions(n)

    def step_arguments(self, state: NativeState, tokens: Tensor, n: int, steps: int = 1) -> DecoderStep:
        """Return the arguments of the C library for `steps` decoder steps of n tokens per row."""
        end = state.position + n * steps
        tables = self.target.at_least(end), self.rotary.at_least(end)
        arguments = DecoderStep(
            sentences=len(state.lengths), beam=state.beam, n=n, threads=torch.get_num_threads(),
            tokens=tokens.data_ptr(), length=state.lengths.ctypes.data, origin=state.origin.ctypes.data,
            capacity=state.origin.shape[1], pages=state.pages.ctypes.data, pages_per_sentence=state.pages.shape[1],
        )  # fmt: skip
        if state.memory is not None:
            arguments.source = state.memory.address.ctypes.data
            arguments.source_length = state.memory.length.ctypes.data
        arguments.positions, arguments.rotary = map(_tensor_address, tables)
        size = self.library.qkv_step_size(ctypes.byref(self.native), ctypes.byref(arguments))
        arguments.scratch = self.scratch.reserve(size)
        return arguments


def _tensor_address(table: Tensor | None) -> int | None:
    """Return the address of a tensor, None for None."""
    return None if table is None else table.data_ptr()
