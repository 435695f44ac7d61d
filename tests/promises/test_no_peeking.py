"""No peeking: the gradient of output i by input j is zero exactly where the mask says, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import leaves
from qkv.assembly import build_model
from qkv.core.attention import MultiHeadAttention, attention_weights, causal_mask, padding_mask
from qkv.core.transformer import Transformer
from qkv.models.variants import ScoredAttention, window_mask, with_padding
from qkv.options import DecoderOnlyConfig, EncoderOnlyConfig, TransformerConfig

KINDS: list[dict[str, Any]] = [
    {"norm": "post", "positions": "sinusoidal"},
    {"norm": "pre", "positions": "sinusoidal"},
    {"norm": "post", "positions": "learned"},
    {"norm": "pre", "positions": "none", "rms_norm": True, "activation": "swiglu"},
    {"norm": "pre", "positions": "rotary", "attention": "dot", "activation": "gelu"},
    {"norm": "pre", "attention": "additive"},
    {"norm": "pre", "attention": "general"},
]
NAMES = ["post", "pre", "learned", "none", "rotary", "additive", "general"]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)
SIZES: list[dict[str, Any]] = [
    {"d_model": 8, "d_ff": 16, "heads": 1, "encoder_layers": 1, "decoder_layers": 1},
    {"d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 3},
    {"d_model": 12, "d_ff": 16, "heads": 2, "encoder_layers": 3, "decoder_layers": 2, "d_k": 6, "d_v": 3, "bias": True},
]


def influence(model: Transformer, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> Any:
    """|d output i / d embedding j| summed over features: by target (batch, i, j), and by source (batch, i, s)."""
    inputs = leaves(source=model.source, target=model.target)
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
@kinds
@settings(max_examples=6)
@given(target=st.integers(1, 7), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_outputs_see_the_source_and_the_target_before_them(
    kind: dict[str, Any], size: dict[str, Any], target: int, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = build_model(TransformerConfig(max_positions=9, **kind, **size), 20, 20).eval()
    width = max(lengths) + seed % 2  # sometimes a column that is padding in every row
    source = torch.randint(3, 20, (len(lengths), width))
    by_target, by_source = influence(model, source, torch.tensor(lengths), torch.randint(3, 20, (len(lengths), target)))
    may_see = np.broadcast_to(np.tri(target, dtype=bool), by_target.shape)
    np.testing.assert_array_equal(by_target > 0, may_see)
    real = np.arange(width) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(by_source > 0, np.broadcast_to(real[:, None], by_source.shape))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("size", SIZES, ids=["small", "deep", "odd"])
@kinds
def test_a_window_reaches_so_far_a_layer(kind: dict[str, Any], size: dict[str, Any], window: int) -> None:
    """Restricted self-attention: each decoder layer reaches `window` positions back; the whole source is visible."""
    torch.manual_seed(window)
    spec = TransformerConfig(max_positions=20, window=window, **kind, **size)
    lengths = torch.tensor([12, 3])
    by_target, by_source = influence(
        build_model(spec, 20, 20).eval(), torch.randint(3, 20, (2, 12)), lengths, torch.randint(3, 20, (2, 12))
    )
    distance = np.arange(12)[:, None] - np.arange(12)
    may_see = (distance >= 0) & (distance <= window * size["decoder_layers"])
    np.testing.assert_array_equal(by_target > 0, np.broadcast_to(may_see, by_target.shape))
    real = np.arange(12) < lengths.numpy()[:, None]
    np.testing.assert_array_equal(by_source > 0, np.broadcast_to(real[:, None], by_source.shape))


def reach(model: Any, embedding: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    """Which input positions each output position depends on: (outputs, inputs), for one row."""
    given = leaves(input=embedding)
    logits = model(*inputs)[0]
    weighted = logits @ torch.randn(logits.shape[-1])
    seen = [torch.autograd.grad(each, given["input"], retain_graph=True)[0][0].abs().sum(-1) for each in weighted]
    return torch.stack(seen).numpy() > 0


@pytest.mark.parametrize("window", [0, 2])
@kinds
def test_a_language_model_uses_the_tokens_before(kind: dict[str, Any], window: int) -> None:
    torch.manual_seed(window)
    spec = DecoderOnlyConfig(d_model=16, d_ff=24, heads=4, layers=2, window=window, max_positions=20, **kind)
    model = build_model(spec, 20, 20).eval()
    distance = np.arange(11)[:, None] - np.arange(11)
    may_see = (distance >= 0) & (distance <= (2 * window or 11))
    np.testing.assert_array_equal(reach(model, model.target, torch.randint(3, 20, (1, 11))), may_see)


@pytest.mark.parametrize("window", [0, 2])
@kinds
def test_an_encoder_attends_to_all_tokens_but_padding(kind: dict[str, Any], window: int) -> None:
    torch.manual_seed(window)
    spec = EncoderOnlyConfig(d_model=16, d_ff=24, heads=4, layers=2, window=window, max_positions=20, **kind)
    model = build_model(spec, 20, 20).eval()
    seen = reach(model, model.source, torch.randint(3, 20, (1, 12)), torch.tensor([9]))
    distance = np.abs(np.arange(9)[:, None] - np.arange(12))
    may_see = (distance <= (2 * window or 12)) & (np.arange(12) < 9)
    np.testing.assert_array_equal(seen[:9], may_see)


@kinds
def test_the_content_of_padding_changes_nothing(kind: dict[str, Any]) -> None:
    torch.manual_seed(4)
    model = build_model(TransformerConfig(**kind, **SIZES[1]), 20, 20).eval()
    source, target, lengths = torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 5)), torch.tensor([4, 6])
    other = source.clone()
    other[0, 4:] = torch.tensor([0, 19])
    assert torch.equal(model(source, lengths, target), model(other, lengths, target))
    later = target.clone()
    later[:, 3:] = 7
    assert torch.equal(model(source, lengths, target)[:, :3], model(source, lengths, later)[:, :3])


def mask_of(queries: int, keys: int, lengths: torch.Tensor | None, *, causal: bool, window: int) -> torch.Tensor:
    """The mask of the paper's attention, or of a window."""
    real = torch.ones(1, 1, 1, keys, dtype=torch.bool) if lengths is None else padding_mask(keys, lengths)
    if window:
        mask = window_mask(queries, keys, window, causal=causal)
        return mask if lengths is None else with_padding(mask, real)
    return (causal_mask(queries, keys) if causal else torch.ones(1, 1, queries, keys, dtype=torch.bool)) & real


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
    mask = mask_of(queries, keys, None if lengths is None else torch.tensor(lengths), causal=causal, window=window)
    assert mask.dtype == torch.bool
    assert mask.shape == (1 if lengths is None else len(lengths), 1, queries, keys)
    for b, i, j in np.ndindex(mask.shape[0], queries, keys):
        place = before + i  # the last query has the position of the last key
        may = (not causal or j <= place) and (not window or abs(place - j) <= window)
        own = window and place == j  # with a window every query keeps its own key
        assert bool(mask[b, 0, i, j]) == bool(own or (may and (lengths is None or j < lengths[b])))


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_a_windows_gradient_is_its_mask(length: int, window: int, causal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    module = MultiHeadAttention(8, 2, 4, 3)
    x = torch.randn(1, length, 8, requires_grad=True)
    mask = mask_of(length, length, None, causal=causal, window=window)
    out = module(*module.project(x), mask) @ torch.randn(8)  # (1, length)
    seen = [torch.autograd.grad(out[0, i], x, retain_graph=True)[0].abs().sum(-1)[0] for i in range(length)]
    np.testing.assert_array_equal(torch.stack(seen).numpy() > 0, mask[0, 0].numpy())


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from(["scaled", "dot", "general", "additive"]),
    st.none() | st.integers(1, 40),
    st.integers(0, 99),
)
def test_restricted_attention_is_attention_under_its_mask(
    n: int, window: int, causal: bool, score: str, real: int | None, seed: int
) -> None:
    """In blocks, as one masked matrix, and written out: three ways to the same values and gradients."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 4, requires_grad=True) for _ in range(3))
    weight = {"general": torch.randn(3, 4, 4), "additive": torch.randn(3, 4)}.get(score)
    lengths = None if real is None else torch.tensor([min(real, n), n])
    keys = None if lengths is None else padding_mask(n, lengths)
    whole = mask_of(n, n, lengths, causal=causal, window=window)
    restricted = ScoredAttention(score, weight, "", window=window)
    found = [
        restricted.attend(q, k, v, keys, causal),
        ScoredAttention(score, weight, "").attend(q, k, v, whole),
        restricted.weights(q, k, keys, causal) @ v,
    ]
    direction = torch.randn_like(found[0])
    gradients = [torch.autograd.grad((each * direction).sum(), (q, k, v), retain_graph=True) for each in found]
    for each, gradient in zip(found[1:], gradients[1:], strict=True):
        torch.testing.assert_close(each, found[0], atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 99))
def test_causal_flag_and_causal_mask_are_the_same(length: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 2, length, 4)
    attention, mask = MultiHeadAttention(4, 2, 4, 4), causal_mask(length, length)
    torch.testing.assert_close(attention.attend(q, k, v, causal=True), attention.attend(q, k, v, mask))
    assert not attention_weights(q, k, mask).triu(1).any()
