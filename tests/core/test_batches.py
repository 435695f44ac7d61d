"""Batches: a pure plan that visits every pair once, keeps its budget and pads little; a stream that follows it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batch_streams import FakeStore, both, pairs_in, plain, realistic, updates_of
from qkv.core import batches
from qkv.core.batches import (
    PairBatches,
    PlannedUpdate,
    Position,
    collate,
    cut,
    micro_batches,
    pad,
    plan_epoch,
    share,
    visits,
)
from qkv.core.dataset import Rows
from qkv.core.device import World
from qkv.core.errors import UsageError

lengths_of = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)


def arrays(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    src, tgt = np.array(pairs, np.int64).T
    return src, tgt


def flat(updates: list[PlannedUpdate]) -> list[list[list[int]]]:
    return [[micro.tolist() for micro in update] for update in updates]


def sizes(update: PlannedUpdate, src: NDArray[np.int64], tgt: NDArray[np.int64]) -> list[int]:
    """Padded tokens of each micro-batch, on the side that has more."""
    return [len(micro) * int(max(src[micro].max(), tgt[micro].max())) for micro in update]


# ---- the plan --------------------------------------------------------------------------------------------------------


@given(lengths_of, st.integers(1, 400), st.integers(1, 400), st.integers(0, 5), st.integers(0, 5))
def test_a_plan_visits_each_once_within_its_budgets(
    pairs: list[tuple[int, int]], tokens: int, micro_tokens: int, seed: int, epoch: int
) -> None:
    src, tgt = arrays(pairs)
    indices = np.random.default_rng(seed).permutation(len(pairs))
    updates = plan_epoch(indices, src, tgt, tokens=tokens, micro_tokens=micro_tokens, seed=seed, epoch=epoch)
    visited = [i for update in updates for micro in update for i in micro.tolist()]
    assert sorted(visited) == list(range(len(pairs)))
    for update in updates:
        of_micros = sizes(update, src, tgt)
        for micro, size in zip(update, of_micros, strict=True):
            assert size <= min(micro_tokens, tokens) or len(micro) == 1  # a sentence too long for any batch is alone
        assert sum(of_micros) <= tokens or len(update) == 1


def test_the_plan_of_an_older_run_is_the_same() -> None:
    """A resumed run reads on in it: whole weights draw nothing else from the random numbers of the epoch."""
    random = np.random.default_rng((3, 2, 1))
    random.permutation(6)  # of which no part is visited once more
    expected = random.permutation(np.arange(6))
    assert visits(np.zeros(6, np.int64), (1.0,), seed=3, epoch=2).tolist() == expected.tolist()
    widths = np.full(8, 5)
    updates = plan_epoch(np.arange(8), widths, widths, tokens=20, micro_tokens=10, seed=0, epoch=0)
    assert [len(update) for update in updates] == [2, 2], "micro-batches that fill an update to the last token"


def test_a_plan_is_a_function_of_its_arguments() -> None:
    src, tgt = realistic(2000, 20, 0.5)

    def planned(seed: int, epoch: int) -> list[list[list[int]]]:
        indices = visits(np.zeros(2000, np.int64), (1.0,), seed=seed, epoch=epoch)
        return flat(plan_epoch(indices, src, tgt, tokens=4000, micro_tokens=1000, seed=seed, epoch=epoch))

    first = planned(1, 0)
    np.random.seed(5)  # the plan does not use numpy's global random state
    assert planned(1, 0) == first
    others = [planned(1, 1), planned(2, 0), planned(0, 1)]
    for i, other in enumerate(others):
        assert other != first
        assert other not in others[:i]
        assert sorted(str(sorted(u)) for u in other) != sorted(str(sorted(u)) for u in first)  # in other batches, too
    same_sentences = [
        flat(plan_epoch(np.arange(2000), src, tgt, tokens=4000, micro_tokens=1000, seed=seed, epoch=epoch))
        for seed, epoch in [(1, 0), (1, 1), (2, 0)]
    ]
    assert all(one != other for one, other in combinations(same_sentences, 2))  # in another order


def test_updates_fill_their_budget() -> None:
    src, tgt = realistic(30_000, 20, 0.5)
    updates = plan_epoch(np.arange(30_000), src, tgt, tokens=8000, micro_tokens=2000, seed=0, epoch=0)
    filled = [sum(sizes(update, src, tgt)) for update in updates]
    assert np.mean(filled) > 0.95 * 8000
    assert {len(update) for update in updates[:-1]} >= {4}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 200))
def test_cut_is_greedy_and_in_order(widths: list[int], tokens: int) -> None:
    lengths = np.array(widths)
    parts = [part.tolist() for part in cut(np.arange(len(widths)), lengths, lengths, tokens)]
    assert [i for part in parts for i in part] == list(range(len(widths)))
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert len(part) * lengths[part].max() <= tokens or len(part) == 1
        if following is not None:  # one more would not have fitted
            assert (len(part) + 1) * lengths[[*part, following[0]]].max() > tokens


def test_cut_by_hand() -> None:
    src, tgt = np.array([5, 5, 5, 2, 2, 9]), np.array([5, 4, 5, 2, 4, 1])
    parts = [part.tolist() for part in cut(np.array([0, 1, 2, 3, 4, 5]), src, tgt, 10)]
    assert parts == [[0, 1], [2, 3], [4], [5]], "a batch may have exactly so many tokens, on the wider side"
    assert [part.tolist() for part in cut(np.array([5, 3, 4]), src, tgt, 8)] == [[5], [3, 4]]


def test_targets_rise_and_fall_in_turn_inside_bands_of_sources() -> None:
    """Where one band ends and the next begins, targets are alike: a batch over the border has little padding."""
    src, tgt = np.full(8, 4), np.array([3, 1, 4, 2, 3, 1, 4, 2])
    assert [micro.tolist() for micro in micro_batches(np.arange(8), src, tgt, 8)] == [[1, 3], [0, 2], [6, 4], [7, 5]]
    widths = np.array([6, 2, 6, 2])
    assert [micro.tolist() for micro in micro_batches(np.arange(4), widths, np.ones(4), 4)] == [[1, 3], [0], [2]]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.25]), min_size=1, max_size=3), st.integers(0, 9))
def test_weights_are_multiplicities(weights: list[float], seed: int) -> None:
    corpus = np.repeat(np.arange(len(weights)), 40)
    counts = Counter(visits(corpus, tuple(weights), seed=seed, epoch=0).tolist())
    for number, weight in enumerate(weights):
        each = [counts[i] for i in np.flatnonzero(corpus == number)]
        assert sum(each) == 40 * weight
        assert set(each) <= {int(weight), int(np.ceil(weight))}


def test_a_weight_of_less_than_a_sentence_visits_it_as_often_as_it_says() -> None:
    corpus = np.array([0] * 10 + [1])
    counts = Counter[int]()
    for epoch in range(1000):
        counts.update(visits(corpus, (0.02, 0.5), seed=0, epoch=epoch).tolist())
    assert sum(counts[i] for i in range(10)) == pytest.approx(200, abs=45)  # three standard deviations
    assert counts[10] == pytest.approx(500, abs=50)


def test_a_part_of_a_corpus_is_another_part_each_epoch() -> None:
    corpus = np.zeros(1000, np.int64)
    halves = [frozenset(visits(corpus, (0.5,), seed=0, epoch=epoch).tolist()) for epoch in range(4)]
    assert [len(half) for half in halves] == [500] * 4
    assert len(set(halves)) == 4
    assert len(frozenset.union(*halves)) > 900


@given(lengths_of, st.integers(1, 9), st.integers(40, 400))
def test_ranks_partition_every_update(pairs: list[tuple[int, int]], world: int, tokens: int) -> None:
    src, tgt = arrays(pairs)
    for update in plan_epoch(np.arange(len(pairs)), src, tgt, tokens=tokens, micro_tokens=tokens // 2, seed=0, epoch=0):
        shares = [share(update, rank, world) for rank in range(world)]
        together = [i for mine in shares for micro in mine for i in micro.tolist()]
        assert sorted(together) == sorted(i for micro in update for i in micro.tolist())
        rows = [sum(map(len, mine)) for mine in shares]
        left = [len(micro) % world for micro in update]
        assert max(rows) - min(rows) <= sum(0 < rest < world for rest in left)  # they differ by one row at most
        if len(update) % world == 0 and len(set(left)) == 1:  # every rank begins as often
            assert max(rows) == min(rows)
        assert all(len(micro) for mine in shares for micro in mine)
    assert flat([share(update, 0, 1)]) == flat([update])


# ---- the loader ------------------------------------------------------------------------------------------------------


def test_collate_by_hand() -> None:
    batch = collate([np.array([7, 8, 9]), np.array([5])], [np.array([6], np.uint16), np.array([], np.uint16)], both())
    assert batch.source.tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.target.tolist() == [[1, 6], [1, 0]]
    assert batch.labels.tolist() == [[6, 2], [2, 0]]
    assert batch.tokens == 3 == int((batch.labels != 0).sum())
    assert batch.source.dtype == batch.labels.dtype == torch.int64


def test_pad_by_hand() -> None:
    rows = [np.array([7, 8], np.uint16), np.array([], np.uint16)]
    assert pad(rows, -1).tolist() == [[7, 8], [-1, -1]]
    assert pad(rows, 0, first=1, last=2).tolist() == [[1, 7, 8, 2], [1, 2, 0, 0]]
    assert pad([], 0, first=1).shape == (0, 1)
    assert pad(rows, 5, first=0, last=0).tolist() == [[0, 7, 8, 0], [0, 0, 5, 5]], "0 is an id like others"


def test_all_tensors_of_a_batch_go_to_its_device() -> None:
    meta = torch.device("meta")
    batch = collate([np.array([7])], [np.array([6])], both()).to(meta)
    assert {tensor.device for tensor in (*batch.inputs, batch.labels)} == {meta}
    assert batch.tokens == 2
    update = next(updates_of(device=meta).starting(Position(0, 0)))
    assert {batch.labels.device for batch in update.micro_batches} == {meta}


def test_a_stream_of_a_ring_changes_the_ids_of_a_batch() -> None:
    """It gets the seed of the training, the epoch and the number of the update, from which all randomness follows."""
    seeds: list[tuple[int, ...]] = []

    class Segmented(PairBatches):
        def sides(self, micro: NDArray[np.int64], seed: tuple[int, ...]) -> list[Rows]:
            seeds.append(seed)
            ones = np.ones(len(micro), np.int64)
            return [Rows(np.full(len(micro), token), ones) for token in (11, 12)]

    stream = updates_of(Segmented)
    for number, update in enumerate(islice(stream.starting(Position(1, 0)), 2)):
        for micro, batch in zip(stream.plan(1)[number], update.micro_batches, strict=True):
            assert batch.source.tolist() == [[11, 2]] * len(micro)
            assert batch.labels.tolist() == [[12, 2]] * len(micro)
        assert set(seeds) == {(3, 1, number)}
        seeds.clear()


def test_an_epoch_loads_every_pair_once() -> None:
    updates = updates_of()
    planned = updates.plan(0)
    store = FakeStore()
    loaded = list(islice(updates.starting(Position(0, 0)), len(planned)))
    sides = ([tuple(row.tolist()) for row in store.sides[side]] for side in ("src", "tgt"))
    stored = list(zip(*sides, strict=True))
    assert Counter(pairs_in(loaded)) == Counter(stored)
    assert loaded[-1].after == Position(1, 0)
    assert [step.after for step in loaded[:-1]] == [Position(0, n + 1) for n in range(len(planned) - 1)]
    assert sum(step.tokens for step in loaded) == sum(len(target) + 1 for _, target in stored)


def test_visiting_nothing_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(UsageError, match="visits no sentence"):
        next(updates_of(store=FakeStore(weights=(0.0, 0.0))).starting(Position(0, 0)))


def test_a_plan_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several streams over one store share it: a plan of two million pairs takes a second."""
    calls: list[str] = []

    def count(name: str) -> None:
        real = getattr(batches, name)
        monkeypatch.setattr(batches, name, lambda *a, **k: calls.append(name) or real(*a, **k))

    count("plan_epoch")
    store = FakeStore(sentences=2000)
    streams = [updates_of(store=store) for _ in range(3)]
    for updates in streams:
        updates.describe(0)
        assert len(updates.plan(0)) == len(streams[0].plan(0))
        list(islice(updates.starting(Position(0, 0)), 2))
    assert len(calls) == 1
    other = updates_of(store=store, micro_tokens=50)
    other.plan(0)
    assert len(calls) == 2, "another size is another plan"
    for epoch in range(5):
        streams[0].plan(epoch)
    assert len(store.plans) <= batches.PLANS_CACHED
    calls.clear()
    for epoch in (3, 4, 3, 4):  # a thread that reads ahead is in the next epoch
        streams[1].plan(epoch)
    assert calls == [], "the two newest plans are kept"


