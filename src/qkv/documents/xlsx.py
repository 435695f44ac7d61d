"""Excel workbooks (.xlsx): the texts of cells and of text boxes.

A cell's text is a shared string or an inline string; formulas, their results and the names of sheets are never changed.
Kept and counted in `Document.skipped`: the header cells of tables (formulas refer to columns by these names), cells
with a phonetic guide, page headers and footers, comments, charts, diagrams and embedded files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from qkv.documents import Document
from qkv.documents.office_runs import RunStory, count_untranslated, is_main, part_types
from qkv.documents.office_story import Item, KeptError, Story, Style, package_document
from qkv.documents.pptx import DrawingStory
from qkv.documents.segments import Segment
from qkv.documents.xml_events import Event, XmlPart, escape_xml
from qkv.documents.zip_package import ZipPackage

WORKBOOK_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
MARGINS = [f"s:{page}{margin}" for page in ("odd", "even", "first") for margin in ("Header", "Footer")]
MARGIN_CODE = re.compile(r'&(?:"[^"]*"|K[0-9A-F]{6}|[0-9]+|.)', re.DOTALL)  # of a page header: a font, the page …


def read(name: str, data: bytes) -> Document:
    package = ZipPackage(name, data, "an Excel workbook", "xlsx")
    types = part_types(package)
    if not is_main(types, "spreadsheetml.", "ms-excel."):
        raise package.error("not an Excel workbook")
    segments: list[Segment] = []
    skipped = Counter(count_untranslated(package, types))
    headers = frozenset(_column_names(package, types))
    stories: list[tuple[str, Story]] = []
    for member, kind in types.items():
        if kind.endswith((".sharedStrings+xml", ".worksheet+xml")):
            part = package.xml(member)
            # A sheet can be large; most have nothing to read but references to shared strings.
            if ".shared" in kind or b"inlineStr" in part.data or b"headerFooter" in part.data:
                stories.append((member, CellStory(part, segments, skipped, headers)))
        elif kind.endswith("officedocument.drawing+xml"):
            stories.append((member, DrawingStory(package.xml(member), segments, skipped)))
    return package_document(package, WORKBOOK_TYPE, stories, segments, skipped)


def _column_names(package: ZipPackage, types: Mapping[str, str]) -> set[str]:
    """The names of the columns of all tables; each equals the text of a header cell."""
    tables = [member for member, kind in types.items() if kind.endswith("spreadsheetml.table+xml")]
    events = [event for member in tables for event in package.xml(member).events()]
    names = {event.attributes.get("name", "") for event in events if event.name == "s:tableColumn"}
    return {_as_column_name(name) for name in names}


def _as_column_name(text: str) -> str:
    """A column name writes line breaks of its cell as _x000a_."""
    return " ".join(re.sub(r"_x000[aAdD]_", "\n", text).split())


class CellStory(RunStory):
    """Shared strings (`si`) and inline strings (`is`)."""

    paragraphs = frozenset(["s:si", "s:is", *MARGINS])
    run, properties, text = "s:r", "s:rPr", "s:t"
    special = re.compile(r"([\t\n\r]|_x[0-9A-Fa-f]{4}_)")
    unsupported: ClassVar[Mapping[str, str]] = {"s:rPh": "phonetic guide"}

    def __init__(self, part: XmlPart, segments: list[Segment], skipped: Counter[str], headers: frozenset[str]) -> None:
        self.headers = headers
        super().__init__(part, segments, skipped)

    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        if name in MARGINS:
            text = MARGIN_CODE.sub("", "".join(event.text for event in events))
            if any(character.isalnum() for character in text):
                raise KeptError("header or footer")
            return []
        items = super().read_items(name, events, level)
        if self.headers and _as_column_name("".join(item.text for item in items)) in self.headers:
            raise KeptError("table header")
        return items

    def write_text(self, style: Style, text: str) -> str:
        name = f"{style.prefix}t"
        return f'{style.before}<{name} xml:space="preserve">{escape_xml(text)}</{name}>{style.after}'
