"""Cut a text into pieces that the model translates one by one, and join their translations without loss.

A piece is a sentence, or as many as a line of the training text had (`qkv.segmentation.text_cutter`). `sentencex` finds
the sentences, paragraph by paragraph. A sentence that does not fit the model is cut at clause punctuation, else at a
space, else (a very long token) inside the token. Without `sentences` pieces are as long as possible, and end at a full
stop if there is one. Pieces and the white space between them are the text, to the character.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from qkv.core.errors import QkvError, UsageError

Span = tuple[int, int]  # begin and end, in characters

SPACE, CLAUSE, SENTENCE, LINE = range(4)  # ranks of borders, from the worst place to cut to the best
SHORT = 300  # characters; a shorter line is first tried as one piece, without a search for borders
WINDOW = 1 << 14  # characters that sentencex reads at once
BLOCK = 1 << 16  # characters of a long sentence that are cut at once
LONG_LINE = 40  # characters of a line that may be hard-wrapped

STOPS = ".!?…؟۔।॥։።။៕‼⁇⁈⁉‽"
PAUSES = ",;:،؛–—"
WIDE_STOPS = "。！？｡"  # scripts without spaces: these always end a sentence
WIDE_PAUSES = "、，；："
OPENERS = "\"'“‘„«‹([{¿¡「『（《"
CLOSERS = "\"'”’“»›)]}」』）》"

# Each run of marks is one match, border or not, so that the scan is linear even on a million full stops.
MARKS = re.compile(rf"([{STOPS}{PAUSES}{WIDE_STOPS}{WIDE_PAUSES}]+)([{re.escape(CLOSERS)}]*)(\s*)|\s+")

WORD = re.compile(r"[^\W_]")
# Every line of several sentences matches; a line without a match is one sentence and is not searched further. The
# semicolon is a Greek question mark.
INNER_STOP = re.compile(
    rf"[{STOPS};\u037e][{re.escape(CLOSERS)}\u00a0\u202f]*\s|[{WIDE_STOPS}][{re.escape(CLOSERS)}]*."
)
NO_BREAK = str.maketrans(dict.fromkeys("\u00a0\u202f\u2007\u2009\u200a\u2002\u2003", " "))
NUMBER = re.compile(r"\s*\(?\d{1,3}[.)]\s*")  # of an item: belongs to the sentence after it
# Words that sentencex takes for abbreviations (Me., No., Ill., Mich.), where the next word has a capital letter.
NOT_ABBREVIATED = {
    language: re.compile(rf"\b(?:{words})\.[{re.escape(CLOSERS)}]*\s+(?=[{re.escape(OPENERS)}]*[^\W\d_a-zäöü])")
    for language, words in {"en": "me|no|ill|may|miss|fed", "de": "mich|mag"}.items()
}
LINE_END = re.compile(r"\r\n|\n|\r")
NOT_SPACE, SPACES = re.compile(r"\S"), re.compile(r"\s+")
LIST_ITEM = re.compile(r"(?:[-*+•–—#>|]|\(?\d{1,3}[.)]|\(?[a-z]\))\s")


@dataclass(frozen=True)
class Pieces:
    """A text in pieces: separators[0] + pieces[0] + separators[1] + … + separators[-1] is the text, exactly."""

    pieces: tuple[str, ...]
    separators: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where each piece begins in the text."""
        steps = [len(gap) + len(piece) for piece, gap in zip(self.pieces, self.separators[1:], strict=True)]
        return tuple(accumulate(steps[:-1], initial=len(self.separators[0]))) if steps else ()

    def gaps(self, *, spaces: bool | None = None) -> tuple[str, ...]:
        """Return the separators of a translation; `spaces`: whether the target language separates words by them.

        If so, a space is inserted after a wide mark (。) without one; if not, single spaces between pieces are dropped.
        """
        gaps = ["" if spaces is False and gap == " " else gap for gap in self.separators]
        for i, piece in enumerate(self.pieces[:-1], 1):
            if spaces and not gaps[i] and piece.rstrip(CLOSERS).endswith(tuple(WIDE_STOPS + WIDE_PAUSES)):
                gaps[i] = " "
        return tuple(gaps)

    def join(self, translated: Sequence[str], *, spaces: bool | None = None) -> str:
        """Return the text with every piece replaced by its translation, with the `gaps` between them."""
        if len(translated) != len(self.pieces):
            raise QkvError(f"{len(translated)} translations for {len(self.pieces)} pieces: give one for each")
        gaps = self.gaps(spaces=spaces)
        return gaps[0] + "".join(text + gap for text, gap in zip(translated, gaps[1:], strict=True))


