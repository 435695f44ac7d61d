"""The layer types of the paper's Table 1 as operations, and counts of FLOPs, sequential operations and path lengths.

Self-attention is counted as in the paper: queries, keys and values are given, without projections. The recurrence is a
GRU and the convolutions are the gated ones of ConvS2S; constant factors do not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qkv.core.errors import QkvError
from qkv.models.convs2s import GatedConvolution, dilations
from qkv.models.rnn import Layer, gru
from qkv.models.variants import ScoredAttention
from qkv.options import ConvS2SConfig

WIDTH = 64  # of an attention head; the number of heads grows with d, as in the paper's two models
SMALL = 8  # d of measurements that only depend on the pattern of dependence

Operation = Callable[[Tensor], Tensor]  # (batch, n, d) → (batch, n, d)


@dataclass(frozen=True)
class LayerShape:
    """Hyperparameters of one layer; the length n comes from the input."""

    d: int
    span: int = 0  # r of restricted attention, k of a convolution
    causal: bool = False  # decoder
    layer: int = 0  # index in the stack; sets the dilation
    written_out: bool = False  # one operation per equation instead of a fused kernel
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class PathLength:
    """Number of layers that connect the two ends of n positions: the paper's O(…) as an exact number."""

    where: str
    causal: bool
    formula: str
    length: Callable[[int, int], int] | None  # function of n and the span
    inside: bool = False  # n positions inside a longer sentence, with n on each side


@dataclass(frozen=True)
class LayerType:
    """One row of Table 1: the paper's formulas, and a constructor of the layer."""

    name: str
    span: str  # its symbol in the formulas: r, k or none
    complexity: str
    operations: Callable[[int, int, int], float]  # the same as a function of n, d and the span
    sequential: str
    path: str
    paths: tuple[PathLength, ...]
    make: Callable[[LayerShape], Operation]
    recurrent: bool = False  # one application is one time step at every position, not a layer


# ---- the operations --------------------------------------------------------------------------------------------------


