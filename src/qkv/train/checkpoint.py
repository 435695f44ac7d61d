"""What training continues from: weights, optimiser, moving average and progress, saved as one unit.

A state is a folder `state/step-N`. It is written under another name and renamed when it is complete and flushed, so a
folder with that name is whole, and the previous one is removed only afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.core import files
from qkv.core.batches import Position
from qkv.core.errors import QkvError
from qkv.run import Run, by_step, load_weights, step_of
from qkv.train.optim import Ema
from qkv.training import distributed
from qkv.training.distributed import ALONE, World


@dataclass
class Progress:
    """The numbers of a training run; everything random follows from `step`."""

    step: int = 0
    epoch: int = 0
    update: int = 0  # next update of the epoch
    micro_tokens: int = 0  # of the plan in which that is counted; in states of old, 0
    tokens: int = 0  # labels read
    seconds: float = 0.0  # of everything
    training_seconds: float = 0.0  # without validating and saving
    skipped: int = 0  # updates left out because the loss was not finite
    skipped_in_a_row: int = 0
    validated: int = 0  # step of the last validation
    best: float | None = None
    best_step: int = 0
    worse: int = 0  # validations since the best one

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.update)


def save(
    run: Run,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    world: World = ALONE,
) -> None:
    """Write the state of this step, then remove older ones; when this returns, on any rank, it is written."""
    folder = run.path / "state" / f"step-{progress.step:07d}"
    if world.tell("known" if folder.exists() else ""):
        if world.first:  # stopped here before: the tensors of a step are always the same, only the progress is not
            _write_progress(folder, progress)
    else:
        tensors: dict[str, dict[str, Tensor]] = {
            "weights": dict(model.named_parameters()),
            "optimizer": _optimizer_tensors(model, optimizer),
        }
        if ema is not None:
            tensors["ema"] = ema.tensors()
        whole = (
            (name, distributed.whole(values, world)) for name, values in tensors.items()
        )  # one in memory at a time
        if world.first:
            _write(folder, progress, whole)
        else:
            deque(whole, maxlen=0)
    world.tell()


def _write(folder: Path, progress: Progress, tensors: Iterable[tuple[str, dict[str, Tensor]]]) -> None:
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
            shutil.rmtree(older, ignore_errors=True)


def latest(run: Run) -> Path | None:
    """The newest complete state."""
    states = by_step((run.path / "state").glob("step-*"))
    return states[-1] if states else None


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> Progress:
    """Load a state into model, optimiser and average; returns the progress to go on from."""
    weights, average = folder / "weights.safetensors", folder / "ema.safetensors"
    load_weights(model, _parts(files.read_tensors(weights), model), weights)
    _load_optimizer(model, optimizer, files.read_tensors(folder / "optimizer.safetensors"), folder)
    if ema is not None:  # one that is new with this resume begins at the weights
        ema.load(_parts(files.read_tensors(average if average.exists() else weights), model))
    try:
        return Progress(**json.loads((folder / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise QkvError(f"{folder / 'progress.json'}: damaged: restore it from a copy, or train again") from None


def begin_with(weights: Path, model: nn.Module, ema: Ema | None) -> None:
    """Load the weights of another training, and nothing else of it."""
    tensors = _parts(files.read_tensors(weights), model)
    load_weights(model, tensors, weights)
    if ema is not None:
        ema.load(tensors)


def clear_away(run: Run, progress: Progress) -> None:
    """Remove what a killed run left behind: unfinished files, and weights of steps that will come again."""
    for folder in (run.path, run.path / "weights"):
        for unfinished in folder.glob(".*.tmp"):
            unfinished.unlink()
    for path in run.checkpoints():
        if step_of(path) > progress.validated:
            path.unlink()


def _parts(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Of each of the model's tensors what this rank keeps."""
    own = dict(model.named_parameters())
    return {name: distributed.part(value, own[name]) if name in own else value for name, value in tensors.items()}


def _write_progress(folder: Path, progress: Progress) -> None:
    files.write_text(folder / "progress.json", json.dumps(dataclasses.asdict(progress), indent=2) + "\n")


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors, named `parameter/slot`."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{slot}"] = value
    return tensors


def _load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], folder: Path
) -> None:
    parameters = dict(model.named_parameters())
    slots: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        if name not in parameters:
            raise QkvError(f"{folder}: the optimiser state is of another model: it has {name}")
        own = parameters[name]
        # What has the weight's shape is divided as it is; counts and the like are the same on all ranks.
        slots.setdefault(name, {})[slot] = (
            distributed.part(value, own) if value.shape == own.shape else value.to(own.device)
        )
    for name, values in slots.items():
        optimizer.state[parameters[name]] = values
