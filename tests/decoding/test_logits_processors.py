"""Logits processors, each against its definition in plain Python; scores stay those of the model."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchState, search
from qkv.core.tokenizer import Tokenizer
from qkv.decoding.beam_variants import DecodingOptions
from qkv.decoding.ensemble import Ensemble
from qkv.decoding.logits_processors import NoRepeatNgram, RepetitionPenalty, Sampling
from qkv.evaluation.diagnosis import LONGEST, TIMES, TOKENS, Loop, breaking, find_loop, repetitions
from qkv.models.variants import record_attention
from search_tables import BOS, EOS, SPECIAL, Table, TableModel, random_table, sources, transformer

VOCAB = 9
rows = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=5, max_size=5), min_size=1, max_size=4)


def state_of(written: list[list[int]], length: int, capacity: int) -> SearchState:
    """A search state of one sentence; tokens beyond its length are random and must not be read."""
    state = SearchState(1, len(written), 1, capacity, torch.device("cpu"))
    state.tokens[0, :, 0] = BOS
    state.tokens[0, :, 1:] = 3
    for row, tokens in enumerate(written):
        state.tokens[0, row, 1 : 1 + len(tokens)] = torch.tensor(tokens)
    state.length[0] = length
    return state


def some_log_probs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@given(rows, st.integers(0, 5), st.sampled_from([0.5, 1.3, 2.0]), st.integers(0, 3))
def test_repetition_penalty_applies_to_earlier_tokens(
    written: list[list[int]], length: int, factor: float, spare: int
) -> None:
    before = some_log_probs(len(written))
    after = before.clone()
    RepetitionPenalty(factor)(after, state_of(written, length, 6 + spare))
    for row, tokens in enumerate(written):
        for token in range(2, VOCAB):  # <s> is never chosen, whatever it has
            expected = before[0, row, token] * (factor if token in tokens[:length] else 1.0)
            assert float(after[0, row, token]) == pytest.approx(float(expected), rel=1e-6)


@given(rows, st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
def test_no_ngram_comes_twice(written: list[list[int]], length: int, n: int, spare: int) -> None:
    after = some_log_probs(len(written))
    before = after.clone()
    NoRepeatNgram(n)(after, state_of(written, length, 6 + spare))
    for row, whole in enumerate(written):
        tokens = whole[:length]
        had = {tuple(tokens[i : i + n]) for i in range(length - n + 1)}
        for token in range(2, VOCAB):
            repeats = length >= n - 1 and (*tokens[length - n + 1 :], token) in had
            assert float(after[0, row, token]) == (-math.inf if repeats else float(before[0, row, token]))


# ---- in a search -----------------------------------------------------------------------------------------------------


def found_by(
    table: Table, options: DecodingOptions, *, beam: int = 3, n_best: int = 1, longest: int = 7, **more: Any
) -> list[Hypothesis]:
    (found,) = search(
        TableModel(table),
        torch.tensor([[0]]),
        torch.tensor([longest + 1]),
        dataclasses.replace(options, beam=beam, n_best=n_best, extra_length=0),
        Tokenizer("char", []),
        **more,
    )
    return found


def assert_own_logprob(table: Table, found: Hypothesis) -> None:
    followed = [(tuple(found.tokens[:i]), t) for i, t in enumerate([*found.tokens, EOS])]
    assert found.logprob == pytest.approx(sum(math.log(table(0, w)[t]) for w, t in followed), abs=1e-4)


rule_sets = st.builds(
    DecodingOptions,
    min_length=st.integers(0, 8),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    no_repeat_ngram=st.integers(0, 3),
    groups=st.sampled_from([1, 2]),
    diversity=st.sampled_from([0.0, 1.0]),
)


@settings(max_examples=100)
@given(st.integers(0, 10**6), rule_sets, st.sampled_from([1, 4]), st.booleans())
def test_rules_hold_and_scores_are_the_models_own(seed: int, rules: DecodingOptions, beam: int, draws: bool) -> None:
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
def test_greedy_with_rules_equals_plain_python(seed: int, n: int) -> None:
    """Plain Python, token by token: the likeliest allowed token, with a penalty on earlier ones."""
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
    (found,) = found_by(table, DecodingOptions(repetition_penalty=1.5, no_repeat_ngram=n), beam=1)
    assert tuple(found.tokens) == written


def test_processors_cannot_forbid_a_forced_token() -> None:
    table = random_table(1, 5)
    prefix = torch.tensor([[4, 4, 5]])
    for beam in (1, 3):
        (found,) = found_by(table, DecodingOptions(no_repeat_ngram=1), prefix=prefix, longest=4, beam=beam)
        assert found.tokens[:3] == [4, 4, 5]
        assert set(found.tokens[3:]).isdisjoint({4, 5})
        assert_own_logprob(table, found)


def test_a_repetition_in_a_prefix_is_nobodys_fault() -> None:
    table = random_table(1, 5)
    prefix = torch.tensor([[4, 4, 4]])
    (found,) = found_by(table, DecodingOptions(no_repeat_ngram=1, min_length=7), prefix=prefix, longest=5)
    assert found.tokens[:3] == [4, 4, 4]
    assert len(found.tokens) == 5
    assert len(set(found.tokens[2:])) == 3


# Alone, "a" is the most probable first token: ln 0.5 = -0.69 against ln 0.4 = -0.92 for "b". A group after
# one that took "a" scores it -0.69 - diversity.
@pytest.mark.parametrize(("diversity", "first"), [(0.0, {3}), (0.2, {3}), (0.25, {3, 4}), (5.0, {3, 4})])
def test_diversity_keeps_groups_apart(diversity: float, first: set[int]) -> None:
    def table(_sentence: int, prefix: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.array([0.0, 0.0, 1.0, 0.0, 0.0] if prefix else [0.0, 0.0, 0.1, 0.5, 0.4])

    found = found_by(table, DecodingOptions(groups=2, diversity=diversity, length_penalty="none"), beam=2, n_best=2)
    assert {hypothesis.tokens[0] for hypothesis in found} == first
    for hypothesis in found:
        assert_own_logprob(table, hypothesis)


@pytest.mark.parametrize("groups", [1, 2])
def test_coverage_counts_the_attention_of_all_steps(groups: int) -> None:
    """The score again by forced decoding: β Σ log min(1, attention that a source token has had over all steps)."""
    source, lengths = sources(6)
    options = DecodingOptions(beam=4, n_best=2, extra_length=4, coverage=0.7, groups=groups, length_penalty="none")
    every = search(transformer(), source, lengths, options, SPECIAL)
    for row, length, hypotheses in zip(source, lengths.tolist(), every, strict=True):
        for hypothesis in hypotheses:
            fed = torch.tensor([[BOS, *hypothesis.tokens]])
            with torch.inference_mode(), record_attention() as recording:
                encoded = transformer().encode(row[None, :length], torch.tensor([length]))
                transformer().step(fed, transformer().start(encoded))
            (weights,) = recording["decoder.1.cross"]  # (1, heads, target, source)
            covered = weights.mean(1).sum(1).clamp(max=1.0)
            expected = hypothesis.logprob + 0.7 * float(covered.log().sum())
            assert hypothesis.score == pytest.approx(expected, abs=1e-3)


def test_coverage_of_an_ensemble_is_the_mean_of_its_members() -> None:
    """Members with uniform and with sharp attention: neither alone gives the score."""
    source, lengths = sources(3)
    uniform = copy.deepcopy(transformer())
    torch.nn.init.zeros_(uniform.decoder[1].cross_attention.qkv.weight)
    options = DecodingOptions(beam=3, extra_length=4, coverage=0.7, length_penalty="none")

    def gains(*members: Any) -> list[float]:
        found = search(Ensemble(members), source, lengths, options, SPECIAL)
        return [each[0].score - each[0].logprob for each in found]

    twice, once = gains(transformer(), transformer()), gains(transformer())
    assert twice == pytest.approx(once, abs=1e-4)
    assert gains(transformer(), uniform) == pytest.approx(gains(uniform, transformer()), abs=1e-4)


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
        with pytest.raises(UsageError, match=r"must be|more than|omit"):
            DecodingOptions(**options)
    assert DecodingOptions().logits_processors() == ()
    assert hash(DecodingOptions(no_repeat_ngram=2, repetition_penalty=2.0))  # a search is cached under its options


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
def test_the_rule_against_a_loop_excludes_loops(length: int, blocked: int) -> None:
    """The longest repetition of a phrase without a repeated n-gram does not count as a loop."""
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


def test_a_looping_model_stops_looping_under_the_rule() -> None:
    def table(_sentence: int, _prefix: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.array([0.0, 0.0, 0.1, 0.6, 0.1, 0.1, 0.1])

    (found,) = found_by(table, DecodingOptions(), beam=1, longest=20)
    loop = find_loop(found.tokens)
    assert loop == Loop(0, 1, 20)
    (again,) = found_by(table, DecodingOptions(no_repeat_ngram=breaking(loop)), beam=1, longest=20)
    assert find_loop(again.tokens) is None
