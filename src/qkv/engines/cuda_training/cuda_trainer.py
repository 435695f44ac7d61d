"""A Trainer for a GPU: fused passes over sentences laid end to end, in CUDA graphs, and no waiting for the device.

The same optimiser takes the same steps; only the arithmetic is done in another order. Where nothing is padded, lengths
need not be alike: unless `train.micro_tokens` says otherwise, an update mixes more of them than on the plain path. What
is too long takes the plain way, within the same training.

One update of the weights as a few CUDA graphs: the pass over a batch, then the optimiser.

Small models are bound by launches, not by arithmetic: a graph is launched at once. Whatever changes from step to step
(batch, learning rate, dropout's seed, number of tokens) lies in tensors of fixed place, and nothing waits for the
device: what a step came to is read when it is there. Without a GPU the same operations run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv.console import say
from qkv.core.batches import Batch, Update, UpdateStream, collate
from qkv.core.dataset import PreparedText
from qkv.core.device import choose_device, choose_precision
from qkv.engines.cuda_decoding.inference_kernels import triton
from qkv.engines.cuda_training.forward_backward import Passes, Weights, can_pass
from qkv.engines.cuda_training.packed_batch import LONGEST, TILES, PackedBatch, PackedPairs, PackedUpdate
from qkv.models.transformer import Transformer
from qkv.options import Config, TrainConfig, TransformerConfig
from qkv.train.optim import Ema
from qkv.train.trainer import Outcome, Trainer, make_updates
from qkv.training.distributed import ALONE, World
from qkv.training.matrix_optimizers import Soap

# ---- the trainer -----------------------------------------------------------------------------------------------------

PASS_SEED = 0x85EBCA77  # far from the seeds of other steps and ranks
TOGETHER = 256  # rows of a ragged batch that are padded together
MIXED = 16  # parts of an update, each of like lengths: all updates have about the same sizes, and need few graphs


def trainer_for(config: Config, world: World = ALONE) -> type[Trainer]:
    """The fastest trainer there is for this model on this device."""
    return FastTrainer if _is_fast(config, world) else Trainer


def make_trainer(config: Config, prepared: PreparedText, world: World = ALONE) -> Trainer:
    return trainer_for(config, world)(config, prepared, world)


def _is_fast(config: Config, world: World) -> bool:
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

    def __init__(self, config: Config, prepared: PreparedText, world: World = ALONE) -> None:
        super().__init__(config, prepared, world)
        self._made: Captured | None = None

    @staticmethod
    def read(
        config: Config, prepared: PreparedText, device: torch.device | None = None, world: World = ALONE
    ) -> UpdateStream:
        spec, longest = config.train, LONGEST
        if isinstance(config.model, TransformerConfig) and config.model.positions == "learned":
            # What BPE-dropout makes longer than that is refused by the plain way, with a word.
            longest = min(longest, config.model.max_positions)
        return make_updates(
            config,
            prepared,
            device,
            world,
            micro_tokens=spec.micro_tokens or -(-spec.tokens_per_step // MIXED),
            pair_batches=partial(PackedPairs, packed_tokens=-(-spec.tokens_per_step // world.size), longest=longest),
        )

    @property
    def captured(self) -> Captured:
        """Made at the first step: a state that is restored before it finds the weights where they were."""
        if self._made is None:
            assert isinstance(self.model, Transformer)
            assert isinstance(self.updates, PackedPairs)
            pad, most = self.prepared.tokenizers.tgt.pad, self.updates.most_rows(self.progress.epoch)
            self.model.train()
            self._made = Captured(
                self.model, self.optimizer, self.ema, self.spec, pad=pad, dtype=self.precision, most=most
            )
        return self._made

    def probe(self) -> None:
        """Nothing is tried beforehand: what does not fit is taken in parts when it comes."""

    def start(self, update: Update) -> Callable[[], Outcome]:
        progress, captured = self.progress, self.captured
        progress.step += 1
        seed = self.seed()
        self.model.train()
        torch.manual_seed(seed)  # for what takes the plain way
        if update.micro_batches:  # first: what does not fit there begins with zero gradients anew
            captured.totals += self.gradients(Update(update.micro_batches, update.after))
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

    def _passed(self, update: Update, seed: int) -> bool:
        """Add the gradients of what is laid end to end; False if memory does not suffice, and nothing is held of it."""
        try:
            for number, batch in enumerate(_packed(update)):
                self.captured.add_gradient(batch, seed + number * PASS_SEED)
        except torch.OutOfMemoryError:
            return False
        return True

    def zero_gradients(self) -> None:
        """They stay where they are: the graphs know the place."""
        self.captured.weights.grads.zero_()
        self.captured.totals.zero_()

    def _in_smaller_parts(self, update: Update) -> Update:
        """The same update as padded micro-batches; from now on half as much is laid end to end."""
        assert isinstance(self.updates, PackedPairs)
        fewer = max(1, max(max(batch.sizes) for batch in _packed(update)) // 2)
        if fewer < self.updates.packed_tokens:  # else it was laid before the last time that memory did not suffice
            self.updates.packed_tokens = fewer
            say(f"out of memory: from now on {fewer:,} tokens a side are computed at once")
        self.zero_gradients()
        self.captured.forget()
        return Update([batch.to(self.device) for batch in self.padded(update)], update.after)

    def padded(self, update: Update) -> list[Batch]:
        tokenizers = self.prepared.tokenizers
        rows = [row for batch in _packed(update) for row in batch.rows(tokenizers.tgt.pad)]
        groups = (rows[first : first + TOGETHER] for first in range(0, len(rows), TOGETHER))
        made = [collate([s[:-1] for s, _, _ in group], [t[1:] for _, t, _ in group], tokenizers) for group in groups]
        return [*update.micro_batches, *made]


def _packed(update: Update) -> tuple[PackedBatch, ...]:
    return update.packed if isinstance(update, PackedUpdate) else ()


# ---- CUDA graphs of a step -------------------------------------------------------------------------------------------

Sizes = tuple[int, int]  # tokens of source and target


class Captured:
    """A model in training on ragged batches; `weights` are the model's own parameters from now on."""

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        spec: TrainConfig,
        *,
        pad: int,
        dtype: torch.dtype,
        most: Sequence[int] = (),
    ) -> None:
        """`most` is how many rows of each tile a batch is expected to have."""
        self.weights = Weights(model, dtype)
        self.passes = Passes(model, self.weights, smoothing=spec.label_smoothing, pad=pad, r_drop=spec.r_drop)
        self.optimizer, self.clip = optimizer, spec.clip
        self.device = self.weights.masters.device
        number = self.weights.masters.new_zeros
        self.rate, self.ema_weight, self.broken, self.divisor = number(()), number(()), number(()), number(())
        self.totals = number(3)  # loss, −log p and tokens of the update so far
        self.outcome = number(4)  # loss and −log p for each token, norm of the gradient, tokens
        self.average = None if ema is None else self._flatten(ema)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.graphs: dict[Sizes, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        self.update_graph: torch.cuda.CUDAGraph | None = None
        self.most = list(most) or [0] * len(TILES)  # rows of each tile that the graphs have room for
        self._prepare_optimizer()

    def _flatten(self, ema: Ema) -> Tensor:
        """The moving average in one tensor, like the weights."""
        whole = self.weights.masters.clone()
        views = self.weights.views(whole)
        for view, weight in zip(views, ema.weights, strict=True):
            view.copy_(weight)
        ema.weights = views
        return whole

    def _prepare_optimizer(self) -> None:
        """Its state must exist before a graph is captured: a step that is left out makes it and changes nothing."""
        optimizer: Any = self.optimizer
        optimizer.found_inf, optimizer.grad_scale = self.broken, self.divisor
        for group in optimizer.param_groups:
            group["lr"] = self.rate
            if "capturable" in group:
                group["capturable"] = self.device.type == "cuda"
        # SOAP decomposes matrices now and then, which no graph can hold.
        self.captures_update = self.pool is not None and not isinstance(optimizer, Soap)
        if self.captures_update:
            self.broken.fill_(1.0)
            self.divisor.fill_(1.0)
            optimizer.step()

    @torch.no_grad()
    def add_gradient(self, batch: PackedBatch, seed: int) -> None:
        """One pass: its gradient, its loss and its tokens are added to those of the update."""
        self.passes.seed.copy_(_halves(seed), non_blocking=True)
        self.totals[2] += batch.tokens
        if self.pool is None:
            self.totals[:2] += self.passes.run(batch)
            return
        self._make_room(batch)
        if batch.sizes in self.graphs:
            static, graph = self.graphs[batch.sizes]
            static.copy_(batch.whole)
            graph.replay()
            return
        self.totals[:2] += self.passes.run(batch, tuple(self.most))  # compiles what is new; the graph is for the next
        held = PackedBatch(batch.whole.clone(), batch.sizes, batch.counts, batch.tokens)

        def work() -> None:
            self.totals[:2] += self.passes.run(held, tuple(self.most))

        self.graphs[batch.sizes] = held.whole, self._capture(work)

    @torch.no_grad()
    def update(self, *, rate: float, ema_weight: float = 0.0) -> None:
        """Change the weights by the gradients added since the last time, divided by the count of tokens.

        If loss or gradient are not finite, nothing changes but the outcome.
        """
        self.rate.fill_(rate)
        self.ema_weight.fill_(ema_weight)
        if self.update_graph is not None:
            self.update_graph.replay()
            return
        self._update()
        if self.captures_update:
            self.update_graph = self._capture(self._update)

    def _update(self) -> None:
        tokens = self.totals[2]
        norm = self.weights.grads.norm() / tokens
        self.outcome.copy_(torch.stack([self.totals[0] / tokens, self.totals[1] / tokens, norm, tokens]))
        finite = self.outcome.isfinite().all()
        self.broken.copy_(~finite)
        self.divisor.copy_(tokens * (norm / self.clip).clamp(min=1.0) if self.clip else tokens)
        self.optimizer.step()
        if self.average is not None:
            self.average.lerp_(self.weights.masters, self.ema_weight * finite)
        self.weights.refresh()
        self.weights.grads.zero_()
        self.totals.zero_()

    def read(self) -> Callable[[], list[float]]:
        """What the last update came to: a function that waits for it."""
        if self.pool is None:
            known: list[float] = self.outcome.tolist()
            return lambda: known
        held = torch.empty(4, pin_memory=True).copy_(self.outcome, non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def wait() -> list[float]:
            there.synchronize()
            numbers: list[float] = held.tolist()
            return numbers

        return wait

    def forget(self) -> None:
        """Give back the memory of all graphs; they are captured again."""
        self.graphs.clear()
        self.update_graph = None
        if self.pool is not None:
            torch.cuda.empty_cache()

    def _make_room(self, batch: PackedBatch) -> None:
        """Graphs are captured with room for the most rows met so far, and a quarter more."""
        for tile, count in enumerate(batch.counts):
            if count > self.most[tile]:
                self.most[tile] = count + count // 4
                self.graphs.clear()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if not self.graphs and self.update_graph is None:  # a pool ends with the last of its graphs
            self.pool = torch.cuda.graph_pool_handle()
        # The loader's thread may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            work()
        return graph


def _halves(seed: int) -> Tensor:
    """A seed as two well mixed words, from a generator made for it."""
    drawn = torch.randint(-(2**31), 2**31, (2,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.int32)
