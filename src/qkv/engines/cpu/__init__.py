"""The CPU engines: a copy of a trained model for search, in the fastest form that this processor supports.

An ordinary Transformer runs in C (`native_transformer`), or without a C compiler as the plain model. All other models
use packed matrices and the kernels that PyTorch ships (`packed_linear`). fp32 is exact; bf16 and int8 round. int8 keeps
a scale for each output of a matrix, and one for its inputs, computed at every call. A kernel that is missing or
computes wrongly here is not used, and the engine gives the reason.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import nn

from qkv.core.errors import QkvError, UsageError
from qkv.core.transformer import Transformer
from qkv.engines import FLAG, SIZES, AllowList
from qkv.engines.cpu.native_library import NativeBytes, NativeProduct, library
from qkv.engines.cpu.native_transformer import NativeTransformer
from qkv.engines.cpu.packed_linear import (
    INSTRUCTIONS,
    KERNELS,
    Plain,
    Product,
    fault,
    processor,
    replace_matrices,
)
from qkv.models.language_models import DecoderOnly
from qkv.options import DecoderOnlyConfig, TransformerConfig

DTYPES = ("auto", "fp32", "bf16", "int8")
NATIVE: dict[str, type[Product]] = {"fp32": NativeProduct, "int8": NativeBytes}


@dataclass(frozen=True)
class Engine:
    """What computes: `int8 on avx512_vnni, native`."""

    dtype: str
    kernel: type[Product]
    instructions: str
    reason: str = ""  # why it is not what was asked for
    native: bool = False  # in C rather than in torch

    def __str__(self) -> str:
        native, reason = ", native" if self.native else "", f" ({self.reason})" if self.reason else ""
        return f"{self.dtype} on {self.instructions}{native}{reason}"


def choose(dtype: str = "auto", flags: frozenset[str] | None = None) -> Engine:
    """The engine for a processor of these flags, by default this one's; fp32 where another dtype is not to be had.

    `auto` is fp32: it computes what was trained. bf16 needs instructions of its own, without which it is slow.
    """
    if dtype not in DTYPES:
        raise UsageError(f'dtype = "{dtype}": must be one of {", ".join(DTYPES)}')
    flags = processor() if flags is None else flags
    wanted, reason = "fp32" if dtype == "auto" else dtype, ""
    best = next((name for name in INSTRUCTIONS[wanted] if name in flags), "")
    if best or wanted == "fp32":
        for kernel in KERNELS[wanted]:
            reason = fault(kernel, wanted)
            if not reason:
                return Engine(wanted, kernel, best or "any processor")
    else:
        reason = "the processor has no instructions for it"
    return Engine("fp32", Plain, "any processor", reason) if wanted == "fp32" else _instead(wanted, reason, flags)


def _instead(wanted: str, reason: str, flags: frozenset[str]) -> Engine:
    exact = choose("fp32", flags)
    return Engine(exact.dtype, exact.kernel, exact.instructions, f"not {wanted}: {reason}")


def compiled(engine: Engine) -> Engine:
    """The engine in C; without a compiler, or where C computes wrongly, the plain model in fp32, with the reason."""
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
    kind=("transformer", "decoder"),
    attention=("scaled", "dot"),
    window=(0,),
    norm=("post", "pre"),
    rms_norm=FLAG,
    activation=("relu", "gelu", "swiglu"),
    positions=("sinusoidal", "learned", "rotary", "none"),
    bias=FLAG,
)


def runs_in_c(model: nn.Module) -> TypeGuard[Transformer | DecoderOnly]:
    """Return whether the C engine supports this model: its options, and heads of one width."""
    return (
        isinstance(model, Transformer | DecoderOnly)
        and MODEL.refusal(model.config) is None
        and model.config.key_width == model.config.value_width
    )


def pack(model: nn.Module, dtype: str = "auto") -> nn.Module:
    """A copy of a model for search on a CPU, with the same methods; its `engine` is what was chosen.

    A Transformer with ordinary attention becomes a `NativeTransformer`; without a C compiler it stays the plain model
    in fp32, and int8 is refused. bf16 and all other models use packed matrices in place of their own, except the
    recurrences of an RNN, for which PyTorch has kernels.
    """
    engine = choose(dtype)
    if engine.dtype == "int8":  # its kernels cannot report NaN
        broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
        if broken:
            raise QkvError(f"the weights of {broken[0]} are not numbers: use those of another step")
    with torch.no_grad():
        if runs_in_c(model) and engine.dtype != "bf16":
            engine, found = compiled(engine), library()
            if engine.native and not isinstance(found, str):
                packed: nn.Module = NativeTransformer(model, found, rounded=engine.dtype == "int8")
            else:
                packed = copy.deepcopy(model)
        else:
            packed = replace_matrices(copy.deepcopy(model), engine.kernel)
    packed.engine = engine  # type: ignore[assignment]
    return packed.eval().requires_grad_(False)
