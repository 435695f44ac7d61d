"""Cut inputs into sentences, or into pieces that fit the model, and join them again without loss.

With `sentences` every sentence is a piece. Without it, or if a sentence is too long, pieces are as long as possible: a
piece ends at a sentence border if there is one, else at clause punctuation, else at a space, else (a very long token)
inside the token. The white space between pieces is stored and put back between their translations.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qkv.core.errors import QkvError

SPACE, CLAUSE, SENTENCE, LINE = range(4)  # ranks of borders, from the worst place to cut to the best
SHORT = 300  # characters; a shorter line is first tried as one piece, without a search for borders

STOPS = ".!?…؟۔।"
PAUSES = ",;:،؛–—"
WIDE_STOPS = "。！？｡"  # scripts without spaces: these always end a sentence
WIDE_PAUSES = "、，；："
OPENERS = "\"'“‘„«‹([{¿¡「『（《"
CLOSERS = "\"'”’“»›)]}」』）》"

# Each run of marks is one match, border or not, so that the scan is linear even on a million full stops.
MARKS = re.compile(rf"([{STOPS}{PAUSES}{WIDE_STOPS}{WIDE_PAUSES}]+)([{re.escape(CLOSERS)}]*)(\s*)|\s+")

WORD = re.compile(r"[^\W_]|[\r\n]")  # a letter or digit, or the end of the line
# Every line of several sentences matches; a line without a match is one sentence and is not scanned further.
INNER_STOP = re.compile(rf"[{STOPS}][{re.escape(CLOSERS)}]*\s|[{WIDE_STOPS}][{re.escape(CLOSERS)}]*.")

# Abbreviations: their full stop never ends a sentence, or not before a number. Initials ("J.", "z.B.", "U.S.") and
# small numbers ("3. Mai") are recognised by their form; before a lower-case letter a stop never ends a sentence.
TITLES = """
    dr mr mrs ms prof st sr jr rev capt lt sgt gov vs approx dept bzw ca ggf inkl exkl hrsg str tel vgl sog evtl hl frl
    dipl ing dott sig sigg avv mme mlle sra srta dra
"""
COUNTERS = """
    no nos nr vol fig figs eq sec ch pp abs art bd núm pág jan feb mar apr aug sept oct nov dec
