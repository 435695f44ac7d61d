"""Ablation: train a recipe with and without each change, at equal time and with several seeds, and compare BLEU.

A change is written as on the command line, `train.r_drop=5`; several options are separated by spaces. Each change is
compared with the unchanged recipe on the validation set, and the table marks differences larger than the noise.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkv.api import auto_recipe
from qkv.assembly import trainer_for
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.lab import result_tables, trials
from qkv.lab.trials import Result, Trial
from qkv.options import Config, TranslationConfig, option_path

BASELINE = "as it is"
EQUAL = ("time", "steps")

# Options that a row may not change, with the reason: the rows could not be compared, or would be equal.
LENGTH = "the length of each training follows from the unchanged recipe: set its updates with --steps"
NOTHING = "it has no effect on the results: omit it"
NOT_COMPARABLE = {
    "train.steps": LENGTH,
    "train.epochs": LENGTH,
    "train.patience": "all trainings run to their end: omit it",
    "train.seed": "all rows use the same seeds: set their number with --seeds",
    "train.device": "all rows are trained on one device: choose it with --device",
    "train.parallel": NOTHING,
    "train.metric": NOTHING,
    "train.log_every": NOTHING,
    "train.tensorboard": NOTHING,
    "train.name": NOTHING,
    "data.store": "the tokenised text is stored in the working folder: choose that with --out",
    "data.workers": NOTHING,
}


def measure(config: Config, changes: Sequence[str], *, equal: str = "time", **shared: Any) -> dict[str, Any]:
    """Train the recipe and each changed recipe, print the table and write it to the outputs.

    With `equal="time"` a change with slower updates gets fewer of them, from the time per update measured beforehand,
    and its schedule is scaled. `shared` has the options of an `Experiment`; its steps are of the unchanged recipe.
    """
    experiment = result_tables.Experiment(**shared)
    if equal not in EQUAL:
        raise UsageError(f"--equal {equal}: choose one of {', '.join(EQUAL)}")
    if not isinstance(config.model, TranslationConfig):
        raise UsageError(
            f'lab ablate needs BLEU, which model.kind = "{config.model.kind}" does not have: use a translation model'
        )
    # No early stopping: all trainings run to their planned end.
    base = config.replace(train={"device": experiment.device, "tensorboard": False, "patience": 0})
    if experiment.steps:
        base = base.replace(train={"steps": experiment.steps, "epochs": 0.0})
    variants = {BASELINE: base} | {change: _apply_change(base, change) for change in changes}
    texts = {name: trials.prepare_text(variant, experiment.folder) for name, variant in variants.items()}
    _check_same_validation(texts)
    # A recipe in epochs needs a trainer to count its updates.
    count = trainer_for(base, texts[BASELINE]).plan().last_step if base.train.epochs else base.train.steps
    variants = {name: each.replace(train={"steps": count, "epochs": 0.0}) for name, each in variants.items()}
    if equal == "time":
        variants = _equalise_time(variants, texts, experiment.folder)
    by_name = experiment.run(variants, texts)
    text = trials.describe_text(base, texts[BASELINE])
    title = f"Changes of a recipe at equal {equal}, {experiment.seeds} seeds; {text}"
    return experiment.publish({"equal": equal, "text": text}, by_name, [_table(title, by_name)], [])


def _apply_change(base: Config, change: str) -> Config:
    settings = shlex.split(change)
    for path in map(option_path, settings):
        if path in NOT_COMPARABLE:
            raise UsageError(f"--try {change}: {path} cannot differ between rows, because {NOT_COMPARABLE[path]}")
    return base.assign(settings)


def _check_same_validation(texts: dict[str, PreparedText]) -> None:
    """Refuse changes that alter the validation text, on which BLEU is measured."""
    validation = {name: [path.read_bytes() for path in text.valid_text] for name, text in texts.items()}
    for name, sentences in validation.items():
        if sentences != validation[BASELINE]:
            raise UsageError(
                f"--try {name}: it would be measured on other validation text than the unchanged recipe: "
                f"give one text to all rows with --valid-src and --valid-tgt"
            )


def _equalise_time(variants: dict[str, Config], texts: dict[str, PreparedText], folder: Path) -> dict[str, Config]:
    """Return every variant with the updates, warm-up and validation interval that fit the unchanged recipe's time."""
    seconds = {
        name: trials.cached_seconds(Trial(name, variant, texts[name]), folder, seconds_per_update)
        for name, variant in variants.items()
    }

    def fit(name: str, steps: int) -> int:
        return max(1, round(steps * seconds[BASELINE] / seconds[name])) if steps else 0

    return {
        name: variant.replace(
            train={what: fit(name, getattr(variant.train, what)) for what in ("steps", "warmup", "validate_every")}
        )
        for name, variant in variants.items()
    }


def seconds_per_update(config: Config, prepared: PreparedText) -> float:
    return auto_recipe.seconds_a_pass(config, prepared) / auto_recipe.updates_a_pass(config, prepared)


def _table(title: str, by_name: dict[str, list[Result]]) -> result_tables.ResultTable:
    bleus = {name: [result.bleu for result in good] for name, good in result_tables.successful(by_name).items()}
    spread = result_tables.pooled_deviation(bleus.values())

    def cells(name: str, good: list[Result]) -> Sequence[str]:
        gained = ""
        if name != BASELINE and good and bleus[BASELINE]:
            gain = result_tables.difference(bleus[name], bleus[BASELINE], spread)
            verdict = "significant" if gain.significant else "within the noise"
            gained = str(gain) if math.isnan(gain.noise) else f"{gain}: {verdict}"
        return (
            result_tables.mean_and_deviation(bleus[name]),
            result_tables.mean_and_deviation([result.loss for result in good], 3),
            gained,
            f"{good[0].steps:,}" if good else "failed",
            result_tables.mean_and_deviation([result.seconds for result in good], 0),
        )

    columns = ("change", "BLEU", "loss at the end", "BLEU gained", "updates", "seconds of training")
    return result_tables.result_table(title, columns, by_name, cells)
