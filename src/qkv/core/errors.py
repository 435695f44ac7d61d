"""Failures and interruptions with their exit codes; each failure is reported in one readable line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def stop_signals(impatient: bool = True) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying; if impatient, a second one stops at once.

    torchrun passes on signals that every process may have received already, and limits the time itself.
    """
    received: list[int] = []

    def remember(number: int, _frame: object) -> None:
        if received and impatient:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()  # Python refuses handlers in other threads
    before = {number: signal.signal(number, remember) for number in numbers if in_main}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
