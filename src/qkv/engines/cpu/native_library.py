"""The C of this package as a library: compiled for this processor on first use, and kept in the user's cache.

Whatever goes wrong is a reason and no error: torch's kernels serve instead. QKV_NATIVE=0 turns it off.

Weights as the C of this package reads them: the structs of native.h, filled from a model.

Widths are padded with zeros to a multiple of `panel`, a head's to a multiple of `lanes`; padding stays zero through
every layer. The factor √d_model is in the embeddings and 1/√d_k in W^Q.

A product by the C of this package alone: what shows whether it computes rightly here.
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
from qkv.models.language_models import DecoderOnly
from qkv.models.variants import score_of

# ---- compiling -------------------------------------------------------------------------------------------------------

FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread", "-fno-math-errno")
OWN = "-march=native"  # all that this processor can do
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 120  # seconds for the compiler


class Unavailable(Exception):
    """Why there is no library."""


def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if os.environ.get("QKV_NATIVE", "1") == "0":
        return "QKV_NATIVE=0"
    return _library(os.environ.get("PATH", ""))


@cache
def _library(path: str) -> ctypes.CDLL | str:
    """Once for every path to compilers there is."""
    try:
        return build(path)
    except Unavailable as reason:
        return str(reason)


def build(path: str) -> ctypes.CDLL:
    """Load the library from the cache; compile it first if it is not there."""
    compiler = next(filter(None, (shutil.which(name, path=path) for name in COMPILERS)), None)
    if compiler is None:
        raise Unavailable("no C compiler")
    name = f"native-{fingerprint(compiler)}.so"
    if (folder := cache_folder()) is not None:
        with suppress(OSError):  # not there yet, or damaged
            return ctypes.CDLL(str(folder / name))
        with suppress(OSError):  # a cache that cannot be written, or that nothing may be loaded from
            folder.mkdir(parents=True, exist_ok=True)
            return compiled(compiler, folder / name)
    try:
        with tempfile.TemporaryDirectory(prefix="qkv-") as passing:  # what is loaded may be deleted
            return compiled(compiler, Path(passing, name))
    except OSError as error:
        said = error.strerror or str(error).split(": ", 1)[-1]  # without the name of the file
        raise Unavailable(f"the library cannot be loaded ({said:.80})") from None


def cache_folder() -> Path | None:
    with suppress(RuntimeError):  # a user without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qkv")
    return None


def sources() -> list[Path]:
    """The files of C, headers first."""
    here = Path(str(resources.files(__package__)))
    return sorted([*here.glob("*.h"), *here.glob("*.c")], key=lambda file: (file.suffix != ".h", file.name))


def fingerprint(compiler: str) -> str:
    """Of all that the library is made of: sources, compiler, flags and what the processor can do."""
    digest = hashlib.sha256("\0".join([*FLAGS, OWN]).encode())
    digest.update(_run([compiler, "--version"]).encode())
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        digest.update("".join(sorted({line for line in lines if line.lower().startswith(("flags", "feat"))})).encode())
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def compiled(compiler: str, target: Path) -> ctypes.CDLL:
    """Under another name until it is loaded: several processes may do the same at once, and what fails is not kept."""
    if sys.stderr.isatty():
        say("compiling the CPU engine for this processor, once")
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        files = [str(file) for file in sources() if file.suffix == ".c"]
        command = [compiler, *FLAGS, "-o", temporary, *files, "-lm"]
        try:
            _run([*command, OWN])
        except Unavailable:  # some compilers for ARM do not know it; NEON, like SSE2, is there without it
            _run(command)
        loaded = ctypes.CDLL(temporary)
        os.replace(temporary, target)
        return loaded
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, env=english, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler cannot be run ({type(error).__name__})") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise Unavailable(f"the C compiler failed ({said.strip():.80})")
    return done.stdout


# ---- structs of native.h ---------------------------------------------------------------------------------------------

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
KINDS = ("relu", "gelu", "swiglu")  # as native.h counts them


class Matrix(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("scale", POINTER), ("bias", POINTER), ("inputs", INTEGER), ("outputs", INTEGER)]


class Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double)]


class Layer(ctypes.Structure):
    _fields_ = [(name, Matrix) for name in "project output ask read found inner gate outer".split()] + [
        (name, Norm) for name in "attention cross feed_forward".split()
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        *((name, INTEGER) for name in "encoder_layers decoder_layers".split()),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("output", Matrix),
        *((name, POINTER) for name in "source target".split()),
        *((name, INTEGER) for name in "source_vocabulary target_vocabulary".split()),
        ("real", POINTER),
        *((name, INTEGER) for name in "d_model width heads head inner pre activation half".split()),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, INTEGER) for name in "sentences beam n count".split()),
        *((name, POINTER) for name in "rows tokens length origin".split()),
        ("capacity", INTEGER),
        ("pages", POINTER),
        ("pages_each", INTEGER),
        *((name, POINTER) for name in "source source_length positions rotary hidden logits".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


class Encode(ctypes.Structure):
    _fields_ = [
        ("sentences", INTEGER),
        *((name, POINTER) for name in "tokens start source positions rotary".split()),
        ("threads", INTEGER),
        ("scratch", POINTER),
    ]


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass
class Layout:
    """How wide things are, and the tensors that the structs point into."""

    lanes: int
    panel: int
    bytes: bool  # weights are rounded to bytes
    held: list[Tensor] = field(default_factory=list)

    def hold(self, x: Tensor) -> int:
        """Where a copy of it lies, as long as this is held."""
        self.held.append(x.detach().contiguous().clone())
        return self.held[-1].data_ptr()

    def padded(self, x: Tensor, *sizes: int) -> Tensor:
        """Zeros behind x in every dimension."""
        wide = x.new_zeros(sizes)
        wide[tuple(slice(0, size) for size in x.shape)] = x.detach()
        return wide

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A weight (outputs, inputs) in panels."""
        outputs, inputs = (up(size, self.panel) for size in weight.shape)
        whole = self.padded(weight.float(), outputs, inputs)
        made = Matrix(inputs=inputs, outputs=outputs)
        if bias is not None:
            made.bias = self.hold(self.padded(bias.float(), outputs))
        panels = whole.view(-1, self.panel, inputs)
        if self.bytes:
            scale = whole.abs().amax(1).clamp_min(1e-12) / 127
            rounded = (whole / scale[:, None]).round().add_(128).to(torch.uint8)
            made.scale = self.hold(scale)
            made.weight = self.hold(rounded.view(-1, self.panel, inputs // 4, 4).transpose(1, 2))
        else:
            made.weight = self.hold(panels.transpose(1, 2))
        return made

    def norm(self, norm: nn.Module, width: int) -> Norm:
        if isinstance(norm, nn.Identity):
            return Norm()
        weight, bias = norm.weight, getattr(norm, "bias", None)
        assert isinstance(weight, Tensor)
        made = Norm(weight=self.hold(self.padded(weight, width)), eps=norm.eps)
        if isinstance(bias, Tensor):
            made.bias = self.hold(self.padded(bias, width))
        return made

    def heads(self, attention: MultiHeadAttention) -> tuple[int, int]:
        """How many heads of which width, padding among them, lie side by side."""
        width, count = up(attention.d_k, self.lanes), attention.heads
        while count * width % self.panel:
            count += 1
        return count, width

    def attention(self, attention: MultiHeadAttention) -> tuple[list[tuple[Tensor, Tensor | None]], Matrix]:
        """W^Q, W^K and W^V with their biases, their outputs padded head by head, and W^O with its inputs."""
        count, width = self.heads(attention)
        shape = (attention.heads, attention.d_k)
        weight, bias = scaled(attention)

        def spread(part: Tensor) -> Tensor:  # (heads · d_k, …) to (padded heads · padded width, …)
            rest = part.shape[1:]
            return self.padded(part.view(*shape, *rest), count, width, *rest).flatten(0, 1)

        weights = [spread(part) for part in weight.chunk(3)]
        biases = [None] * 3 if bias is None else [spread(part) for part in bias.chunk(3)]
        output = spread(attention.output.weight.t().contiguous()).t()
        return list(zip(weights, biases, strict=True)), self.matrix(output, attention.output.bias)

    def together(self, parts: list[tuple[Tensor, Tensor | None]]) -> Matrix:
        """Several projections of the same as one matrix."""
        weights, biases = zip(*parts, strict=True)
        return self.matrix(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def layer(self, layer: Any, width: int) -> Layer:
        made = Layer()
        parts, made.output = self.attention(layer.attention)
        made.project = self.together(parts)
        cross = getattr(layer, "cross_attention", None)
        if cross is not None:
            (query, *read), made.found = self.attention(cross)
            made.ask, made.read = self.matrix(*query), self.together(read)
            made.cross = self.norm(layer.residuals[1].norm, width)
        forward = layer.feed_forward
        made.inner = self.matrix(forward.inner.weight, forward.inner.bias)
        made.outer = self.matrix(forward.outer.weight, forward.outer.bias)
        if (gate := getattr(forward, "gate", None)) is not None:
            made.gate = self.matrix(gate.weight, None)
        made.attention = self.norm(layer.residuals[0].norm, width)
        made.feed_forward = self.norm(layer.residuals[-1].norm, width)
        return made

    def embedding(self, embedding: Embedding, width: int) -> int:
        return self.hold(
            self.padded(embedding.tokens.weight.float() * embedding.scale, len(embedding.tokens.weight), width)
        )

    def model(self, model: Transformer | DecoderOnly, *, half: bool) -> Model:
        """All of it; `half` keeps keys and values as bf16."""
        spec = model.config
        width = up(spec.d_model, self.panel)
        decoder = [self.layer(layer, width) for layer in model.decoder]
        heads, head = self.heads(model.decoder[0].attention)
        made = Model(
            decoder=(Layer * len(decoder))(*decoder),
            decoder_layers=len(decoder),
            decoder_norm=self.norm(model.decoder_norm, width),
            output=self.matrix(model.output.weight, None),
            target=self.embedding(model.target, width),
            target_vocabulary=len(model.target.tokens.weight),
            real=self.hold(self.padded(torch.ones(spec.d_model), width)),
            d_model=spec.d_model,
            width=width,
            heads=heads,
            head=head,
            inner=decoder[0].inner.outputs,
            pre=spec.norm == "pre",
            activation=KINDS.index(spec.activation),
            half=half,
        )
        if isinstance(model, Transformer):
            encoder = [self.layer(layer, width) for layer in model.encoder]
            made.encoder, made.encoder_layers = (Layer * len(encoder))(*encoder), len(encoder)
            made.encoder_norm = self.norm(model.encoder_norm, width)
            shared = model.source.tokens.weight is model.target.tokens.weight
            made.source = made.target if shared else self.embedding(model.source, width)
            made.source_vocabulary = len(model.source.tokens.weight)
        return made


# ---- a single product ------------------------------------------------------------------------------------------------


def scaled(attention: MultiHeadAttention) -> tuple[Tensor, Tensor | None]:
    """Return the joint matrix and bias of queries, keys and values, with 1/√d_k as part of W^Q."""
    factor = attention.d_k**-0.5 if score_of(attention)[0] == "scaled" else 1.0
    outputs = attention.qkv.weight.new_ones(len(attention.qkv.weight))
    outputs[: attention.heads * attention.d_k] = factor
    bias = attention.qkv.bias
    return attention.qkv.weight * outputs[:, None], None if bias is None else bias * outputs


class NativeProduct:
    """Product x (…, inputs) to xWᵀ + b (…, outputs) in C."""

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


class NativeBytes(NativeProduct):
    """The same with weights and inputs rounded to bytes."""

    rounded = True
