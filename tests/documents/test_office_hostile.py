"""Hostile and unusual office files: one clear line, or a whole document in linear time."""

from __future__ import annotations

import gc
import io
import struct
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress

import pytest

from office_builders import docx, epub, members_of, odt, package, pptx, xlsx, zip_of
from qkv.core.errors import UsageError
from qkv.documents import read_document, zip_package

PARAGRAPH = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"
SMALL = {
    "docx": docx(PARAGRAPH.format("text")),
    "pptx": pptx("<a:p><a:r><a:t>text</a:t></a:r></a:p>"),
    "xlsx": xlsx("<si><t>text</t></si>"),
    "odt": odt("<text:p>text</text:p>"),
    "epub": epub("<p>text</p>"),
}


def refused(name: str, data: bytes) -> str:
    with pytest.raises(UsageError) as raised:
        read_document(name, data)
    message = str(raised.value)
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", SMALL)
def test_every_truncated_archive_is_refused(kind: str) -> None:
    data = SMALL[kind]
    for size in (0, 1, 4, 30, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1):
        refused(f"a.{kind}", data[:size])


@pytest.mark.parametrize("kind", SMALL)
def test_a_changed_byte_raises_no_other_error(kind: str) -> None:
    data = SMALL[kind]
    for place in range(0, len(data), 7):
        broken = data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :]
        with suppress(UsageError):
            document = read_document(f"a.{kind}", broken)
            document.build([segment.upper() for segment in document.segments])


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("other", [*SMALL, "txt", "zip", "ole", "png"])
def test_a_file_that_lies_about_its_type_is_refused(kind: str, other: str) -> None:
    others = {"txt": b"just text", "zip": zip_of({"a": "b"}), "ole": b"\xd0\xcf\x11\xe0\xa1\xb1", "png": b"\x89PNG\r\n"}
    if kind != other:
        message = refused(f"a.{kind}", (SMALL | others)[other])
        assert ("password" if other == "ole" else "not a") in message


def test_bombs_are_refused_while_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_package, "MAX_UNPACKED_BYTES", 1 << 20)
    bomb = docx(PARAGRAPH.format("x" * (2 << 20)))
    assert len(bomb) < 10_000
    assert "larger than 1 MiB when unpacked" in refused("a.docx", bomb)
    directory = bomb.index(b"PK\x01\x02")
    place = bomb.index(b"word/document.xml", directory) - 46 + 24
    lying = bomb[:place] + struct.pack("<L", 100) + bomb[place + 4 :]
    assert "larger than 1 MiB when unpacked" in refused("a.docx", lying)
    monkeypatch.setattr(zip_package, "MAX_UNPACKED_BYTES", 8 << 20)
    monkeypatch.setattr(zip_package, "FREE_BYTES", 1 << 20)
    assert "larger than" in refused("a.docx", bomb)  # the ratio
    monkeypatch.setattr(zip_package, "MAX_MEMBERS", 5)
    assert "more than 5 files" in refused("a.docx", zip_of({str(number): "" for number in range(9)}))
    monkeypatch.setattr(zip_package, "MAX_DECLARED_BYTES", 100)
    assert "when unpacked" in refused("a.docx", SMALL["docx"])


def test_members_that_overlap_are_refused() -> None:
    data = SMALL["docx"]
    directory = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", directory + 4)
    overlapping = data[: second + 42] + data[directory + 42 : directory + 46] + data[second + 46 :]
    assert "damaged" in refused("a.docx", overlapping)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..\\b", "C:/b", "\\b"])
