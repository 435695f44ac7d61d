"""Engines that decode the same weights: qkv in all its settings, and what a setting of other software has.

A setting is a name and a function that opens a run as a decode function, from sentences to tokens. `open` raises
`UsageError` if the engine is not installed or does not support the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from qkv import presets
from qkv.assembly import Run, open_run, start_search_for
from qkv.core import files
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchOptions
from qkv.core.tokenizer import BOS, EOS, PAD, PRINTABLE, SPECIALS, Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.engines.cpu import pack
from qkv.engines.cpu.native_search import ProcessDecoding
from qkv.engines.cuda_decoding.continuous_batching import MOST, SlotDecoding
from qkv.lab.peers import OURS
from qkv.options import Config, ModelConfig, TransformerConfig
from qkv.worker_pool import ProcessWorkers

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


def settings(device: torch.device, peers: Sequence[ModuleType] = (), threads: int = 0) -> list[Setting]:
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


# ---- qkv -------------------------------------------------------------------------------------------------------------


def _plain(subject: DecodingSetup, dtype: torch.dtype = torch.float32) -> DecodeFunction:
    return search_with(subject.run.model(subject.device).to(dtype), subject)


def _packed(subject: DecodingSetup, dtype: str) -> DecodeFunction:
    packed: Any = pack(subject.model, dtype)
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


# ---- random weights --------------------------------------------------------------------------------------------------


SIZES: dict[str, tuple[ModelConfig, int]] = {  # the model, and its vocabulary
    "small": (TransformerConfig(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3), 8000),
    "base": (presets.paper_base().model, 37_000),
    "demo": (presets.demo().model, 2000),
}


def make_random_run(size: str, folder: Path, *, seed: int = 0) -> Run:
    """Create a run folder with random weights of a size: `small`, `base` or `demo`."""
    if size not in SIZES:
        raise UsageError(f"--model {size}: choose one of {', '.join(SIZES)}")
    spec, vocab = SIZES[size]
    assert isinstance(spec, TransformerConfig)
    # With a random embedding tied to the output, each word would be followed by itself.
    settings = Config(model=spec).replace(model={"tie": "none", "dropout": 0.0})
    assert isinstance(settings.model, TransformerConfig)
    tokenizer = Tokenizer("word", [f"{i:06d}" for i in range(vocab - len(SPECIALS) - len(PRINTABLE))])
    torch.manual_seed(seed)
    model = Transformer(settings.model, vocab, vocab)
    suppress_end_token(model)
    run = Run.create(folder, settings, TokenizerPair(tokenizer, tokenizer))
    files.write_tensors(folder / "weights" / "best.safetensors", dict(model.named_parameters()))
    return run


def suppress_end_token(model: Transformer) -> None:
    """Make <pad>, <s> and </s> practically impossible: their logits are always -32.

    The last norm gives a constant 4 in one of its d_model outputs, where alone these tokens have a weight, -8.
    """
    last = model.decoder_norm if model.config.norm == "pre" else model.decoder[-1].residuals[-1].norm
    assert isinstance(last, nn.LayerNorm)
    with torch.no_grad():
        last.weight[0], last.bias[0] = 0.0, 4.0
        for token in (PAD, BOS, EOS):
            model.output.weight[token] = 0.0
            model.output.weight[token, 0] = -8.0


def random_sentences(run: Run, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Return `count` random sources of exactly `length` tokens."""
    draws = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(EOS + 1, run.tokenizers.src.size, (count, length), generator=draws).tolist()
    return drawn
