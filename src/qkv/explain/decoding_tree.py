"""The decoding of one sentence as plain data: what the model thought at each step, and the search as a tree.

A step has the model's own probabilities, before anything is forbidden or forced. A node of the tree is a token that the
search ranked: its path to the root spells a hypothesis, and its fate says what became of it, with the numbers.
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
    Hypothesis,
    RankedStep,
    Search,
    SearchOptions,
    SpecialTokens,
    StartSearch,
    length_penalty,
    search,
    start_search,
)
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.decoding.beam_variants import DecodingOptions, start_variant
from qkv.models.state import StepModel
from qkv.options import DecodeConfig

CANDIDATES = 10  # shown at each step


@dataclass(frozen=True)
class Decoding:
    """How a translation was found: its steps, the tree of the search, and the n best hypotheses."""

    steps: list[dict[str, Any]]
    beam: dict[str, Any]
    hypotheses: list[Hypothesis]


class Read:
    """A model that has read its source: the search and all that comes after share one run of the encoder."""

    def __init__(
        self, model: StepModel[Any, Any], tokenizers: TokenizerPair, source: Sequence[int], device: torch.device
    ):
        self.source = torch.tensor([[*source, tokenizers.src.eos]], device=device)
        self.lengths = torch.tensor([self.source.shape[1]], device=device)
        with torch.inference_mode():
            self.memory = model.encode(self.source, self.lengths)
        self.start, self.step, self.tgt = model.start, model.step, tokenizers.tgt

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        return self.memory

    def search(
        self,
        spec: DecodeConfig,
        *,
        n_best: int = 1,
        prefix: Sequence[int] = (),
        start: StartSearch = start_search,
    ) -> list[Hypothesis]:
        """Return the n best hypotheses that begin with the prefix."""
        special = SpecialTokens(self.tgt.bos, self.tgt.eos, self.tgt.pad)
        begun = torch.tensor([list(prefix)], device=self.source.device) if prefix else None
        options = SearchOptions.of(spec, n_best=n_best)
        (found,) = search(self, self.source, self.lengths, options, special, prefix=begun, start=start)
        return found


def decoding(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    spec: DecodeConfig,
    device: torch.device,
    *,
    n_best: int = 1,
    prefix: Sequence[int] = (),
) -> Decoding:
    """Search for the translation of one source, without <s> and </s>, and tell how; the encoder runs once."""
    read = Read(model, tokenizers, source_ids, device)
    trace = SearchTrace()
    found = read.search(spec, n_best=n_best, prefix=prefix, start=trace.start)
    tree = _Tree(trace.sentences[0], spec, tokenizers.tgt, width=max(spec.beam, n_best), n_best=n_best)
    return Decoding(_steps(read, found[0].tokens), tree.to_dict(), found)


def forced_steps(
    model: StepModel[Any, Any],
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    device: torch.device,
) -> list[dict[str, Any]]:
    """The steps of a target that is given: what the model would have written at each place of it."""
    return _steps(Read(model, tokenizers, source_ids, device), target_ids)


@torch.inference_mode()
def _steps(read: Read, target: Sequence[int]) -> list[dict[str, Any]]:
    tgt = read.tgt
    fed, written = [tgt.bos, *target], [*target, tgt.eos]
    logits, _ = read.step(torch.tensor([fed], device=read.source.device), read.start(read.memory))
    log_probs = logits[0].float().log_softmax(-1)  # (target, vocab)
    probabilities = log_probs.exp()
    entropy = -(probabilities * log_probs.clamp(min=-1e4)).sum(-1)  # 0 · -inf counts nothing
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
            "entropy": uncertainty,  # in nats
        }
        for before, token, row, best, ids, uncertainty in rows
    ]


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.tokens([token])[0]


# ---- the trace of a search -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedStep:
    """One step of the search for one sentence: the continuations that it ranked, best first.

    Those that are neither in `ended` nor in `kept` were pruned.
    """

    parents: list[int]  # which of the living hypotheses each continues: its place in the `kept` of the step before
    tokens: list[int]
    logprobs: list[float]  # of the whole hypothesis
    ended: list[int]  # places of those that finished
    kept: list[int]  # places of those that go on, best first
    nearest: list[float]  # of each living hypothesis, by place: its best continuation, ranked or not
    to_beat: float  # the worst of the n best scores found so far; -inf while there are fewer


@dataclass
class TracedSentence:
    """The steps of the search for one sentence."""

    prefix: list[int]
    longest: int
    prefix_logprobs: list[float] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)

    def add(self, step: TracedStep) -> None:
        """Append a step; of a step whose token was given only the log-probability is kept."""
        if len(self.prefix_logprobs) < len(self.prefix):
            self.prefix_logprobs.append(step.logprobs[0] - sum(self.prefix_logprobs))
        else:
            self.steps.append(step)


class SearchTrace:
    """Records which continuations a search ranks, keeps, finishes and prunes: give its `start` to the search."""

    def __init__(self) -> None:
        self.sentences: list[TracedSentence] = []  # of all searches, in the order in which they started

    def start(self, model: StepModel[Any, Any], options: SearchOptions, special: SpecialTokens, **rest: Any) -> Search:
        """Return the plain search for these options, observed."""
        if isinstance(options, DecodingOptions) and options.groups > 1:
            raise UsageError("a search in groups cannot be told as one tree: leave out groups")
        search = start_variant(model, options, special, **rest)
        search.on_step = partial(self._add, len(self.sentences))
        return search

    def _add(self, first: int, search: Search, step: RankedStep) -> None:
        state = search.state
        if len(self.sentences) == first:  # no sentence has left yet
            for forced, longest in zip(state.forced.tolist(), state.longest.tolist(), strict=True):
                self.sentences.append(TracedSentence([token for token in forced if token >= 0], longest))
        rows = zip(search.numbers, *(part.tolist() for part in (*step, state.finished_scores[:, -1, 0])), strict=True)
        for number, totals, parents, tokens, kept, best, to_beat in rows:
            real = sum(total > -math.inf for total in totals)
            if not real:  # the sentence is done, but has not left yet
                continue
            ends = [token == search.special.eos for token in tokens]
            traced = TracedStep(
                parents[:real],
                tokens[:real],
                totals[:real],
                ended=[place for place in range(min(search.rows, real)) if ends[place]],
                kept=[place for place in kept if place < real and not ends[place]],
                nearest=best,
                to_beat=to_beat,
            )
            self.sentences[first + number].add(traced)


# ---- the tree --------------------------------------------------------------------------------------------------------


class _Tree:
    """The nodes of one traced search, in the order in which it ranked them; the first is <s>."""

    def __init__(self, traced: TracedSentence, spec: DecodeConfig, tgt: Tokenizer, *, width: int, n_best: int) -> None:
        self.traced, self.spec, self.tgt, self.width, self.n_best = traced, spec, tgt, width, n_best
        self.nodes: list[dict[str, Any]] = []
        root = self._add(None, 0, tgt.bos, 0.0, "went on", "where every translation begins")
        logprob = 0.0
        for step, (token, gained) in enumerate(zip(traced.prefix, traced.prefix_logprobs, strict=True), 1):
            logprob += gained
            root = self._add(root, step, token, logprob, "went on", "given: every hypothesis begins so")
        living = [root]
        for step, ranking in enumerate(traced.steps, len(traced.prefix) + 1):
            living = self._grow(step, ranking, living)
        self._end(living)

    def to_dict(self) -> dict[str, Any]:
        return {"width": self.width, "nodes": self.nodes}

    def _add(self, parent: int | None, step: int, token: int, logprob: float, fate: str, why: str) -> int:
        node = {"id": len(self.nodes), "parent": parent, "step": step, "token": _name(self.tgt, token)}
        self.nodes.append(node | {"logprob": logprob, "score": None, "fate": fate, "why": why})
        return len(self.nodes) - 1

    def _grow(self, step: int, ranking: TracedStep, living: list[int]) -> list[int]:
        """Add what one step ranked; return the nodes that live on."""
        kept, made = set(ranking.kept), []
        for place, (parent, token, logprob) in enumerate(
            zip(ranking.parents, ranking.tokens, ranking.logprobs, strict=True)
        ):
            fate = "finished" if place in ranking.ended else "went on" if place in kept else "pruned"
            why = self._why(step, ranking, place, fate)
            made.append(self._add(living[parent], step, token, logprob, fate, why))
            if fate == "finished":
                self.nodes[-1]["score"] = logprob / float(length_penalty(step, self.spec))
        for place, node in enumerate(living):
            if place not in ranking.parents:
                last, count = ranking.logprobs[-1], len(ranking.tokens)
                why = (
                    f"its best continuation had {_number(ranking.nearest[place], last)} at step {step}, "
                    f"below {_number(last, ranking.nearest[place])}, the last of the {count} ranked"
                )
                self.nodes[node] |= {"fate": "pruned", "why": why}
        return [made[place] for place in ranking.kept]

    def _why(self, step: int, ranking: TracedStep, place: int, fate: str) -> str:
        """The rank of a continuation and, if it was pruned, the last that was not."""
        rank, own = f"ranked {_ordinal(place + 1)} of {len(ranking.tokens)} at step {step}", ranking.logprobs[place]
        if fate != "pruned":
            return f"{rank}: {_number(own)}"
        if self.width == 1:
            last, name = 0, "the likeliest, which alone goes on"
        elif ranking.tokens[place] == self.tgt.eos:
            last, name = self.width - 1, f"the {_ordinal(self.width)}, the last that may end"
        else:
            last, name = ranking.kept[-1], "the last that stayed"
        other = ranking.logprobs[last]
        return f"{rank}: {_number(own, other)} against {_number(other, own)} for {name}"

    def _end(self, living: list[int]) -> None:
        """Who won, and why those that had finished or still lived did not."""
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
        for place in living:
            node = self.nodes[place]
            attainable = node["logprob"] / float(length_penalty(self.traced.longest + 1, self.spec))
            beaten = threshold.format(_number(to_beat, attainable))
            why = f"no longer able to beat {beaten}: {_number(attainable, to_beat)} at the very best"
            node |= {"fate": "pruned", "why": why}
        why = f"the only one that finished: score {_number(best)}"
        if others:
            rest = f"the best of {len(finished)} that finished: score"
            why = f"{rest} {_number(best, others[0]['score'])} against {_number(others[0]['score'], best)} for the next"
        winner |= {"fate": "winner", "why": why}


def _number(value: float, other: float | None = None) -> str:
    """With two decimals, or as many more as tell it from another number."""
    places = 2
    while other is not None and places < 6 and value != other and f"{value:.{places}f}" == f"{other:.{places}f}":
        places += 1
    return f"{value:.{places}f}".replace("-", "−")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