def tiles(pieces: Sequence[str], gaps: Sequence[str]) -> list[Span]:
    """Return a span for each piece, with the white space after it (and before the first), that tile the joined text."""
    ends = accumulate(len(piece) + len(gap) for piece, gap in zip(pieces, gaps[1:], strict=True))
    return list(pairwise([0, *(len(gaps[0]) + end for end in ends)]))


class Border(NamedTuple):
    """A place to cut: a piece ends at `stop`, the next starts at `resume`, with white space between them."""

    stop: int
    resume: int
    rank: int


def split(
    text: str,
    fits: Callable[[str], bool],
    *,
    sentences: int = 0,
    language: str = "",
    join_lines: bool = False,
    whole: Sequence[Span] = (),
) -> Pieces:
    """Cut `text` into pieces for which `fits` is true: of at most so many `sentences` each, or (0) as long as possible.

    A line break ends a piece, unless `join_lines` is true and the line goes on in the next one (`paragraphs`). Marks
    without a letter or digit are part of the sentence before them. No piece ends inside a span of `whole`, if the span
    fits. A single character is a piece even if `fits` returns False; white space alone has no pieces. `fits` is called
    O(log n) times per piece, rarely with much more text than one piece.
    """
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    line = text[start:end]
    one_line = "\n" not in line and "\r" not in line and not (sentences and INNER_STOP.search(line))
    if 0 < len(line) < SHORT and one_line and fits(line):
        return Pieces((line,), (text[:start], text[end:]))
    cutter, spans = _Cutter(text, fits, whole), list[Span]()
    for begin, stop in paragraphs(text, join_lines):
        units = sentence_spans(text, begin, stop, language, whole) if sentences else [(begin, stop)]
        spans += cutter.packed(units, max(1, sentences))
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return Pieces(
        tuple(text[begin:stop] for begin, stop in spans),
        tuple(text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)),
    )


# ---- paragraphs and sentences ----------------------------------------------------------------------------------------


def paragraphs(text: str, join_lines: bool = False) -> Iterator[Span]:
    """Yield the lines of a text that are not blank, without the white space around them.

    With `join_lines` a line that does not end in a mark belongs to the next one if that begins with a lower-case letter
    or if its first word had no room in the width of the paragraph (a hard-wrapped text); an item of a list begins anew.
    """
    if "\n" not in text and "\r" not in text:
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if begin < end:
            yield begin, end
        return
    lines = [(begin, end) for begin, end in _lines(text)]
    at = 0
    while at < len(lines):
        block = at
        while block < len(lines) and lines[block][0] < lines[block][1]:
            block += 1
        width = max((end - begin for begin, end in lines[at:block]), default=0)
        begin = -1
        for i in range(at, block):
            begin = lines[i][0] if begin < 0 else begin
            if not (join_lines and i + 1 < block and _goes_on(text, lines[i], lines[i + 1], width)):
                yield begin, lines[i][1]
                begin = -1
        at = block + 1


def _lines(text: str) -> Iterator[Span]:
    """Yield every line, stripped; a blank one is an empty span."""
    at = 0
    for match in LINE_END.finditer(text):
        yield _stripped(text, at, match.start())
        at = match.end()
    yield _stripped(text, at, len(text))


