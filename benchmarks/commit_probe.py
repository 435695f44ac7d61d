"""Run a list of qkv command lines in one process, for the tree that PYTHONPATH names (used by compare_commits.py).

    python commit_probe.py JOBS.json RESULTS.jsonl      # each job: {"id", "argv", "interrupt", "fresh"}
    python commit_probe.py --speed SETTINGS.json        # one timing of training and decoding, printed as JSON

The command line and the names that `import qkv` exports are the whole interface, so that the internal modules of the
tree may move. Each result is written as soon as its job ends: {"id", "code", "stdout", "stderr"}.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def call(argv: list[str]) -> tuple[int, str, str]:
    """Run one command line in this process: its exit code, its standard output, and the end of its standard error."""
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    stdin, stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(3))
    code = 0
    try:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = ["qkv", *argv], stdin, stdout, stderr
        runpy.run_module("qkv", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc(file=stderr)
        code = 70
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    texts = []
    for stream in (stdout, stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
    return code, texts[0], texts[1][-2000:]


def interrupt_at(log: Path, step: int) -> threading.Event:
    """Send SIGINT to this process as soon as the training log has a line for `step`; setting the event cancels it."""
    cancelled = threading.Event()

    def watch() -> None:
        while not cancelled.is_set():
            if log.exists() and f'"step": {step},' in log.read_text(encoding="utf-8"):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()
    return cancelled


def run_jobs(jobs: list[dict[str, Any]], results: Path) -> None:
    """Run all jobs in order; a job that fails does not stop the others."""
    with results.open("a", encoding="utf-8") as file:
        for job in jobs:
            if folder := job.get("fresh"):
                shutil.rmtree(folder, ignore_errors=True)
            watched = job.get("interrupt")
            cancelled = interrupt_at(Path(watched["log"]), watched["step"]) if watched else threading.Event()
            code, out, error = call(job["argv"])
            cancelled.set()
            print(json.dumps({"id": job["id"], "code": code, "stdout": out, "stderr": error}), file=file, flush=True)


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Training speed in tokens per second, from the log, and seconds of decoding, after a short warm-up."""
    import qkv

    shutil.rmtree(settings["run"], ignore_errors=True)
    code, _, error = call(settings["train"])
    if code:
        raise SystemExit(error)
    lines = (Path(settings["run"]) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = [line["tokens_per_second"] for line in map(json.loads, lines) if line["event"] == "train"]
    translator: Any = qkv.load(settings["model"], device="cpu")
    text = Path(settings["lines"]).read_text(encoding="utf-8").splitlines()
    text = [line for line in text if line.count(".") < 2]  # several sentences in a line are translated one by one now
    found = {"train": statistics.median(speeds[1:])}
    for name, beam in (("greedy", 1), ("beam 4", 4)):
        translator.translate(text[:16], beam=beam)
        start = time.perf_counter()
        for _ in range(settings["repeat"]):
            translator.translate(text, beam=beam)
        found[name] = settings["repeat"] * len(text) / (time.perf_counter() - start)
    return found


if __name__ == "__main__":
    import torch

    import qkv

    if not Path(qkv.__file__).is_relative_to(os.environ["PYTHONPATH"]):
        raise SystemExit(f"qkv comes from {qkv.__file__}, not from {os.environ['PYTHONPATH']}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if sys.argv[1] == "--speed":
        print(json.dumps(measure(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))))
    else:
        run_jobs(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
