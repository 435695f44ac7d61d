"""Protected text is found, replaced by stand-ins, and put back as often as the source has it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.segmentation.protected_text import Protected, find_protected, without_protected

TEXTS = [
    *("%s", "%(name)s", "%1$s", "%100$s", "{name}", "{{name}}", "{}", "${x}", "$x$", "&amp;", "&#160;"),
    *('<x id="1"/>', "<b>", "</b>", "`ls -l`", "http://x.org", "http://x.org/faq?a=b", "www.x.org", "me@x.org"),
]
WORDS = ["the", "cat", "Tom", "a", ",", ".", "10", "%", "<", "{", "日本", "é"]
STAND_INS = [f"Name{letter}" for letter in "abcdefghijkl"]
sources = st.lists(st.sampled_from(TEXTS + WORDS), max_size=12).map(" ".join)
translations = st.lists(st.sampled_from(TEXTS + WORDS + STAND_INS), max_size=20).map(" ".join)


def of(text: str, spans: list[tuple[int, int]] | None = None) -> Protected:
    return Protected(text, tuple(find_protected(text, spans or ())))


@pytest.mark.parametrize("text", TEXTS)
def test_protected_text_is_found(text: str) -> None:
    assert of(f"Say {text} now").texts == [text]
    assert without_protected(f"Say {text} now") == "Say X now"


@pytest.mark.parametrize("text", ["100 % sure", "50%off", "3 < 4 > 2", "a & b;", "$5 and $6", "a@b", "`a\rb`", "{ }"])
def test_other_text_is_not(text: str) -> None:
    assert find_protected(text) == []


def test_marks_after_a_url_belong_to_the_sentence() -> None:
    assert of("See http://x.org/a_(b), or (www.x.org).").texts == ["http://x.org/a_(b)", "www.x.org"]
    assert of("{at http://x.org/{id}, [http://[::1]]}").texts == ["http://x.org/{id}", "http://[::1]"]


@given(st.text("%{}$<>&;@`/:.aw 1#s!\n\r", max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))))
def test_spans_are_in_order_inside_the_text_and_apart(text: str, given_spans: list[tuple[int, int]]) -> None:
    spans = [(min(pair), max(pair)) for pair in given_spans if max(pair) <= len(text)]
    found = find_protected(text, spans)
    edges = [edge for span in found for edge in span]
    assert edges == sorted(edges)
    for begin, end in found:
        assert text[begin:end] == text[begin:end].strip() != ""
    for begin, end in spans:
        for at in range(begin, end):
            assert text[at].isspace() or any(first <= at < last for first, last in found)


@pytest.mark.parametrize("spans", [[[1]], [("a", 2)], [3], [(0.5, 2)], [(1, 2, 3)]])
def test_what_is_no_span_is_refused(spans: Any) -> None:
    with pytest.raises(UsageError, match=r"protected: not spans of characters: give pairs"):
        find_protected("text", spans)


@pytest.mark.parametrize("span", [(-1, 3), (2, 9), (3, 2)])
def test_a_span_outside_the_text_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"protected span \(.*\): not inside the text of 4 characters"):
        find_protected("Text", [span])


def test_given_spans_that_overlap_become_one_and_blank_ones_are_dropped() -> None:
    assert find_protected("one two three", [(8, 13), (0, 7), (4, 10), (3, 4), (5, 5)]) == [(0, 13)]
    assert find_protected("one two three", [(3, 4), (7, 7), (3, 8)]) == [(4, 7)]


@given(sources)
def test_stand_ins_come_back_as_the_texts(source: str) -> None:
    protected = of(source)
    substituted = protected.stand_in(STAND_INS)
    assert substituted is not None
    assert protected.put_back(*substituted) == source
    assert not protected.missing(source)


@given(sources, translations)
def test_a_translation_with_each_stand_in_once_has_every_text(source: str, translation: str) -> None:
    protected = of(source)
    _, words = protected.stand_in(STAND_INS) or ("", [])
    result = protected.put_back(translation, words)
    assert (result is None) == any(translation.split().count(word) != 1 for word in words)
    if result is not None and not any(text in translation for text in protected.texts):
        assert not protected.missing(result)


@given(sources, translations)
def test_repair_gives_each_text_as_often_as_the_source(source: str, translation: str) -> None:
    protected = of(source)
    repaired = protected.repair(translation)
    assert protected.missing(repaired) == []
    assert all(repaired.count(text) >= protected.texts.count(text) for text in protected.texts)
    if not protected.missing(translation):
        assert repaired == translation


def test_a_text_that_is_part_of_another_is_neither_missing_nor_removed() -> None:
    for text in ("See http://x.org and http://x.org/faq now", "Give {a} and {{a}} now", "%s or %(b)s or `%s`"):
        assert of(text).missing(text) == []
        assert of(text).repair(text) == text


def test_repair_does_not_divide_another_protected_text() -> None:
    assert of("Run %s `ls -l` now").repair("`ls -l` ora") == "%s `ls -l` ora"


def test_a_word_protected_in_one_place_may_stand_elsewhere() -> None:
    protected = of("Will will go", [(0, 4)])
    assert protected.missing("Will geht") == []
    assert protected.missing("Wills Haus") == ["Will"]
    assert protected.repair("Wills Haus") == "Will Wills Haus"
    assert of("Tom and Tom", [(0, 3)]).repair("Tom und Tom") == "Tom und Tom"


def test_text_beside_letters_stays_beside_letters() -> None:
    protected = of("the {name}s go")
    assert protected.stand_in(["Tom"]) == ("the Tom s go", ["Tom"])
    assert protected.put_back("i Tom s vanno", ["Tom"]) == "i {name}s vanno"


def test_too_few_stand_ins_are_none() -> None:
    assert of("%s and {a}").stand_in(["Tom"]) is None
    assert of("tom, %s").stand_in(["Tom"]) is None


@pytest.mark.parametrize(("text", "words"), [("%s, {a}!", False), ("`x y` 5", True), ("a%", True)])
def test_words_around_protected_text(text: str, words: bool) -> None:
    assert of(text).words_around == words


def test_hundreds_of_texts() -> None:
    source = " ".join(f"{{name{i}}}" for i in range(300)) + " end"
    protected = of(source)
    assert len(protected.spans) == 300
    assert protected.missing(protected.repair("fine")) == []
