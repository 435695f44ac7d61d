"""Verbs that make a model: train, average, and config, which shows what would be trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.corpora import with_more, with_pairs, with_text
from qkv.cli.options import RunArgument, Settings, command_line
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.config import Config
    from qkv.data.store import Prepared
    from qkv.run import Run


def train(
    what: Annotated[str | None, typer.Argument(metavar="PRESET|CONFIG", help="A preset's name or a TOML file.")] = None,
    src: Annotated[
        list[str] | None, typer.Option(help="Source text, or a .tsv/.jsonl file with both sides; may be repeated.")
    ] = None,
    tgt: Annotated[list[str] | None, typer.Option(help="Target text, line by line; one for each --src.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:WEIGHT[:TAG]]",
            help="More pairs, .tsv or .jsonl, e.g. of qkv augment: WEIGHT times an epoch, after TAG; may be repeated.",
        ),
    ] = None,
    valid_src: Annotated[
        str | None, typer.Option(help="Validation source; by default a part of the text is held out.")
    ] = None,
    valid_tgt: Annotated[str | None, typer.Option(help="Validation target.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Plain text, for a model without a source; may be repeated.")
    ] = None,
    valid_text: Annotated[
        str | None, typer.Option(help="Validation text; by default the end of it is held out.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Begin with this run's weights, e.g. to adapt it to other text."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder to make.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    minutes: Annotated[
        float, typer.Option(min=0, help="Length of an automatic recipe, 100 steps at least; 0: 30, or 60 on a GPU.")
    ] = 0.0,
    on_bad: Annotated[
        str | None, typer.Option(help="A line that is not UTF-8: error, or skip the pair.", show_default=False)
    ] = None,
) -> None:
    """Train a model: from a preset, a config file, or text files and nothing else.

    Two files (--src, --tgt) make a model that translates, one (--text) a language model. --from adapts a trained one.
    """
    from qkv import auto
    from qkv.config import path_of
    from qkv.run import Run
    from qkv.train.begin import train as begin

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt or also or valid_src or valid_tgt or text or valid_text or minutes or start:
            raise UsageError("--resume takes what the run folder holds: give --run, and --set if need be, alone")
        begin(run=run, resume=True, settings=changed)
        return
    if what and minutes:
        raise UsageError(f"--minutes is for an automatic recipe: {what} says itself how long it trains (train.steps)")
    source = Run.open(start) if start else None
    config = _given(what, source)
    if text or valid_text:
        if src or tgt or also or valid_src or valid_tgt:
            raise UsageError("--text is for models without a source, --src and --tgt for those with one: give either")
        config = with_text(config, text or [], valid_text)
    else:
        config = with_more(with_pairs(config, src or [], tgt or [], valid_src, valid_tgt), also or [])
    fixed = set(map(path_of, changed))
    if minutes and "train.steps" in fixed:
        raise UsageError("--minutes and --set train.steps both say how long to train: give one of them")

    def recipe(config: Config, prepared: Prepared, ranks: int) -> tuple[Config, list[str]]:
        return auto.choose(config, prepared, minutes, fixed=fixed, ranks=ranks, trained=source is not None)

    begin(config, run, recipe=None if what else recipe, settings=changed, start=source, command=command_line())


def _given(what: str | None, start: Run | None) -> Config | None:
    """What the command line names to train: a config, or that of the run to begin with, whose length was its own."""
    from qkv.config import TrainConfig
    from qkv.run import find_config
    from qkv.terminal import say

    if what is None:
        return None if start is None else dataclasses.replace(start.config, train=TrainConfig())
    if Path(what).is_dir() and start is None:
        say(f"{what}: its config, and new weights: to go on with those it has, give --from {what}")
    return find_config(what)


def average(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many of the last checkpoints; 0: all that are kept.")] = 0,
    name: Annotated[str, typer.Option(help="What to call the result.", show_default="average_N")] = "",
) -> None:
    """Average the last checkpoints of a run into new weights (use them with --weights)."""
    from qkv.train.average import average_last

    path, checkpoints = average_last(run, last, name)
    print(f"{path}: average of {', '.join(each.stem for each in checkpoints)}")


def config(
    what: Annotated[str, typer.Argument(metavar="PRESET|CONFIG|RUN", help="What to show and check.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Show only where it differs from this one.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Show and check a config, or compare two."""
    from qkv import config as configs
    from qkv.run import find_config

    shown = configs.assign(find_config(what), settings or [])
    if other is None:
        print(configs.dumps(shown), end="")
        return
    for path, ours, theirs in configs.difference(shown, find_config(other)):
        print(f"{path}\t{ours}\t{theirs}")
