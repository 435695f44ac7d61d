"""Documents: read a file's text as segments, and write the same file with translations in their place.

A format is one module with `read(name, data) -> Document` and a line in `FORMATS`; it is imported on first use. A
reader cuts the file into segments (`qkv.documents.segments`) and keeps everything else to the byte; what it finds but
cannot translate it counts in `Document.skipped`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath

from qkv.core.errors import UsageError
from qkv.data.alignments import Link
from qkv.documents.segments import Segment

FORMATS = {  # suffix: module
    "txt": "plain_text",
    "md": "markdown",
    "html": "html_text",
    "htm": "html_text",
    "srt": "subtitles",
    "vtt": "subtitles",
    "docx": "docx",
    "pptx": "pptx",
    "xlsx": "xlsx",
    "odt": "odt",
    "epub": "epub",
}
BOM = b"\xef\xbb\xbf"
CHARSET = "; charset=utf-8"
Join = Callable[[Sequence[str | None]], bytes]  # the built text of each segment, None if unchanged → the file


class Document:
    """A parsed file: `segments` are the texts to translate, `build` writes the file with their translations.

    `protected` are the spans of each segment that must come back unchanged; `skipped` counts, by name, what the reader
    left untranslated. A document built from its own segments equals the input, byte for byte.
    """

    def __init__(
        self, name: str, media_type: str, parts: Sequence[Segment], join: Join, skipped: Mapping[str, int] | None = None
    ) -> None:
        self.name, self.media_type, self.parts, self.join = name, media_type, parts, join
        self.skipped = Counter(skipped or {})
        self.segments = [part.text for part in parts]  # without markup, in order
        self.protected = [part.protected for part in parts]

    @property
    def is_text(self) -> bool:
        """Whether the file is text, which a terminal or a pipe can show."""
        return self.media_type.endswith(CHARSET)

    @property
    def has_markup(self) -> list[bool]:
        """Whether each segment contains inline markup; only those need an alignment."""
        return [part.needs_alignment for part in self.parts]

    def build(self, translations: Sequence[str], alignments: Sequence[Iterable[Link] | None] | None = None) -> bytes:
        """Return the file with one translation for each segment.

        An alignment links the words of a segment to the words of its translation (`Translator.align`) and places the
        inline markup. Without an alignment, markup keeps its relative position in the sentence.
        """
        if len(translations) != len(self.parts):
            count = len(self.parts)
            raise UsageError(f"{self.name}: {count} segments, but {len(translations)} translations: give one for each")
        links = [None] * len(translations) if alignments is None else alignments
        triples = zip(self.parts, translations, links, strict=True)
        try:
            return self.join([None if text == part.text else part.build(text, link) for part, text, link in triples])
        except UnicodeEncodeError as error:
            half = f"U+{ord(error.object[error.start]):04X}"
            raise UsageError(f"{self.name}: a translation contains half of a character ({half}): remove it") from None


def read_document(name: str, data: bytes, format: str = "") -> Document:
    """Parse a document of a format in `FORMATS`; by default the suffix of its name selects the format."""
    format = format or PurePath(name).suffix.lower().removeprefix(".")
    if format not in FORMATS:
        raise UsageError(f"{name}: not a document that can be translated: send one of {', '.join(FORMATS)}")
    read: Callable[[str, bytes], Document] = importlib.import_module(f"{__name__}.{FORMATS[format]}").read
    return read(name, data)


def read_utf8(
    name: str,
    data: bytes,
    media_type: str,
    cut: Callable[[str], list[str | Segment]],
    skipped: Mapping[str, int] | None = None,
) -> Document:
    """Parse a text file: `cut` returns its parts in order, kept source as `str` and text to translate as `Segment`.

    `cut` may count in `skipped` what it leaves untranslated.
    """
    bom = BOM if data.startswith(BOM) else b""
    text = decode_utf8(name, data).removeprefix("\ufeff")
    parts = cut(text)
    segments = [part for part in parts if isinstance(part, Segment)]

    def join(built: Sequence[str | None]) -> bytes:
        texts = iter([part.raw if text is None else text for part, text in zip(segments, built, strict=True)])
        return bom + "".join(part if isinstance(part, str) else next(texts) for part in parts).encode()

    return Document(name, media_type + CHARSET, segments, join, skipped)


def decode_utf8(name: str, data: bytes, lines_before: int = 0) -> str:
    """Return the text of a file, or of a part of it after some lines."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + lines_before + 1
        raise UsageError(f"{name}, line {line}: not UTF-8: save the document as UTF-8 and send it again") from None
    if "\0" in text:
        raise UsageError(f"{name}: contains NUL characters, so it is not text in UTF-8: save it as UTF-8 text")
    return text
