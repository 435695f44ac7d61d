"""Bad input: one clear line, the right exit code, no traceback, and no files that break a second attempt.

Exit code 1 means that the work failed, 2 that the call was wrong.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import qkv
from conftest import Call, sentences, tiny_config, write_pairs
from qkv.assembly import Run
from qkv.core import files


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    """Two valid files, to be damaged."""
    src, tgt = write_pairs(tmp_path, sentences(150))
    return Path(src), Path(tgt)


@pytest.fixture
def train(pairs: tuple[Path, Path], tmp_path: Path, call: Call) -> Any:
    """Two steps of training on the files as they are, in the folder `run`, with more arguments."""
    quick = tiny_config("a", "b", steps=2, tokens_per_step=256, metric="loss", average=0)
    small = quick.replace(model={"d_model": 16, "d_ff": 16})
    (tmp_path / "quick.toml").write_text(small.dumps(), encoding="utf-8")

    def run(*arguments: object) -> Any:
        files = ["--src", pairs[0], "--tgt", pairs[1], "--run", tmp_path / "run"]
        return call("train", tmp_path / "quick.toml", *files, *arguments)

    return run


def expect(done: Any, code: int, *words: str) -> None:
    assert done.code == code, done.err
    for each in words:
        assert each in done.error
    assert done.out == ""


# ---- training text ---------------------------------------------------------------------------------------------------


def test_line_counts_that_differ(pairs: tuple[Path, Path], train: Any, tmp_path: Path) -> None:
    good = pairs[1].read_bytes()
    pairs[1].write_bytes(good + b"Uno di troppo.\n")
    expect(train(), 1, "text.src has 150 lines but", "text.tgt has 151 lines")
    assert not (tmp_path / "run").exists()
    pairs[1].write_bytes(good)
    assert train().code == 0  # the corrected second attempt, into the same folder


def test_a_line_that_is_not_utf8(pairs: tuple[Path, Path], train: Any, tmp_path: Path) -> None:
    lines = pairs[0].read_bytes().split(b"\n")
    lines[6] = b"caf\xe9"
    pairs[0].write_bytes(b"\n".join(lines))
    expect(train(), 1, "text.src, line 7: not UTF-8 (byte 0xE9 at position 4)")
    assert not (tmp_path / "run").exists()
    done = train("--on-bad", "skip")
    assert done.code == 0
    header, row = (line.split("  ") for line in done.err.splitlines()[:2])
    columns = dict(zip(filter(None, map(str.strip, header)), filter(None, map(str.strip, row)), strict=True))
    assert (columns["read"], columns["not UTF-8"]) == ("150", "1")
    expect(train("--on-bad", "ignore"), 2, "holds a run already")
    shutil.rmtree(tmp_path / "run")
    expect(train("--on-bad", "ignore"), 2, 'data.on_bad = "ignore": choose one of error, skip')


@pytest.mark.parametrize("side", [0, 1])
def test_an_empty_file(pairs: tuple[Path, Path], train: Any, side: int) -> None:
    pairs[side].write_bytes(b"")
    expect(train(), 1, f"{pairs[side].name}: the file is empty")
    pairs[1 - side].write_bytes(b"")
    expect(train(), 1, "the file is empty")


def test_a_missing_file(pairs: tuple[Path, Path], train: Any, tmp_path: Path) -> None:
    pairs[1].rename(tmp_path / "elsewhere")
    expect(train(), 2, f"{pairs[1]}: no such file")
    (tmp_path / "elsewhere").rename(pairs[1])
    assert train().code == 0


def test_a_folder_or_a_broken_archive_for_a_file(pairs: tuple[Path, Path], call: Call, tmp_path: Path) -> None:
    expect(call("train", "--src", tmp_path, "--tgt", pairs[1], "--run", tmp_path / "r"), 2, "is a folder")
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00half")
    expect(
        call("train", "--src", tmp_path / "cut.gz", "--tgt", pairs[1], "--run", tmp_path / "r"), 1, "broken .gz file"
    )
    assert not (tmp_path / "r").exists()


def test_a_vocabulary_larger_than_the_text_supports(train: Any, tmp_path: Path) -> None:
    done = train("--set", "tokenizer.vocab=30000")
    expect(done, 2, "tokenizer.vocab = 30000: the text supports only")
    supported = done.error.partition("supports only ")[2].split()[0]
    assert train("--set", f"tokenizer.vocab={supported}").code == 0
    assert Run.open(tmp_path / "run").tokenizers.tgt.size == int(supported)


def test_lines_that_are_too_long_are_dropped_and_counted(pairs: tuple[Path, Path], train: Any) -> None:
    with pairs[0].open("a") as src, pairs[1].open("a") as tgt:
        src.write("cat " * 250_000 + "\nOne.\n" + "x" * 1_000_000 + "\n")
        tgt.write("Uno.\n" + "gatto " * 170_000 + "\n" + "y" * 1_000_000 + "\n")
    done = train()
    assert done.code == 0
    header, row = done.err.splitlines()[:2]
    end = header.index("too long") + len("too long")
    assert row[:end].split()[-1] == "3"


def test_text_that_is_all_filtered_out(pairs: tuple[Path, Path], train: Any) -> None:
    pairs[0].write_bytes(b"\n" * 150)
    expect(train(), 1, "no pair is left to train on: all are empty, repeated or not UTF-8")
    pairs[0].write_bytes(b"One cat.\n" * 150)
    pairs[1].write_bytes(b"Uno gatto.\n" * 150)
    expect(train(), 2, "too few to hold some out")


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.heads=3", "model.heads = 3 does not divide model.d_model = 16"),
        ("model.head=2", "unknown option model.head: did you mean model.heads?"),
        ("modle.heads=2", "unknown section modle: did you mean model?"),
        ("train.steps=many", "train.steps = 'many': expected a whole number"),
        ("train.steps=0", "train.steps = 0: must be at least 1"),
        ("model.norm=middle", "choose one of post, pre"),
        ("steps", "write section.key=value"),
        ("train.device=abacus", 'device "abacus" cannot be used'),
        ("data.max_length=900", "leaves no room"),
    ],
)
def test_an_option_that_cannot_be(train: Any, tmp_path: Path, setting: str, words: str) -> None:
    expect(train("--set", setting), 2, words)
    assert not (tmp_path / "run").exists()


def test_a_config_file_that_cannot_be(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for text, words in [
        ("[train]\nwarm_up = 3\n", "unknown option train.warm_up: did you mean train.warmup?"),
        ("[train\n", "not valid TOML"),
        ("[model]\nheads = 7\n", "model.heads = 7 does not divide model.d_model = 512"),
        ('[model]\nkind = "rmm"\n', 'model.kind = "rmm"'),
    ]:
        path.write_text(text)
        expect(call("config", path), 2, f"{path}: ", words)
    path.write_bytes(b"\xff\xfe")
    expect(call("config", path), 2, "not a text file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "paper_bas"], "no such preset, config file or run folder: did you mean paper_base?"),
        (["train", "xyz"], "presets: "),
        (["train"], "no training text"),
        (["train", "paper_base"], "nothing to train on"),
        (["train", "--src", "a"], "a: give tgt too"),
        (["train", "--src", "a", "--tgt", "b", "--tgt", "c"], "1 --src but 2 --tgt"),
        (["train", "--src", "a", "--tgt", "b", "--valid-tgt", "c"], "give --valid-src too"),
        (["train", "paper_base", "--minutes", "3"], "--minutes is for an automatic recipe"),
        (["train", "--minutes", "-3"], "--minutes"),
        (["trian"], "No such command 'trian'"),
        (["translate", "--bean", "3"], "No such option: --bean"),
        (["translate"], "Missing argument 'RUN'"),
        (["translate", "nowhere"], "nowhere: no such run folder"),
        (["translate", ".", "a"], ".: not a run folder"),
        (["config", "nothing"], "no such preset"),
        (["average", "."], ".: not a run folder"),
    ],
    ids=" ".join,
)
def test_a_call_that_is_wrong(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    expect(call(*arguments), 2, words)
    assert not list(tmp_path.iterdir())


# ---- translating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["translate", "RUN", "missing.txt"], 2, "missing.txt: no such file"),
        (["translate", "RUN", "god.txt"], 2, "god.txt: no such file: did you mean good.txt?"),
        (["translate", "RUN", "bad.txt"], 1, "bad.txt, line 2: not UTF-8"),
        (["translate", "RUN", "good.txt", "--beam", "0"], 2, "decode.beam = 0: must be at least 1"),
        (["translate", "RUN", "good.txt", "--n-best", "0"], 2, "n_best = 0"),
        (["translate", "RUN", "good.txt", "--length-penalty", "long"], 2, "choose one of gnmt, average, none"),
        (["translate", "RUN", "good.txt", "--tag", "de"], 2, 'language tag "de" is not in the vocabulary'),
        (["translate", "RUN", "good.txt", "--weights", "worst"], 2, "no weights named worst"),
        (["translate", "RUN", "good.txt", "--on-bad", "cry"], 2, "--on-bad"),
        (
            ["translate", "RUN", "good.txt", "-o", "no/such/folder"],
            2,
            "folder: cannot be written: No such file",
        ),
        (["translate", "RUN", "I love you."], 2, "to translate a sentence, pipe it: echo … | qkv translate"),
        (
            ["train", "good.txt"],
            2,
            "good.txt: not a .toml file: a config is one, and text is given with --src",
        ),
        (["train", "paper_base"], 2, "name the text with --src and --tgt"),
        (["score", "RUN", "good.txt", "one.txt"], 1, "good.txt has 2 lines but one.txt has 1"),
        (["evaluate", "RUN", "good.txt", "one.txt"], 1, "good.txt has 2 lines but one.txt has 1"),
        (["score", "RUN", "long.txt", "good.txt"], 2, "line 2: "),
        (["evaluate", "RUN", "good.txt"], 2, "give REF too"),
        (["evaluate", "RUN", "empty.txt", "empty.txt"], 1, "empty.txt: the file is empty"),
        (["heads", "RUN", "empty.txt", "empty.txt"], 1, "empty.txt: the file is empty"),
        (["evaluate", "RUN", "good.txt", "good.txt", "--against", "nowhere"], 2, "nowhere: no such run folder"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_a_text_or_option_that_cannot_be_translated(
    tiny: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("One cat.\nTwo dog.\n")
    Path("one.txt").write_text("Uno gatto.\n")
    Path("bad.txt").write_bytes(b"One cat.\n\xff\n")
    Path("empty.txt").write_bytes(b"")
    Path("long.txt").write_text("One cat.\n" + "x" * 1_000_000 + "\n")
    done = call(*(tiny if each == "RUN" else each for each in arguments))
    assert done.code == code, done.err
    assert words in done.error


def test_a_bad_line_may_be_skipped_and_stays_a_line(tiny: Path, call: Call) -> None:
    done = call("translate", tiny, "--on-bad", "skip", input=b"One cat.\n\xff\nTwo dog.\n")
    assert (done.code, done.out) == (0, "Uno gatto.\n\nDue cane.\n")
    assert done.err == "-: 1 lines were not UTF-8; their output is empty\n"


def test_a_remedy_is_offered_only_if_one_exists(tiny: Path, call: Call, tmp_path: Path) -> None:
    text = tmp_path / "bad.txt"
    text.write_bytes(b"caf\xe9\n")
    assert call("translate", tiny, text).error.endswith('with --on-bad skip (data.on_bad = "skip")')
    assert call("evaluate", tiny, text, text).error.endswith("convert the file")


def test_translations_cut_at_the_maximum_length_are_reported(copy: Path, call: Call) -> None:
    run = Run.open(copy)
    run.write_config(run.config.replace(decode={"extra_length": 0}))
    done = call("translate", copy, input=b"One\n\n")
    assert (done.code, done.out.count("\n")) == (0, 2)
    assert done.err == "-: 1 translations reached the maximum length (decode.extra_length)\n"


@pytest.mark.slow
def test_a_line_of_a_million_characters_is_answered_in_pieces(tiny: Path, call: Call) -> None:
    """Words, and one very long token: cut without loss into pieces that fit, each translated by itself."""
    sentence = " ".join(text for text, _ in sentences(2000, seed=31))
    line = f"{sentence} {'x' * 20_000} "
    line += sentence * ((1_000_000 - len(line)) // len(sentence) + 1)
    assert len(line) > 1_000_000
    translator = qkv.load(tiny)
    pieces = translator.cutter.cut(line).pieces
    assert "".join(a + b for a, b in zip(pieces.separators, (*pieces.pieces, ""), strict=True)) == line
    longest = translator.config.data.max_length
    assert all(len(translator.tokenizers.src.encode(piece)) <= longest for piece in pieces)
    done = call("translate", tiny, "--beam", "1", "--json", input=f"One cat.\n{line}\nTwo dog.\n".encode())
    assert done.code == 0
    before, found, after = (json.loads(row) for row in done.out.splitlines())
    assert (before["text"], after["text"]) == ("Uno gatto.", "Due cane.")
    assert len(found["pieces"]) == len(pieces)
    alone = [each.text for each in translator.translate(pieces.pieces, beam=1)]
    assert all(alone)
    assert found["text"] == pieces.join(alone)


# ---- run folders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A run folder, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def translated(call: Call, run: Path) -> Any:
    return call("translate", run, input=b"One cat.\n")


def test_a_truncated_weights_file(copy: Path, call: Call) -> None:
    path = Run.open(copy).weights()
    whole = path.read_bytes()
    for size in (len(whole) - 100, 100, 3, 0):
        path.write_bytes(whole[:size])
        expect(translated(call, copy), 1, f"{path}: truncated or not a safetensors file", "restore it from a copy")
    path.write_bytes(b"PK\x03\x04 something else entirely")
    expect(translated(call, copy), 1, "truncated or not a safetensors file")
    path.write_bytes(whole)
    assert translated(call, copy).out == "Uno gatto.\n"


def test_weights_of_another_model(copy: Path, call: Call) -> None:
    path = Run.open(copy).weights()
    save_file({"bert.embeddings": np.zeros((4, 2), np.float32)}, path)
    expect(translated(call, copy), 1, f"{path}: weights of another model", "is nothing in the file")
    tensors = {name: tensor.numpy() for name, tensor in files.read_tensors(Run.open(copy).weights("last")).items()}
    first = next(iter(tensors))
    save_file({**tensors, "extra": np.zeros(1, np.float32)}, path)
    expect(translated(call, copy), 1, "weights of another model: extra is (1,) in the file and nothing in the config")
    save_file({**tensors, first: np.zeros((3, 3), np.float32)}, path)
    expect(translated(call, copy), 1, f"{first} is (3, 3) in the file and")


@pytest.mark.parametrize("weights", [(), ("--weights", "last")])
def test_loading_a_run_without_weights_says_when_they_are_saved(
    copy: Path, call: Call, weights: tuple[str, ...]
) -> None:
    shutil.rmtree(copy / "weights")
    expect(call("translate", copy, *weights), 2, f"{copy}: no weights: restore them from a copy")
    (copy / "scores.json").unlink()
    words = "no weights yet: the first come with the first validation, at step 100: "
    expect(call("translate", copy, *weights), 2, f"{words}go on with `qkv train --resume --run {copy}`")
    with Run.open(copy).lock():  # as a training holds it
        expect(call("translate", copy, *weights), 2, f"{words}wait for it")


def test_a_missing_or_damaged_part(copy: Path, call: Call) -> None:
    for name, text, code, words in [
        ("tokenizer.json", "{", 1, "not a tokenizer, or cut off"),
        ("tokenizer.json", '{"format": "other"}', 1, "not a qkv tokenizer"),
        ("tokenizer.json", '{"format": "qkv-tokenizer", "version": 9}', 1, "tokenizer version 9"),
        ("tokenizer.json", '{"format": "qkv-tokenizer", "version": 1, "sides": [{}]}', 1, "damaged tokenizer"),
        ("tokenizer.json", None, 2, "cannot read the tokenizer"),
        ("config.toml", "[model]\nhead = 3\n", 2, "unknown option model.head"),
        ("config.toml", None, 2, "config.toml"),
        ("scores.json", "{", 1, "scores.json: damaged"),
        ("run.json", "[]", 1, "run.json: damaged"),
        ("run.json", '{"format": 99}', 1, "run folder of format 99, but this qkv reads format 1"),
        ("run.json", "{}", 1, "run folder of format None"),
        ("run.json", None, 2, "not a run folder (no run.json in it)"),
    ]:
        path = copy / name
        whole = path.read_bytes()
        path.unlink()
        if text is not None:
            path.write_text(text)
        expect(translated(call, copy), code, words)
        path.write_bytes(whole)
    assert translated(call, copy).out == "Uno gatto.\n"


def test_a_damaged_state(copy: Path, call: Call) -> None:
    (state,) = (copy / "state").iterdir()
    for name, words in [
        ("weights.safetensors", "truncated or not a safetensors file"),
        ("optimizer.safetensors", "truncated or not a safetensors file"),
        ("progress.json", "damaged"),
    ]:
        whole = (state / name).read_bytes()
        (state / name).write_bytes(whole[: len(whole) // 2])
        expect(call("train", "--resume", "--run", copy, "--set", "train.steps=202"), 1, f"{state / name}: {words}")
        (state / name).write_bytes(whole)
    assert call("train", "--resume", "--run", copy, "--set", "train.steps=202").code == 0


# ---- a full disk -----------------------------------------------------------------------------------------------------

# A process with a file size limit of half its next state, which acts like a disk that fills up in the middle.
LIMITED = """
import resource, sys
from qkv.core import files
from qkv.cli import main

