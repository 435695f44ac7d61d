"""The CPU engine: a copy of a trained model whose matrices are packed once, as the kernels of this processor want them.

fp32 is exact; bf16 and int8 round. int8 keeps a scale for each output of a matrix, and one for its inputs, found anew
at every call. An ordinary Transformer runs in C (`native_transformer`) where that can be compiled. All else uses the
kernels that torch ships (`packed_linear`). What is missing, or computes wrongly here, is left aside, and the engine
says why.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn

from qkv.core.errors import QkvError, UsageError
from qkv.core.transformer import Transformer
from qkv.engines.cpu.native_library import NativeBytes, NativeProduct, library
from qkv.engines.cpu.native_transformer import NativeTransformer
from qkv.engines.cpu.packed_linear import (
    BF16,
    INSTRUCTIONS,
    KERNELS,
    Plain,
    Product,
    fault,
    processor,
    replace_matrices,
)
from qkv.engines.cpu.packed_transformer import PackedTransformer, fits
from qkv.models.language_models import DecoderOnly

DTYPES = ("auto", "fp32", "bf16", "int8")
NATIVE: dict[str, type[Product]] = {"fp32": NativeProduct, "int8": NativeBytes}


@dataclass(frozen=True)
class Engine:
    """What computes: `int8 on avx512_vnni, native`."""

    dtype: str
    kernel: type[Product]
    instructions: str
    reason: str = ""  # why it is not what was asked for
    kept: torch.dtype = torch.float32  # of the keys and values that a Transformer remembers
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
                # What rounds matrices may round these too: half the memory is read at each step.
                halved = wanted != "fp32" and not BF16.isdisjoint(flags)
                return Engine(wanted, kernel, best or "any processor", kept=torch.bfloat16 if halved else torch.float32)
    else:
        reason = "the processor has no instructions for it"
    return Engine("fp32", Plain, "any processor", reason) if wanted == "fp32" else _instead(wanted, reason, flags)


def _instead(wanted: str, reason: str, flags: frozenset[str]) -> Engine:
    exact = choose("fp32", flags)
    return Engine(exact.dtype, exact.kernel, exact.instructions, f"not {wanted}: {reason}")


def compiled(engine: Engine) -> Engine:
    """The engine in C, for the Transformers that it knows; itself, with the reason, where that is not to be had."""
    if engine.dtype == "bf16":
        return engine
    found = library()
    reason = found if isinstance(found, str) else fault(NATIVE[engine.dtype], engine.dtype)
    if reason:
        return replace(engine, reason=", ".join(filter(None, (engine.reason, f"not native: {reason}"))))
    rounded = engine.dtype == "int8"
    best = "avx512_vnni" if rounded else engine.instructions
    return replace(engine, native=True, instructions=best, kept=torch.bfloat16 if rounded else torch.float32)


def pack(model: nn.Module, dtype: str = "auto") -> nn.Module:
    """A copy of a model for the search on a CPU, with the same four calls; its `engine` says what was chosen.

    Transformers with ordinary attention become a `NativeTransformer`, or without C a `PackedTransformer`. Every
    other model stays what it is, with packed matrices in place of its own, but for the recurrences of an RNN, for which
    torch has its own kernels.
    """
    engine = choose(dtype)
    if engine.dtype == "int8":  # its kernels have no way to say so
        broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
        if broken:
            raise QkvError(f"the weights of {broken[0]} are not numbers: use those of another step")
    with torch.no_grad():
        if isinstance(model, Transformer | DecoderOnly) and fits(model):
            engine, found = compiled(engine), library()
            if engine.native and not isinstance(found, str):
                packed: nn.Module = NativeTransformer(model, found, rounded=engine.dtype == "int8")
            else:
                packed = PackedTransformer(copy.deepcopy(model), engine.kernel, engine.kept)
        else:
            packed = replace_matrices(copy.deepcopy(model), engine.kernel)
    packed.engine = engine  # type: ignore[assignment]
    return packed.eval().requires_grad_(False)
