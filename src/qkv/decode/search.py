"""Greedy and beam search over encode / start / step / select; they know nothing else of a model.

A hypothesis is a sequence of tokens that ends in </s>. Its log-probability is the sum over its tokens, </s> included;
its score is that sum under the length penalty. At the longest length allowed only </s> may follow, so every hypothesis
ends, and forced decoding of its tokens gives the same log-probability again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv import config
from qkv.models.state import SelectableState, StepModel


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
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, best first: source ids (batch, source), rows of `lengths` tokens.

    `longest` limits each output, </s> not counted; by default to the source's length, its </s> not counted, plus
    `spec.extra_length`, as in the paper.
    """
    if longest is None:
        longest = lengths - 1 + spec.extra_length
    forbidden = [pad, bos]
    state = model.start(model.encode(source, lengths), max(spec.beam, n_best))
    if max(spec.beam, n_best) == 1:
        return _greedy(model, state, longest, spec, bos, eos, forbidden)
    return _beam(model, state, longest, spec, bos, eos, forbidden, n_best)


def _next_log_probs(
    model: StepModel[Any, Any], tokens: Tensor, state: SelectableState, forbidden: list[int]
) -> tuple[Tensor, Any]:
    """Log-probabilities of the next token (rows, vocab); <pad> and <s> are never written."""
    logits, state = model.step(tokens, state)
    log_probs = logits[:, -1].float().log_softmax(-1)
    log_probs[:, forbidden] = -math.inf
    return log_probs, state


def _only_eos(log_probs: Tensor, where: Tensor, eos: int) -> None:
    """Leave no other continuation than </s> where the mask, of log_probs' shape less the vocabulary, says so."""
    kept = log_probs[..., eos].clone()
    log_probs.masked_fill_(where[..., None], -math.inf)
    log_probs[..., eos] = kept


def _greedy(
    model: StepModel[Any, Any],
    state: Any,
    longest: Tensor,
    spec: config.Decode,
    bos: int,
    eos: int,
    forbidden: list[int],
) -> list[list[Hypothesis]]:
    """The likeliest token at each step, sentence by sentence until </s>."""
    results: list[list[Hypothesis]] = [[] for _ in range(len(longest))]
    sentence = torch.arange(len(longest), device=longest.device)  # which sentence each row is
    tokens = torch.full((len(longest), 1), bos, dtype=torch.long, device=longest.device)
    logprob = torch.zeros(len(longest), device=longest.device)
    ended = torch.zeros(len(longest), dtype=torch.bool, device=longest.device)
    while True:
        log_probs, state = _next_log_probs(model, tokens[:, -1:], state, forbidden)
        at_limit = tokens.shape[1] - 1 >= longest[sentence]
        _only_eos(log_probs, at_limit | ended, eos)
        best, token = log_probs.max(-1)
        logprob = torch.where(ended, logprob, logprob + best)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
        for row in torch.nonzero((token == eos) & ~ended).flatten().tolist():
            written = tokens[row, 1:-1].tolist()
            total = float(logprob[row])
            score = total / float(length_penalty(len(written) + 1, spec))
            results[int(sentence[row])] = [Hypothesis(written, total, score, bool(at_limit[row]))]
        ended = ended | (token == eos)
        alive = torch.nonzero(~ended).flatten()
        if not len(alive):
            return results
        if len(alive) <= 0.75 * len(ended):  # leaving costs a copy of the cache, so sentences leave in groups
            state = state.select(alive)
            sentence, tokens, logprob, ended = sentence[alive], tokens[alive], logprob[alive], ended[alive]


