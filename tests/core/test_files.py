"""Atomic writes: the whole new file, or the old one as it was."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qkv.core import files
from qkv.core.errors import QkvError, UsageError


def test_a_file_that_cannot_be_written_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notes.txt"
    files.write_text(path, "before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(QkvError, match=r"notes\.txt: cannot be written: No space left on device"):
        files.write_text(path, "after")
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "notes.txt"
    files.write_text(path, "é\r\n\u2028")
    assert path.read_bytes() == "é\r\n\u2028".encode()
    assert [each.name for each in path.parent.iterdir()] == ["notes.txt"]


def test_tensors_come_back_with_their_metadata_and_ordinary_permissions(tmp_path: Path) -> None:
    path, weight = tmp_path / "weights.safetensors", torch.arange(6.0).reshape(2, 3)
    files.write_tensors(path, {"a": weight.T, "b": torch.ones(2, requires_grad=True)})
    about: dict[str, str] = {"kept": "yes"}
    read = files.read_tensors(path, about)
    assert torch.equal(read["a"], weight.T)
    assert about == {"kept": "yes", "format": "pt"}
    files.write_tensors(path, {"a": weight}, {"step": "7"})
    files.read_tensors(path, about)
    assert about["step"] == "7"
    save_file({"a": weight}, path)  # by other software, without metadata
    assert torch.equal(files.read_tensors(path, about)["a"], weight)
    files.write_tensors(path, {"a": weight})
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(QkvError, match=rf"weights\.safetensors: no such weights: look into {tmp_path} for"):
        files.read_tensors(path)
    path.write_bytes(b"truncated")
    with pytest.raises(QkvError, match=r"truncated or not a safetensors file \(.*\): restore it from a copy"):
        files.read_tensors(path)


def test_a_json_file_is_read_if_it_is_of_its_kind_and_version(tmp_path: Path) -> None:
    path = tmp_path / "made.json"

    def read() -> dict[str, object]:
        return files.read_json(path, "list", 3, "make it again")

    with pytest.raises(UsageError, match=r"made\.json: cannot read the list: No such file or directory$"):
        read()
    whole = '{"format": "qkv-list", "version": 3, "name": "é"}'
    for content, message in [
        (whole.encode()[:-2], "not JSON, so not a list, or cut off: make it again"),
        (b"\xff", "not JSON, so not a list, or cut off: make it again"),
        (b"[]", "not a qkv list: expected a JSON file with format qkv-list"),
        (b'{"version": 3}', "not a qkv list: expected a JSON file with format qkv-list"),
        (whole.replace("3", "4").encode(), "list version 4, this qkv reads 3: make it again"),
        (b'{"format": "qkv-list"}', "list version None, this qkv reads 3: make it again"),
    ]:
        path.write_bytes(content)
        with pytest.raises(QkvError, match=f"^{path}: {message}$") as caught:
            read()
        assert caught.value.exit_code == 1
    path.write_text(whole, encoding="utf-8")
    assert read() == {"format": "qkv-list", "version": 3, "name": "é"}


def test_equal_files_have_equal_hashes(tmp_path: Path) -> None:
    contents = [b"", b"one", b"one", b"one\n"]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    hashes = [files.content_hash(tmp_path / str(number)) for number in range(4)]
    assert hashes == [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]
    assert len(set(hashes)) == 3


def test_the_order_of_an_atomic_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is flushed before it gets its name, and the folder after it."""
    path, seen = tmp_path / "notes.txt", list[str]()
    replace = Path.replace

    def replaced(self: Path, target: Path) -> Path:
        seen.append("rename")
        return replace(self, target)

    monkeypatch.setattr(files, "sync", lambda synced: seen.append("folder" if synced == tmp_path else "content"))
    monkeypatch.setattr(Path, "replace", replaced)
    files.write_text(path, "text")
    assert seen == ["content", "rename", "folder"]


def test_sync_flushes_and_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, flushed = set(os.listdir("/proc/self/fd")), list[int]()
    monkeypatch.setattr(os, "fsync", flushed.append)
    files.sync(tmp_path)
    assert len(flushed) == 1
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_reason_of_an_error_is_the_systems() -> None:
    assert files.reason(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert files.reason(ValueError("I/O error: File too large (os error 27)")) == os.strerror(errno.EFBIG)
    assert files.reason(ValueError("anything else")) == "anything else"
