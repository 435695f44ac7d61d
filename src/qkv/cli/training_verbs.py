"""Verbs that train models: train, average, config, and augment, which makes training text."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from qkv.cli import arguments
from qkv.cli.arguments import given, option
from qkv.core.errors import UsageError


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
    settings: arguments.Settings = None,
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
    from qkv.console import say
    from qkv.options import TrainConfig, option_path
    from qkv.presets import find_config

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt or also or valid_src or valid_tgt or text or valid_text or minutes or start:
            raise UsageError("--resume takes text and config from the run folder: give only --run and --set")
        run_training(run=run, resume=True, settings=changed)
        return
    if what and minutes:
        raise UsageError(f"--minutes is for an automatic recipe: {what} sets its own length: use --set train.steps=N")
    source = Run.open(start) if start else None
    config = None
    if what:
        if Path(what).is_dir() and source is None:
            say(f"{what}: using its config with new weights; to start from its weights, give --from {what}")
        config = find_config(what)
    elif source is not None:
        config = dataclasses.replace(source.config, train=TrainConfig())  # without its schedule
    if text or valid_text:
        if src or tgt or also or valid_src or valid_tgt:
            raise UsageError("--text trains a language model, --src and --tgt a translation model: give one of the two")
        config = arguments.with_text(config, text or [], valid_text)
    else:
        config = arguments.with_pairs(config, src or [], tgt or [], valid_src, valid_tgt)
        config = arguments.with_extra_pairs(config, also or [])
    fixed = set(map(option_path, changed))
    if minutes and "train.steps" in fixed:
        raise UsageError("--minutes and --set train.steps both say how long to train: give one of them")
    recipe = None
    if not what:
        recipe = partial(auto_recipe.choose, minutes=minutes, fixed=fixed, trained=source is not None)
    command = arguments.command_line()
    run_training(config, run, recipe=recipe, settings=changed, start=source, command=command)


def average(
    run: arguments.RunArgument,
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
    settings: arguments.Settings = None,
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


# Options that are passed to `qkv.api.augment` if they are given.
PASSED_ON = """
    references closest_by beam sample temperature top_k top_p min_p seed rerank candidates no_split tag others weights
    dtype device workers
""".split()


def augment(
    context: typer.Context,
    run: arguments.RunArgument,
    kind: Annotated[
        Literal["back-translation", "self-training", "distillation"],
        option(
            "For back-translation RUN translates target text into the source language; else TEXT is source text.",
            "--as",
        ),
    ],
    text: arguments.TextFile = "-",
    output: Annotated[
        str,
        option(
            "Output (.tsv, .jsonl); resumes an interrupted run. - writes .tsv to standard output.", "--output", "-o"
        ),
    ] = "-",
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
        list[str] | None,
        option(
            "Keep pairs that would be dropped for this reason; repeatable.",
            metavar="<repeated|unfinished|looped|copy|ratio>",
        ),
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
    seed: Annotated[int, option("Random seed of sampling and noise.")] = 1,
    rerank: arguments.Rerank = None,
    candidates: Annotated[int | None, option("Number of candidates for --rerank or --references.")] = None,
    no_split: arguments.NoSplit = False,
    tag: arguments.Tag = "",
    others: arguments.With = None,
    weights: arguments.Weights = "",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "auto",
    workers: arguments.Workers = None,
    on_bad: Annotated[arguments.OnBad, option("Line that is not UTF-8: error, or skip.")] = "error",
) -> None:
    """Make training pairs from text and a model's translations.

    `qkv train --also` reads the result. Dropped pairs are counted and reported. With --output, a stopped or killed
    command resumes when it is repeated. On several GPUs:
    torchrun --nproc-per-node 8 -m qkv augment RUN TEXT -o OUTPUT --as KIND
    """
    from qkv.api.augmentation import augment as make
    from qkv.api.file_translation import ProcessGroup, count_lines
    from qkv.api.pair_filters import EDUNOV, Filters, WordNoise
    from qkv.console import counter, say

    options = given({name: context.params[name] for name in PASSED_ON})
    parts = given({"drop": drop, "blank": blank, "shuffle": shuffle})
    first = not ProcessGroup.from_environment().rank
    total = count_lines(text) if first and sys.stderr.isatty() else None
    with counter("augmenting", total, shown=first) as advance:
        summary = make(
            run,
            text,
            output,
            kind=kind,
            noise=dataclasses.replace(EDUNOV if noise else WordNoise(), **parts),
            filters=Filters(max_ratio, min_logprob, keep, tuple(allow or ())),
            back=round_trip,
            on_bad=on_bad,
            command=arguments.command_line(),
            progress=advance,
            **options,
        )
    if first:
        say(str(summary))
