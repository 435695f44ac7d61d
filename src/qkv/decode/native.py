"""A plain step of a search on a CPU by the C of `qkv.models.native`, where it serves.

Its plain twin is the search itself: what `Beams` and `Chains` do in many small steps on the board.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from qkv.decode.board import Board
from qkv.models.native.build import library
from qkv.models.native.layout import INTEGER, POINTER

ROWS = 64  # of a sentence, above which the best are better sorted than put in their place one by one


class Step(ctypes.Structure):
    """`Search` of search.c."""

    _fields_ = [
        ("logits", POINTER),
        *((name, INTEGER) for name in "vocabulary sentences rows n capacity".split()),
        *((name, POINTER) for name in "penalties tokens newest length logprob longest forced done ended facts".split()),
        *((name, INTEGER) for name in "pad bos eos shortest".split()),
        ("chosen", POINTER),
    ]


def serves(board: Board, logits: Tensor) -> bool:
    """Whether C does the step with these logits (rows, vocab)."""
    rows = board.tokens.shape[1]
    fit = logits.is_cpu and logits.dtype == torch.float and logits.is_contiguous() and rows <= ROWS
    return fit and not isinstance(library(), str)


def extend_chains(
    board: Board, logits: Tensor, penalties: Tensor, special: tuple[int, int, int], shortest: int
) -> None:
    """The step of `Chains` on its board, of one row a sentence; `special` are <pad>, <s> and </s>."""
    _call("qkv_extend_chains", Step(*_board(board, logits, penalties), *special, shortest))


def extend_beams(
    board: Board, logits: Tensor, penalties: Tensor, special: tuple[int, int, int], shortest: int
) -> Tensor:
    """The step of `Beams` on its board; which row each row now goes on from: (sentences × rows,)."""
    chosen = board.length.new_empty(len(logits))
    _call("qkv_extend_beams", Step(*_board(board, logits, penalties), *special, shortest, chosen.data_ptr()))
    return chosen


def _board(board: Board, logits: Tensor, penalties: Tensor) -> tuple[int, ...]:
    sentences, rows, capacity = board.tokens.shape
    parts = (penalties, board.tokens, board.newest, board.length, board.logprob, board.longest, board.forced)
    more = (board.done, board.ended, board.facts)
    return (
        *(logits.data_ptr(), logits.shape[1], sentences, rows, board.facts.shape[1], capacity),
        *(part.data_ptr() for part in (*parts, *more)),
    )


def _call(name: str, step: Step) -> None:
    found = library()
    assert not isinstance(found, str)
    if getattr(found, name)(ctypes.byref(step)):
        raise MemoryError(os.strerror(12))
