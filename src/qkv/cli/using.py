"""Verbs that measure what a trained model does with text: score, evaluate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.inputs import held_out, same_length
from qkv.cli.options import Alpha, AsJson, Beam, Device, Penalty, RunArgument, Tag, Weights
from qkv.errors import UsageError

if TYPE_CHECKING:
    from qkv.api import Completer, Filler


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
