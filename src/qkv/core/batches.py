"""Batches: which sentences form which update, and their tensors (paper, section 5.1: about 25,000 tokens a side).

The plan of an epoch is a pure function of lengths, token budgets, seed, epoch, rank and world size. Sentences of
similar length form a micro-batch, the unit of one forward pass; randomly drawn micro-batches form an update. An update
is planned for all devices together, so `tokens_per_step` means the same on one device as on eight; each rank takes its
share of the rows of every micro-batch. Lengths here are row widths, `<s>` or `</s>` included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.dataset import Rows, TokenStore
from qkv.core.device import World
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair

Indices = NDArray[np.int64]
Lengths = NDArray[np.integer]
PlannedUpdate = list[Indices]  # the micro-batches of one optimizer step
Seed = tuple[int, ...]

PLANS_CACHED = 2


# ---- the plan of an epoch --------------------------------------------------------------------------------------------


def visits(corpus: NDArray[np.integer], weights: Sequence[float], *, seed: int, epoch: int) -> Indices:
    """Return the sentences of an epoch, shuffled: a corpus of weight 2.5 twice, and a random half of it once more."""
    random = np.random.default_rng((seed, epoch, 1))
    chosen = []
    for number, weight in enumerate(weights):
        members = np.flatnonzero(corpus == number)
        more = (weight - int(weight)) * len(members)
        more += random.random() if more % 1 else 0.0  # a part of a sentence: as often as it is large
        extra = random.permutation(members)[: int(more)]
        chosen += [members] * int(weight) + [extra]
    return random.permutation(np.concatenate(chosen)).astype(np.int64)


def plan_epoch(
    indices: Indices, src: Lengths, tgt: Lengths, *, tokens: int, micro_tokens: int, seed: int, epoch: int
) -> list[PlannedUpdate]:
    """Plan the updates of an epoch: micro-batches of up to `micro_tokens` padded tokens a side, `tokens` an update.

    `src` and `tgt` are the widths of all sentences of the store, `indices` those to visit, in random order.
    """
    micros = micro_batches(indices, src, tgt, min(micro_tokens, tokens))
    updates, room = list[PlannedUpdate](), 0
    for i in np.random.default_rng((seed, epoch, 2)).permutation(len(micros)):
        size = len(micros[i]) * int(max(src[micros[i]].max(), tgt[micros[i]].max()))
        if size > room:
            updates.append([])
            room = tokens
        updates[-1].append(micros[i])
        room -= size
    return updates


def micro_batches(indices: Indices, src: Lengths, tgt: Lengths, tokens: int) -> list[Indices]:
    """Group sentences of similar length on both sides into micro-batches.

    Sorted by source alone, the targets of a batch differ, and the reverse. So sentences are sorted by source into
    bands, and inside each band by target, ascending and descending in turn so that the borders fit. With n batches,
    about √n bands of √n batches give both sides the same spread. The sort is stable: ties keep their random order.
    """
    src_of, tgt_of = src[indices], tgt[indices]
    by_src = np.argsort(src_of, kind="stable")
    bands = max(1, round((float(np.maximum(src_of, tgt_of).sum()) / tokens) ** 0.5))
    ends = np.linspace(0, float(src_of.sum()), bands + 1)[1:-1]  # bands of equal token counts
    band_of = np.searchsorted(ends, np.cumsum(src_of[by_src]), side="left")
    target = tgt_of[by_src].astype(np.int64)
    order = by_src[np.lexsort((np.where(band_of % 2 == 0, target, -target), band_of))]
    return cut(indices[order], src, tgt, tokens)


def cut(indices: Indices, src: Lengths, tgt: Lengths, tokens: int) -> list[Indices]:
    """Cut a sequence of sentences into batches, in order, with rows × widest row ≤ tokens on both sides.

    A sentence wider than that is a batch of its own.
    """
    widths = np.maximum(src[indices], tgt[indices]).astype(np.int64)
    batches, start = [], 0
    while start < len(indices):
        # A batch that begins here has at most as many rows as its first row's width allows.
        window = widths[start : start + max(1, tokens // int(widths[start]))]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        rows = max(1, int(np.searchsorted(padded, tokens, side="right")))
        batches.append(indices[start : start + rows])
        start += rows
    return batches


def share(update: PlannedUpdate, rank: int, world: int) -> PlannedUpdate:
    """Return one rank's part of an update: every `world`-th row of each micro-batch, so that lengths are similar.

    Each micro-batch begins with another rank, or the first would always get the rows that remain.
    """
    parts = [micro[(rank - number) % world :: world] for number, micro in enumerate(update)]
    return [part for part in parts if len(part)]


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Input of a model, and the label at each position.

    For pairs: a source that ends in </s>, its lengths, and a target that begins with <s>; labels end in </s>.
    """

    inputs: tuple[Tensor, ...]  # the arguments of the model's `hidden`
    labels: Tensor  # (batch, length); <pad> where nothing is to be predicted
    tokens: int  # labels that are not <pad>

    @property
    def source(self) -> Tensor:
        return self.inputs[0]  # (batch, source)

    @property
    def lengths(self) -> Tensor:
        return self.inputs[1]  # (batch,): real source tokens in each row

    @property
    def target(self) -> Tensor:
        return self.inputs[2]  # (batch, target)

    def to(self, device: torch.device) -> Self:
        inputs = tuple(move(tensor, device) for tensor in self.inputs)
        return replace(self, inputs=inputs, labels=move(self.labels, device))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from pinned memory the copy overlaps with the arithmetic of a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pad(rows: Sequence[NDArray[Any]], value: int, *, first: int | None = None, last: int | None = None) -> Tensor:
    """Return rows of ids as one matrix (batch, width), each with an optional first and last id, padded on the right."""
    start, end = int(first is not None), int(last is not None)
    matrix = np.full((len(rows), max(map(len, rows), default=0) + start + end), value, np.int64)
    matrix[:, :start] = first or 0
    for line, row in zip(matrix, rows, strict=True):
        line[start : start + len(row)] = row
        line[start + len(row) : start + len(row) + end] = last or 0
    return torch.from_numpy(matrix)


