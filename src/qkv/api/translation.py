"""What a translation returns: the text, its alternatives, and the pieces in which it was made."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from qkv.core.search import Hypothesis
from qkv.core.tokenizer import Tokenizer
from qkv.data.subwords import readable_tokens
from qkv.segmentation.sentences import Span, tiles
from qkv.segmentation.text_cutter import CutText


@dataclass(frozen=True)
class Alternative:
    """Another translation of the same text."""

    text: str
    score: float
    logprob: float
    truncated: bool = False


@dataclass(frozen=True)
class Piece:
    """A part of a text that was translated alone: its span in the source, that of its translation, and their flags.

    The spans of all pieces tile both texts: the white space after a piece belongs to it. Flags: `truncated`, `looped`,
    `omission` (the translation is so short, or leaves so many source words without a counterpart, that something may be
    missing), `protected` (a protected text was put where the model had not written it) and `blank`.
    """

    source: Span
    target: Span
    score: float
    flags: tuple[str, ...] = ()


class PieceOutput(NamedTuple):
    """The n-best translations of one piece, best first, with the flags of the best."""

    texts: list[str]
    hypotheses: list[Hypothesis]
    source_tokens: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Translation:
    """A translation and its scores; `score` is `logprob` under the length penalty.

    Of several pieces, `score` is the mean, weighted by their source tokens, and `logprob` the sum.
    """

    text: str
    score: float
    logprob: float
    tokens: list[str]
    alternatives: list[Alternative]
    truncated: bool = False  # the longest length allowed was reached before the model ended
    pieces: list[Piece] = field(default_factory=list)  # sentences, or parts of long ones
    finish_reason: str = "stop"  # stop: the model ended; length: the limit did; blank: there was nothing to translate
    length_ratio: float = 0.0  # tokens of the output for each of the input
    looped: bool = False  # the first output repeated itself; the search was repeated, and this is the better output
    dropped: int = 0  # zero-width spaces and soft hyphens of the source that were left out

    @classmethod
    def blank(cls, text: str) -> Self:
        """Return the translation of a text without anything to translate: the text itself."""
        span = (0, len(text))
        pieces = [Piece(span, span, 0.0, ("blank",))] if text else []
        return cls(text, 0.0, 0.0, [], [], pieces=pieces, finish_reason="blank")

    @classmethod
    def of(
        cls,
        cut: CutText,
        outputs: Sequence[PieceOutput],
        tokenizer: Tokenizer,
        *,
        n_best: int = 1,
        spaces: bool | None = None,
        dropped: int = 0,
    ) -> Self:
        """Join the translations of the pieces of a text; `spaces`: whether the target language has them."""
        weights = [output.source_tokens + 1 for output in outputs]
        scores = [[hypothesis.score for hypothesis in output.hypotheses] for output in outputs]
        ranks = []
        for combination in best_combinations(scores, weights, n_best):
            chosen = [output.hypotheses[k] for output, k in zip(outputs, combination, strict=True)]
            text = cut.pieces.join(
                [output.texts[k] for output, k in zip(outputs, combination, strict=True)], spaces=spaces
            )
            score = mean_score(weights, [hypothesis.score for hypothesis in chosen])
            logprob, truncated = sum(h.logprob for h in chosen), any(h.truncated for h in chosen)
            ranks.append(Alternative(text, score, logprob, truncated))
        best = [output.hypotheses[0] for output in outputs]
        written = [token for hypothesis in best for token in hypothesis.tokens]
        spans = zip(
            cut.spans,
            tiles([output.texts[0] for output in outputs], cut.pieces.gaps(spaces=spaces)),
            strict=True,
        )
        return cls(
            **vars(ranks[0]),
            tokens=readable_tokens(tokenizer, written),
            alternatives=ranks[1:],
            pieces=[
                Piece(source, target, hypothesis.score, output.flags)
                for (source, target), hypothesis, output in zip(spans, best, outputs, strict=True)
            ],
            finish_reason="length" if ranks[0].truncated else "stop",
            length_ratio=len(written) / max(1, sum(output.source_tokens for output in outputs)),
            looped=any("looped" in output.flags for output in outputs),
            dropped=dropped,
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of all pieces, each once."""
        return tuple(dict.fromkeys(flag for piece in self.pieces for flag in piece.flags))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        for piece in plain["pieces"]:
            piece |= {"source": list(piece["source"]), "target": list(piece["target"]), "flags": list(piece["flags"])}
        return plain

    def __str__(self) -> str:
        return self.text


def mean_score(weights: Sequence[int], scores: Sequence[float]) -> float:
    """Return the score of a text from those of its pieces, weighted by their source tokens."""
    return sum(w * score for w, score in zip(weights, scores, strict=True)) / max(1, sum(weights))


def best_combinations(scores: Sequence[Sequence[float]], weights: Sequence[float], n: int) -> list[list[int]]:
    """Return the n best choices of one hypothesis for each piece, by the weighted sum of their scores, best first.

    The hypotheses of a piece are best first. Each choice is made from a better one by one step in its last changed
    piece or in a later one, and a heap holds the choices to continue from: no choice is made twice.
    """
    if n == 1:
        return [[0] * len(scores)]
    heap: list[tuple[float, tuple[tuple[int, int], ...]]] = [(0.0, ())]  # loss, and the (piece, rank > 0) of a choice
    found: list[list[int]] = []
    while heap and len(found) < n:
        loss, changed = heapq.heappop(heap)
        ranks = dict(changed)
        found.append([ranks.get(i, 0) for i in range(len(scores))])
        for i in range(changed[-1][0] if changed else 0, len(scores)) if len(found) < n else ():
            rank = ranks.get(i, 0)
            if rank + 1 < len(scores[i]):
                step = max(0.0, weights[i] * (scores[i][rank] - scores[i][rank + 1]))
                kept = changed[:-1] if rank else changed
                heapq.heappush(heap, (loss + step, (*kept, (i, rank + 1))))
    return found


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
