"""Translation of whole documents with a translator that changes the case: chunks, links, flags, counts, files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from qkv.api import document_translation
from qkv.api.document_translation import (
    check_output,
    format_of,
    open_documents,
    translate_document,
    translate_to_file,
    write_document,
)
from qkv.api.translation import Piece, Translation
from qkv.core.errors import QkvError, UsageError
from qkv.documents import Document, read_document
from qkv.documents.plain_text import read_blocks


@dataclass
class UpperCase:
    """Translates by changing the case, and aligns word i with word i; texts with "long" cannot be aligned."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    aligned: list[str] = field(default_factory=list)
    flagged: str = "flag"

    def translate(self, texts: Sequence[str], *, progress: Any, **options: Any) -> list[Translation]:
        self.calls.append({"texts": list(texts), **options})
        progress(len(texts))
        return [
            Translation(
                text.upper(),
                0.0,
                0.0,
                [],
                [],
                pieces=[Piece((0, len(text)), (0, len(text)), 0.0, ("truncated",) * (self.flagged in text))],
            )
            for text in texts
        ]

    def links(
        self, sources: Sequence[str], translations: Sequence[Translation], *, tag: str
    ) -> list[list[tuple[int, int]] | None]:
        self.aligned += sources
        return [None if "long" in source else [(i, i) for i in range(len(source.split()))] for source in sources]


def test_a_document_is_translated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "CHUNK", 3)
    document = read_document("a.md", b"".join(b"line %d\n\n" % i for i in range(8)))
    translator, done, rows = UpperCase(), [], []
    result = translate_document(
        translator,  # type: ignore[arg-type]
        document,
        progress=done.append,
        report=lambda *row: rows.append(row),
        beam=2,
    )
    assert result.data == document.build([text.upper() for text in document.segments])
    assert [(len(call["texts"]), call["first"], call["beam"]) for call in translator.calls] == [
        (3, 0, 2),
        (3, 3, 2),
        (2, 6, 2),
    ]
    assert sum(done) == 8
    assert [(number, source, str(each)) for number, source, each in rows] == [
        (i, f"line {i - 1}", f"LINE {i - 1}") for i in range(1, 9)
    ]
    assert result.summary == "a.md: 8 segments translated"


def test_only_segments_with_markup_are_aligned() -> None:
    """A segment that cannot be aligned keeps the others' links."""
    page = b"<p>plain</p><p>one <b>two</b></p><p>a long <b>text</b></p><p>red <i>cat</i> runs</p>"
    translator = UpperCase()
    result = translate_document(translator, read_document("a.html", page))  # type: ignore[arg-type]
    assert translator.aligned == ["one two", "a long text", "red cat runs"]
    assert result.data == b"<p>PLAIN</p><p>ONE <b>TWO</b></p><p>A LONG <b>TEXT</b></p><p>RED <i>CAT</i> RUNS</p>"


def test_flags_and_skipped_parts_are_counted() -> None:
    document = read_document("a.md", b"one flag\n\ntwo\n")
    document.skipped.update({"equation": 2, "field": 1})
    result = translate_document(UpperCase(), document)  # type: ignore[arg-type]
    assert result.summary == "a.md: 2 segments translated, 3 skipped (2 equations, 1 field), 1 flagged"
    more = replace(result, skipped=Counter({"image text": 2, 'translate="no"': 2, "ruby annotation": 2}), flagged=[])
    assert more.summary.endswith('6 skipped (2 image text, 2 translate="no", 2 ruby annotations)')
    (flagged,) = result.flagged
    assert vars(flagged) == {"number": 1, "source": "one flag", "text": "ONE FLAG", "flags": ("truncated",)}


def test_protected_spans_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "CHUNK", 1)
    document = read_document("a.md", b"one\n\ntwo\n")
    document.protected = [((0, 1),), ((1, 2),)]
    translator = UpperCase()
    translate_document(translator, document)  # type: ignore[arg-type]
    assert [call["protected"] for call in translator.calls] == [[((0, 1),)], [((1, 2),)]]


@pytest.mark.parametrize("options", [{"n_best": 2}, {"prefix": "x"}, {"must_include": ["x"]}, {"ordered": True}])
def test_options_of_one_text_are_refused(options: dict[str, Any]) -> None:
    document = read_document("a.md", b"one\n")
    with pytest.raises(UsageError, match=f"^a.md: {next(iter(options))} applies to one text"):
        translate_document(UpperCase(), document, **options)  # type: ignore[arg-type]
    translate_document(UpperCase(), document, n_best=1, prefix="", must_include=[])  # type: ignore[arg-type]


