"""Lines in, lines out: many sentences through the search, in batches by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from qkv.core.batches import cut, pad
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, Ids, SearchOptions, StartSearch, search, start_search
from qkv.core.tokenizer import TokenizerPair, one_line
from qkv.core.transformer import StepModel


class TranslatedLine(NamedTuple):
    """The n best translations of a line, best first; a line without text has none."""

    texts: list[str]
    hypotheses: list[Hypothesis]
    source_tokens: int


def translate_lines(
    lines: Sequence[str],
    tokenizers: TokenizerPair,
    search: Callable[[list[list[int]], list[int]], list[list[Hypothesis]]],
    *,
    max_length: int,
    tag: Ids = (),
) -> list[TranslatedLine]:
    """Translate lines; `search` gets the ids of the lines with text and their numbers, and returns n-best hypotheses.

    Lines without text stay empty. A line of more than `max_length` tokens is refused; `tag` is put before each source.
    """
    translated = [TranslatedLine([], [], 0) for _ in lines]
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    sources = [[*tag, *tokenizers.src.encode(lines[number].strip())] for number in numbers]
    for number, source in zip(numbers, sources, strict=True):
        if len(source) > len(tag) + max_length:
            longest = f"{len(source) - len(tag)} tokens, at most {max_length}"
            raise UsageError(f"line {number + 1}: {longest}: split the line")
    for number, source, found in zip(numbers, sources, search(sources, numbers), strict=True):
        texts = [one_line(tokenizers.tgt.decode(hypothesis.tokens)).strip() for hypothesis in found]
        translated[number] = TranslatedLine(texts, found, len(source))
    return translated


# ---- many sentences --------------------------------------------------------------------------------------------------


def search_all(
    model: StepModel,
    sources: Sequence[Ids],
    options: SearchOptions,
    tokenizers: TokenizerPair,
    *,
    device: torch.device,
    prefixes: Sequence[Ids] | None = None,
    numbers: Sequence[int] | None = None,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
    start: StartSearch = start_search,
) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each source, in the order of the sources, searched in batches by length.

    Outputs begin with the tokens of `prefixes`; `numbers`, the places of the sentences in the whole input, seed
    samples; `progress` gets the sentences that are finished.
    """
    results: list[list[Hypothesis]] = [[] for _ in sources]
    src = tokenizers.src
    for batch in batches_by_length(sources, options, device):
        rows, begun = ([np.asarray(side[i] if side else (), np.int64) for i in batch] for side in (sources, prefixes))
        found = search(
            model,
            pad(rows, src.pad, last=src.eos).to(device),
            torch.tensor([len(row) + 1 for row in rows], device=device),
            options,
            tokenizers.tgt,
            prefix=pad(begun, -1).to(device),
            numbers=[numbers[i] if numbers else i for i in batch],
            start=start,
        )
        for i, hypotheses in zip(batch, found, strict=True):
            results[i] = hypotheses
        progress(batch)
    return results


def batches_by_length(sources: Sequence[Ids], options: SearchOptions, device: torch.device) -> list[list[int]]:
    """Return positions of sources grouped by length, longest first: too large a batch fails at the start."""
    # Padded source tokens times beams: enough to keep the device busy.
    budget = options.batch_tokens or (4096 if device.type == "cpu" else 131_072)
    return by_length([len(ids) + 1 for ids in sources], budget // options.rows)


def by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return positions of rows grouped into batches of at most `tokens` padded tokens, longest first."""
    widths = np.asarray(lengths, np.int64)
    order = np.argsort(-widths, kind="stable").astype(np.int64)
    return [batch.tolist() for batch in cut(order, widths, widths, tokens)]
