"""Prepared text on disk: complete or absent, reused while nothing changed, refused when it is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import content, prepare_text, texts
from qkv.core import files, preparation
from qkv.core.config import CorpusConfig, DataConfig, TokenizerConfig
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError


def forbid(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError(f"{step} must not run")

    monkeypatch.setattr(preparation, step, refuse)


def test_the_same_inputs_are_not_prepared_again(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_text(split, tmp_path / "store")
    with monkeypatch.context() as patch:
        forbid(patch, "Scan")
        again = prepare_text(split, tmp_path / "store", unpack=None)
        assert again.report == first.report
        assert texts(again, "train") == texts(first, "train")
    os.utime(split.train[0].src, (1, 1))
    with monkeypatch.context() as patch:
        forbid(patch, "Scan")
        prepare_text(split, tmp_path / "store")
    os.replace(split.train[0].tgt, tmp_path / "elsewhere.de")
    moved = DataConfig(train=(CorpusConfig(split.train[0].src, str(tmp_path / "elsewhere.de")),), valid=split.valid)
    with monkeypatch.context() as patch:
        forbid(patch, "Scan")
        prepare_text(moved, tmp_path / "store")


def test_other_text_or_settings_are_prepared_anew(split: DataConfig, tmp_path: Path) -> None:
    before = prepare_text(split, tmp_path / "store")
    stat = os.stat(split.train[0].src)
    text = Path(split.train[0].src).read_bytes()
    Path(split.train[0].src).write_bytes(text.replace(b"cat", b"bat"))
    os.utime(split.train[0].src, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    after = prepare_text(split, tmp_path / "store")
    assert any("bat" in src for src, _ in texts(after, "train"))
    assert not any("bat" in src for src, _ in texts(before, "train")), "an open store outlives its replacement"
    learned = prepare_text(split, tmp_path / "store", learn=True)
    assert learned.tokenizers.src.kind == PreparedText.open(tmp_path / "store").tokenizers.src.kind == "bpe"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["store"]


def test_given_tokenizers_are_used(split: DataConfig, tmp_path: Path) -> None:
    given = prepare_text(split, tmp_path / "one").tokenizers
    prepared = prepare_text(split, tmp_path / "two", tokenizers=given, tokenizer=TokenizerConfig(vocab=32_000))
    assert prepared.tokenizers.fingerprint == given.fingerprint


def test_a_failed_preparation_leaves_no_files(split: DataConfig, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise":
            raise OSError(28, "No space left on device", "ids")

    with pytest.raises(QkvError, match="ids: preparing the text failed: No space left on device"):
        prepare_text(split, tmp_path / "store", progress=progress)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_damaged_stores_are_refused_and_made_again(split: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    whole = content(prepare_text(split, folder).folder)
    for name in ("train.src.ids", "valid.tgt.lengths", "tokenizers.json"):
        with open(folder / name, "r+b") as file:
            file.truncate(os.path.getsize(folder / name) - 2)
        with pytest.raises(QkvError, match=name.split(".")[0]):
            PreparedText.open(folder)
        assert content(prepare_text(split, folder).folder) == whole
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for change, message in (({"version": 99}, "version 99"), ({"format": "x"}, "not a qkv store")):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(QkvError, match=message):
            PreparedText.open(folder)


def test_other_folders_are_not_overwritten(split: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    prepare_text(split, tmp_path / "store")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="mine: exists and is no store"):
        prepare_text(split, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_changed_ids_are_noticed(split: DataConfig, tmp_path: Path) -> None:
    """After a lost disk cache, files have the right size and contain zeros."""
    folder, said = tmp_path / "store", list[str]()
    whole = content(prepare_text(split, folder).folder)
    for name in ("train.src.ids", "valid.tgt.lengths", "valid.src.txt"):
        path = folder / name
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(QkvError, match=rf"{name}: damaged, its checksum is wrong: delete .* and prepare again"):
            PreparedText.open(folder)
        said.clear()
        assert content(prepare_text(split, folder, say=said.append).folder) == whole
        assert len(said) == 1
        assert f"{name}: damaged" in said[0]


def test_all_files_are_flushed_before_they_get_their_name(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    rename, at_renaming = os.rename, list[set[str]]()
    monkeypatch.setattr(files, "sync", lambda path: flushed.add(path.name.lstrip(".").split(".json.")[0]))
    monkeypatch.setattr(os, "rename", lambda *paths: (at_renaming.append(set(flushed)), rename(*paths)))
    folder = prepare_text(split, tmp_path / "store").folder
    (before,) = at_renaming
    assert {path.name for path in folder.iterdir() if path.suffix != ".json"} <= before
    assert {"manifest", "tokenizers.json"} <= before
    assert tmp_path.name in flushed, "and the folder after it"


def test_a_store_without_checksums_still_opens(split: DataConfig, tmp_path: Path) -> None:
    """A store of an older version: a run resumes with it, a new preparation replaces it."""
    folder, said = tmp_path / "store", list[str]()
    first = prepare_text(split, folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del manifest["checksums"]
    manifest["settings"] = {"data": {"valid_size": 0}, "seed": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    old = PreparedText.open(folder)
    assert texts(old, "train") == texts(first, "train")
    assert texts(prepare_text(split, folder, say=said.append), "train") == texts(first, "train")
    assert said == [f"{folder}: made from other text, with other options or by an older version: preparing again"]


def test_many_rows_at_once_are_those_one_by_one(split: DataConfig, tmp_path: Path) -> None:
    store = prepare_text(split, tmp_path / "store").train
    random = np.random.default_rng(0)
    for indices in (random.permutation(300), random.integers(300, size=50), np.array([299, 0, 0]), np.array([], int)):
        for side in ("src", "tgt"):
            ids, lengths = store.rows(side, indices)
            assert lengths.tolist() == [len(store.row(side, i)) for i in indices]
            assert ids.tolist() == [token for i in indices for token in store.row(side, i).tolist()]
    assert store.rows("src", np.arange(300)).ids.tolist() == np.concatenate([store.src(i) for i in range(300)]).tolist()
