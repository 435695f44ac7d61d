"""Every format of text file gives the same pairs; every bad file gives one clear error."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import zstandard

from qkv.core.corpus import Corpus, split_into_blocks
from qkv.core.errors import QkvError, UsageError
from qkv.data import formats
from qkv.data.formats import find_text, infer_languages, read_lines, unpack
from qkv.options import CorpusConfig, DataConfig

PAIRS = [
    ("A cat.", "Eine Katze."),
    ("", "leer"),
    ("line\u2028separator\x85next\x0b\x0c\x1c", "é ü 日本 \u2029"),
    ("carriage\rinside", " spaces "),
    ("last", "letzte"),
]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def pairs_of(
    tmp_path: Path, spec: CorpusConfig, on_bad: str = "error", langs: tuple[str, str] = ("", "")
) -> list[tuple[str, ...] | None]:
    data = DataConfig(train=(spec,), root=str(tmp_path), on_bad=on_bad, src_lang=langs[0], tgt_lang=langs[1])
    (tmp_path / "scratch").mkdir(exist_ok=True)
    (found,), _ = unpack(find_text(data.train, data), tmp_path / "scratch", starmap, lambda stage, done, total: None)
    return [pair for block in split_into_blocks(found) for pair in block.texts(on_bad)]


def lines(texts: list[str], end: str = "\n") -> bytes:
    return "".join(text + end for text in texts).encode()


def write_pair(folder: Path, src: bytes, tgt: bytes, suffix: str = "") -> CorpusConfig:
    (folder / f"a.en{suffix}").write_bytes(PACKERS[suffix](src))
    (folder / f"a.de{suffix}").write_bytes(PACKERS[suffix](tgt))
    return CorpusConfig(src=f"a.en{suffix}", tgt=f"a.de{suffix}")


# ---- the same pairs from everything ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    src, tgt = zip(*PAIRS, strict=True)
    spec = write_pair(tmp_path, lines(list(src)), lines(list(tgt)), suffix)
    assert pairs_of(tmp_path, spec) == PAIRS
    pack = PACKERS[suffix]
    (tmp_path / f"b.tsv{suffix}").write_bytes(pack(lines(["\t".join(pair) for pair in PAIRS])))
    assert pairs_of(tmp_path, CorpusConfig(src=f"b.tsv{suffix}")) == PAIRS
    (tmp_path / f"c.jsonl{suffix}").write_bytes(pack(lines([json.dumps({"src": a, "tgt": b}) for a, b in PAIRS])))
    assert pairs_of(tmp_path, CorpusConfig(src=f"c.jsonl{suffix}")) == PAIRS
    (tmp_path / f"d.txt{suffix}").write_bytes(pack(lines(list(tgt))))
    assert pairs_of(tmp_path, CorpusConfig(text=f"d.txt{suffix}")) == [(line,) for line in tgt]


def test_a_compressed_file_is_found_under_its_plain_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"packed"))
    assert pairs_of(tmp_path, CorpusConfig(text="a.txt")) == [("packed",)]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"also"))
    with pytest.raises(UsageError, match=r"a\.txt: no such file; there are a\.txt\.gz and a\.txt\.xz: name one"):
        pairs_of(tmp_path, CorpusConfig(text="a.txt"))
    (tmp_path / "a.txt").write_bytes(b"plain")
    assert pairs_of(tmp_path, CorpusConfig(text="a.txt")) == [("plain",)]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_several_compressed_streams_end_to_end(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one\ntw") + pack(b"o\n") + pack(b"three"))
    assert pairs_of(tmp_path, CorpusConfig(text=f"a.txt{suffix}")) == [("one",), ("two",), ("three",)]


@pytest.mark.parametrize(
    "row",
    [
        lambda a, b: {"source": a, "target": b, "id": 7},
        lambda a, b: {"translation": {"en": a, "de": b, "fr": "x"}},
    ],
)
def test_kinds_of_jsonl(tmp_path: Path, row: Callable[[str, str], dict[str, object]]) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([json.dumps(row(a, b), ensure_ascii=False) for a, b in PAIRS]))
    assert pairs_of(tmp_path, CorpusConfig(src="a.jsonl"), langs=("en", "de")) == PAIRS


def test_jsonl_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\ntwo"}\n{"text": "three"}\n')
    assert pairs_of(tmp_path, CorpusConfig(text="a.jsonl")) == [("one\ntwo",), ("three",)]


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\teins\ntwo\tzwei\n")))
    assert pairs_of(tmp_path, CorpusConfig(src="-")) == [("one", "eins"), ("two", "zwei")]
    (tmp_path / "a.de").write_bytes(b"eins\nzwei\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert pairs_of(tmp_path, CorpusConfig(src="-", tgt="a.de")) == [("one", "eins"), ("two", "zwei")]


def test_compressed_files_and_pipes_are_copied_and_pipes_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe can be read once only, so no other process may do it; plain files stay where they are."""
    paths = [tmp_path / "plain", tmp_path / "a.gz", tmp_path / "pipe"]
    paths[0].write_bytes(b"plain text")
    paths[1].write_bytes(gzip.compress(b"packed"))
    os.mkfifo(paths[2])
    mapped: list[Path] = []
    read = formats.read_any_file
    monkeypatch.setattr(
        formats, "read_any_file", lambda path: iter([b"of a ", b"pipe"]) if path == paths[2] else read(path)
    )

    def parallel_map(function: Any, tasks: Any) -> Iterator[Any]:
        tasks = list(tasks)
        mapped.extend(task[0] for task in tasks)
        return starmap(function, tasks)

    steps: list[tuple[str, int, int | None]] = []
    corpus = Corpus(("plain", "a.gz", "pipe"), tuple(paths), 2)
    (tmp_path / "scratch").mkdir()
    (found,), digests = unpack([corpus], tmp_path / "scratch", parallel_map, lambda *step: steps.append(step))
    contents = [b"plain text", b"packed", b"of a pipe"]
    assert [path.read_bytes() for path in found.paths] == contents
    assert found.paths[0] == paths[0]
    assert digests == [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]
    assert mapped == paths[:2]
    assert steps == [("unpack", 1, 3), ("unpack", 2, 3), ("unpack", 3, 3)]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_half_a_character_in_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"src": "a", "tgt": "b"}\n{"src": "\\ud83d", "tgt": "b"}\n')
    with pytest.raises(QkvError, match=r"a\.jsonl, line 2: U\+D83D"):
        pairs_of(tmp_path, CorpusConfig(src="a.jsonl"))
    assert pairs_of(tmp_path, CorpusConfig(src="a.jsonl"), "skip") == [("a", "b"), None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tb\na\tb\tc\n", r"a\.tsv, line 2: expected 2 columns.*found 3"),
        ("a.tsv", "a\tb\n\n", r"a\.tsv, line 2: expected 2 columns.*found 1"),
        ("a.jsonl", '{"src": "a", "tgt": "b"}\n{"src"\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '["a", "b"]\n', r'a\.jsonl, line 1: expected "src" and "tgt"'),
        ("a.jsonl", '{"src": "a"}\n', r'a\.jsonl, line 1: expected "src" and "tgt"'),
        ("a.jsonl", '{"src": "a", "tgt": 3}\n', r'a\.jsonl, line 1: expected "src" and "tgt"'),
        ("a.jsonl", '{"translation": {"en": "a", "fr": "b"}}\n', r'a\.jsonl, line 1: .*with "en" and "de"'),
    ],
)
def test_bad_rows(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(QkvError, match=message):
        pairs_of(tmp_path, CorpusConfig(src=name), langs=("en", "de"))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "flipped"])
