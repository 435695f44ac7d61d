"""The options that several verbs share and those of decoding, each with its one line of help."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


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
