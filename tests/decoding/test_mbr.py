"""Minimum Bayes risk: sacreBLEU's own sentence scores, and the choice by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.decoding.mbr import expected_utility, rerank, utilities

WORDS = "the a cat sat on mat . , dog's über 猫 x".split()
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join), min_size=1, max_size=6)


@settings(max_examples=60)
@given(texts)
def test_utilities_are_sacrebleus_sentence_scores(candidates: list[str]) -> None:
    metrics = {"chrf": sacrebleu.CHRF(), "bleu": sacrebleu.BLEU(effective_order=True)}
    for name, metric in metrics.items():
        expected = [[metric.sentence_score(ours, [theirs]).score for theirs in candidates] for ours in candidates]
        assert utilities(candidates, name) == pytest.approx(np.array(expected), abs=1e-9)
    zh = sacrebleu.BLEU(tokenize="zh", effective_order=True)
    first = candidates[0]
    assert utilities([first, "猫猫"], "bleu", "zh")[1, 0] == pytest.approx(zh.sentence_score("猫猫", [first]).score)


def test_the_one_that_the_others_agree_with_wins() -> None:
    # The likeliest is unlike all others. By words, b shares three of four with a and with c; a and c share two.
    candidates = ["something else entirely here", "the cat sat down", "the cat sat there", "a cat sat there"]
    scores = [-0.1, -2.0, -3.0, -4.0]
    gained = expected_utility(candidates, "chrf")
    metric = sacrebleu.CHRF()
    by_hand = [sum(metric.sentence_score(ours, [theirs]).score for theirs in candidates) / 4 for ours in candidates]
    assert gained == pytest.approx(by_hand)
    order = rerank(candidates, scores, "chrf")
    assert order[0] == 2
    assert order[-1] == 0
    assert rerank(candidates, scores, "bleu")[0] == 2
    assert sorted(order) == [0, 1, 2, 3]


def test_repeated_candidates_are_counted() -> None:
    candidates = ["the cat", "a dog", "a dog", "a dog", "the cat sat"]
    assert rerank(candidates, [0.0, -9.0, -8.0, -7.0, -1.0], "chrf")[:3] == [3, 2, 1]  # equals by the model's score


def test_ties_go_to_the_models_score() -> None:
    candidates = ["one two", "three four", "five six"]
    assert rerank(candidates, [-3.0, -1.0, -2.0], "bleu") == [1, 2, 0]
    assert rerank(["same"] * 3, [-3.0, -1.0, -2.0], "chrf") == [1, 2, 0]
    assert rerank(["", ""], [-1.0, -0.5], "chrf") == [1, 0]
    assert rerank(["alone"], [-1.0], "bleu") == [0]


def test_an_unknown_utility_is_refused() -> None:
    with pytest.raises(UsageError, match="chrf, bleu"):
        rerank(["a"], [0.0], "ter")


def test_a_beam_counts_by_its_probabilities() -> None:
    """Three unlikely hypotheses that resemble one another do not outvote the likely one; three samples do."""
    texts = ["red cats sleep", "a dog barked", "a dog barks", "a dog barking"]
    logprobs = [-0.1, -5.0, -5.1, -5.2]
    assert rerank(texts, logprobs, "chrf")[0] != 0
    assert rerank(texts, logprobs, "chrf", logprobs=logprobs)[0] == 0
    weights = np.exp(logprobs) / np.exp(logprobs).sum()
    assert expected_utility(texts, "chrf", logprobs=logprobs) == pytest.approx(utilities(texts, "chrf") @ weights)
