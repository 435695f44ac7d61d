"""Linear layers with packed weights, computed by the oneDNN and FBGEMM kernels of PyTorch in fp32, bf16 and int8."""

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

# oneDNN caches a kernel for each input shape, up to 1,024: hundreds of megabytes in a search with shrinking batches.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
# PyTorch also caches prepared operations for each shape, 1,024 for every kind of product: hundreds of megabytes more.
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")

PACKED_FOR_ROWS = 64  # input rows that oneDNN optimises the weight packing for; any number of rows works
LARGE_OUTPUT = 300_000  # numbers in the output of a product, about the size of the L2 cache


# ---- matrices --------------------------------------------------------------------------------------------------------


class Product(Protocol):
    """A packed weight as a function: x (…, inputs) to xWᵀ + b (…, outputs), both fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Plain:
    """Product with the unpacked weight, by torch.nn.functional.linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDNN:
    """fp32 product by oneDNN, with the weight packed in blocks."""

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype).contiguous(), PACKED_FOR_ROWS)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.kernel = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.kernel(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.float()


class OneDNNBF16(OneDNN):
    """bf16 product by oneDNN, accumulated in fp32."""

    dtype = torch.bfloat16


class OneDNNInt8:
    """int8 product by oneDNN; the inputs are quantised at every call with one scale and zero point."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        quantised, self.scale = quantise_weight(weight)
        self.zero, self.half = torch.zeros(len(weight), dtype=torch.int), torch.tensor(0.5)
        self.weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.bias = bias
        self.kernel = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        low, high = (float(end) for end in x.aminmax())
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / 254 or 1.0  # not 255: rounding at both ends stays within the byte
        zero = round(-low / scale)
        quantised = torch.add(self.half + zero, x, alpha=1 / scale).to(torch.uint8)
        y: Tensor = self.kernel(
            quantised, scale, zero, self.weight, self.scale, self.zero, self.bias,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y


class FBGEMMInt8:
    """int8 product by FBGEMM; the kernel quantises the inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        quantised, scale = quantise_weight(weight)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            with warnings.catch_warnings():  # deprecation warning; `fault` reports a missing kernel
                warnings.simplefilter("ignore")
                zero = torch.zeros(len(scale), dtype=torch.long)
                quantised_tensor = torch._make_per_channel_quantized_tensor(quantised, scale.double(), zero, 0)
                self.packed = torch.ops.quantized.linear_prepack(quantised_tensor, bias)
        finally:
            torch.backends.quantized.engine = before
        kernel = torch.ops.quantized.linear_dynamic.default
        self.kernel = getattr(kernel, "_op", kernel)  # skips a check that takes as long as the product
        # Without VNNI, pairs of products are added in 16 bits: 7-bit inputs avoid saturation.
        self.reduced = not {"avx512_vnni", "avx_vnni"} & processor()

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.packed, self.reduced)


class Int8:
    """int8 product by FBGEMM for small outputs (faster quantisation), by oneDNN for large ones (a single write)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.small, self.large, self.outputs = FBGEMMInt8(weight, bias), OneDNNInt8(weight, bias), len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return (self.large if rows * self.outputs > LARGE_OUTPUT else self.small)(x)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight (outputs, inputs) to int8; return it and the scale of each output."""
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


# ---- choosing --------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[type[Product], ...]] = {  # fastest first
    "fp32": (OneDNN, Plain),
    "bf16": (OneDNNBF16,),
    "int8": (Int8, FBGEMMInt8, OneDNNInt8),
}
INSTRUCTIONS = {  # best first
    "fp32": ("avx512f", "avx2", "asimd"),
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "int8": ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "asimddp"),
}
TOLERANCE = {"fp32": 1e-5, "bf16": 0.03, "int8": 0.03}


@cache
def processor() -> frozenset[str]:
    """Return the feature flags of the processor from /proc/cpuinfo; empty on systems without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split())


@cache
def fault(kernel: type[Product], dtype: str) -> str:
    """Test a kernel on a small matrix; return the reason if it is missing or inaccurate on this machine, else ''."""
    generator = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 32), (5, 32), (24,)))
    x = torch.cat([x] * (LARGE_OUTPUT // x.shape[0] // len(weight) + 1))
    try:
        product = kernel(weight, bias)
        y = torch.cat([product(x[:5]), product(x)[5:]])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return f"PyTorch has no kernel for it on this machine ({cause:.60})"
    expected = F.linear(x, weight, bias)
    deviation = float((y - expected).abs().max() / expected.abs().max())
    return "" if deviation <= TOLERANCE[dtype] else f"its kernel is off by {deviation:.0%} on this machine"


# ---- packing ---------------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """Module that replaces an nn.Linear by a packed product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def replace_matrices(model: nn.Module, kernel: type[Product]) -> nn.Module:
    """Replace the linear layers of a model by packed ones, in place."""
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
    """Pack the joint projection of an attention as two products: queries, and keys with values."""
    weight, bias = attention.qkv.weight, attention.qkv.bias

    def part(rows: slice) -> Product:
        return kernel(weight[rows], None if bias is None else bias[rows])

    queries = attention.heads * attention.d_k
    query, memory = part(slice(0, queries)), part(slice(queries, None))
    # `project_query` asks for the rows from 0, `project_memory` for all others.
    attention._linear = lambda x, rows: (memory if rows.start else query)(x)  # type: ignore[method-assign]


def _replace_normed(matrix: WeightNorm, kernel: type[Product]) -> None:
    """Compute the weight of a WeightNorm once, and pack it."""
    weight = matrix.weight()
    product = kernel(weight, matrix.bias)
    matrix.forward = lambda x, weight=None: product(x)  # type: ignore[method-assign]
    matrix.weight = lambda: weight  # type: ignore[method-assign]
