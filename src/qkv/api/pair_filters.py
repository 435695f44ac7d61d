"""Filters of synthetic pairs, dispositions of lines, and word noise.

Every input line gets one disposition, and all are counted. Repeated lines are found by hashes of 8 bytes each.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qkv.api.file_translation import chunks
from qkv.api.translator import CHUNK
from qkv.core.errors import QkvError, UsageError
from qkv.data.formats import LineReader

# Dispositions in order of priority: the first that applies is counted.
DISPOSITIONS = {
    "encoding": "not UTF-8",
    "blank": "blank",
    "repeated": "repeated in the same text, not translated again",
    "empty": "with an empty translation",
    "garbled": "translated with bytes that are not UTF-8",
    "unfinished": "translated up to the length limit",
    "looped": "translated with a loop",
    "copy": "translated by a copy of the line",
    "ratio": "translated much too long or too short",
    "unlikely": "less likely than min_logprob",
    "worse": "not among the best share",
    "kept": "kept",
}
OPTIONAL = ("repeated", "unfinished", "looped", "copy", "ratio")  # filters that `allow` switches off


@dataclass(frozen=True)
class Filters:
    """Options of the filters that drop pairs.

    `max_ratio` limits the ratio of lengths in tokens, with the shorter side counted as at least 4; 0 is no limit.
    `min_logprob` is the lowest allowed mean log-probability of a token. `keep` is the share of a chunk's pairs, the
    most probable ones, kept after all other filters. `allow` names filters to switch off.
    """

    max_ratio: float = 3.0
    min_logprob: float | None = None
    keep: float = 1.0
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UsageError(f"keep = {self.keep}: a share of the pairs, above 0 and at most 1")
        if self.max_ratio and not self.max_ratio >= 1:
            raise UsageError(f"max_ratio = {self.max_ratio}: at least 1, or 0 for no limit")
        if unknown := [name for name in self.allow if name not in OPTIONAL]:
            raise UsageError(f'allow = "{unknown[0]}": must be one of {", ".join(OPTIONAL)}')

    @property
    def ranked(self) -> bool:
        """Return whether a filter needs the log-probabilities of pairs."""
        return self.min_logprob is not None or self.keep < 1


class FilteredLine(str):
    """A line that is filtered out before translation, with its disposition."""

    disposition: str

    def __new__(cls, line: str, disposition: str) -> Self:
        filtered = super().__new__(cls, line)
        filtered.disposition = disposition
        return filtered


class Seen:
    """Set of lines by hash, 8 bytes each, in sorted arrays of decreasing size (each at least twice the next)."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def new(self, lines: Sequence[str]) -> list[bool]:
        """Add lines and return for each whether it is new; outer spaces and the Unicode form are ignored."""
        texts = (unicodedata.normalize("NFC", line).strip().encode() for line in lines)
        hashes = np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), np.uint64)
        new = np.zeros(len(hashes), np.bool_)
        new[np.unique(hashes, return_index=True)[1]] = True
        for run in self.runs:
            new &= run[np.searchsorted(run, hashes).clip(max=len(run) - 1)] != hashes
        if new.any():
            self.runs.append(np.sort(hashes[new]))
        while len(self.runs) > 1 and len(self.runs[-2]) < 2 * len(self.runs[-1]):
            self.runs[-2:] = [np.sort(np.concatenate(self.runs[-2:]))]
        return new.tolist()


def filter_lines(lines: Iterable[str], bad: Callable[[], int], repeated: bool = True) -> Iterator[str]:
    """Yield the lines; those that are not UTF-8, blank or repeated as `FilteredLine`.

    `bad` returns the number of lines read so far that were not UTF-8. A line may include its reference after a line
    break.
    """
    seen = Seen()
    for chunk in chunks(_filter_unreadable(lines, bad), CHUNK):
        new = seen.new(chunk.lines) if repeated else [True] * len(chunk.lines)
        for line, is_new in zip(chunk.lines, new, strict=True):
            yield line if is_new or isinstance(line, FilteredLine) else FilteredLine(line, "repeated")


def _filter_unreadable(lines: Iterable[str], bad: Callable[[], int]) -> Iterator[str]:
    before = 0
    for line in lines:
        now = bad()
        if now > before:
            yield FilteredLine(line, "encoding")
        else:
            yield line if line.partition("\n")[0].strip() else FilteredLine(line, "blank")
        before = now


def zip_lines(files: Sequence[LineReader]) -> Iterator[str]:
    """Yield the lines of one file, or the corresponding lines of several joined by a line break."""
    for lines in zip_longest(*files):
        if None in lines:
            shorter = files[lines.index(None)].name
            longer = next(each.name for each, line in zip(files, lines, strict=True) if line is not None)
            raise QkvError(f"{longer} has more lines than {shorter}: they must correspond line by line")
        yield "\n".join(lines)


# ---- word noise: words are dropped, blanked and shuffled -------------------------------------------------------------


BLANK = "_"  # replaces a word; a single character, so that it is one token of any vocabulary


@dataclass(frozen=True)
class WordNoise:
    """Shares of words that are dropped and blanked, and the largest distance that a word moves."""

    drop: float = 0.0
    blank: float = 0.0
    shuffle: int = 0

    def __post_init__(self) -> None:
        for name, value in (("drop", self.drop), ("blank", self.blank)):
            if not 0 <= value < 1:
                raise UsageError(f"{name} = {value}: a share of the words, from 0 to below 1")
        if self.shuffle < 0:
            raise UsageError(f"shuffle = {self.shuffle}: the largest distance a word moves, 0 or more")

    def __bool__(self) -> bool:
        return self != WordNoise()

    def words(self, words: Sequence[str], random: np.random.Generator) -> list[str]:
        """Return the words with noise; at least one word is kept."""
        kept = [word for word, draw in zip(words, random.random(len(words)), strict=True) if draw >= self.drop]
        if not kept and words:
            kept = [words[int(random.integers(len(words)))]]
        blanked = random.random(len(kept)) < self.blank
        # Sort keys place + U(0, shuffle + 1): a word overtakes only words less than shuffle + 1 places ahead.
        order = np.argsort(np.arange(len(kept)) + random.random(len(kept)) * (self.shuffle + 1), kind="stable")
        return [BLANK if blanked[place] else kept[place] for place in order.tolist()]

    def text(self, text: str, number: int, seed: int, *, spaces: bool = True) -> str:
        """Return a line with noise; `number` is its line number. If `spaces` is False, characters count as words."""
        if not self:
            return text
        random = np.random.default_rng((seed % 2**64, number))
        return " ".join(self.words(text.split(), random)) if spaces else "".join(self.words(list(text), random))


EDUNOV = WordNoise(drop=0.1, blank=0.1, shuffle=3)  # as in Edunov et al. (2018)
