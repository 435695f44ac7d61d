"""The recipe of a training without a config: chosen by the amount of text and the speed of the device, with reasons."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from qkv.assembly import parameters, shape, trainer_for, unit, updates_for
from qkv.console import describe_device
from qkv.core.dataset import PreparedText, TokenStore
from qkv.core.device import choose_device
from qkv.core.errors import UsageError
from qkv.options import (
    AttentionModelConfig,
    Config,
    DecoderOnlyConfig,
    ModelConfig,
    TransformerConfig,
    TranslationConfig,
)

MINUTES = {"cpu": 30.0, "cuda": 60.0, "mps": 60.0}  # length of a training unless the user sets it
WARM_UP = {"cpu": 1, "cuda": 10, "mps": 10}  # updates before the measurement: a GPU loads its kernels in the first ones
FEWEST = 100  # steps
GIVEN = 30  # passes, for the kinds of model without a table of sizes
TOKENS_A_PARAMETER = 1.0  # at least: with fewer tokens, a smaller model learns as much or more (NOTES.md)

ADAPTING = 10.0  # useful passes over new text, for a trained model
ADAPTING_RATE = 0.3  # factor on the learning rate of a new model

R_DROP = 5.0  # its weight
TWICE = 15  # with at least so many passes, R-Drop (two passes each) gains more than further passes


@dataclass(frozen=True)
class Size:
    """A model for texts with at most `limit` pairs or tokens."""

    limit: float
    model: ModelConfig
    passes: float  # useful passes over the text; with fewer, dropout is lower in proportion
    r_drop: bool = False  # if there is time for it; dropout is a third less then


# By pairs. Small corpora want small models, much dropout and many passes; the second row is that of the preset
# multi30k, the last one is the paper's base. All pre-norm, which needs no tuning.
_narrow = partial(TransformerConfig, heads=4)
PAIRS = [
    Size(15_000, _narrow(d_model=128, d_ff=512, encoder_layers=3, decoder_layers=3, dropout=0.3), 80, r_drop=True),
    Size(80_000, _narrow(d_model=256, d_ff=1024, encoder_layers=4, decoder_layers=4, dropout=0.3), 40, r_drop=True),
    Size(500_000, _narrow(d_model=256, d_ff=1024, encoder_layers=6, decoder_layers=3, dropout=0.2), 30),
    Size(math.inf, TransformerConfig(dropout=0.1), 15),
]

# The same for language models, by tokens of text; the second row is nanoGPT's model of a megabyte of Shakespeare.
TOKENS = [
    Size(300_000, DecoderOnlyConfig(d_model=128, d_ff=512, heads=4, layers=4, dropout=0.2), 40),
    Size(3_000_000, DecoderOnlyConfig(d_model=384, d_ff=1536, heads=6, layers=6, dropout=0.2), 40),
    Size(30_000_000, DecoderOnlyConfig(d_model=512, d_ff=2048, heads=8, layers=8, dropout=0.1), 15),
    Size(math.inf, DecoderOnlyConfig(d_model=768, d_ff=3072, heads=12, layers=12, dropout=0.0), 5),
]


def choose(
    config: Config,
    prepared: PreparedText,
    ranks: int = 1,
    *,
    minutes: float = 0.0,
    fixed: Collection[str] = (),
    trained: bool = False,
) -> tuple[Config, list[str]]:
    """A model and a length of training for this text on this device, and the reasons, a line each.

    The options named in `fixed` (`model.d_model`) are the user's and stay as they are; everything else is chosen to go
    with them. The length follows from `minutes` (0: a default for the device) unless `train.steps` is fixed, and model
    and R-Drop from how much of the text that reads, on so many ranks. A model that is `trained` already is adapted: it
    stays what it is, and learns with a lower rate.
    """
    chooser = Chooser(config, prepared, minutes, fixed, ranks, trained)
    return chooser.choose(), chooser.reasons


@dataclass(frozen=True)
class Plan:
    """A candidate recipe, and its passes over the text within the time limit or the user's steps."""

    config: Config
    size: Size
    updates: int  # in a pass
    seconds: float  # a pass takes
    passes: float


