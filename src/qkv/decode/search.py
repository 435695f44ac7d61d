"""Greedy and beam search over encode / start / step / select; they know nothing else of a model.

A hypothesis is a sequence of tokens that ends in </s>. Its log-probability is the sum over its tokens, </s> included;
its score is that sum under the length penalty. At the longest length allowed only </s> may follow, so every hypothesis
ends, and forced decoding of its tokens gives the same log-probability again.

Inside a `trace()` block the search also tells what it ranks at each step; outside of one nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qkv import config
from qkv.errors import QkvError, UsageError
from qkv.models.state import StepModel

Step = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Hypothesis:
    """One translation in ids, without </s>."""

    tokens: list[int]
    logprob: float
    score: float
    truncated: bool  # it reached the longest length allowed, and </s> was the only continuation left


def length_penalty(length: Tensor | float, spec: config.Decode) -> Any:
    """What a log-probability is divided by; length counts </s>. `gnmt` is the paper's ((5 + length) / 6)^α."""
    if spec.length_penalty == "gnmt":
        return ((5 + length) / 6) ** spec.alpha
    return length if spec.length_penalty == "average" else 1.0


# ---- tracing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """One step of the search for one sentence: the continuations that it ranked, best first, and what became of them.

    What is in neither `ended` nor `kept` was pruned.
    """

    parents: list[int]  # which of the living hypotheses each continues: its place in the step before's `kept`
    tokens: list[int]
    logprobs: list[float]  # of the whole hypothesis
    ended: list[int]  # places of those that finished
    kept: list[int]  # places of those that live on, best first
    nearest: list[float]  # of each living hypothesis, by place: its best continuation, ranked or not
    to_beat: float  # the least of the n best scores found so far; -inf while there are fewer


@dataclass
class Traced:
    """The search for one sentence."""

    prefix: list[int]
    prefix_logprobs: list[float]
    longest: int
    steps: list[Ranking] = field(default_factory=list)


@dataclass
class Trace:
    """The sentences searched inside a `trace()` block, in the order in which the search was given them."""

    sentences: list[Traced] = field(default_factory=list)
    first: int = 0  # the first sentence of the search that is going on

    def begin(self, begun: Tensor, gained: Tensor, longest: Tensor) -> None:
        self.first = len(self.sentences)
        for tokens, logprobs, limit in zip(begun.tolist(), gained.tolist(), longest.tolist(), strict=True):
            self.sentences.append(Traced(tokens[1:], logprobs, limit))

    def greedy(self, s: int, log_probs: Tensor, token: int, logprob: float, ended: list[Hypothesis]) -> None:
        """The token that was chosen, with the log-probability after it, and the runner-up; what has ended by it."""
        gained = float(log_probs[token])
        second, other = log_probs.index_fill(0, torch.tensor([token], device=log_probs.device), -math.inf).max(0)
        ranked = [(token, logprob), (int(other), logprob - gained + float(second))]
        tokens, logprobs = zip(*(pair for pair in ranked if pair[1] != -math.inf), strict=True)
        kept, score = ([], ended[0].score) if ended else ([0], -math.inf)
        step = Ranking([0] * len(tokens), [*tokens], [*logprobs], [0] if ended else [], kept, [logprob], score)
        self.sentences[self.first + s].steps.append(step)

    def beam(self, sentence: Tensor, ranked: tuple[Tensor, ...], chosen: Tensor, total: Tensor, scores: Tensor) -> None:
        """`ranked`: parents, tokens, log-probabilities and whether each ends, (sentences, 2 × beam).

        `chosen` (sentences, beam) are the places of those that go on; `total` (sentences, beam × vocab) is everything.
        """
        beam = chosen.shape[1]
        nearest = total.unflatten(1, (beam, -1)).max(-1).values  # (sentences, beam)
        rows = zip(*(part.tolist() for part in (sentence, *ranked, chosen, nearest, scores[:, -1])), strict=True)
        for s, parents, tokens, logprobs, ends, places, best, to_beat in rows:
            real = sum(logprob > -math.inf for logprob in logprobs)
            step = Ranking(
                parents[:real],
                tokens[:real],
                logprobs[:real],
                ended=[i for i in range(min(beam, real)) if ends[i]],
                kept=[i for i in places if i < real and not ends[i]],
                nearest=best,
                to_beat=to_beat,
            )
            self.sentences[self.first + s].steps.append(step)


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Collect what every search inside the block ranks, keeps, finishes and prunes, step by step."""
    traced = Trace()
    token = _trace.set(traced)
    try:
        yield traced
    finally:
        _trace.reset(token)


