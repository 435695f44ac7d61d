"""The command line: verbs and their options, handed to functions; torch is imported only by the verbs that need it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv import __version__
from qkv.errors import QkvError, UsageError

if TYPE_CHECKING:
    from qkv.api import Translation
    from qkv.config import Config
    from qkv.data.store import Prepared


class OnBad(StrEnum):
    """What to do with a line that is not UTF-8."""

    error = "error"
    skip = "skip"


app = typer.Typer(
    name="qkv",
    help="The Transformer, from raw text files to a model that translates.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="What is claimed, measured on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(lab, name="lab")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best, average, last or a step number; the chosen ones by default.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
Beam = Annotated[int | None, typer.Option(help="Hypotheses kept at each step; 1 is greedy.", show_default=False)]
Penalty = Annotated[str | None, typer.Option(help="gnmt, average or none.", show_default=False)]
Alpha = Annotated[float | None, typer.Option(help="Strength of the gnmt penalty.", show_default=False)]
Tag = Annotated[str, typer.Option(help="Language tag, for a model trained with several.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change an option; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 128 + n stopped by signal n."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # text is UTF-8 with bare newlines, whatever the machine's custom
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", newline="\n")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that drafts are cleared away
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader of our output has gone: `qkv translate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error, debug)
    sys.exit(code)


def _explain(error: BaseException, debug: bool) -> int:
    """Tell of a failure in one line, after a traceback if wanted; returns the exit code. The unforeseen is raised."""
    code: int | None = getattr(error, "exit_code", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(error, OSError):
        code, message = 1, f"{error.filename or 'input or output'}: {error.strerror or error}"
    elif _out_of_memory(error):
        code, message = 1, "out of memory: lower train.micro_tokens, or decode.batch_tokens or --beam"
    if code is None:
        raise error
    if debug:
        traceback.print_exception(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
    elif message:
        print(f"qkv: {' '.join(message.split())}", file=sys.stderr)
    return code


def _out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory; torch has a class for that on a GPU, and only words on a CPU."""
    named = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return named or isinstance(error, MemoryError)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    """The Transformer, from raw text files to a model that translates."""


