"""Worker processes: as many as CPUs allowed, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import PATIENCE
from qkv.core.errors import QkvError
from qkv.worker_pool import WorkerPool, cpu_count


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are ours")
def test_cpu_count_counts_allowed_cores() -> None:
    code = (
        "import os, qkv.worker_pool as p; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(p.cpu_count())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"1"
    assert cpu_count() == len(os.sched_getaffinity(0))


ORPHAN = """
import multiprocessing, os, signal, time
from qkv.worker_pool import exit_with_parent

def work(ready):
    exit_with_parent()
    ready.set()
    time.sleep(1000)

context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=work, args=(ready,)).start()
ready.wait()
print("it works", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the script forks")
def test_a_process_ends_with_its_parent() -> None:
    # Both write to one pipe, so that waiting for its end is waiting for both.
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"it works\n")


def test_a_pool_worker_that_dies_is_an_error() -> None:
    with WorkerPool(2) as pool, pytest.raises(QkvError, match=r"died.*data\.workers = 1"):
        list(pool.map(os._exit, [(3,)] * 20))


def test_a_pool_keeps_order_and_bounds_the_tasks_in_flight() -> None:
    drawn = 0

    def tasks() -> Iterator[tuple[int, int]]:
        nonlocal drawn
        for n in range(100):
            drawn += 1
            yield n, 2

    with WorkerPool(2) as pool:
        results = pool.map(pow, tasks())
        assert next(results) == 0
        assert drawn <= 8
        assert list(results) == [n**2 for n in range(1, 100)]
