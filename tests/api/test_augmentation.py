"""qkv augment: pairs on the right sides, every line counted, the same file for any batch, process count and
interruption, and training on it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qkv
from conftest import WORDS, Call, sentences, write_pairs
from qkv import cli
from qkv.api import augmentation, file_translation, pair_filters
from qkv.api.augmentation import Augmenter
from qkv.api.file_translation import ProcessGroup
from qkv.api.pair_filters import (
    BLANK,
    DISPOSITIONS,
    EDUNOV,
    OPTIONAL,
    FilteredLine,
    Filters,
    Seen,
    WordNoise,
    filter_lines,
)
from qkv.api.translation import Alternative, Translation
from qkv.api.translator import Translator
from qkv.core.corpus import split_into_blocks
from qkv.core.errors import QkvError, UsageError
from qkv.data.formats import find_text
from qkv.options import Config, CorpusConfig, DataConfig

DOCS = Path(__file__).parents[2] / "docs" / "augmenting.md"


def translated(line: str) -> str:
    return " ".join(WORDS[word] for word in line.lower().removesuffix(".").split()).capitalize() + "."


# ---- noise -----------------------------------------------------------------------------------------------------------

NUMBERED = st.integers(0, 40).map(lambda count: [str(n) for n in range(count)])


@given(NUMBERED, st.integers(0, 5), st.integers(0, 1000))
def test_no_word_moves_further_than_allowed(words: list[str], places: int, seed: int) -> None:
    found = WordNoise(shuffle=places).words(words, np.random.default_rng(seed))
    assert sorted(found) == sorted(words)
    assert all(abs(place - int(word)) <= places for place, word in enumerate(found))


def test_words_do_move() -> None:
    moved = Counter(
        place - int(word)
        for seed in range(200)
        for place, word in enumerate(
            WordNoise(shuffle=2).words([str(n) for n in range(10)], np.random.default_rng(seed))
        )
    )
    assert set(moved) == {-2, -1, 0, 1, 2}


@given(NUMBERED, st.floats(0, 0.99), st.integers(0, 1000))
def test_dropped_words_leave_one_word_in_order(words: list[str], drop: float, seed: int) -> None:
    found = WordNoise(drop=drop).words(words, np.random.default_rng(seed))
    assert bool(found) == bool(words)
    assert found == [word for word in words if word in found]


def test_as_many_are_dropped_and_blanked_as_asked() -> None:
    words = [str(n) for n in range(100_000)]
    dropped = WordNoise(drop=0.1).words(words, np.random.default_rng(1))
    blanked = WordNoise(blank=0.2).words(words, np.random.default_rng(1))
    assert len(dropped) == pytest.approx(90_000, abs=500)
    assert blanked.count(BLANK) == pytest.approx(20_000, abs=500)
    assert all(each in (word, BLANK) for each, word in zip(blanked, words, strict=True))


def test_noise_follows_from_seed_and_number_alone() -> None:
    text = "one two three four five six seven eight nine ten"
    assert EDUNOV.text(text, 5, 1) == EDUNOV.text(text, 5, 1)
    assert len({EDUNOV.text(text, number, seed) for number in range(5) for seed in range(5)}) > 20
    assert WordNoise().text("  as it  is ", 1, 1) == "  as it  is "
    assert sorted(WordNoise(shuffle=3).text("日本語を話す", 1, 1, spaces=False)) == sorted("日本語を話す")


@pytest.mark.parametrize("wrong", [{"drop": 1.0}, {"blank": -0.1}, {"shuffle": -1}, {"drop": float("nan")}])
def test_noise_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        WordNoise(**wrong)


# ---- filters before the translation ----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from(["a", " a", "b", "c ", "é", "é", ""]), max_size=12), max_size=20))
def test_repeated_lines_are_found_across_chunks(chunks: list[list[str]]) -> None:
    seen, before = Seen(), set[str]()
    for lines in chunks:
        found = seen.new(lines)
        for line, new in zip(lines, found, strict=True):
            plain = {"é": "é"}.get(line, line).strip()
            assert new == (plain not in before)
            before.add(plain)
    assert sum(map(len, seen.runs)) == len(before)


def test_runs_stay_few() -> None:
    seen = Seen()
    for number in range(200):
        seen.new([f"{number} {line}" for line in range(10)])
    assert sum(map(len, seen.runs)) == 2000
    assert len(seen.runs) <= 9
    assert not any(seen.new([f"{number} 3" for number in range(200)]))


def test_lines_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_filters, "CHUNK", 2)
    found = list(filter_lines(["a", "", "b", "a ", " ", "c"], lambda: 0))
    assert [line.disposition if isinstance(line, FilteredLine) else "" for line in found] == [
        "",
        "blank",
        "",
        "repeated",
        "blank",
        "",
    ]
    assert not any(isinstance(line, FilteredLine) for line in filter_lines(["a", "a"], lambda: 0, repeated=False))


# ---- dispositions, with a fake translator ----------------------------------------------------------------------------


class Words:
    def encode(self, text: str) -> list[str]:
        return text.split()


class FakeTranslator:
    """Fake translator: the text of a line determines its translation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.config, self.device = Config(), torch.device("cpu")
        self.tokenizers = SimpleNamespace(src=Words(), tgt=Words())
        self.members: list[Any] = []
        self.asked: list[str] = []
        self.how: dict[str, Any] = {}

    def translate(self, lines: list[str], first: int, progress: Any, **how: Any) -> list[Translation]:
        self.asked += [line for line in lines if line]
        self.how = how
        progress(len(lines))
        return [self.one(line) for line in lines]

    def one(self, line: str) -> Translation:
        word, _, rest = line.partition(" ")
        if not line:
            return Translation("", 0.0, 0.0, [], [], pieces=0, finish_reason="blank")
        text = line.upper() + " X"
        more: dict[str, Any] = {}
        match word:
            case "empty":
                text = ""
            case "garbled":
                text = "\ufffd x y"
            case "unfinished":
                more = {"truncated": True, "finish_reason": "length"}
            case "looped":
                more = {"looped": True}
            case "chosen":  # among several: the first is cut short, the second goes round
                others = [Alternative("LA " * 12, 0.0, -3.0), Alternative("CHOSEN WELL", 0.0, -3.0)]
                return Translation(text, -1.0, -3.0, [], others, truncated=True, finish_reason="length")
            case "copy":
                text = f"COPY  {rest}!"
            case "long":
                text = "a b c d e f g h i j k l m"
            case "likely":  # the log-probability of a token is the number
                text = rest
                return Translation(text, 0.0, float(rest) * 2, [text], [])
        return Translation(text, -1.0, -3.0, text.split(), [], **more)

    def score(self, source: list[str], target: list[str]) -> list[Any]:
        self.scored = list(zip(source, target, strict=True))
        return [SimpleNamespace(logprob=-4.0 * len(s), tokens=[""] * 4) for s in source]


