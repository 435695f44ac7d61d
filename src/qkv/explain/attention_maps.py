"""The attention weights of every layer and head while a model reads a source and writes a target."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.core import files
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.data.loader import collate
from qkv.explain import figure_files
from qkv.explain.head_analysis import LEGEND, MEASURES, Head, measure
from qkv.explain.head_analysis import rarest as rarest_of
from qkv.models.attention import record
from qkv.models.state import StepModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".html", ".json", *figure_files.PICTURE_FORMATS)
PAGE = Path(__file__).parent / "page"
PARTS = {f"/*{name}*/": name for name in ("explorer.css", "views.js", "decoding.js", "explorer.js")}
UNITS = 10_000  # the page holds weights as whole ten-thousandths, 16 bits each
Span = tuple[int, int]


def check(path: Path) -> None:
    """Refuse a map that could not be written, before a model is loaded for it."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: an attention map is written as {' or '.join(SUFFIXES)}: choose such a name")
    if path.suffix in figure_files.PICTURE_FORMATS:
        figure_files.check_picture(path)
    files.check_place(path)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Weights by name (`encoder.0.self`, `decoder.1.cross` …), each (heads, queries, keys), and the tokens they join.

    Decoder queries are numbered as the decoder works: the query of a position is the token it is fed, and what it
    writes is the token after it. `written` holds those, so query i of a decoder attention belongs to `written[i]`.

    The weights are exactly those that the model used. The page and the data file round them, to four and six decimals.
    `steps` and `beam` tell how the search went, where it was recorded: the candidates at each step, and the tree.
    """

    source: list[str]
    fed: list[str]
    written: list[str]
    text: str
    translation: str
    weights: dict[str, NDArray[np.float32]]
    rare: list[bool] = field(default_factory=list)  # which source tokens count as rare; none said, none measured
    steps: list[dict[str, Any]] | None = None
    beam: dict[str, Any] | None = None

    @cached_property
    def words(self) -> dict[str, list[Span]]:
        """The words of `source`, `fed` and `written`, as (begin, end) of their tokens."""
        return {name: words(getattr(self, name)) for name in ("source", "fed", "written")}

    @cached_property
    def heads(self) -> dict[str, list[Head]]:
        """The measures and roles of every head, by the same names as the weights."""
        return {name: [self._measure(name, head) for head in layer] for name, layer in self.weights.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as the data file holds it."""
        plain = self._plain()
        plain["weights"] = {name: _decimals(layer, 6) for name, layer in self.weights.items()}
        return plain

    def drawn(self) -> dict[str, Any]:
        """What the explorer draws: the same with weights packed, and how it explains the roles of heads."""
        plain = self._plain() | {"legend": LEGEND, "explained": MEASURES, "units": UNITS}
        plain["weights"] = {name: _packed(layer) for name, layer in self.weights.items()}
        return plain

    def page(self) -> str:
        """A page that holds everything it needs and asks nobody else."""
        # "</script" or "<!--" would end or break the script element that holds the data; JSON may spell it so.
        data = json.dumps(self.drawn(), ensure_ascii=False).replace("<", "\\u003c")
        parts = {place: (PAGE / name).read_text(encoding="utf-8") for place, name in PARTS.items()}
        parts |= {"{text}": html.escape(self.text), "{translation}": html.escape(self.translation), "/*data*/": data}
        # In one pass, because the sentence may spell a placeholder.
        places = "|".join(map(re.escape, parts))
        page = (PAGE / "explorer.html").read_text(encoding="utf-8")
        return re.sub(places, lambda found: parts[found[0]], page)

    def save(self, path: str | Path) -> None:
        """Write a page (.html) that opens anywhere, data (.json), or heat-maps of the cross-attention (.png, .svg)."""
        check(path := Path(path))
        if path.suffix == ".html":
            files.write_text(path, self.page())
        elif path.suffix == ".json":
            files.write_text(path, json.dumps(self.to_dict(), ensure_ascii=False))
        else:
            name = "source → target" if any(map(_is_cross, self.weights)) else "attention"
            chosen = {k: v for k, v in self.weights.items() if _is_cross(k)} or self.weights
            labels = {k: self.labels(k) for k in chosen}
            draw(chosen, labels, path, title=f"{name}: {self.text} → {self.translation}")

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """The tokens beside the rows and above the columns of an attention."""
        rows = self.source if name.startswith("encoder") else self.written
        return rows, self.source if _is_cross(name) or name.startswith("encoder") else self.fed

    def _measure(self, name: str, weights: NDArray[np.float32]) -> Head:
        of_source = _is_cross(name) or name.startswith("encoder")
        rare = np.asarray(self.rare) if self.rare and of_source else None
        return measure(weights, cross=_is_cross(name), rare=rare)

    def _plain(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "weights"}
        heads = {name: [dataclasses.asdict(head) for head in layer] for name, layer in self.heads.items()}
        return plain | {"words": self.words, "heads": heads}


