"""What is wrong with a translation, beside its score: loops, inventions, copies, lengths, the worst sentences.

A pure function of the texts. A sentence is judged if neither its source nor its reference is blank; every rate is a
share of the judged sentences, and each flag says what it means (`Diagnosis.definitions`). Words are those of
`qkv.data.links`, punctuation apart; in scripts without spaces each character is one. Lengths are in characters.

A hallucination is an output that has nothing to do with its source. Whether it does, only people can say; the measure
here asks the reference: an output that is no more like its reference than references of different sentences are like
each other. What is empty, runs in a loop, is mostly copied or under half its reference's length has a name of its own,
and fewer than four words tell too little: neither is called a hallucination. Alikeness is the chrF2 of sacreBLEU.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qkv.core.errors import QkvError
from qkv.core.validation import corpus_bleu
from qkv.data import links

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric


Floats = npt.NDArray[np.float64]

UNLIKE = 0.9  # of the pairs of references of different sentences are no more alike than the chance level, at most …
HIGHEST = 30.0  # … this, even if all sentences of a test set are much alike; …
FEW, FEW_CHANCE = 20, 20.0  # … and with fewer references than 20, which cannot tell, this is the level
SAMPLED = 2000  # references, at most, that the chance level is measured on
TOLD = 4  # words that an output must have to be called a hallucination
COPIED = 0.5  # of the words of a source, in the output but not in the reference: a copy
SHORT, LONG = 0.5, 2.0  # lengths, of the reference's, beyond which a translation is flagged
LONGEST_WORD = 40  # letters; what is longer is no word, and is searched for loops letter by letter
BUCKETS, SMALLEST = 6, 10  # of sources of similar length: at most so many, each of at least so many sentences
WORST = 10  # sentences named as the worst
# Han, kana, Thai, Lao, Burmese, Khmer: words that no space divides.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Sentence:
    """A judged sentence: its line (from 1), its texts, and what was found in it."""

    line: int
    source: str
    hypothesis: str
    reference: str
    chrf: float
    length_ratio: float  # characters of the hypothesis for each of the reference
    copied: float  # share of the source's words that the hypothesis copies and the reference does not
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Bucket:
    """The sentences whose source has `low` to `high` words, and their scores together."""

    low: int
    high: int
    sentences: int
    bleu: float
    chrf: float

    @property
    def name(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}–{self.high}"


@dataclass(frozen=True)
class Diagnosis:
    """What was found in the translations of one system on one test set."""

    lines: int
    blank_sources: int  # not judged; …
    blank_kept: int  # … so many of their translations are blank too, as they should be
    blank_references: int  # of sources that are not blank: not judged either
    length_ratio: float  # of all judged sentences together
    copied_words: float  # share of all words of the sources that are copied where the reference does not
    chance: float  # the chrF2 that a hallucination does not exceed
    by_length: tuple[Bucket, ...]  # they hold every judged sentence once
    sentences: tuple[Sentence, ...]  # the judged ones, in order

    @property
    def definitions(self) -> dict[str, str]:
        """What each flag means."""
        return {
            "empty": "nothing is written",
            "loop": f"a phrase stands at least {TIMES} times in a row, over {TOKENS} words or more, and "
            "more often than the source repeats anything",
            "hallucination": f"no more like its reference than references of different sentences are (chrF2 up to "
            f"{self.chance:.1f}), with at least {TOLD} words and half its length, and neither loop nor copy",
            "copy": "the source again, or at least half its words, where the reference has others",
            "short": "less than half as long as its reference",
            "long": "more than twice as long as its reference",
            "cut": "ended by the longest length allowed, not by the model",
            "retried": "the search ran in a loop and was made again; this is the better of both",
        }

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many sentences have each flag."""
        found = Counter(flag for sentence in self.sentences for flag in sentence.flags)
        return {flag: found[flag] for flag in self.definitions}

    def rate(self, flag: str) -> float:
        """The share of the judged sentences that have a flag."""
        return self.counts[flag] / max(1, len(self.sentences))

    @cached_property
    def ranked(self) -> list[Sentence]:
        """The sentences from the worst to the best, by chrF2; the order of the lines does not matter."""
        return sorted(self.sentences, key=lambda s: (s.chrf, s.source, s.hypothesis, s.reference))

    def flagged(self, flag: str) -> list[Sentence]:
        """The sentences that have a flag, the worst first."""
        return [sentence for sentence in self.ranked if flag in sentence.flags]

    def __str__(self) -> str:
        """A few lines for a terminal; flags beyond the first four are told if any sentence has them."""
        shown = [flag for i, flag in enumerate(self.counts) if i < 4 or self.counts[flag]]
        width = max(map(len, shown))
        told = [
            f"{flag:<{width}}  {percent(self.rate(flag)):>8}  ({self.counts[flag]:,})  {self.definitions[flag]}"
            for flag in shown
        ]
        parts = [f"{b.name}: {b.bleu:.1f} / {b.chrf:.1f} ({b.sentences:,})" for b in self.by_length]
        worst = [f"line {sentence.line}: {sentence.chrf:.1f}" for sentence in self.ranked[:5]]
        return "\n".join(
            [
                f"length ratio = {self.length_ratio:.3f}  characters of the output for each of the reference",
                f"copied words = {percent(self.copied_words)}  of the source's, beyond those that the reference copies",
                f"flagged, of {len(self.sentences):,} sentences:",
                *(f"  {line}" for line in told),
                f"BLEU / chrF2 (sentences) by words of the source = {' · '.join(parts) or 'none'}",
                f"worst by chrF2 = {' · '.join(worst) or 'none'}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; of a sentence that is not judged, the columns hold null."""
        scores: dict[str, list[float | None]] = {"chrf": [None] * self.lines, "length_ratio": [None] * self.lines}
        for sentence in self.sentences:
            scores["chrf"][sentence.line - 1] = round(sentence.chrf, 2)
            scores["length_ratio"][sentence.line - 1] = round(sentence.length_ratio, 4)
        names = ("blank_sources", "blank_kept", "blank_references", "length_ratio", "copied_words", "chance")
        return {
            "lines": self.lines,
            "judged": len(self.sentences),
            **{name: getattr(self, name) for name in names},
            "rates": {flag: self.rate(flag) for flag in self.counts},
            "counts": self.counts,
            "definitions": self.definitions,
            "by_length": [dataclasses.asdict(bucket) for bucket in self.by_length],
            "worst": [dataclasses.asdict(sentence) for sentence in self.ranked[:WORST]],
            "flagged": {flag: sorted(sentence.line for sentence in self.flagged(flag)) for flag in self.counts},
            "sentences": scores,
        }


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.2f} %"


def diagnose(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tgt_lang: str = "",
    truncated: Sequence[bool] = (),
    retried: Sequence[bool] = (),
) -> Diagnosis:
    """Look for what is wrong with the translations; `truncated` and `retried` are what the search says of them."""
    lines = len(sources)
    others = (("hypotheses", hypotheses), ("references", references), ("truncated", truncated), ("retried", retried))
    for name, values in others:
        if len(values) != lines and (values or name in ("hypotheses", "references")):
            raise QkvError(f"{lines} sources but {len(values)} {name}: each line needs exactly one of both")
    judged = [i for i in range(lines) if sources[i].strip() and references[i].strip()]
    picked = [references[i] for i in judged]
    statistics = _statistics([hypotheses[i] for i in judged], picked)  # (judged, statistics)
    chance = chance_level(picked)
    sentences, copied = [], []
    for i, row in zip(judged, statistics, strict=True):
        texts = sources[i], hypotheses[i], references[i]
        found, words = copied_words(*texts)
        told = {"cut": bool(truncated and truncated[i]), "retried": bool(retried and retried[i])}
        copied.append((found, words))
        sentences.append(_judged(i + 1, *texts, _chrf(row), found / max(1, words), chance, told))
    blank = [i for i in range(lines) if not sources[i].strip()]
    written, wanted = (sum(len(getattr(s, side).strip()) for s in sentences) for side in ("hypothesis", "reference"))
    return Diagnosis(
        lines=lines,
        blank_sources=len(blank),
        blank_kept=sum(not hypotheses[i].strip() for i in blank),
        blank_references=lines - len(blank) - len(judged),
        length_ratio=written / max(1, wanted),
        copied_words=sum(found for found, _ in copied) / max(1, sum(words for _, words in copied)),
        chance=chance,
        by_length=_buckets(sentences, statistics, tgt_lang),
        sentences=tuple(sentences),
    )


def _judged(
    line: int,
    source: str,
    hypothesis: str,
    reference: str,
    chrf: float,
    copied: float,
    chance: float,
    told: dict[str, bool],
) -> Sentence:
    """A sentence and its flags, in the order of `Diagnosis.definitions`."""
    ratio = len(hypothesis.strip()) / len(reference.strip())
    empty = not hypothesis.strip()
    loop = has_loop(hypothesis, source)
    copy = not empty and (copied >= COPIED or _plain(hypothesis) == _plain(source) != _plain(reference))
    enough = ratio >= SHORT and sum(map(_has_letter, words_of(hypothesis))) >= TOLD
    found = {
        "empty": empty,
        "loop": loop,
        "hallucination": enough and not loop and not copy and chrf <= chance,
        "copy": copy,
        "short": ratio < SHORT and not empty,
        "long": ratio > LONG,
        **told,
    }
    flags = tuple(flag for flag, raised in found.items() if raised)
    return Sentence(line, source, hypothesis, reference, chrf, ratio, copied, flags)


# ---- words -----------------------------------------------------------------------------------------------------------


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where the words of a text and its punctuation begin and end; of scripts without spaces, the characters."""
    return [
        part
        for begin, end in links.word_spans(text)
        for part in (pairwise(range(begin, end + 1)) if SPACELESS.search(text, begin, end) else [(begin, end)])
    ]


def words_of(text: str) -> list[str]:
    """The words themselves."""
    return [text[begin:end] for begin, end in word_spans(text)]


def has_loop(hypothesis: str, source: str) -> bool:
    """Whether an output says the same again and again: the decoder's own detector, on words instead of tokens."""
    numbers: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        units = (unit for word in words_of(text.casefold()) for unit in (word if len(word) > LONGEST_WORD else [word]))
        return [numbers.setdefault(unit, len(numbers)) for unit in units]

    return find_loop(ids(hypothesis), ids(source)) is not None


def copied_words(source: str, hypothesis: str, reference: str) -> tuple[int, int]:
    """How many words of the source are in the output more often than in the reference, and how many it has in all."""
    given, written, wanted = (
        Counter(word for word in words_of(text.casefold()) if _has_letter(word))
        for text in (source, hypothesis, reference)
    )
    return ((given & written) - wanted).total(), given.total()


def _has_letter(word: str) -> bool:
    return any(character.isalpha() for character in word)


def _plain(text: str) -> str:
    """The text whatever its case and spacing."""
    return " ".join(text.casefold().split())


# ---- scores ----------------------------------------------------------------------------------------------------------


def chance_level(references: Sequence[str]) -> float:
    """The chrF2 that nine in ten pairs of references of different sentences do not exceed, but no more than 30.

    Natural test sets of European languages lie between 16 and 25.
    """
    distinct = sorted(set(references))
    distinct = distinct[:: -(-len(distinct) // SAMPLED) or 1]
    if len(distinct) < FEW:
        return FEW_CHANCE
    # In order of the alphabet similar sentences are neighbours; half the way round they have little to do with another.
    half = len(distinct) // 2
    pairs = _statistics(distinct, distinct[half:] + distinct[:half])
    return min(HIGHEST, float(np.quantile([_chrf(row) for row in pairs], UNLIKE)))


@cache
def _metric() -> Metric:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def _statistics(hypotheses: Sequence[str], references: Sequence[str]) -> Floats:
    """What chrF2 counts, sentence by sentence: (sentences, statistics). Any group's score follows from its sum."""
    counted = _metric()._extract_corpus_statistics(hypotheses, [references]) if hypotheses else []
    return np.array(counted, dtype=np.float64)


def _chrf(total: Floats) -> float:
    return float(_metric()._compute_score_from_stats(total.tolist()).score)


def _buckets(sentences: Sequence[Sentence], statistics: Floats, tgt_lang: str) -> tuple[Bucket, ...]:
    """Sentences of similar length together: about as many in each, and those of one length never apart."""
    lengths = np.array([len(words_of(sentence.source)) for sentence in sentences], dtype=np.int64)
    made = []
    for low, high in length_ranges(lengths.tolist()):
        inside = np.flatnonzero((lengths >= low) & (lengths <= high)).tolist()
        texts = [(sentences[i].hypothesis, sentences[i].reference) for i in inside]
        bleu = corpus_bleu([text for text, _ in texts], [text for _, text in texts], tgt_lang=tgt_lang)
        made.append(Bucket(low, high, len(inside), bleu, _chrf(statistics[inside].sum(0))))
    return tuple(made)


def length_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last length of each bucket, which is closed once it has its share of what is left."""
    left = len(lengths)
    buckets = max(1, min(BUCKETS, left // SMALLEST))
    ranges: list[tuple[int, int]] = []
    open_ones: list[int] = []  # lengths of the bucket that is not closed yet
    held = 0
    for length, count in sorted(Counter(lengths).items()):
        open_ones.append(length)
        held += count
        share = max(SMALLEST, left / (buckets - len(ranges)))
        if held >= share and left - held >= SMALLEST:
            ranges.append((open_ones[0], length))
            open_ones, left, held = [], left - held, 0
    return [*ranges, (open_ones[0], open_ones[-1])] if open_ones else ranges


# ---- The loop detector: an output that says the same again and again, more often than its source does ----------------


TIMES = 4  # a phrase that stands so often in a row …
TOKENS = 8  # … and covers so many tokens is a loop, …
SPARE = 1  # … unless the source repeats something as often, but for this many times
LONGEST = 32  # tokens of the longest phrase that is looked for


@dataclass(frozen=True)
class Loop:
    """`length` tokens that stand `times` times in a row, from `start` on."""

    start: int
    length: int
    times: int


def find_loop(output: Sequence[int], source: Sequence[int] = ()) -> Loop | None:
    """The loop that covers most of an output, if it has one.

    A phrase of 1 to 32 tokens that stands at least 4 times in a row and covers at least 8 tokens, wherever it does; but
    a source that repeats a phrase of its own ("ha ha ha ha ha") allows for as many repetitions and one more.
    """
    if len(set(output)) > len(output) - TOKENS * (TIMES - 1) // TIMES:
        return None  # of the tokens of a loop, all but those of its first round have come before
    allowed = max((loop.times for loop in repetitions(source)), default=1) + SPARE
    loops = [
        loop
        for loop in repetitions(output)
        if loop.times >= TIMES and loop.times * loop.length >= TOKENS and loop.times > allowed
    ]
    return max(loops, key=lambda loop: loop.times * loop.length, default=None)


def repetitions(tokens: Sequence[int]) -> list[Loop]:
    """Every phrase that stands at least twice in a row, with as many repetitions as there are."""
    found = []
    for length in range(1, min(LONGEST, len(tokens) // 2) + 1):
        alike = 0  # tokens in a row that equal the one `length` before them
        for i in range(length, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - length]:
                alike += 1
                continue
            if alike >= length:
                found.append(Loop(i - alike - length, length, alike // length + 1))
            alike = 0
    return found


def breaking(loop: Loop, blocked: int = 0) -> int:
    """The length of n-grams to block so that a loop cannot come again: it is left after at most that many tokens more.

    At least 4 tokens, because shorter runs come twice in good text; `blocked` is what was blocked already.
    """
    n = max(TIMES, loop.length)
    return min(n, blocked) if blocked else n
