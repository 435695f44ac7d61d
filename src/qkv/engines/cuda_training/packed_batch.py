"""Sentence pairs packed without padding, the layout of the fused training pass.

The number of shapes is small, so that CUDA graphs can be reused: each side is padded to a multiple of `step` tokens by
rows without labels, and the tensors have space for the largest possible number of rows. Rows are sorted by the
smallest tile that fits both of their sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.batches import Indices, PlannedUpdate, Position, Update, UpdateStream, move, share
from qkv.core.dataset import Rows, TokenStore
from qkv.core.tokenizer import TokenizerPair
from qkv.data.pair_updates import PairUpdates

TILES = (16, 32, 64, 128, 1024)  # maximum tokens on the longer side of a row
LONGEST = TILES[-1]
PADDING = 128  # maximum tokens of a row of padding
SIZES, MIN_STEP = 12, 64  # number of different batch sizes (about), and minimum difference between them in tokens


@dataclass(frozen=True)
class Side:
    """Source or target side of a packed batch."""

    ids: Tensor  # (tokens,) int32
    positions: Tensor  # (tokens,) int32: the position of each token in its sentence
    starts: Tensor  # (rows + 1,) int32: the start of each sentence


@dataclass(frozen=True)
class PackedBatch:
    """Sentence pairs without padding, all in one tensor, so that one copy moves it to the device."""

    tensor: Tensor  # int32
    sizes: tuple[int, int]  # tokens of source and target
    counts: tuple[int, ...]  # rows of each tile
    tokens: int  # real labels

    def rows(self, pad: int) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Return source, target and labels of every row that is not padding."""
        source, target, labels = self.source, self.target, self.labels.numpy(force=True)
        cuts = [side.starts.numpy(force=True)[1 : int(self.first[-1])] for side in (source, target)]
        parts = zip(
            np.split(source.ids.numpy(force=True), cuts[0]),
            *(np.split(ids, cuts[1]) for ids in (target.ids.numpy(force=True), labels)),
            strict=True,
        )
        return [part for part in parts if (part[2] != pad).any()]

    def to(self, device: torch.device) -> PackedBatch:
        return replace(self, tensor=move(self.tensor, device))

    def _parts(self) -> Sequence[Tensor]:
        """Return ids, positions and starts of both sides, the labels, and the first rows."""
        (n, m), starts = self.sizes, _max_rows(self.sizes) + 1
        return self.tensor.split([n, n, starts, m, m, starts, m, len(TILES) + 1])

    @property
    def source(self) -> Side:
        return Side(*self._parts()[:3])

    @property
    def target(self) -> Side:
        return Side(*self._parts()[3:6])

    @property
    def labels(self) -> Tensor:
        """Labels of the target tokens: (target tokens,) int32."""
        return self._parts()[6]

    @property
    def first(self) -> Tensor:
        """First row of each tile: (tiles + 1,)."""
        return self._parts()[7]


def _max_rows(sizes: tuple[int, int]) -> int:
    """Return the maximum number of rows for these sizes: a real row has at least two tokens on each side."""
    return max(sizes) // 2 + 1


def pack(source: Rows, target: Rows, *, bos: int, eos: int, pad: int, step: int = 1) -> PackedBatch:
    """Pack pairs without <s> and </s>, with the tokens of each side padded to a multiple of `step`."""
    lengths = np.stack([source.lengths, target.lengths])
    order = np.argsort(np.searchsorted(TILES, lengths.max(0) + 1), kind="stable")
    lengths = lengths[:, order]
    ends = np.cumsum(lengths, axis=1)
    source_ids, target_ids = _reorder(source, order), _reorder(target, order)
    ids = [
        np.insert(source_ids, ends[0], eos),
        np.insert(target_ids, ends[1] - lengths[1], bos),
        np.insert(target_ids, ends[1], eos),
    ]
    return _assemble(ids, lengths + 1, pad, step)


def _reorder(rows: Rows, order: NDArray[np.intp]) -> NDArray[Any]:
    """Return the ids of the rows, concatenated in this order."""
    ordered = rows.lengths[order]
    shift = (np.cumsum(rows.lengths) - rows.lengths)[order] - (np.cumsum(ordered) - ordered)
    return rows.ids[np.arange(len(rows.ids)) + np.repeat(shift, ordered)]


