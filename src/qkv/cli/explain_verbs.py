"""Verbs that explain a model: attention maps, head importance, word alignment, training report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.arguments import AsJson, Device, RunArgument, Tag, Weights, check_same_length, held_out
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.explain.word_alignment import Alignment


def explain(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="One source sentence.")],
    target: Annotated[
        str | None, typer.Option(help="Translation to explain; default: the model's own.", show_default=False)
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Page (.html), data (.json) or image (.png, .svg) to write.")
    ] = Path("map.html"),
    tag: Tag = "",
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Show attention maps and the beam search of one sentence."""
    from qkv.api import Translator
    from qkv.console import say
    from qkv.explain.attention_maps import check_map_path

    check_map_path(output)
    attention = Translator(run, weights=weights, device=device).attention(text, target, tag=tag)
    attention.save(output)
    say(f"{attention.translation or '(the translation is empty)'}\n{output}")


def heads(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="Source text; default: the held-out pairs.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Reference translations.", show_default=False)
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Number of pairs to measure on, from the first.")] = 300,
    plot: Annotated[str | None, typer.Option(help="Also draw .png or .svg.", show_default=False)] = None,
    tag: Tag = "",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Rank attention heads by the loss increase without each."""
    from qkv.api import Translator
    from qkv.console import counter
    from qkv.explain import figure_files
    from qkv.explain.head_analysis import plot_head_importance

    if plot:
        figure_files.check_picture(plot)
    translator = Translator(run, weights=weights, device=device)
    sources, references = held_out(run, source, reference)
    sources, references = sources[:pairs], references[:pairs]
    with counter("measuring", len(sources)) as advance:
        importances = translator.importance(sources, references, tag=tag, progress=advance)
    for each in importances:
        row = dataclasses.asdict(each)
        print(json.dumps(row) if as_json else f"{each.change:+.4f}\t{each.name}\t{each.head}")
    if plot:
        plot_head_importance(importances, plot, title=f"Head importance: {run}")


def align(
    run: RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Translations, line by line.")],
    find: Annotated[
        str | None,
        typer.Option(
            metavar="GOLD", help="Find the attention head that agrees best with this Pharaoh file, and save the choice."
        ),
    ] = None,
    gold: Annotated[
        str | None, typer.Option(help="Pharaoh file of reference alignments: report the alignment error rate.")
    ] = None,
    words: Annotated[str, typer.Option(help="Word boundaries: marks (spaces and punctuation) or spaces.")] = "marks",
    output: Annotated[str, typer.Option("--output", "-o", help="Output file; - is standard output.")] = "-",
    tag: Tag = "",
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Align the words of given translations (Pharaoh format).

    Prints pairs source-target of word positions, counted from 0.
    """
    from qkv.api import Translator
    from qkv.console import counter, say, writer
    from qkv.data.formats import read_lines
    from qkv.explain import figure_files
    from qkv.explain.word_alignment import HEAD_FILE, agreement, rank_heads, save_head

    if find and (gold or output != "-"):
        raise UsageError(
            "--find writes no alignments: leave out --gold and --output, and give them in a second command"
        )
    translator = Translator(run, weights=weights, device=device)
    if find:
        figure_files.check_place(run / HEAD_FILE)
    sources, targets = read_lines(source), read_lines(target)
    check_same_length(source, sources, target, targets)
    reference: list[Alignment] = []
    if pharaoh := find or gold:
        reference = _read_pharaoh(pharaoh)
        check_same_length(source, sources, pharaoh, reference)
    if find:
        ranked = rank_heads(
            translator.model, translator.tokenizers, sources, targets, reference, translator.device, rule=words, tag=tag
        )
        for head, score in ranked[:10]:
            print(f"{score.aer:.4f}\t{head}")
        save_head(translator.run, ranked[0][0])
        say(f"{run / HEAD_FILE}: `qkv align {run}` will use the first of these heads")
        return
    with writer(output) as write, counter("aligning", len(sources)) as advance:
        alignments = translator.align(sources, targets, rule=words, tag=tag, progress=advance)
        for alignment in alignments:
            write(str(alignment))
    if gold:
        say(str(agreement(alignments, reference)))


def _read_pharaoh(path: str) -> list[Alignment]:
    """Read the alignments of a Pharaoh file."""
    from qkv.data.formats import read_lines
    from qkv.explain.word_alignment import Alignment

    alignments = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            alignments.append(Alignment.parse(line))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    return alignments


def report(
    run: RunArgument,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Another run to compare with.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Output page (.html).")] = Path("report.html"),
) -> None:
    """Write a page about a training: curves, samples, comparison."""
    from qkv.assembly import Run
    from qkv.console import say
    from qkv.explain.training_report import write_training_report

    write_training_report([Run.open(path) for path in (run, other) if path is not None], output)
    say(str(output))
