"""The command line: N lines in, N lines out, and every verb on one small model."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

import qkv
from conftest import PATIENCE, Call, sentences, write_pairs
from qkv import api
from qkv.assembly import Run
from qkv.options import Config

COMMAND = [sys.executable, "-m", "qkv"]


@pytest.fixture(scope="module")
def test_set(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pairs(tmp_path_factory.mktemp("test"), sentences(25, seed=21), "test")


# ---- translate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"One cat.\n", ["Uno gatto."]),
        (b"One cat.", ["Uno gatto."]),
        (b"One cat.\r\nTwo dog.\r\n", ["Uno gatto.", "Due cane."]),
        (b"\n\nOne cat.\n   \n\n", ["", "", "Uno gatto.", "   ", ""]),
        (b"\n", [""]),
        (b"\xef\xbb\xbfOne cat.\n", ["Uno gatto."]),
        ("One\u2028cat.\nTwo dog.\x85\n".encode(), [..., ...]),  # only a newline ends a line
    ],
    ids=["nothing", "one", "no newline at the end", "CRLF", "empty and blank", "one empty", "BOM", "other line ends"],
)
def test_as_many_lines_out_as_in(tiny: Path, call: Call, text: bytes, lines: list[object]) -> None:
    done = call("translate", tiny, input=text)
    assert (done.code, done.err) == (0, "")
    found = done.out.split("\n")
    assert found.pop() == ""
    assert len(found) == len(lines)
    assert all(ours == theirs for ours, theirs in zip(found, lines, strict=True) if theirs is not ...)


def test_a_line_of_several_sentences_is_translated_one_by_one(tiny: Path, call: Call, tmp_path: Path) -> None:
    """From a pipe and from a file, to a file, with one process or two; as one text with --no-split."""
    text, out = tmp_path / "text", tmp_path / "out"
    line = "One cat. Two dog.  Three house!"
    text.write_text(f"{line}\n\nOne cat.\n" * 3)
    one, two, three = call("translate", tiny, input=b"One cat.\nTwo dog.\nThree house!\n").out.splitlines()
    expected = f"{one} {two}  {three}\n\n{one}\n" * 3
    assert call("translate", tiny, input=text.read_bytes()).out == expected
    for options in ([], ["--workers", 2]):
        assert call("translate", tiny, text, "-o", out, *options).code == 0
        assert out.read_text() == expected
    whole = call("translate", tiny, text, "--no-split", "--json").out.splitlines()
    assert [len(json.loads(row)["pieces"]) for row in whole] == [1, 0, 1] * 3
    (tmp_path / "reference").write_text(expected)
    for options, value in (([], 100.0), (["--no-split"], ...)):
        report = json.loads(call("evaluate", tiny, text, tmp_path / "reference", "--json", *options).out)
        assert (report["bleu"]["value"] == pytest.approx(100)) == (value == 100.0)


def test_files_and_streams_are_the_same(tiny: Path, call: Call, test_set: tuple[str, str], tmp_path: Path) -> None:
    source = Path(test_set[0]).read_bytes()
    (tmp_path / "packed.gz").write_bytes(gzip.compress(source))
    expected = call("translate", tiny, test_set[0]).out
    assert expected.count("\n") == 25
    assert call("translate", tiny, "-", input=source).out == expected
    assert call("translate", tiny, input=source).out == expected
    assert call("translate", tiny, tmp_path / "packed.gz").out == expected
    done = call("translate", tiny, test_set[0], "-o", tmp_path / "new" / "out.txt")
    assert (done.code, "No such file" in done.error) == (2, True)
    done = call("translate", tiny, test_set[0], "-o", tmp_path / "out.txt")
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "packed.gz"]


def test_output_over_the_input_loses_nothing(tiny: Path, call: Call, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("One cat.\nTwo dog.\n")
    assert call("translate", tiny, text, "-o", text).code == 0
    assert text.read_text() == "Uno gatto.\nDue cane.\n"
    text.write_bytes(b"One cat.\n\xff\n")
    assert call("translate", tiny, text, "-o", text).code == 1
    assert text.read_bytes() == b"One cat.\n\xff\n"


def test_json_lines(tiny: Path, call: Call) -> None:
    done = call("translate", tiny, "--json", "--n-best", "2", input=b"One cat.\n\nThe red house.\n")
    rows = [json.loads(line) for line in done.out.splitlines()]
    fields = (
        "line text score logprob tokens alternatives truncated pieces finish_reason length_ratio looped dropped".split()
    )
    assert [list(row) for row in rows] == [fields] * 3
    assert [row["finish_reason"] for row in rows] == ["stop", "blank", "stop"]
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert [row["text"] for row in rows] == ["Uno gatto.", "", "Il rosso casa."]
    assert [len(row["alternatives"]) for row in rows] == [1, 0, 1]
    assert set(rows[0]["alternatives"][0]) == {"text", "score", "logprob", "truncated"}
    translated = qkv.load(tiny).translate("One cat.", n_best=2)
    assert rows[0]["score"] == pytest.approx(translated.score, abs=1e-4)


def test_n_best_rows(tiny: Path, call: Call) -> None:
    done = call("translate", tiny, "--n-best", "3", input=b"One cat.\n\nTwo dog.\n")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [row[:2] for row in rows] == [[n, r] for n, ranks in (("1", "123"), ("2", "1"), ("3", "123")) for r in ranks]
    assert rows[0][3] == "Uno gatto."
    assert rows[3][2:] == ["0.0000", ""]
    assert float(rows[0][2]) >= float(rows[1][2]) >= float(rows[2][2])


def test_options_reach_the_translator(tiny: Path, call: Call) -> None:
    def score(*options: str) -> tuple[float, float]:
        row = json.loads(call("translate", tiny, "--json", *options, input=b"One small red cat sees two dog.\n").out)
        return row["score"], row["logprob"]

    assert score("--length-penalty", "none")[0] == score("--length-penalty", "none")[1]
    assert score("--alpha", "0")[0] == score("--alpha", "0")[1]
    assert score("--weights", "100") != score("--weights", "200")
    assert score("--beam", "1")[1] <= score("--beam", "8", "--alpha", "0")[1] + 1e-4
    assert score("--with", str(tiny), "--dtype", "fp32") == pytest.approx(score("--dtype", "fp32"), abs=1e-4)


def test_constraints_on_the_output(tiny: Path, call: Call) -> None:
    def text(*options: str) -> str:
        return call("translate", tiny, *options, input=b"One red cat.\n").out.strip()

    assert text() == "Uno rosso gatto."
    assert text("--prefix", "Tre").startswith("Tre ")
    wanted = [word for phrase in ("casa", "cane") for word in ("--must-include", phrase)]
    assert re.search("casa.*cane", text(*wanted, "--ordered", "--beam", "8"))
    assert not re.search("rosso|gatto", text("--avoid", "rosso", "--avoid", "gatto"))
    assert text("--sample", "--seed", "3", "--temperature", "2") == text(
        "--sample", "--seed", "3", "--temperature", "2"
    )


def test_a_terminal_is_answered_line_by_line(tiny: Path) -> None:
    """At a terminal each typed line is translated before the next is typed, without a progress bar."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "translate", str(tiny)]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as talk, closing(ours):
        os.close(theirs)
        assert talk.stdout
        for typed, answer in [(b"One cat.\n", b"Uno gatto.\n"), (b"\n", b"\n"), (b"Two dog.\n", b"Due cane.\n")]:
            os.write(ours, typed)
            assert select.select([talk.stdout], [], [], PATIENCE)[0], "no answer"
            assert talk.stdout.readline() == answer
        os.write(ours, b"\x04")  # Ctrl-D
        assert talk.wait(PATIENCE) == 0
        assert os.read(ours, 4096) == b"One cat.\r\n\r\nTwo dog.\r\n"  # only the echo of the terminal


