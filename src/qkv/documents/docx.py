"""Word documents (.docx): the paragraphs of body, tables, text boxes, headers and footers, with character formatting.

Word splits a paragraph into runs. Adjacent runs with equal formatting form a group. The formatting of most characters
is the paragraph's base; every other group becomes a mark, so a bold word is bold in the translation. Pictures, notes
and line breaks are marks too. Paragraphs with fields or tracked changes, or with very many marks, are kept unchanged.
"""

from __future__ import annotations

import copy
import html
import io
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from qkv.core.errors import UsageError
from qkv.documents import Document
from qkv.documents.inline_markup import split_at
from qkv.documents.segments import NUMBERED_TAG, Segment, TextFormat, Token, make_segment, too_many_marks

if TYPE_CHECKING:
    from docx.document import Document as WordDocument

WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
MAX_UNPACKED_BYTES = 100 << 20
MAX_MEMBERS = 5000  # files in the archive
UNSUPPORTED = "fldChar fldSimple instrText ins del moveFrom moveTo sdt smartTag".split()
TEXT = "t tab noBreakHyphen".split()
FORMATTING = "rPr lastRenderedPageBreak".split()
AS_XML = TextFormat(partial(html.escape, quote=False))  # built text keeps its numbered tags, which `_write` reads

Runs = list[tuple[Any, Any]]  # each run with its hyperlink, or None
Group = tuple[int, Runs, str | None]  # number of the formatting, the runs, their text (None: other content)


def read(name: str, data: bytes) -> Document:
    word = WordFile(data, name)
    return Document(name, WORD_TYPE, word.segments, word.write)


