"""Memory in training: micro-batches that do not fit are cut, and activations may be computed twice instead of kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkv.console import say
from qkv.core.batches import Batch
from qkv.core.errors import QkvError
from qkv.core.tokenizer import PAD


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model's stacks."""
    return [layer for stack in ("encoder", "decoder") for layer in getattr(model, stack, ())]


def recompute(model: nn.Module) -> None:
    """Let each layer keep its inputs alone, and compute the rest again in the backward pass, with the same dropout."""
    for layer in layers(model):
        layer.forward = partial(_twice, layer.forward)


def _twice(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    if not torch.is_grad_enabled():  # nothing is kept then
        return forward(*inputs)
    computed: Tensor = checkpoint(forward, *inputs, use_reentrant=False)
    return computed


class Room:
    """How large a micro-batch may be: as large as it is planned, until one does not fit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tokens = math.inf  # padded, on the wider side

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch as it is, or cut into parts that fit."""
        rows = len(batch.labels)
        at_once = rows if size(batch) <= self.tokens else max(1, int(self.tokens * rows // size(batch)))
        return [batch] if at_once == rows else [take(batch, i, i + at_once) for i in range(0, rows, at_once)]

    def shrink(self, batch: Batch) -> None:
        """Remember that this batch did not fit; the sizes after it are at most half of its own."""
        rows, width = len(batch.labels), size(batch) // len(batch.labels)
        if rows == 1:
            raise QkvError(
                f"out of memory: a single sentence of {width} tokens does not fit on {self.device}: set "
                f"train.checkpointing=true or train.precision=bf16, lower data.max_length, or take a smaller model"
            )
        told, self.tokens = math.isfinite(self.tokens), (rows // 2) * width
        if not told:
            say(
                f"out of memory: a batch of {rows} × {width} tokens does not fit on {self.device}; it is computed in "
                f"parts, with the same gradient, as are others so large (to plan smaller ones, set train.micro_tokens)"
            )


def size(batch: Batch) -> int:
    """Padded tokens of the wider side."""
    return max(batch.labels.numel(), batch.inputs[0].numel())


def take(batch: Batch, first: int, stop: int) -> Batch:
    """Some rows of a batch."""
    links = batch.alignment
    if links is not None:
        links = links[(links[:, 0] >= first) & (links[:, 0] < stop)] - links.new_tensor([first, 0, 0])
    labels = batch.labels[first:stop]
    return Batch(tuple(each[first:stop] for each in batch.inputs), labels, int((labels != PAD).sum()), links)


def idle(batch: Batch) -> Batch:
    """One row of a batch with nothing to predict: a pass without a gradient, for a rank that must keep step."""
    row = take(batch, 0, 1)
    return Batch(row.inputs, torch.full_like(row.labels, PAD), 0, None if row.alignment is None else row.alignment[:0])
