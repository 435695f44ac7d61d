"""Engines that decode the same weights: qkv in all its settings, CTranslate2, transformers, torch.nn.Transformer.

A setting is a name and a function that opens a run as a decode function, from sentences to tokens. To add an engine,
add a setting to `settings`. `open` raises `UsageError` if the engine is not installed or does not support the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qkv import presets
from qkv.assembly import Run, open_run, start_search_for
from qkv.core import files
from qkv.core.batches import pad
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchOptions
from qkv.core.tokenizer import BOS, EOS, PAD, PRINTABLE, SPECIALS, Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.data.subwords import unique_names
from qkv.engines.cpu import pack
from qkv.engines.cpu.native_search import ProcessDecoding
from qkv.engines.cuda_decoding.continuous_batching import MOST, SlotDecoding
from qkv.interop import import_optional
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.huggingface import to_huggingface
from qkv.lab.training_contenders import TorchTransformer
from qkv.options import Config, ModelConfig, TransformerConfig
from qkv.worker_pool import ProcessWorkers

Sources = Sequence[Sequence[int]]
Outputs = list[list[list[int]]]  # hypotheses per sentence, best first, with </s> if generated

OURS, TRANSFORMERS, CTRANSLATE2, TORCH = "qkv", "transformers", "CTranslate2", "torch.nn.Transformer"
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

    @cached_property
    def exported(self) -> Path:
        """The weights in CTranslate2's format."""
        to_ctranslate2(self.model, self.run.tokenizers, self.folder / "ctranslate2")
        return self.folder / "ctranslate2"


@dataclass(frozen=True)
class Setting:
    """An engine with its options."""

    engine: str
    how: str
    open: Callable[[DecodingSetup], DecodeFunction]
    exact: bool = False  # computes in fp32, so its tokens must equal the reference
    most: int = 0  # maximum sentences per round of a slow engine; 0: no limit

    @property
    def name(self) -> str:
        return f"{self.engine} {self.how}"


def settings(device: torch.device, threads: int = 0) -> list[Setting]:
    """Return all settings for a device; the first is the reference for the outputs."""
    return _on_cpu(threads or torch.get_num_threads()) if device.type == "cpu" else _on_gpu()


