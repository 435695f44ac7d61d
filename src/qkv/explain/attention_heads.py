"""Attention heads of a model: recording and muting them, their importance, and their entropy during training.

Recording and muting are wrappers around the attention of the plain model, so no weight is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.attention import Attend, around_attention
from qkv.core.batches import Batch, collate
from qkv.core.config import Config
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.search import Ids
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Model, StepModel
from qkv.data.lm_data import block_batch, text_blocks
from qkv.decoding.search_request import pair_batches, token_logprobs
from qkv.explain.pages import new_figure
from qkv.models.variants import record_attention
from qkv.options import DecoderOnlyConfig, EncoderOnlyConfig
from qkv.training.lm_tasks import masked_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HeadName = str | tuple[str, int]  # "decoder.1.cross", or one head of it: ("decoder.1.cross", 3)


def attention_of_pairs(model: Any, batch: Batch, kind: str = "") -> dict[str, NDArray[np.float32]]:
    """Return the attention weights of a batch of pairs under teacher forcing: (batch, heads, queries, keys) by name.

    Only attentions with names that end in `kind` are returned, e.g. ".cross".
    """
    with record_attention() as recording:
        model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    # A recurrent network makes one call for each target token.
    named = {name: parts for name, parts in recording.items() if name.endswith(kind)}
    return {name: torch.cat(parts, dim=2).float().cpu().numpy() for name, parts in named.items()}


def head_counts(model: Any, device: torch.device) -> dict[str, int]:
    """The number of heads of each attention of a translating model, by name, found by reading one token."""
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode(), record_attention() as recording:
        model.step(one, model.start(model.encode(one, one[0])))
    return {name: parts[0].shape[1] for name, parts in recording.items()}


@contextmanager
def mute_heads(heads: Iterable[HeadName], known: Mapping[str, int]) -> Iterator[None]:
    """Inside the block these heads contribute zero to the concatenation before W^O; no weight is changed.

    A name means all heads of an attention, a prefix such as `decoder.1` or `encoder` all attentions below it, a pair
    one head. `known` is the result of `head_counts`. Nested blocks add up.
    """
    muted: dict[str, set[int]] = {}
    for head in heads:
        for name, numbers in _named(head, known).items():
            muted.setdefault(name, set()).update(numbers)

    def wrap(
        attention: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        mixed = attend(q, k, v, mask, causal)  # (batch, heads, queries, d_v)
        if attention.name not in muted:
            return mixed
        return mixed.index_fill(1, torch.tensor(sorted(muted[attention.name]), device=mixed.device), 0.0)

    with around_attention(wrap):
        yield


def _named(head: HeadName, known: Mapping[str, int]) -> dict[str, Iterable[int]]:
    """Return the heads of each attention that a name or a pair means; refuse names that the model does not have."""
    if isinstance(head, str):
        names = [name for name in known if name == head or name.startswith(f"{head}.")]
        if not names:
            raise _unknown(head, known)
        return {name: range(known[name]) for name in names}
    if len(head) != 2 or type(head[1]) is not int:  # it may come from an HTTP request
        raise UsageError(f'{head!r} is not a head: give a name, or a name and a number such as ("decoder.0.cross", 3)')
    name, number = head
    if name not in known:
        raise _unknown(name, known)
    if not 0 <= number < known[name]:
        raise UsageError(f"{name} has no head {number}: its heads are 0 to {known[name] - 1}")
    return {name: (number,)}


def _unknown(name: str, known: Mapping[str, int]) -> UsageError:
    return UsageError(f'no attention is called "{name}": this model has {", ".join(known) or "none"}')


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
    pad = tokenizers.tgt.pad
    for indices, batch in pair_batches(sources, targets, tokenizers, device, tokens):
        encoded = model.encode(batch.source, batch.lengths)
        loss -= sum(map(sum, token_logprobs(model, batch, pad, encoded)))
        for head in heads:
            with mute_heads([head], known):
                muted = model.encode(batch.source, batch.lengths) if head[0].startswith("encoder") else encoded
                loss_without[head] -= sum(map(sum, token_logprobs(model, batch, pad, muted)))
        count += batch.tokens
        progress(len(indices))
    importances = [
        HeadImportance(*head, (loss_without[head] - loss) / count, loss_without[head] / count) for head in heads
    ]
    return sorted(importances, key=lambda h: -h.change)


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
    with new_figure(path, size) as figure:
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
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(head, layer, text.replace("-", "−"), color="white" if dark else "black", **style)
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
        return block_batch(text_blocks(np.asarray(store.ids["tgt"][:tokens]), tokenizers.tgt, length)[:rows])
    masked = isinstance(config.model, EncoderOnlyConfig)
    sides = ("tgt",) if masked else ("src", "tgt")
    widths = np.max([np.asarray(store.lengths(side)[:rows]) + 1 for side in sides], axis=0)
    padded = np.maximum.accumulate(widths) * np.arange(1, len(widths) + 1)  # tokens of the first 1, 2, … rows
    count = max(1, int((padded <= tokens).sum()))
    if masked:
        return masked_batch(text, config, np.arange(count))
    return collate([store.row("src", i) for i in range(count)], [store.row("tgt", i) for i in range(count)], tokenizers)


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
    for name, parts in recording.items():
        weights = torch.cat(parts, dim=2).float()  # a recurrent network makes one call for each word
        entropies = torch.special.entr(weights).sum(-1).mean(1)  # (batch, queries)
        means[name] = float(entropies[read if name.startswith("encoder") else written].mean())
    return {name: float(f"{mean:.6g}") for name, mean in means.items() if math.isfinite(mean)}
