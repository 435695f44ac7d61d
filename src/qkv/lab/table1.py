"""The paper's Table 1, measured: complexity per layer, sequential operations and maximum path length.

Measured times, counted operations and the paper's formula are fitted on the same sizes by c · n^a · d^b (· r^e or k^e),
by least squares on logarithms; the table shows the exponents next to each other. All sizes are timed in turn for
several rounds. The time of a size is its median; the minimum would favour short calls, which are disturbed less often.
On a CPU it is the process time of one core, so that neither parallel efficiency nor other programs affect the result.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkv.console import counter
from qkv.core.device import choose_device
from qkv.explain.pages import check_output, new_figure
from qkv.lab.layer_types import (
    LAYER_TYPES,
    SMALL,
    LayerShape,
    LayerType,
    Operation,
    floating_point_operations,
    path_length,
    sequential_operations,
)
from qkv.lab.result_tables import ResultTable, check_outputs, publish

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Grid:
    """Sizes at which arithmetic dominates: every n with every d for the first span, one size for each other span."""

    n: tuple[int, ...]
    d: tuple[int, ...]
    spans: tuple[int, ...] = (0,)
    batch: int = 1

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        first, *others = self.spans
        yield from ((n, d, first) for n in self.n for d in self.d)
        yield from ((self.n[-2], self.d[-1], span) for span in others)


def _convolutions(grid: Grid) -> dict[str, Grid]:
    return dict.fromkeys(("convolution", "dilated", "separable"), grid)


ONE_TO_16K = (1024, 2048, 4096, 8192, 16384)
GRIDS = {
    # At most about 50 MB per tensor: the C library returns larger blocks to the system, which makes each call slower.
    "cpu": {
        "self-attention": Grid((512, 1024, 2048, 4096), (128, 256, 512)),
        "restricted": Grid((1024, 2048, 4096, 8192), (64, 128, 256), (64, 32, 128, 256)),
        "recurrent": Grid((128, 256, 512, 1024), (128, 256, 512), batch=8),
        **_convolutions(Grid((256, 512, 1024, 2048), (128, 256, 512), (3, 5, 7))),
    },
    # Large enough to occupy thousands of cores.
    "cuda": {
        "self-attention": Grid((1024, 2048, 4096, 8192), (512, 1024, 2048), batch=8),
        "restricted": Grid(ONE_TO_16K, (512, 1024, 2048), (64, 32, 128, 256), batch=16),
        "recurrent": Grid((128, 256, 512, 1024), (512, 1024, 2048), batch=512),
        **_convolutions(Grid((512, 1024, 2048, 4096), (512, 1024, 2048), (3, 5, 7), batch=16)),
    },
}
WINDOW, WINDOW_N = 64, ONE_TO_16K  # sizes at which restricted self-attention must be linear
COUNTED_N = (16, 32, 64)  # lengths at which chains and paths are counted
COUNTED_SPAN = {"": 0, "r": 4, "k": 3}
ROUNDS = 5
SOURCES = ("formula", "counted", "measured")  # of exponents
DILATED_NOTE = (
    "Inside: n positions within a longer sentence. Near the ends of a sentence the only dilated path can lead outside "
    "it; such a pair is connected after the cycle of dilations restarts."
)


@dataclass
class Point:
    """One layer at one size, and the time of each call."""

    kind: LayerType
    shape: LayerShape
    n: int
    batch: int
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median time per sequence."""
        return statistics.median(self.times) / self.batch


