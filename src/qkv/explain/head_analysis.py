"""Measures of attention heads (sharpness, distance, offset …), their roles by fixed thresholds, and their importance.

The roles positional and rare-token are from Voita et al. (2019), alignment from Bahdanau et al. (2015). Measures and
roles describe a head on one sentence; on another sentence they may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.batches import Batch, collate
from qkv.core.config import Config
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.search import Ids
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Model, StepModel
from qkv.core.translate import by_length
from qkv.data.lm_data import block_batch, text_blocks
from qkv.explain import figure_files
from qkv.explain.attention_hooks import head_counts, mute_heads, record_attention
from qkv.options import DecoderOnlyConfig, EncoderOnlyConfig
from qkv.training.lm_tasks import masked_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    offset, mass = (None, None) if cross else best_offset(weights)
    order, coverage = alignment(weights) if cross else (None, None)
    entropies = -(weights * np.log2(np.where(weights > 0, weights, 1.0))).sum(1)
    head = HeadMeasures(
        confidence=float(weights.max(1).mean()),
        entropy=float(entropies.mean() + 0.0),  # + 0.0 turns −0 into 0
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


def distance(weights: NDArray[Any], cross: bool) -> float:
    """Return the weighted mean distance between query and key; in cross-attention, between key and diagonal."""
    queries, keys = weights.shape
    scale = (keys - 1) / max(queries - 1, 1) if cross else 1.0
    distances = np.abs(np.arange(keys)[None] - scale * np.arange(queries)[:, None])
    return float((weights * distances).sum(1).mean())


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
    learned: NDArray[np.bool_] = numbers >= first_learned
    if not learned.any():
        return learned
    count = max(1, round(RARE_SHARE * len(ids)))
    # Each id counts once, so that a repeated token does not displace another one.
    bound = np.sort(np.unique(numbers[learned]))[::-1][:count].min()
    rare: NDArray[np.bool_] = learned & (numbers >= bound)
    return rare


def _roles(head: HeadMeasures, share: float) -> list[str]:
    """Return the roles of a head; `share` is the mean weight that even attention has on the rare keys."""
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


# ---- importance: the change in the loss on a test set when a head is muted -------------------------------------------


TITLES = {"encoder.self": "encoder self", "decoder.self": "decoder self", "decoder.cross": "decoder → source"}


@dataclass(frozen=True)
class HeadImportance:
    """The loss (−log p, nats per target token) without one head, and its change; positive if the head helps."""

    name: str  # of the attention, e.g. `decoder.1.cross`
    head: int
    change: float
    loss: float


@torch.inference_mode()
def head_importance(
    model: StepModel,
    tokenizers: TokenizerPair,
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    *,
    tokens: int = 2048,
) -> list[HeadImportance]:
    """Mute each head in turn and measure the loss; return the most important head first.

    Ids are without <s> and </s>. `progress` is called with the number of pairs just done. The encoder runs once for all
    decoder heads, because muting those does not change its output.
    """
    if not len(sources) or len(sources) != len(targets):
        raise UsageError(
            f"{len(sources)} sources but {len(targets)} targets: give one target for each, at least one pair"
        )
    known = head_counts(model, device)
    heads = [(name, head) for name, count in known.items() for head in range(count)]
    loss, loss_without, count = 0.0, dict.fromkeys(heads, 0.0), 0
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        src, tgt = ([np.asarray(side[i], np.int64) for i in indices] for side in (sources, targets))
        batch = collate(src, tgt, tokenizers).to(device)
        encoded = model.encode(batch.source, batch.lengths)
        loss += _loss(model, encoded, batch, tokenizers.tgt.pad)
        for head in heads:
            with mute_heads([head], known):
                muted = model.encode(batch.source, batch.lengths) if head[0].startswith("encoder") else encoded
                loss_without[head] += _loss(model, muted, batch, tokenizers.tgt.pad)
        count += batch.tokens
        progress(len(indices))
    importances = [
        HeadImportance(*head, (loss_without[head] - loss) / count, loss_without[head] / count) for head in heads
    ]
    return sorted(importances, key=lambda h: -h.change)


def _loss(model: StepModel, encoded: Any, batch: Batch, pad: int) -> float:
    """Return −log p, summed over the labels of a batch without padding."""
    logits, _ = model.step(batch.target, model.start(encoded))  # (batch, target, vocab)
    nll: Tensor = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=pad, reduction="none"
    )
    return float(nll.double().sum())


def importance_tables(importances: Sequence[HeadImportance]) -> dict[str, list[list[float | None]]]:
    """Return the changes by kind of attention (`encoder.self`, `decoder.self`, `decoder.cross`): layers × heads.

    A layer without such an attention, as in a recurrent network, has a row of None.
    """
    tables: dict[str, dict[int, dict[int, float]]] = {}
    for each in importances:
        stack, layer, kind = each.name.split(".")
        tables.setdefault(f"{stack}.{kind}", {}).setdefault(int(layer), {})[each.head] = each.change
    filled: dict[str, list[list[float | None]]] = {}
    for kind in sorted(tables, key=lambda kind: list(TITLES).index(kind) if kind in TITLES else len(TITLES)):
        layers = tables[kind]
        heads = 1 + max(head for row in layers.values() for head in row)
        filled[kind] = [[layers.get(i, {}).get(head) for head in range(heads)] for i in range(1 + max(layers))]
    return filled


def plot_head_importance(importances: Sequence[HeadImportance], path: str | Path, *, title: str = "") -> None:
    """Draw a panel for each kind of attention, layers × heads, with the change in the loss in every cell."""
    tables = importance_tables(importances)
    widths = [len(table[0]) for table in tables.values()]
    layers = max(map(len, tables.values()))
    largest = max([abs(each.change) for each in importances] + [1e-9])
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
    # Square roots, so that small changes remain distinguishable when a few are large.
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


# ---- entropy during training -----------------------------------------------------------------------------------------

SAMPLE_ROWS, SAMPLE_TOKENS = 16, 1024  # sample size: all recorded weights are in memory at once


def attention_entropies(model: Model, text: PreparedText, config: Config, device: torch.device) -> dict[str, float]:
    """Return the entropy of each attention on the first rows of the validation text; dropout is off meanwhile."""
    training = model.training
    model.eval()
    batch = first_rows(text, config, SAMPLE_ROWS, SAMPLE_TOKENS)
    entropies = attention_entropy(model, batch, text.tokenizers.tgt.pad, device)
    model.train(training)
    return entropies


def first_rows(text: PreparedText, config: Config, rows: int, tokens: int) -> Batch:
    """Return the first validation rows as one batch: at most `rows` and `tokens`, but at least one row."""
    store, tokenizers = text.valid, text.tokenizers
    if isinstance(config.model, DecoderOnlyConfig):
        length = min(config.data.max_length, tokens // 4)
        return block_batch(text_blocks(np.asarray(store.stream[:tokens]), tokenizers.tgt, length)[:rows])
    masked = isinstance(config.model, EncoderOnlyConfig)
    sides = ("tgt",) if masked else ("src", "tgt")
    widths = np.max([np.asarray(store.lengths(side)[:rows]) + 1 for side in sides], axis=0)
    padded = np.maximum.accumulate(widths) * np.arange(1, len(widths) + 1)  # tokens of the first 1, 2, … rows
    count = max(1, int((padded <= tokens).sum()))
    if masked:
        return masked_batch(text, config, np.arange(count))
    return collate([store.src(i) for i in range(count)], [store.tgt(i) for i in range(count)], tokenizers)


@torch.inference_mode()
def attention_entropy(model: Model, batch: Batch, pad: int, device: torch.device) -> dict[str, float]:
    """Return the mean entropy −Σ a log a of each attention, in nats, over heads and the positions without padding.

    It is 0 if all weight is on one key, and log n if n keys have equal weights. A model without attention has none.
    """
    moved = batch.to(device)
    with record_attention() as recording:
        model.hidden(*moved.inputs)
    written = moved.labels != pad  # (batch, target)
    read = written
    if len(moved.inputs) > 1:
        read = torch.arange(moved.source.shape[1], device=device) < moved.lengths[:, None]  # (batch, source)
    means = {}
    for name, parts in recording.weights.items():
        weights = torch.cat(parts, dim=2).float()  # a recurrent network makes one call for each word
        entropies = torch.special.entr(weights).sum(-1).mean(1)  # (batch, queries)
        means[name] = float(entropies[read if name.startswith("encoder") else written].mean())
    return {name: float(f"{mean:.6g}") for name, mean in means.items() if math.isfinite(mean)}
