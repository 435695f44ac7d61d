"""OpenDocument texts (.odt): body, tables, text boxes, notes, headers and footers.

A span or a hyperlink is a container; adjacent spans of one style are one. Spaces, tabs, line breaks, notes, bookmarks,
frames and fields inside a paragraph are marks. Kept and counted in `Document.skipped`: fields, deleted text of tracked
changes, comments, tables of contents and other indexes, forms, and embedded objects (equations, charts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from qkv.documents import Document
from qkv.documents.office_story import Item, Story, Style, kept_item, package_document
from qkv.documents.segments import Segment
from qkv.documents.xml_events import Event, escape_xml
from qkv.documents.zip_package import ZipPackage

TEXT_TYPE = "application/vnd.oasis.opendocument.text"
CONTAINERS = frozenset("text:span text:a text:meta".split())
SPACES = frozenset("text:s text:tab text:line-break".split())
INDEXES = "table-of-content illustration-index table-index object-index user-index alphabetical-index bibliography"
NOT_FIELDS = frozenset(
    "note ruby s tab line-break soft-page-break alphabetical-index-mark alphabetical-index-mark-start toc-mark "
    "alphabetical-index-mark-end toc-mark-start toc-mark-end user-index-mark change change-start change-end bookmark "
    "bookmark-start bookmark-end reference-mark reference-mark-start reference-mark-end".split()
)


def read(name: str, data: bytes) -> Document:
    package = ZipPackage(name, data, "an OpenDocument text", "odt")
    if "content.xml" not in package or "mimetype" not in package:
        raise package.error("not an OpenDocument text")
    if not package.read("mimetype").decode("ascii", "replace").strip().startswith(TEXT_TYPE):
        raise package.error("not an OpenDocument text")
    segments: list[Segment] = []
    skipped: Counter[str] = Counter()
    if "META-INF/manifest.xml" in package:
        _count_objects(package, skipped)
    parts = [member for member in ("content.xml", "styles.xml") if member in package]
    stories = [(part, OpenDocumentStory(package.xml(part), segments, skipped)) for part in parts]
    return package_document(package, TEXT_TYPE, stories, segments, skipped)


def _count_objects(package: ZipPackage, skipped: Counter[str]) -> None:
    """Count equations and charts, which are documents of their own; refuse a file with a password."""
    # Old files declare the namespace of their manifest in a DTD only, which is not read.
    for event in package.xml("META-INF/manifest.xml").events(namespaces=False):
        name = event.name.rpartition(":")[2]
        if name == "encryption-data":
            raise package.error("encrypted", "save it as .odt without a password")
        if event.kind == "start" and name == "file-entry":
            kind = next((value for key, value in event.attributes.items() if key.endswith("media-type")), "")
            for label in ("formula", "chart"):
                if kind == f"application/vnd.oasis.opendocument.{label}":
                    skipped["equation" if label == "formula" else label] += 1


class OpenDocumentStory(Story):
    paragraphs = frozenset(["text:p", "text:h"])
    kept: ClassVar[Mapping[str, str]] = {
        "text:changed-region": "tracked change",
        "office:annotation": "comment",
        "office:forms": "form",
        **{f"text:{name}": "table of contents" if name == "table-of-content" else "index" for name in INDEXES.split()},
    }

    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        items: list[Item] = []
        mark: list[Event] = []  # of the element that is being read
        depth = 0
        for event in events:
            if depth or (event.kind == "start" and event.name not in CONTAINERS):
                depth += (event.kind == "start") - (event.kind == "end")
                mark.append(event)
                if not depth:
                    items.append(self._mark(mark))
                    mark = []
            elif event.text:
                items.append(Item("text", event.source, event.text))
            elif event.kind in ("text", "other"):  # an empty CDATA section, or a comment
                items.append(Item("mark", event.source))
            else:
                items.append(Item("open" if event.kind == "start" else "close", event.source))
        return _join_containers(items)

    def _mark(self, events: list[Event]) -> Item:
        name, identifier = events[0].name, events[0].attributes
        prefix, _, local = name.partition(":")
        if prefix == "text" and local not in NOT_FIELDS:
            self.skipped["field"] += 1
            return kept_item("".join(event.source for event in events), "".join(event.text for event in events))
        key = next((identifier[key] for key in ("text:name", "text:change-id", "text:id") if key in identifier), "")
        base = local.removesuffix("-start").removesuffix("-end")
        pair = f"{base} {key}" if base != local else ""
        return Item("mark", "".join(event.source for event in events), " " if name in SPACES else "", pair=pair)

    def write_text(self, style: Style, text: str) -> str:
        return escape_xml(text)


def _join_containers(items: list[Item]) -> list[Item]:
    """Join a container to the next one if they have equal tags; containers without content are marks."""
    joined: list[Item] = []
    opened: list[Item] = []
    closed: list[Item] = []  # the containers that the last items close
    for item in items:
        if item.kind == "open":
            if closed and joined[-1].kind == "close" and closed[-1].source == item.source:
                joined.pop()
            else:
                joined.append(item)
            opened.append(item)
        elif item.kind == "close" and joined and joined[-1] is opened[-1]:
            opened.pop()
            joined[-1] = Item("mark", joined[-1].source + item.source)
        elif item.kind == "close":
            closed = [opened.pop()]
            joined.append(item)
        else:
            joined.append(item)
    return joined
