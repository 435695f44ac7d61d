"""The diagnosis: every measure on examples worked by hand, and properties that hold for any text."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import QkvError
from qkv.evaluation import metrics
from qkv.evaluation.diagnosis import (
    BUCKETS,
    SMALLEST,
    Diagnosis,
    chance_level,
    copied_words,
    diagnose,
    has_loop,
    length_ranges,
    words_of,
)

NOUNS = {"cat": "gatto", "dog": "cane", "bird": "uccello", "horse": "cavallo", "fish": "pesce", "mouse": "topo"}
VERBS = {"sees": "vede", "hears": "sente", "likes": "preferisce", "finds": "trova", "follows": "segue"}
PAIRS = [
    (f"The {a} {v} the {b} today.", f"Il {x} {w} il {y} oggi.") for a, x in NOUNS.items() for v, w in VERBS.items()
    for b, y in NOUNS.items() if a != b
]  # fmt: skip
SOURCES, REFERENCES = [list(side) for side in zip(*random.Random(1).sample(PAIRS, 60), strict=True)]
FLAGS = ["empty", "loop", "hallucination", "copy", "short", "long", "cut", "retried"]


def flags(source: str, hypothesis: str, reference: str, **options: Any) -> tuple[str, ...]:
    (sentence,) = diagnose([source], [hypothesis], [reference], **options).sentences
    return sentence.flags


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("L'amico è qui, no?", ["L'", "amico", "è", "qui", ",", "no", "?"]),
        ("我喜欢 cats。", ["我", "喜", "欢", "cats", "。"]),
        ("สวัสดี", list("สวัสดี")),
        ("  ", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


# ---- loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hypothesis", "source", "loops"),
    [
        ("il gatto " * 4, "the cat", True),  # four times, eight words
        ("il gatto " * 3 + "vede Anna", "the cat", False),
        ("no " * 7, "no", False),  # seven words are too few
        ("no " * 8, "no", True),
        ("No no NO no no nO no no", "no", True),  # whatever the case
        ("ha " * 9, "ha " * 8, False),  # the source laughs too, and one more is allowed
        ("ha " * 10, "ha " * 8, True),
        ("Ecco " + "ab" * 30, "Here", True),  # no word is so long
        ("哈" * 8, "hi", True),
        (", ".join(["uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto"]), "", False),
        ("", "the cat", False),
    ],
)
def test_loops(hypothesis: str, source: str, loops: bool) -> None:
    assert has_loop(hypothesis, source) == loops
    assert ("loop" in flags(source or "x", hypothesis, "il gatto")) == loops


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "hypothesis", "reference", "copied"),
    [
        ("the cat Berlin 7", "the cat Berlin 7", "il gatto Berlin 7", (2, 3)),  # Berlin is right, 7 is no word
        ("no no", "no no", "no", (1, 2)),  # the second is too many
        ("no no", "no", "no no", (0, 2)),
        ("The cat", "IL CAT", "il gatto", (1, 2)),
        ("the cat", "il gatto", "il gatto", (0, 2)),
        ("7 : 3", "7 : 3", "sette", (0, 0)),
    ],
)
def test_copied_words(source: str, hypothesis: str, reference: str, copied: tuple[int, int]) -> None:
    assert copied_words(source, hypothesis, reference) == copied
    assert diagnose([source], [hypothesis], [reference]).copied_words == copied[0] / max(1, copied[1])


def test_copies_are_those_that_the_reference_does_not_copy() -> None:
    assert "copy" in flags("The cat  sleeps.", "the cat sleeps.", "Il gatto dorme.")
    assert "copy" in flags("7 : 3", "7 : 3", "sette a tre")  # without a word, but the same
    assert "copy" in flags("The cat sees Anna.", "The cat vede Anna.", "Il gatto vede Anna.")  # two words of four
    assert "copy" not in flags("The cat sees Anna now.", "The cat vede Anna ora.", "Il gatto vede Anna ora.")
    assert flags("OK!", "OK!", "OK!") == ()
    copies = diagnose(["the cat", "a b c d e f"], ["the cat", "u v w x y z"], ["il gatto", "u v w x y z"])
    assert copies.copied_words == 2 / 8  # of all words, not of sentences
    assert copies.rate("copy") == 1 / 2


# ---- hallucinations --------------------------------------------------------------------------------------------------


def test_the_chance_level_is_the_similarity_of_other_references() -> None:
    dice = random.Random(4)
    texts = [" ".join("".join(dice.choices("aeioulnrst", k=dice.randint(1, 8))) for _ in range(8)) for _ in range(41)]
    ordered = sorted(texts)
    alike = [sacrebleu.sentence_chrf(text, [ordered[(i + 20) % 41]]).score for i, text in enumerate(ordered)]
    assert chance_level(texts) == pytest.approx(np.quantile(alike, 0.9))
    assert 10 < chance_level(texts) < 30
    assert chance_level(texts * 3) == chance_level(texts)
    assert chance_level(texts[:19]) == 20.0  # too few references
    assert chance_level(REFERENCES) == 30.0  # all of them are similar


def test_an_output_that_is_unlike_its_reference_is_a_hallucination() -> None:
    invented = "Domani compriamo dodici biciclette nuove."
    diagnosis = diagnose([*SOURCES, "Who knows her?"], [*REFERENCES, invented], [*REFERENCES, "Chi mai la conosce?"])
    assert diagnosis.chance == chance_level([*REFERENCES, "Chi mai la conosce?"])
    assert diagnosis.counts["hallucination"] == 1
    assert diagnosis.flagged("hallucination")[0].line == 61
    assert diagnosis.rate("hallucination") == 1 / 61
    assert f"chrF2 up to {diagnosis.chance:.1f}" in diagnosis.definitions["hallucination"]


def test_the_chance_level_divides() -> None:
    right, dice = "uno due tre quattro cinque sei sette otto nove dieci", random.Random(5)
    wrong = "".join(dice.choice("kwzjhbgxy") if letter != " " else " " for letter in right)
    flagged = {}
    for shared in range(len(right)):
        hypothesis = right[:shared] + wrong[shared:]
        chrf = sacrebleu.sentence_chrf(hypothesis, [right]).score
        flagged[chrf] = "hallucination" in flags("a b c", hypothesis, right)
        assert flagged[chrf] == (chrf <= 20)
    assert max(score for score, flag in flagged.items() if flag) > 17
    assert min(score for score, flag in flagged.items() if not flag) < 23


@pytest.mark.parametrize(
    ("hypothesis", "flag"),
    [
        ("", ("empty",)),
        ("Boh quux pfft.", ()),  # three words are too few
        ("Boh quux pfft grr.", ("hallucination",)),
        ("Who knows her?", ("copy",)),
        ("Chi", ("short",)),
        ("Who knows them, and her?", ("copy",)),  # all words of the source
    ],
)
def test_other_flags_exclude_hallucination(hypothesis: str, flag: tuple[str, ...]) -> None:
    assert flags("Who knows her?", hypothesis, "Chi la conosce?") == flag


def test_the_beginning_of_a_long_reference_is_short_not_invented() -> None:
    reference = "Il gatto vede il cane che corre dietro alla palla rossa nel giardino della vecchia signora inglese"
    (sentence,) = diagnose(["x " * 20], ["Il gatto vede il"], [reference]).sentences
    assert sentence.chrf < 20
    assert sentence.flags == ("short",)


# ---- lengths, blank lines, flags of the search -----------------------------------------------------------------------


def test_lengths_are_in_characters_of_the_reference() -> None:
    assert flags("x y", "abcd", "ab") == ()  # twice as long, not more
    assert flags("x y", "abcde", "ab") == ("long",)
    assert flags("x y", "ab", "abcd") == ()
    assert flags("x y", " ab ", "abcde") == ("short",)
    diagnosis = diagnose(["x", "y"], ["abcd", ""], ["abc", "abcde"])
    assert diagnosis.length_ratio == 4 / 8
    assert [sentence.length_ratio for sentence in diagnosis.sentences] == [4 / 3, 0.0]


def test_blank_lines_are_counted_and_not_judged() -> None:
    diagnosis = diagnose(["a", "", " ", "b", "c"], ["u", "", "v", "w", ""], ["u", "", "", " ", "w"])
    assert (diagnosis.lines, diagnosis.blank_sources, diagnosis.blank_kept, diagnosis.blank_references) == (5, 2, 1, 1)
    assert [sentence.line for sentence in diagnosis.sentences] == [1, 5]
    assert diagnosis.rate("empty") == 1 / 2
    assert diagnosis.to_dict()["sentences"]["length_ratio"] == [1.0, None, None, None, 0.0]


def test_flags_of_the_search_are_taken_over() -> None:
    diagnosis = diagnose(
        SOURCES[:3], REFERENCES[:3], REFERENCES[:3], truncated=[True, False, True], retried=[True] + 2 * [False]
    )
    assert [sentence.flags for sentence in diagnosis.sentences] == [("cut", "retried"), (), ("cut",)]
    assert diagnosis.counts == {**dict.fromkeys(FLAGS, 0), "cut": 2, "retried": 1}


@pytest.mark.parametrize(
    "texts", [(["a"], [], ["a"]), (["a"], ["b"], ["a", "b"]), ([], ["b"], [])], ids=["none", "references", "sources"]
)
def test_lines_that_do_not_correspond_are_refused(texts: tuple[list[str], list[str], list[str]]) -> None:
    with pytest.raises(QkvError, match="give one for each source"):
        diagnose(*texts)
    with pytest.raises(QkvError, match="2 truncated"):
        diagnose(["a"], ["b"], ["c"], truncated=[True, False])


# ---- scores ----------------------------------------------------------------------------------------------------------

HYPOTHESES = [" ".join(reversed(r.split())) if i % 3 == 0 else r for i, r in enumerate(REFERENCES)]
MIXED = [f"{'Then ' * (i % 7)}{source}" for i, source in enumerate(SOURCES)]  # sources of seven lengths


def test_sentences_and_buckets_have_sacrebleus_scores() -> None:
    diagnosis = diagnose(MIXED, HYPOTHESES, REFERENCES)
    for sentence in diagnosis.sentences:
        assert sentence.chrf == pytest.approx(sacrebleu.sentence_chrf(sentence.hypothesis, [sentence.reference]).score)
    lengths = [len(words_of(source)) for source in MIXED]
    assert len(diagnosis.by_length) > 2
    for bucket in diagnosis.by_length:
        inside = [i for i, length in enumerate(lengths) if bucket.low <= length <= bucket.high]
        texts = [HYPOTHESES[i] for i in inside], [[REFERENCES[i] for i in inside]]
        assert bucket.sentences == len(inside) >= SMALLEST
        assert bucket.bleu == pytest.approx(sacrebleu.corpus_bleu(*texts).score)
        assert bucket.chrf == pytest.approx(sacrebleu.corpus_chrf(*texts).score)
    (whole,) = diagnose(["x"] * 60, HYPOTHESES, REFERENCES).by_length
    scores = metrics.score(HYPOTHESES, REFERENCES, bootstrap=0, ter=False)
    assert (whole.bleu, whole.chrf) == pytest.approx((scores.bleu.value, scores.chrf.value))
    assert (whole.low, whole.high, whole.name) == (1, 1, "1")


def test_the_worst_are_those_with_the_lowest_chrf() -> None:
    diagnosis = diagnose(SOURCES, HYPOTHESES, REFERENCES)
    scores = [sentence.chrf for sentence in diagnosis.ranked]
    assert scores == sorted(scores)
    assert len(scores) == 60
    values = diagnosis.to_dict()
    assert [each["line"] for each in values["worst"]] == [sentence.line for sentence in diagnosis.ranked[:10]]
    assert all(each["hypothesis"] == HYPOTHESES[each["line"] - 1] for each in values["worst"])


def test_perfect_translations_have_nothing_wrong() -> None:
    diagnosis = diagnose(SOURCES, REFERENCES, REFERENCES)
    assert sum(diagnosis.counts.values()) == 0
    assert (diagnosis.length_ratio, diagnosis.copied_words) == (1.0, 0.0)
    assert all((bucket.bleu, bucket.chrf) == pytest.approx((100, 100)) for bucket in diagnosis.by_length)


def test_every_flag_is_counted_in_a_bad_system() -> None:
    """Every tenth output is spoilt in each of four ways: exactly these are counted."""
    spoilt = list(REFERENCES)
    for i in range(0, 60, 10):
        spoilt[i], spoilt[i + 1], spoilt[i + 2] = "", SOURCES[i + 1], "il gatto " * 20
        spoilt[i + 3] = "Compriamo dodici biciclette nuove domani."
    diagnosis = diagnose(SOURCES, spoilt, REFERENCES)
    lines = diagnosis.to_dict()["flagged"]
    expected = {"empty": 1, "copy": 2, "loop": 3, "hallucination": 4}
    assert {flag: lines[flag] for flag in expected} == {
        flag: list(range(first, 60, 10)) for flag, first in expected.items()
    }
    assert all(diagnosis.rate(flag) == 6 / 60 for flag in expected)


# ---- properties of any text ------------------------------------------------------------------------------------------


def test_unicode_forms_do_not_change_the_diagnosis() -> None:
    texts = [
        ["Il caffè è già lì.", "Perché è qui?"],
        ["Il caffè è già lì.", "Ma perché è là?"],
        ["Là c'è il tè.", "Più."],
    ]
    nfc, nfd = ([[unicodedata.normalize(form, line) for line in side] for side in texts] for form in ("NFC", "NFD"))
    assert nfc != nfd
    assert diagnose(*nfd) == diagnose(nfc[0], nfd[1], nfc[2]) == diagnose(*nfc)


def facts(diagnosis: Diagnosis) -> Any:
    """Everything in a diagnosis but line numbers."""
    values = diagnosis.to_dict()
    values["flagged"] = values["sentences"] = None
    values["worst"] = [{**each, "line": None} for each in values["worst"]]
    ranked = [(s.source, s.hypothesis, s.flags, s.chrf) for s in diagnosis.ranked]
    return json.loads(json.dumps(values)), ranked


def test_the_order_of_lines_does_not_matter() -> None:
    spoilt = ["", SOURCES[1], "il gatto " * 20, REFERENCES[9], *HYPOTHESES[4:]]
    order = random.Random(2).sample(range(60), 60)
    moved = [[side[i] for i in order] for side in (MIXED, spoilt, REFERENCES)]
    first, other = diagnose(MIXED, spoilt, REFERENCES), diagnose(*moved)
    assert facts(first) == facts(other)
    assert [other.sentences[order.index(i)].flags for i in range(60)] == [s.flags for s in first.sentences]


TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", " ", "a a a a a a a a", "the cat", "il gatto vede Anna oggi", "我喜欢猫"]),
)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=40))
def test_rates_are_shares_and_buckets_hold_everything_once(rows: list[tuple[str, str, str]]) -> None:
    sides = [list(side) for side in zip(*rows, strict=True)] or [[], [], []]
    diagnosis = diagnose(*sides)
    values = json.loads(json.dumps(diagnosis.to_dict()))
    assert list(values["rates"]) == list(values["definitions"]) == list(values["counts"]) == FLAGS
    assert all(0 <= rate <= 1 for rate in values["rates"].values())
    assert 0 <= values["copied_words"] <= 1
    assert all(0 <= sentence.copied <= 1 and 0 <= sentence.chrf <= 100 for sentence in diagnosis.sentences)
    assert sum(bucket.sentences for bucket in diagnosis.by_length) == len(diagnosis.sentences)
    assert diagnosis.lines == diagnosis.blank_sources + diagnosis.blank_references + len(diagnosis.sentences)
    assert {flag: len(values["flagged"][flag]) for flag in FLAGS} == diagnosis.counts
    for sentence in diagnosis.sentences:
        assert not {"empty", "loop", "copy", "short"} & set(sentence.flags) or "hallucination" not in sentence.flags
        assert set(sentence.flags) == {"empty"} or "empty" not in sentence.flags


@given(st.lists(st.integers(0, 30), max_size=200))
def test_length_ranges_partition_the_lengths(lengths: list[int]) -> None:
    ranges = length_ranges(lengths)
    assert len(ranges) <= BUCKETS
    held = [sum(low <= length <= high for length in lengths) for low, high in ranges]
    assert sum(held) == len(lengths)
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))
    assert all(low in lengths and high in lengths for low, high in ranges)
    assert len(ranges) <= 1 or min(held) >= SMALLEST


def test_lengths_that_are_spread_evenly_fill_all_buckets() -> None:
    ranges = length_ranges([length for length in range(1, 61) for _ in range(5)])
    assert ranges == [(1, 10), (11, 20), (21, 30), (31, 40), (41, 50), (51, 60)]
    counts = Counter(dict.fromkeys(range(1, 7), 9))
    assert [low for low, _ in length_ranges(list(counts.elements()))] == [1, 3, 5]  # nine are too few for a bucket


def test_the_printed_lines_state_their_definitions() -> None:
    diagnosis = diagnose(SOURCES, ["", *HYPOTHESES[1:-1], REFERENCES[-1] * 3], REFERENCES)
    text = str(diagnosis)
    assert "length ratio = " in text
    for flag in FLAGS:
        shown = f"({diagnosis.counts[flag]:,})  {diagnosis.definitions[flag]}" in text
        assert shown == (flag in ("empty", "loop", "hallucination", "copy", "long"))
    assert f"line {diagnosis.ranked[0].line}: {diagnosis.ranked[0].chrf:.1f}" in text
    assert all(f"({bucket.sentences:,})" in text for bucket in diagnosis.by_length)
    assert "none" in str(diagnose([], [], []))
