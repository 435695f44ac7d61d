"""Texts of any shape come back whole: spans tile, protected text is there, and nothing odd stops the translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qkv.api.translation import Translation
from qkv.api.translator import Translator
from qkv.core.errors import UsageError

TWO = "One cat runs. Two dogs see the house."


def tiled(text: str, found: Translation) -> bool:
    sides = [(text, [piece.source for piece in found.pieces]), (found.text, [piece.target for piece in found.pieces])]
    return all(
        [begin for begin, _ in spans] + [len(whole)] == [0, *(end for _, end in spans)] for whole, spans in sides
    )


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (TWO * 20, {}),
        ("cat" * 400, {}),
        (TWO.replace(" ", "\u00a0"), {}),
        ("\u200b" + TWO + "\u200b \u200b", {}),
        ("One cat.\r\n\r\nTwo dogs.\r\n", {}),
        ("One cat.\rTwo dogs.\u2028Red.\u0085Big.", {}),
        ("One cat sees\nthe dog.", {"newlines": "join"}),
        ("One cat sees\nthe dog.", {"newlines": "keep"}),
        ("שלום עולם. One cat. 你好。مرحبا؟ 👩\u200d🚀!", {}),
        (TWO, {"n_best": 4, "beam": 4}),
        (TWO, {"sample": True, "seed": 1, "n_best": 2}),
        ("One cat sees {name}. Two dogs.", {"sample": True, "seed": 1}),
        ("One {name} sees %s.", {"prefix": "Uno"}),
        ("One {name} sees %s.", {"must_include": ["gatto", "%s"]}),
        ("One {name} sees %s.", {"groups": 2, "beam": 2}),
        ("One {name} sees %s.", {"max_length": 2}),
        (TWO, {"protected": [[(4, 20), (0, 7), (3, 4)]]}),
        (" ".join(f"{{n{i}}}" for i in range(200)) + " cat", {"beam": 1}),
    ],
)
def test_a_text_comes_back_whole(translator: Translator, text: str, options: dict[str, Any]) -> None:
    found = translator.translate(text, **options)
    assert tiled(text, found)
    for placeholder in ["{name}", "%s", *(f"{{n{i}}}" for i in range(200))]:
        assert found.text.count(placeholder) == text.count(placeholder)


@pytest.mark.parametrize("text", ["... !!!", "%s", "{a}, `b c`!", "\u200b\ufeff", "\u00a0\u202f", "\u2028", "🎉🎉"])
def test_text_without_words_comes_back_unchanged(translator: Translator, text: str) -> None:
    found = translator.translate(text)
    assert (found.text, found.finish_reason) == (text, "blank")
    assert tiled(text, found)


def test_the_pieces_of_a_long_text_are_all_translated(translator: Translator) -> None:
    found = translator.translate(f"{TWO} " * 500, beam=1)
    assert len(found.pieces) == 1000
    assert found.text.count("Uno gatto corre.") == 500


def test_every_text_is_counted(translator: Translator) -> None:
    done: list[int] = []
    translator.translate(["\u200b", "One cat.", "...", "", "%s"], progress=done.append)
    assert sum(done) == 5


@pytest.mark.parametrize(
    ("spans", "problem"),
    [([[(3, 99)]], "not inside the text"), ([[(-2, 3)]], "not inside the text"), ([[], []], "2 lists for 1 texts")],
)
def test_spans_that_do_not_fit_are_refused(translator: Translator, spans: Sequence[Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        translator.translate(TWO, protected=spans)
