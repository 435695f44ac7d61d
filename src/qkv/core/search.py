"""Greedy and beam search (section 6.1).

A hypothesis is a sequence of tokens that ends in </s>. Its log-probability is the sum over its tokens, </s> included;
its score is that sum divided by the length penalty. At the longest length allowed only </s> may follow, so every
hypothesis ends.

The order of equals is the same on every path. Continuations: higher total first, then lower row, then lower token id;
NaN last. Rows are numbered by rank, so this order is total. Finished hypotheses: higher score first, then the one that
finished earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qkv.core.config import DecodeConfig
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import StepModel

CHUNK = 32  # neighbours in a chunk of `top_k`; torch sorts up to 128 numbers ten times faster than 500
LEAVING = 0.25  # finished share of a batch at which it shrinks: shrinking copies the decoder state

Ids = Sequence[int]


@dataclass(frozen=True)
class Hypothesis:
    """One translation in ids, without </s>; its score is the log-probability under the length penalty."""

    tokens: list[int]
    logprob: float
    score: float
    truncated: bool  # it reached the longest length allowed, and </s> was the only continuation left


class LogitsProcessor(Protocol):
    """Changes log-probabilities (sentences, rows, vocab) of the next token in place, before the choice."""

    @property
    def changes_score(self) -> bool: ...  # True: forbids by -inf; False: changes the choice, not what the choice counts

    def __call__(self, log_probs: Tensor, state: SearchState) -> None: ...


@dataclass(frozen=True)
class SearchOptions(DecodeConfig):
    """How to search: the options of the config, and those of one call. Lengths do not count </s>."""

    n_best: int = 1
    min_length: int = 0
    max_length: int | None = None  # None: length of the source + extra_length
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def rows(self) -> int:
        """Hypotheses kept for each sentence: the beam, or more if more are asked for."""
        return max(self.beam, self.n_best)

    def longest(self, source: Any) -> Any:
        """Return the longest output for a source of so many tokens, by default `extra_length` more (section 6.1)."""
        return source + self.extra_length if self.max_length is None else 0 * source + self.max_length

    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """Return all processors in order; options of a ring add their own."""
        return self.processors

    def search_class(self) -> Callable[..., Search]:
        """Return the class of the search: greedy for one hypothesis, a beam for several; rings have others."""
        return GreedySearch if self.rows == 1 else BeamSearch


def length_penalty(length: Tensor | float, decode: DecodeConfig) -> Any:
    """Return the divisor of a log-probability; length counts </s>. `gnmt` is the paper's ((5 + length) / 6)^alpha."""
    if decode.length_penalty == "gnmt":
        return ((5 + length) / 6) ** decode.alpha
    return length if decode.length_penalty == "average" else 1.0


class SearchState:
    """Hypotheses that grow, `rows` for each sentence, and the n best that have finished.

    Tensors of fixed size: kernels and C work on them in place, and a step over them can be captured as a CUDA graph.
    Sentences that are done stay until `Search.keep` removes them. A row without a hypothesis has log-probability -inf.
    """

    def __init__(self, sentences: int, rows: int, n_best: int, capacity: int, device: torch.device) -> None:
        """Create a state of this size; all its sentences are done."""
        ids: dict[str, Any] = {"dtype": torch.long, "device": device}
        self.tokens = torch.zeros(sentences, rows, capacity, **ids)  # <s>, then the tokens written so far
        self.newest = torch.zeros(sentences, rows, **ids)  # the last of them
        self.length = torch.zeros(sentences, **ids)  # tokens written after <s>
        self.logprob = torch.full((sentences, rows), -math.inf, device=device)
        self.longest = torch.zeros(sentences, **ids)  # the most tokens that may be written, </s> not counted
        self.forced = torch.full((sentences, capacity), -1, **ids)  # token that must be written at each length, or -1
        self.done = torch.ones(sentences, dtype=torch.bool, device=device)
        self.finished_tokens = torch.zeros(sentences, n_best, capacity, **ids)  # <s> first
        # Score, log-probability, length, truncated; score -inf: none.
        self.finished_scores = torch.full((sentences, n_best, 4), -math.inf, device=device)

    @property
    def at_limit(self) -> Tensor:
        """Where only </s> may follow: (sentences,)."""
        return self.length >= self.longest

    def go_on(self, rows: Tensor | None, tokens: Tensor, logprob: Tensor, done: Tensor) -> None:
        """Continue `rows` (None: each its own) with one token each: all (sentences, rows), but `done` (sentences,)."""
        if rows is not None:
            self.tokens.copy_(self.tokens.take_along_dim(rows[:, :, None], 1))
        self.length.add_(1).clamp_(max=self.tokens.shape[2] - 1)
        self.tokens.scatter_(2, self.length[:, None, None].expand(-1, self.tokens.shape[1], 1), tokens[:, :, None])
        self.newest.copy_(tokens)
        self.logprob.copy_(logprob.masked_fill(done[:, None], -math.inf))
        self.done.copy_(done)


