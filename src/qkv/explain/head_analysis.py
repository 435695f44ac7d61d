"""What a head does, measured: how sharp it is, how far it looks, and the roles that follow by stated thresholds.

The roles are those that Voita et al. (2019) found in trained Transformers, positional and rare-token, and alignment,
known from attention since Bahdanau et al. (2015). They describe a head on one sentence: on another it may have others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import Ids
from qkv.core.tokenizer import TokenizerPair
from qkv.core.translate import by_length
from qkv.data.loader import Batch, collate
from qkv.explain import figure_files
from qkv.models.attention import heads_of, without
from qkv.models.state import StepModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POSITIONAL_MASS = 0.5  # mean weight on one fixed offset
RARE_MASS, RARE_TIMES = 0.5, 2.0  # mean weight on the rarest tokens, and how often the share that chance would give
RARE_SHARE = 0.2  # the rarest fifth of the source's tokens, at least one
ALIGNMENT_CONFIDENCE, ALIGNMENT_ORDER, ALIGNMENT_COVERAGE = 0.6, 0.8, 0.6
SHORTEST = 4  # with fewer queries every head would seem to have a role

LEGEND = {
    "previous token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset −1",
    "next token": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on offset +1",
    "positional": f"self-attention with a mean weight of at least {POSITIONAL_MASS} on another fixed offset",
    "rare token": (
        f"a mean weight of at least {RARE_MASS}, and {RARE_TIMES:g} times what even attention would give, on the "
        f"rarest {RARE_SHARE:.0%} of the source's tokens; rarity is a token's number in the vocabulary, which is "
        f"learned from frequent to rare (single bytes come first and never count as rare)"
    ),
    "alignment": (
        f"cross-attention that is sharp (confidence ≥ {ALIGNMENT_CONFIDENCE}), runs along both sentences (order ≥ "
        f"{ALIGNMENT_ORDER}) and is near to one-to-one (coverage ≥ {ALIGNMENT_COVERAGE})"
    ),
}
MEASURES = {
    "confidence": "the greatest weight of a row, averaged over the rows",
    "entropy": "the entropy of a row in bits, averaged over the rows: 0 looks at one token, log₂ n at n tokens alike",
    "distance": "how many positions lie between query and key, weighted; in cross-attention, between key and diagonal",
    "offset": "self-attention: the fixed offset (key − query) with the greatest mean weight, and that weight; in the "
    "decoder, offset 0 is the token just fed",
    "rare": "the mean weight on the rarest tokens of the source",
    "order": "cross-attention: the correlation of a row's number with that of its greatest weight",
    "coverage": "cross-attention: how many different keys are some row's greatest weight, of those that could be",
}


@dataclass(frozen=True)
class Head:
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


def measure(weights: NDArray[Any], *, cross: bool, rare: NDArray[np.bool_] | None = None) -> Head:
    """Measure one head: weights (queries, keys), each row a distribution; `rare` marks the keys that count as rare."""
    weights = np.asarray(weights, np.float64)
    offset, mass = (None, None) if cross else best_offset(weights)
    order, coverage = alignment(weights) if cross else (None, None)
    head = Head(
        confidence=confidence(weights),
        entropy=entropy(weights),
        distance=distance(weights, cross),
        offset=offset,
        mass=mass,
        rare=None if rare is None else float(weights[:, rare].sum(1).mean()),
        order=order,
        coverage=coverage,
        roles=[],
    )
    if len(weights) < SHORTEST:
        return head
    return replace(head, roles=_roles(head, 0.0 if rare is None else float(np.mean(rare))))


def confidence(weights: NDArray[Any]) -> float:
    return float(weights.max(1).mean())


def entropy(weights: NDArray[Any]) -> float:
    return float(-(weights * np.log2(np.where(weights > 0, weights, 1.0))).sum(1).mean() + 0.0)


def distance(weights: NDArray[Any], cross: bool) -> float:
    """How far from its own position a query looks; across two sentences, how far from the diagonal."""
    queries, keys = weights.shape
    scale = (keys - 1) / max(queries - 1, 1) if cross else 1.0
    apart = np.abs(np.arange(keys)[None] - scale * np.arange(queries)[:, None])
    return float((weights * apart).sum(1).mean())


def best_offset(weights: NDArray[Any]) -> tuple[int, float]:
    """The offset key − query with the greatest mean weight, of those that at least half of the queries have."""
    queries, keys = weights.shape
    found = {
        offset: float(diagonal.mean())
        for offset in range(1 - queries, keys)
        if len(diagonal := np.diagonal(weights, offset)) * 2 >= queries
    }
    offset = max(found, key=lambda o: (found[o], -abs(o)))
    return offset, found[offset]


def alignment(weights: NDArray[Any]) -> tuple[float, float]:
    """Order and coverage of the rows' greatest weights."""
    best = weights.argmax(1)
    coverage = len(set(best.tolist())) / min(weights.shape)
    if best.std() == 0 or len(best) < 2:
        return 0.0, coverage
    return float(np.corrcoef(np.arange(len(best)), best)[0, 1]), coverage


def rarest(ids: list[int], first: int) -> NDArray[np.bool_]:
    """Mark the rarest tokens: those with the greatest ids, of the ones from `first`, the first learned piece, on."""
    numbers = np.asarray(ids)
    learned: NDArray[np.bool_] = numbers >= first
    if not learned.any():
        return learned
    wanted = max(1, round(RARE_SHARE * len(ids)))
    bound = np.sort(np.unique(numbers[learned]))[::-1][:wanted].min()
    # Repeated tokens count once each, so that a word that occurs twice does not push another out.
    rare: NDArray[np.bool_] = learned & (numbers >= bound)
    return rare