def self_attention(shape: LayerShape) -> Operation:
    """Multi-head self-attention of x, restricted to `span` positions on each side if given."""

    def operation(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (max(1, shape.d // WIDTH), -1)).transpose(1, 2)  # (batch, heads, n, width)
        restricted = ScoredAttention("scaled", None, "", window=shape.span)
        with sdpa_kernel(SDPBackend.MATH) if shape.written_out else nullcontext():
            mixed = restricted.attend(heads, heads, heads, None, shape.causal)
        return mixed.transpose(1, 2).flatten(2)

    return operation


def recurrence(shape: LayerShape) -> Operation:
    layer = _gru(shape)
    layer.written_out = shape.written_out
    return lambda x: layer(x, layer.zeros(x))[0]


def recurrent_step(shape: LayerShape) -> Callable[[Tensor, Tensor], Tensor]:
    """Return one GRU step at all positions at once; h_{t−1} comes from the previous call."""
    weights = _gru(shape).cell.all_weights[0]

    def step(x: Tensor, h: Tensor) -> Tensor:
        previous = F.pad(h, (0, 0, 1, 0))[:, :-1]  # (batch, n, d)
        return gru(x, (previous,), *weights)[0]

    return step


def _gru(shape: LayerShape) -> Layer:
    return Layer("gru", shape.d, shape.d).to(shape.device, shape.dtype)


def convolution(kind: str) -> Callable[[LayerShape], Operation]:
    def make(shape: LayerShape) -> Operation:
        spec = ConvS2SConfig(d_model=shape.d, kernel=shape.span, convolution=kind, dropout=0.0)
        *_, dilation = dilations(spec, shape.layer + 1)
        layer = GatedConvolution(spec, dilation, causal=shape.causal).to(shape.device, shape.dtype)
        with torch.no_grad():
            weights = layer.weights()  # normalise once, independent of n
        return lambda x: layer(x, x.shape[1], weights)

    return make


# ---- the table -------------------------------------------------------------------------------------------------------


def _ceil_ratio(length: int, reach: int) -> int:
    """⌈length / reach⌉"""
    return -(-length // reach)


def _ceil_log(length: int, base: int) -> int:
    """⌈log_base length⌉ in integer arithmetic."""
    return next(m for m in count() if base**m >= length)


def _both_sides(formula: str, length: Callable[[int, int], int]) -> tuple[PathLength, ...]:
    return PathLength("encoder", False, formula, length), PathLength("decoder", True, formula, length)


# A centred kernel reaches (k − 1)/2 positions on each side; a causal kernel reaches k − 1 to the left. With dilations
# 1, k, k², … m layers reach (k^m − 1)/2 on each side, or k^m − 1 to the left. For centred kernels each distance has
# exactly one path (two to the right is three to the right and one to the left). Near the ends of a sentence this path
# can lead outside; such a pair is connected only after the cycle of dilations restarts.
CONTIGUOUS = (
    PathLength("encoder", False, "⌈2(n−1)/(k−1)⌉", lambda n, k: _ceil_ratio(2 * (n - 1), k - 1)),
    PathLength("decoder", True, "⌈(n−1)/(k−1)⌉", lambda n, k: _ceil_ratio(n - 1, k - 1)),
)
DILATED = (
    PathLength("inside", False, "⌈log_k(2n−1)⌉", lambda n, k: _ceil_log(2 * n - 1, k), inside=True),
    PathLength("encoder", False, "more", None),
    PathLength("decoder", True, "⌈log_k n⌉", lambda n, k: _ceil_log(n, k)),
)
DIRECT = _both_sides("1", lambda n, _: 1)
WINDOWED = _both_sides("⌈(n−1)/r⌉", lambda n, r: _ceil_ratio(n - 1, r))
STEPWISE = (PathLength("either", True, "n", lambda n, _: n),)


def _knd2(n: int, d: int, k: int) -> float:
    return k * n * d**2


def _knd_nd2(n: int, d: int, k: int) -> float:
    return k * n * d + n * d**2


ROWS = (
    LayerType("self-attention", "", "n²·d", lambda n, d, _: n * n * d, "1", "1", DIRECT, self_attention),
    LayerType("restricted", "r", "r·n·d", lambda n, d, r: r * n * d, "1", "n/r", WINDOWED, self_attention),
    LayerType("recurrent", "", "n·d²", lambda n, d, _: n * d**2, "n", "n", STEPWISE, recurrence, recurrent=True),
    LayerType("convolution", "k", "k·n·d²", _knd2, "1", "n/k", CONTIGUOUS, convolution("contiguous")),
    LayerType("dilated", "k", "k·n·d²", _knd2, "1", "log_k n", DILATED, convolution("dilated")),
    LayerType("separable", "k", "k·n·d + n·d²", _knd_nd2, "1", "n/k", CONTIGUOUS, convolution("separable")),
)
LAYER_TYPES = {kind.name: kind for kind in ROWS}


# ---- counts ----------------------------------------------------------------------------------------------------------


def floating_point_operations(kind: LayerType, shape: LayerShape, n: int) -> int:
    """Count the FLOPs of matrix products and convolutions."""
    counter = FlopCounterMode(display=False)
    # The meta device computes nothing, so any size is cheap; it is slow only for long chains of small operations.
    shape = replace(shape, written_out=True) if kind.recurrent else replace(shape, device="meta")
    with torch.inference_mode():
        operation, x = kind.make(shape), torch.zeros(1, n, shape.d, device=shape.device, dtype=shape.dtype)
        with counter:
            operation(x)
    return counter.get_total_flops()


def sequential_operations(kind: LayerType, shape: LayerShape, n: int) -> int:
    """Return the longest chain of dependent operations between input and output of one layer."""
    operation = kind.make(replace(shape, written_out=True))
    return longest_chain(operation(torch.randn(1, n, shape.d, requires_grad=True)))


def longest_chain(out: Tensor) -> int:
    """Measure the autograd graph; a matrix product or a softmax counts as one operation, as in the paper."""
    longest: dict[object, int] = {}
    stack = [out.grad_fn]
    while stack:  # iterative: a chain can exceed Python's recursion limit
        node = stack[-1]
        assert node is not None
        before = [other for other, _ in node.next_functions if other is not None]
        waiting = [other for other in before if other not in longest]
        if waiting:
            stack.extend(waiting)
        else:
            leaf = node.name().endswith("AccumulateGrad")
            longest[stack.pop()] = 0 if leaf else 1 + max((longest[other] for other in before), default=0)
    return longest[out.grad_fn]


def path_length(kind: LayerType, n: int, span: int = 0, *, causal: bool, inside: bool = False) -> int:
    """Return after how many applications every output position depends on all input positions it may see."""
    length, inner = (3 * n, slice(n, 2 * n)) if inside else (n, slice(None))
    goal = torch.ones(n, n, dtype=torch.bool)
    if causal:
        goal = goal.tril()
    # A stack of layers starts from the input itself; a recurrence starts from states without input.
    connected = torch.zeros(length, length) if kind.recurrent else torch.eye(length)  # (output, input)
    for applications in range(10 * n + 1):
        if torch.equal(connected[inner, inner] > 0, goal):
            return applications
        shape = LayerShape(SMALL, span, causal, layer=applications, dtype=torch.float64)
        of_input, of_last = dependence(kind, shape, length)
        connected = (of_input + of_last @ connected).clamp(max=1)
    raise QkvError(f"{kind.name}: no number of applications joins {n} positions with a span of {span}: widen it")


def dependence(kind: LayerType, shape: LayerShape, n: int) -> tuple[Tensor, Tensor]:
    """Return which outputs depend on which inputs x, and on which previous outputs h: two 0/1 matrices (n, n).

    An entry is 1 where the block of the Jacobian is nonzero, with random weights. The input is copied n times and copy
    i contributes output i only, so that one backward pass gives all rows.
    """
    x, h = (torch.randn(n, shape.d, dtype=shape.dtype).repeat(n, 1, 1).requires_grad_() for _ in range(2))
    applied = recurrent_step(shape)(x, h) if kind.recurrent else kind.make(shape)(h)
    outputs = applied.diagonal(dim1=0, dim2=1)  # (d, n)
    mixed = (outputs * torch.randn_like(outputs)).sum()
    gradients = torch.autograd.grad(mixed, (x, h), allow_unused=True, materialize_grads=True)
    of_input, of_last = ((gradient != 0).any(dim=-1).float() for gradient in gradients)
    return of_input, of_last
