"""Training speed of qkv and of other implementations, on the same weights and batches.

First the logits are compared. Then all contenders run in turn, round after round, so that disturbances by other
programs affect all equally. Speed is in target tokens per second; padding counts neither as tokens nor as arithmetic.
The share of the peak is the arithmetic of the model (6 operations per token and weight, plus attention) divided by the
speed of one large matrix product on the same device.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.assembly import parameter_count
from qkv.console import say
from qkv.core.batches import Batch
from qkv.core.device import choose_device
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.core.transformer import Transformer
from qkv.lab import contenders, result_tables
from qkv.lab.contenders import OURS, Contender, TrainingSetup
from qkv.lab.result_tables import ResultTable
from qkv.options import TrainConfig, TransformerConfig

SIZES: dict[str, tuple[TransformerConfig, int]] = {  # the model, and its vocabulary
    "tiny": (TransformerConfig(d_model=128, d_ff=256, heads=4, encoder_layers=4, decoder_layers=4), 10_000),
    "small": (TransformerConfig(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3), 8_000),
    "base": (TransformerConfig(), 37_000),
    "big": (TransformerConfig(d_model=1024, d_ff=4096, heads=16), 37_000),
}
TOKENS = {"cpu": 2_048, "gpu": 25_000}  # per side of a batch, without padding
SHORTEST, LONGEST = 24, 32  # tokens per sentence, including </s>
BATCHES = 8
WARM_UP = 3  # untimed steps
ROUND = 0.5  # seconds per contender and round, at least one step
COMPARED = 8  # sentences for the comparison of logits
TOLERANCE = 1e-3  # maximum difference in fp32, relative to the largest logit
PEAK = {"cpu": (1024, torch.float32), "gpu": (8192, torch.bfloat16)}  # size and dtype of the matrix product


@dataclass
class Measurement:
    """A contender with its measured speed and memory."""

    contender: Contender
    device: torch.device
    feed: Iterator[Any]
    warm_up: float = 0.0  # seconds of preparation, compilation and first steps
    memory: int | None = None  # peak bytes, on a GPU
    steps: int = 1  # per round
    speeds: list[float] = field(default_factory=list)  # target tokens per second of each round
    rates: list[float] = field(default_factory=list)  # steps per second
    stalls: list[float] = field(default_factory=list)  # share of time spent waiting for batches

    @property
    def engine(self) -> str:
        return self.contender.engine

    def run(self) -> None:
        """Run and time one round."""
        tokens, stalled = 0, 0.0
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self.steps):
            requested = time.perf_counter()
            batch = next(self.feed)
            stalled += time.perf_counter() - requested
            tokens += self.contender.step(batch)
        synchronize(self.device)
        seconds = time.perf_counter() - started
        self.speeds.append(tokens / seconds)
        self.rates.append(self.steps / seconds)
        self.stalls.append(stalled / seconds)

    def to_dict(self, work: float, peak: float) -> dict[str, Any]:
        """Return the results; `work` is in FLOPs per target token, `peak` in FLOPs per second."""
        speed = statistics.median(self.speeds)
        return {
            "contender": self.contender.name,
            "engine": self.engine,
            "tokens_per_second": speed,
            "low": min(self.speeds),
            "high": max(self.speeds),
            "steps_per_second": statistics.median(self.rates),
            "peak_share": speed * work / peak,
            "stall_share": statistics.median(self.stalls),
            "warm_up_seconds": self.warm_up,
            "memory": self.memory,
            "same_weights": self.contender.exact,
            "rounds": len(self.speeds),
        }


def measure_training(
    *,
    model: str = "",
    tokens: int = 0,
    only: Sequence[str] = (),
    seconds: float = 10.0,
    device: str = "auto",
    outputs: Sequence[str] = (),
    command: str = "",
    folder: Path = contenders.PEERS,
) -> dict[str, Any]:
    """Measure training speed, print tables and write .json or .md files.

    `only` selects contenders by words in their names; `folder` has the  In the result, `rows` has every
    contender, `ratios` the fastest of qkv against the fastest of each other implementation, `missing` the reasons for
    contenders that did not run.
    """
    result_tables.check_outputs(outputs)
    chosen = choose_device(device)
    place = "gpu" if chosen.type == "cuda" else "cpu"
    size = model or ("base" if place == "gpu" else "small")
    if size not in SIZES:
        raise UsageError(f"--model {size}: choose one of {', '.join(SIZES)}")
    tokens = tokens or TOKENS[place]
    if tokens < LONGEST:
        raise UsageError(f"--tokens {tokens}: give at least {LONGEST}, the length of one sentence")
    modules = contenders.find_peers(folder, "training")
    selected = contenders.select(contenders.training_contenders(chosen, modules), only, "contender")
    spec, vocab = SIZES[size]
    torch.manual_seed(0)
    subject = TrainingSetup(Transformer(spec, vocab, vocab), chosen, LONGEST, TrainConfig())
    batches = random_batches(vocab, tokens)
    peak = matrix_peak(chosen)
    rows, missing = _measure_all(selected, subject, batches, seconds)
    peak = max(peak, matrix_peak(chosen))  # the clock may have been lower before
    useful = sum(batch.tokens for batch in batches)
    work = sum(training_operations(spec, vocab, batch) for batch in batches) / useful
    result = result_tables.provenance(device, command) | {
        "versions": contenders.package_versions(modules),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "model": f"{size}, {parameter_count(subject.model):,} parameters, vocabulary {vocab:,}",
        "batch": f"{useful / len(batches):,.0f} target tokens, lengths {SHORTEST}–{LONGEST}",
        "precision": "bf16" if place == "gpu" else "fp32",
        "pad_share": pad_share(batches),
        "peak_flops": peak,
        "flops_per_token": work,
        "rows": [row.to_dict(work, peak) for row in rows],
        "ratios": _ratios(rows),
        "missing": missing,
    }
    result_tables.publish(result, _result_tables(result), _remarks(result), outputs)
    return result


# ---- batches ---------------------------------------------------------------------------------------------------------


def random_batches(vocab: int, tokens: int, *, count: int = BATCHES, seed: int = 0) -> list[Batch]:
    """Return random batches of one shape, with about `tokens` tokens per side without padding."""
    draws = torch.Generator().manual_seed(seed)
    rows = max(1, round(2 * tokens / (SHORTEST + LONGEST)))

    def side() -> tuple[Tensor, Tensor]:
        lengths = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=draws)
        ids = torch.randint(EOS + 1, vocab, (rows, LONGEST), generator=draws)
        position = torch.arange(LONGEST)
        ids[position == lengths[:, None] - 1] = EOS
        return ids.masked_fill(position >= lengths[:, None], PAD), lengths  # (rows, LONGEST), (rows,)

    batches = []
    for _ in range(count):
        source, lengths = side()
        labels, target_lengths = side()
        target = labels.roll(1, dims=1)
        target[:, 0] = BOS
        target = target.masked_fill(torch.arange(LONGEST) >= target_lengths[:, None], PAD)
        batches.append(Batch((source, lengths, target), labels, int(target_lengths.sum())))
    return batches


def pad_share(batches: Sequence[Batch]) -> float:
    """Return the share of padding in both sides."""
    cells = sum(batch.source.numel() + batch.labels.numel() for batch in batches)
    return 1 - sum(int(batch.lengths.sum()) + batch.tokens for batch in batches) / cells


def batch_stream(batches: Sequence[Any], device: torch.device) -> Iterator[Any]:
    """Repeat the batches endlessly; each is copied to the device on demand."""
    return (batch.to(device) for batch in cycle(batches))


def training_operations(spec: TransformerConfig, vocab: int, batch: Batch) -> float:
    """Return the FLOPs of forward and backward pass on a batch, without padding.

    6 per matrix weight and token: source tokens use the encoder and W^K, W^V of cross-attention; target tokens use the
    rest of the decoder and the output projection. QKᵀ and AV cost 12 · d per pair of query and key, for half of the
    pairs under causal masking. Embedding lookups cost nothing.
    """
    sources, targets = batch.lengths.double(), (batch.labels != PAD).sum(1).double()
    d, width = spec.d_model, spec.heads * (spec.key_width + spec.value_width)
    keys_values, attention = d * width, 2 * d * width
    feed_forward = (3 if spec.activation == "swiglu" else 2) * d * spec.d_ff
    encoder = spec.encoder_layers * (attention + feed_forward) + spec.decoder_layers * keys_values
    decoder = spec.decoder_layers * (2 * attention - keys_values + feed_forward) + vocab * d
    pairs = spec.encoder_layers * sources.square() + spec.decoder_layers * (targets.square() / 2 + sources * targets)
    return float(6 * (encoder * sources.sum() + decoder * targets.sum() + width * pairs.sum()))


# ---- measurement -----------------------------------------------------------------------------------------------------


def matrix_peak(device: torch.device) -> float:
    """Return the FLOPs per second of one large matrix product, the best of six."""
    rows, numbers = PEAK["gpu" if device.type == "cuda" else "cpu"]
    a, b = (torch.randn(rows, rows, device=device, dtype=numbers) for _ in range(2))
    times = []
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronize(device)
        times.append((time.perf_counter() - started) / 4)
    return 2 * rows**3 / min(times)


def _measure_all(
    selected: Sequence[Contender], subject: TrainingSetup, batches: list[Batch], seconds: float
) -> tuple[list[Measurement], dict[str, str]]:
    """Measure all contenders that can be prepared; those that run out of memory repeat in a later, smaller group."""
    rows: list[Measurement] = []
    missing: dict[str, str] = {}
    waiting = list(selected)
    while waiting:
        group: list[Measurement] = []
        later: list[Contender] = []
        for contender in waiting:
            try:
                group.append(_prepare(contender, subject, batches))
            except torch.OutOfMemoryError:
                contender.close()
                later.append(contender)
            except (UsageError, RuntimeError) as reason:  # not installed, or a compiler error
                missing[contender.name] = str(reason).partition("\n")[0]
            _free_memory(subject.device)
        if later and not group:
            missing |= {contender.name: "out of memory: lower --tokens" for contender in later}
            break
        result_tables.run_in_turns(group, seconds)
        for row in group:
            row.contender.close()
        _free_memory(subject.device)
        rows, waiting = rows + group, later
    if not rows:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return rows, missing


def _prepare(contender: Contender, subject: TrainingSetup, batches: list[Batch]) -> Measurement:
    """Prepare a contender: compare its logits, compile, warm up and choose the steps per round."""
    device = subject.device
    row = Measurement(contender, device, batch_stream([contender.collate(batch) for batch in batches], device))
    before = _memory_in_use(device)
    started = time.perf_counter()
    contender.prepare(subject)
    preparing = time.perf_counter() - started
    if contender.exact:
        _compare(contender, subject, batches[0])
    started = time.perf_counter()
    for _ in range(WARM_UP):
        contender.step(next(row.feed))
    synchronize(device)
    row.warm_up = preparing + time.perf_counter() - started
    if device.type == "cuda":
        row.memory = torch.cuda.max_memory_allocated(device) - before
    started = time.perf_counter()
    contender.step(next(row.feed))
    synchronize(device)
    row.steps = max(1, round(ROUND / (time.perf_counter() - started)))
    say(f"{contender.name}: ready after {row.warm_up:.1f} s")
    return row


def _memory_in_use(device: torch.device) -> int:
    """Return the bytes in use, and reset the peak counter."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _compare(contender: Contender, subject: TrainingSetup, batch: Batch) -> None:
    """Refuse a contender if its logits differ from the plain model's."""
    few = Batch(tuple(part[:COMPARED] for part in batch.inputs), batch.labels[:COMPARED], 0)
    real = few.labels != PAD
    subject.model.eval()
    with torch.no_grad():
        ours = subject.model(*few.inputs)[real]  # (tokens, vocab)
    theirs = contender.logits(few.to(subject.device)).cpu()[real]
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference < TOLERANCE:
        raise QkvError(
            f"{contender.name}: its logits differ from the plain model's by {difference:.2g} of the largest: "
            f"the speeds are not comparable"
        )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- results ---------------------------------------------------------------------------------------------------------


