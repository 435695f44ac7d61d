"""Pools of processes on this machine: short tasks over blocks of text, and long-lived processes with a model.

`WorkerPool` maps a function over many small tasks in order. `ProcessWorkers` starts processes that first build
something expensive, such as a model, and then run functions on it. All processes end with their parent.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar, TypeVarTuple

from qkv.core.errors import QkvError, UsageError

M = TypeVar("M")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

TASKS_PER_WORKER = 3  # tasks in flight for each worker of a WorkerPool: enough to keep it busy, few enough for memory

# Settings of glibc's allocator for decoding: keep the memory that every step frees, and use huge pages.
# They save 5 to 10 % of the decoding time.
ALLOCATOR_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": "536870912",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read when torch is imported


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exit_with_parent() -> None:
    """End this `multiprocessing` process as soon as its parent ends, even if the parent is killed."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection: a loaded model stays until the process ends."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton reports frozen objects as leaks


# ---- an ordered map over small tasks ---------------------------------------------------------------------------------


class WorkerPool:
    """A fixed number of processes that map a function over tasks; they start with the first result of `map`."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[*Ts], R], tasks: Iterable[tuple[*Ts]]) -> Iterator[R]:
        """Yield `function(*task)` in the order of the tasks, with a bounded number of tasks in flight."""
        self.pool = self.pool or _start_pool(self.workers)
        waiting: deque[Future[R]] = deque()
        try:
            for task in tasks:
                waiting.append(self.pool.submit(function, *task))
                if len(waiting) >= TASKS_PER_WORKER * self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise QkvError(
                "a process that prepares text died, perhaps for lack of memory: try again with data.workers = 1"
            ) from None


def _start_pool(workers: int) -> ProcessPoolExecutor:
    """Start the processes, on Linux by fork: it needs no main guard in the user's script.

    The workers use no threads of PyTorch or of the subword library, so the warnings about fork and threads are off.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_pool_worker)
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


def _initialize_pool_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the interrupt
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_with_parent()


# ---- processes with a model ------------------------------------------------------------------------------------------


class ProcessWorkers(Generic[M]):
    """`count` processes that each build `make(*arguments)` once and then run functions on it.

    The processes start with the first call of `map`; `close()` ends them. Arguments and results must be picklable,
    functions importable by name. After an error all processes are ended; the next call starts new ones. The children
    are new interpreters, so a script needs no main guard.
    """

    def __init__(self, count: int, make: Callable[[*Ts], M], *arguments: *Ts) -> None:
        if count < 1:
            raise UsageError(f"workers = {count}: must be at least 1")
        self.count = count
        self.make: Callable[..., M] = make
        self.arguments: tuple[Any, ...] = arguments
        self.workers: list[_ProcessWorker] = []
        self.finalizer: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the processes unless they run already; return before their models are built."""
        if not self.workers:
            self.workers = [_ProcessWorker(self.make, self.arguments) for _ in range(self.count)]
            self.finalizer = weakref.finalize(self, _end_all, self.workers)  # also when the interpreter ends

    def close(self) -> None:
        """End the processes."""
        self.finalizer()
        self.workers = []

    def map(
        self,
        function: Callable[[M, *Ts], R],
        tasks: Sequence[tuple[*Ts]],
        on_result: Callable[[int, R], None] = lambda number, result: None,
    ) -> list[R]:
        """Return `function(model, *task)` in the order of the tasks; `on_result` gets each result as it arrives."""
        self.start()
        results: dict[int, R] = {}
        numbered = iter(enumerate(tasks))

        def send_next(worker: _ProcessWorker) -> None:
            if (next_task := next(numbered, None)) is not None:
                worker.send(function, next_task[1], next_task[0])

        try:
            for worker in self.workers:
                if not worker.busy:  # a busy worker is still building its model
                    send_next(worker)
            while len(results) < len(tasks):
                busy = {worker.connection: worker for worker in self.workers if worker.busy}
                ready = multiprocessing.connection.wait(list(busy))
                for worker in [worker for connection, worker in busy.items() if connection in ready]:
                    result, number = worker.receive(), worker.task
                    if number is not None:
                        results[number] = result
                        on_result(number, result)
                    send_next(worker)
        except BaseException:
            self.close()
            raise
        return [results[number] for number in range(len(tasks))]


class _ProcessWorker:
    """One child process and the connection to it; it runs one call at a time."""

    def __init__(self, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.connection, child_end = multiprocessing.connection.Pipe()
        environment = {**ALLOCATOR_ENVIRONMENT, **os.environ, **ONE_THREAD}
        environment["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)  # same imports as here
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import answer_calls; answer_calls()", str(child_end.fileno())],
            env=environment,
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        child_end.close()
        self.task: int | None = None  # number of the task in progress; None while it builds the model
        self.busy = False
        self.send(make, arguments)

    def send(self, function: Callable[..., object], arguments: tuple[Any, ...], task: int | None = None) -> None:
        """Send a call to the process, which must be idle."""
        try:
            self.connection.send((function, arguments))
        except OSError:
            raise self._death_error() from None
        self.task, self.busy = task, True

    def receive(self) -> Any:
        """Return the result of the call; raise its error, or a QkvError with the exit status if the process died."""
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            raise self._death_error() from None
        self.busy = False
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """End the process without waiting for its task."""
        self.connection.close()
        self.process.terminate()
        self.process.wait()

    def _death_error(self) -> QkvError:
        code = self.process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return QkvError(f"a decoding process {reason}{hint}: use fewer workers (with one, no other process is needed)")


def _end_all(workers: Sequence[_ProcessWorker]) -> None:
    for worker in workers:
        worker.end()


def answer_calls() -> None:
    """Main loop of a child process: build the model, then answer each call with a result or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the interrupt and ends this process
    connection = Connection(int(sys.argv[1]))
    model: Any = None  # built by the first call
    while True:
        result, error = None, None
        try:
            function, arguments = connection.recv()
            if model is None:
                model = function(*arguments)
                freeze_garbage_collector()
            else:
                result = function(model, *arguments)
        except EOFError:
            return  # the parent has ended
        except QkvError as failed:
            error = failed
        except Exception as failed:
            error = QkvError(f"a decoding process failed ({type(failed).__name__}: {failed})")
        try:
            connection.send((result, error))
        except OSError:
            return
