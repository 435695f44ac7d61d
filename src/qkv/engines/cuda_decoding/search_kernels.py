"""Search steps as Triton kernels: after the scan of the logits, one kernel for a greedy or beam step.

`TritonGreedySearch` and `TritonBeamSearch` run the plain steps of `qkv.core.search` on the same search state. One
program ranks the candidates of one sentence. It loads all values that it needs from the state before it stores any.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.core.search import BeamSearch, GreedySearch, Search, SearchOptions, log_sum_exp, start_search
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import StepModel
from qkv.engines import SEARCH_STEP
from qkv.engines.cuda_decoding.inference_kernels import CHUNK, scan_kernel, tl, triton
from qkv.options import AllowList

SEARCH = AllowList("search", SearchOptions, **SEARCH_STEP)
MAX_ROWS, MAX_CHUNKS = 16, 1024  # of a sentence, limited by the registers of a program
PART = 64  # positions copied at a time


def refused(search: Search, vocab: int) -> str | None:
    """Return None if the kernels support the steps of a search, else the reason why not."""
    if triton is None or not search.state.done.is_cuda:
        return "no Triton, or not on a GPU"
    if search.processors or search.on_step:
        return "processors and on_step need all log-probabilities"
    if isinstance(search, GreedySearch) and search.rows > 1:
        return "greedy search has one row"
    if search.rows > MAX_ROWS or -(-vocab // CHUNK) > MAX_CHUNKS:
        return f"at most {MAX_ROWS} rows and {MAX_CHUNKS * CHUNK} tokens"
    return None


class TritonGreedySearch(GreedySearch):
    """Greedy search with kernels for plain steps; other steps run in PyTorch."""

    def extend(self, logits: Tensor) -> None:
        if refused(self, logits.shape[1]):
            return super().extend(logits)
        largest, arguments = _scan_allowed(self, logits)
        block = triton.next_power_of_2(largest.shape[2])
        _extend_greedy[(len(largest),)](
            *arguments, block=block, chunk=CHUNK, part=PART, num_warps=_warps(block), num_stages=1
        )
        return None


class TritonBeamSearch(BeamSearch):
    """Beam search with kernels for plain steps; other steps run in PyTorch."""

    def extend(self, logits: Tensor) -> Tensor:
        if refused(self, logits.shape[1]):
            return super().extend(logits)
        parents = self.state.length.new_empty(len(logits))
        largest, arguments = _scan_allowed(self, logits, parents)
        (sentences, rows, chunks), n = largest.shape, self.state.finished_scores.shape[1]
        tall, across = triton.next_power_of_2(rows), triton.next_power_of_2(chunks)
        _extend_beams[(sentences,)](
            *arguments,
            rows=rows,
            n=n,
            top_k=min(2 * rows, rows * chunks),
            wide=2 * tall,
            merged=triton.next_power_of_2(n + rows),
            across=across,
            chunk=CHUNK,
            part=PART,
            num_warps=_warps(tall * across),
            num_stages=1,
        )
        return parents


def start_triton(model: StepModel, options: SearchOptions, tgt: Tokenizer, **sizes: Any) -> Search:
    """Return a search for these options, with kernels for plain steps (`qkv.core.search.start_search`)."""
    plain_step = TritonGreedySearch if options.rows == 1 else TritonBeamSearch
    return (start_search if SEARCH.refusal(options) else plain_step)(model, options, tgt, **sizes)


def _scan_allowed(search: Search, logits: Tensor, *parents: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Scan the logits; return the maxima of the chunks (sentences, rows, chunks), and the arguments of the step."""
    state, early = search.state, None
    if least := search.options.min_length:
        early = (state.length < state.longest.clamp(max=least)).repeat_interleave(search.rows)
    total, largest = scan(logits, search.never, early, search.tgt.eos)
    largest = largest.unflatten(0, (-1, search.rows))
    return largest, (
        *(logits, total, largest, search.penalties, *parents),
        *(state.tokens, state.newest, state.length, state.logprob, state.longest, state.forced, state.done),
        *(state.finished_tokens, state.finished_scores),
        *(logits.stride(0), logits.shape[1], largest.shape[2], state.tokens.shape[2], search.tgt.eos),
    )


