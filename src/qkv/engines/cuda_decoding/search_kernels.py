"""Search steps as Triton kernels: one kernel for each plain step of the search, after the scan of the logits.

`TritonGreedySearch` and `TritonBeamSearch` do the plain steps of `qkv.core.search` on the same search state. One
program works on a sentence, and holds all that it ranks. A program reads everything that it needs of the state before
it writes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.core.search import BeamSearch, GreedySearch, Search, SearchOptions, SearchState, SpecialTokens, log_sum_exp
from qkv.core.transformer import StepModel
from qkv.decoding.beam_variants import start_variant
from qkv.engines import SEARCH_STEP, AllowList
from qkv.engines.cuda_decoding.inference_kernels import CHUNK, scan_kernel, tl, triton

SEARCH = AllowList("search", SearchOptions, **SEARCH_STEP)
ROWS, CHUNKS = 16, 1024  # the most of a sentence that a program holds
PART = 64  # positions that are copied at once


def refused(search: Search, vocab: int) -> str | None:
    """Return the reason why no kernel does the steps of a search; None if one does."""
    if triton is None or not search.state.done.is_cuda:
        return "no Triton, or not on a GPU"
    if search.processors or search.on_step:
        return "processors and on_step need all log-probabilities"
    if isinstance(search, GreedySearch) and search.rows > 1:
        return "greedy search has one row"
    if search.rows > ROWS or -(-vocab // CHUNK) > CHUNKS:
        return f"at most {ROWS} rows and {CHUNKS * CHUNK} tokens"
    return None


class TritonGreedySearch(GreedySearch):
    """Greedy search with kernels for plain steps; other steps run in PyTorch."""

    def extend(self, logits: Tensor) -> None:
        if refused(self, logits.shape[1]):
            return super().extend(logits)
        total, largest = _scan_allowed(self, logits)
        return extend_greedy(self.state, logits, total, largest, self.penalties, self.special.eos)


class TritonBeamSearch(BeamSearch):
    """Beam search with kernels for plain steps; other steps run in PyTorch."""

    def extend(self, logits: Tensor) -> Tensor:
        if refused(self, logits.shape[1]):
            return super().extend(logits)
        total, largest = _scan_allowed(self, logits)
        return extend_beams(self.state, logits, total, largest, self.penalties, self.special.eos)


def start_triton(
    model: StepModel[Any, Any], options: SearchOptions, special: SpecialTokens, **arguments: Any
) -> Search:
    """Return a search for these options, with kernels for plain steps (`qkv.core.search.start_search`)."""
    steps: dict[str, Any] = {"greedy": TritonGreedySearch, "beam": TritonBeamSearch}
    return start_variant(model, options, special, **arguments, **({} if SEARCH.refusal(options) else steps))


def _scan_allowed(search: Search, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of each row (sentences, rows), and the largest allowed logit of each chunk of it."""
    early = None
    if least := search.options.min_length:
        early = (search.state.length < search.state.longest.clamp(max=least)).repeat_interleave(search.rows)
    total, largest = scan(logits, search.never, early, search.special.eos)
    return total.unflatten(0, (-1, search.rows)), largest.unflatten(0, (-1, search.rows))