@pytest.mark.parametrize(
    ("reference", "disposition"), [("CHOSEN X", "unfinished"), ("LA " * 12, "looped"), ("CHOSEN WELL", "kept")]
)
def test_the_chosen_candidate_is_filtered(reference: str, disposition: str) -> None:
    augmenter = Augmenter(FakeTranslator(), "distillation", filters=Filters(allow=("ratio",)))  # type: ignore[arg-type]
    (pair,) = augmenter.pairs(list(filter_lines(["chosen"], lambda: 0)), [reference])
    assert (pair.disposition, pair.tgt.split()) == (disposition, reference.split())


def dispositions(lines: list[str], **filters: Any) -> list[str]:
    augmenter = Augmenter(FakeTranslator(), "self-training", filters=Filters(**filters))  # type: ignore[arg-type]
    return [pair.disposition for pair in augmenter.pairs(list(filter_lines(lines, lambda: 0)))]


EACH = ["", "same", "same ", "empty", "garbled", "unfinished", "looped", "copy", "long", "good one"]
EACH_DISPOSITION = ["blank", "kept", "repeated", "empty", "garbled", "unfinished", "looped", "copy", "ratio", "kept"]


def test_each_fate_by_hand() -> None:
    assert dispositions(EACH) == EACH_DISPOSITION


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_filter_can_be_switched_off(name: str) -> None:
    lines = list(filter_lines(EACH, lambda: 0, repeated=name != "repeated"))
    augmenter = Augmenter(FakeTranslator(), "self-training", filters=Filters(allow=(name,)))  # type: ignore[arg-type]
    found = [pair.disposition for pair in augmenter.pairs(lines)]
    assert found == ["kept" if disposition == name else disposition for disposition in EACH_DISPOSITION]


