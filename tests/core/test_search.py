"""Search: tables computed by hand, exhaustive enumeration of a small table model, scores from forced decoding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.batches import collate
from qkv.core.config import DecodeConfig
from qkv.core.errors import QkvError
from qkv.core.search import Hypothesis, SearchOptions, length_penalty, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from search_tables import (
    BOS,
    EOS,
    GARDEN_PATH,
    LONG_OR_SHORT,
    PAD,
    SPECIAL,
    A,
    B,
    Prefix,
    Table,
    TableModel,
    assert_same,
    everything,
    label_logprobs,
    random_table,
    ranked,
    sources,
    specs,
    transformer,
)


def find(
    table: Table, longest: int | list[int], spec: DecodeConfig, *, n_best: int = 1, sentences: int = 1
) -> list[list[Hypothesis]]:
    limits = torch.tensor([longest] * sentences if isinstance(longest, int) else longest)
    numbers = torch.arange(len(limits))[:, None]
    options = SearchOptions(**vars(spec) | {"extra_length": 0}, n_best=n_best)
    return search(TableModel(table), numbers, limits + 1, options, SPECIAL)


def without_stopping(table: Table, longest: int, spec: DecodeConfig, beam: int) -> list[Hypothesis]:
    """Beam search for one sentence in plain Python, to the longest length whatever has been found."""
    living: list[tuple[Prefix, float]] = [((), 0.0)]
    finished: list[tuple[Prefix, float]] = []
    for length in range(longest + 1):
        continuations = []
        for written, total in living:
            for t, p in enumerate(table(0, written)):
                if t not in (PAD, BOS) and p > 0 and (length < longest or t == EOS):
                    continuations.append((written, t, total + math.log(p)))
        continuations.sort(key=lambda c: -c[2])
        finished += [(written, total) for written, t, total in continuations[:beam] if t == EOS]
        living = [((*written, t), total) for written, t, total in continuations if t != EOS][:beam]
    return ranked(finished, longest, spec)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_greedy_is_led_astray_and_a_beam_of_two_is_not() -> None:
    spec = DecodeConfig(beam=1, length_penalty="none")
    ((greedy,),) = find(GARDEN_PATH, 5, spec)
    assert greedy.tokens == [A]
    assert greedy.logprob == greedy.score == pytest.approx(math.log(0.20))
    ((best,),) = find(GARDEN_PATH, 5, dataclasses.replace(spec, beam=2))
    assert best.tokens == [B]
    assert best.logprob == pytest.approx(math.log(0.36))
    # All that ends, by probability: b 0.36, a 0.2, then a a and a b 0.15 (</s> is certain after two), "" 0.1.
    (found,) = find(GARDEN_PATH, 5, dataclasses.replace(spec, beam=6), n_best=5)
    assert [h.logprob for h in found] == pytest.approx([math.log(p) for p in (0.36, 0.2, 0.15, 0.15, 0.1)], abs=1e-6)
    assert [found[0].tokens, found[1].tokens, found[4].tokens] == [[B], [A], []]
    assert sorted([found[2].tokens, found[3].tokens]) == [[A, A], [A, B]]


@pytest.mark.parametrize(
    ("penalty", "alpha", "tokens", "score"),
    [
        ("none", 0.6, [A], -0.693147),
        ("gnmt", 0.6, [A], -0.631916),
        ("gnmt", 2.0, [B, A, A], -0.400487),
        ("average", 0.6, [B, A, A], -0.225274),
    ],
)
def test_length_penalties_choose_between_long_and_short(
    penalty: str, alpha: float, tokens: list[int], score: float
) -> None:
    ((best,),) = find(LONG_OR_SHORT, 6, DecodeConfig(beam=3, length_penalty=penalty, alpha=alpha))
    assert best.tokens == tokens
    assert best.score == pytest.approx(score, abs=1e-5)


def test_the_search_stops_when_it_is_decided_and_not_before() -> None:
    # In LONG_OR_SHORT "a" is found in the second step. Under "none" the rest, at most 0.45 · 0.95, cannot reach 0.5;
    # under "average" with 6 tokens allowed it can: ln 0.4275 / 7 > ln 0.5 / 2.
    steps = {}
    for penalty in ("none", "average"):
        model = TableModel(LONG_OR_SHORT)
        options = SearchOptions(beam=2, length_penalty=penalty, max_length=6)
        search(model, torch.tensor([[0]]), torch.tensor([1]), options, SPECIAL)
        steps[penalty] = model.steps
    assert steps == {"none": 2, "average": 4}


# ---- a small world ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([(3, 0), (3, 1), (3, 3), (3, 5), (4, 2), (4, 4), (1, 5)]), specs)
def test_a_wide_beam_is_exhaustive(seed: int, world: tuple[int, int], spec: DecodeConfig) -> None:
    words, longest = world
    table = random_table(seed, words)
    every = everything(table, words, longest, spec)
    # Wide enough for all continuations of all prefixes one token short of the limit.
    wide = dataclasses.replace(spec, beam=words**longest * 2)
    for n_best in (1, 4):
        (found,) = find(table, longest, wide, n_best=n_best)
        assert_same(found, every[:n_best])


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(0, 7),
    st.integers(2, 5),
    st.integers(1, 5),
    specs,
    st.booleans(),
)
def test_stopping_early_loses_nothing(
    seed: int, words: int, longest: int, beam: int, n_best: int, spec: DecodeConfig, sharp: bool
) -> None:
    """A vocabulary smaller than the beam, too: 1 word and 5 hypotheses."""
    table = random_table(seed, words, sharpness=0.2 if sharp else 1.0)
    (found,) = find(table, longest, dataclasses.replace(spec, beam=beam), n_best=n_best)
    assert_same(found, without_stopping(table, longest, spec, max(beam, n_best))[:n_best])


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 7), specs)
def test_beam_one_is_greedy(seed: int, words: int, longest: int, spec: DecodeConfig) -> None:
    table = random_table(seed, words)
    written: Prefix = ()
    total = 0.0
    while True:
        may = range(2, 3 + words) if len(written) < longest else [EOS]
        likeliest = max(may, key=lambda t: table(0, written)[t])
        total += math.log(table(0, written)[likeliest])
        if likeliest == EOS:
            break
        written = (*written, likeliest)
    ((found,),) = find(table, longest, dataclasses.replace(spec, beam=1))
    assert_same([found], ranked([(written, total)], longest, spec))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(1, 4), specs)
def test_search_does_not_depend_on_the_batch(seed: int, limits: list[int], beam: int, spec: DecodeConfig) -> None:
    """Sentences with lower limits end earlier and are removed; the others are not affected."""
    table = random_table(seed, 3, sharpness=0.4)
    spec = dataclasses.replace(spec, beam=beam)
    together = find(table, limits, spec, n_best=beam)
    for number, limit in enumerate(limits):
        (alone,) = find(lambda _, prefix, n=number: table(n, prefix), limit, spec, n_best=beam)
        assert alone == together[number]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 8), specs)
def test_hypotheses_are_ordered_distinct_ended_and_within_the_limit(
    seed: int, words: int, longest: int, n_best: int, spec: DecodeConfig
) -> None:
    table = random_table(seed, words, sharpness=0.3)
    for found in find(table, longest, dataclasses.replace(spec, beam=2), n_best=n_best, sentences=3):
        assert 1 <= len(found) <= n_best
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        assert len({tuple(h.tokens) for h in found}) == len(found)
        for h in found:
            assert len(h.tokens) <= longest
            assert h.truncated == (len(h.tokens) == longest)
            assert set(h.tokens) <= set(range(3, 3 + words))
            assert h.score == pytest.approx(h.logprob / length_penalty(len(h.tokens) + 1, spec))


def test_a_tempting_pad_or_start_is_never_written() -> None:
    def table(_sentence: int, _prefix: Prefix) -> np.ndarray[Any, Any]:
        return np.array([0.5, 0.4, 0.02, 0.05, 0.03])

    for beam in (1, 3):
        ((best,),) = find(table, 4, DecodeConfig(beam=beam, length_penalty="average"))
        assert best.tokens == [A, A, A, A]
        assert best.truncated
        assert best.logprob == pytest.approx(4 * math.log(0.05) + math.log(0.02))  # not renormalised


@pytest.mark.parametrize("beam", [1, 3])
def test_broken_weights_are_reported(beam: int) -> None:
    def table(sentence: int, _prefix: Prefix) -> np.ndarray[Any, Any]:
        return np.full(5, math.nan) if sentence == 1 else np.full(5, 0.2)

    with pytest.raises(QkvError, match="not numbers"):
        find(table, 4, DecodeConfig(beam=beam), sentences=2)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_broken_sentence_is_not_hidden_by_healthy_ones_that_end_with_it(beam: int) -> None:
    def table(sentence: int, _prefix: Prefix) -> np.ndarray[Any, Any]:
        return np.full(5, math.nan) if sentence == 1 else np.array([0.0, 0.0, 0.9, 0.05, 0.05])

    with pytest.raises(QkvError, match="not numbers"):
        find(table, 4, DecodeConfig(beam=beam, length_penalty="none"), sentences=3)


# ---- a Transformer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beam", "n_best"), [(1, 1), (2, 1), (4, 4), (5, 3), (3, 6)])
@pytest.mark.parametrize("penalty", ["gnmt", "average", "none"])
def test_forced_decoding_gives_every_score_again(beam: int, n_best: int, penalty: str) -> None:
    source, lengths = sources(12)
    spec = SearchOptions(beam=beam, length_penalty=penalty, extra_length=7, n_best=n_best)
    found = search(transformer(), source, lengths, spec, SPECIAL)
    either = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
    truncated = set()
    for row, hypotheses in enumerate(found):
        assert len(hypotheses) == n_best
        given_ = source[row, : lengths[row] - 1].numpy()
        batch = collate([given_] * n_best, [np.array(h.tokens, np.int64) for h in hypotheses], either)
        for h, logprobs in zip(hypotheses, label_logprobs(transformer(), batch), strict=True):
            assert len(logprobs) == len(h.tokens) + 1
            assert h.logprob == pytest.approx(sum(logprobs), abs=1e-4)
            assert h.score == pytest.approx(sum(logprobs) / length_penalty(len(logprobs), spec), abs=1e-4)
            assert h.truncated == (len(h.tokens) == int(lengths[row]) - 1 + 7)  # the paper's limit: input + extra
            truncated.add(h.truncated)
    if beam > 1:
        assert truncated == {True, False}  # both cases occur


def test_a_wider_beam_finds_no_worse_on_the_whole() -> None:
    source, lengths = sources(24)
    spec = SearchOptions(length_penalty="none", extra_length=5)
    totals = []
    for beam in (1, 2, 8):
        found = search(transformer(), source, lengths, dataclasses.replace(spec, beam=beam), SPECIAL)
        totals.append(sum(h[0].logprob for h in found))
    assert totals == sorted(totals)


@given(st.integers(1, 300), st.floats(0, 2))
def test_length_penalties(length: int, alpha: float) -> None:
    spec = DecodeConfig(length_penalty="gnmt", alpha=alpha)
    assert length_penalty(length, spec) == pytest.approx((5 + length) ** alpha / (5 + 1) ** alpha)  # Wu et al., eq. 14
    assert length_penalty(length, dataclasses.replace(spec, length_penalty="average")) == length
    assert length_penalty(length, dataclasses.replace(spec, length_penalty="none")) == 1
    assert float(length_penalty(torch.tensor(length), spec)) == pytest.approx(length_penalty(length, spec), rel=1e-5)
