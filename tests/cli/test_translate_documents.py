"""`qkv translate` with documents: the suffix decides, the output is whole or absent, one line says what was done."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from conftest import Call
from office_builders import docx
from qkv.documents import read_document

PAGE = b'<h1>One cat.</h1>\n<p class="x">Two <b>red</b> dog.</p><script>one()</script>\n'
ITALIAN = b'<h1>Uno gatto.</h1>\n<p class="x">Due <b>rosso</b> cane.</p><script>one()</script>\n'


def test_a_document_keeps_its_format(tiny: Path, call: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "page.it.html"
    page.write_bytes(PAGE)
    done = call("translate", tiny, page, "-o", out)
    assert (done.code, done.out, done.err) == (0, "", f"{page}: 2 segments translated\n")
    assert out.read_bytes() == ITALIAN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.it.html"]
    assert call("translate", tiny, page).out.encode() == ITALIAN
    assert call("translate", tiny, page, "-o", page).code == 0
    assert page.read_bytes() == ITALIAN


def test_a_document_without_tags_needs_no_alignment(tiny: Path, call: Call, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "run")
    (tmp_path / "run" / "alignment.json").write_text("damaged")
    done = call("translate", tmp_path / "run", "--format", "html", input=b"<h1>One cat.</h1>")
    assert (done.out, done.err) == ("<h1>Uno gatto.</h1>", "-: 1 segment translated\n")


def test_a_piped_document_has_its_format_named(tiny: Path, call: Call) -> None:
    done = call("translate", tiny, "--format", "html", input=PAGE)
    assert (done.out.encode(), done.err) == (ITALIAN, "-: 2 segments translated\n")


def test_lines_of_any_file_are_lines_with_format_lines(tiny: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"One cat.\n\n\nTwo dog.\n")
    (tmp_path / "a.txt").write_bytes(b"One\ncat.\n\nTwo dog.\n")
    assert call("translate", tiny, tmp_path / "a.md", "--format", "lines").out == "Uno gatto.\n\n\nDue cane.\n"
    assert call("translate", tiny, tmp_path / "a.txt").out.count("\n") == 4
    done = call("translate", tiny, tmp_path / "a.txt", "--format", "txt")
    assert done.err.endswith("segments translated\n")


def test_json_is_a_line_for_each_segment(tiny: Path, call: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out.html"
    page.write_bytes(PAGE)
    for options in ([], ["-o", out]):
        rows = [json.loads(line) for line in call("translate", tiny, page, "--json", *options).out.splitlines()]
        assert [(row["segment"], row["source"], row["text"], row["flags"]) for row in rows] == [
            (1, "One cat.", "Uno gatto.", []),
            (2, "Two red dog.", "Due rosso cane.", []),
        ]
    assert out.read_bytes() == ITALIAN


def test_flagged_segments_are_counted(tiny: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"One cat.\n\nTwo red dog and the house.\n")
    done = call("translate", tiny, tmp_path / "a.md", "--max-length", 4)
    assert done.err == f"{tmp_path / 'a.md'}: 2 segments translated, 1 flagged\n"
    rows = [
        json.loads(line)
        for line in call("translate", tiny, tmp_path / "a.md", "--max-length", 4, "--json").out.splitlines()
    ]
    assert [row["flags"] for row in rows] == [[], ["truncated"]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--n-best", 2], "--n-best applies to lines, and this is a document"),
        (["--prefix", "x"], "--prefix applies"),
        (["--must-include", "x"], "--must-include applies"),
        (["--on-bad", "skip"], "--on-bad applies"),
        (["--format", "pdf"], "--format pdf: unknown"),
        (["-o", "x.md"], "name it x.html"),
        (["-o", "no/x.html"], "there is no folder no"),
    ],
)
def test_calls_without_a_meaning_are_refused(
    options: list[object], why: str, tiny: Path, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_bytes(PAGE)
    done = call("translate", tiny, tmp_path / "page.html", *options)
    assert (done.code, done.out) == (2, "")
    assert why in done.error


def test_one_process_translates_a_document(
    tiny: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.html").write_bytes(PAGE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in call("translate", tiny, tmp_path / "page.html", "-o", tmp_path / "o.html").error


@pytest.mark.parametrize("output", ["-", "/dev/null"])
def test_a_binary_document_needs_a_file(output: str, tiny: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(docx("<w:p><w:r><w:t>One cat.</w:t></w:r></w:p>"))
    done = call("translate", tiny, tmp_path / "a.docx", "-o", output)
    assert "give -o NAME.docx" in done.error
    assert call("translate", tiny, tmp_path / "a.docx", "-o", tmp_path / "b.docx").code == 0
    written = read_document("b.docx", (tmp_path / "b.docx").read_bytes())
    assert written.segments == ["Uno gatto."]


def hostile(kind: str) -> bytes:
    if kind == "bomb.docx":
        import io

        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("[Content_Types].xml", "word/document.xml"):
                archive.writestr(name, b"\0" * (101 << 20))
        return out.getvalue()
    return {
        "truncated.docx": b"PK\x03\x04\x14\x00",
        "page.docx": PAGE,
        "binary.html": b"PK\x03\x04\xff\xfe",
        "half.srt": b"1\n00:00:01,000 --> 00:00:02,000\nOne \xed\xa0\x80 cat.\n",
        "utf16.vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\nOne".encode("utf-16"),
        "folder.md": b"",
        "missing.md": b"",
    }[kind]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bomb.docx", "MiB"),
        ("truncated.docx", ": "),
        ("page.docx", ": "),
        ("binary.html", "line 1: not UTF-8"),
        ("half.srt", "line 3: not UTF-8"),
        ("folder.md", "is a folder"),
        ("missing.md", "no such file"),
    ],
)
def test_hostile_input_is_refused_in_one_line(name: str, why: str, tiny: Path, call: Call, tmp_path: Path) -> None:
    source, out = tmp_path / name, tmp_path / f"out{Path(name).suffix}"
    if name == "folder.md":
        source.mkdir()
    elif name != "missing.md":
        source.write_bytes(hostile(name))
    done = call("translate", tiny, source, "-o", out)
    assert done.out == ""
    assert f"{name}" in done.error
    assert why in done.error
    assert not [path for path in tmp_path.iterdir() if path != source]


def test_lines_are_not_written_as_an_office_file(tiny: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One cat.\n")
    done = call("translate", tiny, tmp_path / "a.txt", "-o", tmp_path / "out.docx")
    assert (done.code, f"name it {tmp_path}/out.txt" in done.error) == (2, True)
    assert not (tmp_path / "out.docx").exists()
