"""A model in training, and one step of it (paper, section 5): teacher forcing, gradient, Adam."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.core import batches
from qkv.core.batches import Batch, PairBatches, Position, Update, UpdateStream
from qkv.core.dataset import PreparedText
from qkv.core.device import choose_device, choose_precision
from qkv.data.alignments import batch_alignment
from qkv.data.lm_data import BlockBatches, MaskedBatches
from qkv.data.subwords import pair_dropout
from qkv.models.base import Model
from qkv.models.build import build
from qkv.options import Config, DecoderOnlyConfig, EncoderOnlyConfig
from qkv.run import load_weights
from qkv.train import optim
from qkv.train.checkpoint import Progress
from qkv.train.guided import Guide
from qkv.train.loss import agreeing_loss, smoothed_loss
from qkv.training import distributed, memory_limits
from qkv.training.distributed import ALONE, World

RANK_SEED = 0x9E3779B1  # 2³² over the golden ratio: far apart in the 32 bits that a CPU's generator looks at


class Outcome(NamedTuple):
    """What one step came to: loss and −log p for each token, and the norm of the gradient before clipping."""

    loss: float
    nll: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def make_updates(
    config: Config,
    prepared: PreparedText,
    device: torch.device | None = None,
    world: World = ALONE,
    pair_batches: Callable[..., PairBatches] = PairBatches,
    micro_tokens: int = 0,
) -> UpdateStream:
    """Return the updates that this kind of model is trained on, this rank's share of them."""
    spec = config.train
    common: dict[str, Any] = {
        "tokens": spec.tokens_per_step,
        "micro_tokens": micro_tokens or spec.micro_tokens,
        "seed": spec.seed,
        "rank": world.rank,
        "world": world.size,
        "device": device,
    }
    match config.model:
        case DecoderOnlyConfig():
            return BlockBatches(prepared.train, length=config.data.max_length, **common)
        case EncoderOnlyConfig(masked=masked):
            return MaskedBatches(prepared.train, prepared.tokenizers, masked=masked, **common)
    dropout = config.tokenizer.dropout
    return pair_batches(
        prepared.train,
        prepared.tokenizers,
        cut=pair_dropout(prepared.tokenizers, dropout, config.data.max_length) if dropout else None,
        align=batch_alignment if spec.guided_alignment > 0 else None,
        **common,
    )


