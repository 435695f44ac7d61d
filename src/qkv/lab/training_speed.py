"""Training speed: ours against what a user would write instead, on the same weights and batches, in one run.

First the logits are compared, then all contenders take turns, round after round, so that whatever else the machine does
falls on all of them alike. Speed is in useful target tokens a second: padding does not count, neither as tokens nor as
arithmetic. The share of the peak is the arithmetic that the model needs, 6 operations for each token and weight it
meets and those of the attentions, over what one large product of matrices reaches on this device in the same run.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from qkv.console import say
from qkv.core.device import choose_device
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.data.loader import Batch
from qkv.lab.result_tables import ResultTable, check_outputs, provenance, publish
from qkv.lab.training_contenders import OURS, Contender, TrainingSetup, contenders
from qkv.models.base import parameter_count
from qkv.models.transformer import Transformer
from qkv.options import TrainConfig, TransformerConfig

SIZES: dict[str, tuple[TransformerConfig, int]] = {  # the model, and its vocabulary
    "tiny": (TransformerConfig(d_model=128, d_ff=256, heads=4, encoder_layers=4, decoder_layers=4), 10_000),
    "small": (TransformerConfig(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3), 8_000),
    "base": (TransformerConfig(), 37_000),
    "big": (TransformerConfig(d_model=1024, d_ff=4096, heads=16), 37_000),
}
TOKENS = {"cpu": 2_048, "gpu": 25_000}  # of each side in a batch, padding not counted
SHORTEST, LONGEST = 24, 32  # tokens of a sentence, </s> included
BATCHES = 8
WARM_UP = 3  # steps before anything is timed
ROUND = 0.5  # seconds that one contender's part of a round takes, or one step
AT_LEAST = 3  # rounds
COMPARED = 8  # sentences whose logits are compared
TOLERANCE = 1e-3  # by which they may differ, in fp32, relative to the largest
PEAK = {"cpu": (1024, torch.float32), "gpu": (8192, torch.bfloat16)}  # rows of the product, and its numbers
PACKAGES = ("transformers", "x-transformers")


@dataclass
class Measurement:
    """A contender and what was measured of it."""

    contender: Contender
    feed: Iterator[Any]
    warm_up: float = 0.0  # seconds from nothing to the end of the first steps, compilation included
    memory: int | None = None  # bytes at most, on a GPU
    steps: int = 1  # of a round
    speeds: list[float] = field(default_factory=list)  # target tokens a second, round by round
    rates: list[float] = field(default_factory=list)  # steps a second
    stalls: list[float] = field(default_factory=list)  # share of the time spent waiting for batches

    def run(self, device: torch.device) -> None:
        """One round."""
        tokens, stalled = 0, 0.0
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(self.steps):
            asked = time.perf_counter()
            batch = next(self.feed)
            stalled += time.perf_counter() - asked
            tokens += self.contender.step(batch)
        synchronize(device)
        seconds = time.perf_counter() - begun
        self.speeds.append(tokens / seconds)
        self.rates.append(self.steps / seconds)
        self.stalls.append(stalled / seconds)

    def to_dict(self, work: float, peak: float) -> dict[str, Any]:
        """`work` is the arithmetic for a target token, `peak` what the device can do in a second."""
        speed = statistics.median(self.speeds)
        return {
            "contender": self.contender.name,
            "engine": self.contender.engine,
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
) -> dict[str, Any]:
    """Measure, print tables, and write .json or .md.

    `only` keeps the contenders whose names hold one of these words. The result's `rows` has every contender, `ratios`
    our fastest against the fastest of each peer, `missing` the reason for what is not there.
    """
    check_outputs(outputs)
    chosen = choose_device(device)
    place = "gpu" if chosen.type == "cuda" else "cpu"
    size = model or ("base" if place == "gpu" else "small")
    if size not in SIZES:
        raise UsageError(f"--model {size}: choose one of {', '.join(SIZES)}")
    tokens = tokens or TOKENS[place]
    if tokens < LONGEST:
        raise UsageError(f"--tokens {tokens}: a batch holds a sentence at least, of up to {LONGEST} tokens")
    selected = _select_contenders(chosen, only)
    spec, vocab = SIZES[size]
    torch.manual_seed(0)
    subject = TrainingSetup(Transformer(spec, vocab, vocab), chosen, LONGEST, TrainConfig())
    batches = random_batches(vocab, tokens)
    peak = matrix_peak(chosen)
    rows, missing = _measure_all(selected, subject, batches, seconds)
    peak = max(peak, matrix_peak(chosen))  # clocks may have been lower before
    useful = sum(batch.tokens for batch in batches)
    work = sum(training_operations(spec, vocab, batch) for batch in batches) / useful
    result = provenance(device, command) | {
        "versions": {name: _version(name) for name in PACKAGES},
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
    publish(result, _result_tables(result), _remarks(result), outputs)
    return result


def _select_contenders(device: torch.device, only: Sequence[str]) -> list[Contender]:
    known = contenders(device)
    wanted = [each for each in known if not only or any(word in each.name for word in only)]
    if not wanted:
        names = "; ".join(each.name for each in known)
        raise UsageError(f"--only {' '.join(only)}: nobody is called so; there are {names}")
    return wanted


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- the text --------------------------------------------------------------------------------------------------------


def random_batches(vocab: int, tokens: int, *, count: int = BATCHES, seed: int = 0) -> list[Batch]:
    """Random batches of about so many tokens a side, all of one shape: what is longer than its sentence is padding."""
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
        labels, reach = side()
        target = labels.roll(1, dims=1)
        target[:, 0] = BOS
        target = target.masked_fill(torch.arange(LONGEST) >= reach[:, None], PAD)
        batches.append(Batch((source, lengths, target), labels, int(reach.sum())))
    return batches


def pad_share(batches: Sequence[Batch]) -> float:
    """How much of the two sides is padding."""
    cells = sum(batch.source.numel() + batch.labels.numel() for batch in batches)
    return 1 - sum(int(batch.lengths.sum()) + batch.tokens for batch in batches) / cells


def batch_stream(batches: Sequence[Any], device: torch.device) -> Iterator[Any]:
    """The batches over and over, each copied to the device when it is asked for."""
    return (batch.to(device) for batch in cycle(batches))


def training_operations(spec: TransformerConfig, vocab: int, batch: Batch) -> float:
    """Floating-point operations that training on a batch needs, forward and backward, padding left out.

    6 for each weight of a matrix and each token that meets it: source tokens those of the encoder and W^K and W^V of
    the decoder's attention to it, target tokens the others and the output. QKᵀ and AV come to 12 · d for each pair of a
    query and a key, half of the pairs where attention is causal. Embeddings are looked up and cost nothing.
    """
    sources, targets = batch.lengths.double(), (batch.labels != PAD).sum(1).double()
    d, width = spec.d_model, spec.heads * (spec.key_width + spec.value_width)
    keys_values, attention = d * width, 2 * d * width
    feed_forward = (3 if spec.activation == "swiglu" else 2) * d * spec.d_ff
    encoder = spec.encoder_layers * (attention + feed_forward) + spec.decoder_layers * keys_values
    decoder = spec.decoder_layers * (2 * attention - keys_values + feed_forward) + vocab * d
    pairs = spec.encoder_layers * sources.square() + spec.decoder_layers * (targets.square() / 2 + sources * targets)
    return float(6 * (encoder * sources.sum() + decoder * targets.sum() + width * pairs.sum()))


# ---- the race --------------------------------------------------------------------------------------------------------


def matrix_peak(device: torch.device) -> float:
    """Operations a second of one large product of matrices: the best of several."""
    rows, numbers = PEAK["gpu" if device.type == "cuda" else "cpu"]
    a, b = (torch.randn(rows, rows, device=device, dtype=numbers) for _ in range(2))
    times = []
    for _ in range(6):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronize(device)
        times.append((time.perf_counter() - begun) / 4)
    return 2 * rows**3 / min(times)


def _measure_all(
    selected: Sequence[Contender], subject: TrainingSetup, batches: list[Batch], seconds: float
) -> tuple[list[Measurement], dict[str, str]]:
    """Rows of all that could be prepared; those for whom the others leave no memory run in a heat of their own."""
    rows: list[Measurement] = []
    missing: dict[str, str] = {}
    waiting = list(selected)
    while waiting:
        heat: list[Measurement] = []
        later: list[Contender] = []
        for contender in waiting:
            try:
                heat.append(_prepare(contender, subject, batches))
            except torch.OutOfMemoryError:
                contender.close()
                later.append(contender)
            except (UsageError, RuntimeError) as reason:  # not installed; or the compiler's
                missing[contender.name] = str(reason).partition("\n")[0]
            _free_memory(subject.device)
        if later and not heat:
            missing |= {contender.name: "out of memory: lower --tokens" for contender in later}
            break
        _measure_in_turns(heat, subject.device, seconds)
        for row in heat:
            row.contender.close()
        _free_memory(subject.device)
        rows, waiting = rows + heat, later
    if not rows:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return rows, missing


def _prepare(contender: Contender, subject: TrainingSetup, batches: list[Batch]) -> Measurement:
    """Ready to run: compared with our plain model, compiled, warm, and with a round of a sensible length."""
    device = subject.device
    row = Measurement(contender, batch_stream([contender.collate(batch) for batch in batches], device))
    before = _memory_in_use(device)
    begun = time.perf_counter()
    contender.prepare(subject)
    preparing = time.perf_counter() - begun
    if contender.exact:
        _compare(contender, subject, batches[0])
    begun = time.perf_counter()
    for _ in range(WARM_UP):
        contender.step(next(row.feed))
    synchronize(device)
    row.warm_up = preparing + time.perf_counter() - begun
    if device.type == "cuda":
        row.memory = torch.cuda.max_memory_allocated(device) - before
    begun = time.perf_counter()
    contender.step(next(row.feed))
    synchronize(device)
    row.steps = max(1, round(ROUND / (time.perf_counter() - begun)))
    say(f"{contender.name}: ready after {row.warm_up:.1f} s")
    return row


def _memory_in_use(device: torch.device) -> int:
    """Bytes in use, from which on the largest use is counted anew."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _compare(contender: Contender, subject: TrainingSetup, batch: Batch) -> None:
    """Refuse to race those that do not compute the same."""
    few = Batch(tuple(part[:COMPARED] for part in batch.inputs), batch.labels[:COMPARED], 0)
    real = few.labels != PAD
    subject.model.eval()
    with torch.no_grad():
        ours = subject.model(*few.inputs)[real]  # (tokens, vocab)
    theirs = contender.logits(few.to(subject.device)).cpu()[real]
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference < TOLERANCE:
        raise QkvError(
            f"{contender.name}: its logits and those of our model differ by {difference:.2g} of the largest: "
            f"the comparison would mean nothing"
        )


