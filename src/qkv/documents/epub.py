"""EPUB books: every XHTML chapter with the HTML reader, the table of contents, and the title in the metadata.

The order of the archive is kept, so `mimetype` stays first and stored. `dc:language` is kept: a reader does not know
the language of the translation. A chapter is counted in `Document.skipped` if its translation would not be XHTML.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from urllib.parse import unquote

from qkv.documents import Document, read_document
from qkv.documents.office_story import Item, Story, Style
from qkv.documents.segments import Segment
from qkv.documents.xml_events import NOT_XML, Event, XmlPart, escape_xml
from qkv.documents.zip_package import ZipPackage

BOOK_TYPE = "application/epub+zip"
CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
CHAPTER_TYPE, CONTENTS_TYPE = "application/xhtml+xml", "application/x-dtbncx+xml"


class LabelStory(Story):
    """The title in the metadata of a book, and the labels of its table of contents."""

    paragraphs = frozenset(["dc:title", "ncx:text"])

    def read_items(self, name: str, events: list[Event], level: int) -> list[Item]:
        return [Item("text" if event.text else "mark", event.source, event.text) for event in events]

    def write_text(self, style: Style, text: str) -> str:
        return escape_xml(text)


def read(name: str, data: bytes) -> Document:
    package = ZipPackage(name, data, "an EPUB book", "epub")
    if CONTAINER not in package or "mimetype" not in package or package.read("mimetype").strip() != BOOK_TYPE.encode():
        raise package.error("not an EPUB book")
    locked = set()
    if ENCRYPTION in package:
        events = package.xml(ENCRYPTION).events()
        locked = {unquote(event.attributes.get("URI", "")) for event in events if event.name == "enc:CipherReference"}
    segments: list[Segment] = []
    skipped: Counter[str] = Counter()
    labels: list[tuple[str, LabelStory]] = []
    chapters: list[tuple[str, Document, int]] = []  # with the number of the first segment
    for member, kind in _parts(package):
        if member in locked:
            raise package.error("encrypted", "send a copy without DRM")
        if kind != CHAPTER_TYPE:
            labels.append((member, LabelStory(package.xml(member), segments, skipped)))
            continue
        chapter = _read_chapter(package, member)
        if chapter is None:
            skipped["chapter"] += 1
        else:
            chapters.append((member, chapter, len(segments)))
            segments += chapter.parts
            skipped += chapter.skipped

    def join(texts: Sequence[str | None]) -> bytes:
        built = dict(enumerate(texts))
        changed = {member: data for member, story in labels if (data := story.write(built)) is not None}
        for member, chapter, first in chapters:
            own = texts[first : first + len(chapter.parts)]
            if any(text is not None for text in own):
                changed[member] = chapter.join([text and NOT_XML.sub("\ufffd", text) for text in own])
                if not XmlPart(name, member, changed[member]).is_well_formed():
                    raise package.error(f"the translation of {member} is not XHTML", "check the tags of this chapter")
        return package.write(changed)

    return Document(name, BOOK_TYPE, segments, join, skipped)


def _parts(package: ZipPackage) -> list[tuple[str, str]]:
    """The members with text and their media types: package documents, then what their manifests list."""
    parts: dict[str, str] = {}
    for root in package.xml(CONTAINER).events():
        if root.kind != "start" or root.name != "ocf:rootfile":
            continue
        book = root.attributes.get("full-path", "")
        if book not in package:
            raise package.error(f"damaged file ({book!a} is missing)")
        parts[book] = root.attributes.get("media-type", "")
        for item in package.xml(book).events():
            if item.kind == "start" and item.name == "opf:item":
                href = unquote(item.attributes.get("href", ""))
                path = posixpath.normpath(posixpath.join(posixpath.dirname(book), href))
                kind = item.attributes.get("media-type", "")
                if kind in (CHAPTER_TYPE, CONTENTS_TYPE) and path in package:
                    parts.setdefault(path, kind)
    return [*parts.items()]


def _read_chapter(package: ZipPackage, member: str) -> Document | None:
    """Read a chapter, or return None if the HTML reader cannot change it and keep it XHTML."""
    data = package.read(member)
    if not XmlPart(package.name, member, data).is_well_formed():
        return None
    chapter = read_document("chapter.html", data)
    trial = chapter.build([f"{segment} ." for segment in chapter.segments])
    return chapter if XmlPart(package.name, member, trial).is_well_formed() else None
