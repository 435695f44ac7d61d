"""Variants of the paper's choices: scores, positions, norms and activations, each against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.assembly import build_model
from qkv.core.attention import MultiHeadAttention
from qkv.core.errors import UsageError
from qkv.core.transformer import SinusoidalPositions, sinusoids
from qkv.models.variants import (
    LearnedPositions,
    VariantAttention,
    VariantFeedForward,
    VariantLayers,
    attention_scores,
    rotary_of,
    rotate,
)
from qkv.options import TransformerConfig

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, sizes, st.integers(0, 99))
def test_scores(heads: int, queries: int, keys: int, d_k: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, heads, queries, d_k), torch.randn(2, heads, keys, d_k)
    W, w = torch.randn(heads, d_k, d_k), torch.randn(heads, d_k)
    found = {name: attention_scores(q, k, name, {"general": W, "additive": w}.get(name)) for name in SCORES}
    for b, h, i, j in np.ndindex(2, heads, queries, keys):
        x, y = q[b, h, i].double().numpy(), k[b, h, j].double().numpy()
        expected = {
            "scaled": x @ y / np.sqrt(d_k),
            "dot": x @ y,
            "general": x @ W[h].double().numpy() @ y,
            "additive": w[h].double().numpy() @ np.tanh(x + y),
        }
        for name, value in expected.items():
            assert float(found[name][b, h, i, j]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


SCORES = ["scaled", "dot", "general", "additive"]


@pytest.mark.parametrize("score", SCORES)
def test_attention_with_every_score(score: str) -> None:
    """The fused and the written-out form are softmax(score)·V of the module's projections."""
    torch.manual_seed(1)
    module = VariantAttention(8, 2, 3, 5, score=score)
    x = torch.randn(2, 4, 8)
    q, k, v = module.project(x)
    weights = attention_scores(q, k, score, module.score_weight).softmax(-1)
    expected = module.output((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(q, k, v), expected, atol=1e-5, rtol=1e-5)
    extra = {"general": 2 * 3 * 3, "additive": 2 * 3}.get(score, 0)
    assert sum(p.numel() for p in module.parameters()) == 8 * 2 * (3 + 3 + 5) + 2 * 5 * 8 + extra


# ---- rotary ----------------------------------------------------------------------------------------------------------


def test_rotation_is_by_the_positions_angle() -> None:
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    turned = rotate(x, sinusoids(6, 8))
    for position, pair in np.ndindex(6, 4):
        angle = position / 10000 ** (2 * pair / 8)
        number = complex(x[0, 0, position, 2 * pair], x[0, 0, position, 2 * pair + 1]) * np.exp(1j * angle)
        found = turned[0, 0, position, 2 * pair : 2 * pair + 2].tolist()
        assert found == pytest.approx([number.real, number.imag], abs=1e-5)


def test_rotation_in_bf16_is_that_in_fp32_rounded() -> None:
    """As a GPU decodes: weights, and with them the table, in bf16."""
    x, table = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1)), sinusoids(5, 8)
    turned = rotate(x.bfloat16(), table.bfloat16())
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x, table), rtol=2e-2, atol=2e-2)


@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 500), st.integers(0, 99))
def test_rotary_scores_depend_on_distance_alone(i: int, j: int, shift: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 8).double()
    table = sinusoids(600, 8).double()

    def score(at: int, other: int) -> float:
        return float(
            rotate(q[None], table[at : at + 1]).double()[0] @ rotate(k[None], table[other : other + 1]).double()[0]
        )

    assert score(i + shift, j + shift) == pytest.approx(score(i, j), abs=2e-4)


def test_learned_positions_begin_as_small_as_embeddings_and_end() -> None:
    torch.manual_seed(0)
    positions = LearnedPositions(64, 500)
    assert float(positions.table.detach().std()) == pytest.approx(64**-0.5, rel=0.02)
    assert torch.equal(positions(498, 2), positions.table[498:])
    with pytest.raises(UsageError, match=r"a sequence of 501 tokens, but model\.max_positions = 500"):
        positions(499, 2)


