"""Inputs are cut at sentence borders and other good places, and joined exactly, for any text."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import QkvError
from qkv.segmentation.sentences import Pieces, split


def characters(limit: int) -> Callable[[str], bool]:
    return lambda piece: len(piece) <= limit


def words(limit: int) -> Callable[[str], bool]:
    return lambda piece: len(piece.split()) <= limit


def borders(language: str, text: str, *expected: str) -> None:
    """The text is cut into exactly the expected sentences, or not at all."""
    assert list(split(text, lambda piece: True, sentences=1, language=language)) == list(expected)
    assert list(split(text, lambda piece: True)) == [text]


# Text rich in marks and abbreviations; st.text() alone would almost never make a sentence.
WORDS = ["Hi", "there", "Dr", "z.B", "3.5", "x" * 30, "日本", "é", "e\u0301", "👩\u200d🚀"]
MARKS = [*".!?…,;:–。、！()«”", '"', " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028"]
texts = st.one_of(st.text(), st.lists(st.sampled_from(WORDS + MARKS)).map("".join))


@given(texts, st.integers(0, 40))
def test_pieces_and_separators_are_the_text(text: str, limit: int) -> None:
    for fits in (characters(limit), words(limit)):
        cut = split(text, fits)
        assert cut.join(cut.pieces) == text
        assert len(cut.separators) == len(cut.pieces) + 1
        assert all(not gap or gap.isspace() for gap in cut.separators)
        assert all(piece and piece == piece.strip() for piece in cut)


@given(texts, st.integers(0, 40))
def test_sentences_and_separators_are_the_text(text: str, limit: int) -> None:
    for fits in (characters(limit), characters(10**6)):
        cut = split(text, fits, sentences=1)
        assert cut.join(cut.pieces) == text
        assert all(piece and piece == piece.strip() for piece in cut)
        assert all(len(piece) <= max(limit, 1) or fits(piece) for piece in cut)


@pytest.mark.parametrize(
    "expected",
    [
        ["The cat sleeps.", "The dog eats!", "My friend buys a book."],
        ["Dr. Smith came at 3.5 p.m. and left.", "He said: “Stop!”", "Then he went.", "No"],
        ["你好。", "再见！", "好"],
        ["Hello. ?"],
        ["What ?! ...", "No."],
        ["a ? ! .", "B ?"],
        [". . ."],
        ["1. Open it.", "2. Close it."],
    ],
)
def test_every_sentence_is_a_piece(expected: list[str]) -> None:
    """Marks alone are no sentence; a line break is always a border."""
    gap = "" if expected[0].endswith("。") else " "
    assert list(split(gap.join(expected), lambda piece: True, sentences=1)) == expected
    assert list(split(gap.join(expected), lambda piece: True)) == [gap.join(expected)]
    twice = split("\n".join([gap.join(expected)] * 2), lambda piece: True, sentences=1)
    assert list(twice) == expected * 2


def test_a_long_token_is_not_cut_inside_a_span_that_fits() -> None:
    text = "x" * 20 + "`a b`" + "y" * 9
    assert split(text, lambda piece: len(piece) <= 22, whole=[(20, 25)]).pieces == ("x" * 20, "`a b`" + "y" * 9)
    assert split(text, lambda piece: len(piece) <= 4, whole=[(20, 25)]).pieces[5:7] == ("`a b", "`yyy")


def test_a_long_sentence_is_cut_and_the_others_stay_whole() -> None:
    cut = split("Go. One two, three four five. Stop. No.", words(3), sentences=1)
    assert list(cut) == ["Go.", "One two,", "three four five.", "Stop.", "No."]


@given(texts, st.integers(0, 40))
def test_every_piece_fits(text: str, limit: int) -> None:
    assert all(len(piece) <= max(limit, 1) for piece in split(text, characters(limit)))


@given(texts, st.integers(1, 40))
def test_pieces_fit_even_if_longer_text_sometimes_needs_fewer_tokens(text: str, limit: int) -> None:
    # Subwords are not monotone: "hell" may be two tokens and "hello" one. A made-up predicate exaggerates that.
    def fits(piece: str) -> bool:
        return len(piece) + (len(piece) * 7 + len(text)) % 5 <= limit

    cut = split(text, fits)
    assert cut.join(cut.pieces) == text
    assert all(fits(piece) or len(piece) == 1 for piece in cut)


@given(
    st.lists(st.sampled_from(["One two.", "Three?", "Four five six!", "Seven “eight.”"]), min_size=1),
    st.integers(3, 12),
)
def test_whole_sentences_are_packed_greedily(parts: list[str], limit: int) -> None:
    pieces = split(" ".join(parts), words(limit)).pieces
    fits = words(limit)
    expected: list[str] = []
    for part in parts:
        if expected and fits(f"{expected[-1]} {part}"):
            expected[-1] += f" {part}"
        else:
            expected.append(part)
    assert list(pieces) == expected


def test_sentences_before_clauses_before_spaces_before_windows() -> None:
    assert split("One two, three. Four five.", characters(20)).pieces == ("One two, three.", "Four five.")
    assert split("One two three, four five six.", characters(20)).pieces == ("One two three,", "four five six.")
    assert split("one two three four five", characters(10)).pieces == ("one two", "three four", "five")
    assert split("abcdefghij klm", characters(4)).pieces == ("abcd", "efgh", "ij", "klm")


def test_a_long_sentence_does_not_spoil_its_neighbours() -> None:
    cut = split("Yes. One two three four five. No. Me too.", characters(12))
    assert cut.pieces == ("Yes.", "One two", "three four", "five.", "No. Me too.")


@pytest.mark.parametrize(
    "expected",
    [
        ("en", "He left.", "She stayed."),
        ("en", "Dr. Smith met Prof. Jones.", "They ate."),
        ("en", "It costs 3.5 dollars.", "It is cheap."),
        ("en", "Well... maybe not.", "Yes!"),
        ("en", "He said “no.”", "She said yes.", "Then?!", '"Nothing."'),
        ("en", "See example.de.", "Write to info@example.de.", "Fine."),
        ("en", "It ended in 1999.", "Then came 2000."),
        ("en", "See fig. 3 and e.g. this one.", "I said so.", "Fine."),
        ("en", "He lives in the U.S. with us.", "Good."),
        ("en", "Use README.Md now.", "The file is there."),
        ("en", "He told me.", "Tom said “no.”", "I was ill.", "Open the window."),
        ("en", "See no. 5 and ill. 3.", "Fine."),
        ("de", "Er sah mich.", "Tom kam, weil er das mag.", "Ich nicht."),
        ("en", "1. Open it.", "2. Close it."),
        ("de", "Das ist z. B. Brot.", "Und Salz."),
        ("de-AT", "Am 3. Mai war es warm.", "Dann nicht."),
        ("de_CH", "Er sagte: „Ja.“", "Dann ging er."),
        ("fr", "C’est M. Dupont.", "Il dit : « Oui ! »", "Puis il part."),
        ("it", "Il sig. Rossi è qui.", "Ciao."),
        ("es", "¿Qué?", "¡Ya!", "El Sr. Paz lo vio."),
        ("el", "Τι κάνεις;", "Καλά."),
        ("ru", "Он ушёл.", "Она осталась!"),
        ("ar", "مرحبا.", "كيف حالك؟", "أنا بخير."),
        ("hi", "यह है।", "वह था।"),
        ("xx", "Hello there.", "Bye."),
    ],
)
def test_sentence_borders(expected: tuple[str, ...]) -> None:
    language, *sentences = expected
    borders(language, " ".join(sentences), *sentences)


def test_scripts_without_spaces() -> None:
    borders("zh", "你好。「你好吗？」我很好！", "你好。", "「你好吗？」", "我很好！")
    cut = split("你好。你好吗？", characters(4))
    assert cut.join(["Hello.", "How are you?"], spaces=True) == "Hello. How are you?"
    assert cut.join(cut.pieces) == "你好。你好吗？"
    endless = split("abcdef", characters(3))
    assert endless.join(endless.pieces, spaces=True) == "abcdef"


def test_white_space_is_put_back() -> None:
    cut = split("\u00a0 One.\t\tTwo.\n\n  Three.\r\n", characters(6))
    assert cut == Pieces(("One.", "Two.", "Three."), ("\u00a0 ", "\t\t", "\n\n  ", "\r\n"))
    assert cut.join(["Uno.", "Due.", "Tre."]) == "\u00a0 Uno.\t\tDue.\n\n  Tre.\r\n"


def test_a_line_break_always_ends_a_piece() -> None:
    assert split("a title\nOne. Two.", lambda piece: True).pieces == ("a title", "One. Two.")


@pytest.mark.parametrize("text", ["", " ", "\n \t"])
def test_white_space_alone_has_no_pieces(text: str) -> None:
    def never(piece: str) -> bool:
        raise AssertionError("called without a piece")

    assert split(text, never) == Pieces((), (text,))


def test_a_letter_keeps_its_accents() -> None:
    pieces = split("e\u0301" * 9, characters(3)).pieces
    assert set(pieces) == {"e\u0301"}
    assert split("a" + "\u0301" * 50, characters(3)).join(["x"] * 17) == "x" * 17  # accents without end are cut


def test_each_piece_needs_one_translation() -> None:
    with pytest.raises(QkvError, match="1 translations for 2 pieces"):
        split("One. Two.", characters(5)).join(["Uno."])


@pytest.mark.parametrize(
    "unit",
    [
        "x",
        ". ",
        '."',
        "One two, three four. ",
        "a" + " " * 999,
        "a\n",
        "。",
        "e\u0301",
        "Dr. " * 9 + "Oh, ",
        "x" * 5000 + ". Hi. ",
    ],
)
@pytest.mark.parametrize("sentences", [0, 1])
def test_a_million_characters_are_cut_with_few_calls(unit: str, sentences: int) -> None:
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    limit = 500
    calls = read = 0

    def fits(piece: str) -> bool:
        nonlocal calls, read
        calls += 1
        read += len(piece)
        return len(piece) <= limit

    cut = split(text, fits, sentences=sentences)
    assert cut.join(cut.pieces) == text
    assert calls <= (len(cut) + 1) * 2 * math.log2(limit)
    assert read <= 12 * len(text)


@pytest.mark.parametrize("unit", ["a b c, ", "x" * 999 + " ", "x", "e\u0301"])
def test_a_long_sentence_is_cut_block_by_block(unit: str) -> None:
    """The borders of a whole megabyte are never in memory together, and nothing is lost where blocks meet."""
    text = unit * (500_000 // len(unit))
    span = (200_000, 200_300)
    cut = split(text, characters(400), sentences=1, whole=[span])
    assert cut.join(cut.pieces) == text
    assert max(map(len, cut)) <= 400
    assert not any(span[0] < begin < span[1] for begin in cut.begins)
