"""Plain text as a document: paragraphs, lists, tables, blocks of a long text."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.documents import read_document
from qkv.documents.plain_text import read_blocks


def segments(text: str) -> list[str]:
    document = read_document("a.txt", text.encode())
    assert document.build(document.segments) == text.encode()
    return document.segments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("My friend buys\na book.", ["My friend buys a book."]),
        ("My friend buys\r\na book.\r\n", ["My friend buys a book."]),
        ("One cat.\nTwo dogs.\n", ["One cat.", "Two dogs."]),
        ("apples\npears\nmilk\n", ["apples", "pears", "milk"]),
        ("Chapter one\nIt was a dark and stormy\nnight.\n", ["Chapter one", "It was a dark and stormy night."]),
        (
            "- an item that goes\n  on in this line\n  and here.\n- another one.\n",
            ["- an item that goes on in this line and here.", "- another one."],
        ),
        (
            "A paragraph of lines that are long enough\nto be wrapped, without a full stop at the end",
            ["A paragraph of lines that are long enough to be wrapped, without a full stop at the end"],
        ),
        ("one\ttwo  \t three    four\n", ["one", "two", "three", "four"]),
        ("これは小さい\n猫です。\n", ["これは小さい猫です。"]),
        ("First half of it\n\nsecond half of it.\n", ["First half of it", "second half of it."]),
        ("A question that is:\n- yes or no.\n", ["A question that is:", "- yes or no."]),
        ("  \n\n - \n***\n", []),
        ("", []),
    ],
)
def test_paragraphs(text: str, expected: list[str]) -> None:
    assert segments(text) == expected


def test_a_translation_is_wrapped_at_the_width_of_its_paragraph() -> None:
    text = "  My friend buys\n    a small book.\n\n\tA line.\n"
    document = read_document("a.txt", text.encode())
    assert document.segments == ["My friend buys a small book.", "A line."]
    changed = document.build(["Il mio amico compra un libro molto piccolo.", "Una riga molto lunga."])
    assert changed == (b"  Il mio amico\n    compra un\n    libro molto\n    piccolo.\n\n\tUna riga molto lunga.\n")


WORDS = st.sampled_from(["a", "word", "longer", "end.", "why?", "-", "1.", "été", "Wort"])
LINES = st.lists(WORDS, max_size=6).map(" ".join)


@given(st.lists(LINES, max_size=9), st.sampled_from(["\n", "\r\n"]))
def test_a_paragraph_of_short_lines_keeps_them_if_no_word_changes_its_length(lines: list[str], newline: str) -> None:
    text = newline.join(lines)
    document = read_document("a.txt", text.encode())
    assert document.build(document.segments) == text.encode()
    swapped = document.build([segment.swapcase() for segment in document.segments])
    assert swapped.decode() == text.swapcase()


@given(st.text(), st.integers(1, 9))
def test_any_text_is_rebuilt_from_blocks(text: str, size: int) -> None:
    data = text.encode("utf-8", "ignore").replace(b"\0", b"\n")
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    documents = list(read_blocks("a.txt", parts, size=size))
    assert b"".join(document.build(document.segments) for document in documents) == data
    assert [s for document in documents for s in document.segments] == segments(data.decode()) or len(documents) > 1


def test_a_long_text_is_read_in_blocks_that_end_with_a_paragraph() -> None:
    given = 0

    def parts() -> Iterator[bytes]:
        nonlocal given
        for _ in range(20):
            given += 1
            yield b"One line of\ntext.\n\n" * 100 + b"The next\n"

    for number, document in enumerate(read_blocks("a.txt", parts(), size=1000), 1):
        assert given <= number + 1  # so no more than two parts are in memory
        assert set(document.segments) <= {"One line of text.", "The next One line of text.", "The next"}
    assert given == 20


def test_a_bad_byte_is_found_by_its_line_in_the_whole_text() -> None:
    parts = [b"one\n\ntwo\n\n", b"three\n\n", b"four\xff\n"]
    with pytest.raises(UsageError, match=r"^a.txt, line 7: not UTF-8"):
        list(read_blocks("a.txt", parts, size=1))
    with pytest.raises(UsageError, match=r"^a.txt: contains NUL characters"):
        list(read_blocks("a.txt", [b"one\n", b"\0"], size=1))


@pytest.mark.parametrize(
    "unit", ["word ", "word", "a\n", "a line of words\n", "\t", "   ", "a\t", "。", "猫\n", "\n", "\r", "1", "*"]
)
def test_time_is_linear(unit: str) -> None:
    def seconds(count: int) -> float:
        data = (unit * count + "end\nof it").encode()
        times = []
        for _ in range(2):
            begin = time.process_time()
            document = read_document("a.txt", data)
            document.build([segment[::-1] for segment in document.segments])
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(10_000) < 12 * seconds(1_000) + 0.5
