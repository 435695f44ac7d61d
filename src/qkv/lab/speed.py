"""Training speed, as a ratio against torch.nn.Transformer: same weights, same text, same run.

The two take turns, round after round, so that whatever else the machine does falls on both; the figure is the median
over the rounds. Before anything is timed the two are shown to compute the same. Decoding has more peers, and a module
of its own.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from qkv import config, files
from qkv.data.lines import Lines
from qkv.data.loader import Batch, collate
from qkv.decode.batched import by_length
from qkv.device import choose_device, describe
from qkv.errors import QkvError, UsageError
from qkv.lab import decoding
from qkv.lab.peers import TorchTransformer
from qkv.models.base import parameter_count
from qkv.models.transformer import Transformer
from qkv.presets import demo
from qkv.text import Tokenizers
from qkv.text.learn import learn
from qkv.train import optim
from qkv.train.loss import smoothed_loss

PEER = "torch.nn.Transformer"
SENTENCES = 8192  # of the demo corpus


def measure(
    what: str, *, seconds: float = 10.0, device: str = "auto", outputs: Sequence[str] = (), **decode: Any
) -> dict[str, Any]:
    """The speed of training, of decoding, or of all; `decode` is what `qkv.lab.decoding.measure` wants besides."""
    if what not in ("train", "decode", "all"):
        raise UsageError(f"lab speed {what}: choose one of train, decode, all")
    if what == "all" and outputs:
        raise UsageError("--output: one file for one table: measure train and decode one after the other")
    results = {}
    if what != "decode":
        results["train"] = train(seconds=seconds, device=device, outputs=outputs)
    if what != "train":
        results["decode"] = decoding.measure(seconds=seconds, device=device, outputs=outputs, **decode)
    return results


def train(*, seconds: float = 10.0, device: str = "auto", outputs: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, print a table, and write JSON if asked: the `demo` model on the demo corpus."""
    chosen = choose_device(device)
    spec = demo()
    torch.manual_seed(0)
    sources, targets, tokenizers = _text(spec)
    assert isinstance(spec.model, config.Transformer)
    ours = Transformer(spec.model, tokenizers.src.size, tokenizers.tgt.size).to(chosen)
    peer = TorchTransformer(copy.deepcopy(ours)).to(chosen)
    batches = _batches(sources, targets, tokenizers, spec.train, chosen)
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {describe(chosen)}",
        "torch": torch.__version__,
        "model": f"demo, {parameter_count(ours):,} parameters",
        "peer": PEER,
        "rows": {"train": _train(ours, peer, batches, spec.train, seconds)},
    }
    _print(result)
    for output in outputs:
        files.write_text(Path(output), json.dumps(result, indent=2) + "\n")
    return result


def _text(spec: config.Config) -> tuple[list[list[int]], list[list[int]], Tokenizers]:
    sources, targets = (list(islice(Lines(f"demo:train.{side}"), SENTENCES)) for side in ("en", "it"))
    tokenizers = learn(sources, targets, spec.tokenizer, ())
    return list(map(tokenizers.src.encode, sources)), list(map(tokenizers.tgt.encode, targets)), tokenizers


def _batches(
    sources: list[list[int]], targets: list[list[int]], tokenizers: Tokenizers, spec: config.Train, device: torch.device
) -> list[Batch]:
    widths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    return [
        collate([np.asarray(sources[i]) for i in rows], [np.asarray(targets[i]) for i in rows], tokenizers).to(device)
        for rows in by_length(widths, spec.tokens_per_step)
    ]


def _train(
    ours: Transformer, peer: TorchTransformer, batches: list[Batch], spec: config.Train, seconds: float
) -> dict[str, Any]:
    """Target tokens a second of forward, backward and Adam, dropout on."""
    ours, peer = copy.deepcopy(ours).eval(), copy.deepcopy(peer).eval()
    first = batches[0]
    with torch.no_grad():
        same(ours(first.source, first.lengths, first.target), peer(first.source, first.lengths, first.target))

    def our_loss(batch: Batch) -> torch.Tensor:
        hidden = ours.hidden(batch.source, batch.lengths, batch.target)
        loss, _ = smoothed_loss(hidden, ours.output.weight, batch.labels, smoothing=spec.label_smoothing, pad=0)
        return loss / batch.tokens

    def peer_loss(batch: Batch) -> torch.Tensor:
        logits = peer(batch.source, batch.lengths, batch.target)
        return F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=0, label_smoothing=spec.label_smoothing
        )

    def step(model: torch.nn.Module, loss: Callable[[Batch], torch.Tensor]) -> Callable[[int], int]:
        optimizer = optim.build(model, spec)
        model.train()

        def one(number: int) -> int:
            batch = batches[number % len(batches)]
            loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return batch.tokens

        return one

    return _take_turns(step(ours, our_loss), step(peer, peer_loss), seconds)


def same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Refuse to compare the speed of things that do not compute the same."""
    difference = float((ours - theirs).abs().max())
    if difference > tolerance:
        raise QkvError(f"our logits and the peer's differ by {difference:.2g}: the comparison would mean nothing")


def _take_turns(ours: Callable[[int], int], theirs: Callable[[int], int], seconds: float) -> dict[str, Any]:
    """Tokens a second of both, and the median ratio over rounds in which each runs once."""
    ours(0), theirs(0)
    speeds: list[tuple[float, float]] = []
    until = time.perf_counter() + 2 * seconds
    number = 0
    while time.perf_counter() < until or len(speeds) < 3:
        speeds.append((_speed(ours, number), _speed(theirs, number)))
        number += 1
    ratios = [a / b for a, b in speeds]
    return {
        "ours": statistics.median(a for a, _ in speeds),
        "peer": statistics.median(b for _, b in speeds),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "rounds": len(speeds),
    }


def _speed(work: Callable[[int], int], number: int) -> float:
    _wait()
    start = time.perf_counter()
    tokens = work(number)
    _wait()
    return tokens / (time.perf_counter() - start)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"{result['model']}; {result['machine']}; torch {result['torch']}")
    table = Table("", "qkv tok/s", f"{PEER} tok/s", "ratio", "range", "rounds")
    for name, row in result["rows"].items():
        spread = f"{row['low']:.2f} – {row['high']:.2f}"
        table.add_row(
            name, f"{row['ours']:,.0f}", f"{row['peer']:,.0f}", f"{row['ratio']:.2f}×", spread, str(row["rounds"])
        )
    console.print(table)