def test_rotary_goes_past_the_training_length_and_learned_does_not() -> None:
    spec = {"d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    source, lengths, target = torch.randint(3, 9, (1, 700)), torch.tensor([700]), torch.randint(3, 9, (1, 700))
    for positions in ("sinusoidal", "rotary", "none"):
        made: Any = TransformerConfig(positions=positions, **spec)  # type: ignore[arg-type]
        assert build_model(made, 10, 10).eval()(source, lengths, target).isfinite().all()
    learned: Any = TransformerConfig(positions="learned", max_positions=512, **spec)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"700 tokens, but model\.max_positions = 512"):
        build_model(learned, 10, 10).eval()(source, lengths, target)


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_a_table_that_grew_in_validation_serves_training(positions: str) -> None:
    spec = TransformerConfig(
        d_model=16, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0, positions=positions
    )
    model = build_model(spec, 10, 10)
    long = torch.randint(3, 9, (1, 600)), torch.tensor([600]), torch.randint(3, 9, (1, 600))
    with torch.inference_mode():
        model(*long)
    model(*long).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rotary_turns_nothing_between_source_and_target() -> None:
    spec = TransformerConfig(d_model=8, d_ff=8, heads=2, encoder_layers=1, decoder_layers=1, positions="rotary")
    model = build_model(spec, 10, 10)
    assert model.decoder[0].cross_attention is not None
    assert rotary_of(model.decoder[0].cross_attention) is None
    assert isinstance(rotary_of(model.decoder[0].attention), SinusoidalPositions)
    assert model.source.positions is None
    assert not [name for name, _ in model.named_parameters() if "rotary" in name or "positions" in name]


# ---- norms and feed-forward ------------------------------------------------------------------------------------------


def test_norms() -> None:
    x = torch.randn(3, 8)
    plain = x.double().numpy()
    for rms, centred in ((False, plain - plain.mean(-1, keepdims=True)), (True, plain)):
        norm = VariantLayers(TransformerConfig(d_model=8, rms_norm=rms)).norm()
        torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * norm.weight.detach().numpy()
        np.testing.assert_allclose(norm(x).detach().numpy(), expected, atol=1e-5)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_feed_forward_activations() -> None:
    from math import erf

    x = torch.randn(3, 4)
    plain = x.double().numpy()

    def matrix(linear: Any) -> Any:
        return linear.weight.detach().double().numpy().T

    relu, gelu, swiglu = (VariantFeedForward(4, 6, activation=name) for name in ("relu", "gelu", "swiglu"))
    inner = plain @ matrix(relu.inner) + relu.inner.bias.detach().numpy()
    expected = np.maximum(inner, 0) @ matrix(relu.outer) + relu.outer.bias.detach().numpy()
    np.testing.assert_allclose(relu(x).detach(), expected, atol=1e-5)
    inner = plain @ matrix(gelu.inner)
    expected = inner * 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2))) @ matrix(gelu.outer)
    np.testing.assert_allclose(gelu(x).detach(), expected, atol=1e-5)
    inner = plain @ matrix(swiglu.inner)
    expected = inner / (1 + np.exp(-inner)) * (plain @ matrix(swiglu.gate)) @ matrix(swiglu.outer)
    np.testing.assert_allclose(swiglu(x).detach(), expected, atol=1e-5)
    assert sum(p.numel() for p in swiglu.parameters()) == 3 * 4 * 6


def test_any_width_of_keys_and_values() -> None:
    q, k, v = torch.randn(1, 2, 3, 7), torch.randn(1, 2, 5, 7), torch.randn(1, 2, 5, 4)
    assert MultiHeadAttention(8, 2, 7, 4).attend(q, k, v).shape == (1, 2, 3, 4)
