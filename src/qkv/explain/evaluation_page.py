"""The evaluation page: scores, diagnosis, plots and lists of sentences, of one system or of two side by side.

One HTML file that works offline, in the style of the training report. All content, plots included, is written into the
page; its script only filters the sentences.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

from qkv.core import files
from qkv.core.errors import UsageError
from qkv.evaluation.diagnosis import Diagnosis, Sentence, percent, word_spans
from qkv.evaluation.metrics import Comparison, Scores
from qkv.explain.pages import check_output, fill_template, table

LISTED = 50  # largest number of sentences in a list
FLAGGED = 200  # the same for the list of one flag
RATIOS = 20  # tenths: length ratios from 2.0 on are counted together

Pair = tuple[Sentence, ...]  # the same sentence, judged for each system


@dataclass(frozen=True)
class System:
    """A system's name, scores and diagnosis."""

    name: str
    scores: Scores
    diagnosis: Diagnosis


@dataclass(frozen=True)
class SentenceList:
    """A list of the page: its sentences, and how many there are in all (`total`)."""

    key: str
    name: str
    note: str
    pairs: Sequence[Pair]
    total: int


def write_evaluation_page(systems: Sequence[System], path: str | Path, comparison: Comparison | None = None) -> None:
    """Write the evaluation of one system, or of two on the same lines, as an HTML file."""
    check_output(path, "a report")
    files.write_text(Path(path), page_html(systems, comparison))