def test_the_ratio_counts_four_tokens_at_least() -> None:
    """13 tokens for one, which counts as 4: more than 3 times, but not more than 3.25 times."""
    assert dispositions(["long"], max_ratio=3.25) == ["kept"]
    assert dispositions(["long"], max_ratio=3.2) == ["ratio"]
    assert dispositions(["long"], max_ratio=0.0) == ["kept"]


def test_copies_in_another_dress() -> None:
    for line, text, same in [
        ("Ok", "OK.", True),
        ("Nr. 5", "nr 5", True),
        ("…", "…", True),
        ("…", "!", False),
        ("no", "not", False),
    ]:
        assert (augmentation._letters(line) == augmentation._letters(text)) == same


def test_the_likeliest_are_kept() -> None:
    lines = [f"likely -{n}" for n in (3, 1, 4, 2, 5)]
    assert dispositions(lines, min_logprob=-3.0) == ["kept", "kept", "unlikely", "kept", "unlikely"]
    assert dispositions(lines, keep=0.5) == ["kept", "kept", "worse", "kept", "worse"]
    assert dispositions(lines, keep=0.4, min_logprob=-4.0) == ["worse", "kept", "worse", "kept", "unlikely"]
    assert dispositions([*lines, "copy"], keep=0.2) == ["worse", "kept", "worse", "worse", "worse", "copy"]


def test_a_round_trip_is_the_judge() -> None:
    """The backward model scores the remaining pairs: the given line as a translation of its translation."""
    forth, back = FakeTranslator(), FakeTranslator()
    back.config = Config().replace(data={"max_length": 3})
    lines = ["ab", "copy", "abcd", "too many words here"]
    augmenter = Augmenter(forth, "back-translation", filters=Filters(min_logprob=-5.0), back=back)  # type: ignore[arg-type]
    found = augmenter.pairs(lines)
    assert back.scored == [("AB X", "ab"), ("ABCD X", "abcd")]
    assert [(pair.disposition, pair.logprob) for pair in found] == [
        ("kept", -4.0),
        ("copy", None),
        ("unlikely", -6.0),
        ("unlikely", None),
    ]


def test_the_closest_to_the_reference() -> None:
    fake = FakeTranslator()
    others = [Alternative("the cat sleeps on the mat", -2.0, -8.0), Alternative("a cat sat on the mat", -3.0, -9.0)]
    fake.one = lambda line: Translation("that dog ran", -1.0, -4.0, [], others)  # type: ignore[method-assign]
    for by in ("bleu", "chrf"):
        augmenter = Augmenter(fake, "distillation", closest_by=by, options={"candidates": 3})  # type: ignore[arg-type]
        lines = ["die katze sass auf der matte"] * 3
        wanted = ["the cat sat on the mat today", "the cat sleeps on the mat", "xyz"]
        assert [pair.tgt for pair in augmenter.pairs(lines, wanted)] == [others[1].text, others[0].text, "that dog ran"]
        assert fake.how["n_best"] == 3
    (pair,) = augmenter.pairs(lines[:1], wanted[1:2])
    assert pair.logprob == -8.0 / 7
    with pytest.raises(UsageError, match="references are for distillation"):
        Augmenter(fake, "self-training").pairs(lines, wanted)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="both choose among candidates"):
        Augmenter(fake, "distillation", options={"rerank": "bleu"}).pairs(lines, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["bleu", "chrf"])
def test_references_are_compared_in_one_unicode_form(by: str) -> None:
    right = "une école très fermée"
    fake, others = FakeTranslator(), [Alternative(right, -2.0, -8.0)]
    fake.one = lambda line: Translation("une ecole tres fermee", -1.0, -4.0, [], others)  # type: ignore[method-assign]
    augmenter = Augmenter(fake, "distillation", closest_by=by)  # type: ignore[arg-type]
    for form in ("NFC", "NFD"):
        (pair,) = augmenter.pairs(["a closed school"], [unicodedata.normalize(form, right)])
        assert pair.tgt == right


SAID = st.lists(st.sampled_from("a b c d e".split()), min_size=1, max_size=8).map(" ".join)


