"""Continuous batching: sentences that enter and leave slots of fixed size are translated as in a batch of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.decode.batched import search_all
from qkv.decode.board import Hypothesis
from qkv.decode.rules import Rules
from qkv.decode.sampling import Sampling
from qkv.decode.step import PLAIN, Special
from qkv.decode.trace import trace
from qkv.engines.cuda_decoding.continuous_batching import Pool, Slots, can_hold
from qkv.models import Transformer
from qkv.models.attention import heads_of, record, without
from qkv.options import DecodeConfig, TransformerConfig

BYTES = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"d_model": 16, "heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 2}


def model(**options: Any) -> Transformer:
    torch.manual_seed(3)
    made = Transformer(TransformerConfig(**SMALL | {"dropout": 0.0} | options), BYTES.src.size, BYTES.tgt.size).eval()
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
def test_slots_give_what_a_batch_gives(options: dict[str, Any], beam: int) -> None:
    made, spec = model(**options), DecodeConfig(beam=beam, extra_length=5)
    lines = sentences(30)
    expected = search_all(made, lines, spec, BYTES, device=CPU, n_best=beam)
    assert_alike(search_all(made, lines, spec, BYTES, device=CPU, n_best=beam, pool=Pool(made)), expected)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2), st.data())
def test_any_number_of_slots_in_any_order(
    seed: int, slots: int, count: int, beam: int, lag: int, data: st.DataObject
) -> None:
    made, spec = model(), DecodeConfig(beam=beam)
    lines = sentences(count, seed)
    order = data.draw(st.permutations(range(count)))
    prefixes = [lines[i][: i % 3] for i in range(count)]
    longest = [data.draw(st.integers(1, 8)) for _ in range(count)]
    special = Special(BYTES.tgt.bos, BYTES.tgt.eos, BYTES.tgt.pad)
    made_slots = Slots(made, spec, special, slots=slots, capacity=16, source=16, choice=PLAIN)
    made_slots.lag = lag  # as on a GPU, where the host sees what was some steps before
    for _ in range(2):  # what is left of one call must not be seen in the next
        found: dict[int, list[Hypothesis]] = {}

        def finished(place: int, hypotheses: list[Hypothesis], found: dict[int, list[Hypothesis]] = found) -> None:
            found[order[place]] = hypotheses

        made_slots.run(
            [[*lines[i], BYTES.src.eos] for i in order],
            [longest[i] for i in order],
            [prefixes[i] for i in order],
            pad_id=BYTES.src.pad,
            finished=finished,
        )
        for i in range(count):
            options: dict[str, Any] = {"max_length": longest[i], "prefixes": [prefixes[i]]}
            alone = search_all(made, [lines[i]], spec, BYTES, device=CPU, **options)
            assert_alike([found[i]], alone)


def test_a_pool_serves_what_has_steps_of_one_shape() -> None:
    made = model()
    pool = Pool(made)
    assert pool.serves(made, PLAIN)
    assert pool.serves(made, Rules(no_repeat_ngram=2, repetition_penalty=1.2).choice())
    assert not pool.serves(model(), PLAIN)  # another model
    assert not pool.serves(made, Rules(coverage=0.2).choice())
    assert not pool.serves(made, Rules(sampling=Sampling()).choice())
    assert not can_hold(model(attention="additive"))


def test_rules_hold_in_slots() -> None:
    made, spec = model(), DecodeConfig(beam=3, extra_length=12)
    lines, choice = sentences(12, 5), Rules(no_repeat_ngram=2, min_length=4).choice()
    expected = search_all(made, lines, spec, BYTES, device=CPU, choice=choice)
    assert_alike(search_all(made, lines, spec, BYTES, device=CPU, choice=choice, pool=Pool(made)), expected)


def test_what_is_watched_is_no_work_for_a_pool() -> None:
    made = model()
    pool = Pool(made)
    with trace():
        assert not pool.serves(made, PLAIN)
    with without(["decoder.0.cross"], heads_of(made, CPU)):
        assert not pool.serves(made, PLAIN)
    with record():
        assert not pool.serves(made, PLAIN)


def test_learned_positions_are_used_to_the_last() -> None:
    made, spec = model(positions="learned", max_positions=27), DecodeConfig(beam=2, extra_length=16)
    lines = [*sentences(3), list(range(5, 14))]  # 9 + 16 + 2 positions
    expected = search_all(made, lines, spec, BYTES, device=CPU)
    assert_alike(search_all(made, lines, spec, BYTES, device=CPU, pool=Pool(made)), expected)


def test_a_prefix_that_writes_nothing_is_refused() -> None:
    made = model()
    for pool in (None, Pool(made)):
        with pytest.raises(UsageError, match="prefix"):
            search_all(made, [[7]], DecodeConfig(), BYTES, device=CPU, prefixes=[[BYTES.tgt.eos]], pool=pool)


def test_options_that_one_beam_cannot_serve_are_refused() -> None:
    for rules in (Rules(groups=2), Rules(coverage=0.5)):
        with pytest.raises(UsageError, match="beam"):
            search_all(model(), [[7]], DecodeConfig(beam=1), BYTES, device=CPU, choice=rules.choice())


def test_a_pool_makes_a_search_once_and_forgets_old_ones() -> None:
    made = model()
    pool = Pool(made, keep=2)
    for beam in (1, 2, 1, 3):
        search_all(made, sentences(4), DecodeConfig(beam=beam), BYTES, device=CPU, pool=pool)
    assert [key[0].beam for key in pool.made] == [1, 3]
    kept = pool.made[next(iter(pool.made))]
    search_all(made, sentences(4), DecodeConfig(beam=1), BYTES, device=CPU, pool=pool)
    assert list(pool.made.values())[-1] is kept


def test_learned_positions_that_do_not_suffice_are_refused() -> None:
    made = model(positions="learned", max_positions=24)
    with pytest.raises(UsageError, match="max_positions"):
        search_all(made, sentences(3), DecodeConfig(beam=1), BYTES, device=CPU, pool=Pool(made))
