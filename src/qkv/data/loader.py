"""From planned indices to tensors: `Batch`, and the endless stream of updates that training reads, of sentence pairs.

A thread stays a few updates ahead, so reading, BPE-dropout and copying to the device overlap with the arithmetic.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.data import batches
from qkv.data.ragged import LONGEST, PADDING, TILES, Flat, Ragged, lay
from qkv.data.store import Store
from qkv.data.subwords import BpeDropout, row_seeds

SIZES, LEAST_STEP = 12, 64  # ragged batches come in about so many sizes, which differ by a multiple of tokens


@dataclass(frozen=True)
class Batch:
    """Text as a model sees it: what it is given, and what it must predict at each position.

    For sentence pairs that is a source that ends in </s>, its lengths, a target that begins with <s>, and labels that
    end in </s>. What is known of their alignment, if it was asked for, comes as links between their tokens.
    """

    inputs: tuple[Tensor, ...]  # the arguments of the model's `hidden`
    labels: Tensor  # (batch, length); <pad> where nothing is to be predicted
    tokens: int  # real labels
    links: Tensor | None = None  # (links, 3): row, position in the source, position in the labels

    @property
    def source(self) -> Tensor:
        """(batch, source)"""
        return self.inputs[0]

    @property
    def lengths(self) -> Tensor:
        """(batch,): real source tokens in each row"""
        return self.inputs[1]

    @property
    def target(self) -> Tensor:
        """(batch, target)"""
        return self.inputs[2]

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda":  # from pinned memory the copy runs beside the arithmetic
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        links = None if self.links is None else move(self.links)
        return Batch(tuple(map(move, self.inputs)), move(self.labels), self.tokens, links)


class Position(NamedTuple):
    """How far the data has been read: everything before update number `update` of epoch `epoch`."""

    epoch: int
    update: int


class Step(NamedTuple):
    """One optimiser step: this rank's share of it, in micro-batches or laid end to end, and the position after it."""

    micros: list[Batch]
    after: Position
    ragged: tuple[Ragged, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.micros) + sum(batch.tokens for batch in self.ragged)


def pad(rows: list[NDArray[Any]], value: int, *, first: int | None = None, last: int | None = None) -> Tensor:
    """Rows of ids as one matrix (batch, width), each with an optional first and last id, padded on the right."""
    extra = (first is not None) + (last is not None)
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    matrix = np.full((len(rows), int(lengths.max(initial=0)) + extra), value, np.int64)
    start = 0 if first is None else 1
    for i, row in enumerate(rows):
        matrix[i, start : start + len(row)] = row
    if first is not None:
        matrix[:, 0] = first
    if last is not None:
        matrix[np.arange(len(rows)), lengths + start] = last
    return torch.from_numpy(matrix)


def collate(
    sources: list[NDArray[Any]],
    targets: list[NDArray[Any]],
    tokenizers: TokenizerPair,
    *,
    links: list[NDArray[Any]] | None = None,
) -> Batch:
    """Ids without <s> and </s> as a Batch, and the links (links, 2) between the tokens of each row, if given."""
    src, tgt = tokenizers.src, tokenizers.tgt
    return Batch(
        inputs=(
            pad(sources, src.pad, last=src.eos),
            torch.tensor([len(row) + 1 for row in sources]),
            pad(targets, tgt.pad, first=tgt.bos),
        ),
        labels=pad(targets, tgt.pad, last=tgt.eos),
        tokens=sum(len(row) + 1 for row in targets),
        links=None if links is None else _number(links),
    )


def _number(links: list[NDArray[Any]]) -> Tensor:
    """The links of all rows together, each behind the number of its row."""
    rows = np.repeat(np.arange(len(links)), [len(row) for row in links])[:, None]
    return torch.from_numpy(np.concatenate([rows, np.concatenate(links)], axis=1, dtype=np.int64))