@app.command()
def train(
    what: Annotated[str | None, typer.Argument(metavar="PRESET|CONFIG", help="A preset's name or a TOML file.")] = None,
    src: Annotated[
        list[str] | None, typer.Option(help="Source text, or a .tsv/.jsonl file with both sides; may be repeated.")
    ] = None,
    tgt: Annotated[list[str] | None, typer.Option(help="Target text, line by line; one for each --src.")] = None,
    valid_src: Annotated[
        str | None, typer.Option(help="Validation source; by default a part of the text is held out.")
    ] = None,
    valid_tgt: Annotated[str | None, typer.Option(help="Validation target.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder to make.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="Limit for an automatic recipe; 0: 30, or 60 on a GPU.")] = 0.0,
    on_bad: Annotated[
        str | None, typer.Option(help="A line that is not UTF-8: error, or skip the pair.", show_default=False)
    ] = None,
) -> None:
    """Train a model: from a preset, a config file, or two text files and nothing else."""
    from qkv import auto
    from qkv.run import find_config
    from qkv.train.begin import train as begin

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt or valid_src or valid_tgt or minutes:
            raise UsageError("--resume takes what the run folder holds: give --run, and --set if need be, alone")
        begin(run=run, resume=True, settings=changed)
        return
    if what and minutes:
        raise UsageError(f"--minutes is for an automatic recipe: {what} says itself how long it trains (train.steps)")
    config = _with_corpora(find_config(what) if what else None, src or [], tgt or [], valid_src, valid_tgt)
    fixed = any(setting.partition("=")[0].strip() == "train.steps" for setting in changed)

    def recipe(config: Config, prepared: Prepared) -> tuple[Config, list[str]]:
        return auto.choose(config, prepared, minutes, steps=config.train.steps if fixed else 0)

    begin(config, run, recipe=None if what else recipe, settings=changed, command=_command())


@app.command()
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
    from qkv.api import CHUNK, load
    from qkv.data.lines import Lines
    from qkv.terminal import counter, say, writer

    translator = load(run, weights=weights, device=device)
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


@app.command()
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
    from qkv.api import load
    from qkv.data.lines import read_lines
    from qkv.terminal import counter

    translator = load(run, weights=weights, device=device)
    sources, targets = read_lines(source), read_lines(target)
    _same_length(source, sources, target, targets)
    with counter("scoring", len(sources)) as advance:
        scored = translator.score(sources, targets, tag=tag, progress=advance)
    for found in scored:
        if as_json:
            print(json.dumps({**dataclasses.asdict(found), "perplexity": found.perplexity}, ensure_ascii=False))
        else:
            print(f"{found.logprob:.4f}\t{found.perplexity:.4f}")


@app.command()
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
    """BLEU, chrF and TER against raw references, each with its signature and 95 % interval."""
    from qkv import api
    from qkv.evaluate import metrics
    from qkv.run import Run
    from qkv.terminal import counter, writer

    sources, references = _test_set(run, source, reference)

    def measure(folder: Path, chosen: str) -> tuple[metrics.Scores, list[str]]:
        translator = api.load(folder, weights=chosen, device=device)
        with counter("translating", len(sources)) as advance:
            scores, found = api.evaluate(
                translator,
                sources,
                references,
                progress=advance,
                beam=beam,
                length_penalty=length_penalty,
                alpha=alpha,
                tag=tag,
            )
        return scores, [each.text for each in found]

    scores, texts = measure(run, weights)
    if output:
        with writer(output) as write:
            for text in texts:
                write(text)
    report: dict[str, Any] = {"run": str(run), **scores.to_dict()}
    lines = [str(scores)]
    if against:
        other, other_texts = measure(against, "")
        tgt_lang = Run.open(run).config.data.tgt_lang
        comparison = metrics.compare(texts, other_texts, references, tgt_lang=tgt_lang)
        report |= {"against": {"run": str(against), **other.to_dict()}, "comparison": comparison.to_dict()}
        lines += ["", f"a: {run}", f"b: {against}", str(comparison)]
    print(json.dumps(report, ensure_ascii=False) if as_json else "\n".join(lines))


@app.command()
def explain(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="One source sentence.")],
    target: Annotated[
        str | None, typer.Option(help="Its translation; the model's own by default.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="A page (.html) or data (.json).")] = Path("map.html"),
    tag: Tag = "",
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """Draw what every head attends to while a sentence is translated."""
    from qkv.api import load
    from qkv.terminal import say

    found = load(run, weights=weights, device=device).attention(text, target, tag=tag)
    found.save(output)
    say(f"{found.translation}\n{output}: {len(found.weights)} attention layers")


@app.command()
def average(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many of the last checkpoints; 0: all that are kept.")] = 0,
    name: Annotated[str, typer.Option(help="What to call the result.", show_default="average_N")] = "",
) -> None:
    """Average the last checkpoints of a run into new weights (use them with --weights)."""
    from qkv.train.average import average_last

    path, checkpoints = average_last(run, last, name)
    print(f"{path}: average of {', '.join(each.stem for each in checkpoints)}")


@app.command()
def config(
    what: Annotated[str, typer.Argument(metavar="PRESET|CONFIG|RUN", help="What to show and check.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Show only where it differs from this one.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Show and check a config, or compare two."""
    from qkv import config as configs
    from qkv.run import find_config

    shown = configs.assign(find_config(what), settings or [])
    if other is None:
        print(configs.dumps(shown), end="")
        return
    for path, ours, theirs in configs.difference(shown, find_config(other)):
        print(f"{path}\t{ours}\t{theirs}")


@app.command()
def doctor() -> None:
    """Versions, devices, and a self-test of a few seconds."""
    from qkv.lab.doctor import examine

    raise typer.Exit(0 if examine(print) else 1)


@lab.command()
def speed(
    what: Annotated[str, typer.Argument(help="train, decode or all.")] = "all",
    seconds: Annotated[float, typer.Option(help="How long to measure each setting.")] = 10.0,
    device: Device = "auto",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Also write JSON.", show_default=False)] = None,
) -> None:
    """Training and decoding speed against the same architecture built from torch.nn.Transformer."""
    from qkv.lab.speed import measure

    measure(what, seconds=seconds, device=device, output=output)


# ---- what the verbs share --------------------------------------------------------------------------------------------


def _with_corpora(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """The config with the corpora that the command line names."""
    from qkv.config import Config as Settings
    from qkv.config import Corpus

    if config is None and not src:
        raise UsageError("nothing to train on: give a preset, a config file, or --src and --tgt")
    if tgt and len(tgt) != len(src):
        raise UsageError(f"{len(src)} --src but {len(tgt)} --tgt: give one for each")
    if valid_tgt and not valid_src:
        raise UsageError(f"--valid-tgt {valid_tgt}: give --valid-src too")
    config = config or Settings()
    data = config.data
    if src:
        corpora = tuple(Corpus(src=s, tgt=t) for s, t in zip(src, tgt or [""] * len(src), strict=True))
        data = dataclasses.replace(data, train=corpora, valid=(), root="")
    if valid_src:
        data = dataclasses.replace(data, valid=(Corpus(src=valid_src, tgt=valid_tgt or ""),))
    return dataclasses.replace(config, data=data)


def _test_set(run: Path, source: str | None, reference: str | None) -> tuple[list[str], list[str]]:
    """The lines of both files, or the pairs that the run held out."""
    from qkv.data.lines import read_lines
    from qkv.run import Run

    if source and not reference:
        raise UsageError(f"{source}: give REF too, its reference translations")
    if not source or not reference:
        store = Run.open(run).store
        source, reference = str(store / "valid.src.txt"), str(store / "valid.tgt.txt")
        if not Path(source).exists():
            raise UsageError(f"{run} keeps no held-out pairs (no {source}): give SRC and REF")
    sources, references = read_lines(source), read_lines(reference)
    _same_length(source, sources, reference, references)
    return sources, references


def _same_length(name: str, lines: Sequence[str], other: str, others: Sequence[str]) -> None:
    if len(lines) != len(others):
        counts = f"{name} has {len(lines):,} lines but {other} has {len(others):,}"
        raise QkvError(f"{counts}: they must correspond line by line")


def _command() -> str:
    """The command line as it was typed, for the model card."""
    import shlex

    return shlex.join(["qkv", *sys.argv[1:]])
