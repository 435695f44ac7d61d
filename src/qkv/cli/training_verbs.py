"""Verbs that make a model: train, average, and config, which shows what would be trained."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli import arguments
from qkv.cli.arguments import RunArgument, Settings, command_line, with_more, with_pairs, with_text
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.assembly import Run
    from qkv.config import Config
    from qkv.data.store import Prepared
if TYPE_CHECKING:
    from qkv.api.pair_filters import Noise


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
    from qkv.api import auto_recipe
    from qkv.api.run_training import train as begin
    from qkv.assembly import Run
    from qkv.config import path_of

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
        return auto_recipe.choose(config, prepared, minutes, fixed=fixed, ranks=ranks, trained=source is not None)

    begin(config, run, recipe=None if what else recipe, settings=changed, start=source, command=command_line())


def _given(what: str | None, start: Run | None) -> Config | None:
    """What the command line names to train: a config, or that of the run to begin with, whose length was its own."""
    from qkv.config import TrainConfig
    from qkv.console import say
    from qkv.presets import find_config

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
    from qkv.api.run_training import average_last

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
    from qkv.presets import find_config

    shown = configs.assign(find_config(what), settings or [])
    if other is None:
        print(configs.dumps(shown), end="")
        return
    for path, ours, theirs in configs.difference(shown, find_config(other)):
        print(f"{path}\t{ours}\t{theirs}")


# ---- The verb augment: a trained model and text make a corpus to train on --------------------------------------------


class Kind(StrEnum):
    """What the pairs are for, which decides the side that the translation is on."""

    back = "back-translation"
    own = "self-training"
    distilled = "distillation"


class Reason(StrEnum):
    """For what pairs are left out, unless it is allowed."""

    repeated = "repeated"
    unfinished = "unfinished"
    looped = "looped"
    copy = "copy"
    ratio = "ratio"


# Options that are handed on as they are, if they are given.
HANDED_ON = """
    references closest_by beam sample temperature top_k top_p min_p seed rerank candidates tag others weights
    dtype device workers
""".split()

As = Annotated[
    Kind,
    typer.Option("--as", help="back-translation: RUN translates target text to the source; the others: source text."),
]
Output = Annotated[
    str,
    typer.Option("--output", "-o", help="Pairs to write, .tsv or .jsonl; was it interrupted, it goes on. - is .tsv."),
]
References = Annotated[
    str | None,
    typer.Option(help="Of distillation: references, line by line; the translation closest to each is taken."),
]
ClosestBy = Annotated[str, typer.Option(help="Closest to the reference by bleu or chrf.")]
WithNoise = Annotated[
    bool, typer.Option("--noise", help="Noise on the source side: --drop 0.1 --blank 0.1 --shuffle 3.")
]
Drop = Annotated[float | None, typer.Option(help="Share of source words dropped.")]
Blank = Annotated[float | None, typer.Option(help="Share of source words blanked.")]
Shuffle = Annotated[int | None, typer.Option(help="Places that a source word may move.")]
Allow = Annotated[list[Reason] | None, typer.Option(help="Leave nothing out for this reason; may be repeated.")]
MaxRatio = Annotated[float, typer.Option(help="Longest side to the shortest, in tokens; 0: no limit.")]
MinLogprob = Annotated[float | None, typer.Option(help="Least log-probability of a token, on average.")]
Keep = Annotated[float, typer.Option(help="Share to keep of the pairs that pass all else, the likeliest.")]
RoundTrip = Annotated[
    Path | None, typer.Option(metavar="RUN", help="A run of the other direction, which says how likely pairs are.")
]
Seed = Annotated[int, typer.Option(help="Of samples and noise.")]
Candidates = Annotated[int | None, typer.Option(help="How many --rerank or --references choose from.")]
BadLines = Annotated[arguments.OnBad, typer.Option(help="A line that is not UTF-8: error, or skip it.")]


def augment(
    context: typer.Context,
    run: arguments.RunArgument,
    kind: As,
    text: arguments.TextFile = "-",
    output: Output = "-",
    references: References = None,
    closest_by: ClosestBy = "bleu",
    noise: WithNoise = False,
    drop: Drop = None,
    blank: Blank = None,
    shuffle: Shuffle = None,
    allow: Allow = None,
    max_ratio: MaxRatio = 3.0,
    min_logprob: MinLogprob = None,
    keep: Keep = 1.0,
    round_trip: RoundTrip = None,
    beam: arguments.Beam = None,
    sample: arguments.Sample = False,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    seed: Seed = 1,
    rerank: arguments.Rerank = None,
    candidates: Candidates = None,
    tag: arguments.Tag = "",
    others: arguments.With = None,
    weights: arguments.Weights = "",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "auto",
    workers: arguments.Workers = None,
    on_bad: BadLines = arguments.OnBad.error,
) -> None:
    """Make a corpus of text and a model's translations of it: what `qkv train --also` reads.

    What is left out is counted and told. With --output a file of any size: stopped or killed, the same command goes on
    where it was. On several GPUs: torchrun --nproc-per-node 8 -m qkv augment RUN TEXT -o OUTPUT --as KIND
    """
    from qkv.api import augment as make
    from qkv.api.file_translation import Crew, count_lines
    from qkv.api.pair_filters import Filters
    from qkv.console import counter, say

    asked = {name: context.params[name] for name in HANDED_ON}
    how = {name: value for name, value in asked.items() if value is not None and value is not False and value != ""}
    first = not Crew.here().rank
    total = count_lines(text) if first and sys.stderr.isatty() else None
    with counter("augmenting", total, shown=first) as advance:
        made = make(
            run,
            text,
            output,
            kind=kind.value,
            noise=_noise(noise, drop, blank, shuffle),
            filters=Filters(max_ratio, min_logprob, keep, tuple(reason.value for reason in allow or ())),
            back=round_trip,
            on_bad=on_bad.value,
            command=arguments.command_line(),
            progress=advance,
            **how,
        )
    if first:
        say(str(made))


def _noise(usual: bool, drop: float | None, blank: float | None, shuffle: int | None) -> Noise:
    """Of what is not given there is as much as is usual, or none."""
    from qkv.api.pair_filters import EDUNOV, Noise

    base = EDUNOV if usual else Noise()
    return Noise(
        base.drop if drop is None else drop,
        base.blank if blank is None else blank,
        base.shuffle if shuffle is None else shuffle,
    )