class Updates(ABC):
    """The endless stream of optimiser steps over a store, from any position on; the same for the same arguments.

    What a pass over the text consists of is for each kind of text to say.
    """

    tokens: int  # in one update, over all ranks
    micro_tokens: int  # of these, in each of its micro-batches
    seed: int
    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def plan(self, epoch: int) -> list[batches.Update]:
        """The updates of an epoch, each a list of micro-batches."""

    @abstractmethod
    def batch(self, micro: batches.Indices, seed: tuple[int, ...]) -> Batch:
        """The tensors of a micro-batch; what is random in it follows from the seed."""

    @abstractmethod
    def describe(self, epoch: int) -> str:
        """The plan of an epoch in words."""

    def starting(self, position: Position) -> Generator[Step, None, None]:
        """All steps from a position on, made by a thread that stays a little ahead."""
        return _ahead(self._steps(position), 4)

    def _steps(self, position: Position) -> Iterator[Step]:
        epoch, first = position
        while True:
            plan = self.plan(epoch)
            for number in range(first, len(plan)):
                mine = batches.share(plan[number], self.rank, self.world)
                after = Position(epoch, number + 1) if number + 1 < len(plan) else Position(epoch + 1, 0)
                yield self.make(mine, (self.seed, epoch, number), after)
            epoch, first = epoch + 1, 0

    def make(self, share: batches.Update, seed: tuple[int, ...], after: Position) -> Step:
        """The tensors of one rank's share of an update."""
        return Step([self.batch(micro, seed).to(self.device) for micro in share], after)


