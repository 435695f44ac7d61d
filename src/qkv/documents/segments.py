"""A segment: text to translate, and the inline markup around its words, which the translation gets back.

A reader of some format makes tokens of what stands between two boundaries; a segment shows their text to the model
without markup, and afterwards puts each mark where `qkv.documents.inline_markup` finds its words. A segment that is
translated to itself is what it was, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from qkv.core.errors import UsageError
from qkv.data.links import Link, word_spans
from qkv.documents.inline_markup import place_markup, strip_markup

SPACE = " \t\r\n\f"
TAG = re.compile(r"<(/?)x([0-9]+)(/?)>")
MARKS = 300  # of one segment
WORK = 1_000_000  # marks times characters, which is what placing the marks takes
PRIVATE = range(0xE000, 0xF900)  # characters without a meaning, one of which stands for "<" for a while


@dataclass(frozen=True)
class Token:
    """A part of a document: text as it reads, or a mark as it is written.

    `kind` is text, open, close (of the same `name`), alone (a mark that holds its own content) or boundary. A mark that
    stands alone may read as a space.
    """

    kind: str
    raw: str
    text: str = ""
    name: str = ""


@dataclass(frozen=True)
class Writing:
    """How a format writes a text, and what it does with a segment at last."""

    spell: Callable[[str], str] = str
    lay_out: Callable[[str], str] = str


@dataclass(frozen=True)
class Segment:
    """`marked` is the text with a numbered tag for each mark, which is written as `marks` has it (opening, closing)."""

    raw: str
    marked: str
    marks: tuple[tuple[str, str], ...]
    less: str  # what stands for "<" in `marked`
    writing: Writing

    @cached_property
    def text(self) -> str:
        return strip_markup(self.marked).replace(self.less, "<")

    def build(self, translation: str, links: Iterable[Link] | None = None) -> str:
        """The translation as the format writes it; without an alignment, marks keep their place in the sentence."""
        text = self.text
        if translation == text:
            return self.raw
        translation = " ".join(translation.split("\n"))
        inner = self.raw.strip(SPACE)
        begin = self.raw.index(inner)
        before, after = self.raw[:begin], self.raw[begin + len(inner) :]
        if not self.marks:
            return before + self.writing.lay_out(self.writing.spell(translation)) + after
        less = _unused(translation + self.marked.replace(self.less, ""))
        marked, translated = self.marked.replace(self.less, less), translation.replace("<", less)
        placed = place_markup(marked, translated, diagonal(text, translation) if links is None else links)
        return before + self.writing.lay_out("".join(self._spelt(placed, less))) + after

    def _spelt(self, placed: str, less: str) -> Iterator[str]:
        done = 0
        for tag in TAG.finditer(placed):
            yield self.writing.spell(placed[done : tag.start()].replace(less, "<"))
            yield self.marks[int(tag[2])][bool(tag[1])]
            done = tag.end()
        yield self.writing.spell(placed[done:].replace(less, "<"))


def _unused(text: str) -> str:
    """A character that the text has not."""
    found = next((chr(code) for code in PRIVATE if chr(code) not in text), None)
    if found is None:
        raise UsageError("a sentence has every private character of Unicode: send text")
    return found


def diagonal(source: str, target: str) -> list[Link]:
    """Words linked by their place alone: as far along in the one as in the other."""
    given, written = len(word_spans(source)), len(word_spans(target))
    if not given or not written:
        return []
    longest = max(given, written)
    middles = range(1, 2 * longest, 2)
    return sorted({(middle * given // (2 * longest), middle * written // (2 * longest)) for middle in middles})


def segment(tokens: Sequence[Token], writing: Writing, raw: str | None = None) -> Segment | None:
    """The segment of balanced tokens; none, if they have no word. `raw` is all that it stands for, if it is more."""
    written = "".join(token.raw for token in tokens)
    less = _unused(written + "".join(token.text for token in tokens))
    parts: list[str] = []
    marks: list[tuple[str, str]] = []
    opened: list[int] = []
    plain = ""
    for number, token in enumerate(tokens):
        if token.kind == "text":
            text = re.sub(f"[{SPACE}]+", " ", token.text)
            text = text.lstrip(" ") if not plain or plain.endswith(" ") else text
            plain += text
            parts.append(text.replace("<", less))
        elif token.kind == "open":
            opened.append(len(marks))
            marks.append((token.raw, ""))
            parts.append(f"<x{opened[-1]}>")
        elif token.kind == "close":
            mark = opened.pop()
            marks[mark] = (marks[mark][0], token.raw)
            parts.append(f"</x{mark}>")
        else:
            before, after = _spaces(tokens, number, parts, first=not plain)
            plain = plain[: len(plain) - len(before)]
            parts.append(f"<x{len(marks)}/>")
            marks.append((before + token.raw + after, ""))
            if token.text and plain:
                plain += " "
                parts.append(" ")
    if not any(character.isalnum() for character in plain):
        return None
    _strip_end(parts)
    return Segment(written if raw is None else raw, "".join(parts), tuple(marks), less, writing)


def _spaces(tokens: Sequence[Token], number: int, parts: list[str], first: bool) -> tuple[str, str]:
    """The space that a mark standing alone takes along, so that the text around it has one space and not two."""
    following = tokens[number + 1].text[:1] if number + 1 < len(tokens) else ""
    if first:
        return "", " " if following and following in SPACE else ""
    if not parts[-1].endswith(" ") or following.isalnum():
        return "", ""
    parts[-1] = parts[-1][:-1]
    return " ", ""


def _strip_end(parts: list[str]) -> None:
    """Take the space off the end of the text, which may stand before closing tags."""
    for place in range(len(parts) - 1, -1, -1):
        if not parts[place].startswith("<"):
            parts[place] = parts[place].rstrip(" ")
            if parts[place]:
                return


# ---- from tokens to segments -----------------------------------------------------------------------------------------


def segments(tokens: Iterable[Token], writing: Writing) -> Iterator[str | Segment]:
    """What is kept and what is translated, in order: together, as written, the tokens."""
    run: list[Token] = []
    for token in tokens:
        if token.kind != "boundary":
            run.append(token)
            continue
        yield from _run(run, writing)
        run = []
        yield token.raw
    yield from _run(run, writing)


def _run(run: list[Token], writing: Writing) -> Iterator[str | Segment]:
    """The segments between two boundaries; a tag without its counterpart there is one more boundary."""
    for part, balanced in _split(run, unmatched(run)):
        stray = crowded(part) or (not balanced and unmatched(part))
        # Tags that cross each other have no tree: then every tag is a boundary.
        crossing = {place for place, token in enumerate(part) if token.kind != "text"} if stray else set()
        for inner, _ in _split(part, crossing):
            yield from _peeled(inner, writing)


def crowded(tokens: Sequence[Token]) -> bool:
    """Whether there are more marks than can be placed in reasonable time."""
    marks = sum(token.kind != "text" for token in tokens)
    return marks > MARKS or marks * sum(len(token.text) for token in tokens) > WORK


def unmatched(tokens: Sequence[Token]) -> set[int]:
    """The places of tags that have no counterpart."""
    opened: list[int] = []
    stray: set[int] = set()
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close":
            if opened and tokens[opened[-1]].name == token.name:
                opened.pop()
            else:
                stray.add(place)
    return stray | set(opened)


def _split(tokens: list[Token], at: set[int]) -> Iterator[tuple[list[Token], bool]]:
    """The tokens between those at some places, which come alone; and whether they are known to be balanced."""
    part: list[Token] = []
    for place, token in enumerate(tokens):
        if place in at:
            yield part, False
            yield [Token("alone", token.raw)], True
            part = []
        else:
            part.append(token)
    yield part, not at


def _peeled(tokens: list[Token], writing: Writing) -> Iterator[str | Segment]:
    """One segment without the marks that stand outside of all its words."""
    begin, end = 0, len(tokens)
    closers = _closers(tokens)
    while begin < end:
        first, last = tokens[begin], tokens[end - 1]
        if first.kind == "alone" or (first.kind == "text" and not first.text.strip(SPACE)):
            begin += 1
        elif last.kind == "alone" or (last.kind == "text" and not last.text.strip(SPACE)):
            end -= 1
        elif first.kind == "open" and closers[begin] == end - 1:
            begin, end = begin + 1, end - 1
        else:
            break
    found = segment(tokens[begin:end], writing) if begin < end else None
    if found is None:
        begin = end = len(tokens)
    yield "".join(token.raw for token in tokens[:begin])
    if found is not None:
        yield found
    yield "".join(token.raw for token in tokens[end:])


def _closers(tokens: Sequence[Token]) -> dict[int, int]:
    """Where each opening tag of balanced tokens is closed."""
    opened: list[int] = []
    found: dict[int, int] = {}
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close" and opened:
            found[opened.pop()] = place
    return found
