"""Search under limits, prefixes and processors, the order of equals, and what the hooks of a search get."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.core import search as module
from qkv.core.config import DecodeConfig
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import (
    BeamSearch,
    GreedySearch,
    Hypothesis,
    Search,
    SearchOptions,
    SearchState,
    log_sum_exp,
    search,
    start_search,
    top_k,
)
from search_tables import (
    BOS,
    EOS,
    GARDEN_PATH,
    PAD,
    SPECIAL,
    A,
    B,
    Prefix,
    Table,
    TableModel,
    assert_same,
    everything,
    random_table,
)

WORDS = 3
WIDE = WORDS**4 * 2  # a beam that holds all continuations of up to four words
NONE = DecodeConfig(length_penalty="none")


def find(
    table: Table, limits: Sequence[int], prefix: Sequence[Sequence[int]] | None = None, **options: Any
) -> list[list[Hypothesis]]:
    """Search the sentences 0, 1, 2 … of a table, each up to its limit."""
    start = options.pop("start", start_search)
    chosen = SearchOptions(**{"length_penalty": "none", "extra_length": 0, **options})
    numbers = torch.arange(len(limits))[:, None]
    given_ = None if prefix is None else torch.tensor(prefix, dtype=torch.long)
    lengths = torch.tensor(limits) + 1
    return search(TableModel(table), numbers, lengths, chosen, SPECIAL, prefix=given_, start=start)


# ---- limits ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(0, 4))
def test_a_shortest_length_leaves_the_longer_hypotheses(seed: int, shortest: int, longest: int) -> None:
    table = random_table(seed, WORDS)
    every = [h for h in everything(table, WORDS, longest, NONE) if len(h.tokens) >= min(shortest, longest)]
    (found,) = find(table, [longest], beam=WIDE, n_best=4, min_length=shortest)
    assert_same(found, every[:4])
    ((greedy,),) = find(table, [longest], beam=1, min_length=shortest)
    assert min(shortest, longest) <= len(greedy.tokens) <= longest


def test_a_longest_length_replaces_that_of_the_source() -> None:
    options = SearchOptions(extra_length=5)
    assert (options.longest(7), options.longest(torch.tensor([7, 0])).tolist()) == (12, [12, 5])
    limited = dataclasses.replace(options, max_length=3)
    assert (limited.longest(7), limited.longest(torch.tensor([7, 0])).tolist()) == (3, [3, 3])
    assert SearchOptions(max_length=0).longest(7) == 0

    def endless(_sentence: int, _prefix: Prefix) -> Any:
        return np.array([0.0, 0.0, 0.01, 0.98, 0.01])

    for beam in (1, 2):
        found = find(endless, [9, 1], beam=beam, max_length=4, length_penalty="average")
        assert [h.tokens for (h,) in found] == [[A] * 4] * 2
        assert all(h.truncated for (h,) in found)


# ---- prefixes --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.lists(st.integers(3, 2 + WORDS), max_size=3))
def test_hypotheses_begin_with_the_prefix_and_count_it(seed: int, prefix: list[int]) -> None:
    table = random_table(seed, WORDS)
    every = [h for h in everything(table, WORDS, 4, NONE) if h.tokens[: len(prefix)] == prefix]
    (found,) = find(table, [4], [prefix], beam=WIDE, n_best=3)
    assert_same(found, every[:3])


@pytest.mark.parametrize("beam", [1, 3])
def test_every_sentence_has_its_own_prefix(beam: int) -> None:
    table, prefixes = random_table(5, WORDS), [[B, A], [A], [], [B, B]]
    together = find(table, [4, 3, 4, 1], [[B, A], [A, -1], [-1, -1], [B, B]], beam=beam, n_best=beam)
    for number, (limit, prefix) in enumerate(zip([4, 3, 4, 1], prefixes, strict=True)):
        alone = find(lambda _, written, n=number: table(n, written), [limit], [prefix], beam=beam, n_best=beam)
        assert together[number] == alone[0]
    assert [h.tokens for h in together[3]] == [[B, B]], "a prefix is written whole, though the limit is lower"
    assert together[3][0].truncated


@pytest.mark.parametrize("beam", [1, 3])
def test_rules_do_not_change_a_prefix(beam: int) -> None:
    """Tokens of the prefix that a rule forbids keep their probability, and </s> waits until the prefix is written."""
    forbids = Change({A: -math.inf}, changes_score=True)
    ((best, *_),) = find(GARDEN_PATH, [5], [[A]], beam=beam, processors=(forbids,))
    assert best.tokens[0] == A
    assert A not in best.tokens[1:]
    assert best.logprob == pytest.approx(math.log(0.5 * 0.4)), "a </s>"


@pytest.mark.parametrize("token", [PAD, BOS, EOS])
def test_a_prefix_of_special_tokens_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=r"a prefix cannot hold <s>, </s> or <pad>"):
        find(GARDEN_PATH, [5], [[A, token]], beam=2)


# ---- processors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A processor that adds numbers to the log-probabilities of tokens."""

    by: Any  # token → number
    changes_score: bool

    def __call__(self, log_probs: Tensor, state: SearchState) -> None:
        assert log_probs.shape[:2] == state.logprob.shape
        for token, number in self.by.items():
            log_probs[:, :, token] += number


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_a_rule_that_forbids_leaves_the_other_hypotheses_and_their_scores(seed: int) -> None:
    table = random_table(seed, WORDS)
    every = [h for h in everything(table, WORDS, 3, NONE) if B not in h.tokens]
    (found,) = find(table, [3], beam=WIDE, n_best=3, processors=(Change({B: -math.inf}, changes_score=True),))
    assert_same(found, every[:3])


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("changes_score", [False, True])
def test_a_processor_gets_log_probabilities_of_logits_that_are_none(beam: int, changes_score: bool) -> None:
    nothing = Change({}, changes_score)
    (ours,) = find(lambda *row: 20 * GARDEN_PATH(*row), [4], beam=beam, processors=(nothing,))
    (theirs,) = find(GARDEN_PATH, [4], beam=beam)
    assert_same(ours, theirs)


