"""The training report: one page with the curves, samples and facts of a run, or of two side by side.

Everything comes from the run folder (log.jsonl, scores.json, config.toml, card.md), so a run that is still going has a
report too. The page opens offline; its charts are drawn in the browser from the numbers it carries.
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

from qkv.assembly import Run
from qkv.core import files
from qkv.core.errors import UsageError
from qkv.explain.model_card import parameters, shape, vocabulary
from qkv.options import TranslationConfig

PAGE = Path(__file__).parent / "page"
TRAIN = ("step", "seconds", "tokens", "loss", "nll", "norm", "learning_rate", "tokens_per_second", "skipped")
VALID = ("step", "seconds", "tokens", "loss", "perplexity", "bleu", "bits_per_byte")
SMOOTH = 40  # a smoothed value is the mean of the lines around it, two or one in so many of the log to each side
ATTENTIONS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}

Column = list[float | None]


@dataclass(frozen=True)
class History:
    """What the log of a run says: a table of its training lines, one of its validations, and the samples."""

    train: dict[str, Column]
    valid: dict[str, Column]  # with `entropy.NAME` for each attention
    samples: dict[int, str]


@dataclass(frozen=True)
class Line:
    """One line of a chart: a column of a run's table, how it is drawn, and how strongly."""

    run: int
    label: str
    table: str
    column: str
    style: str = "line"  # faint, or dots: a line with a mark at every value
    shade: float = 1.0


@dataclass(frozen=True)
class Chart:
    """Some lines on the same axes."""

    title: str
    note: str
    lines: list[Line] = field(default_factory=list)
    zero: bool = False  # the axis begins at zero
    log: bool = False  # may be shown on a logarithmic axis


def report(runs: Sequence[Run], path: str | Path) -> None:
    """Write the report of one run, or of two side by side, as a page (.html)."""
    if Path(path).suffix != ".html":
        raise UsageError(f"{path}: a report is written as .html: choose such a name")
    files.write_text(Path(path), page(runs))


