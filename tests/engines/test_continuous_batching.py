"""Continuous batching: a sentence in a slot gets the same translation as in a batch by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.assembly import build_model
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchOptions
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.decoding.beam_variants import DecodingOptions
from qkv.decoding.constraints import Avoid
from qkv.decoding.logits_processors import Sampling
from qkv.engines.cuda_decoding.continuous_batching import Sentence, SlotDecoding, SlotScheduler
from qkv.explain.attention_heads import head_counts, mute_heads
from qkv.models.variants import record_attention
from qkv.options import TransformerConfig

BYTES = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"d_model": 16, "heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 2}


def model(**options: Any) -> Transformer:
    torch.manual_seed(3)
    made = build_model(TransformerConfig(**SMALL | {"dropout": 0.0} | options), BYTES.src.size, BYTES.tgt.size).eval()
    for parameter in made.parameters():
        parameter.data.mul_(1.5)  # sharper, so that no rounding decides
    return made


def sentences(count: int, seed: int = 0, longest: int = 9) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (count,), generator=random).tolist()
    return [torch.randint(5, BYTES.src.size, (n,), generator=random).tolist() for n in lengths]


def assert_alike(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [(h.tokens, h.truncated) for h in ours] == [(h.tokens, h.truncated) for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)
        assert [h.logprob for h in ours] == pytest.approx([h.logprob for h in theirs], abs=1e-4)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "pre", "positions": "rotary"},
        {"positions": "learned", "max_positions": 64},
        {"positions": "none", "activation": "swiglu", "rms_norm": True},
        {"window": 2},
        {"attention": "general"},
        {"attention": "dot"},
    ],
)
def test_slots_give_the_results_of_a_batch(options: dict[str, Any], beam: int) -> None:
    made, spec = model(**options), SearchOptions(beam=beam, extra_length=5, n_best=beam)
    lines = sentences(30)
    expected = search_all(made, lines, spec, BYTES, device=CPU)
    assert_alike(SlotDecoding(made, BYTES).search_all(lines, spec), expected)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2), st.data())
def test_any_number_of_slots_in_any_order(
    seed: int, slots: int, count: int, beam: int, lag: int, data: st.DataObject
) -> None:
    made, spec = model(), SearchOptions(beam=beam)
    lines = sentences(count, seed)
    order = data.draw(st.permutations(range(count)))
    prefixes = [lines[i][: i % 3] for i in range(count)]
    longest = [data.draw(st.integers(1, 8)) for _ in range(count)]
    made_slots = SlotScheduler(made, spec, BYTES.tgt, slots=slots, capacity=16, source=16)
    made_slots.lag = lag  # as on a GPU, where the host reads the state of some steps before
    for _ in range(2):  # the state of one call must not change the next
        found: dict[int, list[Hypothesis]] = {}

        def finished(place: int, hypotheses: list[Hypothesis], found: dict[int, list[Hypothesis]] = found) -> None:
            found[order[place]] = hypotheses

        made_slots.run(
            [Sentence([*lines[i], BYTES.src.eos], longest[i], prefixes[i]) for i in order],
            pad_id=BYTES.src.pad,
            finished=finished,
        )
        for i in range(count):
            limited = dataclasses.replace(spec, max_length=longest[i])
            alone = search_all(made, [lines[i]], limited, BYTES, device=CPU, prefixes=[prefixes[i]])
            assert_alike([found[i]], alone)


def test_slots_support_options_whose_steps_have_one_shape() -> None:
    slots = SlotDecoding(model(), BYTES)
    assert slots.supports(SearchOptions()) is None
    assert slots.supports(DecodingOptions(no_repeat_ngram=2, repetition_penalty=1.2)) is None
    assert "coverage" in str(slots.supports(DecodingOptions(coverage=0.2)))
    assert "sampling" in str(slots.supports(DecodingOptions(sampling=Sampling())))
    assert "model.attention" in str(SlotDecoding(model(attention="additive"), BYTES).supports(SearchOptions()))


def test_one_processor_that_cannot_be_captured_is_enough_to_refuse() -> None:
    avoid = Avoid(["a"], BYTES.tgt)
    mixed = DecodingOptions(no_repeat_ngram=2, repetition_penalty=1.2, processors=(avoid,))
    assert [processor.capturable for processor in mixed.logits_processors()] == [True, False, True]
    assert "host" in str(SlotDecoding(model(), BYTES).supports(mixed))


def test_rules_hold_in_slots() -> None:
    made, lines = model(), sentences(12, 5)
    for options in (
        DecodingOptions(beam=3, extra_length=12, no_repeat_ngram=2, min_length=4),
        DecodingOptions(beam=4, extra_length=12, groups=2, repetition_penalty=1.5),
    ):
        expected = search_all(made, lines, options, BYTES, device=CPU)
        assert_alike(SlotDecoding(made, BYTES).search_all(lines, options), expected)


def test_slots_refuse_muted_and_recorded_attention() -> None:
    made = model()
    slots = SlotDecoding(made, BYTES)
    with mute_heads(["decoder.0.cross"], head_counts(made, CPU)):
        assert "muted" in str(slots.supports(SearchOptions()))
    with record_attention():
        assert "recorded" in str(slots.supports(SearchOptions()))


def test_learned_positions_are_used_to_the_last() -> None:
    made, spec = model(positions="learned", max_positions=27), SearchOptions(beam=2, extra_length=16)
    lines = [*sentences(3), list(range(5, 14))]  # 9 + 16 + 2 positions
    expected = search_all(made, lines, spec, BYTES, device=CPU)
    assert_alike(SlotDecoding(made, BYTES).search_all(lines, spec), expected)


def test_a_prefix_that_writes_nothing_is_refused() -> None:
    made, prefixes = model(), [[BYTES.tgt.eos]]
    with pytest.raises(UsageError, match="prefix"):
        search_all(made, [[7]], SearchOptions(), BYTES, device=CPU, prefixes=prefixes)
    with pytest.raises(UsageError, match="prefix"):
        SlotDecoding(made, BYTES).search_all([[7]], SearchOptions(), prefixes=prefixes)


def test_options_that_one_beam_cannot_serve_are_refused() -> None:
    for options in (DecodingOptions(beam=1, groups=2), DecodingOptions(beam=1, coverage=0.5)):
        with pytest.raises(UsageError, match="beam"):
            search_all(model(), [[7]], options, BYTES, device=CPU)


def test_a_pool_makes_a_search_once_and_forgets_old_ones() -> None:
    slots = SlotDecoding(model(), BYTES, keep=2)
    for beam in (1, 2, 1, 3):
        slots.search_all(sentences(4), SearchOptions(beam=beam))
    assert [key[0].beam for key in slots.schedulers] == [1, 3]
    kept = slots.schedulers[next(iter(slots.schedulers))]
    slots.search_all(sentences(4), SearchOptions(beam=1))
    assert list(slots.schedulers.values())[-1] is kept


def test_learned_positions_that_do_not_suffice_are_refused() -> None:
    made = model(positions="learned", max_positions=24)
    with pytest.raises(UsageError, match="max_positions"):
        SlotDecoding(made, BYTES).search_all(sentences(3), SearchOptions(beam=1))
