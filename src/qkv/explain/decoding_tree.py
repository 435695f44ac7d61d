"""The search for one sentence as plain data: the model's candidates at each step, and the hypotheses as a tree.

A step has the model's probabilities, before logits processors and forced tokens. A node of the tree is a token that the
search ranked; its path from the root is a hypothesis, `fate` its outcome, and `why` the reason with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import (
    GreedySearch,
    Hypothesis,
    Search,
    SearchOptions,
    StartSearch,
    length_penalty,
    search,
    start_search,
    top_k,
)
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import StepModel
from qkv.data.subwords import readable_tokens
from qkv.decoding.beam_variants import DecodingOptions, start_variant
from qkv.options import DecodeConfig

CANDIDATES = 10  # shown at each step


@dataclass(frozen=True)
class Decoding:
    """A traced search: the steps of the best hypothesis, the tree (`beam`), and the n best hypotheses."""

    steps: list[dict[str, Any]]
    beam: dict[str, Any]
    hypotheses: list[Hypothesis]


class EncodedSource:
    """A model with one encoded source: searches and teacher forcing share one run of the encoder."""

    def __init__(self, model: StepModel, tokenizers: TokenizerPair, source: Sequence[int], device: torch.device):
        self.source = torch.tensor([[*source, tokenizers.src.eos]], device=device)
        self.lengths = torch.tensor([self.source.shape[1]], device=device)
        with torch.inference_mode():
            self.encoded = model.encode(self.source, self.lengths)
        self.start, self.step, self.tgt = model.start, model.step, tokenizers.tgt

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        return self.encoded

    def search(
        self,
        spec: DecodeConfig,
        *,
        n_best: int = 1,
        prefix: Sequence[int] = (),
        start: StartSearch = start_search,
    ) -> list[Hypothesis]:
        """Return the n best hypotheses that begin with the prefix."""
        forced = torch.tensor([list(prefix)], device=self.source.device) if prefix else None
        options = SearchOptions(**vars(spec), n_best=n_best)
        (hypotheses,) = search(self, self.source, self.lengths, options, self.tgt, prefix=forced, start=start)
        return hypotheses


def trace_search(
    model: StepModel,
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    spec: DecodeConfig,
    device: torch.device,
    *,
    n_best: int = 1,
    prefix: Sequence[int] = (),
) -> Decoding:
    """Search for the translation of one source (ids without <s> and </s>) and record the search."""
    source = EncodedSource(model, tokenizers, source_ids, device)
    trace = SearchTrace()
    hypotheses = source.search(spec, n_best=n_best, prefix=prefix, start=trace.start)
    tree = _HypothesisTree(trace.sentences[0], spec, tokenizers.tgt, width=max(spec.beam, n_best), n_best=n_best)
    return Decoding(_steps(source, hypotheses[0].tokens), tree.to_dict(), hypotheses)


def forced_steps(
    model: StepModel,
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return the steps of a given target, with the model's candidates at each position."""
    return _steps(EncodedSource(model, tokenizers, source_ids, device), target_ids)


@torch.inference_mode()
def _steps(source: EncodedSource, target: Sequence[int]) -> list[dict[str, Any]]:
    tgt = source.tgt
    fed, written = [tgt.bos, *target], [*target, tgt.eos]
    logits, _ = source.step(torch.tensor([fed], device=source.source.device), source.start(source.encoded))
    log_probs = logits[0].float().log_softmax(-1)  # (target, vocab)
    probabilities = log_probs.exp()
    entropy = -(probabilities * log_probs.clamp(min=-1e4)).sum(-1)  # 0 · -inf counts as 0
    top, which = probabilities.topk(min(CANDIDATES, probabilities.shape[1]), dim=-1)
    rows = zip(fed, written, probabilities.cpu(), top.tolist(), which.tolist(), entropy.tolist(), strict=True)
    return [
        {
            "fed": _name(tgt, before),
            "chosen": _name(tgt, token),
            "probability": float(row[token]),
            "candidates": [
                {"token": _name(tgt, other), "id": other, "probability": p} for other, p in zip(ids, best, strict=True)
            ],
            "entropy": nats,
        }
        for before, token, row, best, ids, nats in rows
    ]


def _name(tokenizer: Tokenizer, token: int) -> str:
    return readable_tokens(tokenizer, [token])[0]