"""
ABBREVIATIONS = frozenset(TITLES.split())
BEFORE_NUMBERS = frozenset((TITLES + COUNTERS).split())


@dataclass(frozen=True)
class Pieces:
    """A text in pieces: separators[0] + pieces[0] + separators[1] + … + separators[-1] is the text, exactly."""

    pieces: tuple[str, ...]
    separators: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def join(self, translated: Sequence[str], *, spaces: bool | None = None) -> str:
        """Return the text with every piece replaced; `spaces`: whether the target language separates words by them.

        If so, a space is inserted after a wide mark (。) without one; if not, single spaces between pieces are dropped.
        """
        if len(translated) != len(self.pieces):
            raise QkvError(f"{len(translated)} translations for {len(self.pieces)} pieces: give one for each piece")
        gaps = ["" if spaces is False and gap == " " else gap for gap in self.separators]
        for i, piece in enumerate(self.pieces[:-1], 1):
            if spaces and not gaps[i] and piece.rstrip(CLOSERS).endswith(tuple(WIDE_STOPS + WIDE_PAUSES)):
                gaps[i] = " "
        return gaps[0] + "".join(text + gap for text, gap in zip(translated, gaps[1:], strict=True))


class Border(NamedTuple):
    """A place to cut: a piece ends at `stop`, the next starts at `resume`, with white space between them."""

    stop: int
    resume: int
    rank: int


def split(text: str, fits: Callable[[str], bool], *, sentences: bool = False) -> Pieces:
    """Cut `text` into the longest pieces for which `fits` is true, or into `sentences`; a line break ends a piece.

    Marks without a letter or digit are part of the sentence before them. A single character is a piece even if `fits`
    returns False. White space alone has no pieces. `fits` is called O(log n) times per piece, rarely with much more
    text than one piece.
    """
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    line = text[start:end]
    whole = "\n" not in line and "\r" not in line and not (sentences and INNER_STOP.search(line))
    if 0 < len(line) < SHORT and whole and fits(line):
        return Pieces((line,), (text[:start], text[end:]))
    cutter = _Cutter(text, fits, sentences)
    cuts = list(cutter.lines(start)) if start < len(text) else []
    starts = [start, *(resume for _, resume in cuts)]
    pieces = tuple(text[a:stop] for a, (stop, _) in zip(starts, cuts, strict=False))
    return Pieces(pieces, (text[:start], *(text[stop:resume] for stop, resume in cuts)))


class _Cutter:
    """Finds the cuts, (stop, resume) each, of one text."""

    def __init__(self, text: str, fits: Callable[[str], bool], sentences: bool) -> None:
        self.text, self.fits, self.sentences = text, fits, sentences
        self.word = -1  # last result of next_word
        self.guess = dict.fromkeys((SPACE, CLAUSE, SENTENCE), 1)  # units in the last piece of each rank
        self.window = 1  # characters in the last piece of a long token

    def lines(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the cuts from `start` to the end of the text."""
        line: list[Border] = []
        word = self.next_word(start)
        for border in _borders(self.text, start):
            line.append(border)
            inner = self.sentences and border.rank == SENTENCE and word < border.stop and self.begins(border.resume)
            if inner or border.rank == LINE:
                if self.fits(self.text[start : border.stop]):
                    yield border.stop, border.resume
                else:
                    yield from self.pack(start, line, SENTENCE)
                start, line = border.resume, []
                word = self.next_word(start)

    def begins(self, at: int) -> bool:
        """Return whether a sentence starts here: there is a word before the next stop and the end of the line."""
        word = self.next_word(at)
        if word == len(self.text) or self.text[word] in "\r\n":
            return False
        return INNER_STOP.search(self.text, at, word) is None

    def next_word(self, at: int) -> int:
        """Return the position of the next letter, digit or line break, or the length of the text; `at` only grows."""
        if self.word < at:
            match = WORD.search(self.text, at)
            self.word = match.start() if match else len(self.text)
        return self.word

    def pack(self, start: int, borders: list[Border], rank: int) -> Iterator[tuple[int, int]]:
        """Cut text[start:] up to the last border, at borders of this rank or better if the pieces fit."""
        if rank < SPACE:
            yield from self.windows(start, borders[-1])
            return
        units = [i for i, border in enumerate(borders) if border.rank >= rank]
        stops = [borders[i].stop for i in units]
        done = 0
        while done < len(units):
            count = self.longest(start, stops, done, self.guess[rank])
            if count:
                self.guess[rank] = count
                yield borders[units[done + count - 1]][:2]
            else:  # one unit does not fit: cut inside it, at borders of the next lower rank
                count = 1
                first = units[done - 1] + 1 if done else 0
                yield from self.pack(start, borders[first : units[done] + 1], rank - 1)
            done += count
            start = borders[units[done - 1]].resume

    def windows(self, start: int, end: Border) -> Iterator[tuple[int, int]]:
        """Cut a long token at any place that does not separate a letter from its accents."""
        while start < end.stop:
            self.window = self.longest(start, range(start + 1, end.stop + 1), 0, self.window) or 1
            stop = start + self.window
            for back in range(stop, max(start, stop - 8), -1):
                if not _sticks(self.text, back) and (back == stop or self.fits(self.text[start:back])):
                    stop = back
                    break
            yield stop, end.resume if stop == end.stop else stop
            start = stop

    def longest(self, start: int, stops: Sequence[int], done: int, guess: int) -> int:
        """Return how many more stops a piece from `start` can include: doubling steps from a guess, then bisection."""
        low, high = 0, len(stops) - done + 1  # low fits, high does not
        probe, stride = min(guess, high - 1), max(1, guess // 8)
        while high - low > 1:
            if self.fits(self.text[start : stops[done + probe - 1]]):
                low, probe = probe, probe + stride
            else:
                high, probe = probe, probe - stride
            stride *= 2
            if not low < probe < high:
                probe = (low + high) // 2
        return low


def _borders(text: str, start: int) -> Iterator[Border]:
    """Yield every place where the text may be cut, the end of the text last; sentence borders are heuristic."""
    end = len(text.rstrip())
    for match in MARKS.finditer(text, start, end):
        marks, space = match.group(1) or "", match.group(3) or ""
        if not marks:
            space = match.group()
        if match.end() == end:
            break
        if "\n" in space or "\r" in space:
            rank = LINE
        elif marks and marks[-1] in WIDE_STOPS:
            rank = SENTENCE
        elif marks and marks[-1] in WIDE_PAUSES:
            rank = CLAUSE
        elif not space:
            continue
        elif marks and marks[-1] in STOPS:
            rank = SENTENCE if _ends_sentence(text, match.start(), marks, match.end()) else SPACE
        else:
            rank = CLAUSE if marks else SPACE
        yield Border(match.end() - len(space), match.end(), rank)
    yield Border(end, len(text), LINE)


def _ends_sentence(text: str, start: int, marks: str, resume: int) -> bool:
    """Return whether the marks at `start`, with the next word at `resume`, end a sentence."""
    following = text[resume : resume + 4].lstrip(OPENERS)[:1]
    if following.islower():
        return False
    if marks != ".":
        return True
    word = re.split(r"\s", text[max(0, start - 12) : start])[-1].lstrip(OPENERS)
    initials = all(len(part) <= 2 and part.isalpha() for part in word.split(".")) and ("." in word or len(word) == 1)
    ordinal = word.isdigit() and len(word) <= 2
    abbreviations = BEFORE_NUMBERS if following.isdigit() else ABBREVIATIONS
    return not (initials or ordinal or word.lower() in abbreviations)


def _sticks(text: str, at: int) -> bool:
    """Return whether a cut before text[at] would separate a letter from its accents or an emoji from its joiner."""
    return at < len(text) and (unicodedata.category(text[at]).startswith("M") or "\u200d" in text[at - 1 : at + 1])
