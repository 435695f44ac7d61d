"""Plain steps of a search on a CPU by the C of this package, where it serves.

Their plain twin is the search itself: what `Beams` and `Chains` do in many small steps on the board. Where the model is
native too, its steps and the search's alternate until all sentences are done or memory is wanted: C passes over those
that are done, so none needs to leave before.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qkv.decode.board import Board
from qkv.engines.cpu.native_library import INTEGER, POINTER, library
from qkv.engines.cpu.native_transformer import NativeState, NativeTransformer

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


def advances(model: object, state: object, board: Board) -> bool:
    """Whether C does all of a step, the model's part and the search's."""
    native = isinstance(model, NativeTransformer) and model.output is None and isinstance(state, NativeState)
    return native and board.tokens.shape[1] <= ROWS and not isinstance(library(), str)


def advance(
    model: object,
    state: object,
    board: Board,
    penalties: Tensor,
    special: tuple[int, int, int],
    shortest: int,
) -> None:
    """A token more for every row, or as many as the state has room for, until all sentences are done."""
    assert isinstance(model, NativeTransformer)
    assert isinstance(state, NativeState)
    rows = board.newest.numel()
    model.prepare(state, rows, 1)
    steps = 1 + int(min(state.spare, max(0, model.target.limit - state.position - 1)))
    state.spare -= steps - 1  # before the call: if it is interrupted, what it wrote is counted
    logits = torch.empty(rows, model.vocabulary)
    chosen = board.length.new_empty(rows) if board.tokens.shape[1] > 1 else None
    call = model.call(state, board.newest, 1, steps)
    call.logits = logits.data_ptr()
    step = Step(*_board(board, logits, penalties), *special, shortest, None if chosen is None else chosen.data_ptr())
    made = model.library.qkv_advance(
        ctypes.byref(model.native),
        ctypes.byref(call),
        ctypes.byref(step),
        ctypes.c_int64(steps),
        ctypes.c_int64(len(board.done)),
    )
    _check(-made)
    state.spare += steps - made


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
    _check(getattr(found, name)(ctypes.byref(step)))


def _check(failed: int) -> None:
    if failed == 1:
        raise IndexError("a token or a length that the board or the vocabulary does not have")
    if failed == 2:
        raise MemoryError("no memory for a step of the search")
