"""The verb augment: a trained model and text make a corpus to train on."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli import options

if TYPE_CHECKING:
    from qkv.data.noise import Noise


class Kind(StrEnum):
    """What the pairs are for, which decides the side that the translation is on."""

    back = "back-translation"
    own = "self-training"
    distilled = "distillation"


class Reason(StrEnum):
    """For what pairs are left out, unless it is allowed."""

    repeated = "repeated"
    unfinished = "unfinished"
    looped = "looped"
    copy = "copy"
    ratio = "ratio"


# Options that are handed on as they are, if they are given.
HANDED_ON = """
    references closest_by beam sample temperature top_k top_p min_p seed rerank candidates tag others weights
    dtype device workers
""".split()

As = Annotated[
    Kind,
    typer.Option("--as", help="back-translation: RUN translates target text to the source; the others: source text."),
]
Output = Annotated[
    str,
    typer.Option("--output", "-o", help="Pairs to write, .tsv or .jsonl; was it interrupted, it goes on. - is .tsv."),
]
References = Annotated[
    str | None,
    typer.Option(help="Of distillation: references, line by line; the translation closest to each is taken."),
]
ClosestBy = Annotated[str, typer.Option(help="Closest to the reference by bleu or chrf.")]
WithNoise = Annotated[
    bool, typer.Option("--noise", help="Noise on the source side: --drop 0.1 --blank 0.1 --shuffle 3.")
]
Drop = Annotated[float | None, typer.Option(help="Share of source words dropped.")]
Blank = Annotated[float | None, typer.Option(help="Share of source words blanked.")]
Shuffle = Annotated[int | None, typer.Option(help="Places that a source word may move.")]
Allow = Annotated[list[Reason] | None, typer.Option(help="Leave nothing out for this reason; may be repeated.")]
MaxRatio = Annotated[float, typer.Option(help="Longest side to the shortest, in tokens; 0: no limit.")]
MinLogprob = Annotated[float | None, typer.Option(help="Least log-probability of a token, on average.")]
Keep = Annotated[float, typer.Option(help="Share to keep of the pairs that pass all else, the likeliest.")]
RoundTrip = Annotated[
    Path | None, typer.Option(metavar="RUN", help="A run of the other direction, which says how likely pairs are.")
]
Seed = Annotated[int, typer.Option(help="Of samples and noise.")]
Candidates = Annotated[int | None, typer.Option(help="How many --rerank or --references choose from.")]
BadLines = Annotated[options.OnBad, typer.Option(help="A line that is not UTF-8: error, or skip it.")]


def augment(
    context: typer.Context,
    run: options.RunArgument,
    kind: As,
    text: options.TextFile = "-",
    output: Output = "-",
    references: References = None,
    closest_by: ClosestBy = "bleu",
    noise: WithNoise = False,
    drop: Drop = None,
    blank: Blank = None,
    shuffle: Shuffle = None,
    allow: Allow = None,
    max_ratio: MaxRatio = 3.0,
    min_logprob: MinLogprob = None,
    keep: Keep = 1.0,
    round_trip: RoundTrip = None,
    beam: options.Beam = None,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: Seed = 1,
    rerank: options.Rerank = None,
    candidates: Candidates = None,
    tag: options.Tag = "",
    others: options.With = None,
    weights: options.Weights = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    workers: options.Workers = None,
    on_bad: BadLines = options.OnBad.error,
) -> None:
    """Make a corpus of text and a model's translations of it: what `qkv train --also` reads.

    What is left out is counted and told. With --output a file of any size: stopped or killed, the same command goes on
    where it was. On several GPUs: torchrun --nproc-per-node 8 -m qkv augment RUN TEXT -o OUTPUT --as KIND
    """
    from qkv.api import augment as make
    from qkv.api.files import Crew, count_lines
    from qkv.api.sifting import Filters
    from qkv.terminal import counter, say

    asked = {name: context.params[name] for name in HANDED_ON}
    how = {name: value for name, value in asked.items() if value is not None and value is not False and value != ""}
    first = not Crew.here().rank
    total = count_lines(text) if first and sys.stderr.isatty() else None
    with counter("augmenting", total, shown=first) as advance:
        made = make(
            run,
            text,
            output,
            kind=kind.value,
            noise=_noise(noise, drop, blank, shuffle),
            filters=Filters(max_ratio, min_logprob, keep, tuple(reason.value for reason in allow or ())),
            back=round_trip,
            on_bad=on_bad.value,
            command=options.command_line(),
            progress=advance,
            **how,
        )
    if first:
        say(str(made))


def _noise(usual: bool, drop: float | None, blank: float | None, shuffle: int | None) -> Noise:
    """Of what is not given there is as much as is usual, or none."""
    from qkv.data.noise import EDUNOV, Noise

    base = EDUNOV if usual else Noise()
    return Noise(
        base.drop if drop is None else drop,
        base.blank if blank is None else blank,
        base.shuffle if shuffle is None else shuffle,
    )
