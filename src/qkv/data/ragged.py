"""Sentence pairs laid end to end, without padding between them: the layout of the fused training pass.

Shapes are few, so that the work on them can be captured once: tokens are filled up to a multiple of `step`, with rows
that nobody is to predict, and there is room for as many rows as there might be. Rows are sorted by the tile that holds
both of their sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.data.loader import Batch

TILES = (16, 32, 64, 128)  # tokens on the longer side of a row, at most


@dataclass(frozen=True)
class Side:
    """One side of all pairs."""

    ids: Tensor  # (tokens,) int32
    places: Tensor  # (tokens,) int32: the position of each token in its sentence
    starts: Tensor  # (rows + 1,) int32: where each sentence begins


@dataclass(frozen=True)
class Ragged:
    """A batch of pairs, all in one tensor so that one copy moves it."""

    whole: Tensor  # int32
    sizes: tuple[int, int]  # tokens of source and target
    counts: tuple[int, ...]  # rows of each tile
    tokens: int  # real labels

    def to(self, device: torch.device) -> Ragged:
        if device.type == "cuda":  # from pinned memory the copy runs beside the arithmetic
            return replace(self, whole=self.whole.pin_memory().to(device, non_blocking=True))
        return replace(self, whole=self.whole.to(device))

    @property
    def source(self) -> Side:
        (n, _), rows = self.sizes, _room(self.sizes)
        return Side(*self.whole[: 2 * n + rows + 1].split([n, n, rows + 1]))

    @property
    def target(self) -> Side:
        (n, m), rows = self.sizes, _room(self.sizes)
        return Side(*self.whole[2 * n + rows + 1 :][: 2 * m + rows + 1].split([m, m, rows + 1]))

    @property
    def labels(self) -> Tensor:
        """(target tokens,) int32"""
        (n, m), rows = self.sizes, _room(self.sizes)
        return self.whole[2 * (n + m + rows + 1) :][:m]

    @property
    def first(self) -> Tensor:
        """(tiles + 1,): the first row of each tile"""
        return self.whole[-len(TILES) - 1 :]


def _room(sizes: tuple[int, int]) -> int:
    """Rows that may lie in so many tokens: a real one has two or more on each side."""
    return max(sizes) // 2 + 1


def fits(batches: Sequence[Batch]) -> bool:
    """Whether no sentence is longer than the largest tile."""
    return all(max(batch.source.shape[1], batch.target.shape[1]) <= TILES[-1] for batch in batches)


def lay(batches: Sequence[Batch], *, pad: int, step: int = 1) -> Ragged:
    """All rows of some batches in one, their tokens filled up to a multiple of `step` on each side."""
    sources, targets, labels = [], [], []
    source_lengths, target_lengths = [], []
    for batch in batches:
        real = (batch.labels != pad).numpy()
        target_lengths.append(real.sum(1))
        source_lengths.append(batch.lengths.numpy())
        sources.append(batch.source.numpy()[np.arange(batch.source.shape[1]) < source_lengths[-1][:, None]])
        targets.append(batch.target.numpy()[real])
        labels.append(batch.labels.numpy()[real])
    lengths = np.stack([np.concatenate(source_lengths), np.concatenate(target_lengths)]).astype(np.int32)
    order = np.argsort(np.searchsorted(TILES, lengths.max(0)), kind="stable")
    flat = [np.concatenate(part).astype(np.int32) for part in (sources, targets, labels)]
    columns = [_gather(lengths[side], order) for side in (0, 1)]
    ids = [flat[0][columns[0]], flat[1][columns[1]], flat[2][columns[1]]]
    return _assemble(ids, lengths[:, order], pad, step)


def _gather(lengths: NDArray[np.int32], order: NDArray[np.intp]) -> NDArray[np.int64]:
    """Where the tokens of rows lie that come in another order."""
    ends = np.cumsum(lengths, dtype=np.int64)
    ordered = lengths[order]
    shift = (ends - lengths)[order] - (np.cumsum(ordered, dtype=np.int64) - ordered)
    places: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(shift, ordered)
    return places


def _assemble(ids: list[NDArray[np.int32]], lengths: NDArray[np.int32], pad: int, step: int) -> Ragged:
    """Rows in the order of their tiles as one tensor, with rows of padding behind them."""
    rows, real = lengths.shape[1], len(ids[1])
    fill = [-len(side) % step for side in ids[:2]]
    largest = TILES[int(np.searchsorted(TILES, lengths.max()))]
    extra = -(-max(fill) // largest)  # rows of padding, of the largest tile there is
    padding = np.minimum(largest, np.maximum(0, np.array(fill)[:, None] - largest * np.arange(extra)))
    lengths = np.concatenate([lengths, padding.astype(np.int32)], axis=1)
    tiles = np.searchsorted(TILES, lengths.max(0))
    tiles[rows:] = np.searchsorted(TILES, largest)
    counts = np.bincount(tiles, minlength=len(TILES))
    starts = np.concatenate([np.zeros((2, 1), np.int32), np.cumsum(lengths, axis=1, dtype=np.int32)], axis=1)
    parts, sizes = [], (int(starts[0, -1]), int(starts[1, -1]))
    for side, count in enumerate(fill):
        own = starts[side]
        places = np.arange(own[-1], dtype=np.int32) - np.repeat(own[:-1], lengths[side])
        parts += [
            np.pad(ids[side], (0, count), constant_values=pad),
            places,
            np.pad(own, (0, _room(sizes) - (rows + extra)), mode="edge"),
        ]
    parts.append(np.pad(ids[2], (0, fill[1]), constant_values=pad))
    parts.append(np.concatenate([[0], np.cumsum(counts)]))
    whole = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return Ragged(whole, sizes, tuple(counts.tolist()), real)
