"""Text files as blocks: whole lines in order, and one clear error for a bad file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from qkv.core import corpus as module
from qkv.core.config import CorpusConfig, DataConfig
from qkv.core.corpus import find_corpus, split_into_blocks
from qkv.core.errors import QkvError, UsageError


def write_pair(folder: Path, src: bytes, tgt: bytes) -> CorpusConfig:
    (folder / "a.en").write_bytes(src)
    (folder / "a.de").write_bytes(tgt)
    return CorpusConfig(src="a.en", tgt="a.de")


def lines(texts: list[str], end: str = "\n") -> bytes:
    return "".join(text + end for text in texts).encode()


def pairs_of(folder: Path, spec: CorpusConfig, on_bad: str = "error") -> list[tuple[str, ...] | None]:
    """All pairs of a corpus, block by block."""
    corpus = find_corpus(spec, DataConfig(root=str(folder)))
    return [pair for block in split_into_blocks(corpus) for pair in block.texts(on_bad)]


def test_ends_of_lines_and_files(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    spec = write_pair(tmp_path, bom + b"one\r\ntwo\r\r\n\xef\xbb\xbfthree\r", b"eins\nzwei\ndrei")
    assert pairs_of(tmp_path, spec) == [("one", "eins"), ("two\r", "zwei"), ("\ufeffthree", "drei")]


def test_blocks_are_whole_lines_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    src = [f"line {n} " + "x" * (n % 90) for n in range(200)]
    tgt = [f"Zeile {n}" for n in range(200)]
    spec = write_pair(tmp_path, lines(src), lines(tgt, "\r\n"))
    assert pairs_of(tmp_path, spec) == list(zip(src, tgt, strict=True))
    (found,) = [find_corpus(spec, DataConfig(root=str(tmp_path)))]
    cut = split_into_blocks(found)
    sizes = [sum(stop - start for start, stop in block.spans) for block in cut]
    last = [sum(len(line) for line in pair) + 3 for pair in zip(src, tgt, strict=True)]  # with the ends of both lines
    assert all(size >= 64 for size in sizes[:-1])
    ends = [block.first + block.count - 1 for block in cut]
    assert all(size - last[end] < 64 for size, end in zip(sizes, ends, strict=True)), "closed as soon as it is full"
    assert [block.first for block in cut] == [sum(b.count for b in cut[:n]) for n in range(len(cut))]


def test_uneven_files(tmp_path: Path) -> None:
    spec = write_pair(tmp_path, b"one\ntwo\nthree\n", b"eins\nzwei")
    with pytest.raises(QkvError, match=r"a\.en has 3 lines but a\.de has 2 lines"):
        pairs_of(tmp_path, spec)
    spec = write_pair(tmp_path, b"one\n", b"eins\nzwei\ndrei\n\n")
    with pytest.raises(QkvError, match=r"a\.en has 1 lines but a\.de has 4 lines"):
        pairs_of(tmp_path, spec)


def test_uneven_files_with_a_column(tmp_path: Path) -> None:
    corpus = find_corpus(write_pair(tmp_path, b"one\ntwo\n", b"eins\nzwei\n"), DataConfig(root=str(tmp_path)))
    (tmp_path / "links").write_bytes(b"0-0\n")
    column = module.Column("links", "key", np.dtype("<u2"), lambda block, tokenizers: lambda row, texts, ids: b"")
    names, paths = (*corpus.names, "links"), (*corpus.paths, tmp_path / "links")
    with pytest.raises(QkvError, match=r"links has 1 lines: line N of each must belong together$"):
        split_into_blocks(dataclasses.replace(corpus, names=names, paths=paths, column=column))
    with pytest.raises(QkvError, match=r"links has 1 lines: line N of one must translate line N of the other$"):
        split_into_blocks(dataclasses.replace(corpus, names=names, paths=paths))


def test_empty_files(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match=r"a\.en: the file is empty"):
        pairs_of(tmp_path, write_pair(tmp_path, b"", b"eins\n"))
    with pytest.raises(QkvError, match=r"a\.de: the file is empty"):
        pairs_of(tmp_path, write_pair(tmp_path, b"one\n", b"\xef\xbb\xbf"))
    with pytest.raises(QkvError, match="empty"):
        pairs_of(tmp_path, write_pair(tmp_path, b"", b""))


def test_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 20)
    spec = write_pair(tmp_path, b"one\n" * 20 + b"tw\xf6\nthree\n", b"eins\n" * 22)
    with pytest.raises(QkvError, match=r"a\.en, line 21: not UTF-8 \(byte 0xF6 at position 3\).*on_bad"):
        pairs_of(tmp_path, spec)
    assert pairs_of(tmp_path, spec, "skip") == [("one", "eins")] * 20 + [None, ("three", "eins")]


def test_lines_end_at_newline_bytes_alone(tmp_path: Path) -> None:
    odd = ["line\u2028separator\x85next\x0b\x0c\x1c", "carriage\rinside", "", "é ü 日本 \u2029"]
    assert pairs_of(tmp_path, write_pair(tmp_path, lines(odd), lines(odd))) == [(line, line) for line in odd]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CorpusConfig(src="none.en", tgt="a.de"), r"none\.en: no such file"),
        (CorpusConfig(src="a.en", tgt="folder"), "folder: no such file"),
        (CorpusConfig(), "a corpus names no file: give src and tgt"),
        (CorpusConfig(tgt="a.de"), r"corpus a\.de: give src too"),
        (CorpusConfig(src="a.en"), r"corpus a\.en: give tgt too"),
    ],
)
def test_wrong_calls(tmp_path: Path, spec: CorpusConfig, message: str) -> None:
    (tmp_path / "folder").mkdir()
    write_pair(tmp_path, b"one\n", b"eins\n")
    with pytest.raises(UsageError, match=message):
        find_corpus(spec, DataConfig(root=str(tmp_path)))


def test_a_corpus_keeps_weight_and_tag_and_the_names_of_the_config(tmp_path: Path) -> None:
    write_pair(tmp_path, b"one\n", b"eins\n")
    found = find_corpus(CorpusConfig("a.en", "a.de", weight=2.5, tag="de"), DataConfig(root=str(tmp_path)))
    assert (found.weight, found.tag, found.sides, found.column) == (2.5, "de", 2, None)
    assert not found.given, "only a validation set is"
    assert found.paths == (tmp_path / "a.en", tmp_path / "a.de")
    assert str(found) == "a.en a.de"


def test_a_file_whose_lines_move_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    corpus = find_corpus(write_pair(tmp_path, b"one\ntwo\n", b"eins\nzwei\n"), DataConfig(root=str(tmp_path)))
    (block,) = split_into_blocks(corpus)
    for moved in (b"one two\n", b"o\ne\nwo\n"):
        (tmp_path / "a.en").write_bytes(moved)  # as many bytes
        with pytest.raises(QkvError, match=r"a\.en: the file changed while it was being read: start again"):
            block.texts()


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    corpus = find_corpus(write_pair(tmp_path, b"one\ntwo\n", b"eins\nzwei\n"), DataConfig(root=str(tmp_path)))
    (block,) = split_into_blocks(corpus)
    (tmp_path / "a.en").write_bytes(b"one\n")
    with pytest.raises(QkvError, match=r"a\.en: the file changed while it was being read: start again"):
        block.texts()


def test_a_line_that_is_not_utf8_offers_a_choice_where_there_is_one(tmp_path: Path) -> None:
    corpus = find_corpus(write_pair(tmp_path, b"one\ntw\xf6\n", b"eins\nzwei\n"), DataConfig(root=str(tmp_path)))
    (block,) = split_into_blocks(corpus)
    with pytest.raises(QkvError, match=r"convert the file$"):
        block.lines(0)
    with pytest.raises(QkvError, match=r"convert the file, or leave such lines out with --on-bad skip"):
        block.texts("error")


def test_the_state_of_a_file_changes_with_it_and_a_pipe_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pipe = tmp_path / "a.en", tmp_path / "pipe"
    path.write_bytes(b"one\n")
    os.mkfifo(pipe)
    before = module.file_state(path)
    assert before == {"path": str(path), "size": 4, "mtime": path.stat().st_mtime_ns}
    assert module.file_state(path) == before
    os.utime(path, ns=(0, 1))
    assert module.file_state(path) != before
    monkeypatch.chdir(tmp_path)
    assert module.file_state(Path("a.en"))["path"] == str(path), "the same from any folder"
    assert module.file_state(pipe) == {"path": str(pipe), "size": None, "mtime": None}
    (tmp_path / "-").touch()  # "-" is standard input, whatever files there are
    assert [module.is_stream(each) for each in (path, pipe, Path("-"))] == [False, True, True]
