"""A product by the C of this package alone: what shows whether it computes rightly here."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.models.native.build import library
from qkv.models.native.layout import Layout


class NativeProduct:
    """x (…, inputs) to xWᵀ + b (…, outputs); negative ones become zero if `relu`."""

    rounded = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        found = library()
        if isinstance(found, str):
            raise RuntimeError(found)
        if self.rounded and not found.qkv_has_bytes():
            raise RuntimeError("needs avx512_vnni")
        self.library, self.outputs = found, len(weight)
        self.layout = Layout(found.qkv_lanes(), found.qkv_panel(), self.rounded)
        self.matrix = self.layout.matrix(weight, bias)

    def __call__(self, x: Tensor, relu: bool = False) -> Tensor:
        inputs = self.matrix.inputs
        rows = F.pad(x.float(), (0, inputs - x.shape[-1])).reshape(-1, inputs).contiguous()
        y = torch.empty(len(rows), self.outputs)
        memory = torch.empty(len(rows) * (inputs + 8) + 256, dtype=torch.uint8)
        self.library.qkv_product(
            ctypes.byref(self.matrix), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)),
            ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(self.outputs), relu, ctypes.c_void_p(memory.data_ptr()),
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.outputs)


class NativeBytes(NativeProduct):
    """The same with weights and inputs rounded to bytes."""

    rounded = True
