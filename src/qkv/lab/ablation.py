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
NOTHING = "it has no effect on the results: leave it out"
NOT_COMPARABLE = {
    "train.steps": LENGTH,
    "train.epochs": LENGTH,
    "train.patience": "all trainings run to their end: leave it out",
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


def measure(
    config: Config,
    changes: Sequence[str],
    *,
    out: str | Path,
    steps: int = 0,
    equal: str = "time",
    seeds: int = 3,
    jobs: int = 0,
    device: str = "auto",
    output: Sequence[str] = (),
    command: str = "",
) -> dict[str, Any]:
    """Train the recipe and each changed recipe, print the table and write it to `output`.

    With `equal="time"` a change with slower updates gets fewer of them, from the time per update measured beforehand,
    and its schedule is scaled. `out` is the working directory: the same directory resumes an interrupted table.
    """
    result_tables.check_outputs(output)
    if equal not in EQUAL:
        raise UsageError(f"--equal {equal}: choose one of {', '.join(EQUAL)}")
    if not isinstance(config.model, TranslationConfig):
        raise UsageError(
            f'lab ablate compares BLEU, which model.kind = "{config.model.kind}" has not: use a translation model'
        )
    folder = Path(out)
    # No early stopping: all trainings run to their planned end.
    base = config.replace(train={"device": device, "tensorboard": False, "patience": 0})
    if steps:
        base = base.replace(train={"steps": steps, "epochs": 0.0})
    variants = {BASELINE: base} | {change: _apply_change(base, change) for change in changes}
    texts = {name: trials.prepare_text(variant, folder) for name, variant in variants.items()}
    _check_same_validation(texts)
    # A recipe in epochs needs a trainer to count its updates.
    count = trainer_for(base, texts[BASELINE]).plan().last_step if base.train.epochs else base.train.steps
    variants = {name: each.replace(train={"steps": count, "epochs": 0.0}) for name, each in variants.items()}
    if equal == "time":
        variants = _equalise_time(variants, texts, folder)
    planned = [
        Trial(name, variant.replace(train={"seed": seed}), texts[name])
        for seed in range(1, seeds + 1)
        for name, variant in variants.items()
    ]
    finished = trials.run_all(planned, folder, jobs=jobs or trials.default_jobs(device))
    results = {name: [each for each in finished if each.name == name] for name in variants}
    result = {
        **result_tables.provenance(device, command),
        "equal": equal,
        "text": trials.describe_text(base, texts[BASELINE]),
        "trials": [each.to_dict() for row in results.values() for each in row],
    }
    title = f"Changes of a recipe at equal {equal}, {seeds} seeds; {result['text']}"
    result_tables.publish(result, [_result_table(title, results)], [], output)
    return result


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
    fitted = {}
    for name, variant in variants.items():
        now = {what: getattr(variant.train, what) for what in ("steps", "warmup", "validate_every")}
        share = seconds[BASELINE] / seconds[name]
        fitted[name] = variant.replace(
            train={what: max(1, round(value * share)) if value else 0 for what, value in now.items()}
        )
    return fitted


def seconds_per_update(config: Config, prepared: PreparedText) -> float:
    return auto_recipe.seconds_a_pass(config, prepared) / auto_recipe.updates_a_pass(config, prepared)


def _result_table(title: str, by_name: dict[str, list[Result]]) -> result_tables.ResultTable:
    good = {name: [each for each in results if not each.error] for name, results in by_name.items()}
    bleus = {name: [result.bleu for result in results] for name, results in good.items()}
    losses = {name: [result.loss for result in results] for name, results in good.items()}
    spread = result_tables.pooled_deviation(bleus.values())
    rows = []
    for name, results in good.items():
        gained = ""
        if name != BASELINE and bleus[name] and bleus[BASELINE]:
            gain = result_tables.difference(bleus[name], bleus[BASELINE], spread)
            verdict = "significant" if gain.significant else "within the noise"
            gained = str(gain) if math.isnan(gain.noise) else f"{gain}: {verdict}"
        steps = f"{results[0].steps:,}" if results else "failed"
        mean = [result_tables.mean_and_deviation(values[name], digits) for values, digits in ((bleus, 2), (losses, 3))]
        seconds = result_tables.mean_and_deviation([result.seconds for result in results], 0)
        rows.append((name, *mean, gained, steps, seconds))
    columns = ("change", "BLEU", "loss at the end", "BLEU gained", "updates", "seconds of training")
    return result_tables.ResultTable(title, columns, tuple(rows))