def measure(
    *,
    device: str = "auto",
    seconds: float = 60.0,
    output: Sequence[str] = (),
    plot: str | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Measure for about `seconds`, print the tables, and write them (`output`) and a plot (`plot`: .png, .svg)."""
    check_outputs(output)
    if plot:
        check_output(plot, "a picture")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Full fp32: with TF32 in cuDNN only the recurrence would become faster.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            figures = _measure(choose_device(device), seconds)
        tables, remark = _result_tables(figures), _remark()
        result = publish(figures, tables, [remark], device=device, command=command, outputs=output)
    finally:
        torch.set_num_threads(threads)
    if plot:
        draw(result, plot)
    return result


def _measure(device: torch.device, seconds: float) -> dict[str, Any]:
    grids = GRIDS["cpu" if device.type == "cpu" else "cuda"]
    d, batch = grids["restricted"].d[1], grids["restricted"].batch
    base = LayerShape(d, WINDOW, device=device)  # fp32: arithmetic dominates at smaller sizes than in bf16
    points = {  # of the second layer of a stack, which is the first dilated one
        name: [Point(LAYER_TYPES[name], replace(base, d=d, span=span, layer=1), n, grid.batch) for n, d, span in grid]
        for name, grid in grids.items()
    }
    window = {
        where: [Point(LAYER_TYPES["restricted"], replace(base, causal=causal), n, batch) for n in WINDOW_N]
        for where, causal in (("encoder", False), ("decoder", True))
    }
    _time_points([point for group in (*points.values(), *window.values()) for point in group], seconds)
    return {
        "precision": str(base.dtype).removeprefix("torch."),
        "complexity": {name: _complexity(LAYER_TYPES[name], group) for name, group in points.items()},
        "restricted": {"r": WINDOW, "d": d} | {where: _window(group) for where, group in window.items()},
        "sequential": {name: _sequential(kind) for name, kind in LAYER_TYPES.items()},
        "path": {name: _path(kind) for name, kind in LAYER_TYPES.items()},
    }


def fit_exponents(sizes: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Fit values ≈ c · x^a · y^b … and return the exponents a, b …; `sizes` has the (x, y …) of each value."""
    logarithms = np.log(np.asarray(sizes, dtype=np.float64))
    columns = np.column_stack([logarithms, np.ones(len(values))])
    exponents, *_ = np.linalg.lstsq(columns, np.log(np.asarray(values, dtype=np.float64)), rcond=None)
    return [float(exponent) for exponent in exponents[:-1]]


# ---- complexity ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _time_points(points: list[Point], seconds: float) -> None:
    """Time all points in turn, round after round, each at least once per round."""
    operations: dict[tuple[str, LayerShape], Operation] = {}
    share = seconds / (ROUNDS * len(points))
    with counter("sizes", ROUNDS * len(points)) as advance:
        for _ in range(ROUNDS):
            for point in points:
                key = point.kind.name, point.shape
                if key not in operations:
                    operations[key] = point.kind.make(point.shape)
                point.times += _time_calls(operations[key], _input(point), share)
                advance(1)


def _input(point: Point) -> Tensor:
    shape = point.shape
    return torch.randn(point.batch, point.n, shape.d, device=shape.device, dtype=shape.dtype)


def _time_calls(operation: Operation, x: Tensor, seconds: float) -> list[float]:
    """Call for `seconds`, at least once after a warm-up call, and return the time of each call."""
    until = time.perf_counter() + seconds
    operation(x)
    times: list[float] = []
    while not times or time.perf_counter() < until:
        start = _now(x.device)
        operation(x)
        times.append(_now(x.device) - start)
    return times


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _complexity(kind: LayerType, points: list[Point]) -> dict[str, Any]:
    symbols = ["n", "d", *kind.span]
    sizes = [(p.n, p.shape.d, p.shape.span)[: len(symbols)] for p in points]
    counted = [floating_point_operations(kind, p.shape, p.n) for p in points]
    values: dict[str, Sequence[float]] = {
        "formula": [kind.operations(p.n, p.shape.d, p.shape.span) for p in points],
        "counted": counted,
        "measured": [p.seconds for p in points],
    }
    return {
        "paper": kind.complexity,
        "points": [
            dict(zip(symbols, size, strict=True)) | {"operations": operations, "seconds": p.seconds, "batch": p.batch}
            for size, operations, p in zip(sizes, counted, points, strict=True)
        ],
        **{name: dict(zip(symbols, fit_exponents(sizes, each), strict=True)) for name, each in values.items()},
    }


# ---- restricted self-attention ---------------------------------------------------------------------------------------


def _window(points: list[Point]) -> dict[str, Any]:
    """Return time and memory of restricted self-attention, with their exponents in n."""
    n = [point.n for point in points]
    peaks = [_peak(point) // point.batch for point in points]
    times = [point.seconds for point in points]
    sizes = [(length,) for length in n]
    return {
        "n": n,
        "seconds": times,
        "bytes": peaks,
        "time": fit_exponents(sizes, times)[0],
        "memory": fit_exponents(sizes, peaks)[0],
    }


@torch.no_grad()
def _peak(point: Point) -> int:
    """Return peak memory in bytes, input included: allocated on CUDA, held by tensors elsewhere."""
    operation = point.kind.make(point.shape)
    if torch.device(point.shape.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(point.shape.device)
        before = torch.cuda.memory_allocated(point.shape.device)
        operation(_input(point))
        return int(torch.cuda.max_memory_allocated(point.shape.device) - before)
    live = LiveTensors()
    with live:
        operation(_input(point))
    return live.peak


class LiveTensors(TorchDispatchMode):
    """Context manager that measures the peak memory of the tensors created inside it.

    It misses the workspace of kernels and, in inference mode, intermediate tensors of composite operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.alive: dict[int, int] = {}  # address of a storage → its bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, tuple | list) else (results,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self.alive.values()))
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address not in self.alive:
            self.alive[address] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, address, None)


# ---- sequential operations and path lengths --------------------------------------------------------------------------


def _sequential(kind: LayerType) -> dict[str, Any]:
    span = COUNTED_SPAN[kind.span]
    chains = [sequential_operations(kind, LayerShape(SMALL, span), n) for n in COUNTED_N]
    return {"paper": kind.sequential, "n": COUNTED_N, "chain": chains, "growth": growth(COUNTED_N, chains)}


def growth(n: Sequence[int], values: Sequence[int]) -> str:
    """Return "1" for constant values, "n" for linear ones, otherwise the best-fitting power of n."""
    slopes = {(b - a) / (later - n_) for n_, later, a, b in zip(n, n[1:], values, values[1:], strict=False)}
    if len(slopes) == 1:
        return "n" if slopes.pop() else "1"
    return f"n^{fit_exponents([(length,) for length in n], values)[0]:.2f}"


def _path(kind: LayerType) -> dict[str, Any]:
    span = COUNTED_SPAN[kind.span]
    lengths = {
        path.where: {
            "formula": path.formula,
            "expected": [path.length(n, span) for n in COUNTED_N] if path.length else None,
            "found": [path_length(kind, n, span, causal=path.causal, inside=path.inside) for n in COUNTED_N],
        }
        for path in kind.paths
    }
    return {"paper": kind.path, "n": COUNTED_N, "span": span, "lengths": lengths}


# ---- printed tables --------------------------------------------------------------------------------------------------


def _result_tables(result: dict[str, Any]) -> list[ResultTable]:
    complexity = [
        (name, row["paper"], symbol, *(f"{row[source][symbol]:.2f}" for source in SOURCES))
        for name, row in result["complexity"].items()
        for symbol in row["formula"]
    ]
    chains = [
        (name, f"O({row['paper']})", f"O({row['growth']})", *map(str, row["chain"]))
        for name, row in result["sequential"].items()
    ]
    paths = [
        (name, row["paper"], where, path["formula"], *map(_compared, path["found"], path["expected"] or path["found"]))
        for name, row in result["path"].items()
        for where, path in row["lengths"].items()
    ]
    lengths = [f"n = {n}" for n in COUNTED_N]
    window = result["restricted"]
    return [
        ResultTable(
            f"Complexity per layer, {result['precision']}", ("layer", "paper", "exponent of", *SOURCES), complexity
        ),
        ResultTable(
            f"Restricted self-attention, r = {window['r']}, d = {window['d']}",
            ("in the", "n", "time", "memory", "bytes a position"),
            [(where, *_window_cells(window[where])) for where in ("encoder", "decoder")],
        ),
        ResultTable("Sequential operations: the longest chain", ("layer", "paper", "counted", *lengths), chains),
        ResultTable("Maximum path length", ("layer", "paper", "in the", "exactly", *lengths), paths),
    ]


def _window_cells(side: dict[str, Any]) -> tuple[str, ...]:
    n, each = side["n"], [size / n for size, n in zip(side["bytes"], side["n"], strict=True)]
    sizes = f"{each[0]:,.0f} – {each[-1]:,.0f}"
    return f"{n[0]:,} – {n[-1]:,}", f"n^{side['time']:.2f}", f"n^{side['memory']:.2f}", sizes


def _compared(found: int, expected: int) -> str:
    return f"{found}" if found == expected else f"{found} ≠ {expected}"


def _remark() -> str:
    spans = ", ".join(f"{symbol} = {span}" for symbol, span in COUNTED_SPAN.items() if symbol)
    return f"Chains and paths with {spans}; paths of {', '.join(map(str, COUNTED_N))} positions. {DILATED_NOTE}"


# ---- plot ------------------------------------------------------------------------------------------------------------

# Marker and dash distinguish the lines as well as colour; a family of layer types shares a colour.
STYLES: dict[str, dict[str, Any]] = {
    "self-attention": {"color": "#b5121b", "marker": "o", "linestyle": "-"},
    "restricted": {"color": "#b5121b", "marker": "s", "linestyle": "--"},
    "recurrent": {"color": "#1b1b1b", "marker": "D", "linestyle": "-"},
    "convolution": {"color": "#1f5fa8", "marker": "^", "linestyle": "-"},
    "dilated": {"color": "#1f5fa8", "marker": "v", "linestyle": ":"},
    "separable": {"color": "#1f5fa8", "marker": "P", "linestyle": "--"},
}


def draw(result: dict[str, Any], path: str) -> None:
    """Draw the result of `measure`: time against n and against d on logarithmic axes."""
    with new_figure(path, (11, 5), font=10) as figure:
        left, right = figure.subplots(1, 2)
        for axes, symbol, held, name in ((left, "n", "d", "sequence length n"), (right, "d", "n", "width d")):
            _panel(axes, result["complexity"], symbol, held)
            axes.set_xlabel(name)
        left.set_ylabel("milliseconds for one sequence of a batch")
        figure.suptitle(f"Table 1, measured: one layer forward ({result['machine']}, {result['precision']})")


def _panel(axes: Axes, rows: dict[str, Any], symbol: str, held: str) -> None:
    """Plot time against one size, with the other fixed at the largest value common to all layer types."""
    common = set.intersection(*({point[held] for point in row["points"]} for row in rows.values()))
    for name, row in rows.items():
        first, exponents = row["points"][0], row["measured"]
        spans = [other for other in exponents if other not in "nd"]  # r or k, fixed too
        points = [p for p in row["points"] if p[held] == max(common) and all(p[span] == first[span] for span in spans)]
        label = ", ".join([name, *(f"{span} = {first[span]}" for span in spans)])
        axes.plot(
            [p[symbol] for p in points],
            [1000 * p["seconds"] for p in points],
            label=f"{label}:  ${symbol}^{{{exponents[symbol]:.2f}}}$",
            linewidth=1.6,
            markersize=6,
            **STYLES[name],
        )
    ticks = sorted({point[symbol] for row in rows.values() for point in row["points"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, title="time ∝")
    axes.set_title(f"{held} = {max(common):,}", fontsize=10)
