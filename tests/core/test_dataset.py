"""Prepared text on disk: complete or absent, reused while nothing changed, refused when it is damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import content, prepare_text, texts
from qkv.core import files, preparation
from qkv.core.config import CorpusConfig, DataConfig, TokenizerConfig
from qkv.core.dataset import PreparedText, StoreFolder, TokenStore, read_manifest
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
    assert (
        store.rows("src", np.arange(300)).ids.tolist()
        == np.concatenate([store.row("src", i) for i in range(300)]).tolist()
    )


# ---- a store by hand -------------------------------------------------------------------------------------------------


def store_by_hand(folder: Path) -> TokenStore:
    """Three pairs of two corpora, with links for none of them, of which the second pair has no target."""
    rows = {"src": [[5, 6], [7], [8, 9, 10]], "tgt": [[1], [], [2, 3]], "links": [[], [], []]}
    dtypes = {"src": "<u2", "tgt": "<u4", "links": "<u2"}
    for name, dtype in dtypes.items():
        np.concatenate([np.array(row, dtype) for row in rows[name]]).tofile(folder / f"train.{name}.ids")
        np.array([len(row) for row in rows[name]], "<u4").tofile(folder / f"train.{name}.lengths")
    manifest = {"format": "qkv-store", "version": 1, "sides": ["src", "tgt"], "dtypes": dtypes}
    manifest["train"] = {"pairs": [2, 1], "weights": [1.0, 0.5]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return TokenStore(folder, "train")


def test_rows_and_numbers_of_a_store(tmp_path: Path) -> None:
    store = store_by_hand(tmp_path)
    assert len(store) == 3
    assert store.weights == (1.0, 0.5)
    assert store.corpus.tolist() == [0, 0, 1]
    assert (store.sides, store.columns) == (["src", "tgt"], ["src", "tgt", "links"])
    assert [store.row("src", i).tolist() for i in range(3)] == [[5, 6], [7], [8, 9, 10]]
    assert [store.row("tgt", i).tolist() for i in range(3)] == [[1], [], [2, 3]]
    assert store.ids["tgt"].tolist() == [1, 2, 3]
    assert store.lengths("src").tolist() == [2, 1, 3]
    assert [store.row("links", i).tolist() for i in range(3)] == [[], [], []]
    assert store.rows("tgt", np.array([2, 1, 0])).ids.tolist() == [2, 3, 1]
    with pytest.raises(UsageError, match=r"plain text, which has no more side: train a model without a source on it"):
        store.lengths("more")


@pytest.mark.parametrize("name", ["train.src.ids", "train.tgt.lengths", "train.links.ids"])
def test_a_store_whose_files_do_not_fit_together_is_refused(tmp_path: Path, name: str) -> None:
    store_by_hand(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4))
    with pytest.raises(QkvError, match=r"train\..*ids: cut off or damaged: delete .* and prepare again"):
        TokenStore(tmp_path, "train")
    path.write_bytes(whole + b"x")  # no whole number of ids
    with pytest.raises(QkvError, match=rf"{name}: missing or cut off: delete {tmp_path} and prepare again"):
        TokenStore(tmp_path, "train")
    path.unlink()
    with pytest.raises(QkvError, match=rf"{name}: missing or cut off"):
        TokenStore(tmp_path, "train")


# ---- the place of a prepared text ------------------------------------------------------------------------------------


def test_a_text_of_other_tokenizers_or_with_a_missing_file_is_refused(split: DataConfig, tmp_path: Path) -> None:
    folder = prepare_text(split, tmp_path / "store").folder
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with pytest.raises(QkvError, match="store: the text was prepared with other tokenizers: delete it and prepare"):
        PreparedText.open(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "valid.src.txt").unlink()
    with pytest.raises(QkvError, match=r"valid\.src\.txt: missing: delete .*store and prepare again"):
        PreparedText.open(folder)
    with pytest.raises(UsageError, match="none: no prepared text here: prepare it first"):
        PreparedText.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: exists and is no store of prepared text: choose another folder, or"):
        StoreFolder(tmp_path / "file")


def test_an_earlier_result_is_found_by_settings_and_inputs(split: DataConfig, tmp_path: Path) -> None:
    folder, said = prepare_text(split, tmp_path / "store").folder, list[str]()
    store, manifest = StoreFolder(folder, said.append), read_manifest(folder)
    settings, inputs = manifest["settings"], manifest["inputs"]
    for respects in (("path", "size", "mtime"), ("hash",)):
        found = store.find(settings, [{name: about[name] for name in respects} for about in inputs])
        assert found is not None
        assert found.folder == folder
    hashes = [{"hash": about["hash"]} for about in inputs]
    states = [{"path": about["path"], "size": about["size"], "mtime": about["mtime"]} for about in inputs]
    changed = [*states[:-1], {**states[-1], "size": 1}]
    assert store.find(settings, changed) is None
    assert store.find({**settings, "text": "other"}, states) is None
    assert store.find(settings, [*states[:-1], {"path": "-", "size": None, "mtime": None}]) is None
    assert said == [], "the content may still be equal"
    stream = [*inputs[:-1], {**inputs[-1], "size": None}]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"inputs": stream}))
    assert store.find(settings, stream) is None, "a stream has other content each time"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for other, about in [(settings, [*hashes[:-1], {"hash": "x"}]), ({}, hashes)]:
        assert store.find(other, about) is None
        assert (
            said.pop() == f"{folder}: made from other text, with other options or by an older version: preparing again"
        )
    (folder / "manifest.json").write_text(json.dumps({"format": "qkv-store", "version": 1}))
    assert store.find(settings, hashes) is None
    assert said.pop().startswith(f"{folder}: cannot be reused ('inputs'): preparing again")
    assert StoreFolder(tmp_path / "new", said.append).find(settings, hashes) is None
    assert said == [], "nothing is there"


def test_a_result_that_another_process_published_meanwhile_stays(split: DataConfig, tmp_path: Path) -> None:
    folder = prepare_text(split, tmp_path / "store").folder
    store, manifest, inode = StoreFolder(folder), read_manifest(folder), folder.stat().st_ino
    with store.draft() as draft:
        for name, content_ in content(folder).items():
            (draft / name).write_bytes(content_)
        assert store.publish(draft, manifest).folder == folder
    assert folder.stat().st_ino == inode
    with store.draft() as draft:
        for name, content_ in content(folder).items():
            (draft / name).write_bytes(content_)
        store.publish(draft, {**manifest, "settings": {"text": "newer"}})
    assert folder.stat().st_ino != inode
    assert read_manifest(folder)["settings"] == {"text": "newer"}
    assert {path.name for path in folder.iterdir()} == {*content(folder), "manifest.json"}, "the older one is removed"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["store"]


def test_a_result_published_at_the_moment_of_the_rename_stays(
    split: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_text(split, tmp_path / "first").folder
    place, rename = tmp_path / "store", os.rename
    other = prepare_text(dataclasses.replace(split, seed=split.seed + 1), tmp_path / "second").folder

    def publish(by_other: Path) -> Path:
        def late(source: Path, target: Path) -> None:
            if target == place and not place.exists():
                shutil.copytree(by_other, place)
            rename(source, target)

        store, manifest = StoreFolder(place), read_manifest(folder)
        with store.draft() as draft, monkeypatch.context() as patch:
            for name, content_ in content(folder).items():
                (draft / name).write_bytes(content_)
            patch.setattr(os, "rename", late)
            return store.publish(draft, manifest).folder

    assert publish(folder) == place
    assert content(place) == content(folder)
    shutil.rmtree(place)
    with pytest.raises(OSError, match="not empty"):  # another text must not pass for this one
        publish(other)


def test_a_draft_lies_beside_its_place_and_is_removed(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path / "new" / "folder" / "store")
    with store.draft() as first, store.draft() as second:
        assert first.parent == second.parent == tmp_path / "new" / "folder"
        assert first != second
        assert first.name.startswith(".preparing-")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(RuntimeError), store.draft():
        raise RuntimeError
    assert list((tmp_path / "new" / "folder").iterdir()) == []
