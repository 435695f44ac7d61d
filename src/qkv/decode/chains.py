"""Greedy search and sampling: every row goes its own way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.decode.sampling import draw
from qkv.decode.step import Search
from qkv.decode.trace import watching
from qkv.engines.cpu import native_search
from qkv.engines.cuda_decoding.inference_kernels import CHUNK
from qkv.engines.cuda_decoding.search_kernels import extend_chains, serves


class Chains(Search):
    """Every row on its own until its </s>: the likeliest token at each step, or one that is drawn."""

    def __init__(self, *args: Any, numbers: Tensor | None = None) -> None:
        super().__init__(*args)
        self.uniform = numbers  # (sentences, rows, capacity) in [0, 1): what the draws are made of

    def extend(self, logits: Tensor) -> None:
        if self.rows == 1 and native_search.serves(self.board, logits):
            return native_search.extend_chains(self.board, logits, *self.rules())
        total, largest = self._scan(logits)
        if self.rows == 1 and serves(self.board, largest):
            return extend_chains(self.board, logits, total, largest, self.penalties, self.special.eos)
        return self.extend_plain(logits, total, largest)

    def extend_plain(self, logits: Tensor, total: Tensor, largest: Tensor) -> None:
        """The likeliest token lies in the chunk of the vocabulary whose largest is the largest."""
        rows = logits.unflatten(0, (-1, self.rows))
        chunk = largest.argmax(-1, keepdim=True)  # (sentences, rows, 1)
        place = (chunk * CHUNK + torch.arange(CHUNK, device=logits.device)).clamp(max=logits.shape[1] - 1)
        token = place.gather(2, rows.gather(2, place).argmax(-1, keepdim=True)).squeeze(2)
        token = self._bound(token)
        self._write(token, rows.gather(2, token[:, :, None]).squeeze(2).float() - total)

    def extend_by_rules(self, log_probs: Tensor) -> None:
        token = self._bound(self._token(self._merit(log_probs)))
        traced, before = watching.get(), self.board.logprob[:, 0].clone()
        allowed = self.allowed(log_probs)[:, 0] if traced is not None else log_probs[:, 0]
        score = self._write(token, log_probs.gather(2, token[:, :, None]).squeeze(2))
        if traced is not None:
            traced.greedy(self.numbers, allowed, before, token[:, 0], score[:, 0])

    def _bound(self, token: Tensor) -> Tensor:
        """The tokens (sentences, rows), or the only one that may follow."""
        only = self.only()
        return token if only is None else torch.where(only[1][:, None], only[0][:, None], token)

    def _write(self, token: Tensor, gained: Tensor) -> Tensor:
        """Write a token to each row, which gains so much by it; the scores of those that end, -inf for the others."""
        board, limit = self.board, self.at_limit()[:, None]
        now = board.logprob + gained  # (sentences, rows)
        ends = (token == self.special.eos) & (board.logprob > -math.inf)
        score = (now / self.penalty(board.length)[:, None]).masked_fill(~ends, -math.inf)
        if not self.eager or bool(ends.any()):
            length = board.length[:, None].expand_as(now)
            facts = torch.stack([score, now, length, limit.expand_as(now)], dim=-1)
            board.ended.copy_(torch.where(ends[:, :, None], board.tokens, board.ended))
            board.facts.copy_(torch.where(ends[:, :, None], facts, board.facts))
        # What goes beyond its limit is no number: it would never end.
        now = now.masked_fill(ends | limit, -math.inf)
        board.logprob.copy_(now)
        board.done.copy_((now == -math.inf).all(1))
        board.write(token)
        return score

    def _token(self, merit: Tensor) -> Tensor:
        if self.choice.sampling is None or self.uniform is None:
            return merit.argmax(-1)
        place = self.board.length[:, None, None].expand(-1, self.rows, 1)
        numbers = self.uniform.gather(2, place).flatten()
        drawn: Tensor = draw(merit.flatten(0, 1), self.choice.sampling, numbers).unflatten(0, (-1, self.rows))
        return drawn

    def keep(self, slots: list[int]) -> None:
        super().keep(slots)
        if self.uniform is not None:
            self.uniform = self.uniform[torch.tensor(slots, device=self.uniform.device)]
