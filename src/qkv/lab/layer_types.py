"""The layer types of the paper's Table 1, each as one operation, and all that can be counted of them without a clock.

Self-attention is counted as the paper counts it: queries, keys and values are given, the projections left out. The
recurrence is a GRU, the convolutions are the gated ones of ConvS2S; constant factors do not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qkv.core.errors import QkvError
from qkv.models.attention import attend
from qkv.models.convs2s import GatedConvolution, dilations
from qkv.models.rnn import Layer, gru
from qkv.options import ConvS2SConfig

WIDTH = 64  # of an attention head: more of them as d grows, as in the paper's two models
SMALL = 8  # d where only the pattern of dependence matters

Operation = Callable[[Tensor], Tensor]  # (batch, n, d) → (batch, n, d)


@dataclass(frozen=True)
class LayerShape:
    """What one layer is made from; its length n is its input's."""

    d: int
    span: int = 0  # r of restricted attention, k of a convolution
    causal: bool = False  # as in a decoder
    layer: int = 0  # its place in a stack, which decides on its dilation
    written_out: bool = False  # in the operations of its equations rather than by a fused kernel
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class PathLength:
    """How many applications join the two ends of n positions: the paper's O(…) as an exact number."""

    where: str
    causal: bool
    formula: str
    length: Callable[[int, int], int] | None  # of n and the span
    inside: bool = False  # of n positions with as many before and behind them, not of a whole sentence


@dataclass(frozen=True)
class LayerType:
    """One row of Table 1: what the paper says of it, and how to make one."""

    name: str
    span: str  # the formulae's symbol for it, if they have one
    complexity: str
    operations: Callable[[int, int, int], float]  # the same, of n, d and the span
    sequential: str
    path: str
    paths: tuple[PathLength, ...]
    make: Callable[[LayerShape], Operation]
    recurrent: bool = False  # one application is one step at every position, not a whole layer


# ---- the operations --------------------------------------------------------------------------------------------------


