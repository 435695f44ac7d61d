"""The same result on every path: stepped or whole, fused or written out, in any batch, in parts."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.torch_layers import TorchTransformer
from qkv.assembly import build_model
from qkv.core import batches
from qkv.core.attention import SPARE
from qkv.core.batches import Batch, collate
from qkv.core.search import SearchOptions, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.decoding.search_request import score_all
from qkv.models.variants import record_attention
from qkv.training.unpadded import loss_in_parts
from random_models import NAMES, SPEC, VARIANTS, VOCAB, model_of, shaken, some_text

CPU = torch.device("cpu")
variants = pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=NAMES)


def tokenizers() -> TokenizerPair:
    made = Tokenizer("char", [])  # only its special tokens matter here
    return TokenizerPair(made, made)


def batch_of(sources: list[list[int]], targets: list[list[int]]) -> Batch:
    return collate([np.array(s) for s in sources], [np.array(t) for t in targets], tokenizers())


SPECIAL = Tokenizer("char", [])  # its special tokens have the ids 0, 1 and 2

# ---- stepped = whole -------------------------------------------------------------------------------------------------


@variants
@settings(max_examples=20)
@given(st.lists(st.integers(1, 2 * SPARE + 3), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 99))
def test_stepped_in_any_chunks_is_the_whole(variant: int, chunks: list[int], beam: int, seed: int) -> None:
    model = model_of(variant)
    torch.manual_seed(seed)
    source, lengths = torch.randint(3, VOCAB, (2, 5)), torch.tensor([5, 3])
    target = torch.randint(3, VOCAB, (2 * beam, sum(chunks)))
    with torch.inference_mode():
        whole = model(source.repeat_interleave(beam, 0), lengths.repeat_interleave(beam), target)
        state = model.start(model.encode(source, lengths), beam)
        parts = []
        for chunk in target.split(chunks, dim=1):
            logits, state = model.step(chunk, state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert state.position == sum(chunks)


@variants
@settings(max_examples=20)
@given(st.data())
def test_selected_rows_continue_like_new_rows(variant: int, data: st.DataObject) -> None:
    """Rows repeated, dropped and reordered inside a sentence, and whole sentences likewise."""
    model = model_of(variant)
    beam, sentences = data.draw(st.integers(1, 3)), 3
    torch.manual_seed(data.draw(st.integers(0, 99)))
    source, lengths = torch.randint(3, VOCAB, (sentences, 6)), torch.tensor([6, 2, 4])
    owner, written = torch.arange(sentences).repeat_interleave(beam), torch.empty(sentences * beam, 0).long()
    with torch.inference_mode():
        state = model.start(model.encode(source, lengths), beam)
        for _ in range(4):
            new = torch.randint(3, VOCAB, (len(owner), data.draw(st.sampled_from([1, 2, SPARE + 1]))))
            written = torch.cat([written, new], dim=1)
            logits, state = model.step(new, state)
            whole = model(source[owner], lengths[owner], written)[:, -new.shape[1] :]
            torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
            groups = len(owner) // beam
            stay = data.draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=groups + 1))
            inside = st.lists(st.integers(0, beam - 1), min_size=beam, max_size=beam)
            rows = [group * beam + row for group in stay for row in data.draw(inside)]
            state, owner, written = state.select(torch.tensor(rows)), owner[rows], written[rows]


# ---- fused = written out ---------------------------------------------------------------------------------------------


@variants
def test_recording_changes_nothing_and_explains_the_output(variant: int) -> None:
    model = copy.deepcopy(model_of(variant))  # the hooks are for this test
    batch = batch_of(some_text(4, seed=1), some_text(4, seed=2))
    heads: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i, layer in enumerate(layers):
            attentions = {"self": layer.attention}
            if side == "decoder":
                attentions["cross"] = layer.cross_attention  # type: ignore[attr-defined]
            for name, module in attentions.items():
                name = f"{side}.{i}.{name}"
                module.register_forward_pre_hook(lambda _m, x, name=name: values.__setitem__(name, x[2]))
                module.output.register_forward_pre_hook(lambda _m, x, name=name: heads.__setitem__(name, x[0]))
    with torch.no_grad():
        fused = model(batch.source, batch.lengths, batch.target)
        with record_attention() as recording:
            written_out = model(batch.source, batch.lengths, batch.target)
        again = model(batch.source, batch.lengths, batch.target)
    torch.testing.assert_close(written_out, fused, atol=1e-5, rtol=1e-5)
    assert torch.equal(again, fused)
    assert list(recording) == [
        *(f"encoder.{i}.self" for i in range(2)),
        *(f"decoder.{i}.{what}" for i in range(2) for what in ("self", "cross")),
    ]
    for name, (weights,) in recording.items():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        mixed = (weights @ values[name]).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixed, heads[name], atol=1e-5, rtol=1e-5)
        if name.startswith("decoder") and name.endswith("self"):
            assert not weights.triu(1).any()
        else:
            padding = torch.arange(weights.shape[-1]) >= batch.lengths[:, None]
            queries = ~padding[:, None, :, None] if name.startswith("encoder") else torch.tensor(True)
            assert not weights.masked_select(padding[:, None, None] & queries).any()


@variants
def test_gradients_are_the_same_while_recording(variant: int) -> None:
    model = model_of(variant)
    batch = batch_of(some_text(3, seed=3), some_text(3, seed=4))
    fused = gradients(model, [batch])
    with record_attention():
        written_out = gradients(model, [batch])
    for name, gradient in fused.items():
        torch.testing.assert_close(written_out[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@variants
def test_recorded_steps_are_rows_of_the_recorded_whole(variant: int) -> None:
    model = model_of(variant)
    source, lengths, target = torch.randint(3, VOCAB, (2, 5)), torch.tensor([5, 2]), torch.randint(3, VOCAB, (2, 4))
    with torch.no_grad():
        with record_attention() as whole:
            model(source, lengths, target)
        with record_attention() as stepped:
            state = model.start(model.encode(source, lengths))
            for i in range(4):
                _, state = model.step(target[:, i : i + 1], state)
    for name in ("decoder.0.self", "decoder.1.cross"):
        for i, weights in enumerate(stepped[name]):
            row = whole[name][0][:, :, i : i + 1]
            if name.endswith("self"):  # up to the step itself; a window begins later
                row = row[..., : i + 1][..., -weights.shape[-1] :]
            torch.testing.assert_close(weights, row, atol=1e-5, rtol=1e-5)


# ---- alone = in any batch --------------------------------------------------------------------------------------------


@variants
@settings(max_examples=10)
@given(st.permutations(range(6)), st.integers(0, 4), st.integers(0, 4))
def test_logits_do_not_depend_on_the_batch(variant: int, order: list[int], wider: int, longer: int) -> None:
    model = model_of(variant)
    sources, targets = some_text(6, seed=5), some_text(6, seed=6)
    batch = batch_of([sources[i] for i in order], [targets[i] for i in order])
    with torch.inference_mode():
        together = model(
            torch.nn.functional.pad(batch.source, (0, wider)),
            batch.lengths,
            torch.nn.functional.pad(batch.target, (0, longer)),
        )
        for row, i in enumerate(order):
            one = batch_of([sources[i]], [targets[i]])
            alone = model(one.source, one.lengths, one.target)[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-5, rtol=1e-5)


@variants
@pytest.mark.parametrize("beam", [1, 3])
def test_search_does_not_depend_on_the_batch(variant: int, beam: int) -> None:
    model, sources = model_of(variant), some_text(12, seed=7)
    spec = SearchOptions(beam=beam, extra_length=6, n_best=beam)
    alone = [search_all(model, [s], spec, tokenizers(), device=CPU)[0] for s in sources]
    random = np.random.default_rng(0)
    for tokens in (1, 60, 10_000):
        order = random.permutation(len(sources))
        crowded = dataclasses.replace(spec, batch_tokens=tokens)
        found = search_all(model, [sources[i] for i in order], crowded, tokenizers(), device=CPU)
        for hypotheses, i in zip(found, order, strict=True):
            assert [h.tokens for h in hypotheses] == [h.tokens for h in alone[i]]
            assert [h.logprob for h in hypotheses] == pytest.approx([h.logprob for h in alone[i]], abs=1e-4)


def test_scores_do_not_depend_on_the_batch() -> None:
    model, sources, targets = model_of(0), some_text(9, seed=8), some_text(9, seed=9)
    alone = [score_all(model, [s], [t], tokenizers(), device=CPU)[0] for s, t in zip(sources, targets, strict=True)]
    for tokens in (1, 50, 8192):
        together = score_all(model, sources, targets, tokenizers(), device=CPU, tokens=tokens)
        for one, other, target in zip(alone, together, targets, strict=True):
            assert len(one) == len(other) == len(target) + 1
            assert other == pytest.approx(one, abs=1e-4)


# ---- accumulated = at once, two ranks = one --------------------------------------------------------------------------


def gradients(model: Transformer, micros: list[Batch]) -> dict[str, torch.Tensor]:
    """The gradient of one update: each micro-batch's sum, divided once by the tokens of all."""
    tokens = sum(batch.tokens for batch in micros)
    model.zero_grad()
    for batch in micros:
        hidden = model.hidden(batch.source, batch.lengths, batch.target)
        loss, _ = loss_in_parts(hidden, model.output.weight, batch.labels, smoothing=0.1, pad=0)
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@variants
@settings(max_examples=10)
@given(st.lists(st.integers(1, 7), max_size=3, unique=True).map(sorted), st.integers(1, 3))
def test_micro_batches_and_ranks_give_the_gradient_of_the_whole(variant: int, cuts: list[int], world: int) -> None:
    model, sources, targets = model_of(variant), some_text(8, seed=10), some_text(8, seed=11)
    whole = gradients(model, [batch_of(sources, targets)])
    update = np.split(np.arange(8), cuts)
    micros = [
        batch_of([sources[i] for i in rows], [targets[i] for i in rows])
        for rank in range(world)
        for rows in batches.share(update, rank, world)
    ]
    in_parts = gradients(model, micros)
    assert list(in_parts) == list(whole) == [name for name, _ in model.named_parameters()]
    for name, gradient in whole.items():
        torch.testing.assert_close(in_parts[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


# ---- other precision, other implementation ---------------------------------------------------------------------------


@variants
def test_bf16_is_near_fp32(variant: int) -> None:
    model, batch = model_of(variant), batch_of(some_text(8, seed=12), some_text(8, seed=13))
    exact = gradients(model, [batch])
    losses = []
    for precision in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision):
            hidden = model.hidden(batch.source, batch.lengths, batch.target)
            loss, _ = loss_in_parts(hidden, model.output.weight, batch.labels, smoothing=0.1, pad=0)
        losses.append(float(loss.detach()) / batch.tokens)
        assert loss.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] != losses[0]
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients(model, [batch])
    a, b = (torch.cat([g.flatten() for g in found.values()]) for found in (exact, rough))
    assert a.dtype == b.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.99


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_torch_nn_transformer_with_our_weights_is_our_model(norm: str, bias: bool) -> None:
    torch.manual_seed(5)
    ours = shaken(build_model(dataclasses.replace(SPEC, norm=norm, bias=bias), VOCAB, VOCAB))
    theirs = TorchTransformer(ours)
    batch = batch_of(some_text(6, seed=14), some_text(6, seed=15))
    real = batch.labels != 0
    # With dropout 0, training mode computes the same too, by torch's other path.
    for training in (True, False):
        ours.train(training), theirs.train(training)
        a, b = ours(batch.source, batch.lengths, batch.target), theirs(batch.source, batch.lengths, batch.target)
        torch.testing.assert_close(a[real], b[real], atol=1e-4, rtol=1e-4)
    for beam in (1, 3):
        spec = SearchOptions(beam=beam, extra_length=4, n_best=beam)
        a, b = (search(m, batch.source, batch.lengths, spec, SPECIAL) for m in (ours, theirs))
        assert [[h.tokens for h in found] for found in a] == [[h.tokens for h in found] for found in b]
