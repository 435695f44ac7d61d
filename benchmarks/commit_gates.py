"""The comparisons of compare_commits.py: weights and logs of runs, output of commands, prepared text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

TOLERANCE = 1e-6  # of a score: absolute up to 1, relative above
SHOWN = 4  # differing lines that are printed of one case


class Verdict(NamedTuple):
    """Whether two results agree, in one line, and the differences."""

    ok: bool
    detail: str
    more: Sequence[str] = ()


def compare_training(old: Path, new: Path) -> Verdict:
    """Compare all weights of two run folders, and what their logs say of losses."""
    ours, theirs = ({f.stem: f for f in (run / "weights").glob("*.safetensors")} for run in (new, old))
    problems = (
        [f"weights of {old.name} are {sorted(theirs)}, here {sorted(ours)}"] if ours.keys() != theirs.keys() else []
    )
    tensors = 0
    for stem in sorted(ours.keys() & theirs.keys()):
        a, b = load_file(theirs[stem]), load_file(ours[stem])
        tensors += len(a)
        if a.keys() != b.keys():
            problems.append(f"{stem}: other tensors: {sorted(a.keys() ^ b.keys())[:SHOWN]}")
        unequal = [n for n in a.keys() & b.keys() if a[n].dtype != b[n].dtype or a[n].tobytes() != b[n].tobytes()]
        if unequal:
            largest = max(float(np.abs(a[n] - b[n]).max()) if a[n].shape == b[n].shape else math.inf for n in unequal)
            problems.append(f"{stem}: {len(unequal)} of {len(a)} tensors differ, by at most {largest:.3g}")
    logs = [log_of(run) for run in (old, new)]
    first = next((a or b for a, b in zip_longest(*logs) if a != b), None)
    if first:
        problems.append(f"the logs differ first at {first[0]} of step {first[1]}")
    detail = f"{tensors} tensors of {len(theirs)} files bit-identical, logs equal" if not problems else "differs"
    return Verdict(not problems, detail, problems)


def log_of(run: Path) -> list[tuple[Any, ...]]:
    """What a log says of each step, but for times."""
    keys = ("event", "step", "epoch", "loss", "nll", "norm", "learning_rate", "tokens", "bleu", "sample")
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [tuple(entry.get(key) for key in keys) for entry in map(json.loads, lines)]


def compare_outputs(old: list[Any], new: list[Any]) -> Verdict:
    """Compare line by line: text exactly, numbers to the tolerance; equally good translations are ties."""
    if len(old) != len(new):
        return Verdict(False, f"{len(old)} lines in the old tree, {len(new)} here")
    largest, problems, ties = 0.0, [], []
    for number, (a, b) in enumerate(zip(old, new, strict=True), 1):
        found = list(differences(a, b))
        largest = max([largest, *(size for _, size in found if size is not None)])
        wrong = [where for where, size in found if size is None or size > TOLERANCE]
        if wrong and is_tie(a, b):
            ties.append(f"line {number} is a tie: {a['text']!r} or {b['text']!r}")
        elif wrong:
            problems.append(f"line {number}: {'; '.join(wrong[:2])}")
    detail = f"{len(old)} lines, {len(old) - len(problems) - len(ties)} equal, largest difference {largest:.2g}"
    detail += f", {len(ties)} ties" * bool(ties) + f", {len(problems)} differ" * bool(problems)
    return Verdict(not problems, detail, [*problems[:SHOWN], *ties[:SHOWN]])


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, float | None]]:
    """Where two values differ: a number and its relative difference, or None for anything else."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:  # keys that are new in this tree are no difference
            if key in b:
                yield from differences(a[key], b[key], f"{where}.{key}" if where else key)
            else:
                yield f"{where}.{key} is missing", None
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, float):
        if a != b:
            yield f"{where}: {a!r} became {b!r}", abs(a - b) / max(1.0, abs(a))
    elif a != b:
        yield f"{where}: {a!r} became {b!r}"[:300], None


def is_tie(a: Any, b: Any) -> bool:
    """Whether two translations have other texts, but rank by rank scores that are equal to the tolerance."""
    if not (isinstance(a, dict) and isinstance(b, dict) and "score" in a and "score" in b):
        return False
    scores = [[one["score"], *(other["score"] for other in one.get("alternatives", []))] for one in (a, b)]
    same_length = len(scores[0]) == len(scores[1])
    return same_length and all(abs(x - y) <= TOLERANCE * max(1.0, abs(x)) for x, y in zip(*scores, strict=True))


def compare_tensors(old: Path, new: Path) -> Verdict:
    """Compare all tensors of two files."""
    a, b = load_file(old), load_file(new)
    same = a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    return Verdict(same, f"{len(a)} tensors" + (" equal" if same else " differ"))


def compare_stores(old: Path, new: Path) -> Verdict:
    """Compare the ids, lengths and held-out text of two runs by file name, else by content; and the tokenizers."""
    theirs, ours = contents(store_of(old)), contents(store_of(new))
    theirs["tokenizer.json"], ours["tokenizer.json"] = (digest(run / "tokenizer.json") for run in (old, new))
    problems, notes = [], []
    for file, hashed in theirs.items():
        if ours.get(file) == hashed:
            continue
        renamed = [other for other, content in ours.items() if content == hashed]
        if file not in ours and renamed:
            notes.append(f"{file} is called {renamed[0]} here")
        else:
            problems.append(f"{file} {'differs' if file in ours else 'is missing'}")
    detail = f"{len(theirs)} files" + (" byte-equal" if not problems else "")
    return Verdict(not problems, detail, [*problems, *notes])


def store_of(run: Path) -> Path:
    """The folder of a run's prepared text."""
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return run / str(about.get("store", "store"))


def contents(store: Path) -> dict[str, str]:
    """Hashes of the files that hold ids, lengths and held-out text."""
    files = [path for path in sorted(store.rglob("*")) if path.suffix in (".ids", ".lengths", ".txt")]
    return {path.name: digest(path) for path in files}


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest() if path.exists() else "missing"
