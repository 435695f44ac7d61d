"""The recipe a user gets without a config: chosen from the amount of text and the speed of the device, with reasons."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import torch

from qkv.config import Config, Transformer
from qkv.data.store import Prepared
from qkv.device import choose_device
from qkv.models.transformer import build

MINUTES = {"cpu": 30.0, "cuda": 60.0, "mps": 60.0}  # how long training may take unless the user says
EFFICIENCY = {"cpu": 0.45, "cuda": 0.15, "mps": 0.1}  # share of the matrix rate that training reaches; an estimate
PASSES = 3  # over the text, at least; a model too large for that learns less than a smaller one

# Up to so many pairs: the model, its dropout, and how many passes over the text are worth while. Small corpora want
# small models, much dropout and many passes; the last row is the paper's base.
SIZES: list[tuple[float, Transformer, float]] = [
    (15_000, Transformer(d_model=128, d_ff=512, heads=4, encoder_layers=3, decoder_layers=3, dropout=0.3), 100),
    (80_000, Transformer(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3, dropout=0.3), 50),
    (500_000, Transformer(d_model=256, d_ff=1024, heads=4, encoder_layers=6, decoder_layers=3, dropout=0.2), 30),
    (float("inf"), Transformer(dropout=0.1), 15),
]


def choose(config: Config, prepared: Prepared, minutes: float = 0.0) -> tuple[Config, list[str]]:
    """A model and a length of training for this text on this device, and the reasons, a line each."""
    device = choose_device(config.train.device)
    pairs = len(prepared.train)
    tokens = int(np.asarray(prepared.train.tgt_lengths).sum()) + pairs
    budget = minutes or MINUTES.get(device.type, 30.0)
    rate = EFFICIENCY.get(device.type, 0.1) * (measured := measured_rate(device))
    row = next(i for i, (limit, _, _) in enumerate(SIZES) if pairs <= limit)
    reasons = [
        f"auto: {pairs:,} pairs, {tokens / 1e6:.1f} million target tokens; {measured / 1e9:,.0f} GFLOP/s measured"
    ]

    while row > 0 and budget / _minutes(tokens, SIZES[row][1], prepared, rate) < PASSES:
        d_model = SIZES[row][1].d_model
        reasons.append(f"auto: d_model {d_model} would not see the text {PASSES} times in {budget:g} min: smaller")
        row -= 1
    _, model, epochs = SIZES[row]
    affordable = budget / _minutes(tokens, model, prepared, rate)
    tokens_per_step = max(_tokens_per_step(tokens, device), config.data.max_length + 1)
    steps = max(100, round(min(epochs, affordable) * tokens / tokens_per_step))
    if not config.tokenizer.shared:
        model = dataclasses.replace(model, tie="output")
    train = dataclasses.replace(
        config.train,
        steps=steps,
        tokens_per_step=tokens_per_step,
        schedule="cosine",
        learning_rate=_peak_rate(model),
        warmup=min(1000, max(20, steps // 10)),
        clip=1.0,
        validate_every=max(50, min(1000, steps // 10)),
        log_every=max(1, min(50, steps // 20)),
    )
    model = dataclasses.replace(model, norm="pre")
    passes = steps * tokens_per_step / tokens
    wanted = f"{epochs:g} passes are enough" if affordable >= epochs else f"{epochs:g} passes would take longer"
    reasons += [
        f"auto: d_model {model.d_model}, {model.encoder_layers} + {model.decoder_layers} layers, "
        f"dropout {model.dropout} for a text of this size; pre-norm, which needs no tuning",
        f"auto: {steps:,} steps of {tokens_per_step:,} tokens, {passes:.1f} passes over the text ({wanted}): "
        f"about {_minutes(steps * tokens_per_step, model, prepared, rate):.0f} min; --minutes or --set changes this",
    ]
    return dataclasses.replace(config, model=model, train=train), reasons


def measured_rate(device: torch.device) -> float:
    """Matrix products a second, in FLOP/s, on this device right now: a fraction of a second's look."""
    size = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _minutes(tokens: float, model: Transformer, prepared: Prepared, rate: float) -> float:
    """Estimated minutes to train on this many target tokens: 6 FLOPs a weight and token, source tokens alike."""
    with torch.device("meta"):  # counted without being made
        inner = sum(p.numel() for p in build(model, 1, 1).parameters() if p.dim() > 1)
    output = model.d_model * prepared.tokenizers.tgt.size
    return tokens * 6 * (inner + output) / rate / 60


def _tokens_per_step(tokens: int, device: torch.device) -> int:
    """About 200 updates a pass for small texts; never less than 2,048 tokens or more than the paper's 25,000."""
    limit = 8192 if device.type == "cpu" else 25_000
    return int(min(limit, max(2048, 1 << round(np.log2(max(1, tokens / 200))))))


def _peak_rate(model: Transformer) -> float:
    """Narrow models bear larger steps: 2e-3 at d_model 128, 1e-3 at 512."""
    return round(1e-3 * math.sqrt(512 / model.d_model), 5)