def test_a_document_may_be_a_path_or_bytes(tmp_path: Path) -> None:
    page = b"<p>one</p>"
    (tmp_path / "a.html").write_bytes(page)
    (tmp_path / "a.txt").write_bytes(b"a line that\ngoes on.\n")
    translator: Any = UpperCase()
    for source in (tmp_path / "a.html", str(tmp_path / "a.html"), read_document("a.html", page)):
        assert translate_document(translator, source).data == b"<p>ONE</p>"
    assert translate_document(translator, page, format="html").data == b"<p>ONE</p>"
    assert translate_document(translator, tmp_path / "a.txt").translated == 1
    with pytest.raises(UsageError, match="bytes have no suffix: give a format, one of txt"):
        translate_document(translator, page)
    with pytest.raises(UsageError, match=r"no\.html: no such file"):
        translate_document(translator, tmp_path / "no.html")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_suffix_decides_the_format() -> None:
    names = ["a.txt", "a", "-", "a.en", "a.md", "b.HTML", "a.md.xz", "a.docx"]
    assert [format_of(name) for name in names] == ["lines"] * 4 + ["md", "html", "lines", "docx"]
    assert (format_of("a.html", "lines"), format_of("-", "html"), format_of("a.txt", "txt")) == ("lines", "html", "txt")
    with pytest.raises(UsageError, match="--format pdf: unknown: choose one of lines, txt, md"):
        format_of("a.html", "pdf")


def test_an_output_has_the_format_of_its_input(tmp_path: Path) -> None:
    document = read_document("notes.md", b"one")
    for output in ("-", "/dev/null", tmp_path / "a.md", tmp_path / "b.MD"):
        check_output(document, "md", str(output))
    for output, why in [
        (tmp_path / "a.html", r"the translation of notes.md is a .md file: name it a\.md"),
        (tmp_path / "notes", r"name it notes\.md"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "a.md", "there is no folder"),
    ]:
        with pytest.raises(UsageError, match=why):
            check_output(document, "md", str(output))
    document.media_type = "application/octet-stream"
    with pytest.raises(UsageError, match=r"notes.md: a .md file cannot be written to a pipe: give -o NAME.md"):
        check_output(document, "md", "-")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "a.md"
    output.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(QkvError, match=r"No space left.*untouched"):
            write_document([b"af", b"ter"], str(output))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.md", b"before")]
    write_document([b"af", b"ter"], str(output))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.md", b"after")]


def test_half_of_a_character_is_refused() -> None:
    document = read_document("a.md", b"one")
    with pytest.raises(UsageError, match=r"^a.md: a translation contains half of a character \(U\+D800\): remove it$"):
        document.build(["\ud800"])


def test_a_compressed_document_is_read(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.md.gz").write_bytes(gzip.compress(b"one\n"))
    assert next(open_documents(str(tmp_path / "a.md"), "md")).segments == ["one"]
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"one\n" * 99)[:20])
    with pytest.raises(QkvError, match=r"broken \.gz file"):
        next(open_documents(str(tmp_path / "b.md"), "md"))


def test_a_long_text_is_translated_block_by_block(tmp_path: Path) -> None:
    """Numbers of segments go on, and counts are summed."""
    blocks = list(read_blocks("a.txt", [b"one\n\n", b"two flag\n", b"three\n"], size=1))
    assert len(blocks) == 4  # the last one is empty
    translator, numbers = UpperCase(), []
    result = translate_to_file(
        translator,  # type: ignore[arg-type]
        blocks,
        str(tmp_path / "b.txt"),
        report=lambda number, *_: numbers.append(number),
    )
    assert (tmp_path / "b.txt").read_bytes() == b"ONE\n\nTWO FLAG\nTHREE\n"
    assert numbers == [call["first"] + 1 for call in translator.calls] == [1, 2, 3]
    assert (result.summary, result.flagged[0].number) == ("a.txt: 3 segments translated, 1 flagged", 2)


@pytest.mark.parametrize("stop", [QkvError("failed"), KeyboardInterrupt(), SystemExit(143)])
def test_a_translation_that_stops_writes_nothing(stop: BaseException, tmp_path: Path) -> None:
    output = tmp_path / "b.txt"
    output.write_bytes(b"before")

    def blocks() -> Iterator[Document]:
        yield read_document("a.txt", b"one")
        raise stop

    with pytest.raises(type(stop)):
        translate_to_file(UpperCase(), blocks(), str(output))  # type: ignore[arg-type]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("b.txt", b"before")]
