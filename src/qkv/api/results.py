"""What comes out of a translator."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float
    truncated: bool = False


@dataclass(frozen=True)
class Translation:
    """A translation and what is known about it; `score` is `logprob` under the length penalty.

    For an input translated in pieces both are sums over the pieces, each of which was a sentence to the model.
    """

    text: str
    score: float
    logprob: float
    tokens: list[str]
    alternatives: list[Alternative]
    truncated: bool = False  # the longest length allowed was reached before the model ended
    pieces: int = 1  # how many sentences or parts of long ones were translated; 0 for blank text
    finish_reason: str = "stop"  # stop: the model ended; length: the limit did; blank: there was nothing to translate
    length_ratio: float = 0.0  # tokens of the output for each of the input
    looped: bool = False  # it ran in a loop and was searched for again, and this is the better of the two

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.text


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
