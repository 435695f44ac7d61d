"""Which sentences form which update: a pure function of lengths, token budgets, seed, epoch, rank and world size.

Sentences of like length form a micro-batch, the unit of one forward pass; micro-batches drawn at random form an update.
An update is planned for all devices together, so `tokens_per_step` means the same on one device as on eight; each rank
takes its share of the rows of every micro-batch. Lengths here are row widths as the model sees them, `<s>` or `</s>`
included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Lengths = NDArray[np.integer]
Update = list[Indices]  # the micro-batches of one optimiser step

MOST_PADDING = 0.05
LEAST = 512  # tokens in a micro-batch


def visits(corpus: NDArray[np.integer], weights: tuple[float, ...], *, seed: int, epoch: int) -> Indices:
    """The sentences an epoch visits, shuffled: a corpus of weight 2.5 twice, and a random half of it once more."""
    random = np.random.default_rng((seed, epoch, 1))
    chosen = []
    for number, weight in enumerate(weights):
        members = np.flatnonzero(corpus == number)
        whole, part = int(weight), weight - int(weight)
        extra = random.permutation(members)[: round(part * len(members))]
        chosen += [members] * whole + [extra]
    return random.permutation(np.concatenate(chosen)).astype(np.int64)


def plan(
    indices: Indices, src: Lengths, tgt: Lengths, *, tokens: int, micro_tokens: int, seed: int, epoch: int
) -> list[Update]:
    """The updates of an epoch: micro-batches of at most `micro_tokens` padded tokens a side, `tokens` in an update.

    `src` and `tgt` are the lengths of all sentences of the store, `indices` the ones to visit, in random order.
    """
    micro_tokens = min(micro_tokens, tokens)
    micros = cut(indices[_by_length(src[indices], tgt[indices], micro_tokens)], src, tgt, micro_tokens)
    updates: list[Update] = []
    room = 0
    for i in np.random.default_rng((seed, epoch, 2)).permutation(len(micros)):
        size = len(micros[i]) * int(max(src[micros[i]].max(), tgt[micros[i]].max()))
        if size > room:
            updates.append([])
            room = tokens
        updates[-1].append(micros[i])
        room -= size
    return updates


def cut(indices: Indices, src: Lengths, tgt: Lengths, tokens: int) -> list[Indices]:
    """Cut a sequence of sentences, in order, into batches with rows × widest row ≤ tokens on both sides.

    A sentence wider than that is a batch alone.
    """
    widths = np.maximum(src[indices], tgt[indices]).astype(np.int64)
    batches, start = [], 0
    while start < len(indices):
        # No batch that begins here has more rows than its first row's width allows: look no further.
        window = widths[start : start + max(1, tokens // int(widths[start]))]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        rows = max(1, int(np.searchsorted(padded, tokens, side="right")))
        batches.append(indices[start : start + rows])
        start += rows
    return batches


def share(update: Update, rank: int, world: int) -> Update:
    """One rank's part of an update: every `world`-th row of each micro-batch, so all ranks work on like lengths.

    Each micro-batch begins with another rank, or the first would always have the rows that do not divide.
    """
    parts = [micro[(rank - number) % world :: world] for number, micro in enumerate(update)]
    return [part for part in parts if len(part)]


def pad_share(updates: list[Update], src: Lengths, tgt: Lengths) -> float:
    """The share of padded tokens that are padding, over both sides."""
    real = padded = 0
    for micro in (micro for update in updates for micro in update):
        for lengths in (src[micro], tgt[micro]):
            real += int(lengths.sum())
            padded += int(lengths.max()) * len(micro)
    return 1 - real / max(1, padded)


def choose_micro_tokens(src: Lengths, tgt: Lengths, tokens: int, sample: int = 2_000_000) -> int:
    """The largest micro-batch, tokens / 2ᵏ, whose padding stays under 5 %: a small corpus needs smaller ones.

    None is smaller than the longest sentence, nor than `LEAST`, where padding would cost less than the many passes.
    """
    indices = np.random.default_rng(0).permutation(len(src))[:sample]
    micro_tokens = tokens
    while micro_tokens >= 2 * max(LEAST, int(src.max()), int(tgt.max())):
        updates = plan(indices, src, tgt, tokens=tokens, micro_tokens=micro_tokens, seed=0, epoch=0)
        if pad_share(updates, src, tgt) < MOST_PADDING:
            break
        micro_tokens //= 2
    return micro_tokens


def _by_length(src: Lengths, tgt: Lengths, tokens: int) -> Indices:
    """An order in which neighbours are of like length on both sides.

    Sorted by source alone, the targets of a batch differ, and the reverse. So sentences are sorted by source into
    bands, and inside each band by target, up and down in turn so that the seams fit. With n batches, about √n bands
    of √n batches leave the same spread on both sides. The sort is stable: ties stay in the random order given.
    """
    by_src = np.argsort(src, kind="stable")
    batches = max(1.0, float(np.maximum(src, tgt).sum()) / tokens)
    bands = max(1, round(batches**0.5))
    ends = np.linspace(0, float(src.sum()), bands + 1)[1:-1]  # bands of equal token counts
    band_of = np.searchsorted(ends, np.cumsum(src[by_src]), side="left")
    target = tgt[by_src].astype(np.int64)
    return by_src[np.lexsort((np.where(band_of % 2 == 0, target, -target), band_of))].astype(np.int64)
