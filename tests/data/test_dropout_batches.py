"""BPE-dropout in batches: another segmentation of the same text, by seed and position alone."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_streams import FakeStore, both, pairs_in, plain, updates_of
from qkv.assembly import updates_for
from qkv.core.batches import (
    PairBatches,
    Position,
    Update,
)
from qkv.core.device import World
from qkv.data.pair_updates import PairUpdates
from qkv.options import Config


def stream(dropout: float = 0.0, **options: Any) -> PairBatches:
    return updates_of(PairUpdates, dropout=dropout, **options)


def test_dropout_keeps_the_text_and_follows_the_seed() -> None:
    def loaded(**options: Any) -> list[Update]:
        updates = stream(**options)
        return list(islice(updates.starting(Position(0, 0)), len(updates.plan(0))))

    plainly, dropped = loaded(), loaded(dropout=0.3)
    for one, other in zip(pairs_in(plainly), pairs_in(dropped), strict=True):
        assert both().src.decode(one[0]) == both().src.decode(other[0])
        assert both().tgt.decode(one[1]) == both().tgt.decode(other[1])
        assert (one[0][0] == both().src.tag("fr")) == (other[0][0] == both().src.tag("fr"))  # tags stay in front
    assert pairs_in(plainly) != pairs_in(dropped)
    assert any(pair[0][0] == both().src.tag("fr") for pair in pairs_in(dropped))
    assert [plain(step) for step in loaded(dropout=0.3)] == [plain(step) for step in dropped]
    updates = stream(0.3)
    later = pairs_in(list(islice(updates.starting(Position(1, 0)), len(updates.plan(1)))))
    assert set(later) != set(pairs_in(dropped))  # another cut in another epoch


@pytest.mark.parametrize("dropout", [0.3])
@settings(max_examples=8)
@given(st.integers(0, 25))
def test_any_position_starts_the_tail_of_the_whole(dropout: float, start: int) -> None:
    updates = stream(dropout)
    whole = list(islice(updates._updates(Position(0, 0)), 30))
    assert {step.after.epoch for step in whole} >= {0, 1}
    position = whole[start - 1].after if start else Position(0, 0)
    tail = islice(stream(dropout).starting(position), 30 - start)
    assert [plain(step) for step in tail] == [plain(step) for step in whole[start:]]


@pytest.mark.parametrize("dropout", [0.3])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_together_load_the_batches_of_one(world: int, dropout: float) -> None:
    one = list(islice(stream(dropout).starting(Position(0, 0)), 12))
    ranks = [
        list(islice(stream(dropout, world=World(rank, world)).starting(Position(0, 0)), 12)) for rank in range(world)
    ]
    for number, step in enumerate(one):
        shared = [mine[number] for mine in ranks]
        assert Counter(pairs_in(shared)) == Counter(pairs_in([step]))
        assert sum(part.tokens for part in shared) == step.tokens
        assert {part.after for part in shared} == {step.after}


def test_dropout_keeps_the_length_limit_of_the_config() -> None:
    """Neither side of a batch is longer than data.max_length, unless its stored sentence is."""
    text: Any = SimpleNamespace(train=FakeStore(), tokenizers=both())
    stored = {side: text.train.lengths(side) for side in ("src", "tgt")}
    limit = int(max(lengths.max() for lengths in stored.values()))

    def longest(max_length: int, side: int) -> int:
        settings = {"tokens_per_step": 400, "micro_tokens": 200, "device": "cpu"}
        config = Config().replace(tokenizer={"dropout": 0.9}, data={"max_length": max_length}, train=settings)
        updates = updates_for(config, text)
        with closing(updates.starting(Position(0, 0))) as steps:
            return max(len(pair[side]) for pair in pairs_in(list(islice(steps, len(updates.plan(0))))))

    for side in (0, 1):
        assert longest(limit, side) <= limit < longest(199, side)
