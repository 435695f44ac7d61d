"""Whole texts against single sentences: are joined lines found again, translated completely, and as well?

    python benchmarks/whole_texts.py RUN SRC REF [--pieces 10000] [--seed 1] [--beam N] [--detect 200]

Lines of a test set (SRC, REF) that end in . ! or ? on both sides are joined, 2 to 20 consecutive ones to a text, until
the texts have `--pieces` lines. The run translates (a) every line alone and (b) the texts, with default options. The
report says which joins are borders of pieces, whether spans tile source and translation, whether a piece has no
translation, the chrF of (a) and (b), and what the omission check did.

Detection: with split=False a model of single sentences leaves out much of a text. The report says how many of the first
`--detect` texts come back with fewer than half the tokens of (b), and what the omission check makes of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sacrebleu.metrics import CHRF

import qkv
from qkv.api.omission import OmissionCheck
from qkv.api.translation import Translation
from qkv.decoding.search_request import SearchRunner

STOPS = (".", "!", "?")
SHORTEST, LONGEST = 2, 20  # lines of a text


@dataclass(frozen=True)
class JoinedText:
    """Consecutive lines of a test set, joined by a space: sources, references, and the place of the first line."""

    first: int
    sources: tuple[str, ...]
    references: tuple[str, ...]

    @property
    def source(self) -> str:
        return " ".join(self.sources)

    @property
    def joins(self) -> list[int]:
        """Where each line but the first begins in the text."""
        return list(accumulate(len(line) + 1 for line in self.sources[:-1]))


def ended_lines(src: Sequence[str], ref: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of lines that both end in a terminal mark."""
    pairs = [(a.strip(), b.strip()) for a, b in zip(src, ref, strict=True)]
    return [(a, b) for a, b in pairs if a.endswith(STOPS) and b.endswith(STOPS)]


def joined_texts(pairs: Sequence[tuple[str, str]], pieces: int, seed: int = 1) -> list[JoinedText]:
    """Join lines to texts until these have so many lines; at the end of the test set begin again, cut otherwise."""
    if len(pairs) < LONGEST:
        raise SystemExit(f"{len(pairs)} lines end in . ! or ?: at least {LONGEST} are needed")
    pick, texts, at, total = random.Random(seed), list[JoinedText](), 0, 0
    while total < pieces:
        count = pick.randint(SHORTEST, LONGEST)
        if at + count > len(pairs):
            at = 0
        sources, references = zip(*pairs[at : at + count], strict=True)
        texts.append(JoinedText(at, sources, references))
        at, total = at + count, total + count
    return texts


# ---- what became of the joins ----------------------------------------------------------------------------------------


@dataclass
class Joins:
    """Counts over all texts: which joins are borders of pieces, which other borders there are, what is not whole."""

    texts: int = 0
    pieces: int = 0
    joins: int = 0
    found: int = 0
    extra: int = 0  # borders that are no joins …
    extra_alone: int = 0  # … and are borders of the line alone, too
    untranslated: int = 0
    not_tiled: int = 0  # texts
    flagged: int = 0  # pieces with the flag `omission`

    def add(self, text: JoinedText, translation: Translation, alone: Sequence[Translation]) -> None:
        pieces, joins = translation.pieces, set(text.joins)
        borders = {piece.source[0] for piece in pieces[1:]}
        of_lines = {
            begin + piece.source[0]
            for begin, line in zip([0, *text.joins], alone, strict=True)
            for piece in line.pieces[1:]
        }
        self.texts += 1
        self.pieces += len(pieces)
        self.joins += len(joins)
        self.found += len(joins & borders)
        self.extra += len(borders - joins)
        self.extra_alone += len((borders - joins) & of_lines)
        self.untranslated += sum(not translation.text[slice(*piece.target)].strip() for piece in pieces)
        self.not_tiled += not (
            tiled([piece.source for piece in pieces], len(text.source))
            and tiled([piece.target for piece in pieces], len(translation.text))
        )
        self.flagged += sum("omission" in piece.flags for piece in pieces)