def _assemble(ids: list[NDArray[Any]], lengths: NDArray[np.int64], pad: int, step: int) -> PackedBatch:
    """Concatenate the rows, sorted by tile, and rows of padding to one tensor."""
    rows, real = lengths.shape[1], len(ids[1])
    fill = [-len(side) % step for side in ids[:2]]
    largest = int(np.searchsorted(TILES, lengths.max()))
    size = min(PADDING, TILES[largest])
    extra = -(-max(fill) // size)  # rows of padding are last, so they belong to the largest tile
    padding = np.minimum(size, np.maximum(0, np.array(fill)[:, None] - size * np.arange(extra)))
    lengths = np.concatenate([lengths, padding], axis=1)
    tiles = np.searchsorted(TILES, lengths.max(0))
    tiles[rows:] = largest
    counts = np.bincount(tiles, minlength=len(TILES))
    starts = np.concatenate([np.zeros((2, 1), np.int64), np.cumsum(lengths, axis=1)], axis=1)
    parts, sizes = [], (int(starts[0, -1]), int(starts[1, -1]))
    for side, count in enumerate(fill):
        side_starts = starts[side]
        positions = np.arange(side_starts[-1]) - np.repeat(side_starts[:-1], lengths[side])
        parts += [
            np.pad(ids[side], (0, count), constant_values=pad),
            positions,
            np.pad(side_starts, (0, _max_rows(sizes) - (rows + extra)), mode="edge"),
        ]
    parts.append(np.pad(ids[2], (0, fill[1]), constant_values=pad))
    parts.append(np.concatenate([[0], np.cumsum(counts)]))
    tensor = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return PackedBatch(tensor, sizes, tuple(counts.tolist()), real)


# ---- the stream of updates -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedUpdate(Update):
    """One optimizer step: packed batches, and padded micro-batches for the rows that are too long for packing."""

    packed: tuple[PackedBatch, ...] = ()

    @property
    def tokens(self) -> int:
        return super().tokens + sum(batch.tokens for batch in self.packed)


class PackedPairs(PairUpdates):
    """Sentence pairs in packed batches of about `packed_tokens` tokens a side, in the order of the padded plan.

    A row is packed if its longer side has at most `longest` tokens.
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizers: TokenizerPair,
        *,
        packed_tokens: int,
        longest: int = LONGEST,
        **options: Any,
    ) -> None:
        super().__init__(store, tokenizers, **options)
        self.packed_tokens, self.longest = packed_tokens, longest

    def describe(self, epoch: int) -> str:
        return f"{UpdateStream.describe(self, epoch)}, without padding"

    def make(self, planned: PlannedUpdate, seed: tuple[int, ...], after: Position) -> PackedUpdate:
        longest = self.longest // 2 if self.cut else self.longest  # BPE-dropout may make a row longer
        too_long = [np.maximum(self.src_widths[micro], self.tgt_widths[micro]) > longest for micro in planned]
        short = [micro[~long] for micro, long in zip(planned, too_long, strict=True)]
        packed = [self._pack(part, seed) for part in self._parts(np.concatenate([np.empty(0, np.int64), *short]))]
        if None in packed:
            return PackedUpdate(super().make(planned, seed, after).micro_batches, after)
        others = [micro[long] for micro, long in zip(planned, too_long, strict=True) if long.any()]
        padded = super().make(others, seed, after).micro_batches
        return PackedUpdate(padded, after, tuple(batch.to(self.device) for batch in packed if batch is not None))

    def most_rows(self, epoch: int) -> list[int]:
        """Return the maximum rows of each tile in this rank's share of an update, with rows of padding."""
        most = np.zeros(len(TILES), np.int64)
        for update in self.plan(epoch):
            rows = np.concatenate([np.empty(0, np.int64), *share(update, self.world.rank, self.world.size)])
            widths = np.maximum(self.src_widths[rows], self.tgt_widths[rows])
            tiles = np.searchsorted(TILES, widths[widths <= LONGEST])
            most = np.maximum(most, np.bincount(tiles, minlength=len(TILES)))
        padding = -(-self._step // np.minimum(PADDING, TILES))
        return [int(rows + extra) if rows else 0 for rows, extra in zip(most, padding, strict=True)]

    def _parts(self, indices: Indices) -> list[Indices]:
        """Divide rows into parts of about `packed_tokens` tokens on the longer side."""
        if not len(indices):
            return []
        tokens_so_far = np.maximum(*(np.cumsum(widths[indices]) for widths in (self.src_widths, self.tgt_widths)))
        part = (tokens_so_far - 1) // self.packed_tokens
        return np.split(indices, np.flatnonzero(np.diff(part)) + 1)

    def _pack(self, indices: Indices, seed: tuple[int, ...]) -> PackedBatch | None:
        """Pack pairs; return None if one of them is too long."""
        source, target = self.sides(indices, seed)
        if max(source.lengths.max(), target.lengths.max()) >= self.longest:  # </s> adds a token
            return None
        tgt = self.tokenizers.tgt
        return pack(source, target, bos=tgt.bos, eos=tgt.eos, pad=tgt.pad, step=self._step)

    @property
    def _step(self) -> int:
        """Difference between the sizes of packed batches, in tokens."""
        return -(-self.packed_tokens // SIZES // MIN_STEP) * MIN_STEP
