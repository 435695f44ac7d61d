"""Training step for a GPU: hand-written passes over sentences packed without padding, replayed as CUDA graphs.

The step makes the same updates with the same optimizer; only the order of the arithmetic differs. A packed batch may
mix sentences of different lengths: unless `train.micro_tokens` is set, an update has more lengths than on the plain
path. Sentences that are too long for the kernels take the plain path, within the same update.

Small models are limited by kernel launches, not by arithmetic, and a graph needs one launch. All values that change
from step to step (batch, learning rate, dropout seed, token count) are in tensors at fixed addresses. The host does not
wait for the device: it reads the outcome of a step some steps later. Without a GPU the operations run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.console import say
from qkv.core.batches import Batch, Update, collate
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World, choose_precision
from qkv.core.trainer import Outcome
from qkv.core.transformer import Transformer
from qkv.core.validation import update_options
from qkv.engines.cuda_decoding.inference_kernels import triton
from qkv.engines.cuda_training import refused_model
from qkv.engines.cuda_training.forward_backward import FlatWeights, ForwardBackward
from qkv.engines.cuda_training.packed_batch import LONGEST, TILES, PackedBatch, PackedPairs, PackedUpdate
from qkv.options import FLAG, AllowList, Config, TrainConfig, TransformerConfig, number, text
from qkv.training.matrix_optimizers import Soap
from qkv.training.memory_limits import MemoryLimitedStep
from qkv.training.regularization import Ema

# ---- the training step -----------------------------------------------------------------------------------------------

PASS_SEED = 0x85EBCA77  # far from the seeds of other steps and ranks
PADDED_TOGETHER = 256  # rows of a packed batch that are padded together
LENGTH_GROUPS = 16  # parts of similar length in an update; similar sizes need few graphs


TRAIN = AllowList(
    "train",
    TrainConfig,
    **dict.fromkeys(("steps", "epochs", "tokens_per_step", "micro_tokens", "warmup", "learning_rate", "clip"), number),
    **dict.fromkeys(("beta1", "beta2", "eps", "weight_decay", "label_smoothing", "r_drop", "ema", "average"), number),
    **dict.fromkeys(("validate_every", "patience", "log_every", "seed"), number),
    **dict.fromkeys(("device", "name"), text),
    optimizer=("adam", "adamw", "muon", "soap"),
    schedule=("paper", "inverse_sqrt", "cosine", "linear", "constant", "wsd"),
    precision=("auto", "fp32", "bf16"),
    metric=("bleu", "loss"),
    tensorboard=FLAG,
    parallel=("data", "sharded"),
    guided_alignment=(0.0,),  # needs attention weights, which the kernels do not store
    checkpointing=(False,),
)


def supports(config: Config, device: torch.device, world: World = ALONE) -> str | None:
    """Return None if `CudaTrainStep` can train this config on the device, else the reason why not."""
    options = config.train
    if (reason := TRAIN.refusal(options)) is not None:
        return reason
    if options.parallel == "sharded" and world.size > 1:
        return "it does not shard weights"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a CUDA GPU that computes in bf16 (Ampere or later)"
    if triton is None:
        return "it needs Triton"
    return refused_model(config.model, choose_precision(options.precision, device))


class CudaTrainStep(MemoryLimitedStep):
    """Training step that replays CUDA graphs; too long sentences take the plain path."""

    max_in_flight = 16
    model: Transformer
    updates: PackedPairs
    average: Ema | None
    options: TrainConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert len(self.hooks) == (self.average is not None), "the graphs support no other hook than a moving average"
        self._graphs: CudaGraphs | None = None

    @staticmethod
    def packed_updates(
        config: Config, text: PreparedText, device: torch.device, world: World = ALONE, **hooks: Any
    ) -> PackedPairs:
        """Return the stream of updates, with sentences packed without padding; too long sentences are padded."""
        options, longest = config.train, LONGEST
        if isinstance(config.model, TransformerConfig) and config.model.positions == "learned":
            # The plain path refuses rows that BPE-dropout makes longer.
            longest = min(longest, config.model.max_positions)
        return PackedPairs(
            text.train,
            text.tokenizers,
            **hooks,
            packed_tokens=-(-options.tokens_per_step // world.size),
            longest=longest,
            **update_options(config, device, world)
            | {"micro_tokens": options.micro_tokens or -(-options.tokens_per_step // LENGTH_GROUPS)},
        )

    def graphs(self, epoch: int = 0) -> CudaGraphs:
        """Return the graphs; they are created at the first step, after a saved state has been restored."""
        if self._graphs is None:
            self.model.train()
            self._graphs = CudaGraphs(
                self.model,
                self.optimizer,
                self.average,
                self.options,
                pad=self.updates.tokenizers.tgt.pad,
                dtype=self.precision,
                max_rows=self.updates.most_rows(epoch),
            )
        return self._graphs

    def start(self, update: Update, number: int, rate: float) -> Callable[[], Outcome]:
        """Run one update without probing its memory first: an update that does not fit is computed in parts."""
        graphs = self.graphs(update.after.epoch - (update.after.update == 0))
        seed = self.seed(number)
        self.model.train()
        torch.manual_seed(seed)  # for the rows on the plain path
        if update.micro_batches:  # first, because zero_gradients restarts the update if they do not fit
            graphs.totals += self.gradients(Update(update.micro_batches, update.after))
        if not self._add_packed(update, seed):
            graphs.totals += self.gradients(self._in_smaller_parts(update))
        self.world.sum([graphs.weights.grads, graphs.totals])
        ema_weight = 0.0 if self.average is None else 1 - self.average.decay_at(number)
        graphs.update(rate=rate, ema_weight=ema_weight)
        return graphs.read()

    def _add_packed(self, update: Update, seed: int) -> bool:
        """Add the gradients of the packed batches; return False if they do not fit into memory."""
        try:
            for number, batch in enumerate(_packed(update)):
                self.graphs().add_gradient(batch, seed + number * PASS_SEED)
        except torch.OutOfMemoryError:
            return False
        return True

    def zero_gradients(self) -> None:
        """Set the gradients to zero in place: the graphs contain their address."""
        graphs = self.graphs()
        graphs.weights.grads.zero_()
        graphs.totals.zero_()

    def _in_smaller_parts(self, update: Update) -> Update:
        """Return the same update as padded micro-batches; from now on packed batches are half as large."""
        fewer = max(1, max(max(batch.sizes) for batch in _packed(update)) // 2)
        if fewer < self.updates.packed_tokens:  # else the update was packed before the last reduction
            self.updates.packed_tokens = fewer
            say(f"out of memory: batches are reduced to {fewer:,} tokens a side")
        self.zero_gradients()
        self.graphs().forget()
        return Update([batch.to(self.device) for batch in self.padded(update)], update.after)

    def padded(self, update: Update) -> list[Batch]:
        """Return an update as padded micro-batches, the packed batches unpacked."""
        tokenizers = self.updates.tokenizers
        rows = [row for batch in _packed(update) for row in batch.rows(tokenizers.tgt.pad)]
        groups = (rows[first : first + PADDED_TOGETHER] for first in range(0, len(rows), PADDED_TOGETHER))
        unpacked = [
            collate([s[:-1] for s, _, _ in group], [t[1:] for _, t, _ in group], tokenizers) for group in groups
        ]
        return [*update.micro_batches, *unpacked]


def _packed(update: Update) -> tuple[PackedBatch, ...]:
    return update.packed if isinstance(update, PackedUpdate) else ()


# ---- CUDA graphs of a step -------------------------------------------------------------------------------------------

Sizes = tuple[int, int]  # tokens of source and target


class CudaGraphs:
    """The passes over packed batches and the update as CUDA graphs; `weights` replace the model's own parameters."""

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        options: TrainConfig,
        *,
        pad: int,
        dtype: torch.dtype,
        max_rows: Sequence[int] = (),
    ) -> None:
        """`max_rows` is the expected maximum number of rows of each tile in a batch."""
        self.weights = FlatWeights(model, dtype)
        self.passes = ForwardBackward(
            model, self.weights, smoothing=options.label_smoothing, pad=pad, r_drop=options.r_drop
        )
        self.optimizer, self.clip = optimizer, options.clip
        self.device = self.weights.masters.device
        number = self.weights.masters.new_zeros
        self.rate, self.ema_weight, self.broken, self.divisor = number(()), number(()), number(()), number(())
        self.totals = number(3)  # loss, −log p and tokens of the update so far
        self.outcome = number(4)  # loss and −log p for each token, gradient norm, tokens
        self.average = None if ema is None else self._flatten(ema)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.graphs: dict[Sizes, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        self.update_graph: torch.cuda.CUDAGraph | None = None
        self.max_rows = list(max_rows) or [0] * len(TILES)  # rows of each tile that the graphs can compute
        self._prepare_optimizer()

    def _flatten(self, ema: Ema) -> Tensor:
        """Move the moving average into one tensor with the layout of the weights."""
        flat = self.weights.masters.clone()
        views = self.weights.views(flat)
        for view, weight in zip(views, ema.weights, strict=True):
            view.copy_(weight)
        ema.weights = views
        return flat

    def _prepare_optimizer(self) -> None:
        """Create the optimizer's state, which a graph needs, by a skipped step: it changes no weight."""
        optimizer: Any = self.optimizer
        optimizer.found_inf, optimizer.grad_scale = self.broken, self.divisor
        for group in optimizer.param_groups:
            group["lr"] = self.rate
            if "capturable" in group:
                group["capturable"] = self.device.type == "cuda"
        # SOAP decomposes matrices periodically, which a graph cannot contain.
        self.captures_update = self.pool is not None and not isinstance(optimizer, Soap)
        if self.captures_update:
            self.broken.fill_(1.0)
            self.divisor.fill_(1.0)
            optimizer.step()

    @torch.no_grad()
    def add_gradient(self, batch: PackedBatch, seed: int) -> None:
        """Run one pass; add its gradient, loss and tokens to the update."""
        words = torch.randint(-(2**31), 2**31, (2,), generator=torch.Generator().manual_seed(seed))  # of 32 bits
        self.passes.seed.copy_(words.to(torch.int32), non_blocking=True)
        self.totals[2] += batch.tokens
        if self.pool is None:
            self.totals[:2] += self.passes.run(batch)
            return
        self._reserve_rows(batch)
        if batch.sizes in self.graphs:
            static, graph = self.graphs[batch.sizes]
            static.copy_(batch.tensor)
            graph.replay()
            return
        self.totals[:2] += self.passes.run(batch, tuple(self.max_rows))  # compiles new kernels before the capture
        static_batch = PackedBatch(batch.tensor.clone(), batch.sizes, batch.counts, batch.tokens)

        def run_pass() -> None:
            self.totals[:2] += self.passes.run(static_batch, tuple(self.max_rows))

        self.graphs[batch.sizes] = static_batch.tensor, self._capture(run_pass)

    @torch.no_grad()
    def update(self, *, rate: float, ema_weight: float = 0.0) -> None:
        """Change the weights by the gradients added since the last update, divided by the number of tokens.

        If loss or gradient are not finite, only the outcome changes.
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

    def read(self) -> Callable[[], Outcome]:
        """Return a function that waits for the outcome of the last update and returns it."""
        on_device = self.pool is not None
        host = torch.empty(4, pin_memory=on_device).copy_(self.outcome, non_blocking=True)
        copied = torch.cuda.Event() if on_device else None
        if copied is not None:
            copied.record()

        def wait() -> Outcome:
            if copied is not None:
                copied.synchronize()
            loss, nll, norm, tokens = host.tolist()
            return Outcome(loss, nll, norm, int(tokens))

        return wait

    def forget(self) -> None:
        """Free the memory of all graphs; they are captured again when they are needed."""
        self.graphs.clear()
        self.update_graph = None
        if self.pool is not None:
            torch.cuda.empty_cache()

    def _reserve_rows(self, batch: PackedBatch) -> None:
        """Drop the graphs if a batch has more rows of a tile than they can compute; allow for a quarter more."""
        for tile, count in enumerate(batch.counts):
            if count > self.max_rows[tile]:
                self.max_rows[tile] = count + count // 4
                self.graphs.clear()

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if not self.graphs and self.update_graph is None:  # the memory pool is freed with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        # thread_local: the thread that reads batches may pin memory during the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            function()
        return graph
