"""Processes on this machine: how many may work at once, and that none outlives the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading


def cores() -> int:
    """How many processors we may use; where the system does not say, all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def follow_parent() -> None:
    """In a process of `multiprocessing`: end as soon as the parent does, even if that is killed."""
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
