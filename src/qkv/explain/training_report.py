"""The training report: one HTML page with curves, samples and facts of a run, or of two side by side.

It is made from the run folder (log.jsonl, scores.json, config.toml, card.md), also while training is going on. The page
works offline; its script draws the charts from the numbers in the page.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from qkv.assembly import Run, parameters, shape, vocabulary
from qkv.core import files
from qkv.core.errors import UsageError
from qkv.explain.pages import check_output, fill_template, script_data, table
from qkv.options import TranslationConfig

TRAIN = ("step", "seconds", "tokens", "loss", "nll", "norm", "learning_rate", "tokens_per_second", "skipped")
VALID = ("step", "seconds", "tokens", "loss", "perplexity", "bleu", "bits_per_byte")
SMOOTH = 40  # smoothing: mean over 1/40 of the log's lines, at least two, on each side
ATTENTIONS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}

Column = list[float | None]


@dataclass(frozen=True)
class History:
    """The log of a run as columns: training lines, validations, and sample texts by step."""

    train: dict[str, Column]
    valid: dict[str, Column]  # with `entropy.NAME` for each attention
    samples: dict[int, str]


@dataclass(frozen=True)
class Line:
    """One line of a chart: a column of a run's table, its style and opacity."""

    run: int
    label: str
    table: str
    column: str
    style: str = "line"  # or faint, or dots: a line with a mark at every value
    shade: float = 1.0


@dataclass(frozen=True)
class Chart:
    """Lines on the same axes, with a title and a note."""

    title: str
    note: str
    lines: list[Line] = field(default_factory=list)
    zero: bool = False  # the axis begins at zero
    log: bool = False  # may be shown on a logarithmic axis


def write_training_report(runs: Sequence[Run], path: str | Path) -> None:
    """Write the report of one run, or of two side by side, as an HTML file."""
    check_output(path, "a report")
    files.write_text(Path(path), report_html(runs))


def report_html(runs: Sequence[Run]) -> str:
    """Return the report as HTML."""
    if not 1 <= len(runs) <= 2:
        raise UsageError(f"a report shows one run or two, not {len(runs)}: name one or two run folders")
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    histories = [read_history(run) for run in runs]
    data = {
        "runs": [
            {"name": name, "train": history.train, "valid": history.valid}
            for name, history in zip(names, histories, strict=True)
        ],
        "charts": [dataclasses.asdict(chart) for chart in charts(histories)],
    }
    sections = [_facts(runs, names, histories), _differences(runs, names), _samples(runs, names, histories)]
    return fill_template("report", names, body="\n".join(sections), data=script_data(data))


# ---- the log ---------------------------------------------------------------------------------------------------------


def read_history(run: Run) -> History:
    """Read the log as columns; of a step that was logged twice, the last line counts."""
    events: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "valid": {}}
    text = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
            events[entry["event"]][int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):  # the last line may be incomplete: training goes on, or was killed
            continue
    train, valid = (dict(sorted(by_step.items())) for by_step in events.values())
    trained = {name: _column(train.values(), name) for name in TRAIN}
    for name in ("loss", "nll"):
        trained[f"{name}_smoothed"] = smoothed(trained[name])
    entropies = {name: None for entry in valid.values() for name in entry.get("attention_entropy") or {}}
    validated = {name: _column(valid.values(), name) for name in VALID}
    for name in entropies:
        validated[f"entropy.{name}"] = _column((e.get("attention_entropy") or {} for e in valid.values()), name)
    return History(trained, validated, {step: e["sample"] for step, e in valid.items() if e.get("sample")})


def _column(entries: Any, name: str) -> Column:
    """Return one value for each entry; None if it is missing or not a number."""
    values = (entry.get(name) for entry in entries)
    return [value if isinstance(value, int | float) and np.isfinite(value) else None for value in values]


