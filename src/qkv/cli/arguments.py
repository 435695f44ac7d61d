"""Options that several verbs share, and the text files that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    pass


class OnBad(StrEnum):
    """How to treat a line that is not UTF-8."""

    error = "error"
    skip = "skip"


def optional(help: str, *names: str, **more: Any) -> Any:
    """An option without a default: if it is not given, the run's config decides, or the feature is off."""
    return typer.Option(*names, help=help, show_default=False, **more)


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best, average, last or a step number; default: the run's chosen weights.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
Tag = Annotated[str, typer.Option(help="Language tag, for a model trained with several languages.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a config option; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

# Text in and out.
TextFile = Annotated[str, typer.Argument(help="Text file, one segment per line; - is standard input.")]
Output = Annotated[
    str, typer.Option("--output", "-o", help="Output file; resumes an interrupted translation. - is standard output.")
]
NoSplit = Annotated[bool, typer.Option("--no-split", help="Translate a line of several sentences in one piece.")]
BadLines = Annotated[OnBad, typer.Option(help="Line that is not UTF-8: error, or skip (its output line is empty).")]

# Search and its preferences.
Beam = Annotated[int | None, optional("Beam size; 1 is greedy search.")]
NBest = Annotated[int | None, optional("Translations per line, as tab-separated line number, rank, score and text.")]
Penalty = Annotated[str | None, optional("Length penalty: gnmt, average or none.")]
Alpha = Annotated[float | None, optional("Exponent α of the gnmt length penalty.")]
Coverage = Annotated[float | None, optional("Coverage penalty β for source tokens with little attention; 0 is off.")]
MinLength = Annotated[int | None, optional("Minimum length of a translation, in tokens.")]
MaxLength = Annotated[int | None, optional("Maximum length of a translation, in tokens.")]
RepetitionPenalty = Annotated[
    float | None, optional("Repetition penalty; above 1, tokens already generated become less likely.")
]
NoRepeatNgram = Annotated[int | None, optional("Never generate the same n-gram of this length twice.", metavar="N")]
Groups = Annotated[int | None, optional("Diverse beam search: number of groups that the beam is divided into.")]
Diversity = Annotated[float | None, optional("Diverse beam search: penalty for tokens that earlier groups chose.")]

# Sampling instead of search.
Sample = Annotated[bool, typer.Option("--sample", help="Sample translations instead of searching.")]
Temperature = Annotated[float | None, optional("Sampling temperature; below 1 more predictable, above 1 more varied.")]
TopK = Annotated[int | None, optional("Sample from the k most probable tokens.")]
TopP = Annotated[
    float | None, optional("Nucleus sampling: keep the smallest set of tokens with cumulative probability p.")
]
MinP = Annotated[float | None, optional("Keep tokens with at least this fraction of the highest probability.")]
Seed = Annotated[int | None, optional("Random seed of sampling; equal seeds give equal output.")]

# Constraints on the output.
Prefix = Annotated[str | None, optional("Force every translation to begin with this text.", metavar="TEXT")]
MustInclude = Annotated[
    list[str] | None, optional("Phrase that every translation must contain; repeatable.", metavar="TEXT")
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Keep the phrases of --must-include in the given order.")]
Avoid = Annotated[list[str] | None, optional("Phrase that no translation may contain; repeatable.", metavar="TEXT")]
Shortlist = Annotated[
    bool, typer.Option("--shortlist", help="Limit the output vocabulary to likely translations of the source; faster.")
]
Rerank = Annotated[
    str | None, optional("Minimum Bayes risk: choose the candidate most similar to the others by chrf or bleu.")
]
Candidates = Annotated[int | None, optional("Number of hypotheses or samples that --rerank chooses from.")]

# Models, devices, processes.
With = Annotated[
    list[Path] | None,
    optional("Another run to decode with as an ensemble; repeatable.", "--with", metavar="RUN"),
]
Dtype = Annotated[str, typer.Option(help="Precision: auto (fp32 on a CPU, bf16 on a GPU), fp32, bf16 or int8.")]
Workers = Annotated[int | None, optional("Worker processes on a CPU; default: one per core for a large file.", min=1)]


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