def _roles(head: Head, share: float) -> list[str]:
    """The roles of a head; `share` is what even attention would give to the rare keys."""
    roles = []
    if head.mass is not None and head.mass >= POSITIONAL_MASS:
        roles.append({-1: "previous token", 1: "next token"}.get(head.offset or 0, "positional"))
    if head.rare is not None and head.rare >= max(RARE_MASS, RARE_TIMES * share):
        roles.append("rare token")
    if (
        head.order is not None
        and head.coverage is not None
        and head.confidence >= ALIGNMENT_CONFIDENCE
        and head.order >= ALIGNMENT_ORDER
        and head.coverage >= ALIGNMENT_COVERAGE
    ):
        roles.append("alignment")
    return roles


# ---- Head importance: by how much the loss on a test set changes when a head is removed, for every head o ------------


TITLES = {"encoder.self": "encoder self", "decoder.self": "decoder self", "decoder.cross": "decoder → source"}


@dataclass(frozen=True)
class HeadImportance:
    """The loss (−log p, nats per target token) without one head, and its change: above zero, the head helps."""

    name: str  # of the attention, e.g. `decoder.1.cross`
    head: int
    change: float
    loss: float


@torch.inference_mode()
def importance(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    *,
    tokens: int = 2048,
) -> list[HeadImportance]:
    """Remove each head in turn, the most important first in the answer; `progress` hears how many more pairs are done.

    The ids are without <s> and </s>. A head of the decoder leaves the encoder as it is, which then runs once for all.
    """
    if not len(sources) or len(sources) != len(targets):
        raise UsageError(f"{len(sources)} sources and {len(targets)} targets: give as many of both, at least one")
    known = heads_of(model, device)
    heads = [(name, head) for name, count in known.items() for head in range(count)]
    loss, lost, count = 0.0, dict.fromkeys(heads, 0.0), 0
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        src, tgt = ([np.asarray(side[i], np.int64) for i in indices] for side in (sources, targets))
        batch = collate(src, tgt, tokenizers).to(device)
        memory = model.encode(batch.source, batch.lengths)
        loss += _loss(model, memory, batch, tokenizers.tgt.pad)
        for head in heads:
            with without([head], known):
                seen = memory
                if head[0].startswith("encoder"):
                    seen = model.encode(batch.source, batch.lengths)
                lost[head] += _loss(model, seen, batch, tokenizers.tgt.pad)
        count += batch.tokens
        progress(len(indices))
    found = [HeadImportance(*head, (lost[head] - loss) / count, lost[head] / count) for head in heads]
    return sorted(found, key=lambda h: -h.change)


def _loss(model: StepModel[Any, Any], memory: Any, batch: Batch, pad: int) -> float:
    """−log p summed over the real labels of a batch."""
    logits, _ = model.step(batch.target, model.start(memory))  # (batch, target, vocab)
    nll: Tensor = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=pad, reduction="none"
    )
    return float(nll.double().sum())


def matrices(found: Sequence[HeadImportance]) -> dict[str, list[list[float | None]]]:
    """The changes by kind of attention (`encoder.self`, `decoder.self`, `decoder.cross`): rows are layers.

    A layer that has no such attention, as in a recurrent network, has a row of None.
    """
    tables: dict[str, dict[int, dict[int, float]]] = {}
    for one in found:
        stack, layer, kind = one.name.split(".")
        tables.setdefault(f"{stack}.{kind}", {}).setdefault(int(layer), {})[one.head] = one.change
    filled: dict[str, list[list[float | None]]] = {}
    for kind in sorted(tables, key=lambda kind: list(TITLES).index(kind) if kind in TITLES else len(TITLES)):
        layers = tables[kind]
        heads = 1 + max(head for row in layers.values() for head in row)
        filled[kind] = [[layers.get(i, {}).get(head) for head in range(heads)] for i in range(1 + max(layers))]
    return filled


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(found: Sequence[HeadImportance], path: str | Path, *, title: str = "") -> None:
    """One panel for each kind of attention, layers × heads, with the change in the loss written into every cell."""
    tables = matrices(found)
    widths = [len(table[0]) for table in tables.values()]
    layers = max(map(len, tables.values()))
    largest = max([abs(one.change) for one in found] + [1e-9])
    size = (max(5.0, 0.62 * sum(widths) + 0.7 * len(widths) + 1.2), 0.42 * layers + 1.9)
    with figure_files.new_figure(path, size) as figure:
        panels = figure.subplots(1, len(tables), squeeze=False, width_ratios=widths)[0]
        for axes, (kind, table) in zip(panels, tables.items(), strict=True):
            _panel(axes, table, largest)
            axes.set_title(TITLES.get(kind, kind), fontsize=10)
        panels[0].set_ylabel("layer")
        heading = title.replace("$", r"\$") or "Change in the loss when a head is removed"
        figure.suptitle(f"{heading}\nnats per token; red: worse without it", fontsize=11)


def _panel(axes: Axes, table: list[list[float | None]], largest: float) -> None:
    values = np.array([[np.nan if change is None else change for change in row] for row in table])
    # Square roots of the shares, so that the many small changes beside a few large ones can still be told apart.
    shades = np.sign(values) * np.sqrt(np.abs(values) / largest)
    axes.imshow(shades, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for (layer, head), change in np.ndenumerate(values):
        if not np.isnan(change):
            dark = abs(shades[layer, head]) > 0.65
            text = f"{change:+.3f}" if largest < 10 else f"{change:+.2f}"
            axes.text(
                head,
                layer,
                text.replace("-", "−"),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    axes.set_xticks(range(values.shape[1]), [str(head) for head in range(values.shape[1])])
    axes.set_yticks(range(values.shape[0]), [str(layer) for layer in range(values.shape[0])])
    axes.set_xlabel("head")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