# ---- the trace of a search -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedStep:
    """One step of the search for one sentence: the ranked continuations, best first.

    Continuations in neither `ended` nor `kept` were pruned.
    """

    parents: list[int]  # the continued hypothesis, as an index into `kept` of the step before
    tokens: list[int]
    logprobs: list[float]  # of the hypothesis from <s> on
    ended: list[int]  # ranks of finished hypotheses
    kept: list[int]  # ranks of hypotheses that are continued, best first
    nearest: list[float]  # log-probability of the best continuation of each hypothesis, ranked or not
    to_beat: float  # the worst of the n best scores so far; -inf while there are fewer


@dataclass
class TracedSentence:
    """The steps of the search for one sentence."""

    prefix: list[int]
    longest: int
    prefix_logprobs: list[float] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)

    def add(self, step: TracedStep) -> None:
        """Append a step; for a forced token only its log-probability is stored."""
        if len(self.prefix_logprobs) < len(self.prefix):
            self.prefix_logprobs.append(step.logprobs[0] - sum(self.prefix_logprobs))
        else:
            self.steps.append(step)


class SearchTrace:
    """Recorder of the continuations that a search ranks, keeps, finishes and prunes; pass its `start` to the search."""

    def __init__(self) -> None:
        self.sentences: dict[int, TracedSentence] = {}  # by their place in the whole input

    def start(self, model: StepModel, options: SearchOptions, tgt: Tokenizer, **rest: Any) -> Search:
        """Return the plain search for these options, with this recorder attached."""
        if isinstance(options, DecodingOptions) and options.groups > 1:
            raise UsageError("a search in groups cannot be shown as one tree: omit groups")
        search = start_variant(model, options, tgt, **rest)
        search.on_step = partial(self._add, search)
        return search

    def _add(self, search: Search, scores: Tensor, flat: Tensor, totals: Tensor, kept: Tensor) -> None:
        state, vocab = search.state, scores.shape[2]
        if search.numbers[0] not in self.sentences:  # the first step: all sentences are still in the search
            limits = zip(search.numbers, state.forced.tolist(), state.longest.tolist(), strict=True)
            for number, forced, longest in limits:
                self.sentences[number] = TracedSentence([token for token in forced if token >= 0], longest)
        nearest = scores.amax(2)  # best continuation of each row, ranked or not
        if isinstance(search, GreedySearch):  # it ranks the chosen token alone: add the best of the others
            nearest = totals
            second, other = top_k(scores.scatter(2, flat[:, :, None], -math.inf).flatten(1), 1)
            totals, flat = torch.cat([totals, second], dim=1), torch.cat([flat, other], dim=1)
        parts = (totals, flat // vocab, flat % vocab, kept, nearest, state.finished_scores[:, -1, 0])
        rows = zip(search.numbers, *(part.tolist() for part in parts), strict=True)
        for number, logprobs, parents, tokens, places, best, to_beat in rows:
            real = sum(logprob > -math.inf for logprob in logprobs)
            if not real:  # the sentence is done, but not yet removed from the search
                continue
            ends = [token == search.tgt.eos for token in tokens]
            traced = TracedStep(
                parents[:real],
                tokens[:real],
                logprobs[:real],
                ended=[place for place in range(min(search.rows, real)) if ends[place]],
                kept=[place for place in places if place < real and not ends[place]],
                nearest=best,
                to_beat=to_beat,
            )
            self.sentences[number].add(traced)


# ---- the tree --------------------------------------------------------------------------------------------------------


class _HypothesisTree:
    """The nodes of a traced search in ranking order; the first is <s>."""

    def __init__(self, traced: TracedSentence, spec: DecodeConfig, tgt: Tokenizer, *, width: int, n_best: int) -> None:
        self.traced, self.spec, self.tgt, self.width, self.n_best = traced, spec, tgt, width, n_best
        self.nodes: list[dict[str, Any]] = []
        root = self._add(None, 0, tgt.bos, 0.0, "went on", "start of every hypothesis")
        logprob = 0.0
        for step, (token, token_logprob) in enumerate(zip(traced.prefix, traced.prefix_logprobs, strict=True), 1):
            logprob += token_logprob
            root = self._add(root, step, token, logprob, "went on", "part of the given prefix")
        active = [root]
        for step, ranking in enumerate(traced.steps, len(traced.prefix) + 1):
            active = self._add_step(step, ranking, active)
        self._finish(active)

    def to_dict(self) -> dict[str, Any]:
        return {"width": self.width, "nodes": self.nodes}

    def _add(self, parent: int | None, step: int, token: int, logprob: float, fate: str, why: str) -> int:
        node = {"id": len(self.nodes), "parent": parent, "step": step, "token": _name(self.tgt, token)}
        self.nodes.append(node | {"logprob": logprob, "score": None, "fate": fate, "why": why})
        return len(self.nodes) - 1

    def _add_step(self, step: int, ranking: TracedStep, active: list[int]) -> list[int]:
        """Add the ranked continuations of one step; return the nodes that are continued."""
        kept, added = set(ranking.kept), []
        for rank, (parent, token, logprob) in enumerate(
            zip(ranking.parents, ranking.tokens, ranking.logprobs, strict=True)
        ):
            fate = "finished" if rank in ranking.ended else "went on" if rank in kept else "pruned"
            why = self._why(step, ranking, rank, fate)
            added.append(self._add(active[parent], step, token, logprob, fate, why))
            if fate == "finished":
                self.nodes[-1]["score"] = logprob / float(length_penalty(step, self.spec))
        for place, node in enumerate(active):
            if place not in ranking.parents:
                last, count = ranking.logprobs[-1], len(ranking.tokens)
                why = (
                    f"its best continuation had {_number(ranking.nearest[place], last)} at step {step}, "
                    f"below {_number(last, ranking.nearest[place])}, the last of the {count} ranked"
                )
                self.nodes[node] |= {"fate": "pruned", "why": why}
        return [added[rank] for rank in ranking.kept]

    def _why(self, step: int, ranking: TracedStep, rank: int, fate: str) -> str:
        """Return the rank of a continuation and, if it was pruned, the last one that was kept."""
        text, logprob = f"ranked {_ordinal(rank + 1)} of {len(ranking.tokens)} at step {step}", ranking.logprobs[rank]
        if fate != "pruned":
            return f"{text}: {_number(logprob)}"
        if self.width == 1:
            last, name = 0, "the best, the only one kept"
        elif ranking.tokens[rank] == self.tgt.eos:
            last, name = self.width - 1, f"the {_ordinal(self.width)}, the last that may end"
        else:
            last, name = ranking.kept[-1], "the last one kept"
        other = ranking.logprobs[last]
        return f"{text}: {_number(logprob, other)} against {_number(other, logprob)} for {name}"

    def _finish(self, active: list[int]) -> None:
        """Mark the winner, and give the reason for each other finished or active hypothesis."""
        finished = sorted((n for n in self.nodes if n["fate"] == "finished"), key=lambda n: -n["score"])
        winner, others = finished[0], finished[1:]
        best = winner["score"]
        to_beat = self.traced.steps[-1].to_beat
        threshold = f"{{}}, the score of the {_ordinal(self.n_best)} best" if self.n_best > 1 else "{}"
        for node in others:
            pair = _number(node["score"], best), _number(best, node["score"])
            node["why"] = f"finished, but its score {pair[0]} is below the winner's {pair[1]}"
            if node["score"] == best:
                node["why"] = f"finished with the winner's score, {pair[0]}, but after it"
        for number in active:
            node = self.nodes[number]
            attainable = node["logprob"] / float(length_penalty(self.traced.longest + 1, self.spec))
            bound = threshold.format(_number(to_beat, attainable))
            why = f"no longer able to beat {bound}: {_number(attainable, to_beat)} at best"
            node |= {"fate": "pruned", "why": why}
        why = f"the only finished hypothesis: score {_number(best)}"
        if others:
            start = f"the best of {len(finished)} finished hypotheses: score"
            why = (
                f"{start} {_number(best, others[0]['score'])} against {_number(others[0]['score'], best)} for the next"
            )
        winner |= {"fate": "winner", "why": why}


def _number(value: float, other: float | None = None) -> str:
    """Format a number with two decimals, or up to six if it would look equal to `other`."""
    places = 2
    while other is not None and places < 6 and value != other and f"{value:.{places}f}" == f"{other:.{places}f}":
        places += 1
    return f"{value:.{places}f}".replace("-", "−")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
