"""What the automatic recipe is worth: against the paper's base preset, on the same text and in the same time.

    python benchmarks/auto_sizes.py train.en train.de valid.en valid.de --pairs 1000 --pairs 30000 --minutes 1 -o a.json

For each size the first so many pairs are trained on three times: as `qkv train --src … --tgt … --minutes …` would, and
with `paper_base` for as many updates as take as long, by the time of an update measured beforehand. Its warm-up of
4,000 updates may be longer than all of that, so it is also trained with one of a tenth of its updates, to the paper's
peak rate. All use the subwords of the automatic recipe. Scores are BLEU with a beam of 4 on the validation set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import Any

from qkv import auto, presets
from qkv import config as configs
from qkv.data.lines import Lines
from qkv.data.store import Prepared
from qkv.lab import figures, trials
from qkv.lab.ablation import seconds_an_update
from qkv.lab.trials import Result, Trial

AUTO, PAPER, QUICKER = "auto", "paper_base", "paper_base, warm-up in proportion"


def text(files: list[str], pairs: int, folder: Path) -> configs.Config:
    """A config of the first so many pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    cut = [folder / f"{pairs}.src", folder / f"{pairs}.tgt"]
    for name, path in zip(files, cut, strict=False):
        path.write_text("".join(f"{line}\n" for line in islice(Lines(name), pairs)), encoding="utf-8")
    train, valid = configs.Corpus(src=str(cut[0]), tgt=str(cut[1])), configs.Corpus(src=files[2], tgt=files[3])
    return configs.Config(data=configs.Data(train=(train,), valid=(valid,)))


def paper(config: configs.Config, prepared: Prepared, seconds: float) -> dict[str, configs.Config]:
    """The preset, and the same with a shorter warm-up, for so many seconds."""
    base = presets.paper_base()
    usual = dataclasses.replace(config, model=base.model, train=base.train).replace(train={"tensorboard": False})
    steps = max(1, round(seconds / seconds_an_update(usual, prepared)))
    usual = usual.replace(train={"steps": steps, "validate_every": max(1, steps // 10), "metric": "loss"})
    peak = (base.model.d_model * base.train.warmup) ** -0.5
    quicker = {"schedule": "inverse_sqrt", "learning_rate": peak, "warmup": max(1, steps // 10)}
    return {PAPER: usual, QUICKER: usual.replace(train=quicker)}


def measure(files: list[str], pairs: int, minutes: float, folder: Path) -> list[Result]:
    config = text(files, pairs, folder)
    prepared = trials.prepare_text(config, folder)
    chosen, reasons = auto.choose(config, prepared, minutes)
    print(*reasons, sep="\n", flush=True)
    chosen = chosen.replace(train={"tensorboard": False, "metric": "loss"})
    (ours,) = trials.run_all([Trial(AUTO, chosen, prepared)], folder)
    theirs = paper(config, prepared, ours.seconds)
    return [ours, *trials.run_all([Trial(name, each, prepared) for name, each in theirs.items()], folder)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=4)
    parser.add_argument("--pairs", type=int, action="append", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", default="runs/auto_sizes")
    parser.add_argument("-o", "--output", required=True)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for pairs in given.pairs:
        for result in measure(given.files, pairs, given.minutes, Path(given.out) / str(pairs)):
            rows.append({"pairs": pairs, "seconds": result.seconds, **result.to_dict()})
            print(
                f"{pairs:,} pairs, {result.name}: BLEU {result.bleu:.2f}, loss {result.loss:.3f}, {result.steps:,} "
                f"updates in {result.seconds:.0f} s, {result.parameters / 1e6:.1f} million parameters {result.error}",
                flush=True,
            )
            report = {**figures.about("auto", " ".join(given.files)), "minutes": given.minutes, "rows": rows}
            Path(given.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
