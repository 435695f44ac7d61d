"""What comes out of a translator."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherWord:
    """A word that could stand at a place of a translation, and how the translation would best go on with it."""

    word: str
    probability: float  # of the word there, as the model sees it
    text: str
    score: float
    logprob: float


@dataclass(frozen=True)
class Scored:
    """The log-probability of a given translation, as a whole and token by token, </s> last."""

    logprob: float
    tokens: list[str]
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, -self.logprob / len(self.token_logprobs)))
