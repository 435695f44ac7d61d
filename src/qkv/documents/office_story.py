"""The paragraphs of XML parts: found, cut into segments, and written back with the rest of the part to the byte.

A story is read in two steps. A format's `read_items` turns the events of one paragraph into items: text with a style,
marks, and containers (a hyperlink) with an opening and a closing item. `Paragraph` makes segments of them: the style of
most characters is the base, text in another style is enclosed in a mark. Paragraphs may be nested: the text box in a
paragraph is part of one of its marks, and its own paragraphs are segments too.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import ClassVar

from qkv.documents import Document
from qkv.documents.inline_markup import split_at
from qkv.documents.segments import (
    NUMBERED_TAG,
    WHITE_SPACE,
    Segment,
    TextFormat,
    Token,
    make_segment,
    too_many_marks,
)
from qkv.documents.xml_events import Event, XmlPart, escape_xml, unescape_xml
from qkv.documents.zip_package import ZipPackage

MAX_NESTING = 16  # paragraphs inside each other; deeper ones are kept
NESTED = re.compile("\0([0-9]+)\0")  # stands for a nested paragraph; XML has no NUL
AS_XML = TextFormat(escape_xml)  # the built text keeps its numbered tags, which `Paragraph` replaces

ROOT = -1
MARKS = ("mark", "character")
NEVER_OUTER = ("open", "close", "protected")
MAX_PROTECTED = 80  # characters; a longer text is a mark
CLOSING_PUNCTUATION = ".,;:!?)]}»”’…、。，！？；："


@dataclass(frozen=True, slots=True)
class Style:
    """The XML before and after a text; texts with an equal `key` look alike."""

    key: object = None
    before: str = ""
    after: str = ""
    prefix: str = ""  # of the namespace, as the part writes it


PLAIN = Style()
Built = Mapping[int, str | None]  # number of a segment: its new text with numbered tags, or None if unchanged
Bases = Mapping[int, Style]  # place of an opening item, or ROOT: the style of text without a mark in it
WriteText = Callable[[Style, str], str]


@dataclass(slots=True)
class Item:
    """A piece of a paragraph.

    `kind` is text, protected (a field's text, which is part of the sentence but must not change), character (a tab:
    written like text, but not translated), mark, open, close (of a container) or dropped (kept only while the
    paragraph is unchanged). `source` is XML that is valid by itself, but for open and
    close; `text` is what the reader of the document sees. `pair` is shared by a start mark and its end mark, whose
    order must not change. `field` says which edge of a field a mark is, or that a container is one.
    """

    kind: str
    source: str
    text: str = ""
    style: Style = PLAIN
    pair: str = ""
    field: str = ""


class KeptError(Exception):
    """A paragraph cannot be translated; the text names the reason in `Document.skipped`."""


@dataclass(slots=True)
class Paragraph:
    """The source of a paragraph's content, and the plan to write it: XML, or a segment's number and styles."""

    number: int
    source: str
    items: Sequence[Item] = ()
    plan: list[str | tuple[int, Bases]] = dataclass_field(default_factory=list)
    segments: dict[int, str] = dataclass_field(default_factory=dict)  # number: its own text with numbered tags

    def write(self, built: Built, write_text: WriteText) -> str:
        if all(built.get(number) is None for number in self.segments):
            return self.source
        out = []
        for piece in self.plan:
            if isinstance(piece, str):
                out.append(piece)
            else:
                text = built.get(piece[0])
                text = self.segments[piece[0]] if text is None else text
                out.append(_write_items(text, self.items, piece[1], write_text))
        return "".join(out)


class Story(ABC):
    """Reads and writes the paragraphs of one part."""

    paragraphs: ClassVar[frozenset[str]] = frozenset()
    kept: ClassVar[Mapping[str, str]] = {}  # element that is kept with its content: name in `Document.skipped`

    def __init__(self, part: XmlPart, segments: list[Segment], skipped: Counter[str]) -> None:
        self.part, self.segments, self.skipped = part, segments, skipped
        self.first_segment = len(segments)
        self.found: list[Paragraph] = []
        self.pieces: list[tuple[int, int] | Paragraph] = []  # bytes of the part that are kept, or a paragraph
        self._branches: list[tuple[str, dict[str, Paragraph]]] = []  # of mc:AlternateContent
        self._read()
        self.last_segment = len(segments)

    @abstractmethod
    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        """Turn the content of a paragraph element into items; `level` is the number of paragraphs around it."""

    @abstractmethod
    def write_text(self, style: Style, text: str) -> str:
        """Write text in a style as XML."""

    def write(self, built: Built) -> bytes | None:
        """Return the part with new texts, or None if all its segments are unchanged."""
        if all(built.get(number) is None for number in range(self.first_segment, self.last_segment)):
            return None
        out = bytearray()
        for piece in self.pieces:
            if isinstance(piece, Paragraph):
                out += self._expand(piece, built).encode()
            else:
                out += memoryview(self.part.data)[slice(*piece)]
        return self.part.encode(bytes(out))

    def _expand(self, paragraph: Paragraph, built: Built) -> str:
        text = paragraph.write(built, self.write_text)
        return NESTED.sub(lambda match: self._expand(self.found[int(match[1])], built), text)

    # ---- finding paragraphs ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        frames: list[list[Event]] = []  # the content of each open paragraph
        depth = 0  # of open paragraphs inside a kept element or too deep
        kept = 0  # nesting depth inside a kept element
        begin = 0  # of the bytes to keep
        for event in self.part.events():
            if event.kind == "start":
                self._enter(event, kept)
                kept += bool(kept) or event.name in self.kept
            ends = event.kind == "end" and event.name in self.paragraphs
            if ends and depth:
                depth -= 1
            elif ends:
                paragraph = self._paragraph(event.name, frames.pop(), len(frames))
                if frames:
                    frames[-1].append(Event("other", "", {}, "", 0, source=f"\0{paragraph.number}\0"))
                else:
                    self.pieces.append(paragraph)
                    begin = event.begin
            if frames:
                event.source = self.part.source(event.begin, event.end)
                frames[-1].append(event)
            if event.kind == "start" and event.name in self.paragraphs:
                if kept or len(frames) == MAX_NESTING:
                    depth += 1
                else:
                    if not frames:
                        self.pieces.append((begin, event.end))
                    frames.append([])
            elif event.kind == "end":
                self._leave(event)
                kept -= bool(kept)
        self.pieces.append((begin, len(self.part.data)))

    def _enter(self, event: Event, kept: int) -> None:
        if not kept and (label := self.kept.get(event.name)):
            self.skipped[label] += 1
        if event.name == "mc:AlternateContent":
            self._branches.append(("", {}))
        elif event.name in ("mc:Choice", "mc:Fallback") and self._branches:
            self._branches[-1] = (event.name, self._branches[-1][1])

    def _leave(self, event: Event) -> None:
        if event.name == "mc:AlternateContent" and self._branches:
            self._branches.pop()

    def _paragraph(self, name: str, events: list[Event], level: int) -> Paragraph:
        """Make segments of a paragraph; the branches of an mc:AlternateContent share equal paragraphs."""
        source = "".join(event.source for event in events)
        branch, paragraphs = self._branches[-1] if self._branches else ("", {})
        if branch == "mc:Fallback" and source in paragraphs:
            return paragraphs[source]
        paragraph = Paragraph(len(self.found), source)
        self.found.append(paragraph)
        if branch == "mc:Choice":
            paragraphs.setdefault(source, paragraph)
        try:
            paragraph.items = self.read_items(name, events, level)
            paragraph.plan = [*self._plan(paragraph)]
            if not paragraph.segments:
                paragraph.items, paragraph.plan = (), []
        except KeptError as error:
            text = "".join(event.text for event in events)
            self.skipped[str(error)] += any(character.isalnum() for character in text)
            self.skipped += Counter()  # without zeros
        return paragraph

    # ---- from items to segments --------------------------------------------------------------------------------------

    def _plan(self, paragraph: Paragraph) -> Iterator[str | tuple[int, Bases]]:
        items = paragraph.items
        closing = _closing_items(items)
        begin, end = _trim(items, closing)
        bases = _base_styles(items[begin:end], begin)
        tokens = [*_tokens(items, begin, end, bases)]
        yield _sources(items[:begin])
        if too_many_marks(tokens):  # each text is a segment
            for item in items[begin:end]:
                token = Token("text", escape_xml(item.text), item.text)
                segment = make_segment([token], AS_XML) if item.kind == "text" else None
                yield self._add(paragraph, segment, {ROOT: item.style}) if segment else item.source
        else:
            segment = make_segment(tokens, AS_XML)
            yield self._add(paragraph, segment, bases) if segment else _sources(items[begin:end])
        yield _sources(items[end:])

    def _add(self, paragraph: Paragraph, segment: Segment, bases: Bases) -> tuple[int, Bases]:
        number = len(self.segments)
        self.segments.append(segment)
        paragraph.segments[number] = segment.raw
        return number, bases


def kept_item(source: str, text: str) -> Item:
    """Something that is not translated, with the text that it shows."""
    shown = " ".join(text.split())
    if shown and len(shown) <= MAX_PROTECTED:
        return Item("protected", source, shown)
    return Item("mark", source)


def _sources(items: Sequence[Item]) -> str:
    return "".join(item.source for item in items)


def _closing_items(items: Sequence[Item]) -> dict[int, int]:
    """The place of each opening item's closing item; containers that are not nested make the paragraph a kept one."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for place, item in enumerate(items):
        if item.kind == "open":
            opened.append(place)
        elif item.kind == "close":
            if not opened or items[opened[-1]].field != item.field:
                raise KeptError("field")
            closing[opened.pop()] = place
    if opened:
        raise KeptError("field")
    return closing


