"""Decoding on several processes, each with a model on one thread: two of them beat one process with two threads.

Each process opens the run by itself: it maps the weights and packs them. Batches wait in one queue, the longest
sentences first; a free process takes the next one, and results come back in the order of the sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qkv.assembly import Run
from qkv.core.tokenizer import TokenizerPair
from qkv.decode.batched import batch_tokens, by_length, search_all
from qkv.decode.board import Hypothesis
from qkv.engines.cpu import pack
from qkv.models.state import StepModel
from qkv.options import DecodeConfig
from qkv.worker_pool import ProcessWorkers, cpu_count

Opened = tuple[StepModel[Any, Any], TokenizerPair]
CPU = torch.device("cpu")
WORTHWHILE = 8192  # source tokens for each process, below which it takes longer to start than it helps


def open_run(path: str, weights: str = "", dtype: str = "auto") -> Opened:
    """What a worker makes: the run's model, packed, and its tokenizers."""
    run = Run.open(path)
    model: Any = pack(run.model(CPU, weights), dtype)
    return model, run.tokenizers


def worker_count(tokens: int | None = None, threads: int | None = None) -> int:
    """How many processes to start: one for each core we may use, or one alone where there is too little to do.

    `tokens` is how much there is to translate, None if nobody knows; `threads` what the user allows.
    """
    most = threads or cpu_count()
    return max(1, most if tokens is None else min(most, tokens // WORTHWHILE))


# ---- searching -------------------------------------------------------------------------------------------------------


def search_in(
    workers: ProcessWorkers[Opened],
    sources: Sequence[Sequence[int]],
    spec: DecodeConfig,
    *,
    n_best: int = 1,
    progress: Callable[[Sequence[int]], None] = lambda finished: None,
    each: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """`search_all` by several processes: the n best hypotheses of each source, in the order of the sources.

    `options` go to `search_all` as they are; `each` holds those that have one value for each source.
    """
    each = {"numbers": range(len(sources)), **(each or {})}
    budget = batch_tokens(spec, CPU) // max(spec.beam, n_best)
    planned = [batch.tolist() for batch in by_length([len(ids) + 1 for ids in sources], budget)]
    tasks = []
    for batch in planned:
        own = {name: [values[i] for i in batch] for name, values in each.items()}
        tasks.append(([list(sources[i]) for i in batch], spec, {"n_best": n_best, **options, **own}))
    results: list[list[Hypothesis]] = [[] for _ in sources]

    def heard(number: int, found: list[list[Hypothesis]]) -> None:
        for i, hypotheses in zip(planned[number], found, strict=True):
            results[i] = hypotheses
        progress(planned[number])

    workers.map(_search, tasks, heard)
    return results


def _search(
    opened: Opened, sources: list[list[int]], spec: DecodeConfig, options: dict[str, Any]
) -> list[list[Hypothesis]]:
    model, tokenizers = opened
    return search_all(model, sources, spec, tokenizers, device=CPU, **options)
