"""Processes that work on blocks side by side; with one worker, this process does the work itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TypeVar, TypeVarTuple

from qkv.core.errors import QkvError
from qkv.processes import follow_parent

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

AHEAD = 3  # tasks for each worker that may be waiting or done before their turn


class Crew:
    """A fixed number of workers; use it as a context."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        if self.workers > 1:
            self.pool = _start(self.workers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[*Ts], R], tasks: Iterable[tuple[*Ts]]) -> Iterator[R]:
        """`function(*task)` for every task, results in the order of the tasks, a bounded number of them in flight."""
        if not self.pool:
            yield from (function(*task) for task in tasks)
            return
        waiting: deque[Future[R]] = deque()
        try:
            for task in tasks:
                waiting.append(self.pool.submit(function, *task))
                if len(waiting) >= AHEAD * self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise QkvError(
                "a process that prepares text died, perhaps for lack of memory: try again with data.workers = 1"
            ) from None


def _start(workers: int) -> ProcessPoolExecutor:
    # Fork, where it exists, needs no main guard in the user's script. The workers run no threads of torch or of the
    # subword library, so neither Python's nor the library's warning about forking beside threads applies.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_settle)
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pool.submit(int).result()
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
    return pool


def _settle() -> None:
    """In a new worker: leave interrupts to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow_parent()
