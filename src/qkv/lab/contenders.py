"""Settings that `qkv lab speed` compares: qkv's own, those of other software, how they are found, timed and compared.

A `Setting` opens a setup: for training as a `TrainingLoop`, for decoding as a function from sentences to tokens. It
raises `UsageError` if a package is not installed or does not support the model. All loops use torch's fused Adam; on a
GPU bf16 with fp32 weights, on a CPU fp32.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
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
from qkv.lab.result_tables import ResultTable
from qkv.options import TrainConfig
from qkv.training.unpadded import loss_in_parts
from qkv.worker_pool import ProcessWorkers

OURS = "qkv"
PEERS = Path("benchmarks/peers")  # in a checkout: other software, one module each
AT_LEAST = 3  # rounds
STEP = 256  # packed batches are padded to a multiple of this many tokens, to limit the number of shapes
RATE = 1e-4  # constant learning rate; only speed matters


@dataclass(frozen=True)
class Setting:
    """An engine with its options."""

    engine: str
    how: str
    open: Callable[[Any], Any]  # from a TrainingSetup to a TrainingLoop, or from a DecodingSetup to a DecodeFunction
    exact: bool = False  # its logits in training, its tokens in decoding must equal the reference
    most: int = 0  # maximum sentences per round of a slow engine; 0: no limit
    one_batch: bool = False  # where all batches are equal, one per round is enough

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSetup:
    """Weights, device and options that all loops share."""

    model: Transformer  # on the CPU; loops copy it
    device: torch.device
    width: int  # of a batch: the longest sentence
    spec: TrainConfig


class TrainingLoop:
    """A model on its device with its optimizer: `logits` for the comparison and `step` for the timing."""

    model: Any  # from (source, lengths, target) to logits

    def collate(self, batch: Batch) -> Any:
        """Convert a batch to the loop's format on the host; not timed, a loader thread would do it."""
        return batch

    def logits(self, batch: Batch) -> Tensor:
        """Return logits (batch, target, vocab) in fp32 without dropout."""
        self.model.eval()
        with torch.no_grad():
            logits: Tensor = self.model(*batch.inputs)
        self.model.train()
        return logits

    def step(self, batch: Any) -> int:
        """Update the weights once and return the number of target tokens; need not synchronise."""
        raise NotImplementedError


class PlainQkv(TrainingLoop):
    """The usual training loop (loss under autocast, backward, fused Adam), by default over qkv's plain model."""

    def __init__(self, setup: TrainingSetup, model: nn.Module | None = None) -> None:
        self.device, self.smoothing = setup.device.type, setup.spec.label_smoothing
        self.model = (model or copy.deepcopy(setup.model)).to(setup.device).train()
        betas = (setup.spec.beta1, setup.spec.beta2)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, betas=betas, eps=setup.spec.eps, fused=True)

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the mean loss over tokens without padding, in parts: all logits are never held at once."""
        hidden = self.model.hidden_at(labels != PAD, *batch)
        loss, _ = loss_in_parts(hidden, self.model.output.weight, labels, smoothing=self.smoothing, pad=PAD)
        return loss / (labels != PAD).sum()

    def step(self, batch: Batch) -> int:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.loss(batch.inputs, batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return batch.tokens


class FusedQkv(TrainingLoop):
    """qkv's fused pass over packed batches, replayed as CUDA graphs on a GPU."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.model = copy.deepcopy(setup.model).to(setup.device).train()
        optimizer = optimizer_for(self.model, setup.spec)
        dtype = torch.bfloat16 if setup.device.type == "cuda" else torch.float32
        self.graphs = CudaGraphs(self.model, optimizer, None, setup.spec, pad=PAD, dtype=dtype)
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


def training_settings(device: torch.device, peers: Sequence[ModuleType] = ()) -> list[Setting]:
    """Return the engines to time, of qkv and its peers; the first, qkv's plain model, is the reference for logits."""
    ours = [Setting(OURS, "plain", PlainQkv, exact=True)]
    if device.type == "cuda":
        ours.append(Setting(OURS, "captured", FusedQkv, exact=True))
    return [*ours, *(setting for peer in peers for setting in peer.training())]


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


def decoding_settings(device: torch.device, peers: Sequence[ModuleType] = (), threads: int = 0) -> list[Setting]:
    """Return all settings for a device; the first is the reference for the outputs."""
    threads = threads or torch.get_num_threads()
    ours = _on_cpu(threads) if device.type == "cpu" else _on_gpu()
    return [*ours, *(setting for peer in peers for setting in peer.decoding(device, threads))]


