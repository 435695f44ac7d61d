"""The loss in parts against the loss of the core, numpy and torch: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qkv.core.loss import label_smoothed_loss
from qkv.training import unpadded
from qkv.training.unpadded import loss_in_parts

Array = NDArray[np.float64]


def array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def smoothed(hidden: Array, weight: Array, labels: NDArray[np.int64], epsilon: float) -> tuple[float, Array, Array]:
    """Cross-entropy against (1 − ε)·one-hot + ε/V, and its gradients by hidden and weight."""
    p = softmax(hidden @ weight.T)
    q = np.full_like(p, epsilon / p.shape[1])
    q[np.arange(len(labels)), labels] += 1 - epsilon
    return float(-(q * np.log(p)).sum()), (p - q) @ weight, (p - q).T @ hidden


@given(st.integers(1, 12), st.integers(2, 9), st.floats(0, 1), st.integers(1, 5), st.integers(0, 99))
def test_loss_in_parts_and_gradient(tokens: int, vocab: int, epsilon: float, rows: int, seed: int) -> None:
    """numpy = fused, in parts of any size = plain = torch's own; half of the positions here are padding."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(2, tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(1, vocab, (2, tokens))
    labels[1] = 0
    value, d_hidden, d_weight = smoothed(array(hidden[0]), array(weight), labels[0].numpy(), epsilon)
    whole, unpadded.ROWS = unpadded.ROWS, rows
    try:
        fused, nll = loss_in_parts(hidden, weight, labels, smoothing=epsilon, pad=0)
    finally:
        unpadded.ROWS = whole
    plain, plain_nll = label_smoothed_loss(hidden[labels != 0], weight, labels, epsilon, 0)
    torchs = F.cross_entropy(hidden[0] @ weight.T, labels[0], reduction="sum", label_smoothing=epsilon)
    for loss in (fused, plain, torchs):
        assert float(loss.detach()) == pytest.approx(value, rel=1e-4, abs=1e-4)
        of_hidden, of_weight = torch.autograd.grad(3 * loss, [hidden, weight])
        np.testing.assert_allclose(array(of_hidden[0]), 3 * d_hidden, atol=1e-4)
        np.testing.assert_allclose(array(of_weight), 3 * d_weight, atol=1e-4)
        assert not of_hidden[1].any()
    negative, _, _ = smoothed(array(hidden[0]), array(weight), labels[0].numpy(), 0.0)
    assert float(nll) == pytest.approx(negative, rel=1e-4, abs=1e-4)
    assert float(plain_nll) == pytest.approx(negative, rel=1e-4, abs=1e-4)


def test_loss_without_gradients_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    in_parts = unpadded._LossInParts.apply

    def spy(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return in_parts(*arguments)

    monkeypatch.setattr(unpadded._LossInParts, "apply", spy)
    hidden, weight, labels = torch.randn(1, 3, 4), torch.randn(5, 4, requires_grad=True), torch.tensor([[1, 2, 0]])
    with torch.no_grad():
        without, _ = loss_in_parts(hidden, weight, labels, smoothing=0.1, pad=0)
    with torch.inference_mode():
        loss_in_parts(hidden, weight, labels, smoothing=0.1, pad=0)
    with_gradient, _ = loss_in_parts(hidden, weight, labels, smoothing=0.1, pad=0)
    assert asked == [False, False, True]
    assert float(without) == float(with_gradient.detach())


def test_hidden_states_of_real_tokens_alone_give_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(2, 4, 6), torch.randn(9, 6), torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]])
    padded = loss_in_parts(hidden, weight, labels, smoothing=0.2, pad=0)
    packed = loss_in_parts(hidden[labels != 0], weight, labels, smoothing=0.2, pad=0)
    assert [float(value) for value in padded] == [float(value) for value in packed]


def test_parts_have_about_equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short last part would cost a pass over the whole gradient of the weights."""
    sizes: list[int] = []
    gather = torch.Tensor.gather

    def counted(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(len(self))
        return gather(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "gather", counted)
    monkeypatch.setattr(unpadded, "ROWS", 100)
    for tokens, parts in [(1, [1]), (140, [140]), (160, [80, 80]), (301, [101, 101, 99]), (1000, [100] * 10)]:
        sizes.clear()
        loss_in_parts(
            torch.randn(1, tokens, 4), torch.randn(5, 4), torch.ones(1, tokens, dtype=torch.long), smoothing=0.1, pad=0
        )
        assert sizes == parts


def test_nothing_but_padding_has_no_loss_and_no_gradient() -> None:
    hidden, weight = torch.randn(1, 2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss, nll = loss_in_parts(hidden, weight, torch.zeros(1, 2, dtype=torch.long), smoothing=0.1, pad=0)
    assert (float(loss.detach()), float(nll)) == (0.0, 0.0)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_have_the_types_of_the_inputs_in_bf16(autocast: bool) -> None:
    """The softmax is in fp32; matrix products are in the type of the inputs, or in that of autocast."""
    torch.manual_seed(0)
    kind = torch.float32 if autocast else torch.bfloat16
    exact_hidden, exact_weight = torch.randn(1, 600, 16), torch.randn(11, 16)
    hidden, weight = (t.to(kind).requires_grad_() for t in (exact_hidden, exact_weight))
    labels = torch.randint(1, 11, (1, 600))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, nll = loss_in_parts(hidden, weight, labels, smoothing=0.1, pad=0)
    assert loss.dtype == nll.dtype == torch.float32
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == kind
    exact_hidden.requires_grad_()
    exact_weight.requires_grad_()
    expected, _ = label_smoothed_loss(exact_hidden[0], exact_weight, labels, 0.1, 0)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.01)
    assert float(loss.detach()) != float(expected.detach())
    assert exact_weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), exact_weight.grad, rtol=0.05, atol=1.0)
