"""The Python surface: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from qkv import config as configs
from qkv.api.completing import Completer, Completion
from qkv.api.filling import Filler, Filling
from qkv.api.translating import CHUNK, Options, Scored, Translation, Translator
from qkv.errors import UsageError
from qkv.evaluate import metrics
from qkv.run import Run
from qkv.train.begin import train

__all__ = [
    "CHUNK",
    "Completer",
    "Completion",
    "Filler",
    "Filling",
    "Options",
    "Scored",
    "Translation",
    "Translator",
    "compare",
    "evaluate",
    "load",
    "train",
]


def load(run: str | Path | Run, *, weights: str = "", device: str = "auto") -> Translator | Completer | Filler:
    """Open a run folder for use, as what its kind of model is good for."""
    opened = run if isinstance(run, Run) else Run.open(run)
    match opened.config.model:
        case configs.DecoderOnly():
            return Completer(opened, weights=weights, device=device)
        case configs.EncoderOnly():
            return Filler(opened, weights=weights, device=device)
    return Translator(opened, weights=weights, device=device)


Evaluated = tuple[metrics.Scores, list[Translation]]


def evaluate(
    run: str | Path | Run | Translator,
    src: Sequence[str],
    ref: Sequence[str],
    **options: Unpack[Options],
) -> Evaluated:
    """Translate the source lines and score them against raw references: BLEU, chrF and TER, and the translations."""
    translator = run if isinstance(run, Translator) else Translator(run)
    if len(src) != len(ref):
        raise UsageError(f"{len(src)} source lines but {len(ref)} reference lines: they must correspond line by line")
    translations = translator.translate(src, **options)
    scores = metrics.score([t.text for t in translations], ref, tgt_lang=translator.config.data.tgt_lang)
    return scores, translations


def compare(
    run: str | Path | Run | Translator,
    against: str | Path | Run | Translator,
    src: Sequence[str],
    ref: Sequence[str],
    **options: Unpack[Options],
) -> tuple[Evaluated, Evaluated, metrics.Comparison]:
    """Evaluate two runs on the same lines, and ask whether they differ by more than chance."""
    translator = run if isinstance(run, Translator) else Translator(run)
    ours = evaluate(translator, src, ref, **options)
    theirs = evaluate(against, src, ref, **options)
    a, b = ([each.text for each in translations] for _, translations in (ours, theirs))
    return ours, theirs, metrics.compare(a, b, ref, tgt_lang=translator.config.data.tgt_lang)
