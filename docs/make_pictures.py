"""Draw the figures of the documentation with the functions of the package.

python docs/make_pictures.py runs/demo [FOLDER]
"""

from __future__ import annotations

import re
import struct
import sys
import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.api.translator import Translator
from qkv.core.optimizer import learning_rate
from qkv.core.transformer import sinusoids
from qkv.data.formats import read_lines
from qkv.options import TrainConfig

SENTENCE = "Your cat is a lovely cat."
PRONOUN = ("The cat was purring because it was happy.", "it", "cat")
AGREEMENT = ("The women stayed in the garden because they were tired.", "stanche", "women")
# Sentences with an unambiguous pronoun: it refers to the noun before "because".
LIKE_IT = re.compile(r"\b(?:that|this|those|these) (\w+) because (it|they) (?:is|was|are|were) (?:very )?\w+\.$")
SCHEDULES = [(512, 4000, "base"), (1024, 4000, "big"), (512, 8000, ""), (256, 4000, "")]  # d_model, warm-up steps
CELL, LEFT, TOP, GAP = 26, 92, 84, 40

# Colours for light and dark pages; every figure has its own background for readers without either.
STYLE = """<style>
.paper{fill:#fff}.ink{fill:#1b1d21}.soft{fill:#5c626d}.line{stroke:#d9dce2;fill:none}.heat{fill:#1558b0}
.c0{--c:#1558b0}.c1{--c:#c2500a}.c2{--c:#2b8a3e}.c3{--c:#a33ea1}.stroke{stroke:var(--c);fill:none}.fill{fill:var(--c)}
@media(prefers-color-scheme:dark){.paper{fill:#16181c}.ink{fill:#e9eaed}.soft{fill:#a2a8b3}.line{stroke:#3a3f49}
.heat{fill:#74b3ff}.c0{--c:#74b3ff}.c1{--c:#ffab66}.c2{--c:#7ddb8f}.c3{--c:#eb95e9}}
</style>"""


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return an SVG document with a background and a title for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
    top = [f'{head} font-size="13" font-family="Arial, sans-serif">', f"<title>{escape(title)}</title>", STYLE]
    paper = f'<rect class="paper" width="{width:g}" height="{height:g}" rx="8"/>'
    return "\n".join([*top, paper, *parts, "</svg>", ""])