@given(SAID, st.lists(SAID, min_size=2, max_size=6), st.sampled_from(["bleu", "chrf"]))
def test_the_closest_candidate_has_the_best_metric(reference: str, texts: list[str], by: str) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    fake = FakeTranslator()
    first, *rest = (Alternative(text, 0.0, 0.0) for text in texts)
    fake.one = lambda line: Translation(first.text, 0.0, 0.0, [], rest)  # type: ignore[method-assign]
    (found,) = Augmenter(fake, "distillation", closest_by=by).pairs(["x"], [reference])  # type: ignore[arg-type]
    metric: Any = BLEU(effective_order=True) if by == "bleu" else CHRF()
    scores = {text: metric.sentence_score(text, [reference]).score for text in texts}
    assert scores[found.tgt] == pytest.approx(max(scores.values()))


def test_a_line_has_its_own_noise_wherever_it_is_cut() -> None:
    lines = ["one two three four five six seven eight"] * 9
    augmenter = Augmenter(FakeTranslator(), "self-training", noise=EDUNOV, seed=2)  # type: ignore[arg-type]
    whole = augmenter.pairs(lines)
    assert len({pair.src for pair in whole}) > 5
    assert [pair for first in (0, 4, 8) for pair in augmenter.pairs(lines[first : first + 4], first=first)] == whole


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Augmenter(FakeTranslator(), "distill"), 'kind = "distill": must be one of back-translation'),  # type: ignore[arg-type]
        (lambda: Augmenter(FakeTranslator(), "distillation", closest_by="ter"), "must be one of chrf, bleu"),  # type: ignore[arg-type]
        (lambda: Augmenter(FakeTranslator(), "distillation", options={"n_best": 2}), "n_best: not an option here"),  # type: ignore[arg-type]
        (lambda: Filters(keep=0.0), "keep = 0.0"),
        (lambda: Filters(max_ratio=0.5), "max_ratio = 0.5"),
        (lambda: Filters(allow=("empty",)), 'allow = "empty": must be one of repeated'),
    ],
)
def test_impossible_options_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        make()


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTranslator:
    """The translator that `augment` opens."""
    found = FakeTranslator()
    monkeypatch.setattr(augmentation, "Translator", lambda *arguments, **options: found)
    return found


def small_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (augmentation, pair_filters):
        monkeypatch.setattr(module, "CHUNK", size)


def columns(path: Path) -> list[tuple[str, ...]]:
    """The pairs of a file, as training reads them."""
    (corpus,) = find_text([CorpusConfig(src=str(path))], DataConfig())
    return [pair for block in split_into_blocks(corpus) for pair in block.texts() if pair]


@given(
    lines=st.lists(st.sampled_from([*EACH, "likely -1", "likely -2", "likely\t-3"]), max_size=25),
    size=st.integers(1, 9),
    keep=st.sampled_from([1.0, 0.5]),
    allow=st.lists(st.sampled_from(OPTIONAL), unique=True).map(tuple),
    form=st.sampled_from(["tsv", "jsonl"]),
)
def test_every_line_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, keep: float, allow: Any, form: str
) -> None:
    folder = tmp_path_factory.mktemp("counts")
    (folder / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augmentation, "Translator", FakeTranslator)
        patch.setattr("os.fsync", lambda handle: None)
        small_chunks(patch, size)
        found = qkv.augment(
            "run", folder / "text", folder / f"out.{form}", kind="back-translation", filters=Filters(3, -2, keep, allow)
        )
    assert found.lines == sum(found.counts.values()) == len(lines)
    assert set(found.counts) <= set(DISPOSITIONS)
    if lines and found.counts.get("kept"):
        pairs = columns(folder / f"out.{form}")
        assert len(pairs) == found.counts["kept"]
        given = [line.replace("\t", " ") if form == "tsv" else line for line in lines]
        rest = iter(given)
        assert all(target in rest for _, target in pairs)  # in the order of the text
    else:
        assert (folder / f"out.{form}").read_bytes() == b""


def test_bad_lines_are_counted(fake: FakeTranslator, tmp_path: Path) -> None:
    text, references, out = tmp_path / "text", tmp_path / "references", tmp_path / "out.tsv"
    text.write_bytes(b"a\n\xff\n\nb\nc\n")
    references.write_bytes(b"1\n2\n3\n\xff\n5\n")
    with pytest.raises(QkvError, match="text, line 2: not UTF-8"):
        qkv.augment("run", text, out, kind="distillation")
    assert qkv.augment("run", text, out, kind="distillation", on_bad="skip").counts == {
        "encoding": 1,
        "blank": 1,
        "kept": 3,
    }
    found = qkv.augment("run", text, out, kind="distillation", on_bad="skip", references=references)
    assert found.counts == {"encoding": 2, "blank": 1, "kept": 2}
    assert columns(out) == [("a", "A X"), ("c", "C X")]
    references.write_bytes(b"1\n2\n")
    with pytest.raises(QkvError, match=r"text has more lines than .*references: they must correspond"):
        qkv.augment("run", text, tmp_path / "other.tsv", kind="distillation", on_bad="skip", references=references)


