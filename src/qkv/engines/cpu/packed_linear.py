"""Products of packed matrices by the kernels that torch ships: oneDNN's and FBGEMM's, in fp32, bf16 and int8."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import MultiHeadAttention
from qkv.core.transformer import Model
from qkv.models.convs2s import WeightNorm

# oneDNN keeps a kernel for each shape it has met, up to 1,024: hundreds of megabytes in a search whose batches shrink.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
# torch keeps what it prepared for each shape as well, 1,024 for every kind of product: hundreds of megabytes more.
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")

ROWS = 64  # for which oneDNN lays out a weight; the layout serves any number
MUCH = 300_000  # numbers in a product, about what the second cache holds


# ---- matrices --------------------------------------------------------------------------------------------------------


class Product(Protocol):
    """x (…, inputs) to xWᵀ + b (…, outputs), both fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Plain:
    """As torch does it by itself."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDNN:
    """oneDNN's, with the weight in blocks."""

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype).contiguous(), ROWS)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.kernel = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.kernel(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.float()


class OneDNN16(OneDNN):
    """The same in bf16, added up in fp32."""

    dtype = torch.bfloat16


class OneDNN8:
    """oneDNN's with bytes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, self.scale = round_weight(weight)
        self.zero, self.half = torch.zeros(len(weight), dtype=torch.int), torch.tensor(0.5)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.bias = bias
        self.kernel = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        low, high = (float(end) for end in x.aminmax())
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / 254 or 1.0  # one less than there are: rounding at both ends cannot leave the byte
        zero = round(-low / scale)
        rounded = torch.add(self.half + zero, x, alpha=1 / scale).to(torch.uint8)
        y: Tensor = self.kernel(
            rounded, scale, zero, self.weight, self.scale, self.zero, self.bias,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y


class FBGEMM8:
    """FBGEMM's with bytes, which rounds the inputs on the way."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, scale = round_weight(weight)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            with warnings.catch_warnings():  # torch announces that it will go one day: then it is missing
                warnings.simplefilter("ignore")
                zero = torch.zeros(len(scale), dtype=torch.long)
                whole = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zero, 0)
                self.packed = torch.ops.quantized.linear_prepack(whole, bias)
        finally:
            torch.backends.quantized.engine = before
        kernel = torch.ops.quantized.linear_dynamic.default
        self.kernel = getattr(kernel, "_op", kernel)  # without a check that takes as long as the product
        # Without these instructions pairs are added up in 16 bits, which the inputs must leave room for.
        self.reduced = not {"avx512_vnni", "avx_vnni"} & processor()

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.kernel(x, self.packed, self.reduced)
        return y


class Int8:
    """FBGEMM's where little is written, oneDNN's where much is: the one rounds faster, the other writes once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.little, self.much, self.outputs = FBGEMM8(weight, bias), OneDNN8(weight, bias), len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return (self.much if rows * self.outputs > MUCH else self.little)(x)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (outputs, inputs) as bytes from -127 to 127, and for each output what they count."""
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


# ---- choosing --------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[type[Product], ...]] = {  # the fastest first
    "fp32": (OneDNN, Plain),
    "bf16": (OneDNN16,),
    "int8": (Int8, FBGEMM8, OneDNN8),
}
INSTRUCTIONS = {  # the best first
    "fp32": ("avx512f", "avx2", "asimd"),
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "int8": ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "asimddp"),
}
BF16 = frozenset(INSTRUCTIONS["bf16"])
TOLERANCE = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.03}


@cache
def processor() -> frozenset[str]:
    """What the processor can do, in the system's own words; nothing where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split())


@cache
def fault(kernel: type[Product], dtype: str) -> str:
    """What is wrong with a kernel here; nothing if it gives the right product of a small matrix."""
    draws = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(*shape, generator=draws) for shape in ((24, 32), (5, 32), (24,)))
    x = torch.cat([x] * (MUCH // x.shape[0] // len(weight) + 1))
    try:
        product = kernel(weight, bias)
        y = torch.cat([product(x[:5]), product(x)[5:]])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"no kernel for it here ({(str(error) or type(error).__name__).splitlines()[0]:.60})"
    right = F.linear(x, weight, bias)
    wrong = float((y - right).abs().max() / right.abs().max())
    return "" if wrong <= TOLERANCE[dtype] else f"its kernel computes wrongly here, by {wrong:.0%}"


# ---- packing ---------------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """In place of an nn.Linear."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def replace_matrices(model: nn.Module, kernel: type[Product]) -> nn.Module:
    """Put packed matrices in the place of all others."""
    if isinstance(model, Model):
        model.project = kernel(model.output.weight, None)  # type: ignore[method-assign,assignment]
    for module in list(model.modules()):
        if isinstance(module, MultiHeadAttention):
            _replace_parts(module, kernel)
        elif isinstance(module, WeightNorm):
            _replace_normed(module, kernel)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not getattr(model, "output", None):
                setattr(parent, name, PackedLinear(kernel(child.weight, child.bias)))
    return model


def _replace_parts(attention: MultiHeadAttention, kernel: type[Product]) -> None:
    """The joint matrix is used as a whole or in parts: the parts become matrices of their own."""
    queries = attention.heads * attention.d_k
    weight, bias = attention.qkv.weight, attention.qkv.bias

    def part(rows: slice) -> Product:
        return kernel(weight[rows], None if bias is None else bias[rows])

    query, memory = part(slice(0, queries)), part(slice(queries, None))

    def split(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (attention.heads, -1))
        return heads.transpose(1, 2)  # (batch, heads, length, width)

    def project_query(x: Tensor) -> Tensor:
        return split(query(x))

    def project_memory(x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = memory(x).tensor_split([queries], dim=-1)
        return split(k), split(v)

    attention.project_query = project_query  # type: ignore[method-assign]
    attention.project_memory = project_memory  # type: ignore[method-assign,assignment]


def _replace_normed(matrix: WeightNorm, kernel: type[Product]) -> None:
    """Its norm is taken once for all."""
    weight = matrix.weight()
    product = kernel(weight, matrix.bias)

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return product(x)

    matrix.forward = forward  # type: ignore[method-assign]
    matrix.weight = lambda: weight  # type: ignore[method-assign]
