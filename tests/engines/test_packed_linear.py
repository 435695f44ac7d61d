"""The CPU engine with torch's kernels: packed fp32 is the plain model, for every kind; bf16 and int8 are near it.

The C engine is turned off here; its tests are in engines/test_native_transformer.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import sentences
from qkv.assembly import Run, build_model
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import SearchOptions
from qkv.core.translate import search_all
from qkv.engines.cpu import choose, pack, packed_linear
from qkv.engines.cpu.packed_linear import OneDNN, PackedLinear, Plain, fault, processor
from qkv.options import (
    ConvS2SConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TransformerConfig,
    TranslationConfig,
)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}
SHORT: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
MODERN: dict[str, Any] = {"norm": "pre", "rms_norm": True, "activation": "swiglu", "positions": "rotary", "bias": True}
KINDS: dict[str, TranslationConfig] = {
    "transformer": TransformerConfig(**SMALL),
    "modern": TransformerConfig(**SMALL, **MODERN),
    "learned": TransformerConfig(
        **SMALL, attention="dot", activation="gelu", positions="learned", tie="none", d_k=6, d_v=6
    ),
    "widths": TransformerConfig(**SMALL, d_k=5, d_v=6),
    "window": TransformerConfig(**SMALL, window=3),
    "general": TransformerConfig(**SMALL, attention="general", bias=True),
    "additive": TransformerConfig(**SMALL, attention="additive"),
    "gru": RnnConfig(**SHORT),
    "lstm": RnnConfig(**SHORT, cell="lstm", attention="general", bidirectional=False),
    "conv": ConvS2SConfig(**SHORT),
    "separable": ConvS2SConfig(**SHORT, convolution="separable"),
}
VOCAB = 50
LENGTHS = torch.tensor([9, 3, 7, 9, 1])


@pytest.fixture(autouse=True)
def _torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_NATIVE", "0")


def made(spec: ModelConfig) -> Any:
    torch.manual_seed(0)
    model = build_model(spec, VOCAB, VOCAB).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at zero, which would hide a lost one
                parameter.normal_(std=0.2)
    return model


def draw(*shape: int) -> Tensor:
    return torch.randint(4, VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def walk(model: Any, beam: int, steps: int = 40) -> list[Tensor]:
    """Logits of a search that feeds one or several tokens, reorders beams and drops two sentences."""
    draws = torch.Generator().manual_seed(7)
    state, rows, seen = model.start(model.encode(draw(5, 9), LENGTHS), beam), 5 * beam, []
    for step in range(steps):
        tokens = torch.randint(4, VOCAB, (rows, 3 if step % 5 == 2 else 1), generator=draws)
        logits, state = model.step(tokens, state)
        seen.append(logits)
        stay = torch.arange(rows // beam)
        if step in (4, 12):
            stay = torch.cat([stay[:1], stay[2:].flip(0)])
        parents = torch.randint(0, beam, (len(stay), beam), generator=draws)
        rows = len(stay) * beam
        state = state.select((stay[:, None] * beam + parents).flatten())
    return seen


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_packed_fp32_is_the_plain_model_on_any_way_of_a_search(kind: str, beam: int) -> None:
    plain = made(KINDS[kind])
    for ours, theirs in zip(walk(pack(plain, "fp32"), beam), walk(plain, beam), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


ORDINARY = {"transformer", "modern", "learned"}  # which would run in C


def test_an_ordinary_transformer_stays_the_plain_model_and_refuses_int8() -> None:
    for kind, spec in KINDS.items():
        plain = made(spec)
        packed: Any = pack(plain)
        if isinstance(spec, TransformerConfig):
            assert any(isinstance(module, PackedLinear) for module in packed.modules()) == (kind not in ORDINARY)
        if kind in ORDINARY:
            assert str(packed.engine) == "fp32 on any processor (not native: QKV_NATIVE=0)"
            if choose("int8").dtype == "int8":
                with pytest.raises(UsageError, match=r"only the C engine has it .*QKV_NATIVE=0.*: use fp32"):
                    pack(plain, "int8")


@pytest.mark.parametrize("options", [{}, MODERN, {"window": 3}], ids=["fast", "modern", "window"])
@torch.inference_mode()
def test_a_language_model_is_packed_too(options: dict[str, Any]) -> None:
    plain = made(DecoderOnlyConfig(d_model=32, d_ff=64, heads=4, layers=2, **options))
    ours = pack(plain, "fp32")
    ids = draw(3, 12)
    whole = plain(ids)
    state = ours.start(beam=3)
    stepped = []
    for part in ids.split([5, 1, 1, 4, 1], dim=1):
        logits, state = ours.step(part, state)
        stepped.append(logits)
    torch.testing.assert_close(torch.cat(stepped, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert state.position == 12


@torch.inference_mode()
def test_an_encoder_is_packed_too() -> None:
    plain = made(EncoderOnlyConfig(d_model=32, d_ff=64, heads=4, layers=2))
    torch.testing.assert_close(pack(plain)(draw(5, 9), LENGTHS), plain(draw(5, 9), LENGTHS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_stepped_is_full(kind: str) -> None:
    plain = made(KINDS[kind])
    ours = pack(plain, "fp32")
    target = draw(5, 40)  # longer than a cache is at first
    state, stepped = ours.start(ours.encode(draw(5, 9), LENGTHS)), []
    for token in target.split(1, dim=1):
        logits, state = ours.step(token, state)
        stepped.append(logits)
    torch.testing.assert_close(torch.cat(stepped, dim=1), plain(draw(5, 9), LENGTHS, target), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_alone_is_as_in_any_batch(kind: str) -> None:
    ours = pack(made(KINDS[kind]), "fp32")
    source, target = draw(5, 9), draw(5, 6)
    together, _ = ours.step(target, ours.start(ours.encode(source, LENGTHS)))
    for i, length in enumerate(LENGTHS.tolist()):
        memory = ours.encode(source[i : i + 1, :length], LENGTHS[i : i + 1])
        alone, _ = ours.step(target[i : i + 1], ours.start(memory))
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


# The largest logit is about 4. A product of n terms rounded to 8 bits is off by about √n · 2⁻⁸ of a term's size.
BOUND = {"bf16": 0.15, "int8": 0.3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUND)
@torch.inference_mode()
def test_rounded_is_near(kind: str, dtype: str) -> None:
    if choose(dtype).dtype != dtype:
        pytest.skip(str(choose(dtype)))
    if dtype == "int8" and kind in ORDINARY:
        return  # refused, see above
    plain = made(KINDS[kind])
    for ours, theirs in zip(walk(pack(plain, dtype), 3), walk(plain, 3), strict=True):
        off = (ours - theirs).abs().max()
        assert 0 < off < BOUND[dtype] * max(1.0, float(theirs.abs().max()) / 4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_text_on_an_easy_task(tiny: Path, dtype: str) -> None:
    run = Run.open(tiny)
    model: Any = run.model(CPU)
    sources = [run.tokenizers.src.encode(source) for source, _ in sentences(60, seed=5)]
    spec = SearchOptions(beam=3, batch_tokens=400)
    ours, theirs = (
        search_all(engine, sources, spec, run.tokenizers, device=CPU) for engine in (pack(model, dtype), model)
    )
    same = sum(a[0].tokens == b[0].tokens for a, b in zip(ours, theirs, strict=True))
    assert same == len(sources) if dtype == "fp32" else same >= 0.95 * len(sources)


@pytest.mark.parametrize("kind", ["conv", "transformer"])
def test_the_original_is_unchanged_and_independent(kind: str) -> None:
    plain = made(KINDS[kind]).train()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    ours = pack(plain, "fp32")
    with torch.inference_mode():
        first = ours.step(draw(5, 2), ours.start(ours.encode(draw(5, 9), LENGTHS)))[0]
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    assert "project" not in vars(plain)
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert all(module.training for module in plain.modules())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    with torch.inference_mode():
        assert torch.equal(ours.step(draw(5, 2), ours.start(ours.encode(draw(5, 9), LENGTHS)))[0], first)


@pytest.mark.parametrize("kind", ["gru", "conv", "transformer"])
def test_weights_that_are_no_numbers_are_not_rounded(kind: str) -> None:
    plain = made(KINDS[kind])
    name, weight = list(plain.named_parameters())[-1]
    with torch.no_grad():
        weight.view(-1)[-1] = math.nan
    if choose("int8").dtype == "int8":
        with pytest.raises(QkvError, match=f"the weights of {name} are not numbers"):
            pack(plain, "int8")


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_auto_is_exact() -> None:
    assert choose("auto").dtype == choose().dtype == "fp32"
    with pytest.raises(UsageError, match="must be one of auto, fp32, bf16, int8"):
        choose("fp8")


def test_bf16_and_int8_only_where_the_processor_has_them() -> None:
    poor = choose("bf16", frozenset({"avx2"}))
    assert str(poor) == "fp32 on avx2 (not bf16: the processor has no instructions for it)"
    assert choose("int8", frozenset()).dtype == "fp32"
    assert processor() is processor()


def test_a_missing_or_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Plain):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            raise RuntimeError("no such kernel\nand many lines more")

    class Wrong(Plain):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 1.5

    flags = frozenset({"avx2", "avx512_vnni"})
    monkeypatch.setitem(packed_linear.KERNELS, "int8", (Missing, Wrong, Plain))
    assert choose("int8", flags).kernel is Plain
    monkeypatch.setitem(packed_linear.KERNELS, "int8", (Wrong, Missing))
    fallen = choose("int8", flags)
    assert (fallen.dtype, "no such kernel" in fallen.reason, "\n" in str(fallen)) == ("fp32", True, False)
    monkeypatch.setitem(packed_linear.KERNELS, "fp32", (Wrong,))
    last = choose("fp32", flags)
    assert last.kernel is Plain
    assert "its kernel is off by 50%" in last.reason


def test_every_kernel_that_is_here_is_right() -> None:
    draws = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=draws) for shape in ((7, 33), (19, 33), (19,)))
    for dtype, kernels in packed_linear.KERNELS.items():
        for kernel in kernels:
            if fault(kernel, dtype):
                continue
            for b in (bias, None):
                for given in (x, x + 2, x.abs(), -x.abs(), x[None], torch.zeros(2, 33)):
                    wanted = F.linear(given, weight, b)
                    bound = packed_linear.TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
                    torch.testing.assert_close(kernel(weight, b)(given), wanted, rtol=0, atol=bound)
    assert not fault(OneDNN, "fp32") or not torch.backends.mkldnn.is_available()
