"""What every search is made of: sentences on a board, each advanced by a token at a time.

A hypothesis is a sequence of tokens that ends in </s>. Its log-probability is the sum over its tokens, </s> included;
its score is that sum under the length penalty. At the longest length allowed only </s> may follow, so every hypothesis
ends. Rules may change what is chosen, but never what it counts: forced decoding of a hypothesis gives the same
log-probability again.

A step is made of tensors of fixed shapes, without asking the device for anything: on a CPU it runs as it stands, and
`qkv.engines.cuda_decoding.continuous_batching` captures it for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.core.errors import QkvError
from qkv.decode.board import Board, Hypothesis
from qkv.decode.sampling import Sampling
from qkv.decode.trace import watching
from qkv.engines.cpu import native_search
from qkv.engines.cpu.native_transformer import NativeState
from qkv.engines.cuda_decoding.inference_kernels import scan
from qkv.models.state import StepModel
from qkv.options import DecodeConfig

# Leaving costs a copy of what the model remembers, so sentences leave in groups: when more than this part is done.
LEAVING = 0.25
Rule = Callable[[Tensor, Board], None]  # changes log-probabilities (sentences, rows, vocab) in place


@dataclass(frozen=True)
class Special:
    """The ids that write nothing."""

    bos: int
    eos: int
    pad: int


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen, beyond the penalties and the width that `config.DecodeConfig` has.

    `forbid` takes tokens away, with -inf; `prefer` changes how likely tokens are to be chosen, not how likely they are.
    """

    forbid: Sequence[Rule] = ()
    prefer: Sequence[Rule] = ()
    shortest: int = 0  # tokens before </s>, unless the longest is fewer
    coverage: float = 0.0  # β of Wu et al. (2016): a score gains β Σ log min(attention that a source token has had, 1)
    groups: int = 1  # of beams, which are to differ (Vijayakumar et al., 2018)
    diversity: float = 0.0  # by so much less likely is a token for each hypothesis of earlier groups that just took it
    sampling: Sampling | None = None


PLAIN = Choice()


def length_penalty(length: Tensor | float, spec: DecodeConfig) -> Any:
    """What a log-probability is divided by; length counts </s>. `gnmt` is the paper's ((5 + length) / 6)^α."""
    if spec.length_penalty == "gnmt":
        return ((5 + length) / 6) ** spec.alpha
    return length if spec.length_penalty == "average" else 1.0


