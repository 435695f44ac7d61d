"""Updates of pairs as the options ask: micro-batches are as large as possible with little padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batch_streams import FakeStore, realistic, updates_of
from qkv.core.batches import PlannedUpdate, plan_epoch, visits
from qkv.data.pair_updates import MIN_TOKENS, PairUpdates, choose_micro_tokens, pad_share


def chosen(src: NDArray[np.int64], tgt: NDArray[np.int64], tokens: int) -> int:
    """The size for sentences of these widths, </s> included."""
    store: Any = FakeStore()
    store.lengths = {"src": src - 1, "tgt": tgt - 1}.__getitem__
    return choose_micro_tokens(store, ("src", "tgt"), tokens)


def micros_of(updates: list[PlannedUpdate]) -> list[NDArray[np.int64]]:
    return [micro for update in updates for micro in update]


def test_pad_share_by_hand() -> None:
    src, tgt = np.array([2, 4, 3]), np.array([5, 5, 1])
    # Source: 2 + 4 of 2 × 4, and 3 of 3; target: 10 of 10, and 1 of 1. So 2 of 22 are padding.
    assert pad_share([np.array([0, 1]), np.array([2])], src, tgt) == pytest.approx(2 / 22)


@pytest.mark.parametrize("tokens", [4096, 25_000])
@pytest.mark.parametrize(("median", "spread"), [(22, 0.6), (9, 0.35)], ids=["news", "talk"])
def test_padding_stays_under_five_percent(median: float, spread: float, tokens: int) -> None:
    pairs = 30_000
    src, tgt = realistic(pairs, median, spread)
    micro_tokens = chosen(src, tgt, tokens)
    assert tokens // micro_tokens in (2**k for k in range(10))
    assert micro_tokens >= max(src.max(), tgt.max(), MIN_TOKENS)
    for epoch in range(3):
        indices = visits(np.zeros(pairs, np.int64), (1.0,), seed=7, epoch=epoch)
        updates = plan_epoch(indices, src, tgt, tokens=tokens, micro_tokens=micro_tokens, seed=7, epoch=epoch)
        assert pad_share(micros_of(updates), src, tgt) < 0.05
    twice = plan_epoch(indices, src, tgt, tokens=tokens, micro_tokens=2 * micro_tokens, seed=7, epoch=epoch)
    assert micro_tokens == tokens or pad_share(micros_of(twice), src, tgt) > 0.045  # the largest that will do


def test_micro_batches_are_worth_a_pass_even_if_padded() -> None:
    src, tgt = realistic(300, 22, 0.6)
    assert MIN_TOKENS <= chosen(src, tgt, 25_000) < 2 * MIN_TOKENS


def test_the_smallest_micro_batch_is_reached() -> None:
    src, tgt = realistic(300, 22, 0.6)  # so few sentences that all sizes have more than 5 % padding
    short = np.minimum(src, 200), np.minimum(tgt, 200)
    assert chosen(*short, 2 * MIN_TOKENS) == MIN_TOKENS
    assert chosen(*short, 2 * MIN_TOKENS - 2) == 2 * MIN_TOKENS - 2
    assert chosen(*short, 4 * MIN_TOKENS) == MIN_TOKENS


def test_micro_batches_hold_the_longest_sentence() -> None:
    src, tgt = np.random.default_rng(0).integers(1, 900, (2, 40))  # so few and so different that all padding is large
    src[7] = 900
    assert chosen(src, tgt, 1000) == 1000
    assert chosen(src, tgt, 4000) == 1000


def test_the_size_is_chosen_once_for_a_text() -> None:
    """Several streams over one store share it, and a stream with a size of its own keeps that."""
    store: Any = FakeStore(sentences=2000)
    before = choose_micro_tokens.cache_info().misses
    sizes = {updates_of(PairUpdates, store=store, tokens=4096, micro_tokens=0).micro_tokens for _ in range(3)}
    assert choose_micro_tokens.cache_info().misses == before + 1
    assert sizes == {choose_micro_tokens(store, ("src", "tgt"), 4096)}
    assert updates_of(PairUpdates, store=store, tokens=4096, micro_tokens=50).micro_tokens == 50


def test_the_description_has_the_share_of_padding() -> None:
    updates = updates_of(PairUpdates)
    share = pad_share(micros_of(updates.plan(0)), updates.src_widths, updates.tgt_widths)
    words = f"{len(updates.plan(0))} updates of up to 400 tokens a side, in batches of up to 200; {share:.1%} of them"
    assert updates.describe(0) == f"a pass over the text is {words} padding"
