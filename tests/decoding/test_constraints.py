"""Required phrases are in the text or refused with a reason, forbidden ones never are, in any tokenisation."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qkv.assembly import build_model
from qkv.core.batches import collate, pad
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data.subwords import readable_tokens
from qkv.data.subwords import to_printable as printable
from qkv.decoding.beam_variants import ConstrainedBeamSearch, DecodingOptions
from qkv.decoding.constraints import Avoid, MustInclude, check_conflict, find, spell
from qkv.decoding.logits_processors import Sampling
from qkv.decoding.search_request import token_logprobs
from qkv.options import ConvS2SConfig, RnnConfig, TransformerConfig
from search_tables import SPECIAL, Prefix, TableModel

PIECES = [" cat", "cat", " c", "c", "at", "s", "egory", " dog", " the", ".", " (", ")", " é", "t"]
WORDS = Tokenizer("word", [printable(piece) for piece in PIECES if len(piece.encode()) > 1])
LIKELY = [
    WORDS.eos,
    *(
        next(token for token in range(WORDS.offset, WORDS.size) if WORDS.bytes_of(token) == p.encode())
        for p in [*PIECES, "\n", " "]
    ),
    WORDS.offset + 0xC3,  # half of an é
    WORDS.offset + 0xA9,
]


@cache
def probabilities(seed: int, sentence: int, prefix: Prefix) -> np.ndarray[Any, Any]:
    """Random probabilities after every prefix; some tokens are likely, all are possible."""
    random = np.random.default_rng((seed, sentence, *prefix))
    values = np.full(WORDS.size, 1e-7)
    values[LIKELY] += random.dirichlet([0.5] * len(LIKELY))
    return values / values.sum()


def searched(
    seed: int,
    longest: int,
    *,
    beam: int = 4,
    n_best: int = 1,
    sentences: int = 2,
    prefix: torch.Tensor | None = None,
    **rules: Any,
) -> Any:
    model = TableModel(lambda sentence, prefix: probabilities(seed, sentence, prefix))
    numbers, ones = torch.arange(sentences)[:, None], torch.ones(sentences, dtype=torch.long)
    options = DecodingOptions(beam=beam, n_best=n_best, max_length=longest, **rules)
    return search(model, numbers, ones, options, SPECIAL, prefix=prefix)


def text_of(hypothesis: Hypothesis) -> str:
    return WORDS.decode(hypothesis.tokens).replace("\n", " ")


def assert_own_logprob(seed: int, sentence: int, found: Hypothesis) -> None:
    followed = [(tuple(found.tokens[:i]), t) for i, t in enumerate([*found.tokens, WORDS.eos])]
    total = sum(math.log(probabilities(seed, sentence, before)[t]) for before, t in followed)
    assert found.logprob == pytest.approx(total, abs=1e-4)


seeds = st.integers(0, 10**6)
phrase = st.sampled_from(["cat", "the cat", "dog.", "(cat)", "category", "é", "cats", "t", "at the", "dog dog"])


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phrase_", "text", "whole", "end"),
    [
        ("cat", "the cat sat", True, 7),
        ("cat", "category", True, -1),
        ("cat", "category", False, 3),
        ("cat", "tomcat cat.", True, 10),
        ("cat", "cat_", True, -1),
        ("cat", "cat\u0301", True, -1),
        ("cat", "Cat", True, -1),
        (".", "a.b", True, 2),
        ("a b", "a  b", True, -1),
        ("猫", "白猫说", False, 2),
    ],
)
def test_phrases_are_found_as_whole_words(phrase_: str, text: str, whole: bool, end: int) -> None:
    assert find(phrase_, text, whole) == end


def test_blank_phrases_and_bare_strings_are_refused() -> None:
    with pytest.raises(UsageError, match="blank"):
        Avoid(["cat", " "], WORDS)
    with pytest.raises(UsageError, match="brackets"):
        MustInclude.of("cat", WORDS)


# ---- forbidden -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.sampled_from(LIKELY[1:]), max_size=6), st.lists(phrase, min_size=1, max_size=2))
def test_just_those_tokens_are_forbidden_that_complete_a_phrase(before: list[int], phrases: list[str]) -> None:
    avoid = Avoid(phrases, WORDS)

    def holds(tokens: list[int]) -> bool:
        # Half of a character may become any character: like all unknown text it counts as the end of a word.
        written = b"".join(map(WORDS.bytes_of, tokens)).replace(b"\n", b" ").decode("utf-8", "replace")
        return any(find(p, written) >= 0 for p in phrases)

    assume(not holds(before))
    forbidden = avoid.forbidden(before)
    for token in range(WORDS.offset, WORDS.size):
        assert (token in forbidden) == holds([*before, token]), readable_tokens(WORDS, [*before, token])
    assert WORDS.eos not in forbidden


@settings(max_examples=60)
@given(seeds, st.integers(0, 9), st.lists(phrase, min_size=1, max_size=4), st.sampled_from([1, 4]), st.booleans())
def test_a_forbidden_phrase_is_never_written(
    seed: int, longest: int, phrases: list[str], beam: int, draws: bool
) -> None:
    avoid = Avoid(phrases, WORDS)
    more: dict[str, Any] = {"sampling": Sampling(seed=seed)} if draws else {}
    found = searched(seed, longest, beam=beam, n_best=beam, processors=(avoid,), **more)
    for sentence, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            assert avoid.occurs(text_of(hypothesis)) is None
            assert_own_logprob(seed, sentence, hypothesis)


def test_without_the_rule_the_phrases_do_come() -> None:
    """Otherwise the test above proves nothing."""
    texts = [text_of(hypotheses[0]) for seed in range(40) for hypotheses in searched(seed, 9)]
    assert all(sum(find(p, text) >= 0 for text in texts) >= 1 for p in ("cat", "é", "t"))


def test_a_longer_word_is_another_word() -> None:
    """Only the spelling that starts with the token " cat" is refused, unless the rest of the word is required."""
    avoid = Avoid(["cat"], WORDS)
    begun = [LIKELY[1 + PIECES.index(" c")]]
    at, egory, dot = (LIKELY[1 + PIECES.index(piece)] for piece in ("at", "egory", "."))
    assert at in avoid.forbidden(begun, left=5)
    known = Avoid(["cat"], WORDS, exempt=[(*begun, at, egory)])
    assert at not in known.forbidden(begun, left=2)
    assert at in known.forbidden(begun, left=1)
    assert {dot, WORDS.eos} < known.forbidden([*begun, at], left=1)
    assert egory not in known.forbidden([*begun, at], left=1)
    assert avoid.occurs("category") is None
    assert Avoid(["cat"], WORDS, whole_words=False).occurs("category") == "cat"


# ---- required --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    seeds,
    st.lists(phrase, min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from([1, 8, 12]),
    st.booleans(),
)
def test_required_phrases_are_always_met(
    seed: int, phrases: list[str], ordered: bool, spare: int, beam: int, whole: bool
) -> None:
    """Also with the smallest possible length limit."""
    required = MustInclude.of(phrases, WORDS, ordered=ordered, whole_words=whole)
    longest = required.need([]) + spare
    found = searched(seed, longest, beam=beam, n_best=2, required={0: required, 1: required})
    for sentence, hypotheses in enumerate(found):
        assert hypotheses
        for hypothesis in hypotheses:
            text = text_of(hypothesis)
            assert required.missing(text) == []
            assert len(hypothesis.tokens) <= longest
            assert_own_logprob(seed, sentence, hypothesis)
            if ordered and whole:
                end = 0
                for p in phrases:
                    assert (end := find(p, text, True, end)) >= 0


def test_bytes_that_are_no_character_do_not_join_a_phrase() -> None:
    required = MustInclude.of(["category"], WORDS)
    cat, egory = (LIKELY[1 + PIECES.index(piece)] for piece in ("cat", "egory"))
    (byte,) = (token for token in range(WORDS.offset, WORDS.size) if WORDS.bytes_of(token) == b"\xc3")
    assert required.missing(required.text([cat, egory])) == []
    assert required.missing(required.text([cat, byte, egory])) == [0]
    assert required.text([cat, byte]) == "cat"  # the rest of the character may follow


some_tokens = st.sampled_from(LIKELY[1:]).map(lambda token: [token]) | phrase.map(WORDS.encode)


@settings(max_examples=200)
@given(
    st.lists(phrase, min_size=1, max_size=3),
    st.booleans(),
    st.lists(some_tokens, max_size=4).map(lambda parts: [token for part in parts for token in part]),
    st.integers(0, 3),
)
def test_allowed_tokens_leave_room_for_missing_phrases(
    phrases: list[str], ordered: bool, tokens: list[int], spare: int
) -> None:
    required = MustInclude.of(phrases, WORDS, ordered=ordered)
    model: Any = None
    sizes: dict[str, Any] = {"lengths": torch.tensor([1]), "capacity": 20}
    search_ = ConstrainedBeamSearch(model, DecodingOptions(required={0: required}), SPECIAL, **sizes)
    left = required.need(tokens) + spare
    merit = torch.zeros(WORDS.size)
    search_._forbid(merit, required, tokens, left)
    may = [token for token in range(WORDS.size) if merit[token] > -math.inf]
    assert (WORDS.eos in may) == (required.missing(required.text(tokens)) == [])
    assert all(token == WORDS.eos or required.need([*tokens, token]) < left for token in may)
    assert may  # there is a way
    assert left == 0 or required.advancing(tokens) & set(may) or WORDS.eos in may


@given(st.lists(phrase, min_size=1, max_size=3), st.booleans())
def test_phrases_without_room_are_refused(phrases: list[str], ordered: bool) -> None:
    required = MustInclude.of(phrases, WORDS, ordered=ordered)
    need = required.need([])
    with pytest.raises(UsageError, match=f"takes {need} tokens, but the output may have {need - 1} more"):
        searched(1, need - 1, required={0: required, 1: required})


def test_a_phrase_behind_a_prefix() -> None:
    required = MustInclude.of(["the cat"], WORDS)
    begun = torch.tensor([WORDS.encode("dog the")] * 2)  # half of the phrase is in the prefix
    for hypotheses in searched(3, begun.shape[1] + 1, prefix=begun, required={0: required, 1: required}):
        assert text_of(hypotheses[0]) == "dog the cat"
    with pytest.raises(UsageError, match="takes 1 tokens, but the output may have 0 more"):
        searched(3, begun.shape[1], prefix=begun, required={0: required, 1: required})


@settings(max_examples=30)
@given(seeds, st.integers(0, 8))
def test_required_and_forbidden_together(seed: int, spare: int) -> None:
    """A required word that is spelt by way of a forbidden one, too."""
    required = MustInclude.of(["dog.", "category"], WORDS)
    avoid = Avoid(["cat", "é"], WORDS, exempt=required.spelt)
    longest = required.need([]) + spare
    for hypotheses in searched(seed, longest, required={0: required, 1: required}, processors=(avoid,)):
        assert required.missing(text_of(hypotheses[0])) == []
        assert avoid.occurs(text_of(hypotheses[0])) is None


def test_phrases_both_required_and_forbidden_are_refused() -> None:
    with pytest.raises(UsageError, match='"the cat" is required, but "cat" in it is forbidden'):
        check_conflict(["the cat"], "", Avoid(["cat"], WORDS))
    with pytest.raises(UsageError, match=r'"a cat\." is required, but "cat" in it is forbidden'):
        check_conflict([], "a cat.", Avoid(["cat"], WORDS))
    check_conflict(["category"], "a cat", Avoid(["cat"], WORDS))  # which may become "a category"
    # Two phrases have to be adjacent, because there is no room between them, and together form a forbidden one.
    required = MustInclude.of(["the", "cat"], WORDS, ordered=True)
    avoid = Avoid(["the cat"], WORDS)
    with pytest.raises(UsageError, match="cannot be met together"):
        searched(1, 2, required={0: required, 1: required}, processors=(avoid,))
    ((best,), _) = searched(1, 3, required={0: required, 1: required}, processors=(avoid,))
    assert required.missing(text_of(best)) == []


def test_a_sentence_alone_and_among_others() -> None:
    asked = [MustInclude.of(p, WORDS) for p in (["cat"], ["dog."], ["the cat", "é"], ["t"])]
    together = searched(5, 9, sentences=4, required=dict(enumerate(asked)))
    for number, required in enumerate(asked):
        model = TableModel(lambda _, prefix, n=number: probabilities(5, n, prefix))
        one, options = torch.tensor([[0]]), DecodingOptions(max_length=9, required={0: required})
        (alone,) = search(model, one, torch.tensor([1]), options, SPECIAL)
        assert alone == together[number]


def test_a_phrase_in_a_language_without_spaces_has_none_before_it() -> None:
    assert WORDS.decode(spell("cats", WORDS)) == "cats"
    joined = b"".join(WORDS.bytes_of(token) for token in spell("cat猫s", WORDS, space=False))
    assert joined.decode() == "cat猫s"


KINDS: list[Any] = [
    TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1, tie="none"),
    RnnConfig(d_model=16, tie="none"),
    ConvS2SConfig(d_model=16, tie="none"),
]


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind)
def test_every_kind_of_model_keeps_to_them(spec: Any) -> None:
    torch.manual_seed(1)
    model = build_model(spec, WORDS.size, WORDS.size).eval()
    required, avoid = MustInclude.of(["the cat", "dog."], WORDS), Avoid(["cats", "é"], WORDS)
    rows = [np.array(WORDS.encode(text), np.int64) for text in ("cat.", "the dog (cat)", "s")]
    lengths = torch.tensor([len(row) + 1 for row in rows])
    for bound in (True, False):
        rules: dict[str, Any] = {"processors": (avoid,), "required": dict.fromkeys(range(3), required)} if bound else {}
        options = DecodingOptions(extra_length=6, n_best=3, **rules)
        found = search(model, pad(rows, 0, last=2), lengths, options, SPECIAL)
        for row, hypotheses in zip(rows, found, strict=True):
            targets = [np.array(h.tokens, np.int64) for h in hypotheses]
            batch = collate([row] * len(targets), targets, TokenizerPair(WORDS, WORDS))
            for h, logprobs in zip(hypotheses, token_logprobs(model, batch, 0), strict=True):
                assert h.logprob == pytest.approx(sum(logprobs), abs=1e-4)
                assert not bound or (required.missing(text_of(h)) == [] and avoid.occurs(text_of(h)) is None)
