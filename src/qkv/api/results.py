"""Results of a translator: translations, their scores, and other words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from qkv.core.tokenizer import Tokenizer
from qkv.core.translate import TranslatedLine
from qkv.data.subwords import readable_tokens


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float
    truncated: bool = False


@dataclass(frozen=True)
class Translation:
    """A translation and its scores; `score` is `logprob` under the length penalty.

    For an input translated in pieces both are sums over the pieces.
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
    looped: bool = False  # the first output repeated itself; the search was repeated, and this is the better output

    @classmethod
    def of(cls, line: TranslatedLine, tgt: Tokenizer, *, looped: bool = False) -> Self:
        """Return the result of a line, whose pieces were translated one by one."""
        if not line.hypotheses:
            return cls("", 0.0, 0.0, [], [], pieces=0, finish_reason="blank")
        ranks = []
        for text, rank in zip(line.texts, line.hypotheses, strict=True):
            score, logprob = sum(h.score for h in rank), sum(h.logprob for h in rank)
            ranks.append(Alternative(text, score, logprob, any(h.truncated for h in rank)))
        best, written = ranks[0], [token for hypothesis in line.hypotheses[0] for token in hypothesis.tokens]
        return cls(
            **vars(best),
            tokens=readable_tokens(tgt, written),
            alternatives=ranks[1:],
            pieces=len(line.hypotheses[0]),
            finish_reason="length" if best.truncated else "stop",
            length_ratio=len(written) / max(1, line.source_tokens),
            looped=looped,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class OtherWord:
    """Another word at a position of a translation, and the best translation with that word."""

    word: str
    probability: float  # of the word at this position
    text: str
    score: float
    logprob: float


@dataclass(frozen=True)
class Scored:
    """The log-probability of a given translation, in total and of each token, </s> last."""

    logprob: float
    tokens: list[str]
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, -self.logprob / len(self.token_logprobs)))
