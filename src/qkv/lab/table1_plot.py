"""The picture of Table 1: time against n and against d on logarithmic axes, one line a layer type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkv.explain import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by marker and dash as well as by colour; a family shares a colour.
STYLES: dict[str, dict[str, Any]] = {
    "self-attention": {"color": "#b5121b", "marker": "o", "linestyle": "-"},
    "restricted": {"color": "#b5121b", "marker": "s", "linestyle": "--"},
    "recurrent": {"color": "#1b1b1b", "marker": "D", "linestyle": "-"},
    "convolution": {"color": "#1f5fa8", "marker": "^", "linestyle": "-"},
    "dilated": {"color": "#1f5fa8", "marker": "v", "linestyle": ":"},
    "separable": {"color": "#1f5fa8", "marker": "P", "linestyle": "--"},
}


def draw(result: dict[str, Any], path: str) -> None:
    """Two panels from what `qkv.lab.table1.measure` returns."""
    with picture.drawn(path, (11, 5), font=10) as figure:
        left, right = figure.subplots(1, 2)
        for axes, symbol, held, name in ((left, "n", "d", "sequence length n"), (right, "d", "n", "width d")):
            _panel(axes, result["complexity"], symbol, held)
            axes.set_xlabel(name)
        left.set_ylabel("milliseconds for one sequence of a batch")
        figure.suptitle(f"Table 1, measured: one layer forward ({result['machine']}, {result['precision']})")


def _panel(axes: Axes, rows: dict[str, Any], symbol: str, held: str) -> None:
    """Time over one size, the other held at the greatest value that all layer types have in common."""
    common = set.intersection(*({point[held] for point in row["points"]} for row in rows.values()))
    for name, row in rows.items():
        first, exponents = row["points"][0], row["measured"]
        spans = [other for other in exponents if other not in "nd"]  # r or k, held too
        at = max(common or {point[held] for point in row["points"]})
        points = [p for p in row["points"] if p[held] == at and all(p[span] == first[span] for span in spans)]
        label = ", ".join([name, *(f"{span} = {first[span]}" for span in spans)])
        axes.plot(
            [p[symbol] for p in points],
            [1000 * p["seconds"] for p in points],
            label=f"{label}:  ${symbol}^{{{exponents[symbol]:.2f}}}$",
            linewidth=1.6,
            markersize=6,
            **STYLES[name],
        )
    ticks = sorted({point[symbol] for row in rows.values() for point in row["points"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, title="time ∝")
    if common:
        axes.set_title(f"{held} = {max(common):,}", fontsize=10)