def page_html(systems: Sequence[System], comparison: Comparison | None = None) -> str:
    """Return the evaluation as HTML, with all texts escaped."""
    if not 1 <= len(systems) <= 2:
        raise UsageError(f"an evaluation page shows one system or two, not {len(systems)}")
    names = [system.name for system in systems]
    lists = sentence_lists(systems)
    return fill_template(
        "evaluation",
        names,
        styles=("report", "evaluation"),
        lines=_line_counts(systems[0].diagnosis),
        scores=_scores(systems, comparison),
        charts="\n".join(_charts(systems)),
        findings=_findings(systems),
        key="Words of an output that are not in the reference are <mark>marked like this</mark>, words of the "
        'reference that are not in an output <mark class="missed">like this</mark>; word order counts.',
        choices="\n".join(_choice(each, checked=i == 0) for i, each in enumerate(lists)),
        lists="\n".join(_list(each, names) for each in lists),
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _line_counts(diagnosis: Diagnosis) -> str:
    """Return the number of lines, of judged sentences and of blank lines, as text."""
    text = f"{diagnosis.lines:,} lines, {len(diagnosis.sentences):,} judged sentences."
    if diagnosis.blank_sources:
        text += f" Blank sources: {diagnosis.blank_sources:,}; blank translations of them: {diagnosis.blank_kept:,}."
    if diagnosis.blank_references:
        text += f" Blank references of other sources: {diagnosis.blank_references:,}."
    return text


def _scores(systems: Sequence[System], comparison: Comparison | None) -> str:
    """Return the table of scores with intervals and, for two systems, the significance of their difference."""
    tested = {difference.name: difference for difference in comparison or ()}
    rows = []
    for figures in zip(*(system.scores for system in systems), strict=True):
        cells = []
        for score in figures:
            interval = "" if score.low is None else f" [{score.low:.2f}, {score.high:.2f}]"
            cells.append(f"{score.value:.2f}{interval}")
        if comparison is not None:
            test = tested.get(figures[0].name)
            cells.append(signed(figures[1].value - figures[0].value, 2) + (f", p = {test.p:.4f}" if test else ""))
        rows.append([escape(figures[0].name), *cells])
    head = ["", *(escape(system.name) for system in systems), *(["difference"] if comparison else [])]
    scores = table("On the whole test set, with 95 % bootstrap intervals", head, rows)
    signatures = "".join(f"<li>{escape(s.name)} <code>{escape(s.signature)}</code></li>" for s in systems[0].scores)
    uncut = "".join(f"<p>{escape(f'{s.name}: {s.scores.uncut}')}.</p>" for s in systems if s.scores.uncut)
    return f'<section class="scores"><h2>Scores</h2>{scores}{uncut}<ul class="signatures">{signatures}</ul></section>'


def _charts(systems: Sequence[System]) -> list[str]:
    names = [system.name for system in systems]
    buckets = [system.diagnosis.by_length for system in systems]
    if not buckets[0]:
        return ["<p>There are no judged sentences: nothing to plot.</p>"]
    labels = [bucket.name for bucket in buckets[0]]
    counts = [bucket.sentences for bucket in buckets[0]]
    note = "Sentences grouped by the number of source words; n is the number of sentences."
    charts = []
    for title, metric in (("BLEU", "bleu"), ("chrF2", "chrf")):
        values = [[getattr(bucket, metric) for bucket in each] for each in buckets]
        charts.append(_points(f"{title} by words of the source", note, names, labels, counts, values))
    note, labels = "Number of sentences in each interval of five points.", [str(5 * i) for i in range(20)]
    by_score = [chrf_histogram(system.diagnosis) for system in systems]
    charts.append(_bars("Sentences by chrF2", note, names, labels, by_score, "chrF2 of the sentence"))
    note = "Characters of the output / characters of the reference, rounded to tenths."
    labels = [*(f"{i / 10:.1f}" for i in range(RATIOS)), f"{RATIOS / 10:.0f}+"]
    by_ratio = [ratio_histogram(system.diagnosis) for system in systems]
    return [*charts, _bars("Sentences by length ratio", note, names, labels, by_ratio, "length ratio")]


def chrf_histogram(diagnosis: Diagnosis) -> list[int]:
    """Return the number of sentences with a chrF2 of 0 to 5, 5 to 10, …, 95 to 100."""
    counts = Counter(min(19, int(sentence.chrf / 5)) for sentence in diagnosis.sentences)
    return [counts[i] for i in range(20)]


def ratio_histogram(diagnosis: Diagnosis) -> list[int]:
    """Return the number of sentences with a length ratio of 0.0, 0.1, …, 1.9 (rounded), and of 2.0 or more."""
    counts = Counter(min(RATIOS, int(10 * sentence.length_ratio + 0.5)) for sentence in diagnosis.sentences)
    return [counts[i] for i in range(RATIOS + 1)]


def _findings(systems: Sequence[System]) -> str:
    """Return the table of flags: number and share of sentences, and each definition."""
    diagnoses = [system.diagnosis for system in systems]
    ratios = [f"{each.length_ratio:.3f}" for each in diagnoses]
    copied = [percent(each.copied_words) for each in diagnoses]
    rows = [
        ["length ratio", *ratios, "characters of all outputs / characters of all references"],
        ["copied words", *copied, "share of the source words in the output but not in the reference"],
    ]
    for flag, definition in diagnoses[0].definitions.items():
        counts = [f"{each.counts[flag]:,} ({percent(each.rate(flag))})" for each in diagnoses]
        rows.append([flag, *counts, escape(definition)])
    head = ["", *(escape(system.name) for system in systems), "definition"]
    flags = table("Number and share of sentences with each flag", head, rows)
    return f'<section class="findings"><h2>Diagnosis</h2>{flags}</section>'


# ---- plots -----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 200, 40, 6, 8, 38  # size and margins of a plot in SVG units


def _points(
    title: str,
    note: str,
    names: Sequence[str],
    labels: Sequence[str],
    counts: Sequence[int],
    values: Sequence[Sequence[float]],
) -> str:
    """Return a line chart: one line for each system through its value in each bucket."""
    flat = [value for series in values for value in series]
    ticks = _ticks(max(0.0, min(flat) - 2), min(100.0, max(flat) + 2))
    column = (WIDTH - LEFT - RIGHT) / len(labels)
    centres = [LEFT + (i + 0.5) * column for i in range(len(labels))]
    svg = _axis(ticks)
    for x, label, count in zip(centres, labels, counts, strict=True):
        svg += _text(x, HEIGHT - BOTTOM + 15, label)
        svg += _text(x, HEIGHT - BOTTOM + 31, f"n {count:,}" if count < 10_000 else f"n {count // 1000:,}k")
    for run, series in enumerate(values):
        points = [(x, _y(value, ticks)) for x, value in zip(centres, series, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        svg += f'<path d="M{path}" class="series run-{run}"/>'
        for (x, y), label, value in zip(points, labels, series, strict=True):
            tooltip = f"<title>{escape(names[run])}, {label} words: {value:.2f}</title>"
            if run:
                shape = f'rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"'
            else:
                shape = f'circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"'
            svg += f'<{shape} class="mark run-{run}">{tooltip}</{shape.split()[0]}>'
    cells = [[f"{value:.2f}" for value in series] for series in values]
    numbers = [[label, f"{count:,}", *row] for label, count, *row in zip(labels, counts, *cells, strict=True)]
    return _figure(title, note, names, svg, ["words", "sentences", *map(escape, names)], numbers)


def _bars(
    title: str, note: str, names: Sequence[str], labels: Sequence[str], values: Sequence[Sequence[int]], axis: str
) -> str:
    """Return a bar chart of counts, with the systems side by side; a count of 1 is still visible."""
    ticks = _ticks(0, max(value for series in values for value in series))
    column = (WIDTH - LEFT - RIGHT) / len(labels)
    width = column * 0.86 / len(values)
    svg = _axis(ticks) + _text(WIDTH - RIGHT, HEIGHT - BOTTOM + 31, axis, "end")
    for i, label in enumerate(labels):
        left = LEFT + i * column
        if i % 5 == 0:
            svg += _text(left + column / 2, HEIGHT - BOTTOM + 15, label)
        for run, series in enumerate(values):
            if series[i]:
                height = max(1.5, _y(0, ticks) - _y(series[i], ticks))
                tooltip = f"<title>{escape(names[run])}, {label}: {series[i]:,} sentences</title>"
                svg += (
                    f'<rect x="{left + 0.07 * column + run * width:.1f}" y="{_y(0, ticks) - height:.1f}" '
                    f'width="{width:.1f}" height="{height:.1f}" class="bar run-{run}">{tooltip}</rect>'
                )
    numbers = [[label, *(f"{value:,}" for value in row)] for label, *row in zip(labels, *values, strict=True)]
    return _figure(title, note, names, svg, [axis, *map(escape, names)], numbers)


def _figure(
    title: str, note: str, names: Sequence[str], svg: str, head: Sequence[str], numbers: Sequence[Sequence[str]]
) -> str:
    """Return a plot with title, legend and, below it, a table of its numbers."""
    runs = "".join(
        f'<li class="run run-{i}"><i aria-hidden="true"></i>{escape(name)}</li>' for i, name in enumerate(names)
    )
    legend = f'<ul class="legend">{runs}</ul>' if len(names) > 1 else ""
    return (
        f"<figure><figcaption><h3>{title}</h3><p>{note}</p>{legend}</figcaption>"
        f'<div class="frame"><svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}; all values are in the table under Numbers">{svg}</svg></div>'
        f"<details><summary>Numbers</summary>{table(title, head, numbers)}</details></figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that cover `low` to `high`."""
    rough = max(high - low, 1e-9) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _y(value: float, ticks: Sequence[float]) -> float:
    """Return the y coordinate of a value, counted from the top."""
    return HEIGHT - BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)


def _axis(ticks: Sequence[float]) -> str:
    return "".join(
        f'<path d="M{LEFT} {_y(tick, ticks):.1f}H{WIDTH - RIGHT}" class="grid"/>'
        + _text(LEFT - 6, _y(tick, ticks) + 4, f"{tick:,.6g}", "end")
        for tick in ticks
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


# ---- sentences -------------------------------------------------------------------------------------------------------


def sentence_lists(systems: Sequence[System]) -> list[SentenceList]:
    """Return the lists of the page: largest differences (for two systems), worst, random, and one for each flag."""
    pairs: list[Pair] = list(zip(*(system.diagnosis.sentences for system in systems), strict=True))
    ranked = sorted(pairs, key=lambda pair: (min(s.chrf for s in pair), pair[0].source, pair[0].reference))
    sample = random.Random(0).sample(range(len(pairs)), min(LISTED, len(pairs)))
    lists = []
    if len(systems) > 1:
        differing = [pair for pair in pairs if pair[0].hypothesis != pair[1].hypothesis]
        differing.sort(key=lambda pair: -abs(gain(pair)))
        note = "The largest differences in chrF2 first."
        lists.append(SentenceList("differ", "differ most", note, differing[:LISTED], len(differing)))
    lists.append(SentenceList("worst", "worst", "The lowest chrF2 first.", ranked[:LISTED], len(ranked)))
    note = "A random sample, in the order of the lines."
    lists.append(SentenceList("random", "random", note, [pairs[i] for i in sorted(sample)], len(pairs)))
    for flag, definition in systems[0].diagnosis.definitions.items():
        flagged = [pair for pair in ranked if any(flag in sentence.flags for sentence in pair)]
        if flagged:
            note = f"{definition[0].upper()}{definition[1:]}."
            lists.append(SentenceList(flag, flag, note, flagged[:FLAGGED], len(flagged)))
    return lists


def signed(value: float, digits: int) -> str:
    """Return a difference with its sign, a typographic minus if negative."""
    return f"{value:+.{digits}f}".replace("-", "−")


def gain(pair: Pair) -> float:
    """Return the chrF2 of the last system minus that of the first."""
    return pair[-1].chrf - pair[0].chrf


def _choice(sentences: SentenceList, *, checked: bool) -> str:
    return (
        f'<label><input type="radio" name="list" value="{sentences.key}"{" checked" if checked else ""}> '
        f'{sentences.name} <span class="facts">({sentences.total:,})</span></label>'
    )


def _list(sentences: SentenceList, names: Sequence[str]) -> str:
    cut = len(sentences.pairs) < sentences.total
    shown = f"{len(sentences.pairs):,} of {sentences.total:,}. " if cut else ""
    articles = "\n".join(_article(pair, names) for pair in sentences.pairs) or "<p>There are none.</p>"
    return (
        f'<section class="list" data-list="{sentences.key}"><h3>{sentences.name.capitalize()}</h3>'
        f'<p class="soft">{shown}{escape(sentences.note)}</p>\n{articles}</section>'
    )


def _article(pair: Pair, names: Sequence[str]) -> str:
    """Return a sentence with source, reference and outputs, differing words marked, and flags."""
    first, single = pair[0], len(pair) == 1
    missed = marked(first.reference, [sentence.hypothesis for sentence in pair], ' class="missed"')
    rows = [("source", escape(first.source), ""), ("reference", missed, "")]
    for name, sentence in zip(names, pair, strict=True):
        text = marked(sentence.hypothesis, [first.reference]) or '<em class="none">empty</em>'
        rows.append(("output" if single else escape(name), text, "" if single else f" {_facts(sentence)}"))
    body = "".join(f'<dt>{name}</dt><dd><bdi dir="auto">{text}</bdi>{facts}</dd>' for name, text, facts in rows)
    header = _facts(first) if single else f'<span class="facts">difference {signed(gain(pair), 1)}</span>'
    return f"<article><header><h4>line {first.line}</h4>{header}</header><dl>{body}</dl></article>"


def _facts(sentence: Sentence) -> str:
    flags = "".join(f' <span class="flag">{flag}</span>' for flag in sentence.flags)
    return f'<span class="facts">chrF2 {sentence.chrf:.1f}, length {sentence.length_ratio:.2f}{flags}</span>'


def marked(text: str, others: Sequence[str], kind: str = "") -> str:
    """Return the text as HTML; words are marked if at least one of `others` lacks them in this order."""
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
        if j > i:  # one mark for consecutive words
            begin, end = spans[i][0], spans[j - 1][1]
            html += f"{escape(text[done:begin])}<mark{kind}>{escape(text[begin:end])}</mark>"
            done = end
        i = max(i + 1, j)
    return html + escape(text[done:])
