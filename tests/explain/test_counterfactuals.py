"""What-if: a muted head equals W^O without its part; changes of model, source and prefix have their effect."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.assembly import build_model
from qkv.core.attention import MultiHeadAttention
from qkv.core.batches import Batch, collate
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import TranslationModel
from qkv.decoding.search_request import token_logprobs
from qkv.explain.attention_heads import (
    HeadImportance,
    head_counts,
    head_importance,
    importance_tables,
    mute_heads,
    plot_head_importance,
)
from qkv.explain.counterfactuals import WhatIf, edit, source_words, what_if
from qkv.models.convs2s import ConvEncoderOutput, ConvS2S
from qkv.models.rnn import Rnn
from qkv.models.variants import record_attention
from qkv.options import ConvS2SConfig, RnnConfig, TransformerConfig

CPU = torch.device("cpu")
BYTES = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
SMALL = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
TRANSFORMERS = {
    "paper": TransformerConfig(**SMALL, d_ff=32, heads=4),
    "d_k, d_v, bias": TransformerConfig(**SMALL, d_ff=32, heads=2, d_k=5, d_v=3, bias=True, norm="pre"),
    "window, rotary": TransformerConfig(**SMALL, d_ff=32, heads=2, window=2, positions="rotary"),
    "additive": TransformerConfig(**SMALL, d_ff=32, heads=2, attention="additive"),
    "general": TransformerConfig(**SMALL, d_ff=32, heads=2, attention="general"),
}


def made(spec: Any) -> TranslationModel:
    torch.manual_seed(0)
    model = build_model(spec, BYTES.src.size, BYTES.tgt.size).eval()
    assert isinstance(model, TranslationModel)
    return model


def a_batch() -> Batch:
    draw = np.random.default_rng(0)
    rows = [[draw.integers(3, 60, size=size) for size in sizes] for sizes in ((7, 4, 9), (5, 8, 2))]
    return collate(*rows, BYTES)


def attentions(model: torch.nn.Module) -> dict[str, MultiHeadAttention]:
    return {m.name: m for m in model.modules() if isinstance(m, MultiHeadAttention)}


def every_way(model: TranslationModel) -> list[torch.Tensor]:
    """The logits of a batch as training computes them, written out, and as the search does, in two steps."""
    batch = a_batch()
    whole = model(*batch.inputs)
    with record_attention():
        written_out = model(*batch.inputs)
    state = model.start(model.encode(batch.source, batch.lengths))
    first, state = model.step(batch.target[:, :4], state)
    second, state = model.step(batch.target[:, 4:], state)
    return [whole, written_out, torch.cat([first, second], dim=1)]


# ---- muting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRANSFORMERS)
@torch.inference_mode()
def test_a_muted_head_is_a_head_without_its_part_of_the_output_matrix(kind: str) -> None:
    model = made(TRANSFORMERS[kind])
    known = head_counts(model, CPU)
    assert known == {name: attention.heads for name, attention in attentions(model).items()}
    untouched = every_way(model)
    for name, heads in known.items():
        for head in range(heads):
            cut = copy.deepcopy(model)
            attention = attentions(cut)[name]
            attention.output.weight[:, head * attention.d_v : (head + 1) * attention.d_v] = 0.0
            with mute_heads([(name, head)], known):
                muted = every_way(model)
            for ours, theirs in zip(muted, every_way(cut), strict=True):
                torch.testing.assert_close(ours, theirs)
            assert not torch.allclose(muted[0], untouched[0])
    for before, after in zip(untouched, every_way(model), strict=True):
        assert torch.equal(before, after)


@torch.inference_mode()
def test_muting_keeps_the_bias_and_applies_to_all_names_with_a_prefix() -> None:
    model = made(TRANSFORMERS["d_k, d_v, bias"])
    known, batch = head_counts(model, CPU), a_batch()
    attention = attentions(model)["encoder.0.self"]
    torch.nn.init.normal_(attention.output.bias)
    x = torch.randn(2, 5, 16)
    with mute_heads(["encoder.0.self"], known):
        assert torch.equal(attention(*attention.project(x)), attention.output.bias.expand(2, 5, 16))
    with mute_heads(["decoder.1"], known):
        layer = model(*batch.inputs)
    with mute_heads(["decoder.1.self"], known), mute_heads([("decoder.1.cross", 0), ("decoder.1.cross", 1)], known):
        assert torch.equal(model(*batch.inputs), layer)


def test_a_muted_head_learns_nothing() -> None:
    model = made(TRANSFORMERS["paper"]).train()
    known = head_counts(model, CPU)
    with mute_heads([("decoder.0.cross", 2)], known):
        model(*a_batch().inputs).square().sum().backward()
    attention = attentions(model)["decoder.0.cross"]
    parts = attention.qkv.weight.grad.unflatten(0, (3, 4, -1)).abs().amax((2, 3))  # (q k v, heads)
    assert (parts[:, 2] == 0).all()
    assert (parts[:, [0, 1, 3]] > 0).all()


@torch.inference_mode()
def test_recurrent_and_convolutional_models_can_be_muted_too() -> None:
    batch = a_batch()
    recurrent = made(RnnConfig(**SMALL))
    assert isinstance(recurrent, Rnn)
    assert head_counts(recurrent, CPU) == {"decoder.1.cross": 1}
    cut = copy.deepcopy(recurrent)
    cut.combine.weight[:, :16] = 0.0  # W_c [c; s] without c
    with mute_heads([("decoder.1.cross", 0)], head_counts(recurrent, CPU)):
        torch.testing.assert_close(recurrent(*batch.inputs), cut(*batch.inputs))
    convolutional = made(ConvS2SConfig(**SMALL))
    assert isinstance(convolutional, ConvS2S)
    memory = convolutional.encode(batch.source, batch.lengths)
    blind = convolutional.start(ConvEncoderOutput(memory.keys, memory.values * 0, memory.mask))
    with mute_heads(["decoder"], head_counts(convolutional, CPU)):
        torch.testing.assert_close(convolutional(*batch.inputs), convolutional.step(batch.target, blind)[0])


def test_unknown_heads_are_refused_with_the_known_ones() -> None:
    known = {"encoder.0.self": 4, "decoder.0.cross": 4}
    for wrong, message in [
        ("decoder.1.cross", r'"decoder\.1\.cross": this model has encoder\.0\.self, decoder\.0\.cross'),
        ("decode", "no attention is called"),
        (("encoder", 1), "no attention is called"),
        (("encoder.0.self", 4), "encoder.0.self has no head 4: its heads are 0 to 3"),
        (("encoder.0.self", -1), "no head -1"),
        (("encoder.0.self", "1"), "is not a head"),
        (("encoder.0.self",), "is not a head"),
    ]:
        with pytest.raises(UsageError, match=message), mute_heads([wrong], known):  # type: ignore[list-item]
            pass


# ---- what if ---------------------------------------------------------------------------------------------------------


TEXT = "The big cat sees the dog."


def ask(translator: qkv.Translator, **change: Any) -> WhatIf:
    spec = translator.config.decode
    found = what_if(translator.model, translator.tokenizers, spec, CPU, TEXT, **change)
    as_it_is = translator.translate(TEXT)
    before = found.before
    assert before.translation == as_it_is.text
    assert (before.logprob, before.score) == pytest.approx((as_it_is.logprob, as_it_is.score), abs=1e-4)
    return found


def test_nothing_changed_is_the_same_translation(translator: qkv.Translator) -> None:
    found = ask(translator)
    assert found.before == found.after
    assert not found.changed
    assert found.likelier == pytest.approx(0.0, abs=1e-4)
    assert found.forced_score == pytest.approx(found.before.score, abs=1e-4)


def test_the_source_can_lose_words_and_get_others(translator: qkv.Translator) -> None:
    assert source_words(translator.tokenizers.src, TEXT) == ["The", "big", "cat", "sees", "the", "dog", "."]
    for change, text in [
        ({"drop": [1]}, "The cat sees the dog."),
        ({"drop": [0, 6]}, "big cat sees the dog"),
        ({"replace": {2: "house"}}, "The big house sees the dog."),
        ({"replace": {5: " cat "}, "drop": [1]}, "The cat sees the cat."),
    ]:
        found = ask(translator, **change)
        assert found.after.source == text
        assert found.after.translation == translator.translate(text).text
        assert found.changed
        forced = translator.score(text, found.before.translation).logprob
        assert found.forced_logprob == pytest.approx(forced, abs=1e-4)
        assert found.likelier < -1  # the translation of one sentence is improbable for the other
        assert found.to_dict()["logprob_change"] == found.after.logprob - found.before.logprob
    for change, message in [({"drop": [7]}, "no word 7.*6 \\."), ({"drop": range(7)}, "no word of the source would")]:
        with pytest.raises(UsageError, match=message):
            ask(translator, **change)
    assert edit(translator.tokenizers.src, "  as  it   is ", (), {}) == "  as  it   is "


def test_a_word_is_forced_and_the_search_goes_on(translator: qkv.Translator) -> None:
    before = ask(translator).before
    step = next(i for i, token in enumerate(before.tokens) if token == "▁gatto" or token.startswith("▁ga"))
    kept = translator.tokenizers.tgt.decode(translator.tokenizers.tgt.encode(before.translation)[:step])
    forced = ask(translator, force=(step, "cane"))
    assert forced.after.translation.startswith(f"{kept} cane")
    assert forced.likelier == pytest.approx(0.0, abs=1e-4)
    assert forced.after.logprob < before.logprob
    scored = translator.score(TEXT, forced.after.translation)
    assert forced.after.logprob == pytest.approx(scored.logprob, abs=1e-4)
    assert ask(translator, begin=f"{kept} cane") == forced
    token = translator.tokenizers.tgt.encode("cane")
    if len(token) == 1:
        assert ask(translator, force=(step, token[0])) == forced
    stopped = ask(translator, force=(step, "."))
    assert stopped.after.translation.startswith(f"{kept}.")
    for force, message in [((99, "cane"), "step 99"), ((0, 2), "token 2 has no text"), ((0, " "), "is empty")]:
        with pytest.raises(UsageError, match=message):
            ask(translator, force=force)
    with pytest.raises(UsageError, match="exclude each other"):
        ask(translator, force=(0, "cane"), begin="Il")


def test_without_the_source_the_translation_is_lost(translator: qkv.Translator) -> None:
    found = ask(translator, heads_off=["decoder.0.cross"])
    assert found.changed
    assert found.likelier < -5
    known = head_counts(translator.model, CPU)
    with mute_heads(["decoder.0.cross"], known):
        alone = translator.translate(TEXT)
        forced = translator.score(TEXT, found.before.translation)
    assert found.after.translation == alone.text
    assert found.forced_logprob == pytest.approx(forced.logprob, abs=1e-4)
    with pytest.raises(UsageError, match="this model has encoder"):
        ask(translator, heads_off=["decoder.7"])


# ---- importance ------------------------------------------------------------------------------------------------------


def test_importance_is_the_loss_without_the_head_less_the_loss_with_it() -> None:
    model = made(TRANSFORMERS["paper"])
    random = np.random.default_rng(1)
    pairs = [[random.integers(3, 90, size=size).tolist() for size in random.integers(1, 9, 2)] for _ in range(11)]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    heard: list[int] = []
    found = head_importance(model, BYTES, sources, targets, CPU, heard.append, tokens=20)
    assert sum(heard) == 11
    assert len(heard) > 1
    assert [h.change for h in found] == sorted((h.change for h in found), reverse=True)
    assert {(h.name, h.head) for h in found} == {(name, i) for name in head_counts(model, CPU) for i in range(4)}
    assert found == head_importance(model, BYTES, sources, targets, CPU, tokens=20)
    together = {(h.name, h.head): h for h in head_importance(model, BYTES, sources, targets, CPU)}

    batch = collate(*([np.array(row) for row in side] for side in (sources, targets)), BYTES)
    for one in found:
        losses = []
        for weight in (1.0, 0.0):
            cut = copy.deepcopy(model)
            attention = attentions(cut)[one.name]
            with torch.no_grad():
                attention.output.weight[:, one.head * attention.d_v : (one.head + 1) * attention.d_v] *= weight
            losses.append(-sum(map(sum, token_logprobs(cut, batch, BYTES.tgt.pad))) / batch.tokens)
        assert one.loss == pytest.approx(losses[1], abs=1e-5)
        assert one.change == pytest.approx(losses[1] - losses[0], abs=1e-5)
        assert one.change == pytest.approx(together[one.name, one.head].change, abs=1e-5)
    for few in ([], targets[:3]):
        with pytest.raises(UsageError, match="give one target for each"):
            head_importance(model, BYTES, few, targets, CPU)


def test_changes_are_laid_out_by_layer_and_head_and_drawn(tmp_path: Path) -> None:
    found = [HeadImportance("decoder.1.cross", head, change, 2.0) for head, change in ((1, 0.75), (0, -0.25))]
    found += [HeadImportance("encoder.0.self", 0, 0.125, 2.0)]
    assert list(importance_tables(found).items()) == [
        ("encoder.self", [[0.125]]),
        ("decoder.cross", [[None, None], [-0.25, 0.75]]),
    ]
    plot_head_importance(found, tmp_path / "new" / "heads.svg")
    plot_head_importance(found, tmp_path / "again.svg")
    drawn = (tmp_path / "new" / "heads.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "again.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in ("+0.750", "−0.250", "+0.125", "encoder self", "decoder → source"))
    plot_head_importance(found, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match=r"heads\.pdf.*\.png or \.svg"):
        plot_head_importance(found, tmp_path / "heads.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(QkvError, match="cannot be written"):
        plot_head_importance(found, tmp_path / "file" / "heads.svg")
