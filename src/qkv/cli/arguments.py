"""Options that several verbs share, and the text files that a command line names.

An option of one verb is declared in the signature of that verb.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from qkv.options import Config


def option(help: str, *names: str, **more: Any) -> Any:
    """An option; its help shows the default, if there is one."""
    return typer.Option(*names, help=help, **more)


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a verb that have a value, by their Python names: --no-split is split=False."""
    values = {name: value for name, value in params.items() if value is not False and value not in (None, "", (), [])}
    if values.pop("no_split", False):
        values["split"] = False
    return values


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Weights = Annotated[str, option("best, average, last or a step number; default: the run's chosen weights.")]
Device = Annotated[str, option("auto, cpu, cuda, cuda:1, mps …")]
Tag = Annotated[str, option("Language tag, for a model trained with several languages.")]
Settings = Annotated[
    list[str] | None, option("Override a config option; repeatable.", "--set", metavar="SECTION.KEY=VALUE")
]
AsJson = Annotated[bool, option("Print one JSON object per line.", "--json")]

# Text in and out.
OnBad = Literal["error", "skip"]  # how to treat a line that is not UTF-8
TextFile = Annotated[str, typer.Argument(help="Text file, one segment per line; - is standard input.")]
Newlines = Literal["keep", "join"]
NoSplit = Annotated[bool, option("Translate a line of several sentences in one piece.", "--no-split")]

# Search and its preferences.
Beam = Annotated[int | None, option("Beam size; 1 is greedy search.")]
Penalty = Annotated[str | None, option("Length penalty: gnmt, average or none.")]
Alpha = Annotated[float | None, option("Exponent α of the gnmt length penalty.")]

# Sampling instead of search.
Sample = Annotated[bool, option("Sample translations instead of searching.", "--sample")]
Temperature = Annotated[float | None, option("Sampling temperature; below 1 more predictable, above 1 more varied.")]
TopK = Annotated[int | None, option("Sample from the k most probable tokens.")]
TopP = Annotated[
    float | None, option("Nucleus sampling: keep the smallest set of tokens with cumulative probability p.")
]
MinP = Annotated[float | None, option("Keep tokens with at least this fraction of the highest probability.")]

# Constraints on the output.
Rerank = Annotated[
    str | None, option("Minimum Bayes risk: choose the candidate most similar to the others by chrf or bleu.")
]

# Models, devices, processes.
With = Annotated[
    list[Path] | None, option("Another run to decode with as an ensemble; repeatable.", "--with", metavar="RUN")
]
Dtype = Annotated[str, option("Precision: auto (fp32 on a CPU, bf16 on a GPU), fp32, bf16 or int8.")]
Workers = Annotated[int | None, option("Worker processes on a CPU; default: one per core for a large file.", min=1)]


def command_line() -> str:
    """Return the command line, for the model card."""
    return shlex.join(["qkv", *sys.argv[1:]])


# ---- Input files -----------------------------------------------------------------------------------------------------


def held_out(run: Path, source: str | None, reference: str | None) -> tuple[list[str], list[str]]:
    """Return the lines of both files, or the held-out pairs of the run."""
    from qkv.assembly import Run

    if source and not reference:
        raise UsageError(f"{source}: references are missing: give REF too")
    if not source or not reference:
        store = Run.open(run).store
        source, reference = str(store / "valid.src.txt"), str(store / "valid.tgt.txt")
        if not Path(source).exists():
            raise UsageError(f"{run} keeps no held-out pairs (no {source}): give SRC and REF")
    sources, references = read_nonempty(source), read_nonempty(reference)
    check_same_length(source, sources, reference, references)
    return sources, references


def read_nonempty(name: str) -> list[str]:
    """Return the lines of a file; refuse an empty one, on which no metric is defined."""
    from qkv.data.formats import read_lines

    lines = read_lines(name)
    if not lines:
        raise QkvError(f"{name}: the file is empty")
    return lines


def check_same_length(name: str, lines: Sequence[object], other: str, others: Sequence[object]) -> None:
    """Refuse two files with different numbers of lines."""
    if len(lines) != len(others):
        counts = f"{name} has {len(lines):,} lines but {other} has {len(others):,}"
        raise QkvError(f"{counts}: they must correspond line by line")


# ---- Training text, as corpora of a config ---------------------------------------------------------------------------


def with_pairs(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """Return the config with the parallel text of --src, --tgt, --valid-src and --valid-tgt."""
    from qkv.options import Config

    if config is None and not src:
        raise UsageError("no training text: give a preset, a config file, --src and --tgt, or --text")
    if tgt and len(tgt) != len(src):
        raise UsageError(f"{len(src)} --src but {len(tgt)} --tgt: give one --tgt for each --src")
    if valid_tgt and not valid_src:
        raise UsageError(f"--valid-tgt {valid_tgt}: give --valid-src too")
    config = config or Config()
    if src:
        corpora = [{"src": s, "tgt": t} for s, t in zip(src, tgt or [""] * len(src), strict=True)]
        config = config.replace(data={"train": corpora, "valid": [], "root": ""})
    if valid_src:
        config = config.replace(data={"valid": [{"src": valid_src, "tgt": valid_tgt or ""}]})
    return config


def with_extra_pairs(config: Config, also: list[str]) -> Config:
    """Return the config with the corpora of --also added to its own."""
    if also and not config.data.valid:
        # A held-out part of all text would contain synthetic pairs, and select the checkpoint closest to machine text.
        raise UsageError(f"--also {also[0]}: synthetic pairs cannot be validated on: give --valid-src and --valid-tgt")
    return config.replace(data={"train": [*config.data.train, *(_corpus(each, config.data.root) for each in also)]})


def _corpus(given: str, root: str) -> dict[str, Any]:
    """Parse a value of --also: FILE, FILE:WEIGHT or FILE:WEIGHT:TAG."""
    # A file name may contain colons: take the longest prefix that exists.
    ends = [*(i for i, letter in enumerate(given) if letter == ":"), len(given)]
    end = next((end for end in reversed(ends) if Path(given[:end]).exists()), ends[0])
    name, (weight, _, tag) = given[:end], given[end + 1 :].partition(":")
    try:
        value = float(weight or "1")
    except ValueError:
        raise UsageError(f'--also {given}: "{weight}" is not a number: write FILE:WEIGHT, e.g. {name}:0.5') from None
    # A path is relative to the working directory on the command line, to data.root in a config.
    path = str(Path(name).absolute()) if root and name != "-" else name
    return {"src": path, "weight": value, "tag": tag}


def with_text(config: Config | None, text: list[str], valid_text: str | None) -> Config:
    """Return the config with the monolingual text of --text and --valid-text; by default it is a language model's."""
    from qkv.options import Config, DecoderOnlyConfig

    if config is None and not text:
        raise UsageError(f"--valid-text {valid_text}: give --text too")
    config = config or Config(model=DecoderOnlyConfig())
    if text:
        config = config.replace(data={"train": [{"text": t} for t in text], "valid": [], "root": ""})
    if valid_text:
        config = config.replace(data={"valid": [{"text": valid_text}]})
    return config
