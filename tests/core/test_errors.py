"""Failures, interruptions and their exit codes."""

from __future__ import annotations

import signal

from qkv.core.errors import Interrupted, QkvError, UsageError


def test_exit_codes() -> None:
    assert (QkvError("failed").exit_code, UsageError("wrong").exit_code) == (1, 2)
    assert issubclass(UsageError, QkvError)
    stop = Interrupted(signal.SIGINT, "stopped and saved")
    assert (stop.exit_code, str(stop)) == (130, "stopped and saved")
    assert not isinstance(stop, QkvError), "nothing failed"
