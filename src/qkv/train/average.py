"""The mean of several checkpoints (paper, section 6.1: the last 5 for base, the last 20 for big)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from qkv import files
from qkv.errors import UsageError
from qkv.run import Run


def average(checkpoints: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in float64."""
    return {
        name: torch.stack([tensors[name].double() for tensors in checkpoints]).mean(0).to(first.dtype)
        for name, first in checkpoints[0].items()
    }


def average_last(folder: str | Path, last: int = 0, name: str = "average") -> list[str]:
    """Average the last checkpoints kept in a run (0: all of them) into weights of that name; returns which they were."""
    run = Run.open(folder)
    kept = run.checkpoints()
    if len(kept) < max(2, last):
        raise UsageError(f"{folder} keeps {len(kept)} checkpoints, {max(2, last)} are needed: train with a larger train.average")
    if not name.isidentifier() or name in ("best", "last"):
        raise UsageError(f'"{name}" cannot name an average: use letters, digits and _, and neither best nor last')
    chosen = kept[-last:]
    files.write_tensors(run.path / "weights" / f"{name}.safetensors", average([files.read_tensors(p) for p in chosen]))
    return [path.stem for path in chosen]