def _stripped(text: str, begin: int, end: int) -> Span:
    """Return a span without the white space around it."""
    line = text[begin:end]
    first = begin + len(line) - len(line.lstrip())
    return first, max(first, begin + len(line.rstrip()))


def _goes_on(text: str, line: Span, following: Span, width: int) -> bool:
    """Whether a sentence goes on in the following line."""
    last, after = text[max(line[0], line[1] - 8) : line[1]].rstrip(CLOSERS)[-1:], text[following[0] : following[1]]
    if last in STOPS + WIDE_STOPS + ":" or LIST_ITEM.match(after):
        return False
    if after.lstrip(OPENERS)[:1].islower():
        return True
    room = width - (line[1] - line[0])
    return width >= LONG_LINE and room <= len(after.split(maxsplit=1)[0])


@cache
def _segmenter() -> Callable[[str, str], list[str]]:
    """The library that finds sentences."""
    try:
        from sentencex import segment  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            "sentencex, which cuts a text into sentences, is not installed: pip install sentencex, or do not cut the "
            "text (--no-split, split=False)"
        ) from None
    found: Callable[[str, str], list[str]] = segment
    return found


def sentence_spans(text: str, begin: int, end: int, language: str, whole: Sequence[Span] = ()) -> list[Span]:
    """Return the sentences of a paragraph, without the white space between them.

    A sentence begins after white space or a wide mark, not with a lower-case letter, and has a letter or digit; the
    number of an item is not one.
    """
    spans: list[Span] = []
    inside = Inside(whole)
    at = begin
    for stop in _sentence_ends(text, begin, end, language.replace("_", "-").split("-")[0].lower() or "en"):
        if stop < end:
            following = text[stop : stop + 8].lstrip(OPENERS)[:1]
            glued = not text[stop - 1].isspace() and not _is_wide(text, at, stop)
            if glued or inside(stop) or following.islower() or NUMBER.fullmatch(text, at, stop):
                continue
        trimmed = _stripped(text, at, stop)
        if spans and not WORD.search(text, *trimmed):
            spans[-1] = spans[-1][0], trimmed[1]
        else:
            spans.append(trimmed)
        at = stop
    if len(spans) > 1 and not WORD.search(text, *spans[0]):
        spans[:2] = [(spans[0][0], spans[1][1])]
    return spans


