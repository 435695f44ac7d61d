"""Memory in training: micro-batches that do not fit are cut, activations may be computed twice instead of kept.

The loss is computed in parts: `loss_in_parts` projects some hundred tokens at a time to the vocabulary and takes the
gradients at once, so that the logits of a whole batch never exist. Values and gradients are those of the core's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
        """Add the gradient of this rank's micro-batches; start again, in smaller parts, when one does not fit."""
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
    share = micro[updates.rank :: updates.world]
    return updates.batch(share if len(share) else micro[:1], (0, 0, 0))


class MicroBatchLimit:
    """How large a micro-batch may be: as large as it is planned, until one does not fit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tokens = math.inf  # padded, on the wider side

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch as it is, or cut into parts that fit."""
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
                f"out of memory: a batch of {rows} × {width} tokens does not fit on {self.device}; it is computed in "
                f"parts, with the same gradient, as are others so large (to plan smaller ones, set train.micro_tokens)"
            )


def size(batch: Batch) -> int:
    """Return the padded tokens of the wider side."""
    return max(batch.labels.numel(), batch.inputs[0].numel())


def take(batch: Batch, first: int, stop: int) -> Batch:
    """Return some rows of a batch."""
    links = batch.alignment
    if links is not None:
        links = links[(links[:, 0] >= first) & (links[:, 0] < stop)] - links.new_tensor([first, 0, 0])
    labels = batch.labels[first:stop]
    return Batch(tuple(each[first:stop] for each in batch.inputs), labels, int((labels != PAD).sum()), links)


def idle(batch: Batch) -> Batch:
    """Return one row of a batch with nothing to predict: a pass without a gradient."""
    row = take(batch, 0, 1)
    return Batch(row.inputs, torch.full_like(row.labels, PAD), 0, None if row.alignment is None else row.alignment[:0])


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


# ---- the loss in parts -----------------------------------------------------------------------------------------------

ROWS = 512  # tokens projected at once: their logits stay in the cache of a CPU; a GPU takes twice as many


def loss_in_parts(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    """Return what `label_smoothed_loss` of the core returns, in less time and memory; `hidden` may be padded, too."""
    real = labels != pad
    hidden, labels = hidden[real] if hidden.dim() > labels.dim() else hidden, labels[real]  # (tokens, d_model)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, nll = _LossInParts.apply(hidden, weight, labels, smoothing, needs_grad)  # type: ignore[no-untyped-call]
    return loss, nll


class _LossInParts(torch.autograd.Function):
    """Computes the gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return loss and −log p; the softmax is in fp32, whatever the inputs are."""
        ctx.dtypes, device = (hidden.dtype, weight.dtype), hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            hidden, weight = hidden.to(compute), weight.to(compute)
            loss = hidden.new_zeros((), dtype=torch.float32)
            nll = loss.clone()
            mean = weight.float().mean(0)  # its product with a hidden state is the mean of the logits
            d_hidden = torch.empty_like(hidden) if needs_grad else None
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
            parts = max(1, round(len(hidden) / (ROWS if hidden.is_cpu else 2 * ROWS)))
            # Equal parts: a short last part would pass over all of d_weight too.
            rows = max(1, -(-len(hidden) // parts))
            for first in range(0, len(hidden), rows):
                part = slice(first, first + rows)
                h, y = hidden[part], labels[part, None]
                logits = (h @ weight.T).float()  # (rows, vocab)
                own, largest = logits.gather(-1, y), logits.amax(-1, keepdim=True)  # (rows, 1)
                p = logits.sub_(largest).exp_()
                z = p.sum(-1, keepdim=True)
                log_z = largest + z.log()
                part_nll = (log_z - own).sum()
                loss += (1 - smoothing) * part_nll + smoothing * (log_z.sum() - (h.float() @ mean).sum())
                nll += part_nll
                if d_hidden is not None and d_weight is not None:
                    # d loss / d logits = softmax − targets; the ε/V of every target is subtracted through the mean
                    d_logits = p.div_(z).scatter_add_(-1, y, p.new_full(y.shape, smoothing - 1)).to(hidden.dtype)
                    d_hidden[part] = d_logits @ weight - smoothing * mean
                    if h.dtype == torch.float32:  # not `addmm_`, which torch's operation counter misses
                        torch.addmm(d_weight, d_logits.T, h, out=d_weight)
                    else:
                        d_weight += d_logits.T @ h
            if d_weight is not None:
                d_weight -= smoothing / len(weight) * hidden.float().sum(0)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(ctx.dtypes[0]), (d_weight * d_loss).to(ctx.dtypes[1]), None, None, None