def self_attention(shape: LayerShape) -> Operation:
    """Attention of x to itself, in heads; restricted to `span` positions on each side if that is given."""

    def fused(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (max(1, shape.d // WIDTH), -1)).transpose(1, 2)  # (batch, heads, n, width)
        found = attend(heads, heads, heads, causal=shape.causal, window=shape.span)
        return found.transpose(1, 2).flatten(2)

    def written_out(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return fused(x)

    return written_out if shape.written_out else fused


def recurrence(shape: LayerShape) -> Operation:
    layer = _gru(shape)
    layer.written_out = shape.written_out
    return lambda x: layer(x, layer.zeros(x))[0]


def recurrent_step(shape: LayerShape) -> Callable[[Tensor, Tensor], Tensor]:
    """One step at every position at once: h_t of x_t and of the h_{t−1} that the application before this one made."""
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
        made = GatedConvolution(spec, dilation, causal=shape.causal).to(shape.device, shape.dtype)
        with torch.no_grad():
            weights = made.weights()  # normalised once, whatever n
        return lambda x: made(x, x.shape[1], weights)

    return make


# ---- the table -------------------------------------------------------------------------------------------------------


def _ceil_ratio(length: int, reach: int) -> int:
    """⌈length / reach⌉"""
    return -(-length // reach)


def _ceil_log(length: int, base: int) -> int:
    """⌈log_base length⌉, in whole numbers."""
    return next(m for m in count() if base**m >= length)


def _both_sides(formula: str, length: Callable[[int, int], int]) -> tuple[PathLength, ...]:
    return PathLength("encoder", False, formula, length), PathLength("decoder", True, formula, length)


# A centred kernel reaches (k − 1)/2 to each side, one that ends at its position k − 1 to the left. Dilated by 1, k, k²
# and so on, m layers reach (k^m − 1)/2 to each side, or k^m − 1 to the left. To each side there is but one way for each
# distance, two to the right being one to the left and three to the right; at the ends of a sentence that way may lead
# outside, and such a pair of positions waits for the dilations to begin anew.
CONTIGUOUS = (
    PathLength("encoder", False, "⌈2(n−1)/(k−1)⌉", lambda n, k: _ceil_ratio(2 * (n - 1), k - 1)),
    PathLength("decoder", True, "⌈(n−1)/(k−1)⌉", lambda n, k: _ceil_ratio(n - 1, k - 1)),
)
DILATED = (
    PathLength("inside", False, "⌈log_k(2n−1)⌉", lambda n, k: _ceil_log(2 * n - 1, k), inside=True),
    PathLength("encoder", False, "more", None),
    PathLength("decoder", True, "⌈log_k n⌉", lambda n, k: _ceil_log(n, k)),
)
KND2 = "k·n·d²"

LAYER_TYPES = {
    kind.name: kind
    for kind in (
        LayerType(
            "self-attention",
            "",
            "n²·d",
            lambda n, d, _: n * n * d,
            "1",
            "1",
            _both_sides("1", lambda n, _: 1),
            self_attention,
        ),
        LayerType(
            "restricted",
            "r",
            "r·n·d",
            lambda n, d, r: r * n * d,
            "1",
            "n/r",
            _both_sides("⌈(n−1)/r⌉", lambda n, r: _ceil_ratio(n - 1, r)),
            self_attention,
        ),
        LayerType(
            "recurrent",
            "",
            "n·d²",
            lambda n, d, _: n * d**2,
            "n",
            "n",
            (PathLength("either", True, "n", lambda n, _: n),),
            recurrence,
            recurrent=True,
        ),
        LayerType(
            "convolution", "k", KND2, lambda n, d, k: k * n * d**2, "1", "n/k", CONTIGUOUS, convolution("contiguous")
        ),
        LayerType("dilated", "k", KND2, lambda n, d, k: k * n * d**2, "1", "log_k n", DILATED, convolution("dilated")),
        LayerType(
            "separable",
            "k",
            "k·n·d + n·d²",
            lambda n, d, k: k * n * d + n * d**2,
            "1",
            "n/k",
            CONTIGUOUS,
            convolution("separable"),
        ),
    )
}


# ---- what can be counted ---------------------------------------------------------------------------------------------


def floating_point_operations(kind: LayerType, shape: LayerShape, n: int) -> int:
    """Of the matrix products and convolutions."""
    counter = FlopCounterMode(display=False)
    # On "meta" nothing is computed, so any size is free; but for a long chain of small operations it is slow.
    shape = replace(shape, written_out=True) if kind.recurrent else replace(shape, device="meta")
    with torch.inference_mode():
        operation, x = kind.make(shape), torch.zeros(1, n, shape.d, device=shape.device, dtype=shape.dtype)
        with counter:
            operation(x)
    return counter.get_total_flops()


def sequential_operations(kind: LayerType, shape: LayerShape, n: int) -> int:
    """The longest chain of operations that wait for one another, between one layer's input and its output."""
    operation = kind.make(replace(shape, written_out=True))
    return longest_chain(operation(torch.randn(1, n, shape.d, requires_grad=True)))


def longest_chain(out: Tensor) -> int:
    """Found in the graph that autograd keeps. A matrix product or a softmax counts as one, as in the paper."""
    longest: dict[object, int] = {}
    stack = [out.grad_fn]
    while stack:  # a chain may be longer than Python's recursion goes
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
    """After how many applications every output position depends on every input position that it may depend on."""
    length, asked = (3 * n, slice(n, 2 * n)) if inside else (n, slice(None))
    goal = torch.ones(n, n, dtype=torch.bool)
    if causal:
        goal = goal.tril()
    # A stack of layers begins with the input itself; a recurrence, with states that know nothing.
    known = torch.zeros(length, length) if kind.recurrent else torch.eye(length)  # (output, input)
    for applications in range(10 * n + 1):
        if torch.equal(known[asked, asked] > 0, goal):
            return applications
        shape = LayerShape(SMALL, span, causal, layer=applications, dtype=torch.float64)
        of_input, of_last = dependence(kind, shape, length)
        known = (of_input + of_last @ known).clamp(max=1)
    raise QkvError(f"{kind.name}: no number of applications joins {n} positions with a span of {span}: widen it")


def dependence(kind: LayerType, shape: LayerShape, n: int) -> tuple[Tensor, Tensor]:
    """Which outputs of one application depend on which inputs x, and on which outputs h of the last: 0 or 1, (n, n).

    These are the blocks of the Jacobian that are not zero, with random weights. Of n copies of x and h, copy i is asked
    for output i alone, so that one backward pass finds all rows.
    """
    x, h = (torch.randn(n, shape.d, dtype=shape.dtype).repeat(n, 1, 1).requires_grad_() for _ in range(2))
    applied = recurrent_step(shape)(x, h) if kind.recurrent else kind.make(shape)(h)
    outputs = applied.diagonal(dim1=0, dim2=1)  # (d, n)
    mixed = (outputs * torch.randn_like(outputs)).sum()
    gradients = torch.autograd.grad(mixed, (x, h), allow_unused=True, materialize_grads=True)
    of_input, of_last = ((gradient != 0).any(dim=-1).float() for gradient in gradients)
    return of_input, of_last
