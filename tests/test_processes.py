"""Processes use the cores that they may, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from qkv.processes import cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are ours")
def test_cores_are_those_that_we_may_use() -> None:
    code = "import os, qkv.processes as p; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(p.cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"1"
    assert cores() == len(os.sched_getaffinity(0))


ORPHAN = """
import multiprocessing, os, signal, time
from qkv.processes import follow_parent

def work(ready):
    follow_parent()
    ready.set()
    time.sleep(100)

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
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"it works\n")