class Search:
    """Sentences on a board, each advanced by a token at a time; `rows` hypotheses of each grow side by side."""

    def __init__(
        self, model: StepModel[Any, Any], spec: DecodeConfig, choice: Choice, special: Special, board: Board
    ) -> None:
        self.model, self.spec, self.choice, self.special, self.board = model, spec, choice, special, board
        self.rows = board.tokens.shape[1]
        self.state: Any = None
        self.numbers = list(range(len(board.done)))  # which sentence of the input each slot holds
        self.never = torch.tensor([special.pad, special.bos], device=board.done.device)
        self.first = torch.zeros(self.rows, device=board.done.device)  # log-probabilities at the beginning
        # Without a step to be captured, what no sentence needs is left out.
        self.eager = board.done.device.type == "cpu"
        # Only the largest logits are looked at, unless somebody wants to see them all.
        all_of_them = choice.forbid or choice.prefer or choice.coverage or choice.groups > 1 or choice.sampling
        self.plain = not all_of_them and watching.get() is None
        lengths = torch.arange(1, board.tokens.shape[2] + 2, device=board.done.device)
        self.penalties = torch.ones(len(lengths), device=board.done.device) * length_penalty(lengths.float(), spec)

    def place(self, slots: Tensor, longest: Tensor, forced: Tensor) -> None:
        """Begin sentences in these slots; `forced` (sentences, places) are the tokens they begin with, then -1."""
        longest = longest.maximum((forced >= 0).sum(1))
        self.board.place(slots, self.special.bos, longest, forced, self.first)

    def advance(self) -> None:
        """Write one more token to every row; where C does it, several."""
        if self.plain and native_search.advances(self.model, self.state, self.board):
            return native_search.advance(self.model, self.state, self.board, *self.rules())
        logits = self._logits()
        rows = self.extend(logits) if self.plain else self.extend_by_rules(self._log_probs(logits))
        if rows is not None:
            self.state = self.state.select(rows)

    def extend(self, logits: Tensor) -> Tensor | None:
        """Choose the likeliest of logits (sentences × rows, vocab); which row each row now goes on from, if another."""
        raise NotImplementedError

    def extend_by_rules(self, log_probs: Tensor) -> Tensor | None:
        """The same where rules, draws or groups look at all log-probabilities (sentences, rows, vocab)."""
        raise NotImplementedError

    def _logits(self) -> Tensor:
        if isinstance(self.state, NativeState):  # rows that hold nothing need no logits
            self.state.alive = (self.board.logprob.flatten() != -math.inf).numpy()
        logits, self.state = self.model.step(self.board.last(), self.state)
        last: Tensor = logits[:, -1]
        return last

    def _scan(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ exp of all logits of each row (sentences, rows), and of each chunk the largest of those allowed.

        Never <pad> or <s>, nor </s> too early: these become -inf.
        """
        total, largest = scan(logits, self.never, self.early(), self.special.eos)
        return total.unflatten(0, (-1, self.rows)), largest.unflatten(0, (-1, self.rows))

    def rules(self) -> tuple[Tensor, tuple[int, int, int], int]:
        """What a plain step knows beside the board: length penalties, the tokens that write nothing, the shortest."""
        return self.penalties, (self.special.pad, self.special.bos, self.special.eos), self.choice.shortest

    def early(self) -> Tensor | None:
        """The rows (sentences × rows,) in which </s> may not follow yet."""
        if not self.choice.shortest:
            return None
        early = self.board.length < self.board.longest.clamp(max=self.choice.shortest)
        return early.repeat_interleave(self.rows)

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Of the next token, (sentences, rows, vocab): never <pad> or <s>, and what the rules forbid is -inf."""
        log_probs: Tensor = logits.log_softmax(-1, dtype=torch.float)
        log_probs.index_fill_(1, self.never, -math.inf)
        if (early := self.early()) is not None:
            log_probs[:, self.special.eos].masked_fill_(early, -math.inf)
        log_probs = log_probs.unflatten(0, (-1, self.rows))
        for rule in self.choice.forbid:
            rule(log_probs, self.board)
        return log_probs

    def _merit(self, log_probs: Tensor) -> Tensor:
        """What is chosen by: the log-probabilities, or what the rules prefer."""
        if not self.choice.prefer:
            return log_probs
        merit = log_probs.clone()
        for rule in self.choice.prefer:
            rule(merit, self.board)
        return merit

    def only(self) -> tuple[Tensor, Tensor] | None:
        """The one token (sentences,) that may follow, and in which sentences; None if all are free."""
        board = self.board
        forced = board.forced.gather(1, board.length[:, None]).squeeze(1)
        is_forced = forced >= 0
        bound = is_forced | self.at_limit()
        if self.eager and not bool(bound.any()):
            return None
        return torch.where(is_forced, forced, self.special.eos), bound

    def allowed(self, log_probs: Tensor) -> Tensor:
        """The log-probabilities with -inf for all that may not follow."""
        if (only := self.only()) is None:
            return log_probs
        token, bound = only
        other = torch.arange(log_probs.shape[2], device=token.device) != token[:, None]
        return log_probs.masked_fill((other & bound[:, None])[:, None], -math.inf)

    def at_limit(self) -> Tensor:
        return self.board.length >= self.board.longest

    def penalty(self, length: Tensor) -> Tensor:
        """The length penalty of each of some lengths, </s> not counted."""
        penalties: Tensor = self.penalties[length]
        return penalties

    def keep(self, slots: list[int]) -> None:
        """Go on with these slots alone."""
        chosen = torch.tensor(slots, device=self.board.done.device)
        self.board.keep(chosen)
        rows = chosen[:, None] * self.rows + torch.arange(self.rows, device=chosen.device)
        self.state = self.state.select(rows.flatten())
        self.numbers = [self.numbers[slot] for slot in slots]

    def finished(self, slots: list[int]) -> list[list[Hypothesis]]:
        """The hypotheses of slots that are done, best first."""
        found = self.board.hypotheses(torch.tensor(slots, device=self.board.done.device))
        if not all(hypotheses and math.isfinite(hypotheses[0].logprob) for hypotheses in found):
            raise QkvError(
                "the model's probabilities are not numbers, or the rules left no way to go on: use the weights of "
                "another step, or fewer rules"
            )
        return [sorted(hypotheses, key=lambda h: -h.score) for hypotheses in found]