def label(x: float, y: float, text: str, anchor: str = "start", kind: str = "ink", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


# ---- the paper's sections 3.5 and 5.3 --------------------------------------------------------------------------------


def position_encodings(length: int = 100, d_model: int = 128) -> str:
    """Section 3.5: the sinusoids added to the embeddings, −1 to 1, one row per position."""
    table = sinusoids(length, d_model).numpy()  # (length, d_model)
    width, height, left, top = 720, 260, 58, 34
    image = b64encode(png(np.round((table + 1) * 127.5).astype(np.uint8))).decode()
    parts = [
        label(left, 22, f"PE(position, dimension), d_model = {d_model}", kind="ink"),
        f'<image x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{image}"/>',
        f'<rect class="line" x="{left}" y="{top}" width="{width}" height="{height}"/>',
        *(label(left - 8, top + (p + 0.5) * height / length + 4, str(p), "end", "soft") for p in range(0, length, 20)),
        *(
            label(left + d * width / d_model, top + height + 18, str(d), "middle", "soft")
            for d in range(0, d_model, 16)
        ),
        label(left + width / 2, top + height + 38, "dimension: even ones sine, odd ones cosine", "middle", "soft"),
        label(16, top + height / 2, "position", "middle", "soft", f' transform="rotate(-90 16 {top + height / 2:g})"'),
    ]
    x = left + width + 18
    for i in range(64):  # the scale, from 1 down to −1
        colour = "#{:02x}{:02x}{:02x}".format(*palette()[255 - 4 * i])
        parts.append(
            f'<rect x="{x}" y="{top + i * height / 64:g}" width="12" height="{height / 64 + 0.3:.3g}" fill="{colour}"/>'
        )
    parts += [label(x + 17, top + (1 - v) * height / 2 + 4, f"{v:g}", kind="soft") for v in (1, 0, -1)]
    return svg(
        x + 50, top + height + 50, "Position encodings: a sinusoid of another frequency in each dimension", parts
    )


def palette() -> NDArray[np.uint8]:
    """256 colours from blue over white to orange: (256, 3)."""
    ends = np.array([[21, 88, 176], [250, 250, 250], [194, 80, 10]], float)
    at = np.linspace(0, 2, 256)
    return np.stack([np.interp(at, [0, 1, 2], ends[:, c]) for c in range(3)], axis=1).round().astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return palette indices (rows, columns) as a PNG file."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows, columns = pixels.shape
    scanlines = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)  # eight bits, by palette
    parts = [(b"IHDR", header), (b"PLTE", palette().tobytes()), (b"IDAT", zlib.compress(scanlines, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def learning_rates(steps: int = 20_000) -> str:
    """Section 5.3, equation 3: linear warm-up, then 1/√step, for several widths and warm-ups."""
    left, top, width, height = 70, 36, 620, 260
    at = np.unique(np.concatenate([np.linspace(1, steps, 240).round(), [4000, 8000]])).astype(int)
    curves = {
        spec: [learning_rate(int(step), TrainConfig(warmup=spec[1]), d_model=spec[0]) for step in at]
        for spec in SCHEDULES
    }
    highest = 0.0012
    place = lambda step, rate: f"{left + step * width / steps:.1f} {top + height - rate * height / highest:.1f}"  # noqa: E731
    parts = [label(left, 22, "lrate = d_model^−0.5 · min(step^−0.5, step · warmup^−1.5)")]
    for rate in np.arange(0, highest + 1e-9, 0.0002):
        y = top + height - rate * height / highest
        parts.append(
            f'<path class="line" d="M{left} {y:.1f}h{width}"/>' + label(left - 8, y + 4, f"{rate:.4f}", "end", "soft")
        )
    for step in range(0, steps + 1, 4000):
        parts.append(label(left + step * width / steps, top + height + 18, f"{step:,}", "middle", "soft"))
    parts.append(label(left + width / 2, top + height + 38, "step", "middle", "soft"))
    for i, ((d_model, warmup, name), rates) in enumerate(curves.items()):
        path = "L".join(place(step, rate) for step, rate in zip(at, rates, strict=True))
        text = f"d_model {d_model}, warm-up {warmup:,}" + (f" ({name})" if name else "")
        y = top + 14 + 20 * i
        dashes = "" if name else ' stroke-dasharray="7 4"'  # not the paper's
        parts.append(f'<g class="c{i}"{dashes}><path class="stroke" stroke-width="2" d="M{path}"/>')
        parts.append(
            f'<path class="stroke" stroke-width="3" d="M{left + 330} {y - 4}h22"/></g>' + label(left + 360, y, text)
        )
    return svg(left + width + 24, top + height + 50, "The learning rate over time, equation 3 of the paper", parts)


# ---- attention -------------------------------------------------------------------------------------------------------


def picture(run: str | Path | Translator) -> str:
    """Draw the cross-attention of all heads of the last decoder layer as SVG."""
    attention = _translator(run).attention(SENTENCE)
    name = max(name for name in attention.weights if name.endswith("cross"))
    heads = np.asarray(attention.weights[name])
    columns, rows = attention.source, attention.written
    width = LEFT + len(heads) * (len(columns) * CELL + GAP)
    height = TOP + len(rows) * CELL + 34
    parts = [label(LEFT - 8, TOP + i * CELL + 18, token, "end") for i, token in enumerate(rows)]
    for number, head in enumerate(heads):
        x0 = LEFT + number * (len(columns) * CELL + GAP)
        parts += [
            label(0, 0, token, more=f' transform="translate({x0 + j * CELL + 17},{TOP - 8}) rotate(-60)"')
            for j, token in enumerate(columns)
        ]
        parts += [
            f'<rect class="line" x="{x0 + j * CELL}" y="{TOP + i * CELL}" width="{CELL - 1}" height="{CELL - 1}"/>'
            f'<rect class="heat" x="{x0 + j * CELL}" y="{TOP + i * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill-opacity="{weight:.3f}"/>'
            for i, row in enumerate(head)
            for j, weight in enumerate(row)
        ]
        parts.append(label(x0, TOP + len(rows) * CELL + 22, f"head {number}", kind="soft"))
    layer = int(name.split(".")[1]) + 1
    return svg(width, height, f"Cross-attention of layer {layer}: {attention.text} → {attention.translation}", parts)


@dataclass(frozen=True)
class WordAttention:
    """Attention of one word in the last layer: the weight of each head on each source word."""

    name: str
    rows: list[str]  # words of the attending sentence
    source: list[str]
    query: int
    weights: NDArray[np.float64]  # (heads, words of the source)


def dependency(run: str | Path | Translator) -> str:
    """Draw attention to a distant noun: from a pronoun (encoder) and from an agreeing adjective (decoder)."""
    translator = _translator(run)
    parts = []
    for i, (text, word, noun) in enumerate((PRONOUN, AGREEMENT)):
        drawn = _bundle(word_attention(translator, text, word), text, noun)
        parts.append(f'<g transform="translate(0 {212 * i})">{drawn}</g>')
    return svg(870, 426, f"Attention over a distance: {PRONOUN[0]} {AGREEMENT[0]}", parts)


def word_attention(translator: Translator, text: str, word: str) -> WordAttention:
    """Return the attention of a word: encoder self-attention for a source word, cross-attention for a target word."""
    attention = translator.attention(text)
    source, written = split_words(attention.source), split_words(attention.written)
    inside = word in [each for each, _ in source]
    rows = source if inside else written
    name = max(
        name for name in attention.weights if re.fullmatch(r"encoder.*self" if inside else r"decoder.*cross", name)
    )
    weights = np.asarray(attention.weights[name])  # (heads, queries, keys)
    merged = np.stack([weights[..., pieces].sum(-1) for _, pieces in source], axis=-1)  # (heads, queries, words)
    query = max(i for i, (each, _) in enumerate(rows) if each == word)
    received = merged[:, rows[query][1][-1]]  # (heads, words), of the last piece, which carries the ending
    return WordAttention(name, [each for each, _ in rows], [each for each, _ in source], query, received)


def split_words(tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Join subwords to words, each with the indices of its pieces; punctuation and </s> are separate words."""
    words: list[tuple[str, list[int]]] = []
    for i, token in enumerate(tokens):
        if words and token[:1] != "▁" and token.isalnum() and words[-1][0].isalnum():
            words[-1] = words[-1][0] + token, [*words[-1][1], i]
        else:
            words.append((token.lstrip("▁"), [i]))
    return words


def _bundle(attention: WordAttention, text: str, noun: str) -> str:
    """Draw one curve per head and source word, with opacity equal to the attention weight."""
    above, below, left, width = 60, 190, 24, 640
    places = {
        key: left + (np.arange(len(words)) + 0.5) * width / len(words)
        for key, words in (("rows", attention.rows), ("source", attention.source))
    }
    stack, layer, kind = attention.name.split(".")
    parts = [
        label(
            left,
            26,
            f"{stack}, layer {int(layer) + 1}, {kind}-attention: what “{attention.rows[attention.query]}” looks at",
        )
    ]
    for head, weights in enumerate(attention.weights):
        shift = 3 * (head - (len(attention.weights) - 1) / 2)
        for x, weight in zip(places["source"], weights, strict=True):
            if weight >= 0.02:
                x0, x1 = places["rows"][attention.query] + shift, x + shift
                parts.append(
                    f'<path class="c{head % 4} stroke" stroke-width="2.6" stroke-opacity="{weight:.2f}" '
                    f'd="M{x0:.1f} {above + 7}C{x0:.1f} {above + 60} {x1:.1f} {below - 70} {x1:.1f} {below - 16}"/>'
                )
        share = weights[attention.source.index(noun)]
        parts.append(f'<rect class="c{head % 4} fill" x="684" y="{74 + 24 * head}" width="12" height="12" rx="2"/>')
        parts.append(label(704, 85 + 24 * head, f"head {head}: {share:.2f} on “{noun}”"))
    for key, y, strong in (("rows", above, attention.query), ("source", below, attention.source.index(noun))):
        words = attention.rows if key == "rows" else attention.source
        for i, (x, word) in enumerate(zip(places[key], words, strict=True)):
            parts.append(
                label(
                    x, y, word, "middle", "ink" if i == strong else "soft", ' font-weight="bold"' if i == strong else ""
                )
            )
    return "\n".join(parts)


def measure(translator: Translator, sentences: Iterable[str]) -> dict[str, NDArray[np.float64]]:
    """Return the mean attention weight on the noun of each head of the last layers, over matching sentences.

    `pronoun` is measured in the encoder, `adjective`, the last word of the translation, in the decoder.
    """
    weights_of: dict[str, list[NDArray[np.float64]]] = {"pronoun": [], "adjective": []}
    for text in sentences:
        match = LIKE_IT.search(text)
        if match is None:
            continue
        adjective = re.findall(r"\w+", translator.translate(text).text)[-1]
        for kind, word in (("pronoun", match[2]), ("adjective", adjective)):
            attention = word_attention(translator, text, word)
            weights_of[kind].append(attention.weights[:, attention.source.index("because") - 1])
    return {
        f"{kind}, {len(rows)} sentences": np.mean(rows, axis=0).round(2) for kind, rows in weights_of.items() if rows
    }


def _translator(run: str | Path | Translator) -> Translator:
    opened = run if isinstance(run, Translator) else qkv.load(run)
    assert isinstance(opened, Translator)
    return opened


def main(run: str = "runs/demo", folder: str = "docs") -> None:
    """Write all figures, and print the mean attention of the heads over all matching sentences."""
    translator = _translator(run)
    pictures = {
        "attention": picture(translator),
        "positions": position_encodings(),
        "learning-rate": learning_rates(),
        "dependency": dependency(translator),
    }
    for name, drawn in pictures.items():
        (Path(folder) / f"{name}.svg").write_text(drawn, encoding="utf-8")
    lines = read_lines("demo:valid.en") + read_lines("demo:test.en")
    for kind, weights in measure(translator, lines).items():
        print(f"weight on the noun by {kind}:", *(f"head {i} {weight:.2f}" for i, weight in enumerate(weights)))


if __name__ == "__main__":
    main(*sys.argv[1:])
