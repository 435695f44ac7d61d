"""Multi-head attention equals torch's on the same weights: outputs, weights and gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from qkv.core.attention import MultiHeadAttention, causal_mask, padding_mask
from qkv.models.variants import record_attention

Weights = dict[str, Tensor]


def assert_close(ours: Tensor, theirs: Tensor, name: str = "", *, of_largest: bool = False) -> None:
    """Equal to 1e-5; `of_largest`: to 1e-5 times the largest entry, for sums that may be of any size."""
    tolerance = 1e-5 * (float(theirs.abs().max()) if of_largest else 1.0)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0, msg=lambda message: f"{name} {message}")


def assert_same_gradients(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], name, of_largest=True)


def shake(model: nn.Module, std: float, seed: int) -> None:
    """Large random weights, as after training: no bias is zero, no gain one, and outputs differ."""
    torch.manual_seed(seed)
    norms = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        nn.init.normal_(p, mean=1.0 if id(p) in norms else 0.0, std=std)


def gradients(model: nn.Module) -> Weights:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def torch_attention(theirs: Weights) -> Weights:
    """The weights of torch.nn.MultiheadAttention, or their gradients, under our names."""
    return {name.replace("in_proj_", "qkv.").replace("out_proj", "output"): tensor for name, tensor in theirs.items()}


@pytest.mark.parametrize("recorded", [False, True], ids=["fused", "written-out"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("masks", ["", "padding", "causal", "causal padding", "cross", "cross padding"])
def test_multi_head_attention_is_torchs(masks: str, bias: bool, recorded: bool) -> None:
    d_model, heads, lengths = 24, 3, torch.tensor([7, 4, 1])
    theirs = nn.MultiheadAttention(d_model, heads, bias=bias, batch_first=True)
    shake(theirs, std=0.3, seed=0)
    ours = MultiHeadAttention(d_model, heads, d_model // heads, d_model // heads, bias=bias, name="it")
    ours.load_state_dict(torch_attention(theirs.state_dict()))

    causal, padded, cross = ("causal" in masks), ("padding" in masks), ("cross" in masks)
    x, wanted = torch.randn(3, 5 if cross else 7, d_model), torch.randn(3, 5 if cross else 7, d_model)
    inputs = [x, torch.randn(3, 7, d_model)] if cross else [x]
    real = padding_mask(7, lengths)  # (batch, 1, 1, keys)

    def attend_ours(x: Tensor, memory: Tensor | None = None) -> Tensor:
        qkv = ours.project(x) if memory is None else (ours.project_query(x), *ours.project_memory(memory))
        if padded:
            return ours(*qkv, causal_mask(7, 7) & real if causal else real)
        return ours(*qkv, causal=causal)

    def attend_theirs(x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys = x if memory is None else memory
        forbidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
        ignored = ~real[:, 0, 0] if padded else None
        return theirs(x, keys, keys, ignored, attn_mask=forbidden, average_attn_weights=False)

    our_inputs, their_inputs = ([i.clone().requires_grad_() for i in inputs] for _ in range(2))
    with record_attention() if recorded else nullcontext() as recording:
        found = attend_ours(*our_inputs)
    expected, weights = attend_theirs(*their_inputs)
    assert_close(found, expected)
    if recording is not None:
        assert_close(recording["it"][0], weights)
    (found * wanted).sum().backward()
    (expected * wanted).sum().backward()
    assert_same_gradients(gradients(ours), torch_attention(gradients(theirs)))
    for our_input, their_input in zip(our_inputs, their_inputs, strict=True):
        assert_close(our_input.grad, their_input.grad, of_largest=True)