class Search:
    """Sentences that each grow by one token per step; subclasses choose the token in `extend`."""

    # Choose from logits (sentences × rows, vocab); return the row that each row continues, None if itself.
    extend: Callable[[Tensor], Tensor | None]

    def __init__(
        self,
        model: StepModel,
        options: SearchOptions,
        tgt: Tokenizer,
        *,
        lengths: Tensor,
        capacity: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Prepare slots for as many sentences as `lengths` (of their sources), each for `capacity` tokens.

        `numbers` are the places of the sentences in the whole input.
        """
        self.model, self.options, self.tgt = model, options, tgt
        device, self.rows = lengths.device, options.rows
        self.state = SearchState(len(lengths), self.rows, options.n_best, capacity, device)
        self.decoder: Any = None  # the model's state
        self.numbers = list(range(len(lengths)) if numbers is None else numbers)  # of the sentence in each slot
        # Hook: scores (sentences, rows, vocab); flat places and totals of the ranked, -inf: none; which of them go on.
        self.on_step: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
        self.processors = options.logits_processors()
        self.first = torch.full((self.rows,), -math.inf, device=device)  # log-probabilities before the first step:
        self.first[0] = 0.0  # all rows begin alike, so only the first counts
        self.never = torch.tensor([tgt.pad, tgt.bos], device=device)
        written = torch.arange(1.0, capacity + 2, device=device)
        self.penalties: Tensor = torch.ones_like(written) * length_penalty(written, options)
        self.eager = device.type == "cpu"  # reading a value from the device costs nothing: skip what no sentence needs

    def place(self, slots: Tensor, longest: Tensor, forced: Tensor) -> None:
        """Start sentences in these slots; `forced` (sentences, lengths) are the tokens they begin with, then -1."""
        state, bos = self.state, self.tgt.bos
        # index_fill and index_copy: an assignment would copy numbers from the host, which a CUDA graph cannot.
        state.tokens.index_fill_(0, slots, 0)
        state.tokens[:, :, 0].index_fill_(0, slots, bos)
        state.newest.index_fill_(0, slots, bos)
        state.length.index_fill_(0, slots, 0)
        state.logprob.index_copy_(0, slots, self.first.expand(len(slots), -1))
        state.longest.index_copy_(0, slots, longest.maximum((forced >= 0).sum(1)))
        state.forced.index_fill_(0, slots, -1)
        state.forced[:, : forced.shape[1]].index_copy_(0, slots, forced)
        state.done.index_fill_(0, slots, False)
        state.finished_scores.index_fill_(0, slots, -math.inf)

    def advance(self) -> None:
        """Write one more token to every row."""
        logits, self.decoder = self.model.step(self.state.newest.view(-1, 1), self.decoder)
        if (rows := self.extend(logits[:, -1])) is not None:
            self.decoder = self.decoder.select(rows)

    def allowed(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values (sentences, rows, vocab), -inf where forbidden, their shift (sentences, rows), and preferences.

        value + shift is the log-probability of a token. Without processors the values are the logits: equal logits of a
        row stay equal. The preferences are the values to choose by: the same tensor, unless a processor changes them.
        """
        state, eos = self.state, self.tgt.eos
        logits = logits.unflatten(0, (-1, self.rows))
        values = logits.log_softmax(-1, dtype=torch.float) if self.processors else logits.float()
        shift = torch.zeros_like(state.logprob) if self.processors else -log_sum_exp(values)
        values.index_fill_(2, self.never, -math.inf)
        if self.options.min_length:
            early = state.length < state.longest.clamp(max=self.options.min_length)
            values[:, :, eos].masked_fill_(early[:, None], -math.inf)
        forced = state.forced.gather(1, state.length[:, None])[:, :, None]  # (sentences, 1, 1)
        is_forced = forced >= 0
        only = torch.where(is_forced, forced, eos).expand(-1, self.rows, 1)
        given = values.gather(2, only)
        for processor in self.processors:
            if processor.changes_score:
                processor(values, state)
        bound = is_forced | state.at_limit[:, None, None]
        if not self.eager or bool(bound.any()):  # then only one token may follow; processors cannot forbid a forced one
            value = torch.where(is_forced, given, values.gather(2, only))
            values.masked_fill_(bound, -math.inf).scatter_(2, only, value)  # where nothing is bound, </s> stays itself
        preferences = [processor for processor in self.processors if not processor.changes_score]
        preferred = values.clone() if preferences else values
        for processor in preferences:
            processor(preferred, state)
        return values, shift, preferred

    def keep(self, slots: list[int]) -> None:
        """Keep only the sentences in these slots."""
        chosen = torch.tensor(slots, device=self.state.done.device)
        for name, part in vars(self.state).items():
            setattr(self.state, name, part[chosen])
        rows = chosen[:, None] * self.rows + torch.arange(self.rows, device=chosen.device)
        self.decoder = self.decoder.select(rows.flatten())
        self.numbers = [self.numbers[slot] for slot in slots]

    def finished(self, slots: list[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses of slots that are done, best first."""
        found: list[list[Hypothesis]] = []
        tokens, scores = (part[slots].tolist() for part in (self.state.finished_tokens, self.state.finished_scores))
        for sentence in zip(tokens, scores, strict=True):
            entries = [each for each in zip(*sentence, strict=True) if each[1][0] > -math.inf]
            entries.sort(key=lambda each: -each[1][0])
            found.append([Hypothesis(ids[1 : 1 + int(n)], logp, s, bool(cut)) for ids, (s, logp, n, cut) in entries])
        if not all(hypotheses and math.isfinite(hypotheses[0].logprob) for hypotheses in found):
            raise QkvError(
                "the model's probabilities are not numbers, or the rules left no way to go on: use the weights of "
                "another step, or fewer rules"
            )
        return found


class GreedySearch(Search):
    """Take the most probable token at each step until </s>; of equals the lower id."""

    def extend(self, logits: Tensor) -> None:
        state = self.state
        values, shift, preferred = self.allowed(logits)
        tokens = self.choose(preferred)  # (sentences, rows)
        totals = state.logprob + (values.gather(2, tokens[:, :, None]).squeeze(2) + shift)
        ends = (tokens == self.tgt.eos) & (state.logprob > -math.inf)
        if not self.eager or bool(ends.any()):
            length, cut = (part[:, None].expand_as(totals) for part in (state.length, state.at_limit))
            entries = torch.stack([totals / self.penalties[length], totals, length, cut], dim=-1)
            state.finished_scores.copy_(torch.where(ends[:, :, None], entries, state.finished_scores))
            state.finished_tokens.copy_(torch.where(ends[:, :, None], state.tokens, state.finished_tokens))
        if self.on_step:
            self.on_step(values + (state.logprob + shift)[:, :, None], tokens, totals, torch.zeros_like(tokens))
        totals = totals.masked_fill(ends | state.at_limit[:, None], -math.inf)  # beyond the limit no row would end
        state.go_on(None, tokens, totals, (totals == -math.inf).all(1))

    def choose(self, values: Tensor) -> Tensor:
        """Return one token for each row: (sentences, rows)."""
        return values.argmax(-1)


class BeamSearch(Search):
    """Keep the best `rows` hypotheses of each sentence; it is done when none can still enter its n best."""

    def extend(self, logits: Tensor) -> Tensor:
        state, beam, vocab = self.state, self.rows, logits.shape[1]
        values, shift, preferred = self.allowed(logits)
        before = (state.logprob + shift)[:, :, None]
        scores = values.add_(before)  # (sentences, beam, vocab): log-probabilities of whole hypotheses
        best, flat = self.rank(scores if preferred is values else preferred.add_(before))
        totals = scores.flatten(1).gather(1, flat).masked_fill_(best == -math.inf, -math.inf)
        parents, tokens = flat // vocab, flat % vocab
        ends = tokens == self.tgt.eos
        kept = self.going_on(ends)
        # A hypothesis is finished if its </s> is among the first `beam`. Twice as many are ranked: `beam` do not end.
        final = totals[:, :beam].masked_fill(~ends[:, :beam], -math.inf)
        if not self.eager or bool((final > -math.inf).any()):  # keep the n best of the finished and these
            rows = parents[:, :beam]
            length, cut = (part[:, None].expand_as(final) for part in (state.length, state.at_limit))
            new = torch.stack([self.finish_score(final, rows), final, length, cut], dim=-1)
            entries = torch.cat([state.finished_scores, new], dim=1)
            written = torch.cat([state.finished_tokens, state.tokens.take_along_dim(rows[:, :, None], 1)], dim=1)
            order = top_k(entries[:, :, 0], self.options.n_best)[1][:, :, None]
            state.finished_scores.copy_(entries.take_along_dim(order, 1))
            state.finished_tokens.copy_(written.take_along_dim(order, 1))
        if self.on_step:
            self.on_step(scores, flat, totals, kept)
        totals = totals.masked_fill(ends, -math.inf).gather(1, kept)
        parents, tokens = parents.gather(1, kept), tokens.gather(1, kept)
        # Log-probabilities only fall: no hypothesis will score more than its own at the longest length.
        bound = totals.amax(1) / self.penalties[state.longest]
        state.go_on(parents, tokens, totals, state.done | (bound <= state.finished_scores[:, -1, 0]) | state.at_limit)
        first = torch.arange(0, parents.numel(), beam, device=parents.device)
        return (first[:, None] + parents).flatten()

    def rank(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best 2 × beam of scores (sentences, beam, vocab), best first, and their flat indices."""
        return top_k(scores.flatten(1), 2 * self.rows)

    def going_on(self, ends: Tensor) -> Tensor:
        """Return the indices of the first `beam` candidates that do not end, in their order: (sentences, beam)."""
        return ends.byte().argsort(dim=1, stable=True)[:, : self.rows]

    def finish_score(self, totals: Tensor, parents: Tensor) -> Tensor:
        """Return the scores of hypotheses that end now; they continue the rows `parents` (sentences, beam)."""
        return totals / self.penalties[self.state.length][:, None]


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row (rows, n), largest first, and their indices; NaN becomes -inf in `values`.

    Of equals the lower index is first; `torch.topk` promises no order. Sorting everything is slow, so chunks are ranked
    by their maximum first: a chunk that holds one of the k best is itself among the k best chunks, in the same order.
    """
    values.nan_to_num_(-math.inf, math.inf, -math.inf)
    (rows, n), whole = values.shape, values.shape[1] // CHUNK
    if whole <= k or n <= 4 * CHUNK:
        best, order = values.sort(dim=1, descending=True, stable=True)
        return best[:, :k], order[:, :k]
    _, chunks = top_k(values[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amax(2), k)
    inside = torch.arange(CHUNK, device=values.device)
    places = (chunks.sort(dim=1)[0][:, :, None] * CHUNK + inside).flatten(1)  # in the order of the indices
    rest = torch.arange(whole * CHUNK, n, device=values.device).expand(rows, -1)
    places = torch.cat([places, rest], dim=1)
    best, order = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    return best[:, :k], places.gather(1, order[:, :k])


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log Σ exp of each row: best logit minus its log p, in two thirds of the time of `logsumexp`."""
    return logits.amax(-1).float() - logits.log_softmax(-1, dtype=torch.float).amax(-1)


StartSearch = Callable[..., Search]  # arguments as of `Search`; returns a search of which no sentence has started


def start_search(model: StepModel, options: SearchOptions, tgt: Tokenizer, **sizes: Any) -> Search:
    """Return the search that the options select; `sizes` are the keyword arguments of `Search`."""
    return options.search_class()(model, options, tgt, **sizes)


@torch.inference_mode()
def search(
    model: StepModel,
    source: Tensor,
    lengths: Tensor,
    options: SearchOptions,
    tgt: Tokenizer,
    *,
    prefix: Tensor | None = None,
    numbers: Sequence[int] | None = None,
    start: StartSearch = start_search,
) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each source (batch, source) of so many tokens, </s> included, best first.

    Each hypothesis begins with its sentence's `prefix` (batch, tokens; -1 behind shorter ones), which counts in length
    and score. `numbers` are the places of the sentences in the whole input.
    """
    prefix = source.new_empty(len(source), 0) if prefix is None else prefix
    check_prefix(prefix.flatten().tolist(), tgt)
    longest = options.longest(lengths - 1)
    capacity = max(int(longest.max()), prefix.shape[1]) + 2
    run = start(model, options, tgt, lengths=lengths, capacity=capacity, numbers=numbers)
    run.place(torch.arange(len(source), device=source.device), longest, prefix)
    run.decoder = model.start(model.encode(source, lengths), run.rows)
    found: list[list[Hypothesis]] = [[] for _ in source]
    held = list(range(len(source)))  # the sentence in each slot
    while held:
        run.advance()
        done: list[bool] = run.state.done.tolist()
        if sum(done) > LEAVING * len(done):
            leaving = [slot for slot, over in enumerate(done) if over]
            for slot, hypotheses in zip(leaving, run.finished(leaving), strict=True):
                found[held[slot]] = hypotheses
            staying = [slot for slot, over in enumerate(done) if not over]
            held = [held[slot] for slot in staying]
            if held:
                run.keep(staying)
    return found


def check_prefix(tokens: Iterable[int], tgt: Tokenizer) -> None:
    """Refuse a prefix with tokens that write no text."""
    if not {tgt.pad, tgt.bos, tgt.eos}.isdisjoint(tokens):
        raise UsageError("a prefix cannot hold <s>, </s> or <pad>: give only tokens that write something")
