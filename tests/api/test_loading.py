"""Loading a run: the weights that are used, also while a training changes them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

import qkv
from qkv.assembly import Run


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
    def flock(*_: object) -> None:
        raise OSError(number, "as the system reports it")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert Run(tmp_path).in_training() == locked
