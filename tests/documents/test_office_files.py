"""Generated office files: translated texts in the same structure, every other byte kept."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from office_builders import Generator, members_of
from qkv.documents import Document, read_document

FORMATS = ["docx", "pptx", "xlsx", "odt", "epub"]
IGNORED = {"proofErr", "lastRenderedPageBreak", "lang"}
SPACE = "{http://www.w3.org/XML/1998/namespace}space"


def local(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def shape(element: ET.Element, style: str = "") -> list[tuple[str, ...]]:
    """The tags and texts in order, with the style of each text; runs and spans do not count as tags."""
    name = local(element)
    if name in IGNORED:
        return []
    out: list[tuple[str, ...]] = []
    attributes = sorted((key, value) for key, value in element.attrib.items() if key != SPACE)
    if name in ("r", "span", "t"):
        properties = next((ET.tostring(each) for each in element if local(each) == "rPr"), b"")
        shown = re.sub(rb"<[^>]*:lang [^>]*>| (lang|dirty)=\"\w*\"", b"", properties).decode() + str(
            attributes if name == "span" else ""
        )
        style = shown if name in ("r", "span") else style
    else:
        out.append((f"<{name}", str(attributes)))
    if element.text:
        out.append(("text", style, element.text))
    for child in element:
        if local(child) != "rPr":
            out += shape(child, style)
        if child.tail:
            out.append(("text", style, child.tail))
    if name not in ("r", "span", "t"):
        out.append((f"</{name}",))
    return out


def merged(shapes: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join adjacent texts of one style; white space does not count."""
    out: list[tuple[str, ...]] = []
    for each in shapes:
        if each[0] == "text":
            text = "".join(each[2].split())
            if out and out[-1][:2] == each[:2]:
                text = out.pop()[2] + text
            each = ("text", each[1], text)
        if each[0] != "text" or each[2]:
            out.append(each)
    return out


def swapped(document: Document) -> list[str]:
    """Each segment with the case of its letters changed outside of protected spans."""
    translations = []
    for segment, spans in zip(document.segments, document.protected, strict=True):
        edges = [0, *(edge for span in spans for edge in span), len(segment)]
        pieces = [segment[begin:end] for begin, end in pairwise(edges)]
        translations.append("".join(piece if number % 2 else piece.swapcase() for number, piece in enumerate(pieces)))
    return translations


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", FORMATS)
def test_only_texts_change(kind: str, seed: int) -> None:
    generator = Generator(seed)
    data = getattr(generator, kind)()
    document = read_document(f"a.{kind}", data)
    assert document.segments
    assert document.build(document.segments) == data
    translated = document.build(swapped(document))
    before, after = members_of(data), members_of(translated)
    assert list(before) == list(after)
    sources = b"".join(after.values())
    assert not [source for source in generator.protected if sources.count(source.encode()) != 1]
    changed = [name for name in before if before[name] != after[name]]
    assert changed
    assert all(name.endswith(("xml", "xhtml", "opf", "ncx")) for name in changed)
    for name in changed:
        old, new = (merged(shape(ET.fromstring(each[name]))) for each in (before, after))
        assert [each[:2] for each in old] == [each[:2] for each in new]
        assert [each[2].casefold() for each in old if each[0] == "text"] == [
            each[2].casefold() for each in new if each[0] == "text"
        ]
    again = read_document(f"a.{kind}", translated)
    assert again.segments == swapped(document)
    assert again.skipped == document.skipped


@pytest.mark.parametrize("kind", FORMATS)
def test_marks_survive_any_translation(kind: str) -> None:
    """A translation of other words in another order keeps every mark once, and the XML well-formed."""
    for seed in range(10, 15):
        generator = Generator(seed)
        data = getattr(generator, kind)()
        document = read_document(f"a.{kind}", data)
        translations = [f'{segment[::-1]} <x0> & "more" \x00\ud800' for segment in document.segments]
        after = members_of(document.build(translations))
        sources = b"".join(after.values())
        assert not [source for source in generator.protected if sources.count(source.encode()) != 1]
        for name, content in after.items():
            if name.endswith(("xml", "xhtml")):
                ET.fromstring(content)
