"""Flag faulty translations: loops, hallucinations, copies, wrong lengths; find the worst sentences.

A pure function of the texts, all in NFC. Sentences with a blank source or reference are not judged; every rate is a
share of the judged sentences, and `Diagnosis.definitions` defines each flag. Words are those of `data.alignments`, with
punctuation marks as words; in scripts without spaces each character is a word. Lengths are in characters.

A hallucination is an output unrelated to its source. That needs a human judge; the measure here is an estimate from the
reference: the output's chrF2 is no higher than that of references of different sentences (`chance_level`). Outputs with
a flag of their own (empty, loop, copy, short) and outputs of fewer than four words are not flagged as hallucinations.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from qkv.core.errors import QkvError
from qkv.data import alignments
from qkv.evaluation.metrics import Floats, bleu, chrf, sentence_statistics, value_of

CHANCE_QUANTILE = 0.9  # chance level: this quantile of the chrF2 of references of different sentences, …
MAX_CHANCE = 30.0  # … at most this, for test sets of very similar sentences; …
MIN_REFERENCES, DEFAULT_CHANCE = 20, 20.0  # … and with fewer references than 20, a fixed level
SAMPLED = 2000  # largest number of references for measuring the chance level
MIN_WORDS = 4  # of an output that is flagged as a hallucination
COPIED = 0.5  # share of the source's words in the output but not in the reference: from here on a copy
SHORT, LONG = 0.5, 2.0  # length ratios to the reference beyond which a translation is flagged
LONGEST_WORD = 40  # letters; a longer word is searched for loops letter by letter
BUCKETS, SMALLEST = 6, 10  # groups of sources of similar length: at most 6, each of at least 10 sentences
WORST = 10  # sentences listed as the worst
# Han, kana, Thai, Lao, Burmese, Khmer: no spaces between words.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Sentence:
    """A judged sentence: its line (from 1), texts, measures and flags."""

    line: int
    source: str
    hypothesis: str
    reference: str
    chrf: float
    length_ratio: float  # characters of the hypothesis / characters of the reference
    copied: float  # share of the source's words that the hypothesis copies and the reference does not
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Bucket:
    """Corpus scores of the sentences with a source of `low` to `high` words."""

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
    """Flags, length ratios and scores by length of one system's translations of one test set."""

    lines: int
    blank_sources: int  # not judged; …
    blank_kept: int  # … number of them with a blank translation, as it should be
    blank_references: int  # of sources that are not blank: not judged either
    length_ratio: float  # characters of all hypotheses / characters of all references
    copied_words: float  # share of all source words that the output copies and the reference does not
    chance: float  # highest chrF2 of a hallucination
    by_length: tuple[Bucket, ...]  # each judged sentence is in exactly one
    sentences: tuple[Sentence, ...]  # the judged ones, in order

    @property
    def definitions(self) -> dict[str, str]:
        """Return the definition of each flag."""
        return {
            "empty": "empty output",
            "loop": f"a phrase is repeated at least {TIMES} times in a row, over {TOKENS} words or more, and more "
            "often than any phrase of the source",
            "hallucination": f"no closer to its reference than references of different sentences are (chrF2 up to "
            f"{self.chance:.1f}), with at least {MIN_WORDS} words and half its length, and neither loop nor copy",
            "copy": "copies the source, or at least half its words, where the reference has others",
            "short": "less than half as long as its reference",
            "long": "more than twice as long as its reference",
            "cut": "ended by the length limit, not by the model",
            "retried": "the search ran in a loop and was repeated; this is the better result",
        }

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of sentences with each flag."""
        counter = Counter(flag for sentence in self.sentences for flag in sentence.flags)
        return {flag: counter[flag] for flag in self.definitions}

    def rate(self, flag: str) -> float:
        """Return the share of the judged sentences that have a flag."""
        return self.counts[flag] / max(1, len(self.sentences))

    @cached_property
    def ranked(self) -> list[Sentence]:
        """Return the sentences from the worst to the best chrF2, independent of the order of the lines."""
        return sorted(self.sentences, key=lambda s: (s.chrf, s.source, s.hypothesis, s.reference))

    def flagged(self, flag: str) -> list[Sentence]:
        """Return the sentences that have a flag, the worst first."""
        return [sentence for sentence in self.ranked if flag in sentence.flags]

    def __str__(self) -> str:
        """Return a few lines for a terminal; flags after the first four appear if any sentence has them."""
        shown = [flag for i, flag in enumerate(self.counts) if i < 4 or self.counts[flag]]
        width = max(map(len, shown))
        flags = [
            f"{flag:<{width}}  {percent(self.rate(flag)):>8}  ({self.counts[flag]:,})  {self.definitions[flag]}"
            for flag in shown
        ]
        parts = [f"{b.name}: {b.bleu:.1f} / {b.chrf:.1f} ({b.sentences:,})" for b in self.by_length]
        worst = [f"line {sentence.line}: {sentence.chrf:.1f}" for sentence in self.ranked[:5]]
        return "\n".join(
            [
                f"length ratio = {self.length_ratio:.3f}  characters of the output / characters of the reference",
                f"copied words = {percent(self.copied_words)}  of the source's, beyond those that the reference copies",
                f"flagged, of {len(self.sentences):,} sentences:",
                *(f"  {line}" for line in flags),
                f"BLEU / chrF2 (sentences) by words of the source = {' · '.join(parts) or 'none'}",
                f"worst by chrF2 = {' · '.join(worst) or 'none'}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; the columns hold null for a sentence that is not judged."""
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
    """Return a share as a percentage with two decimals."""
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
    """Flag faulty translations; `truncated` and `retried` are the fields of the same name of `Translation`."""
    lines = len(sources)
    others = (("hypotheses", hypotheses), ("references", references), ("truncated", truncated), ("retried", retried))
    for name, values in others:
        if len(values) != lines and (values or name in ("hypotheses", "references")):
            raise QkvError(f"{lines} sources but {len(values)} {name}: give one for each source")
    sources, hypotheses, references = (
        [unicodedata.normalize("NFC", line) for line in side] for side in (sources, hypotheses, references)
    )
    judged = [i for i in range(lines) if sources[i].strip() and references[i].strip()]
    judged_references = [references[i] for i in judged]
    metric = chrf()
    statistics = sentence_statistics(metric, [hypotheses[i] for i in judged], judged_references)
    chance = chance_level(judged_references)
    sentences: list[Sentence] = []
    copied = source_words = 0
    for i, row in zip(judged, statistics, strict=True):
        source, hypothesis, reference, closeness = sources[i], hypotheses[i], references[i], value_of(metric, row)
        ratio = len(hypothesis.strip()) / len(reference.strip())
        copies, words = copied_words(source, hypothesis, reference)
        share = copies / max(1, words)
        copied, source_words = copied + copies, source_words + words

        empty, loop = not hypothesis.strip(), has_loop(hypothesis, source)
        copy = not empty and (share >= COPIED or _folded(hypothesis) == _folded(source) != _folded(reference))
        long_enough = ratio >= SHORT and sum(map(_has_letter, words_of(hypothesis))) >= MIN_WORDS
        raised = {  # in the order of `Diagnosis.definitions`
            "empty": empty,
            "loop": loop,
            "hallucination": long_enough and not loop and not copy and closeness <= chance,
            "copy": copy,
            "short": ratio < SHORT and not empty,
            "long": ratio > LONG,
            "cut": bool(truncated and truncated[i]),
            "retried": bool(retried and retried[i]),
        }
        flags = tuple(flag for flag, is_raised in raised.items() if is_raised)
        sentences.append(Sentence(i + 1, source, hypothesis, reference, closeness, ratio, share, flags))
    blank = [i for i in range(lines) if not sources[i].strip()]
    lengths = [(len(sentence.hypothesis.strip()), len(sentence.reference.strip())) for sentence in sentences]
    return Diagnosis(
        lines=lines,
        blank_sources=len(blank),
        blank_kept=sum(not hypotheses[i].strip() for i in blank),
        blank_references=lines - len(blank) - len(judged),
        length_ratio=sum(ours for ours, _ in lengths) / max(1, sum(theirs for _, theirs in lengths)),
        copied_words=copied / max(1, source_words),
        chance=chance,
        by_length=_buckets(sentences, statistics, tgt_lang),
        sentences=tuple(sentences),
    )


