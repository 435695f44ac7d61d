"""Verbs for models of plain text: complete goes on with a text, fill closes its gaps."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.arguments import (
    Alpha,
    AsJson,
    Beam,
    Device,
    Penalty,
    RunArgument,
    Tag,
    Weights,
    held_out,
    same_length,
    some_lines,
)
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api.completer import Draws
if TYPE_CHECKING:
    from qkv.api import Completer, Filler
    from qkv.evaluation.metrics import Comparison
    from qkv.explain.evaluation_page import System


def complete(
    run: RunArgument,
    prompt: Annotated[
        str, typer.Argument(help="Text to go on with; - is standard input, nothing begins a new text.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=0, help="How many to add; 0: without end, until interrupted.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Below 1 safer, above wilder; 0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many of the likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest that hold this share.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among tokens this many times as likely as the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text.", show_default=False)] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many continuations; more than one with --json.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated; with --json.")] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Go on with a text, as it is written; the context slides, so it need not end."""
    from qkv.api import Completer
    from qkv.core.errors import UsageError

    if not as_json and (n > 1 or stop):
        raise UsageError("-n and --stop need whole continuations: add --json")
    if as_json and not tokens:
        raise UsageError("--tokens 0 never ends, so nothing can be shown as JSON: give a number")
    completer = Completer(run, weights=weights, device=device)
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    if prompt != prompt.encode("utf-8", "replace").decode():
        raise UsageError("the prompt is not UTF-8: convert it")
    draws: Draws = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if as_json:
        for found in completer.complete(prompt, max_tokens=tokens, n=n, stop=stop or [], **draws):
            print(json.dumps({"prompt": prompt, **found.to_dict()}, ensure_ascii=False))
        return
    print(prompt, end="", flush=True)
    try:
        for piece in completer.stream(prompt, max_tokens=tokens or None, **draws):
            print(piece, end="", flush=True)
    finally:
        print()


def fill(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="A sentence with <mask> for each token that is missing.")],
    n: Annotated[int, typer.Option("-n", min=1, help="How many tokens to try in each gap.")] = 5,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Fill the gaps of a sentence: for each the likeliest tokens, their probability, and the text with them."""
    from qkv.api import Filler

    for gap in Filler(run, weights=weights, device=device).fill(text, n):
        for found in gap:
            if as_json:
                print(json.dumps(found.to_dict(), ensure_ascii=False))
            else:
                print(f"{found.gap}\t{found.probability:.4f}\t{found.token}\t{found.text}")


# ---- Verbs that measure what a trained model does with text: score, evaluate -----------------------------------------


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
    from qkv.console import counter
    from qkv.data.formats import read_lines

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
    from qkv.console import counter, say, writer
    from qkv.explain import evaluation_page

    if report:
        evaluation_page.check(report)
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
        evaluation_page.System(str(path), scores, api.diagnose(sources, found, references, tgt_lang=language))
        for path, (scores, found) in zip((run, against), results, strict=False)
    ]
    _tell(systems, comparison, as_json)
    if report:
        evaluation_page.report(systems, report, comparison)
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
