"""Segments: a text to translate and the inline markup around its words, which is put back into the translation.

A format's reader turns a document into tokens. The tokens between two boundaries become a segment: its `text` has no
markup, and `build` places the markup in the translation (see `qkv.documents.inline_markup`). Protected text, such as
inline code, is part of `text`; `build` writes its source where the translation repeats it. If the translation equals
the text, the segment is written back byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from qkv.core.errors import UsageError
from qkv.data.alignments import Link
from qkv.documents.inline_markup import Atoms, Span, match_protected, place_markup, split_at, strip_markup

WHITE_SPACE = " \t\r\n\f"
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r|$)")
NUMBERED_TAG = re.compile(r"<(/?)x([0-9]+)(/?)>")
MAX_MARKS = 300  # in one segment
MAX_PLACEMENT_COST = 1_000_000  # marks times characters: the time to place marks grows with this product
PRIVATE_USE = range(0xE000, 0xF900)  # Unicode characters without a meaning; one of them temporarily replaces "<"


@dataclass(frozen=True)
class Token:
    """A piece of a document: text, or a mark (a tag, emphasis, an image …).

    `kind` is text, protected (text that must not change), open, close (paired by `name`), standalone (a mark with its
    own content) or boundary (between segments). `raw` is the source, `text` its plain reading; a standalone mark may
    read as a space. `written` is the mark of a translation, if it is not the source.
    """

    kind: str
    raw: str
    text: str = ""
    name: str = ""
    written: str = ""


@dataclass(frozen=True)
class TextFormat:
    """How a format writes text: `escape` for the text between inline marks, `lay_out` for the finished segment."""

    escape: Callable[[str], str] = str
    lay_out: Callable[[str], str] = str


@dataclass(frozen=True)
class Segment:
    """Text with a numbered tag for each mark: `tagged` is "a <x0>b</x0>", `marks[0]` its source (opening, closing).

    A protected text is an element too: its mark is (source, "").
    """

    raw: str
    tagged: str
    marks: tuple[tuple[str, str], ...]
    less_than: str  # replaces "<" of the text in `tagged`
    format: TextFormat
    protected: tuple[Span, ...] = ()  # spans of `text` that must come back unchanged
    protected_marks: tuple[int, ...] = ()  # the mark of each protected span

    @cached_property
    def text(self) -> str:
        return strip_markup(self.tagged).replace(self.less_than, "<")

    @property
    def needs_alignment(self) -> bool:
        """Whether `build` uses an alignment; protected text alone is found by its characters."""
        return len(self.marks) > len(self.protected)

    def build(self, translation: str, links: Iterable[Link] | None = None) -> str:
        """Return the translation as the format writes it, with the marks placed by the alignment.

        Without an alignment, marks keep their relative position in the sentence.
        """
        if translation == self.text:
            return self.raw
        translation = " ".join(translation.split("\n"))
        inner = self.raw.strip(WHITE_SPACE)
        begin = self.raw.index(inner)
        before, after = self.raw[:begin], self.raw[begin + len(inner) :]
        if not self.marks:
            return before + self.format.lay_out(self.format.escape(translation)) + after
        less_than, atom = unused_characters(translation + self.tagged.replace(self.less_than, ""), 2)
        links = None if links is None else list(links)
        pairs = match_protected(self.text, self.protected, translation, links)
        matched = {number for number, _ in pairs}
        tagged = self._with_atoms(less_than, atom, matched)
        if self.protected:
            atoms = Atoms(self.text, translation, strip_markup(tagged), self.protected, pairs, atom)
            translation, links = atoms.masked, atoms.renumber(links)
        placed = place_markup(tagged, translation.replace("<", less_than), links)
        sources = iter([self.marks[self.protected_marks[number]][0] for number, _ in pairs])
        missing = self._missing_marks(matched)
        out: list[str] = []
        for stretch, tag in split_at(NUMBERED_TAG, placed):
            first, *others = (self.format.escape(text.replace(less_than, "<")) for text in stretch.split(atom))
            out += [first, *(next(sources) + text for text in others)]
            if tag:
                mark = int(tag[2])
                out.append(self.marks[mark][1] if tag[1] else missing.get(mark, self.marks[mark][0]))
        return before + self.format.lay_out("".join(out)) + after

    def _with_atoms(self, less_than: str, atom: str, matched: set[int]) -> str:
        """Return `tagged` with `atom` for each protected text, inside an element if the translation lacks the text."""
        tagged = self.tagged.replace(self.less_than, less_than)
        parts: list[str] = []
        done = 0
        for number, mark in enumerate(self.protected_marks):
            begin = tagged.index(f"<x{mark}>", done)
            parts.append(tagged[done:begin])
            closing = f"</x{mark}>"
            parts.append(atom if number in matched else f"<x{mark}>{atom}{closing}")
            done = tagged.index(closing, begin) + len(closing)
        return "".join(parts) + tagged[done:]

    def _missing_marks(self, matched: set[int]) -> dict[int, str]:
        """The sources, by mark, of the protected texts that a translation lacks, with a space to the nearest word."""
        missing: dict[int, str] = {}
        for number, (mark, (begin, end)) in enumerate(zip(self.protected_marks, self.protected, strict=True)):
            if number not in matched:
                source = self.marks[mark][0]
                spaced = self.text[begin - 1 if begin else end :][:1] == " "
                missing[mark] = source if not spaced else f" {source}" if begin else f"{source} "
        return missing


def unused_characters(text: str, count: int = 1) -> list[str]:
    """Return private-use characters that do not occur in the text."""
    used = set(text)
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in used), count))
    if len(unused) < count:
        raise UsageError("a sentence contains every private-use character of Unicode: remove some of them")
    return unused


def split_lines(text: str) -> list[str]:
    """Split into lines that keep their line ends (CR, LF or CRLF)."""
    return [line for line in LINE.findall(text) if line]


# ---- from tokens to segments -----------------------------------------------------------------------------------------


Cut = Callable[[list[Token]], Iterator[list[Token]]]


def split_segments(
    tokens: Iterable[Token], format: TextFormat, cut: Cut | None = None, fits: Callable[[str], bool] | None = None
) -> Iterator[str | Segment]:
    """Yield the document in order: kept source as `str`, text to translate as `Segment`.

    `cut` divides the balanced tokens between two boundaries further, for example into sentences. A segment with marks
    for whose text `fits` is false is divided at its marks.
    """
    run: list[Token] = []
    for token in tokens:
        if token.kind != "boundary":
            run.append(token)
            continue
        yield from _run_segments(run, format, cut, fits)
        run = []
        yield token.raw
    yield from _run_segments(run, format, cut, fits)


def _run_segments(
    run: list[Token], format: TextFormat, cut: Cut | None, fits: Callable[[str], bool] | None
) -> Iterator[str | Segment]:
    """The segments between two boundaries; a tag without a counterpart in the run is one more boundary."""
    for balanced in _split_at(run, unmatched_tags(run)):
        for part in cut(balanced) if cut else [balanced]:
            # Crossing tags form no tree: then every tag is a boundary.
            divided = too_many_marks(part) or bool(unmatched_tags(part))
            segments = [] if divided else list(_trim_outer_marks(part, format))
            if fits and not all(isinstance(s, str) or not s.needs_alignment or fits(s.text) for s in segments):
                divided = True
            if not divided:
                yield from segments
                continue
            for inner in _split_at(part, _marks(part, "protected")):
                for piece in _split_at(inner, _marks(inner)) if too_many_marks(inner) else [inner]:
                    yield from _trim_outer_marks(piece, format)


def _marks(tokens: Sequence[Token], *others: str) -> set[int]:
    """Positions of all marks, except those of `others`."""
    return {place for place, token in enumerate(tokens) if token.kind not in ("text", *others)}


def too_many_marks(tokens: Sequence[Token]) -> bool:
    """Whether placing the marks would take too long."""
    marks = sum(token.kind != "text" for token in tokens)
    return marks > MAX_MARKS or marks * sum(len(token.text) for token in tokens) > MAX_PLACEMENT_COST


def unmatched_tags(tokens: Sequence[Token]) -> set[int]:
    """Positions of opening and closing tags without a counterpart."""
    opened: list[int] = []
    unmatched: set[int] = set()
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close":
            if opened and tokens[opened[-1]].name == token.name:
                opened.pop()
            else:
                unmatched.add(place)
    return unmatched | set(opened)


def _split_at(tokens: list[Token], positions: set[int]) -> Iterator[list[Token]]:
    """Split at some positions; the token at each position becomes a separate part."""
    part: list[Token] = []
    for place, token in enumerate(tokens):
        if place in positions:
            yield part
            yield [Token("standalone", token.raw)]
            part = []
        else:
            part.append(token)
    yield part


def _trim_outer_marks(tokens: list[Token], format: TextFormat) -> Iterator[str | Segment]:
    """Yield one segment, after moving marks that enclose all its words out of it."""
    begin, end = 0, len(tokens)
    opened: list[int] = []
    closing: dict[int, int] = {}  # position of each opening tag's closing tag
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close" and opened:
            closing[opened.pop()] = place
    while begin < end:
        first, last = tokens[begin], tokens[end - 1]
        if first.kind == "standalone" or (first.kind == "text" and not first.text.strip(WHITE_SPACE)):
            begin += 1
        elif last.kind == "standalone" or (last.kind == "text" and not last.text.strip(WHITE_SPACE)):
            end -= 1
        elif first.kind == "open" and closing[begin] == end - 1:
            begin, end = begin + 1, end - 1
        else:
            break
    segment = make_segment(tokens[begin:end], format) if begin < end else None
    if segment is None:
        begin = end = len(tokens)
    yield "".join(token.raw for token in tokens[:begin])
    if segment is not None:
        yield segment
    yield "".join(token.raw for token in tokens[end:])


def make_segment(tokens: Sequence[Token], format: TextFormat, raw: str | None = None) -> Segment | None:
    """Make a segment of balanced tokens, or None if they contain no word; `raw` overrides its source."""
    source = "".join(token.raw for token in tokens)
    (less_than,) = unused_characters(source + "".join(token.text for token in tokens))
    parts: list[str] = []
    marks: list[tuple[str, str]] = []
    opened: list[int] = []
    protected: dict[int, Span] = {}  # by mark
    plain, has_word = "", False
    for number, token in enumerate(tokens):
        text = re.sub(f"[{WHITE_SPACE}]+", " ", token.text)
        if token.kind == "text":
            text = text.lstrip(" ") if not plain or plain.endswith(" ") else text
            plain += text
            has_word = has_word or any(character.isalnum() for character in text)
            parts.append(text.replace("<", less_than))
        elif token.kind == "protected" and (text := text.strip(" ")):
            protected[len(marks)] = len(plain), len(plain) + len(text)
            plain += text
            parts += [f"<x{len(marks)}>", text.replace("<", less_than), f"</x{len(marks)}>"]
            marks.append((token.raw, ""))
        elif token.kind == "open":
            opened.append(len(marks))
            marks.append((token.raw, ""))
            parts.append(f"<x{opened[-1]}>")
        elif token.kind == "close":
            mark = opened.pop()
            marks[mark] = (marks[mark][0], token.written or token.raw)
            parts.append(f"</x{mark}>")
        else:
            before, after = _absorbed_spaces(tokens, number, parts, first=not plain)
            plain = plain[: len(plain) - len(before)]
            parts.append(f"<x{len(marks)}/>")
            marks.append((before + token.raw + after, ""))
            if token.text and plain:
                plain += " "
                parts.append(" ")
    if not has_word:
        return None
    for place in range(len(parts) - 1, -1, -1):  # strip the end of the text, which closing tags may follow
        if not parts[place].startswith("<"):
            parts[place] = parts[place].rstrip(" ")
            if parts[place]:
                break
    source = source if raw is None else raw
    return Segment(source, "".join(parts), tuple(marks), less_than, format, tuple(protected.values()), tuple(protected))


def _absorbed_spaces(tokens: Sequence[Token], number: int, parts: list[str], first: bool) -> tuple[str, str]:
    """Spaces that become part of a standalone mark, so that the text around it has one space instead of two."""
    following = tokens[number + 1].text[:1] if number + 1 < len(tokens) else ""
    if first:
        return "", " " if following and following in WHITE_SPACE else ""
    if not parts[-1].endswith(" ") or following.isalnum():
        return "", ""
    parts[-1] = parts[-1][:-1]
    return " ", ""
