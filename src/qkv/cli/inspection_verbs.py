"""Verbs that measure and explain a trained model: score, evaluate, explain, heads, align, report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli import arguments
from qkv.cli.arguments import check_same_length, held_out, option, read_nonempty
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api.completer import LanguageModel
    from qkv.api.text_encoder import Encoder, GapScores
    from qkv.evaluation.metrics import Comparison, TextLoss
    from qkv.explain.evaluation_page import System
    from qkv.explain.word_alignment import Alignment


def score(
    run: arguments.RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Translations to score, line by line.")],
    tag: arguments.Tag = "",
    as_json: arguments.AsJson = False,
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Score given translations by forced decoding.

    Prints the log-probability and the perplexity of each line.
    """
    from qkv.api.translator import Translator
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


def evaluate(
    run: arguments.RunArgument,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC", help="Source text; default: the held-out pairs of the training.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Reference translations, raw text.", show_default=False)
    ] = None,
    against: Annotated[Path | None, option("Another run; tests whether the difference is significant.")] = None,
    beam: arguments.Beam = None,
    length_penalty: arguments.Penalty = None,
    alpha: arguments.Alpha = None,
    no_split: arguments.NoSplit = False,
    tag: arguments.Tag = "",
    output: Annotated[str | None, option("Also write the translations to this file.", "--output", "-o")] = None,
    report: Annotated[Path | None, option("Also write an .html page with plots and examples.", metavar="FILE")] = None,
    as_json: arguments.AsJson = False,
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Measure a model: BLEU, chrF, TER; bits per byte of a text.

    Scores have a signature and a 95 % interval; a diagnosis follows (loops, hallucinations, copies). For a language
    model SRC is a text, measured in perplexity and bits per byte; for an encoder, in the accuracy of filled masks.
    """
    from qkv import api
    from qkv.api.translator import Translator
    from qkv.console import counter, say, writer
    from qkv.decoding.search_request import Options
    from qkv.explain import evaluation_page
    from qkv.explain.pages import check_output

    if report:
        check_output(report, "a report")
    loaded = api.load(run, weights=weights, device=device)
    if not isinstance(loaded, Translator):
        if reference or against or output or report:
            raise UsageError(
                f"{run} is not a translation model: give one text, and omit REF, --against, --output and --report"
            )
        _evaluate_text(loaded, source, as_json)
        return
    sources, references = held_out(run, source, reference)
    options = Options(beam=beam, length_penalty=length_penalty, alpha=alpha, split=not no_split, tag=tag)
    theirs = Translator(against, device=device) if against else None
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
    ours, *others = systems
    if as_json:
        values = [{"run": s.name, **s.scores.to_dict(), "diagnosis": s.diagnosis.to_dict()} for s in systems]
        compared = {"against": values[1], "comparison": comparison.to_dict()} if comparison else {}
        print(json.dumps({**values[0], **compared}, ensure_ascii=False))
        return
    print(f"{ours.scores}\n{ours.diagnosis}")
    for other in others:
        uncut = f"b: {other.scores.uncut}\n" if other.scores.uncut else ""
        print(f"\na: {ours.name}\nb: {other.name}\n{comparison}\n{uncut}b:\n{other.diagnosis}")


def _evaluate_text(model: LanguageModel | Encoder, file: str | None, as_json: bool) -> None:
    """Print perplexity and bits per byte, or the accuracy of filled masks; default: on the held-out text."""
    from qkv.api.completer import LanguageModel

    if isinstance(model, LanguageModel):
        text = "".join(line + "\n" for line in read_nonempty(file)) if file else ""
        scores: TextLoss | GapScores = model.evaluate(text) if file else model.evaluate_held_out()
    else:
        scores = model.evaluate(read_nonempty(file or str(model.run.store / "valid.tgt.txt")))
    print(json.dumps({**scores.to_dict(), "perplexity": scores.perplexity}) if as_json else scores)


# ---- explain, heads, align, report -----------------------------------------------------------------------------------


def explain(
    run: arguments.RunArgument,
    text: Annotated[str, typer.Argument(help="Source text; every sentence has a map of its own.")],
    target: Annotated[str | None, option("Translation to explain; default: the model's own.")] = None,
    output: Annotated[
        Path, option("Page (.html), data (.json) or image (.png, .svg) to write.", "--output", "-o")
    ] = Path("map.html"),
    no_split: Annotated[bool, option("Explain a text of several sentences in one piece.", "--no-split")] = False,
    tag: arguments.Tag = "",
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Show attention maps and the beam search of a text.

    Names the source words that no word of the translation is aligned with.
    """
    from qkv.api.translator import Translator
    from qkv.console import say
    from qkv.explain.attention_maps import save_maps
    from qkv.explain.pages import check_output

    check_output(output, "an attention map")
    translator = Translator(run, weights=weights, device=device)
    maps = translator.attention_maps(text, target, tag=tag, split=not no_split)
    save_maps(maps, output)
    for each in maps:
        say(each.translation or "(the translation is empty)")
        if each.unaligned:
            say(f"without a counterpart: {', '.join(each.unaligned_words)}")
    say(str(output))


