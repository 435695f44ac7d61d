"""Streams of updates over random sentences, for tests: the interface of a prepared text without its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.core.batches import (
    PairBatches,
    Update,
)
from qkv.core.config import TokenizerConfig
from qkv.core.dataset import Rows
from qkv.core.device import ALONE
from qkv.core.tokenizer import TokenizerPair, learn_bpe, learn_tokenizers

CPU = torch.device("cpu")
WORDS = "the cat sleeps in a lovely garden under green trees while small birds sing about summer mornings".split()


@cache
def both() -> TokenizerPair:
    sides = [[" ".join(WORDS)] * 20, ["  ".join(reversed(WORDS))] * 20]
    return learn_tokenizers(sides, TokenizerConfig(vocab=320), ("de", "fr"), pairs=20, learner=learn_bpe)


@dataclass(eq=False)
class FakeStore:
    """Random sentences of two corpora, the second tagged; the interface of a TokenStore without its files."""

    weights: tuple[float, ...] = (1.0, 1.0)
    sentences: int = 120
    sides: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(9)
        half = self.sentences // 2
        self.corpus = np.repeat([0, 1], half)
        for name, tokenizer in (("src", both().src), ("tgt", both().tgt)):
            texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(self.sentences)]
            rows = [tokenizer.encode(text) for text in texts]
            if name == "src":
                rows[half:] = [[tokenizer.tag("fr"), *row] for row in rows[half:]]
            self.sides[name] = [np.array(row, np.uint16) for row in rows]

    def rows(self, side: str, indices: NDArray[np.int64]) -> Rows:
        rows = [self.sides[side][i] for i in indices]
        return Rows(np.concatenate(rows), np.array([len(row) for row in rows]))

    def lengths(self, side: str) -> NDArray[np.uint32]:
        return np.array([len(row) for row in self.sides[side]], np.uint32)


def realistic(pairs: int, median: float, spread: float, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Log-normal source lengths, targets a little longer and following them, cut at 255 tokens; </s> included."""
    random = np.random.default_rng(seed)
    src = np.exp(random.normal(np.log(median), spread, pairs)).clip(1, 255).astype(np.int64)
    tgt = (src * np.exp(random.normal(0.05, 0.18, pairs))).clip(1, 255).astype(np.int64)
    return src + 1, tgt + 1


def updates_of(kind: type[PairBatches] = PairBatches, **options: Any) -> PairBatches:
    store: Any = options.pop("store", None) or FakeStore()
    return kind(
        store, both(), **{"tokens": 400, "micro_tokens": 200, "seed": 3, "world": ALONE, "device": CPU, **options}
    )


def plain(step: Update) -> Any:
    return step.after, [[t.tolist() for t in (b.source, b.lengths, b.target, b.labels)] for b in step.micro_batches]


def pairs_in(steps: list[Update]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every pair of rows, without padding, <s> and </s>."""
    found = []
    for batch in (batch for step in steps for batch in step.micro_batches):
        for source, labels in zip(batch.source.tolist(), batch.labels.tolist(), strict=True):
            found.append((tuple(source[: source.index(2)]), tuple(labels[: labels.index(2)])))
    return found
