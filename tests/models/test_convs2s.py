"""ConvS2S: its equations, its receptive field, and equal results of whole and stepped decoding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conftest import leaves
from qkv.assembly import parameter_count
from qkv.core.search import SearchOptions, search
from qkv.core.tokenizer import Tokenizer
from qkv.models.convs2s import ConvS2S, EncoderLayer, GatedConvolution, dilations, neighbours
from qkv.models.variants import record_attention
from qkv.options import ConvS2SConfig

VOCAB = 20
KINDS = ("contiguous", "dilated", "separable")
kinds = pytest.mark.parametrize("convolution", KINDS)
COMBINATIONS = list(itertools.product(KINDS, (1, 3, 5), ("learned", "sinusoidal", "none"), ("all", "output", "none")))


def spec_of(**options: Any) -> ConvS2SConfig:
    small = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 3, "max_positions": 64, "dropout": 0.0}
    return ConvS2SConfig(**(small | options))


def model_of(seed: int = 0, **options: Any) -> ConvS2S:
    """Weights as after training: no bias is zero, and no gain equals the norm of its direction."""
    torch.manual_seed(seed)
    model = ConvS2S(spec_of(**options), VOCAB, VOCAB).eval()
    for name, p in model.named_parameters():
        if name.endswith(("gain", "bias")):
            torch.nn.init.normal_(p, mean=float(name.endswith("gain")), std=0.3)
    return model


def some(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# ---- the equations ---------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]


def matrix(weights: dict[str, Array], name: str) -> Array:
    """w = g · v / ‖v‖, row by row."""
    v, g = weights[f"{name}.direction"], weights[f"{name}.gain"]
    return np.stack([g[i] * v[i] / np.sqrt((v[i] ** 2).sum()) for i in range(len(v))])


def gated(weights: dict[str, Array], name: str, x: Array, places: list[int]) -> Array:
    """GLU of the convolution of x (n, d); the inputs of position i are at i + each of `places`."""
    n, d = x.shape
    out = np.zeros((n, d))
    mixture, bias = matrix(weights, f"{name}.mixture"), weights[f"{name}.mixture.bias"]
    for i in range(n):
        window = [x[i + place] if 0 <= i + place < n else np.zeros(d) for place in places]
        if f"{name}.depthwise.gain" in weights:
            depthwise = matrix(weights, f"{name}.depthwise")  # (d, kernel)
            window = [sum((depthwise[:, j] * one for j, one in enumerate(window)), start=np.zeros(d))]
        both = mixture @ np.concatenate(window) + bias
        out[i] = both[:d] / (1 + np.exp(-both[d:]))
    return out


def statement(model: ConvS2S, source: list[int], target: list[int]) -> Array:
    """ConvS2S of one sentence pair with learned positions: logits (target, vocab)."""
    spec, k = model.config, model.config.kernel
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    d = spec.d_model
    sizes = [k**i if spec.convolution == "dilated" else 1 for i in range(3)]

    def embed(side: str, ids: list[int]) -> Array:
        words = weights[f"{side}.tokens.weight"][ids] * math.sqrt(d)
        embedded: Array = (words + weights[f"{side}.positions.table"][: len(ids)]) * 0.1
        return embedded

    e, g = embed("source", source), embed("target", target)
    z = e
    for i in range(spec.encoder_layers):
        around = [sizes[i] * j for j in range(-(k // 2), k // 2 + 1)]
        z = (z + gated(weights, f"encoder.{i}.convolution", z, around)) / math.sqrt(2)
    x = g
    for i in range(spec.decoder_layers):
        before = [sizes[i] * j for j in range(-k + 1, 1)]
        h = gated(weights, f"decoder.{i}.convolution", x, before)
        query = h @ matrix(weights, f"decoder.{i}.query").T + weights[f"decoder.{i}.query.bias"]
        scores = (query + g) / math.sqrt(2) @ z.T
        a = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        c = math.sqrt(len(source)) * a @ ((z + e) / math.sqrt(2))
        x = (x + (h + c) / math.sqrt(2)) / math.sqrt(2)
    logits: Array = (x @ matrix(weights, "last").T + weights["last.bias"]) @ weights["output.weight"].T
    return logits


@kinds
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_model_is_its_equations(convolution: str, kernel: int) -> None:
    model = model_of(convolution=convolution, kernel=kernel, tie="none").double()
    source, target = some(1, 7), some(1, 9, seed=2)
    found = model(source, torch.tensor([7]), target)[0].detach().numpy()
    np.testing.assert_allclose(found, statement(model, source[0].tolist(), target[0].tolist()), atol=1e-10)


@given(st.integers(1, 6), st.integers(-9, 9), st.data())
def test_neighbours_are_those_so_far_before(length: int, offset: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, length + 4))
    x = torch.arange(1.0, length + 1)[None, :, None]
    places = [i - offset for i in range(length - n, length)]
    expected = [float(place + 1) if 0 <= place < length else 0.0 for place in places]
    assert neighbours(x, offset, n).flatten().tolist() == expected


def test_weights_begin_as_their_directions_and_only_directions_turn_them() -> None:
    layer = GatedConvolution(spec_of(), 1, causal=True).mixture
    same(layer.weight(), layer.direction)
    before = layer.weight().detach()
    with torch.no_grad():
        layer.direction *= torch.rand(len(layer.direction), 1) + 0.5
    same(layer.weight(), before)


@pytest.mark.parametrize("convolution", ["contiguous", "separable"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_deep_stack_keeps_the_variance_of_what_enters_it(convolution: str, dropout: float) -> None:
    torch.manual_seed(0)
    spec = spec_of(convolution=convolution, dropout=dropout, d_model=64)
    x = torch.randn(20, 60, 64) * 0.1
    before = x.var()
    for _ in range(10):
        x = EncoderLayer(spec, 1)(x, torch.zeros(20, 60, 1, dtype=torch.bool))
    assert 0.6 < x.var() / before < 1.6


def test_the_encoder_gets_its_gradient_divided_by_twice_the_attentions() -> None:
    """Compared with finite differences; gradients of embeddings, which are also part of the values, are not scaled."""
    model = model_of().double()
    bias, eps = model.encoder[0].convolution.mixture.bias, 1e-6
    inputs = some(2, 5), torch.tensor([5, 3]), some(2, 4, seed=2)
    assert bias is not None
    model(*inputs).square().sum().backward()
    sums = []
    with torch.no_grad():
        for change in (eps, -2 * eps):
            bias[1] += change
            sums.append(float(model(*inputs).square().sum()))
    assert bias.grad is not None
    assert float(bias.grad[1]) == pytest.approx((sums[0] - sums[1]) / (2 * eps) / (2 * 3), rel=1e-4)


def test_separable_convolutions_have_fewer_parameters() -> None:
    d, k, layers = 8, 5, 2 + 3
    count = {kind: parameter_count(model_of(convolution=kind, kernel=k)) for kind in KINDS}
    assert count["contiguous"] == count["dilated"]
    assert count["contiguous"] - count["separable"] == layers * (2 * k * d * d - (2 * d * d + k * d + d))
    assert count["separable"] < count["contiguous"]


# ---- receptive fields ------------------------------------------------------------------------------------------------


def influence(output: torch.Tensor, given: torch.Tensor) -> NDArray[np.bool_]:
    """Where output i (batch, i, d) changes with input j (batch, j, d): (batch, i, j)."""
    direction = torch.randn(output.shape[-1], dtype=output.dtype)
    found = []
    for i in range(output.shape[1]):
        (gradient,) = torch.autograd.grad((output[:, i] @ direction).sum(), given, retain_graph=True)
        found.append((gradient != 0).any(-1))
    return torch.stack(found, 1).numpy()


def reached(n: int, layers: list[list[int]]) -> NDArray[np.bool_]:
    """The receptive field (n, n) of a stack of layers that read these relative positions."""
    seen = np.eye(n, dtype=bool)
    for places in layers:
        one = np.eye(n, dtype=bool)  # by the residual connection
        for place in places:
            one |= np.eye(n, k=place, dtype=bool)
        seen = one @ seen
    return seen


@kinds
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_receptive_field_follows_from_kernel_and_dilations(convolution: str, kernel: int, depth: int) -> None:
    model = model_of(convolution=convolution, kernel=kernel, encoder_layers=depth, decoder_layers=depth).double()
    inputs, n = leaves(source=model.source, target=model.target), 40
    hidden = model.hidden(some(1, 2), torch.tensor([2]), some(1, n))
    sizes = [kernel**i if convolution == "dilated" else 1 for i in range(depth)]
    before = reached(n, [[-size * j for j in range(kernel)] for size in sizes])
    np.testing.assert_array_equal(influence(hidden, inputs["target"])[0], before)
    # The receptive field of the last position grows by kernel − 1 per layer, or kernel-fold with dilation.
    assert before[-1].sum() == min(n, kernel**depth if convolution == "dilated" else depth * (kernel - 1) + 1)
    keys = model.encode(some(1, n), torch.tensor([n])).keys[:, 0]
    around = reached(n, [[size * j for j in range(-(kernel // 2), kernel // 2 + 1)] for size in sizes])
    np.testing.assert_array_equal(influence(keys, inputs["source"])[0], around)


def test_dilations_begin_anew_before_they_pass_every_sentence() -> None:
    found = {k: list(dilations(spec_of(kernel=k, convolution="dilated"), 8)) for k in (1, 3, 5)}
    assert found[3] == [1, 3, 9, 27, 81, 243, 1, 3]
    assert found[5] == [1, 5, 25, 125, 1, 5, 25, 125]
    assert set(found[1]) == set(dilations(spec_of(), 8)) == {1}


@kinds
@pytest.mark.parametrize("kernel", [1, 3])
@settings(max_examples=6)
@given(target=st.integers(1, 7), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_no_output_sees_a_later_target_or_padding(
    convolution: str, kernel: int, target: int, lengths: list[int], seed: int
) -> None:
    model = model_of(seed, convolution=convolution, kernel=kernel).double()
    inputs = leaves(source=model.source, target=model.target)
    width = max(lengths) + seed % 2  # sometimes a column that is padding in every row
    logits = model(some(len(lengths), width, seed), torch.tensor(lengths), some(len(lengths), target, seed + 1))
    assert not np.triu(influence(logits, inputs["target"]), 1).any()
    real = np.arange(width) < np.array(lengths)[:, None]
    by_source = influence(logits, inputs["source"])
    np.testing.assert_array_equal(by_source, np.broadcast_to(real[:, None], by_source.shape))


# ---- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("convolution", "kernel", "positions", "tie"), COMBINATIONS)
def test_stepped_decoding_in_a_batch_equals_the_whole_alone(
    convolution: str, kernel: int, positions: str, tie: str
) -> None:
    model = model_of(convolution=convolution, kernel=kernel, positions=positions, tie=tie)
    shared = {"all": 1, "output": 2, "none": 3}[tie]
    assert len({id(p) for p in (model.source.tokens.weight, model.target.tokens.weight, model.output.weight)}) == shared
    source, lengths, target = some(3, 6), torch.tensor([6, 2, 4]), some(3, 17, seed=2)
    with torch.inference_mode():
        alone = torch.cat([model(source[i : i + 1, : lengths[i]], lengths[i : i + 1], target[[i]]) for i in range(3)])
        same(model(torch.nn.functional.pad(source, (0, 3), value=5), lengths, target), alone)
        state = model.start(model.encode(source, lengths))
        parts = []
        for chunk in target.split([1, 4, 1, 1, 10], dim=1):
            logits, state = model.step(chunk, state)
            parts.append(logits)
    same(torch.cat(parts, dim=1), alone)


@kinds
@settings(max_examples=15)
@given(st.data())
def test_selected_rows_continue_like_new_rows(convolution: str, data: st.DataObject) -> None:
    """Steps of any size; rows repeated, dropped and reordered inside a sentence, and whole sentences likewise."""
    kernel, beam, sentences = data.draw(st.sampled_from([1, 3, 5])), data.draw(st.integers(1, 3)), 3
    model = model_of(convolution=convolution, kernel=kernel)
    source, lengths = some(sentences, 6), torch.tensor([6, 2, 4])
    owner, written = torch.arange(sentences).repeat_interleave(beam), torch.empty(sentences * beam, 0).long()
    with torch.inference_mode():
        state = model.start(model.encode(source, lengths), beam)
        for turn in range(4):
            new = some(len(owner), data.draw(st.integers(1, 9)), seed=turn)
            written = torch.cat([written, new], dim=1)
            logits, state = model.step(new, state)
            same(logits, model(source[owner], lengths[owner], written)[:, -new.shape[1] :])
            groups = len(owner) // beam
            assert len(state.encoded.keys) == len(state.encoded.values) == groups  # not once for every row
            stay = data.draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=groups + 1))
            inside = st.lists(st.integers(0, beam - 1), min_size=beam, max_size=beam)
            rows = [group * beam + row for group in stay for row in data.draw(inside)]
            state, owner, written = state.select(torch.tensor(rows)), owner[rows], written[rows]
    sizes = [kernel**i if convolution == "dilated" else 1 for i in range(3)]
    held = [past.shape[1] for past in state.past if past is not None]
    assert held == [min(written.shape[1], (kernel - 1) * size) for size in sizes]


@kinds
def test_search_does_not_depend_on_the_batch(convolution: str) -> None:
    model = model_of(convolution=convolution, tie="none")
    source, lengths = some(4, 6), torch.tensor([6, 2, 4, 1])
    options, special = SearchOptions(beam=3, extra_length=5, n_best=3), Tokenizer("char", [])
    together = search(model, source, lengths, options, special)
    for i, found in enumerate(together):
        (alone,) = search(model, source[i : i + 1, : lengths[i]], lengths[i : i + 1], options, special)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert [h.logprob for h in found] == pytest.approx([h.logprob for h in alone], abs=1e-4)


def test_recorded_weights_are_the_attention() -> None:
    model = model_of()
    source, lengths, target = some(2, 6), torch.tensor([6, 3]), some(2, 5, seed=2)
    with torch.inference_mode():
        fused = model(source, lengths, target)
        with record_attention() as recording:
            same(model(source, lengths, target), fused)
    assert list(recording) == [f"decoder.{i}.cross" for i in range(3)]
    for (weights,) in recording.values():
        assert weights.shape == (2, 1, 5, 6)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 5))
        assert not weights[1, :, :, 3:].any()
        assert weights[0].all()


@kinds
def test_half_precision_is_near_and_steps_alike(convolution: str) -> None:
    model = model_of(convolution=convolution, d_model=32)
    source, lengths, target = some(3, 6), torch.tensor([6, 2, 4]), some(3, 9, seed=2)
    exact = model(source, lengths, target)
    exact.logsumexp(-1).sum().backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(source, lengths, target)
        rough.float().logsumexp(-1).sum().backward()
        with torch.inference_mode():
            state = model.start(model.encode(source, lengths))
            parts = []
            for chunk in target.split([1, 4, 1, 3], dim=1):
                logits, state = model.step(chunk, state)
                parts.append(logits)
    assert rough.dtype == torch.bfloat16
    assert all(past is not None and past.dtype == torch.float32 for past in state.past)
    torch.testing.assert_close(torch.cat(parts, dim=1), rough, atol=0.03, rtol=0.03)
    torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(found, right, dim=0)) > 0.99
    halved = model.bfloat16()(source, lengths, target)
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), exact, atol=0.2, rtol=0.2)


def test_every_dropout_acts_and_in_training_only() -> None:
    """On both embeddings, before all five convolutions, and before the output."""
    model = ConvS2S(spec_of(dropout=0.5), VOCAB, VOCAB)
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) == 2 + 5 + 1
    inputs = some(2, 5), torch.tensor([5, 3]), some(2, 4)
    for one in dropouts:
        model.eval()
        assert torch.equal(model(*inputs), model(*inputs))
        one.train()
        assert not torch.equal(model(*inputs), model(*inputs))
