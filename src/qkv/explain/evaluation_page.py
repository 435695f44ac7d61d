"""The evaluation as a page: scores, what they hide, and the sentences behind them, of one system or of two.

It has the look of the training report and opens offline. Everything is in the page as it is written, plots too; its
script only chooses which sentences to show.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

from qkv.core import files
from qkv.core.errors import UsageError
from qkv.evaluation.diagnosis import Diagnosis, Sentence, percent, word_spans
from qkv.evaluation.metrics import Comparison, Scores
from qkv.explain.training_report import PAGE, heading, table

LISTED = 50  # sentences of a list, at most; …
FLAGGED = 200  # … of those with one flag
RATIOS = 20  # tenths: lengths from twice the reference's on are counted together

Pair = tuple[Sentence, ...]  # one sentence as each system translates it


@dataclass(frozen=True)
class System:
    """What was measured of one system."""

    name: str
    scores: Scores
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Group:
    """Sentences to look at, and how many more of the kind there are."""

    key: str
    name: str
    note: str
    pairs: Sequence[Pair]
    all: int


def check(path: str | Path) -> None:
    """Refuse a page that could not be written, before minutes are spent on translating."""
    if Path(path).suffix != ".html":
        raise UsageError(f"{path}: a report is written as .html: choose such a name")
    files.check_place(Path(path))


def report(systems: Sequence[System], path: str | Path, comparison: Comparison | None = None) -> None:
    """Write the evaluation of one system, or of two on the same lines, as a page (.html)."""
    check(path)
    files.write_text(Path(path), page(systems, comparison))


def page(systems: Sequence[System], comparison: Comparison | None = None) -> str:
    """The evaluation as HTML; every text of the user is escaped where it is put in."""
    if not 1 <= len(systems) <= 2:
        raise UsageError(f"an evaluation is of one system, or of two side by side, not of {len(systems)}")
    names = [system.name for system in systems]
    made = groups(systems)
    first = systems[0].diagnosis
    parts = {
        "title": escape(" and ".join(names)),
        "css": "".join((PAGE / name).read_text(encoding="utf-8") for name in ("report.css", "evaluation.css")),
        "js": (PAGE / "evaluation.js").read_text(encoding="utf-8"),
        "heading": heading(names),
        "lines": _lines(first),
        "scores": _scores(systems, comparison),
        "charts": "\n".join(_charts(systems)),
        "findings": _findings(systems),
        "key": "Words of an output that the reference does not have are <mark>marked so</mark>, words of the reference "
        'that an output lacks <mark class="missed">so</mark>, each in its order.',
        "choices": "\n".join(_choice(group, i) for i, group in enumerate(made)),
        "lists": "\n".join(_list(group, names) for group in made),
    }
    template = (PAGE / "evaluation.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _lines(found: Diagnosis) -> str:
    """How many lines there are, and what became of those that cannot be judged."""
    text = f"{found.lines:,} lines, {len(found.sentences):,} of them judged sentence by sentence."
    if found.blank_sources:
        text += f" Blank sources: {found.blank_sources:,}; blank translations of them: {found.blank_kept:,}."
    if found.blank_references:
        text += f" Blank references of other sources: {found.blank_references:,}."
    return text


def _scores(systems: Sequence[System], comparison: Comparison | None) -> str:
    """Every score with its interval; of two systems, whether they differ by more than chance."""
    tested = {difference.name: difference for difference in comparison or ()}
    rows = []
    for figures in zip(*(system.scores for system in systems), strict=True):
        cells = []
        for score in figures:
            interval = "" if score.low is None else f" [{score.low:.2f}, {score.high:.2f}]"
            cells.append(f"{score.value:.2f}{interval}")
        if comparison is not None:
            found = tested.get(figures[0].name)
            cells.append(signed(figures[1].value - figures[0].value, 2) + (f", p = {found.p:.4f}" if found else ""))
        rows.append([escape(figures[0].name), *cells])
    head = ["", *(escape(system.name) for system in systems), *(["difference"] if comparison else [])]
    shown = table("Of the whole test set, with 95 % bootstrap intervals", head, rows)
    signatures = "".join(f"<li>{escape(s.name)} <code>{escape(s.signature)}</code></li>" for s in systems[0].scores)
    return f'<section class="scores"><h2>Scores</h2>{shown}<ul class="signatures">{signatures}</ul></section>'


def _charts(systems: Sequence[System]) -> list[str]:
    names = [system.name for system in systems]
    buckets = [system.diagnosis.by_length for system in systems]
    if not buckets[0]:
        return ["<p>No sentence could be judged: there is nothing to plot.</p>"]
    labels = [bucket.name for bucket in buckets[0]]
    counts = [bucket.sentences for bucket in buckets[0]]
    note = "Of all sentences whose source has so many words; n is how many they are."
    chrf = [chrf_histogram(system.diagnosis) for system in systems]
    ratios = [ratio_histogram(system.diagnosis) for system in systems]
    return [
        _points(f"{title} by words of the source", note, names, labels, counts, values)
        for title, values in (
            ("BLEU", [[bucket.bleu for bucket in each] for each in buckets]),
            ("chrF2", [[bucket.chrf for bucket in each] for each in buckets]),
        )
    ] + [
        _bars(
            "Sentences by chrF2",
            "How many sentences have a chrF2 from each value on, in steps of five.",
            names,
            [str(5 * i) for i in range(20)],
            chrf,
            "chrF2 of the sentence",
        ),
        _bars(
            "Sentences by length ratio",
            "Characters of the output for each of the reference, rounded to tenths.",
            names,
            [f"{i / 10:.1f}" for i in range(RATIOS)] + [f"{RATIOS / 10:.0f}+"],
            ratios,
            "length ratio",
        ),
    ]


def chrf_histogram(found: Diagnosis) -> list[int]:
    """How many sentences have a chrF2 of 0 to 5, 5 to 10, …, 95 to 100."""
    counts = [0] * 20
    for sentence in found.sentences:
        counts[min(19, int(sentence.chrf / 5))] += 1
    return counts


def ratio_histogram(found: Diagnosis) -> list[int]:
    """How many sentences are 0.0, 0.1, …, 1.9 times as long as their reference, rounded, and from then on."""
    counts = [0] * (RATIOS + 1)
    for sentence in found.sentences:
        counts[min(RATIOS, int(10 * sentence.length_ratio + 0.5))] += 1
    return counts


def _findings(systems: Sequence[System]) -> str:
    """How many sentences have each flag, and what it means."""
    found = [system.diagnosis for system in systems]
    rows = [
        [
            "length ratio",
            *(f"{each.length_ratio:.3f}" for each in found),
            "characters of all outputs for each of the references",
        ],
        [
            "copied words",
            *(percent(each.copied_words) for each in found),
            "of the sources' words, beyond those that the reference copies too",
        ],
    ]
    for flag, meaning in found[0].definitions.items():
        rows.append([flag, *(f"{each.counts[flag]:,} ({percent(each.rate(flag))})" for each in found), escape(meaning)])
    head = ["", *(escape(system.name) for system in systems), "what it is"]
    shown = table("Sentences that have each flag, and their share", head, rows)
    return f'<section class="findings"><h2>What was found</h2>{shown}</section>'


# ---- plots -----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 200, 40, 6, 8, 38  # of a plot, in units that grow with the page


def _points(
    title: str,
    note: str,
    names: Sequence[str],
    labels: Sequence[str],
    counts: Sequence[int],
    values: Sequence[Sequence[float]],
) -> str:
    """A line for each system through its value in each bucket."""
    every = [value for each in values for value in each]
    ticks = _ticks(max(0.0, min(every) - 2), min(100.0, max(every) + 2))
    across = (WIDTH - LEFT - RIGHT) / len(labels)
    drawn = _axis(ticks) + "".join(
        _text(LEFT + (i + 0.5) * across, HEIGHT - BOTTOM + 15, label) for i, label in enumerate(labels)
    )
    drawn += "".join(
        _text(
            LEFT + (i + 0.5) * across,
            HEIGHT - BOTTOM + 31,
            f"n {count:,}" if count < 10_000 else f"n {count // 1000:,}k",
        )
        for i, count in enumerate(counts)
    )
    for run, each in enumerate(values):
        places = [(LEFT + (i + 0.5) * across, _height(value, ticks)) for i, value in enumerate(each)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawn += f'<path d="M{path}" class="series run-{run}"/>'
        for (x, y), label, value in zip(places, labels, each, strict=True):
            told = f"<title>{escape(names[run])}, {label} words: {value:.2f}</title>"
            shape = (
                f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"'
                if run
                else (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"')
            )
            drawn += f'{shape} class="mark run-{run}">{told}</{"rect" if run else "circle"}>'
    cells = [[f"{value:.2f}" for value in each] for each in values]
    numbers = [[label, f"{count:,}", *row] for label, count, *row in zip(labels, counts, *cells, strict=True)]
    return _figure(title, note, names, drawn, ["words", "sentences", *map(escape, names)], numbers)


def _bars(
    title: str, note: str, names: Sequence[str], labels: Sequence[str], values: Sequence[Sequence[int]], axis: str
) -> str:
    """Counts as bars, those of two systems beside each other; even a single sentence can be seen."""
    ticks = _ticks(0, max(value for each in values for value in each))
    across = (WIDTH - LEFT - RIGHT) / len(labels)
    wide = across * 0.86 / len(values)
    drawn = _axis(ticks) + _text(WIDTH - RIGHT, HEIGHT - BOTTOM + 31, axis, "end")
    for i, label in enumerate(labels):
        left = LEFT + i * across
        if i % 5 == 0:
            drawn += _text(left + across / 2, HEIGHT - BOTTOM + 15, label)
        for run, each in enumerate(values):
            if each[i]:
                tall = max(1.5, _height(0, ticks) - _height(each[i], ticks))
                told = f"<title>{escape(names[run])}, {label}: {each[i]:,} sentences</title>"
                drawn += (
                    f'<rect x="{left + 0.07 * across + run * wide:.1f}" y="{_height(0, ticks) - tall:.1f}" '
                    f'width="{wide:.1f}" height="{tall:.1f}" class="bar run-{run}">{told}</rect>'
                )
    numbers = [[label, *(f"{value:,}" for value in row)] for label, *row in zip(labels, *values, strict=True)]
    return _figure(title, note, names, drawn, [axis, *map(escape, names)], numbers)


def _figure(
    title: str, note: str, names: Sequence[str], drawn: str, head: Sequence[str], numbers: Sequence[Sequence[str]]
) -> str:
    """A plot as the training report frames it, with its numbers as a table below."""
    runs = "".join(
        f'<li class="run run-{i}"><i aria-hidden="true"></i>{escape(name)}</li>' for i, name in enumerate(names)
    )
    legend = f'<ul class="legend">{runs}</ul>' if len(names) > 1 else ""
    return (
        f"<figure><figcaption><h3>{title}</h3><p>{note}</p>{legend}</figcaption>"
        f'<div class="frame"><svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}; all values are in the table under Numbers">{drawn}</svg></div>'
        f"<details><summary>Numbers</summary>{table(title, head, numbers)}</details></figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, five or so, from at most `low` to at least `high`."""
    rough = max(high - low, 1e-9) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _height(value: float, ticks: Sequence[float]) -> float:
    """Where a value stands, from the top."""
    return HEIGHT - BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)