def test_a_tab_is_no_third_column(fake: FakeTranslator, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\tb\nc\n", encoding="utf-8")
    found = qkv.augment("run", tmp_path / "text", tmp_path / "out.tsv", kind="self-training")
    assert columns(tmp_path / "out.tsv") == [("a b", "A B X"), ("c", "C X")]
    assert "tabs replaced by spaces in 1 pairs" in str(found)
    found = qkv.augment("run", tmp_path / "text", tmp_path / "out.jsonl", kind="self-training")
    assert columns(tmp_path / "out.jsonl") == [("a\tb", "A\tB X"), ("c", "C X")]
    assert str(found) == f"{tmp_path / 'out.jsonl'}: 2 lines read, 2 pairs kept"
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["line"], row["logprob"]) for row in rows] == [(1, -0.75), (2, -1.0)]


def test_repeated_lines_are_not_translated_again(
    fake: FakeTranslator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 2)
    (tmp_path / "text").write_text("a\nb\na\nc\nb\n", encoding="utf-8")
    found = qkv.augment("run", tmp_path / "text", tmp_path / "out.tsv", kind="self-training")
    assert fake.asked == ["a", "b", "c"]
    assert found.counts == {"repeated": 2, "kept": 3}


LINES = [f"line {number} {'ä' * (number % 7)}" if number % 5 else EACH[number % 9] for number in range(23)]


class Stopped(BaseException):
    """Raised to interrupt an attempt."""


