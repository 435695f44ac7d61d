"""From files to stored ids: exact counts, no leak between the parts, equal bytes on every path, no partial store."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core_runs import content, distinct_pairs, texts, write_corpus
from qkv.api import run_training
from qkv.api.run_training import line_statistics
from qkv.core import config, corpus, preparation
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.data import text_preparation
from qkv.data.text_preparation import filter_table, prepare_text
from qkv.options import Config, CorpusConfig, DataConfig, TokenizerConfig

CHARS = TokenizerConfig(kind="char")


def write(folder: Path, pairs: list[tuple[str, str]], name: str = "train") -> CorpusConfig:
    corpus = write_corpus(folder, pairs, name)
    return CorpusConfig(corpus.src, corpus.tgt)


@pytest.fixture
def split(split: config.DataConfig) -> DataConfig:
    """The text of the core's tests with the options of the rings."""
    train, valid = ((CorpusConfig(corpus.src, corpus.tgt),) for (corpus,) in (split.train, split.valid))
    return DataConfig(train=train, valid=valid)


def test_all_stages_are_reported(split: DataConfig, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    prepare_text(split, CHARS, tmp_path / "store", progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["unpack", "scan", "learn", "tokenise"]
    assert told[-1] == ("tokenise", 320, 320)


def test_a_filter_report_is_a_table(tmp_path: Path) -> None:
    pairs = [*distinct_pairs(40), distinct_pairs(1)[0], ("", "empty"), ("x" * 200, "long")]
    valid = write(tmp_path, [*distinct_pairs(20, seed=1), *distinct_pairs(2), ("", "x")], "valid")
    data = DataConfig(train=(write(tmp_path, pairs),), valid=(valid,), max_length=200)
    prepared = prepare_text(data, CHARS, tmp_path / "store")
    train, held_out = prepared.report
    assert (train["in_training"], held_out["in_training"]) == (0, 2)
    titles, first, second = filter_table(prepared.report).split("\n")
    assert titles.split() == ["corpus", "read", "kept", "empty", "duplicate", "too", "long", "in", "training"]
    assert "held out" not in titles, "nothing was, so it has no column"
    assert first.split()[-6:] == ["43", "40", "1", "1", "1", "0"]
    assert second.split()[-7:] == ["(valid)", "23", "22", "1", "0", "0", "2"]
    older = [{name: count for name, count in row.items() if name != "in_training"} for row in prepared.report]
    assert filter_table(older).split("\n")[0].endswith("too long")


# ---- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sample", "share"), [(2000, 0.25), (16, 0.25), (1, 0.0)])
def test_lines_of_several_sentences_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int, share: float
) -> None:
    """The share is measured on a sample of the whole text; a language tag does not count as a sentence."""
    monkeypatch.setattr("qkv.api.run_training.SAMPLE", sample)
    pairs = [(f"{src[:-1]}! And more." if i % 4 == 3 else src, tgt) for i, (src, tgt) in enumerate(distinct_pairs(80))]
    train, valid = write(tmp_path, pairs), write(tmp_path, distinct_pairs(20, seed=1), "valid")
    tagged = CorpusConfig(train.src, train.tgt, tag="de")
    prepared = prepare_text(DataConfig(train=(tagged,), valid=(valid,)), CHARS, tmp_path / "store")
    assert len(prepared.train) == 80
    found = line_statistics(prepared, "en")
    assert found is not None
    assert 1 - found.sentences["1"] == share
    assert found.tokens == max(prepared.train.lengths("src"))


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n\n" for n in range(100)))
    prepared = prepare_text(DataConfig(train=(CorpusConfig(text=str(tmp_path / "a.txt")),)), CHARS, tmp_path / "store")
    assert prepared.tokenizers.shared
    assert prepared.train.sides == ["tgt"]
    kept = [
        prepared.tokenizers.tgt.decode(part.row("tgt", i))
        for part in (prepared.train, prepared.valid)
        for i in range(len(part))
    ]
    assert sorted(kept) == sorted(f"line {n}" for n in range(100))
    assert prepared.report[0]["empty"] == 100
    with pytest.raises(UsageError, match="no src side"):
        prepared.train.row("src", 0)


# ---- the held-out part -----------------------------------------------------------------------------------------------


# ---- how it is made --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_processes_make_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 2_000)
    monkeypatch.setattr(text_preparation, "SMALL_TEXT", 0)
    spec = write(tmp_path, [*distinct_pairs(600), *distinct_pairs(100)])
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
    spec = write(tmp_path, distinct_pairs(50))
    (tmp_path / "train.en").write_bytes(b"\xff\n" * 50)
    with pytest.raises(QkvError, match=r"train\.en, line 1: not UTF-8"):
        prepare_text(DataConfig(train=(spec,), workers=2), CHARS, tmp_path / "store")


# ---- used again ------------------------------------------------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError(f"{step} must not run")

    monkeypatch.setattr(preparation, step, refuse)


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


# ---- whole or not at all ---------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from qkv.options import CorpusConfig, DataConfig, TokenizerConfig
from qkv.core import config, corpus
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
    spec = write(tmp_path, distinct_pairs(300))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), stage], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) == 2, "the draft, and the folder of hashes"
    for folder in (tmp_path / "store", *left):
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


