"""Translation of documents: the segments of a file are translated in chunks, and the file is written with them.

`translate_document` returns the bytes of the translated file, with what was translated, skipped and flagged. A
translated file appears when it is complete: `write_document` renames a temporary file.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from qkv.api.file_translation import chunks, is_stream_output
from qkv.console import Advance
from qkv.core.errors import UsageError
from qkv.core.files import write_parts
from qkv.data.alignments import Link
from qkv.data.formats import open_text, read_any_file
from qkv.documents import FORMATS, Document, read_document
from qkv.documents.plain_text import read_blocks

if TYPE_CHECKING:
    from qkv.api.translation import Translation
    from qkv.decoding.search_request import Options

CHUNK = 2048  # segments translated together: enough for batches of similar length
TEXT_OPTIONS = ("n_best", "prefix", "must_include", "ordered")  # one text's, so without a meaning for a document

# Called with the number of a segment, counted from 1, its text and its translation.
Report = Callable[[int, str, "Translation"], None]


class TextTranslator(Protocol):
    """What translates the segments: a `qkv.Translator`."""

    def translate(self, text: Sequence[str], **options: Unpack[Options]) -> list[Translation]: ...

    def links(
        self, sources: Sequence[str], translations: Sequence[Translation], *, tag: str = ""
    ) -> list[list[Link] | None]: ...


class HasFlags(Protocol):
    """A translation, also one from a server."""

    @property
    def flags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class FlaggedSegment:
    """A segment whose translation should be checked, and the reasons."""

    number: int  # counted from 1
    source: str
    text: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class DocumentTranslation:
    """A translated document: the bytes of the file, and counts of what was and what was not translated."""

    name: str
    media_type: str
    data: bytes
    translated: int  # segments
    skipped: Counter[str] = field(default_factory=Counter)  # what the reader left untranslated, by its name
    flagged: list[FlaggedSegment] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line: `report.docx: 214 segments translated, 3 skipped (2 equations, 1 field), 1 flagged`."""
        parts = [f"{_count(self.translated, 'segment')} translated"]
        if skipped := self.skipped.total():
            names = ", ".join(_count(count, name) for name, count in self.skipped.most_common() if count)
            parts.append(f"{skipped:,} skipped ({names})")
        if self.flagged:
            parts.append(f"{len(self.flagged):,} flagged")
        return f"{self.name}: {', '.join(parts)}"


def translate_document(
    translator: TextTranslator,
    document: Document | str | Path | bytes,
    *,
    format: str = "",
    first: int = 0,
    progress: Advance = lambda done: None,
    report: Report = lambda number, source, translation: None,
    **options: Any,
) -> DocumentTranslation:
    """Translate all segments and write the document; options are those of `Translator.translate`.

    The document is a file or the bytes of one; `format` is a suffix in `FORMATS`, by default that of the file.
    `progress` is called with the number of finished segments, `report` with each translated segment in order. `first`
    is the number of segments before this document, if it is a part of a longer text.
    """
    document = _as_document(document, format)
    check_options(document.name, options)
    has_markup = document.has_markup
    texts: list[str] = []
    links: list[Sequence[Link] | None] = []
    flagged: list[FlaggedSegment] = []
    for chunk in chunks(document.segments, CHUNK):
        begin, end = chunk.first, chunk.first + len(chunk.lines)
        spans = document.protected[begin:end]
        translations = translator.translate(
            chunk.lines, first=first + begin, protected=spans, progress=progress, **options
        )
        for number, (source, each) in enumerate(zip(chunk.lines, translations, strict=True), first + begin + 1):
            if flags := flags_of(each):
                flagged.append(FlaggedSegment(number, source, each.text, flags))
            report(number, source, each)
        texts += [each.text for each in translations]
        of_chunk: list[Sequence[Link] | None] = [None] * len(translations)
        wanted = [i for i, each in enumerate(translations) if has_markup[begin + i] and each.text != chunk.lines[i]]
        pairs = [chunk.lines[i] for i in wanted], [translations[i] for i in wanted]
        for i, found in zip(wanted, translator.links(*pairs, tag=options.get("tag", "")), strict=True):
            of_chunk[i] = found
        links += of_chunk
    data = document.build(texts, links)
    return DocumentTranslation(document.name, document.media_type, data, len(texts), document.skipped, flagged)


