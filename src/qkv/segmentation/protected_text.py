"""Protected text: stretches that must come back once and unchanged (URLs, placeholders, code, tags, formulas).

`find_protected` finds them in a text; a document's reader names further ones. `Protected` holds those of one piece: it
tells whether a translation has each of them, puts short words that the model copies in their places (`stand_in`), and
as a last resort puts the missing ones into a translation (`repair`).
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from qkv.core.errors import UsageError
from qkv.segmentation.sentences import WORD, Inside, Span

# Every protected text has one of these; a text without them is not searched further.
HINT = re.compile(r"[%{$&<@`]|://|www\.")

# The bounds on lengths keep the time linear.
PROTECTED = re.compile(
    r"""
      `[^`\r\n]{1,300}`                                                           # inline code
    | (?<![A-Za-z0-9])(?:(?:https?|ftp|file)://|www\.)[^\s<>"'`«»“”]{1,2000}        # URL
    | (?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}   # e-mail address
    | </?[A-Za-z][^<>\n]{0,300}>                                                  # tag
    | &(?:[A-Za-z][A-Za-z0-9]{1,31}|\#[0-9]{1,7}|\#[xX][0-9A-Fa-f]{1,6});          # entity
    | \$?\{\{?[\w.:!-]{0,60}\}?\}                                                 # {name}, {{name}}, ${name}, {}
    | (?<![\w%])%(?:\d{1,3}\$)?(?:\(\w{1,60}\)|\{\w{1,60}\})?[-+\#0]{0,4}\d{0,4}(?:\.\d{1,3})?
        (?:hh|ll|[hlLqjzt])?(?:[diouxXeEfFgGcrsap@](?![A-Za-z])|(?<=\})|(?<=%[1-9]))   # %s, %(name)s, %1$d, %{name}, %1
    | \$(?![\s\d]|\{)[^$\n]{1,80}?(?<!\s)\$(?![\w])                               # $x$
    """,
    re.VERBOSE,
)
AFTER_URL = ".,;:!?…)]}’"  # marks of the sentence, not of the URL before them
PAIRS = {")": "(", "]": "[", "}": "{"}


def without_protected(text: str) -> str:
    """Return a text with one letter in place of each protected text, to measure its length."""
    return PROTECTED.sub("X", text) if HINT.search(text) else text


def find_protected(text: str, given: Iterable[Span] = ()) -> list[Span]:
    """Return the spans of protected text, in order and without overlap: those given, and those found between them."""
    spans = _united(text, given)
    if not HINT.search(text):
        return spans
    found = []
    for match in PROTECTED.finditer(text):
        begin, end = match.span()
        if "://" in match[0] or match[0].startswith("www."):
            end = _url_end(text, begin, end)
        found.append((begin, end))
    return _merged(spans, found)


def _url_end(text: str, begin: int, end: int) -> int:
    """Return where a URL ends without the marks after it; the closing bracket of a pair inside it is its own."""
    surplus = {mark: text.count(mark, begin, end) - text.count(opening, begin, end) for mark, opening in PAIRS.items()}
    while (last := text[end - 1]) in AFTER_URL and surplus.get(last, 1) > 0:
        if last in surplus:
            surplus[last] -= 1
        end -= 1
    return end


def _united(text: str, given: Iterable[Span]) -> list[Span]:
    """Return given spans in order, without white space at their ends; those that overlap become one."""
    united: list[Span] = []
    try:
        spans = sorted((operator.index(begin), operator.index(end)) for begin, end in given)
    except (TypeError, ValueError):
        raise UsageError("protected: not spans of characters: give pairs (begin, end) of numbers") from None
    for begin, end in spans:
        if not 0 <= begin <= end <= len(text):
            raise UsageError(
                f"protected span ({begin}, {end}): not inside the text of {len(text)} characters: correct it"
            )
        part = text[begin:end]
        begin, end = end - len(part.lstrip()), begin + len(part.rstrip())
        if begin >= end:
            continue
        if united and begin < united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


def _merged(given: Sequence[Span], found: Sequence[Span]) -> list[Span]:
    """Return all given spans, and the found ones that overlap none of them."""
    merged, at = [], 0
    for span in found:
        while at < len(given) and given[at][1] <= span[0]:
            merged.append(given[at])
            at += 1
        if at == len(given) or span[1] <= given[at][0]:
            merged.append(span)
    return [*merged, *given[at:]]


@dataclass(frozen=True)
class Protected:
    """The protected texts of a piece, with their spans in it."""

    text: str
    spans: tuple[Span, ...]

    @property
    def texts(self) -> list[str]:
        return [self.text[begin:end] for begin, end in self.spans]

    @cached_property
    def joined(self) -> list[tuple[bool, bool]]:
        """Whether a letter or digit stands directly before and after each protected text."""
        return [
            (self.text[max(0, begin - 1) : begin].isalnum(), self.text[end : end + 1].isalnum())
            for begin, end in self.spans
        ]

    @cached_property
    def wanted(self) -> dict[str, tuple[int, int]]:
        """How often each protected text may occur in a translation: at least as often as it is protected.

        At most as often as it is in the piece, where the same text may also stand unprotected.
        """
        there = self._places(self.text)
        ranges = {}
        for text, count in Counter(self.texts).items():
            present = len(there[text])
            ranges[text] = min(count, present), max(count, present)
        return ranges

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """A pattern of the protected texts, the longest first: `http://a.b` may be part of `http://a.b/c`.

        A text that always stands alone is found only without letters and digits beside it: `Tom`, but not in `Toms`.
        """
        alone: dict[str, bool] = {}
        for text, sides in zip(self.texts, self.joined, strict=True):
            alone[text] = alone.get(text, True) and not any(sides)
        longest_first = sorted(alone, key=len, reverse=True)
        return re.compile("|".join(_alone(t) if alone[t] else re.escape(t) for t in longest_first) or "(?!)")

    def _places(self, translation: str) -> dict[str, list[Span]]:
        """Return where each protected text occurs in a translation."""
        places: dict[str, list[Span]] = {text: [] for text in self.texts}
        for match in self._pattern.finditer(translation):
            places[match[0]].append(match.span())
        return places

    def missing(self, translation: str) -> list[str]:
        """Return the protected texts that do not occur as often as in the piece, each once."""
        places = self._places(translation)
        return [text for text, (least, most) in self.wanted.items() if not least <= len(places[text]) <= most]

    @cached_property
    def words_around(self) -> bool:
        """Whether the piece has a letter or digit outside its protected texts."""
        edges = [0, *(edge for span in self.spans for edge in span), len(self.text)]
        return any(WORD.search(self.text, edges[i], edges[i + 1]) for i in range(0, len(edges), 2))

    def stand_in(self, words: Sequence[str]) -> tuple[str, list[str]] | None:
        """Return the piece with a word in place of each protected text, and these words; None if too few are left.

        A word that occurs in the piece is not used. Between a word and the letters beside it comes a space.
        """
        plain = self.text.lower()
        free = [word for word in words if word.lower() not in plain]
        if len(free) < len(self.spans):
            return None
        parts, at = [], 0
        for (begin, end), (before, after), word in zip(self.spans, self.joined, free, strict=False):
            parts += [self.text[at:begin], " " * before, word, " " * after]
            at = end
        return "".join([*parts, self.text[at:]]), free[: len(self.spans)]

    def put_back(self, translation: str, words: Sequence[str]) -> str | None:
        """Return a translation with the protected texts in place of their stand-ins; None if one is not there once."""
        found = [[match.span() for match in re.finditer(_alone(word), translation)] for word in words]
        if any(len(places) != 1 for places in found):
            return None
        order = sorted(zip((places[0] for places in found), self.texts, self.joined, strict=True), reverse=True)
        for (begin, end), text, (before, after) in order:
            head, tail = translation[:begin], translation[end:]
            head, tail = head.removesuffix(" ") if before else head, tail.removeprefix(" ") if after else tail
            translation = f"{head}{text}{tail}"
        return translation

    def repair(self, translation: str) -> str:
        """Return a translation with each protected text as often as in the piece.

        A superfluous one is removed; a missing one goes between two words, near its relative place in the piece.
        """
        while extra := self._superfluous(translation):
            for begin, end in reversed(extra):
                before, after = translation[:begin], translation[end:]
                translation = (before.rstrip(" ") if after[:1] in ("", " ") else before) + after
        places = self._places(translation)
        inserts: dict[int, list[str]] = {}  # by the border of two words
        borders = self._borders(translation, [span for spans in places.values() for span in spans])
        for text, (least, _) in self.wanted.items():
            begins = [begin for begin, end in self.spans if self.text[begin:end] == text]
            for begin in begins[len(places[text]) : least]:
                place = len(translation) * begin // len(self.text)
                inserts.setdefault(min(borders, key=lambda border: abs(border - place)), []).append(text)
        parts, at = [], 0
        for border, texts in sorted(inserts.items()):
            parts += [translation[at:border].strip(" "), *texts]
            at = border
        return " ".join(filter(None, [*parts, translation[at:].strip(" ")])) if inserts else translation

    def _superfluous(self, translation: str) -> list[Span]:
        """Return the spans of protected texts that occur more often than in the piece."""
        places = self._places(translation)
        return sorted(span for text, (_, most) in self.wanted.items() for span in places[text][most:])

    @staticmethod
    def _borders(translation: str, taken: Sequence[Span]) -> list[int]:
        """Return the borders of words, but not those inside one of some spans."""
        inside = Inside(taken)
        return [0, *(m.start() for m in re.finditer(" ", translation) if not inside(m.start())), len(translation)]


def _alone(text: str) -> str:
    """Return a pattern of a text without letters and digits beside it."""
    return rf"(?<![^\W_]){re.escape(text)}(?![^\W_])"
