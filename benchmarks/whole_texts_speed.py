"""Speed of single sentences: this tree against an old one, in interleaved pairs.

    git worktree add /tmp/old 0cf597c
    python benchmarks/whole_texts_speed.py RUN SRC --old /tmp/old [--lines 500] [--pairs 20] [--beam N]

Each tree has a process of its own that stays alive, with the model loaded and warmed up; a pair is one `translate` of
the same lines by each, in alternating order, while the other waits. The report is the median ratio of the speeds (this
tree / the old one, above 1: this tree is faster) with its 95 % interval by order statistics, which needs no assumption
about the distribution; beside it the same of processor time, which other work on the machine disturbs less. Lines with
an end of a sentence inside are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).resolve()
NEW = HERE.parents[1]
INNER = re.compile(r"[.!?…][\"'”’)]*\s")


class TimedTree:
    """A process that translates the lines with the code of one checkout, and answers with the seconds it took."""

    def __init__(self, source: Path, run: str, lines: Path, beam: int | None) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("QKV_", "PYTHON"))}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--worker", json.dumps([run, str(lines), beam])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, "PYTHONPATH": str(source / "src"), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()

    def answer(self, request: str = "translate") -> dict[str, float | str]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(request + "\n")
        stdin.flush()
        if not (line := stdout.readline()):
            raise SystemExit(f"the process of a tree ended with code {self.process.wait()}")
        return json.loads(line)


def worker(run: str, file: str, beam: int | None) -> None:
    """Answer every line of standard input with the seconds and the tokens of one translation."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import qkv

    lines = Path(file).read_text(encoding="utf-8").splitlines()
    translator = qkv.Translator(run, device="cpu")
    translator.translate(lines, beam=beam)
    for request in sys.stdin:
        if request.strip() == "where":
            answer: dict[str, float | str] = {"where": str(Path(qkv.__file__).parents[2]), "engine": translator.engine}
        else:
            began, used = time.perf_counter(), time.process_time()
            translations = translator.translate(lines, beam=beam)
            answer = {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}
            answer["tokens"] = sum(len(each.tokens) for each in translations)
        print(json.dumps(answer), file=answers, flush=True)


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return the median, and the order statistics between which it lies with this probability (binomial)."""
    ordered, n = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + math.comb(n, rank) / 2**n <= (1 - level) / 2:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def measure(old: TimedTree, new: TimedTree, pairs: int) -> dict[str, list[float]]:
    """Time pairs in alternating order; return the ratios of the speeds, by the clock and by processor time."""
    ratios: dict[str, list[float]] = {"seconds": [], "processor": []}
    for number in range(pairs):
        order = (old, new) if number % 2 == 0 else (new, old)
        answers = {tree: tree.answer() for tree in order}
        parts = [f"pair {number + 1}"]
        for kind, values in ratios.items():
            before, after = float(answers[old][kind]), float(answers[new][kind])
            values.append(before / after)
            parts.append(f"{kind} {before:.3f} and {after:.3f}, {values[-1]:.3f}")
        print(f"{'; '.join(parts)}; tokens {answers[old]['tokens']} and {answers[new]['tokens']}", flush=True)
    return ratios


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("src", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the old commit")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--beam", type=int, default=None, help="default: that of the run")
    chosen = parser.parse_args()
    lines = [line.strip() for line in chosen.src.read_text(encoding="utf-8").splitlines()]
    single = [line for line in lines if line and not INNER.search(line)][: chosen.lines]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines.txt")
        file.write_text("".join(f"{line}\n" for line in single), encoding="utf-8")
        run = str(Path(chosen.run).resolve())
        with (
            TimedTree(chosen.old.resolve(), run, file, chosen.beam) as old,
            TimedTree(NEW, run, file, chosen.beam) as new,
        ):
            for name, tree in (("old", old), ("this", new)):
                print(f"{name} tree: {tree.answer('where')}")
            ratios = measure(old, new, chosen.pairs)
    for kind, values in ratios.items():
        median, low, high = median_interval(values)
        print(f"{len(single)} lines, {chosen.pairs} pairs, {kind}: ratio {median:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
