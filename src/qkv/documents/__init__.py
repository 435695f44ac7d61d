"""Document formats: extract the sentences of a file, and write the same file with translations in their place.

`read_document` reads plain text, Markdown, HTML, SubRip subtitles and Word documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePath

from qkv.core.errors import UsageError
from qkv.data.alignments import Link
from qkv.documents import html_text, markdown
from qkv.documents.docx import WordFile
from qkv.documents.segments import Segment, TextFormat, Token, make_segment, split_lines, split_segments

__all__ = ["FORMATS", "Document", "read_document"]

WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
BOM = b"\xef\xbb\xbf"
Join = Callable[[Iterable[str | None]], bytes]  # the built text of each segment, None if unchanged → the file


class Document:
    """A parsed file: `segments` are the texts to translate, `build` writes the file with their translations.

    A document built from its own segments equals the input; txt, md, html and srt are equal byte for byte.
    """

    def __init__(self, name: str, media_type: str, parts: Sequence[Segment], join: Join) -> None:
        self.name, self.media_type, self._parts, self._join = name, media_type, parts, join
        self.segments = [part.text for part in self._parts]  # without markup, in order

    @property
    def has_markup(self) -> list[bool]:
        """Whether each segment contains inline markup; only those need an alignment."""
        return [bool(part.marks) for part in self._parts]

    def build(self, translations: Sequence[str], alignments: Sequence[Iterable[Link] | None] | None = None) -> bytes:
        """Return the file with one translation for each segment.

        An alignment links the words of a segment to the words of its translation (`Translator.align`) and places the
        inline markup. Without an alignment, markup keeps its relative position in the sentence.
        """
        if len(translations) != len(self._parts):
            count = len(self._parts)
            raise UsageError(f"{self.name}: {count} segments, but {len(translations)} translations: give one for each")
        links = [None] * len(translations) if alignments is None else alignments
        triples = zip(self._parts, translations, links, strict=True)
        return self._join([None if text == part.text else part.build(text, link) for part, text, link in triples])


def read_document(name: str, data: bytes) -> Document:
    """Parse a document; the suffix of its name selects the format."""
    suffix = PurePath(name).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UsageError(f"{name}: not a document that can be translated: send one of {', '.join(FORMATS)}")
    if suffix == "docx":
        word = WordFile(data, name)
        return Document(name, WORD_TYPE, word.segments, word.write)
    media_type, read = TEXT_FORMATS[suffix]
    bom = BOM if data.startswith(BOM) else b""
    try:
        text = data[len(bom) :].decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start + len(bom)].count(b"\n") + 1
        raise UsageError(f"{name}, line {line}: not UTF-8: save the document as UTF-8 and send it again") from None
    parts = read(text)
    segments = [part for part in parts if isinstance(part, Segment)]

    def join(built: Iterable[str | None]) -> bytes:
        texts = iter([part.raw if text is None else text for part, text in zip(segments, built, strict=True)])
        return bom + "".join(part if isinstance(part, str) else next(texts) for part in parts).encode()

    return Document(name, f"{media_type}; charset=utf-8", segments, join)


# ---- plain text ------------------------------------------------------------------------------------------------------


def _read_text(text: str) -> list[str | Segment]:
    """One segment per line; blank lines and the white space around a line are kept."""

    parts: list[str | Segment] = []
    for line in split_lines(text):
        inner = line.strip()
        begin = line.index(inner)
        segment = make_segment([Token("text", inner, inner)], TextFormat())
        parts += [line[:begin], segment or inner, line[begin + len(inner) :]]
    return parts


# ---- subtitles (SubRip) ----------------------------------------------------------------------------------------------

TIMES = re.compile(r"\s*\d+:\d\d:\d\d[,.]\d{1,3}\s*-->\s*\d+:\d\d:\d\d[,.]\d{1,3}")
SPEAKER = re.compile(r"\s*[-–—]\s")  # a dash marks a change of speaker
STYLE = re.compile(r"(\{\\[^}]*\})")  # position and style, for example {\an8}
SPACES_OUTSIDE_TAGS = re.compile(r" (?![^<>]*>)")


def _read_subtitles(text: str) -> list[str | Segment]:
    """Keep numbers and times; the lines of a cue are one segment for each speaker."""
    parts: list[str | Segment] = []
    cue: list[str] | None = None  # lines of text after the times of a cue
    for line in split_lines(text):
        if cue is None or not line.strip():
            parts += _cue_parts(cue or [])
            parts.append(line)
            cue = [] if TIMES.match(line) else None
        else:
            cue.append(line)
    return parts + _cue_parts(cue or [])


def _cue_parts(lines: list[str]) -> list[str | Segment]:
    """Split a cue by speaker; a translation gets as many lines as the source had."""
    speeches: list[list[str]] = []
    for line in lines:
        if speeches and not SPEAKER.match(line):
            speeches[-1].append(line)
        else:
            speeches.append([line])
    parts: list[str | Segment] = []
    for speech in speeches:
        text = "".join(speech)
        body = text.rstrip("\r\n")
        dash = SPEAKER.match(body)
        begin = dash.end() if dash else 0
        newline = "\r\n" if "\r\n" in body else "\n"
        wrap = partial(_wrap_lines, lines=len(speech), newline=newline)
        parts += [body[:begin], *split_segments(_subtitle_tokens(body[begin:]), TextFormat(lay_out=wrap))]
        parts.append(text[len(body) :])
    return parts


def _subtitle_tokens(text: str) -> Iterator[Token]:
    """Subtitles use a few HTML tags but no entities."""
    for part in STYLE.split(text):
        if STYLE.fullmatch(part):
            yield Token("standalone", part)
            continue
        for token in html_text.tokenize(part):
            yield Token("text", token.raw, token.raw) if token.kind in ("text", "boundary") else token


def _wrap_lines(text: str, lines: int, newline: str) -> str:
    """Break the text into lines of about equal length, or into fewer lines if it has too few spaces."""
    spaces = [space.start() for space in SPACES_OUTSIDE_TAGS.finditer(text)]
    if lines > 1 and spaces:
        cut = min(spaces, key=lambda place: abs(place - len(text) // lines))
        return text[:cut] + newline + _wrap_lines(text[cut + 1 :], lines - 1, newline)
    return text


TEXT_FORMATS: dict[str, tuple[str, Callable[[str], list[str | Segment]]]] = {
    "txt": ("text/plain", _read_text),
    "md": ("text/markdown", markdown.read_markdown),
    "html": ("text/html", html_text.read_html),
    "htm": ("text/html", html_text.read_html),
    "srt": ("application/x-subrip", _read_subtitles),
}
FORMATS = (*TEXT_FORMATS, "docx")
