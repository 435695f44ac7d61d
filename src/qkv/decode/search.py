"""Greedy and beam search over encode / start / step / select; they know nothing else of a model.

A hypothesis is a sequence of tokens that ends in </s>. Its log-probability is the sum over its tokens, </s> included;
its score is that sum under the length penalty. At the longest length allowed only </s> may follow, so every hypothesis
ends, and forced decoding of its tokens gives the same log-probability again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qkv import config
from qkv.errors import QkvError
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

    More than `spec.beam` of them need a beam as wide. `longest` limits each output, </s> not counted; by default to the
    source's length, its </s> not counted, plus `spec.extra_length`, as in the paper.
    """
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
    state = model.start(model.encode(source, lengths), beam)
    if beam == 1:
        found = _greedy(step, state, longest, spec, bos, eos)
    else:
        found = _beam(step, state, longest, spec, bos, eos, beam, n_best)
    if not all(hypotheses and math.isfinite(hypotheses[0].logprob) for hypotheses in found):
        raise QkvError("the model's probabilities are not numbers: its weights are damaged; use those of another step")
    return found


def _greedy(step: Step, state: Any, longest: Tensor, spec: config.Decode, bos: int, eos: int) -> list[list[Hypothesis]]:
    """The likeliest token at each step, sentence by sentence until </s>."""
    limits: list[int] = longest.tolist()
    written: list[list[int]] = [[] for _ in limits]
    logprob = [0.0 for _ in limits]
    found: list[list[Hypothesis]] = [[] for _ in limits]
    sentences = list(range(len(limits)))  # which one each row is
    tokens = torch.full((len(limits), 1), bos, device=longest.device)
    for length in count():
        at_limit = [length >= limits[s] for s in sentences]
        mask = torch.tensor(at_limit, device=longest.device) if any(at_limit) else None
        log_probs, state = step(tokens, state, mask)
        best, token = log_probs.max(-1)
        for s, t, gained, truncated in zip(sentences, token.tolist(), best.tolist(), at_limit, strict=True):
            if found[s]:
                continue  # it has ended, but not left
            logprob[s] += gained
            if t == eos:
                score = logprob[s] / length_penalty(length + 1, spec)
                found[s] = [Hypothesis(written[s], logprob[s], score, truncated)]
            else:
                written[s].append(t)
        tokens = token[:, None]
        alive = [row for row, s in enumerate(sentences) if not found[s]]
        if not alive:
            break
        if len(alive) <= 0.75 * len(sentences):  # leaving costs a copy of the cache, so sentences leave in groups
            rows = torch.tensor(alive, device=longest.device)
            state, tokens, sentences = state.select(rows), tokens[rows], [sentences[row] for row in alive]
    return found


def _beam(
    step: Step, state: Any, longest: Tensor, spec: config.Decode, bos: int, eos: int, beam: int, n_best: int
) -> list[list[Hypothesis]]:
    """Beam search for all sentences at once; a sentence leaves when no hypothesis can still enter its n best.

    Each step ranks all continuations of a sentence's `beam` hypotheses. Those among the first `beam` that end are
    finished; the first `beam` that do not end go on. Log-probabilities only fall, so the best score still attainable by
    a living hypothesis is its log-probability under the penalty of the longest length allowed.
    """
    device, shortest_limit = longest.device, int(longest.min())
    found: list[list[Hypothesis]] = [[] for _ in longest]
    sentence = torch.arange(len(longest), device=device)  # which one each group of `beam` rows is
    tokens = torch.full((len(longest), beam, 1), bos, device=device)
    alive = torch.full((len(longest), beam), -math.inf, device=device)  # log-probability of each living hypothesis
    alive[:, 0] = 0.0  # all beams begin alike: count one
    scores = torch.full((len(longest), n_best), -math.inf, device=device)  # the n best finished, best first
    for length in count():
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
        attainable = alive[:, 0] / length_penalty(longest + 1, spec)
        stay = (attainable > scores[:, -1]).nonzero().flatten()
        if not len(stay):
            break
        sentence, longest, alive, scores = sentence[stay], longest[stay], alive[stay], scores[stay]
        parent, token = parent.gather(1, chosen)[stay], token.gather(1, chosen)[stay]
        tokens = torch.cat([tokens[stay[:, None], parent], token[:, :, None]], dim=2)
        state = state.select((stay[:, None] * beam + parent).flatten())
    return [sorted(hypotheses, key=lambda h: -h.score)[:n_best] for hypotheses in found]