@pytest.mark.parametrize("beam", [1, 2])
def test_a_preference_changes_the_choice_and_not_the_score(beam: int) -> None:
    """In GARDEN_PATH, b is the second choice and then ends: 0.4 · 0.9."""
    prefers = Change({B: 3.0}, changes_score=False)
    ((best,),) = find(GARDEN_PATH, [1], beam=1, processors=(prefers,))
    assert best.tokens == [B]
    assert best.logprob == pytest.approx(math.log(0.36))
    twice = (Change({A: -math.inf}, changes_score=True), prefers)
    ((best, *_),) = find(GARDEN_PATH, [1], beam=beam, processors=twice)
    assert (best.tokens, best.logprob) == ([B], pytest.approx(math.log(0.36)))
    against = Change({B: -9.0}, changes_score=False)
    ((best,),) = find(GARDEN_PATH, [1], beam=1, processors=(prefers, against))
    assert best.tokens == [A], "all preferences count"
    counted = Change({B: -0.5, A: -9.0}, changes_score=True)
    ((best,),) = find(GARDEN_PATH, [1], beam=beam, processors=(counted,))
    assert best.logprob == pytest.approx(math.log(0.36) - 0.5)


@pytest.mark.parametrize("beam", [1, 2])
def test_rules_that_leave_no_way_to_go_on_are_named(beam: int) -> None:
    nothing = Change(dict.fromkeys((EOS, A, B), -math.inf), changes_score=True)
    with pytest.raises(QkvError, match=r"or the rules left no way to go on: use the weights of another step, or fewer"):
        find(GARDEN_PATH, [5], beam=beam, processors=(nothing,))


# ---- the order of equals ---------------------------------------------------------------------------------------------


def equals(_sentence: int, _prefix: Prefix) -> Any:
    return np.array([0.0, 0.0, 0.25, 0.25, 0.25, 0.25])


def test_of_equal_continuations_the_lower_row_and_token_come_first() -> None:
    """Beam 3: </s>, a, b are the first of four equals. Then those of a and of b: a </s> and a a, a b and a c …"""
    (found,) = find(equals, [3], beam=3, n_best=3)
    assert [h.tokens for h in found] == [[], [A], [A, A]]
    ((greedy,),) = find(equals, [3], beam=1)
    assert greedy.tokens == []
    ((greedy,),) = find(equals, [3], beam=1, min_length=2)
    assert greedy.tokens == [A, A]


