"""Each equation of the paper against a plain statement of it in float64 numpy, and the parameter counts of Table 3."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qkv import presets
from qkv.assembly import build_model, optimizer_for, parameter_count
from qkv.core import optimizer
from qkv.core.attention import MultiHeadAttention, around_attention, attend, attention_weights, padding_mask
from qkv.core.errors import UsageError
from qkv.core.transformer import (
    Embedding,
    FeedForward,
    Residual,
    SinusoidalPositions,
    Transformer,
    sinusoids,
)
from qkv.models.variants import LearnedPositions, PreNormResidual, VariantFeedForward, record_attention
from qkv.options import TrainConfig, TransformerConfig
from qkv.training.regularization import Ema
from qkv.training.unpadded import ShortDropout

Array = NDArray[np.float64]
TINY = TransformerConfig(d_model=8, d_ff=12, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)


def array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def equation_1(Q: Array, K: Array, V: Array, may: NDArray[np.bool_] | None = None) -> Array:
    scores = Q @ K.T / math.sqrt(Q.shape[1])
    return softmax(scores if may is None else np.where(may, scores, -np.inf)) @ V


def equation_2(x: Array, W1: Array, b1: Array, W2: Array, b2: Array) -> Array:
    return np.maximum(0, x @ W1 + b1) @ W2 + b2


def multi_head(x: Array, memory: Array, module: MultiHeadAttention, may: NDArray[np.bool_] | None = None) -> Array:
    """Section 3.2.2, head by head, with W_i^Q, W_i^K, W_i^V cut out of the one matrix that holds them."""
    h, d_k, d_v = module.heads, module.d_k, module.d_v
    W, b = array(module.qkv.weight).T, np.zeros(h * (2 * d_k + d_v))
    if module.qkv.bias is not None:
        b = array(module.qkv.bias)
    heads = []
    for i in range(h):
        q = slice(i * d_k, (i + 1) * d_k)
        k = slice((h + i) * d_k, (h + i + 1) * d_k)
        v = slice(2 * h * d_k + i * d_v, 2 * h * d_k + (i + 1) * d_v)
        heads.append(equation_1(x @ W[:, q] + b[q], memory @ W[:, k] + b[k], memory @ W[:, v] + b[v], may))
    bias = 0 if module.output.bias is None else array(module.output.bias)
    return np.concatenate(heads, axis=1) @ array(module.output.weight).T + bias


ATTENTION = MultiHeadAttention(4, 1, 4, 4)  # for its two ways to compute equation 1; its matrices are not used


# ---- 3.2: attention --------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_equation_1(queries: int, keys: int, d_k: int, d_v: int, masked: bool, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 3, queries, d_k), torch.randn(2, 3, keys, d_k), torch.randn(2, 3, keys, d_v)
    mask = torch.rand(2, 1, queries, keys) < 0.5
    mask[..., 0] = True  # every query has at least one key
    ours = array(attend(ATTENTION, q, k, v, mask if masked else None))
    with record_attention():
        written_out = array(attend(ATTENTION, q, k, v, mask if masked else None))
    np.testing.assert_allclose(written_out, ours, atol=1e-5)
    for b in range(2):
        for h in range(3):
            may = mask[b, 0].numpy() if masked else None
            np.testing.assert_allclose(ours[b, h], equation_1(*map(array, (q[b, h], k[b, h], v[b, h])), may), atol=1e-5)
    if masked:
        assert not attention_weights(q, k, mask).masked_select(~mask).any()


def test_equation_1_causal() -> None:
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    may = np.tri(6, dtype=bool)
    expected = equation_1(*(array(x[0, 0]) for x in (q, k, v)), may)
    np.testing.assert_allclose(array(attend(ATTENTION, q, k, v, None, causal=True))[0, 0], expected, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("d_k", "d_v"), [(4, 4), (3, 5), (5, 2)])
def test_multi_head(d_k: int, d_v: int, bias: bool) -> None:
    torch.manual_seed(1)
    module = MultiHeadAttention(12, 3, d_k, d_v, bias=bias)
    if bias:
        torch.nn.init.normal_(module.qkv.bias)
        torch.nn.init.normal_(module.output.bias)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    itself = array(module(*module.project(x), causal=True))
    lengths = torch.tensor([4, 2])
    source = array(module(module.project_query(x), *module.project_memory(memory), padding_mask(4, lengths)))
    for b in range(2):
        np.testing.assert_allclose(
            itself[b], multi_head(array(x[b]), array(x[b]), module, np.tri(5, dtype=bool)), atol=1e-5
        )
        may = np.arange(4)[None] < int(lengths[b])
        np.testing.assert_allclose(source[b], multi_head(array(x[b]), array(memory[b]), module, may), atol=1e-5)


# ---- 3.3 to 3.5: feed-forward, embeddings, positions -----------------------------------------------------------------


def test_equation_2() -> None:
    torch.manual_seed(2)
    module = FeedForward(6, 10)
    torch.nn.init.normal_(module.inner.bias)
    torch.nn.init.normal_(module.outer.bias)
    x = torch.randn(3, 6)
    inner, outer = module.inner, module.outer
    expected = equation_2(*map(array, (x, inner.weight.T, inner.bias, outer.weight.T, outer.bias)))
    np.testing.assert_allclose(array(module(x)), expected, atol=1e-5)


@given(st.integers(1, 40), st.integers(1, 12).map(lambda half: 2 * half))
def test_sinusoids(length: int, d_model: int) -> None:
    expected = np.empty((length, d_model))
    for pos in range(length):
        for i in range(d_model // 2):
            expected[pos, 2 * i] = math.sin(pos / 10000 ** (2 * i / d_model))
            expected[pos, 2 * i + 1] = math.cos(pos / 10000 ** (2 * i / d_model))
    np.testing.assert_allclose(array(sinusoids(length, d_model)), expected, atol=1e-6)


def test_sinusoids_beyond_the_table_are_the_same_function() -> None:
    short, long = SinusoidalPositions(6, length=4), sinusoids(300, 6)
    for start, length in [(0, 4), (2, 9), (250, 50), (0, 3)]:
        assert torch.equal(short(start, length), long[start : start + length])


def test_learned_positions_refuse_longer_sequences() -> None:
    positions = LearnedPositions(4, 6)
    assert torch.equal(positions(2, 4), positions.table[2:6])
    with pytest.raises(UsageError, match="max_positions = 6"):
        positions(3, 4)


@pytest.mark.parametrize("positions", [SinusoidalPositions(6), LearnedPositions(6, 20)])
def test_embedding_is_scaled_and_placed(positions: torch.nn.Module) -> None:
    module = Embedding(11, 6, positions, dropout=0.0)
    ids = torch.tensor([[3, 0, 10], [5, 5, 5]])
    expected = array(module.tokens.weight)[ids.numpy()] * math.sqrt(6) + array(positions(4, 3))
    np.testing.assert_allclose(array(module(ids, 4)), expected, atol=1e-5)


# ---- 3.1: residual connections and the whole -------------------------------------------------------------------------


def test_sublayer_order() -> None:
    x, W = torch.randn(3, 6), torch.randn(6, 6)
    post, pre = (kind(torch.nn.LayerNorm(6), 0.0) for kind in (Residual, PreNormResidual))
    np.testing.assert_allclose(array(post(x, lambda y: y @ W)), layer_norm(array(x) + array(x) @ array(W)), atol=1e-5)
    np.testing.assert_allclose(array(pre(x, lambda y: y @ W)), array(x) + layer_norm(array(x)) @ array(W), atol=1e-5)


def sublayer(x: Array, f: Any, norm: str) -> Array:
    result: Array = layer_norm(x + f(x)) if norm == "post" else x + f(layer_norm(x))
    return result


def feed_forward(module: FeedForward) -> Any:
    inner, outer = module.inner, module.outer
    weights = [array(w) for w in (inner.weight.T, inner.bias, outer.weight.T, outer.bias)]
    return lambda x: equation_2(x, *weights)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tie", ["all", "output", "none"])
def test_the_whole_model(norm: str, tie: str) -> None:
    """Figure 1 from ids to logits, written out in numpy (norms as initialised: gain 1, bias 0)."""
    torch.manual_seed(3)
    model = build_model(dataclasses.replace(TINY, norm=norm, tie=tie), 13, 13)
    source, target = torch.tensor([[4, 9, 2]]), torch.tensor([[1, 7, 7, 5]])
    end = layer_norm if norm == "pre" else (lambda x: x)

    def embed(embedding: Embedding, ids: torch.Tensor) -> Array:
        table = array(embedding.tokens.weight)[ids[0].numpy()]
        return table * math.sqrt(8) + array(sinusoids(ids.shape[1], 8))

    x = embed(model.source, source)
    for encoder in model.encoder:
        x = sublayer(x, lambda y, m=encoder.attention: multi_head(y, y, m), norm)
        x = sublayer(x, feed_forward(encoder.feed_forward), norm)
    memory = end(x)
    y = embed(model.target, target)
    for decoder in model.decoder:
        y = sublayer(y, lambda z, m=decoder.attention: multi_head(z, z, m, np.tri(4, dtype=bool)), norm)
        y = sublayer(y, lambda z, m=decoder.cross_attention: multi_head(z, memory, m), norm)
        y = sublayer(y, feed_forward(decoder.feed_forward), norm)
    logits = end(y) @ array(model.output.weight).T
    np.testing.assert_allclose(array(model(source, torch.tensor([3]), target))[0], logits, atol=1e-4)


def test_three_way_tying_is_one_tensor(tmp_path: Path) -> None:
    model = build_model(TINY, 13, 13)
    assert model.source.tokens.weight is model.target.tokens.weight is model.output.weight
    names = [name for name, _ in model.named_parameters() if "tokens" in name or name.startswith("output")]
    assert len(names) == 1
    save_file(dict(model.named_parameters()), tmp_path / "weights.safetensors")
    other = build_model(TINY, 13, 13)
    assert not torch.equal(other.output.weight, model.output.weight)
    missing = other.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False).missing_keys
    assert {name.split(".")[-1] for name in missing} <= {"weight"}
    assert other.source.tokens.weight is other.target.tokens.weight is other.output.weight
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_tying_needs_one_vocabulary() -> None:
    with pytest.raises(UsageError, match='tie = "output"'):
        build_model(TINY, 13, 14)
    apart = build_model(dataclasses.replace(TINY, tie="output"), 13, 14)
    assert apart.target.tokens.weight is apart.output.weight is not apart.source.tokens.weight


# ---- Table 3 ---------------------------------------------------------------------------------------------------------

VOCAB = 37_000
ROWS = ["paper_base", *presets.TABLE_3, "paper_big"]
# The paper's column in millions, for rows that differ from our counts by rounding of base and row alone.
PRINTED = {"b_d_k_16": 58, "b_d_k_32": 60, "c_2_layers": 36, "c_4_layers": 50, "c_8_layers": 80}
PRINTED |= {"c_d_model_256": 28, "c_d_ff_1024": 53, "c_d_ff_4096": 90}


def counted(row: str) -> int:
    name = row if row in ROWS else f"table3_{row}"
    spec = presets.PRESETS[name]().model
    assert isinstance(spec, TransformerConfig)
    with torch.device("meta"):  # shapes without numbers
        return parameter_count(build_model(spec, VOCAB, VOCAB))


def formula(d_model: int = 512, d_ff: int = 2048, h: int = 8, N: int = 6, d_k: int = 64, d_v: int = 64) -> int:
    """Embedding, once; attention h·(2·d_k + 2·d_v)·d_model, no biases; feed-forward and norms with theirs."""
    attention = h * (2 * d_k + 2 * d_v) * d_model
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    norm = 2 * d_model
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return VOCAB * d_model + N * (encoder + decoder)


def test_table_3_has_all_rows() -> None:
    letters = [name.split("_")[1] for name in presets.TABLE_3]
    assert {letter: letters.count(letter) for letter in letters} == {"a": 4, "b": 2, "c": 7, "d": 4, "e": 1}


def test_table_3_counts_follow_the_formula() -> None:
    base = counted("paper_base")
    assert base == formula()
    for row, h in [("a_1_head", 1), ("a_4_heads", 4), ("a_16_heads", 16), ("a_32_heads", 32)]:
        assert counted(row) == base == formula(h=h, d_k=512 // h, d_v=512 // h)
    for row in ("d_dropout_0", "d_dropout_0_2", "d_label_smoothing_0", "d_label_smoothing_0_2"):
        assert counted(row) == base
    assert counted("b_d_k_16") == formula(d_k=16)
    assert counted("b_d_k_32") == formula(d_k=32)
    assert counted("c_d_model_256") == formula(d_model=256, d_k=32, d_v=32)
    assert counted("c_d_model_1024") == formula(d_model=1024, d_k=128, d_v=128)
    assert counted("paper_big") == formula(d_model=1024, d_ff=4096, h=16)


def test_table_3_differences_from_base() -> None:
    base = counted("paper_base")
    # d_k shrinks W^Q and W^K of 18 attentions (6 in the encoder, 12 in the decoder), 8 heads each.
    assert base - counted("b_d_k_16") == 18 * 8 * 2 * (64 - 16) * 512
    assert base - counted("b_d_k_32") == 18 * 8 * 2 * (64 - 32) * 512
    # A layer of each stack: 3 attentions of 4 matrices 512 × 512, 2 feed-forwards, 5 norms.
    layer = 3 * 4 * 512**2 + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512
    assert base - counted("c_2_layers") == 4 * layer
    assert base - counted("c_4_layers") == 2 * layer
    assert counted("c_8_layers") - base == 2 * layer
    # An inner unit of the feed-forward: a column, a row and a bias, in 12 of them.
    assert base - counted("c_d_ff_1024") == 12 * 1024 * (2 * 512 + 1)
    assert counted("c_d_ff_4096") - base == 12 * 2048 * (2 * 512 + 1)
    assert counted("e_learned") - base == 2 * 1024 * 512  # max_positions vectors a side


@pytest.mark.parametrize("row", PRINTED)
def test_table_3_agrees_with_the_printed_column(row: str) -> None:
    # Its vocabulary is "about" 37,000, so only differences of numbers rounded to millions are comparable.
    assert (counted(row) - counted("paper_base")) / 1e6 == pytest.approx(PRINTED[row] - 65, abs=1.0)


def test_rows_differ_from_the_base_in_nothing_else() -> None:
    base = presets.paper_base()
    assert (base.model, base.train.label_smoothing) == (TransformerConfig(dropout=0.1), 0.1)
    for name, change in presets.TABLE_3.items():
        paths = {path for path, _, _ in base.difference(presets.PRESETS[name]())}
        assert paths == {"train.name"} | {f"{part}.{key}" for part, keys in change.items() for key in keys}
    big = presets.paper_big()
    assert big.model == TransformerConfig(d_model=1024, d_ff=4096, heads=16, dropout=0.3)
    assert big.train.steps == 3 * base.train.steps == 300_000


# ---- 5.3: the learning rate ------------------------------------------------------------------------------------------


def test_the_base_models_peak() -> None:
    spec = presets.paper_base().train
    rates = [optimizer.learning_rate(step, spec, 512) for step in range(1, 10_000)]
    assert int(np.argmax(rates)) + 1 == 4000
    assert max(rates) == pytest.approx(6.9877e-4, rel=1e-4)


def test_adam_has_the_papers_numbers() -> None:
    spec = presets.paper_base().train
    (group,) = optimizer.build_optimizer(torch.nn.Linear(2, 2), spec).param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_weight_decay_spares_norms_and_biases() -> None:
    model = build_model(TINY, 13, 13)
    groups = optimizer_for(model, TrainConfig(optimizer="adamw", weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    spared = {id(p) for p in groups[1]["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in spared) == ("norm" in name or name.endswith("bias")), name


def test_ema_is_the_recurrence() -> None:
    model = torch.nn.Linear(3, 2)
    ema = Ema(model, 0.9)
    expected = array(model.weight)
    for step in range(1, 120):
        torch.nn.init.normal_(model.weight)
        ema(step, model)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * array(model.weight)
    np.testing.assert_allclose(array(ema.tensors()["weight"]), expected, atol=1e-6)


# ---- 5.4: label smoothing and dropout --------------------------------------------------------------------------------


def dropped(monkeypatch: pytest.MonkeyPatch, **options: float) -> tuple[list[tuple[str, int, float]], Transformer]:
    """Every dropout of a training forward pass: module, width of its input, probability."""
    model = build_model(dataclasses.replace(TINY, **options), 13, 13).train()  # type: ignore[arg-type]
    seen: list[tuple[str, int, float]] = []
    names = {module: name for name, module in model.named_modules()}
    plain, fused = F.dropout, F.scaled_dot_product_attention

    def spy(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p and training:
            seen.append((current[-1] if current else "", x.shape[-1], p))
        return plain(x, p, training, inplace)

    def spy_fused(q: Any, k: Any, v: Any, mask: Any = None, *, dropout_p: float = 0.0, **options: Any) -> Any:
        if dropout_p:
            seen.append((current[-1], k.shape[-2], dropout_p))
        return fused(q, k, v, mask, dropout_p=dropout_p, **options)

    current: list[str] = []
    for module, name in names.items():
        if isinstance(module, ShortDropout):
            module.register_forward_pre_hook(
                lambda m, inputs, name=name: seen.extend([(name, inputs[0].shape[-1], m.p)] if m.p else [])
            )
        elif isinstance(module, FeedForward | VariantFeedForward):
            module.register_forward_pre_hook(lambda _m, _i, name=name: current.append(name))
            module.register_forward_hook(lambda _m, _i, _o: current.pop() and None)
    monkeypatch.setattr(F, "dropout", spy)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy_fused)

    def named(attention: Any, attend: Any, *inputs: Any) -> Any:
        current.append(names[attention])
        mixed = attend(*inputs)
        current.pop()
        return mixed

    with around_attention(named):
        model(torch.tensor([[4, 5, 2]]), torch.tensor([3]), torch.tensor([[1, 6]]))
    return seen, model


def test_dropout_is_where_the_paper_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the sums of embeddings and positions, and on every sub-layer's output before it is added; nowhere else."""
    seen, _ = dropped(monkeypatch, dropout=0.25)
    residuals = [f"encoder.{i}.residuals.{j}.dropout" for i in range(2) for j in range(2)]
    residuals += [f"decoder.{i}.residuals.{j}.dropout" for i in range(2) for j in range(3)]
    expected = [(name, 8, 0.25) for name in ["source.dropout", "target.dropout", *residuals]]
    assert sorted(seen) == sorted(expected)


def test_the_other_dropouts_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = dropped(monkeypatch, attention_dropout=0.5, activation_dropout=0.125)
    expected = [(f"{side}.{i}.feed_forward", 12, 0.125) for side in ("encoder", "decoder") for i in range(2)]
    for i in range(2):
        expected += [(f"encoder.{i}.attention", 3, 0.5), (f"decoder.{i}.attention", 2, 0.5)]
        expected += [(f"decoder.{i}.cross_attention", 3, 0.5)]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_residual_drops_the_sublayer_and_not_the_stream(norm: str) -> None:
    torch.manual_seed(0)
    residual = (PreNormResidual if norm == "pre" else Residual)(torch.nn.Identity(), 0.5)
    x = torch.full((1, 1000), 5.0)
    out = residual.train()(x, torch.ones_like) - x
    assert set(out.unique().tolist()) == {0.0, 2.0}  # dropped, or scaled by 1 / (1 − p)
    assert 400 < int((out == 0).sum()) < 600
    assert torch.equal(residual.eval()(x, torch.ones_like) - x, torch.ones_like(x))


# ---- 6.1: the length penalty -----------------------------------------------------------------------------------------
