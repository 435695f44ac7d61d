"""Which lines become pairs: what becomes of a line, the filters, and what is known before any translation.

Every line that is read has one fate, and all are counted. Lines that came before are found by hashes, in 8 bytes each.
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

# What becomes of a line, in the order in which it is asked; the first that holds is the one counted.
FATES = {
    "encoding": "not UTF-8",
    "blank": "blank",
    "repeated": "came before in the same text, and were not translated again",
    "empty": "were translated by nothing",
    "garbled": "came out with bytes that are no letters",
    "unfinished": "reached the longest length allowed before the model ended",
    "looped": "ran in a loop",
    "copy": "came out as they went in",
    "ratio": "came out much too long or too short",
    "unlikely": "are less likely than asked for",
    "worse": "are not among the best",
    "kept": "kept",
}
OPTIONAL = ("repeated", "unfinished", "looped", "copy", "ratio")  # reasons that a user may waive


@dataclass(frozen=True)
class Filters:
    """Which pairs are left out.

    `max_ratio` compares lengths in tokens, of which a shorter side counts as at least 4; 0 is no limit. `min_logprob`
    is the least log-probability of a token, on average. `keep` is a share: of the pairs of a chunk that pass everything
    else, so many are kept, the likeliest. `allow` names reasons for which nothing is left out.
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
        """Whether it matters how likely a pair is."""
        return self.min_logprob is not None or self.keep < 1


class Settled(str):
    """A line of which it is known before any translation that no pair comes of it, and why."""

    fate: str

    def __new__(cls, line: str, fate: str) -> Self:
        made = super().__new__(cls, line)
        made.fate = fate
        return made


class Seen:
    """Which lines have come before: 8 bytes for each, in sorted runs of which each is twice as long as the next."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def new(self, lines: Sequence[str]) -> list[bool]:
        """For each line, whether it comes for the first time; spaces around it and its Unicode form do not matter."""
        plain = (unicodedata.normalize("NFC", line).strip().encode() for line in lines)
        hashes = np.frombuffer(b"".join(hashlib.blake2b(line, digest_size=8).digest() for line in plain), np.uint64)
        fresh = np.zeros(len(hashes), np.bool_)
        fresh[np.unique(hashes, return_index=True)[1]] = True
        for run in self.runs:
            fresh &= run[np.searchsorted(run, hashes).clip(max=len(run) - 1)] != hashes
        if fresh.any():
            self.runs.append(np.sort(hashes[fresh]))
        while len(self.runs) > 1 and len(self.runs[-2]) < 2 * len(self.runs[-1]):
            self.runs[-2:] = [np.sort(np.concatenate(self.runs[-2:]))]
        return fresh.tolist()


def settle(lines: Iterable[str], bad: Callable[[], int], repeated: bool = True) -> Iterator[str]:
    """The lines, of which those that are not UTF-8, blank or repeated are settled.

    `bad` tells how many of those read so far were not UTF-8. A reference may stand behind a line, after a line break.
    """
    seen = Seen()
    for chunk in chunks(_readable(lines, bad), CHUNK):
        new = seen.new(chunk.lines) if repeated else [True] * len(chunk.lines)
        for line, first in zip(chunk.lines, new, strict=True):
            yield line if first or isinstance(line, Settled) else Settled(line, "repeated")


def _readable(lines: Iterable[str], bad: Callable[[], int]) -> Iterator[str]:
    before = 0
    for line in lines:
        now = bad()
        if now > before:
            yield Settled(line, "encoding")
        else:
            yield line if line.partition("\n")[0].strip() else Settled(line, "blank")
        before = now


def beside(files: Sequence[LineReader]) -> Iterator[str]:
    """The lines of one file, or of several line by line with a line break between them, which no line has."""
    for lines in zip_longest(*files):
        if None in lines:
            ended = files[lines.index(None)].name
            longer = next(each.name for each, line in zip(files, lines, strict=True) if line is not None)
            raise QkvError(f"{longer} has more lines than {ended}: they must correspond line by line")
        yield "\n".join(lines)


# ---- Noise on the words of a sentence: some are dropped, some blanked, and the rest stands a little out o ------------


BLANK = "_"  # stands for a word; one letter, so that it is one token of any vocabulary


@dataclass(frozen=True)
class Noise:
    """How much of it: shares of words dropped and blanked, and how many places a word may move."""

    drop: float = 0.0
    blank: float = 0.0
    shuffle: int = 0

    def __post_init__(self) -> None:
        for name, value in (("drop", self.drop), ("blank", self.blank)):
            if not 0 <= value < 1:
                raise UsageError(f"{name} = {value}: a share of the words, from 0 to below 1")
        if self.shuffle < 0:
            raise UsageError(f"shuffle = {self.shuffle}: places that a word may move, 0 or more")

    def __bool__(self) -> bool:
        return self != Noise()

    def words(self, words: Sequence[str], random: np.random.Generator) -> list[str]:
        """The words with noise; of one or more, one is left at least."""
        kept = [word for word, drawn in zip(words, random.random(len(words)), strict=True) if drawn >= self.drop]
        if not kept and words:
            kept = [words[int(random.integers(len(words)))]]
        blanked = random.random(len(kept)) < self.blank
        # A word overtakes another only if that is less than shuffle + 1 places ahead, so none moves further.
        order = np.argsort(np.arange(len(kept)) + random.random(len(kept)) * (self.shuffle + 1), kind="stable")
        return [BLANK if blanked[place] else kept[place] for place in order.tolist()]

    def text(self, text: str, number: int, seed: int, *, spaces: bool = True) -> str:
        """A line with noise; `number` is its place in the input. Without spaces between words, letters are words."""
        if not self:
            return text
        random = np.random.default_rng((seed % 2**64, number))
        return " ".join(self.words(text.split(), random)) if spaces else "".join(self.words(list(text), random))


EDUNOV = Noise(drop=0.1, blank=0.1, shuffle=3)  # as published
