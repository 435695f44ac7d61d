"""From files to stored ids: exact counts, no leak between the parts, equal bytes on every path, no partial store."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import signal
import subprocess
import sys
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.api import run_training
from qkv.api.run_training import several_sentences
from qkv.core import corpus, files, preparation
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.preparation import Filter
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data import text_preparation
from qkv.data.text_preparation import filter_table, prepare_text
from qkv.options import Config, CorpusConfig, DataConfig, TokenizerConfig

CHARS = TokenizerConfig(kind="char")
WORDS = "cat dog house tree sleeps sees likes the a big small café naïve never always".split()


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    chance = random.Random(seed)
    made: dict[tuple[str, str], None] = {}
    while len(made) < count:
        words = chance.choices(WORDS, k=chance.randint(3, 9))
        made[" ".join(words) + ".", " ".join(reversed(words)).upper() + " !"] = None
    return list(made)


def write(folder: Path, pairs: list[tuple[str, str]], name: str = "train") -> CorpusConfig:
    for side, lang in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{name}.{lang}").write_bytes(text.encode())
    return CorpusConfig(src=str(folder / f"{name}.en"), tgt=str(folder / f"{name}.de"))


def texts(prepared: PreparedText, part: str) -> list[tuple[str, str]]:
    kept, both = getattr(prepared, part), prepared.tokenizers
    return [(both.src.decode(kept.src(i)), both.tgt.decode(kept.tgt(i))) for i in range(len(kept))]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.fixture
def split(tmp_path: Path) -> DataConfig:
    """300 training and 20 validation pairs in files."""
    train, valid = write(tmp_path, sentences(300)), write(tmp_path, sentences(20, seed=1), "valid")
    return DataConfig(train=(train,), valid=(valid,))


# ---- filters ---------------------------------------------------------------------------------------------------------


def test_every_filter_counts_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = sentences(40)
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
    spec = write(tmp_path, [*good, *bad])
    with open(tmp_path / "train.en", "ab") as src, open(tmp_path / "train.de", "ab") as tgt:
        src.write(b"not \xff UTF-8\nfine\n")
        tgt.write(b"fine\nnot \xff UTF-8\n")
    pack = Tokenizer.pack

    def watched(self: Tokenizer, text: str) -> bytes:
        assert len(text) < 10_000, "a line that cannot fit is not tokenised"
        return pack(self, text)

    monkeypatch.setattr(Tokenizer, "pack", watched)
    valid = write(tmp_path, [good[0], good[0], ("one", "w" * 150), ("", "x"), ("x" * 300, "y")], "valid")
    data = DataConfig(train=(spec,), valid=(valid,), max_length=200, on_bad="skip")
    prepared = prepare_text(data, CHARS, tmp_path / "store")
    train, held = prepared.report
    names = ("read", "train", "valid", "encoding", "empty", "duplicate", "too_long", "ratio")
    assert [train[name] for name in names] == [54, 43, 0, 2, 2, 4, 2, 1]
    assert [held[name] for name in names] == [5, 0, 3, 0, 1, 0, 1, 0], "a validation set keeps what memory allows"
    assert (train["in_training"], held["in_training"]) == (0, 2)
    assert len(prepared.train) == 43
    assert len(prepared.valid) == 3
    told = filter_table(prepared.report).split("\n")
    assert len(told) == 3
    assert told[1].split()[-8:] == ["54", "43", "2", "2", "4", "2", "1", "0"]
    assert "held out" not in told[0], "nothing was, so it has no column"
    loose = DataConfig(train=(spec,), valid=(valid,), max_length=10**7, max_ratio=0.0, dedupe=False, on_bad="skip")
    monkeypatch.undo()
    assert len(prepare_text(loose, CHARS, tmp_path / "loose").train) == 50


def test_wrong_encoding_is_an_error_unless_skipped(tmp_path: Path) -> None:
    spec = write(tmp_path, sentences(30))
    (tmp_path / "train.de").write_bytes((tmp_path / "train.de").read_bytes().replace(b"!", b"\xff", 1))
    with pytest.raises(QkvError, match=r"train\.de, line 1: not UTF-8"):
        prepare_text(DataConfig(train=(spec,)), CHARS, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_stored_ids_are_the_encoded_lines(split: DataConfig, tmp_path: Path) -> None:
    prepared = prepare_text(split, TokenizerConfig(), tmp_path / "store")
    for part, pairs in (("train", sentences(300)), ("valid", sentences(20, seed=1))):
        kept, both = getattr(prepared, part), prepared.tokenizers
        assert texts(prepared, part) == pairs
        assert kept.lengths("src").tolist() == [len(both.src.encode(src)) for src, _ in pairs]
        assert kept.lengths("tgt").tolist() == [len(both.tgt.encode(tgt)) for _, tgt in pairs]
        assert [kept.src(i).tolist() for i in range(len(kept))] == [both.src.encode(src) for src, _ in pairs]
    assert prepared.train.src(0).dtype == np.uint16


def test_validation_text_is_raw(tmp_path: Path) -> None:
    raw = [("cafe\u0301  ", "  Kaffee\u2028"), ("b\rb", "c")]
    data = DataConfig(train=(write(tmp_path, sentences(50)),), valid=(write(tmp_path, raw, "valid"),))
    prepared = prepare_text(data, CHARS, tmp_path / "store")
    src, tgt = (path.read_bytes().decode().split("\n") for path in prepared.valid_text)
    assert src == ["cafe\u0301  ", "b b", ""]
    assert tgt == ["  Kaffee\u2028", "c", ""]
    assert texts(prepared, "valid")[0] == (unicodedata.normalize("NFC", raw[0][0]), raw[0][1])


def test_corpora_with_weights_and_tags(tmp_path: Path) -> None:
    same = sentences(30)
    first, second, valid = (write(tmp_path, same, name) for name in ("one", "two", "three"))
    data = DataConfig(
        train=(
            CorpusConfig(first.src, first.tgt, weight=2.0, tag="de"),
            CorpusConfig(second.src, second.tgt, weight=0.5, tag="fr"),
        ),
        valid=(CorpusConfig(valid.src, valid.tgt, tag="de"),),
    )
    prepared = prepare_text(data, CHARS, tmp_path / "store")
    both = prepared.tokenizers
    assert both.src.tags == ("de", "fr")
    assert prepared.train.weights == (2.0, 0.5)
    assert prepared.train.corpus.tolist() == [0] * 30 + [1] * 30, "the same pair under another tag is no duplicate"
    assert {int(prepared.train.src(i)[0]) for i in range(30)} == {both.src.tag("de")}
    assert {int(prepared.train.src(i)[0]) for i in range(30, 60)} == {both.src.tag("fr")}
    assert prepared.train.src(0).tolist()[1:] == both.src.encode(same[0][0])
    assert int(prepared.train.lengths("src")[0]) == len(both.src.encode(same[0][0])) + 1
    assert prepared.train.tgt(0).tolist() == both.tgt.encode(same[0][1])


@pytest.mark.parametrize(("sample", "share"), [(2000, 0.25), (16, 0.25), (1, 0.0)])
def test_lines_of_several_sentences_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int, share: float
) -> None:
    """The share is measured on a sample of the whole text; a language tag does not count as a sentence."""
    monkeypatch.setattr("qkv.api.run_training.SAMPLE", sample)
    pairs = [(f"{src[:-1]}! And more." if i % 4 == 3 else src, tgt) for i, (src, tgt) in enumerate(sentences(80))]
    train, valid = write(tmp_path, pairs), write(tmp_path, sentences(20, seed=1), "valid")
    tagged = CorpusConfig(train.src, train.tgt, tag="de")
    prepared = prepare_text(DataConfig(train=(tagged,), valid=(valid,)), CHARS, tmp_path / "store")
    assert len(prepared.train) == 80
    assert several_sentences(prepared) == share


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n\n" for n in range(100)))
    prepared = prepare_text(DataConfig(train=(CorpusConfig(text=str(tmp_path / "a.txt")),)), CHARS, tmp_path / "store")
    assert prepared.tokenizers.shared
    assert prepared.train.sides == ["tgt"]
    kept = [
        prepared.tokenizers.tgt.decode(part.tgt(i))
        for part in (prepared.train, prepared.valid)
        for i in range(len(part))
    ]
    assert sorted(kept) == sorted(f"line {n}" for n in range(100))
    assert prepared.report[0]["empty"] == 100
    with pytest.raises(UsageError, match="no src side"):
        prepared.train.src(0)


def test_a_large_vocabulary_is_stored_in_four_bytes(split: DataConfig, tmp_path: Path) -> None:
    pieces = [f"w{n}" for n in range(70_000)]
    words = Tokenizer("word", [*pieces, "Ġtree"])
    prepared = prepare_text(split, CHARS, tmp_path / "store", tokenizers=TokenizerPair(words, words))
    assert prepared.train.src(0).dtype == np.uint32
    assert texts(prepared, "train") == sentences(300)
    assert max(int(prepared.train.src(i).max()) for i in range(300)) == words.size - 1


# ---- the held-out part -----------------------------------------------------------------------------------------------


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
    data = DataConfig(train=(write(tmp_path, pairs),), valid_size=100)
    prepared = prepare_text(dataclasses.replace(data, seed=seed), CHARS, tmp_path / "store")
    train, valid = ({src.strip() for src, _ in texts(prepared, part)} for part in ("train", "valid"))
    assert not train & valid
    assert len(prepared.train) + len(prepared.valid) == len(pairs)
    assert 100 <= len(prepared.valid) < 105
    assert sorted(texts(prepared, "train") + texts(prepared, "valid")) == sorted(
        (unicodedata.normalize("NFC", src), tgt) for src, tgt in pairs
    )


def test_seeds_hold_out_different_pairs(tmp_path: Path) -> None:
    data = DataConfig(train=(write(tmp_path, sentences(400)),))
    held = [
        texts(prepare_text(dataclasses.replace(data, seed=seed), CHARS, tmp_path / str(n)), "valid")
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
        data = DataConfig(train=(write(tmp_path, sentences(9)),), valid_size=wanted)
        with pytest.raises(UsageError, match=r"9 usable pairs are too few.*--valid-src.*--valid-text \(data\.valid\)"):
            prepare_text(data, CHARS, tmp_path / "store")
    same = [("the same source", f"target {n}") for n in range(100)]
    with pytest.raises(UsageError, match="too few"):
        prepare_text(DataConfig(train=(write(tmp_path, same),)), CHARS, tmp_path / "store")
    with pytest.raises(UsageError, match=r"valid_size = 50.*at most a tenth of the 100 usable"):
        prepare_text(DataConfig(train=(write(tmp_path, sentences(100)),), valid_size=50), CHARS, tmp_path / "store")
    data = DataConfig(train=(write(tmp_path, [("", "x")] * 9),), valid=(write(tmp_path, sentences(9), "valid"),))
    with pytest.raises(QkvError, match="no pair is left"):
        prepare_text(data, CHARS, tmp_path / "store")
    data = DataConfig(train=(write(tmp_path, sentences(30)),), max_length=2)
    with pytest.raises(QkvError, match=r"nothing is left for train.*30 read, 30 too long"):
        prepare_text(data, CHARS, tmp_path / "store")
    with pytest.raises(UsageError, match="no training text"):
        prepare_text(DataConfig(), CHARS, tmp_path / "store")


def test_duplicates_are_found_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = np.random.default_rng(0).integers(300, size=1_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    once = np.zeros(1_000, np.uint8)
    preparation.mark_duplicates(hashes, once)
    assert np.flatnonzero(once == 0).tolist() == sorted(np.unique(hashes, return_index=True)[1].tolist())
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", 64)
    parts = np.zeros(1_000, np.uint8)
    preparation.mark_duplicates(hashes, parts)
    assert (parts == once).all()


# ---- how it is made --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_processes_make_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 2_000)
    monkeypatch.setattr(text_preparation, "SMALL_TEXT", 0)
    spec = write(tmp_path, [*sentences(600), *sentences(100)])
    made = []
    for workers in (1, 2, 3):
        folder = tmp_path / f"store{workers}"
        data = DataConfig(train=(spec,), workers=workers)
        prepare_text(data, TokenizerConfig(kind=kind, sample=300), folder)
        made.append((content(folder), json.loads((folder / "manifest.json").read_text(encoding="utf-8"))))
    assert made[0] == made[1] == made[2]
    assert made[0][1]["report"][0]["duplicate"] == 100


def test_errors_in_processes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_preparation, "SMALL_TEXT", 0)
    spec = write(tmp_path, sentences(50))
    (tmp_path / "train.en").write_bytes(b"\xff\n" * 50)
    with pytest.raises(QkvError, match=r"train\.en, line 1: not UTF-8"):
        prepare_text(DataConfig(train=(spec,), workers=2), CHARS, tmp_path / "store")


def test_progress_is_reported(split: DataConfig, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    prepare_text(split, CHARS, tmp_path / "store", progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["unpack", "scan", "learn", "tokenise"]
    assert told[-1] == ("tokenise", 320, 320)
    assert ("scan", 320, 320) in told


# ---- used again ------------------------------------------------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError(f"{step} must not run")

    monkeypatch.setattr(preparation, step, refuse)


def test_the_same_inputs_are_not_prepared_again(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_text(split, CHARS, tmp_path / "store")
    with monkeypatch.context() as patch:
        forbid(patch, "decompress_all")
        again = prepare_text(split, CHARS, tmp_path / "store")
        assert again.report == first.report
        assert texts(again, "train") == texts(first, "train")
    os.utime(split.train[0].src, (1, 1))
    with monkeypatch.context() as patch:
        forbid(patch, "Scan")
        prepare_text(split, CHARS, tmp_path / "store")
    os.replace(split.train[0].tgt, tmp_path / "elsewhere.de")
    moved = DataConfig(train=(CorpusConfig(split.train[0].src, str(tmp_path / "elsewhere.de")),), valid=split.valid)
    with monkeypatch.context() as patch:
        forbid(patch, "Scan")
        prepare_text(moved, CHARS, tmp_path / "store")


def test_other_text_or_settings_are_prepared_anew(split: DataConfig, tmp_path: Path) -> None:
    before = prepare_text(split, CHARS, tmp_path / "store")
    stat = os.stat(split.train[0].src)
    text = Path(split.train[0].src).read_bytes()
    Path(split.train[0].src).write_bytes(text.replace(b"cat", b"bat"))
    os.utime(split.train[0].src, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    after = prepare_text(split, CHARS, tmp_path / "store")
    assert any("bat" in src for src, _ in texts(after, "train"))
    assert not any("bat" in src for src, _ in texts(before, "train")), "an open store outlives its replacement"
    words = prepare_text(split, TokenizerConfig(kind="word"), tmp_path / "store")
    assert words.tokenizers.src.kind == PreparedText.open(tmp_path / "store").tokenizers.src.kind == "word"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["store"]


def test_a_shared_store_holds_one_folder_for_each_content(split: DataConfig, tmp_path: Path) -> None:
    shared = DataConfig(train=split.train, valid=split.valid, store=str(tmp_path / "shared"))
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "config.toml").touch()
    one = prepare_text(shared, CHARS, tmp_path / "run1")
    two = prepare_text(shared, CHARS, tmp_path / "run2")
    other = prepare_text(shared, TokenizerConfig(kind="word"), tmp_path / "run3")
    assert one.folder == two.folder != other.folder
    assert len(list((tmp_path / "shared").iterdir())) == 2
    assert [path.name for path in (tmp_path / "run1").iterdir()] == ["config.toml"]
    assert not (tmp_path / "run2").exists()
    assert texts(PreparedText.open(other.folder), "train") == texts(one, "train")


def test_given_tokenizers_are_used(split: DataConfig, tmp_path: Path) -> None:
    given = prepare_text(split, CHARS, tmp_path / "one").tokenizers
    prepared = prepare_text(split, TokenizerConfig(vocab=32_000), tmp_path / "two", tokenizers=given)
    assert prepared.tokenizers.fingerprint == given.fingerprint


# ---- whole or not at all ---------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from qkv.options import CorpusConfig, DataConfig, TokenizerConfig
from qkv.core import corpus
from qkv.data import text_preparation
corpus.BLOCK_BYTES, text_preparation.SMALL_TEXT = 2000, 0
folder, stage = Path(sys.argv[1]), sys.argv[2]
data = DataConfig(train=(CorpusConfig(str(folder / "train.en"), str(folder / "train.de")),), workers=2)
def progress(now, done, total):
    if now == stage and done != 0 or now == stage == "learn":
        os.kill(os.getpid(), signal.SIGKILL)
text_preparation.prepare_text(data, TokenizerConfig(kind="char"), folder / "store", progress=progress)
"""


