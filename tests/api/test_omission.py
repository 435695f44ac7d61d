"""The limits of a run are quantiles of held-out text, and find translations that leave something out."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qkv.api.omission import FILE, RARE, RATHER_SHORT, Checks, OmissionCheck, uncovered
from qkv.api.run_limits import LEAST_LINES, MOST_CHARACTERS, STAND_INS, copied_words, measure
from qkv.api.translator import Translator
from qkv.core.errors import QkvError


class Held:
    """A translator of held-out lines: line i of n loses i words of its ten; the alignment has a link for each word."""

    def __init__(self, aligns: bool = True) -> None:
        self.tokenizers = SimpleNamespace(src=SimpleNamespace(tags=()))
        self.needs_tag = False
        self.run = SimpleNamespace(scores={"chosen": "average"})
        self.aligns = aligns

    def translate(self, sources: list[str], **options: Any) -> list[Any]:
        assert options == {"split": False, "check": False, "beam": 1, "tag": ""}
        return [SimpleNamespace(text=" ".join(source.split()[: 10 - i % 10])) for i, source in enumerate(sources)]

    def token_lengths(self, source: str, output: str) -> tuple[int, int]:
        return len(source.split()), len(output.split())

    def align(self, sources: list[str], outputs: list[str], tag: str, split: bool = True) -> list[Any]:
        if not self.aligns:
            raise QkvError("no alignment")
        return [[(i, i) for i in range(len(output.split()))] for output in outputs]


SOURCES = ["a b c d e f g h i j"] * 1000


def limits(sources: list[str], aligns: bool = True) -> Checks | None:
    return measure(cast(Translator, Held(aligns)), sources)


def test_a_limit_is_passed_by_its_share_of_the_lines() -> None:
    checks = limits(SOURCES)
    assert checks is not None
    assert (checks.lines, checks.weights) == (1000, "average")
    assert checks.ratio == pytest.approx(0.55)
    shortfalls = [checks.shortfall(10, 10 - i % 10) for i in range(1000)]
    assert sum(each > checks.short for each in shortfalls) <= RARE * 1000
    assert sum(each > checks.rather_short for each in shortfalls) <= RATHER_SHORT * 1000
    assert checks.short == max(shortfalls)
    assert checks.uncovered == pytest.approx(0.9)


def test_the_limits_are_quantiles() -> None:
    sources = [("a " * (10 + i)).strip() for i in range(400)]
    checks = limits(sources)
    assert checks is not None
    shortfalls = [checks.shortfall(10 + i, 10 - i % 10) for i in range(checks.lines)]
    for limit, share in [(checks.short, RARE), (checks.rather_short, RATHER_SHORT)]:
        passing = sum(each > limit for each in shortfalls)
        assert share * checks.lines - 2 < passing <= share * checks.lines


def test_too_few_lines_have_no_limits() -> None:
    assert limits(SOURCES[: LEAST_LINES - 1]) is None
    assert limits([*SOURCES[: LEAST_LINES - 1], " ", ""]) is None
    assert limits(["a " * MOST_CHARACTERS] * 200) is None


def test_a_model_without_alignment_has_no_limit_of_uncovered_words() -> None:
    checks = limits(SOURCES, aligns=False)
    assert checks is not None
    assert checks.uncovered == 1.0


def test_checks_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    assert Checks.read(tmp_path) is None
    checks = Checks(1.1, 2.0, 1.5, 0.5, 100, "best", ("Tom",))
    checks.write(tmp_path)
    assert Checks.read(tmp_path) == checks
    (tmp_path / FILE).write_text("{")
    with pytest.raises(QkvError, match=FILE):
        Checks.read(tmp_path)


def test_a_run_folder_without_checks_translates(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "run")
    (folder / FILE).unlink(missing_ok=True)
    translator = Translator(folder, device="cpu")
    found = translator.translate("One cat runs. Two dogs see {name}.")
    assert translator.checks is None
    assert [flag for flag in found.flags if flag == "omission"] == []
    assert found.text.count("{name}") == 1


def check(**changes: float) -> OmissionCheck:
    values: dict[str, Any] = {"ratio": 1.0, "short": 2.0, "rather_short": 1.0, "uncovered": 0.5} | changes
    asked = Checks(lines=100, weights="best", **values)
    held = Held()
    return OmissionCheck(asked, lambda sources, outputs: held.align(sources, outputs, tag=""))


def test_short_translations_are_suspects() -> None:
    source = SOURCES[0]
    counts = (10, 7, 6, 5, 4, 3, 0)
    given = [(source, " ".join("x" * count)) for count in counts], [(10, count) for count in counts]
    assert check().suspects(*given) == [4, 5, 6]  # (10 - 3) / √10 > 2; with four words 0.6 is uncovered
    assert check(uncovered=0.45).suspects(*given) == [3, 4, 5, 6]
    assert check(uncovered=1.0).suspects(*given) == [5, 6]  # not known
    assert check().suspects([], []) == []


def test_uncovered_words_say_nothing_of_a_short_source() -> None:
    align = check().align
    assert align is not None
    assert uncovered([("a b c d", "x"), ("a b c d e", "x")], align) == [0.0, 0.8]


def test_words_are_copied_that_nearly_always_are() -> None:
    pairs = [("Tom sees 10 cats in Rome", "Tom vede 10 gatti a Roma")] * 20 + [("Boston is big", "Boston")] * 4
    assert copied_words(pairs) == ("Tom", "10")
    assert copied_words([(f"{name} Ann",) * 2 for i in range(30) for name in [f"N{'a' * i}"] * 5])[0] == "Ann"
    assert len(copied_words([(f"N{'a' * i}",) * 2 for i in range(1, 30) for _ in range(5)])) == STAND_INS
