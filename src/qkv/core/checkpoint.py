"""The state that training continues from, saved as one unit, and the mean of several checkpoints.

A state is a folder `state/step-N`: weights, optimizer, progress, and the moving average of the weights if there is one.
It is written under another name and renamed when it is complete and flushed to disk, so a folder with that name is
complete; the previous state is removed only afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qkv.core import files
from qkv.core.batches import Position
from qkv.core.device import ALONE, World
from qkv.core.errors import QkvError
from qkv.core.run import Run, by_step, load_weights, step_of


@dataclass
class Progress:
    """The numbers of a training; all randomness follows from `step`."""

    step: int = 0
    epoch: int = 0
    update: int = 0  # next update of the epoch
    micro_tokens: int = 0  # of the plan that `update` counts in; 0 in old states
    tokens: int = 0  # labels read
    seconds: float = 0.0  # in all
    training_seconds: float = 0.0  # without validating and saving
    skipped: int = 0  # updates skipped because the loss was not finite
    skipped_in_a_row: int = 0
    validated: int = 0  # step of the last validation
    best: float | None = None
    best_step: int = 0
    worse: int = 0  # validations since the best one
    learning_rate: float = 0.0  # of the last update: with last_step, the plan that a replay of this step follows
    last_step: int = 0

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.update)


class Clock:
    """Seconds, tokens and the share of time without data since the last reading."""

    def __init__(self, tokens: int = 0) -> None:
        self.since, self.tokens, self.stalled = time.perf_counter(), tokens, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as time without data."""
        before = time.perf_counter()
        yield
        self.stalled += time.perf_counter() - before

    def read(self, progress: Progress) -> tuple[float, float]:
        """Return tokens a second and the share of time without data, and begin again."""
        tokens, stalled = self.tokens, self.stalled
        seconds = max(1e-9, self.count_training(progress))
        return (progress.tokens - tokens) / seconds, stalled / seconds

    def count_training(self, progress: Progress) -> float:
        """Count the seconds since the last reading as training, without validating and saving."""
        seconds = self.count(progress)
        progress.training_seconds += seconds
        return seconds

    def count(self, progress: Progress) -> float:
        """Count the seconds since the last reading, and begin again."""
        now = time.perf_counter()
        seconds = now - self.since
        progress.seconds += seconds
        self.since, self.tokens, self.stalled = now, progress.tokens, 0.0
        return seconds


@runtime_checkable
class WeightAverage(Protocol):
    """Weights that are validated and kept in place of the trained ones, e.g. their moving average."""

    def tensors(self) -> dict[str, Tensor]: ...
    def load(self, tensors: Mapping[str, Tensor]) -> None: ...


# ---- state -----------------------------------------------------------------------------------------------------------


def save_state(
    run: Run,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    world: World = ALONE,
) -> None:
    """Write the state of this step, then remove older ones; when this returns, on any rank, it is on disk."""
    folder = run.path / "state" / f"step-{progress.step:07d}"
    if world.broadcast("saved" if folder.exists() else ""):
        if world.first:  # an earlier stop at this step saved the same tensors; the progress may have changed
            _write_progress(folder, progress)
    else:
        tensors: dict[str, dict[str, Tensor]] = {
            "weights": dict(model.named_parameters()),
            "optimizer": _optimizer_tensors(model, optimizer),
        }
        if average is not None:
            tensors["ema"] = average.tensors()
        gathered = ((name, world.gather(values)) for name, values in tensors.items())  # one in memory at a time
        if world.first:
            _write_state(folder, progress, gathered)
        else:
            deque(gathered, maxlen=0)
    world.broadcast()


def _write_state(folder: Path, progress: Progress, tensors: Iterable[tuple[str, dict[str, Tensor]]]) -> None:
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for name, values in tensors:
            files.write_tensors(unfinished / f"{name}.safetensors", values)
        _write_progress(unfinished, progress)
        unfinished.rename(folder)
        files.sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for older in folder.parent.iterdir():
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)  # if it cannot be removed, the newest state still counts


def _write_progress(folder: Path, progress: Progress) -> None:
    files.write_text(folder / "progress.json", json.dumps(dataclasses.asdict(progress), indent=2) + "\n")


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors, named `parameter/slot`."""
    return {
        f"{name}/{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def latest_state(run: Run) -> Path | None:
    """Return the newest complete state of a run."""
    states = by_step((run.path / "state").glob("step-*"))
    return states[-1] if states else None


def restore_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    world: World = ALONE,
) -> Progress:
    """Load a state into model, optimizer and average; return its progress."""
    weights, kept = folder / "weights.safetensors", folder / "ema.safetensors"
    load_weights(model, _parts(files.read_tensors(weights), model, world), weights)
    parameters = dict(model.named_parameters())
    slots: dict[str, dict[str, Any]] = {}
    for key, value in files.read_tensors(folder / "optimizer.safetensors").items():
        name, _, slot = key.rpartition("/")
        if name not in parameters:
            raise QkvError(f"{folder}: the optimizer state is of another model: it has {name}")
        own = parameters[name]
        # Tensors of the weight's shape are divided like the weight; all ranks have the same counts and scalars.
        slots.setdefault(name, {})[slot] = world.part(value, own) if value.shape == own.shape else value.to(own.device)
    for name, values in slots.items():
        optimizer.state[parameters[name]] = values
    if average is not None:  # an average that this resume adds begins at the weights
        average.load(_parts(files.read_tensors(kept if kept.exists() else weights), model, world))
    try:
        return Progress(**json.loads((folder / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise QkvError(f"{folder / 'progress.json'}: damaged: restore it from a copy, or train again") from None


def start_from(weights: Path, model: nn.Module, average: WeightAverage | None = None, world: World = ALONE) -> None:
    """Load the weights of another training, without its optimizer and progress."""
    tensors = _parts(files.read_tensors(weights), model, world)
    load_weights(model, tensors, weights)
    if average is not None:
        average.load(tensors)


def _parts(tensors: dict[str, Tensor], model: nn.Module, world: World) -> dict[str, Tensor]:
    """Return this rank's part of each tensor."""
    own = dict(model.named_parameters())
    return {name: world.part(value, own[name]) if name in own else value for name, value in tensors.items()}


def clear_away(run: Run, progress: Progress) -> None:
    """Remove what a killed run left behind: unfinished files, and weights of steps that will come again."""
    for folder in (run.path, run.path / "weights"):
        for unfinished in folder.glob(".*.tmp"):
            unfinished.unlink()
    for path in run.checkpoints():
        if step_of(path) > progress.validated:
            path.unlink()


# ---- average (paper, section 6.1: the last 5 checkpoints for base, the last 20 for big) ------------------------------


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights in several files, summed in float64, with at most two of them in memory."""
    first, *others = checkpoints
    own = files.read_tensors(first)
    total = {name: tensor.double() for name, tensor in own.items()}
    for path in others:
        tensors = files.read_tensors(path)
        if {name: tensor.shape for name, tensor in tensors.items()} != {n: t.shape for n, t in total.items()}:
            raise QkvError(f"{path}: weights of another model than {first}: they cannot be averaged")
        for name, tensor in tensors.items():
            total[name] += tensor
    return {name: (tensor / len(checkpoints)).to(own[name].dtype) for name, tensor in total.items()}