real = files.write_tensors

def write(path, tensors, *rest):
    if path.parents[1].name == "state":
        half = sum(tensor.nbytes for tensor in tensors.values()) // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
    real(path, tensors, *rest)

files.write_tensors = write
sys.argv = ["qkv", *sys.argv[1:]]
main()
"""


def test_a_full_disk_leaves_the_previous_checkpoint(train: Any, tmp_path: Path, call: Call) -> None:
    assert train().code == 0  # writes the config; without the limit it works
    run, free = tmp_path / "run", tmp_path / "free"
    shutil.copytree(run, free)
    more = ["train", "--resume", "--run", str(run), "--set", "train.steps=6", "--set", "train.validate_every=2"]
    done = subprocess.run([sys.executable, "-c", LIMITED, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("qkv: ")
    assert "weights.safetensors: cannot be written: File too large; what was there before is untouched" in last
    assert [path.name for path in (run / "state").iterdir()] == ["step-0000002"]
    assert not list(run.rglob("*.tmp"))
    assert call("train", "--resume", "--run", run).code == 0
    more[3] = str(free)
    assert call(*more).code == 0
    for ours, theirs in zip(sorted(run.rglob("*.safetensors")), sorted(free.rglob("*.safetensors")), strict=True):
        assert ours.relative_to(run) == theirs.relative_to(free)
        same = files.read_tensors(theirs)
        assert all(tensor.equal(same[name]) for name, tensor in files.read_tensors(ours).items())


@pytest.mark.parametrize("place", ["log", "tokenizer", "output"])
def test_other_writes_to_a_full_disk_are_reported_in_one_line(
    train: Any, tiny: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "output":
        expect(call("translate", tiny, "-o", "/dev/full", input=b"One cat.\n"), 1, "No space left on device")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place == "log":
        assert train().code == 0
        size = (tmp_path / "run" / "log.jsonl").stat().st_size
        from qkv.core.run import JsonlLog

        write = JsonlLog.event

        def limited(log: JsonlLog, kind: str, *arguments: Any) -> None:
            if kind in ("train", "valid"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
            write(log, kind, *arguments)

        monkeypatch.setattr(JsonlLog, "event", limited)
        done = call("train", "--resume", "--run", tmp_path / "run", "--set", "train.steps=3")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        done = train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expect(done, 1, "File too large")


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "RUN", "IN", "IN", "--report", "ro/new/page.html"],
        ["evaluate", "RUN", "IN", "IN", "-o", "ro/out.txt"],
        ["explain", "RUN", "One cat.", "-o", "ro/map.html"],
        ["explain", "RUN", "One cat.", "-o", "ro/map.svg"],
        ["heads", "RUN", "IN", "IN", "--plot", "ro/heads.svg"],
        ["align", "RUN", "IN", "IN", "-o", "ro/links.txt"],
        ["align", "ro", "IN", "IN", "--find", "IN"],
    ],
    ids=lambda arguments: " ".join(arguments[::4]),
)
def test_unwritable_outputs_are_refused_before_the_work(
    tiny: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "in.txt").write_text("One cat.\n")
    shutil.copytree(tiny, tmp_path / "ro")
    monkeypatch.chdir(tmp_path)
    lock(tmp_path / "ro", monkeypatch)

    def work(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the model was asked")

    monkeypatch.setattr("qkv.api.translator.Translator._translate", work)
    monkeypatch.setattr("qkv.core.transformer.Transformer.encode", work)
    places: dict[str, object] = {"RUN": tiny, "IN": tmp_path / "in.txt"}
    expect(call(*(places.get(each, each) for each in arguments)), 2, "ro/", "cannot be written")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.txt", "ro"]


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder read-only, for root too (root ignores the mode)."""
    folder.chmod(0o555)
    access, open_ = os.access, io.open

    def asked(path: Any, mode: int) -> bool:
        return access(path, mode) and not (mode & os.W_OK and Path(path).absolute().is_relative_to(folder))

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode != "r" and isinstance(path, Path) and path.absolute().is_relative_to(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(path, mode, *arguments, **options)

    monkeypatch.setattr(os, "access", asked)
    monkeypatch.setattr(io, "open", opened)


# ---- debug -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--debug", "config", "nothing"], ["config", "nothing", "--debug"]])
def test_debug_shows_a_traceback(call: Call, arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert done.err.splitlines()[-1].startswith("qkv: nothing: no such preset")


def test_an_unexpected_error_has_a_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug must not look like a user's mistake."""
    monkeypatch.setattr("qkv.presets.find_config", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("config", "demo")


def test_interrupted_anywhere_is_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("qkv.presets.find_config", interrupted)
    expect(call("config", "demo"), 130, "qkv: interrupted")