@pytest.mark.parametrize("stage", ["scan", "learn", "tokenise"])
def test_a_killed_preparation_leaves_no_store_that_loads(tmp_path: Path, stage: str) -> None:
    spec = write(tmp_path, sentences(300))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), stage], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) == 1
    for folder in (tmp_path / "store", left[0]):
        with pytest.raises(UsageError, match="no prepared text"):
            PreparedText.open(folder)
    prepare_text(DataConfig(train=(spec,)), CHARS, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["store"], "what was left is swept up"


def test_only_drafts_of_dead_processes_of_this_machine_are_swept_up(split: DataConfig, tmp_path: Path) -> None:
    mine = f".preparing-{platform.node()}"
    names = {f"{mine}-{os.getpid()}-00", f"{mine}-9999-{2**22 + 1}-00", f"{mine}-x-00", ".preparing-"}
    dead = f"{mine}-{2**22 + 1}-00"  # a number that no process of Linux has
    for name in (*names, dead):
        (tmp_path / name).mkdir()
    prepare_text(split, CHARS, tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"store", *names}


def test_a_failed_preparation_leaves_no_files(split: DataConfig, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise":
            raise OSError(28, "No space left on device", "ids")

    with pytest.raises(QkvError, match="ids: preparing the text failed: No space left on device"):
        prepare_text(split, CHARS, tmp_path / "store", progress=progress)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_damaged_stores_are_refused_and_made_again(split: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    whole = content(prepare_text(split, CHARS, folder).folder)
    for name in ("train.src.ids", "valid.tgt.lengths", "tokenizers.json"):
        with open(folder / name, "r+b") as file:
            file.truncate(os.path.getsize(folder / name) - 2)
        with pytest.raises(QkvError, match=name.split(".")[0]):
            PreparedText.open(folder)
        assert content(prepare_text(split, CHARS, folder).folder) == whole
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for change, message in (({"version": 99}, "version 99"), ({"format": "x"}, "not the manifest")):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(QkvError, match=message):
            PreparedText.open(folder)


def test_other_folders_are_not_overwritten(split: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    prepare_text(split, CHARS, tmp_path / "store")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="mine: exists and is no store"):
        prepare_text(split, CHARS, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_pipes_are_read_once(tmp_path: Path) -> None:
    pairs = sentences(60)
    write(tmp_path, pairs)
    code = (
        "import sys; from pathlib import Path; from qkv import options as config\n"
        "from qkv.data.text_preparation import prepare_text\n"
        "data = config.DataConfig(train=(config.CorpusConfig(src='-', tgt=sys.argv[2]),), workers=2)\n"
        "prepare_text(data, config.TokenizerConfig(kind='char'), Path(sys.argv[1]))\n"
    )
    script = f'cat train.en | {sys.executable} -c "$0" store <(cat train.de)'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["bash", "-c", script, code], cwd=tmp_path, env=environment, check=True)
    prepared = PreparedText.open(tmp_path / "store")
    assert sorted(texts(prepared, "train") + texts(prepared, "valid")) == sorted(pairs)


def test_a_tag_that_given_tokenizers_lack(split: DataConfig, tmp_path: Path) -> None:
    given = prepare_text(split, CHARS, tmp_path / "one").tokenizers
    tagged = DataConfig(train=(CorpusConfig(split.train[0].src, split.train[0].tgt, tag="de"),))
    with pytest.raises(UsageError, match='"de" is not in the vocabulary'):
        prepare_text(tagged, CHARS, tmp_path / "two", tokenizers=given)


def test_standard_input_is_one_file(split: DataConfig) -> None:
    data = DataConfig(train=(CorpusConfig(src="-"),), valid=(CorpusConfig(src="-"),))
    with pytest.raises(UsageError, match="only one file"):
        prepare_text(data, CHARS, Path("unused"))


# ---- nothing wrong is reused -----------------------------------------------------------------------------------------


def test_changed_ids_are_noticed(split: DataConfig, tmp_path: Path) -> None:
    """After a lost disk cache, files have the right size and contain zeros."""
    folder, said = tmp_path / "store", list[str]()
    whole = content(prepare_text(split, CHARS, folder).folder)
    for name in ("train.src.ids", "valid.tgt.lengths", "valid.src.txt"):
        path = folder / name
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(QkvError, match=rf"{name}: damaged, its checksum is wrong: delete .* and prepare again"):
            PreparedText.open(folder)
        said.clear()
        assert content(prepare_text(split, CHARS, folder, say=said.append).folder) == whole
        assert len(said) == 1
        assert f"{name}: damaged" in said[0]


def test_all_files_are_flushed_before_they_get_their_name(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    rename, at_renaming = os.rename, list[set[str]]()
    monkeypatch.setattr(files, "sync", lambda path: flushed.add(path.name.lstrip(".").split(".json.")[0]))
    monkeypatch.setattr(os, "rename", lambda *paths: (at_renaming.append(set(flushed)), rename(*paths)))
    folder = prepare_text(split, CHARS, tmp_path / "store").folder
    (before,) = at_renaming
    assert {path.name for path in folder.iterdir() if path.suffix != ".json"} <= before
    assert {"manifest", "tokenizers.json"} <= before
    assert tmp_path.name in flushed, "and the folder after it"


def test_a_store_without_checksums_still_opens(split: DataConfig, tmp_path: Path) -> None:
    """A store of an older version: a run resumes with it, a new preparation replaces it."""
    folder, said = tmp_path / "store", list[str]()
    first = prepare_text(split, CHARS, folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del manifest["checksums"]
    for row in manifest["report"]:
        del row["in_training"]
    manifest["settings"] = {"data": {"valid_size": 0}, "seed": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    old = PreparedText.open(folder)
    assert texts(old, "train") == texts(first, "train")
    assert "kept" in filter_table(old.report)
    assert texts(prepare_text(split, CHARS, folder, say=said.append), "train") == texts(first, "train")
    assert said == [f"{folder}: made from other text, with other options or by an older version: preparing again"]


@pytest.mark.parametrize("shared", [False, True])
def test_of_two_that_prepare_the_same_text_one_wins(split: DataConfig, tmp_path: Path, shared: bool) -> None:
    data = dataclasses.replace(split, store=str(tmp_path / "shared")) if shared else split
    folder, inner = tmp_path / "store", list[PreparedText]()

    def meanwhile(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise" and not inner:
            inner.append(prepare_text(data, CHARS, folder))
            inode.append(inner[0].folder.stat().st_ino)

    inode: list[int] = []
    outer = prepare_text(data, CHARS, folder, progress=meanwhile)
    assert outer.folder == inner[0].folder
    assert outer.folder.stat().st_ino == inode[0], "the first one stays"
    assert texts(outer, "train") == texts(inner[0], "train")
    assert [path.name for path in outer.folder.parent.iterdir() if path.name.startswith(".")] == []


def test_an_unfinished_store_is_not_read(split: DataConfig, tmp_path: Path) -> None:
    """A draft is complete, with its manifest, before it is renamed."""
    data = dataclasses.replace(split, store=str(tmp_path / "shared"))
    done = prepare_text(data, CHARS, tmp_path / "run").folder
    done.rename(done.with_name(f".preparing-{platform.node()}-{os.getpid()}-00"))
    again = prepare_text(data, CHARS, tmp_path / "run").folder
    assert again == done
    assert len(list(done.parent.iterdir())) == 2


@pytest.mark.parametrize("at", [1, 3, 10])
def test_killed_while_flushing(tmp_path: Path, at: int) -> None:
    spec = write(tmp_path, sentences(300))
    sabotage = f"""
from qkv.core import files
real, calls = files.sync, []
def sync(path):
    calls.append(path)
    if len(calls) == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(path)
files.sync = sync
"""
    code = KILLED.replace("folder, stage", f"{sabotage}\nfolder, stage", 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), "none"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    prepare_text(DataConfig(train=(spec,)), CHARS, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["store"]


# ---- filters ---------------------------------------------------------------------------------------------------------


def without(values: Any, word: str) -> bool:
    return all(word not in text for text in values)


def short(lengths: Any, most: int) -> bool:
    return sum(lengths) <= most


def test_a_filter_is_part_of_the_key(split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new filter, or one with other options, never reuses text that was made without it."""

    def prepared(*filters: Filter) -> PreparedText:
        return prepare_text(split, CHARS, tmp_path / "store", filters=filters, say=lambda line: None)

    cats = Filter("cats", partial(without, word="cat"), "text", "no cat")
    plainly, filtered = prepared(), prepared(cats)
    expected = [pair for pair in sentences(300) if "cat" not in pair[0]]
    assert texts(filtered, "train") == expected
    assert len(plainly.train) == 300
    assert filtered.report[0]["cats"] == 300 - len(expected)
    assert len(filtered.valid) == 20, "a given validation set is taken as it is"
    assert "cats" in filter_table(filtered.report)
    with monkeypatch.context() as patch:
        forbid(patch, "decompress_all")
        prepared(cats)
    dogs = prepared(cats._replace(keep=partial(without, word="dog"), key="no dog"))
    assert len(dogs.train) == sum("dog" not in src for src, _ in sentences(300))
    strict = Filter("long", partial(short, most=60), "tokens", "<= 60", on_validation=True)
    both = prepared(cats, strict)
    assert all(len(src) + len(tgt) + 2 <= 60 for part in ("train", "valid") for src, tgt in texts(both, part))
    assert both.report[1]["long"] == 20 - len(both.valid) > 0


def test_validation_pairs_that_occur_in_training_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", 64)
    pairs = sentences(300)
    train = write(tmp_path, pairs)
    seen = [pairs[7], (f" {pairs[150][0]} ", pairs[150][1]), pairs[299], (pairs[3][0], "another translation")]
    valid = [write(tmp_path, sentences(20, seed=1) + seen, "one"), write(tmp_path, pairs[:2] * 2, "two")]
    report = prepare_text(DataConfig(train=(train,), valid=tuple(valid)), CHARS, tmp_path / "store").report
    assert [row["in_training"] for row in report] == [0, 3, 4]
    assert "in training" in filter_table(report)
    rest = DataConfig(train=(train,), valid=(write(tmp_path, sentences(20, seed=1), "three"),))
    assert "in training" not in filter_table(prepare_text(rest, CHARS, tmp_path / "other").report)


# ---- slices and rows -------------------------------------------------------------------------------------------------


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


def test_many_rows_at_once_are_those_one_by_one(split: DataConfig, tmp_path: Path) -> None:
    store = prepare_text(split, CHARS, tmp_path / "store").train
    random = np.random.default_rng(0)
    for indices in (random.permutation(300), random.integers(300, size=50), np.array([299, 0, 0]), np.array([], int)):
        for side in ("src", "tgt"):
            ids, lengths = store.rows(side, indices)
            assert lengths.tolist() == [len(store.row(side, i)) for i in indices]
            assert ids.tolist() == [token for i in indices for token in store.row(side, i).tolist()]
    assert store.rows("src", np.arange(300)).ids.tolist() == np.concatenate([store.src(i) for i in range(300)]).tolist()


def test_the_seed_of_training_does_not_change_the_text(tmp_path: Path) -> None:
    """Trainings with several seeds are compared on the same text."""
    data = DataConfig(train=(write(tmp_path, sentences(400)),), store=str(tmp_path / "shared"))
    one, two, other = (
        run_training._prepare(tmp_path / "run", Config(data=each, tokenizer=CHARS).replace(train={"seed": seed}))
        for each, seed in ((data, 1), (data, 2), (dataclasses.replace(data, seed=2), 1))
    )
    assert one.folder == two.folder != other.folder
    assert texts(one, "valid") != texts(other, "valid")
