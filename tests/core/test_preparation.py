"""From files to token ids: exact counts of dropped pairs, and no leak between the parts."""

from __future__ import annotations

import dataclasses
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import distinct_pairs, prepare_text, texts, write_corpus
from qkv.core import preparation
from qkv.core.config import CorpusConfig, DataConfig
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.preparation import Filter
from qkv.core.tokenizer import Tokenizer, TokenizerPair


def test_every_filter_counts_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = distinct_pairs(40)
    bad = [
        ("", "empty"),
        ("empty", "   "),
        good[3],
        good[3],
        (f" {good[4][0]}", good[4][1]),  # the same but for spaces around it
        ("e\u0301a cafe\u0301", "x"),
        ("éa café", "x"),  # the same in another Unicode form
        ("x" * 200, "y" * 199),  # 201 characters with the implied space
        ("z" * 199, "u" * 199),  # exactly 200: kept
        ("w" * 1_000_000, "long"),
        ("ab", "v" * 20),  # 3 counts as 4 tokens; 21 > 5 * 4
        ("ab", "v" * 19),  # 20 = 5 * 4: kept
    ]
    spec = write_corpus(tmp_path, [*good, *bad])
    with open(tmp_path / "train.en", "ab") as src, open(tmp_path / "train.de", "ab") as tgt:
        src.write(b"not \xff UTF-8\nfine\n")
        tgt.write(b"fine\nnot \xff UTF-8\n")
    pack = Tokenizer.pack

    def watched(self: Tokenizer, text: str) -> bytes:
        assert len(text) < 10_000, "a line that cannot fit is not tokenised"
        return pack(self, text)

    monkeypatch.setattr(Tokenizer, "pack", watched)
    valid = write_corpus(tmp_path, [good[0], good[0], ("one", "w" * 150), ("", "x"), ("x" * 300, "y")], "valid")
    data = DataConfig(train=(spec,), valid=(valid,), max_length=200, on_bad="skip")
    prepared = prepare_text(data, tmp_path / "store")
    train, held = prepared.report
    names = ("read", "train", "valid", "encoding", "empty", "duplicate", "too_long", "ratio")
    assert [train[name] for name in names] == [54, 43, 0, 2, 2, 4, 2, 1]
    assert [held[name] for name in names] == [5, 0, 3, 0, 1, 0, 1, 0], "a validation set keeps what memory allows"
    assert len(prepared.train) == 43
    assert len(prepared.valid) == 3
    loose = DataConfig(train=(spec,), valid=(valid,), max_length=10**7, max_ratio=0.0, dedupe=False, on_bad="skip")
    monkeypatch.undo()
    assert len(prepare_text(loose, tmp_path / "loose").train) == 50


