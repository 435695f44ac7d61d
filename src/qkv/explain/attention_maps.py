"""Attention maps: the weights of every layer and head for one sentence pair, as a page, JSON or picture.

A map also measures each head (sharpness, distance, offset …) and names its roles by fixed thresholds; on another
sentence both may differ. The roles positional and rare-token are from Voita et al. (2019), alignment from Bahdanau et
al. (2015).
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.core import files
from qkv.core.batches import collate
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import StepModel
from qkv.data.subwords import readable_tokens
from qkv.explain.attention_heads import attention_of_pairs
from qkv.explain.pages import PAGE, check_output, new_figure, script_data

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {f"/*{name}*/": name for name in ("explorer.css", "views.js", "decoding.js", "explorer.js")}
UNITS = 10_000  # the page stores weights as 16-bit integers in units of 1/10,000
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Weights by name (`encoder.0.self`, `decoder.1.cross` …), each (heads, queries, keys), and their tokens.

    Query i of a decoder attention has the input token `fed[i]` and predicts the token `written[i]`.

    The weights are exactly those that the model used. The page rounds them to four decimals, the data file to six.
    `steps` and `beam`, if the search was recorded, are the candidates at each step and the tree of hypotheses.
    `unaligned` are the spans in `text` of the words that no word of the translation is aligned with.
    """

    source: list[str]
    fed: list[str]
    written: list[str]
    text: str
    translation: str
    weights: dict[str, NDArray[np.float32]]
    rare: list[bool] = field(default_factory=list)  # for each source token, whether it is rare; empty: not measured
    steps: list[dict[str, Any]] | None = None
    beam: dict[str, Any] | None = None
    unaligned: list[Span] | None = None  # None: not measured

    @property
    def has_cross_attention(self) -> bool:
        return any(map(_is_cross, self.weights))

    @property
    def unaligned_words(self) -> list[str]:
        return [self.text[begin:end] for begin, end in self.unaligned or ()]

    @cached_property
    def words(self) -> dict[str, list[Span]]:
        """Return the words of `source`, `fed` and `written`, as (begin, end) of their tokens."""
        return {name: words(getattr(self, name)) for name in ("source", "fed", "written")}

    @cached_property
    def heads(self) -> dict[str, list[HeadMeasures]]:
        """Return the measures and roles of every head, by the same names as the weights."""
        return {name: [self._measure(name, head) for head in layer] for name, layer in self.weights.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values: the content of the data file."""
        plain = self._plain()
        rounded = {name: np.round(layer.astype(np.float64), 6) for name, layer in self.weights.items()}
        plain["weights"] = {name: layer.tolist() for name, layer in rounded.items()}
        return plain

    def drawn(self) -> dict[str, Any]:
        """Return the data of the explorer page: packed weights, and the definitions of roles and measures."""
        plain = self._plain() | {"legend": LEGEND, "explained": MEASURES, "units": UNITS}
        plain["weights"] = {name: _packed(layer) for name, layer in self.weights.items()}
        return plain

    def page(self) -> str:
        """Return the explorer as one HTML page that works offline."""
        return _page([self], self.drawn())

    def save(self, path: str | Path) -> None:
        """Write a page (.html), data (.json), or heat-maps of the cross-attention (.png, .svg)."""
        check_output(path := Path(path), "an attention map")
        if path.suffix == ".html":
            files.write_text(path, self.page())
        elif path.suffix == ".json":
            files.write_text(path, json.dumps(self.to_dict(), ensure_ascii=False))
        else:
            name = "source → target" if self.has_cross_attention else "attention"
            shown = {k: v for k, v in self.weights.items() if _is_cross(k)} or self.weights
            labels = {k: self.labels(k) for k in shown}
            plot_attention(shown, labels, path, title=f"{name}: {self.text} → {self.translation}")

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """Return the tokens of the rows and of the columns of an attention."""
        rows = self.source if name.startswith("encoder") else self.written
        return rows, self.source if _is_cross(name) or name.startswith("encoder") else self.fed

    def _measure(self, name: str, weights: NDArray[np.float32]) -> HeadMeasures:
        _, keys = self.labels(name)
        rare = np.asarray(self.rare) if self.rare and keys is self.source else None
        return measure_head(weights, cross=_is_cross(name), rare=rare)

    def _plain(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "weights"}
        heads = {name: [dataclasses.asdict(head) for head in layer] for name, layer in self.heads.items()}
        return plain | {"words": self.words, "heads": heads}


def save_maps(maps: Sequence[AttentionMap], path: str | Path) -> None:
    """Write the maps of the pieces of a text into one page (.html) or data file (.json); one map as `save` does."""
    if len(maps) == 1:
        maps[0].save(path)
        return
    check_output(path := Path(path), "an attention map")
    if path.suffix == ".html":
        files.write_text(path, _page(maps, {"sentences": [each.drawn() for each in maps]}))
    elif path.suffix == ".json":
        plain = {"sentences": [each.to_dict() for each in maps]}
        files.write_text(path, json.dumps(plain, ensure_ascii=False))
    else:
        raise UsageError(f"{path}: a picture shows one sentence, not {len(maps)}: give one, or write .html or .json")


def _page(maps: Sequence[AttentionMap], data: dict[str, Any]) -> str:
    """Return the explorer page of one map, or of several to choose from."""
    parts = {place: (PAGE / name).read_text(encoding="utf-8") for place, name in PARTS.items()}
    parts["{text}"] = html.escape(" ".join(each.text for each in maps))
    parts["{translation}"] = html.escape(" ".join(each.translation for each in maps))
    parts["/*data*/"] = script_data(data)
    # All placeholders in one pass, because the sentence may contain the text of a placeholder.
    placeholders = "|".join(map(re.escape, parts))
    page = (PAGE / "explorer.html").read_text(encoding="utf-8")
    return re.sub(placeholders, lambda match: parts[match[0]], page)


def words(tokens: list[str]) -> list[Span]:
    """Group tokens into words, (begin, end) each; specials, tags and closing punctuation are words of their own."""
    begins = [
        i
        for i, token in enumerate(tokens)
        if i == 0 or token.startswith("▁") or _is_special(token) or _is_special(tokens[i - 1]) or _closing(tokens, i)
    ]
    return list(pairwise([*begins, len(tokens)]))


def _is_special(token: str) -> bool:
    return token in ("<s>", "</s>", "<pad>") or (token.startswith("<2") and token.endswith(">"))


def _closing(tokens: list[str], i: int) -> bool:
    """Return whether the letters of a word end just before token i and only punctuation follows in that word."""
    if not any(c.isalnum() for c in tokens[i - 1]):
        return False
    for token in tokens[i:]:
        if token.startswith("▁") or _is_special(token):
            break
        if any(c.isalnum() for c in token):  # letters, or the name of a byte, <0xE2>
            return False
    return True


def _is_cross(name: str) -> bool:
    return name.endswith("cross")


def _packed(layer: NDArray[np.float32]) -> dict[str, Any]:
    """Encode weights as little-endian 16-bit integers in base64: four decimals in 2.7 characters."""
    units = np.round(layer.astype(np.float64) * UNITS).astype("<u2")
    return {"shape": list(layer.shape), "data": base64.b64encode(units.tobytes()).decode("ascii")}


@torch.inference_mode()
def attention_map(
    model: StepModel,
    tokenizers: TokenizerPair,
    text: str,
    source: list[int],
    target: list[int],
    device: torch.device,
) -> AttentionMap:
    """Run the model with teacher forcing on a sentence pair and record its attention weights."""
    batch = collate([np.asarray(source, np.int64)], [np.asarray(target, np.int64)], tokenizers).to(device)
    tokens = readable_tokens(tokenizers.tgt, target)
    first_learned = tokenizers.src.offset + 256  # ids of bytes come before those of learned pieces
    return AttentionMap(
        source=[*readable_tokens(tokenizers.src, source), "</s>"],
        fed=["<s>", *tokens],
        written=[*tokens, "</s>"],
        text=text,
        translation=tokenizers.tgt.decode(target),
        weights={name: layer[0] for name, layer in attention_of_pairs(model, batch).items()},
        rare=[*rare_tokens(source, first_learned).tolist(), False],
    )


# ---- measures and roles of a head ------------------------------------------------------------------------------------

POSITIONAL_MASS = 0.5  # mean weight on one fixed offset
RARE_MASS, RARE_TIMES = 0.5, 2.0  # mean weight on the rarest tokens, and its ratio to that of even attention
RARE_SHARE = 0.2  # the rarest fifth of the source's tokens, at least one
ALIGNMENT_CONFIDENCE, ALIGNMENT_ORDER, ALIGNMENT_COVERAGE = 0.6, 0.8, 0.6
SHORTEST = 4  # queries; with fewer, almost every head passes a threshold by chance

LEGEND = {
    "previous token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset −1",
    "next token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset +1",
    "positional": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on another fixed offset",
    "rare token": (
        f"a mean weight of at least {RARE_MASS}, and {RARE_TIMES:g} times that of even attention, on the rarest "
        f"{RARE_SHARE:.0%} of the source's tokens; rarity is the token's number in the vocabulary, which is learned "
        f"from frequent to rare (single bytes are never rare)"
    ),
    "alignment": (
        f"cross-attention that is sharp (confidence ≥ {ALIGNMENT_CONFIDENCE}), monotonic (order ≥ {ALIGNMENT_ORDER}) "
        f"and nearly one-to-one (coverage ≥ {ALIGNMENT_COVERAGE})"
    ),
}
MEASURES = {
    "confidence": "the greatest weight of a row, averaged over the rows",
    "entropy": "the entropy of a row in bits, averaged over the rows: 0 for all weight on one token, log₂ n for equal "
    "weights on n tokens",
    "distance": "the weighted mean distance between query and key; in cross-attention, between key and diagonal",
    "offset": "self-attention: the fixed offset (key − query) with the greatest mean weight, and that weight; in the "
    "decoder, offset 0 is the input token",
    "rare": "the mean weight on the rarest tokens of the source",
    "order": "cross-attention: the correlation of a row's number with the position of its greatest weight",
    "coverage": "cross-attention: the number of different keys with the greatest weight of a row, as a share of the "
    "largest number possible",
}


@dataclass(frozen=True)
class HeadMeasures:
    """The measures and roles of one head; a measure that does not apply to its kind of attention is None."""

    confidence: float
    entropy: float
    distance: float
    offset: int | None
    mass: float | None
    rare: float | None
    order: float | None
    coverage: float | None
    roles: list[str]


def measure_head(weights: NDArray[Any], *, cross: bool, rare: NDArray[np.bool_] | None = None) -> HeadMeasures:
    """Measure one head: weights (queries, keys), each row a distribution; `rare` marks the rare keys."""
    weights = np.asarray(weights, np.float64)
    queries, keys = weights.shape
    scale = (keys - 1) / max(queries - 1, 1) if cross else 1.0
    distances = np.abs(np.arange(keys)[None] - scale * np.arange(queries)[:, None])
    entropies = -(weights * np.log2(np.where(weights > 0, weights, 1.0))).sum(1)
    confidence = float(weights.max(1).mean())
    offset = mass = on_rare = order = coverage = None
    roles = []
    if not cross:
        offset, mass = best_offset(weights)
        if mass >= POSITIONAL_MASS:
            roles.append({-1: "previous token", 1: "next token"}.get(offset, "positional"))
    if rare is not None:
        on_rare = float(weights[:, rare].sum(1).mean())
        if on_rare >= max(RARE_MASS, RARE_TIMES * float(np.mean(rare))):  # the mean: what even attention has on them
            roles.append("rare token")
    if cross:
        order, coverage = alignment(weights)
        if confidence >= ALIGNMENT_CONFIDENCE and order >= ALIGNMENT_ORDER and coverage >= ALIGNMENT_COVERAGE:
            roles.append("alignment")
    return HeadMeasures(
        confidence=confidence,
        entropy=float(entropies.mean() + 0.0),  # + 0.0 turns −0 into 0
        distance=float((weights * distances).sum(1).mean()),
        offset=offset,
        mass=mass,
        rare=on_rare,
        order=order,
        coverage=coverage,
        roles=roles if queries >= SHORTEST else [],
    )


def best_offset(weights: NDArray[Any]) -> tuple[int, float]:
    """Return the offset key − query with the greatest mean weight, among offsets that half of the queries have."""
    queries, keys = weights.shape
    means = {
        offset: float(diagonal.mean())
        for offset in range(1 - queries, keys)
        if len(diagonal := np.diagonal(weights, offset)) * 2 >= queries
    }
    offset = max(means, key=lambda o: (means[o], -abs(o)))
    return offset, means[offset]


def alignment(weights: NDArray[Any]) -> tuple[float, float]:
    """Return order and coverage of the rows' greatest weights."""
    best = weights.argmax(1)
    coverage = len(set(best.tolist())) / min(weights.shape)
    if best.std() == 0 or len(best) < 2:
        return 0.0, coverage
    return float(np.corrcoef(np.arange(len(best)), best)[0, 1]), coverage


def rare_tokens(ids: list[int], first_learned: int) -> NDArray[np.bool_]:
    """Mark the rarest tokens: those with the greatest ids; ids below `first_learned` are bytes and never rare."""
    numbers = np.asarray(ids)
    learned = numbers >= first_learned
    if not learned.any():
        return learned
    count = max(1, round(RARE_SHARE * len(ids)))
    # Each id counts once, so that a repeated token does not displace another one.
    bound = np.sort(np.unique(numbers[learned]))[::-1][:count].min()
    return learned & (numbers >= bound)


# ---- heat-maps as a picture: a row for each layer, a column for each head --------------------------------------------


CELL, MARGIN = 0.2, 1.1  # inches: size of a token's cell, and space for the labels
CAPTION = 2.2  # inches: width of "decoder layer 11 cross, head 15", the least width of a heat-map
WIDEST = 60.0  # inches; larger pictures are scaled down
Labels = tuple[list[str], list[str]]


def plot_attention(
    weights: Mapping[str, NDArray[Any]], labels: Mapping[str, Labels], path: Path, *, title: str
) -> None:
    """Draw every head of the given attentions; `labels` are the tokens of rows and columns."""
    names = list(weights)
    heads = max(len(layer) for layer in weights.values())
    rows, columns = (max(len(pair[side]) for pair in labels.values()) for side in (0, 1))
    width, height = heads * max(columns * CELL + MARGIN, CAPTION), len(names) * (rows * CELL + MARGIN) + 0.5
    scale = min(1.0, WIDEST / max(width, height))
    with new_figure(path, (max(width * scale, 4), height * scale), font=9 * scale) as figure:
        grid = figure.subplots(len(names), heads, squeeze=False)
        for name, row in zip(names, grid, strict=True):
            stack, layer, kind = name.split(".")
            for number, axes in enumerate(row):
                if number < len(weights[name]):
                    caption = f"{stack} layer {layer} {kind}, head {number}"
                    _heat_map(axes, weights[name][number], labels[name], caption)
                else:
                    axes.set_axis_off()
        figure.suptitle(title.replace("$", r"\$"), fontsize=10 * scale, wrap=True)


def _heat_map(axes: Axes, head: NDArray[Any], labels: Labels, title: str) -> None:
    rows, columns = ([token.replace("$", r"\$") for token in side] for side in labels)
    axes.imshow(head, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xlabel(title)
