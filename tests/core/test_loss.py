"""Label smoothing (paper, section 5.4) against numpy and torch, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qkv.core.batches import Batch
from qkv.core.loss import SmoothedObjective, label_smoothed_loss

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


@given(st.integers(1, 12), st.integers(2, 9), st.floats(0, 1), st.integers(0, 99))
def test_label_smoothed_loss_and_gradient(tokens: int, vocab: int, epsilon: float, seed: int) -> None:
    """numpy = plain = torch's own; half of the positions here are padding."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(2, tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(1, vocab, (2, tokens))
    labels[1] = 0
    value, d_hidden, d_weight = smoothed(array(hidden[0]), array(weight), labels[0].numpy(), epsilon)
    plain, nll = label_smoothed_loss(hidden[labels != 0], weight, labels, smoothing=epsilon, pad=0)
    torchs = F.cross_entropy(hidden[0] @ weight.T, labels[0], reduction="sum", label_smoothing=epsilon)
    for loss in (plain, torchs):
        assert float(loss.detach()) == pytest.approx(value, rel=1e-4, abs=1e-4)
        of_hidden, of_weight = torch.autograd.grad(3 * loss, [hidden, weight])
        np.testing.assert_allclose(array(of_hidden[0]), 3 * d_hidden, atol=1e-4)
        np.testing.assert_allclose(array(of_weight), 3 * d_weight, atol=1e-4)
        assert not of_hidden[1].any()
    negative, _, _ = smoothed(array(hidden[0]), array(weight), labels[0].numpy(), 0.0)
    assert float(nll) == pytest.approx(negative, rel=1e-4, abs=1e-4)


def test_the_objective_asks_for_the_hidden_states_of_real_labels() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(7, 4), torch.tensor([[1, 2, 0], [3, 0, 0]])

    class Model:
        output = SimpleNamespace(weight=weight)

        def hidden_at(self, real: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
            assert torch.equal(real, labels != 0)
            assert [each.item() for each in inputs] == [7, 8]
            return hidden[real]

    batch = Batch((torch.tensor(7), torch.tensor(8)), labels, 3)
    model: Any = Model()
    loss, nll = SmoothedObjective(0.1, 0)(model, batch)
    expected, expected_nll = label_smoothed_loss(hidden[labels != 0], weight, labels, 0.1, 0)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(nll) == pytest.approx(float(expected_nll), rel=1e-5)


def test_nothing_but_padding_has_no_loss_and_no_gradient() -> None:
    hidden, weight = torch.randn(1, 2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.zeros(1, 2, dtype=torch.long)
    loss, nll = label_smoothed_loss(hidden[labels != 0], weight, labels, smoothing=0.1, pad=0)
    assert (float(loss.detach()), float(nll)) == (0.0, 0.0)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()
