"""Ways to train and to decode the same model: qkv's own, and what the ways of other software have in common with them.

A contender in training has three methods: `prepare` on the shared weights, `logits`, and `step`. All use torch's fused
Adam; on a GPU bf16 with fp32 weights, on a CPU fp32. A setting in decoding has a function that opens a run as a decode
function, from sentences to tokens. `prepare` and `open` raise `UsageError` if a package is not installed or does not
support the model.
"""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.assembly import Run, open_run, optimizer_for, start_search_for
from qkv.console import say
from qkv.core.batches import Batch
from qkv.core.dataset import Rows
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchOptions
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.engines.cpu import pack as pack_matrices
from qkv.engines.cpu.native_search import ProcessDecoding
from qkv.engines.cuda_decoding.continuous_batching import MOST, SlotDecoding
from qkv.engines.cuda_training.cuda_trainer import CudaGraphs
from qkv.engines.cuda_training.packed_batch import PackedBatch, pack
from qkv.options import TrainConfig
from qkv.training.memory_limits import loss_in_parts
from qkv.worker_pool import ProcessWorkers

OURS = "qkv"
PEERS = Path("benchmarks/peers")  # in a checkout: other software, one module each
STEP = 256  # packed batches are padded to a multiple of this many tokens, to limit the number of shapes
RATE = 1e-4  # constant learning rate; only speed matters

# ---- training --------------------------------------------------------------------------------------------------------


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


def training_contenders(device: torch.device, peers: Sequence[ModuleType] = ()) -> list[Contender]:
    """Return all contenders; the first, qkv's plain model, is the reference for the logits."""
    everyone: list[Contender] = [PlainQkv(), FusedQkv()] if device.type == "cuda" else [PlainQkv()]
    return [*everyone, *(contender for peer in peers for contender in peer.training())]


# ---- decoding --------------------------------------------------------------------------------------------------------

Sources = Sequence[Sequence[int]]
Outputs = list[list[list[int]]]  # hypotheses per sentence, best first, with </s> if generated

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class DecodingTask:
    """Search options for all engines; no length penalty, because its definition differs between engines."""

    beam: int
    batch: int  # sentences per batch
    extra: int  # maximum tokens of an output beyond its source
    n_best: int = 1


DecodeFunction = Callable[[Sources, DecodingTask], Outputs]


@dataclass(frozen=True)
class DecodingSetup:
    """A run folder on a device, shared by all engines, and a folder for their converted files."""

    run: Run
    device: torch.device
    folder: Path

    @cached_property
    def model(self) -> Transformer:
        model = self.run.model(self.device)
        if not isinstance(model, Transformer):
            raise UsageError(
                f"{self.run.path}: not a Transformer for translation, which the other engines require: give another run"
            )
        return model


@dataclass(frozen=True)
class Setting:
    """An engine with its options."""

    engine: str
    how: str
    open: Callable[[DecodingSetup], DecodeFunction]
    exact: bool = False  # computes in fp32, so its tokens must equal the reference
    most: int = 0  # maximum sentences per round of a slow engine; 0: no limit
    one_batch: bool = False  # where all batches are equal, one per round is enough

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"


def decoding_settings(device: torch.device, peers: Sequence[ModuleType] = (), threads: int = 0) -> list[Setting]:
    """Return all settings for a device; the first is the reference for the outputs."""
    threads = threads or torch.get_num_threads()
    ours = _on_cpu(threads) if device.type == "cpu" else _on_gpu()
    return [*ours, *(setting for peer in peers for setting in peer.decoding(device, threads))]


def _on_cpu(threads: int) -> list[Setting]:
    one = f"{threads} thread{'s' * (threads > 1)}"
    available = [Setting(OURS, f"fp32, {one}", _plain, exact=True)]
    for dtype in ("fp32", "bf16", "int8"):
        available.append(Setting(OURS, f"packed {dtype}, {one}", partial(_packed, dtype=dtype), exact=dtype == "fp32"))
        if threads > 1:
            several = partial(_in_processes, dtype=dtype, processes=threads)
            available.append(Setting(OURS, f"packed {dtype}, {threads} processes", several, exact=dtype == "fp32"))
    return available


