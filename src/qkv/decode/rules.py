"""Rules: what a call may ask of the search beyond its width and length penalty, and each rule as a small callable.

A rule changes the log-probabilities (sentences, rows, vocab) of the next token in place, before the choice: one that
forbids writes -inf, one that prefers makes finite values larger or smaller. It depends on nothing but these and the
board, so nothing has to be reordered when beams are; and what is counted stays the model's own log-probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.decode.board import Board
from qkv.decode.sampling import Sampling
from qkv.decode.step import Choice, Rule


@dataclass(frozen=True)
class Rules:
    """What the search may choose; the defaults leave it alone.

    Lengths are in tokens, </s> not counted. `coverage` is β of Wu et al. (2016): source tokens that were never attended
    to lower a score. `diversity` is by how much a token becomes less likely for each hypothesis of an earlier group
    that has just taken it (Vijayakumar et al., 2018). `forbid` are further rules, such as
    `qkv.decoding.constraints.Avoid`.
    """

    min_length: int = 0
    max_length: int | None = None  # None: the source's length + decode.extra_length
    coverage: float = 0.0
    repetition_penalty: float = 1.0  # a written token's log-probability times this: above 1 makes it less likely
    no_repeat_ngram: int = 0  # no run of so many tokens twice; 0: no limit
    groups: int = 1
    diversity: float = 0.5
    sampling: Sampling | None = None
    forbid: tuple[Rule, ...] = ()

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
                "samples are drawn one by one: groups and coverage are for a beam, leave them or sample out"
            )

    def choice(self) -> Choice:
        """The same, as the search takes it."""
        return Choice(
            forbid=tuple(forbidding(self)),
            prefer=tuple(preferring(self)),
            shortest=self.min_length,
            coverage=self.coverage,
            groups=self.groups,
            diversity=self.diversity if self.groups > 1 else 0.0,
            sampling=self.sampling,
        )


def forbidding(rules: Rules) -> list[Rule]:
    """The rules that take tokens away; none touches a token that a prefix forces."""
    every: list[Rule] = [NoRepeat(rules.no_repeat_ngram)] if rules.no_repeat_ngram else []
    every += rules.forbid
    return [UnlessForced(tuple(every))] if every else []


def preferring(rules: Rules) -> list[Rule]:
    """The rules that make tokens more or less attractive."""
    return [Repetition(rules.repetition_penalty)] if rules.repetition_penalty != 1 else []


@dataclass(frozen=True)
class UnlessForced:
    """Several rules, except for the tokens that a sentence must begin with: those are not for them to forbid."""

    rules: tuple[Rule, ...]

    @property
    def capturable(self) -> bool:
        return all(getattr(rule, "capturable", False) for rule in self.rules)

    def __call__(self, log_probs: Tensor, board: Board) -> None:
        forced = board.forced.gather(1, board.length[:, None])  # (sentences, 1): -1 where none is
        place = forced.clamp(min=0)[:, :, None].expand(-1, log_probs.shape[1], 1)
        before = log_probs.gather(2, place)
        for rule in self.rules:
            rule(log_probs, board)
        after = torch.where(forced[:, :, None] >= 0, before, log_probs.gather(2, place))
        log_probs.scatter_(2, place, after)


@dataclass(frozen=True)
class Repetition:
    """Multiplies the log-probability of every token that was written already (Keskar et al., 2019, on log p)."""

    factor: float
    capturable: ClassVar[bool] = True

    def __call__(self, log_probs: Tensor, board: Board) -> None:
        place = torch.arange(board.tokens.shape[2], device=board.tokens.device)
        # <s>, which is never chosen, stands in for what is not written yet.
        written = torch.where(place <= board.length[:, None, None], board.tokens, board.tokens[:, :, :1])
        log_probs.scatter_(2, written, self.factor * log_probs.gather(2, written))


@dataclass(frozen=True)
class NoRepeat:
    """Forbids the token that would write the same n tokens a second time; </s> is none of them and stays."""

    n: int
    capturable: ClassVar[bool] = True

    def __call__(self, log_probs: Tensor, board: Board) -> None:
        before, length = self.n - 1, board.length[:, None, None]
        starts = board.tokens.shape[2] - before
        if starts <= 1:
            return
        # Every place where n tokens may have begun, and whether their first n - 1 are the newest of the row.
        place = torch.arange(starts, device=board.tokens.device)
        again = ((place >= 1) & (place + before <= length)).expand(*board.tokens.shape[:2], starts)
        for i in range(before):
            newest = board.tokens.gather(2, (length - before + 1 + i).clamp(min=0).expand(*board.tokens.shape[:2], 1))
            again = again & (board.tokens[:, :, i : i + starts] == newest)
        # <s>, which is never chosen, stands in where nothing is to be forbidden.
        last = torch.where(again, board.tokens[:, :, before:], board.tokens[:, :, :1])
        log_probs.scatter_(2, last, -math.inf)
