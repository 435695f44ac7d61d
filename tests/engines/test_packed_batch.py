"""Batches packed without padding: every row once, in parts of about equal size."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from batch_streams import CPU, FakeStore, both, pairs_in, updates_of
from qkv.core.batches import (
    Position,
)
from qkv.core.device import ALONE, World
from qkv.engines.cuda_training.packed_batch import PackedPairs, PackedUpdate


@pytest.mark.parametrize("world", [1, 2])
def test_packed_batches_hold_every_row_once(world: int) -> None:
    """In parts of at most about so many tokens on each side."""
    store: Any = FakeStore()
    plainly = list(islice(updates_of(store=store, tokens=2000).starting(Position(0, 0)), 12))
    packed: list[list[PackedUpdate]] = []
    for rank in range(world):
        stream = PackedPairs(
            store, both(), packed_tokens=64, tokens=2000, micro_tokens=200, seed=3, world=World(rank, world), device=CPU
        )
        packed.append(list(islice(stream.starting(Position(0, 0)), 12)))  # type: ignore[arg-type]
    for number, update in enumerate(plainly):
        parts = [batch for mine in packed for batch in mine[number].packed]
        assert len(parts) > 3
        rows = [row for batch in parts for row in batch.rows(both().tgt.pad)]
        found = Counter((tuple(s[:-1].tolist()), tuple(labels[:-1].tolist())) for s, _, labels in rows)
        assert found == Counter(pairs_in([update]))
        assert sum(mine[number].tokens for mine in packed) == update.tokens


def test_packed_batches_are_as_full_as_their_budget() -> None:
    """Parts start at the beginning of the update and have about equal sizes; no row is longer than a budget."""
    store: Any = FakeStore()
    stream = PackedPairs(
        store, both(), packed_tokens=64, tokens=2000, micro_tokens=200, seed=3, world=ALONE, device=CPU
    )
    rows = np.concatenate(stream.plan(0)[0])
    parts = stream._parts(rows)
    assert np.concatenate(parts).tolist() == rows.tolist()
    total = np.maximum(*(np.cumsum(store.lengths(side)[rows] + 1) for side in ("src", "tgt")))
    ends = np.cumsum([len(part) for part in parts])
    assert len(parts) == -(-int(total[-1]) // 64)
    for number, end in enumerate(ends.tolist(), 1):
        assert total[end - 1] <= 64 * number
        assert end == len(rows) or total[end] > 64 * number, "the next row would not fit"
