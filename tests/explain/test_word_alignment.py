"""Word alignment: the error rate, links from attention weights, and markup placed by links."""

from __future__ import annotations

import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import demo_corpus as demo
import qkv
from conftest import sentences
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.data import alignments
from qkv.data.subwords import learn
from qkv.documents.inline_markup import place_markup, strip_markup
from qkv.explain.word_alignment import (
    Agreement,
    Alignment,
    AlignmentHead,
    agreement,
    align_pairs,
    choose_links,
    rank_heads,
    word_weights,
)
from qkv.options import TokenizerConfig

CPU = torch.device("cpu")
LINKS = st.tuples(st.integers(0, 200), st.integers(0, 200))


# ---- agreement and Pharaoh text --------------------------------------------------------------------------------------


def test_the_error_rate_by_hand() -> None:
    found, sure = [{(0, 0), (1, 1), (2, 1)}], [{(0, 0), (1, 1), (3, 2)}]
    alone = agreement(found, sure)
    assert alone == Agreement(3, 3, 2, 2)
    assert (alone.aer, alone.precision, alone.recall) == pytest.approx((1 / 3, 2 / 3, 2 / 3))
    # 2-1 is possible: |A ∩ S| = 2, |A ∩ P| = 3 of |A| = 3, |S| = 3.
    eased = agreement(found, sure, [{(2, 1), (9, 9)}])
    assert (eased.aer, eased.precision, eased.recall) == pytest.approx((1 / 6, 1, 2 / 3))
    # Over a whole set the counts add up, not the rates: 2 of (3 + 3) and 1 of (1 + 1).
    assert agreement([*found, {(0, 0)}], [*sure, {(0, 0)}]).aer == pytest.approx(1 - 6 / 8)
    assert agreement(sure, sure).aer == 0
    assert agreement([{(5, 5)}], sure).aer == 1
    assert agreement([set()], [set()]).aer == 0
    with pytest.raises(UsageError, match="2 alignments but 1 gold"):
        agreement([set(), set()], [set()])


@given(st.frozensets(LINKS))
def test_pharaoh_text_there_and_back(pairs: frozenset[tuple[int, int]]) -> None:
    alignment = Alignment(pairs)
    assert Alignment.parse(str(alignment)) == alignment == pairs
    assert str(alignment) == demo.pharaoh(tuple(sorted(pairs)))


@pytest.mark.parametrize("text", ["0", "0-", "a-b", "0-1-2", "1_0-2", "-1-0", "0-1,1-2", "٣-1"])
def test_an_invalid_link_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=f'"{re.escape(text)}" is not a link'):
        Alignment.parse(f"0-0 {text}")


# ---- words and tokens ------------------------------------------------------------------------------------------------

AWKWARD = [
    "L'amico c'è, un'arancia dov'era!",
    "Anna's cat woke up at ten o'clock. \"Twenty-three?!\"",
    "  two   spaces\tand a tab  ",
    "e\u0301te\u0301 naïve 猫は寝る。🐈‍⬛ a_b x=\u03389 …",
    "don't <b>stop</b> 3.14 % ''' -- -",
    "",
    " ",
]
TRAINING = ["the cat is at home.", "il gatto è a casa.", *AWKWARD[:4], "Anna's amico, l'arancia e 猫"] * 3


