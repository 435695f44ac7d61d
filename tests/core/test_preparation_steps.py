"""The preparation of text, function by function: hashes, filters, choices by hash, samples, ids and the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.core import preparation
from qkv.core.config import DataConfig, TokenizerConfig
from qkv.core.corpus import LINES, Column, Corpus, TextBlock, split_into_blocks
from qkv.core.dataset import PreparedText, StoreFolder, read_manifest
from qkv.core.errors import QkvError, UsageError
from qkv.core.preparation import (
    ROW,
    Disposition,
    Filter,
    Scan,
    Sentences,
    fits,
    hold_out,
    is_even,
    length_filters,
    mark_duplicates,
    prepare,
    slices,
)
from qkv.core.tokenizer import Tokenizer, TokenizerPair

CHARS = Tokenizer("char", [], ("de",))
BOTH = TokenizerPair(CHARS, CHARS)
DATA = DataConfig(max_length=40)
GOLDEN = 0x9E3779B97F4A7C15


def corpus_of(folder: Path, pairs: Sequence[tuple[str, str]], name: str = "train", **options: Any) -> Corpus:
    paths = (folder / f"{name}.en", folder / f"{name}.de")
    for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_bytes("".join(f"{line}\n" for line in side).encode())
    return Corpus((f"{name}.en", f"{name}.de"), paths, 2, **options)


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"line {n}", f"Zeile {n}") for n in range(count)]


def sentences(data: DataConfig = DATA, *filters: Filter) -> Sentences:
    return Sentences(data, [*length_filters(data), *filters])


def learn_chars(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
    return Tokenizer("char", [], tags)


def prepared(
    folder: Path, train: Sequence[Corpus], valid: Sequence[Corpus] = (), data: DataConfig = DATA, **options: Any
) -> PreparedText:
    text = options.pop("text", None) or sentences(data)
    options.setdefault("learner", learn_chars)
    said: list[str] = []
    store = StoreFolder(folder / "store", options.pop("say", said.append))
    return prepare(train, valid, text, TokenizerConfig(), store, **options)


def texts(text: PreparedText, part: str) -> list[tuple[str, str]]:
    store, both = getattr(text, part), text.tokenizers
    return [(both.src.decode(store.row("src", i)), both.tgt.decode(store.row("tgt", i))) for i in range(len(store))]


# ---- filters ---------------------------------------------------------------------------------------------------------


def test_the_limits_of_lengths() -> None:
    assert fits([3, 40], limit=40)
    assert not fits([41, 3], limit=40)
    assert is_even([4, 20], ratio=5.0)
    assert not is_even([21, 4], ratio=5.0)
    assert is_even([1, 20], ratio=5.0), "a shorter side counts as 4 tokens"
    assert not is_even([1, 21], ratio=5.0)
    assert not is_even([25, 5], ratio=4.9)
    assert is_even([1, 1000], ratio=0.0)
    long, ratio = length_filters(DataConfig(max_length=7, max_ratio=2.5))
    assert (long.name, long.stage, long.key, long.on_validation) == ("too_long", "tokens", "<= 7", True)
    assert (ratio.name, ratio.stage, ratio.key, ratio.on_validation) == ("ratio", "tokens", "<= 2.5", False)
    assert [long.keep([7, 1]), long.keep([8, 1]), ratio.keep([10, 4]), ratio.keep([11, 4])] == [
        True,
        False,
        True,
        False,
    ]


def test_the_first_filter_that_drops_a_pair_counts() -> None:
    text = Sentences(
        DATA,
        [
            Filter("a", lambda values: "a" not in values[0], "text", "a"),
            Filter("b", lambda values: "b" not in values[0], "text", "b", on_validation=True),
            Filter("few", lambda lengths: lengths[0] > 2, "tokens", "2"),
        ],
    )
    assert text.reasons == ["train", "valid", "encoding", "empty", "duplicate", "a", "b", "few"]
    first = [text.first_filter("text", [line], given) for line in ("abc", "bc", "c") for given in (False, True)]
    assert first == [5, 6, 6, 6, 0, 0]
    assert [text.first_filter("tokens", [n], False) for n in (2, 3)] == [7, 0]
    assert text.first_filter("tokens", [2], True) == 0


# ---- one block -------------------------------------------------------------------------------------------------------


def scanned(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> Any:
    (block,) = split_into_blocks(corpus_of(folder, pairs, **options))
    return np.frombuffer(sentences().scan(block), ROW)


def test_hashes_ignore_spaces_and_the_form_of_characters(tmp_path: Path) -> None:
    pairs = [("café", "x"), (" cafe\u0301\t", "x  "), ("café", "y"), ("cafe", "x"), ("x", "café")]
    rows = scanned(tmp_path, pairs)
    assert rows["source"][0] == rows["source"][1] == rows["source"][2]
    assert len(set(rows["source"].tolist())) == 3
    assert rows["pair"][0] == rows["pair"][1]
    assert len(set(rows["pair"].tolist())) == 4
    assert rows["disposition"].tolist() == [0] * 5
    tagged = scanned(tmp_path, pairs, tag="de")
    assert (tagged["source"] == rows["source"]).all(), "no source may be in both parts, whatever its tag"
    assert not set(tagged["pair"].tolist()) & set(rows["pair"].tolist())
    source = hashlib.blake2b("café".encode(), digest_size=8).digest()
    assert rows["source"][0].tobytes() == source
    assert rows["pair"][0].tobytes() == hashlib.blake2b(source + b"\nx", digest_size=8).digest()


def test_what_a_scan_drops(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [("a", "b"), ("", "b"), ("a", " \t"), ("", "")])
    with corpus.paths[0].open("ab") as src, corpus.paths[1].open("ab") as tgt:
        src.write(b"\xff\nlast\n")
        tgt.write(b"b\n\xfe\n")
    (block,) = split_into_blocks(corpus)
    skipping = dataclasses.replace(DATA, on_bad="skip")
    text = sentences(skipping, Filter("a", lambda pair: pair != ("a", "b"), "text", ""))
    found = np.frombuffer(text.scan(block), ROW)["disposition"].tolist()
    assert found == [Disposition.FILTERED + 2, 3, 3, 3, Disposition.ENCODING, Disposition.ENCODING]
    given = dataclasses.replace(block, corpus=dataclasses.replace(corpus, given=True))
    assert np.frombuffer(text.scan(given), ROW)["disposition"][0] == Disposition.TRAIN


def sampled(block: TextBlock, dispositions: list[int], *arguments: Any) -> list[str]:
    return sentences().sample(block, bytes(dispositions), *arguments)


def test_a_sample_is_a_share_of_the_training_lines(tmp_path: Path) -> None:
    (block,) = split_into_blocks(corpus_of(tmp_path, numbered(100)))
    dispositions = [n % 2 for n in range(100)]  # the odd ones are held out
    assert sampled(block, dispositions, 0, 1.0, (1, 0)) == [f"line {n}" for n in range(0, 100, 2)]
    assert sampled(block, dispositions, 1, 1.0, (1, 0)) == [f"Zeile {n}" for n in range(0, 100, 2)]
    half = [sampled(block, dispositions, 0, 0.5, (1, number)) for number in range(8)]
    assert {len(lines) for lines in half} == {25}
    assert len(set(map(tuple, half))) == 8
    assert all(lines == sorted(lines, key=lambda line: int(line[5:])) for lines in half), "in the order of the text"
    assert len({line for lines in half for line in lines}) == 50
    assert half[0] == sampled(block, dispositions, 0, 0.5, (1, 0))
    few = [len(sampled(block, dispositions, 0, 0.01, (1, number))) for number in range(400)]
    assert set(few) == {0, 1}
    assert 150 < sum(few) < 250, "a share of half a line is a line half of the time"
    assert sampled(block, [4] * 100, 0, 1.0, (1, 0)) == []


def encoded(block: TextBlock, dispositions: list[int], folder: Path, text: Sentences, **more: Any) -> Any:
    BOTH.save(folder / "tokenizers.json")
    dtypes = {"src": CHARS.dtype, "tgt": CHARS.dtype, **more}
    return text.encode(block, bytes(dispositions), dtypes, folder / "tokenizers.json")


def test_ids_of_a_block(tmp_path: Path) -> None:
    pairs = [("one", "eins"), ("two", "zwei"), ("three", "x" * 50), ("four", "vier"), ("ab", "v" * 36), ("six", "VI")]
    (block,) = split_into_blocks(corpus_of(tmp_path, pairs, tag="de"))
    files, counts = encoded(block, [0, 1, 0, 4, 0, 0], tmp_path, sentences())
    assert counts == [2, 1, 0, 0, 1, 1, 1]
    tag = CHARS.tag("de")

    def stored(name: str) -> list[int]:
        return np.frombuffer(files[name], CHARS.dtype).tolist()

    assert stored("train.src.ids") == [tag, *CHARS.encode("one"), tag, *CHARS.encode("six")]
    assert stored("train.tgt.ids") == [*CHARS.encode("eins"), *CHARS.encode("VI")]
    assert stored("valid.src.ids") == [tag, *CHARS.encode("two")]
    assert np.frombuffer(files["train.src.lengths"], "<u4").tolist() == [5, 5]
    assert np.frombuffer(files["train.tgt.lengths"], "<u4").tolist() == [5, 3]
    assert (files["valid.src.txt"], files["valid.tgt.txt"]) == (b"two\n", b"zwei\n")
    assert "train.src.txt" not in files


def test_a_given_validation_set_is_filtered_by_length_alone(tmp_path: Path) -> None:
    pairs = [("ab", "v" * 36), ("long", "x" * 40), ("fine", "x" * 39)]
    (block,) = split_into_blocks(corpus_of(tmp_path, pairs, given=True))
    _, counts = encoded(block, [1, 1, 1], tmp_path, sentences())
    assert counts == [0, 2, 0, 0, 0, 1, 0]


def test_a_line_that_cannot_fit_is_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token has at most `max_token_bytes` bytes; composed characters count once."""
    words = Tokenizer("word", ["Ġabcd"])  # a token of five bytes
    text, seen = sentences(DataConfig(max_length=4)), list[int]()
    pack = Tokenizer.pack
    monkeypatch.setattr(Tokenizer, "pack", lambda self, line: seen.append(len(line)) or pack(self, line))
    lines = ["x" * 20, "x" * 21, "é" * 20, "e\u0301" * 20, "e\u0301" * 21]
    found = [len(text.pack(line, words, LINES)) // words.dtype.itemsize for line in lines]
    assert seen == [20, 20, 40]
    assert found == [21, 5, 41, 41, 5]


def read_links(block: TextBlock, both: TokenizerPair) -> Any:
    lines = block.lines(-1)

    def encode(row: int, pair: Any, packed: Any) -> bytes:
        if lines[row] == "bad":
            raise QkvError(f"{block.where(row, -1)}: not a number")
        ids = np.frombuffer(packed[0], both.src.dtype)
        return np.array([int(lines[row] or 0), len(ids), len(pair[1])], "<u2").tobytes()

    return encode


def test_a_column_is_made_of_the_last_file(tmp_path: Path) -> None:
    column = Column("links", "key", np.dtype("<u2"), read_links)
    pairs = numbered(4)
    corpus = corpus_of(tmp_path, pairs)
    (tmp_path / "links").write_text("10\n11\n\n13\n")
    corpus = dataclasses.replace(
        corpus, names=(*corpus.names, "links"), paths=(*corpus.paths, tmp_path / "links"), column=column
    )
    (block,) = split_into_blocks(corpus)
    files, _ = encoded(block, [0, 1, 4, 0], tmp_path, sentences(), links=column.dtype)
    assert np.frombuffer(files["train.links.ids"], "<u2").tolist() == [10, 7, 7, 13, 7, 7]
    assert np.frombuffer(files["train.links.lengths"], "<u4").tolist() == [3, 3]
    assert np.frombuffer(files["valid.links.ids"], "<u2").tolist() == [11, 7, 7]
    (tmp_path / "links").write_text("1\nbad\n2\n3\n")
    (block,) = split_into_blocks(corpus)
    with pytest.raises(QkvError, match=r"^links, line 2: not a number$"):
        encoded(block, [0, 0, 0, 0], tmp_path, sentences(), links=column.dtype)
    (tmp_path / "links").write_text("1\n2\n3\n4\n")
    without = corpus_of(tmp_path, [("x", "y")], "more")
    text = prepared(tmp_path, [corpus, without], [corpus_of(tmp_path, pairs[:2], "valid")])
    assert text.train.lengths("links").tolist() == [3, 3, 3, 3, 0]
    assert text.valid.lengths("links").tolist() == [0, 0]
    assert read_manifest(text.folder)["dtypes"] == {"src": "<u2", "tgt": "<u2", "links": "<u2"}


# ---- choosing by hashes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [3, 1 << 24])
def test_the_first_of_equal_pairs_stays(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", at_once)
    pairs = np.array([5, 7, 5, 9, 7, 5, 2, 9, 5], np.uint64)
    dispositions = np.array([0, 0, 0, 3, 0, 2, 0, 0, 0], np.uint8)
    mark_duplicates(pairs, dispositions)
    assert dispositions.tolist() == [0, 0, 4, 3, 4, 2, 0, 0, 4], "what was dropped before is not the first"


def test_slices() -> None:
    assert list(slices(5)) == [slice(0, 5)]
    size = preparation.HASHES_AT_ONCE
    parts = [slice(0, size), slice(size, 2 * size), slice(2 * size, 2 * size + 1)]
    assert list(slices(2 * size + 1)) == parts
    assert list(slices(size)) == [slice(0, size)]
    assert size == 16_777_216


def held_out(sources: Any, wanted: int, seed: int = 1) -> Any:
    dispositions = np.zeros(len(sources), np.uint8)
    hold_out(np.asarray(sources, np.uint64), dispositions, wanted, seed)
    return dispositions == Disposition.VALID


def spread(count: int) -> Any:
    return np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN)


@pytest.mark.parametrize(
    ("pairs", "wanted", "held"),
    [(10, 1, 1), (10, 0, 1), (19, 0, 1), (499, 0, 49), (500, 0, 50), (2_550, 0, 51), (99_950, 0, 1_999)]
    + [(100_050, 0, 2_000), (200_000, 0, 2_000), (200_000, 20_000, 20_000)],
)
def test_how_many_pairs_are_held_out(pairs: int, wanted: int, held: int) -> None:
    assert held_out(spread(pairs), wanted).sum() == held


def test_all_pairs_of_a_source_are_held_out_together() -> None:
    sources = np.repeat(spread(300), np.arange(300) % 3 + 1)
    chosen = held_out(sources, 20)
    assert 20 <= chosen.sum() <= 22
    assert not set(sources[chosen].tolist()) & set(sources[~chosen].tolist())
    assert (chosen == held_out(sources, 20)).all()
    assert (chosen != held_out(sources, 20, seed=2)).any()
    assert (held_out(sources, 20, seed=0) != held_out(sources, 20, seed=2)).any()
    frequent = np.concatenate([np.full(1_000, 7, np.uint64), spread(1_000)])
    for seed in range(10):
        assert held_out(frequent, 50, seed).sum() == 50, "a source of more than a tenth of all pairs stays in training"


def test_the_order_of_sources_is_that_of_a_seeded_hash() -> None:
    """A smaller held-out part is a part of a larger one, and every source has the same chance."""
    sources = spread(2_000)
    small, large = held_out(sources, 20), held_out(sources, 200)
    assert not (small & ~large).any()
    counts = sum(held_out(sources, 200, seed).astype(int) for seed in range(60))
    assert 0.5 < counts[:1_000].sum() / counts[1_000:].sum() < 2
    mean = np.mean([held_out(sources, 200, seed).nonzero()[0].mean() for seed in range(60)])
    assert abs(mean - 1_000) < 60


def test_the_hash_of_hashes_is_that_of_earlier_versions() -> None:
    """The held-out pairs of a run that is prepared again stay the same."""
    hashes = preparation._mix(np.array([1, 2**63], np.uint64), 1)
    assert hashes.tolist() == [3843862589663420446, 12993861888267872631]


def test_only_usable_pairs_are_held_out() -> None:
    sources, dispositions = np.repeat(spread(200), 2), np.tile(np.array([0, 3], np.uint8), 200)
    hold_out(sources, dispositions, 0, 1)
    assert np.bincount(dispositions).tolist() == [180, 20, 0, 200]


def test_too_little_to_hold_out() -> None:
    with pytest.raises(UsageError, match=r"data.valid_size = 11: at most a tenth of the 109 usable .* set it to 10 or"):
        held_out(spread(109), 11)
    assert held_out(spread(110), 11).sum() == 11
    for wanted in (0, 3):
        with pytest.raises(UsageError, match=r"^9 usable pairs are too few .* --valid-text \(data.valid\)$"):
            held_out(spread(9), wanted)
    with pytest.raises(UsageError, match="too few"):
        held_out(np.ones(100), 5)


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_pairs_and_numbers_of_a_preparation(tmp_path: Path) -> None:
    pairs = [*numbered(60), ("line 1", "Zeile 1"), ("", "x"), ("y", "x" * 60)]
    train = [corpus_of(tmp_path, pairs, weight=2.0), corpus_of(tmp_path, [("other", "andere")], "more")]
    valid = [corpus_of(tmp_path, [("line 1", "Zeile 1"), ("line 1", "Zeile 1")], "valid", weight=0.5)]
    stages: list[Any] = []
    text = prepared(tmp_path, train, valid, progress=lambda *stage: stages.append(stage))
    assert texts(text, "train") == [*numbered(60), ("other", "andere")]
    assert texts(text, "valid") == [("line 1", "Zeile 1")] * 2, "a given validation set is not deduplicated"
    names = ["read", "train", "valid", "encoding", "empty", "duplicate", "too_long", "ratio"]
    expected = [[63, 60, 0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0], [2, 0, 2, 0, 0, 0, 0, 0]]
    assert [[row[name] for name in names] for row in text.report] == expected
    assert [row["part"] for row in text.report] == ["train", "train", "valid"]
    assert [row["name"] for row in text.report] == ["train.en train.de", "more.en more.de", "valid.en valid.de"]
    assert stages == [
        *(("scan", n, 66) for n in (63, 64, 66)),
        ("learn", 0, None),
        *(("tokenise", n, 66) for n in (63, 64, 66)),
    ]
    manifest = read_manifest(text.folder)
    assert manifest["train"] == {"pairs": [60, 1], "weights": [2.0, 1.0]}
    assert manifest["valid"] == {"pairs": [2], "weights": [0.5]}
    assert manifest["sides"] == ["src", "tgt"]
    settings = manifest["settings"]
    assert settings["text"] == "stripped sentences"
    assert settings["data"] == {"valid_size": 0, "dedupe": True, "on_bad": "error", "seed": 1}
    assert settings["filters"] == [["too_long", "tokens", "<= 40", True], ["ratio", "tokens", "<= 5.0", False]]
    assert settings["tokenizer"] == ["learn_chars", 0, True, 200_000]
    assert settings["train"] == [["lines", 2, 2.0, "", None], ["lines", 2, 1.0, "", None]]
    assert settings["valid"] == [["lines", 2, 0.5, "", None]]
    first = train[0].paths[0]
    assert manifest["inputs"][0] == {
        "path": str(first),
        "size": first.stat().st_size,
        "mtime": first.stat().st_mtime_ns,
        "hash": hashlib.blake2b(first.read_bytes(), digest_size=16).hexdigest(),
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["store"]
    assert not (text.folder / "scratch").exists()


def test_pairs_are_held_out_of_all_corpora(tmp_path: Path) -> None:
    train = [corpus_of(tmp_path, numbered(300)[n::2], f"part{n}", weight=n + 1.0) for n in range(2)]
    text = prepared(tmp_path, train, data=DataConfig(valid_size=30))
    manifest = read_manifest(text.folder)
    assert sum(manifest["valid"]["pairs"]) == 30
    assert min(manifest["valid"]["pairs"]) > 3
    assert manifest["valid"]["weights"] == manifest["train"]["weights"] == [1.0, 2.0]
    assert sorted(texts(text, "train") + texts(text, "valid")) == sorted(numbered(300))


def test_repeated_pairs_stay_if_asked(tmp_path: Path) -> None:
    train = corpus_of(tmp_path, [("a", "b")] * 30)
    valid = corpus_of(tmp_path, [("c", "d")], "valid")
    data = dataclasses.replace(DATA, dedupe=False)
    assert len(prepared(tmp_path, [train], [valid], data).train) == 30
    assert len(prepared(tmp_path, [train], [valid]).train) == 1


def test_one_side_alone(tmp_path: Path) -> None:
    """Plain text is read as the target."""
    (tmp_path / "text").write_text("".join(f"line {n}\n" for n in range(40)))
    plain = Corpus(("text",), (tmp_path / "text",), 1)
    text = prepared(tmp_path, [plain])
    assert text.train.sides == ["tgt"]
    assert len(text.train) + len(text.valid) == 40
    assert not list(text.folder.glob("*.src.*"))


def test_what_the_vocabulary_is_learned_from(tmp_path: Path) -> None:
    """A uniform sample of the training pairs, one side after the other, with all tags."""
    train = [
        corpus_of(tmp_path, [*numbered(50), ("line 1", "Zeile 1")], tag="de"),
        corpus_of(tmp_path, numbered(100)[50:], "more", tag="fr"),
        corpus_of(tmp_path, [("again", "wieder")], "third", tag="de"),
    ]
    valid = corpus_of(tmp_path, [("held", "out")], "valid", tag="nl")
    (tmp_path / "scratch").mkdir()
    text, stages = sentences(), list[Any]()
    corpora = [*train, dataclasses.replace(valid, given=True)]
    scan = Scan(text, corpora, tmp_path / "scratch", starmap, lambda *stage: stages.append(stage))
    assert (scan.counts, scan.trained, scan.stops) == ([51, 50, 1, 1], 102, [51, 101, 102, 103])
    text.choose(scan)
    calls: list[Any] = []

    def learner(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
        calls.append((list(lines), size, tags))
        return Tokenizer("char", [], tags)

    scan.learn_tokenizers(TokenizerConfig(), learner)
    ((lines, size, tags),) = calls
    sides = [*(src for src, _ in numbered(100)), "again"], [*(tgt for _, tgt in numbered(100)), "wieder"]
    assert lines == [f" {line}" for side in sides for line in side]
    assert tags == ("de", "fr", "nl")
    assert size == 2_000 - 256 - 3 - 3
    assert stages[-1] == ("learn", 0, None)
    calls.clear()
    both = scan.learn_tokenizers(TokenizerConfig(shared=False, sample=30), learner)
    assert not both.shared
    assert all(27 <= len(lines) <= 33 for lines, _, _ in calls), "30 lines a side, rounded for each block"
    calls.clear()
    one = dataclasses.replace(scan.text.data, seed=5)
    scan.text = sentences(one)
    scan.learn_tokenizers(TokenizerConfig(shared=False, sample=30), learner)
    again = calls.copy()
    scan.text = sentences()
    scan.learn_tokenizers(TokenizerConfig(shared=False, sample=30), learner)
    assert again[0] != calls[2], "data.seed decides the sample"


def test_nothing_to_train_on(tmp_path: Path) -> None:
    valid = corpus_of(tmp_path, numbered(3), "valid")
    unread = corpus_of(tmp_path, numbered(9), "unread", weight=0.0)
    for train in ([], [unread]):
        with pytest.raises(UsageError, match=r"^no training text: give data.train, with a weight above 0$"):
            prepared(tmp_path, train, [valid])
    empty = corpus_of(tmp_path, [("", "x")] * 20)
    with pytest.raises(QkvError, match=r"^train.en train.de: no pair is left to train on"):
        prepared(tmp_path, [empty], [valid])
    long = corpus_of(tmp_path, [*((f"{n}" * 50, "y") for n in range(5)), ("", "x")])
    with pytest.raises(QkvError, match=r"^nothing is left for train after filtering: 9 read, 1 empty, 5 too long$"):
        prepared(tmp_path, [long], [valid])
    with pytest.raises(QkvError, match=r"^nothing is left for valid after filtering: 11 read, 1 empty, 5 too long"):
        prepared(tmp_path, [corpus_of(tmp_path, numbered(5), "good")], [long])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_an_equal_result_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, valid, said = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid"), list[str]()
    again = partial(prepared, tmp_path, [train], [valid], say=said.append)
    inode = again().folder.stat().st_ino
    hashed: list[Any] = []
    unpack = preparation.hash_files
    watched = partial(again, unpack=lambda *given: hashed.append(given) or unpack(*given))
    assert watched().folder.stat().st_ino == inode
    assert not hashed, "path, size and time are equal"
    os.utime(train.paths[0], (1, 1))
    assert watched().folder.stat().st_ino == inode, "the content is equal"
    assert len(hashed) == 1
    assert said == []
    for change in ({"tokenizers": BOTH}, {"data": DataConfig(max_length=41)}, {"data": DataConfig(seed=2)}):
        assert again(**change).folder.stat().st_ino != inode
        assert len(said) == 1
        assert "made from other text, with other options" in said.pop()
        inode = again().folder.stat().st_ino
        said.clear()
    train.paths[0].write_text(train.paths[0].read_text().replace("line", "LINE"))
    assert texts(again(), "train")[0] == ("LINE 0", "Zeile 0")


def test_given_tokenizers(tmp_path: Path) -> None:
    words = Tokenizer("word", ["Ġline"])
    train, valid = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid")
    text = prepared(tmp_path, [train], [valid], tokenizers=TokenizerPair(words, words))
    manifest = read_manifest(text.folder)
    assert manifest["settings"]["tokenizer"] == manifest["tokenizer"] == TokenizerPair(words, words).fingerprint
    assert int(text.train.row("src", 0)[0]) == words.size - 1


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    train, valid = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid")

    def change(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise":
            os.utime(valid.paths[1], (1, 1))

    with pytest.raises(QkvError, match=r"valid\.de: the file changed while it was being read: start again"):
        prepared(tmp_path, [train], [valid], progress=change)


def test_a_corpus_of_weight_zero_is_not_read(tmp_path: Path) -> None:
    train = [corpus_of(tmp_path, numbered(30), "off", weight=0.0), corpus_of(tmp_path, numbered(60))]
    text = prepared(tmp_path, train, [corpus_of(tmp_path, numbered(3), "valid")])
    assert texts(text, "train") == numbered(60), "none counts as repeated"
    assert [row["name"] for row in text.report] == ["train.en train.de", "valid.en valid.de"]


def test_text_that_is_empty_throughout_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match=r"^train.en train.de: no pair is left to train on: all are empty, repeated or"):
        prepared(tmp_path, [corpus_of(tmp_path, [("", "x")] * 20)])


def test_a_full_disk_ends_the_scan_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of all rows is written before it is mapped: a map with a hole would end the process by a bus error."""
    seen: list[tuple[int, int]] = []

    def full(path: Path, *_: Any, **options: Any) -> None:
        seen.append((path.stat().st_size, path.stat().st_blocks))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "memmap", full)
    train, valid = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid")
    with pytest.raises(QkvError, match=r"store: preparing the text failed: No space left on device$"):
        prepared(tmp_path, [train], [valid])
    ((size, blocks),) = seen
    assert size == 23 * ROW.itemsize
    assert blocks > 0


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    def fail(stage: str, done: int, total: int | None) -> None:
        raise OSError(28, "No space left on device", *(["rows"] if stage == "scan" else []))

    train, valid = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid")
    with pytest.raises(QkvError, match=r"^rows: preparing the text failed: No space left on device$"):
        prepared(tmp_path, [train], [valid], progress=fail)
    with pytest.raises(QkvError, match=r"store: preparing the text failed: No space left on device$"):
        prepared(tmp_path, [train], [valid], progress=lambda *stage: stage[0] == "learn" and fail(*stage))


def test_a_filter_of_texts_is_counted_by_its_name(tmp_path: Path) -> None:
    odd = Filter("odd", lambda pair: int(pair[0][5:]) % 2 == 0, "text", "even")
    train, valid = corpus_of(tmp_path, numbered(20)), corpus_of(tmp_path, numbered(3), "valid")
    text = prepared(tmp_path, [train], [valid], text=sentences(DATA, odd))
    assert texts(text, "train") == numbered(20)[::2]
    assert [row["odd"] for row in text.report] == [10, 0]
    assert json.loads((text.folder / "manifest.json").read_text())["settings"]["filters"][2] == [
        "odd",
        "text",
        "even",
        False,
    ]
