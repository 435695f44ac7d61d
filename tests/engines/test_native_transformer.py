"""The engine in C: equal to the plain model with all options; without a compiler the plain model decodes."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed_linear import BOUND, CPU, KINDS, LENGTHS, MODERN, VOCAB, draw, made, walk
from torch import Tensor

from conftest import sentences
from qkv.assembly import Run
from qkv.core.batches import collate
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import BeamSearch, GreedySearch, SearchOptions, search
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.decoding.search_request import token_logprobs
from qkv.engines.cpu import native_search, pack
from qkv.engines.cpu.native_library import library
from qkv.engines.cpu.native_search import NativeBeamSearch, NativeGreedySearch, start_native
from qkv.engines.cpu.native_transformer import PAGE, NativeTransformer
from qkv.options import DecoderOnlyConfig, TransformerConfig, TranslationConfig

ROOT = Path(__file__).parents[2]
SPECIAL = Tokenizer("char", [])  # its special tokens have the ids 0, 1 and 2
HERE = library()
needed = pytest.mark.skipif(isinstance(HERE, str), reason=f"not native: {HERE}")
NATIVE = [kind for kind in KINDS if kind in ("transformer", "modern", "learned")]


def native(model: Any, dtype: str = "fp32") -> NativeTransformer:
    found = pack(model, dtype)
    if not isinstance(found, NativeTransformer):
        pytest.skip(str(found.engine))
    return found


def rounded_near(ours: Tensor, theirs: Tensor) -> None:
    assert 0 < (ours - theirs).abs().max() < BOUND["int8"] * max(1.0, float(theirs.abs().max()) / 4)


# ---- the same model --------------------------------------------------------------------------------------------------


@st.composite
def specs(pick: st.DrawFn) -> TranslationConfig:
    heads, d_k = pick(st.sampled_from([(1, 4), (2, 6), (4, 16), (3, 8), (2, 32)]))
    return TransformerConfig(
        d_model=pick(st.sampled_from([12, 20, 32, 64, 96])),
        d_ff=pick(st.sampled_from([8, 40, 64, 200])),
        heads=heads,
        d_k=d_k,
        d_v=d_k,
        encoder_layers=pick(st.integers(1, 2)),
        decoder_layers=pick(st.integers(1, 3)),
        norm=pick(st.sampled_from(["pre", "post"])),
        rms_norm=pick(st.booleans()),
        activation=pick(st.sampled_from(["relu", "gelu", "swiglu"])),
        positions=pick(st.sampled_from(["sinusoidal", "learned", "rotary", "none"])),
        bias=pick(st.booleans()),
        tie=pick(st.sampled_from(["all", "output", "none"])),
        attention=pick(st.sampled_from(["scaled", "dot"])),
    )


@needed
@settings(max_examples=25, deadline=None)
@given(spec=specs(), beam=st.sampled_from([1, 2, 3, 4, 6]))
@torch.inference_mode()
def test_it_is_the_plain_model_with_any_options_on_any_way_of_a_search(spec: TranslationConfig, beam: int) -> None:
    plain = made(spec)
    theirs = walk(plain, beam, 22)
    for a, b in zip(walk(native(plain), beam, 22), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("kind", NATIVE)
@torch.inference_mode()
def test_it_is_the_plain_model_of_every_kind(kind: str, beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = native(made(KINDS[kind]))
    monkeypatch.setenv("QKV_NATIVE", "0")
    theirs = pack(made(KINDS[kind]))
    assert isinstance(theirs, Transformer)
    for a, b in zip(walk(ours, beam), walk(theirs, beam), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NATIVE)
@torch.inference_mode()
def test_bytes_are_near(kind: str) -> None:
    plain = made(KINDS[kind])
    for ours, theirs in zip(walk(native(plain, "int8"), 3), walk(plain, 3), strict=True):
        rounded_near(ours, theirs)


@pytest.mark.parametrize("options", [{}, MODERN], ids=["paper", "modern"])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@torch.inference_mode()
def test_a_language_model_stepped_is_whole(options: dict[str, Any], dtype: str) -> None:
    plain = made(DecoderOnlyConfig(d_model=32, d_ff=64, heads=4, layers=2, **options))
    ours, ids = native(plain, dtype), draw(3, 40)
    state, stepped = ours.start(beam=3), []
    for part in ids.split([5, 1, 20, 13, 1], dim=1):
        logits, state = ours.step(part, state)
        stepped.append(logits)
    if dtype == "fp32":
        torch.testing.assert_close(torch.cat(stepped, dim=1), plain(ids), rtol=1e-4, atol=1e-4)
    else:
        rounded_near(torch.cat(stepped, dim=1), plain(ids))
    assert state.position == 40


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@torch.inference_mode()
def test_nothing_in_the_batch_changes_a_row_by_a_bit(dtype: str) -> None:
    """Bit-identical for other rows, lengths and positions in the batch, and for tokens at once or one by one."""
    ours = native(made(KINDS["transformer"]), dtype)
    source, target = draw(5, 9), draw(5, 6)
    together, _ = ours.step(target, ours.start(ours.encode(source, LENGTHS)))
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled, _ = ours.step(target[order], ours.start(ours.encode(source[order], LENGTHS[order])))
    assert torch.equal(shuffled, together[order])
    for i, length in enumerate(LENGTHS.tolist()):
        state = ours.start(ours.encode(source[i : i + 1, :length], LENGTHS[i : i + 1]))
        for place in range(6):
            alone, state = ours.step(target[i : i + 1, place : place + 1], state)
            assert torch.equal(alone[0, 0], together[i, place])


@needed
def test_several_threads_compute_the_same_bits() -> None:
    """In a separate process, with up to as many threads as the machine has cores, or more."""
    script = """
