"""Ways to train the same model: qkv's own, and the usual loop that other implementations are measured in.

A contender has three methods: `prepare` on the shared weights, `logits`, and `step`. All use torch's fused Adam; on a
GPU bf16 with fp32 weights, on a CPU fp32. `prepare` raises `UsageError` if a package is not installed.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.assembly import optimizer_for
from qkv.core.batches import Batch
from qkv.core.dataset import Rows
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.core.transformer import Transformer
from qkv.engines.cuda_training.cuda_trainer import CudaGraphs
from qkv.engines.cuda_training.packed_batch import PackedBatch, pack
from qkv.lab.peers import OURS
from qkv.options import TrainConfig
from qkv.training.memory_limits import loss_in_parts

STEP = 256  # packed batches are padded to a multiple of this many tokens, to limit the number of shapes
RATE = 1e-4  # constant learning rate; only speed matters


@dataclass(frozen=True)
class TrainingSetup:
    """Weights, device and options that all contenders share."""

    model: Transformer  # on the CPU; contenders copy it
    device: torch.device
    width: int  # of a batch: the longest sentence
    spec: TrainConfig

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Contender(ABC):
    """One way to train: `prepare`, then `logits` for the comparison and `step` for the timing."""

    exact = True  # same architecture and weights, so the logits must be equal
    model: Any  # from (source, lengths, target) to logits

    def __init__(self, engine: str, how: str) -> None:
        self.engine, self.how = engine, how

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"

    @abstractmethod
    def prepare(self, subject: TrainingSetup) -> None:
        """Create model and optimizer on the device."""

    def collate(self, batch: Batch) -> Any:
        """Convert a batch to the contender's format on the host; not timed, a loader thread would do it."""
        return batch

    def logits(self, batch: Batch) -> Tensor:
        """Return logits (batch, target, vocab) in fp32 without dropout."""
        self.model.eval()
        with torch.no_grad():
            logits: Tensor = self.model(*batch.inputs)
        self.model.train()
        return logits

    @abstractmethod
    def step(self, batch: Any) -> int:
        """Update the weights once and return the number of target tokens; need not synchronise."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class StandardLoop(Contender):
    """The usual training loop: loss under autocast, backward, fused Adam.

    `make` returns a module from (source, lengths, target) to logits. With `compiled`, torch compiles model and loss for
    the single batch shape.
    """

    def __init__(self, engine: str, make: Callable[[TrainingSetup], nn.Module], *, compiled: bool = False) -> None:
        super().__init__(engine, "compiled" if compiled else "eager")
        self.make, self.compiled = make, compiled

    def prepare(self, subject: TrainingSetup) -> None:
        self.subject = subject
        self.model = self.make(subject).to(subject.device).train()
        self.run = torch.compile(self.loss, dynamic=False) if self.compiled else self.loss
        betas = (subject.spec.beta1, subject.spec.beta2)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, betas=betas, eps=subject.spec.eps, fused=True)

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the mean loss over tokens without padding."""
        smoothing = self.subject.spec.label_smoothing
        logits = self.model(*batch)  # (batch, target, vocab)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=smoothing)

    def step(self, batch: Batch) -> int:
        with self.subject.autocast:
            loss = self.run(batch.inputs, batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return batch.tokens

    def close(self) -> None:
        self.model = self.run = self.optimizer = None  # type: ignore[assignment]
        torch.compiler.reset()


class PlainQkv(StandardLoop):
    """qkv's plain model and its loss in parts, which never holds all logits at once."""

    def __init__(self) -> None:
        super().__init__(OURS, lambda subject: copy.deepcopy(subject.model))
        self.how = "plain"

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        hidden = self.model.hidden_at(labels != PAD, *batch)
        smoothing = self.subject.spec.label_smoothing
        loss, _ = loss_in_parts(hidden, self.model.output.weight, labels, smoothing=smoothing, pad=PAD)
        return loss / (labels != PAD).sum()


class FusedQkv(Contender):
    """qkv's fused pass over packed batches, replayed as CUDA graphs on a GPU."""

    def __init__(self) -> None:
        super().__init__(OURS, "captured")

    def prepare(self, subject: TrainingSetup) -> None:
        self.model = copy.deepcopy(subject.model).to(subject.device).train()
        optimizer = optimizer_for(self.model, subject.spec)
        dtype = torch.bfloat16 if subject.device.type == "cuda" else torch.float32
        self.graphs = CudaGraphs(self.model, optimizer, None, subject.spec, pad=PAD, dtype=dtype)
        self.steps = 0

    def collate(self, batch: Batch) -> PackedBatch:
        real = batch.labels != PAD
        lengths = [side.numpy() - 1 for side in (batch.lengths, real.sum(1))]  # without </s>
        rows = [
            np.concatenate([row[:length] for row, length in zip(ids.numpy(), own, strict=True)])
            for ids, own in zip((batch.source, batch.labels), lengths, strict=True)
        ]
        return pack(*map(Rows, rows, lengths), bos=BOS, eos=EOS, pad=PAD, step=STEP)

    def step(self, batch: PackedBatch) -> int:
        self.steps += 1
        self.graphs.add_gradient(batch, self.steps)
        self.graphs.update(rate=RATE)
        return batch.tokens

    def close(self) -> None:
        self.model = self.graphs = None  # type: ignore[assignment]


def contenders(device: torch.device, peers: Sequence[ModuleType] = ()) -> list[Contender]:
    """Return all contenders; the first, qkv's plain model, is the reference for the logits."""
    everyone: list[Contender] = [PlainQkv(), FusedQkv()] if device.type == "cuda" else [PlainQkv()]
    return [*everyone, *(contender for peer in peers for contender in peer.training())]