def _on_cpu(threads: int) -> list[Setting]:
    one = f"{threads} thread{'s' * (threads > 1)}"
    available = [Setting(OURS, f"fp32, {one}", _plain, exact=True)]
    for dtype in ("fp32", "bf16", "int8"):
        ways = {one: partial(_packed, dtype=dtype)}
        if threads > 1:
            ways[f"{threads} processes"] = partial(_in_processes, dtype=dtype, processes=threads)
        available += [Setting(OURS, f"packed {dtype}, {how}", way, exact=dtype == "fp32") for how, way in ways.items()]
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
        size = task.batch if task.batch < MOST else len(sources)
        return in_batches(sources, size, lambda batch: _outputs(slots.search_all(batch, options)))

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


def in_batches(sources: Sources, size: int, decode: Callable[[Sources], Outputs]) -> Outputs:
    """Decode batches of `size` sentences, longest first; return the outputs in the order of the sentences."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    outputs: Outputs = [[] for _ in sources]
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        for i, hypotheses in zip(batch, decode([sources[i] for i in batch]), strict=True):
            outputs[i] = hypotheses
    return outputs


def _outputs(results: list[list[Hypothesis]]) -> Outputs:
    return [[[*hypothesis.tokens, EOS] for hypothesis in hypotheses] for hypotheses in results]


# ---- other software --------------------------------------------------------------------------------------------------


def find_peers(folder: Path, what: str) -> list[ModuleType]:
    """Return the modules of the folder that define `what` (training or decoding); say so if there is no folder."""
    if not folder.is_dir():
        say(f"{folder}: no such folder, so qkv is measured alone; a checkout has other software in {PEERS} (--peers)")
        return []
    return [module for module in _load_modules(folder.resolve()) if hasattr(module, what)]


@cache
def _load_modules(folder: Path) -> list[ModuleType]:
    """Import the modules of exactly this folder as a package; the search path of Python does not matter."""
    package = ModuleType(f"{folder.name} of {folder.parent}".replace(".", "_"))
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return [import_module(f"{package.__name__}.{path.stem}") for path in sorted(folder.glob("[!_]*.py"))]


def select(available: Sequence[Setting], only: Sequence[str], what: str) -> list[Setting]:
    """Return those with one of the words of --only in their name; without words, all."""
    selected = [each for each in available if not only or any(word in each.name for word in only)]
    if not selected:
        names = "; ".join(each.name for each in available)
        raise UsageError(f"--only {' '.join(only)}: no {what} has such a name; choose among {names}")
    return selected


# ---- timing and comparing --------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class Timed:
    """A setting with its speed in tokens per second in each round."""

    setting: Setting
    speeds: list[float] = field(default_factory=list, kw_only=True)

    @property
    def name(self) -> str:
        return self.setting.name

    def run(self) -> None:
        """Run and time one round."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.setting.engine,
            "tokens_per_second": statistics.median(self.speeds),
            "low": min(self.speeds),
            "high": max(self.speeds),
            "rounds": len(self.speeds),
        }


def run_in_turns(rows: Sequence[Timed], seconds: float, about: str = "") -> None:
    """Run all rows in turn, round after round, for `seconds` per row and at least three rounds."""
    started = time.perf_counter()
    while rows and (time.perf_counter() < started + seconds * len(rows) or len(rows[0].speeds) < AT_LEAST):
        for row in rows:
            row.run()
        say(f"{about}{len(rows[0].speeds)} rounds in {time.perf_counter() - started:.0f} s")


def ratios(rows: Sequence[Timed]) -> list[dict[str, Any]]:
    """Compare qkv's row of highest median speed with that of each other engine, round by round."""
    fastest = {row.setting.engine: row for row in sorted(rows, key=lambda row: statistics.median(row.speeds))}
    if OURS not in fastest:
        return []
    ours = fastest.pop(OURS)
    compared = []
    for theirs in fastest.values():
        each = [a / b for a, b in zip(ours.speeds, theirs.speeds, strict=False)]  # groups may differ in rounds
        spread = {"ratio": statistics.median(each), "low": min(each), "high": max(each)}
        compared.append({"peer": theirs.setting.engine, "ours": ours.name, "theirs": theirs.name} | spread)
    return compared


def ratio_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[ResultTable]:
    return [ResultTable("fastest qkv against the fastest of each other engine", columns, rows)] if rows else []


def median_and_range(row: dict[str, Any]) -> str:
    """Format a speed or a ratio."""
    if "ratio" in row:
        return f"{row['ratio']:.2f} × ({row['low']:.2f} – {row['high']:.2f})"
    return f"{row['tokens_per_second']:,.0f} ({row['low']:,.0f} – {row['high']:,.0f})"


def surroundings(peers: Sequence[ModuleType]) -> dict[str, Any]:
    """Return the versions of the peers' packages, and the cores and threads."""
    versions = {}
    for package in [module.PACKAGE for module in peers if hasattr(module, "PACKAGE")]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def remarks_on(result: dict[str, Any]) -> list[str]:
    """Return what every table of speeds says about its surroundings and about what was not measured."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"{result['cores']} cores, {result['threads']} threads; {versions}",
        *(f"not measured: {name}: {reason}" for name, reason in result["missing"].items()),
    ]
