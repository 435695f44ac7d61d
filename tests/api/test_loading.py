"""Loading a run: the weights that are used, also while a training changes them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.assembly import Run
from qkv.core import run as core_run
from qkv.core.errors import UsageError


def test_weights_of_a_run_in_training_are_named_with_their_step(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.open(tiny)
    name, step = run.scores["chosen"], run.scores["best"]["step"]
    qkv.load(run)
    assert "in training" not in capsys.readouterr().err
    with run.lock():
        qkv.load(run, weights="best")
        assert f"{tiny} is in training: using best weights of step {step}" in capsys.readouterr().err
        qkv.load(run)
    assert f"{tiny} is in training: using {name} weights of step " in capsys.readouterr().err


@pytest.mark.parametrize(("number", "locked"), [(errno.EWOULDBLOCK, True), (errno.EACCES, True), (errno.ENOSYS, False)])
def test_a_locked_folder_is_in_training(
    number: int, locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    assert Run(tmp_path).in_training() == locked


def test_only_one_training_at_a_time(tmp_path: Path) -> None:
    handles = set(os.listdir("/proc/self/fd"))
    with Run(tmp_path).lock():
        for _ in range(2):
            with pytest.raises(UsageError, match="another process is training here: wait for it, or stop it"):
                Run(tmp_path).lock().__enter__()
    with pytest.raises(RuntimeError), Run(tmp_path).lock():
        raise RuntimeError
    with Run(tmp_path).lock():
        pass
    assert set(os.listdir("/proc/self/fd")) == handles


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_folder_locked_by_another_process_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(UsageError, match="another process is training here"), Run(tmp_path).lock():
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_and_training_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with Run(tmp_path).lock():
        pass
    assert "this file system cannot lock folders" in capsys.readouterr().err


def failing(number: int) -> Any:
    def flock(*_: object) -> None:
        raise OSError(number, "as the system reports it")

    return flock


def test_weights_are_also_named_by_age_and_step(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(UsageError, match="no weights"):
        core_run.Run(tmp_path).weights("last")
    for name in ("best", "average", "step-0000020", "step-0000100"):
        (tmp_path / "weights" / f"{name}.safetensors").touch()
    run = Run(tmp_path)
    for name, stem in [("", "best"), ("average", "average"), ("last", "step-0000100"), ("20", "step-0000020")]:
        assert run.weights(name) == tmp_path / "weights" / f"{stem}.safetensors"
    assert run.weights("0020") == run.weights("step-0000020") == run.weights("20")
    with pytest.raises(UsageError, match=r"no weights named step-0000021: there are average, best, step-0000020, "):
        run.weights("21")
