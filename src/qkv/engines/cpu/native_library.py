"""The C library of this package: compilation on first use, weight packing, and a single product for the self-test.

`library` compiles the C files for this processor and keeps the result in the user's cache. If that fails it returns the
reason, and PyTorch computes instead. QKV_NATIVE=0 disables the library.

`WeightPacking` fills the structs of native.h from a model. Widths are padded with zeros to a multiple of `panel`, the
head width to a multiple of `lanes`; the padding stays zero in every layer. The factor √d_model is part of the
embeddings, and 1/√d_k part of W^Q.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.console import say
from qkv.core.attention import MultiHeadAttention
from qkv.core.transformer import Embedding, Transformer
from qkv.engines.cpu.packed_linear import processor, quantise_weight
from qkv.models.variants import DecoderOnly, score_of

# ---- compiling -------------------------------------------------------------------------------------------------------

FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread", "-fno-math-errno")
NATIVE_FLAG = "-march=native"  # all instructions of this processor
COMPILERS = ("cc", "gcc", "clang")
COMPILER_TIMEOUT = 120  # seconds


class Unavailable(Exception):
    """The library cannot be built or loaded; the message is the reason."""


def library() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    if os.environ.get("QKV_NATIVE", "1") == "0":
        return "QKV_NATIVE=0"
    return _library(os.environ.get("PATH", ""))


@cache
def _library(path: str) -> ctypes.CDLL | str:
    """Build the library once for each value of PATH."""
    try:
        return build(path)
    except Unavailable as reason:
        return str(reason)


def build(path: str) -> ctypes.CDLL:
    """Load the library from the user's cache; compile it first if the cache has none."""
    compiler = next(filter(None, (shutil.which(name, path=path) for name in COMPILERS)), None)
    if compiler is None:
        raise Unavailable("no C compiler")
    name = f"native-{fingerprint(compiler)}.so"
    if (folder := cache_folder()) is not None:
        with suppress(OSError):  # missing or damaged file
            return ctypes.CDLL(str(folder / name))
        with suppress(OSError):  # cache not writable, or mounted noexec
            folder.mkdir(parents=True, exist_ok=True)
            return compile_library(compiler, folder / name)
    try:
        with tempfile.TemporaryDirectory(prefix="qkv-") as folder_name:  # a loaded library may be deleted
            return compile_library(compiler, Path(folder_name, name))
    except OSError as error:
        message = error.strerror or str(error).split(": ", 1)[-1]  # without the file name
        raise Unavailable(f"the library cannot be loaded ({message:.80})") from None


def cache_folder() -> Path | None:
    """Return the folder of the compiled library, or None for a user without a home directory."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qkv")
    return None


def sources() -> list[Path]:
    """Return the C files of this package, headers first."""
    here = Path(str(resources.files(__package__)))
    return sorted([*here.glob("*.h"), *here.glob("*.c")], key=lambda file: (file.suffix != ".h", file.name))


def fingerprint(compiler: str) -> str:
    """Hash the inputs of the build: sources, compiler, flags and the features of the processor."""
    digest = hashlib.sha256("\0".join([*FLAGS, NATIVE_FLAG]).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(" ".join(sorted(processor())).encode())
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def compile_library(compiler: str, target: Path) -> ctypes.CDLL:
    """Compile and load the library, then rename it to `target`: other processes may compile it at the same time."""
    if sys.stderr.isatty():
        say("compiling the CPU engine for this processor, once")
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        files = [str(file) for file in sources() if file.suffix == ".c"]
        command = [compiler, *FLAGS, "-o", temporary, *files, "-lm"]
        try:
            _run([*command, NATIVE_FLAG])
        except Unavailable:  # some ARM compilers lack the flag; NEON and SSE2 are on by default
            _run(command)
        loaded = ctypes.CDLL(temporary)
        os.replace(temporary, target)
        return loaded
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    english = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.run(
            command, env=english, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILER_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler cannot be run ({type(error).__name__})") from None
    if process.returncode:
        message = next((line for line in process.stderr.splitlines() if "error" in line), "no reason given")
        raise Unavailable(f"the C compiler failed ({message.strip():.80})")
    return process.stdout


# ---- structs of native.h ---------------------------------------------------------------------------------------------

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
ACTIVATIONS = ("relu", "gelu", "swiglu")  # in the order of the enum in native.h


class Matrix(ctypes.Structure):
    """`Matrix` of native.h: a packed weight."""

    _fields_ = [("weight", POINTER), ("scale", POINTER), ("bias", POINTER), ("inputs", INTEGER), ("outputs", INTEGER)]


class Norm(ctypes.Structure):
    """`Norm` of native.h: LayerNorm, RMSNorm or the identity."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double)]