def _trim(items: Sequence[Item], closing: Mapping[int, int]) -> tuple[int, int]:
    """The range of items without outer marks and without containers around all its words."""
    begin, end = 0, len(items)
    while begin < end:
        first, last = items[begin], items[end - 1]
        if first.kind not in NEVER_OUTER and not (first.kind == "text" and first.text.strip(WHITE_SPACE)):
            begin += 1
        elif last.kind not in NEVER_OUTER and not (last.kind == "text" and last.text.strip(WHITE_SPACE)):
            end -= 1
        elif first.kind == "open" and closing[begin] == end - 1:
            begin, end = begin + 1, end - 1
        else:
            break
    return begin, end


def _base_styles(items: Sequence[Item], begin: int) -> dict[int, Style]:
    """The style of most characters in each container, by the place of its opening item, and outside of them."""
    lengths: dict[int, Counter[object]] = defaultdict(Counter)
    styles: dict[tuple[int, object], Style] = {}
    opened, first = [ROOT], PLAIN
    for place, item in enumerate(items, begin):
        if item.kind == "open":
            opened.append(place)
        elif item.kind == "close":
            opened.pop()
        elif item.kind == "text":
            first = item.style if first is PLAIN else first
            lengths[opened[-1]][item.style.key] += len(item.text)
            styles.setdefault((opened[-1], item.style.key), item.style)
    bases = {place: styles[place, max(counts, key=counts.__getitem__)] for place, counts in lengths.items()}
    return {ROOT: first} | bases


