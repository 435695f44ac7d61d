"""Verbs that train models: train, average, config, and augment, which makes training text."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli import arguments
from qkv.cli.arguments import (
    RunArgument,
    Settings,
    command_line,
    given,
    option,
    with_extra_pairs,
    with_pairs,
    with_text,
)
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api.pair_filters import WordNoise
    from qkv.assembly import Run
    from qkv.core.dataset import PreparedText
    from qkv.options import Config


def train(
    what: Annotated[
        str | None, typer.Argument(metavar="PRESET|CONFIG", help="Name of a preset, or a TOML file.")
    ] = None,
    src: Annotated[list[str] | None, option("Source text, or a .tsv/.jsonl file with both sides; repeatable.")] = None,
    tgt: Annotated[list[str] | None, option("Target text, line by line; one per --src.")] = None,
    also: Annotated[
        list[str] | None,
        option(
            "More pairs (.tsv, .jsonl), e.g. from qkv augment; read WEIGHT times per epoch; repeatable.",
            metavar="FILE[:WEIGHT[:TAG]]",
        ),
    ] = None,
    valid_src: Annotated[str | None, option("Validation source; default: held-out text.")] = None,
    valid_tgt: Annotated[str | None, option("Validation target.")] = None,
    text: Annotated[list[str] | None, option("Monolingual text, for a language model; repeatable.")] = None,
    valid_text: Annotated[str | None, option("Validation text; default: held-out text.")] = None,
    start: Annotated[
        Path | None, option("Start from the weights of this run, e.g. to fine-tune it.", "--from", metavar="RUN")
    ] = None,
    run: Annotated[Path | None, option("Run folder to create.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    resume: Annotated[bool, option("Resume the training in the run folder.", "--resume")] = False,
    minutes: Annotated[
        float, option("Duration of an automatic recipe, at least 100 steps; 0: 30, or 60 on a GPU.", min=0)
    ] = 0.0,
    on_bad: Annotated[str | None, option("Line that is not UTF-8: error, or skip (drops the pair).")] = None,
) -> None:
    """Train a model from a preset, a config file or text files.

    Parallel text (--src, --tgt) gives a translation model, monolingual text (--text) a language model. --from
    fine-tunes a trained run. Without a preset or config file, the recipe is chosen from the text and the device.
    """
    from qkv.api import auto_recipe
    from qkv.api.run_training import train as run_training
    from qkv.assembly import Run
    from qkv.options import option_path

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt or also or valid_src or valid_tgt or text or valid_text or minutes or start:
            raise UsageError("--resume takes text and config from the run folder: give only --run and --set")
        run_training(run=run, resume=True, settings=changed)
        return
    if what and minutes:
        raise UsageError(f"--minutes is for an automatic recipe: {what} sets its own length: use --set train.steps=N")
    source = Run.open(start) if start else None
    config = _named_config(what, source)
    if text or valid_text:
        if src or tgt or also or valid_src or valid_tgt:
            raise UsageError("--text trains a language model, --src and --tgt a translation model: give one of the two")
        config = with_text(config, text or [], valid_text)
    else:
        config = with_extra_pairs(with_pairs(config, src or [], tgt or [], valid_src, valid_tgt), also or [])
    fixed = set(map(option_path, changed))
    if minutes and "train.steps" in fixed:
        raise UsageError("--minutes and --set train.steps both say how long to train: give one of them")

    def recipe(config: Config, prepared: PreparedText, ranks: int) -> tuple[Config, list[str]]:
        return auto_recipe.choose(config, prepared, minutes, fixed=fixed, ranks=ranks, trained=source is not None)

    run_training(config, run, recipe=None if what else recipe, settings=changed, start=source, command=command_line())


def _named_config(what: str | None, start: Run | None) -> Config | None:
    """Return the named config, or the config of the --from run without its schedule; None if neither is given."""
    from qkv.console import say
    from qkv.options import TrainConfig
    from qkv.presets import find_config

    if what is None:
        return None if start is None else dataclasses.replace(start.config, train=TrainConfig())
    if Path(what).is_dir() and start is None:
        say(f"{what}: using its config with new weights; to start from its weights, give --from {what}")
    return find_config(what)


def average(
    run: RunArgument,
    last: Annotated[int, option("Number of checkpoints to average; 0: all that are kept.")] = 0,
    name: Annotated[str, option("Name of the new weights.", show_default="average_N")] = "",
) -> None:
    """Average the last checkpoints of a run into new weights.

    Other verbs use the result with --weights NAME.
    """
    from qkv.api.run_training import average_last

    path, checkpoints = average_last(run, last, name)
    print(f"{path}: average of {', '.join(each.stem for each in checkpoints)}")


def config(
    what: Annotated[str, typer.Argument(metavar="PRESET|CONFIG|RUN", help="Preset, TOML file or run folder.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Compare: print only the options that differ.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Show and check a config, or compare two."""
    from qkv.presets import find_config

    shown = find_config(what).assign(settings or [])
    if other is None:
        print(shown.dumps(), end="")
        return
    for path, ours, theirs in shown.difference(find_config(other)):
        print(f"{path}\t{ours}\t{theirs}")