def test_pipes_are_read_once(tmp_path: Path) -> None:
    pairs = distinct_pairs(60)
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


@pytest.mark.parametrize("published", [True, False])
def test_a_shared_store_that_appears_while_it_is_renamed_is_used(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """Of two processes that rename at the same moment, the second fails and uses the result of the first."""
    data = dataclasses.replace(split, store=str(tmp_path / "shared"))

    def rename(draft: Path, place: Path) -> None:
        if published:
            shutil.copytree(draft, place)  # the other process
        raise OSError(errno.ENOTEMPTY if published else errno.EIO, "as the system reports it", str(draft))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        if not published:
            with pytest.raises(QkvError, match="preparing the text failed: as the system reports it"):
                prepare_text(data, CHARS, tmp_path / "run")
            return
        found = prepare_text(data, CHARS, tmp_path / "run")
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [found.folder.name]
    assert len(texts(found, "train")) == 300


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
    spec = write(tmp_path, distinct_pairs(300))
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


def test_validation_pairs_that_occur_in_training_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "HASHES_AT_ONCE", 64)
    pairs = distinct_pairs(300)
    train = write(tmp_path, pairs)
    seen = [pairs[7], (f" {pairs[150][0]} ", pairs[150][1]), pairs[299], (pairs[3][0], "another translation")]
    valid = [write(tmp_path, distinct_pairs(20, seed=1) + seen, "one"), write(tmp_path, pairs[:2] * 2, "two")]
    report = prepare_text(DataConfig(train=(train,), valid=tuple(valid)), CHARS, tmp_path / "store").report
    assert [row["in_training"] for row in report] == [0, 3, 4]
    assert "in training" in filter_table(report)
    rest = DataConfig(train=(train,), valid=(write(tmp_path, distinct_pairs(20, seed=1), "three"),))
    assert "in training" not in filter_table(prepare_text(rest, CHARS, tmp_path / "other").report)


# ---- slices and rows -------------------------------------------------------------------------------------------------


def test_the_seed_of_training_does_not_change_the_text(tmp_path: Path) -> None:
    """Trainings with several seeds are compared on the same text."""
    data = DataConfig(train=(write(tmp_path, distinct_pairs(400)),), store=str(tmp_path / "shared"))
    one, two, other = (
        run_training._prepare(tmp_path / "run", Config(data=each, tokenizer=CHARS).replace(train={"seed": seed}))
        for each, seed in ((data, 1), (data, 2), (dataclasses.replace(data, seed=2), 1))
    )
    assert one.folder == two.folder != other.folder
    assert texts(one, "valid") != texts(other, "valid")