def tiled(spans: Sequence[tuple[int, int]], length: int) -> bool:
    """Return whether spans follow each other without gap or overlap, from 0 to the length."""
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    return [*begins, length] == [0, *ends]


def cut_again(text: JoinedText, translation: Translation) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, end line, translation) between the joins that were found."""
    at = {0: 0, **{begin: i for i, begin in enumerate(text.joins, 1)}}
    starts = [
        (at[piece.source[0]], piece.target[0] if at[piece.source[0]] else 0)
        for piece in translation.pieces
        if piece.source[0] in at
    ]
    for (line, begin), (end_line, end) in zip(
        starts, [*starts[1:], (len(text.sources), len(translation.text))], strict=True
    ):
        yield line, end_line, translation.text[begin:end].strip()


def chrf_pair(
    texts: Sequence[JoinedText], whole: Sequence[Translation], alone: Sequence[Sequence[Translation]]
) -> tuple[float, float]:
    """Return the chrF of the lines alone and of the joined texts, both cut where joins were found."""
    single, joined, references = [], [], []
    for text, translation, lines in zip(texts, whole, alone, strict=True):
        for begin, end, output in cut_again(text, translation):
            joined.append(output)
            single.append(" ".join(each.text for each in lines[begin:end]))
            references.append(" ".join(text.references[begin:end]))
    score = CHRF().corpus_score
    return score(single, [references]).score, score(joined, [references]).score


# ---- what the omission check costs and finds -------------------------------------------------------------------------


class TokenCount:
    """Counts the source tokens of first searches, and of those after the omission check has found suspects."""

    def __init__(self) -> None:
        self.first = self.again = 0
        self.suspects_seen = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count while one call of `translate` runs."""
        run, suspects = SearchRunner.run, OmissionCheck.suspects
        self.suspects_seen = False

        def counted(runner: SearchRunner, work: Any, *arguments: Any, **options: Any) -> Any:
            tokens = sum(map(len, work.sources))
            self.again += tokens if self.suspects_seen else 0
            self.first += 0 if self.suspects_seen else tokens
            return run(runner, work, *arguments, **options)

        def seen(check: OmissionCheck, pairs: Any, lengths: Any) -> list[int]:
            self.suspects_seen = True
            return suspects(check, pairs, lengths)

        with patch.object(SearchRunner, "run", counted), patch.object(OmissionCheck, "suspects", seen):
            yield


def detection(
    translator: qkv.Translator, texts: Sequence[JoinedText], whole: Sequence[Translation], **options: Any
) -> dict[str, int]:
    """Translate the texts as single pieces, without and with the omission check, and count what is too short."""
    sources = [text.source for text in texts]
    unchecked = translator.translate(sources, split=False, check=False, **options)
    checked = translator.translate(sources, split=False, **options)
    counts = dict.fromkeys(("texts", "short", "flagged", "completed", "missed", "flagged_or_short"), 0)
    for complete, before, after in zip(whole, unchecked, checked, strict=True):
        half = len(complete.tokens) / 2
        flagged, short = "omission" in after.flags, len(after.tokens) < half
        counts["texts"] += 1
        counts["flagged_or_short"] += flagged or short
        if len(before.tokens) < half:
            counts["short"] += 1
            counts["flagged"] += flagged
            counts["completed"] += not flagged and not short
            counts["missed"] += not flagged and short
    return counts


# ---- the report ------------------------------------------------------------------------------------------------------


