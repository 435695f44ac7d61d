"""Many sentences through the search: sorted by length into batches, the results back in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from qkv import config
from qkv.data import batches
from qkv.data.loader import Batch, collate, pad
from qkv.decode.score import token_logprobs
from qkv.decode.search import Hypothesis, search
from qkv.models.state import StepModel
from qkv.text import Tokenizers

Ids = Sequence[int]


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
    spec: config.Decode,
    tokenizers: Tokenizers,
    *,
    n_best: int = 1,
    device: torch.device,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each source, in the order of the sources; `progress` hears which ones are finished."""
    results: list[list[Hypothesis]] = [[] for _ in sources]
    src, tgt = tokenizers.src, tokenizers.tgt
    budget = batch_tokens(spec, device) // max(spec.beam, n_best)
    for batch in by_length([len(ids) + 1 for ids in sources], budget):
        rows = [np.asarray(sources[i], np.int64) for i in batch]
        found = search(
            model,
            pad(rows, src.pad, last=src.eos).to(device),
            torch.tensor([len(row) + 1 for row in rows], device=device),
            spec,
            bos=tgt.bos,
            eos=tgt.eos,
            pad=tgt.pad,
            n_best=n_best,
        )
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = hypotheses
        progress(batch.tolist())
    return results


def score_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    tokenizers: Tokenizers,
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


def batch_tokens(spec: config.Decode, device: torch.device) -> int:
    """Padded source tokens times beams decoded at once: what keeps the device busy, unless the config says."""
    return spec.batch_tokens or (4096 if device.type == "cpu" else 131_072)