# ---- augment ---------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """Kind of synthetic pairs; it decides on which side the translation is."""

    back = "back-translation"
    own = "self-training"
    distilled = "distillation"


class Reason(StrEnum):
    """Reason for which a pair is dropped, unless --allow names it."""

    repeated = "repeated"
    unfinished = "unfinished"
    looped = "looped"
    copy = "copy"
    ratio = "ratio"


# Options that are passed to `qkv.api.augment` if they are given.
PASSED_ON = """
    references closest_by beam sample temperature top_k top_p min_p seed rerank candidates no_split tag others weights
    dtype device workers
""".split()

Output = Annotated[
    str,
    option(
        "Output file (.tsv, .jsonl); resumes an interrupted run. - writes .tsv to standard output.", "--output", "-o"
    ),
]
Seed = Annotated[int, option("Random seed of sampling and noise.")]
Candidates = Annotated[int | None, option("Number of candidates for --rerank or --references.")]
BadLines = Annotated[arguments.OnBad, option("Line that is not UTF-8: error, or skip.")]


def augment(
    context: typer.Context,
    run: arguments.RunArgument,
    kind: Annotated[
        Kind,
        option(
            "For back-translation RUN translates target text into the source language; else TEXT is source text.",
            "--as",
        ),
    ],
    text: arguments.TextFile = "-",
    output: Output = "-",
    references: Annotated[
        str | None, option("Distillation: references, line by line; the candidate closest to the reference is chosen.")
    ] = None,
    closest_by: Annotated[str, option("Similarity to the reference: bleu or chrf.")] = "bleu",
    noise: Annotated[
        bool, option("Add noise to the source side: --drop 0.1 --blank 0.1 --shuffle 3.", "--noise")
    ] = False,
    drop: Annotated[float | None, option("Probability of dropping a source word.")] = None,
    blank: Annotated[float | None, option("Probability of blanking a source word.")] = None,
    shuffle: Annotated[int | None, option("Maximum distance that a source word moves.")] = None,
    allow: Annotated[
        list[Reason] | None, option("Keep pairs that would be dropped for this reason; repeatable.")
    ] = None,
    max_ratio: Annotated[float, option("Maximum length ratio of the two sides, in tokens; 0: no limit.")] = 3.0,
    min_logprob: Annotated[float | None, option("Minimum mean log-probability per token.")] = None,
    keep: Annotated[float, option("Fraction of the remaining pairs to keep, most probable first.")] = 1.0,
    round_trip: Annotated[
        Path | None,
        option("Run of the opposite direction that scores the pairs for --keep and --min-logprob.", metavar="RUN"),
    ] = None,
    beam: arguments.Beam = None,
    sample: arguments.Sample = False,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    seed: Seed = 1,
    rerank: arguments.Rerank = None,
    candidates: Candidates = None,
    no_split: arguments.NoSplit = False,
    tag: arguments.Tag = "",
    others: arguments.With = None,
    weights: arguments.Weights = "",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "auto",
    workers: arguments.Workers = None,
    on_bad: BadLines = arguments.OnBad.error,
) -> None:
    """Make training pairs from text and a model's translations.

    `qkv train --also` reads the result. Dropped pairs are counted and reported. With --output, a stopped or killed
    command resumes when it is repeated. On several GPUs:
    torchrun --nproc-per-node 8 -m qkv augment RUN TEXT -o OUTPUT --as KIND
    """
    from qkv.api.augmentation import augment as make
    from qkv.api.file_translation import ProcessGroup, count_lines
    from qkv.api.pair_filters import Filters
    from qkv.console import counter, say

    options = given({name: context.params[name] for name in PASSED_ON})
    first = not ProcessGroup.from_environment().rank
    total = count_lines(text) if first and sys.stderr.isatty() else None
    with counter("augmenting", total, shown=first) as advance:
        summary = make(
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
            **options,
        )
    if first:
        say(str(summary))


def _noise(standard: bool, drop: float | None, blank: float | None, shuffle: int | None) -> WordNoise:
    """Return the noise of the options; values not given are those of --noise (Edunov et al. 2018), or zero."""
    from qkv.api.pair_filters import EDUNOV, WordNoise

    base = EDUNOV if standard else WordNoise()
    return WordNoise(
        base.drop if drop is None else drop,
        base.blank if blank is None else blank,
        base.shuffle if shuffle is None else shuffle,
    )
