"""Head importance: by how much the loss on a test set changes when a head is removed, for every head of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.data.loader import Batch, collate
from qkv.decode.batched import by_length
from qkv.decode.board import Ids
from qkv.explain import picture
from qkv.models.attention import heads_of, without
from qkv.models.state import StepModel
from qkv.text import Tokenizers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    tokenizers: Tokenizers,
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
    with picture.drawn(path, size) as figure:
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
