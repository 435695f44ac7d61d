"""Sampling: the right frequencies, the same draws for a sentence in any batch, and never a forbidden token."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.core.search import SearchOptions, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.translate import search_all
from qkv.decoding.beam_variants import DecodingOptions
from qkv.decoding.logits_processors import Sampling, draw, uniform_numbers
from random_models import model_of, some_text
from search_tables import EOS, SPECIAL, TableModel, random_table

CPU = torch.device("cpu")
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)


def plainly(log_probs: list[float], sampling: Sampling) -> list[float]:
    """The probabilities of one row, by the definition."""
    if not sampling.temperature:
        best = max(range(len(log_probs)), key=log_probs.__getitem__)
        return [float(i == best) for i in range(len(log_probs))]
    weights = [math.exp((value - max(log_probs)) / sampling.temperature) for value in log_probs]
    likely = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(likely)), key=lambda i: -likely[i])
    kept, before = [], 0.0
    for rank, i in enumerate(order):
        fits = (not sampling.top_k or rank < sampling.top_k) and likely[i] >= sampling.min_p * likely[order[0]]
        if rank == 0 or (fits and (sampling.top_p == 1 or before < sampling.top_p)):
            kept.append(i)
        before += likely[i]
    total = sum(likely[i] for i in kept)
    return [likely[i] / total if i in kept else 0.0 for i in range(len(likely))]


@given(samplings, st.integers(0, 10**6), st.integers(2, 12))
def test_probabilities_by_their_definition(sampling: Sampling, seed: int, size: int) -> None:
    log_probs = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    found = sampling.probabilities(log_probs)
    for i, j in np.ndindex(2, 3):
        assert found[i, j].tolist() == pytest.approx(plainly(log_probs[i, j].tolist(), sampling), abs=1e-5)


@given(samplings, st.integers(0, 10**6))
def test_sampling_inverts_the_cumulative_distribution(sampling: Sampling, seed: int) -> None:
    log_probs = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    numbers = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tokens = draw(log_probs, sampling, numbers)
    for row, token in enumerate(tokens.tolist()):
        shares = sampling.probabilities(log_probs)[row].double()
        assert shares[token] > 0
        assert shares[:token].sum() - 1e-6 <= numbers[row] <= shares[: token + 1].sum() + 1e-6
    never = torch.tensor([-math.inf, 0.0, -math.inf])
    assert draw(never, sampling, torch.tensor(0.0, dtype=torch.float64)) == 1  # the very first number, too


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_frequencies_follow_the_probabilities(sampling: Sampling) -> None:
    """Chi-square of 20,000 draws: the statistic of `k` classes has mean k - 1 and deviation √2(k - 1)."""
    log_probs = torch.randn(1, 12, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    count = 20_000
    numbers = uniform_numbers(Sampling(seed=7), range(count), 1, 3)[:, 0, 2]  # one draw of each of many sentences
    drawn = Counter(draw(log_probs.expand(count, -1), sampling, numbers).tolist())
    expected = {i: p * count for i, p in enumerate(plainly(log_probs[0].tolist(), sampling)) if p}
    assert set(drawn) <= set(expected)
    statistic = sum((drawn[i] - e) ** 2 / e for i, e in expected.items())
    degrees = len(expected) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


@given(st.integers(-5, 10**9), st.lists(st.integers(0, 10**12), min_size=1, max_size=5, unique=True))
def test_numbers_belong_to_seed_sentence_and_row(seed: int, sentences: list[int]) -> None:
    together = uniform_numbers(Sampling(seed=seed), sentences, 3, 8)
    assert together.shape == (len(sentences), 3, 8)
    assert len(together.unique()) == together.numel()
    for place, number in enumerate(sentences):
        alone = uniform_numbers(Sampling(seed=seed), [number], 2, 5)
        assert torch.equal(alone[0], together[place, :2, :5])
    assert not torch.equal(uniform_numbers(Sampling(seed=seed + 1), sentences, 3, 8), together)
    assert not torch.equal(uniform_numbers(Sampling(), sentences, 1, 8), uniform_numbers(Sampling(), sentences, 1, 8))


def test_samples_of_a_search_follow_the_models_probabilities() -> None:
    """Whole sentences of a small table model, each with the frequency of its probability."""
    table = random_table(3, 2, sharpness=2.0)
    count = 4000
    source = torch.zeros(count, 1, dtype=torch.long)
    found = search(
        TableModel(table),
        source,
        torch.ones(count, dtype=torch.long),
        DecodingOptions(sampling=Sampling(seed=1), max_length=1),
        SPECIAL,
    )
    drawn = Counter(tuple(hypotheses[0].tokens) for hypotheses in found)
    # <pad> and <s> have some probability in a table, but are never drawn; after one word only </s> may follow.
    allowed = table(0, ())[2:]
    for token, share in enumerate(allowed / allowed.sum(), 2):
        expected = share * count
        assert abs(drawn[() if token == EOS else (token,)] - expected) < 4 * math.sqrt(expected)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.permutations(range(9)), st.integers(1, 3))
def test_a_sentence_is_drawn_the_same_alone_and_in_any_order(seed: int, order: list[int], rows: int) -> None:
    table = random_table(seed, 5, sharpness=0.5)

    def drawn(numbers: list[int]) -> list[Any]:
        source = torch.tensor(numbers)[:, None]
        lengths = torch.tensor([4 + number % 4 for number in numbers])
        sampling = Sampling(seed=seed, temperature=1.5)
        options = DecodingOptions(beam=5, n_best=rows, extra_length=0, sampling=sampling)
        return search(TableModel(table), source, lengths, options, SPECIAL, numbers=numbers)

    together = drawn(order)
    for number, hypotheses in zip(order, together, strict=True):
        assert drawn([number]) == [hypotheses]
        assert len(hypotheses) == rows  # some may be equal


def test_a_real_model_draws_the_same_in_any_batch() -> None:
    texts = some_text(12)
    either = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
    more: dict[str, Any] = {"device": CPU}

    def drawn(places: list[int], tokens: int) -> dict[int, list[int]]:
        sources = [texts[i] for i in places]
        sampling = Sampling(seed=5, top_p=0.95)
        small = DecodingOptions(extra_length=8, batch_tokens=tokens, sampling=sampling)
        found = search_all(model_of(0), sources, small, either, numbers=places, **more)
        return {place: each[0].tokens for place, each in zip(places, found, strict=True)}

    everything = drawn(list(range(12)), 1000)
    assert drawn(list(reversed(range(12))), 30) == everything
    assert drawn([7], 1000) == {7: everything[7]}
    greedy = search_all(model_of(0), texts, SearchOptions(beam=1, extra_length=8), either, device=CPU)
    cold = DecodingOptions(extra_length=8, sampling=Sampling(temperature=0.0))
    same = search_all(model_of(0), texts, cold, either, **more)
    assert [each[0].tokens for each in same] == [each[0].tokens for each in greedy]
    assert [each[0].tokens for each in greedy] != [everything[i] for i in range(12)]


def test_wrong_limits_are_refused() -> None:
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.1}, {"min_p": -0.1}, {"temperature": math.inf}):
        with pytest.raises(UsageError, match="must be"):
            Sampling(**wrong)  # type: ignore[arg-type]
