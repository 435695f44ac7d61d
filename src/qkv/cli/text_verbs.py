"""Verbs that write text: translate (a terminal, a pipe, a file of any size, a document), complete and fill."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv import __version__
from qkv.cli import arguments
from qkv.cli.arguments import given, option
from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.api.completer import SamplingOptions
    from qkv.api.file_translation import Chunk, ProcessGroup, Work
    from qkv.api.translation import Translation
    from qkv.api.translator import Translator
    from qkv.console import Advance
    from qkv.documents import Document

# Options about input, output and hardware; all others are search options, passed to Translator.translate.
NOT_SEARCH = "run file output format as_json others weights dtype device workers on_bad".split()


def translate(
    context: typer.Context,
    run: arguments.RunArgument,
    file: Annotated[
        str, typer.Argument(help="Text file, one segment per line, or document; - is standard input.")
    ] = "-",
    output: Annotated[
        str, option("Output file; resumes an interrupted translation of lines. - is standard output.", "--output", "-o")
    ] = "-",
    format: Annotated[
        str, option("Format of the input: lines, or a document's (txt, md, html, docx …); default: by its suffix.")
    ] = "",
    as_json: arguments.AsJson = False,
    beam: arguments.Beam = None,
    n_best: Annotated[
        int | None, option("Translations per line, as tab-separated line number, rank, score and text.")
    ] = None,
    length_penalty: arguments.Penalty = None,
    alpha: arguments.Alpha = None,
    coverage: Annotated[
        float | None, option("Coverage penalty β for source tokens with little attention; 0 is off.")
    ] = None,
    min_length: Annotated[int | None, option("Minimum length of a translation, in tokens.")] = None,
    max_length: Annotated[int | None, option("Maximum length of a translation, in tokens.")] = None,
    repetition_penalty: Annotated[
        float | None, option("Repetition penalty; above 1, tokens already generated become less likely.")
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, option("Never generate the same n-gram of this length twice.", metavar="N")
    ] = None,
    groups: Annotated[
        int | None, option("Diverse beam search: number of groups that the beam is divided into.")
    ] = None,
    diversity: Annotated[
        float | None, option("Diverse beam search: penalty for tokens that earlier groups chose.")
    ] = None,
    sample: arguments.Sample = False,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    seed: Annotated[int | None, option("Random seed of sampling; equal seeds give equal output.")] = None,
    prefix: Annotated[str | None, option("Force every translation to begin with this text.", metavar="TEXT")] = None,
    must_include: Annotated[
        list[str] | None, option("Phrase that every translation must contain; repeatable.", metavar="TEXT")
    ] = None,
    ordered: Annotated[bool, option("Keep the phrases of --must-include in the given order.", "--ordered")] = False,
    avoid: Annotated[
        list[str] | None, option("Phrase that no translation may contain; repeatable.", metavar="TEXT")
    ] = None,
    shortlist: Annotated[
        bool, option("Limit the output vocabulary to likely translations of the source; faster.", "--shortlist")
    ] = False,
    rerank: arguments.Rerank = None,
    candidates: Annotated[int | None, option("Number of hypotheses or samples that --rerank chooses from.")] = None,
    no_split: arguments.NoSplit = False,
    newlines: Annotated[
        arguments.Newlines | None,
        option("Line breaks: keep (each line by itself), or join the lines of a paragraph that is hard-wrapped."),
    ] = None,
    tag: arguments.Tag = "",
    others: arguments.With = None,
    weights: arguments.Weights = "",
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = "auto",
    workers: arguments.Workers = None,
    on_bad: Annotated[
        arguments.OnBad, option("Line that is not UTF-8: error, or skip (its output line is empty).")
    ] = "error",
) -> None:
    """Translate text line by line, or a whole document.

    N lines in, N lines out. A document (md, html, docx …) keeps its format: qkv translate RUN a.docx -o a.it.docx

    Typed or piped lines are translated as they arrive. With --output, a stopped or killed command on a file of lines
    resumes when it is repeated. On several GPUs: torchrun --nproc-per-node 8 -m qkv translate RUN FILE -o OUTPUT
    """
    from qkv.api.document_translation import LINES, check_output, format_of, open_documents
    from qkv.api.file_translation import (
        ProcessGroup,
        check_files,
        count_lines,
        default_workers,
        joined_paragraphs,
        translate_text,
    )
    from qkv.api.translator import CHUNK, Translator
    from qkv.console import counter, say
    from qkv.data.formats import LineReader

    options = {name: value for name, value in given(context.params).items() if name not in NOT_SEARCH}
    group = ProcessGroup.from_environment()
    documents: Iterable[Document] | None = None
    if (format := format_of(file, format)) != LINES:
        _check_document_options(file, options, on_bad, group)
        first = next(blocks := open_documents(file, format))
        if not as_json or output != "-":
            check_output(first, format, output)
        documents, total = chain([first], blocks), None if format == "txt" else len(first.segments)
    if workers is None and not others:
        workers = default_workers(file, group)
    translator = Translator(
        run, weights=weights, device=group.device(device), dtype=dtype, workers=workers, others=others or []
    )
    if shortlist and not (run / "shortlist.safetensors").exists():
        say(f"{run}: computing the shortlist (likely translations of each source token), once")
        translator.learn_shortlist()
    if documents is not None:
        _translate_document(translator, documents, total, output, as_json, options)
        return
    if " " in file and not Path(file).exists():
        raise UsageError(f"{file}: no such file: to translate a sentence, pipe it: echo … | qkv translate {run}")
    check_files([file], output, group)
    lines, total = LineReader(file, on_bad), None
    reported = not group.rank and not (file == "-" and sys.stdin.isatty())  # not among lines that are typed
    shown = reported and (output != "-" or not sys.stdout.isatty())
    if reported and sys.stderr.isatty():
        say(translator.engine)
        total = count_lines(file) if shown else None
    with counter("translating", total, shown=shown) as advance:
        work = _chunk_work(translator, options, as_json, advance)
        key = {"device": translator.device.type, "dtype": dtype, "json": as_json, **options}
        counts = translate_text(
            joined_paragraphs(lines) if newlines == "join" else lines,
            output,
            work,
            partial(_resume_key, translator, weights, key),
            size=CHUNK,
            more=lambda: lines.more,  # lines that have arrived are written as soon as no further line is waiting
            about={"command": arguments.command_line(), "input": file},
            group=group,
            progress=advance,
        )
    _report(file, counts, 0 if group.rank else lines.bad, max_length)


def _check_document_options(file: str, options: Mapping[str, Any], on_bad: str, group: ProcessGroup) -> None:
    """Refuse options that have no meaning for a document."""
    from qkv.api.document_translation import TEXT_OPTIONS

    names = [name for name in TEXT_OPTIONS if options.get(name, 1) != 1]
    if names or on_bad != "error":
        name = f"--{names[0].replace('_', '-')}" if names else "--on-bad"
        raise UsageError(f"{file}: {name} applies to lines, and this is a document: omit it, or add --format lines")
    if group.world > 1:
        raise UsageError(f"{file}: one process translates a document: start qkv without torchrun")


def _translate_document(
    translator: Translator,
    documents: Iterable[Document],
    total: int | None,
    output: str,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Translate a document to a file or pipe; with `as_json` print a line for each segment."""
    from qkv.api.document_translation import flags_of, translate_to_file
    from qkv.console import counter, say

    def report(number: int, source: str, translation: Translation) -> None:
        if as_json:
            row = {"segment": number, "source": source, **translation.to_dict(), "flags": flags_of(translation)}
            print(json.dumps(row, ensure_ascii=False))

    if sys.stderr.isatty():
        say(translator.engine)
    shown = not (sys.stdout.isatty() and (as_json or output == "-"))
    written = None if as_json and output == "-" else output
    with counter("translating", total, shown=shown) as advance:
        result = translate_to_file(translator, documents, written, progress=advance, report=report, **options)
    say(result.summary)


