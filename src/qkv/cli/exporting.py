"""The verb that gives a trained model away: export."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.options import RunArgument, Tag, Weights


class Format(StrEnum):
    """What other engines read."""

    ctranslate2 = "ctranslate2"
    huggingface = "huggingface"


def export(
    run: RunArgument,
    to: Annotated[Format, typer.Option(help="Whose format.", show_default=False, case_sensitive=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.", show_default=False)],
    tag: Tag = "",
    weights: Weights = "",
) -> None:
    """Write a Transformer for another engine: weights, a tokenizer and a README.md; nothing of qkv is needed then."""
    from qkv.api import export as write

    folder = write(run, to=to, output=output, weights=weights, tag=tag)
    print(f"{folder}: how to use it is in {folder / 'README.md'}")
