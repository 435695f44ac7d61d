"""Embedding × √d_model plus positions, then dropout (sections 3.4, 3.5 and 5.4), forward and backward."""

from __future__ import annotations

from torch import Tensor

from qkv.models.fused.noise import Noise, drop
from qkv.models.kernels import tl, triton

if triton is not None:
    from qkv.models.fused.noise import _keep


def embed(ids: Tensor, places: Tensor, table: Tensor, positions: Tensor | None, scale: float, noise: Noise) -> Tensor:
    """Vectors of ids (tokens,) at their places in the sentences: (tokens, d_model), of the table's precision."""
    chosen = embed_kernel if triton is not None and table.is_cuda else embed_plain
    return chosen(ids, places, table, positions, scale, noise)


def embed_backward(
    d_x: Tensor, ids: Tensor, places: Tensor, d_table: Tensor, d_positions: Tensor | None, scale: float, noise: Noise
) -> None:
    """Add the gradients to those of the table and, if they are learned, of the positions."""
    chosen = embed_backward_kernel if triton is not None and d_x.is_cuda else embed_backward_plain
    chosen(d_x, ids, places, d_table, d_positions, scale, noise)


def embed_plain(
    ids: Tensor, places: Tensor, table: Tensor, positions: Tensor | None, scale: float, noise: Noise
) -> Tensor:
    x = table[ids.long()].float() * scale
    if positions is not None:
        x = x + positions[places.long()].float()
    return drop(x, noise).to(table.dtype)


def embed_backward_plain(
    d_x: Tensor, ids: Tensor, places: Tensor, d_table: Tensor, d_positions: Tensor | None, scale: float, noise: Noise
) -> None:
    d_x = drop(d_x.float(), noise)
    d_table.index_add_(0, ids.long(), d_x * scale)
    if d_positions is not None:
        d_positions.index_add_(0, places.long(), d_x)


def embed_kernel(
    ids: Tensor, places: Tensor, table: Tensor, positions: Tensor | None, scale: float, noise: Noise
) -> Tensor:
    x = table.new_empty(len(ids), table.shape[1])
    _embed[(len(ids),)](
        ids,
        places,
        table,
        table if positions is None else positions,
        x,
        noise.seed,
        noise.salt,
        scale,
        noise.scale,
        has_positions=positions is not None,
        **_sizes(table, noise),
    )
    return x


def embed_backward_kernel(
    d_x: Tensor, ids: Tensor, places: Tensor, d_table: Tensor, d_positions: Tensor | None, scale: float, noise: Noise
) -> None:
    _embed_backward[(len(ids),)](
        d_x,
        ids,
        places,
        d_table,
        d_table if d_positions is None else d_positions,
        noise.seed,
        noise.salt,
        scale,
        noise.scale,
        has_positions=d_positions is not None,
        **_sizes(d_table, noise),
    )


def _sizes(table: Tensor, noise: Noise) -> dict[str, int]:
    width = table.shape[1]
    return {"width": width, "block": triton.next_power_of_2(width), "threshold": noise.threshold, "num_warps": 2}


if triton is not None:

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _embed(  # type: ignore[no-untyped-def]
        ids,
        places,
        table,
        positions,
        x,
        seed,
        salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
    ):
        """One program a token."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        found = tl.load(table + tl.load(ids + token) * width + inside, mask=real, other=0.0).to(tl.float32) * scale
        if has_positions:
            at = tl.load(places + token) * width
            found += tl.load(positions + at + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            found = tl.where(_keep(token * width + inside, seed, salt, threshold), found * factor, 0.0)
        tl.store(x + token * width + inside, found.to(x.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["salt"])  # type: ignore[untyped-decorator]
    def _embed_backward(  # type: ignore[no-untyped-def]
        d_x,
        ids,
        places,
        d_table,
        d_positions,
        seed,
        salt,
        scale,
        factor,
        has_positions: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        threshold: tl.constexpr,
    ):
        """One program a token; many may add to the same row."""
        token, inside = tl.program_id(0), tl.arange(0, block)
        real = inside < width
        given = tl.load(d_x + token * width + inside, mask=real, other=0.0).to(tl.float32)
        if threshold > 0:
            given = tl.where(_keep(token * width + inside, seed, salt, threshold), given * factor, 0.0)
        tl.atomic_add(d_table + tl.load(ids + token) * width + inside, given * scale, mask=real, sem="relaxed")
        if has_positions:
            at = tl.load(places + token) * width
            tl.atomic_add(d_positions + at + inside, given, mask=real, sem="relaxed")
