"""The native library: built on first use, by several processes at once, or not at all, with a reason."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_native_transformer import ROOT, needed
from test_packed_linear import KINDS, made

from qkv.core.transformer import Transformer
from qkv.engines.cpu import choose, native_library, pack
from qkv.engines.cpu.native_library import library, sources


@needed
def test_the_engine_reports_that_it_is_native() -> None:
    assert str(pack(made(KINDS["transformer"])).engine) == f"{choose('fp32')}, native"
    if "avx512_vnni" in str(choose("int8")):
        assert str(pack(made(KINDS["transformer"]), "int8").engine) == "int8 on avx512_vnni, native"
    assert "native" not in str(pack(made(KINDS["gru"])).engine)
    assert "native" not in str(pack(made(KINDS["transformer"]), "bf16").engine)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_NATIVE", "0")
    found = pack(made(KINDS["transformer"]))
    assert isinstance(found, Transformer)
    assert str(found.engine) == "fp32 on any processor (not native: QKV_NATIVE=0)"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a folder of compilers on the path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler does not optimise, which takes most of its time."""
    monkeypatch.setattr(
        native_library, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native_library.FLAGS)
    )


def test_without_a_compiler_the_plain_model_decodes(elsewhere: Path) -> None:
    assert library() == "no C compiler"
    found = pack(made(KINDS["transformer"]))
    assert isinstance(found, Transformer)
    assert str(found.engine).endswith("(not native: no C compiler)")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.c:1: error: bad day' >&2\nexit 1", "bad day"),
        ("#!/bin/sh\nexit 0", "cannot be loaded"),  # it exits with 0 and writes no file
        ("#!/no/such/shell\n", "cannot be run"),
    ],
)
def test_a_broken_compiler_is_a_reason(elsewhere: Path, script: str, reason: str) -> None:
    (elsewhere / "cc").write_text(script)
    (elsewhere / "cc").chmod(0o755)
    assert reason in str(library())
    assert "\n" not in str(library())
    assert isinstance(pack(made(KINDS["transformer"])), Transformer)
    assert not list((elsewhere / "cache").rglob("*.so"))


@needed
@pytest.mark.usefixtures("quickly")
def test_a_compiler_that_does_not_know_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = next(filter(None, map(shutil.which, native_library.COMPILERS)))
    refusing = 'case "$*" in *-march=*) echo "error: unsupported argument to -march=" >&2; exit 1;; esac'
    (tmp_path / "cc").write_text(f'#!/bin/sh\n{refusing}\nexec {real} "$@"')
    (tmp_path / "cc").chmod(0o755)
    assert native_library.build(str(tmp_path)).qkv_lanes() > 0
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


@needed
@pytest.mark.usefixtures("quickly")
def test_a_cache_that_cannot_be_written_or_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native_library.build(os.environ["PATH"]).qkv_lanes() > 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_library.build(os.environ["PATH"])
    (kept,) = (tmp_path / "qkv").iterdir()
    kept.unlink()
    kept.write_bytes(b"no library")
    assert native_library.build(os.environ["PATH"]).qkv_lanes() > 0


@needed
@pytest.mark.usefixtures("quickly")
def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert native_library.cache_folder() is None
    assert native_library.build(os.environ["PATH"]).qkv_lanes() > 0
    monkeypatch.setattr(native_library.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(native_library.Unavailable, match=r"cannot be loaded \(No such file"):
        native_library.build(os.environ["PATH"])


@needed
@pytest.mark.usefixtures("quickly")
def test_a_cache_that_nothing_may_be_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk mounted noexec the library is loaded from a temporary folder."""
    load = native_library.ctypes.CDLL

    def picky(path: str) -> Any:
        if path.startswith(str(tmp_path)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library.ctypes, "CDLL", picky)
    assert native_library.build(os.environ["PATH"]).qkv_lanes() > 0
    assert not list(tmp_path.rglob("*.so"))


@needed
def test_several_processes_may_build_at_once(tmp_path: Path) -> None:
    script = "from qkv.engines.cpu.native_library import library; print(library().qkv_panel())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) for _ in range(3)
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert len(set(said)) == 1
    assert int(said[0]) > 0
    assert len(list((tmp_path / "qkv").iterdir())) == 1


def test_the_sources_are_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    assert {file.suffix for file in sources()} == {".c", ".h"}
    assert all(any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns) for file in sources())