@pytest.fixture(scope="module", params=["bpe", "unigram", "word", "char"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return learn(
        TRAINING,
        TRAINING,
        TokenizerConfig(kind=request.param, vocab=0 if request.param == "char" else 300),
        ("it",),
    ).src


@pytest.mark.parametrize("rule", alignments.RULES)
def test_words_have_the_tokens_that_hold_them(tokenizer: Tokenizer, rule: str) -> None:
    pick = random.Random(1)
    drawn = ["".join(pick.choices("ab' -.é猫\u0301\t9\"", k=pick.randint(1, 12))) for _ in range(200)]
    for text in AWKWARD + drawn:
        ids = [tokenizer.tag("it"), *tokenizer.encode(text)]
        groups = alignments.tokens_of_words(tokenizer, ids, text, rule)
        plain = unicodedata.normalize("NFC", text)
        words = alignments.words(plain, rule)
        assert len(groups) == len(words) == len(alignments.words(text, rule))
        for word, group in zip(words, groups, strict=True):
            assert group == list(range(group[0], group[-1] + 1))
            held = b"".join(tokenizer.bytes_of(ids[place]) for place in group)
            assert word.encode() in held
            # The group is minimal: dropping its first or last token cuts the word.
            for less in (group[1:], group[:-1]):
                assert word.encode() not in b"".join(tokenizer.bytes_of(ids[place]) for place in less)
        free = set(range(len(ids))) - {place for group in groups for place in group}
        assert b"".join(tokenizer.bytes_of(ids[place]) for place in free).decode().strip() == ""
        assert 0 in free  # the tag


def test_the_demo_counts_words_as_its_gold_does() -> None:
    pairs = [
        ("Anna's cat woke up at ten o'clock.", "L'amico c'è, un'arancia dov'era!"),
        ("Twenty-three.", "Sì, è così?"),
    ]
    for text in (text for pair in pairs for text in pair):
        assert alignments.words(text) == demo.words(text)
    assert alignments.words("A cat, and  a dog.", "spaces") == ["A", "cat,", "and", "a", "dog."]


# ---- from weights to links -------------------------------------------------------------------------------------------


def test_weights_between_words_are_sums_over_the_source_and_means_over_the_target() -> None:
    random_ = np.random.default_rng(0)
    weights = random_.dirichlet(np.ones(6), size=5).astype(np.float32)  # 4 target tokens, 5 source tokens and </s>
    source, target = [[0, 1], [1, 2], [4]], [[0], [1, 2, 3]]
    for shift, reading in enumerate(("written", "fed")):
        found = word_weights(weights, source, target, reading)
        for j, tokens in enumerate(target):
            for i, keys in enumerate(source):
                rows = [sum(weights[t + shift, s] for s in keys) for t in tokens]
                assert found[j, i] == pytest.approx(sum(rows) / len(rows), rel=1e-5)


def test_links_by_hand() -> None:
    weights = np.array([[0.5, 0.3, 0.0], [0.0, 0.1, 0.6], [0.0, 0.0, 0.9]], np.float32)
    assert np.argwhere(choose_links(weights)).tolist() == [[0, 0], [1, 2], [2, 2]]
    # Target word 0 gives 0.3 / 0.8 of its weight to source word 1, which has 0.3 / 0.4 of its weight from it: linked.
    # Target word 1 gives 0.1 / 0.7 to it, too little.
    assert np.argwhere(choose_links(weights, 0.25)).tolist() == [[0, 0], [0, 1], [1, 2], [2, 2]]
    assert np.argwhere(choose_links(weights, 0.38)).tolist() == [[0, 0], [1, 2], [2, 2]]
    # A threshold link needs a high share in both directions.
    assert not choose_links(np.array([[0.6, 0.4], [0.0, 9.0]], np.float32), 0.1)[0, 1]
    assert choose_links(np.zeros((1, 2), np.float32), 0.1).tolist() == [[True, False]]


def test_a_head_that_is_not_there_is_refused() -> None:
    weights = {"decoder.0.cross": np.ones((2, 3, 4), np.float32)}
    assert AlignmentHead("decoder.0.cross", 1).choose(weights).shape == (3, 4)
    for head, message in (
        (AlignmentHead("decoder.1.cross"), "choose one of decoder.0.cross"),
        (AlignmentHead("decoder.0.cross", 2), "0 to 1"),
        (AlignmentHead("", 1), "name a layer"),
    ):
        with pytest.raises(UsageError, match=message):
            head.choose(weights)
    with pytest.raises(UsageError, match="written, fed"):
        AlignmentHead(reading="read")
    with pytest.raises(UsageError, match="0 to 1"):
        AlignmentHead(threshold=2.0)


def test_a_trained_model_aligns_the_small_language(tiny: Path) -> None:
    """Word by word in the same order: the gold of every sentence is 0-0 1-1 …"""
    translator = qkv.load(tiny)
    assert isinstance(translator, qkv.Translator)
    model, both = translator.model, translator.tokenizers
    sources, targets = map(list, zip(*sentences(60, seed=5), strict=True))
    gold = [Alignment((i, i) for i in range(len(alignments.words(source)))) for source in sources]
    ranked = rank_heads(model, both, sources[:30], targets[:30], gold[:30], CPU)
    head, score = ranked[0]
    assert score.aer < 0.1 < ranked[-1][1].aer
    # The ranking counts what aligning with that head finds, and every head, reading and threshold has its place.
    for own, expected in (ranked[0], ranked[len(ranked) // 2], ranked[-1]):
        assert agreement(align_pairs(model, both, sources[:30], targets[:30], CPU, own), gold[:30]) == expected
    assert len(ranked) == 2 * (2 + 1 + 1) * 7
    found = align_pairs(model, both, sources[30:], targets[30:], CPU, head)
    assert agreement(found, gold[30:]).aer < 0.1
    # A single pair gives the same as in a batch; empty lines are skipped.
    assert align_pairs(model, both, sources[33:34], targets[33:34], CPU, head) == [found[3]]
    assert align_pairs(model, both, ["", "Cat."], ["Gatto.", " "], CPU, head) == [Alignment(), Alignment()]
    with pytest.raises(UsageError, match="1 sources but 0 targets"):
        align_pairs(model, both, ["a"], [], CPU, head)


# ---- markup ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "translation", "alignment", "expected"),
    [
        ("a <b>red cat</b>.", "un gatto rosso.", "0-0 1-2 2-1 3-3", "un <b>gatto rosso</b>."),
        ("I <i>love</i> you.", "Ti amo.", "0-1 1-1 2-0 3-2", "Ti <i>amo</i>."),
        ("I <i>love</i> you.", "Amo.", "0-0 1-0 2-0 3-1", "<i>Amo</i>."),  # one of three words is enough
        (
            "<a href='x'>the <b>big</b> cat</a>",
            "il gatto grande",
            "0-0 1-2 2-1",
            "<a href='x'>il gatto <b>grande</b></a>",
        ),
        ("<b>one two</b> three", "uno tre due", "0-0 1-2 2-1", "<b>uno</b> tre <b>due</b>"),  # torn apart
        (
            "<b>one two</b>",
            "uno e due",
            "0-0 1-2",
            "<b>uno e due</b>",
        ),  # a word without a link has the links of its neighbours
        ("one <b>of</b> two", "uno due", "0-0 2-1", "uno<b></b> due"),  # nothing translates it
        ("one<br/> <i>two <br> three</i>", "due tre uno", "0-2 1-0 2-1", "<i>due<br> tre</i> uno<br/>"),
        ("<i>3 < 4</i> & 5", "3 < 4 & 5", "0-0 1-1 2-2 3-3 4-4", "<i>3 < 4</i> & 5"),
        ("<b></b>", "", "", "<b></b>"),
    ],
)
def test_markup_follows_the_aligned_words(source: str, translation: str, alignment: str, expected: str) -> None:
    assert place_markup(source, translation, Alignment.parse(alignment)) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a <b>c", "<b> is not closed"),
        ("a</i> b", "</i> closes no open tag"),
        ("<b><i>a</b></i>", "</b> closes no open"),
    ],
)
def test_unbalanced_markup_is_refused(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        place_markup(source, "x", set())
    with pytest.raises(UsageError, match="link 0-7"):
        place_markup("a", "x", {(0, 7)})


def trees() -> st.SearchStrategy[str]:
    """Text with elements in elements, some empty, some inside words."""
    leaf = st.text("ab .,'é<&>", max_size=8).filter(lambda text: not re.search(r"<[ab]", text))
    return st.recursive(
        leaf | st.sampled_from(["<br/>", '<img src="a b">', "<x:y />"]),
        lambda inner: (
            st.lists(inner, max_size=4).map("".join)
            | st.tuples(st.sampled_from(["b", "i", 'a href="x"']), inner).map(lambda t: f"<{t[0]}>{t[1]}</{t[0][0]}>")
        ),
        max_leaves=12,
    )


@given(trees(), st.text("xy .,'è", max_size=20), st.randoms(use_true_random=False), st.floats(0, 1))
def test_markup_is_always_well_formed(source: str, translation: str, pick: random.Random, share: float) -> None:
    given_, written = len(alignments.words(strip_markup(source))), len(alignments.words(translation))
    alignment = {(i, j) for i in range(given_) for j in range(written) if pick.random() < share}
    marked = place_markup(source, translation, alignment)
    assert strip_markup(marked) == translation
    opened: list[str] = []
    for close, name, alone in re.findall(r"<(/?)([a-z:]+)[^<>]*?(/?)>", marked):
        if close:
            assert opened.pop() == name
        elif not alone and name != "img":
            opened.append(name)
    assert not opened
    tags = r"<[a-z][^<>]*>"
    assert set(re.findall(tags, marked)) == set(re.findall(tags, source))  # no tag is lost or added


def test_words_of_scripts_whose_vowels_are_signs() -> None:
    assert alignments.words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert alignments.words("น้ำ") == ["น้ำ"]
    assert alignments.words("كَتَبَ.") == ["كَتَبَ", "."]
    with pytest.raises(UsageError, match="choose one of spaces, marks"):
        alignments.words("a", "letters")
