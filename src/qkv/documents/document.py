"""A document: its segments in order, and the same document with others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

from qkv.core.errors import UsageError
from qkv.data.links import Link
from qkv.documents import html_text, markdown, plain_text
from qkv.documents.docx import WordText
from qkv.documents.segments import Segment

WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
MEDIA_TYPES = {
    "txt": "text/plain; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "htm": "text/html; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "docx": WORD,
}
FORMATS: tuple[str, ...] = tuple(MEDIA_TYPES)
READERS: dict[str, Callable[[str], list[str | Segment]]] = {
    "txt": plain_text.read_text,
    "md": markdown.read,
    "html": html_text.read,
    "htm": html_text.read,
    "srt": plain_text.read_subtitles,
}
BOM = b"\xef\xbb\xbf"


class Document:
    """What of a file is to be translated: `segments`, texts without markup, and `build`, the file with translations.

    Built with its own segments it is the same document; txt, md, html and srt to the byte.
    """

    def __init__(self, name: str, media_type: str, found: Sequence[Segment]) -> None:
        self.name, self.media_type, self._found = name, media_type, list(found)
        self.segments = [segment.text for segment in self._found]  # the texts to translate, in order

    @staticmethod
    def parse(name: str, data: bytes) -> Document:
        """Read a document; the end of its name says what it is, and nothing else of the name matters."""
        suffix = PurePath(name).suffix.lower().removeprefix(".")
        if suffix not in MEDIA_TYPES:
            raise UsageError(f"{name}: not a document that can be translated: send one of {', '.join(FORMATS)}")
        if suffix == "docx":
            return _WordDocument(name, data)
        mark = BOM if data.startswith(BOM) else b""
        try:
            text = data[len(mark) :].decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start + len(mark)].count(b"\n") + 1
            raise UsageError(f"{name}, line {line}: not UTF-8: save the document as UTF-8 and send it again") from None
        return _TextDocument(name, MEDIA_TYPES[suffix], READERS[suffix](text), mark)

    @property
    def marked(self) -> list[bool]:
        """Which of them have markup within, for which an alignment is worth its time."""
        return [bool(segment.marks) for segment in self._found]

    def build(self, translations: Sequence[str], alignments: Sequence[Iterable[Link] | None] | None = None) -> bytes:
        """The document with translations in place of its segments.

        An alignment says which words of a segment became which of its translation (`Translator.align`), so that markup
        goes with its words; without one, it goes to the same place in the sentence.
        """
        if len(translations) != len(self._found):
            count = len(self._found)
            raise UsageError(f"{self.name}: {count} segments, but {len(translations)} translations: give one for each")
        links = [None] * len(translations) if alignments is None else alignments
        found = zip(self._found, translations, links, strict=True)
        return self._joined([segment.build(text, link) for segment, text, link in found], translations)

    def _joined(self, built: list[str], translations: Sequence[str]) -> bytes:
        raise NotImplementedError


class _TextDocument(Document):
    def __init__(self, name: str, media_type: str, parts: list[str | Segment], mark: bytes) -> None:
        super().__init__(name, media_type, [part for part in parts if isinstance(part, Segment)])
        self.parts, self.mark = parts, mark

    def _joined(self, built: list[str], translations: Sequence[str]) -> bytes:
        texts = iter(built)
        return self.mark + "".join(next(texts) if isinstance(p, Segment) else p for p in self.parts).encode()


class _WordDocument(Document):
    def __init__(self, name: str, data: bytes) -> None:
        self.word = WordText(data, name)
        super().__init__(name, WORD, self.word.segments)

    def _joined(self, built: list[str], translations: Sequence[str]) -> bytes:
        return self.word.write(
            text if translation != segment.text else None
            for segment, text, translation in zip(self._found, built, translations, strict=True)
        )
