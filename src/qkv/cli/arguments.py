"""The options that several verbs share and those of decoding, each with its one line of help."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from qkv.config import Config, CorpusConfig


class OnBad(StrEnum):
    """What to do with a line that is not UTF-8."""

    error = "error"
    skip = "skip"


def _if_given(help: str, *names: str, **more: Any) -> Any:
    """An option that is as the run's config has it, or off, unless it is given."""
    return typer.Option(*names, help=help, show_default=False, **more)


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best, average, last or a step number; the chosen ones by default.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
Tag = Annotated[str, typer.Option(help="Language tag, for a model trained with several.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change an option; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

# Text in and out.
TextFile = Annotated[str, typer.Argument(help="Text file, a line for each sentence; - is standard input.")]
Output = Annotated[
    str, typer.Option("--output", "-o", help="File to write; was it interrupted, it goes on. - is standard output.")
]
BadLines = Annotated[OnBad, typer.Option(help="A line that is not UTF-8: error, or skip: it stays empty.")]

# The search, and what it prefers.
Beam = Annotated[int | None, _if_given("Hypotheses kept at each step; 1 is greedy.")]
NBest = Annotated[int | None, _if_given("Translations of each line: number, rank, score and text, tab-separated.")]
Penalty = Annotated[str | None, _if_given("gnmt, average or none.")]
Alpha = Annotated[float | None, _if_given("Strength of the gnmt penalty.")]
Coverage = Annotated[float | None, _if_given("Penalty β for source words that nothing attends to; 0 is none.")]
MinLength = Annotated[int | None, _if_given("Fewest tokens of a translation.")]
MaxLength = Annotated[int | None, _if_given("Most tokens of a translation.")]
RepetitionPenalty = Annotated[float | None, _if_given("Above 1, tokens already written become less likely.")]
NoRepeatNgram = Annotated[int | None, _if_given("No run of this many tokens comes twice.", metavar="N")]
Groups = Annotated[int | None, _if_given("Diverse beam: the beam in so many groups that differ from each other.")]
Diversity = Annotated[float | None, _if_given("How much a group avoids what the groups before it chose.")]

# Sampling instead of a search for the best.
Sample = Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching for the best.")]
Temperature = Annotated[float | None, _if_given("Of --sample: below 1 safer, above wilder.")]
TopK = Annotated[int | None, _if_given("Draw among this many of the likeliest tokens.")]
TopP = Annotated[float | None, _if_given("Draw among the likeliest that hold this share.")]
MinP = Annotated[float | None, _if_given("Draw among tokens at least this many times as likely as the likeliest.")]
Seed = Annotated[int | None, _if_given("The same seed, the same draws.")]

# What must, may and may not be said.
Prefix = Annotated[str | None, _if_given("How every translation begins.", metavar="TEXT")]
MustInclude = Annotated[list[str] | None, _if_given("A phrase to use; may be repeated.", metavar="TEXT")]
Ordered = Annotated[bool, typer.Option("--ordered", help="Phrases of --must-include stand in the order given.")]
Avoid = Annotated[list[str] | None, _if_given("A phrase not to use; may be repeated.", metavar="TEXT")]
Shortlist = Annotated[bool, typer.Option("--shortlist", help="Only words that these source words can need: faster.")]
Rerank = Annotated[str | None, _if_given("chrf or bleu: the candidate most like all others (minimum Bayes risk).")]
Candidates = Annotated[int | None, _if_given("How many hypotheses or samples --rerank chooses from.")]

# What computes it.
With = Annotated[
    list[Path] | None,
    _if_given("Another run to decide together with, an ensemble; may be repeated.", "--with", metavar="RUN"),
]
Dtype = Annotated[
    str, typer.Option(help="Numbers to compute with: fp32 (auto on a CPU), bf16 (auto on a GPU) or int8.")
]
Workers = Annotated[
    int | None, _if_given("Processes that translate, on a CPU; for a large file one for each core.", min=1)
]


def command_line() -> str:
    """The command as it was typed, for the model card."""
    return shlex.join(["qkv", *sys.argv[1:]])


# ---- What verbs read: files that correspond line by line, and the pairs that a training held out ---------------------


def held_out(run: Path, source: str | None, reference: str | None) -> tuple[list[str], list[str]]:
    """The lines of both files, or the pairs that the run held out."""
    from qkv.assembly import Run

    if source and not reference:
        raise UsageError(f"{source}: give REF too, its reference translations")
    if not source or not reference:
        store = Run.open(run).store
        source, reference = str(store / "valid.src.txt"), str(store / "valid.tgt.txt")
        if not Path(source).exists():
            raise UsageError(f"{run} keeps no held-out pairs (no {source}): give SRC and REF")
    sources, references = some_lines(source), some_lines(reference)
    same_length(source, sources, reference, references)
    return sources, references


def some_lines(name: str) -> list[str]:
    """The lines of a file, which must have one at least: there is nothing to measure on none."""
    from qkv.data.lines import read_lines

    lines = read_lines(name)
    if not lines:
        raise QkvError(f"{name}: the file is empty")
    return lines


def same_length(name: str, lines: Sequence[object], other: str, others: Sequence[object]) -> None:
    """Refuse two files that do not correspond line by line."""
    if len(lines) != len(others):
        counts = f"{name} has {len(lines):,} lines but {other} has {len(others):,}"
        raise QkvError(f"{counts}: they must correspond line by line")


# ---- The text that a command line names, as corpora of a config ------------------------------------------------------


def with_pairs(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """The config with the pairs that the command line names."""
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
        corpora = tuple(configs.CorpusConfig(src=s, tgt=t) for s, t in zip(src, tgt or [""] * len(src), strict=True))
        data = dataclasses.replace(data, train=corpora, valid=(), root="")
    if valid_src:
        data = dataclasses.replace(data, valid=(configs.CorpusConfig(src=valid_src, tgt=valid_tgt or ""),))
    return dataclasses.replace(config, data=data)


def with_more(config: Config, also: list[str]) -> Config:
    """The config with more corpora beside those that it has."""
    if also and not config.data.valid:
        # What is held out is a part of everything: the best checkpoint would be the one most like a machine's text.
        raise UsageError(
            f"--also {also[0]}: what was made by a model is no text to validate on: give --valid-src and --valid-tgt"
        )
    more = tuple(_corpus(each, config.data.root) for each in also)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(*config.data.train, *more)))


def _corpus(given: str, root: str) -> CorpusConfig:
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
    return configs.CorpusConfig(src=path, weight=value, tag=tag)


def with_text(config: Config | None, text: list[str], valid_text: str | None) -> Config:
    """The config with the plain text that the command line names; without any, it is of a language model."""
    from qkv import config as configs

    if config is None and not text:
        raise UsageError(f"--valid-text {valid_text}: give --text too")
    config = config or configs.Config(model=configs.DecoderOnlyConfig())
    data = config.data
    if text:
        data = dataclasses.replace(data, train=tuple(configs.CorpusConfig(text=t) for t in text), valid=(), root="")
    if valid_text:
        data = dataclasses.replace(data, valid=(configs.CorpusConfig(text=valid_text),))
    return dataclasses.replace(config, data=data)
