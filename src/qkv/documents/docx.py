"""Word documents (.docx): body, tables, text boxes, headers, footers, footnotes and endnotes.

A run's formatting is a mark, a hyperlink a container. Tabs, breaks, pictures, note references, equations, bookmarks,
fields (page numbers, dates) and content controls inside a paragraph are marks: they stay, as they are, between the
same words. Kept and counted in `Document.skipped`: paragraphs with tracked changes or in a field of several paragraphs
(a table of contents), equations, fields, content controls, comments, charts, diagrams and embedded files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from qkv.documents import Document
from qkv.documents.office_runs import RunStory, count_untranslated, part_types
from qkv.documents.office_story import MAX_NESTING, Item, KeptError, Style, kept_item, package_document
from qkv.documents.segments import Segment
from qkv.documents.xml_events import Event, XmlPart, escape_xml
from qkv.documents.zip_package import ZipPackage

WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
PARTS = (".header+xml", ".footer+xml", ".footnotes+xml", ".endnotes+xml")
ELEMENTS = {"\t": "tab", "\u2011": "noBreakHyphen", "\u00ad": "softHyphen"}  # characters that Word writes as elements
CHARACTERS = re.compile(f"([{''.join(ELEMENTS)}])")


def read(name: str, data: bytes) -> Document:
    package = ZipPackage(name, data, "a Word document", "docx")
    types = part_types(package)
    main = [member for member, kind in types.items() if kind.endswith(".main+xml") and "word" in kind]
    if not main:
        raise package.error("not a Word document")
    segments: list[Segment] = []
    skipped = Counter(count_untranslated(package, types))
    parts = [*main, *(member for member, kind in types.items() if kind.endswith(PARTS))]
    stories = [(part, WordStory(package.xml(part), segments, skipped)) for part in parts]
    return package_document(package, WORD_TYPE, stories, segments, skipped)


class WordStory(RunStory):
    paragraphs = frozenset(["w:p"])
    run, properties, text = "w:r", "w:rPr", "w:t"
    containers = frozenset("w:hyperlink w:smartTag w:customXml w:bdo w:dir".split())
    container_properties = frozenset("w:smartTagPr w:customXmlPr".split())
    dropped = frozenset("w:proofErr w:lastRenderedPageBreak".split())
    breaks = frozenset("w:br w:cr w:ptab".split())
    characters: ClassVar[Mapping[str, str]] = {f"w:{name}": character for character, name in ELEMENTS.items()}
    untranslated: ClassVar[Mapping[str, str]] = {
        "w:fldSimple": "field",
        "w:sdt": "content control",
        "w:ruby": "phonetic guide",
    }
    shown = frozenset("w:fldSimple w:sdt".split())
    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        "w:ins w:del w:moveFrom w:moveTo".split(), "tracked change"
    )
    ranges: ClassVar[Mapping[str, str]] = {
        f"w:{name}{edge}": name for name in ("bookmark", "commentRange", "perm") for edge in ("Start", "End")
    }

    def __init__(self, part: XmlPart, segments: list[Segment], skipped: Counter[str]) -> None:
        self._open_fields: dict[int, int] = {}  # level: fields that continue in the next paragraph
        super().__init__(part, segments, skipped)

    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        """The items of a paragraph; a field is one mark, but a hyperlink field is a container."""
        depths = self._open_fields
        depths.pop(level + 1, None)
        before = depth = lowest = depths.get(level, 0)
        for event in events:
            if event.kind == "start" and event.name == "w:fldChar":
                edge = event.attributes.get("w:fldCharType")
                depth += (edge == "begin") - (edge == "end")
                lowest = min(lowest, depth)
        depths[level] = max(depth, 0)
        if before or depth or lowest < 0:
            raise KeptError("field")
        open_fields: list[list[Item]] = [[]]
        for item in super().read_items(name, events, level):
            if item.field == "begin":
                open_fields.append([])
            open_fields[-1].append(item)
            if item.field == "end" and len(open_fields) > 1:
                done = open_fields.pop()
                open_fields[-1] += self._field(done)
            elif item.field == "end" or len(open_fields) > MAX_NESTING:
                raise KeptError("field")
        if len(open_fields) > 1:  # its end is inside a mark, such as a content control
            raise KeptError("field")
        return open_fields[0]

    def _field(self, items: list[Item]) -> list[Item]:
        edges = [item.field for item in items]
        shown = edges.index("separate") if "separate" in edges else len(items) - 1
        instruction = "".join(item.text for item in items[:shown] if item.field == "instruction")
        sources = [item.source for item in items]
        if instruction.split()[:1] == ["HYPERLINK"] and "separate" in edges:
            opening = Item("open", "".join(sources[: shown + 1]), field="field")
            return [opening, *items[shown + 1 : -1], Item("close", sources[-1], field="field")]
        if any(item.kind in ("open", "close") for item in items):
            raise KeptError("field")
        self.skipped["field"] += 1
        return [kept_item("".join(sources), "".join(item.text for item in items[shown:] if item.kind == "text"))]

    def field_edge(self, event: Event) -> str:
        if event.name == "w:fldChar":
            return event.attributes.get("w:fldCharType", "")
        return "instruction" if event.name == "w:instrText" else ""

    def visible_text(self, event: Event, text: str) -> str:
        """Word ignores outer white space unless the text says otherwise."""
        return text if event.attributes.get("xml:space") == "preserve" else text.strip(" \t\r\n")

    def write_text(self, style: Style, text: str) -> str:
        name, out = style.prefix, [style.before]
        for stretch in CHARACTERS.split(text):
            if stretch in ELEMENTS:
                out.append(f"<{name}{ELEMENTS[stretch]}/>")
            elif stretch:
                out.append(f'<{name}t xml:space="preserve">{escape_xml(stretch)}</{name}t>')
        return "".join([*out, style.after])
