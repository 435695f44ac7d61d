"""Updates of sentence pairs for all options: micro-batches with little padding, BPE-dropout and alignments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from qkv.core.batches import Batch, Indices, Lengths, PairBatches, Seed, micro_batches, move
from qkv.core.dataset import Rows, TokenStore
from qkv.core.tokenizer import TokenizerPair
from qkv.data.alignments import batch_alignment
from qkv.data.subwords import pair_dropout

MAX_PADDING = 0.05  # share of padding that micro-batches of the chosen size stay below
MIN_TOKENS = 512  # of a micro-batch: smaller ones cost more time than their padding would


@dataclass(frozen=True)
class AlignedBatch(Batch):
    """Sentence pairs with the links between their tokens."""

    alignment: Tensor  # (links, 3): row, position in the source, position in the labels

    def to(self, device: torch.device) -> Self:
        return replace(super().to(device), alignment=move(self.alignment, device))


class PairUpdates(PairBatches):
    """Sentence pairs in micro-batches of a size that is chosen unless it is given.

    `dropout` is the probability of BPE-dropout, up to `max_length` tokens; `align` adds the alignments.
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizers: TokenizerPair,
        *,
        dropout: float = 0.0,
        max_length: int = 0,
        align: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(store, tokenizers, **options)
        self.cut = pair_dropout(tokenizers, dropout, max_length) if dropout else None
        self.align = align
        if not options.get("micro_tokens"):
            self.micro_tokens = choose_micro_tokens(store, self.measured, self.tokens)

    def describe(self, epoch: int) -> str:
        micros = [micro for update in self.plan(epoch) for micro in update]
        padding = pad_share(micros, self.src_widths, self.tgt_widths)
        return f"{super().describe(epoch)}, in batches of up to {self.micro_tokens:,}; {padding:.1%} of them padding"

    def sides(self, micro: Indices, seed: Seed) -> list[Rows]:
        rows = super().sides(micro, seed)
        return self.cut(rows, micro, seed) if self.cut else rows

    def batch(self, micro: Indices, seed: Seed) -> Batch:
        batch = super().batch(micro, seed)
        return AlignedBatch(**vars(batch), alignment=batch_alignment(self.store, micro)) if self.align else batch


@lru_cache(maxsize=1)  # several streams read the same text
def choose_micro_tokens(store: TokenStore, measured: tuple[str, str], tokens: int, sample: int = 2_000_000) -> int:
    """Return the largest micro-batch, tokens / 2ᵏ, with under 5 % padding: a small corpus needs smaller ones.

    None is smaller than the longest sentence, nor than `MIN_TOKENS`.
    """
    src, tgt = (store.lengths(side) + 1 for side in measured)
    indices = np.random.default_rng(0).permutation(len(src))[:sample]
    least = 2 * max(MIN_TOKENS, int(src.max()), int(tgt.max()))
    while tokens >= least and pad_share(micro_batches(indices, src, tgt, tokens), src, tgt) >= MAX_PADDING:
        tokens //= 2
    return tokens


def pad_share(micros: Sequence[Indices], src: Lengths, tgt: Lengths) -> float:
    """Return the share of padding among the tokens of micro-batches, over both sides."""
    sides = [lengths[micro] for micro in micros for lengths in (src, tgt)]
    padded = sum(int(lengths.max()) * len(lengths) for lengths in sides)
    return 1 - sum(int(lengths.sum()) for lengths in sides) / max(1, padded)
