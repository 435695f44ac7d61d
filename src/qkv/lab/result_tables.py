"""Tables of results as text, Markdown and JSON; tables of trials: their options, spread over seeds, noise."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qkv import __version__
from qkv.console import describe_device
from qkv.core import files
from qkv.core.dataset import PreparedText
from qkv.core.device import choose_device
from qkv.core.errors import UsageError
from qkv.lab import trials
from qkv.lab.trials import Result, Trial
from qkv.options import Config, CorpusConfig, DataConfig
from qkv.presets import demo

STANDARD_ERRORS = 2.0  # two means differ significantly if they are this repeated standard errors apart


@dataclass(frozen=True)
class ResultTable:
    """A table of text cells with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

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


def check_outputs(outputs: Sequence[str]) -> None:
    """Refuse unknown output formats before the measurement starts."""
    for output in outputs:
        if Path(output).suffix not in (".json", ".md"):
            raise UsageError(f"--output {output}: write to a .json file (everything) or a .md file (the tables)")


def provenance(device: str, command: str) -> dict[str, Any]:
    """Return machine, versions and command of a measurement."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {describe_device(choose_device(device))}",
        "torch": torch.__version__,
        "qkv": __version__,
        "command": command,
    }


def publish(
    figures: dict[str, Any],
    sheets: Sequence[ResultTable],
    remarks: Sequence[str],
    *,
    device: str,
    command: str,
    outputs: Sequence[str],
) -> dict[str, Any]:
    """Print tables and remarks, and return the figures with their provenance.

    All figures are written to .json outputs, the printed text to .md outputs.
    """
    result = provenance(device, command) | figures
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # do not wrap in files and pipes
    where = f"{result['machine']}; torch {result['torch']}, qkv {result['qkv']}"
    console.print(where, markup=False)
    for sheet in sheets:
        sheet.show(console)
    for remark in remarks:
        console.print(remark, markup=False, soft_wrap=True)
    page = [*(sheet.markdown() for sheet in sheets), *(f"- {remark}" for remark in remarks), ""]
    page.append(f"Measured on {where}.")
    if command:
        page.append(f"Command: `{command}`")
    for output in outputs:
        text = "\n".join(page) if output.endswith(".md") else json.dumps(result, indent=2, ensure_ascii=False)
        files.write_text(Path(output), text + "\n")
    return result


# ---- a table of trials -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """The options that all tables of trials share; 0: chosen by the device.

    Without files the text is the demo corpus. `out` is the working directory: the same directory resumes an interrupted
    table, or prints a finished one again.
    """

    out: str | Path
    src: str = ""
    tgt: str = ""
    valid_src: str = ""
    valid_tgt: str = ""
    steps: int = 0
    tokens: int = 0
    seeds: int = 3
    jobs: int = 0
    device: str = "auto"
    output: Sequence[str] = ()
    command: str = ""

    def __post_init__(self) -> None:
        check_outputs(self.output)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def text_config(self, *, max_length: int) -> Config:
        """Return a config with the text; without validation files a part is held out."""
        if not self.src:
            if other := self.tgt or self.valid_src or self.valid_tgt:
                raise UsageError(f"{other}: give --src too, or no file for the demo corpus")
            return demo().replace(data={"max_length": max_length})
        train = (CorpusConfig(src=self.src, tgt=self.tgt),)
        valid = (CorpusConfig(src=self.valid_src, tgt=self.valid_tgt),) if self.valid_src else ()
        return Config(data=DataConfig(train=train, valid=valid, max_length=max_length))

    def run(
        self,
        configs: Mapping[str, Config],
        texts: Mapping[str, PreparedText],
        *,
        jobs: int = 0,
        test: trials.FilePair | None = None,
    ) -> dict[str, list[Result]]:
        """Train each config with every seed; return the results by name."""
        planned = [
            Trial(name, config.replace(train={"seed": seed}), texts[name])
            for seed in range(1, self.seeds + 1)
            for name, config in configs.items()
        ]
        finished = trials.run_all(
            planned, self.folder, jobs=jobs or self.jobs or trials.default_jobs(self.device), test=test
        )
        return {name: [result for result in finished if result.name == name] for name in configs}

    def publish(
        self,
        figures: dict[str, Any],
        by_name: Mapping[str, Sequence[Result]],
        tables: Sequence[ResultTable],
        remarks: Sequence[str],
    ) -> dict[str, Any]:
        """Print and write the figures with all trials."""
        results = {result.key: result for results in by_name.values() for result in results}
        figures = figures | {"trials": [result.to_dict() for result in results.values()]}
        return publish(figures, tables, remarks, device=self.device, command=self.command, outputs=self.output)


def successful(by_name: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
    """Return the results without those that failed."""
    return {name: [result for result in results if not result.error] for name, results in by_name.items()}


def result_table(
    title: str,
    columns: Sequence[str],
    by_name: Mapping[str, Sequence[Result]],
    cells: Callable[[str, list[Result]], Sequence[str]],
    label: Callable[[str], str] = str,
) -> ResultTable:
    """Return a table with a row for each name: how many trials failed, and `cells(name, successful results)`."""
    rows = []
    for name, good in successful(by_name).items():
        count = len(by_name[name])
        failed = f" ({count - len(good)} of {count} failed)" if len(good) < count else ""
        rows.append((label(name) + failed, *cells(name, good)))
    return ResultTable(title, columns, rows)


# ---- spread and noise ------------------------------------------------------------------------------------------------


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
