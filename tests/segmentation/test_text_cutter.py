"""Texts are cut like the lines of the training text, around their protected texts, in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.segmentation.protected_text import find_protected
from qkv.segmentation.special_spaces import unwrapped
from qkv.segmentation.text_cutter import SHORTEST, LineStatistics, TextCutter

PARTS = [
    *("Tom goes home. ", "Is it 3.5 km? ", "and then", " ", "\n", "\r", "\r\n", "\u00a0", "\u200b", "\u2028", "日本。"),
    *("{name}", "%s", "`a b`", "http://x.org/a?b. ", "<b>", "</b>", "`a\nb`", "שלום. ", "👩\u200d🚀", "e\u0301", "..."),
]
texts = st.lists(st.sampled_from(PARTS), max_size=20).map("".join)


def encode(text: str) -> range:
    return range(len(re.findall(r"\w{1,4}|\S", text)))


def cutter(longest: int = 40, statistics: LineStatistics | None = None) -> TextCutter:
    return TextCutter(encode, longest, "en", statistics)


@given(
    texts,
    st.integers(3, 40),
    st.booleans(),
    st.sampled_from(["join", "keep"]),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=4),
)
def test_pieces_tile_and_keep_every_protected_text(
    text: str, longest: int, sentences: bool, newlines: str, pairs: list[tuple[int, int]]
) -> None:
    given_spans = [(min(pair), max(pair)) for pair in pairs if max(pair) <= len(text)]
    cut = cutter(longest).cut(text, sentences=sentences, newlines=newlines, protected=given_spans)
    assert cut.pieces.join(cut.pieces.pieces) == text
    assert [begin for begin, _ in cut.spans] + [len(text)] == [0, *(end for _, end in cut.spans)] or not cut.pieces
    assert list(cut.sources) == [unwrapped(piece) for piece in cut.pieces]
    letters = "".join(text for own in cut.protected if own is not None for text in own.texts)
    wanted = "".join(text[begin:end] for begin, end in find_protected(text, given_spans))
    assert "".join(letters.split()) == "".join(wanted.split())


def test_protected_text_is_measured_as_one_letter_and_never_divided() -> None:
    link = f'<a href="http://x.org/{"a. B" * 60}">'
    text = f"Tom reads {link}a good book</a>. He sleeps."
    cut = TextCutter(encode, 400, "en", LineStatistics({"1": 1.0}, 10, 100)).cut(text)
    assert list(cut.pieces) == [f"Tom reads {link}a good book</a>.", "He sleeps."]
    assert [own.texts if own else [] for own in cut.protected] == [[link, "</a>"], []]


@pytest.mark.parametrize("span", [(3, 4), (12, 18), (15, 17)])
def test_a_given_span_may_touch_white_space(span: tuple[int, int]) -> None:
    cut = cutter().cut("Tom is here and  \n  sees a dog.", protected=[span])
    assert cut.sources == ("Tom is here and sees a dog.",)


def test_a_protected_text_of_several_lines_that_does_not_fit_is_cut() -> None:
    text = "Tom goes home.\nTom goes home again."
    cut = cutter(3).cut(text, newlines="keep", protected=[(0, len(text))])
    assert "".join("".join(cut.pieces).split()) == "".join(text.split())
    assert [own.texts if own else [] for own in cut.protected] == [[piece] for piece in cut.pieces]


def test_a_divided_protected_text_of_several_lines_is_found_in_each_part() -> None:
    text = "a b c d e f\ng h i j k l m n"
    for longest in range(1, 12):
        for begin in range(0, len(text), 3):
            cut = cutter(longest).cut(text, protected=[(begin, len(text))])
            assert cut.pieces.join(cut.pieces.pieces) == text
            assert all(own is None or all(own.texts) for own in cut.protected)


def test_half_of_a_character_is_refused() -> None:
    for text in ("a\ud800", "One. Two \udfff. Three."):
        with pytest.raises(UsageError, match="half of a character"):
            cutter().cut(text)


def test_newlines_is_keep_or_join() -> None:
    wrapped = "My friend buys\na book."
    assert cutter().cut(wrapped).sources == ("My friend buys a book.",)
    assert cutter().cut(wrapped, newlines="keep").sources == ("My friend buys", "a book.")
    with pytest.raises(UsageError, match="must be join or keep"):
        cutter().cut(wrapped, newlines="drop")


def test_the_training_text_says_how_many_sentences_a_piece_has() -> None:
    paragraphs = ["One cat. Two cats. Three cats."] * 19 + ["One cat."]
    statistics = LineStatistics.of(paragraphs, 12, "en")
    assert statistics.sentences == {"1": 0.05, "3": 0.95}
    assert (statistics.usual, LineStatistics.of(["One cat."], 3, "en").usual) == (3, 1)
    assert LineStatistics.read(statistics.to_dict()) == statistics
    text = "The cats run. The dogs see. The birds fly. The fish swim."
    assert list(cutter(400, statistics).cut(text).pieces) == [
        "The cats run. The dogs see. The birds fly.",
        "The fish swim.",
    ]
    assert list(cutter().cut(text).pieces) == text.replace(". ", ".|").split("|")
    assert list(cutter().cut(text, sentences=False).pieces) == [text]
    long = "word " * 3 * SHORTEST
    assert len(cutter(400, statistics).cut(long).pieces) >= 3
    assert len(cutter(400, statistics).cut(long, sentences=False).pieces) == 1


@pytest.mark.parametrize("plain", [None, 3, {}, {"sentences": 1}, {"sentences": {"a": 1}, "tokens": 1, "lines": 1}])
def test_statistics_that_a_folder_does_not_hold_are_none(plain: object) -> None:
    assert LineStatistics.read(plain) is None


@pytest.mark.parametrize(
    "unit", ["Tom went home and {name} did. ", "<", "`", "$x", "{", "a@", "a-", "a\r", "a\n", ". "]
)
@pytest.mark.parametrize("sentences", [True, False])
def test_ten_times_the_text_is_ten_times_the_work(unit: str, sentences: bool) -> None:
    assert _work(unit, 50_000, sentences) <= 12 * _work(unit, 5_000, sentences)


def _work(unit: str, size: int, sentences: bool) -> int:
    """Count the characters that are encoded to cut a text."""
    encoded = 0

    def counted(text: str) -> range:
        nonlocal encoded
        encoded += len(text)
        return range(len(text))

    text = (unit * (size // len(unit) + 1))[:size]
    cut = TextCutter(counted, 256, "en").cut(text, sentences=sentences)
    assert cut.pieces.join(cut.pieces.pieces) == text
    return encoded
