"""Greedy, sampled and beam search over encode / start / step / select; they know nothing else of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.decode.beams import Beams
from qkv.decode.board import Board, Hypothesis
from qkv.decode.chains import Chains
from qkv.decode.sampling import uniform_numbers
from qkv.decode.step import LEAVING, PLAIN, Choice, Search, Special
from qkv.decode.trace import watching
from qkv.models.state import StepModel
from qkv.options import DecodeConfig

Kind = Callable[..., Search]  # makes a search, as `begin` does


def begin(
    model: StepModel[Any, Any],
    spec: DecodeConfig,
    special: Special,
    *,
    lengths: Tensor,
    capacity: int,
    n_best: int = 1,
    choice: Choice = PLAIN,
    numbers: Sequence[int] | None = None,
    beams: Callable[..., Beams] = Beams,
    narrowest: int = 1,
) -> Search:
    """A search for as many sentences as `lengths` (of their sources) has; nothing is on its board yet.

    `numbers` are those of the sentences in the whole input, by which draws are seeded. Another beam search than the
    usual one is made by `beams`, and has at least `narrowest` rows.
    """
    rows = max(spec.beam, n_best, narrowest)
    if rows % choice.groups:
        raise UsageError(f"{rows} beams in {choice.groups} groups: the beams must divide into groups of one width")
    if rows == 1 and choice.coverage:
        raise UsageError("coverage compares hypotheses, and a beam of 1 has one: give a larger beam")
    if choice.groups > 1 and watching.get() is not None:
        raise UsageError("a search in groups cannot be told as one tree: leave out groups")
    if choice.sampling is not None or rows == 1:
        rows = n_best
        board = Board.empty(len(lengths), rows, rows, capacity, lengths.device)
        drawn = None
        if choice.sampling is not None:
            drawn = uniform_numbers(choice.sampling, numbers or range(len(lengths)), rows, capacity).to(lengths.device)
        return Chains(model, spec, choice, special, board, numbers=drawn)
    board = Board.empty(len(lengths), rows, n_best, capacity, lengths.device)
    return beams(model, spec, choice, special, board, lengths=lengths)


def check_prefix(prefix: Tensor, special: Special) -> None:
    """Refuse a beginning that could not be written."""
    if not prefix.numel():
        return
    if bool(torch.isin(prefix, torch.tensor([special.bos, special.eos, special.pad], device=prefix.device)).any()):
        raise UsageError("a prefix cannot hold <s>, </s> or <pad>: give only tokens that write something")


@torch.inference_mode()
def search(
    model: StepModel[Any, Any],
    source: Tensor,
    lengths: Tensor,
    spec: DecodeConfig,
    *,
    bos: int,
    eos: int,
    pad: int,
    n_best: int = 1,
    longest: Tensor | None = None,
    prefix: Tensor | None = None,
    choice: Choice = PLAIN,
    numbers: Sequence[int] | None = None,
    kind: Kind = begin,
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, best first: source ids (batch, source), rows of `lengths` tokens.

    More than `spec.beam` of them need a beam as wide. `longest` limits each output, </s> not counted; by default to the
    source's length, its </s> not counted, plus `spec.extra_length`, as in the paper. Every hypothesis begins with its
    sentence's `prefix` (batch, tokens; -1 behind shorter ones), which counts in its log-probability and length like
    tokens that were found. `kind` makes another search than the usual ones.
    """
    if prefix is None:
        prefix = source.new_empty(len(source), 0)
    check_prefix(prefix, Special(bos, eos, pad))
    if longest is None:
        longest = lengths - 1 + spec.extra_length
    capacity = max(int(longest.max()), prefix.shape[1]) + 2
    special = Special(bos, eos, pad)
    run = kind(model, spec, special, lengths=lengths, capacity=capacity, n_best=n_best, choice=choice, numbers=numbers)
    run.place(torch.arange(len(source), device=source.device), longest, prefix)
    run.state = model.start(model.encode(source, lengths), run.rows)
    if (traced := watching.get()) is not None:
        traced.begin(prefix, run.board.longest)
    found: list[list[Hypothesis]] = [[] for _ in source]
    while True:
        run.advance()
        done: list[bool] = run.board.done.tolist()
        if sum(done) > LEAVING * len(done) or all(done):
            leaving = [slot for slot, over in enumerate(done) if over]
            for slot, hypotheses in zip(leaving, run.finished(leaving), strict=True):
                found[run.numbers[slot]] = hypotheses
            if all(done):
                return found
            run.keep([slot for slot, over in enumerate(done) if not over])
