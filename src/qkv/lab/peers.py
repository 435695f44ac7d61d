"""Comparing speeds: contenders of qkv and of other software in turn, and the fastest of each against qkv's fastest.

The other software is not part of qkv: each module of a folder, in a checkout `benchmarks/peers`, adds one peer.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from qkv.console import say
from qkv.core.errors import UsageError

OURS = "qkv"
FOLDER = Path("benchmarks/peers")  # in a checkout
AT_LEAST = 3  # rounds


class Named(Protocol):
    """A contender in training, or a setting in decoding."""

    @property
    def name(self) -> str: ...


class Timed(Protocol):
    """A contender or setting with its speed in each round."""

    speeds: list[float]  # tokens per second

    @property
    def engine(self) -> str: ...

    def run(self) -> None: ...


N = TypeVar("N", bound=Named)
T = TypeVar("T", bound=Timed)


def find_peers(folder: Path, what: str) -> list[ModuleType]:
    """Return the modules of the folder that define `what` (training or decoding); say so if there is no folder."""
    if not folder.is_dir():
        say(f"{folder}: no such folder, so qkv is measured alone; a checkout has other software in {FOLDER} (--peers)")
        return []
    return [module for module in _load_modules(folder.resolve()) if hasattr(module, what)]


@cache
def _load_modules(folder: Path) -> list[ModuleType]:
    """Execute the modules of exactly this folder; the search path of Python does not matter."""
    modules = []
    for path in sorted(folder.glob("[!_]*.py")):
        spec = spec_from_file_location(f"{folder.name}.{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


def package_versions(peers: Sequence[ModuleType]) -> dict[str, str]:
    """Return the installed version of each peer's package."""
    versions = {}
    for package in [module.PACKAGE for module in peers if hasattr(module, "PACKAGE")]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def select(available: Sequence[N], only: Sequence[str], what: str) -> list[N]:
    """Return those with one of the words of --only in their name; without words, all."""
    selected = [each for each in available if not only or any(word in each.name for word in only)]
    if not selected:
        names = "; ".join(each.name for each in available)
        raise UsageError(f"--only {' '.join(only)}: no {what} has such a name; choose among {names}")
    return selected


def run_in_turns(rows: Sequence[Timed], seconds: float, about: str = "") -> None:
    """Run all rows in turn, round after round, for `seconds` per row and at least three rounds."""
    started = time.perf_counter()
    while rows and (time.perf_counter() < started + seconds * len(rows) or len(rows[0].speeds) < AT_LEAST):
        for row in rows:
            row.run()
        say(f"{about}{len(rows[0].speeds)} rounds in {time.perf_counter() - started:.0f} s")


def fastest_of_each(rows: Sequence[T]) -> tuple[T | None, list[T]]:
    """Return qkv's row of the highest median speed, if there is one, and that of each peer, the slowest first."""
    best: dict[str, T] = {}
    for row in sorted(rows, key=lambda row: statistics.median(row.speeds)):
        best[row.engine] = row
    return best.pop(OURS, None), list(best.values())


def speed_ratio(ours: Timed, theirs: Timed) -> dict[str, Any]:
    """Return the median, least and greatest ratio of two speeds, round by round."""
    ratios = [a / b for a, b in zip(ours.speeds, theirs.speeds, strict=False)]  # groups may differ in rounds
    return {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