def smoothed(values: Column) -> Column:
    """Return the moving average of a column; windows are symmetric, so the curve neither lags nor bends at its ends."""
    reach = max(2, len(values) // SMOOTH)
    means: Column = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        window = [value for value in values[i - side : i + side + 1] if value is not None]
        means.append(float(f"{sum(window) / len(window):.6g}") if window else None)
    return means


# ---- charts ----------------------------------------------------------------------------------------------------------


CHARTS: list[tuple[Chart, list[tuple[str, str, str, str]]]] = [  # lines: table, column, label, style
    (
        Chart("Loss", "−log p per token: training as logged (faint) and smoothed, validation with marks.", log=True),
        [
            ("train", "nll", "training", "faint"),
            ("train", "nll_smoothed", "training, smoothed", "line"),
            ("valid", "loss", "validation", "dots"),
        ],
    ),
    (Chart("BLEU", "On the validation set, greedy."), [("valid", "bleu", "BLEU", "dots")]),
    (
        Chart("Bits per byte", "On the validation text; comparable between tokenizers."),
        [("valid", "bits_per_byte", "bits per byte", "dots")],
    ),
    (
        Chart("Learning rate", "From the schedule.", zero=True),
        [("train", "learning_rate", "learning rate", "line")],
    ),
    (Chart("Gradient norm", "Before clipping.", log=True), [("train", "norm", "norm", "line")]),
    (
        Chart("Tokens a second", "Target tokens per second, without validation.", zero=True),
        [("train", "tokens_per_second", "tokens/s", "line")],
    ),
    (
        Chart("Objective", "The minimised sum: loss with label smoothing, R-Drop and guided alignment.", log=True),
        [("train", "loss", "as logged", "faint"), ("train", "loss_smoothed", "smoothed", "line")],
    ),
    (
        Chart("Skipped updates", "Updates skipped so far, because the loss or the gradient was not finite.", zero=True),
        [("train", "skipped", "skipped", "line")],
    ),
]


def charts(histories: Sequence[History]) -> list[Chart]:
    """Return the charts that have values, in reading order, with lines for every run."""
    omitted = set()
    if not any(history.train["loss"] != history.train["nll"] for history in histories):
        omitted.add("Objective")  # equal to the loss
    if not any(any(history.train["skipped"]) for history in histories):
        omitted.add("Skipped updates")
    filled = []
    for chart, columns in CHARTS:
        lines = [
            Line(run, label, table, column, style)
            for run, history in enumerate(histories)
            for table, column, label, style in columns
            if any(value is not None for value in getattr(history, table)[column])
        ]
        if chart.title not in omitted:
            filled.append(dataclasses.replace(chart, lines=lines))
    order = [*filled[:4], *_entropy_charts(histories), *filled[4:]]
    return [chart for chart in order if chart.lines]


def _entropy_charts(histories: Sequence[History]) -> list[Chart]:
    """Return a chart for each kind of attention, with a line for each layer, more opaque for deeper layers."""
    entropy_charts = []
    for kind, title in ATTENTIONS.items():
        lines = []
        for run, history in enumerate(histories):
            stack, part = kind.split(".")
            names = [name for name in history.valid if re.fullmatch(rf"entropy\.{stack}\.\d+\.{part}", name)]
            for i, name in enumerate(names, start=1):
                label = f"layer {name.split('.')[2]}"
                lines.append(Line(run, label, "valid", name, "dots", round(0.35 + 0.65 * i / len(names), 3)))
        note = "Mean over heads and positions, in nats: 0 if all weight is on one token, log n if even over n tokens."
        entropy_charts.append(Chart(f"Entropy of {title}", note, lines, zero=True))
    return entropy_charts


# ---- tables ----------------------------------------------------------------------------------------------------------


def _facts(runs: Sequence[Run], names: Sequence[str], histories: Sequence[History]) -> str:
    facts = [
        _card(run) | _state(run, history) | _scores(run.scores) for run, history in zip(runs, histories, strict=True)
    ]
    keys = list(dict.fromkeys(key for each in sorted(facts, key=len, reverse=True) for key in each))
    rows = [[escape(key), *(escape(each.get(key, "–")) for each in facts)] for key in keys]
    cells = table("Model, text, progress and scores", ["", *map(escape, names)], rows)
    return f"<section><h2>Facts</h2>{cells}</section>"


def _card(run: Run) -> dict[str, str]:
    """Return the facts of the model card; before it is written (end of training), those that are already known."""
    path = run.path / "card.md"
    if path.exists():
        lines = re.findall(r"^- ([^:\n]+): (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {name: value.strip("`") for name, value in lines}
    spec, about, tokenizers = run.config, run.about, run.tokenizers
    return {
        "model": f"{spec.model.kind}, {parameters(spec.model, tokenizers):,} parameters, {shape(spec.model)}",
        "vocabulary": f"{vocabulary(tokenizers)} ({spec.tokenizer.kind})",
        "begun": f"{about['begun']}, with qkv {about['qkv']}, torch {about['torch']}, Python {about['python']}",
    } | ({"command": about["command"]} if about["command"] else {})


def _state(run: Run, history: History) -> dict[str, str]:
    """Return steps, time, tokens and skipped updates so far."""
    step = max([0, *(int(s or 0) for s in [*history.train["step"], *history.valid["step"]])])
    finished = run.scores.get("finished", -1)  # the step at which the training ended
    end = "finished" if finished >= step else f"not finished, of at most {run.config.train.steps:,}"
    facts = {"steps": f"{max(step, finished):,} ({end})" if step else "none logged yet"}
    seconds, tokens = (
        max((v for v in [*history.train[name], *history.valid[name]] if v is not None), default=None)
        for name in ("seconds", "tokens")
    )
    if seconds is not None:
        minutes, rest = divmod(int(seconds), 60)
        facts["time"] = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
    if tokens is not None:
        facts["target tokens"] = f"{tokens:,.0f}"
        facts["skipped updates"] = f"{max((s for s in history.train['skipped'] if s is not None), default=0):,.0f}"
    return facts


def _scores(scores: dict[str, Any]) -> dict[str, str]:
    """Return the validation scores of each set of weights; the ones used by default are marked."""
    figures = {"bleu": "BLEU {:.2f}", "bits_per_byte": "{:.4f} bits per byte", "loss": "loss {:.4f}"}
    facts = {}
    for name in ("best", "average"):
        values = scores.get(name, {})
        parts = [form.format(values[key]) for key, form in figures.items() if values.get(key) is not None]
        if "step" in values:
            parts.append(f"at step {values['step']:,}")
        if parts:
            facts[f"{name} weights"] = ", ".join(parts) + (" (used)" if scores.get("chosen") == name else "")
    return facts


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    if len(runs) < 2:
        return ""
    differences = runs[0].config.difference(runs[1].config)
    rows = [[f"<code>{escape(path)}</code>", _option(a), _option(b)] for path, a, b in differences]
    cells = table("Options with different values", ["option", *map(escape, names)], rows)
    return f"<section><h2>Config</h2>{cells if rows else '<p>Both runs have the same config.</p>'}</section>"


def _option(value: Any) -> str:
    """Return the value of an option as HTML; a dash if this kind of model does not have it."""
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return "<br>".join(escape(" ".join(filter(None, (c.text, c.src, c.tgt)))) for c in value) or "none"
    return f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"


def _samples(runs: Sequence[Run], names: Sequence[str], histories: Sequence[History]) -> str:
    """Return the samples of all validations: translations of the same sentence, or generated text."""
    steps = sorted({step for history in histories for step in history.samples})
    if not steps:
        return ""
    sentences = [_first_valid_pair(run) for run in runs]
    rows = [
        [name, *(f"<q>{escape(each[name])}</q>" if name in each else "–" for each in sentences)]
        for name in ("source", "reference")
        if any(name in each for each in sentences)
    ]
    samples = [(step, [escape(history.samples.get(step, "–")) for history in histories]) for step in steps]
    for cells, group in groupby(samples, key=itemgetter(1)):  # one row for consecutive steps with equal samples
        equal = [step for step, _ in group]
        rows.append([f"steps {equal[0]:,} to {equal[-1]:,}" if len(equal) > 1 else f"step {equal[0]:,}", *cells])
    title = "Samples over time"
    caption = "The translation of the first validation sentence, or generated text, at each validation"
    return f'<section class="samples"><h2>{title}</h2>{table(caption, ["", *map(escape, names)], rows)}</section>'


def _first_valid_pair(run: Run) -> dict[str, str]:
    """Return the source and reference of the samples, if the prepared text still exists."""
    if not isinstance(run.config.model, TranslationConfig):
        return {}
    lines = {}
    for name, side in (("source", "src"), ("reference", "tgt")):
        path = run.store / f"valid.{side}.txt"
        if path.exists():
            with path.open(encoding="utf-8", newline="\n") as file:
                lines[name] = file.readline().rstrip("\n")
    return lines