def _axis(ticks: Sequence[float]) -> str:
    return "".join(
        f'<path d="M{LEFT} {_height(tick, ticks):.1f}H{WIDTH - RIGHT}" class="grid"/>'
        + _text(LEFT - 6, _height(tick, ticks) + 4, f"{tick:,.6g}", "end")
        for tick in ticks
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


# ---- sentences -------------------------------------------------------------------------------------------------------


def groups(systems: Sequence[System]) -> list[Group]:
    """The lists that the page offers: the worst, random ones, those in which two systems differ most, flagged ones."""
    pairs: list[Pair] = list(zip(*(system.diagnosis.sentences for system in systems), strict=True))
    ranked = sorted(pairs, key=lambda pair: (min(s.chrf for s in pair), pair[0].source, pair[0].reference))
    drawn = random.Random(0).sample(range(len(pairs)), min(LISTED, len(pairs)))
    made = []
    if len(systems) > 1:
        apart = [pair for pair in pairs if pair[0].hypothesis != pair[1].hypothesis]
        apart.sort(key=lambda pair: -abs(gain(pair)))
        made.append(
            Group("differ", "differ most", "The chrF2 of their outputs lie furthest apart.", apart[:LISTED], len(apart))
        )
    made += [
        Group("worst", "worst", "The lowest chrF2 first.", ranked[:LISTED], len(ranked)),
        Group(
            "random",
            "random",
            "Drawn blindly, in the order of the lines.",
            [pairs[i] for i in sorted(drawn)],
            len(pairs),
        ),
    ]
    for flag, meaning in systems[0].diagnosis.definitions.items():
        found = [pair for pair in ranked if any(flag in sentence.flags for sentence in pair)]
        if found:
            made.append(Group(flag, flag, f"{meaning[0].upper()}{meaning[1:]}.", found[:FLAGGED], len(found)))
    return made


def signed(value: float, digits: int) -> str:
    """A difference for people, with a minus that is one."""
    return f"{value:+.{digits}f}".replace("-", "−")


def gain(pair: Pair) -> float:
    """How much better the second system is."""
    return pair[-1].chrf - pair[0].chrf


def _choice(group: Group, number: int) -> str:
    checked = "" if number else " checked"
    return (
        f'<label><input type="radio" name="list" value="{group.key}"{checked}> {group.name} '
        f'<span class="facts">({group.all:,})</span></label>'
    )


def _list(group: Group, names: Sequence[str]) -> str:
    shown = f"{len(group.pairs):,} of {group.all:,}. " if len(group.pairs) < group.all else ""
    articles = "\n".join(_article(pair, names) for pair in group.pairs) or "<p>There are none.</p>"
    return (
        f'<section class="list" data-list="{group.key}"><h3>{group.name.capitalize()}</h3>'
        f'<p class="soft">{shown}{escape(group.note)}</p>\n{articles}</section>'
    )


def _article(pair: Pair, names: Sequence[str]) -> str:
    """A sentence: source, reference and each output, with what differs marked and what was flagged named."""
    first, alone = pair[0], len(pair) == 1
    missed = marked(first.reference, [sentence.hypothesis for sentence in pair], ' class="missed"')
    rows = [("source", escape(first.source), ""), ("reference", missed, "")]
    for name, sentence in zip(names, pair, strict=True):
        text = marked(sentence.hypothesis, [first.reference]) or '<em class="none">nothing</em>'
        rows.append(("output" if alone else escape(name), text, "" if alone else f" {_facts(sentence)}"))
    body = "".join(f'<dt>{name}</dt><dd><bdi dir="auto">{text}</bdi>{facts}</dd>' for name, text, facts in rows)
    told = _facts(first) if alone else f'<span class="facts">difference {signed(gain(pair), 1)}</span>'
    return f"<article><header><h4>line {first.line}</h4>{told}</header><dl>{body}</dl></article>"


def _facts(sentence: Sentence) -> str:
    flags = "".join(f' <span class="flag">{flag}</span>' for flag in sentence.flags)
    return f'<span class="facts">chrF2 {sentence.chrf:.1f}, length {sentence.length_ratio:.2f}{flags}</span>'


def marked(text: str, others: Sequence[str], kind: str = "") -> str:
    """The text as HTML, the words marked that one of the others does not have in this order."""
    spans = word_spans(text)
    ours = [text[begin:end] for begin, end in spans]
    lacking = set()
    for other in others:
        theirs = [other[begin:end] for begin, end in word_spans(other)]
        shared = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        lacking |= set(range(len(ours))) - {block.a + i for block in shared for i in range(block.size)}
    html, done, i = "", 0, 0
    while i < len(spans):
        j = i
        while j in lacking:
            j += 1
        if j > i:  # one mark for words that follow each other
            begin, end = spans[i][0], spans[j - 1][1]
            html += f"{escape(text[done:begin])}<mark{kind}>{escape(text[begin:end])}</mark>"
            done = end
        i = max(i + 1, j)
    return html + escape(text[done:])
