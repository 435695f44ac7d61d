"""Compare this working tree with an old commit: the same weights, translations and prepared text, and the speed.

    python benchmarks/compare_commits.py [--commit 7db564e | --old WORKTREE] [--work DIR] [--only G1 G2 G4]
    python benchmarks/compare_commits.py --speed 7 --only          # the speed alone, of 7 interleaved pairs

G1: training on the CPU gives bit-identical weights: 200 updates of the demo, the same stopped and resumed (from this
tree's state and from the old tree's), and 16 updates of every kind of model, optimiser and regularisation.
G2: run folders that the old tree trained give the same translations, and scores that differ by at most 1e-6, on every
CPU path. Where texts differ but scores agree to 1e-6, the line is listed as a tie and does not fail the gate.
G4: the prepared text is byte-equal.

Both trees run the same command lines (commit_jobs.py) in processes of their own (commit_probe.py), with a fixed number
of threads; commit_gates.py compares the results. With --work, the results of the old tree are kept in that folder and
the next call runs only this tree. Gate G3, Triton's interpreter, is tests/engines/test_kernels.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import commit_jobs
from commit_gates import compare_outputs, compare_stores, compare_tensors, compare_training, store_of
from commit_jobs import Job, file_name

HERE = Path(__file__).resolve().parent
NEW = HERE.parent
LINES = 80  # of the demo's validation text that gate 2 translates
MORE_LINES = [
    "",
    "ZEBRA ÇA 中文 🙂 2,000!",
    "cat",
    "The cat sleeps. " * 24,  # longer than the limit of some runs: translated in pieces
    "the the the the the the the the",
]


# ---- the two trees ---------------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """A checkout, the folder of its results, and the command lines it has run."""

    source: Path
    own: Path
    places: dict[str, Path]
    threads: int
    as_before: bool = False  # whether intended changes since the old commit are undone by options

    def __post_init__(self) -> None:
        self.own.mkdir(parents=True, exist_ok=True)
        self.places = {**self.places, "own": self.own}

    @property
    def results(self) -> dict[str, Job]:
        """The results of all jobs so far, by their ids."""
        file = self.own / "results.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return {result["id"]: result for result in map(json.loads, lines)}

    def start(self, jobs: Sequence[Job], native: bool = True) -> subprocess.Popen[bytes] | None:
        """Start a process for the jobs that have no result yet."""
        known = self.results
        missing = [self.filled(job) for job in jobs if job["id"] not in known]
        if self.as_before:
            missing = [{**job, "argv": as_before(job["argv"])} for job in missing]
        if not missing:
            return None
        file = self.own / f"jobs-{time.monotonic_ns()}.json"
        file.write_text(json.dumps(missing), encoding="utf-8")
        command = [sys.executable, str(HERE / "commit_probe.py"), str(file), str(self.own / "results.jsonl")]
        return subprocess.Popen(command, env=self.environment(native), cwd=self.own)

    def environment(self, native: bool = True) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("QKV_", "PYTHON"))}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        fixed = {"PYTHONPATH": str(self.source / "src"), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
        return {**kept, **threads, **fixed, **({} if native else {"QKV_NATIVE": "0"})}

    def filled(self, value: Any) -> Any:
        """The value with all placeholders replaced by folders and files."""
        if isinstance(value, str):
            for name, place in self.places.items():
                value = value.replace(f"{{{name}}}", str(place))
            return value
        if isinstance(value, dict):
            return {key: self.filled(part) for key, part in value.items() if key != "id"} | (
                {"id": value["id"]} if "id" in value else {}
            )
        return [self.filled(part) for part in value] if isinstance(value, list) else value


def as_before(argv: list[str]) -> list[str]:
    """Undo intended changes by options: inputs cut into sentences, and a seed of its own for the data."""
    if argv[0] == "translate":
        return [*argv, "--no-split"]
    if argv[0] == "train" and argv[1].endswith(".toml"):
        train = tomllib.loads(Path(argv[1]).read_text(encoding="utf-8")).get("train", {})
        return [*argv, "--set", f"data.seed={train.get('seed', 1)}"]
    return argv


class Comparison:
    """Two trees and the rows of the report."""

    def __init__(self, old: Tree, new: Tree, processes: int) -> None:
        self.old, self.new, self.processes = old, new, processes
        self.failed: list[str] = []

    def run(self, old: Sequence[Job], new: Sequence[Job], native: bool = True) -> None:
        """Run jobs in both trees, side by side if two processes are allowed."""
        started = []
        for tree, jobs in ((self.old, old), (self.new, new)):
            process = tree.start(jobs, native)
            started += [process] if process else []
            if process and self.processes < 2:
                process.wait()
        for process in started:
            if process.wait():
                raise SystemExit(f"the process that runs command lines failed with code {process.returncode}")

    def tell(self, gate: str, name: str, ok: bool, detail: str, more: Sequence[str] = ()) -> None:
        """Print one row, and the lines below it."""
        print(f"{'PASS' if ok else 'FAIL'}  {gate}  {name}: {detail}", flush=True)
        for line in more:
            print(f"          {line}")
        if not ok:
            self.failed.append(f"{gate} {name}")

    def worked(self, gate: str, name: str, job: str, only_new: bool = False) -> bool:
        """Whether a job ended with exit code 0 in both trees; a failure is a row of the report."""
        trees = ((self.old, "old tree"), (self.new, "this tree"))
        for tree, words in trees[only_new:]:
            result = tree.results.get(job, {"code": None, "stderr": "it has no result"})
            if result["code"] != 0:
                error = (result["stderr"].strip().splitlines() or [""])[-1]
                self.tell(gate, name, False, f"{words}: exit code {result['code']}: {error}")
                return False
        return True


# ---- gate 1: training ------------------------------------------------------------------------------------------------


def gate_1(trees: Comparison) -> None:
    unequal = [name for name in commit_jobs.PRESETS if preset(trees.old, name) != preset(trees.new, name)]
    trees.tell("G1", "presets", not unequal, f"{len(commit_jobs.PRESETS)} configs", [f"differ: {n}" for n in unequal])
    for name in (*commit_jobs.VARIANTS, "adapted"):
        folder = f"G1/{file_name(name)}"
        if trees.worked("G1", name, f"train {{own}}/{folder}"):
            trees.tell("G1", name, *compare_training(trees.old.own / folder, trees.new.own / folder))
    if trees.worked("G1", "demo, 200 updates", "train {own}/demo"):
        trees.tell("G1", "demo, 200 updates", *compare_training(trees.old.own / "demo", trees.new.own / "demo"))
    for name, words in (("stopped", "stopped and resumed"), ("stopped_by_old", "stopped by the old tree, resumed")):
        if trees.worked("G1", f"demo, {words}", f"resume {name}", only_new=True):
            verdict = compare_training(trees.old.own / "demo", trees.new.own / "G1" / name)
            trees.tell("G1", f"demo, {words}", *verdict)


def preset(tree: Tree, name: str) -> dict[str, Any]:
    """The config of a preset, as tables: the order of the options does not count."""
    tables = tomllib.loads(tree.results[f"config {name}"]["stdout"])
    tables["data"].pop("seed", None)  # an option that the old commit has not
    return tables


# ---- gate 2: decoding ------------------------------------------------------------------------------------------------


def gate_2(trees: Comparison) -> None:
    for native in (True, False):
        for job in commit_jobs.decoding_jobs(native):
            name = job["id"]
            if not trees.worked("G2", name, name):
                continue
            old, new = (outputs(tree, job) for tree in (trees.old, trees.new))
            trees.tell("G2", name, *compare_outputs(old, new))
    learned = [tree.own / "copy" / "a" / "shortlist.safetensors" for tree in (trees.old, trees.new)]
    if all(path.exists() for path in learned):
        trees.tell("G2", "learned shortlist", *compare_tensors(*learned))


def outputs(tree: Tree, job: Job) -> list[Any]:
    """What a command wrote, a value for each line: JSON where it is JSON."""
    text = tree.results[job["id"]]["stdout"]
    if "file" in job:
        text = json.dumps(json.loads(Path(tree.filled(job["file"])).read_text(encoding="utf-8")))
    return [parsed(line.replace(str(tree.own), "{own}")) for line in text.splitlines()]


def parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


# ---- gate 4: prepared text -------------------------------------------------------------------------------------------


def gate_4(trees: Comparison) -> None:
    for name in ("demo", *commit_jobs.STORES):
        folder = "demo" if name == "demo" else f"G4/{file_name(name)}"
        if trees.worked("G4", name, f"train {{own}}/{folder}"):
            trees.tell("G4", name, *compare_stores(trees.old.own / folder, trees.new.own / folder))


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(trees: Comparison, pairs: int) -> None:
    """Measure both trees in turn, and print the median of new / old with its interval."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(pairs):
        order = (trees.old, trees.new) if number % 2 == 0 else (trees.new, trees.old)
        measured = {id(tree): measure(tree) for tree in order}
        for name, value in measured[id(trees.old)].items():
            found.setdefault(name, []).append((value, measured[id(trees.new)][name]))
        print(f"      pair {number + 1} of {pairs}", file=sys.stderr)
    for name, values in found.items():
        ratios = [new / old for old, new in values]
        low, high = interval(ratios)
        old, new = (statistics.median(side) for side in zip(*values, strict=True))
        unit = "tokens/s" if name == "train" else "sentences/s"
        print(
            f"SPEED {name}: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] times the old tree's "
            f"(medians {old:,.0f} and {new:,.0f} {unit}, {len(ratios)} pairs)"
        )


