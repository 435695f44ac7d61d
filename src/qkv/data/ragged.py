"""Sentence pairs laid end to end, without padding between them: the layout of the fused training pass.

Shapes are few, so that the work on them can be captured once: tokens are filled up to a multiple of `step`, with rows
that nobody is to predict, and there is room for as many rows as there might be. Rows are sorted by the tile that holds
both of their sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Flat(NamedTuple):
    """Sentences end to end."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


TILES = (16, 32, 64, 128, 1024)  # tokens on the longer side of a row, at most
LONGEST = TILES[-1]
PADDING = 128  # in a row of nothing else, at most


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

    def rows(self, pad: int) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Source, target and labels of every row that is not padding."""
        source, target, labels = self.source, self.target, self.labels.numpy(force=True)
        cuts = [side.starts.numpy(force=True)[1 : int(self.first[-1])] for side in (source, target)]
        parts = zip(
            np.split(source.ids.numpy(force=True), cuts[0]),
            *(np.split(ids, cuts[1]) for ids in (target.ids.numpy(force=True), labels)),
            strict=True,
        )
        return [part for part in parts if (part[2] != pad).any()]

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


def lay(source: Flat, target: Flat, *, bos: int, eos: int, pad: int, step: int = 1) -> Ragged:
    """Pairs without <s> and </s> as a batch, the tokens of each side filled up to a multiple of `step`."""
    lengths = np.stack([source.lengths, target.lengths]) + 1
    order = np.argsort(np.searchsorted(TILES, lengths.max(0)), kind="stable")
    lengths = lengths[:, order]
    own, other = _gather(source, order), _gather(target, order)
    ids = [_with(own, lengths[0], last=eos), _with(other, lengths[1], first=bos), _with(other, lengths[1], last=eos)]
    return _assemble(ids, lengths, pad, step)


def _gather(rows: Flat, order: NDArray[np.intp]) -> NDArray[Any]:
    """The ids of rows that come in another order."""
    ordered = rows.lengths[order]
    shift = (np.cumsum(rows.lengths) - rows.lengths)[order] - (np.cumsum(ordered) - ordered)
    found: NDArray[Any] = rows.ids[np.arange(len(rows.ids)) + np.repeat(shift, ordered)]
    return found


def _with(ids: NDArray[Any], lengths: NDArray[np.int64], *, first: int = -1, last: int = -1) -> NDArray[np.int32]:
    """The same rows, each with another token before or behind it; `lengths` count it already."""
    longer = np.empty(len(ids) + len(lengths), np.int32)
    ends = np.cumsum(lengths)
    extra = ends - lengths if first >= 0 else ends - 1
    own = np.ones(len(longer), bool)
    own[extra] = False
    longer[own], longer[extra] = ids, first if first >= 0 else last
    return longer


def _assemble(ids: list[NDArray[np.int32]], lengths: NDArray[np.int64], pad: int, step: int) -> Ragged:
    """Rows in the order of their tiles as one tensor, with rows of padding behind them."""
    rows, real = lengths.shape[1], len(ids[1])
    fill = [-len(side) % step for side in ids[:2]]
    largest = int(np.searchsorted(TILES, lengths.max()))
    size = min(PADDING, TILES[largest])
    extra = -(-max(fill) // size)  # rows of padding, behind the others and so of the largest tile there is
    padding = np.minimum(size, np.maximum(0, np.array(fill)[:, None] - size * np.arange(extra)))
    lengths = np.concatenate([lengths, padding], axis=1)
    tiles = np.searchsorted(TILES, lengths.max(0))
    tiles[rows:] = largest
    counts = np.bincount(tiles, minlength=len(TILES))
    starts = np.concatenate([np.zeros((2, 1), np.int64), np.cumsum(lengths, axis=1)], axis=1)
    parts, sizes = [], (int(starts[0, -1]), int(starts[1, -1]))
    for side, count in enumerate(fill):
        own = starts[side]
        places = np.arange(own[-1]) - np.repeat(own[:-1], lengths[side])
        parts += [
            np.pad(ids[side], (0, count), constant_values=pad),
            places,
            np.pad(own, (0, _room(sizes) - (rows + extra)), mode="edge"),
        ]
    parts.append(np.pad(ids[2], (0, fill[1]), constant_values=pad))
    parts.append(np.concatenate([[0], np.cumsum(counts)]))
    whole = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return Ragged(whole, sizes, tuple(counts.tolist()), real)
