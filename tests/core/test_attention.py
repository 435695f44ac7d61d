"""Equation 1 against numpy, masks by their definition, heads, the cache, and wrappers around attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.core.attention import (
    CachedDecoding,
    EncoderOutput,
    KVCache,
    MultiHeadAttention,
    WholeSequence,
    around_attention,
    attend,
    attention_weights,
    causal_mask,
    kept_sentences,
    padding_mask,
    wrappers,
)

Array = NDArray[np.float64]


def equation_1(q: Array, k: Array, v: Array, allowed: Any = None) -> tuple[Array, Array]:
    """Heads and weights of one head, in float64."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights @ v, weights


def array(x: Tensor) -> Array:
    return x.detach().double().numpy()


def attention_of(seed: int = 0, bias: bool = True) -> MultiHeadAttention:
    torch.manual_seed(seed)
    module = MultiHeadAttention(12, 3, 4, 5, bias=bias, name="decoder.0.self")
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return module.eval()


@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_weights_and_heads_are_equation_1(kind: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6, 7)
    if kind == "causal":
        k, v = k[:, :, :4], v[:, :, :4]
    mask = torch.tensor([True, False, True, True, False, True]).expand(2, 1, 1, 6) if kind == "mask" else None
    causal = kind == "causal"
    module = MultiHeadAttention(15, 3, 5, 7)
    heads, weights = module.attend(q, k, v, mask, causal), module.weights(q, k, mask, causal)
    allowed = np.tri(4, dtype=bool) if causal else None if mask is None else np.asarray(mask[0, 0])
    for b, h in np.ndindex(2, 3):
        expected = equation_1(*(array(x[b, h]) for x in (q, k, v)), allowed)
        np.testing.assert_allclose(array(heads[b, h]), expected[0], atol=1e-5)
        np.testing.assert_allclose(array(weights[b, h]), expected[1], atol=1e-5)
    if mask is not None:
        assert not attention_weights(q, k, mask)[..., [1, 4]].any()
    if kind == "all":  # without a mask, every key is attended to
        assert torch.equal(module.attend(q, k, v), heads)
        assert torch.equal(module.weights(q, k), weights)
        assert torch.equal(module(q, k, v), module.merge(heads))


def test_masks_are_their_definitions() -> None:
    lengths = torch.tensor([3, 1, 5])
    real = padding_mask(5, lengths)
    assert (real.dtype, real.shape) == (torch.bool, (3, 1, 1, 5))
    for b, j in np.ndindex(3, 5):
        assert bool(real[b, 0, 0, j]) == (j < int(lengths[b]))
    for queries in (5, 2, 1):
        mask = causal_mask(queries, 5)
        assert (mask.dtype, mask.shape) == (torch.bool, (1, 1, queries, 5))
        for i, j in np.ndindex(queries, 5):
            assert bool(mask[0, 0, i, j]) == (j <= 5 - queries + i)  # the last query has the position of the last key


