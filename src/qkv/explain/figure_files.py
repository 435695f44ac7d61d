"""Figures as .png or .svg files, drawn with matplotlib (an optional dependency)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.console import say
from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".svg")


def check_picture(path: str | Path) -> None:
    """Refuse a picture that cannot be drawn or written, before minutes are spent on measuring."""
    if Path(path).suffix not in PICTURE_FORMATS:
        raise UsageError(f"{path}: a picture is written as {' or '.join(PICTURE_FORMATS)}: choose such a name")
    if find_spec("matplotlib") is None:
        raise UsageError(f"{path}: a picture needs matplotlib, which is not installed: pip install 'qkv[plot]'")
    check_place(Path(path))


def check_place(path: Path) -> None:
    """Refuse a place where no file could be written, before the work whose end it would be."""
    if os.path.isdir(path):
        raise UsageError(f"{path}: is a folder: give a file")
    folder = next(each for each in path.absolute().parents if os.path.exists(each))  # those below it would be made
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(f"{path}: cannot be written: nothing can be made in {folder}: choose another place")


@contextmanager
def new_figure(path: str | Path, size: tuple[float, float], *, font: float = 9.0) -> Iterator[Figure]:
    """Yield a figure of `size` inches and write it when the block ends; equal drawings give equal bytes."""
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    path = Path(path)
    # The salt makes the ids of an SVG reproducible.
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": font, "svg.hashsalt": "qkv"}):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        yield figure
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # "tight" includes wide captions, which the layout ignores.
                undated = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(path, dpi=150, bbox_inches="tight", metadata=undated)
            except OSError as error:
                raise QkvError(f"{path}: cannot be written: {error.strerror or error}") from None
    if caught:  # most likely characters that the font does not have
        say(f"{path}: written with a warning: {caught[0].message}")
