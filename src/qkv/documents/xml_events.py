"""XML parts as events with their source, so that a part can be changed in some places and kept to the byte elsewhere.

The parser is expat of the standard library, because it reports the byte position of every event; lxml does not. No
entity but the five of XML is accepted, nothing outside the part is read, and the time is linear in its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.parsers import expat

from qkv.core.errors import UsageError

ECMA, ISO = "http://schemas.openxmlformats.org/", "http://purl.oclc.org/ooxml/"
ODF = "urn:oasis:names:tc:opendocument:xmlns:"
NAMESPACES = {
    "w": (ECMA + "wordprocessingml/2006/main", ISO + "wordprocessingml/main"),
    "a": (ECMA + "drawingml/2006/main", ISO + "drawingml/main"),
    "p": (ECMA + "presentationml/2006/main", ISO + "presentationml/main"),
    "s": (ECMA + "spreadsheetml/2006/main", ISO + "spreadsheetml/main"),
    "m": (ECMA + "officeDocument/2006/math", ISO + "officeDocument/math"),
    "mc": (ECMA + "markup-compatibility/2006",),
    "types": (ECMA + "package/2006/content-types",),
    "a14": ("http://schemas.microsoft.com/office/drawing/2010/main",),
    "text": (ODF + "text:1.0",),
    "office": (ODF + "office:1.0",),
    "draw": (ODF + "drawing:1.0",),
    "manifest": (ODF + "manifest:1.0",),
    "xlink": ("http://www.w3.org/1999/xlink",),
    "xml": ("http://www.w3.org/XML/1998/namespace",),
    "dc": ("http://purl.org/dc/elements/1.1/",),
    "opf": ("http://www.idpf.org/2007/opf",),
    "ocf": ("urn:oasis:names:tc:opendocument:xmlns:container",),
    "ncx": ("http://www.daisy.org/z3986/2005/ncx/",),
    "enc": ("http://www.w3.org/2001/04/xmlenc#",),
}
PREFIXES = {uri: prefix for prefix, uris in NAMESPACES.items() for uri in uris}
ENCODING = re.compile(rb"""<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")
KNOWN_ENCODING = re.compile(r"utf-?8|utf-?16(?:-?[lb]e)?|us-ascii|iso-8859-\d+|windows-125\d", re.IGNORECASE)
BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class Event:
    """A start tag, an end tag, text or anything else, from byte `begin` to `end` of the part.

    The name of an element or attribute has a fixed prefix for each known namespace (`NAMESPACES`), "?" for others.
    """

    kind: str
    name: str
    attributes: dict[str, str]
    text: str
    begin: int
    end: int = 0
    source: str = ""  # filled in where it is needed


class XmlPart:
    """The bytes of an XML part as UTF-8, and the encoding to write it again."""

    def __init__(self, name: str, part: str, data: bytes) -> None:
        self.name, self.part = name, part
        self.bom = next((bom for bom in BOMS if data.startswith(bom)), b"")
        declared = ENCODING.match(data[len(self.bom) :])
        self.encoding = BOMS.get(self.bom) or (declared[1].decode() if declared else "utf-8")
        if not KNOWN_ENCODING.fullmatch(self.encoding):
            raise UsageError(f"{name}: {part} has the unknown encoding {self.encoding}: save it as UTF-8")
        try:
            self.data = data[len(self.bom) :]
            if self.encoding.lower() not in ("utf-8", "utf8"):
                self.data = self.data.decode(self.encoding).encode()
        except (UnicodeError, LookupError):
            raise self.damaged() from None

    def encode(self, data: bytes) -> bytes:
        """Return UTF-8 data in the encoding of the part."""
        if self.encoding.lower() in ("utf-8", "utf8"):
            return self.bom + data
        return self.bom + data.decode().encode(self.encoding, "xmlcharrefreplace")

    def source(self, begin: int, end: int) -> str:
        return self.data[begin:end].decode()

    def damaged(self) -> UsageError:
        return UsageError(f"{self.name}: damaged XML in {self.part}: save the document again")

    def is_well_formed(self) -> bool:
        """Whether the part is XML; entities that its document type may define are allowed."""
        parser = expat.ParserCreate("utf-8")
        parser.UseForeignDTD(True)
        parser.EntityDeclHandler = self._refuse_entities
        try:
            parser.Parse(self.data, True)
        except expat.ExpatError:
            return False
        return True

    def _refuse_entities(self, *_: object) -> None:
        raise UsageError(f"{self.name}: {self.part} declares entities: remove its DOCTYPE and send it again")

    def events(self, namespaces: bool = True) -> Iterator[Event]:
        """Yield the events in order; their sources, joined, are the part. Without namespaces, names are as written."""
        recorder = _Recorder(self, namespaces)
        fed = 0
        while fed < len(self.data):
            # A tag that does not end in a chunk is parsed again with the next one: growing chunks keep that linear.
            size = max(CHUNK_BYTES, fed - max(0, recorder.parser.CurrentByteIndex))
            recorder.feed(self.data[fed : fed + size], last=fed + size >= len(self.data))
            fed += size
            yield from recorder.take()
        if not fed:
            raise self.damaged()
        yield from recorder.take(len(self.data))


