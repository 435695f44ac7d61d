"""No peeking: the gradient of output i by input j is zero exactly where the mask says, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv import config
from qkv.models import MultiHeadAttention, Transformer, attend, attention_mask, attention_weights

KINDS = [(norm, positions) for norm in ("post", "pre") for positions in ("sinusoidal", "learned")]
SIZES: list[dict[str, Any]] = [
    {"d_model": 8, "d_ff": 16, "heads": 1, "encoder_layers": 1, "decoder_layers": 1},
    {"d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 3},
    {"d_model": 12, "d_ff": 16, "heads": 2, "encoder_layers": 3, "decoder_layers": 2, "d_k": 5, "d_v": 3, "bias": True},
]


def influence(model: Transformer, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> Any:
    """|d output i / d embedding j| summed over features: by target (batch, i, j), and by source (batch, i, s)."""
    inputs: dict[str, torch.Tensor] = {}

    def leaf(name: str) -> Any:
        def hook(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
            inputs[name] = output.detach().requires_grad_()
            return inputs[name]

        return hook

    model.source.register_forward_hook(leaf("source"))
    model.target.register_forward_hook(leaf("target"))
    logits = model(source, lengths, target)
    direction = torch.randn(logits.shape[-1])
    by_target, by_source = [], []
    for i in range(target.shape[1]):
        gradients = torch.autograd.grad(
            (logits[:, i] @ direction).sum(), [inputs["target"], inputs["source"]], retain_graph=True
        )
        by_target.append(gradients[0].abs().sum(-1))
        by_source.append(gradients[1].abs().sum(-1))
    return torch.stack(by_target, 1).numpy(), torch.stack(by_source, 1).numpy()


@pytest.mark.parametrize("size", SIZES, ids=["small", "deep", "odd"])
@pytest.mark.parametrize(("norm", "positions"), KINDS)
@settings(max_examples=6)
@given(target=st.integers(1, 7), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_outputs_see_the_source_and_the_target_before_them(
    norm: str, positions: str, size: dict[str, Any], target: int, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = Transformer(config.Transformer(norm=norm, positions=positions, max_positions=9, **size), 20, 20).eval()
    width = max(lengths) + seed % 2  # sometimes a column that is padding in every row
    source = torch.randint(3, 20, (len(lengths), width))
    by_target, by_source = influence(model, source, torch.tensor(lengths), torch.randint(3, 20, (len(lengths), target)))
    may_see = np.broadcast_to(np.tri(target, dtype=bool), by_target.shape)
    np.testing.assert_array_equal(by_target > 0, may_see)
    real = np.arange(width) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(by_source > 0, np.broadcast_to(real[:, None], by_source.shape))


@pytest.mark.parametrize(("norm", "positions"), KINDS)
def test_padding_cannot_be_seen_whatever_stands_there(norm: str, positions: str) -> None:
    torch.manual_seed(4)
    model = Transformer(config.Transformer(norm=norm, positions=positions, **SIZES[1]), 20, 20).eval()
    source, target, lengths = torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 5)), torch.tensor([4, 6])
    other = source.clone()
    other[0, 4:] = torch.tensor([0, 19])
    assert torch.equal(model(source, lengths, target), model(other, lengths, target))
    later = target.clone()
    later[:, 3:] = 7
    assert torch.equal(model(source, lengths, target)[:, :3], model(source, lengths, later)[:, :3])


@given(
    queries=st.integers(1, 6),
    before=st.integers(0, 4),
    lengths=st.none() | st.lists(st.integers(0, 10), min_size=1, max_size=3),
    causal=st.booleans(),
    window=st.integers(0, 4),
)
def test_the_mask_is_its_definition(
    queries: int, before: int, lengths: list[int] | None, causal: bool, window: int
) -> None:
    keys = queries + before
    mask = attention_mask(
        queries, keys, None if lengths is None else torch.tensor(lengths), causal=causal, window=window
    )
    assert mask.dtype == torch.bool
    assert mask.shape == (1 if lengths is None else len(lengths), 1, queries, keys)
    for b, i, j in np.ndindex(mask.shape[0], queries, keys):
        place = before + i  # the last query stands at the last key
        may = (not causal or j <= place) and (not window or abs(place - j) <= window)
        assert bool(mask[b, 0, i, j]) == (may and (lengths is None or j < lengths[b]))


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_a_windows_gradient_is_its_mask(length: int, window: int, causal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    module = MultiHeadAttention(8, 2, 4, 3)
    x = torch.randn(1, length, 8, requires_grad=True)
    mask = attention_mask(length, length, causal=causal, window=window)
    out = module(*module.project(x), mask) @ torch.randn(8)  # (1, length)
    seen = [torch.autograd.grad(out[0, i], x, retain_graph=True)[0].abs().sum(-1)[0] for i in range(length)]
    np.testing.assert_array_equal(torch.stack(seen).numpy() > 0, mask[0, 0].numpy())


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 99))
def test_causal_flag_and_causal_mask_are_the_same(length: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 2, length, 4)
    mask = attention_mask(length, length, causal=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), attend(q, k, v, mask))
    assert not attention_weights(q, k, mask).triu(1).any()
