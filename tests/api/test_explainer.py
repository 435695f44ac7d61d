"""Inspection through the public API: attention maps, decoding steps, what-if, heads, alignments, reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import qkv
from conftest import Call, sentences
from qkv.assembly import Run
from qkv.core.errors import QkvError, UsageError
from qkv.explain.word_alignment import Alignment, AlignmentHead, alignment_head, save_head

TEXT = "The cat sees the big dog."


def test_an_attention_map_contains_the_decoding_steps(translator: qkv.Translator) -> None:
    found = translator.attention(TEXT)
    best = translator.translate(TEXT)
    assert found.translation == best.text
    assert found.steps is not None
    assert found.beam is not None
    assert [step["chosen"] for step in found.steps] == found.written
    winner = [node for node in found.beam["nodes"] if node["fate"] == "winner"]
    assert winner[-1]["score"] == pytest.approx(best.score, abs=1e-4)
    given = translator.attention(TEXT, "Il gatto.")
    assert given.beam is None
    assert [step["chosen"] for step in given.steps or []] == given.written
    with pytest.raises(UsageError, match="one sentence of 1 to 32 tokens"):
        translator.attention("")


def test_what_if(translator: qkv.Translator) -> None:
    before = translator.translate(TEXT)
    dropped = translator.what_if(TEXT, drop=[4])
    assert dropped.before.translation == before.text
    assert dropped.after.translation == translator.translate("The cat sees the dog.").text
    cut = translator.what_if(TEXT, heads_off=["decoder.0.cross"])
    assert cut.changed
    assert cut.likelier < 0
    with pytest.raises(UsageError, match=r"decoder\.9\.cross"):
        translator.what_if(TEXT, heads_off=["decoder.9.cross"])
    with pytest.raises(UsageError, match="no word of the source would remain"):
        translator.what_if("One.", drop=[0, 1])
    with pytest.raises(UsageError, match="one sentence of 1 to 32 tokens"):
        translator.what_if(TEXT * 30, drop=[0])


def test_every_sentence_of_a_text_has_a_map(translator: qkv.Translator, tiny: Path, call: Call, tmp_path: Path) -> None:
    text = "One cat. Two dog.  The house runs."
    maps = translator.attention_maps(text)
    assert [each.text for each in maps] == ["One cat.", "Two dog.", "The house runs."]
    assert " ".join(each.translation for each in maps) == translator.translate(text).text.replace("  ", " ")
    given = translator.attention_maps(text, "Uno gatto. Due cane. Il casa.")
    assert [(each.text, each.translation) for each in given[1:]] == [
        ("Two dog.", "Due cane."),
        ("The house runs.", "Il casa."),
    ]
    for (whole,) in (translator.attention_maps(text, "Uno gatto. Due."), translator.attention_maps(text, split=False)):
        assert whole.text == text
    assert translator.attention(text, split=False).text == text
    for refused in (translator.attention, translator.what_if):
        with pytest.raises(UsageError, match=r'3 pieces, "One cat\." "Two dog\." "The house runs\.": give one of them'):
            refused(text)
    assert translator.what_if(text, split=False).before.source == text
    done = call("explain", tiny, text, "-o", tmp_path / "map.json")
    assert [line for line in done.err.splitlines() if "counterpart" not in line] == [
        *(each.translation for each in maps),
        str(tmp_path / "map.json"),
    ]
    held = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    assert held == json.loads(json.dumps({"sentences": [each.to_dict() for each in maps]}))
    call("explain", tiny, text, "-o", tmp_path / "map.json", "--no-split")
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))["text"] == text
    assert call("explain", tiny, text, "-o", tmp_path / "map.html").code == 0
    assert "one sentence, not 3" in call("explain", tiny, text, "-o", tmp_path / "map.svg").error


def test_source_words_without_a_counterpart_are_marked(
    translator: qkv.Translator, tiny: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "align", lambda *sides, **options: [Alignment([(0, 0), (1, 1), (4, 2)])])
    found = translator.attention("The cat sees dog!", "Il gatto vede.")
    assert found.unaligned == [(8, 12), (13, 16)]
    assert found.unaligned_words == ["sees", "dog"]
    assert found.drawn()["unaligned"] == found.to_dict()["unaligned"] == found.unaligned
    monkeypatch.undo()
    done = call("explain", tiny, "One cat.", "--target", "", "-o", tmp_path / "map.html")
    assert "without a counterpart: One, cat\n" in done.err


def test_a_text_is_aligned_sentence_by_sentence(
    translator: qkv.Translator, tiny: Path, call: Call, tmp_path: Path
) -> None:
    """Links never leave a sentence; the words are numbered in the text."""
    sources, targets = ["One cat runs.", "Two dog."], ["Uno gatto corre.", "Due cane."]
    alone = translator.align(sources, targets)
    expected = Alignment([*alone[0], *((i + 4, j + 4) for i, j in alone[1])])
    texts, told = (" ".join(sources), " ".join(targets)), list[int]()
    joined, other = translator.align([texts[0], sources[0]], [texts[1], targets[0]], progress=told.append)
    assert (joined, other, sum(told)) == (expected, alone[0], 2)
    whole = translator.align([texts[0]], [texts[1]], split=False)
    assert whole != [expected]
    spaces = translator.align(sources, targets, rule="spaces")
    assert translator.align([texts[0]], [texts[1]], rule="spaces") == [
        Alignment([*spaces[0], *((i + 3, j + 3) for i, j in spaces[1])])
    ]
    # As a whole where the numbers of sentences differ.
    assert translator.align([texts[0]], ["Uno gatto."]) == translator.align([texts[0]], ["Uno gatto."], split=False)
    for name, text in zip("st", texts, strict=True):
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    assert call("align", tiny, tmp_path / "s", tmp_path / "t").out == f"{expected}\n"
    assert call("align", tiny, tmp_path / "s", tmp_path / "t", "--no-split").out == f"{whole[0]}\n"


def test_words_are_aligned_through_the_head_that_is_kept(tiny: Path, tmp_path: Path, call: Call) -> None:
    """In the small language word i translates word i, and the full stop the full stop."""
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    pairs = sentences(40, seed=7)
    gold = [Alignment((i, i) for i in range(len(source.split()) + 1)) for source, _ in pairs]
    files = {"src": [s for s, _ in pairs], "tgt": [t for _, t in pairs], "gold": list(map(str, gold))}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    paths = [tmp_path / "src", tmp_path / "tgt"]
    listed = call("align", run, *paths, "--find", tmp_path / "gold")
    aer = [float(line.split("\t")[0]) for line in listed.out.splitlines()]
    assert aer == sorted(aer)
    assert aer[0] < 0.2
    kept = alignment_head(Run.open(run))
    assert str(kept) in listed.out.splitlines()[0]
    done = call("align", run, *paths, "--gold", tmp_path / "gold")
    found = [Alignment.parse(line) for line in done.out.splitlines()]
    assert found == qkv.Translator(run).align(files["src"], files["tgt"], head=kept)
    assert f"{aer[0]:.4f}" in done.err
    assert "omit --gold and --output" in call("align", run, *paths, "--find", "a", "--gold", "b").error
    assert "is not a rule for words" in call("align", run, *paths, "--words", "letters").error
    wrong = [*files["gold"][:2], "0-99", *files["gold"][3:]]
    (tmp_path / "wrong").write_text("".join(f"{line}\n" for line in wrong), encoding="utf-8")
    assert "line 3: link 0-99" in call("align", run, *paths, "--find", tmp_path / "wrong").error
    assert "must correspond line by line" in call("align", run, paths[0], tiny / "config.toml").error
    (run / "alignment.json").write_text("{", encoding="utf-8")
    with pytest.raises(QkvError, match="damaged"):
        alignment_head(Run.open(run))
    assert alignment_head(Run.open(tiny)) == AlignmentHead()
    save_head(Run.open(run), AlignmentHead("decoder.0.cross", 1))
    assert alignment_head(Run.open(run)) == AlignmentHead("decoder.0.cross", 1)


def test_heads_are_ranked_by_the_loss_without_them(tiny: Path, call: Call, tmp_path: Path) -> None:
    done = call("heads", tiny, "--pairs", 8, "--plot", tmp_path / "heads.svg")
    changes = [float(line.split("\t")[0]) for line in done.out.splitlines()]
    assert len(changes) == 2 + 2 + 2  # encoder, decoder and cross, two heads each
    assert changes == sorted(changes, reverse=True)
    assert (tmp_path / "heads.svg").exists()
    row = json.loads(call("heads", tiny, "--pairs", 8, "--json").out.splitlines()[0])
    assert row["change"] == pytest.approx(changes[0], abs=1e-4)
    assert "heads.txt" in call("heads", tiny, "--plot", tmp_path / "heads.txt").error


def test_a_report_of_one_run_and_of_two(tiny: Path, call: Call, tmp_path: Path) -> None:
    assert call("report", tiny, "-o", tmp_path / "one.html").code == 0
    assert call("report", tiny, tiny, "-o", tmp_path / "two.html").code == 0
    assert (tmp_path / "two.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "no such run folder" in call("report", tmp_path / "none").error