class _Recorder:
    """Collects expat's callbacks as events; adjacent texts are one event."""

    def __init__(self, part: XmlPart, namespaces: bool) -> None:
        self.part = part
        self.waiting: list[Event] = []
        self.texts: list[str] = []  # of the last event
        self.names: dict[str, str] = {}
        parser = self.parser = expat.ParserCreate("utf-8", " " if namespaces else None)
        parser.StartElementHandler = self._start
        parser.EndElementHandler = lambda name: self._add("end", self._short(name))
        parser.CharacterDataHandler = self._text
        parser.StartCdataSectionHandler = parser.EndCdataSectionHandler = lambda: self._text("")
        parser.DefaultHandler = lambda _: self._other()
        parser.CommentHandler = lambda _: self._other()
        parser.ProcessingInstructionHandler = lambda *_: self._other()
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = part._refuse_entities

    def feed(self, data: bytes, last: bool) -> None:
        try:
            self.parser.Parse(data, last)
        except expat.ExpatError:
            raise self.part.damaged() from None

    def take(self, end: int | None = None) -> list[Event]:
        """Return the complete events: all but the last one, whose end is not known before the next event."""
        if end is not None:
            self._finish_text()
        events, self.waiting = self.waiting, []
        if events and end is None:
            self.waiting = [events.pop()]
        begins = [event.begin for event in [*events, *self.waiting]] + ([] if end is None else [end])
        for event, stop in zip(events, begins[1:], strict=True):
            event.end = stop
        return events

    def _short(self, name: str) -> str:
        short = self.names.get(name)
        if short is None:
            uri, _, local = name.rpartition(" ")
            short = self.names[name] = f"{PREFIXES.get(uri, '?')}:{local}" if uri else local
        return short

    def _add(self, kind: str, name: str = "", attributes: dict[str, str] | None = None) -> None:
        self._finish_text()
        self.waiting.append(Event(kind, name, attributes or {}, "", self.parser.CurrentByteIndex))

    def _finish_text(self) -> None:
        if self.texts:
            self.waiting[-1].text = "".join(self.texts)
            self.texts = []

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._add("start", self._short(name), {self._short(key): value for key, value in attributes.items()})

    def _text(self, text: str) -> None:
        if not self.waiting or self.waiting[-1].kind != "text":
            self._add("text")
        self.texts.append(text)

    def _other(self) -> None:
        if not self.waiting or self.waiting[-1].kind != "other":
            self._add("other")

    def _doctype(self, _name: str, _system: str | None, _public: str | None, internal_subset: int) -> None:
        if internal_subset:
            self.part._refuse_entities()
        self._other()


def escape_xml(text: str) -> str:
    """Return text for an element's content; characters that XML forbids become U+FFFD."""
    return NOT_XML.sub("\ufffd", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def unescape_xml(text: str) -> str:
    """Undo `escape_xml`."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
