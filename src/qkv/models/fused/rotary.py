"""Rotary positions: queries and keys turned by the angles of their places, in place, and back again.

A turn is undone by the opposite one, and so is its gradient: the backward pass needs nothing of the forward pass.
"""

from __future__ import annotations

from torch import Tensor

from qkv.models.attention import rotate
from qkv.models.kernels import tl, triton


def turn(x: Tensor, places: Tensor, table: Tensor, *, back: bool = False) -> None:
    """Turn the heads beside each other in x (tokens, heads · d_k) by the angles of `places` (tokens,), or back.

    `table` (positions, d_k) is that of the sinusoids: sines and cosines of the angles in turn.
    """
    chosen = turn_kernel if triton is not None and x.is_cuda else turn_plain
    chosen(x, places, table, back)


def turn_plain(x: Tensor, places: Tensor, table: Tensor, back: bool) -> None:
    angles = table[places.long()]
    if back:
        angles[:, 0::2].neg_()  # the sines
    x.copy_(rotate(x.unflatten(1, (-1, table.shape[1])), angles[:, None]).flatten(1))


def turn_kernel(x: Tensor, places: Tensor, table: Tensor, back: bool) -> None:
    pairs = x.shape[1] // 2
    _turn[(len(x),)](
        x, places, table, x.stride(0), pairs=pairs, d_k=table.shape[1], block=triton.next_power_of_2(pairs), back=back
    )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn(  # type: ignore[no-untyped-def]
        x, places, table, stride, pairs: tl.constexpr, d_k: tl.constexpr, block: tl.constexpr, back: tl.constexpr
    ):
        """One program a token; both numbers of a pair are one thread's, so neither is overwritten before it is read."""
        token, pair = tl.program_id(0), tl.arange(0, block)
        real = pair < pairs
        angle = table + tl.load(places + token) * d_k + pair * 2 % d_k
        sin, cos = tl.load(angle, mask=real, other=0.0), tl.load(angle + 1, mask=real, other=1.0)
        if back:
            sin = -sin
        place = x + token.to(tl.int64) * stride + pair * 2
        even = tl.load(place, mask=real, other=0.0).to(tl.float32)
        odd = tl.load(place + 1, mask=real, other=0.0).to(tl.float32)
        tl.store(place, (even * cos - odd * sin).to(x.dtype.element_ty), mask=real)
        tl.store(place + 1, (even * sin + odd * cos).to(x.dtype.element_ty), mask=real)