# ---- words -----------------------------------------------------------------------------------------------------------


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return (begin, end) of each word and punctuation mark; in scripts without spaces, of each character."""
    return [
        span
        for begin, end in alignments.word_spans(text)
        for span in (pairwise(range(begin, end + 1)) if SPACELESS.search(text, begin, end) else [(begin, end)])
    ]


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text."""
    return [text[begin:end] for begin, end in word_spans(text)]


def has_loop(hypothesis: str, source: str) -> bool:
    """Return whether an output repeats a phrase as `find_loop` defines it, on words instead of tokens."""
    numbers: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        units = (unit for word in words_of(text.casefold()) for unit in (word if len(word) > LONGEST_WORD else [word]))
        return [numbers.setdefault(unit, len(numbers)) for unit in units]

    return find_loop(ids(hypothesis), ids(source)) is not None


def copied_words(source: str, hypothesis: str, reference: str) -> tuple[int, int]:
    """Return how many source words occur more often in the output than in the reference, and the number of all."""
    in_source, in_output, in_reference = (
        Counter(word for word in words_of(text.casefold()) if _has_letter(word))
        for text in (source, hypothesis, reference)
    )
    return ((in_source & in_output) - in_reference).total(), in_source.total()


def _has_letter(word: str) -> bool:
    return any(character.isalpha() for character in word)