def test_a_plan_says_what_it_costs() -> None:
    updates = updates_of(tokens=1_200, micro_tokens=200)
    count = len(updates.plan(0))
    assert updates.describe(0) == f"a pass over the text is {count} updates of up to 1,200 tokens a side"


def test_updates_are_one_batch_unless_its_size_is_given() -> None:
    assert updates_of(tokens=500, micro_tokens=0).micro_tokens == 500
    assert updates_of(tokens=500, micro_tokens=70).micro_tokens == 70


@settings(max_examples=8)
@given(st.integers(0, 25))
def test_any_position_starts_the_tail_of_the_whole(start: int) -> None:
    updates = updates_of()
    whole = list(islice(updates._updates(Position(0, 0)), 30))
    assert {step.after.epoch for step in whole} >= {0, 1}
    position = whole[start - 1].after if start else Position(0, 0)
    tail = islice(updates_of().starting(position), 30 - start)
    assert [plain(step) for step in tail] == [plain(step) for step in whole[start:]]


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_together_load_the_batches_of_one(world: int) -> None:
    one = list(islice(updates_of().starting(Position(0, 0)), 12))
    ranks = [list(islice(updates_of(world=World(rank, world)).starting(Position(0, 0)), 12)) for rank in range(world)]
    for number, step in enumerate(one):
        shared = [mine[number] for mine in ranks]
        assert Counter(pairs_in(shared)) == Counter(pairs_in([step]))
        assert sum(part.tokens for part in shared) == step.tokens
        assert {part.after for part in shared} == {step.after}
