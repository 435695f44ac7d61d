"""Shortlists: the target tokens that a source can need, the likeliest for each of its tokens and frequent ones.

The output matrix is the largest of a small model. With a shortlist only the rows are multiplied that the sentences of a
batch can need. Each sentence's softmax covers only its own shortlist, so its output does not depend on the batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qkv.core import files
from qkv.core.batches import pad
from qkv.core.dataset import TokenStore
from qkv.core.errors import QkvError
from qkv.core.search import Hypothesis, Ids, SearchOptions
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Model, StepModel
from qkv.core.translate import batches_by_length, search_all

LIKELIEST, FREQUENT = 40, 100  # target tokens for each source token, and for every sentence
LINKS = 20_000_000  # pairs of a source and a target token that the table is learned from: a few seconds, under 1 GB
ROUNDS = 4  # of expectation and maximisation; the order of the likeliest hardly changes after


@dataclass(frozen=True)
class Shortlist:
    """Which target tokens may translate each source token."""

    likeliest: Tensor  # (source vocabulary, k): the k likeliest, </s> where there are fewer
    frequent: Tensor  # (n,): for every sentence, </s> among them
    vocabulary: int  # of the target
    copies: bool  # with one vocabulary for both sides, a source token may be written as it is

    def allowed(self, source: Tensor) -> Tensor:
        """Which target tokens the sentences of a batch (batch, source) may use: (batch, vocabulary)."""
        may = torch.zeros(len(source), self.vocabulary, dtype=torch.bool, device=source.device)
        may[:, self.frequent.to(source.device)] = True
        may.scatter_(1, self.likeliest.to(source.device)[source].flatten(1), True)
        if self.copies:
            may.scatter_(1, source, True)
        return may

    def save(self, path: Path, tokenizers: TokenizerPair) -> None:
        """Write it as safetensors, with the fingerprint of its tokenizers."""
        mark = torch.tensor(list(bytes.fromhex(tokenizers.fingerprint)), dtype=torch.uint8)
        tensors = {"likeliest": self.likeliest.int(), "frequent": self.frequent.int(), "tokenizers": mark}
        files.write_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path, tokenizers: TokenizerPair) -> Shortlist:
        """Read what `save` wrote; one for other tokenizers is refused."""
        tensors = files.read_tensors(path)
        if bytes(tensors.get("tokenizers", torch.empty(0)).int().tolist()).hex() != tokenizers.fingerprint:
            raise QkvError(f"{path}: a shortlist for another vocabulary: learn it again")
        likeliest, frequent = tensors["likeliest"].long(), tensors["frequent"].long()
        return cls(likeliest, frequent, tokenizers.tgt.size, tokenizers.shared)

    @classmethod
    def learn(
        cls,
        store: TokenStore,
        tokenizers: TokenizerPair,
        *,
        likeliest: int = LIKELIEST,
        frequent: int = FREQUENT,
        links: int = LINKS,
    ) -> Shortlist:
        """From the training pairs, or as many of them as have `links` pairs of tokens, by IBM model 1."""
        src, tgt = tokenizers.src, tokenizers.tgt
        counts = np.bincount(np.asarray(store.ids["tgt"]), minlength=tgt.size)
        counts[: tgt.offset] = 0
        counts[tgt.eos] = counts.max() + 1
        often = np.argsort(-counts, kind="stable")[: min(frequent, int((counts > 0).sum()))]
        keys, probability = translation_table(list(_pairs(store, src.eos, links)), tgt.size)
        table = np.full((src.size, likeliest), tgt.eos, np.int64)
        # The likeliest first for each source token: its place among those of the same source is its column.
        order = np.lexsort((keys, -probability, keys // tgt.size))
        source = keys[order] // tgt.size
        column = np.arange(len(order)) - np.searchsorted(source, source)
        kept = column < likeliest
        table[source[kept], column[kept]] = keys[order][kept] % tgt.size
        return cls(torch.from_numpy(table), torch.from_numpy(often.copy()), tgt.size, tokenizers.shared)


Pair = tuple[NDArray[np.int64], NDArray[np.int64]]


def _pairs(store: TokenStore, eos: int, links: int) -> Iterator[Pair]:
    """Training pairs in a random order that is always the same, until they have so many links; </s> ends a source."""
    for i in np.random.default_rng(0).permutation(len(store)).tolist():
        source, target = np.append(store.row("src", i).astype(np.int64), eos), store.row("tgt", i).astype(np.int64)
        links -= len(source) * len(target)
        if links < 0:
            return
        yield source, target


def translation_table(pairs: Sequence[Pair], vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """IBM model 1 (Brown et al., 1993): keys source · vocabulary + target of tokens that met, and p(target | source).

    Every target token is written by one source token, by each as likely as the table says; the table becomes what that
    makes of the pairs, again and again.
    """
    joined = [(source[None, :] * vocabulary + target[:, None]).ravel() for source, target in pairs]
    empty = np.zeros(0, np.int64)
    keys, link = np.unique(np.concatenate([empty, *joined]), return_inverse=True)
    width = np.concatenate([empty, *(np.full(len(target), len(source)) for source, target in pairs)])
    start = np.cumsum(width) - width  # where the links of each target token begin
    probability = np.ones(len(keys))
    for _ in range(ROUNDS if len(keys) else 0):
        weight = probability[link]
        weight /= np.repeat(np.add.reduceat(weight, start), width)  # share of each source token in this one
        expected = np.bincount(link, weight, len(keys))
        probability = expected / np.bincount(keys // vocabulary, expected)[keys // vocabulary]
    return keys, probability


# ---- in the search ---------------------------------------------------------------------------------------------------


@dataclass
class ShortState:
    """The model's own state, and what each row may write."""

    state: Any
    allowed: Tensor  # (sentences, tokens)
    sentence: Tensor  # (rows,): which sentence each row is

    def select(self, rows: Tensor) -> ShortState:
        return ShortState(self.state.select(rows), self.allowed, self.sentence[rows])