def _on_gpu() -> list[Setting]:
    available = []
    for name, numbers in FLOATS.items():
        available.append(Setting(OURS, name, partial(_plain, dtype=numbers), exact=name == "fp32"))
        available.append(Setting(OURS, f"{name}, captured", partial(_captured, dtype=numbers), exact=name == "fp32"))
    return available


def _plain(subject: DecodingSetup, dtype: torch.dtype = torch.float32) -> DecodeFunction:
    return search_with(subject.run.model(subject.device).to(dtype), subject)


def _packed(subject: DecodingSetup, dtype: str) -> DecodeFunction:
    packed: Any = pack_matrices(subject.model, dtype)
    if packed.engine.dtype != dtype:
        raise UsageError(packed.engine.reason)
    return search_with(packed, subject)


def _captured(subject: DecodingSetup, dtype: torch.dtype) -> DecodeFunction:
    """Search steps as CUDA graphs, with as many slots as sentences, up to the maximum."""
    model: Any = subject.run.model(subject.device).to(dtype)
    slots = SlotDecoding(model, subject.run.tokenizers)

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        options = _options(sources, task)
        outputs: Outputs = [[] for _ in sources]
        for batch in batches_of(sources, task.batch if task.batch < MOST else len(sources)):
            rows = [sources[i] for i in batch]
            for i, hypotheses in zip(batch, _outputs(slots.search_all(rows, options)), strict=True):
                outputs[i] = hypotheses
        return outputs

    return decode


def _in_processes(subject: DecodingSetup, dtype: str, processes: int) -> DecodeFunction:
    _packed(subject, dtype)  # raises here, because worker processes would not report it
    workers = ProcessWorkers(processes, open_run, str(subject.run.path), "", dtype)

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        return _outputs(ProcessDecoding(workers).search_all(sources, _options(sources, task)))

    return decode


def search_with(model: Any, subject: DecodingSetup) -> DecodeFunction:
    """Decode with qkv's search over any model that encodes and steps."""
    tokenizers, device = subject.run.tokenizers, subject.device

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        start = start_search_for(device)
        return _outputs(search_all(model, sources, _options(sources, task), tokenizers, device=device, start=start))

    return decode


def _options(sources: Sources, task: DecodingTask) -> SearchOptions:
    """Return search options with a token budget for `task.batch` sentences of mean length."""
    tokens = sum(len(source) + 1 for source in sources) / len(sources)
    budget = max(int(tokens * task.batch), max(len(source) + 1 for source in sources)) * max(task.beam, task.n_best)
    return SearchOptions(
        beam=task.beam, n_best=task.n_best, length_penalty="none", extra_length=task.extra, batch_tokens=budget
    )


def batches_of(sources: Sources, size: int) -> Iterator[list[int]]:
    """Return indices of batches of `size` sentences, longest first."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    return (order[start : start + size] for start in range(0, len(order), size))


def _outputs(results: list[list[Hypothesis]]) -> Outputs:
    return [[[*hypothesis.tokens, EOS] for hypothesis in hypotheses] for hypotheses in results]


# ---- other software --------------------------------------------------------------------------------------------------

C = TypeVar("C", Contender, Setting)


def find_peers(folder: Path, what: str) -> list[ModuleType]:
    """Return the modules of the folder that define `what` (training or decoding); say so if there is no folder."""
    if not folder.is_dir():
        say(f"{folder}: no such folder, so qkv is measured alone; a checkout has other software in {PEERS} (--peers)")
        return []
    return [module for module in _load_modules(folder.resolve()) if hasattr(module, what)]


@cache
def _load_modules(folder: Path) -> list[ModuleType]:
    """Execute the modules of exactly this folder; the search path of Python does not matter."""
    modules = []
    for path in sorted(folder.glob("[!_]*.py")):
        spec = spec_from_file_location(f"{folder.name}.{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


def package_versions(peers: Sequence[ModuleType]) -> dict[str, str]:
    """Return the installed version of each peer's package."""
    versions = {}
    for package in [module.PACKAGE for module in peers if hasattr(module, "PACKAGE")]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def select(available: Sequence[C], only: Sequence[str], what: str) -> list[C]:
    """Return those with one of the words of --only in their name; without words, all."""
    selected = [each for each in available if not only or any(word in each.name for word in only)]
    if not selected:
        names = "; ".join(each.name for each in available)
        raise UsageError(f"--only {' '.join(only)}: no {what} has such a name; choose among {names}")
    return selected
