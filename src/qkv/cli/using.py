"""Verbs that measure what a trained model does with text: score, evaluate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.inputs import held_out, same_length, some_lines
from qkv.cli.options import Alpha, AsJson, Beam, Device, Penalty, RunArgument, Tag, Weights
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api import Completer, Filler
    from qkv.evaluate.metrics import Comparison
    from qkv.explain.evaluation import System


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
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A page (.html) to write: plots, sentences to look at.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Measure a model: BLEU, chrF, TER against raw references; bits per byte of a text.

    Scores have their signature and 95 % interval; below them stands what is wrong: loops, hallucinations, copies. Of a
    model without a source, SRC is a text: how well it is foreseen, in perplexity and bits per byte, or its gaps filled.
    """
    from qkv import api
    from qkv.explain import evaluation
    from qkv.terminal import counter, say, writer

    if report:
        evaluation.check(report)
    loaded = api.load(run, weights=weights, device=device)
    if not isinstance(loaded, api.Translator):
        if reference or against or output or report:
            raise UsageError(f"{run} has no source: give one text, and neither REF, --against, --output nor --report")
        _evaluate_text(loaded, source, as_json)
        return
    ours = loaded
    sources, references = held_out(run, source, reference)
    theirs = api.Translator(against, device=device) if against else None
    # The file is opened before the work, so that one that cannot be written does not cost it.
    with writer(output) if output else nullcontext(lambda line: None) as write:
        with counter("translating", len(sources) * (2 if theirs else 1)) as advance:
            options = api.Options(beam=beam, length_penalty=length_penalty, alpha=alpha, tag=tag, progress=advance)
            if theirs is None:
                results, comparison = [api.evaluate(ours, sources, references, **options)], None
            else:
                first, second, comparison = api.compare(ours, theirs, sources, references, **options)
                results = [first, second]
        for each in results[0][1]:
            write(each.text)
    language = ours.config.data.tgt_lang
    systems = [
        evaluation.System(str(path), scores, api.diagnose(sources, found, references, tgt_lang=language))
        for path, (scores, found) in zip((run, against), results, strict=False)
    ]
    _tell(systems, comparison, as_json)
    if report:
        evaluation.report(systems, report, comparison)
        say(str(report))


def _tell(systems: Sequence[System], comparison: Comparison | None, as_json: bool) -> None:
    """What was measured, as lines or as JSON."""
    ours, *others = systems
    if as_json:
        values = [{"run": s.name, **s.scores.to_dict(), "diagnosis": s.diagnosis.to_dict()} for s in systems]
        compared = {"against": values[1], "comparison": comparison.to_dict()} if comparison else {}
        print(json.dumps({**values[0], **compared}, ensure_ascii=False))
        return
    print(f"{ours.scores}\n{ours.diagnosis}")
    for other in others:
        print(f"\na: {ours.name}\nb: {other.name}\n{comparison}\nb:\n{other.diagnosis}")


def _evaluate_text(model: Completer | Filler, file: str | None, as_json: bool) -> None:
    """Perplexity and bits per byte of a text, or how many of its tokens are filled in; by default the held-out text."""
    from qkv.api import Completer

    if isinstance(model, Completer):
        text = "".join(line + "\n" for line in some_lines(file)) if file else ""
        found = model.evaluate(text) if file else model.evaluate_held_out()
        print(json.dumps({**found.to_dict(), "perplexity": found.perplexity}) if as_json else found)
    else:
        filled = model.evaluate(some_lines(file or str(model.run.store / "valid.tgt.txt")))
        print(json.dumps(filled.to_dict()) if as_json else filled)
