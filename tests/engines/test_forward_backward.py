"""The fused forward and backward pass: loss and gradients equal autograd's, kernels equal their PyTorch twins."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qkv.assembly import build_model
from qkv.core.batches import Batch, pad
from qkv.core.dataset import Rows
from qkv.core.transformer import Transformer
from qkv.engines.cuda_training import refused_model
from qkv.engines.cuda_training.elementwise_kernels import DropoutHash, drop
from qkv.engines.cuda_training.forward_backward import FlatWeights, ForwardBackward
from qkv.engines.cuda_training.packed_batch import TILES, PackedBatch, pack
from qkv.engines.cuda_training.vocabulary_kernels import r_drop_loss_and_gradients
from qkv.options import DecoderOnlyConfig, TransformerConfig
from qkv.training.regularization import r_drop_loss
from qkv.training.unpadded import loss_in_parts

VOCAB = 50


def end_to_end(batches: list[Batch], step: int) -> PackedBatch:
    rows = [
        (source[: length - 1], label[: int((label != 0).sum()) - 1])
        for batch in batches
        for source, length, _, label in zip(*batch.inputs, batch.labels, strict=True)
    ]
    flat = [Rows(torch.cat(side).numpy(), np.array([len(row) for row in side])) for side in zip(*rows, strict=True)]
    return pack(*flat, bos=1, eos=2, pad=0, step=step)


def pairs(seed: int, rows: int, shortest: int, longest: int) -> Batch:
    draw = np.random.default_rng(seed)
    source, target = (
        [draw.integers(3, VOCAB, draw.integers(shortest, longest + 1)) for _ in range(rows)] for _ in range(2)
    )
    lengths = torch.tensor([len(row) + 1 for row in source])
    tokens = sum(len(row) + 1 for row in target)
    return Batch((pad(source, 0, last=2), lengths, pad(target, 0, first=1)), pad(target, 0, last=2), tokens)


def small(**options: object) -> Transformer:
    torch.manual_seed(0)
    settings: dict[str, object] = {"d_model": 32, "d_ff": 48, "heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    return build_model(TransformerConfig(**(settings | {"dropout": 0.0} | options)), VOCAB, VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "pre", "positions": "learned", "tie": "none"},
        {"norm": "pre", "rms_norm": True, "positions": "none", "tie": "output", "d_k": 8, "d_v": 24},
        {"rms_norm": True, "attention": "dot", "heads": 4},
        {"activation": "gelu", "bias": True},
        {"activation": "swiglu", "norm": "pre", "bias": True},
        {"positions": "rotary", "d_k": 8, "d_v": 24, "bias": True},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_autograd(options: dict[str, object], step: int) -> None:
    model = small(**options)
    batches = [pairs(1, 5, 1, 12), pairs(2, 4, 17, 70), pairs(3, 1, 140, 140)]
    total = torch.zeros(2)
    for batch in batches:
        loss, nll = loss_in_parts(model.hidden(*batch.inputs), model.output.weight, batch.labels, smoothing=0.1, pad=0)
        loss.backward()
        total += torch.stack([loss.detach(), nll])
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    passes = ForwardBackward(model, FlatWeights(model, torch.float32), smoothing=0.1, pad=0)
    passes.weights.grads.zero_()
    with torch.no_grad():
        sums = passes.run(end_to_end(batches, step))
    torch.testing.assert_close(sums, total, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=3e-5)


def test_an_unknown_activation_is_refused_and_not_computed_as_another() -> None:
    model = small()
    model.config = dataclasses.replace(model.config, activation="silu")
    passes = ForwardBackward(model, FlatWeights(model, torch.float32), smoothing=0.1, pad=0)
    with pytest.raises(NotImplementedError, match="no kernels of silu"), torch.no_grad():
        passes.run(end_to_end([pairs(1, 5, 1, 12)], 1))


@pytest.mark.parametrize(
    ("options", "r_drop"),
    [
        ({"norm": "post", "activation": "relu"}, 0.0),
        ({"norm": "pre", "activation": "relu"}, 5.0),
        ({"norm": "pre", "activation": "gelu"}, 0.0),
        ({"norm": "post", "activation": "swiglu"}, 0.0),
        ({"norm": "pre", "activation": "swiglu", "positions": "rotary"}, 5.0),
    ],
    ids=str,
)
def test_gradients_with_dropout_are_the_slope_of_the_loss(options: dict[str, object], r_drop: float) -> None:
    """Backward uses the dropout masks of forward: the slope along the gradient is its squared norm."""
    dropout = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.2, "token_dropout": 0.1}
    model = small(**dropout, **options)
    weights = FlatWeights(model, torch.float32)
    passes = ForwardBackward(model, weights, smoothing=0.1, pad=0, r_drop=r_drop)
    passes.seed.copy_(torch.tensor([7, -3]))
    batch = end_to_end([pairs(3, 6, 2, 20)], 8)
    with torch.no_grad():
        weights.grads.zero_()
        first = passes.run(batch)
        direction = weights.grads / weights.grads.norm()
        slope = float(weights.grads.norm())
        before = weights.masters.clone()
        sums = []
        for distance in (-1e-3, 1e-3):
            weights.masters.copy_(before + distance * direction)
            sums.append(float(passes.run(batch)[0]))
        weights.masters.copy_(before)
        passes.seed.copy_(torch.tensor([8, -3]))
        other = passes.run(batch)
    assert (sums[1] - sums[0]) / 2e-3 == pytest.approx(slope, rel=0.03)
    assert float(other[0]) != float(first[0])


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_the_agreement_of_two_passes_has_the_gradient_of_autograd(alpha: float) -> None:
    """The loss of R-Drop and its gradients by hand, and by the definition of the divergence."""
    torch.manual_seed(3)
    labels = torch.randint(1, VOCAB, (700,))
    labels[::7] = 0
    hidden = torch.randn(2, 700, 16, requires_grad=True)
    weight = torch.randn(VOCAB, 16, requires_grad=True)
    real = [each[labels != 0] for each in hidden]
    loss, nll = r_drop_loss(*real, weight, labels, smoothing=0.1, alpha=alpha, pad=0)
    wanted = torch.autograd.grad(loss, (hidden, weight))
    parts = [loss_in_parts(each, weight, labels[None], smoothing=0.1, pad=0) for each in real]
    logs = [(each @ weight.T).log_softmax(-1) for each in real]
    ways = ((logs[0], logs[1]), (logs[1], logs[0]))
    divergence = sum(F.kl_div(other, own, log_target=True, reduction="sum") for own, other in ways)
    expected = sum(part[0] for part in parts) / 2 + alpha / 4 * divergence
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert nll.item() == pytest.approx(sum(part[1].item() for part in parts) / 2, rel=1e-5)
    logits = [(each @ weight.T).detach() for each in hidden]
    by_hand = r_drop_loss_and_gradients(*logits, labels, 0.1, alpha, 0)  # and the logits are now their gradients
    assert by_hand[0].sum().item() == pytest.approx(loss.item(), rel=1e-5)
    assert by_hand[1].sum().item() == pytest.approx(nll.item(), rel=1e-5)
    both, given = torch.stack(logits), hidden.detach()
    torch.testing.assert_close(both @ weight.detach(), wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.einsum("crv,crd->vd", both, given), wanted[1], rtol=1e-4, atol=1e-4)


def test_the_two_passes_of_r_drop_drop_differently() -> None:
    model = small(dropout=0.3)
    batch, losses = end_to_end([pairs(3, 6, 2, 20)], 8), []
    for r_drop in (1e-9, 10.0):
        passes = ForwardBackward(model, FlatWeights(model, torch.float32), smoothing=0.1, pad=0, r_drop=r_drop)
        passes.seed.copy_(torch.tensor([7, -3]))
        with torch.no_grad():
            losses.append(float(passes.run(batch)[0]))
    assert losses[1] > 1.01 * losses[0]


def test_positions_reach_as_far_as_rows_do() -> None:
    model, batch = small(), pairs(3, 1, 600, 600)
    loss, _ = loss_in_parts(model.hidden(*batch.inputs), model.output.weight, batch.labels, smoothing=0.1, pad=0)
    fresh = small()
    passes = ForwardBackward(fresh, FlatWeights(fresh, torch.float32), smoothing=0.1, pad=0)
    with torch.no_grad():
        assert float(passes.run(end_to_end([batch], 1))[0]) == pytest.approx(loss.item(), rel=1e-5)


def test_dropout_is_even_and_differs_by_place_and_seed() -> None:
    ones = torch.ones(512, 512)
    masks = []
    for seed in ([1, 2], [2, 2], [1, 3]):
        for site in (1, 2):
            dropped = drop(ones, DropoutHash(0.1, torch.tensor(seed, dtype=torch.int32), site))
            assert dropped.mean() == pytest.approx(1.0, abs=0.003)
            assert dropped.mean(0).std() == pytest.approx((1 / 9 / 512) ** 0.5, rel=0.15)  # columns are independent
            masks.append((dropped == 0).float() - 0.1)
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((one * other).mean())) < 0.001  # uncorrelated: 5 times its standard error is 0.0009


def test_rows_lie_end_to_end_in_the_order_of_their_tiles() -> None:
    batches = [pairs(4, 7, 1, 60), pairs(5, 3, 20, 100)]
    laid = end_to_end(batches, 256)
    rows = [
        (source[:length].tolist(), target[: int((label != 0).sum())].tolist(), label[label != 0].tolist())
        for batch in batches
        for source, length, target, label in zip(*batch.inputs, batch.labels, strict=True)
    ]
    found, first = [], laid.first.tolist()
    for tile, start, end in zip(TILES, first, first[1:], strict=False):
        for row in range(start, end):
            source, target = (slice(*side.starts[row : row + 2].tolist()) for side in (laid.source, laid.target))
            assert max(source.stop - source.start, target.stop - target.start) <= tile
            own = laid.source.ids[source].tolist(), laid.target.ids[target].tolist(), laid.labels[target].tolist()
            if any(own[2]):
                assert laid.source.positions[source].tolist() == list(range(len(own[0])))
                found.append(own)
    assert sorted(found) == sorted(rows)
    assert laid.sizes[0] % 256 == laid.sizes[1] % 256 == 0
    assert laid.tokens == sum(batch.tokens for batch in batches) == int((laid.labels != 0).sum())
    assert sorted(tuple(part.tolist() for part in row) for row in laid.rows(0)) == sorted(rows)


def test_unsupported_models_are_refused() -> None:
    for options in ({"window": 3}, {"heads": 1}, {"attention": "additive"}):
        assert refused_model(TransformerConfig(**options))  # type: ignore[arg-type]
    assert refused_model(DecoderOnlyConfig())
    assert refused_model(TransformerConfig()) is None


KERNELS = """
import torch
from qkv.engines.cuda_training import attention_kernels as attention
from qkv.engines.cuda_training import elementwise_kernels as elementwise
from qkv.engines.cuda_training import norm_kernels as norm
from qkv.engines.cuda_training import vocabulary_kernels as vocabulary
from qkv.engines.cuda_training.elementwise_kernels import Heads, DropoutHash, Rows
from qkv.engines.cuda_training.norm_kernels import Scale, Sums

