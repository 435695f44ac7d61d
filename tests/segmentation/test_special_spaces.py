"""The model reads plain spaces; a translation gets the special ones back between the same neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.segmentation.special_spaces import DROPPED, SPECIAL, plain, restore, unwrapped

texts = st.text(st.sampled_from([*SPECIAL, *DROPPED, *"ab1 .,!"]), max_size=40)


@pytest.mark.parametrize("space", SPECIAL)
def test_special_spaces_are_read_as_spaces_and_come_back(space: str) -> None:
    assert plain(f"It is 10{space}km.") == ("It is 10 km.", 0)
    assert restore(f"It is 10{space}km.", "Sono 10 km.") == f"Sono 10{space}km."
    assert restore(f"It is 10{space}km.", "Sono 10 miglia.") == "Sono 10 miglia."
    assert restore(f"It is 10{space}km.", "Sono 110 km e 10 kmh.") == "Sono 110 km e 10 kmh."


@pytest.mark.parametrize("mark", DROPPED)
def test_invisible_marks_are_dropped_and_counted(mark: str) -> None:
    assert plain(f"It{mark} is{mark}") == ("It is", 2)
    assert restore(f"10\u00a0{mark}km", "10 km") == "10\u00a0km"


@given(texts)
def test_a_copy_comes_back_with_its_spaces(text: str) -> None:
    read, dropped = plain(text)
    assert len(read) + dropped == len(text)
    assert not any(space in read for space in SPECIAL + DROPPED)
    restored = restore(text, read)
    assert restored.translate(dict.fromkeys(map(ord, SPECIAL), " ")) == read


@given(texts, texts)
def test_only_spaces_of_a_translation_change(source: str, output: str) -> None:
    restored = restore(source, output)
    assert len(restored) == len(output)
    assert all(old == new or (old == " " and new in SPECIAL) for old, new in zip(output, restored, strict=True))


def test_each_space_comes_back_in_its_turn() -> None:
    assert restore("10\u00a0km and 10\u202fkm", "10 km e 10 km") == "10\u00a0km e 10\u202fkm"
    assert restore("10\u00a0km, 5\u202fm", "5 m, 10 km") == "5\u202fm, 10\u00a0km"
    assert restore("Ah\u00a0!", "Oh !") == "Oh !"
    assert restore("Ah\u00a0!", "Ah !") == "Ah\u00a0!"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", " \n\t", "\n\n"])
def test_lines_become_one(end: str) -> None:
    assert unwrapped(f"My friend buys{end}a book.") == "My friend buys a book."
