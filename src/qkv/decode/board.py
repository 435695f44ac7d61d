"""What a search has written: sentences in slots, some rows each, as tensors whose shapes never change.

Nothing here asks the device for a value, so a step over the board can be captured as a graph and replayed; sentences
that are done stay on the board, dead, until they are taken off it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

Ids = Sequence[int]


@dataclass(frozen=True)
class Hypothesis:
    """One translation in ids, without </s>; its score is the log-probability under the length penalty."""

    tokens: list[int]
    logprob: float
    score: float
    truncated: bool  # it reached the longest length allowed, and </s> was the only continuation left


@dataclass
class Board:
    """Sentences × rows of hypotheses that still grow, and the n best that have ended.

    A row that holds nothing has the log-probability -inf.
    """

    tokens: Tensor  # (sentences, rows, capacity): <s>, then what was written
    newest: Tensor  # (sentences, rows): the last of these
    length: Tensor  # (sentences,): tokens written after <s>
    logprob: Tensor  # (sentences, rows): the model's own
    longest: Tensor  # (sentences,): the most that may be written, </s> not counted
    forced: Tensor  # (sentences, capacity): the token that must be written at each place, -1 where none must
    done: Tensor  # (sentences,)
    ended: Tensor  # (sentences, n, capacity): the n best that have ended, <s> first
    facts: Tensor  # (sentences, n, 4): score, log-probability, length and whether the limit ended it; score -inf: none

    @classmethod
    def empty(cls, sentences: int, rows: int, n_best: int, capacity: int, device: torch.device) -> Board:
        """A board for this many; all its slots are done."""

        def full(*shape: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((sentences, *shape), value, dtype=dtype, device=device)

        return cls(
            tokens=full(rows, capacity, value=0, dtype=torch.long),
            newest=full(rows, value=0, dtype=torch.long),
            length=full(value=0, dtype=torch.long),
            logprob=full(rows, value=-math.inf, dtype=torch.float),
            longest=full(value=0, dtype=torch.long),
            forced=full(capacity, value=-1, dtype=torch.long),
            done=full(value=True, dtype=torch.bool),
            ended=full(n_best, capacity, value=0, dtype=torch.long),
            facts=full(n_best, 4, value=-math.inf, dtype=torch.float),
        )

    @property
    def ended_score(self) -> Tensor:
        """Of the n best that have ended, best first: (sentences, n)."""
        return self.facts[:, :, 0]

    def place(self, slots: Tensor, bos: int, longest: Tensor, forced: Tensor, logprob: Tensor) -> None:
        """Begin sentences in these slots: `forced` (sentences, places), `logprob` (rows,) of rows that begin alike."""
        # Filled and copied by index: an assignment would bring its numbers from the host, which no graph can hold.
        self.tokens.index_fill_(0, slots, 0)
        self.tokens[:, :, 0].index_fill_(0, slots, bos)
        self.newest.index_fill_(0, slots, bos)
        self.length.index_fill_(0, slots, 0)
        self.logprob.index_copy_(0, slots, logprob.expand(len(slots), -1))
        self.longest.index_copy_(0, slots, longest)
        self.forced.index_fill_(0, slots, -1)
        self.forced[:, : forced.shape[1]].index_copy_(0, slots, forced)
        self.done.index_fill_(0, slots, False)
        self.facts.index_fill_(0, slots, -math.inf)

    def last(self) -> Tensor:
        """The newest token of every row: (sentences × rows, 1)."""
        return self.newest.view(-1, 1)

    def write(self, tokens: Tensor) -> None:
        """Put one more token (sentences, rows) behind every row; what is written behind the capacity is lost."""
        self.length.add_(1).clamp_(max=self.tokens.shape[2] - 1)
        self.tokens.scatter_(2, self.length[:, None, None].expand(-1, self.tokens.shape[1], 1), tokens[:, :, None])
        self.newest.copy_(tokens)

    def reorder(self, parents: Tensor) -> None:
        """Let each row go on from the one of its sentence that `parents` (sentences, rows) names."""
        self.tokens.copy_(self.tokens.gather(1, parents[:, :, None].expand_as(self.tokens)))

    def keep(self, slots: Tensor) -> None:
        """Take all other sentences off the board, which becomes smaller."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name).index_select(0, slots))

    def hypotheses(self, slots: Tensor) -> list[list[Hypothesis]]:
        """What has ended in these slots, best first."""
        chosen: list[Any] = [part.index_select(0, slots).tolist() for part in (self.ended, self.facts)]
        return [
            [
                Hypothesis(tokens[1 : 1 + int(length)], logprob, score, bool(cut))
                for tokens, (score, logprob, length, cut) in zip(*sentence, strict=True)
                if score > -math.inf
            ]
            for sentence in zip(*chosen, strict=True)
        ]