def _tokens(items: Sequence[Item], begin: int, end: int, bases: Bases) -> Iterator[Token]:
    """The range as tokens; the source of a mark is a numbered tag with the place of its item.

    Adjacent marks, and the white space before them, read as one space; but not before a comma or full stop.
    """
    opened = [ROOT]
    marks: list[str] = []
    held = reads = False  # whether the marks follow white space; whether they read as a space
    after_space = False  # whether the text before them ends with a space
    shown = [place for place in range(begin, end) if items[place].kind != "dropped"]
    for place, following in zip(shown, [*shown[1:], end], strict=False):
        item = items[place]
        next_kind, next_text = (items[following].kind, items[following].text) if following < end else ("", "")
        if item.kind in MARKS:
            reads = reads or held or bool(item.text and not after_space)
            marks.append(f"<x{place}/>")
            if next_kind in MARKS:
                continue
            if held and next_kind == "text" and next_text[0] in CLOSING_PUNCTUATION:
                marks[0], reads = " " + marks[0], False
            yield from [Token("standalone", mark) for mark in marks[:-1]]
            yield Token("standalone", marks[-1], " " if reads else "")
            after_space = after_space or reads
            marks, held, reads = [], False, False
        elif item.kind == "open":
            opened.append(place)
            yield Token("open", f"<x{place}>")
        elif item.kind == "close":
            yield Token("close", f"</x{opened.pop()}>")
        elif item.kind == "protected":
            yield Token("protected", f"<x{place}/>", item.text)
            after_space = False
        elif item.style.key != bases[opened[-1]].key:
            token = Token("text", escape_xml(item.text), item.text)
            yield from (Token("open", f"<x{place}>"), token, Token("close", f"</x{place}>"))
            after_space = item.text[-1] in WHITE_SPACE
        else:
            text = item.text.rstrip(WHITE_SPACE) if next_kind in MARKS else item.text
            held = text != item.text
            yield Token("text", escape_xml(text), text)
            after_space = not held and text[-1] in WHITE_SPACE