def page(runs: Sequence[Run]) -> str:
    """The report as HTML."""
    if not 1 <= len(runs) <= 2:
        raise UsageError(
            f"a report is of one run, or of two side by side, not of {len(runs)}: name so many run folders"
        )
    names, histories = _names(runs), [history(run) for run in runs]
    data = {
        "runs": [
            {"name": name, "train": found.train, "valid": found.valid}
            for name, found in zip(names, histories, strict=True)
        ],
        "charts": [dataclasses.asdict(chart) for chart in charts(histories)],
    }
    parts = {
        "title": escape(" and ".join(names)),
        "css": (PAGE / "report.css").read_text(encoding="utf-8"),
        "js": (PAGE / "report.js").read_text(encoding="utf-8"),
        "heading": heading(names),
        "body": "\n".join(
            [_facts(runs, names, histories), _differences(runs, names), _samples(runs, names, histories)]
        ),
        # "</script" or "<!--" would end or break the script element that holds the data; JSON may spell it so.
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    template = (PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names; their paths where the names are the same."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


# ---- what the log says -----------------------------------------------------------------------------------------------


def history(run: Run) -> History:
    """The log as columns; a step that was logged twice counts as it was logged last."""
    events: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "valid": {}}
    text = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
            events[entry["event"]][int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):  # the last line of a run that is going on, or was killed, may be cut
            continue
    train, valid = (dict(sorted(found.items())) for found in events.values())
    trained = {name: _column(train.values(), name) for name in TRAIN}
    for name in ("loss", "nll"):
        trained[f"{name}_smoothed"] = smoothed(trained[name])
    entropies = {name: None for entry in valid.values() for name in entry.get("attention_entropy") or {}}
    validated = {name: _column(valid.values(), name) for name in VALID}
    for name in entropies:
        validated[f"entropy.{name}"] = _column((e.get("attention_entropy") or {} for e in valid.values()), name)
    return History(trained, validated, {step: e["sample"] for step, e in valid.items() if e.get("sample")})


def _column(entries: Any, name: str) -> Column:
    """The values of a name that are numbers; None for the others."""
    return [_number(entry.get(name)) for entry in entries]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and np.isfinite(value) else None


def smoothed(values: Column) -> Column:
    """The mean of the values around each, on both sides alike, so that no curve lags behind or leans at its ends."""
    reach = max(2, len(values) // SMOOTH)
    means: Column = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        around = [value for value in values[i - near : i + near + 1] if value is not None]
        means.append(float(f"{sum(around) / len(around):.6g}") if around else None)
    return means


# ---- charts ----------------------------------------------------------------------------------------------------------


CHARTS: list[tuple[Chart, list[tuple[str, str, str, str]]]] = [  # lines: table, column, label, style
    (
        Chart(
            "Loss", "−log p for each token: training as logged (faint) and smoothed, validation with marks.", log=True
        ),
        [
            ("train", "nll", "training", "faint"),
            ("train", "nll_smoothed", "training, smoothed", "line"),
            ("valid", "loss", "validation", "dots"),
        ],
    ),
    (Chart("BLEU", "On the validation set, greedy."), [("valid", "bleu", "BLEU", "dots")]),
    (
        Chart("Bits per byte", "Of the validation text, whatever its tokens."),
        [("valid", "bits_per_byte", "bits per byte", "dots")],
    ),
    (
        Chart("Learning rate", "As the schedule sets it.", zero=True),
        [("train", "learning_rate", "learning rate", "line")],
    ),
    (Chart("Gradient norm", "Before clipping.", log=True), [("train", "norm", "norm", "line")]),
    (
        Chart("Tokens a second", "Target tokens; validation does not count.", zero=True),
        [("train", "tokens_per_second", "tokens/s", "line")],
    ),
    (
        Chart(
            "Objective", "What training minimises: the loss with label smoothing, and with a guide if any.", log=True
        ),
        [("train", "loss", "as logged", "faint"), ("train", "loss_smoothed", "smoothed", "line")],
    ),
    (
        Chart("Skipped updates", "Those whose loss or gradient was not finite, all until then.", zero=True),
        [("train", "skipped", "skipped", "line")],
    ),
]


def charts(histories: Sequence[History]) -> list[Chart]:
    """The charts that have something to show, in reading order."""
    dull = set()
    if not any(each.train["loss"] != each.train["nll"] for each in histories):
        dull.add("Objective")  # the same as the loss
    if not any(any(each.train["skipped"]) for each in histories):
        dull.add("Skipped updates")
    found = [_chart(chart, histories, lines) for chart, lines in CHARTS if chart.title not in dull]
    order = [*found[:4], *_entropy_charts(histories), *found[4:]]
    return [chart for chart in order if chart.lines]


def _chart(chart: Chart, histories: Sequence[History], lines: Sequence[tuple[str, str, str, str]]) -> Chart:
    """The same lines for every run that has the numbers."""
    made = [
        Line(run, label, table, column, style)
        for run, found in enumerate(histories)
        for table, column, label, style in lines
        if any(value is not None for value in getattr(found, table)[column])
    ]
    return dataclasses.replace(chart, lines=made)


def _entropy_charts(histories: Sequence[History]) -> list[Chart]:
    """A chart for each kind of attention, with a line for each layer: the deeper, the stronger."""
    made = []
    for kind, title in ATTENTIONS.items():
        lines = []
        for run, found in enumerate(histories):
            stack, part = kind.split(".")
            names = [name for name in found.valid if re.fullmatch(rf"entropy\.{stack}\.\d+\.{part}", name)]
            for i, name in enumerate(names, start=1):
                label = f"layer {name.split('.')[2]}"
                lines.append(Line(run, label, "valid", name, "dots", round(0.35 + 0.65 * i / len(names), 3)))
        note = "Mean over heads and positions, in nats: 0 is one word looked at, log n all n words alike."
        made.append(Chart(f"Entropy of {title}", note, lines, zero=True))
    return made


# ---- words -----------------------------------------------------------------------------------------------------------


def heading(names: Sequence[str]) -> str:
    """The names of the runs, each with the colour that its lines have."""
    return " <span class=and>and</span> ".join(
        f'<span class="run run-{i}"><i aria-hidden="true"></i>{escape(name)}</span>' for i, name in enumerate(names)
    )


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first of each row is its name."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _facts(runs: Sequence[Run], names: Sequence[str], histories: Sequence[History]) -> str:
    facts = [_card(run) | _state(run, found) | _scores(run.scores) for run, found in zip(runs, histories, strict=True)]
    keys = list(dict.fromkeys(key for each in sorted(facts, key=len, reverse=True) for key in each))
    rows = [[escape(key), *(escape(each.get(key, "–")) for each in facts)] for key in keys]
    shown = table("How it was made, and how far it came", ["", *map(escape, names)], rows)
    return f"<section><h2>Facts</h2>{shown}</section>"


def _card(run: Run) -> dict[str, str]:
    """The facts of the model card, or those that can be told before it is written, at the end of training."""
    path = run.path / "card.md"
    if path.exists():
        lines = re.findall(r"^- ([^:\n]+): (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {name: value.strip("`") for name, value in lines}
    spec, made, tokenizers = run.config, run.about, run.tokenizers
    return {
        "model": f"{spec.model.kind}, {parameters(spec.model, tokenizers):,} parameters, {shape(spec.model)}",
        "vocabulary": f"{vocabulary(tokenizers)} ({spec.tokenizer.kind})",
        "begun": f"{made['begun']}, with qkv {made['qkv']}, torch {made['torch']}, Python {made['python']}",
    } | ({"command": made["command"]} if made["command"] else {})


def _state(run: Run, found: History) -> dict[str, str]:
    """How far training has come."""
    step = max([0, *(int(s or 0) for s in [*found.train["step"], *found.valid["step"]])])
    finished = run.scores.get("finished")
    end = (
        "finished"
        if finished is not None and finished >= step
        else f"not finished, of at most {run.config.train.steps:,}"
    )
    facts = {"steps": f"{max(step, finished or 0):,} ({end})" if step else "none logged yet"}
    seconds, tokens = (
        max((v for v in [*found.train[name], *found.valid[name]] if v is not None), default=None)
        for name in ("seconds", "tokens")
    )
    if seconds is not None:
        minutes, rest = divmod(int(seconds), 60)
        facts["time"] = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
    if tokens is not None:
        facts["target tokens"] = f"{tokens:,.0f}"
        facts["skipped updates"] = f"{max((s for s in found.train['skipped'] if s is not None), default=0):,.0f}"
    return facts


def _scores(scores: dict[str, Any]) -> dict[str, str]:
    """The validation scores of the weights, and which are used."""
    figures = {"bleu": "BLEU {:.2f}", "bits_per_byte": "{:.4f} bits per byte", "loss": "loss {:.4f}"}
    facts = {}
    for name in ("best", "average"):
        values = scores.get(name, {})
        words = [form.format(values[key]) for key, form in figures.items() if values.get(key) is not None]
        if "step" in values:
            words.append(f"at step {values['step']:,}")
        if words:
            facts[f"{name} weights"] = ", ".join(words) + (" (used)" if scores.get("chosen") == name else "")
    return facts


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    if len(runs) < 2:
        return ""
    found = runs[0].config.difference(runs[1].config)
    rows = [[f"<code>{escape(path)}</code>", _option(ours), _option(theirs)] for path, ours, theirs in found]
    shown = table("Options in which the two differ", ["option", *map(escape, names)], rows)
    return f"<section><h2>Config</h2>{shown if rows else '<p>Both runs have the same config.</p>'}</section>"


def _option(value: Any) -> str:
    """The value of an option; a model of another kind may not have it."""
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return "<br>".join(escape(" ".join(filter(None, (c.text, c.src, c.tgt)))) for c in value) or "none"
    return f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"


def _samples(runs: Sequence[Run], names: Sequence[str], histories: Sequence[History]) -> str:
    """The same sentence translated, or some text written, at every validation."""
    steps = sorted({step for found in histories for step in found.samples})
    if not steps:
        return ""
    given = [_given(run) for run in runs]
    rows = [
        [name, *(f"<q>{escape(each[name])}</q>" if name in each else "–" for each in given)]
        for name in ("source", "reference")
        if any(name in each for each in given)
    ]
    written = [(step, [escape(found.samples.get(step, "–")) for found in histories]) for step in steps]
    for cells, same in groupby(written, key=itemgetter(1)):
        alike = [step for step, _ in same]
        rows.append([f"steps {alike[0]:,} to {alike[-1]:,}" if len(alike) > 1 else f"step {alike[0]:,}", *cells])
    title = "Samples over time"
    caption = "The first validation sentence translated, or text written, at each validation"
    return f'<section class="samples"><h2>{title}</h2>{table(caption, ["", *map(escape, names)], rows)}</section>'


def _given(run: Run) -> dict[str, str]:
    """The sentence that the samples translate, where the text still lies in the store."""
    if not isinstance(run.config.model, TranslationConfig):
        return {}
    lines = {}
    for name, side in (("source", "src"), ("reference", "tgt")):
        path = run.store / f"valid.{side}.txt"
        if path.exists():
            with path.open(encoding="utf-8", newline="\n") as file:
                lines[name] = file.readline().rstrip("\n")
    return lines