def _ratios(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Compare our fastest contender with the fastest of each other engine, round by round."""
    ours, others = result_tables.fastest_of_each(rows, OURS)
    if ours is None:
        return []
    return [
        {"ours": ours.contender.name, "peer": row.contender.name} | result_tables.speed_ratio(ours, row)
        for row in reversed(others)
    ]


def _result_tables(result: dict[str, Any]) -> list[ResultTable]:
    columns = ("", "target tok/s (range)", "steps/s", "of the peak", "stalled", "warm-up", "memory")
    lines = [
        (
            row["contender"],
            f"{row['tokens_per_second']:,.0f} ({row['low']:,.0f} – {row['high']:,.0f})",
            f"{row['steps_per_second']:.3g}",
            f"{row['peak_share']:.1%}",
            f"{row['stall_share']:.1%}",
            f"{row['warm_up_seconds']:.1f} s",
            "–" if row["memory"] is None else f"{row['memory'] / 2**30:.1f} GiB",
        )
        for row in result["rows"]
    ]
    sheets = [
        ResultTable(f"training, {result['model']}; {result['batch']}; {result['precision']}", columns, tuple(lines))
    ]
    ratios = [
        (each["ours"], each["peer"], f"{each['ratio']:.2f} × ({each['low']:.2f} – {each['high']:.2f})")
        for each in result["ratios"]
    ]
    if ratios:
        title = "fastest qkv against the fastest of each other engine"
        sheets.append(ResultTable(title, ("ours", "peer", "ratio"), tuple(ratios)))
    return sheets


def _remarks(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    own = [row["contender"] for row in result["rows"] if not row["same_weights"]]
    return [
        f"peak: {result['peak_flops'] / 1e12:.3g} TFLOP/s in one matrix product; "
        f"{result['flops_per_token'] / 1e6:,.0f} MFLOP per target token; {result['pad_share']:.1%} padding",
        f"{result['cores']} cores, {result['threads']} threads; {versions}",
        *(f"{name}: a different architecture, logits not compared" for name in own),
        *(f"not measured: {name}: {reason}" for name, reason in result["missing"].items()),
    ]