def scan(logits: Tensor, never: Tensor, early: Tensor | None, eos: int) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of each row of logits (rows, vocab) and the maximum of each chunk, in one pass.

    The two tokens `never`, and `eos` in rows below the minimum length (`early`), are part of the sum; their logits
    become -inf, and the maxima exclude them.
    """
    if triton is not None and logits.is_cuda:
        return scan_kernel(logits, never, early, eos)
    largest = _chunk_maxima(logits)
    total = log_sum_exp(logits)
    logits.index_fill_(1, never, -math.inf)
    if early is not None:
        logits[:, eos].masked_fill_(early, -math.inf)
    for chunk in {token // CHUNK for token in (*never.tolist(), eos)}:  # the maximum may be forbidden now
        largest[:, chunk] = logits[:, chunk * CHUNK : (chunk + 1) * CHUNK].amax(-1)
    return total, largest


def _chunk_maxima(logits: Tensor) -> Tensor:
    """Return the maximum of each chunk of each row; the last chunk may be shorter."""
    full_chunks = logits.shape[1] // CHUNK
    maxima = [logits[:, : full_chunks * CHUNK].unflatten(1, (full_chunks, CHUNK)).amax(-1)] if full_chunks else []
    if logits.shape[1] % CHUNK:
        maxima.append(logits[:, full_chunks * CHUNK :].amax(-1, keepdim=True))
    return torch.cat(maxima, dim=1).float()


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


if triton is not None:

    @triton.jit
    def _nan_to_minus_inf(value):  # type: ignore[no-untyped-def]
        """Replace NaN by -inf, so that it ranks last."""
        return tl.where(value == value, value, float("-inf"))

    @triton.jit
    def _max_and_place(value, place, no_place):  # type: ignore[no-untyped-def]
        """Return the largest value and its lowest place; NaN marks missing values and values taken before."""
        largest = tl.max(value, axis=0)
        return largest, tl.min(tl.where(value == largest, place, no_place), axis=0)

    @triton.jit
    def _forced_token(length, longest, forced, capacity, eos):  # type: ignore[no-untyped-def]
        """Return the length of a sentence, whether it is at its limit, the forced token, and whether it is forced."""
        sentence = tl.program_id(0).to(tl.int64)
        at = tl.load(length + sentence)
        limit = at >= tl.load(longest + sentence)
        prefix = tl.load(forced + sentence * capacity + at)
        return at, limit, tl.where(prefix >= 0, prefix, eos).to(tl.int32), (prefix >= 0) | limit

    @triton.jit  # type: ignore[untyped-decorator]
    def _rank(  # type: ignore[no-untyped-def]
        logits,
        total,
        largest,
        logprob,
        logits_row,
        vocab,
        chunks,
        only,
        bound,
        rows: tl.constexpr,
        top_k: tl.constexpr,
        wide: tl.constexpr,
        across: tl.constexpr,
        chunk: tl.constexpr,
    ):
        """Return the best 2 × rows continuations of a sentence: log-probability, parent row and token of each."""
        nothing = float("-inf")
        first = tl.program_id(0).to(tl.int64) * rows
        slot, row, column = tl.arange(0, wide), tl.arange(0, wide // 2), tl.arange(0, across)
        # The chunks of all rows with the largest maxima. logit + shift is the log-probability of the hypothesis.
        is_row = row < rows
        shift = tl.load(logprob + first + row, mask=is_row, other=0.0)
        shift -= tl.load(total + first + row, mask=is_row, other=0.0)
        real = is_row[:, None] & (column < chunks)[None, :]
        value = tl.load(largest + (first + row)[:, None] * chunks + column[None, :], mask=real, other=0.0)
        value = _nan_to_minus_inf(value + shift[:, None])
        value = tl.reshape(tl.where(real, tl.where(bound, nothing, value), float("nan")), (wide // 2 * across,))
        place = tl.arange(0, wide // 2 * across)
        within = tl.arange(0, wide * chunk)
        chunk_index = tl.zeros((wide * chunk,), tl.int32)  # chunk of each candidate token …
        chunk_maximum = tl.full((wide * chunk,), nothing, tl.float32)  # … and its maximum
        for i in range(top_k):
            best, index_of_best = _max_and_place(value, place, wide * across)
            value = tl.where(place == index_of_best, float("nan"), value)
            chunk_index = tl.where(within // chunk == i, index_of_best, chunk_index)
            chunk_maximum = tl.where(within // chunk == i, best, chunk_maximum)
        # The best tokens of these chunks, or the forced ones. Ties go to the lower flat index row · vocab + token;
        # candidates outside the vocabulary get larger indices than all others.
        flat_row = first + chunk_index // across
        token = chunk_index % across * chunk + within % chunk
        real = (chunk_maximum > nothing) & (token < vocab)
        value = tl.load(logits + flat_row * logits_row + token, mask=real, other=nothing).to(tl.float32)
        value = _nan_to_minus_inf(value + (tl.load(logprob + flat_row) - tl.load(total + flat_row)))
        index = tl.where(real, chunk_index // across * vocab + token, rows * vocab + within)
        alone = tl.load(logits + (first + row) * logits_row + only, mask=is_row, other=nothing).to(tl.float32)
        alone = tl.where(bound, _nan_to_minus_inf(alone + shift), nothing)
        alone_index = row * vocab + only
        no_index = rows * vocab + wide * chunk
        totals = tl.full((wide,), nothing, tl.float32)
        flat = tl.zeros((wide,), tl.int32)
        for i in range(2 * rows):
            best, index_of_best = _max_and_place(value, index, no_index)
            forced_best, forced_index = _max_and_place(alone, alone_index, no_index)
            is_forced = forced_best > best
            index_of_best = tl.where(is_forced, forced_index, index_of_best)
            value = tl.where(index == index_of_best, float("nan"), value)
            alone = tl.where(alone_index == index_of_best, nothing, alone)
            totals = tl.where(slot == i, tl.where(is_forced, forced_best, best), totals)
            flat = tl.where(slot == i, index_of_best, flat)
        parents = tl.minimum(flat // vocab, rows - 1)
        tokens = flat % vocab
        return totals, parents, tokens

    @triton.jit  # type: ignore[untyped-decorator]
    def _merge_finished(  # type: ignore[no-untyped-def]
        totals,
        parents,
        ends,
        at,
        limit,
        penalties,
        tokens,
        finished,
        scores,
        capacity,
        rows: tl.constexpr,
        n: tl.constexpr,
        wide: tl.constexpr,
        merged: tl.constexpr,
        part: tl.constexpr,
    ):
        """Merge the candidates among the first `rows` that end with </s> into the n best finished hypotheses.

        Each candidate computes its rank and is stored at that index; ties keep the earlier hypothesis first. Return
        the lowest of the n best scores.
        """
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        candidate = tl.arange(0, merged)
        old, new = candidate < n, (candidate >= n) & (candidate < n + rows)
        same = (candidate - n)[:, None] == tl.arange(0, wide)[None, :]
        final = tl.max(tl.where(same & ends[None, :], totals[None, :], nothing), axis=1)
        parent = tl.sum(tl.where(same, parents[None, :], 0), axis=1)
        address = scores + (sentence * n + candidate) * 4
        score = tl.where(old, tl.load(address, mask=old, other=nothing), tl.div_rn(final, tl.load(penalties + at)))
        final = tl.where(old, tl.load(address + 1, mask=old, other=nothing), final)
        count = tl.where(old, tl.load(address + 2, mask=old, other=nothing), at.to(tl.float32))
        cut = tl.where(old, tl.load(address + 3, mask=old, other=nothing), limit.to(tl.float32))
        better = score[None, :] > score[:, None]
        earlier = (score[None, :] == score[:, None]) & (candidate[None, :] < candidate[:, None])
        rank = tl.sum(((better | earlier) & (old | new)[None, :]).to(tl.int32), axis=1)
        stays = (old | new) & (rank < n)
        tl.debug_barrier()  # all scores are loaded
        address = scores + (sentence * n + rank) * 4
        tl.store(address, score, mask=stays)
        tl.store(address + 1, final, mask=stays)
        tl.store(address + 2, count, mask=stays)
        tl.store(address + 3, cut, mask=stays)
        if tl.max((stays & (rank != candidate)).to(tl.int32), axis=0) > 0:
            for start in range(0, capacity, part):
                position = start + tl.arange(0, part)
                inside = stays[:, None] & (position < capacity)[None, :]
                place = (sentence * n + candidate)[:, None] * capacity + position[None, :]
                kept = tl.load(finished + place, mask=inside & old[:, None], other=0)
                place = (sentence * rows + parent)[:, None] * capacity + position[None, :]
                written = tl.load(tokens + place, mask=inside & new[:, None], other=0)
                tl.debug_barrier()
                place = (sentence * n + rank)[:, None] * capacity + position[None, :]
                tl.store(finished + place, tl.where(old[:, None], kept, written), mask=inside)
        return tl.max(tl.where(stays & (rank == n - 1), score, nothing), axis=0)

    @triton.jit(do_not_specialize=["logits_row", "vocab", "chunks"])  # type: ignore[untyped-decorator]
    def _extend_beams(  # type: ignore[no-untyped-def]
        logits,
        total,
        largest,
        penalties,
        parent_rows,
        tokens,
        newest,
        length,
        logprob,
        longest,
        forced,
        done,
        finished,
        scores,
        logits_row,
        vocab,
        chunks,
        capacity,
        eos,
        rows: tl.constexpr,
        n: tl.constexpr,
        top_k: tl.constexpr,
        wide: tl.constexpr,
        merged: tl.constexpr,
        across: tl.constexpr,
        chunk: tl.constexpr,
        part: tl.constexpr,
    ):
        """Beam step; one program per sentence."""
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        first = sentence * rows
        at, limit, only, bound = _forced_token(length, longest, forced, capacity, eos)
        totals, parents, token = _rank(
            logits, total, largest, logprob, logits_row, vocab, chunks, only, bound, rows, top_k, wide, across, chunk
        )
        slot = tl.arange(0, wide)
        ends = (token == eos) & (slot < 2 * rows)
        worst = _merge_finished(
            totals, parents, ends, at, limit, penalties, tokens, finished, scores, capacity, rows, n, wide, merged, part
        )
        # The first `rows` candidates without </s> continue; if they are fewer, finished ones fill the remaining rows.
        continues = (token != eos) & (slot < 2 * rows)
        earlier = slot[None, :] < slot[:, None]
        place = tl.sum((earlier & continues[None, :]).to(tl.int32), axis=1)
        later_place = tl.sum(continues.to(tl.int32), axis=0) + tl.sum((earlier & ends[None, :]).to(tl.int32), axis=1)
        place = tl.where(continues, place, later_place)
        stored = (slot < 2 * rows) & (place < rows)
        alive = tl.where(continues, totals, nothing)
        best = tl.max(tl.where(stored, alive, nothing), axis=0)
        attainable = tl.div_rn(best, tl.load(penalties + tl.load(longest + sentence)))
        # A NaN total would never end the sentence without the limit.
        over = (attainable <= worst) | limit | (tl.load(done + sentence) != 0)
        end = tl.minimum(at + 1, capacity - 1)
        source, target = tokens + (first + parents) * capacity, tokens + (first + place) * capacity
        for start in range(0, end, part):
            position = start + tl.arange(0, part)
            inside = stored[:, None] & (position < end)[None, :]
            written = tl.load(source[:, None] + position[None, :], mask=inside, other=0)
            tl.debug_barrier()
            tl.store(target[:, None] + position[None, :], written, mask=inside)
        tl.debug_barrier()  # all values are loaded
        tl.store(target + end, token.to(tl.int64), mask=stored)
        tl.store(newest + first + place, token.to(tl.int64), mask=stored)
        tl.store(parent_rows + first + place, first + parents, mask=stored)
        tl.store(logprob + first + place, tl.where(over, nothing, alive), mask=stored)
        tl.store(length + sentence, end)
        tl.store(done + sentence, over)

    @triton.jit(do_not_specialize=["logits_row", "vocab", "chunks"])  # type: ignore[untyped-decorator]
    def _extend_greedy(  # type: ignore[no-untyped-def]
        logits,
        total,
        largest,
        penalties,
        tokens,
        newest,
        length,
        logprob,
        longest,
        forced,
        done,
        finished,
        scores,
        logits_row,
        vocab,
        chunks,
        capacity,
        eos,
        block: tl.constexpr,
        chunk: tl.constexpr,
        part: tl.constexpr,
    ):
        """Greedy step; one program per sentence."""
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        at, limit, only, bound = _forced_token(length, longest, forced, capacity, eos)
        place = tl.arange(0, block)
        # NaN counts as the largest, as in `argmax`.
        value = tl.load(largest + sentence * chunks + place, mask=place < chunks, other=nothing)
        value = tl.where(value == value, value, float("inf"))
        _, best = _max_and_place(tl.where(place < chunks, value, float("nan")), place, block)
        place = best * chunk + tl.arange(0, chunk)
        value = tl.load(logits + sentence * logits_row + place, mask=place < vocab, other=nothing).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        _, best = _max_and_place(tl.where(place < vocab, value, float("nan")), place, vocab)
        token = tl.where(bound, only, best)
        gained = tl.load(logits + sentence * logits_row + token).to(tl.float32) - tl.load(total + sentence)
        previous = tl.load(logprob + sentence)
        logprob_now = previous + gained
        ends = (token == eos) & (previous > nothing)
        end = tl.minimum(at + 1, capacity - 1)
        score = tl.div_rn(logprob_now, tl.load(penalties + at))
        tl.debug_barrier()  # all values are loaded
        if ends:
            address = scores + sentence * 4
            tl.store(address, score)
            tl.store(address + 1, logprob_now)
            tl.store(address + 2, at.to(tl.float32))
            tl.store(address + 3, limit.to(tl.float32))
            for start in range(0, capacity, part):
                position = start + tl.arange(0, part)
                inside = position < capacity
                written = tl.load(tokens + sentence * capacity + position, mask=inside, other=0)
                tl.store(finished + sentence * capacity + position, written, mask=inside)
            tl.debug_barrier()
        logprob_now = tl.where(ends | limit, nothing, logprob_now)  # NaN at the length limit would never end
        tl.store(tokens + sentence * capacity + end, token.to(tl.int64))
        tl.store(newest + sentence, token.to(tl.int64))
        tl.store(logprob + sentence, logprob_now)
        tl.store(length + sentence, end)
        tl.store(done + sentence, logprob_now == nothing)