def _as_document(source: Document | str | Path | bytes, format: str) -> Document:
    if isinstance(source, Document):
        return source
    if isinstance(source, bytes):
        if not format:
            raise UsageError(f'bytes have no suffix: give a format, one of {", ".join(FORMATS)}, as in format="docx"')
        return read_document(f"document.{format}", source, format)
    return read_document(str(source), b"".join(read_any_file(open_text(str(source)))), format)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse options that apply to a single text."""
    for option in TEXT_OPTIONS:
        if options.get(option) and not (option == "n_best" and options[option] == 1):
            remedy = "omit it, or translate the lines of a text file"
            raise UsageError(f"{name}: {option} applies to one text, and a document has many: {remedy}")


def flags_of(translation: HasFlags) -> tuple[str, ...]:
    """Return the reasons to look at a translation."""
    return tuple(flag for flag in translation.flags if flag != "blank")


def _count(count: int, noun: str) -> str:
    """Return `1 field` or `2 fields`; names that are no countable noun (`image text`) stay as they are."""
    countable = re.fullmatch(r"[A-Za-z]+( [a-z]+)?", noun) and not noun.endswith(("s", "text"))
    return f"{count:,} {noun}s" if count != 1 and countable else f"{count:,} {noun}"


# ---- files -----------------------------------------------------------------------------------------------------------

LINES = "lines"  # the format of a file whose lines are translated one by one


def format_of(name: str, chosen: str = "") -> str:
    """Return the format of an input: the chosen one, else that of its suffix; `lines` for .txt and unknown suffixes."""
    if chosen and chosen not in (LINES, *FORMATS):
        raise UsageError(f"--format {chosen}: unknown: choose one of {LINES}, {', '.join(FORMATS)}")
    suffix = PurePath(name).suffix.lower().removeprefix(".")
    return chosen or (suffix if suffix in FORMATS and suffix != "txt" else LINES)


def open_documents(name: str, format: str) -> Iterator[Document]:
    """Read a document from a file, which may be compressed, or from standard input; plain text comes in blocks."""
    parts = read_any_file(open_text(name))
    if format == "txt":
        yield from read_blocks(name, parts)
    else:
        yield read_document(name, b"".join(parts), format)


def check_output(document: Document, format: str, output: str) -> None:
    """Refuse an output that cannot be written, or whose name promises another format, before the translation."""
    name, suffix = document.name, PurePath(document.name).suffix or f".{format}"
    if is_stream_output(output):
        if not document.is_text:
            raise UsageError(f"{name}: a .{format} file cannot be written to a pipe: give -o NAME{suffix}")
        return
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"{output}: is a folder: give a file")
    if path.suffix.lower() not in (suffix.lower(), f".{format}"):
        raise UsageError(f"{output}: the translation of {name} is a .{format} file: name it {path.stem}{suffix}")
    if not path.parent.is_dir():
        raise UsageError(f"{output}: there is no folder {path.parent}: create it")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{output}: the folder {path.parent} cannot be written to: choose another one")


def translate_to_file(
    translator: TextTranslator, documents: Iterable[Document], output: str | None, **options: Any
) -> DocumentTranslation:
    """Translate the blocks of a text, or a single document, to a file, a pipe or nowhere; return the counts."""
    total: DocumentTranslation | None = None

    def translated() -> Iterator[bytes]:
        nonlocal total
        for document in documents:
            done = translate_document(translator, document, first=total.translated if total else 0, **options)
            yield done.data
            total = replace(
                done,
                data=b"",
                translated=done.translated + (total.translated if total else 0),
                skipped=done.skipped + (total.skipped if total else Counter()),
                flagged=[*(total.flagged if total else []), *done.flagged],
            )

    write_document(translated(), output)
    assert total is not None
    return total


def write_document(parts: Iterable[bytes], output: str | None) -> None:
    """Write to standard output (-), a pipe, or a file, which appears when it is complete; None writes nothing."""
    if output is None:
        deque(parts, maxlen=0)
    elif output == "-":
        sys.stdout.buffer.writelines(parts)
        sys.stdout.buffer.flush()
    elif is_stream_output(output):
        with Path(output).open("wb") as file:
            file.writelines(parts)
    else:
        write_parts(Path(output), parts)
