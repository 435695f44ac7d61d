"""Optimizers beyond the paper's Adam, and the warm-up–stable–decay schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import step_of, tiny_config
from qkv.assembly import Run, build_model, optimizer_for
from qkv.core import checkpoint, files
from qkv.options import MODEL_KINDS, RnnConfig, TrainConfig, TransformerConfig
from qkv.training import matrix_optimizers
from qkv.training.matrix_optimizers import RMS, MatrixOptimizer, Muon, as_wide_matrices, matrices, orthogonal

OPTIMIZERS = ["adam", "adamw", "muon", "soap"]
TINY = TransformerConfig(d_model=8, d_ff=12, heads=2, encoder_layers=1, decoder_layers=1, d_k=3, bias=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x)


def perceptron(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))


def build(model: nn.Module, optimizer: str, rate: float | Tensor = 0.01, **train: Any) -> torch.optim.Optimizer:
    made = optimizer_for(model, TrainConfig(optimizer=optimizer, **train))
    for group in made.param_groups:
        group["lr"] = rate
    return made


def regression(model: nn.Module, width: int = 16) -> Callable[[], Tensor]:
    """The loss of a badly conditioned linear regression on one fixed batch."""
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(256, width, generator=draws) * torch.logspace(0, -1.5, width)
    y = x @ torch.randn(width, width, generator=draws)
    return lambda: (model(x) - y).square().mean()


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return loss().item()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---- Newton–Schulz and Muon ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 128), (3, 48, 96), (2, 2, 8, 64)])
def test_newton_schulz_gives_nearly_orthogonal_rows(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    made = orthogonal(x * 1e-4)  # of any size
    assert made.shape == x.shape
    assert singular_values(made).min() > 0.8
    assert singular_values(made).max() < 1.2
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    cosine = nn.functional.cosine_similarity(made.flatten(-2), (u @ v).flatten(-2), dim=-1)
    assert cosine.min() > 0.98


def test_newton_schulz_keeps_zeros_and_raises_small_singular_values() -> None:
    assert orthogonal(torch.zeros(3, 4)).eq(0).all()
    spread = torch.diag(torch.logspace(0, -2.5, 8)) @ torch.linalg.qr(torch.randn(8, 8)).Q
    assert singular_values(orthogonal(spread)).min() > 0.7


def test_muon_moves_every_matrix_in_all_directions_alike() -> None:
    model = build_model(TINY, 17, 17)
    before = weights(model)
    optimizer = build(model, "muon", rate=0.01)
    model(torch.randint(3, 17, (8, 7)), torch.full((8,), 7), torch.randint(3, 17, (8, 6))).logsumexp(
        -1
    ).sum().backward()
    optimizer.step()
    inside = matrices(model)
    for parameter, old in zip(model.parameters(), before, strict=True):
        moved = parameter.detach() - old
        if parameter not in inside:
            assert moved.abs().max() <= 0.01 * 1.001  # Adam's first step has one size
            continue
        for part in as_wide_matrices([moved], [inside[parameter]]):
            values = singular_values(part) / (0.01 * RMS * math.sqrt(part.shape[1]))
            known = values[values > 0.05]  # the rank of the gradient may be lower
            assert len(known)
            assert known.max() < 1.2


@pytest.mark.parametrize("name", ["adamw", "muon", "soap"])
def test_weight_decay_shrinks_every_matrix(name: str) -> None:
    """Without a gradient, a step multiplies the matrices alone by 1 − rate · weight_decay."""
    model = build_model(TINY, 17, 17)
    before = weights(model)
    optimizer = build(model, name, rate=0.01, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        factor = 1 - 0.01 * 0.1 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), old * factor, rtol=1e-6, atol=0)


def test_the_matrices_are_those_inside_the_layers() -> None:
    model = build_model(TINY, 17, 17)
    names = {name for name, p in model.named_parameters() if p in matrices(model)}
    assert names == {
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith(("encoder.", "decoder.")) and name.endswith("weight")
    }
    assert matrices(model)[model.encoder[0].attention.qkv.weight] == [6, 6, 8]  # W^Q, W^K, W^V: d_k = 3, d_v = 4
    untied = build_model(TransformerConfig(d_model=8, d_ff=12, heads=2, tie="none"), 17, 17)
    assert untied.output.weight not in matrices(untied)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_gates_of_a_recurrent_cell_are_matrices_of_their_own(cell: str) -> None:
    model = build_model(RnnConfig(cell=cell, d_model=8), 17, 17)
    rows = {name: matrices(model)[p] for name, p in model.named_parameters() if "weight_hh" in name}
    assert rows
    assert all(each == [each[0]] * (4 if cell == "lstm" else 3) for each in rows.values())


def test_queries_keys_and_values_are_separate_matrices_to_muon() -> None:
    """A step of the parameter that holds all three is that of three parameters."""
    grad, whole = torch.randn(18, 6), nn.Linear(6, 18, bias=False)
    parts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
    with torch.no_grad():
        for part, rows in zip(parts, whole.weight.split(6), strict=True):
            part.weight.copy_(rows)  # type: ignore[operator]
    one, three = Muon(whole), Muon(parts)
    one.param_groups[0]["rows"] = [[6, 6, 6]]
    for optimizer in (one, three):
        optimizer.param_groups[0]["lr"] = 0.1
    whole.weight.grad = grad
    for part, rows in zip(parts, grad.split(6), strict=True):
        part.weight.grad = rows  # type: ignore[assignment]
    one.step(), three.step()
    torch.testing.assert_close(whole.weight, torch.cat([part.weight for part in parts]))  # type: ignore[misc]


# ---- SOAP ------------------------------------------------------------------------------------------------------------


def test_soap_in_fixed_bases_is_adam() -> None:
    ours, theirs = perceptron(), perceptron()
    theirs.load_state_dict(ours.state_dict())
    turned = matrix_optimizers.Soap(ours, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1, every=0)
    adam = build(theirs, "adamw", rate=0.01, weight_decay=0.1)
    for group in turned.param_groups:
        group["lr"] = 0.01
    descend(ours, turned, regression(ours), 20)
    descend(theirs, adam, regression(theirs), 20)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_soaps_bases_become_eigenvectors() -> None:
    model = perceptron()
    optimizer = build(model, "soap", rate=0.003)
    descend(model, optimizer, regression(model), 41)
    state = optimizer.state[next(model.parameters())]
    for side in ("left", "right"):
        covariance, basis = state[f"{side}.0"], state[f"{side}_basis.0"]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)), atol=1e-4, rtol=0)
        seen = basis.mT @ covariance @ basis
        off = (seen - seen.diag().diag()).norm() / seen.norm()
        assert off < 0.1 * (covariance - covariance.diag().diag()).norm() / covariance.norm()
        assert (seen.diag()[:4].diff() <= 1e-6 * seen.norm()).all()  # in order


def test_a_side_too_long_keeps_its_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_optimizers, "LARGEST", 20)
    model = perceptron()
    optimizer = build(model, "soap")
    start = regression(model)().item()
    assert descend(model, optimizer, regression(model), 30) < start / 2
    assert not any(name.startswith("right") for state in optimizer.state.values() for name in state)
    assert any(name.startswith("left") for state in optimizer.state.values() for name in state)


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_regression_is_learned(name: str) -> None:
    model = perceptron()
    loss = regression(model)
    start = loss().item()
    rate = 0.05 if name == "muon" else 0.01  # Muon's steps are as small as Adam's later ones
    assert descend(model, build(model, name, rate=rate), loss, 100) < 0.2 * start


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_may_be_a_tensor(name: str) -> None:
    ours, theirs = perceptron(), perceptron()
    theirs.load_state_dict(ours.state_dict())
    descend(ours, build(ours, name, rate=torch.tensor(0.01)), regression(ours), 5)
    descend(theirs, build(theirs, name, rate=0.01), regression(theirs), 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_step_can_be_skipped_on_the_device(name: str, at: int) -> None:
    """With found_inf = 1 a NaN gradient changes neither the weights nor the steps after it."""
    ours, theirs = perceptron(), perceptron()
    theirs.load_state_dict(ours.state_dict())
    first, second = build(ours, name, weight_decay=0.0), build(theirs, name, weight_decay=0.0)
    for number in range(8):
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            regression(model)().backward()
        first.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        first.step(), second.step()
        if number == at:
            first.found_inf = torch.ones(())  # type: ignore[attr-defined]
            before = weights(ours)
            for p in ours.parameters():
                p.grad = torch.full_like(p, math.nan)
            first.step()
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))
    # SOAP refreshes its bases after a number of calls; a skipped call shifts the refresh and its rounding.
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_may_be_scaled(name: str) -> None:
    ours, theirs = perceptron(), perceptron()
    theirs.load_state_dict(ours.state_dict())
    first, second = build(ours, name), build(theirs, name)
    first.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    descend(ours, first, lambda: regression(ours)() * 1024, 5)
    descend(theirs, second, regression(theirs), 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [4, 10])
def test_the_saved_state_of_an_optimizer_is_complete(name: str, at: int, tmp_path: Path) -> None:
    """Between SOAP's refreshments or on one, a new optimiser with the state goes on with the same bits."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = perceptron()
        return model, build(model, name, weight_decay=0.0 if name == "adam" else 0.1)

    model, optimizer = made()
    run = Run(tmp_path)
    for step in range(13):
        if step == at:
            checkpoint.save_state(run, checkpoint.Progress(step=step), step_of(model, optimizer))
        descend(model, optimizer, regression(model), 1)
    other, resumed = made()
    folder = checkpoint.latest_state(run)
    assert folder is not None
    assert checkpoint.restore_state(folder, step_of(other, resumed)).step == at
    descend(other, resumed, regression(other), 13 - at)
    for (key, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), key
        for slot, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][slot]), f"{key}/{slot}"


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_the_small_language_is_learned(name: str, corpus: tuple[str, str], tmp_path: Path) -> None:
    rate = 0.02 if name == "muon" else 0.005
    settings = tiny_config(*corpus, optimizer=name, schedule="wsd", learning_rate=rate, steps=80, metric="loss")
    run = qkv.train(settings, tmp_path / "run")
    assert run.scores["best"]["loss"] < 0.5  # it begins at 6
    state = files.read_tensors(next((run.path / "state").iterdir()) / "optimizer.safetensors")
    kept = {key.rpartition("/")[2] for key in state}
    assert {"exp_avg", "exp_avg_sq", "step"} <= kept
    assert ("momentum_buffer" in kept) == (name == "muon")


@pytest.mark.parametrize("kind", ["decoder", "encoder", "rnn"])
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_every_parameter_of_every_kind_of_model_is_updated(kind: str, name: str) -> None:
    sizes = {"d_ff": 12, "heads": 2, "layers": 1} if kind in ("decoder", "encoder") else {}
    spec = MODEL_KINDS[kind](d_model=8, **sizes)  # type: ignore[arg-type]
    model = build_model(spec, 17, 17)
    optimizer = build(model, name)
    assert isinstance(optimizer, MatrixOptimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# ---- warm-up, stable, decay ------------------------------------------------------------------------------------------