class WordFile:
    """The translatable paragraphs of a Word document, and the document with new text in them."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        self.parts = [_read_paragraph(paragraph) for paragraph in _paragraphs(_open(data, name))]

    @property
    def segments(self) -> list[Segment]:
        return [part for part in self.parts if part is not None]

    def write(self, built: Iterable[str | None]) -> bytes:
        """Return the document with one built text for each segment; None keeps the paragraph."""
        word = _open(self.data, self.name)
        texts = iter(built)
        for paragraph, part in zip(_paragraphs(word), self.parts, strict=True):
            text = None if part is None else next(texts)
            if text is not None:
                _write_paragraph(paragraph, text)
        out = io.BytesIO()
        word.save(out)
        return out.getvalue()


def _open(data: bytes, name: str) -> WordDocument:
    try:
        import docx
    except ImportError:
        raise UsageError(f"{name}: Word documents need python-docx: pip install 'qkv[serve]'") from None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError):
        raise UsageError(f"{name}: not a Word document: save it as .docx again") from None
    # Reading a member yields at most the size in the archive's directory, so this bounds the memory.
    if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES or len(members) > MAX_MEMBERS:
        raise UsageError(f"{name}: larger than {MAX_UNPACKED_BYTES >> 20} MiB when unpacked: send it in parts")
    try:
        return docx.Document(io.BytesIO(data))
    except Exception as error:  # the error depends on the damaged part
        raise UsageError(f"{name}: damaged Word document ({type(error).__name__}): save it again") from None


def _qualified(name: str) -> str:
    return f"{{http://schemas.openxmlformats.org/wordprocessingml/2006/main}}{name}"


def _local_name(element: Any) -> str:
    return str(element.tag).rsplit("}", 1)[-1]


# ---- reading a paragraph ---------------------------------------------------------------------------------------------


def _paragraphs(word: WordDocument) -> Iterator[Any]:
    """Yield the supported paragraphs of the body (tables and text boxes included), headers and footers."""
    roots = [word.element.body]
    for section in word.sections:
        for margin in (section.header, section.footer, section.first_page_header, section.first_page_footer):
            if not margin.is_linked_to_previous:
                roots.append(margin._element)
    for root in roots:
        for paragraph in root.iter(_qualified("p")):
            if not any(True for _ in paragraph.iter(*map(_qualified, UNSUPPORTED))):
                yield paragraph


def _read_paragraph(paragraph: Any) -> Segment | None:
    """Make a segment; each group without the base formatting is a mark, numbered by its position."""
    groups = _groups(paragraph)
    base = _base_formatting(groups)
    tokens: list[Token] = []
    for place, (number, runs, text) in enumerate(groups):
        if text is None:
            is_break = runs[0][0].find(_qualified("br")) is not None
            tokens.append(Token("standalone", f"<x{place}/>", " " if is_break else ""))
        elif number == base:
            tokens.append(Token("text", text, text))
        else:
            tokens += [Token("open", f"<x{place}>"), Token("text", text, text), Token("close", f"</x{place}>")]
    return None if too_many_marks(tokens) else make_segment(tokens, AS_XML)


def _groups(paragraph: Any) -> list[Group]:
    """Group adjacent text runs with equal formatting and equal hyperlink; a run with other content is its own group."""
    runs: Runs = []
    for child in list(paragraph):
        if child.tag == _qualified("r"):
            runs += [(run, None) for run in _split_run(child)]
        elif child.tag == _qualified("hyperlink"):
            runs += [(part, child) for run in list(child.iterchildren(_qualified("r"))) for part in _split_run(run)]
    numbers: dict[tuple[str, int], int] = {}
    groups: list[Group] = []
    for run, link in runs:
        text = _run_text(run)
        properties = run.find(_qualified("rPr"))
        formatting = "" if properties is None else str(properties.xml), id(link)
        number = numbers.setdefault(formatting, len(numbers))
        last_number, last_runs, last_text = groups[-1] if groups else (-1, [], None)
        if text is not None and last_text is not None and last_number == number:
            groups[-1] = (number, [*last_runs, (run, link)], last_text + text)
        else:
            groups.append((number, [(run, link)], text))
    return groups


def _split_run(run: Any) -> list[Any]:
    """Split a run in place, so that text and other content are in separate runs."""
    runs = [run]
    content = [child for child in run if _local_name(child) not in FORMATTING]
    for child, before in zip(content[1:], content, strict=False):
        if (_local_name(child) in TEXT) != (_local_name(before) in TEXT):
            after = copy.deepcopy(run)
            for other in list(after):
                if other.tag != _qualified("rPr"):
                    after.remove(other)
            runs[-1].addnext(after)
            runs.append(after)
        if len(runs) > 1:
            runs[-1].append(child)
    return runs


def _run_text(run: Any) -> str | None:
    """Return the text of a run, or None if it has other content."""
    text = ""
    for child in run:
        name = _local_name(child)
        if name in TEXT:
            text += {"tab": "\t", "noBreakHyphen": "\u2011"}.get(name, child.text or "")
        elif name not in FORMATTING:
            return None
    return text


def _base_formatting(groups: list[Group]) -> int:
    """The number of the formatting that covers the most characters."""
    lengths: Counter[int] = Counter()
    for number, _, text in groups:
        lengths[number] += len(text or "")
    return max(lengths, key=lambda number: lengths[number], default=0)


# ---- writing a paragraph ---------------------------------------------------------------------------------------------


def _write_paragraph(paragraph: Any, built: str) -> None:
    """Replace the runs of a paragraph by copies of them that contain the built text."""
    groups = _groups(paragraph)
    base_number = _base_formatting(groups)
    base = next(place for place, (number, _, text) in enumerate(groups) if number == base_number and text is not None)
    old = [run if link is None else link for _, runs, _ in groups for run, link in runs]
    place = paragraph.index(old[0])
    new = [_copy_run(groups[base if at is None else at], text) for at, text in _stretches(built)]
    for element in old:
        if element.getparent() is paragraph:
            paragraph.remove(element)
    for offset, element in enumerate(new):
        paragraph.insert(place + offset, element)


def _stretches(built: str) -> Iterator[tuple[int | None, str | None]]:
    """Yield (position of the group or None for base formatting, text or None for other content)."""
    inside: list[int] = []
    for text, tag in split_at(NUMBERED_TAG, built):
        if text:
            yield inside[-1] if inside else None, html.unescape(text)
        if tag is None:
            break
        if tag[3]:
            yield int(tag[2]), None
        elif tag[1]:
            inside.pop()
        else:
            inside.append(int(tag[2]))


def _copy_run(group: Group, text: str | None) -> Any:
    """Copy the first run of a group, inside its hyperlink; `text` replaces its content unless it is None."""
    from docx.text.run import Run

    run, link = group[1][0]
    run_copy = copy.deepcopy(run)
    if text is not None:
        Run(run_copy, None).text = text  # type: ignore[arg-type]  # the parent is not used
    if link is None:
        return run_copy
    link_copy = copy.deepcopy(link)
    for child in list(link_copy):
        link_copy.remove(child)
    link_copy.append(run_copy)
    return link_copy