class Shortlisted:
    """StepModel with a reduced vocabulary: `tokens`, sorted, are all tokens that its sentences may use.

    An id is an index in `tokens`; special tokens keep theirs. Tokens that only other sentences may use get -inf.
    """

    def __init__(self, model: StepModel, weight: Tensor, shortlist: Shortlist, tokens: Tensor) -> None:
        """`weight` (vocabulary, d_model) is the model's output matrix; a packed model stores it in another layout."""
        self.model, self.shortlist, self.tokens = _narrow(model, weight.detach()[tokens]), shortlist, tokens

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Any, Tensor]:
        return self.model.encode(source, lengths), self.shortlist.allowed(source)[:, self.tokens]

    def start(self, memory: tuple[Any, Tensor], beam: int = 1) -> ShortState:
        read, allowed = memory
        sentence = torch.arange(len(allowed), device=allowed.device).repeat_interleave(beam)
        return ShortState(self.model.start(read, beam), allowed, sentence)

    def step(self, tokens: Tensor, state: ShortState) -> tuple[Tensor, ShortState]:
        logits, after = self.model.step(self.tokens[tokens], state.state)  # (rows, n, tokens)
        logits = logits.masked_fill(~state.allowed[state.sentence, None], -math.inf)
        return logits, ShortState(after, state.allowed, state.sentence)


def _narrow(model: StepModel, weight: Tensor) -> StepModel:
    """The same model, sharing everything, with another output matrix."""
    narrow = copy.copy(model)
    # A packed Transformer has its output matrix as a callable, all others multiply by it in `project`.
    name = "project" if isinstance(model, Model) else "output"
    vars(narrow)[name] = lambda hidden: F.linear(hidden, weight)
    return narrow


def search_short(
    narrow: Callable[[Tensor], StepModel],
    shortlist: Shortlist,
    sources: Sequence[Ids],
    options: SearchOptions,
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
    numbers: Sequence[int] | None = None,
    **more: Any,
) -> list[list[Hypothesis]]:
    """Do as `search_all`, with a model for each batch: `narrow` of the tokens that its sentences may use."""
    results: list[list[Hypothesis]] = [[] for _ in sources]
    for batch in batches_by_length(sources, options, device):
        read = [sources[i] for i in batch]
        source = pad([np.asarray(ids, np.int64) for ids in read], tokenizers.src.pad, last=tokenizers.src.eos)
        may = shortlist.allowed(source.to(device)).any(0)
        may[: tokenizers.tgt.offset] = True
        tokens = may.nonzero().flatten()
        own = [numbers[i] if numbers else i for i in batch]
        found = search_all(narrow(tokens), read, options, tokenizers, device=device, numbers=own, **more)
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = [replace(each, tokens=tokens[each.tokens].tolist()) for each in hypotheses]
        progress(batch)
    return results