def test_of_equal_hypotheses_the_one_that_finished_first_comes_first() -> None:
    half = {(): [0.5, 0.5, 0.0], (A,): [1.0, 0.0, 0.0]}  # </s> after nothing or after a: 0.5 both

    def table(_sentence: int, prefix: Prefix) -> Any:
        return np.array([0.0, 0.0, *half.get(prefix, [1.0, 0.0, 0.0])])

    (found,) = find(table, [2], beam=2, n_best=2)
    assert [h.tokens for h in found] == [[], [A]]
    assert found[0].score == found[1].score


@pytest.mark.parametrize("n", [3, 40, 128, 129, 160, 161, 1_000, 32 * 70 + 5])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_top_k_is_a_stable_sort(n: int, k: int) -> None:
    torch.manual_seed(n)
    for distinct in (2, 50, 10**6):
        values = torch.randint(distinct, (4, n)).float()
        values[1, ::3] = math.nan
        values[2, n // 2] = math.inf
        values[3] = -math.inf
        order = np.argsort(-np.nan_to_num(values.numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf), kind="stable")
        best, places = top_k(values.clone(), k)
        assert places.tolist() == order[:, :k].tolist()
        assert best.tolist() == values.nan_to_num(-math.inf, math.inf, -math.inf).gather(1, places).tolist()


def test_log_sum_exp_is_that_of_torch() -> None:
    logits = torch.randn(3, 4, 50) * 10
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=1e-5)
    low = logits.bfloat16()
    assert log_sum_exp(low).dtype == torch.float32
    torch.testing.assert_close(log_sum_exp(low), low.float().logsumexp(-1), rtol=1e-5, atol=1e-4)


# ---- the parts of a search -------------------------------------------------------------------------------------------


def test_the_options_choose_the_search() -> None:
    assert SearchOptions(beam=1).search_class() is GreedySearch
    assert SearchOptions(beam=2).search_class() is BeamSearch
    assert SearchOptions(beam=1, n_best=2).search_class() is BeamSearch
    assert [SearchOptions(beam=3, n_best=n).rows for n in (1, 3, 5)] == [3, 3, 5]
    rule = Change({}, changes_score=True)
    assert SearchOptions(processors=(rule,)).logits_processors() == (rule,)
    assert SearchOptions().logits_processors() == ()