def _chunk_work(translator: Translator, options: Mapping[str, Any], as_json: bool, progress: Advance) -> Work:
    """Return the function that translates one chunk of lines into output text and counts of problems."""
    ranked = options.get("n_best", 1) > 1

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        translations = translator.translate(chunk.lines, first=chunk.first, progress=progress, **options)
        rows = [_format(each, number, ranked, as_json) for number, each in enumerate(translations, chunk.first + 1)]
        counts = Counter(flag for each in translations for flag in each.flags if flag != "blank")
        counts["dropped"] = sum(each.dropped for each in translations)
        return "".join(f"{row}\n" for row in rows), counts

    return work


def _format(translation: Translation, number: int, ranked: bool, as_json: bool) -> str:
    """Return a translation as JSON, as one row per hypothesis, or as text."""
    if as_json:
        return json.dumps({"line": number, **translation.to_dict()}, ensure_ascii=False)
    if ranked:
        n_best = [(translation.score, translation.text), *((one.score, one.text) for one in translation.alternatives)]
        return "\n".join(f"{number}\t{rank}\t{score:.4f}\t{text}" for rank, (score, text) in enumerate(n_best, 1))
    return translation.text


def _resume_key(translator: Translator, weights: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that decides the output; an unfinished file is resumed only if this is unchanged."""
    from qkv.api.file_translation import fingerprint

    models = [fingerprint(member.run, weights) for member in translator.members]
    return {
        "qkv": __version__,
        "models": models,
        **options,
        "split": options.get("split", True),
        "sentences": translator.cutter.sentences,
    }


def _report(file: str, counts: Mapping[str, int], bad: int, max_length: int | None) -> None:
    """Report truncated, repeated, flagged and undecodable lines on stderr."""
    from qkv.console import say

    limit = "decode.extra_length" if max_length is None else "--max-length"
    if ended_early := counts.get("truncated"):
        say(f"{file}: {ended_early:,} translations reached the maximum length ({limit})")
    if looped := counts.get("looped"):
        say(f"{file}: {looped:,} translations were repetitive and were searched again (--json marks them)")
    if incomplete := counts.get("omission"):
        say(f"{file}: {incomplete:,} translations may leave something out: check them (--json marks the pieces)")
    if inserted := counts.get("protected"):
        say(f"{file}: {inserted:,} translations have protected text in doubtful places: check them (--json marks them)")
    if dropped := counts.get("dropped"):
        say(f"{file}: {dropped:,} zero-width spaces and soft hyphens were left out")
    if bad:
        say(f"{file}: {bad:,} lines were not UTF-8; their output is empty")


# ---- complete, fill --------------------------------------------------------------------------------------------------


def complete(
    run: arguments.RunArgument,
    prompt: Annotated[
        str, typer.Argument(help="Prompt to continue; - is standard input, empty starts a new text.")
    ] = "",
    tokens: Annotated[int, option("Number of tokens to generate; 0: until interrupted.", min=0)] = 200,
    temperature: Annotated[float, option("Below 1 more predictable, above 1 more varied; 0 is greedy.", min=0.0)] = 0.8,
    top_k: Annotated[int, option("Sample from the k most probable tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[
        float,
        option("Nucleus sampling: keep the smallest set of tokens with cumulative probability p.", min=0.0, max=1.0),
    ] = 1.0,
    min_p: Annotated[
        float, option("Keep tokens with at least this fraction of the highest probability.", min=0.0, max=1.0)
    ] = 0.0,
    seed: Annotated[int | None, option("Random seed; equal seeds give equal text.")] = None,
    n: Annotated[int, option("Number of continuations; more than one needs --json.", "-n", min=1)] = 1,
    stop: Annotated[list[str] | None, option("Stop before this text; repeatable; needs --json.")] = None,
    as_json: arguments.AsJson = False,
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Generate a continuation of a text, streamed.

    When the context is full, its oldest tokens are dropped, so the length is unlimited.
    """
    from qkv.api.completer import LanguageModel

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
    run: arguments.RunArgument,
    text: Annotated[str, typer.Argument(help="A sentence with <mask> in place of each missing token.")],
    n: Annotated[int, option("Number of candidates per gap.", "-n", min=1)] = 5,
    as_json: arguments.AsJson = False,
    weights: arguments.Weights = "",
    device: arguments.Device = "auto",
) -> None:
    """Predict the masked tokens of a sentence.

    Prints, for each <mask>, the most probable tokens with their probability and the completed text.
    """
    from qkv.api.text_encoder import Encoder

    for gap in Encoder(run, weights=weights, device=device).fill(text, n):
        for guess in gap:
            if as_json:
                print(json.dumps(guess.to_dict(), ensure_ascii=False))
            else:
                print(f"{guess.gap}\t{guess.probability:.4f}\t{guess.token}\t{guess.text}")