def test_broken_compressed_files(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = bytearray(PACKERS[suffix](bytes(n % 251 for n in range(40_000)) + b"\n"))
    if damage == "cut":
        packed = packed[:-9]
    elif damage == "foreign":
        packed = bytearray(b"this is no compressed file\n" * 9)
    else:
        packed[2] ^= 0xFF
    (tmp_path / f"a.txt{suffix}").write_bytes(packed)
    with pytest.raises(QkvError, match=rf"a\.txt{suffix}: broken {suffix} file"):
        pairs_of(tmp_path, CorpusConfig(text=f"a.txt{suffix}"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CorpusConfig(src="none.en", tgt="none.de"), r"none\.en: no such file"),
        (CorpusConfig(text="folder"), "folder: is a folder"),
        (CorpusConfig(), "names no file"),
        (CorpusConfig(src="a.en"), "give tgt too"),
        (CorpusConfig(tgt="a.de"), "give src too"),
        (CorpusConfig(src="a.en", text="a.de"), "not both"),
        (CorpusConfig(src="a.tsv", tgt="a.de"), "omit tgt"),
        (CorpusConfig(text="a.tsv"), "plain text cannot be .tsv"),
        (CorpusConfig(src="-", tgt="-"), "only one file"),
        (CorpusConfig(text="a.txt", tag="de"), "plain text has none"),
    ],
)
def test_wrong_calls(tmp_path: Path, spec: CorpusConfig, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=message):
        pairs_of(tmp_path, spec)