def multi_head(module: MultiHeadAttention, x: Array, memory: Array, allowed: Any = None) -> Array:
    """Section 3.2.2 head by head, from parts cut out of the joint matrix."""
    h, d_k, d_v = module.heads, module.d_k, module.d_v
    W = array(module.qkv.weight)
    b = np.zeros(len(W)) if module.qkv.bias is None else array(module.qkv.bias)
    q, k, v = (y @ w.T + c for y, w, c in zip((x, memory, memory), np.split(W, [h * d_k, 2 * h * d_k]),
                                              np.split(b, [h * d_k, 2 * h * d_k]), strict=True))  # fmt: skip
    heads = [
        equation_1(q[:, i * d_k : (i + 1) * d_k], k[:, i * d_k : (i + 1) * d_k], v[:, i * d_v : (i + 1) * d_v], allowed)
        for i in range(h)
    ]
    joined = np.concatenate([mixed for mixed, _ in heads], axis=1) @ array(module.output.weight).T
    return joined + (0 if module.output.bias is None else array(module.output.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_contexts_of_whole_sequences_are_multi_head_attention(bias: bool) -> None:
    module, x, memory = attention_of(bias=bias), torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    lengths = torch.tensor([4, 2])
    mask = padding_mask(4, lengths)
    source = WholeSequence(mask).self_attention(0, module, memory)
    teacher = WholeSequence(encoded=EncoderOutput(memory, mask))
    target, cross = teacher.self_attention(0, module, x), teacher.cross_attention(0, module, x)
    for b, n in enumerate(lengths.tolist()):
        y, m = array(x[b]), array(memory[b])[:n]
        np.testing.assert_allclose(array(source[b])[:n], multi_head(module, m, m), atol=1e-5)
        np.testing.assert_allclose(array(target[b]), multi_head(module, y, y, np.tri(5, dtype=bool)), atol=1e-5)
        np.testing.assert_allclose(array(cross[b]), multi_head(module, y, m), atol=1e-5)


def test_initial_matrices_are_xavier_uniform_part_by_part() -> None:
    module = MultiHeadAttention(64, 2, 16, 8, bias=True)
    queries, keys, values = module.qkv.weight.split([32, 32, 16])
    for part in (queries, keys, values, module.output.weight):
        bound = (6 / sum(part.shape)) ** 0.5
        assert 0.95 * bound < float(part.detach().abs().max()) <= bound * (1 + 1e-6)
    assert not module.qkv.bias.any()
    assert not module.output.bias.any()
    names = [name for name, _ in MultiHeadAttention(64, 2, 16, 8).named_parameters()]
    assert names == ["qkv.weight", "output.weight"], "the paper's projections have no bias"


@torch.inference_mode()
def test_cached_steps_are_the_whole_target_whatever_the_rows_become() -> None:
    module, memory, lengths = attention_of(), torch.randn(2, 4, 12), torch.tensor([4, 2])
    mask, beam = padding_mask(4, lengths), 2
    pair = module.project_memory(memory)
    state = CachedDecoding([module.new_cache()], [pair], mask, beam)
    x = torch.randn(4, 60, 12)  # 2 sentences of 2 rows; longer than a cache is at first
    order, sentences, start = torch.arange(4), torch.arange(2), 0
    for step, n in enumerate([1, 3, 20, 1, 30, 1, 4]):
        now = torch.randn(len(order), n, 12)
        x = torch.cat([x[:, :start], now, x[:, start + n :]], dim=1)
        own, cross = state.self_attention(0, module, now), state.cross_attention(0, module, now)
        state.advance(n)
        start += n
        assert state.position == start
        whole = WholeSequence().self_attention(0, module, x[:, :start])[:, -n:]
        torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-5)
        encoded = EncoderOutput(*(part[sentences].repeat_interleave(beam, 0) for part in (memory, mask)))
        expected = WholeSequence(encoded=encoded).cross_attention(0, module, now)
        torch.testing.assert_close(cross, expected, rtol=1e-5, atol=1e-5)
        rows = {1: [1, 0, 3, 3], 3: [3, 2, 1, 1], 5: [1, 0]}.get(step, list(range(len(order))))
        state = state.select(torch.tensor(rows))
        x, order = x[rows], order[rows]
        sentences = sentences[torch.tensor(rows[::beam]) // beam]


@torch.inference_mode()
def test_rows_are_selected_where_there_is_no_source() -> None:
    """As in a language model: rows may leave and repeat, and nothing else is kept for them."""
    module, x = attention_of(), torch.randn(3, 2, 12)
    state = CachedDecoding([module.new_cache()], [], None, 1)
    state.self_attention(0, module, x[:, :1])
    state.advance(1)
    rows = torch.tensor([2, 0])
    found = state.select(rows).self_attention(0, module, x[rows, 1:])
    expected = WholeSequence().self_attention(0, module, x[rows])[:, 1:]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_cache_grows_with_room_to_spare_and_masks_only_several_queries() -> None:
    cache = KVCache()
    k = torch.randn(2, 3, 40, 4)
    keys, values, mask = cache.append(k[:, :, :1], k[:, :, :1] + 1)
    assert mask is None
    buffer = cache.kept[0]
    assert buffer.shape[2] == 1 + 16
    keys, values, mask = cache.append(k[:, :, 1:17], k[:, :, 1:17] + 1)
    assert cache.kept[0] is buffer  # filled to the last position
    assert torch.equal(keys, k[:, :, :17])
    assert mask is not None
    assert torch.equal(mask, causal_mask(16, 17))
    keys, values, mask = cache.append(k[:, :, 17:18], k[:, :, 17:18] + 1)
    assert (cache.length, cache.kept[0].shape[2]) == (18, 34)
    assert torch.equal(keys, k[:, :, :18])
    assert torch.equal(values, k[:, :, :18] + 1)


def test_a_cache_selects_rows_without_new_buffers() -> None:
    """Two buffers in turn: allocating one for each step costs more than the copy."""
    cache, k = KVCache(), torch.randn(4, 2, 3, 5)
    cache.append(k, k + 1)
    used = set()
    for rows in ([3, 0, 0, 1], [1, 1, 2, 3], [0, 2], [1, 0]):
        cache.select(torch.tensor(rows))
        k = k[rows]
        assert torch.equal(cache.kept[0][:, :, :3], k)
        assert torch.equal(cache.kept[1][:, :, :3], k + 1)
        used.add(cache.kept[0].data_ptr())
    assert len(used) == 2
    cache.select(torch.tensor([0, 1, 1, 0, 1]))  # more rows than before
    assert torch.equal(cache.kept[0][:, :, :3], k[[0, 1, 1, 0, 1]])


def test_kept_sentences() -> None:
    assert kept_sentences(torch.tensor([1, 0, 2, 3]), 2, 2) is None
    assert torch.equal(kept_sentences(torch.tensor([2, 3, 0, 0]), 2, 2), torch.tensor([1, 0]))  # type: ignore[arg-type]
    assert torch.equal(kept_sentences(torch.tensor([2, 2]), 2, 2), torch.tensor([1]))  # type: ignore[arg-type]


def test_wrappers_nest_and_end_with_their_block() -> None:
    module, q, v = attention_of(), torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 5)
    calls: list[str] = []

    def wrap(name: str, factor: float) -> Any:
        def around(attention: Any, inner: Any, *inputs: Any) -> Tensor:
            assert attention is module
            calls.append(name)
            heads: Tensor = inner(*inputs) * factor
            calls.append(f"{name} ends")
            return heads

        return around

    plain = attend(module, q, q, v, None, True)
    assert torch.equal(plain, module.attend(q, q, v, causal=True))
    with around_attention(wrap("outer", 2.0)), around_attention(wrap("inner", 5.0)):
        assert len(wrappers.get()) == 2
        torch.testing.assert_close(attend(module, q, q, v, None, True), plain * 10)
    assert calls == ["outer", "inner", "inner ends", "outer ends"]
    with pytest.raises(RuntimeError), around_attention(wrap("outer", 2.0)):
        raise RuntimeError
    assert wrappers.get() == ()
    assert torch.equal(module(q, q, v, causal=True), module.merge(plain))
