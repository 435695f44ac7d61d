"""Draw docs/attention.svg from the demo run: what each word of the translation looks at.

python docs/make_pictures.py runs/demo
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import qkv

SENTENCE = "Your cat is a lovely cat."
CELL, LEFT, TOP, GAP = 26, 92, 84, 40


def picture(run: str) -> str:
    """The cross-attention of every head of the last decoder layer, side by side, as SVG."""
    found = qkv.load(run).attention(SENTENCE)
    name = max(name for name in found.weights if name.endswith("cross"))
    heads = found.weights[name]
    columns, rows = found.source, found.written
    width = LEFT + len(heads) * (len(columns) * CELL + GAP)
    height = TOP + len(rows) * CELL + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" font-family="Arial">',
        f"<title>Cross-attention of layer {int(name.split('.')[1]) + 1}: {escape(found.text)} → "
        f"{escape(found.translation)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    parts += [
        f'<text x="{LEFT - 8}" y="{TOP + i * CELL + 18}" text-anchor="end">{escape(token)}</text>'
        for i, token in enumerate(rows)
    ]
    for number, head in enumerate(heads):
        x0 = LEFT + number * (len(columns) * CELL + GAP)
        parts += [
            f'<text transform="translate({x0 + j * CELL + 17},{TOP - 8}) rotate(-60)">{escape(token)}</text>'
            for j, token in enumerate(columns)
        ]
        parts += [
            f'<rect x="{x0 + j * CELL}" y="{TOP + i * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill="rgb(21,88,176)" fill-opacity="{weight:.3f}" stroke="#ddd"/>'
            for i, row in enumerate(head)
            for j, weight in enumerate(row)
        ]
        parts.append(f'<text x="{x0}" y="{TOP + len(rows) * CELL + 22}" fill="#555">head {number + 1}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/demo"
    Path(__file__).with_name("attention.svg").write_text(picture(folder), encoding="utf-8")
