"""Attention as a picture for paper or slides: one heat-map a head, layers downwards, heads across."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from qkv.explain import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL, MARGIN = 0.2, 1.1  # inches: of a token, and of the tokens' names
CAPTION = 2.2  # inches: of "decoder layer 11 cross, head 15", below the few tokens of a short sentence too
WIDEST = 60.0  # inches; a larger picture is drawn smaller
Labels = tuple[list[str], list[str]]


def draw(weights: Mapping[str, NDArray[Any]], labels: Mapping[str, Labels], path: Path, *, title: str) -> None:
    """Draw every head of the named attentions; `labels` are the tokens of rows and columns."""
    names = list(weights)
    across = max(len(layer) for layer in weights.values())
    rows, columns = (max(len(pair[side]) for pair in labels.values()) for side in (0, 1))
    width, height = across * max(columns * CELL + MARGIN, CAPTION), len(names) * (rows * CELL + MARGIN) + 0.5
    shrink = min(1.0, WIDEST / max(width, height))
    with picture.drawn(path, (max(width * shrink, 4), height * shrink), font=9 * shrink) as figure:
        grid = figure.subplots(len(names), across, squeeze=False)
        for name, line in zip(names, grid, strict=True):
            for number, axes in enumerate(line):
                if number < len(weights[name]):
                    _heat_map(axes, weights[name][number], labels[name], f"{_spoken(name)}, head {number}")
                else:
                    axes.set_axis_off()
        figure.suptitle(title.replace("$", r"\$"), fontsize=10 * shrink, wrap=True)


def _heat_map(axes: Axes, head: NDArray[Any], labels: Labels, title: str) -> None:
    rows, columns = ([token.replace("$", r"\$") for token in side] for side in labels)
    axes.imshow(head, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xlabel(title)


def _spoken(name: str) -> str:
    """`decoder.1.cross` in words."""
    stack, layer, kind = name.split(".")
    return f"{stack} layer {layer} {kind}"
