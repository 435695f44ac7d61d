"""Word documents (.docx): every paragraph of the text, its tables, headers and footers, with the looks of its words.

Runs that look alike are one mark, so a bold word is bold in the translation too. Pictures, notes and line breaks keep
their place among the words. Paragraphs with fields or tracked changes, and those of hundreds of looks, are kept as they
are.
"""

from __future__ import annotations

import copy
import html
import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qkv.core.errors import UsageError
from qkv.documents.segments import TAG, Segment, Token, Writing, crowded, segment

if TYPE_CHECKING:
    from docx.document import Document as Word

INFLATED = 100 << 20  # bytes: what the parts of a document may come to
PARTS = 5000
COMPLEX = "fldChar fldSimple instrText ins del moveFrom moveTo sdt smartTag".split()
TEXT = "t tab noBreakHyphen".split()
LOOKS = "rPr lastRenderedPageBreak".split()
WRITING = Writing(partial(html.escape, quote=False))  # the marks are tags here, to be found again in what is built

Runs = list[tuple[Any, Any]]  # each with the link it stands in, or None
Group = tuple[int, Runs, str | None]  # a number for its looks, the runs, their text if they are nothing else


class WordText:
    """The paragraphs of a document that can be translated, and how to write them."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        self.parts = [_segment(paragraph) for paragraph in _paragraphs(_open(data, name))]

    @property
    def segments(self) -> list[Segment]:
        return [part for part in self.parts if part is not None]

    def write(self, built: Iterable[str | None]) -> bytes:
        """The document with what was built of the segments; None leaves a paragraph as it is."""
        word = _open(self.data, self.name)
        texts = iter(built)
        for paragraph, part in zip(_paragraphs(word), self.parts, strict=True):
            text = None if part is None else next(texts)
            if text is not None:
                _write(paragraph, text)
        out = io.BytesIO()
        word.save(out)
        return out.getvalue()


def _open(data: bytes, name: str) -> Word:
    try:
        import docx
    except ImportError:
        raise UsageError(f"{name}: Word documents need python-docx: pip install 'qkv[serve]'") from None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            members = parts.infolist()
    except (zipfile.BadZipFile, ValueError, OSError):
        raise UsageError(f"{name}: this is no Word document: save it as .docx again") from None
    # An archive gives out no more than the sizes that its list has.
    if sum(member.file_size for member in members) > INFLATED or len(members) > PARTS:
        raise UsageError(f"{name}: unpacked, it would be larger than {INFLATED >> 20} MiB: send it in parts")
    try:
        return docx.Document(io.BytesIO(data))
    except Exception as error:  # a damaged document fails wherever it is damaged
        raise UsageError(f"{name}: this Word document is damaged ({type(error).__name__}): save it again") from None


def _tag(name: str) -> str:
    return f"{{http://schemas.openxmlformats.org/wordprocessingml/2006/main}}{name}"


def _paragraphs(word: Word) -> Iterator[Any]:
    """The paragraphs of the text, in tables and boxes too, and of the headers and footers that the document has."""
    roots = [word.element.body]
    for section in word.sections:
        for margin in (section.header, section.footer, section.first_page_header, section.first_page_footer):
            if not margin.is_linked_to_previous:
                roots.append(margin._element)
    for root in roots:
        for paragraph in root.iter(_tag("p")):
            if not any(True for _ in paragraph.iter(*map(_tag, COMPLEX))):
                yield paragraph


def _pieces(paragraph: Any) -> Iterator[tuple[Any, Any | None]]:
    """The runs of a paragraph, and the link that each stands in."""
    for child in list(paragraph):
        if child.tag == _tag("r"):
            for run in _apart(child):
                yield run, None
        elif child.tag == _tag("hyperlink"):
            for run in list(child.iterchildren(_tag("r"))):
                for part in _apart(run):
                    yield part, child


def _apart(run: Any) -> list[Any]:
    """The run as several: text, and what is no text, each by itself."""
    runs = [run]
    content = [child for child in run if _name(child) not in LOOKS]
    for child, before in zip(content[1:], content, strict=False):
        if (_name(child) in TEXT) != (_name(before) in TEXT):
            after = copy.deepcopy(run)
            for other in list(after):
                if other.tag != _tag("rPr"):
                    after.remove(other)
            runs[-1].addnext(after)
            runs.append(after)
        if len(runs) > 1:
            runs[-1].append(child)
    return runs


def _name(element: Any) -> str:
    return str(element.tag).rsplit("}", 1)[-1]


def _looks(run: Any, link: Any | None) -> tuple[str, int]:
    """What tells two runs apart: how they look, and where they lead."""
    looks = run.find(_tag("rPr"))
    return "" if looks is None else str(looks.xml), id(link)


def _text(run: Any) -> str | None:
    """The text of a run; none, if it holds anything else."""
    text = ""
    for child in run:
        name = _name(child)
        if name in TEXT:
            text += {"tab": "\t", "noBreakHyphen": "\u2011"}.get(name, child.text or "")
        elif name not in LOOKS:
            return None
    return text


def _groups(paragraph: Any) -> list[Group]:
    """Neighbours that look alike."""
    numbers: dict[tuple[str, int], int] = {}
    groups: list[Group] = []
    for run, link in _pieces(paragraph):
        text = _text(run)
        number = numbers.setdefault(_looks(run, link), len(numbers))
        before, runs, so_far = groups[-1] if groups else (-1, [], None)
        if text is not None and so_far is not None and before == number:
            groups[-1] = (number, [*runs, (run, link)], so_far + text)
        else:
            groups.append((number, [(run, link)], text))
    return groups


def _usual(groups: Sequence[Group]) -> int:
    """The looks of most of the text."""
    lengths: dict[int, int] = {}
    for number, _, text in groups:
        lengths[number] = lengths.get(number, 0) + len(text or "")
    return max(lengths, key=lambda number: lengths[number], default=0)


def _segment(paragraph: Any) -> Segment | None:
    """A mark, named by its place, for each group of runs that does not look as usual."""
    groups = _groups(paragraph)
    usual = _usual(groups)
    tokens: list[Token] = []
    for place, (number, runs, text) in enumerate(groups):
        if text is None:
            breaks = runs[0][0].find(_tag("br")) is not None
            tokens.append(Token("alone", f"<x{place}/>", " " if breaks else ""))
        elif number == usual:
            tokens.append(Token("text", text, text))
        else:
            tokens += [Token("open", f"<x{place}>"), Token("text", text, text), Token("close", f"</x{place}>")]
    return None if crowded(tokens) else segment(tokens, WRITING)


def _write(paragraph: Any, built: str) -> None:
    """Put the text in place of the runs: for each stretch of it a copy of the run that it shall look like."""
    groups = _groups(paragraph)
    usual = _usual(groups)
    base = next(place for place, (number, _, text) in enumerate(groups) if number == usual and text is not None)
    old = [run if link is None else link for _, runs, _ in groups for run, link in runs]
    place = paragraph.index(old[0])
    new = [_copy(groups[base if at is None else at], text) for at, text in _stretches(built)]
    for element in old:
        if element.getparent() is paragraph:
            paragraph.remove(element)
    for offset, element in enumerate(new):
        paragraph.insert(place + offset, element)


def _stretches(built: str) -> Iterator[tuple[int | None, str | None]]:
    """The text between marks, with the group that it belongs to; a mark that stands alone has no text."""
    inside: list[int] = []
    done = 0
    for tag in TAG.finditer(built):
        if text := built[done : tag.start()]:
            yield inside[-1] if inside else None, html.unescape(text)
        done = tag.end()
        if tag[3]:
            yield int(tag[2]), None
        elif tag[1]:
            inside.pop()
        else:
            inside.append(int(tag[2]))
    if built[done:]:
        yield None, html.unescape(built[done:])


def _copy(group: Group, text: str | None) -> Any:
    """The first run of a group, with another text or as it is, in its link."""
    from docx.text.run import Run

    run, link = group[1][0]
    made = copy.deepcopy(run)
    if text is not None:
        Run(made, None).text = text  # type: ignore[arg-type]  # the parent is not asked for
    if link is None:
        return made
    around = copy.deepcopy(link)
    for child in list(around):
        around.remove(child)
    around.append(made)
    return around
