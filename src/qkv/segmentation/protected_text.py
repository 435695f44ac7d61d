"""Protected text: stretches that must come back once and unchanged (URLs, placeholders, code, tags, formulas).

`find_protected` finds them in a text; a document's reader names further ones. `Protected` holds those of one piece: it
tells whether a translation has each of them, puts short words that the model copies in their places (`stand_in`), and
as a last resort puts the missing ones into a translation (`repair`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from qkv.segmentation.sentences import Span

# Every protected text has one of these; a text without them is not searched further.
HINT = re.compile(r"[%{$&<@`]|://|www\.")

# The bounds on lengths keep the time linear.
PROTECTED = re.compile(
    r"""
      `[^`\n]{1,300}`                                                             # inline code
    | (?<![A-Za-z0-9])(?:(?:https?|ftp|file)://|www\.)[^\s<>"'`«»“”]{1,2000}        # URL
    | (?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}   # e-mail address
    | </?[A-Za-z][^<>\n]{0,300}>                                                  # tag
    | &(?:[A-Za-z][A-Za-z0-9]{1,31}|\#[0-9]{1,7}|\#[xX][0-9A-Fa-f]{1,6});          # entity
    | \$?\{\{?[\w.:!-]{0,60}\}?\}                                                 # {name}, {{name}}, ${name}, {}
    | (?<![\w%])%(?:\d{1,2}\$)?(?:\(\w{1,60}\)|\{\w{1,60}\})?[-+\#0]{0,4}\d{0,4}(?:\.\d{1,3})?
        (?:hh|ll|[hlLqjzt])?(?:[diouxXeEfFgGcrsap@](?![A-Za-z])|(?<=\})|(?<=%[1-9]))   # %s, %(name)s, %1$d, %{name}, %1
    | \$(?![\s\d]|\{)[^$\n]{1,80}?(?<!\s)\$(?![\w])                               # $x$
    """,
    re.VERBOSE,
)
AFTER_URL = ".,;:!?…)]}’"  # marks of the sentence, not of the URL before them


def without_protected(text: str) -> str:
    """Return a text with one letter in place of each protected text, to measure its length."""
    return PROTECTED.sub("X", text) if HINT.search(text) else text


def find_protected(text: str, given: Iterable[Span] = ()) -> list[Span]:
    """Return the spans of protected text, in order and without overlap: those given, and those found between them."""
    spans = sorted((begin, end) for begin, end in given if begin < end)
    if HINT.search(text):
        taken, spans = spans, []
        for match in PROTECTED.finditer(text):
            begin, end = match.span()
            if "://" in match[0] or match[0].startswith("www."):
                while text[end - 1] in AFTER_URL and not (text[end - 1] == ")" and "(" in text[begin:end]):
                    end -= 1
            spans.append((begin, end))
        spans = _merged(taken, spans)
    return spans


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
    def wanted(self) -> list[tuple[str, int, bool]]:
        """Each protected text once, with how often it is there, and whether it stands alone."""
        alone: dict[str, bool] = {}
        for text, sides in zip(self.texts, self.joined, strict=True):
            alone[text] = alone.get(text, True) and not any(sides)
        return [(text, count, alone[text]) for text, count in Counter(self.texts).items()]

    def missing(self, translation: str) -> list[str]:
        """Return the protected texts that do not occur exactly as often as in the piece, each once."""
        return [text for text, count, alone in self.wanted if len(_places(translation, text, alone)) != count]

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
        if any(len(_places(translation, word)) != 1 for word in words):
            return None
        for word, text, (before, after) in zip(words, self.texts, self.joined, strict=True):
            (begin,) = _places(translation, word) or (-1,)
            if begin < 0:  # an earlier text has the word too
                return None
            head, tail = translation[:begin], translation[begin + len(word) :]
            head, tail = head.removesuffix(" ") if before else head, tail.removeprefix(" ") if after else tail
            translation = f"{head}{text}{tail}"
        return translation

    def repair(self, translation: str) -> str:
        """Return a translation with each protected text as often as in the piece.

        A superfluous one is removed; a missing one goes between two words, near its relative place in the piece.
        """
        for text, count, alone in self.wanted:
            if len(_places(translation, text, alone)) == count:
                continue
            begins = [begin for begin, end in self.spans if self.text[begin:end] == text]
            places = _places(translation, text, alone=False)
            for place in reversed(places[len(begins) :]):
                before, after = translation[:place], translation[place + len(text) :]
                translation = (before.rstrip(" ") if after[:1] in ("", " ") else before) + after
            for begin in begins[len(places) :]:
                translation = _insert(translation, text, len(translation) * begin // len(self.text))
        return translation


def _insert(translation: str, text: str, place: int) -> str:
    """Return the translation with a text, between spaces, at the border of two words nearest to a place."""
    borders = [0, *(match.start() for match in re.finditer(" ", translation)), len(translation)]
    at = min(borders, key=lambda border: abs(border - place))
    return " ".join(part for part in (translation[:at].rstrip(" "), text, translation[at:].lstrip(" ")) if part)


def _places(text: str, wanted: str, alone: bool = True) -> list[int]:
    """Return where a text occurs; `alone`: without letters and digits beside it (`Tom` is not in `Toms`)."""
    places, at = [], text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not alone or not (text[end : end + 1].isalnum() or text[max(0, at - 1) : at].isalnum()):
            places.append(at)
        at = text.find(wanted, end)
    return places
