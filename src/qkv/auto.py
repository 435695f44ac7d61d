"""The recipe a user gets without a config: chosen from the amount of text and the speed of the device, with reasons."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.config import Attentive, Config, DecoderOnly, Model, Transformer, Translating
from qkv.data.store import Prepared, Store
from qkv.device import choose_device, describe
from qkv.train.card import parameters, shape, unit
from qkv.train.fast import make_trainer
from qkv.train.trainer import make_updates

MINUTES = {"cpu": 30.0, "cuda": 60.0, "mps": 60.0}  # how long training may take unless the user says
WARM_UP = {"cpu": 1, "cuda": 10, "mps": 10}  # updates before the clock runs: a GPU loads its kernels in the first ones
FEWEST = 100  # steps
GIVEN = 30  # passes, for kinds of model whose size is left as it is
TOKENS_A_PARAMETER = 1.0  # to read, at least: with fewer a smaller model learns as much or more (NOTES.md)

R_DROP = 5.0  # its weight
TWICE = 15  # passes from which R-Drop, which takes each of them twice, is worth more than further ones


@dataclass(frozen=True)
class Size:
    """A model for texts of up to so many pairs or tokens."""

    limit: float
    model: Model
    passes: float  # over the text that are worth while; with fewer there is less dropout, in proportion
    r_drop: bool = False  # if there is time for it; dropout is a third less then


# By pairs. Small corpora want small models, much dropout and many passes; the second row is that of the preset
# multi30k, the last one is the paper's base. All pre-norm, which needs no tuning.
PAIRS = [
    Size(
        15_000, Transformer(d_model=128, d_ff=512, heads=4, encoder_layers=3, decoder_layers=3, dropout=0.3), 80, True
    ),
    Size(
        80_000, Transformer(d_model=256, d_ff=1024, heads=4, encoder_layers=4, decoder_layers=4, dropout=0.3), 40, True
    ),
    Size(500_000, Transformer(d_model=256, d_ff=1024, heads=4, encoder_layers=6, decoder_layers=3, dropout=0.2), 30),
    Size(math.inf, Transformer(dropout=0.1), 15),
]

# The same for language models, by tokens of text; the second row is nanoGPT's model of a megabyte of Shakespeare.
TOKENS = [
    Size(300_000, DecoderOnly(d_model=128, d_ff=512, heads=4, layers=4, dropout=0.2), 40),
    Size(3_000_000, DecoderOnly(d_model=384, d_ff=1536, heads=6, layers=6, dropout=0.2), 40),
    Size(30_000_000, DecoderOnly(d_model=512, d_ff=2048, heads=8, layers=8, dropout=0.1), 15),
    Size(math.inf, DecoderOnly(d_model=768, d_ff=3072, heads=12, layers=12, dropout=0.0), 5),
]


def choose(config: Config, prepared: Prepared, minutes: float = 0.0, *, steps: int = 0) -> tuple[Config, list[str]]:
    """A model and a length of training for this text on this device, and the reasons, a line each.

    The length follows from `minutes` (0: a default for the device), unless `steps` says it, and model and R-Drop from
    how much of the text that reads.
    """
    device = choose_device(config.train.device)
    tokens = tokens_a_pass(prepared.train)
    budget = 60 * (minutes or MINUTES.get(device.type, 30.0))
    of = "target tokens" if isinstance(config.model, Translating) else "tokens"
    reasons = [f"auto: {len(prepared.train):,} {unit(config)}, {tokens / 1e6:.2f} million {of}, on {describe(device)}"]
    limit = f"{steps:,} steps read" if steps else f"{budget / 60:g} min allow"
    sizes, amount = _sizes(config, prepared, tokens)
    row = next(i for i, size in enumerate(sizes) if amount <= size.limit)
    text = sizes[row]  # dropout goes by it: a model that is small for lack of time has much text all the same
    longest = config.data.max_length
    while True:
        size = sizes[row]
        model = dataclasses.replace(size.model, dropout=text.model.dropout)
        tried = _with(config, model, _tokens_per_step(tokens, math.inf, device.type, longest), device.type)
        token_seconds = seconds_a_token(tried, prepared)
        if not steps:
            often = _tokens_per_step(tokens, budget / token_seconds, device.type, longest)
            tried = tried.replace(train={"tokens_per_step": often})
        updates, held = updates_a_pass(tried, prepared), parameters(tried.model, prepared.tokenizers)
        read = steps / updates * tokens if steps else budget / token_seconds
        if read >= TOKENS_A_PARAMETER * held or row == 0:
            break
        reasons.append(
            f"auto: {shape(model)} has {held / 1e6:.1f} million parameters, for which {read / 1e6:.1f} million {of}, "
            f"all that {limit}, are too few: something smaller"
        )
        row -= 1
    if size.r_drop and read >= TWICE * tokens:
        twice = _twice(tried)
        seconds = seconds_a_token(twice, prepared)
        if steps or budget >= TWICE * tokens * seconds:
            tried, token_seconds = twice, seconds
            reasons.append(f"auto: R-Drop {R_DROP:g}: there is time to take {TWICE} passes or more twice each")
    passes, affordable = size.passes, budget / (token_seconds * tokens)
    allowed = round(min(passes, affordable) * updates)
    why = f"{passes:g} are enough" if affordable >= passes else f"all that {limit}"
    if steps:
        why = "as you say"
    elif allowed < FEWEST:
        longer = f", so longer than {budget / 60:g} min" if affordable * updates < FEWEST else ""
        why = f"fewer steps teach nothing{longer}"
    steps = steps or max(FEWEST, allowed)
    made = steps / updates
    if not tried.train.r_drop:  # what is read a few times only is not learned by heart
        tried = tried.replace(model={"dropout": round(text.model.dropout * min(1.0, made / text.passes), 2)})
    chosen = _lasting(tried, steps)
    reasons += [
        f"auto: {shape(tried.model)}, dropout {tried.model.dropout:g} for so many passes over a text of this size",
        f"auto: {steps:,} steps of {tried.train.tokens_per_step:,} tokens, {made:.1f} passes over the text ({why}): "
        f"about {_duration(made * tokens * token_seconds)} by the first steps' speed; --set train.steps=N changes this",
    ]
    return chosen, reasons


def tokens_a_pass(store: Store) -> int:
    """Target tokens, </s> included, in one pass over all corpora with their weights."""
    weights = np.asarray(store.weights)[store.corpus]
    return max(1, round(float(weights @ (np.asarray(store.tgt_lengths) + 1.0))))


def updates_a_pass(config: Config, prepared: Prepared) -> int:
    """How many updates one pass takes: more than tokens / tokens_per_step, as batches are padded and not all full."""
    return len(make_updates(config, prepared).plan(0))


def seconds_a_token(config: Config, prepared: Prepared) -> float:
    """Training time for each target token, measured on a few real updates of a model that is then thrown away."""
    if choose_device(config.train.device).type == "cpu":
        # A full update of a large model takes a CPU half a minute, and a small one tells as much.
        small = max(1024, config.data.max_length + 1)
        config = config.replace(train={"tokens_per_step": min(small, config.train.tokens_per_step)})
    trainer = make_trainer(config, prepared)
    speeds: list[float] = []
    with closing(trainer.updates.starting(trainer.progress.position)) as steps:
        for _ in range(WARM_UP.get(trainer.device.type, 10)):
            trainer.step(next(steps))
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until or len(speeds) < 3:
            update = next(steps)
            start = time.perf_counter()
            trainer.step(update)
            speeds.append((time.perf_counter() - start) / update.tokens)
    return statistics.median(speeds)


def _sizes(config: Config, prepared: Prepared, tokens: int) -> tuple[list[Size], int]:
    """The models to choose from, and how much text there is to choose by; those of other kinds are as they are."""
    if isinstance(config.model, Transformer):
        return PAIRS, len(prepared.train)
    if isinstance(config.model, DecoderOnly):
        return TOKENS, tokens
    return [Size(math.inf, config.model, GIVEN)], len(prepared.train)


def _twice(config: Config) -> Config:
    """The same with R-Drop."""
    return config.replace(model={"dropout": round(config.model.dropout * 2 / 3, 2)}, train={"r_drop": R_DROP})


def _with(config: Config, model: Model, tokens_per_step: int, device: str) -> Config:
    if isinstance(model, Translating) and not config.tokenizer.shared:
        model = dataclasses.replace(model, tie="output")
    if isinstance(model, Attentive):
        model = dataclasses.replace(model, norm="pre")
    if isinstance(model, DecoderOnly):
        model = dataclasses.replace(model, positions="rotary")
    train: dict[str, Any] = {"tokens_per_step": tokens_per_step, "learning_rate": _rate(1e-3, 512, model), "clip": 1.0}
    train["schedule"] = "wsd" if isinstance(model, Transformer) else "cosine"
    # Muon learns more from an update, but on a CPU it takes too long, and it wants whole matrices.
    if isinstance(model, Transformer) and device != "cpu" and config.train.parallel != "sharded":
        train |= {"optimizer": "muon", "learning_rate": _rate(4e-3, 256, model)}
    if not isinstance(model, Translating):
        train["label_smoothing"] = 0.0  # what is measured is the likelihood itself
    return dataclasses.replace(config, model=model).replace(train=train)


def _lasting(config: Config, steps: int) -> Config:
    """The config for a training of so many steps: warm-up, and how often it is validated and logged."""
    often = {"validate_every": max(50, min(1000, steps // 10)), "log_every": max(1, min(50, steps // 20))}
    return config.replace(train={"steps": steps, "warmup": min(1000, max(20, steps // 10)), **often})


def _tokens_per_step(tokens: int, read: float, device: str, longest: int) -> int:
    """About 100 updates a pass for small texts; never less than 2,048 tokens or more than the paper's 25,000.

    A CPU takes smaller ones, which cost it no more, and of the tokens that it can read in all makes 4,000 or more
    updates: in a short training many small ones teach more than a few large ones.
    """
    if device == "cpu":
        wanted, least, most = min(tokens / 200, read / 4000), 1024, 8192
    else:
        wanted, least, most = tokens / 100, 2048, 25_000
    return max(longest + 1, min(most, max(least, 1 << round(math.log2(max(1, wanted))))))


def _rate(rate: float, width: int, model: Model) -> float:
    """The peak learning rate, from that of a width: narrow models bear larger steps."""
    return round(rate * math.sqrt(width / model.d_model), 5)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
