"""What training says: a JSONL log, TensorBoard events, and a progress bar on a terminal."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qkv.core import files
from qkv.train import checkpoint


class Log:
    """One line of JSON for each event; on a terminal also a live line with loss, learning rate, speed and ETA."""

    def __init__(self, path: Path, *, steps: int, after: checkpoint.Progress, tensorboard: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, emoji=False)
        _forget_after(path, after)
        self.file = path.open("a", encoding="utf-8")
        self.events = _tensorboard(path.parent / "tensorboard", after.step) if tensorboard else None
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
        self.task = self.bar.add_task("", total=steps, completed=after.step, state="")

    def __enter__(self) -> Log:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
        plain = {name: _plain(value) for name, value in values.items()}
        self.file.write(json.dumps({"event": event, "step": step, **plain}, ensure_ascii=False) + "\n")
        self.file.flush()
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.events.add_scalar(f"{event}/{name}", value, step)
        if event == "train":
            state = "loss {loss:.3f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s".format(**values)
            self.bar.update(self.task, completed=step, state=state)


def _plain(value: Any) -> Any:
    """Six digits of a number; None for one that is not finite, which JSON cannot hold."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _forget_after(path: Path, after: checkpoint.Progress) -> None:
    """Drop what a killed run logged after the state it continues from: those steps come again."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        kept = "".join(line + "\n" for line in text.split("\n") if _is_past(line, after))
        if kept != text:
            files.write_text(path, kept)


def _is_past(line: str, after: checkpoint.Progress) -> bool:
    try:
        entry = json.loads(line)
        return bool(entry["step"] <= (after.validated if entry["event"] == "valid" else after.step))
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut
        return False


def _tensorboard(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # Events from the step of `purge_step` on, that one included, are forgotten.
    return SummaryWriter(folder, purge_step=step + 1 if step else None)