def test_a_pipe_is_answered_as_it_comes(tiny: Path) -> None:
    """A program that writes a line into a pipe gets its translation at once; lines sent together return together."""
    with subprocess.Popen([*COMMAND, "translate", str(tiny)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as talk:
        assert talk.stdin
        assert talk.stdout
        for sent, answers in [
            ([b"\xef", b"\xbb\xbfOne cat.\n"], [b"Uno gatto.\n"]),  # a byte order mark in two parts
            ([b"Two ", b"dog.\nOne red cat.\n"], [b"Due cane.\n", b"Uno rosso gatto.\n"]),
            ([b"\nOne cat."], [b"\n"]),
        ]:
            for part in sent:
                talk.stdin.write(part)
                talk.stdin.flush()
                time.sleep(0.05)
            assert select.select([talk.stdout], [], [], PATIENCE)[0], "no answer"
            assert [talk.stdout.readline() for _ in answers] == answers
        talk.stdin.close()
        assert talk.stdout.read() == b"Uno gatto.\n"
        assert talk.wait(PATIENCE) == 0


def test_progress_bars_appear_only_on_a_terminal(
    tiny: Path, call: Call, test_set: tuple[str, str], tmp_path: Path
) -> None:
    """The bar is written to the terminal, the result to the output."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "translate", str(tiny), test_set[0]]
    shown = b""
    with (
        (tmp_path / "out").open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=theirs) as process,
        closing(ours),
    ):
        os.close(theirs)
        with suppress(OSError):  # raised when the other side of the terminal is closed
            while select.select([ours], [], [], PATIENCE)[0]:
                shown += os.read(ours, 4096)
        assert process.wait(PATIENCE) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == call("translate", tiny, test_set[0]).out
    assert b"translating" in shown
    assert b"25/25" in shown


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    """Close the descriptor at the end, so that a process on the other side does not wait forever."""
    try:
        yield
    finally:
        os.close(descriptor)


def test_a_closed_pipe_is_no_error(tiny: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.write_text("One.\n" * 30_000)
    line = f'"{sys.executable}" -m qkv translate "{tiny}" "{many}" --beam 1 | head -n 2'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Uno.\nUno.\n", "")


# ---- score, evaluate, average ----------------------------------------------------------------------------------------


def test_score(tiny: Path, call: Call, test_set: tuple[str, str]) -> None:
    plain = [line.split("\t") for line in call("score", tiny, *test_set).out.splitlines()]
    rows = [json.loads(line) for line in call("score", tiny, *test_set, "--json").out.splitlines()]
    assert len(plain) == len(rows) == 25
    for (logprob, perplexity), row in zip(plain, rows, strict=True):
        assert float(logprob) == pytest.approx(row["logprob"], abs=1e-3)
        assert float(perplexity) == pytest.approx(row["perplexity"], rel=1e-3)
        assert sum(row["token_logprobs"]) == pytest.approx(row["logprob"])
        assert len(row["tokens"]) == len(row["token_logprobs"])
        assert row["tokens"][-1] == "</s>"


def test_evaluate(tiny: Path, call: Call, test_set: tuple[str, str], tmp_path: Path) -> None:
    done = call("evaluate", tiny, *test_set, "--json", "-o", tmp_path / "out")
    report = json.loads(done.out)
    texts = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert texts == call("translate", tiny, test_set[0]).out.splitlines()
    reference = Path(test_set[1]).read_text(encoding="utf-8").splitlines()
    assert report["bleu"]["value"] == pytest.approx(sacrebleu.corpus_bleu(texts, [reference]).score)
    assert report["lines"] == 25
    assert "version:" in report["bleu"]["signature"]
    shown = call("evaluate", tiny, *test_set).out.splitlines()
    assert [line.split(" = ")[0] for line in shown[:4]] == ["BLEU", "BLEU lower-case, 13a", "chrF2", "TER"]


def test_evaluate_scores_lines_of_several_sentences_with_and_without_cutting(
    tiny: Path, call: Call, tmp_path: Path
) -> None:
    lines = ["One cat. Two dog.  Three house!", "The cat sees the dog.", "", "Good day. The dog runs."]
    files = tmp_path / "text", tmp_path / "reference"
    for file, texts in zip(files, (lines, [call("translate", tiny, input=b"One cat.\n").out.strip()] * 4), strict=True):
        file.write_text("".join(f"{text}\n" for text in texts))
    cut = json.loads(call("evaluate", tiny, *files, "--json").out)
    whole = json.loads(call("evaluate", tiny, *files, "--json", "--no-split").out)
    assert whole["uncut"] is None
    assert cut["uncut"] == {
        "cut_lines": 2,
        "lines": 4,
        "bleu_cut": cut["bleu"]["value"],
        "bleu": pytest.approx(whole["bleu"]["value"]),
        "chrf_cut": cut["chrf"]["value"],
        "chrf": pytest.approx(whole["chrf"]["value"]),
    }
    assert cut["uncut"]["chrf"] != cut["uncut"]["chrf_cut"]
    shown = call("evaluate", tiny, *files, "--report", tmp_path / "page.html", "--against", tiny).out
    wanted = (
        f"2 of 4 lines have several sentences: BLEU {cut['bleu']['value']:.2f}, {whole['bleu']['value']:.2f} without"
    )
    assert shown.count(wanted) == 2
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count(wanted) == 2
    assert "several sentences" not in call("evaluate", tiny, *files, "--no-split").out


def test_only_the_lines_that_were_cut_are_translated_twice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, calls = qkv.Translator(tiny), list[tuple[list[str], bool]]()
    translate = translator.translate

    def record(texts: list[str], **options: Any) -> Any:
        calls.append((texts, options.get("split", True)))
        return translate(texts, **options)

    monkeypatch.setattr(translator, "translate", record)
    lines = ["One cat. Two dog.", "The cat sees the dog.", "Good day. The dog runs."]
    scores, _ = api.evaluate(translator, lines, lines, prefix=["", "Il", ""])
    assert calls == [(lines, True), ([lines[0], lines[2]], False)]
    assert scores.uncut is not None
    calls.clear()
    assert api.evaluate(translator, lines[1:2], lines[1:2])[0].uncut is None
    assert len(calls) == 1


def test_a_run_does_not_differ_from_itself(tiny: Path, call: Call, test_set: tuple[str, str]) -> None:
    report = json.loads(call("evaluate", tiny, *test_set, "--against", tiny, "--json").out)
    assert [report["comparison"][name]["p"] for name in ("bleu", "chrf")] == [1.0, 1.0]
    shown = call("evaluate", tiny, *test_set, "--against", tiny).out
    assert shown.count("(not significant)") == 2
    assert f"b: {tiny}" in shown
    worse = call("evaluate", tiny, *test_set, "--against", tiny, "--weights", "100").out
    assert "b - a = +" in worse


def test_a_comparison_contains_both_single_reports(
    tiny: Path, call: Call, test_set: tuple[str, str], tmp_path: Path
) -> None:
    """--weights and --output apply to the run, not to the run it is compared with."""

    def report(*options: object) -> dict[str, Any]:
        return dict(json.loads(call("evaluate", tiny, *test_set, "--json", *options).out))

    early, chosen = report("--weights", "100", "-o", tmp_path / "alone"), report()
    assert early["bleu"] != chosen["bleu"]
    both = report("--weights", "100", "-o", tmp_path / "both", "--against", tiny)
    assert (tmp_path / "both").read_text() == (tmp_path / "alone").read_text()
    assert both.pop("against") == chosen
    compared = both.pop("comparison")
    assert both == early
    assert [compared["bleu"][side]["value"] for side in "ab"] == [early["bleu"]["value"], chosen["bleu"]["value"]]


def test_runs_that_are_compared_translate_under_the_same_options(tiny: Path, test_set: tuple[str, str]) -> None:
    sources, references = (Path(path).read_text(encoding="utf-8").splitlines() for path in test_set)
    (_, ours), (_, theirs), _ = api.compare(tiny, tiny, sources, references, length_penalty="none")
    assert all(found.score == found.logprob != 0 for found in ours + theirs)


def test_without_files_the_held_out_pairs_are_used(tiny: Path, call: Call) -> None:
    report = json.loads(call("evaluate", tiny, "--json", "--beam", "1").out)
    assert report["lines"] == len((tiny / "store" / "valid.src.txt").read_text(encoding="utf-8").splitlines())
    chosen = Run.open(tiny).scores
    assert report["bleu"]["value"] == pytest.approx(chosen[chosen["chosen"]]["bleu"], rel=1e-6)


def test_average(tiny: Path, call: Call, tmp_path: Path) -> None:
    import shutil

    run = shutil.copytree(tiny, tmp_path / "run")
    before = (run / "scores.json").read_bytes()
    done = call("average", run, "--name", "both")
    assert done.out == f"{run}/weights/both.safetensors: average of step-0000100, step-0000200\n"
    assert (run / "scores.json").read_bytes() == before

    def logprob(name: str) -> float:
        return float(
            json.loads(call("translate", run, "--json", "--weights", name, input=b"One cat.\n").out)["logprob"]
        )

    assert logprob("both") == logprob("average")  # as in training
    for arguments, words in [
        (["--name", "best"], "cannot name an average"),
        (["--name", "average"], "cannot name an average"),
        (["--name", "../best"], "cannot name an average"),
        (["--last", "3"], "keeps 2 checkpoints, 3 are needed"),
        (["--last", "1"], "at least 2"),
    ]:
        wrong = call("average", run, *arguments)
        assert (wrong.code, words in wrong.error) == (2, True)


# ---- config, doctor, help --------------------------------------------------------------------------------------------


def test_config_round_trip(tiny: Path, call: Call, tmp_path: Path) -> None:
    shown = call("config", tiny).out
    (tmp_path / "f.toml").write_text(shown, encoding="utf-8")
    assert call("config", tmp_path / "f.toml").out == shown
    assert not Config.from_dict(tomllib.loads(shown)).difference(Run.open(tiny).config)
    assert call("config", tiny, tmp_path / "f.toml").out == ""


def test_config_shows_where_two_differ(call: Call) -> None:
    rows = [line.split("\t") for line in call("config", "paper_base", "paper_big").out.splitlines()]
    assert ["model.d_model", "512", "1024"] in rows
    assert "model.encoder_layers" not in [row[0] for row in rows]
    changed = call("config", "paper_base", "paper_base", "--set", "model.heads=4").out
    assert changed == "model.heads\t4\t8\n"


def test_doctor(call: Call) -> None:
    done = call("doctor")
    assert done.code == 0, done.out
    assert done.out.count("  ok  ") == 4
    assert f"qkv {qkv.__version__}" in done.out
    assert "all is well" in done.out


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "translate",
        "complete",
        "fill",
        "score",
        "evaluate",
        "explain",
        "align",
        "heads",
        "report",
        "average",
        "config",
        "doctor",
        "lab",
        "lab speed",
    ],
)
def test_every_verb_explains_itself(verb: str, call: Call) -> None:
    done = call(*verb.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert "Usage: " in done.out
    if verb not in ("doctor", "lab"):
        assert "Options:" in done.out


@pytest.mark.parametrize("group", ["", "lab"])
def test_no_line_of_help_is_cut(group: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns each verb has one line, of at most 60 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(*group.split(), "--help").out.partition("Commands:\n")[2].rstrip().split("\n")
    summaries = [line.split(maxsplit=1)[1] for line in lines]
    assert len(summaries) == (5 if group else 17)
    assert [each for each in summaries if not each.endswith(".") or each.endswith("...") or len(each) > 60] == []


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from qkv.cli import main
sys.argv = ["qkv", "--help"]
try:
    main()
finally:
    heavy = {"torch", "numpy", "tokenizers", "sacrebleu", "safetensors"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "translate" in done.stdout


def test_no_verb_shows_the_verbs(call: Call) -> None:
    done = call()
    assert (done.code, done.err) == (2, "")
    shown = [line.split()[0] for line in done.out.partition("Commands:\n")[2].splitlines() if line[2:3].strip()]
    assert shown[:8] == [
        "train",
        "translate",
        "augment",
        "complete",
        "fill",
        "score",
        "evaluate",
        "explain",
    ]  # in the order of their use
    assert shown[-1] == "lab"
    assert call("--version").out == f"qkv {qkv.__version__}\n"


def test_the_command_is_kept(corpus: tuple[str, str], call: Call, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    sets = ["train.steps=1", "model.d_model=8", "model.d_ff=8", "model.heads=2", "train.device=cpu"]
    arguments = ["--src", corpus[0], "--tgt", corpus[1], "--run", run, *(x for s in sets for x in ("--set", s))]
    assert "both say how long to train" in call("train", *arguments, "--minutes", "1").error
    assert call("train", *arguments).code == 0
    command = Run.open(run).about["command"]
    assert command.startswith(f"qkv train --src {corpus[0]} --tgt {corpus[1]} --run '{run}' --set train.steps=1")
    assert f"`{command}`" in (run / "card.md").read_text(encoding="utf-8")
