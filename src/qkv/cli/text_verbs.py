"""Verbs that generate and measure text: complete, fill, score, evaluate."""

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
    NoSplit,
    Penalty,
    RunArgument,
    Tag,
    Weights,
    check_same_length,
    held_out,
    read_nonempty,
)
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api import Encoder, LanguageModel
    from qkv.api.completer import SamplingOptions
    from qkv.evaluation.metrics import Comparison
    from qkv.explain.evaluation_page import System


def complete(
    run: RunArgument,
    prompt: Annotated[
        str, typer.Argument(help="Prompt to continue; - is standard input, empty starts a new text.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Number of tokens to generate; 0: until interrupted.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Below 1 more predictable, above 1 more varied; 0 is greedy.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most probable tokens; 0: all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Nucleus sampling: keep the smallest set of tokens with cumulative probability p."
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Keep tokens with at least this fraction of the highest probability."),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; equal seeds give equal text.", show_default=False)
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of continuations; more than one needs --json.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable; needs --json.")] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Generate a continuation of a text, streamed.

    When the context is full, its oldest tokens are dropped, so the length is unlimited.
    """
    from qkv.api import LanguageModel

    if not as_json and (n > 1 or stop):
        raise UsageError("-n and --stop need whole continuations: add --json")
    if as_json and not tokens:
        raise UsageError("--tokens 0 never ends, and JSON needs an end: give a number")
    model = LanguageModel(run, weights=weights, device=device)
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    if prompt != prompt.encode("utf-8", "replace").decode():
        raise UsageError("the prompt is not UTF-8: convert it")
    draws: SamplingOptions = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if as_json:
        for completion in model.complete(prompt, max_tokens=tokens, n=n, stop=stop or [], **draws):
            print(json.dumps({"prompt": prompt, **completion.to_dict()}, ensure_ascii=False))
        return
    print(prompt, end="", flush=True)
    try:
        for piece in model.stream(prompt, max_tokens=tokens or None, **draws):
            print(piece, end="", flush=True)
    finally:
        print()


def fill(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="A sentence with <mask> in place of each missing token.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Number of candidates per gap.")] = 5,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Predict the masked tokens of a sentence.

    Prints, for each <mask>, the most probable tokens with their probability and the completed text.
    """
    from qkv.api import Encoder

    for gap in Encoder(run, weights=weights, device=device).fill(text, n):
        for guess in gap:
            if as_json:
                print(json.dumps(guess.to_dict(), ensure_ascii=False))
            else:
                print(f"{guess.gap}\t{guess.probability:.4f}\t{guess.token}\t{guess.text}")


# ---- score, evaluate -------------------------------------------------------------------------------------------------


def score(
    run: RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Translations to score, line by line.")],
    tag: Tag = "",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Score given translations by forced decoding.

    Prints the log-probability and the perplexity of each line.
    """
    from qkv.api import Translator
    from qkv.console import counter
    from qkv.data.formats import read_lines

    translator = Translator(run, weights=weights, device=device)
    sources, targets = read_lines(source), read_lines(target)
    check_same_length(source, sources, target, targets)
    with counter("scoring", len(sources)) as advance:
        scored = translator.score(sources, targets, tag=tag, progress=advance)
    for line in scored:
        if as_json:
            print(json.dumps({**dataclasses.asdict(line), "perplexity": line.perplexity}, ensure_ascii=False))
        else:
            print(f"{line.logprob:.4f}\t{line.perplexity:.4f}")


ReportFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write an .html page with plots and examples.", show_default=False),
]


def evaluate(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC", help="Source text; default: the held-out pairs of the training.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Reference translations, raw text.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run; tests whether the difference is significant.", show_default=False)
    ] = None,
    beam: Beam = None,
    length_penalty: Penalty = None,
    alpha: Alpha = None,
    no_split: NoSplit = False,
    tag: Tag = "",
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Also write the translations to this file.", show_default=False)
    ] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Measure a model: BLEU, chrF, TER; bits per byte of a text.

    Scores have a signature and a 95 % interval; a diagnosis follows (loops, hallucinations, copies). For a language
    model SRC is a text, measured in perplexity and bits per byte; for an encoder, in the accuracy of filled masks.
    """
    from qkv import api
    from qkv.console import counter, say, writer
    from qkv.explain import evaluation_page

    if report:
        evaluation_page.check(report)
    loaded = api.load(run, weights=weights, device=device)
    if not isinstance(loaded, api.Translator):
        if reference or against or output or report:
            raise UsageError(
                f"{run} is not a translation model: give one text, without REF, --against, --output and --report"
            )
        _evaluate_text(loaded, source, as_json)
        return
    sources, references = held_out(run, source, reference)
    options = api.Options(beam=beam, length_penalty=length_penalty, alpha=alpha, split=not no_split, tag=tag)
    theirs = api.Translator(against, device=device) if against else None
    # Open the output first, so that an unwritable file fails before the translation.
    with writer(output) if output else nullcontext(lambda line: None) as write:
        with counter("translating", len(sources) * (2 if theirs else 1)) as advance:
            options["progress"] = advance
            if theirs is None:
                results, comparison = [api.evaluate(loaded, sources, references, **options)], None
            else:
                first, second, comparison = api.compare(loaded, theirs, sources, references, **options)
                results = [first, second]
        for each in results[0][1]:
            write(each.text)
    language = loaded.config.data.tgt_lang
    systems = [
        evaluation_page.System(str(path), scores, api.diagnose(sources, texts, references, tgt_lang=language))
        for path, (scores, texts) in zip((run, against), results, strict=False)
    ]
    _print_scores(systems, comparison, as_json)
    if report:
        evaluation_page.write_evaluation_page(systems, report, comparison)
        say(str(report))


def _print_scores(systems: Sequence[System], comparison: Comparison | None, as_json: bool) -> None:
    """Print scores, diagnosis and comparison as text or as JSON."""
    ours, *others = systems
    if as_json:
        values = [{"run": s.name, **s.scores.to_dict(), "diagnosis": s.diagnosis.to_dict()} for s in systems]
        compared = {"against": values[1], "comparison": comparison.to_dict()} if comparison else {}
        print(json.dumps({**values[0], **compared}, ensure_ascii=False))
        return
    print(f"{ours.scores}\n{ours.diagnosis}")
    for other in others:
        print(f"\na: {ours.name}\nb: {other.name}\n{comparison}\nb:\n{other.diagnosis}")


def _evaluate_text(model: LanguageModel | Encoder, file: str | None, as_json: bool) -> None:
    """Print perplexity and bits per byte, or the accuracy of filled masks; default: on the held-out text."""
    from qkv.api import LanguageModel

    if isinstance(model, LanguageModel):
        text = "".join(line + "\n" for line in read_nonempty(file)) if file else ""
        scores = model.evaluate(text) if file else model.evaluate_held_out()
        print(json.dumps({**scores.to_dict(), "perplexity": scores.perplexity}) if as_json else scores)
    else:
        filled = model.evaluate(read_nonempty(file or str(model.run.store / "valid.tgt.txt")))
        print(json.dumps(filled.to_dict()) if as_json else filled)
