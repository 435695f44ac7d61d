"""The mean of several checkpoints (paper, section 6.1: the last 5 for base, the last 20 for big)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.run import Run

TRAINED = ("best", "last", "average")  # names that training itself gives


def average(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several files, summed in float64; no more than two are in memory at a time."""
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


def average_last(folder: str | Path, last: int = 0, name: str = "") -> tuple[Path, list[Path]]:
    """Average the last checkpoints kept in a run (0: all) into new weights; returns their file, and which they were.

    The name is average_N by default. Training's own names are refused: scores.json speaks of those.
    """
    if last < 0 or last == 1:
        raise UsageError(f"--last {last}: an average takes at least 2 checkpoints")
    run = Run.open(folder)
    kept = run.checkpoints()
    if len(kept) < max(2, last):
        raise UsageError(
            f"{folder} keeps {len(kept)} checkpoints, {max(2, last)} are needed: train with a larger train.average"
        )
    chosen = kept[-last:]
    name = name or f"average_{len(chosen)}"
    if not name.isidentifier() or name in TRAINED:
        raise UsageError(
            f'"{name}" cannot name an average: use letters, digits and _, but none of {", ".join(TRAINED)}'
        )
    path = run.path / "weights" / f"{name}.safetensors"
    files.write_tensors(path, average(chosen))
    return path, chosen
