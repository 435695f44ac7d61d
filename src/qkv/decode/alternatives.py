"""Other words at a place of a translation: which the model finds likely there, one token of them after another."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qkv.decode.board import Board
from qkv.models.state import StepModel
from qkv.text import Tokenizer

AT_ONCE = 8  # beginnings of words that are looked at together
BRANCHES = 20  # tokens that each of them is continued with
ROUNDS = 40  # … at most


@dataclass(frozen=True)
class Borders:
    """Where words begin and end among the tokens of a vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def begins(self) -> Tensor:
        """Which tokens never go on with a word of letters or digits: (vocab,)."""
        return torch.tensor([not _letter(self._text(token)[:1]) for token in range(self.tokenizer.size)])

    @cached_property
    def ends(self) -> Tensor:
        """Which tokens end in a letter or digit, so that the word they write may go on: (vocab,)."""
        return torch.tensor([_letter(self._text(token)[-1:]) for token in range(self.tokenizer.size)])

    def _text(self, token: int) -> str:
        return self.tokenizer.bytes_of(token).decode("utf-8", "replace")


def _letter(character: str) -> bool:
    return character.isalnum() or character == "\ufffd"  # which is part of one, as far as anybody knows


@dataclass(frozen=True)
class WordEnds:
    """A rule: where a forced beginning ends in a letter, a new word comes next."""

    borders: Borders

    def __call__(self, log_probs: Tensor, board: Board) -> None:
        before = (board.length - 1).clamp(min=0)
        # The token at place length + 1 is forced by forced[length].
        forced = (board.forced.gather(1, before[:, None]).squeeze(1) >= 0) & (board.length > 0)
        free = board.forced.gather(1, board.length[:, None]).squeeze(1) < 0
        last = board.last().view(board.tokens.shape[:2])  # (sentences, rows)
        bound = (forced & free)[:, None] & self.borders.ends.to(last.device)[last]
        log_probs.masked_fill_(bound[:, :, None] & ~self.borders.begins.to(last.device), -math.inf)


@torch.inference_mode()
def likeliest_words(
    model: StepModel[Any, Any],
    source: Tensor,
    prefix: Sequence[int],
    borders: Borders,
    n: int,
) -> list[tuple[list[int], float]]:
    """The n likeliest words after a prefix as tokens, each with its log-probability, best first.

    A word's probability is that of its tokens and of anything that ends it. The search takes up the likeliest beginning
    each time, and is over when no beginning is as likely as the n-th word: whatever it grows into is less likely.
    """
    tgt = borders.tokenizer
    memory = model.encode(source, torch.tensor([source.shape[1]], device=source.device))
    beginnings: list[tuple[float, list[int]]] = [(0.0, [])]  # a heap: the likeliest first
    words: dict[str, tuple[list[int], float]] = {}
    for _ in range(ROUNDS):
        best = sorted((logprob for _, logprob in words.values()), reverse=True)[:n]
        if not beginnings or (len(best) == n and -beginnings[0][0] <= best[-1]):
            break
        some = [heapq.heappop(beginnings) for _ in range(min(AT_ONCE, len(beginnings)))]
        after = _after(model, memory, [[tgt.bos, *prefix, *tokens] for _, tokens in some], source.device)
        after[:, [tgt.pad, tgt.bos]] = -math.inf
        for (cost, tokens), log_probs in zip(some, after, strict=True):
            going_on = log_probs.clone()
            if tokens:
                may_end = borders.begins if borders.ends[tokens[-1]] else _spaces(tgt)
                ended = float(log_probs[may_end].logsumexp(0)) - cost
                word = tgt.decode(tokens).strip()
                if word and ended > words.get(word, (tokens, -math.inf))[1]:
                    words[word] = tokens, ended
                going_on[may_end] = -math.inf
            going_on[: tgt.offset] = -math.inf  # what writes nothing
            for gained, token in zip(*(part.tolist() for part in going_on.topk(BRANCHES)), strict=True):
                if gained > -math.inf:
                    heapq.heappush(beginnings, (cost - gained, [*tokens, token]))
    return sorted(words.values(), key=lambda pair: -pair[1])[:n]


def _after(model: StepModel[Any, Any], memory: Any, rows: list[list[int]], device: torch.device) -> Tensor:
    """The log-probabilities of what follows each row of tokens: (rows, vocab), on the CPU."""
    width = max(map(len, rows))
    fed = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device=device)
    logits, _ = model.step(fed, model.start(memory, len(rows)))  # nothing sees what was put behind it
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return logits[torch.arange(len(rows), device=device), last].log_softmax(-1, dtype=torch.float).cpu()


def _spaces(tgt: Tokenizer) -> Tensor:
    """Which tokens begin with a space, or are </s>: what ends a word of marks."""
    return torch.tensor([token == tgt.eos or tgt.bytes_of(token).startswith(b" ") for token in range(tgt.size)])
