"""The run folder: files, lock, weights and log."""

from __future__ import annotations

import errno
import fcntl
import json
import math
from pathlib import Path
from typing import Any

import pytest

from qkv.core.errors import UsageError
from qkv.core.run import JsonlLog, Run


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


def test_the_log_has_small_numbers_and_none_for_nan(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.event("valid", 1, {"loss": math.inf, "rate": 1.23456789e-7, "sample": "a\u2028b\nc", "bleu": None})
    (line,) = (tmp_path / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    values = {"event": "valid", "step": 1, "loss": None, "rate": 1.23457e-7, "sample": "a\u2028b\nc", "bleu": None}
    assert json.loads(line) == values
    log.event("start", 1, {"validated": 1})
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == line + "\n"