# ---- searching -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def search(
    model: StepModel[Any, Any],
    source: Tensor,
    lengths: Tensor,
    spec: config.Decode,
    *,
    bos: int,
    eos: int,
    pad: int,
    n_best: int = 1,
    longest: Tensor | None = None,
    prefix: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, best first: source ids (batch, source), rows of `lengths` tokens.

    More than `spec.beam` of them need a beam as wide. `longest` limits each output, </s> not counted; by default to the
    source's length, its </s> not counted, plus `spec.extra_length`, as in the paper. Every hypothesis begins with its
    sentence's `prefix` (batch, tokens), which counts in its log-probability and length like tokens that were found.
    """
    begun = torch.full((len(source), 1), bos, device=source.device)
    if prefix is not None:
        if bool(torch.isin(prefix, torch.tensor([bos, eos, pad], device=prefix.device)).any()):
            raise UsageError("a prefix cannot hold <s>, </s> or <pad>: give only tokens that write something")
        begun = torch.cat([begun, prefix], dim=1)
    if longest is None:
        longest = lengths - 1 + spec.extra_length
    forbidden = torch.tensor([pad, bos], device=source.device)

    def step(tokens: Tensor, state: Any, at_limit: Tensor | None) -> tuple[Tensor, Any]:
        """Log-probabilities of the next token (rows, vocab): never <pad> or <s>, and only </s> at the limit."""
        logits, state = model.step(tokens, state)
        log_probs = logits[:, -1].float().log_softmax(-1)
        log_probs.index_fill_(1, forbidden, -math.inf)
        if at_limit is not None:
            last = log_probs[:, eos].clone()
            log_probs[at_limit] = -math.inf
            log_probs[:, eos] = last
        return log_probs, state

    beam = max(spec.beam, n_best)
    gained, state = _feed(model, model.start(model.encode(source, lengths), beam), begun, beam)
    if (traced := _trace.get()) is not None:
        traced.begin(begun, gained, longest)
    if beam == 1:
        found = _greedy(step, state, begun, gained.sum(1), longest, spec, eos)
    else:
        found = _beam(step, state, begun, gained.sum(1), longest, spec, eos, beam, n_best)
    if not all(hypotheses and math.isfinite(hypotheses[0].logprob) for hypotheses in found):
        raise QkvError("the model's probabilities are not numbers: its weights are damaged; use those of another step")
    return found


def _feed(model: StepModel[Any, Any], state: Any, begun: Tensor, beam: int) -> tuple[Tensor, Any]:
    """Feed what a sentence begins with but for its last token; the log-probability of each token after <s>."""
    if begun.shape[1] == 1:
        return begun.new_zeros(len(begun), 0, dtype=torch.float), state
    logits, state = model.step(begun[:, :-1].repeat_interleave(beam, dim=0), state)
    log_probs = logits[::beam].float().log_softmax(-1)  # (sentences, prefix, vocab): beams are alike
    return log_probs.gather(-1, begun[:, 1:, None]).squeeze(-1), state


def _greedy(
    step: Step, state: Any, begun: Tensor, begun_logprob: Tensor, longest: Tensor, spec: config.Decode, eos: int
) -> list[list[Hypothesis]]:
    """The likeliest token at each step, sentence by sentence until </s>."""
    traced = _trace.get()
    limits: list[int] = longest.tolist()
    written: list[list[int]] = begun[:, 1:].tolist()
    logprob: list[float] = begun_logprob.tolist()
    found: list[list[Hypothesis]] = [[] for _ in limits]
    sentences = list(range(len(limits)))  # which one each row is
    tokens = begun[:, -1:]
    for length in count(begun.shape[1] - 1):
        at_limit = [length >= limits[s] for s in sentences]
        mask = torch.tensor(at_limit, device=longest.device) if any(at_limit) else None
        log_probs, state = step(tokens, state, mask)
        best, token = log_probs.max(-1)
        gains = zip(sentences, token.tolist(), best.tolist(), at_limit, strict=True)
        for row, (s, t, gained, truncated) in enumerate(gains):
            if found[s]:
                continue  # it has ended, but not left
            logprob[s] += gained
            if t == eos:
                score = logprob[s] / length_penalty(length + 1, spec)
                found[s] = [Hypothesis(written[s], logprob[s], score, truncated)]
            else:
                written[s].append(t)
            if traced is not None:
                traced.greedy(s, log_probs[row], t, logprob[s], found[s])
        tokens = token[:, None]
        alive = [row for row, s in enumerate(sentences) if not found[s]]
        if not alive:
            break
        if len(alive) <= 0.75 * len(sentences):  # leaving costs a copy of the cache, so sentences leave in groups
            rows = torch.tensor(alive, device=longest.device)
            state, tokens, sentences = state.select(rows), tokens[rows], [sentences[row] for row in alive]
    return found


def _beam(
    step: Step,
    state: Any,
    begun: Tensor,
    begun_logprob: Tensor,
    longest: Tensor,
    spec: config.Decode,
    eos: int,
    beam: int,
    n_best: int,
) -> list[list[Hypothesis]]:
    """Beam search for all sentences at once; a sentence leaves when no hypothesis can still enter its n best.

    Each step ranks all continuations of a sentence's `beam` hypotheses. Those among the first `beam` that end are
    finished; the first `beam` that do not end go on. Log-probabilities only fall, so the best score still attainable by
    a living hypothesis is its log-probability under the penalty of the longest length allowed.
    """
    device, shortest_limit, traced = longest.device, int(longest.min()), _trace.get()
    found: list[list[Hypothesis]] = [[] for _ in longest]
    sentence = torch.arange(len(longest), device=device)  # which one each group of `beam` rows is
    tokens = begun[:, None].expand(-1, beam, -1)  # (sentences, beam, what was written)
    alive = torch.full((len(longest), beam), -math.inf, device=device)  # log-probability of each living hypothesis
    alive[:, 0] = begun_logprob  # all beams begin alike: count one
    scores = torch.full((len(longest), n_best), -math.inf, device=device)  # the n best finished, best first
    for length in count(begun.shape[1] - 1):
        at_limit = length >= longest
        mask = at_limit.repeat_interleave(beam) if length >= shortest_limit else None
        log_probs, state = step(tokens[:, :, -1].reshape(-1, 1), state, mask)
        total = log_probs.add_(alive.reshape(-1, 1)).reshape(len(alive), -1)  # (sentences, beam × vocab)
        # At most `beam` continuations end, so twice as many hold `beam` that do not.
        ranked, which = total.topk(2 * beam, dim=-1)
        parent, token = which // log_probs.shape[1], which % log_probs.shape[1]
        ends = token == eos

        final = ranked[:, :beam].masked_fill(~ends[:, :beam], -math.inf)
        penalty = float(length_penalty(length + 1, spec))
        i, j = (final > -math.inf).nonzero(as_tuple=True)
        ended = zip(sentence[i].tolist(), tokens[i, parent[i, j], 1:].tolist(), final[i, j].tolist(), strict=True)
        for (s, written, logprob), truncated in zip(ended, at_limit[i].tolist(), strict=True):
            found[s].append(Hypothesis(written, logprob, logprob / penalty, truncated))
        scores = torch.cat([scores, final / penalty], dim=1).topk(n_best, dim=-1).values

        alive, chosen = ranked.masked_fill(ends, -math.inf).topk(beam, dim=-1)
        if traced is not None:
            traced.beam(sentence, (parent, token, ranked, ends), chosen, total, scores)
        attainable = alive[:, 0] / length_penalty(longest + 1, spec)
        stay = (attainable > scores[:, -1]).nonzero().flatten()
        if not len(stay):
            break
        sentence, longest, alive, scores = sentence[stay], longest[stay], alive[stay], scores[stay]
        parent, token = parent.gather(1, chosen)[stay], token.gather(1, chosen)[stay]
        tokens = torch.cat([tokens[stay[:, None], parent], token[:, :, None]], dim=2)
        state = state.select((stay[:, None] * beam + parent).flatten())
    return [sorted(hypotheses, key=lambda h: -h.score)[:n_best] for hypotheses in found]