def measure(translator: qkv.Translator, texts: Sequence[JoinedText], detect: int = 0, **options: Any) -> dict[str, Any]:
    """Translate the lines alone and the texts, and some of these as single pieces; return all figures."""
    lines = dict.fromkeys(line for text in texts for line in text.sources)
    began = time.perf_counter()
    alone = dict(zip(lines, translator.translate(list(lines), **options), strict=True))
    count = TokenCount()
    with count.watching():
        whole = translator.translate([text.source for text in texts], **options)
    joins = Joins()
    of_texts = [[alone[line] for line in text.sources] for text in texts]
    for text, translation, of_lines in zip(texts, whole, of_texts, strict=True):
        joins.add(text, translation, of_lines)
    single, joined = chrf_pair(texts, whole, of_texts)
    figures: dict[str, Any] = {
        **vars(joins),
        "lines": sum(len(text.sources) for text in texts),
        "chrf_alone": single,
        "chrf_joined": joined,
        "chrf_ratio": joined / single if single else 0.0,
        "flagged_alone": sum("omission" in piece.flags for each in alone.values() for piece in each.pieces),
        "pieces_alone": sum(len(each.pieces) for each in alone.values()),
        "tokens": count.first,
        "tokens_again": count.again,
    }
    if detect:
        figures["detection"] = detection(translator, texts[:detect], whole[:detect], **options)
    return {**figures, "seconds": time.perf_counter() - began}


def rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the report: what, and its figure."""

    def share(part: int, of: int) -> str:
        return f"{part:,} of {of:,} ({part / max(1, of):.2%})"

    yield "texts / lines / pieces", f"{figures['texts']:,} / {figures['lines']:,} / {figures['pieces']:,}"
    yield "joins that are borders of pieces", share(figures["found"], figures["joins"])
    extra = f"{figures['extra']:,}, {figures['extra_alone']:,} of them also in the line alone"
    yield "other borders", extra
    yield "texts whose spans do not tile source and translation", f"{figures['not_tiled']:,}"
    yield "pieces without a translation", f"{figures['untranslated']:,}"
    yield "chrF, lines alone / texts cut at the joins", f"{figures['chrf_alone']:.2f} / {figures['chrf_joined']:.2f}"
    yield "ratio of the two", f"{figures['chrf_ratio']:.4f}"
    yield "pieces flagged `omission`", share(figures["flagged"], figures["pieces"])
    yield "source tokens searched again by the omission check", share(figures["tokens_again"], figures["tokens"])
    if found := figures.get("detection"):
        yield "split=False: texts with fewer than half the tokens, unchecked", share(found["short"], found["texts"])
        yield "of these, completed by searches in smaller pieces", share(found["completed"], found["short"])
        yield "of these, flagged `omission`", share(found["flagged"], found["short"])
        yield "of these, neither", share(found["missed"], found["short"])
        both = share(found["flagged_or_short"], found["texts"])
        yield "split=False, checked: texts that are flagged or have fewer than half the tokens", both


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("src", type=Path)
    parser.add_argument("ref", type=Path)
    parser.add_argument("--pieces", "--pairs", type=int, default=10_000, help="lines in all texts together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beam", type=int, default=None, help="default: that of the run")
    parser.add_argument("--detect", type=int, default=200, help="texts to translate with split=False")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args()
    sides = [path.read_text(encoding="utf-8").splitlines() for path in (chosen.src, chosen.ref)]
    texts = joined_texts(ended_lines(*sides), chosen.pieces, chosen.seed)
    translator = qkv.Translator(chosen.run)
    if translator.cutter.sentences > 1:
        print(f"{chosen.run}: a piece has up to {translator.cutter.sentences} sentences: joins are no borders")
    figures = measure(translator, texts, detect=chosen.detect, beam=chosen.beam)
    if chosen.json:
        print(json.dumps(figures))
        return
    print(f"{translator.engine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{figures['seconds']:.0f} s, seed {chosen.seed}, beam {chosen.beam or 'of the run'}")
    for name, value in rows(figures):
        print(f"| {name} | {value} |")
    if figures["untranslated"] or figures["not_tiled"]:
        sys.exit("a text did not come back whole")


if __name__ == "__main__":
    main()
