"""What a head does, measured: how sharp it is, how far it looks, and the roles that follow by stated thresholds.

The roles are those that Voita et al. (2019) found in trained Transformers, positional and rare-token, and alignment,
known from attention since Bahdanau et al. (2015). They describe a head on one sentence: on another it may have others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITIONAL_MASS = 0.5  # mean weight on one fixed offset
RARE_MASS, RARE_TIMES = 0.5, 2.0  # mean weight on the rarest tokens, and how often the share that chance would give
RARE_SHARE = 0.2  # the rarest fifth of the source's tokens, at least one
ALIGNMENT_CONFIDENCE, ALIGNMENT_ORDER, ALIGNMENT_COVERAGE = 0.6, 0.8, 0.6
SHORTEST = 4  # with fewer queries every head would seem to have a role

LEGEND = {
    "previous token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset −1",
    "next token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset +1",
    "positional": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on another fixed offset",
    "rare token": (
        f"a mean weight of at least {RARE_MASS}, and {RARE_TIMES:g} times what even attention would give, on the "
        f"rarest {RARE_SHARE:.0%} of the source's tokens; rarity is a token's number in the vocabulary, which is "
        f"learned from frequent to rare (single bytes come first and never count as rare)"
    ),
    "alignment": (
        f"cross-attention that is sharp (confidence ≥ {ALIGNMENT_CONFIDENCE}), runs along both sentences (order ≥ "
        f"{ALIGNMENT_ORDER}) and is near to one-to-one (coverage ≥ {ALIGNMENT_COVERAGE})"
    ),
}
MEASURES = {
    "confidence": "the greatest weight of a row, averaged over the rows",
    "entropy": "the entropy of a row in bits, averaged over the rows: 0 looks at one token, log₂ n at n tokens alike",
    "distance": "how many positions lie between query and key, weighted; in cross-attention, between key and diagonal",
    "offset": "self-attention: the fixed offset (key − query) with the greatest mean weight, and that weight; in the "
    "decoder, offset 0 is the token just fed",
    "rare": "the mean weight on the rarest tokens of the source",
    "order": "cross-attention: the correlation of a row's number with that of its greatest weight",
    "coverage": "cross-attention: how many different keys are some row's greatest weight, of those that could be",
}


@dataclass(frozen=True)
class Head:
    """The measures and roles of one head; a measure that does not apply to its kind of attention is None."""

    confidence: float
    entropy: float
    distance: float
    offset: int | None
    mass: float | None
    rare: float | None
    order: float | None
    coverage: float | None
    roles: list[str]


def measure(weights: NDArray[Any], *, cross: bool, rare: NDArray[np.bool_] | None = None) -> Head:
    """Measure one head: weights (queries, keys), each row a distribution; `rare` marks the keys that count as rare."""
    weights = np.asarray(weights, np.float64)
    offset, mass = (None, None) if cross else best_offset(weights)
    order, coverage = alignment(weights) if cross else (None, None)
    head = Head(
        confidence=confidence(weights),
        entropy=entropy(weights),
        distance=distance(weights, cross),
        offset=offset,
        mass=mass,
        rare=None if rare is None else float(weights[:, rare].sum(1).mean()),
        order=order,
        coverage=coverage,
        roles=[],
    )
    if len(weights) < SHORTEST:
        return head
    return replace(head, roles=_roles(head, 0.0 if rare is None else float(np.mean(rare))))


def confidence(weights: NDArray[Any]) -> float:
    return float(weights.max(1).mean())


def entropy(weights: NDArray[Any]) -> float:
    return float(-(weights * np.log2(np.where(weights > 0, weights, 1.0))).sum(1).mean() + 0.0)


def distance(weights: NDArray[Any], cross: bool) -> float:
    """How far from its own position a query looks; across two sentences, how far from the diagonal."""
    queries, keys = weights.shape
    scale = (keys - 1) / max(queries - 1, 1) if cross else 1.0
    apart = np.abs(np.arange(keys)[None] - scale * np.arange(queries)[:, None])
    return float((weights * apart).sum(1).mean())


def best_offset(weights: NDArray[Any]) -> tuple[int, float]:
    """The offset key − query with the greatest mean weight, of those that at least half of the queries have."""
    queries, keys = weights.shape
    found = {
        offset: float(diagonal.mean())
        for offset in range(1 - queries, keys)
        if len(diagonal := np.diagonal(weights, offset)) * 2 >= queries
    }
    offset = max(found, key=lambda o: (found[o], -abs(o)))
    return offset, found[offset]


def alignment(weights: NDArray[Any]) -> tuple[float, float]:
    """Order and coverage of the rows' greatest weights."""
    best = weights.argmax(1)
    coverage = len(set(best.tolist())) / min(weights.shape)
    if best.std() == 0 or len(best) < 2:
        return 0.0, coverage
    return float(np.corrcoef(np.arange(len(best)), best)[0, 1]), coverage


def rarest(ids: list[int], first: int) -> NDArray[np.bool_]:
    """Mark the rarest tokens: those with the greatest ids, of the ones from `first`, the first learned piece, on."""
    numbers = np.asarray(ids)
    learned: NDArray[np.bool_] = numbers >= first
    if not learned.any():
        return learned
    wanted = max(1, round(RARE_SHARE * len(ids)))
    bound = np.sort(np.unique(numbers[learned]))[::-1][:wanted].min()
    # Repeated tokens count once each, so that a word that occurs twice does not push another out.
    rare: NDArray[np.bool_] = learned & (numbers >= bound)
    return rare


def _roles(head: Head, share: float) -> list[str]:
    """The roles of a head; `share` is what even attention would give to the rare keys."""
    roles = []
    if head.mass is not None and head.mass >= POSITIONAL_MASS:
        roles.append({-1: "previous token", 1: "next token"}.get(head.offset or 0, "positional"))
    if head.rare is not None and head.rare >= max(RARE_MASS, RARE_TIMES * share):
        roles.append("rare token")
    if (
        head.order is not None
        and head.coverage is not None
        and head.confidence >= ALIGNMENT_CONFIDENCE
        and head.order >= ALIGNMENT_ORDER
        and head.coverage >= ALIGNMENT_COVERAGE
    ):
        roles.append("alignment")
    return roles
