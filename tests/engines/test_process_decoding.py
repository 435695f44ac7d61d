"""Several processes give the results of one, in the same order; a dead one is reported with its reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conftest import sentences, wait_until
from qkv.assembly import open_run
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import SearchOptions
from qkv.core.translate import search_all
from qkv.engines.cpu import native_search
from qkv.engines.cpu.native_search import CPU, OpenedRun, ProcessDecoding, worker_count
from qkv.worker_pool import ProcessWorkers


@pytest.fixture(scope="module")
def workers(tiny: Path) -> Iterator[ProcessWorkers[OpenedRun]]:
    with closing(ProcessWorkers(2, open_run, str(tiny), "", "fp32")) as crew:
        yield crew


@pytest.fixture(scope="module")
def opened(tiny: Path) -> OpenedRun:
    return open_run(str(tiny), "", "fp32")


def ids(opened: OpenedRun, count: int) -> list[list[int]]:
    return [opened[1].src.encode(source) for source, _ in sentences(count, seed=3)]


@pytest.mark.parametrize(("beam", "n_best"), [(1, 1), (3, 2)])
def test_several_processes_give_the_results_of_one_in_order(
    workers: ProcessWorkers[OpenedRun], opened: OpenedRun, beam: int, n_best: int
) -> None:
    options = SearchOptions(beam=beam, n_best=n_best, batch_tokens=60)
    sources = [*ids(opened, 40), []]
    alone = search_all(opened[0], sources, options, opened[1], device=CPU)
    heard: list[int] = []
    found = ProcessDecoding(workers).search_all(sources, options, progress=heard.extend)
    assert [[h.tokens for h in hypotheses] for hypotheses in found] == [[h.tokens for h in each] for each in alone]
    for ours, theirs in zip(found, alone, strict=True):
        assert [h.logprob for h in ours] == pytest.approx([h.logprob for h in theirs], abs=1e-4)
    assert sorted(heard) == list(range(len(sources)))
    assert heard != sorted(heard)  # the longest came first


def test_nothing_to_do_is_done_at_once(workers: ProcessWorkers[OpenedRun]) -> None:
    assert ProcessDecoding(workers).search_all([], SearchOptions()) == []


def last_first(opened: OpenedRun, number: int, folder: str) -> tuple[int, int]:
    """Finish the first task last, so that results arrive out of order."""
    if number == 0:
        wait_until(Path(folder, "5").exists)
    else:
        Path(folder, str(number)).touch()
    return number, os.getpid()


def test_results_are_in_the_order_of_the_tasks_and_from_every_process(
    workers: ProcessWorkers[OpenedRun], tmp_path: Path
) -> None:
    came: list[int] = []
    tasks = [(number, str(tmp_path)) for number in range(6)]
    done = workers.map(last_first, tasks, lambda number, result: came.append(number))
    assert [number for number, _ in done] == list(range(6))
    assert len({process for _, process in done}) == 2
    assert sorted(came) == list(range(6))
    assert came != sorted(came)


def misbehave(opened: OpenedRun, how: str) -> str:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "refuse":
        raise UsageError("this was asked wrongly")
    if how == "fail":
        raise ZeroDivisionError("by zero")
    return how


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("kill", QkvError, "killed by SIGKILL, perhaps for lack of memory: use fewer workers"),
        ("exit", QkvError, "ended with exit code 3"),
        ("refuse", UsageError, "this was asked wrongly"),
        ("fail", QkvError, "ZeroDivisionError: by zero"),
    ],
)
def test_a_process_that_dies_or_fails_is_reported_with_its_reason(
    workers: ProcessWorkers[OpenedRun], how: str, kind: type[QkvError], message: str
) -> None:
    tasks = [("well",), (how,), ("well",), ("well",)]
    workers.start()
    processes = [worker.process for worker in workers.workers]
    with pytest.raises(kind, match=message) as caught:
        workers.map(misbehave, tasks)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind
    assert all(process.poll() is not None for process in processes)  # all processes ended
    assert not workers.workers
    if how == "fail":  # new ones start by themselves
        assert workers.map(misbehave, [("well",)] * 3) == ["well"] * 3


def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with (
        closing(ProcessWorkers(1, open_run, str(tmp_path / "nowhere"))) as crew,
        pytest.raises(UsageError, match="no such run folder"),
    ):
        crew.map(misbehave, [("well",)])
    with pytest.raises(UsageError, match="workers = 0"):
        ProcessWorkers(0, open_run, "")


SCRIPT = """
import sys
from qkv.core.search import SearchOptions
from qkv.assembly import open_run
from qkv.engines.cpu.native_search import ProcessDecoding
from qkv import options as config
from qkv.worker_pool import ProcessWorkers
workers = ProcessWorkers(1, open_run, sys.argv[1])
print(ProcessDecoding(workers).search_all([[5, 6]], SearchOptions(beam=1))[0][0].tokens)
print(workers.workers[0].process.pid)
"""


def test_a_script_needs_no_main_guard_and_no_process_remains(tiny: Path, opened: OpenedRun) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tiny], capture_output=True, text=True, check=True)
    found, process = done.stdout.splitlines()
    assert found == str(search_all(opened[0], [[5, 6]], SearchOptions(beam=1), opened[1], device=CPU)[0][0].tokens)
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_as_many_workers_as_cores_unless_there_is_too_little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= worker_count(10**9) <= (os.cpu_count() or 1)
    monkeypatch.setattr(native_search, "cpu_count", lambda: 4)
    assert worker_count(10) == 1
    assert worker_count(3 * native_search.MIN_TOKENS) == 3
    assert worker_count(10**9) == 4