# ---- writing ---------------------------------------------------------------------------------------------------------


def _write_items(built: str, items: Sequence[Item], bases: Bases, write_text: WriteText) -> str:
    """Replace the numbered tags of a built text by the sources of their items, and write its text in their styles."""
    out: list[str] = []
    texts: list[str] = []  # of the current style, not yet written
    styles = [bases[ROOT]]
    opened: list[int] = []
    swapped = _swapped_marks(built, items)

    def flush() -> None:
        if texts:
            out.append(write_text(styles[-1], "".join(texts)))
            texts.clear()

    for stretch, tag in split_at(NUMBERED_TAG, built):
        if stretch:
            texts.append(unescape_xml(stretch))
        if tag is None:
            break
        place = int(tag[2])
        place = swapped.get(place, place)
        item = items[place]
        if item.kind == "character":
            texts.append(item.text)
            continue
        flush()
        if tag[3]:
            out.append(item.source)
        elif tag[1]:
            styles.pop()
            out.append(_closing_source(items, opened.pop()))
        else:
            styles.append(item.style if item.kind == "text" else bases.get(place, styles[-1]))
            opened.append(place)
            out.append(item.source if item.kind == "open" else "")
    flush()
    return "".join(out)


def _closing_source(items: Sequence[Item], place: int) -> str:
    depth = 0
    for item in items[place:]:
        depth += (item.kind == "open") - (item.kind == "close")
        if depth <= 0:
            break
    return item.source if item.kind == "close" else ""


def _swapped_marks(built: str, items: Sequence[Item]) -> dict[int, int]:
    """Marks that must change places, so that no end of a bookmark comes before its start."""
    places: dict[str, list[int]] = defaultdict(list)
    for tag in NUMBERED_TAG.finditer(built):
        item = items[int(tag[2])]
        if item.pair:
            places[item.pair].append(int(tag[2]))
    swapped: dict[int, int] = {}
    for pair in places.values():
        if len(pair) == 2 and pair[0] > pair[1]:
            swapped |= {pair[0]: pair[1], pair[1]: pair[0]}
    return swapped


def package_document(
    package: ZipPackage,
    media_type: str,
    stories: Iterable[tuple[str, Story]],
    segments: list[Segment],
    skipped: Counter[str],
) -> Document:
    """The document of an archive: `stories` are its parts that contain the segments."""
    parts = [*stories]

    def join(texts: Sequence[str | None]) -> bytes:
        built = dict(enumerate(texts))
        written = {member: story.write(built) for member, story in parts}
        return package.write({member: data for member, data in written.items() if data is not None})

    return Document(package.name, media_type, segments, join, skipped)