def measure(tree: Tree) -> dict[str, float]:
    file = tree.own / "speed.json"
    file.write_text(json.dumps(tree.filled(commit_jobs.SPEED)), encoding="utf-8")
    command = [sys.executable, str(HERE / "commit_probe.py"), "--speed", str(file)]
    done = subprocess.run(command, env=tree.environment(), cwd=tree.own, stdout=subprocess.PIPE, check=True)
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def interval(ratios: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


# ---- all of it -------------------------------------------------------------------------------------------------------


def prepare_inputs(trees: Comparison, configs: Path, text: Path) -> None:
    """Write the corpora, and every config in full as the old tree resolves it."""
    commit_jobs.write_corpora(text)
    short, jobs = configs / "short", []
    short.mkdir(parents=True, exist_ok=True)
    for name, spec in commit_jobs.CONFIGS.items():
        file = short / f"{file_name(name)}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(commit_jobs.toml(trees.old.filled(spec)), encoding="utf-8")
        jobs.append({"id": f"resolve {name}", "argv": ["config", str(file)]})
    trees.run(jobs, ())
    for name in commit_jobs.CONFIGS:
        result, file = trees.old.results[f"resolve {name}"], configs / f"{file_name(name)}.toml"
        if result["code"]:
            raise SystemExit(f"config of {name}: {result['stderr']}")
        file.parent.mkdir(exist_ok=True)
        file.write_text(result["stdout"], encoding="utf-8")


def write_lines(old: Tree) -> None:
    """Write the lines to decode: the beginning of the demo's validation text, and some odd ones."""
    held_out = [
        (store_of(old.own / "demo") / f"valid.{side}.txt").read_text(encoding="utf-8") for side in ("src", "tgt")
    ]
    for place, text, more in zip(("lines", "refs"), held_out, (MORE_LINES, ["a"] * len(MORE_LINES)), strict=True):
        old.places[place].write_text("\n".join([*text.splitlines()[:LINES], *more]) + "\n", encoding="utf-8")


def compare(trees: Comparison, gates: Sequence[str], pairs: int) -> None:
    begun = time.monotonic()
    prepare_inputs(trees, trees.old.places["config"], trees.old.places["text"])
    trained = [job for gate in ("G1", "G4") if gate in gates for job in commit_jobs.training_jobs(gate)]
    demo = [job for job in commit_jobs.training_jobs("G1") if job["id"] == "train {own}/demo"]
    decodes = "G2" in gates
    of_old = [*demo, *trained, *(commit_jobs.fixed_run_jobs() if decodes else [])]
    of_new = [*(demo if trained else []), *trained]
    trees.run(once(of_old), once(of_new))
    for job in of_old:
        if job["id"].startswith(("train {own}/runs", "learn")) and trees.old.results[job["id"]]["code"]:
            raise SystemExit(f"{job['id']}: {trees.old.results[job['id']]['stderr']}")
    write_lines(trees.old)
    if "G1" in gates:
        copy(trees.old.own / "G1" / "stopped", trees.new.own / "G1" / "stopped_by_old")
        trees.run((), commit_jobs.resume_jobs())
        gate_1(trees)
    if decodes:
        for tree in (trees.old, trees.new):
            copy(trees.old.own / "runs" / "a", tree.own / "copy" / "a")
            (tree.own / "copy" / "a" / "shortlist.safetensors").unlink(missing_ok=True)
        for native in (True, False):
            jobs = commit_jobs.decoding_jobs(native)
            trees.run(jobs, jobs, native)
        gate_2(trees)
    if "G4" in gates:
        gate_4(trees)
    print(f"{time.monotonic() - begun:.0f} seconds", file=sys.stderr)
    if pairs:
        speed(trees, pairs)
    if gates:
        print("all gates passed" if not trees.failed else f"{len(trees.failed)} failed: {'; '.join(trees.failed)}")


def once(jobs: Sequence[Job]) -> list[Job]:
    """Each job once, in the order of the first."""
    return list({job["id"]: job for job in jobs}.values())


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def old_tree(given: str | None, commit: str, work: Path) -> Path:
    """The checkout of the old commit: the one given, or a git worktree made in the work folder."""
    if given:
        return Path(given).resolve()
    place = work / f"worktree-{commit}"
    if not place.exists():
        subprocess.run(["git", "-C", str(NEW), "worktree", "prune"], check=True)
        subprocess.run(["git", "-C", str(NEW), "worktree", "add", "--detach", str(place), commit], check=True)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="a checkout of the old commit; by default a git worktree is made")
    parser.add_argument("--commit", default="7db564e", help="the old commit")
    parser.add_argument("--work", help="folder that keeps the results of the old tree; by default a temporary one")
    parser.add_argument("--only", nargs="*", default=["G1", "G2", "G4"], choices=("G1", "G2", "G4"), metavar="GATE")
    parser.add_argument("--speed", type=int, default=0, metavar="N", help="also measure N interleaved pairs")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2), help="2: both trees at the same time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(given.work or temporary).resolve()
        work.mkdir(parents=True, exist_ok=True)
        source = old_tree(given.old, given.commit, work)
        commit = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        tables = b"".join((HERE / name).read_bytes() for name in ("commit_jobs.py", "commit_probe.py"))
        key = hashlib.blake2b(tables + str(given.threads).encode(), digest_size=4).hexdigest()
        base = work / f"{commit}-{key}"
        shutil.rmtree(base / "new", ignore_errors=True)
        places = {"old": base / "old", "text": base / "text", "config": base / "configs"}
        places |= {"lines": base / "lines.txt", "refs": base / "references.txt"}
        old = Tree(source, base / "old", places, given.threads)
        changed = not (source / "src/qkv/core").exists()  # later commits split inputs and have a data seed too
        new = Tree(NEW, base / "new", places, given.threads, as_before=changed)
        trees = Comparison(old, new, given.processes)
        try:
            compare(trees, given.only, given.speed)
        finally:
            if not given.old and not given.work:
                subprocess.run(["git", "-C", str(NEW), "worktree", "remove", "--force", str(source)], check=False)
    sys.exit(bool(trees.failed))


if __name__ == "__main__":
    main()
