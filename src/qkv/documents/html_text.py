"""HTML: text between tags and in some attributes as segments; everything else is kept to the byte.

justhtml's tokenizer finds tags, comments and raw text, so that they are what a browser sees. Its stream reports no
positions and its tree moves misplaced nodes, so a subclass of the tokenizer records where each piece of the source
begins and ends. One table says what an element is in a sentence; `HtmlText` is the reader of documents and of the
API's `format=html` alike.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from qkv.core.errors import UsageError
from qkv.documents import BOM, Document, read_utf8
from qkv.documents.segments import (
    WHITE_SPACE,
    Segment,
    TextFormat,
    Token,
    make_segment,
    split_segments,
    unused_characters,
)
from qkv.segmentation.sentences import split

# What an element is in a sentence. All others are blocks: boundaries between sentences.
ELEMENTS = {
    name: kind
    for kind, names in {
        "inline": "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike "
        "strong sub sup time tt u",
        "void": "img input wbr",  # inline, without content
        "protected": "code kbd samp var",  # part of the sentence, not to be changed
        "object": "math svg",  # part of the sentence, without text
        "raw": "iframe noembed noframes plaintext script style textarea xmp",  # kept; "<" in them begins no tag
        "kept": "audio canvas object template video",
        "pre": "pre",
    }.items()
    for name in names.split()
}
VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
ATTRIBUTES = {  # attributes with text; the elements that have them, or () for all
    "alt": ("img", "area", "input"),
    "placeholder": ("input", "textarea"),
    "title": (),
}
NO_TITLE = frozenset("link style script meta".split())  # their title is no text
# By start tag: the elements that it ends, if one of them is the innermost open one.
CLOSED_BY = {
    name: frozenset(closed.split())
    for closed, names in {
        "p": "address article aside blockquote div dl fieldset figure footer form h1 h2 h3 h4 h5 h6 header hr main nav "
        "ol p pre section table ul",
        "li": "li",
        "dt dd": "dt dd",
        "td th": "td th",
        "td th tr": "tr",
        "td th tr thead tbody": "tbody tfoot",
        "option": "option",
        "option optgroup": "optgroup",
    }.items()
    for name in names.split()
}

SPACE = "[ \\t\\r\\n\\f]"
SPACES = re.compile(f"({SPACE}+)")
TAG_NAME = re.compile(r"<[^ \t\r\n\f/>]*+")
ATTRIBUTE = re.compile(
    rf"""(?:{SPACE}|[/=])*+([^ \t\r\n\f/>=]++)(?:{SPACE}*+={SPACE}*+("[^"]*+"|'[^']*+'|[^ \t\r\n\f>]*+))?+"""
)
COMMENT = re.compile(r"<!---?>|<!--")
COMMENT_END = re.compile("--!?>")
BOGUS = re.compile(r"<(?:\?|/(?=[^A-Za-z]))[^>]*+>?")  # a browser reads these as comments
LINE_END = re.compile(f"(\n{SPACE}*+)")
CODE_LIKE = re.compile(r"[{}\[\]=<>|\\_$#@`~^*+;]|[^ \n] {2,}[^ \n]|\t")  # preformatted text that is no prose


class Piece(NamedTuple):
    """A piece of the source: a start or end tag, text, raw text, or other markup such as a comment."""

    kind: str
    begin: int
    end: int
    name: str = ""
    attributes: Mapping[str, str | None] = MappingProxyType({})
    empty: bool = False  # a start tag that ends with "/>"


def read(name: str, data: bytes) -> Document:
    try:
        _position_scanner()
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    pages: list[HtmlText] = []

    def cut(text: str) -> list[str | Segment]:
        pages.append(HtmlText(text))
        return [*pages[0].segments]

    document = read_utf8(name, data, "text/html", cut)
    (page,) = pages
    bom = BOM if data.startswith(BOM) else b""
    return Document(
        name, document.media_type, page.segments, lambda built: bom + page.write(built).encode(), page.skipped
    )


def tokenize(text: str) -> Iterator[Token]:
    """Yield tags, comments and text in order; an unfinished tag extends to the end."""
    return HtmlReader(text).tokens()


