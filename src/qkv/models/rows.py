"""Rows of a padded batch laid end to end: what is done at each position alone is then done to real tokens only.

To embedding, projections, feed-forward and norms they are one long row, (1, tokens, d_model). Only attention looks from
one position to another: inside it, and nowhere else, they are a padded rectangle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Rows:
    """Which positions of a batch are tokens: `real` (batch, length), in each row from the left."""

    def __init__(self, real: Tensor) -> None:
        self.batch, self.length = real.shape
        flat = real.flatten()
        self.places = flat.nonzero().squeeze(1)  # (tokens,): where each stands among all positions
        self.tokens = (flat.cumsum(0) - 1).clamp(min=0)  # (batch · length,): which stands there, or did last

    def lay(self, ids: Tensor) -> Tensor:
        """Ids (batch, length) end to end: (1, tokens)."""
        return ids.flatten()[self.places][None]

    def each(self, positions: Callable[[int, int], Tensor]) -> Tensor:
        """What a table of positions has for each token, by its place in its row: (tokens, width)."""
        return positions(0, self.length).index_select(0, self.places % self.length)

    def pad(self, heads: Tensor) -> Tensor:
        """Heads of the tokens (1, heads, tokens, width) in their rows: (batch, heads, length, width)."""
        flat = heads[0].transpose(0, 1).flatten(1)  # (tokens, heads · width)
        padded: Tensor = _Pad.apply(flat, self.tokens, self.places)  # type: ignore[no-untyped-call]
        return padded.view(self.batch, self.length, heads.shape[1], heads.shape[3]).transpose(1, 2)

    def take(self, heads: Tensor) -> Tensor:
        """The reverse: (batch, heads, length, width) to (1, heads, tokens, width)."""
        flat = heads.transpose(1, 2).flatten(2).flatten(0, 1)  # (batch · length, heads · width)
        taken: Tensor = _Take.apply(flat, self.places)  # type: ignore[no-untyped-call]
        return taken.view(1, len(taken), heads.shape[1], heads.shape[3]).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Padding repeats the token before it, which costs less than zeros; nobody looks there, so no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens) if len(x) else x.new_zeros(len(tokens), x.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Take(torch.autograd.Function):
    """Each place is taken once: gradients go back there without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, places, gradient), None
