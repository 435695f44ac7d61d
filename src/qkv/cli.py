"""The command line: verbs and their options, handed to functions; torch is imported only by the verbs that need it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv import __version__
from qkv.errors import QkvError, UsageError

if TYPE_CHECKING:
    from qkv.config import Config

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
OnBad = Annotated[str, typer.Option(help="A line that is not UTF-8: error or skip.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change an option; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 128 + n stopped by signal n."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except BrokenPipeError:  # the reader of our output has gone: `qkv translate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if debug or code is None:
            raise
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:
            print(f"qkv: {message}", file=sys.stderr)
        sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    """The Transformer, from raw text files to a model that translates."""


@app.command()
def train(
    what: Annotated[str | None, typer.Argument(metavar="[PRESET|CONFIG]", help="A preset's name or a TOML file.")] = None,
    src: Annotated[list[str] | None, typer.Option(help="Source text, or a .tsv/.jsonl file with both sides; may be repeated.")] = None,
    tgt: Annotated[list[str] | None, typer.Option(help="Target text, line by line; one for each --src.")] = None,
    valid_src: Annotated[str | None, typer.Option(help="Validation source; by default a part of the text is held out.")] = None,
    valid_tgt: Annotated[str | None, typer.Option(help="Validation target.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder to make.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    minutes: Annotated[float, typer.Option(help="How long an automatic recipe may train; 0: by device.")] = 0.0,
    on_bad: Annotated[str | None, typer.Option(help="A line that is not UTF-8: error or skip.", show_default=False)] = None,
) -> None:
    """Train a model: from a preset, a config file, or two text files and nothing else."""
    from qkv import auto
    from qkv.train.begin import train as begin

    changed = [*(settings or []), *([f'data.on_bad="{on_bad}"'] if on_bad else [])]
    if resume:
        if what or src or tgt:
            raise UsageError("--resume takes what the run folder holds: give --run alone, and --set if need be")
        begin(None, run or "runs/model", resume=True, settings=changed)
        return
    config = _with_corpora(_find_config(what) if what else None, src or [], tgt or [], valid_src, valid_tgt)
    recipe = None if what else lambda config, prepared: auto.choose(config, prepared, minutes)
    begin(config, run, recipe=recipe, settings=changed, command=_command())


@app.command()
def translate(
    run: RunArgument,
    file: Annotated[str, typer.Argument(help="Text file, a line for each sentence; - is standard input.")] = "-",
    beam: Beam = None,
    n_best: Annotated[int, typer.Option(help="Translations of each line: number, rank, score and text, tab-separated.")] = 1,
    length_penalty: Penalty = None,
    alpha: Alpha = None,
    tag: Tag = "",
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
    on_bad: OnBad = "error",
) -> None:
    """Translate text: as many lines out as in."""
    from qkv.api import load
    from qkv.data.lines import read_lines

    translator = load(run, weights=weights, device=device)
    options = {"beam": beam, "n_best": n_best, "length_penalty": length_penalty, "alpha": alpha, "tag": tag}
    with _writer(output) as write, _progress("translating") as advance:
        lines = read_lines(file, on_bad)
        for number, found in enumerate(translator.stream(lines, progress=advance, **options), 1):
            if as_json:
                write(json.dumps({"line": number, **found.to_dict()}, ensure_ascii=False))
            elif n_best > 1:
                for rank, each in enumerate([found, *found.alternatives], 1):
                    write(f"{number}\t{rank}\t{each.score:.4f}\t{each.text}")
            else:
                write(found.text)


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

    translator = load(run, weights=weights, device=device)
    sources, targets = list(read_lines(source)), list(read_lines(target))
    _same_length(source, sources, target, targets)
    for found in translator.score(sources, targets, tag=tag):
        if as_json:
            row = {"logprob": found.logprob, "perplexity": found.perplexity}
            row |= {"tokens": found.tokens, "token_logprobs": found.token_logprobs}
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(f"{found.logprob:.4f}\t{found.perplexity:.4f}")


@app.command()
def evaluate(
    run: RunArgument,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Source text.")],
    reference: Annotated[str, typer.Argument(metavar="REF", help="Reference translations, raw text.")],
    against: Annotated[Path | None, typer.Option(help="Another run: is the difference significant?", show_default=False)] = None,
    beam: Beam = None,
    length_penalty: Penalty = None,
    alpha: Alpha = None,
    tag: Tag = "",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Keep the translations in a file.", show_default=False)] = None,
    as_json: AsJson = False,
    weights: Weights = "",
    device: Device = "auto",
) -> None:
    """BLEU, chrF and TER against raw references, each with its signature and 95 % interval."""
    from qkv import api
    from qkv.data.lines import read_lines
    from qkv.evaluate import metrics

    sources, references = list(read_lines(source)), list(read_lines(reference))
    _same_length(source, sources, reference, references)
    options = {"beam": beam, "length_penalty": length_penalty, "alpha": alpha, "tag": tag}

    def measure(folder: Path, chosen: str) -> tuple[metrics.Scores, list[str]]:
        with _progress("translating", len(sources)) as advance:
            translator = api.load(folder, weights=chosen, device=device)
            scores, found = api.evaluate(translator, sources, references, progress=advance, **options)
        return scores, [each.text for each in found]

    scores, texts = measure(run, weights)
    if output:
        with _writer(output) as write:
            for text in texts:
                write(text)
    report: dict[str, Any] = {"run": str(run), **scores.to_dict()}
    lines = [str(scores)]
    if against:
        other, other_texts = measure(against, "")
        comparison = metrics.compare(texts, other_texts, references)
        report |= {"against": {"run": str(against), **other.to_dict()}, "comparison": comparison.to_dict()}
        lines += ["", f"{against}:", str(other), "", str(comparison)]
    print(json.dumps(report, ensure_ascii=False) if as_json else "\n".join(lines))


@app.command()
def average(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many of the last checkpoints; 0: all that are kept.")] = 0,
    name: Annotated[str, typer.Option(help="What to call the result.")] = "average",
) -> None:
    """Average the last checkpoints of a run into new weights (use them with --weights)."""
    from qkv.train.average import average_last

    steps = average_last(run, last, name)
    print(f"{run}/weights/{name}.safetensors: average of {', '.join(steps)}")


@app.command()
def config(
    what: Annotated[str, typer.Argument(metavar="PRESET|CONFIG|RUN", help="What to show and check.")],
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Show only where it differs from this one.")] = None,
    settings: Settings = None,
) -> None:
    """Show and check a config, or compare two."""
    from qkv import config as configs

    shown = configs.assign(_find_config(what), settings or [])
    if other is None:
        print(configs.dumps(shown), end="")
        return
    for path, ours, theirs in configs.difference(shown, _find_config(other)):
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


def _find_config(name: str) -> Config:
    """A preset by name, a run folder's config, or a TOML file."""
    import difflib

    from qkv import config as configs
    from qkv.presets import PRESETS
    from qkv.run import Run

    if name in PRESETS:
        return PRESETS[name]()
    if Path(name).is_dir():
        return Run.open(name).config
    if Path(name).exists():
        return configs.load(name)
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(PRESETS)}"
    raise UsageError(f"{name}: no such preset, config file or run folder: {hint}")


