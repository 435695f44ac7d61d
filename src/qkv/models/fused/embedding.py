"""Embedding × √d_model plus positions, then dropout (sections 3.4, 3.5 and 5.4), forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.models.fused.noise import Noise, drop, kept
from qkv.models.kernels import tl, triton

if triton is not None:
    from qkv.models.fused.noise import _keep


class Tokens(NamedTuple):
    """What is looked up, and what becomes of it."""

    ids: Tensor  # (tokens,) int32
    places: Tensor  # (tokens,): their positions in the sentences
    scale: float  # √d_model
    noise: Noise  # drops numbers of the sum with the positions
    unseen: Noise  # drops whole tokens, of which the position remains


def embed(tokens: Tokens, table: Tensor, positions: Tensor | None) -> Tensor:
    """Their vectors, (tokens, d_model), of the table's precision."""
    chosen = embed_kernel if triton is not None and table.is_cuda else embed_plain
    return chosen(tokens, table, positions)


def embed_backward(d_x: Tensor, tokens: Tokens, d_table: Tensor, d_positions: Tensor | None) -> None:
    """Add the gradients to those of the table and, if they are learned, of the positions."""
    chosen = embed_backward_kernel if triton is not None and d_x.is_cuda else embed_backward_plain
    chosen(d_x, tokens, d_table, d_positions)


def embed_plain(tokens: Tokens, table: Tensor, positions: Tensor | None) -> Tensor:
    x = _seen(table[tokens.ids.long()].float() * tokens.scale, tokens.unseen)
    if positions is not None:
        x = x + positions[tokens.places.long()].float()
    return drop(x, tokens.noise).to(table.dtype)


def embed_backward_plain(d_x: Tensor, tokens: Tokens, d_table: Tensor, d_positions: Tensor | None) -> None:
    d_x = drop(d_x.float(), tokens.noise)
    d_table.index_add_(0, tokens.ids.long(), _seen(d_x * tokens.scale, tokens.unseen))
    if d_positions is not None:
        d_positions.index_add_(0, tokens.places.long(), d_x)


def _seen(x: Tensor, unseen: Noise) -> Tensor:
    if not unseen.rate:
        return x
    return x * kept(unseen, torch.arange(len(x), dtype=torch.int32, device=x.device))[:, None]


def embed_kernel(tokens: Tokens, table: Tensor, positions: Tensor | None) -> Tensor:
    x = table.new_empty(len(tokens.ids), table.shape[1])
    _embed[(len(x),)](x, table, table if positions is None else positions, **_arguments(tokens, table, positions))
    return x


def embed_backward_kernel(d_x: Tensor, tokens: Tokens, d_table: Tensor, d_positions: Tensor | None) -> None:
    learned = d_table if d_positions is None else d_positions
    _embed_backward[(len(d_x),)](d_x, d_table, learned, **_arguments(tokens, d_table, d_positions))


def _arguments(tokens: Tokens, table: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """What both kernels are told."""
    noise, unseen, width = tokens.noise, tokens.unseen, table.shape[1]
    return {
        "ids": tokens.ids,
        "places": tokens.places,
        "seed": noise.seed,
        "salt": noise.salt,
        "unseen_salt": unseen.salt,
        "scale": tokens.scale,
        "factor": noise.scale,
        "has_positions": positions is not None,
        "width": width,
        "block": triton.next_power_of_2(width),
        "threshold": noise.threshold,
        "unseen": unseen.threshold,
        "num_warps": 2,
    }


if triton is not None:

    @triton.jit(do_not_specialize=["salt", "unseen_salt"])  # type: ignore[untyped-decorator]
    def _embed(  # type: ignore[no-untyped-def]
        x,
        table,
        positions,
        ids,
        places,
        seed,
        salt,
        unseen_salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
        unseen: tl.constexpr,
    ):
        """One program a token."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        found = tl.load(table + tl.load(ids + token) * width + inside, mask=real, other=0.0).to(tl.float32) * scale
        if unseen > 0:
            found = tl.where(_keep(token, seed, unseen_salt, unseen), found, 0.0)
        if has_positions:
            at = tl.load(places + token) * width
            found += tl.load(positions + at + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            found = tl.where(_keep(token * width + inside, seed, salt, threshold), found * factor, 0.0)
        tl.store(x + token * width + inside, found.to(x.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["salt", "unseen_salt"])  # type: ignore[untyped-decorator]
    def _embed_backward(  # type: ignore[no-untyped-def]
        d_x,
        d_table,
        d_positions,
        ids,
        places,
        seed,
        salt,
        unseen_salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
        unseen: tl.constexpr,
    ):
        """One program a token; many may add to the same row."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        given = tl.load(d_x + token * width + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            given = tl.where(_keep(token * width + inside, seed, salt, threshold), given * factor, 0.0)
        if has_positions:
            at = tl.load(places + token) * width
            tl.atomic_add(d_positions + at + inside, given, mask=real, sem="relaxed")
        if unseen > 0:
            given = tl.where(_keep(token, seed, unseen_salt, unseen), given, 0.0)
        tl.atomic_add(d_table + tl.load(ids + token) * width + inside, given * scale, mask=real, sem="relaxed")