class Pairs(Updates):
    """Sentence pairs, batched with others of like length."""

    def __init__(
        self,
        store: Store,
        tokenizers: TokenizerPair,
        *,
        tokens: int,
        micro_tokens: int = 0,
        ragged_tokens: int = 0,
        ragged_longest: int = LONGEST,
        dropout: float = 0.0,
        aligned: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.store, self.tokenizers = store, tokenizers
        self.ragged_tokens = ragged_tokens  # tokens a side that are laid end to end in one pass; 0: they are padded
        self.ragged_longest = ragged_longest  # tokens on the longer side of a row that can be laid so
        self.aligned = aligned  # whether batches hold the links between tokens, which dropout would make false
        self.src_widths, self.tgt_widths = self.widths()
        self.tokens = tokens
        self.micro_tokens = micro_tokens or batches.choose_micro_tokens(self.src_widths, self.tgt_widths, tokens)
        self.dropouts = {}
        if dropout:
            src = BpeDropout(tokenizers.src, dropout)
            self.dropouts = {"src": src, "tgt": src if tokenizers.shared else BpeDropout(tokenizers.tgt, dropout)}
        self.seed = seed
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")

    def widths(self) -> tuple[batches.Lengths, batches.Lengths]:
        """Tokens of every row on both sides, <s> or </s> included."""
        return np.asarray(self.store.src_lengths) + 1, np.asarray(self.store.tgt_lengths) + 1

    def plan(self, epoch: int) -> list[batches.Update]:
        indices = batches.visits(self.store.corpus, self.store.weights, seed=self.seed, epoch=epoch)
        if not len(indices):
            raise UsageError(f"epoch {epoch} visits no sentence: raise a weight in data.train")
        return batches.plan(
            indices,
            self.src_widths,
            self.tgt_widths,
            tokens=self.tokens,
            micro_tokens=self.micro_tokens,
            seed=self.seed,
            epoch=epoch,
        )

    def describe(self, epoch: int) -> str:
        """The plan of an epoch in words, with the share of it that is padding."""
        plan = self.plan(epoch)
        told = f"a pass over the text is {len(plan):,} updates of up to {self.tokens:,} tokens a side, "
        if self.ragged_tokens:
            return f"{told}sentences laid end to end"
        padding = batches.pad_share(plan, self.src_widths, self.tgt_widths)
        return f"{told}in batches of up to {self.micro_tokens:,}; {padding:.1%} of them padding"

    def make(self, share: batches.Update, seed: tuple[int, ...], after: Position) -> Step:
        if not (self.ragged_tokens and share):
            return super().make(share, seed, after)
        longest = self.ragged_longest // 2 if self.dropouts else self.ragged_longest  # cut anew, a row may be longer
        long = [np.maximum(self.src_widths[micro], self.tgt_widths[micro]) > longest for micro in share]
        short = np.concatenate([micro[~too_long] for micro, too_long in zip(share, long, strict=True)])
        laid = [self._lay(part, seed) for part in self._parts(short)]
        if None in laid:
            return super().make(share, seed, after)
        others = [micro[too_long] for micro, too_long in zip(share, long, strict=True) if too_long.any()]
        padded = super().make(others, seed, after).micros
        return Step(padded, after, tuple(batch.to(self.device) for batch in laid if batch is not None))

    def most_rows(self, epoch: int) -> list[int]:
        """Of each tile, the most rows that this rank's share of an update of the epoch has, with those of padding."""
        most = np.zeros(len(TILES), np.int64)
        for update in self.plan(epoch):
            rows = np.concatenate([np.empty(0, np.int64), *batches.share(update, self.rank, self.world)])
            widths = np.maximum(self.src_widths[rows], self.tgt_widths[rows])
            tiles = np.searchsorted(TILES, widths[widths <= LONGEST])
            most = np.maximum(most, np.bincount(tiles, minlength=len(TILES)))
        padding = -(-self._step // np.minimum(PADDING, TILES))
        return [int(rows + extra) if rows else 0 for rows, extra in zip(most, padding, strict=True)]

    def _parts(self, indices: batches.Indices) -> list[batches.Indices]:
        """Rows in parts of at most about `ragged_tokens` on each side."""
        if not len(indices):
            return []
        before = np.maximum(*(np.cumsum(widths[indices]) for widths in (self.src_widths, self.tgt_widths)))
        part = (before - 1) // self.ragged_tokens
        return np.split(indices, np.flatnonzero(np.diff(part)) + 1)

    def _lay(self, indices: batches.Indices, seed: tuple[int, ...]) -> Ragged | None:
        """Pairs end to end; None if one of them is too long for that."""
        source, target = self.sides(indices, seed)
        if max(source.lengths.max(), target.lengths.max()) >= self.ragged_longest:  # with </s>, it is longer
            return None
        tgt = self.tokenizers.tgt
        return lay(source, target, bos=tgt.bos, eos=tgt.eos, pad=tgt.pad, step=self._step)

    @property
    def _step(self) -> int:
        """By how many tokens the sizes of ragged batches differ."""
        return -(-self.ragged_tokens // SIZES // LEAST_STEP) * LEAST_STEP

    def sides(self, micro: batches.Indices, seed: tuple[int, ...]) -> list[Flat]:
        """Sources and targets, cut anew if there is dropout."""
        found = {side: self.store.flat(side, micro) for side in ("src", "tgt")}
        if self.dropouts:
            # Each sentence has its own random numbers, so it is cut alike whatever rank and batch it falls to.
            own = np.random.SeedSequence((*seed, 3)).generate_state(2, np.uint64).tolist()
            for (side, dropout), number in zip(self.dropouts.items(), own, strict=True):
                found[side] = dropout.segment(*found[side], row_seeds(micro, number))
        return [Flat(*each) for each in found.values()]

    def batch(self, micro: batches.Indices, seed: tuple[int, ...]) -> Batch:
        sources, targets = (np.split(side.ids, np.cumsum(side.lengths))[:-1] for side in self.sides(micro, seed))
        links = [self.store.links(i) for i in micro] if self.aligned else None
        return collate(sources, targets, self.tokenizers, links=links)


def _ahead(steps: Iterator[Step], depth: int) -> Generator[Step, None, None]:
    """Run an endless iterator in a thread, at most `depth` items ahead; an exception in it is raised here."""
    items: queue.Queue[Step | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Step | BaseException) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in steps:
                put(step)
                if stop.is_set():
                    return
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()  # a thread inside torch while the interpreter ends would abort the process
