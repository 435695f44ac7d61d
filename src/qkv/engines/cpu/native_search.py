"""Search steps in C, and decoding by several processes.

`NativeGreedySearch` and `NativeBeamSearch` do the plain steps of `qkv.core.search` in C, on the same search state. If
the model is native too, its steps and those of the search alternate in C until all sentences are done or memory is
needed. C skips sentences that are done, so they stay in the batch.

In decoding by processes each has a model on one thread: two of them are faster than one with two threads. Each opens
the run itself: it maps the weights and packs them. Batches wait in one queue, the longest sentences first; a free
process takes the next one, and results are returned in the order of the sentences.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.core.search import BeamSearch, GreedySearch, Hypothesis, Ids, Search, SearchOptions, SpecialTokens
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import StepModel
from qkv.core.translate import batches_by_length, search_all
from qkv.decoding.beam_variants import start_variant
from qkv.decoding.constraints import Avoid
from qkv.engines import SEARCH_STEP, AllowList
from qkv.engines.cpu.native_library import INTEGER, POINTER, library
from qkv.engines.cpu.native_transformer import NativeState, NativeTransformer
from qkv.worker_pool import ProcessWorkers, cpu_count

ROWS = 64  # of a sentence: with more, sorting is faster than inserting one by one


SEARCH = AllowList("search", SearchOptions, **SEARCH_STEP)


class Step(ctypes.Structure):
    """`Search` of search.c."""

    _fields_ = [
        ("logits", POINTER),
        *((name, INTEGER) for name in "vocabulary sentences rows n capacity".split()),
        *((name, POINTER) for name in "penalties tokens newest length logprob longest forced done".split()),
        *((name, POINTER) for name in "finished_tokens finished_scores".split()),
        *((name, INTEGER) for name in "pad bos eos shortest".split()),
        ("chosen", POINTER),
    ]


def refused(search: Search) -> str | None:
    """Return the reason why C does not do the steps of a search; None if it does."""
    if isinstance(missing := library(), str):
        return missing
    if search.processors or search.on_step:
        return "processors and on_step need all log-probabilities"
    rows = search.rows
    if rows > ROWS or (rows > 1 and isinstance(search, GreedySearch)):
        return f"{rows} rows: greedy search has 1, a beam at most {ROWS}"
    return None if search.state.done.device.type == "cpu" else "not on a CPU"


class NativeGreedySearch(GreedySearch):
    """Greedy search with plain steps in C; other steps run in PyTorch."""

    def advance(self) -> None:
        if not _advance(self):
            super().advance()

    def extend(self, logits: Tensor) -> None:
        if refused(self) or not _fits(logits):
            return super().extend(logits)
        return _call("qkv_extend_greedy", _step(self, logits, None))


class NativeBeamSearch(BeamSearch):
    """Beam search with plain steps in C; other steps run in PyTorch."""

    def advance(self) -> None:
        if not _advance(self):
            super().advance()

    def extend(self, logits: Tensor) -> Tensor:
        if refused(self) or not _fits(logits):
            return super().extend(logits)
        chosen = self.state.length.new_empty(len(logits))
        _call("qkv_extend_beams", _step(self, logits, chosen))
        return chosen


def start_native(
    model: StepModel[Any, Any], options: SearchOptions, special: SpecialTokens, **arguments: Any
) -> Search:
    """Return a search for these options, with plain steps in C (`qkv.core.search.start_search`)."""
    steps: dict[str, Any] = {"greedy": NativeGreedySearch, "beam": NativeBeamSearch}
    reason = SEARCH.refusal(options)
    search = start_variant(model, options, special, **arguments, **({} if reason else steps))
    if isinstance(model, NativeTransformer) and (reason or refused(search)):
        living: Any = LivingRows(model, search)
        search.model = living
    return search


@dataclass
class LivingRows:
    """A native model that skips rows without a hypothesis; their logits are zeros."""

    model: NativeTransformer
    search: Search

    def step(self, tokens: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        state.alive = (self.search.state.logprob.flatten() != -math.inf).numpy()
        return self.model.step(tokens, state)


def _advance(search: Search) -> bool:
    """Write one more token, or as many as the decoder has room for, until all sentences are done; False: C cannot."""
    model, decoder, state = search.model, search.decoder, search.state
    if not isinstance(model, NativeTransformer) or model.output is not None or refused(search):
        return False
    if not isinstance(decoder, NativeState):
        return False
    rows = state.newest.numel()
    model.prepare(decoder, rows, 1)
    steps = 1 + int(min(decoder.spare, max(0, model.target.limit - decoder.position - 1)))
    decoder.spare -= steps - 1  # before the call: if it is interrupted, the positions it wrote are counted
    logits = torch.empty(rows, model.vocabulary)
    chosen = state.length.new_empty(rows) if search.rows > 1 else None
    call = model.call(decoder, state.newest, 1, steps)
    call.logits = logits.data_ptr()
    step = _step(search, logits, chosen)
    made = model.library.qkv_advance(
        ctypes.byref(model.native),
        ctypes.byref(call),
        ctypes.byref(step),
        ctypes.c_int64(steps),
        ctypes.c_int64(len(state.done)),
    )
    _check(-made)
    decoder.spare += steps - made
    return True


def _fits(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float and logits.is_contiguous()


def _step(search: Search, logits: Tensor, chosen: Tensor | None) -> Step:
    state, special = search.state, search.special
    sentences, rows, capacity = state.tokens.shape
    parts = (
        *(search.penalties, state.tokens, state.newest, state.length, state.logprob, state.longest, state.forced),
        *(state.done, state.finished_tokens, state.finished_scores),
    )
    return Step(
        *(logits.data_ptr(), logits.shape[1], sentences, rows, state.finished_scores.shape[1], capacity),
        *(part.data_ptr() for part in parts),
        *(special.pad, special.bos, special.eos, search.options.min_length),
        None if chosen is None else chosen.data_ptr(),
    )


def _call(name: str, step: Step) -> None:
    found = library()
    assert not isinstance(found, str)
    _check(getattr(found, name)(ctypes.byref(step)))


def _check(failed: int) -> None:
    if failed == 1:
        raise IndexError("a token or a length that the search state or the vocabulary does not have")
    if failed == 2:
        raise MemoryError("no memory for a step of the search")


# ---- several processes -----------------------------------------------------------------------------------------------

OpenedRun = tuple[StepModel[Any, Any], TokenizerPair]
CPU = torch.device("cpu")
WORTHWHILE = 8192  # source tokens for each process; with fewer, starting it takes longer than it saves


def worker_count(tokens: int | None = None, threads: int | None = None) -> int:
    """Return how many processes to start: one for each core, or fewer for little text.

    `tokens` is how much there is to translate, if that is known; `threads` limits the number of cores.
    """
    most = threads or cpu_count()
    return max(1, most if tokens is None else min(most, tokens // WORTHWHILE))


@dataclass(frozen=True)
class ProcessDecoding:
    """Decoding engine that searches in several processes."""

    workers: ProcessWorkers[OpenedRun]

    def supports(self, options: SearchOptions) -> str | None:
        if any(isinstance(processor, Avoid) for processor in options.processors):
            return "forbidden phrases take longer to send to another process than to search for"
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
        planned = list(batches_by_length(sources, options, CPU))
        tasks = []
        for batch in planned:
            own = [list(prefixes[i]) for i in batch] if prefixes else None
            number = [numbers[i] if numbers else i for i in batch]
            tasks.append(([list(sources[i]) for i in batch], options, own, number))
        results: list[list[Hypothesis]] = [[] for _ in sources]

        def on_result(number: int, found: list[list[Hypothesis]]) -> None:
            for i, hypotheses in zip(planned[number], found, strict=True):
                results[i] = hypotheses
            progress(planned[number])

        self.workers.map(_search, tasks, on_result)
        return results


def _search(
    opened: OpenedRun,
    sources: list[list[int]],
    options: SearchOptions,
    prefixes: list[list[int]] | None,
    numbers: list[int],
) -> list[list[Hypothesis]]:
    model, tokenizers = opened
    some: dict[str, Any] = {"prefixes": prefixes, "numbers": numbers, "start": start_native}
    return search_all(model, sources, options, tokenizers, device=CPU, **some)