def test_pairs_and_plain_text_do_not_mix(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, b"one\n", b"eins\n")
    with pytest.raises(UsageError, match="one kind only"):
        find_text((pair, CorpusConfig(text="a.en")), DataConfig(root=str(tmp_path)))


def test_a_long_line_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending each part read to the line so far would take quadratic time."""

    class Part(bytes):
        def __add__(self, other: bytes) -> bytes:
            raise AssertionError("joined part by part")

        __radd__ = __add__

        def split(self, *arguments: Any) -> list[bytes]:
            return [Part(part) for part in super().split(*arguments)]

    parts = [b"one\ntw", b"o", b"", b" too\n\nthr", b"ee", b"\n", b"la", b"st"]
    monkeypatch.setattr(formats, "read_any_file", lambda path: map(Part, parts))
    (tmp_path / "a.txt").touch()
    assert read_lines(str(tmp_path / "a.txt")) == ["one", "two too", "", "three", "last"]


# ---- languages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["train.en train.de"], ("en", "de")),
        (["train.en.xz train.de.gz"], ("en", "de")),
        (["demo:train.en demo:train.it"], ("en", "it")),
        (["some/folder.fr/europarl-v7.de-en.eng.txt.gz /data/europarl-v7.de-en.deu.txt.gz"], ("eng", "deu")),
        (["a.en a.de", "b.en b.de"], ("en", "de")),
        (["a.en a.de", "made.tsv "], ("en", "de")),  # its name has no language and contradicts none
        (["a.en a.de", "b.en b.fr"], ("en", "")),  # several target languages, as with tags
        (["a.en a.de", "b.de b.en"], ("", "")),
        (["train.src train.tgt"], ("", "")),
        (["train.en train.tgt"], ("", "")),
        (["old.en new.en"], ("", "")),
        (["en de"], ("", "")),
        (["train.gz train.xz"], ("", "")),
        (["- train.de"], ("", "")),
        ([], ("", "")),
    ],
)
def test_the_names_of_files_tell_their_languages(names: list[str], found: tuple[str, str]) -> None:
    corpora = tuple(CorpusConfig(*pair.split(" ")) for pair in names)
    data = infer_languages(DataConfig(train=corpora))
    assert (data.src_lang, data.tgt_lang) == found
    assert infer_languages(data) == data
    assert infer_languages(DataConfig(train=corpora[:1], valid=corpora[1:])).src_lang == found[0]


def test_languages_that_are_given_stay() -> None:
    given = DataConfig(train=(CorpusConfig("train.en", "train.de"),), tgt_lang="de-AT")
    assert infer_languages(given) == dataclasses.replace(given, src_lang="en")


def test_plain_text_has_no_pair_of_languages() -> None:
    plain = DataConfig(train=(CorpusConfig(text="book.en"),))
    assert infer_languages(plain) == plain
