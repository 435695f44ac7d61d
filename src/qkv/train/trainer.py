"""A model in training, and one step of it (paper, section 5): teacher forcing, gradient, Adam."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv import config as configs
from qkv.data.loader import Batch, Pairs, Step, Updates
from qkv.data.plain import Blocks, Sentences
from qkv.data.store import Prepared
from qkv.device import choose_device, choose_precision
from qkv.models.base import Model
from qkv.models.build import build
from qkv.run import load_weights
from qkv.train import optim
from qkv.train.checkpoint import Progress
from qkv.train.guided import Guide
from qkv.train.loss import smoothed_loss


class Outcome(NamedTuple):
    """What one step came to: loss and −log p for each token, and the norm of the gradient before clipping."""

    loss: float
    nll: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def make_updates(config: configs.Config, prepared: Prepared, device: torch.device | None = None) -> Updates:
    """The text as this kind of model is trained on it."""
    spec = config.train
    common: dict[str, Any] = {
        "tokens": spec.tokens_per_step,
        "micro_tokens": spec.micro_tokens,
        "seed": spec.seed,
        "device": device,
    }
    match config.model:
        case configs.DecoderOnly():
            return Blocks(prepared.train, length=config.data.max_length, **common)
        case configs.EncoderOnly(masked=masked):
            return Sentences(prepared.train, prepared.tokenizers, masked=masked, **common)
    text: dict[str, Any] = {"dropout": config.tokenizer.dropout, "aligned": spec.guided_alignment > 0}
    return Pairs(prepared.train, prepared.tokenizers, **text, **common)


class Trainer:
    """A model in training: everything that a step changes, and nothing else."""

    def __init__(self, config: configs.Config, prepared: Prepared) -> None:
        self.config, self.prepared = config, prepared
        self.spec = spec = config.train
        self.device = choose_device(spec.device)
        self.precision = choose_precision(spec.precision, self.device)
        torch.manual_seed(spec.seed)
        tokenizers = prepared.tokenizers
        self.model: Model = build(self.config.model, tokenizers.src.size, tokenizers.tgt.size).to(self.device)
        self.optimizer = optim.build(self.model, spec)
        self.ema = optim.Ema(self.model, spec.ema) if spec.ema else None
        self.guide = Guide(self.model, spec.guided_alignment) if spec.guided_alignment else None
        self.progress = Progress()
        self.updates = make_updates(config, prepared, self.device)
        self.spec = dataclasses.replace(spec, steps=self._steps())

    def _steps(self) -> int:
        """Updates until `train.steps` or `train.epochs` is reached; half a pass is half the updates of it."""
        if not self.spec.epochs:
            return self.spec.steps
        whole, part = divmod(self.spec.epochs, 1)
        passes = sum(len(self.updates.plan(epoch)) for epoch in range(int(whole)))
        return min(self.spec.steps, passes + math.ceil(part * len(self.updates.plan(int(whole)))))

    def done(self) -> bool:
        progress, spec = self.progress, self.spec
        return progress.step >= spec.steps or 0 < spec.patience <= progress.worse

    def step(self, update: Step) -> Outcome:
        """One update of the weights, left out when the loss is not finite.

        The loss is a sum over tokens, divided once by the count of the whole update; micro-batches cannot change it.
        Dropout is seeded by the step number, so a resumed run draws what an unbroken one would have drawn.
        """
        progress = self.progress
        progress.step += 1
        torch.manual_seed(self.spec.seed * 1_000_003 + progress.step)
        outcome = self._backward(update)
        if outcome.finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.model, progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        progress.skipped += not outcome.finite
        progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1
        progress.epoch, progress.update = update.after
        progress.tokens += update.tokens
        return outcome

    def learning_rate(self) -> float:
        return optim.learning_rate(self.progress.step, self.spec, self.config.model.d_model)

    def _backward(self, update: Step) -> Outcome:
        """The gradient of the mean loss over all tokens of the update, clipped if the config says so."""
        self.model.train()
        loss = nll = torch.zeros((), device=self.device)
        for batch in update.micros:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                hidden = self._hidden(batch)
                part, part_nll = smoothed_loss(
                    hidden,
                    self.model.output.weight,
                    batch.labels,
                    smoothing=self.spec.label_smoothing,
                    pad=self.prepared.tokenizers.tgt.pad,
                )
            if self.guide is not None:
                part = part + self.guide.loss(batch)
            (part / update.tokens).backward()
            loss, nll = loss + part.detach(), nll + part_nll
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip or math.inf)
        return Outcome(float(loss) / update.tokens, float(nll) / update.tokens, float(norm))

    def _hidden(self, batch: Batch) -> Tensor:
        with nullcontext() if self.guide is None else self.guide.watching():
            return self.model.hidden(*batch.inputs)

    @contextmanager
    def averaged(self) -> Iterator[Model]:
        """The model as it will be used: with the moving average of the weights, where there is one."""
        if self.ema is None:
            yield self.model
            return
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        load_weights(self.model, self.ema.tensors(), Path("ema"))
        try:
            yield self.model
        finally:
            load_weights(self.model, own, Path("weights"))
