"""The state that training continues from, saved as one unit, and the mean of several checkpoints.

A state is a folder `state/step-N`: weights, optimizer, progress, and the moving average of the weights if there is one.
It is written under another name and renamed when it is complete and flushed to disk, so a folder with that name is
complete; the previous state is removed only afterwards. `step` is a training step (`PlainTrainStep`), of which a state
records the model, the optimizer and the average.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qkv.core import files
from qkv.core.batches import Position
from qkv.core.errors import QkvError
from qkv.core.run import Run, by_step, load_weights, read_record


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
    validating: bool = False  # this step is validated next, whatever the options say
    best: float | None = None
    best_step: int = 0
    worse: int = 0  # validations since the best one
    learning_rate: float = 0.0  # of the last update: with last_step, the plan that a replay of this step follows
    last_step: int = 0

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.update)


def save_state(run: Run, progress: Progress, step: Any) -> None:
    """Write the state of this update, then remove older ones; when this returns, on any rank, it is on disk."""
    own, average, world = dict(step.model.named_parameters()), step.average, step.world
    slots = {f"{name}/{slot}": v for name, p in own.items() for slot, v in step.optimizer.state.get(p, {}).items()}
    tensors = {"weights": own, "optimizer": slots} | ({} if average is None else {"ema": average.tensors()})
    folder = run.path / "state" / f"step-{progress.step:07d}"
    unfinished = folder.with_name(f".{folder.name}.tmp")
    if world.first:
        shutil.rmtree(unfinished, ignore_errors=True)
    # An earlier stop at this step saved the same tensors; the progress may have changed.
    saved = world.broadcast("saved" if folder.exists() else "")
    try:
        for name, values in ({} if saved else tensors).items():  # one in memory at a time
            whole = world.gather(values)
            if world.first:
                files.write_tensors(unfinished / f"{name}.safetensors", whole)
        if world.first:
            record = json.dumps(dataclasses.asdict(progress), indent=2) + "\n"
            files.write_text((folder if saved else unfinished) / "progress.json", record)
    except BaseException:  # half a state would keep a full disk full
        if world.first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if world.first:
        if not saved:
            unfinished.rename(folder)
            files.sync(folder.parent)
        for older in [*by_step(folder.parent).values(), *folder.parent.glob(".step-*.tmp")]:
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)  # if it cannot be removed, the newest state still counts
    world.broadcast()


def latest_state(run: Run) -> Path | None:
    """Return the newest complete state of a run."""
    return max(by_step(run.path / "state").items(), default=(0, None))[1]


def restore_state(folder: Path, step: Any) -> Progress:
    """Load a state into model, optimizer and average; return its progress."""
    start_from(folder / "weights.safetensors", step)
    own, ema = dict(step.model.named_parameters()), folder / "ema.safetensors"
    if step.average is not None and ema.exists():  # an average that this resume adds begins at the weights
        load_weights(step.average.tensors(), files.read_tensors(ema), ema, step.world)
    step.optimizer.state.clear()
    for key, value in files.read_tensors(folder / "optimizer.safetensors").items():
        name, _, slot = key.rpartition("/")
        if name not in own:
            raise QkvError(f"{folder}: the optimizer state is of another model: it has {name}")
        step.optimizer.state[own[name]][slot] = step.world.part(value, own[name])
    return read_record(folder / "progress.json", Progress)


def start_from(weights: Path, step: Any) -> None:
    """Load the weights of another training, without its optimizer and progress."""
    tensors = files.read_tensors(weights)
    load_weights(dict(step.model.named_parameters()), tensors, weights, step.world)
    if step.average is not None:
        load_weights(step.average.tensors(), tensors, weights, step.world)


def clear_away(run: Run, progress: Progress) -> None:
    """Remove what a killed run left behind: unfinished files, and weights of steps that will come again."""
    for unfinished in [*run.path.glob(".*.tmp"), *(run.path / "weights").glob(".*.tmp")]:
        unfinished.unlink()
    for step, path in by_step(run.path / "weights").items():
        if step > progress.validated:
            path.unlink()


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights in several files, summed in float64, with one of them in memory beside the sum.

    The paper (section 6.1) averages the last 5 checkpoints of the base model and the last 20 of the big one.
    """
    first, *others = checkpoints
    own = files.read_tensors(first)
    dtypes, total = {name: t.dtype for name, t in own.items()}, {name: own.pop(name).double() for name in list(own)}
    for path in others:
        tensors = files.read_tensors(path)
        if {name: tensor.shape for name, tensor in tensors.items()} != {n: t.shape for n, t in total.items()}:
            raise QkvError(f"{path}: weights of another model than {first}: they cannot be averaged")
        for name, tensor in tensors.items():
            total[name] += tensor
    return {name: total.pop(name).div_(len(checkpoints)).to(dtype) for name, dtype in dtypes.items()}