class HtmlText:
    """HTML as segments, and the same HTML with other text in them.

    With `sentences` each sentence of the `language` is a segment if no element crosses its borders. A segment with
    markup for which `fits` is false is split at its tags.
    """

    def __init__(
        self, source: str, *, sentences: bool = False, language: str = "", fits: Callable[[str], bool] | None = None
    ) -> None:
        (self.slot,) = unused_characters(source)
        reader = HtmlReader(source, self.slot, words=sentences)
        cut = partial(_cut_sentences, language=language) if sentences else None
        format = TextFormat(partial(html.escape, quote=False))
        self.parts = list(split_segments(reader.tokens(), format, cut, fits))
        self.texts = [part for part in self.parts if isinstance(part, Segment)]
        self.segments = [*self.texts, *reader.values]
        self.skipped = reader.skipped

    def write(self, built: Sequence[str | None]) -> str:
        """Return the HTML with one built text for each segment; None keeps the source."""
        written = [part.raw if text is None else text for part, text in zip(self.segments, built, strict=True)]
        texts, values = iter(written), written[len(self.texts) :]
        page = "".join(part if isinstance(part, str) else next(texts) for part in self.parts)
        if not values:
            return page
        slot = re.compile(f"{self.slot}([0-9]{{1,9}}){self.slot}")
        return slot.sub(lambda match: values[int(match[1])] if int(match[1]) < len(values) else match[0], page)


# ---- tokens ----------------------------------------------------------------------------------------------------------


class HtmlReader:
    """Turns HTML into tokens. With a `slot` character, the text of attributes becomes the segments `values`.

    In the source of a tag, `slot number slot` is then the place of the value with that number.
    """

    def __init__(self, source: str, slot: str = "", *, words: bool = False) -> None:
        self.source, self.slot, self.words = source, slot, words
        self.values: list[Segment] = []
        self.skipped: Counter[str] = Counter()
        self.pieces = scan(source)
        kinds = [ELEMENTS.get(piece.name, "block") if piece.name else "" for piece in self.pieces]
        # How many tags of blocks, and of code, there are before each piece.
        self.blocks = [*accumulate((kind in ("block", "pre") for kind in kinds), initial=0)]
        self.codes = [*accumulate((kind in ("protected", "raw") for kind in kinds), initial=0)]

    def tokens(self) -> Iterator[Token]:
        ends = element_ends(self.pieces)
        number, preformatted = 0, 0  # the next piece; where the last <pre> ends
        while number < len(self.pieces):
            piece = self.pieces[number]
            raw = self.source[piece.begin : piece.end]
            kind = ELEMENTS.get(piece.name, "block")
            if piece.kind == "start" and number in ends:
                token = self._untranslated(number, ends[number], kind, number < preformatted)
                if token is not None:
                    yield token
                    number = ends[number]
                    continue
                preformatted = ends[number] if kind == "pre" else preformatted
            number += 1
            if piece.kind == "text":
                yield from self._text(raw, preformatted=number <= preformatted)
            elif piece.kind == "comment":
                yield Token("standalone", raw)
            elif piece.kind == "start":
                raw = self._tag(piece, raw)
                is_standalone = kind == "void" or (piece.empty and kind in ("inline", "protected", "object"))
                kind = "standalone" if is_standalone else "open" if kind == "inline" else "boundary"
                yield Token(kind, raw, name=piece.name)
            else:
                yield Token("close" if piece.kind == "end" and kind == "inline" else "boundary", raw, name=piece.name)

    def _untranslated(self, number: int, end: int, kind: str, preformatted: bool) -> Token | None:
        """Return the token of a whole element that is not translated, or None."""
        first, last = self.pieces[number], self.pieces[end - 1]
        raw = self.source[first.begin : last.end]
        marked = is_untranslated(first.attributes)
        if kind == "raw":
            if first.name == "textarea" and not marked and self._plain(number, end).strip():
                self.skipped["textarea"] += 1
            head = self.source[first.begin : first.end]
            return Token("boundary", self._tag(first, head) + raw[len(head) :])
        closed = last.kind == "end" and last.name == first.name
        if kind == "object" and closed:
            return Token("standalone", raw)
        in_sentence = self.blocks[end] == self.blocks[number]
        if in_sentence and (kind == "protected" or (marked and kind == "inline")):
            return Token("protected", raw, self._plain(number, end))
        if marked:
            self.skipped['translate="no"'] += 1
        elif kind == "pre" and not preformatted:
            if self.codes[end] == self.codes[number] and not CODE_LIKE.search(self._plain(number, end)):
                return None
            self.skipped["preformatted text"] += 1
        elif kind in ("inline", "block", "pre") or not closed:
            return None  # an element without an end is read on, so that it cannot hide the rest of the page
        return Token("boundary", raw)

    def _plain(self, number: int, end: int) -> str:
        """The text of some pieces."""
        texts = (piece for piece in self.pieces[number:end] if piece.kind == "text")
        return "".join(html.unescape(self.source[piece.begin : piece.end]) for piece in texts)

    def _text(self, raw: str, preformatted: bool) -> Iterator[Token]:
        """Yield the text; each line of preformatted text is translated by itself."""
        if preformatted:
            for place, part in enumerate(LINE_END.split(raw)):
                if part:
                    yield Token("boundary", part) if place % 2 else Token("text", part, html.unescape(part))
        elif self.words:
            for part in SPACES.split(raw):
                if part:
                    yield Token("text", part, html.unescape(part))
        else:
            yield Token("text", raw, html.unescape(raw))

    def _tag(self, piece: Piece, raw: str) -> str:
        """Return the source of a start tag, with a slot for each attribute with text."""
        names = {name for name in ATTRIBUTES if piece.attributes.get(name)} if self.slot else set()
        if not names or is_untranslated(piece.attributes):
            return raw
        name_end = TAG_NAME.match(raw)
        assert name_end is not None
        out, done = "", 0
        for match in ATTRIBUTE.finditer(raw, name_end.end()):
            name, value = match[1].lower(), match[2] or ""
            if name not in names:
                continue
            names.remove(name)  # only the first of two equal names counts
            quoted = value[:1] in ('"', "'") and value[:1]
            bare, text = value.strip(quoted) if quoted else value, piece.attributes[name] or ""
            allowed = ATTRIBUTES[name]
            known = piece.name in allowed if allowed else piece.name not in NO_TITLE
            if known and ("&" in bare or bare == text) and (segment := _value_segment(bare, text, bool(quoted))):
                begin = match.start(2) + bool(quoted)
                out += f"{raw[done:begin]}{self.slot}{len(self.values)}{self.slot}"
                done = begin + len(bare)
                self.values.append(segment)
        return out + raw[done:]


