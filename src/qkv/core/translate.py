"""Many sentences through the search, in batches of like length, and the scores of given targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qkv.core import batches
from qkv.core.batches import Batch, collate, pad
from qkv.core.search import Hypothesis, Ids, SearchOptions, SpecialTokens, StartSearch, search, start_search
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import StepModel

Indices = Sequence[int]


class DecodingEngine(Protocol):
    """Replaces `search_all` for the options that it supports: processes, or slots on a GPU."""

    def supports(self, options: SearchOptions) -> str | None:
        """Return None, or the reason why `search_all` has to do it."""
        ...

    def search_all(
        self,
        sources: Sequence[Ids],
        options: SearchOptions,
        *,
        prefixes: Sequence[Ids] | None = None,
        numbers: Sequence[int] | None = None,
        progress: Callable[[Indices], None] = lambda finished: None,
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each source, in the order of the sources."""
        ...


def search_all(
    model: StepModel[Any, Any],
    sources: Sequence[Ids],
    options: SearchOptions,
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    prefixes: Sequence[Ids] | None = None,
    numbers: Sequence[int] | None = None,
    progress: Callable[[Indices], None] = lambda finished: None,
    start: StartSearch = start_search,
) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each source, in the order of the sources, searched in batches by length.

    `prefixes` are tokens that the outputs begin with; `numbers` are the sentences' own in the whole input, which seed
    samples; `progress` gets the sentences that are finished.
    """
    results: list[list[Hypothesis]] = [[] for _ in sources]
    src, tgt = tokenizers.src, tokenizers.tgt
    longest = longest_outputs(sources, options)
    for batch in batches_by_length(sources, options, device):
        begun = [torch.tensor(prefixes[i] if prefixes else (), dtype=torch.long) for i in batch]
        rows = [np.asarray(sources[i], np.int64) for i in batch]
        found = search(
            model,
            pad(rows, src.pad, last=src.eos).to(device),
            torch.tensor([len(row) + 1 for row in rows], device=device),
            options,
            SpecialTokens(tgt.bos, tgt.eos, tgt.pad),
            longest=torch.tensor([longest[i] for i in batch], device=device),
            prefix=torch.nn.utils.rnn.pad_sequence(begun, batch_first=True, padding_value=-1).to(device),
            numbers=[numbers[i] if numbers else i for i in batch],
            start=start,
        )
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = hypotheses
        progress(batch)
    return results


def longest_outputs(sources: Sequence[Ids], options: SearchOptions) -> list[int]:
    """Return the length limit of each sentence's output."""
    return [len(ids) + options.extra_length if options.max_length is None else options.max_length for ids in sources]


def batches_by_length(sources: Sequence[Ids], options: SearchOptions, device: torch.device) -> Iterator[list[int]]:
    """Yield positions of sources grouped by length, longest first: too large a batch fails at the start."""
    # Padded source tokens times beams: enough to keep the device busy.
    budget = options.batch_tokens or (4096 if device.type == "cpu" else 131_072)
    yield from by_length([len(ids) + 1 for ids in sources], budget // max(options.beam, options.n_best))


def by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield positions of rows grouped into batches of at most `tokens` padded tokens, longest first."""
    widths = np.asarray(lengths, np.int64)
    order = np.argsort(-widths, kind="stable").astype(np.int64)
    for batch in batches.cut(order, widths, widths, tokens):
        yield batch.tolist()


@torch.inference_mode()
def token_logprobs(model: StepModel[Any, Any], batch: Batch, pad: int) -> list[list[float]]:
    """Return log p of each label, </s> last, for each row; their sum is the log-probability of the target."""
    logits, _ = model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    log_probs = logits.float().log_softmax(-1)  # (batch, target, vocab)
    chosen: Tensor = log_probs.gather(-1, batch.labels[:, :, None]).squeeze(-1)
    real = (batch.labels != pad).sum(1).tolist()
    return [row[:count] for row, count in zip(chosen.tolist(), real, strict=True)]


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
    """Return log p of each token of each target, </s> last; `progress` gets how many more are done.

    A batch is small because the logits of all its tokens exist at once: 300 MB with a vocabulary of 37,000.
    """
    results: list[list[float]] = [[] for _ in sources]
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for indices in by_length(lengths, tokens):
        source, target = ([np.asarray(side[i], np.int64) for i in indices] for side in (sources, targets))
        batch = collate(source, target, tokenizers).to(device)
        for i, logprobs in zip(indices, token_logprobs(model, batch, tokenizers.tgt.pad), strict=True):
            results[i] = logprobs
        progress(len(indices))
    return results