torch.manual_seed(0)
seed = torch.tensor([12345, -77], dtype=torch.int32)

def close(ours, plain):
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)

for rate in (0.0, 0.3):
    noise = DropoutHash(rate, seed, 5)
    for width in (24, 64):
        x, y, d, dz = torch.randn(4, 37, width).unbind()
        for shift in (torch.randn(width), None):
            scale = Scale(torch.randn(width), shift, 1e-5)
            for bias in (torch.randn(width), None):
                close(norm.add_norm_kernel(x, y, bias, scale, noise), norm.add_norm(x, y, bias, scale, noise))
            close(norm.add_norm_kernel(x, None, None, scale, noise), norm.add_norm(x, None, None, scale, noise))
            for given in (None, dz):
                for bias in (True, False):
                    sums = [Sums(torch.ones(width), None if shift is None else torch.ones(width),
                                 torch.ones(width) if bias else None) for _ in range(2)]
                    close(norm.add_norm_backward_kernel(given, d, x, scale, noise, sums[0]),
                          norm.add_norm_backward(given, d, x, scale, noise, sums[1]))
                    close(*([part for part in own if part is not None] for own in sums))

    ids, places = torch.randint(0, 9, (30,)).int(), torch.randint(0, 7, (30,)).int()
    table, positions, d = torch.randn(9, 24), torch.randn(7, 24), torch.randn(30, 24)
    for at, unseen in ((positions, 0.0), (None, 0.0), (positions, 0.4)):
        tokens = vocabulary.Tokens(ids, places, 3.0, noise, DropoutHash(unseen, seed, 6))
        close([vocabulary.embed_kernel(tokens, table, at)], [vocabulary.embed(tokens, table, at)])
        sums = [[torch.zeros(9, 24), torch.zeros(7, 24)] for _ in range(2)]
        for own, function in zip(sums, (vocabulary.embed_backward_kernel, vocabulary.embed_backward)):
            function(d, tokens, own[0], None if at is None else own[1])
        close(*sums)

    hidden, d = torch.randn(33, 300).relu(), torch.randn(33, 300)
    close([elementwise.relu_dropout_kernel(d.clone(), noise)], [elementwise.relu_dropout(d.clone(), noise)])
    found = [(d.clone(), torch.ones(300)) for _ in range(2)]
    elementwise.relu_dropout_backward_kernel(found[0][0], hidden, noise, found[0][1])
    elementwise.relu_dropout_backward(found[1][0], hidden, noise, found[1][1])
    close(*found)

    a, b = torch.randn(2, 33, 300).unbind()
    close([elementwise.swiglu_kernel(a, b, noise)], [elementwise.swiglu(a, b, noise)])
    found = [(a.clone(), b.clone()) for _ in range(2)]
    elementwise.swiglu_backward_kernel(d, *found[0], noise)
    elementwise.swiglu_backward(d, *found[1], noise)
    close(*found)

    # rows of several lengths, of them one without a query, one without a key, two that take several blocks
    queries = torch.tensor([0, 3, 3, 16, 40, 90, 92, 192, 342]).int()
    keys = torch.tensor([0, 9, 10, 24, 40, 60, 60, 130, 150]).int()
    rows = Rows(queries, keys, torch.tensor([0, 3, 4, 6, 7, 8]).int(), (4, 1, 2, 1, 3))
    for causal in (False, True):
        for d_k, d_v in ((16, 16), (8, 24)):
            heads = Heads(2, d_k, d_v, 0.3, causal)
            k, v = torch.randn(150, 2 * (d_k + d_v)).split([2 * d_k, 2 * d_v], dim=1)  # beside each other
            qkv = torch.randn(342, 2 * d_k), k, v
            d = torch.randn(342, 2 * d_v)
            close([attention.attend_kernel(qkv, rows, heads, noise)],
                  [attention.attend(qkv, rows, heads, noise)])
            found = [tuple(torch.zeros_like(x) for x in qkv) for _ in range(2)]
            attention.attend_backward_kernel(d, qkv, found[0], rows, heads, noise)
            attention.attend_backward(d, qkv, found[1], rows, heads, noise)
            close(found[0], found[1])

angles, places = torch.randn(7, 6), torch.randint(0, 7, (30,)).int()
for back in (False, True):
    wide = torch.randn(30, 40)
    twin = wide.clone()
    elementwise.rotate_heads_kernel(wide[:, :24], places, angles, back)
    elementwise.rotate_heads(twin[:, :24], places, angles, back=back)
    close([wide], [twin])

for vocab in (30, 8192 + 40):
    logits, labels = torch.randn(7, vocab) * 3, torch.randint(0, 30, (7,)).int()
    labels[2] = 0
    twin = logits.clone()
    close(vocabulary.loss_kernel(logits, labels, 0.1, 0), vocabulary.loss_and_gradient(twin, labels, 0.1, 0))
    close([logits], [twin])
    for alpha in (0.0, 5.0):
        both = torch.randn(2, 7, vocab) * 3
        twins = both.clone()
        close(vocabulary.r_drop_loss_kernel(*both, labels, 0.1, alpha, 0),
              vocabulary.r_drop_loss_and_gradients(*twins, labels, 0.1, alpha, 0))
        close([both], [twins])
print("equal")
"""


def test_kernels_equal_their_plain_twins() -> None:
    pytest.importorskip("triton", reason="Triton is not on this platform")
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("equal"), run.stderr