def _value_segment(raw: str, text: str, quoted: bool) -> Segment | None:
    """Make a segment of an attribute's value; a translation of a bare value gets quotes."""
    lay_out: Callable[[str], str] = str if quoted else '"{}"'.format
    return make_segment([Token("text", raw, text)], TextFormat(html.escape, lay_out))


def is_untranslated(attributes: Mapping[str, str | None]) -> bool:
    """Whether the attributes of an element forbid its translation."""
    return (attributes.get("translate") or "").strip().lower() == "no" or (
        "notranslate" in (attributes.get("class") or "").split()
    )


def _cut_sentences(tokens: list[Token], language: str) -> Iterator[list[Token]]:
    """Cut tokens of single words at the white space between sentences, outside of all elements."""
    plain = "".join(token.text for token in tokens if token.kind in ("text", "protected"))
    spaced = SPACES.sub(lambda match: " " * len(match[0]), plain)
    pieces = split(spaced, lambda piece: True, sentences=1, language=language)
    gaps: dict[int, int] = {}  # begin and length of the white space after a sentence
    end = len(pieces.separators[0])
    for sentence, gap in zip(pieces, pieces.separators[1:], strict=True):
        end += len(sentence)
        gaps[end] = len(gap)
        end += len(gap)
    part: list[Token] = []
    place = depth = 0
    for token in tokens:
        depth += {"open": 1, "close": -1}.get(token.kind, 0)
        is_gap = token.kind == "text" and not token.text.strip(WHITE_SPACE)
        if is_gap and depth == 0 and gaps.get(place) == len(token.text):
            yield part
            yield [token]
            part = []
        else:
            part.append(token)
        place += len(token.text) if token.kind in ("text", "protected") else 0
    yield part


# ---- the pieces of the source ----------------------------------------------------------------------------------------


