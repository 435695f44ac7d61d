"""Beam search: the best few hypotheses of each sentence grow side by side, in one group or several that differ."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.core.attention import around_attention, observe_weights
from qkv.decode.step import Search
from qkv.decode.trace import watching
from qkv.engines.cpu import native_search
from qkv.engines.cuda_decoding.inference_kernels import CHUNK, top
from qkv.engines.cuda_decoding.search_kernels import extend_beams, serves


class Beams(Search):
    """Beam search; a sentence is done when no hypothesis can still enter its n best.

    Each step ranks all continuations of a sentence's hypotheses. Those among the first `rows` that end are finished;
    the first `rows` that do not end go on. Log-probabilities only fall, so the best score still attainable by a living
    hypothesis is its log-probability under the penalty of the longest length allowed. Groups of beams rank apart, one
    after another.
    """

    def __init__(self, *args: Any, lengths: Tensor | None = None) -> None:
        super().__init__(*args)
        self.width = self.rows // self.choice.groups  # of a group
        self.first.unflatten(0, (-1, self.width))[:, 1:] = -math.inf  # all rows of a group begin alike: count one
        self.lengths = lengths  # of the sources, whose coverage counts
        self.covered: Tensor | None = None  # (sentences, rows, source): the attention each source token has had

    def extend(self, logits: Tensor) -> Tensor:
        if native_search.serves(self.board, logits):
            return native_search.extend_beams(self.board, logits, *self.rules())
        total, largest = self._scan(logits)
        if serves(self.board, largest):
            return extend_beams(self.board, logits, total, largest, self.penalties, self.special.eos)
        return self.extend_plain(logits, total, largest)

    def extend_plain(self, logits: Tensor, total: Tensor, largest: Tensor) -> Tensor:
        """The best continuations lie in the chunks of the vocabulary whose largest are best."""
        wanted, (sentences, rows, chunks), vocab = 2 * self.rows, largest.shape, logits.shape[1]
        shift = self.board.logprob - total  # by which a logit becomes the log-probability of the whole
        bests = (largest + shift[:, :, None]).flatten(1)
        only = self.only()
        if only is not None:
            bests.masked_fill_(only[1][:, None], -math.inf)
        best, which = top(bests, min(wanted, rows * chunks))
        parents = which // chunks  # (sentences, wanted)
        counted = (which % chunks)[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)
        tokens = counted.clamp(max=vocab - 1)  # the last chunk may have fewer
        places = (parents * vocab)[:, :, None] + tokens
        totals = logits.reshape(sentences, -1).gather(1, places.flatten(1)).float().view_as(places)
        totals = totals + (shift.gather(1, parents).masked_fill(best == -math.inf, -math.inf))[:, :, None]
        if vocab % CHUNK:
            totals = totals.masked_fill(counted >= vocab, -math.inf)
        totals, parents, tokens = totals.flatten(1), parents.repeat_interleave(CHUNK, dim=1), tokens.flatten(1)
        if only is not None:
            token, bound = only
            token = token[:, None].expand(-1, rows)
            row = torch.arange(rows, device=logits.device).expand(sentences, -1)
            alone = shift + logits.reshape(sentences, -1).gather(1, row * vocab + token)
            totals = torch.cat([totals, alone.masked_fill(~bound[:, None], -math.inf)], dim=1)
            parents, tokens = torch.cat([parents, row], dim=1), torch.cat([tokens, token], dim=1)
        totals, order = top(totals, wanted)
        return self.settle(totals[:, None], parents.gather(1, order)[:, None], tokens.gather(1, order)[:, None])

    def extend_by_rules(self, log_probs: Tensor) -> Tensor:
        totals, parents, tokens = self.choose(log_probs, self._merit(log_probs))
        if (traced := watching.get()) is None:
            return self.settle(totals, parents, tokens)
        nearest = self.board.logprob + self.allowed(log_probs).amax(-1)
        ends = tokens == self.special.eos
        places = self._going_on(ends).flatten(1)
        chosen = self.settle(totals, parents, tokens)
        ranked = tuple(part.flatten(1) for part in (parents, tokens, totals, ends))
        traced.beam(self.numbers, ranked, places, nearest, self.board.ended_score[:, -1])
        return chosen

    def settle(self, totals: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
        """Finish what ends and go on with what does not, of what is ranked: (sentences, groups, 2 × width).

        Which row each row goes on from is returned, (sentences × rows,).
        """
        board, width = self.board, self.width
        ends = tokens == self.special.eos
        final = totals[..., :width].masked_fill(~ends[..., :width], -math.inf).flatten(1)  # (sentences, rows)
        if not self.eager or bool((final > -math.inf).any()):
            self._finish(final, parents[..., :width].flatten(1))
        goes_on = self._going_on(ends)
        alive = totals.masked_fill(ends, -math.inf).gather(-1, goes_on).flatten(1)
        attainable = alive.amax(1) / self.penalty(board.longest)
        # What goes beyond its limit is no number: it would never end.
        done = (attainable <= board.ended_score[:, -1]) | self.at_limit() | board.done
        parents, tokens = parents.gather(-1, goes_on).flatten(1), tokens.gather(-1, goes_on).flatten(1)
        board.reorder(parents)
        board.write(tokens)
        board.logprob.copy_(alive.masked_fill(done[:, None], -math.inf))
        board.done.copy_(done)
        if self.covered is not None:
            self.covered = self.covered.gather(1, parents[:, :, None].expand_as(self.covered))
        first = torch.arange(0, parents.numel(), self.rows, device=parents.device)
        return (first[:, None] + parents).flatten()

    def _going_on(self, ends: Tensor) -> Tensor:
        """The places (sentences, groups, width) of those that do not end, in their order; others if they are few."""
        rank = torch.where(ends, -math.inf, -torch.arange(ends.shape[-1], device=ends.device, dtype=torch.float))
        places: Tensor = top(rank.flatten(0, 1), self.width)[1].unflatten(0, ends.shape[:2])
        return places

    def choose(self, log_probs: Tensor, merit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The continuations that are ranked, best first: log-probability of the whole, row it continues, token.

        Each (sentences, groups, 2 × width): at most `width` of them end, so twice as many hold `width` that do not.
        """
        chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        for group in range(self.choice.groups):
            rows = slice(group * self.width, (group + 1) * self.width)
            ours = merit[:, rows]
            if group:
                ours = ours - self.choice.diversity * self._taken([tokens for _, _, tokens in chosen], merit)
            totals, parents, tokens = self._rank(ours, log_probs[:, rows], self.board.logprob[:, rows], bool(group))
            chosen.append((totals, parents + rows.start, tokens))
        totals, parents, tokens = (torch.stack(parts, dim=1) for parts in zip(*chosen, strict=True))
        return totals, parents, tokens

    def _rank(self, merit: Tensor, log_probs: Tensor, before: Tensor, changed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of some rows of each sentence, by merit; if only one token may follow, with that."""
        wanted = 2 * self.width
        # The best of all are among the best of each row: (sentences, width, wanted).
        merits, tokens = merit.topk(min(wanted, merit.shape[2]), dim=-1)
        values = (before[:, :, None] + merits).flatten(1)
        best, which = values.topk(wanted, dim=-1)
        parents, tokens = which // merits.shape[2], tokens.flatten(1).gather(1, which)
        totals = best
        if changed or self.choice.prefer:  # what was chosen by its merit counts by its probability
            totals = self._totals(log_probs, before, parents, tokens).masked_fill(best == -math.inf, -math.inf)
        if (only := self.only()) is not None:
            token, bound = only
            values = before + log_probs.gather(2, token[:, None, None].expand(-1, self.width, 1)).squeeze(2)
            values, order = values.sort(dim=-1, descending=True, stable=True)
            nothing = torch.full_like(values, -math.inf)
            totals = torch.where(bound[:, None], torch.cat([values, nothing], dim=1), totals)
            parents = torch.where(bound[:, None], torch.cat([order, order], dim=1), parents)
            tokens = torch.where(bound[:, None], token[:, None], tokens)
        return totals, parents, tokens

    def _totals(self, log_probs: Tensor, before: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
        """The log-probability of continuations: of rows `parents` with `tokens`, both (sentences, n)."""
        places = parents * log_probs.shape[2] + tokens
        return before.gather(1, parents) + log_probs.flatten(1).gather(1, places)

    def _taken(self, chosen: list[Tensor], merit: Tensor) -> Tensor:
        """How many hypotheses of earlier groups go on with each token: (sentences, 1, vocab)."""
        counts = merit.new_zeros(len(merit), merit.shape[2])
        for tokens in chosen:
            kept = self._going_on((tokens == self.special.eos)[:, None])[:, 0]
            counts.scatter_add_(1, tokens.gather(1, kept), torch.ones_like(kept, dtype=counts.dtype))
        return counts[:, None]

    def _finish(self, final: Tensor, parents: Tensor) -> None:
        """Put what ends now, with log-probabilities `final` (sentences, rows), among the n best that have ended."""
        board = self.board
        score = final / self.penalty(board.length)[:, None]
        if self.covered is not None:
            score = score + self._coverage().gather(1, parents)
        length, cut = (part[:, None].expand_as(final) for part in (board.length, self.at_limit()))
        facts = torch.cat([board.facts, torch.stack([score, final, length, cut], dim=-1)], dim=1)
        order = top(facts[:, :, 0], board.facts.shape[1])[1][:, :, None]  # of equals, who came first stays first
        board.facts.copy_(facts.gather(1, order.expand(-1, -1, 4)))
        capacity = board.tokens.shape[2]
        written = board.tokens.gather(1, parents[:, :, None].expand(-1, -1, capacity))
        board.ended.copy_(torch.cat([board.ended, written], dim=1).gather(1, order.expand(-1, -1, capacity)))

    # ---- coverage ----------------------------------------------------------------------------------------------------

    def _logits(self) -> Tensor:
        if not self.choice.coverage:
            return super()._logits()
        crosses: dict[str, Tensor] = {}  # in the order of the layers, each (sentences, heads, rows, source)
        with around_attention(observe_weights(crosses.__setitem__)):
            logits = super()._logits()
        weights = [weights for name, weights in crosses.items() if name.endswith(".cross")][-1].mean(1)
        self.covered = weights if self.covered is None else self.covered + weights
        return logits

    def _coverage(self) -> Tensor:
        """β Σ log min(attention that a source token has had, 1): (sentences, rows)."""
        assert self.covered is not None
        assert self.lengths is not None
        real = torch.arange(self.covered.shape[2], device=self.lengths.device) < self.lengths[:, None]
        logs = self.covered.clamp(1e-9, 1.0).log().masked_fill(~real[:, None], 0.0)
        return self.choice.coverage * logs.sum(-1)

    def keep(self, slots: list[int]) -> None:
        super().keep(slots)
        chosen = torch.tensor(slots, device=self.board.done.device)
        if self.lengths is not None:
            self.lengths = self.lengths[chosen]
        if self.covered is not None:
            self.covered = self.covered[chosen]
