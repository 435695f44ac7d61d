"""Minimum Bayes risk: of several translations, the one that the others agree with most (Kumar and Byrne, 2004).

The candidates represent the distribution of the model, so the best is the one with the highest expected utility when
each candidate in turn is taken as the reference: a sample as often as it was drawn, a hypothesis of a beam by its
probability, because it occurs only once. The utility is sacreBLEU's chrF or BLEU of a sentence; the n-grams of a
candidate are counted once, and the shared n-grams of two candidates are found for all pairs at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.core.errors import UsageError
from qkv.evaluation.metrics import chrf

UTILITIES = ("chrf", "bleu")


def rerank(
    texts: Sequence[str],
    scores: Sequence[float],
    utility: str,
    tokenizer: str = "13a",
    logprobs: Sequence[float] | None = None,
) -> list[int]:
    """The places of the candidates, by expected utility and then by the model's own score, best first.

    Without log-probabilities they are samples, and a text counts as often as it comes. `tokenizer` is sacreBLEU's.
    """
    gained = expected_utility(texts, utility, tokenizer, logprobs)
    # Sums in another order round differently: equal up to rounding is a tie.
    return sorted(range(len(texts)), key=lambda i: (-round(gained[i], 9), -scores[i]))


def expected_utility(
    texts: Sequence[str], utility: str, tokenizer: str = "13a", logprobs: Sequence[float] | None = None
) -> list[float]:
    """Return each text's mean utility over all texts as references, itself included; `logprobs` weight the mean."""
    values = np.zeros(len(texts)) if logprobs is None else np.asarray(logprobs, np.float64)
    likely = np.exp(values - values.max())
    distinct = list(dict.fromkeys(texts))
    weights = np.zeros(len(distinct))
    np.add.at(weights, [distinct.index(text) for text in texts], likely / likely.sum())
    gained = dict(zip(distinct, (utilities(distinct, utility, tokenizer) @ weights).tolist(), strict=True))
    return [gained[text] for text in texts]


def utilities(texts: Sequence[str], utility: str, tokenizer: str = "13a") -> NDArray[np.float64]:
    """sacreBLEU's sentence score of every text (rows) with every text as its reference (columns)."""
    if utility not in UTILITIES:
        raise UsageError(f'rerank = "{utility}": must be one of {", ".join(UTILITIES)}')
    metric = _metric(utility, tokenizer)
    segments = [metric._preprocess_segment(text) for text in texts]
    if utility == "chrf":
        counted = [_ngrams("".join(segment.split()), metric.char_order) for segment in segments]
    else:
        counted = [_ngrams(tuple(segment.split()), metric.max_ngram_order) for segment in segments]
    shared, totals = _shared(counted)  # (orders, texts, texts), (orders, texts)
    lengths = [len(segment.split()) for segment in segments]

    def score(i: int, j: int) -> float:
        ours, theirs, both = totals[:, i].tolist(), totals[:, j].tolist(), shared[:, i, j].tolist()
        if utility == "chrf":
            statistics = [count for counts in zip(ours, theirs, both, strict=True) for count in counts]
        else:
            statistics = [lengths[i], lengths[j], *both, *ours]
        return float(metric._compute_score_from_stats(statistics).score)

    return np.array([[score(i, j) for j in range(len(texts))] for i in range(len(texts))]).reshape(len(texts), -1)


@cache
def _metric(utility: str, tokenizer: str) -> Any:
    if utility == "chrf":
        return chrf()
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenizer, effective_order=True)


def _ngrams(units: str | tuple[str, ...], orders: int) -> list[Counter[Any]]:
    return [Counter(units[i : i + n] for i in range(len(units) - n + 1)) for n in range(1, orders + 1)]


def _shared(counted: list[list[Counter[Any]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many n-grams of each order every two texts have in common, (orders, texts, texts), and each alone has."""
    shared, totals = [], []
    for counters in zip(*counted, strict=True):  # of one order: a counter for each text
        column = {ngram: place for place, ngram in enumerate(dict.fromkeys(n for each in counters for n in each))}
        counts = np.zeros((len(counters), len(column)), np.int64)
        for row, each in enumerate(counters):
            counts[row, [column[ngram] for ngram in each]] = list(each.values())
        shared.append([np.minimum(row, counts).sum(1) for row in counts])
        totals.append(counts.sum(1))
    return np.array(shared), np.array(totals)
