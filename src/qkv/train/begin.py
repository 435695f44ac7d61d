"""From a config to a trained run folder: prepare the text, settle the recipe, train, write the card."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from qkv import config as configs
from qkv import files
from qkv.data.store import Prepared, prepare
from qkv.device import choose_device, describe
from qkv.errors import UsageError
from qkv.models.transformer import build, parameter_count
from qkv.run import Run
from qkv.train.card import card
from qkv.train.loop import fit
from qkv.train.progress import bars

Recipe = Callable[[configs.Config, Prepared], tuple[configs.Config, list[str]]]


def train(
    config: configs.Config | None = None,
    run: str | Path | None = None,
    *,
    resume: bool = False,
    recipe: Recipe | None = None,
    settings: list[str] | None = None,
    command: str = "",
) -> Run:
    """Train a model and return its run folder; by default `runs/NAME` with the config's `train.name`.

    `recipe` completes the config once the text is known (see `qkv.auto`); `settings` are `section.key=value` strings
    that have the last word. With `resume`, training goes on from the newest state in the folder, or begins.
    """
    folder = Path(run) if run is not None else Path("runs") / (config.train.name if config else "model")
    if resume:
        opened = _reopen(folder, settings or [])
    else:
        if config is None:
            raise UsageError("nothing to train on: give a preset, a config file, or --src and --tgt")
        opened = _begin(folder, configs.assign(config, settings or []), command)
    config = opened.config
    with bars() as report:
        prepared = prepare(config.data, config.tokenizer, opened.store, progress=report, seed=config.train.seed)
    prepared.tokenizers.save(opened.path / "tokenizer.json")
    say(str(prepared.report))
    if recipe is not None and not resume:
        config, reasons = recipe(config, prepared)
        config = configs.assign(config, settings or [])
        for reason in reasons:
            say(reason)
        opened.write_config(config)
    say(_headline(config, prepared))
    fit(opened, prepared)
    files.write_text(opened.path / "card.md", card(opened, prepared))
    return opened


def _begin(folder: Path, config: configs.Config, command: str) -> Run:
    if not config.data.train:
        raise UsageError("nothing to train on: give --src and --tgt, or data.train in the config")
    if Run(folder).exists():
        raise UsageError(f"{folder} holds a run already: add --resume to go on with it, or name another folder with --run")
    return Run.create(folder, config, command)


def _reopen(folder: Path, settings: list[str]) -> Run:
    run = Run.open(folder)
    changed = configs.assign(run.config, settings)
    fixed = [path for path, _, _ in configs.difference(run.config, changed) if not path.startswith(("train.", "decode."))]
    if fixed:
        raise UsageError(f"--resume cannot change {', '.join(fixed)}: the weights depend on it; begin a new run instead")
    run.write_config(changed)
    return run


def _headline(config: configs.Config, prepared: Prepared) -> str:
    """One line about what is about to be trained."""
    src, tgt = prepared.tokenizers.src.size, prepared.tokenizers.tgt.size
    size = parameter_count(build(config.model, src, tgt))
    vocab = f"{tgt:,} tokens" if prepared.tokenizers.shared else f"{src:,} + {tgt:,} tokens"
    return (
        f"{config.model.kind}, {size / 1e6:.1f} million parameters, vocabulary {vocab}, "
        f"{len(prepared.train):,} pairs, on {describe(choose_device(config.train.device))}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