def test_wrong_encoding_is_an_error_unless_skipped(tmp_path: Path) -> None:
    spec = write_corpus(tmp_path, distinct_pairs(30))
    (tmp_path / "train.de").write_bytes((tmp_path / "train.de").read_bytes().replace(b"!", b"\xff", 1))
    with pytest.raises(QkvError, match=r"train\.de, line 1: not UTF-8"):
        prepare_text(DataConfig(train=(spec,)), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_stored_ids_are_the_encoded_lines(split: DataConfig, tmp_path: Path) -> None:
    prepared = prepare_text(split, tmp_path / "store", learn=True)
    for part, pairs in (("train", distinct_pairs(300)), ("valid", distinct_pairs(20, seed=1))):
        kept, both = getattr(prepared, part), prepared.tokenizers
        assert texts(prepared, part) == pairs
        assert kept.lengths("src").tolist() == [len(both.src.encode(src)) for src, _ in pairs]
        assert kept.lengths("tgt").tolist() == [len(both.tgt.encode(tgt)) for _, tgt in pairs]
        assert [kept.row("src", i).tolist() for i in range(len(kept))] == [both.src.encode(src) for src, _ in pairs]
    assert prepared.train.row("src", 0).dtype == np.uint16


def test_validation_text_is_raw(tmp_path: Path) -> None:
    raw = [("cafe\u0301  ", "  Kaffee\u2028"), ("b\rb", "c")]
    data = DataConfig(
        train=(write_corpus(tmp_path, distinct_pairs(50)),), valid=(write_corpus(tmp_path, raw, "valid"),)
    )
    prepared = prepare_text(data, tmp_path / "store")
    src, tgt = (path.read_bytes().decode().split("\n") for path in prepared.valid_text)
    assert src == ["cafe\u0301  ", "b b", ""]
    assert tgt == ["  Kaffee\u2028", "c", ""]
    assert texts(prepared, "valid")[0] == ("caf\u00e9", "Kaffee")  # what the model reads has no white space around it


def test_corpora_with_weights_and_tags(tmp_path: Path) -> None:
    same = distinct_pairs(30)
    first, second, valid = (write_corpus(tmp_path, same, name) for name in ("one", "two", "three"))
    data = DataConfig(
        train=(
            CorpusConfig(first.src, first.tgt, weight=2.0, tag="de"),
            CorpusConfig(second.src, second.tgt, weight=0.5, tag="fr"),
        ),
        valid=(CorpusConfig(valid.src, valid.tgt, tag="de"),),
    )
    prepared = prepare_text(data, tmp_path / "store", learn=True)
    both = prepared.tokenizers
    assert both.src.tags == ("de", "fr")
    assert prepared.train.weights == (2.0, 0.5)
    assert prepared.train.corpus.tolist() == [0] * 30 + [1] * 30, "the same pair under another tag is no duplicate"
    assert {int(prepared.train.row("src", i)[0]) for i in range(30)} == {both.src.tag("de")}
    assert {int(prepared.train.row("src", i)[0]) for i in range(30, 60)} == {both.src.tag("fr")}
    assert prepared.train.row("src", 0).tolist()[1:] == both.src.encode(same[0][0])
    assert int(prepared.train.lengths("src")[0]) == len(both.src.encode(same[0][0])) + 1
    assert prepared.train.row("tgt", 0).tolist() == both.tgt.encode(same[0][1])


def test_a_large_vocabulary_is_stored_in_four_bytes(split: DataConfig, tmp_path: Path) -> None:
    pieces = [f"w{n}" for n in range(70_000)]
    words = Tokenizer("word", [*pieces, "Ġtree"])
    prepared = prepare_text(split, tmp_path / "store", tokenizers=TokenizerPair(words, words))
    assert prepared.train.row("src", 0).dtype == np.uint32
    assert texts(prepared, "train") == distinct_pairs(300)
    assert max(int(prepared.train.row("src", i).max()) for i in range(300)) == words.size - 1


def repeated_sources(count: int) -> list[tuple[str, str]]:
    # Every source has one to five translations; some differ only in spaces and Unicode form.
    pairs = [(f"café number {n}", f"{n} in form {m}") for n in range(count) for m in range(1 + n % 5)]
    return [
        (src.replace("é", "e\u0301") + " " * (n % 2), tgt) if n % 3 else (src, tgt)
        for n, (src, tgt) in enumerate(pairs)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_source_is_in_both_parts(tmp_path: Path, seed: int) -> None:
    pairs = repeated_sources(500)
    data = DataConfig(train=(write_corpus(tmp_path, pairs),), valid_size=100)
    prepared = prepare_text(dataclasses.replace(data, seed=seed), tmp_path / "store")
    train, valid = ({src.strip() for src, _ in texts(prepared, part)} for part in ("train", "valid"))
    assert not train & valid
    assert len(prepared.train) + len(prepared.valid) == len(pairs)
    assert 100 <= len(prepared.valid) < 105
    assert sorted(texts(prepared, "train") + texts(prepared, "valid")) == sorted(
        (unicodedata.normalize("NFC", src).strip(), tgt) for src, tgt in pairs
    )


def test_seeds_hold_out_different_pairs(tmp_path: Path) -> None:
    data = DataConfig(train=(write_corpus(tmp_path, distinct_pairs(400)),))
    held = [
        texts(prepare_text(dataclasses.replace(data, seed=seed), tmp_path / str(n)), "valid")
        for n, seed in enumerate((0, 0, 1))
    ]
    assert held[0] == held[1] != held[2]


@pytest.mark.parametrize(("pairs", "held"), [(10, 1), (200, 20), (1_000, 50), (5_000, 100)])
def test_size_of_the_held_out_part(tmp_path: Path, pairs: int, held: int) -> None:
    fates = np.zeros(pairs, np.uint8)
    sources = np.random.default_rng(0).integers(2**64, size=pairs, dtype=np.uint64)
    preparation.hold_out(sources, fates, 0, seed=0)
    assert np.count_nonzero(fates == preparation.Disposition.VALID) == held


def test_a_frequent_source_does_not_swallow_the_held_out_part() -> None:
    sources = np.concatenate([np.full(5_000, 1), np.arange(5_000) * 2**48 + 17]).astype(np.uint64)
    for seed in range(20):
        fates = np.zeros(len(sources), np.uint8)
        preparation.hold_out(sources, fates, 200, seed)
        assert np.count_nonzero(fates == preparation.Disposition.VALID) == 200


def test_too_little_to_split(tmp_path: Path) -> None:
    for wanted in (0, 3):
        data = DataConfig(train=(write_corpus(tmp_path, distinct_pairs(9)),), valid_size=wanted)
        with pytest.raises(UsageError, match=r"9 usable pairs are too few.*--valid-src.*--valid-text \(data\.valid\)"):
            prepare_text(data, tmp_path / "store")
    same = [("the same source", f"target {n}") for n in range(100)]
    with pytest.raises(UsageError, match="too few"):
        prepare_text(DataConfig(train=(write_corpus(tmp_path, same),)), tmp_path / "store")
    with pytest.raises(UsageError, match=r"valid_size = 50.*at most a tenth of the 100 usable"):
        prepare_text(
            DataConfig(train=(write_corpus(tmp_path, distinct_pairs(100)),), valid_size=50), tmp_path / "store"
        )
    data = DataConfig(
        train=(write_corpus(tmp_path, [("", "x")] * 9),), valid=(write_corpus(tmp_path, distinct_pairs(9), "valid"),)
    )
    with pytest.raises(QkvError, match="no pair is left"):
        prepare_text(data, tmp_path / "store", learn=True)
    data = DataConfig(train=(write_corpus(tmp_path, distinct_pairs(30)),), max_length=2)
    with pytest.raises(QkvError, match=r"nothing is left for train.*30 read, 30 too long"):
        prepare_text(data, tmp_path / "store")
    with pytest.raises(UsageError, match="no training text"):
        prepare_text(DataConfig(), tmp_path / "store")


def test_duplicates_are_found_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = np.random.default_rng(0).integers(300, size=1_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    once = np.zeros(1_000, np.uint8)
    preparation.mark_duplicates(hashes, once)
    assert np.flatnonzero(once == 0).tolist() == sorted(np.unique(hashes, return_index=True)[1].tolist())
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", 64)
    parts = np.zeros(1_000, np.uint8)
    preparation.mark_duplicates(hashes, parts)
    assert (parts == once).all()


def test_progress_is_reported(split: DataConfig, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    prepare_text(split, tmp_path / "store", learn=True, progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["scan", "learn", "tokenise"]
    assert told[-1] == ("tokenise", 320, 320)
    assert ("scan", 320, 320) in told


def without(values: Any, word: str) -> bool:
    return all(word not in text for text in values)


def short(lengths: Any, most: int) -> bool:
    return sum(lengths) <= most


def test_a_filter_is_part_of_the_key(split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new filter, or one with other options, never reuses text that was made without it."""

    def prepared(*filters: Filter) -> PreparedText:
        return prepare_text(split, tmp_path / "store", filters=filters, say=lambda line: None)

    cats = Filter("cats", partial(without, word="cat"), "text", "no cat")
    plainly, filtered = prepared(), prepared(cats)
    expected = [pair for pair in distinct_pairs(300) if "cat" not in pair[0]]
    assert texts(filtered, "train") == expected
    assert len(plainly.train) == 300
    assert filtered.report[0]["cats"] == 300 - len(expected)
    assert len(filtered.valid) == 20, "a given validation set is taken as it is"
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "Scan", None)  # must not be called
        prepared(cats)
    dogs = prepared(cats._replace(keep=partial(without, word="dog"), key="no dog"))
    assert len(dogs.train) == sum("dog" not in src for src, _ in distinct_pairs(300))
    strict = Filter("long", partial(short, most=60), "tokens", "<= 60", on_validation=True)
    both = prepared(cats, strict)
    assert all(len(src) + len(tgt) + 2 <= 60 for part in ("train", "valid") for src, tgt in texts(both, part))
    assert both.report[1]["long"] == 20 - len(both.valid) > 0


@pytest.mark.parametrize("wanted", [0, 7, 90])
def test_holding_out_goes_by_slices(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    sources = np.random.default_rng(0).integers(400, size=1_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    dropped = np.random.default_rng(1).random(1_000) < 0.1
    whole, parts = (np.where(dropped, preparation.Disposition.EMPTY, 0).astype(np.uint8) for _ in range(2))
    preparation.hold_out(sources, whole, wanted, seed=5)
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", 64)
    preparation.hold_out(sources, parts, wanted, seed=5)
    assert (parts == whole).all()
    held_out = whole == preparation.Disposition.VALID
    assert held_out.sum() >= (wanted or 50)
    assert not set(sources[held_out].tolist()) & set(sources[whole == 0].tolist())
    assert (whole[dropped] == preparation.Disposition.EMPTY).all()
