"""Rules of the search, each against a plain statement of it; the score stays the model's own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.decode.board import Board, Hypothesis
from qkv.decode.rules import NoRepeat, Repetition, Rules, UnlessForced
from qkv.decode.sampling import Sampling
from qkv.decode.search import search
from qkv.evaluation.diagnosis import LONGEST, TIMES, TOKENS, Loop, breaking, find_loop, repetitions
from qkv.options import DecodeConfig
from test_search import BOS, EOS, PAD, Table, TableModel, random_table

VOCAB = 9
rows = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=5, max_size=5), min_size=1, max_size=4)


def board_of(written: list[list[int]], length: int, capacity: int) -> Board:
    """A board of one sentence; behind what was written there is something else, which nobody must look at."""
    board = Board.empty(1, len(written), 1, capacity, torch.device("cpu"))
    board.place(
        torch.tensor([0]), BOS, torch.tensor([capacity - 2]), torch.empty(1, 0).long(), torch.zeros(len(written))
    )
    board.tokens[0, :, 1:] = 3
    for row, tokens in enumerate(written):
        board.tokens[0, row, 1 : 1 + len(tokens)] = torch.tensor(tokens)
    board.length[0] = length
    return board


def some_log_probs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@given(rows, st.integers(0, 5), st.sampled_from([0.5, 1.3, 2.0]), st.integers(0, 3))
def test_repetition_penalty_touches_what_was_written(
    written: list[list[int]], length: int, factor: float, spare: int
) -> None:
    before = some_log_probs(len(written))
    after = before.clone()
    Repetition(factor)(after, board_of(written, length, 6 + spare))
    for row, tokens in enumerate(written):
        for token in range(2, VOCAB):  # <s> is never chosen, whatever it has
            expected = before[0, row, token] * (factor if token in tokens[:length] else 1.0)
            assert float(after[0, row, token]) == pytest.approx(float(expected), rel=1e-6)


@given(rows, st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
def test_no_ngram_comes_twice(written: list[list[int]], length: int, n: int, spare: int) -> None:
    after = some_log_probs(len(written))
    before = after.clone()
    NoRepeat(n)(after, board_of(written, length, 6 + spare))
    for row, whole in enumerate(written):
        tokens = whole[:length]
        had = {tuple(tokens[i : i + n]) for i in range(length - n + 1)}
        for token in range(2, VOCAB):
            repeats = length >= n - 1 and (*tokens[length - n + 1 :], token) in had
            assert float(after[0, row, token]) == (-math.inf if repeats else float(before[0, row, token]))


def test_a_forced_token_is_not_for_rules_to_forbid() -> None:
    board = board_of([[4, 4, 5, 5, 5]], 3, 7)
    board.forced[0, 3] = 5
    after = some_log_probs(1)
    before = after.clone()
    UnlessForced((NoRepeat(1),))(after, board)
    assert after[0, 0, 4] == -math.inf
    assert after[0, 0, 5] == before[0, 0, 5]
    assert UnlessForced((NoRepeat(1),)).capturable


# ---- in a search -----------------------------------------------------------------------------------------------------


def found_by(
    table: Table, rules: Rules, *, beam: int = 3, n_best: int = 1, longest: int = 7, **more: Any
) -> list[Hypothesis]:
    spec = DecodeConfig(beam=beam)
    (found,) = search(
        TableModel(table),
        torch.tensor([[0]]),
        torch.tensor([1]),
        spec,
        bos=BOS,
        eos=EOS,
        pad=PAD,
        n_best=n_best,
        longest=torch.tensor([longest]),
        choice=rules.choice(),
        **more,
    )
    return found


def assert_own_logprob(table: Table, found: Hypothesis) -> None:
    followed = [(tuple(found.tokens[:i]), t) for i, t in enumerate([*found.tokens, EOS])]
    assert found.logprob == pytest.approx(sum(math.log(table(0, w)[t]) for w, t in followed), abs=1e-4)


rule_sets = st.builds(
    Rules,
    min_length=st.integers(0, 8),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    no_repeat_ngram=st.integers(0, 3),
    groups=st.sampled_from([1, 2]),
    diversity=st.sampled_from([0.0, 1.0]),
)


@settings(max_examples=100)
@given(st.integers(0, 10**6), rule_sets, st.sampled_from([1, 4]), st.booleans())
def test_rules_hold_and_scores_are_the_models_own(seed: int, rules: Rules, beam: int, draws: bool) -> None:
    table = random_table(seed, 12, sharpness=0.3)
    if draws or beam == 1:
        rules = dataclasses.replace(rules, groups=1, sampling=Sampling(seed=seed) if draws else None)
    for found in found_by(table, rules, beam=beam, n_best=beam):
        assert len(found.tokens) >= min(rules.min_length, 7)
        n = rules.no_repeat_ngram
        grams = [tuple(found.tokens[i : i + n]) for i in range(len(found.tokens) - n + 1)]
        assert n == 0 or len(set(grams)) == len(grams)
        assert_own_logprob(table, found)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_greedy_under_rules_is_what_it_says(seed: int, n: int) -> None:
    """Token by token in plain Python: the likeliest that is allowed, where those written count for less."""
    table = random_table(seed, 5, sharpness=0.3)
    written: tuple[int, ...] = ()
    while True:
        had = {written[i : i + n] for i in range(len(written) - n + 1)}
        value = {t: math.log(table(0, written)[t]) * (1.5 if t in written else 1) for t in range(2, 8)}
        allowed = [t for t in value if t == EOS or (*written[len(written) - n + 1 :], t) not in had]
        best = max(allowed if len(written) < 7 else [EOS], key=value.__getitem__)
        if best == EOS:
            break
        written = (*written, best)
    (found,) = found_by(table, Rules(repetition_penalty=1.5, no_repeat_ngram=n), beam=1)
    assert tuple(found.tokens) == written


def test_a_repetition_in_a_prefix_is_nobodys_fault() -> None:
    table = random_table(1, 5)
    prefix = torch.tensor([[4, 4, 4]])
    (found,) = found_by(table, Rules(no_repeat_ngram=1, min_length=7), prefix=prefix, longest=5)
    assert found.tokens[:3] == [4, 4, 4]
    assert len(found.tokens) == 5
    assert len(set(found.tokens[2:])) == 3


def test_wrong_rules_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"min_length": -1},
        {"max_length": -1},
        {"min_length": 3, "max_length": 2},
        {"coverage": -0.1},
        {"coverage": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"no_repeat_ngram": -1},
        {"groups": 0},
        {"diversity": -1.0},
        {"groups": 2, "sampling": Sampling()},
    ]
    for options in wrong:
        with pytest.raises(UsageError, match=r"must be|more than|leave"):
            Rules(**options)
    assert Rules().choice().forbid == Rules().choice().prefer == ()
    assert hash(Rules(no_repeat_ngram=2, repetition_penalty=2.0).choice())  # a search is kept by what it was made for


# ---- loops -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 50), max_size=6, unique=True),
    st.lists(st.integers(100, 150), min_size=1, max_size=8, unique=True),
    st.integers(1, 12),
    st.lists(st.integers(200, 250), max_size=6, unique=True),
)
def test_a_loop_is_a_phrase_repeated(before: list[int], phrase: list[int], times: int, after: list[int]) -> None:
    output = [*before, *phrase * times, *after]
    loop = find_loop(output)
    if times >= TIMES and times * len(phrase) >= TOKENS:
        assert loop == Loop(len(before), len(phrase), times)
        assert find_loop(output, source=phrase * (times - 1)) is None  # the source says it as often
        assert find_loop(output, source=phrase * (times - 2)) == loop
    else:
        assert loop is None


@given(st.lists(st.integers(0, 2), max_size=30))
def test_repetitions_by_hand(tokens: list[int]) -> None:
    for loop in repetitions(tokens):
        phrase = tokens[loop.start : loop.start + loop.length]
        assert tokens[loop.start : loop.start + loop.length * loop.times] == phrase * loop.times
        assert loop.times >= 2
    pairs = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[i + 1]]
    assert bool(pairs) == any(loop.length == 1 for loop in repetitions(tokens))


@given(st.integers(1, LONGEST), st.integers(0, 5))
def test_what_breaks_a_loop_leaves_none(length: int, blocked: int) -> None:
    """The longest run of a phrase in which no n-gram comes twice is no loop."""
    n = breaking(Loop(0, length, 9), blocked)
    phrase = list(range(length))

    def run(size: int) -> list[int]:
        return (phrase * (size // length + 1))[:size]

    def repeats(tokens: list[int]) -> bool:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        return len(set(grams)) < len(grams)

    size = max(size for size in range(2 * LONGEST + n) if not repeats(run(size)))
    assert find_loop(run(size)) is None
    assert n == (min(blocked, max(4, length)) if blocked else max(4, length))


def test_the_table_world_loops_until_it_is_told_not_to() -> None:
    def table(_sentence: int, _prefix: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.array([0.0, 0.0, 0.1, 0.6, 0.1, 0.1, 0.1])

    (found,) = found_by(table, Rules(), beam=1, longest=20)
    loop = find_loop(found.tokens)
    assert loop == Loop(0, 1, 20)
    (again,) = found_by(table, Rules(no_repeat_ngram=breaking(loop)), beam=1, longest=20)
    assert find_loop(again.tokens) is None
