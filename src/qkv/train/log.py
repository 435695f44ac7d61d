"""What training says: a JSONL log, TensorBoard events, and a progress bar on a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qkv import files


class Log:
    """One line of JSON for each event; on a terminal also a live line with loss, learning rate, speed and ETA."""

    def __init__(self, path: Path, *, steps: int, step: int = 0, tensorboard: bool = False) -> None:
        self.path = path
        self.console = Console(stderr=True, highlight=False)
        _forget_after(path, step)
        self.file = path.open("a", encoding="utf-8")
        self.events = _tensorboard(path.parent / "tensorboard", step) if tensorboard else None
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
        )
        self.task = self.bar.add_task("", total=steps, completed=step, state="")

    def __enter__(self) -> Log:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()
        self.file.close()
        if self.events is not None:
            self.events.close()

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def write(self, event: str, step: int, **values: Any) -> None:
        """One event for the log and TensorBoard; training events also show beside the bar."""
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        self.file.write(json.dumps({"event": event, "step": step, **rounded}) + "\n")
        self.file.flush()
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.events.add_scalar(f"{event}/{name}", value, step)
        if event == "train":
            state = "loss {loss:.3f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s".format(**values)
            self.bar.update(self.task, completed=step, state=state)


def _forget_after(path: Path, step: int) -> None:
    """Drop what a killed run logged after the state it continues from: those steps come again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step(line) <= step]
        if len(kept) < len(lines):
            files.write_text(path, "".join(line + "\n" for line in kept))


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut
        return float("inf")


def _tensorboard(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=step or None)  # type: ignore[no-untyped-call]