class Trainer:
    """A model in training: everything that a step changes, and nothing else."""

    lag = 0  # steps that may have been started before anybody asks what the first of them came to

    @staticmethod
    def read(
        config: Config, prepared: PreparedText, device: torch.device | None = None, world: World = ALONE
    ) -> UpdateStream:
        """The text as this trainer takes it."""
        return make_updates(config, prepared, device, world)

    def __init__(self, config: Config, prepared: PreparedText, world: World = ALONE) -> None:
        self.config, self.prepared, self.world = config, prepared, world
        self.spec = spec = config.train
        self.device = choose_device(spec.device)
        world.check(self.device)
        self.precision = choose_precision(spec.precision, self.device)
        self.sharded = spec.parallel == "sharded" and world.size > 1
        torch.manual_seed(spec.seed)
        self.model = self._build()
        world.copy(self.model.parameters())  # other processors may have drawn other bits
        if spec.checkpointing:
            memory_limits.recompute(self.model)
        if self.sharded:
            distributed.shard(self.model, self.device, world)
        self.optimizer = optim.build(self.model, spec)
        self.ema = optim.Ema(self.model, spec.ema) if spec.ema else None
        self.guide = Guide(self.model, spec.guided_alignment) if spec.guided_alignment else None
        self.room = memory_limits.Room(self.device)
        # A parameter's device has a number; the loader's thread has no current one of its own.
        self.updates = self.read(config, prepared, next(self.model.parameters()).device, world)
        self.go_on_from(Progress(micro_tokens=self.updates.micro_tokens))

    def _build(self) -> Model:
        tokenizers = self.prepared.tokenizers
        return build(self.config.model, tokenizers.src.size, tokenizers.tgt.size).to(self.device)

    def go_on_from(self, progress: Progress) -> None:
        """Read the text on from there, cut into the updates in which that was counted."""
        self.progress = progress
        self.updates.micro_tokens = progress.micro_tokens or self.updates.micro_tokens
        self.spec = dataclasses.replace(self.config.train, steps=self._steps())

    def _steps(self) -> int:
        """Updates until `train.steps` or `train.epochs` is reached; half a pass is half the updates of it."""
        limit = self.config.train
        if not limit.epochs:
            return limit.steps
        whole, part = divmod(limit.epochs, 1)
        passes = sum(len(self.updates.plan(epoch)) for epoch in range(int(whole)))
        return min(limit.steps, passes + math.ceil(part * len(self.updates.plan(int(whole)))))

    def done(self) -> bool:
        progress, spec = self.progress, self.spec
        return progress.step >= spec.steps or 0 < spec.patience <= progress.worse

    def step(self, update: Update) -> Outcome:
        """One update of the weights, and what it came to."""
        return self.start(update)()

    def start(self, update: Update) -> Callable[[], Outcome]:
        """One update of the weights, left out when the loss is not finite; the same on every rank.

        Returned is a function that waits for what it came to and counts it, to be called in the order of the steps.
        The loss is a sum over tokens, divided once by the count of the whole update; neither micro-batches nor ranks
        can change it. Dropout is seeded by step number and rank, so a resumed run draws what an unbroken one would
        have drawn.
        """
        progress = self.progress
        progress.step += 1
        torch.manual_seed(self.seed())
        sums = self.gradients(update)
        gradients = self._sum_over_ranks(sums)
        norm = self._divide(gradients, sums)
        loss, nll, tokens, size = torch.cat([sums, norm[None]]).tolist()  # the one wait for the device
        outcome = Outcome(loss / tokens, nll / tokens, size)
        if outcome.finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.model, progress.step)
        self.zero_gradients()
        progress.epoch, progress.update = update.after
        return lambda: self.settle(outcome, int(tokens))

    def settle(self, outcome: Outcome, tokens: int) -> Outcome:
        """Count what a step came to."""
        progress = self.progress
        progress.skipped += not outcome.finite
        progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1
        progress.tokens += tokens
        return outcome

    def seed(self) -> int:
        """What is random in this step, on this rank, follows from it."""
        return self.spec.seed * 1_000_003 + self.progress.step + self.world.rank * RANK_SEED

    def learning_rate(self) -> float:
        return optim.learning_rate(self.progress.step, self.spec, self.config.model.d_model)

    # ---- the gradient ------------------------------------------------------------------------------------------------

    def gradients(self, update: Update) -> Tensor:
        """Add the gradient of this rank's share to the weights' own; returns the sums (3,): loss, −log p and tokens.

        What does not fit into memory leaves half a gradient behind: the update begins anew, in smaller parts.
        """
        micros = self._in_step(update.micro_batches) if self.sharded else update.micro_batches
        while True:
            sums, too_large = self._passes(micros)
            if too_large is None:
                return torch.cat([sums, sums.new_tensor([update.tokens])])
            self.room.shrink(too_large)
            self.zero_gradients()

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _passes(self, micros: list[Batch]) -> tuple[Tensor, Batch | None]:
        """Forward and backward through all micro-batches; the second result is the one that did not fit, if any."""
        self.model.train()
        sums = torch.zeros(2, device=self.device)
        for batch in (part for micro in micros for part in self.room.parts(micro)):
            try:
                sums += self._pass(batch)
            except torch.OutOfMemoryError:
                if self.sharded:  # the other ranks are in the middle of the same pass
                    raise
                if self.guide is not None:
                    self.guide.seen = None  # it would keep the graph
                return sums, batch
        return sums, None

    def _pass(self, batch: Batch) -> Tensor:
        """Forward and backward through one batch: loss and −log p (2,), summed over its tokens."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            loss, nll = self._loss(batch)
        if self.guide is not None:
            loss = loss + self.guide.loss(batch)
        loss.backward()
        return torch.stack([loss.detach(), nll])

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and −log p of a batch, summed over its tokens."""
        output, labels, pad = self.model.output, batch.labels, self.prepared.tokenizers.tgt.pad
        options: dict[str, Any] = {"smoothing": self.spec.label_smoothing, "pad": pad}
        if self.guide is not None:  # who looks at whole rows of queries and keys
            with self.guide.watching():
                hidden = self.model.hidden(*batch.inputs)  # (batch, target, d_model)
            return smoothed_loss(hidden, output.weight, labels, **options)
        hidden = self.model.hidden_at(labels != pad, *batch.inputs)  # (tokens, d_model)
        if not self.spec.r_drop:  # sharded weights are whole behind a pass, not before it
            return smoothed_loss(hidden, output.weight, labels, **options)
        again = self.model.hidden_at(labels != pad, *batch.inputs)
        return agreeing_loss(hidden, again, output.weight, labels, alpha=self.spec.r_drop, **options)

    def _in_step(self, micros: list[Batch]) -> list[Batch]:
        """Of sharded weights every rank takes part in every pass: those with fewer micro-batches join idly."""
        missing = self.world.most(len(micros)) - len(micros)
        if not missing:
            return micros
        return micros + [memory_limits.idle(micros[0] if micros else self._least)] * missing

    @cached_property
    def _least(self) -> Batch:
        """A batch of one row, for a rank that has none of its own."""
        return self.updates.batch(self.updates.plan(0)[0][0][:1], (0, 0, 0)).to(self.device)

    def _sum_over_ranks(self, sums: Tensor) -> list[Tensor]:
        """The gradients, summed over all ranks as the sums are, in place. Sharded ones are summed already."""
        if self.sharded:
            self.world.sum([sums])
        elif self.world.size > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:  # this rank had no rows
                    parameter.grad = torch.zeros_like(parameter)
            self.world.sum([*(p.grad for p in self.model.parameters() if p.grad is not None), sums])
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _divide(self, gradients: list[Tensor], sums: Tensor) -> Tensor:
        """Make the sum a mean over tokens, clipped if the config says so; returns its norm before clipping."""
        tokens = sums[2]
        norm = distributed.norm(gradients, self.world) / tokens
        clipped = (self.spec.clip / (norm + 1e-6)).clamp(max=1.0) if self.spec.clip else torch.ones_like(norm)
        distributed.scale(gradients, clipped / tokens)
        return norm

    def padded(self, update: Update) -> list[Batch]:
        """An update as padded batches, to be looked at or taken apart."""
        return update.micro_batches

    def probe(self) -> None:
        """Try the largest micro-batch of the first pass over the text, so that what is too large shows at once.

        Adam's two moments, which do not exist before the first step, have their place taken meanwhile.
        """
        states = 0 if self.optimizer.state else 2
        taken = [torch.empty_like(parameter) for parameter in self.model.parameters() for _ in range(states)]
        self.gradients(Update([largest(self.updates).to(self.device)], Position(0, 0)))
        self.zero_gradients()
        del taken

    # ---- the weights -------------------------------------------------------------------------------------------------

    def plain(self) -> Model:
        """A model of this shape whose weights are whole and may be replaced."""
        return self._build() if self.sharded else self.model

    @contextmanager
    def averaged(self) -> Iterator[Model]:
        """The model as it will be used: with the moving average of the weights, where there is one.

        Of sharded weights all ranks are needed, and only rank 0 gets a model that can be used.
        """
        if self.ema is None and not self.sharded:
            yield self.model
            return
        own = dict(self.model.named_parameters())
        weights = distributed.whole(own if self.ema is None else self.ema.tensors(), self.world)
        if not self.world.first:
            yield self.model
            return
        kept = {} if self.sharded else {name: weight.detach().clone() for name, weight in own.items()}
        model = self.plain()
        load_weights(model, weights, Path("ema"))
        try:
            yield model
        finally:
            if kept:
                load_weights(model, kept, Path("weights"))


def largest(updates: UpdateStream) -> Batch:
    """This rank's share of the micro-batch that takes the most memory, of the first pass over the text."""

    def padded(micro: batches.Indices) -> tuple[int, int]:
        if not isinstance(updates, PairBatches):
            return len(micro), 0
        width = int(max(updates.src_widths[micro].max(), updates.tgt_widths[micro].max()))
        return len(micro) * width, width

    micro = max((micro for update in updates.plan(0) for micro in update), key=padded)
    share = micro[updates.rank :: updates.world]
    return updates.batch(share if len(share) else micro[:1], (0, 0, 0))