class Layer(ctypes.Structure):
    """`Layer` of native.h: the weights of an encoder or decoder layer."""

    _fields_ = [
        *((name, Matrix) for name in "qkv output cross_query cross_key_value cross_output inner gate outer".split()),
        *((name, Norm) for name in "attention_norm cross_norm feed_forward_norm".split()),
    ]


class Model(ctypes.Structure):
    """`Model` of native.h: all weights and widths."""

    _fields_ = [
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        *((name, INTEGER) for name in "encoder_layers decoder_layers".split()),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("output", Matrix),
        *((name, POINTER) for name in "source target".split()),
        *((name, INTEGER) for name in "source_vocabulary target_vocabulary".split()),
        ("mask", POINTER),
        *((name, INTEGER) for name in "d_model width heads head_width inner norm_first activation bf16_cache".split()),
    ]


class DecoderStep(ctypes.Structure):
    """`DecoderStep` of native.h: arguments of a decoder step."""

    _fields_ = [
        *((name, INTEGER) for name in "sentences beam n row_count".split()),
        *((name, POINTER) for name in "rows tokens length origin".split()),
        ("capacity", INTEGER),
        ("pages", POINTER),
        ("pages_per_sentence", INTEGER),
        *((name, POINTER) for name in "source source_length positions rotary hidden logits".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


class EncoderBatch(ctypes.Structure):
    """`EncoderBatch` of native.h: arguments of an encoder call."""

    _fields_ = [
        ("sentences", INTEGER),
        *((name, POINTER) for name in "tokens starts source positions rotary".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


def round_up(n: int, to: int) -> int:
    """Round n up to a multiple of `to`."""
    return -(-n // to) * to


@dataclass
class WeightPacking:
    """Packs the weights of a model into the structs of native.h, and owns the packed tensors."""

    lanes: int
    panel: int
    int8: bool  # weights are quantised to int8
    held: list[Tensor] = field(default_factory=list)

    def hold(self, x: Tensor) -> int:
        """Copy a tensor and return its address; this object keeps the copy alive."""
        self.held.append(x.detach().contiguous().clone())
        return self.held[-1].data_ptr()

    def pad(self, x: Tensor, *sizes: int) -> Tensor:
        """Pad x with zeros at the end of every dimension, by default to a multiple of `panel`."""
        wide = x.new_zeros(sizes or [round_up(size, self.panel) for size in x.shape])
        wide[tuple(slice(0, size) for size in x.shape)] = x.detach()
        return wide

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """Pack a weight (outputs, inputs) into panels, quantised with a scale for each output if `int8`."""
        padded = self.pad(weight.float())
        outputs, inputs = padded.shape
        matrix = Matrix(inputs=inputs, outputs=outputs)
        if bias is not None:
            matrix.bias = self.hold(self.pad(bias.float()))
        if self.int8:
            quantised, scale = quantise_weight(padded)
            matrix.scale = self.hold(scale)
            unsigned = quantised.short().add_(128).to(torch.uint8)
            matrix.weight = self.hold(unsigned.view(-1, self.panel, inputs // 4, 4).transpose(1, 2))
        else:
            matrix.weight = self.hold(padded.view(-1, self.panel, inputs).transpose(1, 2))
        return matrix

    def norm(self, norm: nn.Module) -> Norm:
        """Pack the weights of a norm; an identity has none."""
        if isinstance(norm, nn.Identity):
            return Norm()
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        struct = Norm(weight=self.hold(self.pad(norm.weight)), eps=norm.eps)
        if isinstance(norm, nn.LayerNorm):
            struct.bias = self.hold(self.pad(norm.bias))
        return struct

    def heads(self, attention: MultiHeadAttention) -> tuple[int, int]:
        """Return the padded number of heads and the padded head width."""
        width, count = round_up(attention.d_k, self.lanes), attention.heads
        while count * width % self.panel:
            count += 1
        return count, width

    def attention(self, attention: MultiHeadAttention) -> tuple[list[tuple[Tensor, Tensor | None]], Matrix]:
        """Pad W^Q, W^K and W^V and their biases head by head, and pack W^O."""
        count, width = self.heads(attention)
        shape = (attention.heads, attention.d_k)
        weight: Tensor = attention.qkv.weight
        bias: Tensor | None = attention.qkv.bias
        if score_of(attention)[0] == "scaled":  # 1/√d_k is part of W^Q
            factor = weight.new_ones(len(weight))
            factor[: attention.heads * attention.d_k] = attention.d_k**-0.5
            weight, bias = weight * factor[:, None], None if bias is None else bias * factor

        def pad_heads(part: Tensor) -> Tensor:  # (heads · d_k, …) to (padded heads · padded width, …)
            rest = part.shape[1:]
            return self.pad(part.view(*shape, *rest), count, width, *rest).flatten(0, 1)

        weights = [pad_heads(part) for part in weight.chunk(3)]
        biases = [None] * 3 if bias is None else [pad_heads(part) for part in bias.chunk(3)]
        output = pad_heads(attention.output.weight.t().contiguous()).t()
        return list(zip(weights, biases, strict=True)), self.matrix(output, attention.output.bias)

    def pack_joined(self, parts: list[tuple[Tensor, Tensor | None]]) -> Matrix:
        """Pack several projections of the same input as one matrix."""
        weights, biases = zip(*parts, strict=True)
        return self.matrix(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def layer(self, layer: Any) -> Layer:
        """Pack the weights of an encoder or decoder layer."""
        packed = Layer()
        parts, packed.output = self.attention(layer.attention)
        packed.qkv = self.pack_joined(parts)
        cross = getattr(layer, "cross_attention", None)
        if cross is not None:
            (query, *key_value), packed.cross_output = self.attention(cross)
            packed.cross_query, packed.cross_key_value = self.matrix(*query), self.pack_joined(key_value)
            packed.cross_norm = self.norm(layer.residuals[1].norm)
        feed_forward = layer.feed_forward
        packed.inner = self.matrix(feed_forward.inner.weight, feed_forward.inner.bias)
        packed.outer = self.matrix(feed_forward.outer.weight, feed_forward.outer.bias)
        if (gate := getattr(feed_forward, "gate", None)) is not None:
            packed.gate = self.matrix(gate.weight, None)
        packed.attention_norm = self.norm(layer.residuals[0].norm)
        packed.feed_forward_norm = self.norm(layer.residuals[-1].norm)
        return packed

    def embedding(self, embedding: Embedding) -> int:
        """Pack an embedding table, scaled, and return its address."""
        table = embedding.tokens.weight.float() * embedding.scale
        return self.hold(self.pad(table, len(table), round_up(table.shape[1], self.panel)))

    def model(self, model: Transformer | DecoderOnly, *, bf16_cache: bool) -> Model:
        """Pack a whole model; with `bf16_cache` the KV cache is stored as bf16."""
        config = model.config
        decoder = [self.layer(layer) for layer in model.decoder]
        heads, head_width = self.heads(model.decoder[0].attention)
        packed = Model(
            decoder=(Layer * len(decoder))(*decoder),
            decoder_layers=len(decoder),
            decoder_norm=self.norm(model.decoder_norm),
            output=self.matrix(model.output.weight, None),
            target=self.embedding(model.target),
            target_vocabulary=len(model.target.tokens.weight),
            mask=self.hold(self.pad(torch.ones(config.d_model))),
            d_model=config.d_model,
            width=round_up(config.d_model, self.panel),
            heads=heads,
            head_width=head_width,
            inner=decoder[0].inner.outputs,
            norm_first=config.norm == "pre",
            activation=ACTIVATIONS.index(config.activation),
            bf16_cache=bf16_cache,
        )
        if isinstance(model, Transformer):
            encoder = [self.layer(layer) for layer in model.encoder]
            packed.encoder, packed.encoder_layers = (Layer * len(encoder))(*encoder), len(encoder)
            packed.encoder_norm = self.norm(model.encoder_norm)
            shared = model.source.tokens.weight is model.target.tokens.weight
            packed.source = packed.target if shared else self.embedding(model.source)
            packed.source_vocabulary = len(model.source.tokens.weight)
        return packed


# ---- a single product ------------------------------------------------------------------------------------------------


class NativeProduct:
    """Product in C: x (…, inputs) to xWᵀ + b (…, outputs), in fp32."""

    int8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        native = library()
        if isinstance(native, str):
            raise RuntimeError(native)
        if self.int8 and not native.qkv_has_int8():
            raise RuntimeError("needs avx512_vnni")
        self.library, self.outputs = native, len(weight)
        self.packing = WeightPacking(native.qkv_lanes(), native.qkv_panel(), self.int8)
        self.matrix = self.packing.matrix(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        inputs = self.matrix.inputs
        rows = F.pad(x.float(), (0, inputs - x.shape[-1])).reshape(-1, inputs).contiguous()
        y = torch.empty(len(rows), self.outputs)
        memory = torch.empty(len(rows) * (inputs + 8) + 256, dtype=torch.uint8)
        self.library.qkv_product(
            ctypes.byref(self.matrix), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)),
            ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(self.outputs), 0, ctypes.c_void_p(memory.data_ptr()),
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.outputs)


class NativeInt8Product(NativeProduct):
    """Product in C with weights and inputs quantised to int8."""

    int8 = True
