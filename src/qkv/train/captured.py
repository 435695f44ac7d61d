"""One update of the weights as a few CUDA graphs: the pass over a batch, then the optimiser.

Small models are bound by launches, not by arithmetic: a graph is launched at once. Whatever changes from step to step
(batch, learning rate, dropout's seed, number of tokens) lies in tensors of fixed place, and nothing waits for the
device: what a step came to is read when it is there. Without a GPU the same operations run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv import config
from qkv.data.ragged import TILES, Ragged
from qkv.models.fused.passes import Passes
from qkv.models.fused.weights import Weights
from qkv.models.transformer import Transformer
from qkv.train.optim import Ema
from qkv.train.soap import Soap

Sizes = tuple[int, int]  # tokens of source and target


class Captured:
    """A model in training on ragged batches; `weights` are the model's own parameters from now on."""

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        spec: config.TrainConfig,
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
    def add_gradient(self, batch: Ragged, seed: int) -> None:
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
        held = Ragged(batch.whole.clone(), batch.sizes, batch.counts, batch.tokens)

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

    def _make_room(self, batch: Ragged) -> None:
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
