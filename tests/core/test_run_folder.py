"""The run folder: its lock, the step of its weights, and the state that training continues from."""

from __future__ import annotations

import errno
import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qkv
from conftest import begun, sentences, step_of, tiny_config, updates, write_pairs
from qkv.assembly import Run, trainer_for
from qkv.core import checkpoint
from qkv.core.errors import UsageError


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_folder_locked_by_another_process_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(UsageError, match="another process is training here"), Run(tmp_path).lock():
        pass
    assert Run(tmp_path).in_training()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_and_training_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with Run(tmp_path).lock():
        pass
    assert "this file system cannot lock folders" in capsys.readouterr().err
    assert not Run(tmp_path).in_training()


def failing(number: int) -> Any:
    def flock(*_: object) -> None:
        raise OSError(number, "as the system reports it")

    return flock


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


def test_a_state_is_saved_though_the_older_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    step = step_of(model, torch.optim.Adam(model.parameters()))
    run = Run(tmp_path)
    checkpoint.save_state(run, checkpoint.Progress(step=1), step)
    remove = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "step-0000001":
            remove(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, "a file in it is open")

    monkeypatch.setattr(shutil, "rmtree", busy)
    checkpoint.save_state(run, checkpoint.Progress(step=2), step)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-0000001", "step-0000002"]
    latest = checkpoint.latest_state(run)
    assert latest is not None
    assert checkpoint.restore_state(latest, step).step == 2
    monkeypatch.setattr(shutil, "rmtree", remove)
    checkpoint.save_state(run, checkpoint.Progress(step=3), step)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-0000003"]


def test_training_begins_with_the_first_update_of_the_first_pass(tmp_path: Path) -> None:
    settings = tiny_config(*write_pairs(tmp_path, sentences(150)), tokens_per_step=256, micro_tokens=64)
    trainer = trainer_for(*begun(tmp_path, settings))
    assert trainer.progress.position == (0, 0)
    first = updates(trainer, 1)[0]
    planned = trainer.updates.plan(0)[0]
    assert first.after == (0, 1)
    for batch, rows in zip(first.micro_batches, planned, strict=True):
        expected = trainer.updates.batch(rows, (trainer.config.train.seed, 0, 0))
        assert torch.equal(batch.labels, expected.labels)
