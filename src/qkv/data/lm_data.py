"""Text without a source: running text in blocks for a language model, sentences with masked tokens for an encoder."""

from __future__ import annotations

import dataclasses
import mmap
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.core.batches import Batch, Indices, PlannedUpdate, UpdateStream, pad, visits
from qkv.core.corpus import LINES, Corpus, LineFormat, ParallelMap, TextBlock
from qkv.core.dataset import TokenStore
from qkv.core.errors import UsageError
from qkv.core.preparation import Disposition, Scan, Sentences
from qkv.core.tokenizer import PAD, Tokenizer, TokenizerPair
from qkv.data.pair_updates import PairUpdates
from qkv.data.subwords import newline_of, pack_text

# A text with too few lines to hold some out is divided at spaces. "+" marks a part that does not end its line.
PARTS = LineFormat("parts")
PART = re.compile(rb"([^\n]{1024,}?)(?<!\r) (?=[^ \n])|([^\n]*)\n|([^\n]+)\Z")


class RunningText(Sentences):
    """Text of a language model: blocks cross lines, newlines are tokens, no line is dropped, the end is held out.

    A JSON document ends in </s>. No filter applies.
    """

    name = "running text"
    strips = False

    def blocks(self, corpora: Sequence[Corpus], scratch: Path, parallel_map: ParallelMap) -> list[list[TextBlock]]:
        """Divide the text into blocks of lines, and long lines into parts if there are too few to hold some out."""
        if corpora[0].sides == 2:
            raise UsageError(f"corpus {corpora[0]}: a language model learns from running text: give text, not pairs")
        divided = super().blocks(corpora, scratch, parallel_map)
        total = sum(block.count for blocks in divided for block in blocks)
        if 0 < self._held_out(total) <= total // 2 or any(corpus.format != LINES for corpus in corpora):
            return divided
        parts = []
        for number, corpus in enumerate(corpora):
            copy = scratch / f"parts{number}"
            split_long_lines(corpus.paths[0], copy)
            parts.append(dataclasses.replace(corpus, paths=(copy,), format=PARTS))
        return super().blocks(parts, scratch, parallel_map)

    def choose(self, scan: Scan) -> None:
        """Choose the last lines of each corpus for validation: a tenth of all, at most 5000, or data.valid_size."""
        dispositions, scan.notes = scan.dispositions, [{"in_training": 0} for _ in scan.corpora]
        dispositions[dispositions == Disposition.EMPTY] = Disposition.TRAIN
        valid = dispositions[scan.trained :]
        if len(valid):
            valid[valid == Disposition.TRAIN] = Disposition.VALID
            return
        total = sum(scan.counts)
        goal, most = self._held_out(total), total // 2
        if not 0 < goal <= most:
            remedy = f"set data.valid_size={most}, or " if most else ""
            raise UsageError(
                f"{total} lines of running text, {goal} of them held out for validation: at least one line and "
                f"at most half must be held out: {remedy}give validation text: --valid-text (data.valid)"
            )
        # In proportion to the size of each corpus, but not all of one.
        for count, stop in zip(scan.counts, np.cumsum(scan.counts).tolist(), strict=True):
            last = dispositions[stop - min(count - 1, -(-goal * count // total)) : stop]
            last[last == Disposition.TRAIN] = Disposition.VALID

    def _held_out(self, total: int) -> int:
        """Return how many of so many lines are to be held out; possible are 1 to half of them."""
        return self.data.valid_size or min(total // 10, 5000)

    def sample(self, block: TextBlock, *arguments: Any) -> list[str]:
        texts = super().sample(block, *arguments)
        return [line for text in texts for line in text[block.corpus.format == PARTS :].split("\n")]

    def pack(self, text: str, side: Tokenizer, layout: LineFormat) -> bytes:
        if layout == LINES:
            return pack_text(side, text)
        if layout == PARTS:
            return side.pack(text[1:]) if text.startswith("+") else pack_text(side, text[1:])
        end_of_document = side.eos.to_bytes(side.dtype.itemsize, "little")
        return pack_text(side, text) + end_of_document

    def raw(self, text: str, layout: LineFormat) -> str:
        if layout != PARTS:
            return super().raw(text, layout)
        line = super().raw(text[1:], layout)
        return line.removesuffix("\n") + " " if text.startswith("+") else line


def split_long_lines(file: Path, copy: Path) -> None:
    """Copy a text with long lines split at spaces; each line begins with "+" if its line goes on, "." if it ends."""
    with (
        file.open("rb") as source,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as text,
        copy.open("wb") as out,
    ):
        for match in PART.finditer(text, len(BOM_UTF8) if text[: len(BOM_UTF8)] == BOM_UTF8 else 0):
            inner, line, last = match.groups()
            out.write(b"+" + inner + b"\n" if inner is not None else b"." + (line or last or b"") + b"\n")


# ---- batches ---------------------------------------------------------------------------------------------------------


class BlockBatches(UpdateStream):
    """Running text cut into blocks of equal length; every epoch cuts it at other places and shuffles the blocks."""

    def __init__(self, store: TokenStore, *, length: int, **options: Any) -> None:
        super().__init__(store, **options)
        self.length = length
        self.plan_key = (*self.plan_key, length)
        sizes = np.bincount(store.corpus, store.lengths("tgt"), len(store.weights)).astype(np.int64)
        ends = np.cumsum(sizes).tolist()
        self.ranges = list(zip([0, *ends[:-1]], ends, strict=True))  # start and end of each corpus in the stream
        for first, stop in self.ranges:
            if stop - first <= length:
                raise UsageError(
                    f"{store.folder}: a text of {stop - first} tokens holds no block of data.max_length = {length} "
                    f"tokens: lower that, or remove the text"
                )

    def make_plan(self, epoch: int) -> list[PlannedUpdate]:
        """Plan an epoch; a block is given by its start in the stream, and none crosses from one corpus to the next."""
        random = np.random.default_rng((self.seed, epoch, 4))
        cuts = []
        for first, stop in self.ranges:
            shift = random.integers(min(self.length, stop - first - self.length))
            cuts.append(np.arange(first + shift, stop - self.length, self.length, dtype=np.int64))
        corpus = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
        visited = visits(corpus, self.store.weights, seed=self.seed, epoch=epoch)
        if not len(visited):
            raise UsageError(f"epoch {epoch} visits no text: raise a weight in data.train")
        updates = _groups(np.concatenate(cuts)[visited], self.tokens // self.length)
        return [_groups(update, self.micro_tokens // self.length) for update in updates]

    def describe(self, epoch: int) -> str:
        return (
            f"a pass over the text is {len(self.plan(epoch)):,} updates of {self.tokens // self.length:,} blocks "
            f"of {self.length:,} tokens"
        )

    def batch(self, micro: Indices, seed: tuple[int, ...]) -> Batch:
        return block_batch(self.store.ids["tgt"][micro[:, None] + np.arange(self.length + 1)])


def _groups(starts: Indices, size: int) -> list[Indices]:
    return [starts[first : first + max(1, size)] for first in range(0, len(starts), max(1, size))]


def block_batch(rows: NDArray[Any]) -> Batch:
    """Return rows of one token more than the block as a batch: each position must predict the next token."""
    ids = torch.from_numpy(rows.astype(np.int64))
    labels = ids[:, 1:].contiguous()
    return Batch((ids[:, :-1].contiguous(),), labels, int((labels != PAD).sum()))


def text_blocks(ids: NDArray[Any], tokenizer: Tokenizer, length: int) -> NDArray[Any]:
    """Return a whole text as rows that predict each token once, the first after a newline."""
    count = -(-len(ids) // length)
    filled: NDArray[np.int64] = np.full(count * length + 1, tokenizer.pad, np.int64)
    filled[0] = newline_of(tokenizer)
    filled[1 : len(ids) + 1] = ids
    return filled[np.arange(count)[:, None] * length + np.arange(length + 1)]


class MaskedBatches(PairUpdates):
    """Lines of plain text of similar length, with a share of the tokens masked to be predicted."""

    measured = ("tgt", "tgt")

    def __init__(self, store: TokenStore, tokenizers: TokenizerPair, *, masked: float, **options: Any) -> None:
        super().__init__(store, tokenizers, **options)
        self.masked = masked

    def batch(self, micro: Indices, seed: tuple[int, ...]) -> Batch:
        random = [np.random.default_rng((*seed, int(i), 5)) for i in micro]
        rows = [self.store.row("tgt", i).astype(np.int64) for i in micro]
        return mask_tokens(rows, self.tokenizers.tgt, self.masked, random)


def mask_tokens(
    rows: list[NDArray[np.int64]], tokenizer: Tokenizer, share: float, random: list[np.random.Generator]
) -> Batch:
    """Return rows with a share of their tokens, at least one, to be predicted (BERT; Devlin et al., 2019).

    Of these, 8 in 10 are masked, 1 in 10 is replaced by another token and 1 in 10 stays. The mask is `<s>`, which an
    encoder does not use otherwise.
    """
    inputs, labels = [], []
    for row, own in zip(rows, random, strict=True):
        chosen = own.random(len(row)) < share
        chosen[own.integers(len(row))] = True
        draw = own.random(len(row))
        changed = np.where(draw < 0.8, tokenizer.bos, own.integers(tokenizer.offset, tokenizer.size, len(row)))
        inputs.append(np.where(chosen & (draw < 0.9), changed, row))
        labels.append(np.where(chosen, row, tokenizer.pad))
    source = pad(inputs, tokenizer.pad, last=tokenizer.eos)
    wanted = pad([np.append(row, tokenizer.pad) for row in labels], tokenizer.pad)
    lengths = torch.tensor([len(row) + 1 for row in inputs])
    return Batch((source, lengths), wanted, int((wanted != tokenizer.pad).sum()))