def _folded(text: str) -> str:
    """Return the text with case and spacing removed as differences."""
    return " ".join(text.casefold().split())


# ---- scores ----------------------------------------------------------------------------------------------------------


def chance_level(references: Sequence[str]) -> float:
    """Return the 90 % quantile of the chrF2 between references of different sentences, at most 30.

    It is between 16 and 25 on natural test sets of European languages.
    """
    distinct = sorted(set(references))
    distinct = distinct[:: -(-len(distinct) // SAMPLED) or 1]
    if len(distinct) < MIN_REFERENCES:
        return DEFAULT_CHANCE
    # In alphabetical order similar sentences are neighbours; sentences half the list away have little in common.
    half = len(distinct) // 2
    metric = chrf()
    pairs = sentence_statistics(metric, distinct, distinct[half:] + distinct[:half])
    return min(MAX_CHANCE, float(np.quantile([value_of(metric, row) for row in pairs], CHANCE_QUANTILE)))


def _buckets(sentences: Sequence[Sentence], statistics: Floats, tgt_lang: str) -> tuple[Bucket, ...]:
    """Return scores of sentences grouped by source length, in groups of about equal size."""
    lengths = np.array([len(words_of(sentence.source)) for sentence in sentences], dtype=np.int64)
    metric, buckets = bleu(tgt_lang, quiet=True), []
    hypotheses, references = [each.hypothesis for each in sentences], [each.reference for each in sentences]
    bleu_statistics = sentence_statistics(metric, hypotheses, references)
    for low, high in length_ranges(lengths.tolist()):
        inside = (lengths >= low) & (lengths <= high)
        values = value_of(metric, bleu_statistics[inside].sum(0)), value_of(chrf(), statistics[inside].sum(0))
        buckets.append(Bucket(low, high, int(inside.sum()), *values))
    return tuple(buckets)


def length_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the smallest and largest length of each bucket; all sentences of one length are in the same bucket."""
    remaining = len(lengths)
    buckets = max(1, min(BUCKETS, remaining // SMALLEST))
    ranges: list[tuple[int, int]] = []
    current: list[int] = []  # lengths in the bucket being filled, …
    size = 0  # … and its number of sentences
    for length, count in sorted(Counter(lengths).items()):
        current.append(length)
        size += count
        share = max(SMALLEST, remaining / (buckets - len(ranges)))
        if size >= share and remaining - size >= SMALLEST:
            ranges.append((current[0], length))
            current, remaining, size = [], remaining - size, 0
    return [*ranges, (current[0], current[-1])] if current else ranges


# ---- loop detector ---------------------------------------------------------------------------------------------------


TIMES = 4  # a loop is a phrase repeated at least this often in a row, …
TOKENS = 8  # … over at least this many tokens, …
SPARE = 1  # … and more than this many times more often than the source repeats a phrase
LONGEST = 32  # tokens of the longest phrase searched for


@dataclass(frozen=True)
class Loop:
    """A phrase of `length` tokens, repeated `times` times in a row from `start` on."""

    start: int
    length: int
    times: int


def find_loop(output: Sequence[int], source: Sequence[int] = ()) -> Loop | None:
    """Return the loop that covers most of an output, if it has one.

    A loop is a phrase of 1 to 32 tokens, repeated at least 4 times in a row and over at least 8 tokens, anywhere in the
    output. A source that repeats a phrase ("ha ha ha ha ha") allows the output as many repetitions and one more.
    """
    if len(set(output)) > len(output) - TOKENS * (TIMES - 1) // TIMES:
        return None  # quick test: all tokens of a loop but those of its first round are repeated ones
    allowed = max((loop.times for loop in repetitions(source)), default=1) + SPARE
    loops = [
        loop
        for loop in repetitions(output)
        if loop.times >= TIMES and loop.times * loop.length >= TOKENS and loop.times > allowed
    ]
    return max(loops, key=lambda loop: loop.times * loop.length, default=None)


def repetitions(tokens: Sequence[int]) -> list[Loop]:
    """Return every phrase that occurs at least twice in a row, with its number of repetitions."""
    loops = []
    for length in range(1, min(LONGEST, len(tokens) // 2) + 1):
        equal = 0  # tokens in a row equal to the one `length` before them
        for i in range(length, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - length]:
                equal += 1
                continue
            if equal >= length:
                loops.append(Loop(i - equal - length, length, equal // length + 1))
            equal = 0
    return loops


def breaking(loop: Loop, blocked: int = 0) -> int:
    """Return the n for which blocking repeated n-grams ends this loop after at most n more tokens.

    At least 4, because shorter n-grams occur twice in good text; `blocked` is the n already blocked, if any.
    """
    n = max(TIMES, loop.length)
    return min(n, blocked) if blocked else n
