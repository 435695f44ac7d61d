"""Verbs that show what a model does: explain a sentence, measure heads, align words, report on a training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.arguments import AsJson, Device, RunArgument, Tag, Weights, held_out, same_length
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.explain.word_alignment import Alignment


def explain(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="One source sentence.")],
    target: Annotated[
        str | None, typer.Option(help="Its translation; the model's own by default.", show_default=False)
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Page (.html), data (.json) or picture (.png, .svg).")
    ] = Path("map.html"),
    tag: Tag = "",
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Show what every head attends to while a sentence is translated, and how the search went."""
    from qkv.api import Translator
    from qkv.console import say
    from qkv.explain.attention_maps import check

    check(output)
    found = Translator(run, weights=weights, device=device).attention(text, target, tag=tag)
    found.save(output)
    say(f"{found.translation or '(the translation is empty)'}\n{output}")


def heads(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="Source text; the held-out pairs by default.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Its translations.", show_default=False)
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="How many pairs to measure on, from the first.")] = 300,
    plot: Annotated[str | None, typer.Option(help="Also draw .png or .svg.", show_default=False)] = None,
    tag: Tag = "",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """What each head is worth: how much the loss grows without it, most important first."""
    from qkv.api import Translator
    from qkv.console import counter
    from qkv.explain import figure_files
    from qkv.explain.head_analysis import draw

    if plot:
        figure_files.check_picture(plot)
    translator = Translator(run, weights=weights, device=device)
    sources, references = held_out(run, source, reference)
    sources, references = sources[:pairs], references[:pairs]
    with counter("measuring", len(sources)) as advance:
        found = translator.importance(sources, references, tag=tag, progress=advance)
    for each in found:
        row = dataclasses.asdict(each)
        print(json.dumps(row) if as_json else f"{each.change:+.4f}\t{each.name}\t{each.head}")
    if plot:
        draw(found, plot, title=f"What each head is worth: {run}")


def align(
    run: RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Its translations, line by line.")],
    find: Annotated[
        str | None, typer.Option(metavar="GOLD", help="Find the head that agrees best with this file, and keep it.")
    ] = None,
    gold: Annotated[str | None, typer.Option(help="Pharaoh file to compare with: alignment error rate.")] = None,
    words: Annotated[str, typer.Option(help="marks: punctuation stands alone; spaces: only spaces divide.")] = "marks",
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    tag: Tag = "",
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Word alignment of given translations, in Pharaoh format: source-target, counted from 0."""
    from qkv.api import Translator
    from qkv.console import counter, say, writer
    from qkv.core import files
    from qkv.data.lines import read_lines
    from qkv.explain.word_alignment import KEPT, agreement, keep_head, rank_heads

    if find and (gold or output != "-"):
        raise UsageError("--find only finds a head: leave --gold and --output out, and give them in a second command")
    translator = Translator(run, weights=weights, device=device)
    if find:
        files.check_place(run / KEPT)
    sources, targets = read_lines(source), read_lines(target)
    same_length(source, sources, target, targets)
    wanted = find or gold
    right = _gold(wanted) if wanted else []
    if wanted:
        same_length(source, sources, wanted, right)
    if find:
        ranked = rank_heads(
            translator.model, translator.tokenizers, sources, targets, right, translator.device, rule=words, tag=tag
        )
        for head, found in ranked[:10]:
            print(f"{found.aer:.4f}\t{head}")
        keep_head(translator.run, ranked[0][0])
        say(f"kept the first for `qkv align {run}`, in {run / KEPT}")
        return
    with writer(output) as write, counter("aligning", len(sources)) as advance:
        links = translator.align(sources, targets, rule=words, tag=tag, progress=advance)
        for one in links:
            write(str(one))
    if gold:
        say(str(agreement(links, right)))


def _gold(path: str) -> list[Alignment]:
    """The alignments of a Pharaoh file."""
    from qkv.data.lines import read_lines
    from qkv.explain.word_alignment import Alignment

    found = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            found.append(Alignment.parse(line))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    return found


def report(
    run: RunArgument,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Another run, side by side.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page (.html) to write.")] = Path("report.html"),
) -> None:
    """A page about a training: its curves, its samples over time, and how it compares with another."""
    from qkv.assembly import Run
    from qkv.console import say
    from qkv.explain.training_report import report as write

    write([Run.open(path) for path in (run, other) if path is not None], output)
    say(str(output))
