"""Failures and interruptions with their exit codes; each failure is reported in one readable line."""

from __future__ import annotations


class QkvError(Exception):
    """The work failed; the message names the problem, its place and the remedy."""

    exit_code = 1


class UsageError(QkvError):
    """The call was wrong: an option, a config key, a path that does not exist."""

    exit_code = 2


class Interrupted(Exception):
    """A signal stopped the work, and everything is saved."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
