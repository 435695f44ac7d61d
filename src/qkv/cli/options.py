"""The options that several verbs share, each with its one line of help."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OnBad(StrEnum):
    """What to do with a line that is not UTF-8."""

    error = "error"
    skip = "skip"


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best, average, last or a step number; the chosen ones by default.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
Beam = Annotated[int | None, typer.Option(help="Hypotheses kept at each step; 1 is greedy.", show_default=False)]
Penalty = Annotated[str | None, typer.Option(help="gnmt, average or none.", show_default=False)]
Alpha = Annotated[float | None, typer.Option(help="Strength of the gnmt penalty.", show_default=False)]
Tag = Annotated[str, typer.Option(help="Language tag, for a model trained with several.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change an option; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def command_line() -> str:
    """The command as it was typed, for the model card."""
    return shlex.join(["qkv", *sys.argv[1:]])
