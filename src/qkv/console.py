"""Terminal output: results on standard output, messages on standard error, progress bars if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qkv.core.errors import UsageError

if TYPE_CHECKING:
    import torch

Report = Callable[[str, int, int | None], None]
Advance = Callable[[int], None]  # called with the number of items that were finished


def say(text: str) -> None:
    """Print a message on standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def describe_device(device: torch.device) -> str:
    """Describe a device in words, e.g. `cpu, threads: 2`."""
    import torch

    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"cpu, threads: {torch.get_num_threads()}" if device.type == "cpu" else str(device)


class _Speed(ProgressColumn):
    """Column with the number of items per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


@contextmanager
def bars() -> Iterator[Report]:
    """Yield `report(stage, done, total)`, which shows one progress bar for each stage."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
        redirect_stdout=False,  # results go where the user sent them
        redirect_stderr=False,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    with progress:
        yield report


@contextmanager
def counter(stage: str, total: int | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """Yield `advance(count)`, which moves a progress bar."""
    done = 0
    with bars() if shown else nullcontext(lambda stage, done, total: None) as report:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(stage, done, total)

        yield advance


@contextmanager
def writer(output: str) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes lines to standard output (-) or to FILE.part, which becomes FILE at the end."""
    if output == "-":
        yield lambda line: print(line, flush=True)  # a program may wait for this line
        return
    path = Path(output)
    special = path.exists() and not path.is_file()  # a pipe or a device
    part = path if special else path.with_name(f"{path.name}.part")
    try:
        out = part.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}: choose another file") from None
    try:
        with out:
            yield lambda line: print(line, file=out)
        if not special:
            part.replace(path)
    except BaseException:
        if not special:
            part.unlink()
        raise


class TrainingBar:
    """Log sink that prints messages, and on a terminal shows loss, learning rate, speed and ETA below them."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, emoji=False)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not sys.stderr.isatty(),
            transient=True,
            redirect_stdout=False,
        )
        self.task = self.bar.add_task("", state="")

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        match kind:
            case "message":
                self.console.print(values["text"], markup=False, soft_wrap=True)
            case "start":
                self.bar.reset(self.task, total=values["last_step"], completed=step)
                self.bar.start()
            case "progress":
                self.bar.update(self.task, completed=step)
            case "train":
                state = "loss {loss:.3f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s".format(**values)
                self.bar.update(self.task, state=state)

    def close(self) -> None:
        self.bar.stop()
