"""Save memory in training: cut micro-batches that do not fit, and recompute activations in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkv.console import say
from qkv.core import batches
from qkv.core.batches import Batch, PairBatches, Position, Update, UpdateStream
from qkv.core.errors import QkvError
from qkv.core.tokenizer import PAD
from qkv.core.trainer import Outcome, PlainTrainStep
from qkv.data.pair_updates import AlignedBatch

# ---- micro-batches that do not fit -----------------------------------------------------------------------------------


class MemoryLimitedStep(PlainTrainStep):
    """Plain training step that cuts micro-batches which do not fit into memory; the gradient stays the same."""

    def __init__(self, *arguments: Any, updates: UpdateStream, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.updates = updates
        self.limit = MicroBatchLimit(self.device)
        self.probed = self.device.type != "cuda"

    def start(self, update: Update, number: int, rate: float) -> Callable[[], Outcome]:
        """Change the weights; before the first time try the largest batch, so that a lack of memory shows at once."""
        if not self.probed:
            self.probe()
        return super().start(update, number, rate)

    def gradients(self, update: Update) -> Tensor:
        """Accumulate this rank's gradients; when a micro-batch runs out of memory, start again with smaller parts."""
        self.model.train()
        while True:
            sums, too_large = torch.zeros(2, device=self.device), None
            for batch in (part for micro in update.micro_batches for part in self.limit.parts(micro)):
                try:
                    sums += self.forward_backward(batch)
                except torch.OutOfMemoryError:
                    too_large = batch
                    break
            if too_large is None:
                return torch.cat([sums, sums.new_tensor([update.tokens])])
            self.limit.shrink(too_large)
            self.zero_gradients()  # half a gradient is left behind

    def probe(self) -> None:
        """Compute the largest micro-batch of the first pass over the text, in parts if it does not fit.

        Adam's two moments, which do not exist before the first step, are allocated meanwhile.
        """
        self.probed = True
        states = 0 if self.optimizer.state else 2
        allocated = [torch.empty_like(parameter) for parameter in self.model.parameters() for _ in range(states)]
        self.gradients(Update([largest_batch(self.updates).to(self.device)], Position(0, 0)))
        self.zero_gradients()
        del allocated


def largest_batch(updates: UpdateStream) -> Batch:
    """Return this rank's share of the micro-batch that takes the most memory, of the first pass over the text."""

    def padded(micro: batches.Indices) -> tuple[int, int]:
        if not isinstance(updates, PairBatches):
            return len(micro), 0
        width = int(max(updates.src_widths[micro].max(), updates.tgt_widths[micro].max()))
        return len(micro) * width, width

    micro = max((micro for update in updates.plan(0) for micro in update), key=padded)
    share = micro[updates.world.rank :: updates.world.size]
    return updates.batch(share if len(share) else micro[:1], (0, 0, 0))


class MicroBatchLimit:
    """Limit on the size of micro-batches; none until one runs out of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tokens = math.inf  # padded, on the wider side

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch unchanged, or cut into parts that fit."""
        rows = len(batch.labels)
        at_once = rows if size(batch) <= self.tokens else max(1, int(self.tokens * rows // size(batch)))
        return [batch] if at_once == rows else [take(batch, i, i + at_once) for i in range(0, rows, at_once)]

    def shrink(self, batch: Batch) -> None:
        """Lower the limit to half of a batch that did not fit."""
        rows, width = len(batch.labels), size(batch) // len(batch.labels)
        if rows == 1:
            raise QkvError(
                f"out of memory: a single sentence of {width} tokens does not fit on {self.device}: set "
                f"train.checkpointing=true or train.precision=bf16, lower data.max_length, or take a smaller model"
            )
        first, self.tokens = math.isinf(self.tokens), (rows // 2) * width
        if first:
            say(
                f"out of memory: a batch of {rows} × {width} tokens does not fit on {self.device}; batches so "
                f"large are computed in parts, with the same gradient (to plan smaller ones, set train.micro_tokens)"
            )


def size(batch: Batch) -> int:
    """Return the padded tokens of the wider side."""
    return max(batch.labels.numel(), batch.inputs[0].numel())


def take(batch: Batch, first: int, stop: int) -> Batch:
    """Return some rows of a batch."""
    inputs, labels = tuple(each[first:stop] for each in batch.inputs), batch.labels[first:stop]
    part = replace(batch, inputs=inputs, labels=labels, tokens=int((labels != PAD).sum()))
    if not isinstance(part, AlignedBatch):
        return part
    links = part.alignment[(part.alignment[:, 0] >= first) & (part.alignment[:, 0] < stop)]
    return replace(part, alignment=links - links.new_tensor([first, 0, 0]))


def idle(batch: Batch) -> Batch:
    """Return one row of a batch with nothing to predict: a pass without a gradient."""
    row = take(batch, 0, 1)
    row = replace(row, labels=torch.full_like(row.labels, PAD), tokens=0)
    return replace(row, alignment=row.alignment[:0]) if isinstance(row, AlignedBatch) else row


# ---- activations computed twice --------------------------------------------------------------------------------------


def recompute_layers(model: nn.Module) -> None:
    """Let each layer keep its inputs only, and compute the rest again in the backward pass, with the same dropout."""
    for layer in layers(model):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    if not torch.is_grad_enabled():  # nothing is kept then
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's stacks."""
    return [layer for stack in ("encoder", "decoder") for layer in getattr(model, stack, ())]