def _on_cpu(threads: int) -> list[Setting]:
    one = f"{threads} thread{'s' * (threads > 1)}"
    available = [Setting(OURS, f"fp32, {one}", _plain, exact=True)]
    for dtype in ("fp32", "bf16", "int8"):
        available.append(Setting(OURS, f"packed {dtype}, {one}", partial(_packed, dtype=dtype), exact=dtype == "fp32"))
        if threads > 1:
            several = partial(_in_processes, dtype=dtype, processes=threads)
            available.append(Setting(OURS, f"packed {dtype}, {threads} processes", several, exact=dtype == "fp32"))
    for dtype in ("float32", "int8"):
        for replicas in sorted({1, threads}):
            how = f"{dtype}, {replicas} × {threads // replicas}"
            opened = partial(_ctranslate2, dtype=dtype, replicas=replicas, threads=threads // replicas)
            available.append(Setting(CTRANSLATE2, how, opened, exact=dtype == "float32"))
    available.append(Setting(TRANSFORMERS, f"fp32, {one}", _transformers, exact=True))
    available.append(Setting(TORCH, f"fp32, no cache, {one}", _without_cache, exact=True, most=64))
    return available


def _on_gpu() -> list[Setting]:
    available = []
    for name, numbers in FLOATS.items():
        available.append(Setting(OURS, name, partial(_plain, dtype=numbers), exact=name == "fp32"))
        available.append(Setting(OURS, f"{name}, captured", partial(_captured, dtype=numbers), exact=name == "fp32"))
    for dtype in ("float32", "bfloat16", "int8_bfloat16"):
        opened = partial(_ctranslate2, dtype=dtype, replicas=1, threads=1)
        available.append(Setting(CTRANSLATE2, dtype, opened, exact=dtype == "float32"))
    for name, numbers in FLOATS.items():
        available.append(Setting(TRANSFORMERS, name, partial(_transformers, dtype=numbers), exact=name == "fp32"))
    available.append(Setting(TORCH, "fp32, no cache", _without_cache, exact=True, most=64))
    return available


# ---- qkv -------------------------------------------------------------------------------------------------------------


def _plain(subject: DecodingSetup, dtype: torch.dtype = torch.float32) -> DecodeFunction:
    return _search_with(subject.run.model(subject.device).to(dtype), subject)


def _packed(subject: DecodingSetup, dtype: str) -> DecodeFunction:
    packed: Any = pack(subject.model, dtype)
    if packed.engine.dtype != dtype:
        raise UsageError(packed.engine.reason)
    return _search_with(packed, subject)


def _captured(subject: DecodingSetup, dtype: torch.dtype) -> DecodeFunction:
    """Search steps as CUDA graphs, with as many slots as sentences, up to the maximum."""
    model: Any = subject.run.model(subject.device).to(dtype)
    slots = SlotDecoding(model, subject.run.tokenizers)

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        options = _options(sources, task)
        outputs: Outputs = [[] for _ in sources]
        for batch in _batches(sources, task.batch if task.batch < MOST else len(sources)):
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


def _without_cache(subject: DecodingSetup) -> DecodeFunction:
    return _search_with(TorchTransformer(subject.model).to(subject.device).eval(), subject)


def _search_with(model: Any, subject: DecodingSetup) -> DecodeFunction:
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


def _batches(sources: Sources, size: int) -> Iterator[list[int]]:
    """Return indices of batches of `size` sentences, longest first."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    return (order[start : start + size] for start in range(0, len(order), size))


def _outputs(results: list[list[Hypothesis]]) -> Outputs:
    return [[[*hypothesis.tokens, EOS] for hypothesis in hypotheses] for hypotheses in results]


# ---- other engines ---------------------------------------------------------------------------------------------------


def _ctranslate2(subject: DecodingSetup, dtype: str, replicas: int, threads: int) -> DecodeFunction:
    package = import_optional("ctranslate2")
    device, ours = subject.device.type, torch.get_num_threads()
    try:
        if dtype not in package.get_supported_compute_types(device):
            raise UsageError(f"ctranslate2 does not support {dtype} on this {device}")
        translator = package.Translator(
            str(subject.exported),
            device=device,
            device_index=subject.device.index or 0,
            compute_type=dtype,
            inter_threads=replicas,
            intra_threads=threads,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"ctranslate2 cannot use this {device}: {error}") from None
    finally:
        torch.set_num_threads(ours)  # ctranslate2 shares OpenMP with torch and changes its number of threads
    names = unique_names(subject.run.tokenizers.src)
    ids = {name: token for token, name in enumerate(unique_names(subject.run.tokenizers.tgt))}

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        results = translator.translate_batch(
            [[names[token] for token in (*source, EOS)] for source in sources],
            max_batch_size=task.batch,
            beam_size=task.beam,
            num_hypotheses=task.n_best,
            length_penalty=0.0,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(map(len, sources)) + task.extra,
            return_end_token=True,
        )
        return [[[ids[name] for name in tokens] for tokens in each.hypotheses] for each in results]

    return decode


def _transformers(subject: DecodingSetup, dtype: torch.dtype = torch.float32) -> DecodeFunction:
    model = to_huggingface(subject.model).to(subject.device, dtype)

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        outputs: Outputs = [[] for _ in sources]
        for batch in _batches(sources, task.batch):
            generated = generate([sources[i] for i in batch], task)
            for i, hypotheses in zip(batch, generated, strict=True):
                outputs[i] = hypotheses
        return outputs

    def generate(sources: Sources, task: DecodingTask) -> Outputs:
        source = pad([np.asarray(row) for row in sources], PAD, last=EOS).to(subject.device)
        options: dict[str, Any] = {"num_beams": task.beam, "num_return_sequences": task.n_best}
        if task.beam > 1:
            options["length_penalty"] = 0.0
        rows = model.generate(
            source,
            attention_mask=(source != PAD).long(),
            do_sample=False,
            max_new_tokens=max(map(len, sources)) + task.extra + 1,
            **options,
        ).tolist()
        texts = [row[1 : row.index(EOS) + 1] for row in rows]  # without <s> and padding
        return [texts[i : i + task.n_best] for i in range(0, len(texts), task.n_best)]

    return decode


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
