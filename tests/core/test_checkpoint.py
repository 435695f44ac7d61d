"""The state that training continues from, and the mean of checkpoints."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import step_of
from qkv.core import checkpoint
from qkv.core.run import Run


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
