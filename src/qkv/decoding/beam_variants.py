"""Coverage, diverse beams and required phrases: subclasses of the beam search, and the options that choose among all.

Groups of beams are ranked one after another; each group is kept away from the tokens that earlier groups have just
taken (Vijayakumar et al., 2018). The coverage penalty lowers the score of a hypothesis for each source token that got
little attention (Wu et al., 2016).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.search import BeamSearch, LogitsProcessor, Search, SearchOptions, top_k
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import StepModel
from qkv.decoding.constraints import LETTER, MustInclude, joining, living_rows
from qkv.decoding.logits_processors import NoRepeatNgram, RepetitionPenalty, Sampler, Sampling
from qkv.models.variants import record_attention

BEAM = 8  # rows that a search for required phrases has at least: some for those that have met more, some for less


@dataclass(frozen=True)
class DecodingOptions(SearchOptions):
    """Options of the search and of its variants; the defaults are a plain search."""

    coverage: float = 0.0  # β: a score gains β Σ log min(attention that a source token has had, 1)
    repetition_penalty: float = 1.0  # factor of the log-probability of a written token; above 1: less probable
    no_repeat_ngram: int = 0  # no n tokens in a row twice; 0: no limit
    groups: int = 1
    diversity: float = 0.5  # subtracted for each hypothesis of an earlier group that has just taken the token
    sampling: Sampling | None = None
    required: Mapping[int, MustInclude] | None = None  # by the number of the sentence in the whole input

    def __post_init__(self) -> None:
        least = {"min_length": 0, "coverage": 0, "no_repeat_ngram": 0, "groups": 1, "diversity": 0, "max_length": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and (value < low or not math.isfinite(value)):
                raise UsageError(f"{name} = {value}: must be at least {low}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise UsageError(f"repetition_penalty = {self.repetition_penalty}: must be above 0; 1 changes nothing")
        if self.max_length is not None and self.min_length > self.max_length:
            raise UsageError(f"min_length = {self.min_length} is more than max_length = {self.max_length}")
        if self.sampling is not None and (self.groups > 1 or self.coverage):
            raise UsageError(
                "samples are drawn one by one: groups and coverage are for a beam: omit them, or omit sample"
            )

    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        every: list[LogitsProcessor] = [NoRepeatNgram(self.no_repeat_ngram)] if self.no_repeat_ngram else []
        every += self.processors
        every += [RepetitionPenalty(self.repetition_penalty)] if self.repetition_penalty != 1 else []
        return tuple(every)

    def search_class(self) -> Callable[..., Search]:
        if self.rows % self.groups:
            raise UsageError(
                f"{self.rows} beams in {self.groups} groups: the beams must divide into groups of one width"
            )
        if self.required is not None:
            return ConstrainedBeamSearch
        if self.rows == 1 and self.coverage:
            raise UsageError("coverage compares hypotheses, and a beam of 1 has one: give a larger beam")
        if self.sampling is not None:
            return Sampler
        if self.groups > 1:
            return DiverseBeamSearch
        return CoverageBeamSearch if self.coverage else super().search_class()


class CoverageBeamSearch(BeamSearch):
    """Beam search with a score for the attention to each source token; coverage 0 changes nothing."""

    options: DecodingOptions

    def __init__(self, *arguments: Any, lengths: Tensor, **sizes: Any) -> None:
        super().__init__(*arguments, lengths=lengths, **sizes)
        self.lengths = lengths  # of the sources, </s> included
        self.covered: Tensor | None = None  # (sentences, rows, source): sum of the attention over all steps

    def advance(self) -> None:
        if not self.options.coverage:
            return super().advance()
        with record_attention() as recorded:  # in the order of the layers, from each member of an ensemble
            logits, self.decoder = self.model.step(self.state.newest.view(-1, 1), self.decoder)
        members = [parts for name, parts in recorded.items() if name.endswith(".cross")][-1]
        weights = torch.stack([part.mean(1) for part in members]).mean(0)  # (sentences, rows, source)
        self.covered = weights if self.covered is None else self.covered + weights
        rows = self.extend(logits[:, -1])
        self.covered = self.covered.flatten(0, 1)[rows].view_as(self.covered)
        self.decoder = self.decoder.select(rows)
        return None

    def finish_score(self, totals: Tensor, parents: Tensor) -> Tensor:
        scores = super().finish_score(totals, parents)
        if self.covered is None:
            return scores
        real = torch.arange(self.covered.shape[2], device=self.lengths.device) < self.lengths[:, None]
        logs = self.covered.clamp(1e-9, 1.0).log().masked_fill(~real[:, None], 0.0).sum(-1)  # (sentences, rows)
        return scores + (self.options.coverage * logs).gather(1, parents)

    def keep(self, slots: list[int]) -> None:
        super().keep(slots)
        chosen = torch.tensor(slots, device=self.state.done.device)
        self.lengths = self.lengths[chosen]
        if self.covered is not None:
            self.covered = self.covered[chosen]


class DiverseBeamSearch(CoverageBeamSearch):
    """Beam search in groups of one width, ranked one after another."""

    def __init__(self, *arguments: Any, **sizes: Any) -> None:
        super().__init__(*arguments, **sizes)
        self.groups = self.options.groups
        self.width = self.rows // self.groups
        self.first[:: self.width] = 0.0  # the rows of a group begin alike: only the first counts

    def rank(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first `width` of each group, then the second `width` of each: (sentences, 2 × beam)."""
        vocab = scores.shape[2]
        taken = scores.new_zeros(len(scores), 1, vocab)  # by how many hypotheses of earlier groups
        ranked = []
        for group in range(self.groups):
            ours = scores[:, group * self.width : (group + 1) * self.width]
            best, flat = top_k((ours - self.options.diversity * taken).flatten(1), 2 * self.width)
            ranked.append((best, flat + group * self.width * vocab))
            tokens = flat % vocab
            going_on = (tokens == self.tgt.eos).byte().argsort(dim=1, stable=True)[:, : self.width]
            tokens = tokens.gather(1, going_on)
            taken[:, 0].scatter_add_(1, tokens, torch.ones_like(tokens, dtype=taken.dtype))
        halves = [torch.stack(part, dim=1).unflatten(2, (2, self.width)) for part in zip(*ranked, strict=True)]
        best, flat = (part.transpose(1, 2).flatten(1) for part in halves)
        return best, flat

    def going_on(self, ends: Tensor) -> Tensor:
        """Return the first `width` places of each group that do not end, group by group."""
        groups = ends.unflatten(1, (2, self.groups, self.width)).transpose(1, 2).flatten(2)  # (sentences, groups, 2 w)
        chosen = groups.byte().argsort(dim=2, stable=True)[:, :, : self.width]
        group = torch.arange(self.groups, device=ends.device)[:, None] * self.width
        return (chosen // self.width * self.rows + group + chosen % self.width).flatten(1)


# ---- required phrases ------------------------------------------------------------------------------------------------


class ConstrainedBeamSearch(CoverageBeamSearch):
    """Beam search for translations with required phrases (Post and Vilar, 2018).

    Those that go on are taken in turn from banks, one for each number of phrase tokens still needed, so that a
    hypothesis that pays for a phrase does not lose its place to those that have not. As soon as no more room is left
    than the missing phrases need, only tokens that write them may follow. Progress is a function of the tokens alone.
    """

    def __init__(self, model: StepModel, options: SearchOptions, tgt: Tokenizer, **sizes: Any) -> None:
        super().__init__(model, replace(options, beam=max(options.beam, BEAM)), tgt, **sizes)
        self.required = self.options.required or {}
        self.joining = joining(self.required[self.numbers[0]].tokenizer).to(self.lengths.device)

    def place(self, slots: Tensor, longest: Tensor, forced: Tensor) -> None:
        for slot, most, begun in zip(slots.tolist(), longest.tolist(), forced.tolist(), strict=True):
            required = self.required[self.numbers[slot]]
            prefix = [token for token in begun if token >= 0]
            room = max(0, most - len(prefix))
            if (need := required.need(prefix)) > room:
                raise UsageError(
                    f"must_include: {required} takes {need} tokens, but the output may have {room} more: "
                    f"raise max_length, or require less"
                )
        super().place(slots, longest, forced)

    def rank(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return up to `beam` continuations that end and as many from the banks, best first, padded with -inf."""
        scores, vocab, written = scores.clone(), scores.shape[2], self._written()
        for slot, rows in written.items():
            for row, tokens in rows.items():
                left = int(self.state.longest[slot]) - len(tokens)
                self._forbid(scores[slot, row], self.required[self.numbers[slot]], tokens, left)
        best, flat = super().rank(scores)
        for slot, rows in written.items():
            required = self.required[self.numbers[slot]]
            candidates = {(place // vocab, place % vocab) for place in flat[slot].tolist()}
            kept = self._banks(scores[slot], required, rows, candidates)
            if not kept and float(self.state.finished_scores[slot, 0, 0]) == -math.inf:
                raise UsageError(f"must_include: {required} cannot be met together with the other rules: require less")
            best[slot], flat[slot] = -math.inf, self.tgt.pad
            for place, (row, token) in enumerate(kept):
                best[slot, place], flat[slot, place] = scores[slot, row, token], row * vocab + token
        return best, flat

    def _written(self) -> dict[int, dict[int, list[int]]]:
        """Return the tokens of each living row, by slot and row; slots with a forced next token are left out."""
        forced = self.state.forced.gather(1, self.state.length[:, None]).squeeze(1).tolist()
        written: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for slot, row, tokens in living_rows(self.state):
            if forced[slot] < 0:
                written[slot][row] = tokens
        return written

    def _forbid(self, scores: Tensor, required: MustInclude, tokens: list[int], left: int) -> None:
        """Forbid, in one row (vocab,), </s> while phrases are missing, and tokens after which they would not fit."""
        text = required.text(tokens)
        lost = required.room(required.missing(text))  # tokens needed after one that writes no phrase …
        broken = required.room(required.missing(text + LETTER))  # … or that lengthens the last word
        end = -math.inf if lost else scores[self.tgt.eos].item()
        if broken >= left:
            advancing = {token: scores[token].item() for token in required.advancing(tokens)}
            scores.masked_fill_(self.joining, -math.inf)
            if lost >= left:
                scores.masked_fill_(~self.joining, -math.inf)
            for token, value in advancing.items():
                scores[token] = value if required.need([*tokens, token]) < left else -math.inf
        scores[self.tgt.eos] = end

    def _banks(
        self, scores: Tensor, required: MustInclude, rows: dict[int, list[int]], candidates: set[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the continuations (row, token), best first: up to `beam` that end and as many that do not.

        Of scores (rows, vocab), the `candidates` are looked at, the best of each row, and those that advance a phrase.
        """
        eos, beam = self.tgt.eos, self.rows
        for row, tokens in rows.items():
            candidates |= {(row, token) for token in (eos, int(scores[row].argmax()), *required.advancing(tokens))}
        value = {pair: scores[pair].item() for pair in candidates if pair[0] in rows}
        ranked = sorted((pair for pair in value if value[pair] > -math.inf), key=lambda pair: (-value[pair], pair))
        ending = [pair for pair in ranked if pair[1] == eos][:beam]
        banks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, token in ranked:
            if token != eos:
                banks[required.need([*rows[row], token])].append((row, token))
        going_on: list[tuple[int, int]] = []
        for turn in range(beam):
            going_on += [banks[need][turn] for need in sorted(banks) if turn < len(banks[need])]
        return sorted(ending + going_on[:beam], key=lambda pair: (-value[pair], pair))