@pytest.mark.parametrize("at", range(6))
def test_stopped_at_any_chunk_and_gone_on_with(
    fake: FakeTranslator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """After a resume, lines of finished chunks still count as seen, and their counts are included."""
    small_chunks(monkeypatch, 4)
    text = tmp_path / "text"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    how: dict[str, Any] = {"kind": "back-translation", "noise": EDUNOV, "filters": Filters(keep=0.9), "seed": 3}
    whole = qkv.augment("run", text, tmp_path / "whole.tsv", **how)
    real = Augmenter.pairs

    def until(self: Augmenter, *arguments: Any, first: int, **options: Any) -> Any:
        if first == at * 4:
            raise Stopped
        return real(self, *arguments, first=first, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Augmenter, "pairs", until)
        with pytest.raises(Stopped):
            qkv.augment("run", text, tmp_path / "out.tsv", **how)
    if at:
        for other in (
            {"seed": 4},
            {"noise": WordNoise()},
            {"filters": Filters()},
            {"beam": 2},
            {"kind": "self-training"},
        ):
            with pytest.raises(UsageError, match="begun by another command"):
                qkv.augment("run", text, tmp_path / "out.tsv", **{**how, **other})
    fake.asked.clear()
    again = qkv.augment("run", text, tmp_path / "out.tsv", **how)
    assert (tmp_path / "out.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    assert again.counts == whole.counts
    assert set(fake.asked) <= set(LINES[at * 4 :])
    assert sorted(os.listdir(tmp_path)) == ["out.tsv", "text", "whole.tsv"]


def test_several_processes_write_the_same_file(
    fake: FakeTranslator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 4)
    monkeypatch.setattr(file_translation, "POLL", 0.05)
    text = tmp_path / "text"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    how: dict[str, Any] = {"kind": "back-translation", "noise": EDUNOV}
    whole = qkv.augment("run", text, tmp_path / "whole.tsv", **how)
    groups, found = [ProcessGroup(0, 2), ProcessGroup(1, 2)], dict[str, Any]()
    monkeypatch.setattr(ProcessGroup, "from_environment", lambda: groups[int(threading.current_thread().name)])

    def run(rank: int) -> None:
        found[str(rank)] = qkv.augment("run", text, tmp_path / "out.tsv", **how)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "out.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    assert found["0"].counts == whole.counts
    assert found["1"].counts == {}
    monkeypatch.setattr(ProcessGroup, "from_environment", lambda: groups[0])
    with pytest.raises(UsageError, match="several processes cannot share"):
        qkv.augment("run", text, "-", **how)


@pytest.mark.parametrize(
    ("text", "output", "words"),
    [
        ("text", "out.txt", "out.txt: pairs are written as .tsv or .jsonl"),
        ("text", "out.tsv.gz", "name it without .gz"),
        ("text.tsv", "out.tsv", "text.tsv: a .tsv file holds pairs"),
        ("none", "out.tsv", "none: no such file"),
    ],
)
def test_files_that_cannot_be(
    fake: FakeTranslator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, output: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a\n", encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(words)):
        qkv.augment("run", text, output, kind="self-training")
    assert os.listdir(tmp_path) == ["text"]


def test_a_round_trip_without_use_is_refused(fake: FakeTranslator, tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    with pytest.raises(UsageError, match="only one file"):
        qkv.augment("run", "-", tmp_path / "out.tsv", kind="distillation", references="-")
    with pytest.raises(UsageError, match="are not used: set min_logprob or keep"):
        qkv.augment("run", tmp_path / "text", tmp_path / "out.tsv", kind="self-training", back="other")


# ---- the verb, on a model --------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sixty sentences of the small language, some of them repeated."""
    drawn = [source for source, _ in sentences(60, seed=7)]
    (tmp_path / "mono.en").write_text("".join(f"{line}\n" for line in drawn), encoding="utf-8")
    return tmp_path / "mono.en"


def reported_counts(said: str) -> tuple[int, int, int]:
    """Parse the final report: lines read, pairs kept, lines left out."""
    read_, kept = map(int, re.search(r"(\d+) lines read, (\d+) pairs kept", said).groups())  # type: ignore[union-attr]
    return read_, kept, sum(map(int, re.findall(r"left out: (\d+)", said)))


def test_translations_are_on_the_side_they_belong_to(tiny: Path, call: Call, text: Path, tmp_path: Path) -> None:
    for kind in ("back-translation", "self-training", "distillation"):
        out = tmp_path / f"{kind}.tsv"
        done = call("augment", tiny, text, "-o", out, "--as", kind)
        assert done.code == 0, done.err
        read_, kept, left_out = reported_counts(done.err)
        assert read_ == kept + left_out == 60
        pairs = columns(out)
        assert len(pairs) == kept >= 45
        given = [pair[kind == "back-translation"] for pair in pairs]
        made = [pair[kind != "back-translation"] for pair in pairs]
        lines = text.read_text(encoding="utf-8").splitlines()
        assert set(given) <= set(lines)
        assert len(set(given)) == len(given)
        right = sum(target == translated(source) for source, target in zip(given, made, strict=True))
        assert right >= 0.9 * kept


def test_standard_output_is_a_corpus(tiny: Path, call: Call, text: Path) -> None:
    done = call("augment", tiny, "--as", "self-training", input=text.read_bytes())
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert len(rows) == reported_counts(done.err)[1]
    assert all(len(row) == 2 for row in rows)


@pytest.mark.parametrize(
    "how",
    [["--beam", "2"], ["--sample"], ["--sample", "--top-k", "3"], ["--noise"], ["--noise", "--drop", "0"]],
    ids=" ".join,
)
def test_results_do_not_depend_on_the_batch(
    tiny: Path, call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    outs = [tmp_path / f"{size}.tsv" for size in (2048, 7)]
    for out, size in zip(outs, (2048, 7), strict=True):
        small_chunks(monkeypatch, size)
        assert call("augment", tiny, text, "-o", out, "--as", "back-translation", *how).code == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    if how[0] != "--beam":
        other = tmp_path / "other.tsv"
        assert call("augment", tiny, text, "-o", other, "--as", "back-translation", *how, "--seed", "0").code == 0
        assert other.read_bytes() != outs[0].read_bytes()


def test_noise_is_on_the_source_only(tiny: Path, call: Call, text: Path, tmp_path: Path) -> None:
    plain, noisy = tmp_path / "plain.tsv", tmp_path / "noisy.tsv"
    assert call("augment", tiny, text, "-o", plain, "--as", "self-training").code == 0
    assert call("augment", tiny, text, "-o", noisy, "--as", "self-training", "--shuffle", "2").code == 0
    pairs = list(zip(columns(plain), columns(noisy), strict=True))
    assert all(ours[1] == theirs[1] for ours, theirs in pairs)
    assert all(sorted(ours[0].split()) == sorted(theirs[0].split()) for ours, theirs in pairs)
    assert sum(ours[0] != theirs[0] for ours, theirs in pairs) > 20


def test_references_choose(tiny: Path, call: Call, tmp_path: Path) -> None:
    """A candidate equal to the reference is chosen if it is among the candidates."""
    translator = Translator(tiny)
    lines = list(dict.fromkeys(source for source, _ in sentences(30, seed=9)))
    found = translator.translate(lines, n_best=4)
    wanted = [each.alternatives[1].text for each in found]
    write_pairs(tmp_path, zip(lines, wanted, strict=True), "refs")
    done = call(
        "augment", tiny, tmp_path / "refs.src", "-o", tmp_path / "out.tsv", "--as", "distillation",
        "--references", tmp_path / "refs.tgt", "--candidates", "4", "--allow", "ratio", "--allow", "copy",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert columns(tmp_path / "out.tsv") == [pair for pair in zip(lines, wanted, strict=True) if pair[1]]


# A process that is killed at its third chunk.
KILLED = """
import os, signal, sys
from qkv import cli
from qkv.api import augmentation, output_journal, pair_filters
augmentation.CHUNK = pair_filters.CHUNK = 8
output_journal.INTERVAL = 0.0
real = augmentation.Augmenter.pairs
def pairs(self, *arguments, first, **options):
    if first == 16 and "kill" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *arguments, first=first, **options)
augmentation.Augmenter.pairs = pairs
cli.main()
"""


def test_killed_and_gone_on_with(
    tiny: Path, call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    how = [str(tiny), str(text), "--as", "back-translation", "--sample", "--noise", "--keep", "0.8"]
    arguments = ["augment", *how, "-o", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], env={**os.environ, "kill": "yes"}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    small_chunks(monkeypatch, 8)
    again = call(*arguments)
    assert again.err.startswith(f"{out}: resuming, 16 lines are done\n")
    unbroken = call("augment", *how, "-o", whole)
    assert out.read_bytes() == whole.read_bytes()
    assert reported_counts(again.err) == reported_counts(unbroken.err)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(corpus: tuple[str, str], tmp_path: Path) -> list[str]:
    """A training of a few steps on two files, with a validation set."""
    valid = write_pairs(tmp_path, sentences(20, seed=5), "valid")
    sets = "train.steps=3 train.tensorboard=false train.device=cpu data.max_length=32 train.tokens_per_step=512".split()
    return [
        "train", "--src", corpus[0], "--tgt", corpus[1], "--valid-src", valid[0], "--valid-tgt", valid[1],
        *(word for each in sets for word in ("--set", each)),
    ]  # fmt: skip


def test_training_on_both(tiny: Path, call: Call, text: Path, tmp_path: Path, small: list[str]) -> None:
    assert call("augment", tiny, text, "-o", tmp_path / "own.tsv", "--as", "self-training").code == 0
    assert call("augment", tiny, text, "-o", tmp_path / "own.jsonl", "--as", "self-training", "--noise").code == 0
    also = ["--also", f"{tmp_path / 'own.tsv'}:0.5:st", "--also", f"{tmp_path / 'own.jsonl'}"]
    done = call(*small, *also, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    run = qkv.Run.open(tmp_path / "run")
    assert [(each.weight, each.tag) for each in run.config.data.train] == [(1.0, ""), (0.5, "st"), (1.0, "")]
    assert run.tokenizers.src.tags == ("st",)
    pairs = len(columns(tmp_path / "own.tsv"))
    row = next(line for line in done.err.splitlines() if line.startswith(str(tmp_path / "own.tsv"))).split()
    assert row[1] == row[2] == str(pairs)  # read and kept
    assert call("translate", tmp_path / "run", input=b"One cat.\n").code == 0  # without a tag


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("pairs.tsv", ("pairs.tsv", 1.0, "")),
        ("pairs.tsv:2", ("pairs.tsv", 2.0, "")),
        ("pairs.tsv:0.5:bt", ("pairs.tsv", 0.5, "bt")),
        ("pairs.tsv::bt", ("pairs.tsv", 1.0, "bt")),
        ("a:2.tsv", ("a:2.tsv", 1.0, "")),
        ("a:2.tsv:0.5:bt", ("a:2.tsv", 0.5, "bt")),
        ("-:2", ("-", 2.0, "")),
    ],
)
def test_also_is_read(
    given: str, expected: tuple[str, float, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkv.cli.arguments import with_extra_pairs

    monkeypatch.chdir(tmp_path)
    for name in ("pairs.tsv", "a:2.tsv"):
        (tmp_path / name).touch()
    data = {"train": [{"src": "x", "tgt": "y"}], "valid": [{"src": "v", "tgt": "w"}]}
    first, also = with_extra_pairs(Config().replace(data=data), [given]).data.train
    assert (first.src, (also.src, also.weight, also.tag)) == ("x", expected)
    _, rooted = with_extra_pairs(Config().replace(data={**data, "root": "elsewhere"}), [given]).data.train
    assert rooted.src == ("-" if expected[0] == "-" else str(tmp_path / expected[0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--also", "pairs.tsv:much"], '"much" is not a number: write FILE:WEIGHT, e.g. pairs.tsv:0.5'),
        (["--also", "pairs.tsv:-1"], "weight = -1.0: must be at least 0"),
        (["--also", "none.tsv"], "none.tsv: no such file"),
        (["--also", "pairs.txt"], "give tgt too, or one .tsv or .jsonl file"),
        (["--also", "pairs.tsv", "--text", "a"], "--text trains a language model"),
    ],
)
def test_also_that_cannot_be(
    call: Call, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pairs.tsv", "pairs.txt"):
        (tmp_path / name).write_text("a\tb\n", encoding="utf-8")
    done = call(*small, *change, "--run", tmp_path / "run")
    assert done.code == 2
    assert words in done.error


def test_a_model_is_not_validated_on_its_like(call: Call, corpus: tuple[str, str], tmp_path: Path) -> None:
    done = call("train", "--src", corpus[0], "--tgt", corpus[1], "--also", "pairs.tsv", "--run", tmp_path / "run")
    assert done.code == 2
    assert "synthetic pairs cannot be validated on: give --valid-src and --valid-tgt" in done.error
    done = call("train", "--resume", "--run", tmp_path / "run", "--also", "pairs.tsv")
    assert "--resume takes text and config from the run folder" in done.error


# ---- the page --------------------------------------------------------------------------------------------------------


def fenced(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files that docs/augmenting.md names; texts to translate are in the language of `tiny`."""
    alone = [(source, source) for source, _ in sentences(24, seed=3)]
    parts = {"train": sentences(300, seed=1), "valid": sentences(20, seed=2), "mono": alone}
    for name, pairs in parts.items():
        for side, lang in enumerate(("en", "de")):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_commands() -> Iterator[list[str]]:
    for block in fenced("sh"):
        for line in block.splitlines():
            yield shlex.split(line, comments=True)


@pytest.mark.slow
def test_the_page_runs(page_folder: Path, tiny: Path) -> None:
    """Every training has a few steps; then its run is replaced by a trained model."""
    every = list(page_commands())
    assert len(every) >= 11
    short = ["--set", "train.steps=3", "--set", "train.tensorboard=false", "--set", "data.max_length=32"]
    for program, verb, *arguments in every:
        assert program == "qkv"
        more = short if verb == "train" else [word for name in OPTIONAL for word in ("--allow", name)]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            cli.app([verb, *arguments, *more], standalone_mode=False)
        if verb == "train":
            shutil.rmtree(run := page_folder / arguments[arguments.index("--run") + 1])
            shutil.copytree(tiny, run)
        else:
            read_, kept, left_out = reported_counts(said.getvalue())
            assert read_ == kept + left_out == (300 if "train.en" in arguments else 24)
            assert kept >= (5 if "--sample" in arguments else 20)  # so small a model also draws bytes and nothing
    (code,) = fenced("python")
    exec(compile(code, str(DOCS), "exec"), {})
    assert (page_folder / "pairs.tsv").exists()


def test_every_option_is_on_the_page() -> None:
    import typer

    command = typer.main.get_command(cli.app).commands["augment"]  # type: ignore[attr-defined]
    text = DOCS.read_text(encoding="utf-8")
    own = {each.opts[0] for each in command.params if each.opts[0].startswith("--")} - {"--help"}
    of_translate = {each.opts[0] for each in typer.main.get_command(cli.app).commands["translate"].params}  # type: ignore[attr-defined]
    assert {option for option in own - of_translate if option not in text} == set()
    assert {name for name in DISPOSITIONS if name != "kept" and f"`{name}`" not in text} == set()
    used = {word for words in page_commands() for word in words if words[1] == "augment" and word.startswith("--")}
    assert used <= own
