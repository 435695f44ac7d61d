"""The search for one sentence as plain data: the model's candidates at each step, and the hypotheses as a tree.

A step has the model's probabilities, before logits processors and forced tokens. A node of the tree is a token that the
search ranked; its path from the root is a hypothesis, `fate` its outcome, and `why` the reason with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from qkv.options import DecodeConfig

CANDIDATES = 10  # shown at each step


@dataclass(frozen=True)
class Decoding:
    """A traced search: the steps of the best hypothesis, the tree (`beam`), and the n best hypotheses."""

    steps: list[dict[str, Any]]
    beam: dict[str, Any]
    hypotheses: list[Hypothesis]


class EncodedSource:
    """A model with one encoded source (ids without <s> and </s>): all that follows shares one run of the encoder."""

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


def trace_search(source: EncodedSource, spec: DecodeConfig, *, n_best: int = 1, prefix: Sequence[int] = ()) -> Decoding:
    """Search for the translation of one source and record the search."""
    tree = _HypothesisTree(spec, source.tgt, n_best=n_best, prefix=len(prefix))
    hypotheses = source.search(spec, n_best=n_best, prefix=prefix, start=tree.start)
    return Decoding(forced_steps(source, hypotheses[0].tokens), tree.finish(), hypotheses)


@torch.inference_mode()
def forced_steps(source: EncodedSource, target: Sequence[int]) -> list[dict[str, Any]]:
    """Return the steps of a given target, with the model's candidates at each position."""
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


# ---- the tree --------------------------------------------------------------------------------------------------------


class _HypothesisTree:
    """The ranked continuations of a search for one sentence, as nodes in ranking order; the first is <s>."""

    def __init__(self, spec: DecodeConfig, tgt: Tokenizer, *, n_best: int, prefix: int) -> None:
        """Create a tree for a search whose first `prefix` tokens are given; pass `start` to that search."""
        self.spec, self.tgt, self.n_best, self.prefix = spec, tgt, n_best, prefix
        self.width = max(spec.beam, n_best)
        self.nodes: list[dict[str, Any]] = []
        self.active = [self._add(None, 0, tgt.bos, 0.0, "went on", "start of every hypothesis")]

    def start(self, model: StepModel, options: SearchOptions, tgt: Tokenizer, **sizes: Any) -> Search:
        """Return the plain search for these options; each of its steps is added to the tree."""
        self.search = start_search(model, options, tgt, **sizes)
        self.search.on_step = self._add_step
        return self.search

    def _add(self, parent: int | None, step: int, token: int, logprob: float, fate: str, why: str) -> int:
        node = {"id": len(self.nodes), "parent": parent, "step": step, "token": _name(self.tgt, token)}
        self.nodes.append(node | {"logprob": logprob, "score": None, "fate": fate, "why": why})
        return len(self.nodes) - 1

    def _add_step(self, scores: Tensor, flat: Tensor, totals: Tensor, kept: Tensor) -> None:
        """Add the ranked continuations of one step (`Search.on_step`)."""
        step, vocab = self.nodes[-1]["step"] + 1, scores.shape[2]
        nearest = scores.amax(2)  # log-probability of the best continuation of each hypothesis, ranked or not
        if isinstance(self.search, GreedySearch):  # it ranks the chosen token alone: add the best of the others
            nearest = totals
            second, other = top_k(scores.scatter(2, flat[:, :, None], -math.inf).flatten(1), 1)
            totals, flat = torch.cat([totals, second], dim=1), torch.cat([flat, other], dim=1)
        logprobs = [logprob for logprob in totals[0].tolist() if logprob > -math.inf]
        if not logprobs:  # the model's probabilities are not numbers: the search reports it
            return
        parents, tokens = (part[0].tolist()[: len(logprobs)] for part in (flat // vocab, flat % vocab))
        if step <= self.prefix:
            why = "part of the given prefix"
            self.active = [self._add(self.active[0], step, tokens[0], logprobs[0], "went on", why)]
            return
        ends = [token == self.tgt.eos for token in tokens]
        going_on = [rank for rank in kept[0].tolist() if rank < len(tokens) and not ends[rank]]
        added = []
        for rank, (parent, token, logprob) in enumerate(zip(parents, tokens, logprobs, strict=True)):
            finished = ends[rank] and rank < self.width
            why = f"ranked {_ordinal(rank + 1)} of {len(tokens)} at step {step}: "
            if finished or rank in going_on:
                why += _number(logprob)
            else:
                if self.width == 1:
                    last, name = 0, "the best, the only one kept"
                elif ends[rank]:
                    last, name = self.width - 1, f"the {_ordinal(self.width)}, the last that may end"
                else:
                    last, name = going_on[-1], "the last one kept"
                other_logprob = logprobs[last]
                why += f"{_number(logprob, other_logprob)} against {_number(other_logprob, logprob)} for {name}"
            fate = "finished" if finished else "went on" if rank in going_on else "pruned"
            added.append(self._add(self.active[parent], step, token, logprob, fate, why))
            if finished:
                self.nodes[-1]["score"] = logprob / float(length_penalty(step, self.spec))
        for row, node in enumerate(self.active):
            if row not in parents:
                best, last_logprob = float(nearest[0, row]), logprobs[-1]
                why = (
                    f"its best continuation had {_number(best, last_logprob)} at step {step}, "
                    f"below {_number(last_logprob, best)}, the last of the {len(tokens)} ranked"
                )
                self.nodes[node] |= {"fate": "pruned", "why": why}
        self.active = [added[rank] for rank in going_on]

    def finish(self) -> dict[str, Any]:
        """Mark the winner, give the reason for each other finished or active hypothesis, and return the tree."""
        state = self.search.state
        longest, to_beat = int(state.longest[0]), float(state.finished_scores[0, -1, 0])  # the worst of the n best
        finished = sorted((n for n in self.nodes if n["fate"] == "finished"), key=lambda n: -n["score"])
        winner, others = finished[0], finished[1:]
        best = winner["score"]
        threshold = f"{{}}, the score of the {_ordinal(self.n_best)} best" if self.n_best > 1 else "{}"
        for node in others:
            pair = _number(node["score"], best), _number(best, node["score"])
            node["why"] = f"finished, but its score {pair[0]} is below the winner's {pair[1]}"
            if node["score"] == best:
                node["why"] = f"finished with the winner's score, {pair[0]}, but after it"
        for number in self.active:
            node = self.nodes[number]
            attainable = node["logprob"] / float(length_penalty(longest + 1, self.spec))
            bound = threshold.format(_number(to_beat, attainable))
            why = f"no longer able to beat {bound}: {_number(attainable, to_beat)} at best"
            node |= {"fate": "pruned", "why": why}
        why = f"the only finished hypothesis: score {_number(best)}"
        if others:
            second = others[0]["score"]
            why = f"the best of {len(finished)} finished hypotheses: score {_number(best, second)} "
            why += f"against {_number(second, best)} for the next"
        winner |= {"fate": "winner", "why": why}
        return {"width": self.width, "nodes": self.nodes}


def _number(value: float, other: float | None = None) -> str:
    """Format a number with two decimals, or up to six if it would look equal to `other`."""
    places = 2
    while other is not None and places < 6 and value != other and f"{value:.{places}f}" == f"{other:.{places}f}":
        places += 1
    return f"{value:.{places}f}".replace("-", "−")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
