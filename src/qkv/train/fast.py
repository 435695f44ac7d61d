"""A Trainer for a GPU: fused passes over sentences laid end to end, in CUDA graphs, and no waiting for the device.

The same optimiser takes the same steps; only the arithmetic is done in another order. Where nothing is padded, lengths
need not be alike: unless `train.micro_tokens` says otherwise, an update mixes more of them than on the plain path. What
is too long takes the plain way, within the same training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qkv import config as configs
from qkv.core.device import choose_device, choose_precision
from qkv.data.loader import Batch, Pairs, Step, Updates, collate
from qkv.data.ragged import LONGEST
from qkv.data.store import Prepared
from qkv.models.fused.passes import can_pass
from qkv.models.kernels import triton
from qkv.models.transformer import Transformer
from qkv.terminal import say
from qkv.train.captured import Captured
from qkv.train.distributed import ALONE, World
from qkv.train.trainer import Outcome, Trainer, make_updates

PASS_SEED = 0x85EBCA77  # far from the seeds of other steps and ranks
TOGETHER = 256  # rows of a ragged batch that are padded together
MIXED = 16  # parts of an update, each of like lengths: all updates have about the same sizes, and need few graphs


def trainer_for(config: configs.Config, world: World = ALONE) -> type[Trainer]:
    """The fastest trainer there is for this model on this device."""
    return FastTrainer if _is_fast(config, world) else Trainer


def make_trainer(config: configs.Config, prepared: Prepared, world: World = ALONE) -> Trainer:
    return trainer_for(config, world)(config, prepared, world)


def _is_fast(config: configs.Config, world: World) -> bool:
    spec, device = config.train, choose_device(config.train.device)
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)  # before, bf16 is emulated
        and triton is not None
        and can_pass(config.model, choose_precision(spec.precision, device))
        and not spec.guided_alignment  # which looks at attention weights
        and not spec.checkpointing
        and not (spec.parallel == "sharded" and world.size > 1)
    )


class FastTrainer(Trainer):
    """A trainer that takes its steps in another way."""

    lag = 16

    def __init__(self, config: configs.Config, prepared: Prepared, world: World = ALONE) -> None:
        super().__init__(config, prepared, world)
        self._made: Captured | None = None

    @staticmethod
    def read(
        config: configs.Config, prepared: Prepared, device: torch.device | None = None, world: World = ALONE
    ) -> Updates:
        spec, longest = config.train, LONGEST
        if isinstance(config.model, configs.TransformerConfig) and config.model.positions == "learned":
            # What BPE-dropout makes longer than that is refused by the plain way, with a word.
            longest = min(longest, config.model.max_positions)
        return make_updates(
            config,
            prepared,
            device,
            world,
            micro_tokens=spec.micro_tokens or -(-spec.tokens_per_step // MIXED),
            ragged_tokens=-(-spec.tokens_per_step // world.size),
            ragged_longest=longest,
        )

    @property
    def captured(self) -> Captured:
        """Made at the first step: a state that is restored before it finds the weights where they were."""
        if self._made is None:
            assert isinstance(self.model, Transformer)
            assert isinstance(self.updates, Pairs)
            pad, most = self.prepared.tokenizers.tgt.pad, self.updates.most_rows(self.progress.epoch)
            self.model.train()
            self._made = Captured(
                self.model, self.optimizer, self.ema, self.spec, pad=pad, dtype=self.precision, most=most
            )
        return self._made

    def probe(self) -> None:
        """Nothing is tried beforehand: what does not fit is taken in parts when it comes."""

    def start(self, update: Step) -> Callable[[], Outcome]:
        progress, captured = self.progress, self.captured
        progress.step += 1
        seed = self.seed()
        self.model.train()
        torch.manual_seed(seed)  # for what takes the plain way
        if update.micros:  # first: what does not fit there begins with zero gradients anew
            captured.totals += self.gradients(Step(update.micros, update.after))
        if not self._passed(update, seed):
            captured.totals += self.gradients(self._in_smaller_parts(update))
        if self.world.size > 1:
            self.world.sum([captured.weights.grads, captured.totals])
        ema_weight = 0.0 if self.ema is None else 1 - self.ema.decay_at(progress.step)
        captured.update(rate=self.learning_rate(), ema_weight=ema_weight)
        progress.epoch, progress.update = update.after
        read = captured.read()

        def settle() -> Outcome:
            *numbers, tokens = read()
            return self.settle(Outcome(*numbers), int(tokens))

        return settle

    def _passed(self, update: Step, seed: int) -> bool:
        """Add the gradients of what is laid end to end; False if memory does not suffice, and nothing is held of it."""
        try:
            for number, batch in enumerate(update.ragged):
                self.captured.add_gradient(batch, seed + number * PASS_SEED)
        except torch.OutOfMemoryError:
            return False
        return True

    def zero_gradients(self) -> None:
        """They stay where they are: the graphs know the place."""
        self.captured.weights.grads.zero_()
        self.captured.totals.zero_()

    def _in_smaller_parts(self, update: Step) -> Step:
        """The same update as padded micro-batches; from now on half as much is laid end to end."""
        assert isinstance(self.updates, Pairs)
        fewer = max(1, max(max(batch.sizes) for batch in update.ragged) // 2)
        if fewer < self.updates.ragged_tokens:  # else it was laid before the last time that memory did not suffice
            self.updates.ragged_tokens = fewer
            say(f"out of memory: from now on {fewer:,} tokens a side are computed at once")
        self.zero_gradients()
        self.captured.forget()
        return Step([batch.to(self.device) for batch in self.padded(update)], update.after)

    def padded(self, update: Step) -> list[Batch]:
        tokenizers = self.prepared.tokenizers
        rows = [row for batch in update.ragged for row in batch.rows(tokenizers.tgt.pad)]
        groups = (rows[first : first + TOGETHER] for first in range(0, len(rows), TOGETHER))
        made = [collate([s[:-1] for s, _, _ in group], [t[1:] for _, t, _ in group], tokenizers) for group in groups]
        return [*update.micros, *made]
