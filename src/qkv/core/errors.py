"""Two kinds of failure, each told in one readable line: the work failed, or the call was wrong."""

from __future__ import annotations


class QkvError(Exception):
    """The work failed; the message says what was wrong, where, and what to do."""

    exit_code = 1


class UsageError(QkvError):
    """The call was wrong: an option, a config key, a path that does not exist."""

    exit_code = 2