@pytest.mark.parametrize("beam", [1, 3])
def test_finished_sentences_leave_the_batch(beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a quarter of the rows of a step are of sentences that are done; the others keep their numbers."""
    runs: list[Search] = []

    def start(*arguments: Any, **options: Any) -> Search:
        runs.append(start_search(*arguments, **options))
        return runs[0]

    step, seen = TableModel.step, list[int]()

    def watched(self: TableModel, tokens: Tensor, state: Any) -> Any:
        assert state.sentences[::beam] == runs[0].numbers
        done = int(runs[0].state.done.sum())
        assert done <= module.LEAVING * len(runs[0].numbers)
        seen.append(len(runs[0].numbers))
        return step(self, tokens, state)

    def endless(_sentence: int, _prefix: Prefix) -> Any:
        return np.array([0.0, 0.0, 1e-9, 0.9, 0.1])

    monkeypatch.setattr(TableModel, "step", watched)
    found = find(endless, range(12), beam=beam, length_penalty="average", start=start)
    assert [len(h.tokens) for (h, *_) in found] == list(range(12))
    assert seen == [12, 12, 12, 12, 8, 8, 8, 5, 5, 3, 2, 1]


def test_numbers_are_the_places_in_the_whole_input() -> None:
    numbers: list[Any] = []

    def start(*arguments: Any, **options: Any) -> Search:
        run = start_search(*arguments, **options)
        numbers.append(run.numbers)
        return run

    sources, lengths, options = torch.tensor([[0], [1]]), torch.tensor([2, 3]), SearchOptions(beam=1)
    for given_ in (None, [40, 7]):
        search(TableModel(GARDEN_PATH), sources, lengths, options, SPECIAL, numbers=given_, start=start)
    assert numbers == [[0, 1], [40, 7]]


def observed(limit: int, **options: Any) -> list[tuple[Tensor, ...]]:
    """What the hook of a search of GARDEN_PATH gets in each step."""
    steps: list[tuple[Tensor, ...]] = []

    def start(*arguments: Any, **sizes: Any) -> Search:
        run = start_search(*arguments, **sizes)
        run.on_step = lambda *values: steps.append(tuple(value.clone() for value in values))
        return run

    find(GARDEN_PATH, [limit], start=start, **options)
    return steps


def test_the_hook_of_a_beam_gets_all_scores_and_the_ranked_ones() -> None:
    first, second, *_ = observed(5, beam=2)
    scores, flat, totals, kept = first
    assert scores.shape == (1, 2, 5)
    assert scores[0, 0].exp().tolist() == pytest.approx([0, 0, 0.1, 0.5, 0.4])
    assert flat[0, :3].tolist() == [A, B, EOS]
    assert totals[0].exp().tolist() == pytest.approx([0.5, 0.4, 0.1, 0.0])
    assert kept.tolist() == [[0, 1]]
    scores, flat, totals, kept = second
    assert scores[0].exp().flatten().tolist() == pytest.approx([0, 0, 0.2, 0.15, 0.15, 0, 0, 0.36, 0.02, 0.02])
    assert flat[0].tolist() == [5 + EOS, EOS, A, B], "b </s>, a </s>, a a, a b"
    assert totals[0].exp().tolist() == pytest.approx([0.36, 0.2, 0.15, 0.15])
    assert kept.tolist() == [[2, 3]], "of the ranked, those that go on"


def test_the_hook_of_greedy_search_gets_all_scores_and_the_chosen_token() -> None:
    (scores, tokens, totals, kept), (after, last, end, _) = observed(5, beam=1)
    assert scores[0, 0].exp().tolist() == pytest.approx([0, 0, 0.1, 0.5, 0.4])
    assert (tokens.tolist(), kept.tolist()) == ([[A]], [[0]])
    assert totals.exp().tolist() == [[pytest.approx(0.5)]]
    assert after[0, 0].exp().tolist() == pytest.approx([0, 0, 0.2, 0.15, 0.15])
    assert (last.tolist(), end.exp().tolist()) == ([[EOS]], [[pytest.approx(0.2)]])


def test_a_new_state_has_no_sentence() -> None:
    state = SearchState(2, 3, 1, 5, torch.device("cpu"))
    assert state.done.tolist() == [True, True]
    assert (state.logprob == -math.inf).all()
    assert (state.finished_scores == -math.inf).all()
    assert (state.tokens.shape, state.finished_tokens.shape) == ((2, 3, 5), (2, 1, 5))


# ---- places and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 2])
def test_a_prefix_may_be_longer_than_all_limits(beam: int) -> None:
    (found,) = find(random_table(5, WORDS), [1], [[B, A, B, A, A]], beam=beam)
    assert found[0].tokens == [B, A, B, A, A]


def test_a_slot_forgets_the_prefix_of_its_last_sentence() -> None:
    model: Any = TableModel(GARDEN_PATH)
    run = start_search(model, SearchOptions(), SPECIAL, lengths=torch.tensor([1]), capacity=6)
    slot, longest = torch.tensor([0]), torch.tensor([3])
    run.place(slot, longest, torch.tensor([[A, B]]))
    assert run.state.forced[0, :3].tolist() == [A, B, -1]
    run.place(slot, longest, torch.empty(1, 0, dtype=torch.long))
    assert run.state.forced.unique().tolist() == [-1]


@pytest.mark.parametrize("beam", [1, 2])
def test_logits_in_half_precision_are_summed_in_single(beam: int) -> None:
    class Half(TableModel):
        def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            logits, state = super().step(tokens, state)
            return logits.bfloat16(), state

    model: Any = Half(random_table(3, WORDS))
    options = SearchOptions(beam=beam, length_penalty="none")
    ((best, *_),) = search(model, torch.zeros(1, 1, dtype=torch.long), torch.tensor([5]), options, SPECIAL)
    assert best.logprob != float(torch.tensor(best.logprob).bfloat16()), "no sum in bf16"