def collate(sources: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]], tokenizers: TokenizerPair) -> Batch:
    """Return ids without <s> and </s> as a Batch."""
    src, tgt = tokenizers.src, tokenizers.tgt
    lengths = torch.tensor([len(row) + 1 for row in sources])
    inputs = (pad(sources, src.pad, last=src.eos), lengths, pad(targets, tgt.pad, first=tgt.bos))
    return Batch(inputs, pad(targets, tgt.pad, last=tgt.eos), sum(len(row) + 1 for row in targets))


# ---- the stream of updates -------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """How far the data has been read: everything before update number `update` of epoch `epoch`."""

    epoch: int
    update: int


@dataclass(frozen=True)
class Update:
    """One optimizer step: this rank's micro-batches, and the position after it."""

    micro_batches: list[Batch]
    after: Position

    @property
    def tokens(self) -> int:
        """Labels of this rank's share."""
        return sum(batch.tokens for batch in self.micro_batches)


Updates = Generator[Update, None, None]


class UpdateStream(ABC):
    """The endless stream of updates over a store, from any position on; the same for the same arguments.

    Subclasses plan an epoch. Plans are cached in the store, so that all streams over it share them.
    """

    def __init__(
        self, store: TokenStore, *, tokens: int, micro_tokens: int = 0, seed: int, world: World, device: torch.device
    ) -> None:
        self.store, self.tokens, self.micro_tokens = store, tokens, micro_tokens or tokens
        self.seed, self.world, self.device = seed, world, device
        self.plan_key: tuple[Any, ...] = (type(self).__name__,)  # with all else that a plan depends on
        self.wrap: Callable[[Updates], Updates] = lambda updates: updates  # `assembly.prefetch` reads ahead

    @abstractmethod
    def make_plan(self, epoch: int) -> list[PlannedUpdate]:
        """Plan the updates of an epoch, each a list of micro-batches."""

    @abstractmethod
    def batch(self, micro: Indices, seed: Seed) -> Batch:
        """Return the tensors of a micro-batch; all randomness in it follows from the seed."""

    def describe(self, epoch: int) -> str:
        """Describe the plan of an epoch in one line."""
        return f"a pass over the text is {len(self.plan(epoch)):,} updates of up to {self.tokens:,} tokens a side"

    def plan(self, epoch: int) -> list[PlannedUpdate]:
        """Return the plan of an epoch, computed once."""
        key, plans = (*self.plan_key, self.tokens, self.micro_tokens, self.seed, epoch), self.store.plans
        if (plan := plans.get(key)) is None:
            plan = self.make_plan(epoch)
            for other in list(plans)[: 1 - PLANS_CACHED or None]:
                plans.pop(other, None)  # a thread that reads ahead may do the same
            plans[key] = plan
        return plan

    def starting(self, position: Position) -> Updates:
        """Yield all updates from a position on."""
        return self.wrap(self._updates(position))

    def _updates(self, position: Position) -> Updates:
        epoch, first = position
        while True:
            plan = self.plan(epoch)
            for number in range(first, len(plan)):
                after = Position(epoch, number + 1) if number + 1 < len(plan) else Position(epoch + 1, 0)
                yield self.make(
                    share(plan[number], self.world.rank, self.world.size), (self.seed, epoch, number), after
                )
            epoch, first = epoch + 1, 0

    def make(self, planned: PlannedUpdate, seed: Seed, after: Position) -> Update:
        """Return the tensors of one rank's share of an update."""
        return Update([self.batch(micro, seed).to(self.device) for micro in planned], after)


class PairBatches(UpdateStream):
    """Sentence pairs, batched with others of similar length."""

    measured = ("src", "tgt")  # the sides whose lengths decide the plan

    def __init__(self, store: TokenStore, tokenizers: TokenizerPair, **options: Any) -> None:
        super().__init__(store, **options)
        self.tokenizers = tokenizers
        self.src_widths, self.tgt_widths = (store.lengths(side) + 1 for side in self.measured)

    def make_plan(self, epoch: int) -> list[PlannedUpdate]:
        indices = visits(self.store.corpus, self.store.weights, seed=self.seed, epoch=epoch)
        if not len(indices):
            raise UsageError(f"epoch {epoch} visits no sentence: raise a weight in data.train")
        options = {"tokens": self.tokens, "micro_tokens": self.micro_tokens, "seed": self.seed, "epoch": epoch}
        return plan_epoch(indices, self.src_widths, self.tgt_widths, **options)

    def sides(self, micro: Indices, seed: Seed) -> list[Rows]:
        return [self.store.rows(side, micro) for side in ("src", "tgt")]

    def batch(self, micro: Indices, seed: Seed) -> Batch:
        sources, targets = (np.split(ids, np.cumsum(lengths))[:-1] for ids, lengths in self.sides(micro, seed))
        return collate(sources, targets, self.tokenizers)
