"""Several processes on one machine, each with a model on one thread: two of them beat one process with two threads.

A process is told how to make its model rather than given it: it maps the run's weights and packs them for itself.
Batches wait in one queue, the longest sentences first; whoever is free takes the next, and the results come back in the
order of the sentences. The processes are this module started anew, so that a script which uses them needs no main guard
and no thread of the caller is forked.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, TypeVar, TypeVarTuple

import torch

from qkv import config
from qkv.core.errors import QkvError, UsageError
from qkv.decode.batched import batch_tokens, by_length, search_all
from qkv.decode.board import Hypothesis
from qkv.decode.memory import MEMORY, settle
from qkv.models.packed import pack
from qkv.models.state import StepModel
from qkv.processes import cores
from qkv.run import Run
from qkv.text import Tokenizers

M = TypeVar("M")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

Opened = tuple[StepModel[Any, Any], Tokenizers]
CPU = torch.device("cpu")
START = f"from {__name__} import serve; serve()"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read once, when torch is loaded
WORTHWHILE = 8192  # source tokens for each process, below which it takes longer to start than it helps


def open_run(path: str, weights: str = "", dtype: str = "auto") -> Opened:
    """What a worker makes: the run's model, packed, and its tokenizers."""
    run = Run.open(path)
    model: Any = pack(run.model(CPU, weights), dtype)
    return model, run.tokenizers


def worker_count(tokens: int | None = None, threads: int | None = None) -> int:
    """How many processes to start: one for each core we may use, or one alone where there is too little to do.

    `tokens` is how much there is to translate, None if nobody knows; `threads` what the user allows.
    """
    most = threads or cores()
    return max(1, most if tokens is None else min(most, tokens // WORTHWHILE))


class Worker:
    """One process and the line to it; it has one call to answer at a time."""

    def __init__(self, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.line, theirs = multiprocessing.connection.Pipe()
        environment = {**MEMORY, **os.environ, **THREADS}
        environment["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)  # importable there too
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self.task: int | None = None  # the number of the task it is at; it begins by making its model, which is none
        self.busy = False
        self.send(make, arguments)

    def send(self, function: Callable[..., object], arguments: tuple[Any, ...], task: int | None = None) -> None:
        try:
            self.line.send((function, arguments))
        except OSError:
            raise self._died() from None
        self.task, self.busy = task, True

    def receive(self) -> Any:
        """What the call gave; its error if it failed, and ours if there is nobody to answer."""
        try:
            result, error = self.line.recv()
        except (EOFError, OSError):
            raise self._died() from None
        self.busy = False
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """End it at whatever it is: hanging up alone would let it finish its batch."""
        self.line.close()
        self.process.terminate()
        self.process.wait()

    def _died(self) -> QkvError:
        code = self.process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return QkvError(f"a decoding process {reason}{hint}: use fewer workers (with one, no other process is needed)")


class Workers(Generic[M]):
    """`count` processes, each with what `make(*arguments)` gives there; they start with the first work.

    Use it as a context, or `close()` it. What is sent must be plain data, or importable by name. After an error all
    processes are gone, and the next work starts new ones.
    """

    def __init__(self, count: int, make: Callable[[*Ts], M], *arguments: *Ts) -> None:
        if count < 1:
            raise UsageError(f"workers = {count}: must be at least 1")
        self.count = count
        self.make: Callable[..., M] = make
        self.arguments: tuple[Any, ...] = arguments
        self.crew: list[Worker] = []
        self.finalizer: Callable[[], object] = lambda: None

    def __enter__(self) -> Workers[M]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes, if they are not there, without waiting for them to be ready."""
        if not self.crew:
            self.crew = [Worker(self.make, self.arguments) for _ in range(self.count)]
            self.finalizer = weakref.finalize(self, _end, self.crew)  # also when the interpreter ends

    def close(self) -> None:
        self.finalizer()
        self.crew = []

    def map(
        self,
        function: Callable[[M, *Ts], R],
        tasks: Sequence[tuple[*Ts]],
        heard: Callable[[int, R], None] = lambda number, result: None,
    ) -> list[R]:
        """`function(made, *task)` for every task, in the order of the tasks; `heard` gets each result as it comes."""
        self.start()
        results: dict[int, R] = {}
        waiting = iter(enumerate(tasks))

        def give(worker: Worker) -> None:
            if (next_task := next(waiting, None)) is not None:
                worker.send(function, next_task[1], next_task[0])

        try:
            for worker in self.crew:
                if not worker.busy:  # one that is, is making its model
                    give(worker)
            while len(results) < len(tasks):
                ready = multiprocessing.connection.wait([worker.line for worker in self.crew if worker.busy])
                for worker in [worker for worker in self.crew if worker.line in ready]:
                    result, number = worker.receive(), worker.task
                    if number is not None:
                        results[number] = result
                        heard(number, result)
                    give(worker)
        except BaseException:
            self.close()
            raise
        return [results[number] for number in range(len(tasks))]


def _end(crew: Sequence[Worker]) -> None:
    for worker in crew:
        worker.end()


def serve() -> None:
    """The life of a process: make a model, then answer call after call with a result or an error, until the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    torch.set_num_threads(1)
    line = Connection(int(sys.argv[1]))
    made: Any = None
    while True:
        result, error = None, None
        try:
            function, arguments = line.recv()
            if made is None:
                made = function(*arguments)
                settle()
            else:
                result = function(made, *arguments)
        except EOFError:
            return  # the parent has gone
        except QkvError as failed:
            error = failed
        except Exception as failed:
            error = QkvError(f"a decoding process failed ({type(failed).__name__}: {failed})")
        try:
            line.send((result, error))
        except OSError:
            return


# ---- searching -------------------------------------------------------------------------------------------------------


def search_in(
    workers: Workers[Opened],
    sources: Sequence[Sequence[int]],
    spec: config.DecodeConfig,
    *,
    n_best: int = 1,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
    each: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """`search_all` by several processes: the n best hypotheses of each source, in the order of the sources.

    `options` go to `search_all` as they are; `each` holds those that have one value for each source.
    """
    each = {"numbers": range(len(sources)), **(each or {})}
    budget = batch_tokens(spec, CPU) // max(spec.beam, n_best)
    planned = [batch.tolist() for batch in by_length([len(ids) + 1 for ids in sources], budget)]
    tasks = []
    for batch in planned:
        own = {name: [values[i] for i in batch] for name, values in each.items()}
        tasks.append(([list(sources[i]) for i in batch], spec, {"n_best": n_best, **options, **own}))
    results: list[list[Hypothesis]] = [[] for _ in sources]

    def heard(number: int, found: list[list[Hypothesis]]) -> None:
        for i, hypotheses in zip(planned[number], found, strict=True):
            results[i] = hypotheses
        progress(planned[number])

    workers.map(_search, tasks, heard)
    return results


def _search(
    opened: Opened, sources: list[list[int]], spec: config.DecodeConfig, options: dict[str, Any]
) -> list[list[Hypothesis]]:
    model, tokenizers = opened
    return search_all(model, sources, spec, tokenizers, device=CPU, **options)