def scan(logits: Tensor, never: Tensor, early: Tensor | None, eos: int) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of each row of logits (rows, vocab) and the maximum of each chunk, in one pass.

    The tokens `never` (two of them), and `eos` in the rows where it is too `early`, are part of the sum but become -inf
    in `logits`, and none of the largest.
    """
    chosen = scan_kernel if triton is not None and logits.is_cuda else scan_plain
    return chosen(logits, never, early, eos)


def scan_plain(logits: Tensor, never: Tensor, early: Tensor | None, eos: int) -> tuple[Tensor, Tensor]:
    largest = _largest(logits)
    total = log_sum_exp(logits)
    logits.index_fill_(1, never, -math.inf)
    if early is not None:
        logits[:, eos].masked_fill_(early, -math.inf)
    for chunk in {token // CHUNK for token in (*never.tolist(), eos)}:  # the largest there may be forbidden now
        largest[:, chunk] = logits[:, chunk * CHUNK : (chunk + 1) * CHUNK].amax(-1)
    return total, largest


def _largest(logits: Tensor) -> Tensor:
    """Of each chunk; the last may be shorter."""
    whole = logits.shape[1] // CHUNK
    found = [logits[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amax(-1)] if whole else []
    if logits.shape[1] % CHUNK:
        found.append(logits[:, whole * CHUNK :].amax(-1, keepdim=True))
    return torch.cat(found, dim=1).float()


def extend_beams(
    state: SearchState, logits: Tensor, total: Tensor, largest: Tensor, penalties: Tensor, eos: int
) -> Tensor:
    """Do the step of `BeamSearch` after the scan; return the row that each row continues: (sentences × rows,)."""
    (sentences, rows, chunks), n = largest.shape, state.finished_scores.shape[1]
    chosen = state.length.new_empty(sentences * rows)
    tall, across = triton.next_power_of_2(rows), triton.next_power_of_2(chunks)
    _extend_beams[(sentences,)](
        *(logits, total, largest, penalties, chosen),
        *(state.tokens, state.newest, state.length, state.logprob, state.longest, state.forced, state.done),
        *(state.finished_tokens, state.finished_scores),
        *(logits.stride(0), logits.shape[1], chunks, state.tokens.shape[2], eos),
        rows=rows,
        n=n,
        found=min(2 * rows, rows * chunks),
        wide=2 * tall,
        both=triton.next_power_of_2(n + rows),
        across=across,
        chunk=CHUNK,
        part=PART,
        num_warps=_warps(tall * across),
        num_stages=1,
    )
    return chosen


def extend_greedy(
    state: SearchState, logits: Tensor, total: Tensor, largest: Tensor, penalties: Tensor, eos: int
) -> None:
    """Do the step of `GreedySearch`, of one row a sentence, after the scan."""
    chunks = largest.shape[2]
    block = triton.next_power_of_2(chunks)
    _extend_greedy[(len(state.done),)](
        *(logits, total, largest, penalties),
        *(state.tokens, state.newest, state.length, state.logprob, state.longest, state.forced, state.done),
        *(state.finished_tokens, state.finished_scores),
        *(logits.stride(0), logits.shape[1], chunks, state.tokens.shape[2], eos),
        block=block,
        chunk=CHUNK,
        part=PART,
        num_warps=_warps(block),
        num_stages=1,
    )


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


if triton is not None:

    @triton.jit
    def _known(value):  # type: ignore[no-untyped-def]
        """Replace NaN by -inf: it ranks last."""
        return tl.where(value == value, value, float("-inf"))

    @triton.jit
    def _take(value, place, no_place):  # type: ignore[no-untyped-def]
        """Return the largest value and its lowest place; NaN marks values that do not exist or were taken before."""
        largest = tl.max(value, axis=0)
        return largest, tl.min(tl.where(value == largest, place, no_place), axis=0)

    @triton.jit
    def _may_follow(length, longest, forced, capacity, eos):  # type: ignore[no-untyped-def]
        """Of a sentence: its length, whether it may not grow, the one token that may follow and whether it must."""
        sentence = tl.program_id(0).to(tl.int64)
        at = tl.load(length + sentence)
        limit = at >= tl.load(longest + sentence)
        given = tl.load(forced + sentence * capacity + at)
        return at, limit, tl.where(given >= 0, given, eos).to(tl.int32), (given >= 0) | limit

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
        found: tl.constexpr,
        wide: tl.constexpr,
        across: tl.constexpr,
        chunk: tl.constexpr,
    ):
        """The best 2 × rows continuations of a sentence: log-probability of the whole, row it continues, token."""
        nothing = float("-inf")
        first = tl.program_id(0).to(tl.int64) * rows
        slot, row, column = tl.arange(0, wide), tl.arange(0, wide // 2), tl.arange(0, across)
        # The best chunks of all rows. By its shift a logit becomes the log-probability of the whole.
        is_row = row < rows
        shift = tl.load(logprob + first + row, mask=is_row, other=0.0)
        shift -= tl.load(total + first + row, mask=is_row, other=0.0)
        real = is_row[:, None] & (column < chunks)[None, :]
        value = tl.load(largest + (first + row)[:, None] * chunks + column[None, :], mask=real, other=0.0)
        value = _known(value + shift[:, None])
        value = tl.reshape(tl.where(real, tl.where(bound, nothing, value), float("nan")), (wide // 2 * across,))
        place = tl.arange(0, wide // 2 * across)
        within = tl.arange(0, wide * chunk)
        where = tl.zeros((wide * chunk,), tl.int32)  # the chosen chunk of each of their tokens …
        worth = tl.full((wide * chunk,), nothing, tl.float32)  # … with its best
        for i in range(found):
            best, which = _take(value, place, wide * across)
            value = tl.where(place == which, float("nan"), value)
            where = tl.where(within // chunk == i, which, where)
            worth = tl.where(within // chunk == i, best, worth)
        # The best of their tokens, or of the forced ones. Of equals the lower flat index row · vocab + token is taken;
        # candidates outside the vocabulary get indices behind all others.
        whole = first + where // across
        token = where % across * chunk + within % chunk
        real = (worth > nothing) & (token < vocab)
        value = tl.load(logits + whole * logits_row + token, mask=real, other=nothing).to(tl.float32)
        value = _known(value + (tl.load(logprob + whole) - tl.load(total + whole)))
        index = tl.where(real, where // across * vocab + token, rows * vocab + within)
        alone = tl.load(logits + (first + row) * logits_row + only, mask=is_row, other=nothing).to(tl.float32)
        alone = tl.where(bound, _known(alone + shift), nothing)
        alone_index = row * vocab + only
        no_index = rows * vocab + wide * chunk
        totals = tl.full((wide,), nothing, tl.float32)
        flat = tl.zeros((wide,), tl.int32)
        for i in range(2 * rows):
            best, which = _take(value, index, no_index)
            given, whose = _take(alone, alone_index, no_index)
            must = given > best
            which = tl.where(must, whose, which)
            value = tl.where(index == which, float("nan"), value)
            alone = tl.where(alone_index == which, nothing, alone)
            totals = tl.where(slot == i, tl.where(must, given, best), totals)
            flat = tl.where(slot == i, which, flat)
        parents = tl.minimum(flat // vocab, rows - 1)
        tokens = flat % vocab
        return totals, parents, tokens

    @triton.jit  # type: ignore[untyped-decorator]
    def _finish(  # type: ignore[no-untyped-def]
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
        both: tl.constexpr,
        part: tl.constexpr,
    ):
        """Put those among the first `rows` that end behind the n best that have ended, and keep the n best of both.

        Every candidate finds its rank, and is stored there. The least of the n best scores is returned.
        """
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        candidate = tl.arange(0, both)
        old, new = candidate < n, (candidate >= n) & (candidate < n + rows)
        same = (candidate - n)[:, None] == tl.arange(0, wide)[None, :]
        final = tl.max(tl.where(same & ends[None, :], totals[None, :], nothing), axis=1)
        parent = tl.sum(tl.where(same, parents[None, :], 0), axis=1)
        fact = scores + (sentence * n + candidate) * 4
        score = tl.where(old, tl.load(fact, mask=old, other=nothing), tl.div_rn(final, tl.load(penalties + at)))
        final = tl.where(old, tl.load(fact + 1, mask=old, other=nothing), final)
        count = tl.where(old, tl.load(fact + 2, mask=old, other=nothing), at.to(tl.float32))
        cut = tl.where(old, tl.load(fact + 3, mask=old, other=nothing), limit.to(tl.float32))
        better = score[None, :] > score[:, None]
        earlier = (score[None, :] == score[:, None]) & (candidate[None, :] < candidate[:, None])
        rank = tl.sum(((better | earlier) & (old | new)[None, :]).to(tl.int32), axis=1)
        stays = (old | new) & (rank < n)
        tl.debug_barrier()  # all facts have been read
        fact = scores + (sentence * n + rank) * 4
        tl.store(fact, score, mask=stays)
        tl.store(fact + 1, final, mask=stays)
        tl.store(fact + 2, count, mask=stays)
        tl.store(fact + 3, cut, mask=stays)
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
        chosen,
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
        found: tl.constexpr,
        wide: tl.constexpr,
        both: tl.constexpr,
        across: tl.constexpr,
        chunk: tl.constexpr,
        part: tl.constexpr,
    ):
        """One program a sentence."""
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        first = sentence * rows
        at, limit, only, bound = _may_follow(length, longest, forced, capacity, eos)
        totals, parents, token = _rank(
            logits, total, largest, logprob, logits_row, vocab, chunks, only, bound, rows, found, wide, across, chunk
        )
        slot = tl.arange(0, wide)
        ends = (token == eos) & (slot < 2 * rows)
        worst = _finish(
            totals, parents, ends, at, limit, penalties, tokens, finished, scores, capacity, rows, n, wide, both, part
        )
        # The first `rows` that do not end go on; others if they are few. Each is stored in its place.
        goes_on = (token != eos) & (slot < 2 * rows)
        earlier = slot[None, :] < slot[:, None]
        place = tl.sum((earlier & goes_on[None, :]).to(tl.int32), axis=1)
        behind = tl.sum(goes_on.to(tl.int32), axis=0) + tl.sum((earlier & ends[None, :]).to(tl.int32), axis=1)
        place = tl.where(goes_on, place, behind)
        lives = (slot < 2 * rows) & (place < rows)
        alive = tl.where(goes_on, totals, nothing)
        best = tl.max(tl.where(lives, alive, nothing), axis=0)
        attainable = tl.div_rn(best, tl.load(penalties + tl.load(longest + sentence)))
        # A total beyond the limit is NaN and would never end.
        over = (attainable <= worst) | limit | (tl.load(done + sentence) != 0)
        end = tl.minimum(at + 1, capacity - 1)
        source, target = tokens + (first + parents) * capacity, tokens + (first + place) * capacity
        for start in range(0, end, part):
            position = start + tl.arange(0, part)
            inside = lives[:, None] & (position < end)[None, :]
            written = tl.load(source[:, None] + position[None, :], mask=inside, other=0)
            tl.debug_barrier()
            tl.store(target[:, None] + position[None, :], written, mask=inside)
        tl.debug_barrier()  # all has been read
        tl.store(target + end, token.to(tl.int64), mask=lives)
        tl.store(newest + first + place, token.to(tl.int64), mask=lives)
        tl.store(chosen + first + place, first + parents, mask=lives)
        tl.store(logprob + first + place, tl.where(over, nothing, alive), mask=lives)
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
        """One program a sentence of one row."""
        nothing = float("-inf")
        sentence = tl.program_id(0).to(tl.int64)
        at, limit, only, bound = _may_follow(length, longest, forced, capacity, eos)
        place = tl.arange(0, block)
        # NaN counts as the largest, as in `argmax`.
        value = tl.load(largest + sentence * chunks + place, mask=place < chunks, other=nothing)
        value = tl.where(value == value, value, float("inf"))
        _, best = _take(tl.where(place < chunks, value, float("nan")), place, block)
        place = best * chunk + tl.arange(0, chunk)
        value = tl.load(logits + sentence * logits_row + place, mask=place < vocab, other=nothing).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        _, best = _take(tl.where(place < vocab, value, float("nan")), place, vocab)
        token = tl.where(bound, only, best)
        gained = tl.load(logits + sentence * logits_row + token).to(tl.float32) - tl.load(total + sentence)
        until = tl.load(logprob + sentence)
        now = until + gained
        ends = (token == eos) & (until > nothing)
        end = tl.minimum(at + 1, capacity - 1)
        score = tl.div_rn(now, tl.load(penalties + at))
        tl.debug_barrier()  # all numbers have been read
        if ends:
            fact = scores + sentence * 4
            tl.store(fact, score)
            tl.store(fact + 1, now)
            tl.store(fact + 2, at.to(tl.float32))
            tl.store(fact + 3, limit.to(tl.float32))
            for start in range(0, capacity, part):
                position = start + tl.arange(0, part)
                inside = position < capacity
                written = tl.load(tokens + sentence * capacity + position, mask=inside, other=0)
                tl.store(finished + sentence * capacity + position, written, mask=inside)
            tl.debug_barrier()
        now = tl.where(ends | limit, nothing, now)  # a NaN beyond the limit would never end
        tl.store(tokens + sentence * capacity + end, token.to(tl.int64))
        tl.store(newest + sentence, token.to(tl.int64))
        tl.store(logprob + sentence, now)
        tl.store(length + sentence, end)
        tl.store(done + sentence, now == nothing)
