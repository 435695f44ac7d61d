"""Verbs that put a trained model to use: translate, score, evaluate."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.inputs import held_out, same_length
from qkv.cli.options import Alpha, AsJson, Beam, Device, OnBad, Penalty, RunArgument, Tag, Weights
from qkv.errors import UsageError

if TYPE_CHECKING:
    from qkv.api import Completer, Filler, Translation


def translate(
    run: RunArgument,
    file: Annotated[str, typer.Argument(help="Text file, a line for each sentence; - is standard input.")] = "-",
    beam: Beam = None,
    n_best: Annotated[
        int, typer.Option(help="Translations of each line: number, rank, score and text, tab-separated.")
    ] = 1,
    length_penalty: Penalty = None,
    alpha: Alpha = None,
    tag: Tag = "",
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
    on_bad: Annotated[
        OnBad, typer.Option(help="A line that is not UTF-8: error, or skip: it stays empty.")
    ] = OnBad.error,
) -> None:
    """Translate text: as many lines out as in."""
    from qkv.api import CHUNK, Translator
    from qkv.data.lines import Lines
    from qkv.terminal import counter, say, writer

    translator = Translator(run, weights=weights, device=device)
    if " " in file and not Path(file).exists():
        raise UsageError(f"{file}: no such file: to translate a sentence, pipe it: echo … | qkv translate {run}")
    typed = file == "-" and sys.stdin.isatty()  # someone types: answer line by line
    lines = Lines(file, on_bad.value)
    shown = not typed and (output != "-" or not sys.stdout.isatty())  # a bar and the text would mix
    with writer(output) as write, counter("translating", shown=shown) as advance:
        found = translator.stream(
            lines,
            chunk=1 if typed else CHUNK,
            progress=advance,
            beam=beam,
            n_best=n_best,
            length_penalty=length_penalty,
            alpha=alpha,
            tag=tag,
        )
        ended_early = 0
        for number, each in enumerate(found, 1):
            write(_shown(each, number, n_best, as_json))
            ended_early += each.truncated
    if ended_early:
        say(f"{file}: {ended_early:,} translations reached the longest length allowed (decode.extra_length)")
    if lines.bad:
        say(f"{file}: {lines.bad:,} lines were not UTF-8 and stay empty")


def _shown(found: Translation, number: int, n_best: int, as_json: bool) -> str:
    """A translation as output: JSON, a row for each of the n best, or the text."""
    if as_json:
        return json.dumps({"line": number, **found.to_dict()}, ensure_ascii=False)
    if n_best > 1:
        ranked = [(found.score, found.text), *((other.score, other.text) for other in found.alternatives)]
        return "\n".join(f"{number}\t{rank}\t{score:.4f}\t{text}" for rank, (score, text) in enumerate(ranked, 1))
    return found.text


def score(
    run: RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Translations to score, line by line.")],
    tag: Tag = "",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Forced decoding: log-probability and perplexity of given translations, a line each."""
    from qkv.api import Translator
    from qkv.data.lines import read_lines
    from qkv.terminal import counter

    translator = Translator(run, weights=weights, device=device)
    sources, targets = read_lines(source), read_lines(target)
    same_length(source, sources, target, targets)
    with counter("scoring", len(sources)) as advance:
        scored = translator.score(sources, targets, tag=tag, progress=advance)
    for found in scored:
        if as_json:
            print(json.dumps({**dataclasses.asdict(found), "perplexity": found.perplexity}, ensure_ascii=False))
        else:
            print(f"{found.logprob:.4f}\t{found.perplexity:.4f}")


def evaluate(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC", help="Source text; by default the pairs that training held out.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Reference translations, raw text.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run: is the difference significant?", show_default=False)
    ] = None,
    beam: Beam = None,
    length_penalty: Penalty = None,
    alpha: Alpha = None,
    tag: Tag = "",
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Keep the translations in a file.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Measure a model: BLEU, chrF, TER against raw references; bits per byte of a text.

    Scores have their signature and 95 % interval. Of a model without a source, SRC is a text: how well it is foreseen,
    in perplexity and bits per byte, or its gaps are filled.
    """
    from qkv import api
    from qkv.terminal import counter, writer

    loaded = api.load(run, weights=weights, device=device)
    if not isinstance(loaded, api.Translator):
        if reference or against or output:
            raise UsageError(f"{run} has no source: give one text, and neither REF, --against nor --output")
        _evaluate_text(loaded, source, as_json)
        return
    ours = loaded
    sources, references = held_out(run, source, reference)
    theirs = api.Translator(against, device=device) if against else None
    compared: dict[str, Any] = {}
    lines: list[str] = []
    with counter("translating", len(sources) * (2 if theirs else 1)) as advance:
        options = api.Options(beam=beam, length_penalty=length_penalty, alpha=alpha, tag=tag, progress=advance)
        if theirs is None:
            scores, found = api.evaluate(ours, sources, references, **options)
        else:
            (scores, found), (other, _), comparison = api.compare(ours, theirs, sources, references, **options)
            compared = {"against": {"run": str(against), **other.to_dict()}, "comparison": comparison.to_dict()}
            lines = ["", f"a: {run}", f"b: {against}", str(comparison)]
    if output:
        with writer(output) as write:
            for each in found:
                write(each.text)
    if as_json:
        print(json.dumps({"run": str(run), **scores.to_dict(), **compared}, ensure_ascii=False))
    else:
        print("\n".join([str(scores), *lines]))


def _evaluate_text(model: Completer | Filler, file: str | None, as_json: bool) -> None:
    """Perplexity and bits per byte of a text, or how many of its tokens are filled in; by default the held-out text."""
    from qkv.api import Completer
    from qkv.data.lines import read_lines

    if isinstance(model, Completer):
        text = "".join(line + "\n" for line in read_lines(file)) if file else ""
        found = model.evaluate(text) if file else model.evaluate_held_out()
        print(json.dumps({**found.to_dict(), "perplexity": found.perplexity}) if as_json else found)
    else:
        filled = model.evaluate(read_lines(file or str(model.run.store / "valid.tgt.txt")))
        print(json.dumps(filled.to_dict()) if as_json else filled)
