"""What a search tells while it is watched: inside a `trace()` block, what it ranks at each step; outside, nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """One step of the search for one sentence: the continuations that it ranked, best first, and what became of them.

    What is in neither `ended` nor `kept` was pruned.
    """

    parents: list[int]  # which of the living hypotheses each continues: its place in the step before's `kept`
    tokens: list[int]
    logprobs: list[float]  # of the whole hypothesis
    ended: list[int]  # places of those that finished
    kept: list[int]  # places of those that live on, best first
    nearest: list[float]  # of each living hypothesis, by place: its best continuation, ranked or not
    to_beat: float  # the least of the n best scores found so far; -inf while there are fewer


@dataclass
class Traced:
    """The search for one sentence."""

    prefix: list[int]
    longest: int
    prefix_logprobs: list[float] = field(default_factory=list)
    steps: list[Ranking] = field(default_factory=list)

    def add(self, step: Ranking) -> None:
        """A step at which the token was given is no choice: only what it cost is kept."""
        if len(self.prefix_logprobs) < len(self.prefix):
            self.prefix_logprobs.append(step.logprobs[0] - sum(self.prefix_logprobs))
        else:
            self.steps.append(step)


@dataclass
class Trace:
    """The sentences searched inside a `trace()` block, in the order in which the search was given them."""

    sentences: list[Traced] = field(default_factory=list)
    first: int = 0  # the first sentence of the search that is going on

    def begin(self, forced: Tensor, longest: Tensor) -> None:
        self.first = len(self.sentences)
        for tokens, limit in zip(forced.tolist(), longest.tolist(), strict=True):
            self.sentences.append(Traced([token for token in tokens if token >= 0], limit))

    def greedy(self, numbers: Sequence[int], log_probs: Tensor, before: Tensor, token: Tensor, scores: Tensor) -> None:
        """One row a sentence: `log_probs` (sentences, vocab), `before` (sentences,) of the row until now.

        The token (sentences,) that was chosen and the runner-up; `scores` (sentences,) of what has ended, or -inf.
        """
        others = log_probs.scatter(1, token[:, None], -math.inf)
        second, other = others.max(-1)
        gained = log_probs.gather(1, token[:, None]).squeeze(1)
        rows = (token, before + gained, other, before + second, scores)
        for number, (t, logprob, o, runner_up, score) in zip(
            numbers, zip(*(row.tolist() for row in rows), strict=True), strict=True
        ):
            if logprob == -math.inf:  # it is done, but still on the board
                continue
            ranked = [(t, logprob), (o, runner_up)] if runner_up > -math.inf else [(t, logprob)]
            tokens, logprobs = [t for t, _ in ranked], [p for _, p in ranked]
            ended = score > -math.inf
            step = Ranking(
                [0] * len(tokens), tokens, logprobs, [0] if ended else [], [] if ended else [0], [logprob], score
            )
            self.sentences[self.first + number].add(step)

    def beam(
        self, numbers: Sequence[int], ranked: tuple[Tensor, ...], chosen: Tensor, nearest: Tensor, to_beat: Tensor
    ) -> None:
        """`ranked`: parents, tokens, log-probabilities and whether each ends, (sentences, 2 × beam).

        `chosen` (sentences, beam) are the places of those that go on; `nearest` (sentences, beam) is each living
        hypothesis with its best continuation; `to_beat` (sentences,).
        """
        beam = chosen.shape[1]
        rows = zip(numbers, *(part.tolist() for part in (*ranked, chosen, nearest, to_beat)), strict=True)
        for number, parents, tokens, logprobs, ends, places, best, score in rows:
            real = sum(logprob > -math.inf for logprob in logprobs)
            if not real:  # it is done, but still on the board
                continue
            step = Ranking(
                parents[:real],
                tokens[:real],
                logprobs[:real],
                ended=[i for i in range(min(beam, real)) if ends[i]],
                kept=[i for i in places if i < real and not ends[i]],
                nearest=best,
                to_beat=score,
            )
            self.sentences[self.first + number].add(step)


watching: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Collect what every search inside the block ranks, keeps, finishes and prunes, step by step."""
    traced = Trace()
    token = watching.set(traced)
    try:
        yield traced
    finally:
        watching.reset(token)