def _beam(
    model: StepModel[Any, Any],
    state: Any,
    longest: Tensor,
    spec: config.Decode,
    bos: int,
    eos: int,
    forbidden: list[int],
    n_best: int,
) -> list[list[Hypothesis]]:
    """Beam search for all sentences at once; a sentence leaves when no hypothesis can still enter its n best.

    Each step ranks all continuations of a sentence's `beam` hypotheses. Those among the first `beam` that end are
    finished; the first `beam` that do not end go on. Log-probabilities only fall, so the best score still attainable by
    a living hypothesis is its log-probability under the penalty of the longest length allowed.
    """
    device, beam, sentences = longest.device, max(spec.beam, n_best), len(longest)
    finished: list[list[Hypothesis]] = [[] for _ in range(sentences)]
    sentence = torch.arange(sentences, device=device)
    tokens = torch.full((sentences, beam, 1), bos, dtype=torch.long, device=device)
    alive = torch.full((sentences, beam), -math.inf, device=device)  # log-probability of each living hypothesis
    alive[:, 0] = 0.0  # all beams begin alike: count one
    while True:
        log_probs, state = _next_log_probs(model, tokens[:, :, -1].reshape(-1, 1), state, forbidden)
        log_probs = log_probs.unflatten(0, (-1, beam))  # (sentences, beam, vocab)
        at_limit = tokens.shape[2] - 1 >= longest[sentence]
        _only_eos(log_probs, at_limit[:, None], eos)
        total = (alive[:, :, None] + log_probs).flatten(1)  # (sentences, beam × vocab)
        vocab = log_probs.shape[2]
        # At most `beam` continuations end, so twice as many hold `beam` that do not.
        ranked, which = total.topk(min(2 * beam, total.shape[1]), dim=-1)
        parent, token = which.div(vocab, rounding_mode="floor"), which % vocab
        ends = token == eos
        _collect(finished, sentence, tokens, ranked, parent, ends, at_limit, beam, spec)

        continuing = ranked.masked_fill(ends, -math.inf)
        alive, chosen = continuing.topk(min(beam, continuing.shape[1]), dim=-1)
        if alive.shape[1] < beam:  # a vocabulary smaller than the beam: the missing hypotheses are dead ones
            short = beam - alive.shape[1]
            alive = torch.nn.functional.pad(alive, (0, short), value=-math.inf)
            chosen = torch.nn.functional.pad(chosen, (0, short))
        parent, token = parent.gather(1, chosen), token.gather(1, chosen)
        stay = _undecided(finished, sentence, alive, longest, spec, n_best)
        if not len(stay):
            break
        rows = (stay[:, None] * beam + parent[stay]).flatten()
        history = tokens[stay[:, None], parent[stay]]  # (sentences, beam, length)
        tokens = torch.cat([history, token[stay, :, None]], dim=2)
        sentence, alive = sentence[stay], alive[stay]
        if len(rows) != len(total) * beam or not torch.equal(rows, torch.arange(len(rows), device=device)):
            state = state.select(rows)
    return [hypotheses[:n_best] for hypotheses in finished]


def _collect(
    finished: list[list[Hypothesis]],
    sentence: Tensor,
    tokens: Tensor,
    ranked: Tensor,
    parent: Tensor,
    ends: Tensor,
    at_limit: Tensor,
    beam: int,
    spec: config.Decode,
) -> None:
    """Put the hypotheses that end in this step, among the first `beam` continuations, to the finished ones."""
    ending = ends[:, :beam] & (ranked[:, :beam] > -math.inf)
    penalty = float(length_penalty(tokens.shape[2], spec))
    for i, j in torch.nonzero(ending).tolist():
        logprob = float(ranked[i, j])
        written = tokens[i, parent[i, j], 1:].tolist()
        hypotheses = finished[int(sentence[i])]
        hypotheses.append(Hypothesis(written, logprob, logprob / penalty, bool(at_limit[i])))
        hypotheses.sort(key=lambda h: -h.score)


def _undecided(
    finished: list[list[Hypothesis]],
    sentence: Tensor,
    alive: Tensor,
    longest: Tensor,
    spec: config.Decode,
    n_best: int,
) -> Tensor:
    """Positions of the sentences in which a living hypothesis can still become one of the n best."""
    attainable = alive.max(-1).values / length_penalty(longest[sentence] + 1, spec)
    best = attainable.tolist()
    stay = []
    for i, number in enumerate(sentence.tolist()):
        known = finished[number]
        worst = known[n_best - 1].score if len(known) >= n_best else -math.inf
        if best[i] > worst:
            stay.append(i)
    return torch.tensor(stay, dtype=torch.long, device=alive.device)