class Chooser:
    """Chooses a recipe around the options that the user has fixed, and keeps the reasons."""

    def __init__(
        self, config: Config, prepared: PreparedText, minutes: float, fixed: Collection[str], ranks: int, trained: bool
    ) -> None:
        self.config, self.prepared, self.fixed, self.ranks, self.trained = config, prepared, fixed, ranks, trained
        device = choose_device(config.train.device)
        self.device = device.type
        self.tokens = tokens_a_pass(prepared.train)
        self.budget = 60 * (minutes or MINUTES.get(self.device, 30.0))
        self.steps = config.train.steps if "train.steps" in fixed else 0
        self.of = "target tokens" if isinstance(config.model, TranslationConfig) else "tokens"
        amount = f"{len(prepared.train):,} {unit(config)}, {_many(self.tokens)} {self.of}"
        together = f", with {ranks - 1} more" if ranks > 1 else ""
        self.reasons = [f"auto: {amount}, on {describe_device(device)}{together}"]

    def choose(self) -> Config:
        model, amount = self.config.model, len(self.prepared.train)
        sizes = [Size(math.inf, model, GIVEN)]  # other kinds keep their size
        if isinstance(model, TransformerConfig):
            sizes = PAIRS
        elif isinstance(model, DecoderOnlyConfig):
            sizes, amount = TOKENS, self.tokens
        smaller = [size for i, size in enumerate(sizes) if not i or amount > sizes[i - 1].limit]
        text = smaller[-1]  # dropout goes by it: a model that is small for lack of time has much text all the same
        if self.trained:
            smaller = [dataclasses.replace(text, model=model, passes=ADAPTING, r_drop=False)]
        plan = self._with_r_drop(self._largest_that_fits(smaller, text.model.dropout))
        return self._settle(plan, text)

    def _largest_that_fits(self, sizes: list[Size], dropout: float) -> Plan:
        """Return the largest model with time to read as many tokens as it has parameters, or else the smallest."""
        for size in reversed(sizes):
            plan = self._plan(size, dropout)
            read, held = plan.passes * self.tokens, parameters(plan.config.model, self.prepared.tokenizers)
            if read >= TOKENS_A_PARAMETER * held or size is sizes[0]:
                break
            limit = f"{self.steps:,} steps" if self.steps else f"{self.budget / 60:g} min"
            self.reasons.append(
                f"auto: {_many(held)} parameters ({shape(plan.config.model)}) are too many for {_many(read)} "
                f"{self.of}, all that could be read in {limit}: something smaller"
            )
        return plan

    def _plan(self, size: Size, dropout: float) -> Plan:
        """Return the plan for a model of this size; its speed is measured."""
        config = self._suited(dataclasses.replace(size.model, dropout=dropout))
        seconds = seconds_a_pass(config, self.prepared, self.ranks)
        if not self.steps:
            config = self._set(config, train={"tokens_per_step": self._tokens_per_step(self.budget / seconds)})
        return self._timed(config, size, seconds)

    def _timed(self, config: Config, size: Size, seconds: float) -> Plan:
        updates = updates_a_pass(config, self.prepared)
        passes = self.steps / updates if self.steps else self.budget / seconds
        return Plan(config, size, updates, seconds, min(passes, config.train.epochs or math.inf))

    def _with_r_drop(self, plan: Plan) -> Plan:
        """Return the plan with R-Drop, if it helps, time allows it, and no fixed option is against it."""
        if not plan.size.r_drop or "train.r_drop" in self.fixed or plan.passes < TWICE:
            return plan
        dropout = round(plan.config.model.dropout * 2 / 3, 2)
        try:
            config = self._set(plan.config, model={"dropout": dropout}, train={"r_drop": R_DROP})
        except UsageError:  # it cannot go with guided alignment, or without dropout
            return plan
        twice = self._timed(config, plan.size, seconds_a_pass(config, self.prepared, self.ranks))
        if twice.passes < TWICE:
            return plan
        self.reasons.append(f"auto: R-Drop {R_DROP:g}: there is time to take {TWICE} passes or more twice each")
        return twice

    def _settle(self, plan: Plan, text: Size) -> Config:
        """Return the config of a plan, with length, warm-up, dropout and intervals."""
        config = plan.config
        steps, why = self._length(plan)
        made = min(steps / plan.updates, config.train.epochs or math.inf)
        if not config.train.r_drop:  # few passes over the text do not overfit
            config = self._set(config, model={"dropout": round(text.model.dropout * min(1.0, made / text.passes), 2)})
        parts = max(1, round(steps / max(50, min(1000, steps / 10))))  # alike, so that none comes just before the end
        often = {"validate_every": math.ceil(steps / parts), "log_every": max(1, min(50, steps // 20))}
        config = self._set(config, train={"steps": steps, "warmup": min(1000, max(20, steps // 10)), **often})
        suits = "as you say" if "model.dropout" in self.fixed else f"for {made:.1f} passes over a text of this size"
        length = f"{steps:,} steps of {config.train.tokens_per_step:,} tokens, {made:.1f} passes over the text ({why})"
        seconds = made * plan.seconds
        duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        lasting = f"about {duration} by the first steps' speed"
        self.reasons += [
            f"auto: {shape(config.model)}, dropout {config.model.dropout:g} {suits}",
            f"auto: {length}: {lasting}; --set train.steps=N changes this",
        ]
        return config

    def _length(self, plan: Plan) -> tuple[int, str]:
        """Return the number of steps, and the reason."""
        if self.steps:
            return self.steps, "as you say"
        steps, epochs = round(min(plan.size.passes, plan.passes) * plan.updates), plan.config.train.epochs
        if steps < FEWEST and not epochs:
            longer = f", so longer than {self.budget / 60:g} min" if plan.passes * plan.updates < FEWEST else ""
            return FEWEST, f"fewer steps teach nothing{longer}"
        why = f"{plan.size.passes:g} are enough"
        if plan.passes < plan.size.passes:
            why = "as you say" if plan.passes == epochs else f"all that {self.budget / 60:g} min allow"
        return max(1, steps), why

    def _suited(self, model: ModelConfig) -> Config:
        """Return a config for this model, with a suitable optimizer, schedule and learning rate."""
        if not self.trained:
            if isinstance(model, TranslationConfig) and not self.config.tokenizer.shared:
                model = dataclasses.replace(model, tie="output")
            if isinstance(model, AttentionModelConfig):
                model = dataclasses.replace(model, norm="pre")
        # If the rate falls to zero, an average of the last weights is worse than the last weights.
        train: dict[str, Any] = {"tokens_per_step": self._tokens_per_step(math.inf), "clip": 1.0, "average": 0}
        train["schedule"] = "wsd" if isinstance(model, TransformerConfig) else "cosine"
        # Muon learns more from an update, but it is too slow on a CPU and needs whole matrices.
        if isinstance(model, TransformerConfig) and self.device != "cpu" and self.config.train.parallel != "sharded":
            train["optimizer"] = "muon"
        if not isinstance(model, TranslationConfig):
            train["label_smoothing"] = 0.0  # validation measures the likelihood
        config = self._set(self.config, model=vars(model), train=train)
        # Rotary positions rotate pairs of numbers, and the user may have set an odd head width.
        if (
            isinstance(config.model, TransformerConfig | DecoderOnlyConfig)
            and not self.trained
            and not config.model.key_width % 2
        ):
            config = self._set(config, model={"positions": "rotary"})
        lower = ADAPTING_RATE if self.trained else 1.0
        return self._set(config, train={"learning_rate": round(lower * _rate(config), 5)})

    def _set(self, config: Config, **sections: Mapping[str, Any]) -> Config:
        """Return the config with these options, except those that the user has fixed."""
        free = {
            section: {key: value for key, value in values.items() if f"{section}.{key}" not in self.fixed}
            for section, values in sections.items()
        }
        return config.replace(**free)

    def _tokens_per_step(self, passes: float) -> int:
        """Return a batch size for at most so many passes, not below the user's micro-batches."""
        longest = max(self.config.data.max_length + 1, self.config.train.micro_tokens)
        return max(longest, tokens_per_step(self.tokens, passes * self.tokens, self.device))


def tokens_a_pass(store: TokenStore) -> int:
    """Return the target tokens, </s> included, of one pass over all weighted corpora."""
    weights = np.asarray(store.weights)[store.corpus]
    return max(1, round(float(weights @ (np.asarray(store.lengths("tgt")) + 1.0))))


def updates_a_pass(config: Config, prepared: PreparedText) -> int:
    """Return the updates in one pass: more than tokens / tokens_per_step, because of padding."""
    return len(updates_for(config, prepared).plan(0))


def seconds_a_pass(config: Config, prepared: PreparedText, ranks: int = 1) -> float:
    """Return the training time of one pass, measured on a few updates of a model that is then discarded.

    With several ranks, rank 0 measures its share of an update; communication is not counted.
    """
    spec = config.train
    share = max(config.data.max_length + 1, spec.tokens_per_step // ranks)
    if choose_device(spec.device).type == "cpu":
        # A full update of a large model takes half a minute on a CPU; a small one measures the same.
        share = min(share, max(1024, config.data.max_length + 1))
    sizes = {"tokens_per_step": share, "micro_tokens": min(spec.micro_tokens, share)}
    trainer = trainer_for(config.replace(train=sizes), prepared)
    times: list[float] = []
    with closing(trainer.updates.starting(trainer.progress.position)) as steps:
        for _ in range(WARM_UP.get(trainer.device.type, 10)):
            trainer.step(next(steps))
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until or len(times) < 3:
            update = next(steps)
            start = time.perf_counter()
            trainer.step(update)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * len(trainer.updates.plan(0)) / ranks


def tokens_per_step(tokens: int, read: float, device: str) -> int:
    """About 100 updates a pass for small texts; never less than 2,048 tokens or more than the paper's 25,000.

    A CPU takes smaller ones, which cost it no more, and of the tokens that it can read in all makes 4,000 or more
    updates: in a short training many small ones teach more than a few large ones.
    """
    if device == "cpu":
        wanted, least, most = min(tokens / 200, read / 4000), 1024, 8192
    else:
        wanted, least, most = tokens / 100, 2048, 25_000
    return min(most, max(least, 1 << round(math.log2(max(1, wanted)))))


def _rate(config: Config) -> float:
    """Return the peak learning rate, larger for narrow models; the paper's schedule takes it as a factor."""
    if config.train.schedule == "paper":
        return 1.0
    rate, width = (4e-3, 256) if config.train.optimizer == "muon" else (1e-3, 512)
    return rate * math.sqrt(width / config.model.d_model)


def _many(count: float) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,.0f}"
