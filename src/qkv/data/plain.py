"""Plain text as training sees it: blocks of running text for a language model, sentences with gaps for an encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data import batches
from qkv.data.loader import Batch, Pairs, Updates, pad
from qkv.data.store import Store


class Blocks(Updates):
    """Running text cut into blocks of equal length; every pass cuts it elsewhere, and shuffles them."""

    def __init__(
        self,
        store: Store,
        *,
        length: int,
        tokens: int,
        micro_tokens: int = 0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.store, self.length = store, length
        self.tokens, self.micro_tokens = tokens, micro_tokens or tokens
        self.seed, self.rank, self.world = seed, rank, world
        self.device = device or torch.device("cpu")
        for first, stop in store.ranges:
            if stop - first <= length:
                raise UsageError(
                    f"{store.folder}: a text of {stop - first} tokens holds no block of data.max_length = {length} "
                    f"tokens: lower that, or leave the text out"
                )

    def plan(self, epoch: int) -> list[batches.Update]:
        """Each block is known by where it begins in the stream; none crosses from one corpus to the next."""
        random = np.random.default_rng((self.seed, epoch, 4))
        cuts = []
        for first, stop in self.store.ranges:
            shift = random.integers(min(self.length, stop - first - self.length))
            cuts.append(np.arange(first + shift, stop - self.length, self.length, dtype=np.int64))
        corpus = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
        visited = batches.visits(corpus, self.store.weights, seed=self.seed, epoch=epoch)
        if not len(visited):
            raise UsageError(f"epoch {epoch} visits no text: raise a weight in data.train")
        starts = np.concatenate(cuts)[visited]
        updates = _groups(starts, self.tokens // self.length)
        return [_groups(update, self.micro_tokens // self.length) for update in updates]

    def describe(self, epoch: int) -> str:
        return (
            f"a pass over the text is {len(self.plan(epoch)):,} updates of {self.tokens // self.length:,} blocks "
            f"of {self.length:,} tokens"
        )

    def batch(self, micro: batches.Indices, seed: tuple[int, ...]) -> Batch:
        return block_batch(self.store.stream[micro[:, None] + np.arange(self.length + 1)])


def block_batch(rows: NDArray[Any], pad_id: int = 0) -> Batch:
    """Rows of one token more than the block: each position is given one and must predict the next."""
    ids = torch.from_numpy(rows.astype(np.int64))
    labels = ids[:, 1:].contiguous()
    return Batch((ids[:, :-1].contiguous(),), labels, int((labels != pad_id).sum()))


def text_blocks(ids: NDArray[Any], tokenizer: Tokenizer, length: int) -> NDArray[Any]:
    """A whole text as rows of blocks in which every token is predicted once, the first from the newline before it."""
    count = -(-len(ids) // length)
    filled: NDArray[np.int64] = np.full(count * length + 1, tokenizer.pad, np.int64)
    filled[0] = tokenizer.newline
    filled[1 : len(ids) + 1] = ids
    rows: NDArray[np.int64] = filled[np.arange(count)[:, None] * length + np.arange(length + 1)]
    return rows


def _groups(starts: batches.Indices, size: int) -> list[batches.Indices]:
    return [starts[first : first + max(1, size)] for first in range(0, len(starts), max(1, size))]


class Sentences(Pairs):
    """Lines of plain text of like length, in which a share of the tokens is hidden and must be filled in."""

    def __init__(self, store: Store, tokenizers: TokenizerPair, *, masked: float, **options: Any) -> None:
        super().__init__(store, tokenizers, **options)
        self.masked = masked

    def widths(self) -> tuple[batches.Lengths, batches.Lengths]:
        widths = np.asarray(self.store.tgt_lengths) + 1
        return widths, widths

    def batch(self, micro: batches.Indices, seed: tuple[int, ...]) -> Batch:
        random = [np.random.default_rng((*seed, int(i), 5)) for i in micro]
        rows = [self.store.tgt(i) for i in micro]
        return hide([row.astype(np.int64) for row in rows], self.tokenizers.tgt, self.masked, random)


def hide(rows: list[NDArray[np.int64]], tokenizer: Tokenizer, share: float, random: list[np.random.Generator]) -> Batch:
    """Rows with a share of their tokens, at least one, to be filled in (Devlin et al., 2019).

    Of these, 8 in 10 are hidden, 1 in 10 is another token and 1 in 10 stays, so that no token can be trusted. `<s>`,
    which an encoder has no other use for, stands for what is hidden.
    """
    given, labels = [], []
    for row, own in zip(rows, random, strict=True):
        chosen = own.random(len(row)) < share
        chosen[own.integers(len(row))] = True
        fate = own.random(len(row))
        changed = np.where(fate < 0.8, tokenizer.bos, own.integers(tokenizer.offset, tokenizer.size, len(row)))
        given.append(np.where(chosen & (fate < 0.9), changed, row))
        labels.append(np.where(chosen, row, tokenizer.pad))
    source = pad(given, tokenizer.pad, last=tokenizer.eos)
    wanted = pad([np.append(row, tokenizer.pad) for row in labels], tokenizer.pad)
    lengths = torch.tensor([len(row) + 1 for row in given])
    return Batch((source, lengths), wanted, int((wanted != tokenizer.pad).sum()))
