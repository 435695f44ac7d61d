"""Many sentences through the search: sorted by length into batches, the results back in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data import batches
from qkv.data.loader import Batch, collate, pad
from qkv.decode.board import Hypothesis, Ids
from qkv.decode.score import token_logprobs
from qkv.decode.search import Kind, begin, check_prefix, search
from qkv.decode.step import PLAIN, Choice, Special
from qkv.engines.cuda_decoding.continuous_batching import Pool
from qkv.models.state import StepModel
from qkv.options import DecodeConfig


def by_length(lengths: Sequence[int], tokens: int) -> list[batches.Indices]:
    """Positions of rows grouped into batches of at most `tokens` padded tokens, longest first.

    The longest first, so that a batch too large for the device fails at the start and not after an hour.
    """
    widths = np.asarray(lengths, np.int64)
    order = np.argsort(-widths, kind="stable").astype(np.int64)
    return batches.cut(order, widths, widths, tokens)


def search_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    spec: DecodeConfig,
    tokenizers: TokenizerPair,
    *,
    n_best: int = 1,
    device: torch.device,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
    choice: Choice = PLAIN,
    max_length: int | None = None,
    prefixes: Sequence[Ids] | None = None,
    numbers: Sequence[int] | None = None,
    kind: Callable[[Sequence[int]], Kind] | None = None,
    pool: Pool | None = None,
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each source, in the order of the sources; `progress` hears which ones are finished.

    Each begins with its sentence's prefix. `max_length` takes the place of the source's length + `extra_length`.
    `numbers` are the sentences' own, by which draws are seeded; `kind` makes the search for the sentences of a batch,
    where the usual one will not do. A `pool` keeps searches that are made for one model on a GPU, and makes them.
    """
    work = Work(
        sources,
        [len(ids) + spec.extra_length if max_length is None else max_length for ids in sources],
        prefixes or [()] * len(sources),
        numbers or range(len(sources)),
    )
    if pool is not None and kind is None and sources and pool.serves(model, choice):
        return _in_slots(pool, work, spec, tokenizers, n_best, choice, progress)
    results: list[list[Hypothesis]] = [[] for _ in sources]
    budget = batch_tokens(spec, device) // max(spec.beam, n_best)
    for batch in by_length([len(ids) + 1 for ids in sources], budget):
        found = search(
            model,
            *work.tensors(batch, tokenizers.src, device),
            spec,
            bos=tokenizers.tgt.bos,
            eos=tokenizers.tgt.eos,
            pad=tokenizers.tgt.pad,
            n_best=n_best,
            longest=torch.tensor([work.longest[i] for i in batch], device=device),
            prefix=work.beginnings(batch).to(device),
            choice=choice,
            numbers=[work.numbers[i] for i in batch],
            kind=kind(batch.tolist()) if kind else begin,
        )
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = hypotheses
        progress(batch.tolist())
    return results


@dataclass(frozen=True)
class Work:
    """Sentences, and of each the longest output, what it begins with, and its number in the whole input."""

    sources: Sequence[Ids]
    longest: Sequence[int]
    prefixes: Sequence[Ids]
    numbers: Sequence[int]

    def tensors(self, batch: batches.Indices, tokenizer: Tokenizer, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sources of a batch with </s>, padded, and their lengths."""
        rows = [np.asarray(self.sources[i], np.int64) for i in batch]
        lengths = torch.tensor([len(row) + 1 for row in rows], device=device)
        return pad(rows, tokenizer.pad, last=tokenizer.eos).to(device), lengths

    def beginnings(self, batch: batches.Indices) -> Tensor:
        """The prefixes of a batch, -1 behind shorter ones."""
        if not any(self.prefixes[i] for i in batch):
            return torch.empty(len(batch), 0, dtype=torch.long)
        rows = [torch.tensor(self.prefixes[i], dtype=torch.long) for i in batch]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _in_slots(
    pool: Pool,
    work: Work,
    spec: DecodeConfig,
    tokenizers: TokenizerPair,
    n_best: int,
    choice: Choice,
    progress: Callable[[Sequence[int]], None],
) -> list[list[Hypothesis]]:
    """All sentences, longest first, through slots that they enter and leave."""
    src, tgt = tokenizers.src, tokenizers.tgt
    order = sorted(range(len(work.sources)), key=lambda i: -len(work.sources[i]))
    results: list[list[Hypothesis]] = [[] for _ in order]

    def finished(place: int, hypotheses: list[Hypothesis]) -> None:
        results[order[place]] = hypotheses
        progress([order[place]])

    special = Special(tgt.bos, tgt.eos, tgt.pad)
    check_prefix(torch.tensor([token for prefix in work.prefixes for token in prefix], dtype=torch.long), special)
    pool.run(
        [[*work.sources[i], src.eos] for i in order],
        [work.longest[i] for i in order],
        [work.prefixes[i] for i in order],
        spec,
        special,
        choice,
        n_best=n_best,
        pad_id=src.pad,
        finished=finished,
    )
    return results


def score_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    tokens: int = 2048,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """The log-probability of each token of each target, </s> last; `progress` hears how many more are done.

    A batch is small because the logits of all its tokens exist at once: 300 MB with a vocabulary of 37,000.
    """
    results: list[list[float]] = [[] for _ in sources]
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        batch: Batch = collate(
            [np.asarray(sources[i], np.int64) for i in indices],
            [np.asarray(targets[i], np.int64) for i in indices],
            tokenizers,
        ).to(device)
        for i, logprobs in zip(indices, token_logprobs(model, batch, tokenizers.tgt.pad), strict=True):
            results[i] = logprobs
        progress(len(indices))
    return results


def batch_tokens(spec: DecodeConfig, device: torch.device) -> int:
    """Padded source tokens times beams decoded at once: what keeps the device busy, unless the config says."""
    return spec.batch_tokens or (4096 if device.type == "cpu" else 131_072)