def _with_corpora(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """The config with the corpora that the command line names."""
    import dataclasses

    from qkv.config import Config as Settings
    from qkv.config import Corpus

    if config is None and not src:
        raise UsageError("nothing to train on: give a preset, a config file, or --src and --tgt")
    if tgt and len(tgt) != len(src):
        raise UsageError(f"{len(src)} --src but {len(tgt)} --tgt: give one for each")
    if (valid_tgt or valid_src) and not src and config is None:
        raise UsageError("--valid-src and --valid-tgt go with --src and --tgt")
    config = config or Settings()
    data = config.data
    if src:
        corpora = tuple(Corpus(src=s, tgt=t) for s, t in zip(src, tgt or [""] * len(src), strict=True))
        data = dataclasses.replace(data, train=corpora, valid=(), root="")
    if valid_src:
        data = dataclasses.replace(data, valid=(Corpus(src=valid_src, tgt=valid_tgt or ""),))
    return dataclasses.replace(config, data=data)


def _same_length(name: str, lines: list[str], other: str, others: list[str]) -> None:
    if len(lines) != len(others):
        raise QkvError(f"{name} has {len(lines):,} lines but {other} has {len(others):,}: they must correspond line by line")


@contextmanager
def _writer(output: str) -> Iterator[Callable[[str], object]]:
    """Write lines of UTF-8 to a file or, for -, to standard output."""
    if output == "-":
        out = open(sys.stdout.fileno(), "w", encoding="utf-8", newline="\n", closefd=False)  # noqa: SIM115
    else:
        try:
            out = open(output, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    with out:
        yield lambda line: out.write(line + "\n")


@contextmanager
def _progress(stage: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A function that is told of finished lines and shows them."""
    from qkv.train.progress import bars

    done = 0
    with bars() as report:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(stage, done, total)

        yield advance


def _command() -> str:
    """The command line as it was typed, for the model card."""
    import shlex

    return shlex.join(["qkv", *sys.argv[1:]])