def heads(
    run: arguments.RunArgument,
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Source text; default: the held-out pairs.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="Reference translations.", show_default=False)
    ] = None,
    pairs: Annotated[int, option("Number of pairs to measure on, from the first.", min=1)] = 300,
    plot: Annotated[str | None, option("Also draw .png or .svg.")] = None,
    tag: arguments.Tag = "",
    as_json: arguments.AsJson = False,
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Rank attention heads by the loss increase without each."""
    from qkv.api.translator import Translator
    from qkv.console import counter
    from qkv.explain.attention_heads import plot_head_importance
    from qkv.explain.pages import check_output

    if plot:
        check_output(plot, "a picture")
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
    run: arguments.RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    target: Annotated[str, typer.Argument(metavar="TGT", help="Translations, line by line.")],
    find: Annotated[
        str | None,
        option("Find the attention head that agrees best with this Pharaoh file, and save the choice.", metavar="GOLD"),
    ] = None,
    gold: Annotated[
        str | None, option("Pharaoh file of reference alignments: report the alignment error rate.")
    ] = None,
    words: Annotated[str, option("Word boundaries: marks (spaces and punctuation) or spaces.")] = "marks",
    no_split: Annotated[bool, option("Align a line of several sentences as a whole.", "--no-split")] = False,
    output: Annotated[str, option("Output file; - is standard output.", "--output", "-o")] = "-",
    tag: arguments.Tag = "",
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Align the words of given translations (Pharaoh format).

    Prints pairs source-target of word positions, counted from 0. A line of several sentences is aligned sentence by
    sentence if its translation has as many; --find reads lines as a whole.
    """
    from qkv.api.translator import Translator
    from qkv.console import counter, say, writer
    from qkv.data.formats import read_lines
    from qkv.explain.pages import check_place
    from qkv.explain.word_alignment import HEAD_FILE, agreement, rank_heads, save_head

    if find and (gold or output != "-"):
        raise UsageError("--find writes no alignments: omit --gold and --output, and give them in a second command")
    translator = Translator(run, weights=weights, device=device)
    if find:
        check_place(run / HEAD_FILE)
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
        alignments = translator.align(sources, targets, rule=words, tag=tag, split=not no_split, progress=advance)
        for alignment in alignments:
            write(str(alignment))
    if gold:
        say(str(agreement(alignments, reference)))


def _read_pharaoh(path: str) -> list[Alignment]:
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
    run: arguments.RunArgument,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Another run to compare with.")] = None,
    output: Annotated[Path, option("Output page (.html).", "--output", "-o")] = Path("report.html"),
) -> None:
    """Write a page about a training: curves, samples, comparison."""
    from qkv.assembly import Run
    from qkv.console import say
    from qkv.explain.training_report import write_training_report

    write_training_report([Run.open(path) for path in (run, other) if path is not None], output)
    say(str(output))