def _measure_in_turns(rows: Sequence[Measurement], device: torch.device, seconds: float) -> None:
    begun = time.perf_counter()
    while rows and (time.perf_counter() < begun + seconds * len(rows) or len(rows[0].speeds) < AT_LEAST):
        for row in rows:
            row.run(device)
        say(f"{len(rows[0].speeds)} rounds in {time.perf_counter() - begun:.0f} s")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- results ---------------------------------------------------------------------------------------------------------


def _ratios(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Our fastest against the fastest of each peer, round by round."""
    best: dict[str, Measurement] = {}
    for row in sorted(rows, key=lambda row: statistics.median(row.speeds)):
        best[row.contender.engine] = row
    ours = best.pop(OURS, None)
    found: list[dict[str, Any]] = []
    for row in reversed(best.values()):
        if ours is not None:
            ratios = [a / b for a, b in zip(ours.speeds, row.speeds, strict=False)]  # heats differ in their rounds
            names = {"ours": ours.contender.name, "peer": row.contender.name}
            found.append(names | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)})
    return found


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
    return [*sheets, ResultTable("our fastest against each peer's fastest", ("ours", "peer", "ratio"), tuple(ratios))][
        : 2 if ratios else 1
    ]


def _remarks(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    own = [row["contender"] for row in result["rows"] if not row["same_weights"]]
    return [
        f"peak: {result['peak_flops'] / 1e12:.3g} TFLOP/s in one product of matrices; "
        f"{result['flops_per_token'] / 1e6:,.0f} MFLOP for a target token; {result['pad_share']:.1%} padding",
        f"{result['cores']} cores, {result['threads']} threads; {versions}",
        *(f"{name} has layers of its own: its logits are not compared" for name in own),
        *(f"left out: {name}: {reason}" for name, reason in result["missing"].items()),
    ]
