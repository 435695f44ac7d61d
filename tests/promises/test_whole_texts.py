"""A text of several sentences comes back whole: sentence by sentence, and as good as the sentences alone.

The benchmark measures this with a larger model on real text: `benchmarks/whole_texts.py`.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

import qkv
from conftest import Call, sentences
from qkv.api.omission import Checks
from qkv.api.run_limits import LEAST_LINES
from qkv.api.run_limits import measure as measure_limits
from qkv.api.translation import Piece, Translation
from whole_texts import JoinedText, chrf_pair, cut_again, ended_lines, joined_texts, measure, tiled
from whole_texts_speed import median_interval


@pytest.fixture(scope="module")
def texts() -> list[JoinedText]:
    """Texts of 2 to 20 sentences of the small language that the model has not seen."""
    return joined_texts(ended_lines(*zip(*sentences(200, seed=7), strict=True)), 300, seed=1)


def test_joined_sentences_come_back_whole(translator: qkv.Translator, texts: list[JoinedText]) -> None:
    figures = measure(translator, texts)
    assert figures["lines"] >= 300
    assert figures["found"] == figures["joins"]
    assert figures["extra"] == figures["untranslated"] == figures["not_tiled"] == 0
    assert figures["chrf_alone"] > 90
    assert figures["chrf_ratio"] == pytest.approx(1, abs=0.01)
    assert figures["flagged"] <= 0.01 * figures["pieces"]
    assert figures["tokens_again"] <= 0.05 * figures["tokens"]


def test_a_text_is_its_sentences_and_the_spaces_between_them(
    translator: qkv.Translator, texts: list[JoinedText]
) -> None:
    for text in texts[:10]:
        alone = [each.text for each in translator.translate(text.sources)]
        spaces = [" ", "  ", "\t", " \u00a0"]
        source = "".join(f"{line}{spaces[i % 4]}" for i, line in enumerate(text.sources))
        translation = translator.translate(source)
        assert translation.text == "".join(f"{line}{spaces[i % 4]}" for i, line in enumerate(alone))
        assert [source[slice(*piece.source)].rstrip() for piece in translation.pieces] == list(text.sources)
        assert [translation.text[slice(*piece.target)].rstrip() for piece in translation.pieces] == alone


def test_what_is_lost_without_cutting_is_seen(tiny: Path, tmp_path: Path, texts: list[JoinedText]) -> None:
    """The model knows lines of one sentence: the check notices that it shortens a longer text."""
    shutil.copytree(tiny, tmp_path / "run")
    held_out = [source for source, _ in sentences(LEAST_LINES, seed=8)]
    checks = measure_limits(qkv.Translator(tiny, device="cpu"), held_out)
    assert checks is not None
    checks.write(tmp_path / "run")
    translator = qkv.Translator(tmp_path / "run", device="cpu")
    long = [text for text in texts if len(text.sources) > 8][:5]
    figures = measure(translator, long, detect=5)
    assert figures["flagged"] <= 2  # of some fifty: the limits of this small model come from few lines
    counts = figures["detection"]
    assert counts["short"] == counts["texts"] == 5
    assert counts["missed"] == 0


def test_the_command_warns_of_what_could_not_be_trusted(tiny: Path, call: Call, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "run")
    never = Checks(ratio=1.0, short=-100.0, rather_short=-100.0, uncovered=1.0, lines=LEAST_LINES, weights="best")
    never.write(tmp_path / "run")  # no translation is long enough
    (tmp_path / "text").write_text("One cat. Two dog.\n\nThe red house.\n", encoding="utf-8")
    done = call("translate", tmp_path / "run", tmp_path / "text")
    assert done.out == "Uno gatto. Due cane.\n\nIl rosso casa.\n"
    assert f"{tmp_path / 'text'}: 2 translations may leave something out" in done.err
    done = call("translate", tiny, input=b"The red house sees https://example.org/big/house and %(day)s.\nOne cat.\n")
    assert "-: 1 translations have protected text in doubtful places" in done.err
    assert "leave something out" not in done.err


# ---- the benchmark itself --------------------------------------------------------------------------------------------


def translation(text: str, *spans: tuple[int, int, int, int]) -> Translation:
    pieces = [Piece((a, b), (c, d), 0.0) for a, b, c, d in spans]
    return Translation(text, 0.0, 0.0, [], [], pieces=pieces)


def test_texts_are_consecutive_lines_up_to_the_number_asked_for() -> None:
    pairs = [(f"Line {i}.", f"Riga {i}.") for i in range(50)]
    texts = joined_texts(pairs, 200, seed=3)
    assert sum(len(text.sources) for text in texts[:-1]) < 200 <= sum(len(text.sources) for text in texts)
    assert all(2 <= len(text.sources) <= 20 for text in texts)
    for text in texts:
        assert text.sources == tuple(source for source, _ in pairs[text.first : text.first + len(text.sources)])
        assert [text.source[begin:].split(".")[0] + "." for begin in text.joins] == list(text.sources[1:])
    assert all(b.first in (a.first + len(a.sources), 0) for a, b in pairwise(texts))
    assert ended_lines(["A.", "B", "C!"], ["a.", "b.", "c"]) == [("A.", "a.")]
    with pytest.raises(SystemExit, match="at least 20"):
        joined_texts(pairs[:19], 10)


def test_a_missed_join_and_its_references_stay_together() -> None:
    text = JoinedText(0, ("A b.", "C d.", "E f."), ("Uno.", "Due.", "Tre."))
    assert text.joins == [5, 10]
    output = translation("Uno. Due. Tre.", (0, 2, 0, 0), (2, 10, 0, 10), (10, 14, 10, 14))  # no border at 5, one at 2
    assert list(cut_again(text, output)) == [(0, 2, "Uno. Due."), (2, 3, "Tre.")]
    alone = [translation(line) for line in text.references]
    assert chrf_pair([text], [output], [alone]) == pytest.approx((100, 100))
    assert tiled([piece.source for piece in output.pieces], 14)
    assert not tiled([(0, 4), (5, 14)], 14)
    assert not tiled([(0, 4), (4, 13)], 14)


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    assert median_interval([float(i) for i in range(1, 21)]) == (10.5, 6, 15)  # the table of the sign test, n = 20
    assert median_interval([3.0, 1.0, 2.0]) == (2, 1, 3)
