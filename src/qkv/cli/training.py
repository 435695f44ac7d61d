"""Verbs that make a model: train, average, and config, which shows what would be trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import RunArgument, Settings, command_line
from qkv.errors import UsageError

if TYPE_CHECKING:
    from qkv.config import Config, Corpus
    from qkv.data.store import Prepared


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

    Two files (--src, --tgt) make a model that translates, one (--text) a language model. With --from a trained model
    goes on learning, from other text.
    """
    from qkv import auto
    from qkv.config import Train
    from qkv.run import Run, find_config
    from qkv.terminal import say
    from qkv.train.begin import train as begin

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt or also or valid_src or valid_tgt or text or valid_text or minutes or start:
            raise UsageError("--resume takes what the run folder holds: give --run, and --set if need be, alone")
        begin(run=run, resume=True, settings=changed)
        return
    if what and minutes:
        raise UsageError(f"--minutes is for an automatic recipe: {what} says itself how long it trains (train.steps)")
    config = find_config(what) if what else None
    if what and Path(what).is_dir() and not start:
        say(f"{what}: its config, and new weights: to go on with those it has, give --from {what}")
    source = Run.open(start) if start else None
    if config is None and source is not None:
        config = dataclasses.replace(source.config, train=Train())
    if text or valid_text:
        if src or tgt or also or valid_src or valid_tgt:
            raise UsageError("--text is for models without a source, --src and --tgt for those with one: give either")
        config = _with_text(config, text or [], valid_text)
    else:
        config = _also(with_corpora(config, src or [], tgt or [], valid_src, valid_tgt), also or [])
    fixed = {setting.partition("=")[0].strip() for setting in changed}
    if minutes and "train.steps" in fixed:
        raise UsageError("--minutes and --set train.steps both say how long to train: give one of them")

    def recipe(config: Config, prepared: Prepared, ranks: int) -> tuple[Config, list[str]]:
        return auto.choose(config, prepared, minutes, fixed=fixed, ranks=ranks, trained=source is not None)

    begin(config, run, recipe=None if what else recipe, settings=changed, start=source, command=command_line())


def with_corpora(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """The config with the corpora that the command line names."""
    from qkv import config as configs

    if config is None and not src:
        raise UsageError("nothing to train on: give a preset, a config file, --src and --tgt, or --text")
    if tgt and len(tgt) != len(src):
        raise UsageError(f"{len(src)} --src but {len(tgt)} --tgt: give one for each")
    if valid_tgt and not valid_src:
        raise UsageError(f"--valid-tgt {valid_tgt}: give --valid-src too")
    config = config or configs.Config()
    data = config.data
    if src:
        corpora = tuple(configs.Corpus(src=s, tgt=t) for s, t in zip(src, tgt or [""] * len(src), strict=True))
        data = dataclasses.replace(data, train=corpora, valid=(), root="")
    if valid_src:
        data = dataclasses.replace(data, valid=(configs.Corpus(src=valid_src, tgt=valid_tgt or ""),))
    return dataclasses.replace(config, data=data)


def _also(config: Config, also: list[str]) -> Config:
    """The config with more corpora beside those that it has."""
    if also and not config.data.valid:
        # What is held out is a part of everything: the best checkpoint would be the one most like a machine's text.
        raise UsageError(
            f"--also {also[0]}: what was made by a model is no text to validate on: give --valid-src and --valid-tgt"
        )
    more = tuple(_corpus(each, config.data.root) for each in also)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(*config.data.train, *more)))


def _corpus(given: str, root: str) -> Corpus:
    """A corpus as --also has it: FILE, FILE:WEIGHT or FILE:WEIGHT:TAG."""
    from qkv import config as configs

    # A name may hold colons of its own: the longest that is a file is one.
    ends = [*(i for i, letter in enumerate(given) if letter == ":"), len(given)]
    end = next((end for end in reversed(ends) if Path(given[:end]).exists()), ends[0])
    name, (weight, _, tag) = given[:end], given[end + 1 :].partition(":")
    try:
        value = float(weight or "1")
    except ValueError:
        raise UsageError(f'--also {given}: "{weight}" is no weight: write FILE:WEIGHT, e.g. {name}:0.5') from None
    # On the command line a path starts from here, in a config from its root.
    path = str(Path(name).absolute()) if root and name != "-" else name
    return configs.Corpus(src=path, weight=value, tag=tag)


def _with_text(config: Config | None, text: list[str], valid_text: str | None) -> Config:
    """The config with the plain text that the command line names; without any, it is of a language model."""
    from qkv import config as configs

    if config is None and not text:
        raise UsageError(f"--valid-text {valid_text}: give --text too")
    config = config or configs.Config(model=configs.DecoderOnly())
    data = config.data
    if text:
        data = dataclasses.replace(data, train=tuple(configs.Corpus(text=t) for t in text), valid=(), root="")
    if valid_text:
        data = dataclasses.replace(data, valid=(configs.Corpus(text=valid_text),))
    return dataclasses.replace(config, data=data)


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