def test_names_outside_the_archive_are_refused(name: str) -> None:
    assert "points outside" in refused("a.odt", zip_of({**members_of(SMALL["odt"]), name: "x"}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_occur_twice_are_refused() -> None:
    out = io.BytesIO(SMALL["docx"])
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("word/document.xml", "<other/>")
    assert "occurs twice" in refused("a.docx", out.getvalue())
    assert "occurs twice" in refused("a.odt", zip_of({**members_of(SMALL["odt"]), "CONTENT.xml": "x"}))


def test_encrypted_members_are_refused() -> None:
    data = bytearray(SMALL["docx"])
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    assert "encrypted" in refused("a.docx", bytes(data))
    entry = "<m:file-entry m:full-path='content.xml'><m:encryption-data/></m:file-entry>"
    assert "encrypted" in refused("a.odt", odt("<text:p>x</text:p>", manifest=entry))
    locked = '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:CipherReference URI="OEBPS/c1.xhtml"/>'
    assert "DRM" in refused("a.epub", epub("<p>x</p>", encryption=f"{locked}</encryption>"))


LAUGHS = '<!DOCTYPE w [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;">]>'
OUTSIDE = '<!DOCTYPE w [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "entities": lambda xml: xml.replace("<w:document", f"{LAUGHS}<w:document").replace("text", "&c;").encode(),
    "a file": lambda xml: xml.replace("<w:document", f"{OUTSIDE}<w:document").replace("text", "&a;").encode(),
    "undefined entity": lambda xml: xml.replace("text", "&nbsp;").encode(),
    "surrogate": lambda xml: xml.replace("text", "\ud800").encode("utf-8", "surrogatepass"),
    "surrogate reference": lambda xml: xml.replace("text", "&#xD800;").encode(),
    "control character": lambda xml: xml.replace("text", "\0").encode(),
    "not closed": lambda xml: xml.replace("</w:p>", "").encode(),
    "no namespace": lambda xml: xml.replace("<w:p>", "<q:p>").encode(),
    "codec": lambda xml: xml.replace("UTF-8", "zlib").encode(),
    "UTF-16": lambda xml: xml.encode("utf-16")[:-1],
    "empty": lambda xml: b"",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_xml_is_refused(how: str) -> None:
    members: dict[str, str | bytes] = {**members_of(SMALL["docx"])}
    xml = members["word/document.xml"]
    assert isinstance(xml, bytes)
    message = refused("a.docx", zip_of(members | {"word/document.xml": HOSTILE[how](xml.decode())}))
    assert "word/document.xml" in message


def test_deep_nesting_is_kept() -> None:
    nested = PARAGRAPH.format("inner")
    for _ in range(300):
        nested = f"<w:p><w:r><w:pict>{nested}</w:pict><w:t>outer</w:t></w:r></w:p>"
    data = docx(nested)
    document = read_document("a.docx", data)
    assert document.build(document.segments) == data
    assert set(document.segments) == {"outer"}
    written = members_of(document.build(["fuori"] * len(document.segments)))["word/document.xml"]
    assert written.count(b"fuori") == len(document.segments)
    assert written.count(b"outer") == 300 - len(document.segments)
    deep = "<x>" * 50_000 + "</x>" * 50_000
    assert read_document("a.odt", odt(f"<text:p>one {deep} two</text:p>")).segments == ["one two"]


STREAMED = "a document that was written to a stream"


def test_archives_of_other_programs_are_read() -> None:
    """Sizes after the data, Zip64 fields, and a comment."""

    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.data += data
            return len(data)

    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, data in members_of(docx(PARAGRAPH.format(STREAMED))).items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    document = read_document("a.docx", bytes(stream.data))
    assert document.segments == [STREAMED]
    assert document.build(document.segments) == stream.data
    written = document.build(["CHANGED"])
    assert b">CHANGED<" in members_of(written)["word/document.xml"]
    assert read_document("a.docx", written).segments == ["CHANGED"]


def test_unchanged_members_are_copied_byte_for_byte() -> None:
    data = docx(PARAGRAPH.format("text"), header=PARAGRAPH.format("123, ."))
    document = read_document("a.docx", data)
    written = document.build(["TEXT", *document.segments[1:]])
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(io.BytesIO(written)) as new:
        assert new.comment == old.comment
        for before, after in zip(old.infolist(), new.infolist(), strict=True):
            for attribute in ("filename", "date_time", "compress_type", "external_attr", "create_system", "extra"):
                assert getattr(before, attribute) == getattr(after, attribute)
            raw = [
                each[info.header_offset : info.header_offset + 30 + len(info.filename) + info.compress_size]
                for each, info in ((data, before), (written, after))
            ]
            assert (raw[0] == raw[1]) is (before.filename != "word/document.xml")


RUN = '<w:r>{}<w:t xml:space="preserve">word </w:t></w:r>'
UNITS = {
    "runs": lambda n: docx("<w:p>" + (RUN.format("") + RUN.format("<w:rPr><w:b/></w:rPr>")) * n + "</w:p>"),
    "equal runs": lambda n: docx("<w:p>" + RUN.format("") * n + "</w:p>"),
    "paragraphs": lambda n: docx(PARAGRAPH.format("word") * n),
    "long text": lambda n: docx(PARAGRAPH.format("word &amp;\n" * 5 * n)),
    "bookmarks": lambda n: docx(
        "<w:p>" + RUN.format("") + '<w:bookmarkStart w:id="1"/>' * n + RUN.format("") + "</w:p>"
    ),
    "fields": lambda n: docx("<w:p>" + '<w:r><w:fldChar w:fldCharType="begin"/></w:r>' * n + RUN.format("") + "</w:p>"),
    "links": lambda n: docx("<w:p>" + "<w:hyperlink>" * n + RUN.format("") + "</w:hyperlink>" * n + "</w:p>"),
    "comment": lambda n: docx("<!--" + "x" * 100 * n + "-->" + PARAGRAPH.format("word")),
    "attribute": lambda n: docx(f"<w:p w:id='{'x' * 100 * n}'>{RUN.format('')}</w:p>"),
    "cells": lambda n: xlsx("<si><t>word</t></si>" * n),
    "spans": lambda n: odt("<text:p>" + "<text:span>word </text:span>" * n + "</text:p>"),
    "spaces": lambda n: odt("<text:p>a" + "<text:s/>" * n + "b</text:p>"),
}


@pytest.mark.parametrize("unit", UNITS)
def test_unusual_files_take_linear_time(unit: str) -> None:
    def seconds(n: int) -> float:
        data = UNITS[unit](n)
        kind = "xlsx" if unit == "cells" else "odt" if unit in ("spans", "spaces") else "docx"
        gc.collect()
        gc.disable()
        begin = time.process_time()
        document = read_document(f"a.{kind}", data)
        document.build([segment.upper() for segment in document.segments])
        gc.enable()
        return time.process_time() - begin

    small = max(min(seconds(600) for _ in range(2)), 0.01)
    assert min(seconds(6000) for _ in range(2)) <= 12 * small


def test_parts_by_content_type() -> None:
    """The names of parts are free; their content types say what they are."""
    xml = '<w:document xmlns:w="http://purl.oclc.org/ooxml/wordprocessingml/main"><w:body><w:p><w:r><w:t>strict</w:t>'
    main = ("wordprocessingml.document.main+xml", f"{xml}</w:r></w:p></w:body></w:document>")
    assert read_document("a.docx", package({"other/name.xml": main})).segments == ["strict"]


def test_an_empty_cdata_section_is_no_text() -> None:
    document = read_document("a.odt", odt("<text:p>one<text:s/><![CDATA[]]><text:s/>two</text:p>"))
    assert document.segments == ["one two"]
    assert b"uno" in members_of(document.build(["uno due"]))["content.xml"]
    assert read_document("a.epub", epub("<p>text</p>", title="one &amp; <![CDATA[]]>")).segments[0] == "one &"


def test_an_item_without_a_path_in_a_book_is_passed_over() -> None:
    members = members_of(epub("<p>text</p>"))
    book = next(name for name in members if name.endswith(".opf"))
    members[book] = members[book].replace(b"<manifest>", b"<manifest><item/>")
    assert b"<item/>" in members[book]
    assert "text" in read_document("a.epub", zip_of(members)).segments