import torch
from qkv.assembly import build_model
from qkv.engines.cpu import pack
from qkv.options import TransformerConfig
spec = TransformerConfig(d_model=64, d_ff=512, heads=4, encoder_layers=2, decoder_layers=2)
plain = build_model(spec, 9000, 9000).eval()
source, tokens, seen = torch.randint(4, 9000, (20, 30)), torch.randint(4, 9000, (60, 25)), []
for threads in (1, 3, 2):
    torch.set_num_threads(threads)
    for dtype in ("fp32", "int8"):
        ours = pack(plain, dtype)
        logits, state = ours.step(tokens, ours.start(ours.encode(source, torch.arange(20) + 11), 3))
        seen.append((logits, ours.step(tokens[:, :1], state)[0]))
assert all(torch.equal(a, b) for each, one in zip(seen[2:], seen[:2] * 2) for a, b in zip(each, one))
print("equal")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert run.stdout.strip() == "equal", run.stderr


@torch.inference_mode()
def test_rows_are_repeated_and_permuted_and_their_pages_used_again() -> None:
    plain = made(KINDS["transformer"])
    models = native(plain), plain
    states = [model.start(model.encode(draw(5, 9), LENGTHS), 2) for model in models]
    draws, rows = torch.Generator().manual_seed(3), 10
    most = 0
    for _ in range(60):
        tokens = torch.randint(4, VOCAB, (rows, 1), generator=draws)
        (a, states[0]), (b, states[1]) = (m.step(tokens, s) for m, s in zip(models, states, strict=True))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        stay = torch.randint(0, rows // 2, (4,), generator=draws)  # some twice, some not at all
        chosen = (stay[:, None] * 2 + torch.randint(0, 2, (4, 2), generator=draws)).flatten()
        states, rows = [state.select(chosen) for state in states], 8
        most = max(most, int(states[0].filled.sum()))
    allocator = states[0].allocator
    pages = sum(len(held) for held in allocator.held) // allocator.size
    assert pages <= most + 2 * -(-60 // PAGE)  # the most filled positions at once, plus those of a repeated sentence


@torch.inference_mode()
def test_finished_rows_are_not_computed() -> None:
    ours = native(made(KINDS["transformer"]))
    whole, part = (ours.start(ours.encode(draw(5, 9), LENGTHS), 3) for _ in range(2))
    for step in range(20):
        alive = torch.rand(15, generator=torch.Generator().manual_seed(step // 7)) < 0.6  # the same for some steps
        tokens, part.alive = draw(15, step + 1)[:, -1:], alive.numpy()
        (a, whole), (b, part) = ours.step(tokens, whole), ours.step(tokens, part)
        assert torch.equal(b[~alive], torch.zeros_like(b[~alive]))
        if step < 7:
            assert torch.equal(a[alive], b[alive])


@torch.inference_mode()
def test_long_sources_and_pasts() -> None:
    plain = made(KINDS["transformer"])
    ours = native(plain)
    for batch, width in ((2, 300), (40, 30)):
        source, target = draw(batch, width), draw(batch, 70)
        lengths = torch.arange(batch).mul(7).remainder(width).add(1)
        lengths[0] = width
        outputs = [m.step(target, m.start(m.encode(source, lengths)))[0] for m in (ours, plain)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_another_output_matrix_gets_the_hidden_layer() -> None:
    plain = made(KINDS["transformer"])
    ours = native(plain)
    narrow, weight = copy.copy(ours), plain.output.weight[:7]
    vars(narrow)["output"] = lambda hidden: hidden @ weight.t()
    whole, part = (m.step(draw(5, 3), m.start(m.encode(draw(5, 9), LENGTHS)))[0] for m in (ours, narrow))
    torch.testing.assert_close(part, whole[..., :7], rtol=1e-4, atol=1e-4)


def test_the_original_is_unchanged_and_independent() -> None:
    plain = made(KINDS["learned"]).train()
    ours = native(plain)
    with torch.inference_mode():
        first = ours.step(draw(5, 2), ours.start(ours.encode(draw(5, 9), LENGTHS)))[0]
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    with torch.inference_mode():
        assert torch.equal(ours.step(draw(5, 2), ours.start(ours.encode(draw(5, 9), LENGTHS)))[0], first)
    assert all(module.training for module in plain.modules())


def test_bytes_hold_no_second_copy_of_the_weights() -> None:
    plain = made(TransformerConfig(d_model=64, d_ff=256, heads=4, encoder_layers=2, decoder_layers=2))
    ours = native(plain, "int8")
    held = sum(part.numel() * part.element_size() for part in ours.packing.held)
    weights = sum(p.numel() for p in plain.parameters())
    embedded = plain.target.tokens.weight.numel()
    assert held < 1.3 * weights + 4 * embedded  # one byte per weight, except for the embedding table


# ---- refused options -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_ids_and_positions_that_there_are_not_are_refused() -> None:
    ours = native(made(TransformerConfig(**{**vars(KINDS["learned"]), "max_positions": 12})))
    for wrong in (VOCAB, -1):
        with pytest.raises(IndexError):
            ours.encode(torch.tensor([[5, wrong]]), torch.tensor([2]))
        with pytest.raises(IndexError):
            ours.step(torch.tensor([[wrong]]), ours.start(ours.encode(draw(1, 3), torch.tensor([3]))))
    with pytest.raises(UsageError, match=r"a sequence of 13 tokens, but model\.max_positions = 12"):
        ours.encode(draw(1, 13), torch.tensor([13]))
    _, state = ours.step(draw(1, 12), ours.start(ours.encode(draw(1, 12), torch.tensor([12]))))
    with pytest.raises(UsageError, match="a sequence of 13 tokens"):
        ours.step(draw(1, 1), state)
    with pytest.raises(ValueError, match="rows"):
        ours.step(draw(2, 1), state)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize(
    "where", ["output.weight", "decoder.1.feed_forward.inner.weight", "encoder.0.attention.qkv.weight"]
)
def test_weights_that_are_no_numbers_are_named(where: str, dtype: str, beam: int) -> None:
    plain = made(KINDS["transformer"])
    with torch.no_grad():
        plain.get_parameter(where)[1, 2] = math.nan
    with pytest.raises(QkvError, match="are not numbers"):
        search(native(plain, dtype), draw(5, 9), LENGTHS, SearchOptions(beam=beam), SPECIAL, start=start_native)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7F800001])
def test_none_of_the_ways_to_be_no_number_is_lost(bits: int, dtype: str) -> None:
    """NaN weights, as in a damaged file; in bf16 keys and values the bits of the largest NaN would round to zero."""
    plain = made(KINDS["transformer"])
    with torch.no_grad():
        plain.get_parameter("encoder.0.feed_forward.outer.bias")[-1:].view(torch.int).fill_(bits)
    with pytest.raises(QkvError, match="are not numbers"):
        search(native(plain, dtype), draw(5, 9), LENGTHS, SearchOptions(beam=3), SPECIAL, start=start_native)


# ---- the search ------------------------------------------------------------------------------------------------------


@needed
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rows", "n", "vocab"), [(1, 1, 5), (1, 1, 200), (2, 1, 70), (4, 4, 64), (5, 2, 130), (8, 3, 7)]
)
def test_a_step_of_the_search_equals_its_plain_twin(rows: int, n: int, vocab: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    sentences, capacity = 6, 12
    options = SearchOptions(beam=rows, n_best=n, length_penalty="gnmt", min_length=3 * (seed % 2))
    model: Any = None
    sizes: dict[str, Any] = {"lengths": torch.ones(sentences), "capacity": capacity}
    plain, ours = (BeamSearch, NativeBeamSearch) if rows > 1 else (GreedySearch, NativeGreedySearch)
    plain_step, native_step = (kind(model, options, SPECIAL, **sizes) for kind in (plain, ours))
    longest = torch.randint(1, 10, (sentences,), generator=draws)
    native_step.place(torch.arange(sentences), longest, draw(sentences, 0))
    board = native_step.state
    board.length.random_(0, 10, generator=draws)
    board.tokens.random_(3, vocab, generator=draws)
    board.logprob.copy_(-torch.rand(sentences, rows, generator=draws))
    board.logprob[torch.rand(sentences, rows, generator=draws) < 0.2] = -math.inf
    board.forced[2, :] = 4
    board.done[3] = True
    board.finished_scores[:, :1, 0] = -torch.rand(sentences, 1, generator=draws)
    twin, logits = copy.deepcopy(board), torch.randn(sentences * rows, vocab, generator=draws) * 3
    logits[:, 2] += 3 * torch.rand(sentences * rows, generator=draws)
    plain_step.state = twin
    expected = plain_step.extend(logits.clone())
    assert native_search.refused(native_step) is None
    found = native_step.extend(logits)
    alive, real = twin.logprob > -math.inf, twin.finished_scores[:, :, 0] > -math.inf
    assert torch.equal(board.logprob > -math.inf, alive)
    torch.testing.assert_close(board.logprob[alive], twin.logprob[alive], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(board.finished_scores[real], twin.finished_scores[real], rtol=1e-5, atol=1e-5)
    assert torch.equal(board.finished_scores[:, :, 0] > -math.inf, real)
    for name in ("done", "length"):
        assert torch.equal(getattr(board, name), getattr(twin, name))
    assert torch.equal(board.newest[alive], twin.newest[alive])
    for i, j in alive.nonzero().tolist():
        written = int(board.length[i]) + 1
        assert torch.equal(board.tokens[i, j, :written], twin.tokens[i, j, :written])
    for i, j in real.nonzero().tolist():
        if board.finished_scores[i, j, 0] != -math.inf and board.finished_scores[i, j, 1] > -math.inf:
            ended = int(board.finished_scores[i, j, 2]) + 1
            assert torch.equal(board.finished_tokens[i, j, :ended], twin.finished_tokens[i, j, :ended])
    if expected is not None:
        assert found is not None
        assert torch.equal(found[alive.flatten()], expected[alive.flatten()])


@needed
@pytest.mark.parametrize("beam", [1, 3])
def test_tokens_that_there_are_not_are_refused(beam: int) -> None:
    model = made(KINDS["transformer"])
    beyond = Tokenizer("char", [])
    beyond.eos = VOCAB
    for each in (model, native(model)):  # the step of the search alone, and all of it
        for prefix, special in ((torch.full((5, 1), VOCAB), SPECIAL), (None, beyond)):
            with pytest.raises(IndexError):
                search(
                    *(each, draw(5, 9), LENGTHS, SearchOptions(beam=beam), special), prefix=prefix, start=start_native
                )


@needed
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_same_texts_and_scores(tiny: Path, beam: int, dtype: str) -> None:
    run = Run.open(tiny)
    model: Any = run.model(CPU)
    lines = [run.tokenizers.src.encode(source) for source, _ in sentences(60, seed=5)]
    more: dict[str, Any] = {"prefixes": [lines[0][:1], *[()] * 59], "device": CPU}
    options = SearchOptions(beam=beam, n_best=min(beam, 2), batch_tokens=400)
    ours = search_all(native(model, dtype), lines, options, run.tokenizers, **more, start=start_native)
    theirs = search_all(model, lines, options, run.tokenizers, **more)
    same = [a[0].tokens == b[0].tokens for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= (60 if dtype == "fp32" else 57)
    if dtype == "fp32":
        for a, b in zip(ours, theirs, strict=True):
            assert [h.tokens for h in a] == [h.tokens for h in b]
            assert [h.logprob for h in a] == pytest.approx([h.logprob for h in b], abs=1e-4)
            assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-4)


@torch.inference_mode()
def test_forced_decoding_is_the_plain_models(tiny: Path) -> None:
    run = Run.open(tiny)
    model: Any = run.model(CPU)
    rows = [torch.tensor(run.tokenizers.src.encode(source)).numpy() for source, _ in sentences(8, seed=2)]
    batch = collate(rows, rows, run.tokenizers)
    ours, theirs = (token_logprobs(m, batch, run.tokenizers.tgt.pad) for m in (native(model), model))
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
