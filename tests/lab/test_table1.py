"""Table 1: paths and operations are counted exactly, and a fit recovers known exponents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.core.errors import QkvError, UsageError
from qkv.explain import pages
from qkv.lab import table1
from qkv.lab.layer_types import (
    LAYER_TYPES,
    SMALL,
    LayerShape,
    dependence,
    floating_point_operations,
    longest_chain,
    path_length,
    sequential_operations,
)

SPANS = {"": (0,), "r": (1, 3, 4, 20), "k": (3, 5, 7)}
KINDS = LAYER_TYPES.values()
PATHS = [
    pytest.param(kind, path, span, id=f"{kind.name}-{path.where}-{span}")
    for kind in KINDS
    for path in kind.paths
    for span in SPANS[kind.span]
]


# ---- maximum path length ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "path", "span"), PATHS)
def test_path_lengths_are_those_of_the_exact_formula(kind: Any, path: Any, span: int) -> None:
    for n in (2, 5, 9, 14, 27, 41):
        found = path_length(kind, n, span, causal=path.causal, inside=path.inside)
        if path.length:
            assert found == path.length(n, span), n
        else:  # the ends of a sentence can only make it longer
            inside = path_length(kind, n, span, causal=path.causal, inside=True)
            assert found >= inside
            assert found > inside or n == 2


def test_formulae_by_hand() -> None:
    def exactly(name: str, where: str, n: int, span: int = 0) -> int:
        (path,) = (path for path in LAYER_TYPES[name].paths if path.where == where)
        assert path.length
        return path.length(n, span)

    assert exactly("self-attention", "encoder", 100) == 1
    assert exactly("recurrent", "either", 100) == 100
    assert [exactly("restricted", "decoder", n, 10) for n in (10, 11, 12, 21, 22)] == [1, 1, 2, 2, 3]
    assert [exactly("convolution", "encoder", n, 3) for n in (2, 3, 10)] == [1, 2, 9]
    assert [exactly("convolution", "decoder", n, 3) for n in (2, 3, 4, 10)] == [1, 1, 2, 5]
    assert [exactly("dilated", "decoder", n, 3) for n in (3, 4, 9, 10, 27, 28)] == [1, 2, 2, 3, 3, 4]
    assert [exactly("dilated", "inside", n, 3) for n in (2, 3, 5, 6)] == [1, 2, 2, 3]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["self-attention", "restricted", "convolution", "dilated", "separable"])
def test_the_jacobian_of_a_real_stack_fills_up_after_as_many_layers(name: str, causal: bool) -> None:
    kind, n, d, span = LAYER_TYPES[name], 7, SMALL, {"": 0, "r": 2, "k": 3}[LAYER_TYPES[name].span]
    layers = path_length(kind, n, span, causal=causal)
    shapes = [LayerShape(d, span, causal, layer=i, dtype=torch.float64) for i in range(layers)]
    stack = [kind.make(shape) for shape in shapes]

    def run(x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in stack[:depth]:
            x = layer(x)
        return x

    x = torch.randn(1, n, d, dtype=torch.float64)
    for depth in (layers - 1, layers):
        jacobian = torch.autograd.functional.jacobian(lambda x, depth=depth: run(x, depth), x)
        pattern = (jacobian[0, :, :, 0] != 0).any(dim=3).any(dim=1)  # (output, input)
        goal = torch.ones(n, n, dtype=torch.bool)
        assert torch.equal(pattern, goal.tril() if causal else goal) == (depth == layers)


def test_a_step_of_the_recurrence_depends_on_its_input_and_the_state_before() -> None:
    of_input, of_last = dependence(LAYER_TYPES["recurrent"], LayerShape(SMALL, dtype=torch.float64), 6)
    assert torch.equal(of_input, torch.eye(6))
    assert torch.equal(of_last, torch.ones(6, 6).tril(-1).triu(-1))


def test_positions_that_never_connect_are_an_error() -> None:
    with pytest.raises(QkvError, match="no number of applications joins 4 positions"):
        path_length(LAYER_TYPES["convolution"], 4, 1, causal=False)


# ---- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_counted_operations_have_the_exponents_of_the_formula(kind: Any) -> None:
    spans = {"": (0,), "r": (8, 16, 32), "k": (3, 5, 9)}[kind.span]
    sizes = [(n, d, span) for n in (64, 128, 256) for d in (64, 128) for span in spans if n > 2 * span]
    symbols = 3 if kind.span else 2
    counted = [floating_point_operations(kind, LayerShape(d, span), n) for n, d, span in sizes]
    formula = [kind.operations(*size) for size in sizes]
    ours, papers = (table1.fit_exponents([size[:symbols] for size in sizes], values) for values in (counted, formula))
    exact = kind.name != "separable"  # a sum of two powers; the gate doubles one of them
    assert ours == pytest.approx(papers, abs=1e-9 if exact else 0.05)
    constants = {count / value for count, value in zip(counted, formula, strict=True)}
    assert max(constants) == pytest.approx(min(constants), rel=1e-9 if exact else 0.1)


def test_operations_by_hand() -> None:
    def count(name: str, n: int, d: int, span: int = 0, causal: bool = False) -> int:
        return floating_point_operations(LAYER_TYPES[name], LayerShape(d, span, causal), n)

    n, d = 96, 64
    assert count("self-attention", n, d) == 2 * 2 * n * n * d  # QKᵀ and the mean of V, a multiplication and an addition
    assert count("restricted", n, d, 16) == 2 * 2 * n * 48 * d  # blocks of 16 queries with 48 keys
    assert count("restricted", n, d, 16, causal=True) == 2 * 2 * n * 32 * d
    assert count("recurrent", n, d) == 2 * 6 * n * d * d  # three gates, of x and of h
    assert count("convolution", n, d, 5) == 2 * 5 * n * d * 2 * d  # the values and their gate
    assert count("separable", n, d, 5) == 2 * n * d * 2 * d + 2 * 5 * n * d


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_only_the_recurrence_grows_a_chain(kind: Any) -> None:
    span = {"": 0, "r": 4, "k": 3}[kind.span]
    lengths = (12, 24, 48, 96)
    chains = [sequential_operations(kind, LayerShape(SMALL, span), n) for n in lengths]
    assert table1.growth(lengths, chains) == kind.sequential == ("n" if kind.name == "recurrent" else "1")


def test_chains_are_those_of_the_equations() -> None:
    x = torch.randn(1, 12, SMALL, requires_grad=True)
    assert longest_chain((x.exp().sin() + x.cos()).tanh()) == 4
    steps = [sequential_operations(LAYER_TYPES["recurrent"], LayerShape(SMALL), n) for n in (7, 8)]
    # From h to the next h: product, cut in three, sum, sigmoid of r, r ⊙, sum, tanh of n, (1 − z) ⊙, sum.
    assert steps[1] - steps[0] == 9
    for name, span in (("self-attention", 0), ("restricted", 4)):
        kind, shape = LAYER_TYPES[name], LayerShape(SMALL, span)
        hidden = longest_chain(kind.make(shape)(x)) - 1  # all but the fused kernel
        # Two products with a softmax between them, at least.
        assert sequential_operations(kind, shape, 12) >= hidden + 3


def test_growth_has_three_answers() -> None:
    assert table1.growth((8, 16, 64), (5, 5, 5)) == "1"
    assert table1.growth((8, 16, 64), (10, 18, 66)) == "n"
    assert table1.growth((8, 16, 32), (64, 256, 1024)) == "n^2.00"


# ---- the fit, memory, and the whole ----------------------------------------------------------------------------------


def test_fit_recovers_exponents() -> None:
    sizes = [(n, d, r) for n in (10, 20, 40) for d in (3, 5) for r in (2, 7)]
    assert table1.fit_exponents(sizes, [3e-7 * n**1.5 * d**0.25 * r**-1 for n, d, r in sizes]) == pytest.approx(
        [1.5, 0.25, -1]
    )


def test_live_tensors_measures_the_peak() -> None:
    live = table1.LiveTensors()
    with live:
        a = torch.zeros(1000)
        b = a + 1  # 8,000 bytes
        c = b.view(10, 100)[2:]
        del a
        d = torch.zeros(500)  # 6,000
        del b, c, d
        torch.zeros(1500)  # 6,000
    assert live.peak == 8000
    assert not live.alive


def test_restricted_attention_needs_memory_linear_in_n() -> None:
    shape = LayerShape(64, 8)
    for causal in (False, True):
        kind = LAYER_TYPES["restricted"]
        found = [
            table1._peak(table1.Point(kind, LayerShape(shape.d, shape.span, causal), n, batch=2))
            for n in (512, 1024, 2048)
        ]
        assert 2 * (found[1] - found[0]) == pytest.approx(found[2] - found[1], rel=1e-3)
        assert found[2] < 2.01 * found[1]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = table1.Grid((16, 32), (8, 16), batch=2)
    grids = {
        name: table1.Grid(grid.n, grid.d, {"": (0,), "r": (4, 2), "k": (3, 5)}[kind.span], grid.batch)
        for name, kind in LAYER_TYPES.items()
    }
    monkeypatch.setattr(table1, "GRIDS", {"cpu": grids})
    monkeypatch.setattr(table1, "WINDOW", 4)
    monkeypatch.setattr(table1, "WINDOW_N", (32, 64))
    monkeypatch.setattr(table1, "COUNTED_N", (9, 18))


@pytest.mark.usefixtures("small")
def test_measure_fills_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    output = tmp_path / "table1.json"
    result = table1.measure(device="cpu", seconds=0.0, output=[str(output)])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert "threads: 1" in result["machine"]
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(result))
    for part in ("complexity", "sequential", "path"):
        assert list(written[part]) == list(LAYER_TYPES)
    for name, row in written["complexity"].items():
        kind = LAYER_TYPES[name]
        assert len(row["points"]) == 4 + bool(kind.span)
        assert all(point["seconds"] > 0 and point["operations"] > 0 for point in row["points"])
        assert set(row["formula"]) == set(row["counted"]) == set(row["measured"]) == {"n", "d", *kind.span}
        for path in written["path"][name]["lengths"].values():
            assert path["expected"] in (None, path["found"])
    assert written["restricted"]["r"] == 4
    for where in ("encoder", "decoder"):
        row = written["restricted"][where]
        assert row["memory"] == pytest.approx(1.0, abs=0.15)
        assert row["n"] == [32, 64]
    shown = capsys.readouterr().out
    assert all(name in shown for name in LAYER_TYPES)
    assert "≠" not in shown


@pytest.mark.usefixtures("small")
def test_a_difference_from_the_formula_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table1, "path_length", lambda *arguments, **options: 77)
    table1.measure(device="cpu", seconds=0.0)
    assert "77 ≠ 18" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_the_plot_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / name
    table1.measure(device="cpu", seconds=0.0, plot=str(path))
    begin = path.read_bytes()[:5]
    assert begin == (b"<?xml" if name.endswith("svg") else b"\x89PNG\r")


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"out\.jpg: a picture is written as \.png or \.svg"):
        table1.measure(plot="out.jpg")
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'qkv\[plot\]'"):
        table1.measure(plot="out.png")