def scan(source: str) -> list[Piece]:
    """Cut HTML into pieces that tile it, as a browser's tokenizer does."""
    scanner = _position_scanner()(source)
    starts = sum(kind == "start" for kind, _ in scanner.scan())
    if starts != sum(piece.kind == "start" for piece in scanner.pieces):
        raise UsageError("this version of justhtml reports no positions: pip install 'justhtml==3.16'")
    pieces: list[Piece] = []
    done = 0
    for piece in [*scanner.pieces, Piece("rest", len(source), len(source))]:
        for match in BOGUS.finditer(source, done, piece.begin):
            _add_text(pieces, done, match.start())
            pieces.append(Piece("comment", match.start(), match.end()))
            done = match.end()
        _add_text(pieces, done, piece.begin)
        if piece.end > piece.begin:
            pieces.append(piece)
        done = piece.end
    return pieces


def _add_text(pieces: list[Piece], begin: int, end: int) -> None:
    if begin < end:
        pieces.append(Piece("text", begin, end))


@cache
def _position_scanner() -> Callable[[str], Any]:
    """Return justhtml's tokenizer with a list `pieces` of the places of all markup and raw text."""
    try:
        from justhtml.parser.stream import _StreamScanner
    except ImportError:
        raise UsageError("HTML needs justhtml: pip install 'qkv[documents]'") from None

    class PositionScanner(_StreamScanner):
        __slots__ = ("pieces",)

        def __init__(self, source: str) -> None:
            super().__init__(source)
            self.pieces: list[Piece] = []

        def _parse_start_tag(self, pos: int, end: int) -> tuple[str, dict[str, str | None], bool, int] | None:
            parsed = super()._parse_start_tag(pos, end)
            name, attributes, empty, after = parsed or ("", {}, False, end)
            self.pieces.append(Piece("start" if parsed else "rest", pos - 1, after, name, attributes, empty))
            return parsed

        def _parse_end_tag(self, pos: int, end: int) -> tuple[str, int] | None:
            parsed = super()._parse_end_tag(pos, end)
            if parsed is not None:
                unfinished = parsed[1] == end and not self._html.endswith(">")
                self.pieces.append(Piece("rest" if unfinished else "end", pos - 2, parsed[1], parsed[0]))
            return parsed

        def _parse_markup_declaration(self, pos: int, end: int) -> Any:
            begin = pos - 2
            comment = COMMENT.match(self._html, begin)
            if comment is None:
                parsed = super()._parse_markup_declaration(pos, end)
                self.pieces.append(Piece("other", begin, parsed[2]))
                return parsed
            # justhtml looks for both ends of a comment up to the end of the text: quadratic for many comments.
            match = comment if comment[0].endswith(">") else COMMENT_END.search(self._html, comment.end())
            self.pieces.append(Piece("comment", begin, match.end() if match else end))
            return True, ("comment", ""), self.pieces[-1].end, None

        def _find_rawtext_end_tag(self, name: str, pos: int, end: int) -> tuple[int | None, int]:
            if name == "noscript":  # read its content as HTML, as a browser without scripts does
                return pos, pos
            close, after = super()._find_rawtext_end_tag(name, pos, end)
            text_end = end if close is None else close
            self.pieces.append(Piece("text", pos, text_end))
            if close is not None:
                self.pieces.append(Piece("end", close, after, name))
            return close, after

    return PositionScanner


def element_ends(pieces: Sequence[Piece]) -> dict[int, int]:
    """For each start tag with content, by its number: the number of the piece after its element.

    An element ends after its end tag, or where the end or start of another element implies its end.
    """
    ends: dict[int, int] = {}
    opened: list[int] = []
    depths: dict[str, list[int]] = {}  # by name: the depths of the open elements

    def close(depth: int, end: int, after: int) -> None:
        """Close the element at this depth at `after`, and those inside it at `end`."""
        while len(opened) > depth:
            number = opened.pop()
            depths[pieces[number].name].pop()
            ends[number] = end if len(opened) > depth else after

    for number, piece in enumerate(pieces):
        if piece.kind == "start":
            closed = CLOSED_BY.get(piece.name, ())
            while opened and pieces[opened[-1]].name in closed:
                close(len(opened) - 1, number, number)
            is_raw = ELEMENTS.get(piece.name) == "raw"
            if piece.name not in VOID and (is_raw or not piece.empty):
                depths.setdefault(piece.name, []).append(len(opened))
                opened.append(number)
        elif piece.kind == "end" and depths.get(piece.name):
            close(depths[piece.name][-1], number, number + 1)
    close(0, len(pieces), len(pieces))
    return ends
