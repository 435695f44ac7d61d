"""PowerPoint presentations (.pptx): slides and their notes, tables and text boxes.

Kept and counted in `Document.skipped`: fields (slide numbers, dates), equations, comments, charts, diagrams and
embedded files. Masters and layouts are kept: their texts are prompts that no slide shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from qkv.documents import Document
from qkv.documents.office_runs import RunStory, count_untranslated, is_main, part_types
from qkv.documents.office_story import Style, package_document
from qkv.documents.segments import Segment
from qkv.documents.xml_events import escape_xml
from qkv.documents.zip_package import ZipPackage

SLIDES_TYPE = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
PARTS = (".slide+xml", ".notesSlide+xml")


def read(name: str, data: bytes) -> Document:
    package = ZipPackage(name, data, "a PowerPoint presentation", "pptx")
    types = part_types(package)
    if not is_main(types, "presentationml.", "ms-powerpoint."):
        raise package.error("not a PowerPoint presentation")
    segments: list[Segment] = []
    skipped = Counter(count_untranslated(package, types))
    parts = [member for member, kind in types.items() if kind.endswith(PARTS)]
    stories = [(part, DrawingStory(package.xml(part), segments, skipped)) for part in parts]
    return package_document(package, SLIDES_TYPE, stories, segments, skipped)


class DrawingStory(RunStory):
    """DrawingML text, which Excel's text boxes use too."""

    paragraphs = frozenset(["a:p"])
    run, properties, text = "a:r", "a:rPr", "a:t"
    breaks = frozenset(["a:br"])
    shown = frozenset(["a:fld"])
    untranslated: ClassVar[Mapping[str, str]] = {"a:fld": "field"}

    def write_text(self, style: Style, text: str) -> str:
        return f"{style.before}<{style.prefix}t>{escape_xml(text)}</{style.prefix}t>{style.after}"
