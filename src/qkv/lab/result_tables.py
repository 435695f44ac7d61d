"""Measurements and their tables: speeds in turn, spread over seeds, noise of differences, text, Markdown and JSON."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from qkv import __version__
from qkv.console import describe_device, say
from qkv.core import files
from qkv.core.device import choose_device
from qkv.core.errors import UsageError

AT_LEAST = 3  # rounds
STANDARD_ERRORS = 2.0  # two means differ significantly if they are this repeated standard errors apart


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """Format mean ± standard deviation; a single value has no deviation."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def pooled_deviation(groups: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation between seeds, pooled over all rows; NaN if every row has one seed."""
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return math.nan
    squares = sum((len(group) - 1) * statistics.variance(group) for group in repeated)
    return math.sqrt(squares / sum(len(group) - 1 for group in repeated))


@dataclass(frozen=True)
class Difference:
    """Difference of two means, and the noise it must exceed to be significant (NaN if unknown)."""

    value: float
    noise: float

    @property
    def significant(self) -> bool:
        """Whether the difference exceeds the noise."""
        return abs(self.value) > self.noise

    def __str__(self) -> str:
        noise = "noise unknown" if math.isnan(self.noise) else f"noise {self.noise:.2g}"
        return f"{self.value:+.3g}, {noise}"


def difference(a: Sequence[float], b: Sequence[float], deviation: float) -> Difference:
    """Return the difference of the means of `a` and `b`; its noise is two standard errors."""
    error = deviation * math.sqrt(1 / len(a) + 1 / len(b))
    return Difference(statistics.fmean(a) - statistics.fmean(b), STANDARD_ERRORS * error)


@dataclass(frozen=True)
class ResultTable:
    """A table of text cells with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Console) -> None:
        console.print(self.title, markup=False, soft_wrap=True)
        table = Table()
        for number, column in enumerate(self.columns):
            # On a narrow terminal wrap cells instead of cropping them: a cropped number is a wrong number.
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [self.columns, rule, *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def provenance(device: str, command: str) -> dict[str, Any]:
    """Return machine, versions and command of a measurement."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {describe_device(choose_device(device))}",
        "torch": torch.__version__,
        "qkv": __version__,
        "command": command,
    }


def check_outputs(outputs: Sequence[str]) -> None:
    """Refuse unknown output formats before the measurement starts."""
    for output in outputs:
        if Path(output).suffix not in (".json", ".md"):
            raise UsageError(f"--output {output}: write to a .json file (everything) or a .md file (the tables)")


def publish(
    result: dict[str, Any], sheets: Sequence[ResultTable], remarks: Sequence[str], outputs: Sequence[str]
) -> None:
    """Print tables and remarks; write the full result to .json outputs, the printed text to .md outputs."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # do not wrap in files and pipes
    where = f"{result['machine']}; torch {result['torch']}, qkv {result['qkv']}"
    console.print(where, markup=False)
    for sheet in sheets:
        sheet.show(console)
    for remark in remarks:
        console.print(remark, markup=False, soft_wrap=True)
    page = [
        *(sheet.markdown() for sheet in sheets),
        *(f"- {remark}" for remark in remarks),
        "",
        f"Measured on {where}.",
    ]
    if result["command"]:
        page.append(f"Command: `{result['command']}`")
    for output in outputs:
        text = "\n".join(page) if output.endswith(".md") else json.dumps(result, indent=2, ensure_ascii=False)
        files.write_text(Path(output), text + "\n")


# ---- speeds ----------------------------------------------------------------------------------------------------------


class Timed(Protocol):
    """A contender or setting with its speed in each round."""

    speeds: list[float]  # tokens per second

    @property
    def engine(self) -> str: ...

    def run(self) -> None: ...


T = TypeVar("T", bound=Timed)


def run_in_turns(rows: Sequence[Timed], seconds: float, about: str = "") -> None:
    """Run all rows in turn, round after round, for `seconds` per row and at least three rounds."""
    started = time.perf_counter()
    while rows and (time.perf_counter() < started + seconds * len(rows) or len(rows[0].speeds) < AT_LEAST):
        for row in rows:
            row.run()
        say(f"{about}{len(rows[0].speeds)} rounds in {time.perf_counter() - started:.0f} s")


def fastest_of_each(rows: Sequence[T], name: str) -> tuple[T | None, list[T]]:
    """Return the row of highest median speed of the engine `name`, if any, and of each other one, the slowest first."""
    best: dict[str, T] = {}
    for row in sorted(rows, key=lambda row: statistics.median(row.speeds)):
        best[row.engine] = row
    return best.pop(name, None), list(best.values())


def speed_ratio(ours: Timed, theirs: Timed) -> dict[str, Any]:
    """Return the median, least and greatest ratio of two speeds, round by round."""
    ratios = [a / b for a, b in zip(ours.speeds, theirs.speeds, strict=False)]  # groups may differ in rounds
    return {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