class Inside:
    """Whether a place is inside one of some spans, which do not overlap, and in which."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans)
        self.begins = [begin for begin, _ in self.spans]

    def __call__(self, place: int) -> bool:
        return self.span(place) is not None

    def span(self, place: int) -> Span | None:
        at = bisect_left(self.begins, place) - 1
        return self.spans[at] if at >= 0 and place < self.spans[at][1] else None


def _is_wide(text: str, begin: int, stop: int) -> bool:
    return text[max(begin, stop - 8) : stop].rstrip(CLOSERS)[-1:] in WIDE_STOPS


def _sentence_ends(text: str, begin: int, end: int, language: str) -> Iterator[int]:
    """Yield where sentences of a paragraph end, white space included; the last is the end of the paragraph."""
    at = begin
    while end - at > 0:
        window = text[at : min(end, at + WINDOW)]
        if not INNER_STOP.search(window):
            at += len(window)
            continue
        sentences = _segmenter()(language, window.translate(NO_BREAK))
        if sum(map(len, sentences)) != len(window):
            raise QkvError(f"sentencex lost characters of {window[:40]!r}: report it, and use --no-split meanwhile")
        ends = [at + length for length in accumulate(map(len, sentences))]
        if words := NOT_ABBREVIATED.get(language):
            ends = sorted({*ends, *(at + match.end() for match in words.finditer(window))})
        yield from ends[:-1]
        at = ends[-2] if len(ends) > 1 and ends[-1] < end else ends[-1]  # the last one may go on in the next window
    yield end


# ---- pieces that fit -------------------------------------------------------------------------------------------------


class _Cutter:
    """Packs sentences into pieces that fit, and cuts a sentence that does not."""

    def __init__(self, text: str, fits: Callable[[str], bool], whole: Sequence[Span]) -> None:
        self.text, self.fits, self.inside = text, fits, Inside(whole)
        self.guess = dict.fromkeys((SPACE, CLAUSE, SENTENCE), 1)  # units in the last piece of each rank
        self.window = 1  # characters in the last piece of a long token

    def packed(self, units: Sequence[Span], most: int) -> Iterator[Span]:
        """Yield pieces of at most `most` units each; a unit that does not fit is cut."""
        at = 0
        while at < len(units):
            begin, count = units[at][0], min(most, len(units) - at)
            while count and not self.fits(self.text[begin : units[at + count - 1][1]]):
                count -= 1
            if count:
                yield begin, units[at + count - 1][1]
            else:
                yield from self.cut(*units[at])
            at += count or 1

    def cut(self, begin: int, end: int) -> Iterator[Span]:
        """Yield the pieces of a unit that does not fit, block by block: the borders of all take too much memory."""
        while begin < end:
            last = self._block_end(begin, end)
            borders = [border for border in _borders(self.text, begin, last) if self._is_free(border, last)]
            for stop, resume in self.pack(begin, borders, SENTENCE):
                yield begin, stop
                begin = resume
            following = NOT_SPACE.search(self.text, last, end)
            begin = following.start() if following else end

    def _is_free(self, border: Border, last: int) -> bool:
        return border.stop == last or not self.inside(border.stop)

    def _block_end(self, begin: int, end: int) -> int:
        """Return the end of a block: the unit's, or else after a word and inside no span of `whole`."""
        if end - begin <= BLOCK:
            return end
        for match in SPACES.finditer(self.text, begin + BLOCK, min(end, begin + 2 * BLOCK)):
            if not self.inside(match.start()):
                return match.start()
        last = begin + BLOCK
        while last < end and (self.inside(last) or _sticks(self.text, last)):
            last += 1
        return last

    def pack(self, start: int, borders: list[Border], rank: int) -> Iterator[Span]:
        """Yield cuts (stop, resume) of text[start:] up to the last border, at borders of this rank or better."""
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

    def windows(self, start: int, end: Border) -> Iterator[Span]:
        """Cut a long token at any place that does not separate a letter from its accents."""
        while start < end.stop:
            self.window = self.longest(start, range(start + 1, end.stop + 1), 0, self.window) or 1
            stop = start + self.window
            for back in range(stop, max(start, stop - 8), -1):
                if not _sticks(self.text, back) and (back == stop or self.fits(self.text[start:back])):
                    stop = back
                    break
            if (span := self.inside.span(stop)) and span[0] > start:
                stop = span[0]
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


def _borders(text: str, start: int, end: int) -> Iterator[Border]:
    """Yield every place where a paragraph may be cut, its end last; a full stop is a heuristic end of a sentence."""
    for match in MARKS.finditer(text, start, end):
        marks, space = match.group(1) or "", match.group(3) or ""
        if not marks:
            space = match.group()
        if match.end() == end:
            break
        if marks and marks[-1] in WIDE_STOPS:
            rank = SENTENCE
        elif marks and marks[-1] in WIDE_PAUSES:
            rank = CLAUSE
        elif not space:
            continue
        elif marks and marks[-1] in STOPS:
            following = text[match.end() : match.end() + 4].lstrip(OPENERS)[:1]
            rank = SPACE if following.islower() else SENTENCE
        else:
            rank = CLAUSE if marks else SPACE
        yield Border(match.end() - len(space), match.end(), rank)
    yield Border(end, end, LINE)


def _sticks(text: str, at: int) -> bool:
    """Return whether a cut before text[at] would separate a letter from its accents or an emoji from its joiner."""
    return at < len(text) and (unicodedata.category(text[at]).startswith("M") or "\u200d" in text[at - 1 : at + 1])
