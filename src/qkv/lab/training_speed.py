"""Training speed of qkv and of other implementations, on the same weights and batches.

First the logits are compared. Then all contenders run in turn, round after round, so that disturbances by other
programs affect all equally. Speed is in target tokens per second; padding counts neither as tokens nor as arithmetic.
The share of the peak is the arithmetic of the model (6 operations per token and weight, plus attention) divided by the
speed of one large matrix product on the same device.
"""

from __future__ import annotations

import gc
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
from qkv.lab import contenders
from qkv.lab.contenders import Setting, Timed, TrainingLoop, TrainingSetup
from qkv.lab.result_tables import ResultTable, check_outputs, publish
from qkv.options import TrainConfig, TransformerConfig

SIZES: dict[str, tuple[TransformerConfig, int]] = {  # of random weights: the model, and its vocabulary
    "tiny": (TransformerConfig(d_model=128, d_ff=256, heads=4, encoder_layers=4, decoder_layers=4), 10_000),
    "small": (TransformerConfig(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3), 8000),
    "base": (TransformerConfig(), 37_000),
    "big": (TransformerConfig(d_model=1024, d_ff=4096, heads=16), 37_000),
    "demo": (TransformerConfig(d_model=128, d_ff=512, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0), 2000),
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
class Measurement(Timed):
    """A training loop with its measured speed and memory."""

    device: torch.device
    feed: Iterator[Any]
    loop: TrainingLoop | None  # None: its memory is freed
    warm_up: float = 0.0  # seconds of preparation, compilation and first steps
    memory: int | None = None  # peak bytes, on a GPU
    steps: int = 1  # per round
    rates: list[float] = field(default_factory=list)  # steps per second
    stalls: list[float] = field(default_factory=list)  # share of time spent waiting for batches

    def run(self) -> None:
        assert self.loop is not None
        tokens, stalled = 0, 0.0
        contenders.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self.steps):
            requested = time.perf_counter()
            batch = next(self.feed)
            stalled += time.perf_counter() - requested
            tokens += self.loop.step(batch)
        contenders.synchronize(self.device)
        seconds = time.perf_counter() - started
        self.speeds.append(tokens / seconds)
        self.rates.append(self.steps / seconds)
        self.stalls.append(stalled / seconds)

    def figures(self, work: float, peak: float) -> dict[str, Any]:
        """Return the results; `work` is in FLOPs per target token, `peak` in FLOPs per second."""
        return self.to_dict() | {
            "contender": self.name,
            "steps_per_second": statistics.median(self.rates),
            "peak_share": statistics.median(self.speeds) * work / peak,
            "stall_share": statistics.median(self.stalls),
            "warm_up_seconds": self.warm_up,
            "memory": self.memory,
            "same_weights": self.setting.exact,
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

    `only` selects contenders by words in their names; `folder` has the other software. In the result, `rows` has every
    contender, `ratios` the fastest of qkv against the fastest of each other implementation, `missing` the reasons for
    contenders that did not run.
    """
    check_outputs(outputs)
    chosen = choose_device(device)
    place = "gpu" if chosen.type == "cuda" else "cpu"
    size, spec, vocab = choose_size(model, chosen)
    tokens = tokens or TOKENS[place]
    if tokens < LONGEST:
        raise UsageError(f"--tokens {tokens}: give at least {LONGEST}, the length of one sentence")
    modules = contenders.find_peers(folder, "training")
    selected = contenders.select(contenders.training_settings(chosen, modules), only, "contender")
    torch.manual_seed(0)
    setup = TrainingSetup(Transformer(spec, vocab, vocab), chosen, LONGEST, TrainConfig())
    batches = random_batches(vocab, tokens)
    peak = matrix_peak(chosen)
    rows, missing = _measure_all(selected, setup, batches, seconds)
    peak = max(peak, matrix_peak(chosen))  # the clock may have been lower before
    useful = sum(batch.tokens for batch in batches)
    work = sum(training_operations(spec, vocab, batch) for batch in batches) / useful
    compared = [
        {"ours": each["ours"], "peer": each["theirs"], **{name: each[name] for name in ("ratio", "low", "high")}}
        for each in reversed(contenders.ratios(rows))
    ]
    result = contenders.surroundings(modules) | {
        "model": f"{size}, {parameter_count(setup.model):,} parameters, vocabulary {vocab:,}",
        "batch": f"{useful / len(batches):,.0f} target tokens, lengths {SHORTEST}–{LONGEST}",
        "precision": "bf16" if place == "gpu" else "fp32",
        "pad_share": pad_share(batches),
        "peak_flops": peak,
        "flops_per_token": work,
        "rows": [row.figures(work, peak) for row in rows],
        "ratios": compared,
        "missing": missing,
    }
    return publish(result, _result_tables(result), _remarks(result), device=device, command=command, outputs=outputs)


def choose_size(name: str, device: torch.device) -> tuple[str, TransformerConfig, int]:
    """Return name, model and vocabulary of a size; by default one that suits the device."""
    name = name or ("base" if device.type == "cuda" else "small")
    if name not in SIZES:
        raise UsageError(f"--model {name}: choose one of {', '.join(SIZES)}")
    return name, *SIZES[name]


# ---- batches ---------------------------------------------------------------------------------------------------------


def random_batches(vocab: int, tokens: int, *, count: int = BATCHES) -> list[Batch]:
    """Return random batches of one shape, with about `tokens` tokens per side without padding."""
    draws = torch.Generator().manual_seed(0)
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
        contenders.synchronize(device)
        started = time.perf_counter()
        for _ in range(4):
            a @ b
        contenders.synchronize(device)
        times.append((time.perf_counter() - started) / 4)
    return 2 * rows**3 / min(times)


def _measure_all(
    selected: Sequence[Setting], setup: TrainingSetup, batches: list[Batch], seconds: float
) -> tuple[list[Measurement], dict[str, str]]:
    """Measure all settings that can be opened; those that run out of memory repeat in a later, smaller group."""
    rows: list[Measurement] = []
    missing: dict[str, str] = {}
    waiting = list(selected)
    while waiting:
        group: list[Measurement] = []
        later: list[Setting] = []
        for setting in waiting:
            try:
                group.append(_prepare(setting, setup, batches))
            except torch.OutOfMemoryError:
                later.append(setting)
                torch.compiler.reset()
            except (UsageError, RuntimeError) as reason:  # not installed, or a compiler error
                missing[setting.name] = str(reason).partition("\n")[0]
            _free_memory(setup.device)
        if later and not group:
            missing |= {setting.name: "out of memory: lower --tokens" for setting in later}
            break
        contenders.run_in_turns(group, seconds)
        for row in group:
            row.loop = None
        torch.compiler.reset()
        _free_memory(setup.device)
        rows, waiting = rows + group, later
    if not rows:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return rows, missing


def _prepare(setting: Setting, setup: TrainingSetup, batches: list[Batch]) -> Measurement:
    """Open a setting: compare its logits, compile, warm up and choose the steps per round."""
    device, before = setup.device, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    loop: TrainingLoop = setting.open(setup)
    opening = time.perf_counter() - started
    if setting.exact:
        _compare(setting.name, loop, setup, batches[0])
    collated = [loop.collate(batch) for batch in batches]
    feed = (batch.to(device) for batch in cycle(collated))  # each is copied to the device on demand
    started = time.perf_counter()
    for _ in range(WARM_UP):
        loop.step(next(feed))
    contenders.synchronize(device)
    row = Measurement(setting, device, feed, loop, warm_up=opening + time.perf_counter() - started)
    if device.type == "cuda":
        row.memory = torch.cuda.max_memory_allocated(device) - before
    started = time.perf_counter()
    loop.step(next(feed))
    contenders.synchronize(device)
    row.steps = max(1, round(ROUND / (time.perf_counter() - started)))
    say(f"{setting.name}: ready after {row.warm_up:.1f} s")
    return row


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _compare(name: str, loop: TrainingLoop, setup: TrainingSetup, batch: Batch) -> None:
    """Refuse a loop if its logits differ from the plain model's."""
    few = Batch(tuple(part[:COMPARED] for part in batch.inputs), batch.labels[:COMPARED], 0)
    real = few.labels != PAD
    setup.model.eval()
    with torch.no_grad():
        ours = setup.model(*few.inputs)[real]  # (tokens, vocab)
    theirs = loop.logits(few.to(setup.device)).cpu()[real]
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference < TOLERANCE:
        raise QkvError(
            f"{name}: its logits differ from the plain model's by {difference:.2g} of the largest: "
            f"the speeds are not comparable"
        )


# ---- results ---------------------------------------------------------------------------------------------------------


def _result_tables(result: dict[str, Any]) -> list[ResultTable]:
    columns = ("", "target tok/s (range)", "steps/s", "of the peak", "stalled", "warm-up", "memory")
    lines = [
        (
            row["contender"],
            contenders.median_and_range(row),
            f"{row['steps_per_second']:.3g}",
            f"{row['peak_share']:.1%}",
            f"{row['stall_share']:.1%}",
            f"{row['warm_up_seconds']:.1f} s",
            "–" if row["memory"] is None else f"{row['memory'] / 2**30:.1f} GiB",
        )
        for row in result["rows"]
    ]
    ratios = [(ratio["ours"], ratio["peer"], contenders.median_and_range(ratio)) for ratio in result["ratios"]]
    title = f"training, {result['model']}; {result['batch']}; {result['precision']}"
    return [ResultTable(title, columns, lines), *contenders.ratio_table(("ours", "peer", "ratio"), ratios)]


def _remarks(result: dict[str, Any]) -> list[str]:
    own = [row["contender"] for row in result["rows"] if not row["same_weights"]]
    return [
        f"peak: {result['peak_flops'] / 1e12:.3g} TFLOP/s in one matrix product; "
        f"{result['flops_per_token'] / 1e6:,.0f} MFLOP per target token; {result['pad_share']:.1%} padding",
        *(f"{name}: a different architecture, logits not compared" for name in own),
        *contenders.remarks_on(result),
    ]
