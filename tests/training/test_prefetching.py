"""Updates made in another thread: the same ones, only a little ahead, and errors that arrive."""

from __future__ import annotations

import gc
import threading
import time
from itertools import islice

import numpy as np
import pytest
from numpy.typing import NDArray

from batch_streams import FakeStore, plain, updates_of
from conftest import PATIENCE, wait_until
from qkv.assembly import prefetch
from qkv.core import batches
from qkv.core.batches import (
    Batch,
    PairBatches,
    Position,
)
from qkv.core.dataset import Rows
from qkv.data.pair_updates import PairUpdates


def test_an_error_in_the_thread_reaches_the_reader() -> None:
    class Broken(FakeStore):
        def rows(self, side: str, indices: NDArray[np.int64]) -> Rows:
            if 77 in indices:
                raise OSError("the disk is gone")
            return super().rows(side, indices)

    steps = prefetch(updates_of(store=Broken()).starting(Position(0, 0)))
    with pytest.raises(OSError, match="the disk is gone"):
        list(islice(steps, 100))
    assert list(islice(steps, 1)) == []  # and that was the end


def test_the_thread_ends_with_its_reader() -> None:
    before = set(threading.enumerate())
    steps = prefetch(updates_of().starting(Position(0, 0)))
    next(steps)
    (thread,) = set(threading.enumerate()) - before
    del steps
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_thread_stays_only_a_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Batch] = []
    make = PairBatches.batch

    def counted(self: PairBatches, micro: batches.Indices, seed: tuple[int, ...]) -> Batch:
        made.append(make(self, micro, seed))
        return made[-1]

    monkeypatch.setattr(PairBatches, "batch", counted)
    steps = prefetch(updates_of(micro_tokens=400).starting(Position(0, 0)))  # a micro-batch an update
    next(steps)
    ahead = 1 + 4  # the one that was read, and UPDATES_AHEAD
    wait_until(lambda: len(made) >= ahead)
    time.sleep(0.1)  # time enough for one too many
    assert len(made) == ahead


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_prefetched_updates_are_those_of_the_stream(dropout: float) -> None:
    whole = list(islice(updates_of(PairUpdates, dropout=dropout).starting(Position(0, 0)), 20))
    for start in (0, 7):
        position = whole[start - 1].after if start else Position(0, 0)
        tail = islice(prefetch(updates_of(PairUpdates, dropout=dropout).starting(position)), 20 - start)
        assert [plain(step) for step in tail] == [plain(step) for step in whole[start:]]
