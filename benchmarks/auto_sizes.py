"""Compare the automatic recipe with the paper's base preset on the same text in the same time, by size of the text.

    python benchmarks/auto_sizes.py train.en train.de valid.en valid.de -o sizes.json [--jobs 6] [--out work]
        --pairs 1000 --minutes 0.25 --pairs 30000 --minutes 0.5

For each size, three trainings use the first `--pairs` pairs: the automatic recipe, as in `qkv train --src … --tgt …
--minutes …`; `paper_base` with as many updates as fit in the same time; and `paper_base` with a warm-up of a tenth of
its updates to the paper's peak rate, because 4,000 updates of warm-up may exceed the whole training. All use the
subwords of the automatic recipe. The time per update is measured first, one model at a time; then `--jobs` trainings
run in parallel. Scores are BLEU with beam 4 on the validation set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from itertools import islice
from pathlib import Path

from qkv import presets
from qkv.api import auto_recipe
from qkv.core.dataset import PreparedText
from qkv.data.formats import LineReader
from qkv.lab import result_tables, trials
from qkv.lab.ablation import seconds_per_update
from qkv.lab.trials import Trial
from qkv.options import Config, CorpusConfig, DataConfig

AUTO, PAPER, QUICKER = "auto", "paper_base", "paper_base, warm-up in proportion"


def text(files: list[str], pairs: int, folder: Path) -> tuple[Config, PreparedText]:
    """Return a config with the first `pairs` pairs, and the prepared text."""
    folder.mkdir(parents=True, exist_ok=True)
    cut = [folder / f"{pairs}.src", folder / f"{pairs}.tgt"]
    for name, path in zip(files, cut, strict=False):
        path.write_text("".join(f"{line}\n" for line in islice(LineReader(name), pairs)), encoding="utf-8")
    train, valid = (
        CorpusConfig(src=str(cut[0]), tgt=str(cut[1])),
        CorpusConfig(src=files[2], tgt=files[3]),
    )
    config = Config(data=DataConfig(train=(train,), valid=(valid,)))
    return config, trials.prepare_text(config, folder)


def plan(config: Config, prepared: PreparedText, minutes: float) -> tuple[dict[str, Config], float]:
    """Return automatic recipe, preset and preset with short warm-up, and the seconds of training for each."""
    chosen, reasons = auto_recipe.choose(config, prepared, minutes=minutes)
    print(*reasons, sep="\n", flush=True)
    seconds = chosen.train.steps * seconds_per_update(chosen, prepared)
    base = presets.paper_base()
    preset = dataclasses.replace(config, model=base.model, train=base.train)
    steps = max(1, round(seconds / seconds_per_update(preset, prepared)))
    preset = preset.replace(train={"steps": steps, "validate_every": max(1, steps // 10)})
    peak = (base.model.d_model * base.train.warmup) ** -0.5
    quicker = {"schedule": "inverse_sqrt", "learning_rate": peak, "warmup": max(1, steps // 10)}
    recipes = {AUTO: chosen, PAPER: preset, QUICKER: preset.replace(train=quicker)}
    return {
        name: each.replace(train={"tensorboard": False, "metric": "loss"}) for name, each in recipes.items()
    }, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=4)
    parser.add_argument("--pairs", type=int, action="append", required=True)
    parser.add_argument("--minutes", type=float, action="append", required=True, help="one per --pairs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/auto_sizes"))
    parser.add_argument("-o", "--output", required=True)
    given = parser.parse_args()
    if len(given.pairs) != len(given.minutes):
        parser.error("give one --minutes per --pairs")
    planned: list[Trial] = []
    plans = []
    for pairs, minutes in zip(given.pairs, given.minutes, strict=True):
        config, prepared = text(given.files, pairs, given.out)
        recipes, seconds = plan(config, prepared, minutes)
        planned += [Trial(f"{pairs} pairs, {name}", recipe, prepared) for name, recipe in recipes.items()]
        plans += [{"pairs": pairs, "recipe": name, "alone_seconds": seconds} for name in recipes]
    results = trials.run_all(planned, given.out, jobs=given.jobs)
    rows = [row | result.to_dict() for row, result in zip(plans, results, strict=True)]
    report = {**result_tables.provenance("auto", shlex.join(["python", *sys.argv])), "rows": rows}
    Path(given.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row, result in zip(plans, results, strict=True):
        print(
            f"{row['pairs']:,} pairs, {row['recipe']}: BLEU {result.bleu:.2f}, loss {result.loss:.3f}, "
            f"{result.steps:,} updates, {row['alone_seconds']:.0f} s if alone, "
            f"{result.parameters / 1e6:.1f} million parameters {result.error}"
        )


if __name__ == "__main__":
    main()
