"""Search steps in C, and decoding by several processes.

`NativeGreedySearch` and `NativeBeamSearch` run the plain steps of `qkv.core.search` in C, on the same search state.
With a `NativeTransformer`, decoder and search steps alternate in C until all sentences are done or the KV cache needs
another page. C skips finished sentences, so they stay in the batch.

`ProcessDecoding` decodes in several processes with one thread each: two processes are faster than one with two threads.
Each process loads the run and packs its weights. Batches are queued with the longest sentences first, and results are
returned in the order of the sentences.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.core.search import BeamSearch, GreedySearch, Hypothesis, Ids, Search, SearchOptions, start_search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import StepModel
from qkv.core.translate import batches_by_length, search_all
from qkv.decoding.constraints import Avoid
from qkv.engines import SEARCH_STEP
from qkv.engines.cpu.native_library import INTEGER, POINTER, library
from qkv.engines.cpu.native_transformer import NativeState, NativeTransformer
from qkv.options import AllowList
from qkv.worker_pool import ProcessWorkers, cpu_count

MAX_ROWS = 64  # rows of a sentence; above this, sorting is faster than insertion

SEARCH = AllowList("search", SearchOptions, **SEARCH_STEP)


class SearchStep(ctypes.Structure):
    """`SearchStep` of native.h: search state and options."""

    _fields_ = [
        ("logits", POINTER),
        *((name, INTEGER) for name in "vocabulary sentences rows n capacity".split()),
        *((name, POINTER) for name in "penalties tokens newest length logprob longest forced done".split()),
        *((name, POINTER) for name in "finished_tokens finished_scores".split()),
        *((name, INTEGER) for name in "pad bos eos shortest".split()),
        ("parents", POINTER),
    ]


def refused(search: Search, logits: Tensor | None = None) -> str | None:
    """Return None if C supports the steps of a search, with these logits if they exist, else the reason why not."""
    if isinstance(missing := library(), str):
        return missing
    if search.processors or search.on_step:
        return "processors and on_step need all log-probabilities"
    rows = search.rows
    if rows > MAX_ROWS or (rows > 1 and isinstance(search, GreedySearch)):
        return f"{rows} rows: greedy search has 1, a beam at most {MAX_ROWS}"
    if search.state.done.device.type != "cpu":
        return "not on a CPU"
    if logits is not None and not (logits.is_cpu and logits.dtype == torch.float and logits.is_contiguous()):
        return "the logits are not contiguous in fp32"
    return None


class NativeGreedySearch(GreedySearch):
    """Greedy search with plain steps in C; other steps run in PyTorch."""

    def advance(self) -> None:
        if not _advance(self):
            super().advance()

    def extend(self, logits: Tensor) -> None:
        if refused(self, logits):
            return super().extend(logits)
        return _call("qkv_extend_greedy", _search_step(self, logits, None))


class NativeBeamSearch(BeamSearch):
    """Beam search with plain steps in C; other steps run in PyTorch."""

    def advance(self) -> None:
        if not _advance(self):
            super().advance()

    def extend(self, logits: Tensor) -> Tensor:
        if refused(self, logits):
            return super().extend(logits)
        parents = self.state.length.new_empty(len(logits))
        _call("qkv_extend_beams", _search_step(self, logits, parents))
        return parents


def start_native(model: StepModel, options: SearchOptions, tgt: Tokenizer, **sizes: Any) -> Search:
    """Return a search for these options, with plain steps in C (`qkv.core.search.start_search`)."""
    reason = SEARCH.refusal(options)
    plain_step = NativeGreedySearch if options.rows == 1 else NativeBeamSearch
    search = (start_search if reason else plain_step)(model, options, tgt, **sizes)
    if isinstance(model, NativeTransformer) and (reason or refused(search)):
        masked: Any = UnfinishedRows(model, search)
        search.model = masked
    return search


@dataclass
class UnfinishedRows:
    """Native model that computes only unfinished rows; the logits of the others are zeros."""

    model: NativeTransformer
    search: Search

    def step(self, tokens: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        state.alive = (self.search.state.logprob.flatten() != -math.inf).numpy()
        return self.model.step(tokens, state)


def _advance(search: Search) -> bool:
    """Run as many steps as fit into the KV cache, at least one, in C; return False if C does not support them."""
    model, decoder, state = search.model, search.decoder, search.state
    if not isinstance(model, NativeTransformer) or not isinstance(decoder, NativeState):
        return False
    if model.output is not None or refused(search):
        return False
    rows = state.newest.numel()
    model.prepare(decoder, rows, 1)
    steps = 1 + int(min(decoder.spare, max(0, model.target.limit - decoder.position - 1)))
    decoder.spare -= steps - 1  # before the call: after an interrupt the written positions count as used
    logits = torch.empty(rows, model.vocabulary)
    parents = state.length.new_empty(rows) if search.rows > 1 else None
    arguments = model.step_arguments(decoder, state.newest, 1, steps)
    arguments.logits = logits.data_ptr()
    step = _search_step(search, logits, parents)
    steps_done = model.library.qkv_advance(
        ctypes.byref(model.native),
        ctypes.byref(arguments),
        ctypes.byref(step),
        ctypes.c_int64(steps),
        ctypes.c_int64(len(state.done)),
    )
    _check(-steps_done)
    decoder.spare += steps - steps_done
    return True


def _search_step(search: Search, logits: Tensor, parents: Tensor | None) -> SearchStep:
    state, tgt = search.state, search.tgt
    sentences, rows, capacity = state.tokens.shape
    tensors = (
        *(search.penalties, state.tokens, state.newest, state.length, state.logprob, state.longest, state.forced),
        *(state.done, state.finished_tokens, state.finished_scores),
    )
    return SearchStep(
        *(logits.data_ptr(), logits.shape[1], sentences, rows, state.finished_scores.shape[1], capacity),
        *(tensor.data_ptr() for tensor in tensors),
        *(tgt.pad, tgt.bos, tgt.eos, search.options.min_length),
        None if parents is None else parents.data_ptr(),
    )


def _call(name: str, step: SearchStep) -> None:
    native = library()
    assert not isinstance(native, str)
    _check(getattr(native, name)(ctypes.byref(step)))


def _check(code: int) -> None:
    if code == 1:
        raise IndexError("a token or a length of the search state is out of range")
    if code == 2:
        raise MemoryError("out of memory in a search step")


# ---- several processes -----------------------------------------------------------------------------------------------

OpenedRun = tuple[StepModel, TokenizerPair]
CPU = torch.device("cpu")
MIN_TOKENS = 8192  # source tokens for each process; below this, its start takes longer than it saves


def worker_count(tokens: int) -> int:
    """Return how many processes to start for this many source tokens: one for each core, or fewer for little text."""
    return max(1, min(cpu_count(), tokens // MIN_TOKENS))


@dataclass(frozen=True)
class ProcessDecoding:
    """Decoding engine that searches in several processes."""

    workers: ProcessWorkers[OpenedRun]

    def supports(self, options: SearchOptions) -> str | None:
        if any(isinstance(processor, Avoid) for processor in options.processors):
            return "sending forbidden phrases to another process takes longer than the search"
        return None

    def search_all(
        self,
        sources: Sequence[Ids],
        options: SearchOptions,
        *,
        prefixes: Sequence[Ids] | None = None,
        numbers: Sequence[int] | None = None,
        progress: Callable[[Sequence[int]], None] = lambda finished: None,
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each source, in the order of the sources."""
        batches = batches_by_length(sources, options, CPU)
        tasks = []
        for batch in batches:
            batch_prefixes = [list(prefixes[i]) for i in batch] if prefixes else None
            batch_numbers = [numbers[i] if numbers else i for i in batch]
            tasks.append(([list(sources[i]) for i in batch], options, batch_prefixes, batch_numbers))
        results: list[list[Hypothesis]] = [[] for _ in sources]

        def on_result(number: int, batch_hypotheses: list[list[Hypothesis]]) -> None:
            for i, hypotheses in zip(batches[number], batch_hypotheses, strict=True):
                results[i] = hypotheses
            progress(batches[number])

        self.workers.map(_search, tasks, on_result)
        return results


def _search(
    run: OpenedRun,
    sources: list[list[int]],
    options: SearchOptions,
    prefixes: list[list[int]] | None,
    numbers: list[int],
) -> list[list[Hypothesis]]:
    model, tokenizers = run
    arguments: dict[str, Any] = {"prefixes": prefixes, "numbers": numbers, "start": start_native}
    return search_all(model, sources, options, tokenizers, device=CPU, **arguments)
