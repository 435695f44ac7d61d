"""The parts of a layer against numpy, positions, initial weights, and the order in which a layer works."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkv.core.attention import WholeSequence, padding_mask
from qkv.core.config import TransformerConfig
from qkv.core.errors import UsageError
from qkv.core.transformer import (
    Embedding,
    FeedForward,
    Layers,
    Residual,
    SinusoidalPositions,
    Transformer,
    sinusoids,
)

SMALL = TransformerConfig(d_model=8, d_ff=12, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)


def array(x: Tensor) -> Any:
    return x.detach().double().numpy()


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


# ---- positions -------------------------------------------------------------------------------------------------------


def test_sinusoids_are_the_papers() -> None:
    table = array(sinusoids(30, 6))
    for pos, i in np.ndindex(30, 3):
        angle = pos / 10000 ** (2 * i / 6)
        assert table[pos, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[pos, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_a_table_of_sinusoids_grows_and_works_in_training_afterwards() -> None:
    positions, whole = SinusoidalPositions(6, length=4), sinusoids(40, 6)
    assert len(positions.table) == 4
    positions.reach(4)
    assert len(positions.table) == 4
    with torch.inference_mode():
        assert torch.equal(positions(3, 2), whole[3:5])
    assert len(positions.table) == 10
    x = torch.ones(2, 6, requires_grad=True)
    (x * positions(3, 2)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, whole[3:5])
    assert not list(positions.state_dict())  # it is computed, not stored


def test_embeddings_are_scaled_and_placed_whatever_form_the_position_has() -> None:
    positions = SinusoidalPositions(6, 20)
    module, table = Embedding(11, 6, positions, dropout=0.0), array(positions.table)
    ids = torch.tensor([[3, 0, 10], [5, 5, 5]])
    words = array(module.tokens.weight)[ids.numpy()] * math.sqrt(6)
    np.testing.assert_allclose(array(module(ids)), words + table[:3], atol=1e-6)
    np.testing.assert_allclose(array(module(ids, 4)), words + table[4:7], atol=1e-6)
    starts = torch.tensor([2, 9])  # of each row
    np.testing.assert_allclose(array(module(ids, starts)), words + np.stack([table[2:5], table[9:12]]), atol=1e-6)
    each = torch.tensor([[7, 0, 1]])  # of each token
    np.testing.assert_allclose(array(module(ids[:1], each)), words[:1] + table[[7, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(array(Embedding(11, 6, None, 0.0)(ids)).shape, (2, 3, 6))


def test_embeddings_and_positions_keep_the_type_of_the_model() -> None:
    module = Embedding(11, 6, SinusoidalPositions(6, 4), dropout=0.0)
    module.tokens.to(torch.bfloat16)
    assert module(torch.tensor([[3, 1]])).dtype == torch.bfloat16, "not that of the table"
    module.double()
    assert module(torch.zeros(1, 9, dtype=torch.long)).dtype == torch.float64
    assert module.positions is not None
    assert module.positions.table.dtype == torch.float64, "of the larger table too"


def test_embeddings_begin_with_unit_variance_and_outputs_with_unit_logits() -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(d_model=64, d_ff=8, heads=2, encoder_layers=1, decoder_layers=1), 900, 900)
    assert float((model.source.tokens.weight * model.source.scale).detach().std()) == pytest.approx(1.0, rel=0.02)
    untied = Transformer(
        TransformerConfig(d_model=64, d_ff=8, heads=2, encoder_layers=1, decoder_layers=1, tie="none"), 900, 800
    )
    assert float(untied.output.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.02)
    assert "output.bias" not in dict(untied.named_parameters())


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_feed_forward_is_equation_2() -> None:
    module, x = FeedForward(48, 64), torch.randn(3, 48)
    for linear in (module.inner, module.outer):
        bound = math.sqrt(6 / (48 + 64))
        assert 0.95 * bound < float(linear.weight.detach().abs().max()) <= bound * (1 + 1e-6)
        assert not linear.bias.any()
        linear.bias.data.normal_()
    inner = array(x) @ array(module.inner.weight).T + array(module.inner.bias)
    expected = np.maximum(inner, 0) @ array(module.outer.weight).T + array(module.outer.bias)
    np.testing.assert_allclose(array(module(x)), expected, atol=1e-5)


def test_a_residual_drops_the_sublayer_and_norms_the_sum() -> None:
    x, W = torch.randn(3, 6), torch.randn(6, 6)
    module = Residual(nn.LayerNorm(6), 0.5)
    expected = layer_norm(array(x) + array(x) @ array(W))
    np.testing.assert_allclose(array(module.eval()(x, lambda y: y @ W)), expected, atol=1e-5)
    torch.manual_seed(0)
    apart = Residual(nn.Identity(), 0.5).train()(torch.full((1, 1000), 5.0), torch.ones_like) - 5  # type: ignore[arg-type]
    assert set(apart.unique().tolist()) == {0.0, 2.0}


def test_the_order_of_sublayers_is_figure_1s() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL, 13, 13).eval()
    calls: list[str] = []

    class Recorded(WholeSequence):
        def self_attention(self, layer: int, attention: Any, x: Tensor) -> Tensor:
            calls.append(f"{attention.name} {layer}")
            return x * 2

        def cross_attention(self, layer: int, attention: Any, x: Tensor) -> Tensor:
            calls.append(f"{attention.name} {layer}")
            return x.flip(-1)

    x = torch.randn(1, 2, 8)
    encoder, decoder = model.encoder[1], model.decoder[1]
    for layer in (encoder, decoder):
        layer.feed_forward.register_forward_pre_hook(lambda *_: calls.append("feed-forward"))
        for residual in layer.residuals:
            residual.norm.weight.data.uniform_(1, 2)  # of its own: new norms are all equal

    def feed_forward(part: Any, y: Any) -> Any:
        return np.maximum(y @ array(part.inner.weight).T, 0) @ array(part.outer.weight).T

    def norm(layer: Any, number: int, y: Any) -> Any:
        return layer_norm(y) * array(layer.residuals[number].norm.weight)

    first = norm(encoder, 0, array(x) * 3)
    expected = norm(encoder, 1, first + feed_forward(encoder.feed_forward, first))
    np.testing.assert_allclose(array(encoder(x, Recorded())), expected, atol=1e-5)
    first = norm(decoder, 0, array(x) * 3)
    second = norm(decoder, 1, first + first[..., ::-1])
    expected = norm(decoder, 2, second + feed_forward(decoder.feed_forward, second))
    np.testing.assert_allclose(array(decoder(x, Recorded())), expected, atol=1e-5)
    assert calls == ["encoder.1.self 1", "feed-forward", "decoder.1.self 1", "decoder.1.cross 1", "feed-forward"]


# ---- the model -------------------------------------------------------------------------------------------------------


def test_hidden_is_both_stacks_and_padding_changes_nothing() -> None:
    class Normed(Layers):
        """With a norm after the last layer, as in rings; new norms are all equal, so these differ."""

        def final_norm(self) -> nn.Module:
            norm = nn.LayerNorm(8)
            norm.weight.data.normal_()
            return norm

    torch.manual_seed(0)
    config = TransformerConfig(**{**vars(SMALL), "tie": "none"})  # source and target have tables of their own
    model = Transformer(config, 13, 13, Normed(config)).eval()
    source, lengths, target = torch.tensor([[4, 5, 6], [7, 2, 0]]), torch.tensor([3, 2]), torch.tensor([[1, 8], [1, 9]])
    encoded = model.encode(source, lengths)
    assert torch.equal(encoded.mask, padding_mask(3, lengths))
    x = model.source(source)
    for layer in model.encoder:
        x = layer(x, WholeSequence(encoded.mask))
    assert torch.equal(encoded.values, model.encoder_norm(x))
    y = model.target(target)
    for block in model.decoder:
        y = block(y, WholeSequence(encoded=encoded))
    y = model.decoder_norm(y)
    assert torch.equal(model.hidden(source, lengths, target), y)
    torch.testing.assert_close(model(source, lengths, target), y @ model.output.weight.T)
    real = torch.tensor([[True, True], [True, False]])
    assert torch.equal(model.hidden_at(real, source, lengths, target), y[real])
    alone = model.hidden(source[1:, :2], lengths[1:], target[1:])
    torch.testing.assert_close(alone[0], y[1], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_steps_of_search_are_the_logits_of_the_whole_target() -> None:
    """Several tokens at once or one, and two rows for each source."""
    torch.manual_seed(0)
    model = Transformer(SMALL, 13, 13).eval()
    source, lengths = torch.tensor([[4, 5, 6], [7, 2, 0]]), torch.tensor([3, 2])
    target = torch.tensor([[1, 8, 3, 9], [1, 9, 9, 4], [1, 3, 5, 5], [1, 4, 8, 3]])
    whole = model(source.repeat_interleave(2, 0), lengths.repeat_interleave(2), target)
    state = model.start(model.encode(source, lengths), 2)
    for tokens, expected in zip(target.split([1, 2, 1], dim=1), whole.split([1, 2, 1], dim=1), strict=True):
        logits, state = model.step(tokens, state)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    single = model.start(model.encode(source, lengths))
    logits, _ = model.step(target[::2, :1], single)
    torch.testing.assert_close(logits, whole[::2, :1], rtol=1e-5, atol=1e-5)


def test_what_is_tied_is_one_matrix() -> None:
    for tie, parameters in (("all", 1), ("output", 2), ("none", 3)):
        config = TransformerConfig(**{**vars(SMALL), "tie": tie})
        model = Transformer(config, 13, 13)
        ends = {id(w) for w in (model.source.tokens.weight, model.target.tokens.weight, model.output.weight)}
        assert len(ends) == parameters, tie
    with pytest.raises(UsageError, match="one matrix of vocabularies of 13 and 14 tokens"):
        Transformer(SMALL, 13, 14)


@dataclass(frozen=True)
class Extended(TransformerConfig):
    """The config of a ring, with options of its own."""

    norm: str = "post"
    window: int = 0


def test_layers_refuse_what_only_rings_have() -> None:
    assert Layers(Extended()).config == Extended()  # all at their defaults, which are the paper's
    for change in ({"norm": "pre"}, {"window": 3}):
        with pytest.raises(UsageError, match=rf"model.{next(iter(change))} = .*: not an option of the paper's layers"):
            Transformer(Extended(**change), 13, 13)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model\.positions = rotary"):
        Transformer(Extended(positions="rotary"), 13, 13)


def test_layers_build_the_parts_and_every_sublayer_has_its_own_norm() -> None:
    class WithoutPositions(Layers):
        def positions(self) -> None:
            return None

    model = Transformer(SMALL, 13, 13, WithoutPositions(SMALL))
    assert model.source.positions is None
    assert isinstance(Transformer(SMALL, 13, 13).source.positions, SinusoidalPositions)
    norms = [name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm)]
    expected = [f"encoder.{i}.residuals.{j}.norm" for i in range(2) for j in range(2)]
    assert norms == expected + [f"decoder.{i}.residuals.{j}.norm" for i in range(2) for j in range(3)]
