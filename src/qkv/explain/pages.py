"""Files that show results: HTML pages from the templates in `page/`, and pictures drawn with matplotlib (optional)."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.console import say
from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).parent / "page"
FORMATS = {
    "a report": (".html",),
    "a picture": (".png", ".svg"),
    "an attention map": (".html", ".json", ".png", ".svg"),
}


def check_output(path: str | Path, kind: str) -> None:
    """Refuse a file of the wrong format, or that cannot be written, before minutes of work are spent on it."""
    path = Path(path)
    if path.suffix not in FORMATS[kind]:
        raise UsageError(f"{path}: {kind} is written as {' or '.join(FORMATS[kind])}: choose one of these suffixes")
    if path.suffix in FORMATS["a picture"] and find_spec("matplotlib") is None:
        raise UsageError(f"{path}: a picture needs matplotlib, which is not installed: pip install 'qkv[plot]'")
    check_place(path)


def check_place(path: Path) -> None:
    """Refuse a place where no file could be written."""
    if os.path.isdir(path):
        raise UsageError(f"{path}: is a folder: give a file")
    folder = next(each for each in path.absolute().parents if os.path.exists(each))  # those below it would be made
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(f"{path}: cannot be written: {folder} is not a writable folder: choose another place")


# ---- pages -----------------------------------------------------------------------------------------------------------


def fill_template(name: str, names: Sequence[str], styles: Sequence[str] = ("report",), **parts: str) -> str:
    """Return the page of a template about the runs `names`, with its styles, its script and the given parts."""
    parts |= {
        "title": escape(" and ".join(names)),
        "heading": " <span class=and>and</span> ".join(
            f'<span class="run run-{i}"><i aria-hidden="true"></i>{escape(name)}</span>' for i, name in enumerate(names)
        ),
        "css": "".join((PAGE / f"{style}.css").read_text(encoding="utf-8") for style in styles),
        "js": (PAGE / f"{name}.js").read_text(encoding="utf-8"),
    }
    template = (PAGE / f"{name}.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def script_data(data: dict[str, Any]) -> str:
    """Return JSON for a script element; "</script" or "<!--" in it would end or break the element, so < is escaped."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; cells are HTML, and the first cell of a row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# ---- pictures --------------------------------------------------------------------------------------------------------


@contextmanager
def new_figure(path: str | Path, size: tuple[float, float], *, font: float = 9.0) -> Iterator[Figure]:
    """Yield a figure of `size` inches and write it when the block ends; equal drawings give equal bytes."""
    check_output(path, "a picture")
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
