"""CPU engines: `pack` returns a copy of a trained model for search, in the fastest form that this processor supports.

An ordinary Transformer runs in C (`native_transformer`), or without a C compiler as the plain model. All other models
use packed weights and the kernels of PyTorch (`packed_linear`). fp32 is exact; bf16 and int8 round. int8 has a
quantisation scale for each output of a matrix, and one for its inputs, computed at every call. A kernel that is missing
or fails its self-test is not used, and the engine gives the reason.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import nn

from qkv.core.errors import QkvError, UsageError
from qkv.core.transformer import Transformer
from qkv.engines.cpu.native_library import ACTIVATIONS, NativeInt8Product, NativeProduct, library
from qkv.engines.cpu.native_transformer import NativeTransformer
from qkv.engines.cpu.packed_linear import INSTRUCTIONS, KERNELS, Plain, Product, fault, processor, replace_matrices
from qkv.models.variants import DecoderOnly
from qkv.options import FLAG, SIZES, AllowList, DecoderOnlyConfig, TransformerConfig

DTYPES = ("auto", "fp32", "bf16", "int8")
NATIVE: dict[str, type[Product]] = {"fp32": NativeProduct, "int8": NativeInt8Product}


@dataclass(frozen=True)
class Engine:
    """Choice of dtype, kernel and instruction set; printed as `int8 on avx512_vnni, native`."""

    dtype: str
    kernel: type[Product]
    instructions: str
    reason: str = ""  # for a dtype or implementation other than the requested one
    native: bool = False  # computed by the C library

    def __str__(self) -> str:
        native, reason = ", native" if self.native else "", f" ({self.reason})" if self.reason else ""
        return f"{self.dtype} on {self.instructions}{native}{reason}"


def choose(dtype: str = "auto", flags: frozenset[str] | None = None) -> Engine:
    """Return the engine for a dtype, or fp32 with a reason if the processor or PyTorch does not support that dtype.

    `flags` are the processor's features, by default read from this machine. `auto` is fp32, the precision of training.
    bf16 needs bf16 instructions: emulated, it is slower than fp32.
    """
    if dtype not in DTYPES:
        raise UsageError(f'dtype = "{dtype}": must be one of {", ".join(DTYPES)}')
    flags = processor() if flags is None else flags
    requested, reason = "fp32" if dtype == "auto" else dtype, "the processor has no instructions for it"
    best = next((name for name in INSTRUCTIONS[requested] if name in flags), "")
    if best or requested == "fp32":
        for kernel in KERNELS[requested]:
            reason = fault(kernel, requested)
            if not reason:
                return Engine(requested, kernel, best or "any processor")
    if requested == "fp32":
        return Engine("fp32", Plain, "any processor", reason)
    return replace(choose("fp32", flags), reason=f"not {requested}: {reason}")


def native_or_plain(engine: Engine) -> Engine:
    """Return the C engine; without a compiler, or if C fails its self-test, the plain model in fp32 with a reason."""
    available = library()
    reason = available if isinstance(available, str) else fault(NATIVE[engine.dtype], engine.dtype)
    if not reason:
        best = "avx512_vnni" if engine.dtype == "int8" else engine.instructions
        return replace(engine, native=True, instructions=best)
    if engine.dtype == "int8":
        raise UsageError(f'dtype = "int8": only the C engine has it for a Transformer ({reason}): use fp32')
    reason = ", ".join(filter(None, (engine.reason, f"not native: {reason}")))
    return Engine("fp32", Plain, "any processor", reason)


MODEL = AllowList(
    "model",
    (TransformerConfig, DecoderOnlyConfig),
    **SIZES,
    norm=("post", "pre"),
    rms_norm=FLAG,
    activation=ACTIVATIONS,
    positions=("sinusoidal", "learned", "rotary", "none"),
    bias=FLAG,
    kind=("transformer", "decoder"),
    attention=("scaled", "dot"),
    window=(0,),
)


def runs_in_c(model: nn.Module) -> TypeGuard[Transformer | DecoderOnly]:
    """Return whether the C engine supports this model: the options of `MODEL`, and d_k equal to d_v."""
    return (
        isinstance(model, Transformer | DecoderOnly)
        and MODEL.refusal(model.config) is None
        and model.config.key_width == model.config.value_width
    )


def pack(model: nn.Module, dtype: str = "auto") -> nn.Module:
    """Return a copy of a model for search on a CPU, with the same methods; its `engine` describes the choice.

    A Transformer with dot-product attention becomes a `NativeTransformer`; without a C compiler it stays the plain
    model in fp32, and int8 is refused. bf16 and all other models use packed weights, except the recurrences of an RNN,
    which use the kernels of PyTorch.
    """
    engine = choose(dtype)
    if engine.dtype == "int8":  # int8 kernels hide NaN
        broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
        if broken:
            raise QkvError(f"the weights of {broken[0]} are not numbers: use those of another step")
    with torch.no_grad():
        if runs_in_c(model) and engine.dtype != "bf16":
            engine, native = native_or_plain(engine), library()
            if engine.native and not isinstance(native, str):
                packed: nn.Module = NativeTransformer(model, native, int8=engine.dtype == "int8")
            else:
                packed = copy.deepcopy(model)
        else:
            packed = replace_matrices(copy.deepcopy(model), engine.kernel)
    packed.engine = engine  # type: ignore[assignment]
    return packed.eval().requires_grad_(False)
