"""Pictures for paper or slides, .png or .svg: one way to begin and to save them. matplotlib is an extra."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.console import say
from qkv.core import files
from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".svg")


def check_picture(path: str | Path) -> None:
    """Refuse a picture that could not be drawn, before minutes are spent on measuring."""
    if Path(path).suffix not in PICTURE_FORMATS:
        raise UsageError(f"{path}: a picture is written as {' or '.join(PICTURE_FORMATS)}: end its name so")
    if find_spec("matplotlib") is None:
        raise UsageError(f"{path}: a picture needs matplotlib, which is not installed: pip install 'qkv[plot]'")
    files.check_place(Path(path))


@contextmanager
def new_figure(path: str | Path, size: tuple[float, float], *, font: float = 9.0) -> Iterator[Figure]:
    """A figure of so many inches to draw on, written when the block ends; the same drawing gives the same bytes."""
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    path = Path(path)
    # The salt keeps the ids of an SVG the same from one run to the next.
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": font, "svg.hashsalt": "qkv"}):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        yield figure
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # "tight" is as large as all that is drawn: the layout does not look at how wide captions are.
                dated = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(path, dpi=150, bbox_inches="tight", metadata=dated)
            except OSError as error:
                raise QkvError(f"{path}: cannot be written: {error.strerror or error}") from None
    if noted:  # most likely a script that the font does not have
        say(f"{path}: drawn, but {noted[0].message}")
