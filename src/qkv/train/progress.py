"""What is said while work goes on: lines for people on standard error, and progress bars where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int | None], None]


def say(text: str) -> None:
    """A line for people; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def bars() -> Iterator[Report]:
    """A function `report(stage, done, total)` that keeps one bar for each stage it hears of."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.speed:,.0f}/s", table_column=None),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    with progress:
        yield report
