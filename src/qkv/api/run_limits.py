"""Measures a trained run: what its translations of held-out text are like, and the words that it copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from qkv.api.omission import RARE, RATHER_SHORT, Checks, uncovered
from qkv.api.translator import Translator
from qkv.assembly import Run
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError
from qkv.options import TranslationConfig

LEAST_LINES = 100  # held-out lines for limits that mean something
MOST_LINES, MOST_CHARACTERS = 1000, 100_000
MOST_PAIRS = 20_000  # training pairs in which words that are copied are looked for
STAND_INS, LEAST_COPIES, COPIED = 16, 5, 0.95  # how many words, each seen and copied how often


def measure_run(run: Run, text: PreparedText) -> None:
    """Measure a trained run on its validation text, and write the limits into its folder."""
    if not isinstance(run.config.model, TranslationConfig):
        return
    src, valid = text.tokenizers.src, text.valid
    sources = [src.decode(valid.row("src", i).tolist()) for i in range(min(len(valid), MOST_LINES))]
    if checks := measure(Translator(run, device=run.config.train.device), sources):
        replace(checks, copied=copied_words(_pairs(text))).write(run.path)


def _pairs(text: PreparedText) -> Iterator[tuple[str, str]]:
    """Yield a sample of the training pairs, evenly spread."""
    count = min(len(text.train), MOST_PAIRS)
    for i in range(count):
        at = i * len(text.train) // count
        src, tgt = (text.train.row(side, at).tolist() for side in ("src", "tgt"))
        yield text.tokenizers.src.decode(src), text.tokenizers.tgt.decode(tgt)


def measure(translator: Translator, sources: Sequence[str]) -> Checks | None:
    """Translate held-out sources and return the limits; None if there are too few."""
    sources = [line for line in sources if line.strip()][:MOST_LINES]
    sources = [line for line, end in zip(sources, accumulate(map(len, sources)), strict=True) if end <= MOST_CHARACTERS]
    if len(sources) < LEAST_LINES:
        return None
    tag = next(iter(translator.tokenizers.src.tags), "") if translator.needs_tag else ""
    outputs = [each.text for each in translator.translate(sources, split=False, check=False, beam=1, tag=tag)]
    lengths = np.array([translator.token_lengths(*pair) for pair in zip(sources, outputs, strict=True)], np.float64)
    checks = Checks(
        ratio=float(lengths[:, 1].sum() / lengths[:, 0].sum()),
        short=0.0,
        rather_short=0.0,
        uncovered=1.0,
        lines=len(sources),
        weights=translator.run.scores.get("chosen", "best"),
    )
    shortfalls = [checks.shortfall(*row) for row in lengths.tolist()]
    checks = replace(checks, short=_limit(shortfalls, RARE), rather_short=_limit(shortfalls, RATHER_SHORT))
    pairs = [pair for pair in zip(sources, outputs, strict=True) if pair[1]]
    try:
        shares = uncovered(pairs, lambda *sides: translator.align(*sides, tag=tag, split=False))
    except QkvError:  # a kind of model without alignment
        return checks
    return replace(checks, uncovered=_limit(shares, RARE))


def _limit(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values passes."""
    return float(np.quantile(values, 1 - share, method="higher"))


def copied_words(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the words, most frequent first, that nearly always stand in a translation as in its source."""
    seen: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for source, target in pairs:
        there = Counter(re.findall(r"\w+", target))
        for word, count in Counter(re.findall(r"\w+", source)).items():
            if len(word) > 1 and (word.isdigit() or (word[0].isupper() and word.isalpha())):
                seen[word] += 1
                kept[word] += there[word] == count
    often = [word for word, count in seen.most_common() if count >= LEAST_COPIES and kept[word] >= COPIED * count]
    return tuple(often[:STAND_INS])