def words(tokens: list[str]) -> list[Span]:
    """Which tokens make up each word: a "▁" begins one, `<s>`, `</s>`, tags and closing punctuation stand alone."""
    begins = [
        i
        for i, token in enumerate(tokens)
        if i == 0 or token.startswith("▁") or _alone(token) or _alone(tokens[i - 1]) or _closing(tokens, i)
    ]
    return list(pairwise([*begins, len(tokens)]))


def _alone(token: str) -> bool:
    return token in ("<s>", "</s>", "<pad>") or (token.startswith("<2") and token.endswith(">"))


def _closing(tokens: list[str], i: int) -> bool:
    """Whether a word's letters end right before token i, and nothing but punctuation follows in it."""
    if not any(c.isalnum() for c in tokens[i - 1]):
        return False
    for token in tokens[i:]:
        if token.startswith("▁") or _alone(token):
            break
        if any(c.isalnum() for c in token):  # letters, or a byte spelled <0xE2>
            return False
    return True


def _is_cross(name: str) -> bool:
    return name.endswith("cross")


def _decimals(layer: NDArray[np.float32], places: int) -> list[Any]:
    rounded: list[Any] = np.round(layer.astype(np.float64), places).tolist()
    return rounded


def _packed(layer: NDArray[np.float32]) -> dict[str, Any]:
    """Whole ten-thousandths as little-endian 16-bit numbers in base64: four decimals in 2.7 characters."""
    units = np.round(layer.astype(np.float64) * UNITS).astype("<u2")
    return {"shape": list(layer.shape), "data": base64.b64encode(units.tobytes()).decode("ascii")}


@torch.inference_mode()
def attention_map(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    text: str,
    source: list[int],
    target: list[int],
    device: torch.device,
) -> AttentionMap:
    """Force the target through the model and collect the weights it uses."""
    batch = collate([np.asarray(source, np.int64)], [np.asarray(target, np.int64)], tokenizers).to(device)
    with record() as recording:
        model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    tokens = tokenizers.tgt.tokens(target)
    first_piece = tokenizers.src.offset + 256  # the bytes come before what was learned
    return AttentionMap(
        source=[*tokenizers.src.tokens(source), "</s>"],
        fed=["<s>", *tokens],
        written=[*tokens, "</s>"],
        text=text,
        translation=tokenizers.tgt.decode(target),
        weights={name: _joined(parts) for name, parts in recording.weights.items()},
        rare=[*rarest_of(source, first_piece).tolist(), False],
    )


def _joined(parts: list[torch.Tensor]) -> NDArray[np.float32]:
    """Each call recorded one (1, heads, queries, keys) tensor.

    A recurrent network makes one call for each word of the target, and all see the whole source.
    """
    return torch.cat(parts, dim=2)[0].float().cpu().numpy()  # (heads, queries, keys)


# ---- Attention as a picture for paper or slides: one heat-map a head, layers downwards, heads across -----------------


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
    with figure_files.new_figure(path, (max(width * shrink, 4), height * shrink), font=9 * shrink) as figure:
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
