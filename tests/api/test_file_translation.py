"""Translation of files: killed at any point and resumed, by one or several processes, the file is the same."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import PATIENCE, Call, sentences, wait_until
from qkv import cli
from qkv.api import file_translation, output_journal
from qkv.api.file_translation import Chunk, ProcessGroup, chunks, count_lines, translate_file, translate_text
from qkv.api.output_journal import End, Entry, Journal, PartialFile
from qkv.api.translation import Translation
from qkv.assembly import Run
from qkv.core.errors import QkvError, UsageError

LINES = [f"line {number} {'ä' * (number % 7)}" for number in range(23)]
SIZE = 4


def upper(chunk: Chunk) -> tuple[str, dict[str, int]]:
    """A translator that needs no model: every line in capitals, with its number."""
    rows = [f"{number}\t{line.upper()}\n" for number, line in enumerate(chunk.lines, chunk.first + 1)]
    return "".join(rows), {"truncated": sum("3" in line for line in chunk.lines)}


EXPECTED = "".join(upper(chunk)[0] for chunk in chunks(LINES, SIZE)).encode()


class Stopped(BaseException):
    """Raised to interrupt an attempt."""


def attempt(output: Path, work: Any = upper, lines: list[str] = LINES, size: int = SIZE, **task: Any) -> Any:
    return translate_file(lines, output, work, size=size, task={"model": "a", **task})


def stopped_after(count: int) -> Any:
    """`upper`, which is stopped at chunk `count`."""

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        if chunk.number == count:
            raise Stopped
        return upper(chunk)

    return work


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """An unfinished output: three chunks of four lines are done."""
    with pytest.raises(Stopped):
        attempt(tmp_path / "out", stopped_after(3))
    return tmp_path / "out"


# ---- chunks ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab", max_size=3)), st.integers(1, 5))
def test_chunks_hold_every_line_once_and_in_order(lines: list[str], size: int) -> None:
    found = list(chunks(lines, size))
    assert [line for chunk in found for line in chunk.lines] == lines
    assert [chunk.number for chunk in found] == list(range(len(found)))
    assert [chunk.first for chunk in found] == list(range(0, len(lines), size))
    assert all(len(chunk.lines) == size for chunk in found[:-1])


def test_long_lines_make_small_chunks() -> None:
    """Otherwise 2048 lines of a million characters would be in memory at once."""
    found = list(chunks(("x" * 300_000 for _ in range(10)), 2048))
    assert [len(chunk.lines) for chunk in found] == [4, 4, 2]


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"a\n\n", 2), (b"x" * 3_000_000, 1)],
)
def test_lines_are_counted_as_they_are_read(tmp_path: Path, data: bytes, count: int) -> None:
    from qkv.data.formats import read_lines

    (tmp_path / "text").write_bytes(data)
    assert count_lines(str(tmp_path / "text")) == count == len(read_lines(str(tmp_path / "text")))
    (tmp_path / "text.gz").write_bytes(data)
    assert count_lines(str(tmp_path / "text.gz")) is None
    assert count_lines("-") is None


def test_reading_stays_one_chunk_ahead(tmp_path: Path) -> None:
    """Input is read when needed and output is not kept, so memory does not grow."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for number in range(1000):
            read += 1
            yield str(number)

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        assert read == chunk.first + len(chunk.lines)
        return upper(chunk)

    translate_file(lines(), tmp_path / "out", work, size=10, task={})
    assert read == 1000
    read = 0
    translate_text(lines(), os.devnull, work, dict, size=10)
    assert read == 1000


# ---- stopped and continued -------------------------------------------------------------------------------------------


def test_an_uninterrupted_run_leaves_only_the_output_file(tmp_path: Path) -> None:
    counts = attempt(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == EXPECTED
    assert counts == {"truncated": sum("3" in line for line in LINES)}
    assert os.listdir(tmp_path) == ["out"]
    attempt(tmp_path / "empty", lines=[])
    assert (tmp_path / "empty").read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["empty", "out"]


@pytest.mark.parametrize("interval", [0.0, 1000.0])
@pytest.mark.parametrize("at", range(7))
def test_stopped_at_any_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, interval: float) -> None:
    """Finished chunks are not repeated, whether they were flushed at each chunk or only at the end."""
    monkeypatch.setattr(output_journal, "INTERVAL", interval)
    out = tmp_path / "out"
    done: list[int] = []

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        done.append(chunk.number)
        return upper(chunk)

    if at < 6:
        with pytest.raises(Stopped):
            attempt(out, stopped_after(at))
        assert not out.exists()
        assert bool(os.listdir(tmp_path)) == (at > 0)  # with nothing done, nothing stays
    counts = attempt(out, work)
    assert out.read_bytes() == EXPECTED
    assert done == list(range(at if at < 6 else 0, 6))
    assert counts == {"truncated": sum("3" in line for line in LINES)}  # those of the first attempt too
    assert os.listdir(tmp_path) == ["out"]


def test_cut_off_at_every_byte(unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill or a power cut the part and its journal may end anywhere, in a line or in a letter."""
    monkeypatch.setattr("os.fsync", lambda handle: None)  # a thousand of them take their time
    part, log = (tmp_path / f"out.part{suffix}" for suffix in ("", ".json"))
    whole, entries = part.read_bytes(), log.read_bytes()
    ends = [len("".join(upper(chunk)[0] for chunk in list(chunks(LINES, SIZE))[:n]).encode()) for n in range(4)]
    assert len(whole) == ends[-1]
    for path, data in ((part, whole), (log, entries)):
        for size in range(len(data) + 1):
            part.write_bytes(whole)
            log.write_bytes(entries)
            os.truncate(path, size)
            redone: list[int] = []

            def work(chunk: Chunk, redone: list[int] = redone) -> tuple[str, dict[str, int]]:
                redone.append(chunk.number)
                return upper(chunk)

            attempt(unfinished, work)
            assert unfinished.read_bytes() == EXPECTED
            if path == part:  # every whole chunk is kept
                assert redone[0] == max(n for n in range(4) if ends[n] <= size)
            unfinished.unlink()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("last", [Entry(1, 4, "b", 6, 8, {}), End(1, 4)], ids=["an entry", "the end"])
def test_a_journal_line_counts_only_with_its_newline(last: Entry | End) -> None:
    whole = Entry(0, 4, "a", 5, 7, {"cut": 1})
    lines = [json.dumps(line) for line in ({"task": {"model": "a"}, "about": {}}, asdict(whole), asdict(last))]
    complete = "\n".join(lines[:2]).encode() + b"\n"
    cut = Journal.read(complete + lines[2].encode())  # the text is whole: only the newline is missing
    assert (cut.task, cut.entries, cut.end) == ({"model": "a"}, [whole], None)
    assert cut.offsets == [len(lines[0]) + 1, len(complete)]
    assert Journal.read(complete + lines[2].encode() + b"\n") != cut


@pytest.mark.parametrize("name", ["out.part", "out.part.json"])
def test_stopped_again_after_a_cut(unfinished: Path, name: str) -> None:
    """Chunks finished after a truncation are in the journal for the next attempt."""
    cut = unfinished.with_name(name)
    os.truncate(cut, cut.stat().st_size - 5)
    with pytest.raises(Stopped):
        attempt(unfinished, stopped_after(5))
    attempt(unfinished, lambda chunk: upper(chunk) if chunk.number == 5 else pytest.fail("done twice"))
    assert unfinished.read_bytes() == EXPECTED


def test_damaged_output_is_translated_again(unfinished: Path, tmp_path: Path) -> None:
    """After a power cut some file systems have zeros at the end; everything beyond the journal is cut off."""
    part, log = (tmp_path / f"out.part{suffix}" for suffix in ("", ".json"))
    whole, entries = part.read_bytes(), log.read_bytes()
    for spoilt, journal_ in [
        (whole[:-9] + bytes(9), entries),
        (bytes(len(whole)), entries),
        (whole + b"13\tLI", entries),
        (whole, entries[:-40] + bytes(40)),
        (whole, entries + bytes(100)),
        (whole, b"\n\n\n"),
        (whole, b'{"task": {}}\n[]\n'),
        (whole, b""),
    ]:
        part.write_bytes(spoilt)
        log.write_bytes(journal_)
        attempt(unfinished)
        assert unfinished.read_bytes() == EXPECTED
        assert os.listdir(tmp_path) == ["out"]


def test_resuming_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        attempt(out, stopped_after(3))
    assert capsys.readouterr().err.endswith("unfinished: finished lines are kept, repeat the command to resume\n")
    heard: list[int] = []
    translate_file(LINES, out, upper, size=SIZE, task={"model": "a"}, progress=heard.append)
    assert capsys.readouterr().err == f"{out}: resuming, 12 lines are done\n"
    assert heard[0] == 12  # at once, so that the bar does not take it for speed
    assert sum(heard) == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "b"}, 'another command (model was "a" and is "b"): repeat that command to resume, or delete'),
        ({"beam": 5}, "another command (beam was not given and is 5)"),
        ({"size": 5}, "another command (chunk was 4 and is 5)"),
        ({"lines": ["other", *LINES[1:]]}, "another input (lines 1 to 4 have changed)"),
        ({"lines": LINES[:11]}, "another input (lines 9 to 11 have changed)"),
        ({"lines": LINES[:8]}, "another input (it ends after 8 lines)"),
        ({"lines": []}, "another input (it ends after 0 lines)"),
    ],
    ids=["model", "option", "chunk", "line", "cut", "short", "empty"],
)
def test_another_task_or_input_is_refused(unfinished: Path, change: dict[str, Any], words: str) -> None:
    kept = {path.name: path.read_bytes() for path in unfinished.parent.iterdir()}
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        attempt(unfinished, **change)
    for name in kept:
        assert name in str(error.value)  # the remedy names both files
    assert {path.name: path.read_bytes() for path in unfinished.parent.iterdir()} == kept
    attempt(unfinished)
    assert unfinished.read_bytes() == EXPECTED


def test_lines_that_were_not_yet_read_may_change(unfinished: Path) -> None:
    """After a bad line is repaired, the finished chunks are still used."""
    attempt(unfinished, lines=[*LINES[:12], "mended"])
    assert unfinished.read_bytes().splitlines()[12:] == [b"13\tMENDED"]


def test_nothing_done_is_nothing_kept(tmp_path: Path) -> None:
    """A journal without a chunk is replaced by any task."""
    with pytest.raises(Stopped):
        attempt(tmp_path / "out", stopped_after(0))
    assert not os.listdir(tmp_path)
    with PartialFile(tmp_path / "out", {"model": "b"}, {}):
        pass
    attempt(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == EXPECTED


def test_two_do_not_write_one_file(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_journal, "PATIENCE", 0.0)
    with (
        PartialFile(unfinished, {"model": "a", "chunk": SIZE}, {}) as part,
        pytest.raises(UsageError, match="another process is writing it: wait for it, or stop it"),
    ):
        attempt(unfinished)
    assert part.lines == 12
    attempt(unfinished)
    assert unfinished.read_bytes() == EXPECTED


def test_a_journal_that_was_just_removed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends and removes the journal between its opening here and the lock."""
    out, real, calls = tmp_path / "out", fcntl.flock, 0

    def late(file: Any, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            Path(f"{out}.part.json").unlink()
        real(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(Stopped):
        attempt(out, stopped_after(2))
    assert calls == 2
    assert sorted(os.listdir(tmp_path)) == ["out.part", "out.part.json"]
    attempt(out, lambda chunk: upper(chunk) if chunk.number >= 2 else pytest.fail("done twice"))
    assert out.read_bytes() == EXPECTED


def test_a_file_system_without_locks_is_enough_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: Any, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    attempt(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == EXPECTED
    with pytest.raises(UsageError, match=r"cannot be locked \(Function not implemented\), as several processes need"):
        translate_file(LINES, tmp_path / "out", upper, size=SIZE, task={}, group=ProcessGroup(0, 2))


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_journal, "INTERVAL", 0.0)
    out = tmp_path / "out"
    real = output_journal._write

    def full(file: Any, data: bytes) -> None:
        if b"13\t" in data:
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(output_journal, "_write", full)
        with pytest.raises(QkvError, match="out: cannot be written: No space left on device: 12 lines are kept"):
            attempt(out)
    assert attempt(out, lambda chunk: upper(chunk) if chunk.number >= 3 else pytest.fail("done twice"))
    assert out.read_bytes() == EXPECTED


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder: give a file"):
        attempt(tmp_path)
    with pytest.raises(UsageError, match=r"no/out: cannot be written: No such file or directory"):
        attempt(tmp_path / "no" / "out")
    assert os.listdir(tmp_path) == []


# A process that kills itself in the middle of its n-th operation on files.
KILLED = """
import os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_file_translation as tests
from qkv.api import output_journal as journal

def run(out, at):
    steps = 0
    def step(real, *arguments):
        nonlocal steps
        steps += 1
        if steps == at:
            if real is write:
                file, data = arguments
                write(file, data[: random.Random(at).randrange(len(data) + 1)])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    write, journal.INTERVAL = journal._write, 0.0
    for owner, name in ((journal, "_write"), (os, "fsync"), (os, "replace"), (os, "unlink")):
        setattr(owner, name, lambda *arguments, real=getattr(owner, name): step(real, *arguments))
    tests.attempt(Path(out))

for line in sys.stdin:
    out, at = line.split()
    child = os.fork()
    if not child:
        run(out, int(at))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_killed_at_every_step_towards_the_disk(tmp_path: Path) -> None:
    """SIGKILL before or in the middle of each write, flush, rename and removal; then the same from where it was."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        assert forker.stdin
        assert forker.stdout

        def run(out: Path, at: int) -> int:
            print(out, at, file=forker.stdin, flush=True)
            return int(forker.stdout.readline())

        for at in range(1, 100):
            out = tmp_path / str(at)
            code = run(out, at)
            assert code in (0, -signal.SIGKILL)
            if code == 0:
                break
            assert not out.exists() or out.read_bytes() == EXPECTED  # never half a file
            attempt(out)
            assert out.read_bytes() == EXPECTED
        assert at > 6 * 4  # a write and a flush of the part and of the journal for each chunk, and some more
        pick, out = random.Random(1), tmp_path / "again"
        while run(out, pick.randrange(3, 12)):
            assert not out.exists() or out.read_bytes() == EXPECTED
        assert out.read_bytes() == EXPECTED
        forker.stdin.close()
    assert not list(tmp_path.glob("*.part*"))


# ---- several processes -----------------------------------------------------------------------------------------------


def together(output: Path, world: int, work: Any = upper, **options: Any) -> list[Any]:
    """Run the processes of a group as threads."""
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = translate_file(
                LINES, output, work, size=SIZE, task={"model": "a"}, group=ProcessGroup(rank, world), **options
            )
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world", [2, 3, 8])
def test_several_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Each process translates its share (with 8, some get none); they may finish in any order."""
    monkeypatch.setattr(file_translation, "POLL", 0.05)
    shares: dict[int, list[int]] = {}

    def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
        time.sleep(random.random() / 20)
        shares.setdefault(threading.get_ident(), []).append(chunk.number)
        return upper(chunk)

    first, *others = together(tmp_path / "out", world, work)
    assert (tmp_path / "out").read_bytes() == EXPECTED
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(shares.values()) == [list(range(rank, 6, world)) for rank in range(min(world, 6))]
    assert first == {"truncated": sum("3" in line for line in LINES)}
    assert others == [{}] * (world - 1)


def test_several_processes_resume_a_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_translation, "POLL", 0.05)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            file_translation, "_watched", lambda *group: contextlib.nullcontext()
        )  # else each would end all of us

        def work(chunk: Chunk) -> tuple[str, dict[str, int]]:
            if chunk.number >= 3:
                raise Stopped
            return upper(chunk)

        assert [type(error) for error in together(out, 2, work)] == [Stopped, Stopped]
    assert sorted(os.listdir(tmp_path)) == [f"out.part-{n}of2{end}" for n in (1, 2) for end in ("", ".json")]
    for world in (1, 3):
        with pytest.raises(UsageError, match=rf"number of processes was 2 and is {world}\): start 2 to resume"):
            translate_file(LINES, out, upper, size=SIZE, task={}, group=ProcessGroup(0, world))
    done: list[int] = []

    def rest(chunk: Chunk) -> tuple[str, dict[str, int]]:
        done.append(chunk.number)
        return upper(chunk)

    first, _ = together(out, 2, rest)
    assert sorted(done) == [3, 4, 5]
    assert out.read_bytes() == EXPECTED
    assert first == {"truncated": sum("3" in line for line in LINES)}
    assert os.listdir(tmp_path) == ["out"]


# One of two processes, as torchrun starts them. With `killed`, the second is killed in its second chunk, once the first
# has seen it alive; the first is then at a chunk that would take a quarter of an hour, or before it.
SHARED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_file_translation as tests
from qkv import cli
from qkv.api import file_translation as files, output_journal as journal
from qkv.api.translation import Translation

journal.INTERVAL = 0.0
out, killed, is_held = Path(sys.argv[2]), sys.argv[3:] == ["killed"], files._is_locked
seen = out.parent / "seen"

def held(journal):
    found = is_held(journal)
    if killed and found and os.environ["RANK"] == "0":
        seen.touch()
    return found

def work(chunk):
    if killed and chunk.number == 3:
        while not seen.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if killed and chunk.number == 4:
        time.sleep(900)
    return tests.upper(chunk)

@cli.app.command()
def share():
    files.translate_file(tests.LINES, out, work, size=tests.SIZE, task={}, group=files.ProcessGroup.from_environment())

files._is_locked = held
sys.argv = ["qkv", "share"]
cli.main()
"""


@pytest.mark.slow
def test_one_that_dies_takes_the_others_down(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run_two(*how: str) -> list[tuple[int, str]]:
        command = [sys.executable, "-c", SHARED, str(Path(__file__).parent), str(out), *how]
        group = [
            subprocess.Popen(
                command, env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"}, stderr=subprocess.PIPE, text=True
            )
            for rank in "01"
        ]
        errors = [each.communicate(timeout=PATIENCE)[1] for each in group]
        return [(each.returncode, text) for each, text in zip(group, errors, strict=True)]

    (code, errors), (killed, _) = run_two("killed")
    assert killed == -signal.SIGKILL
    assert code == 1
    assert errors.splitlines()[-1] == (
        f"qkv: {out}: process 2 of 2 has ended before its work was done: repeat the command to resume"
    )
    assert not out.exists()
    assert [code for code, _ in run_two()] == [0, 0]
    assert out.read_bytes() == EXPECTED
    assert sorted(os.listdir(tmp_path)) == ["out", "seen"]


# ---- the verb --------------------------------------------------------------------------------------------------------


class Recorder:
    """Fake translator that records its options."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.members: list[Any] = []  # of the loaded runs
        self.run: Any = None
        self.cutter = SimpleNamespace(sentences=1)
        self.asked: list[dict[str, Any]] = []

    def learn_shortlist(self) -> None:
        pass

    def translate(self, lines: list[str], first: int, progress: Any, **how: Any) -> list[Translation]:
        self.asked.append(how)
        progress(len(lines))
        return [Translation(line.upper(), -1.0, -2.0, [line], []) for line in lines]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()

    def load(run: Path, *, others: list[Path], **options: Any) -> Recorder:
        found.members = [SimpleNamespace(run=Run.open(each)) for each in (run, *others)]
        found.run = found.members[0].run
        return found

    monkeypatch.setattr("qkv.api.translator.Translator", load)
    monkeypatch.setattr("qkv.api.file_translation.fingerprint", lambda run, weights: f"{run.path.name} {weights}")
    return found


# Every option of decoding, as it is written and as the translator is given it.
HOW: dict[str, tuple[list[str], Any]] = {
    "beam": (["5"], 5),
    "n_best": (["2"], 2),
    "length_penalty": (["none"], "none"),
    "alpha": (["0"], 0.0),
    "coverage": (["0.2"], 0.2),
    "min_length": (["0"], 0),
    "max_length": (["9"], 9),
    "repetition_penalty": (["1.5"], 1.5),
    "no_repeat_ngram": (["3"], 3),
    "groups": (["2"], 2),
    "diversity": (["0"], 0.0),
    "sample": ([], True),
    "temperature": (["0"], 0.0),
    "top_k": (["4"], 4),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.1"], 0.1),
    "seed": (["0"], 0),
    "prefix": (["Il"], "Il"),
    "must_include": (["a b", "c"], ["a b", "c"]),
    "ordered": ([], True),
    "avoid": (["d"], ["d"]),
    "shortlist": ([], True),
    "rerank": (["chrf"], "chrf"),
    "candidates": (["8"], 8),
    "split": ([], False),
    "newlines": (["join"], "join"),
    "tag": (["it"], "it"),
}
NEGATED = {"split": "no_split"}


def test_options_are_handed_on_if_given(tiny: Path, call: Call, recorder: Recorder) -> None:
    assert call("translate", tiny, input=b"x\n").code == 0
    assert recorder.asked.pop() == {}
    for name, (values, expected) in HOW.items():
        option = f"--{NEGATED.get(name, name).replace('_', '-')}"
        words = [word for value in values for word in (option, value)] or [option]
        assert call("translate", tiny, *words, input=b"x\n").code == 0
        assert recorder.asked.pop() == {name: expected}


def test_every_option_of_decoding_is_there() -> None:
    import typer

    from qkv import cli
    from qkv.cli.text_verbs import NOT_SEARCH
    from qkv.decoding.search_request import Options

    command = typer.main.get_command(cli.app).commands["translate"]  # type: ignore[attr-defined]
    assert {each.name for each in command.params} - {*NOT_SEARCH, "help"} == {NEGATED.get(name, name) for name in HOW}
    assert set(HOW) == set(Options.__annotations__) - {"first", "progress", "protected", "check"}


def test_every_option_is_on_the_page() -> None:
    """docs/decoding.md shows each of them acting, in a command that docs/make_decoding.py runs."""
    import typer

    from qkv import cli

    command = typer.main.get_command(cli.app).commands["translate"]  # type: ignore[attr-defined]
    page = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")
    used = {word for line in page.splitlines() if line.startswith("$ ") for word in shlex.split(line)}
    options = {each.opts[0] for each in command.params if each.opts[0].startswith("--")} - {"--help"}
    assert options <= used
    explained = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert {option for option in options if f"`{option}" not in explained} == set()
    assert {word for word in used if word.startswith("--")} <= options | {"--nproc-per-node"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--beam", "5"], "beam was not given and is 5"),
        (["--json"], "json was false and is true"),
        (["--weights", "100"], 'models was ["tiny "] and is ["tiny 100"]'),
        (["--with", "."], "models was"),
        (["--dtype", "int8"], 'dtype was "auto" and is "int8"'),
        (["--no-split"], "split was true and is false"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_command_is_refused(
    tiny: Path, call: Call, recorder: Recorder, unfinished_call: list[Any], options: list[str], words: str
) -> None:
    done = call("translate", tiny, *unfinished_call, *options)
    assert done.code == 2
    assert words in done.error
    assert "repeat that command to resume, or delete" in done.error


@pytest.fixture
def unfinished_call(
    tiny: Path, call: Call, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The arguments of a call that failed at a bad line in its second chunk."""
    monkeypatch.setattr("qkv.api.translator.CHUNK", 3)
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(b"a\nb\nc\nd\n\xff\n")
    monkeypatch.chdir(tiny)
    done = call("translate", tiny, text, "-o", out)
    assert (done.code, "text, line 5: not UTF-8" in done.error) == (1, True)
    assert done.err.startswith(f"{out}: unfinished: finished lines are kept")
    return [text, "-o", out]


def test_a_bad_line_may_be_skipped_on_resuming(
    tiny: Path, call: Call, recorder: Recorder, unfinished_call: list[Any], tmp_path: Path
) -> None:
    recorder.asked.clear()
    done = call("translate", tiny, *unfinished_call, "--on-bad", "skip")
    assert (done.code, (tmp_path / "out").read_text()) == (0, "A\nB\nC\nD\n\n")
    assert len(recorder.asked) == 1
    text, _, out = unfinished_call
    going, bad = done.err.splitlines()
    assert going == f"{out}: resuming, 3 lines are done"
    assert bad == f"{text}: 1 lines were not UTF-8; their output is empty"
    assert sorted(os.listdir(tmp_path)) == ["out", "text"]


def test_a_translation_of_standard_input_can_be_resumed(
    tiny: Path, call: Call, recorder: Recorder, tmp_path: Path
) -> None:
    """The same text on standard input again; another is refused."""
    out = tmp_path / "out"
    good = b"".join(b"%d\n" % number for number in range(5000))
    assert call("translate", tiny, "-o", out, input=good + b"\xff").code == 1
    done = call("translate", tiny, "-o", out, input=b"0" + good)
    assert (done.code, "begun with another input (lines 1 to 2,048" in done.error) == (2, True)
    recorder.asked.clear()
    assert call("translate", tiny, "-o", out, input=good).code == 0
    assert out.read_bytes() == good
    assert len(recorder.asked) == 1


def test_several_processes_need_two_files(tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert ProcessGroup.from_environment() == ProcessGroup(1, 2, 1)
    for arguments in (["-o", "out"], [__file__], ["-", "-o", "out"], ["/dev/null", "-o", "out"]):
        done = call("translate", tiny, *arguments)
        assert (done.code, "several processes cannot share standard input or output" in done.error) == (2, True)


# The command line with smaller chunks and a pause before each. It stops for ever at the chunk HELD, counted from its
# start, so that a test can kill it, and kills itself at the chunk FATAL of the file.
SLOW = """
import itertools, os, signal, sys, time
from qkv.api import output_journal as journal, translator
from qkv.cli import main, text_verbs as translating

translator.CHUNK, journal.INTERVAL = 20, 0.0
pause, fatal, hang = float(sys.argv[1]), int(os.environ.get("FATAL", -1)), int(os.environ.get("HELD", -1))
make, begun = translating._chunk_work, itertools.count()

def slow(*arguments):
    real = make(*arguments)
    def work(chunk):
        time.sleep(900 if next(begun) == hang else pause)
        if chunk.number == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(chunk)
    return work

translating._chunk_work = slow
sys.argv = ["qkv", *sys.argv[2:]]
main()
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(f"{source}\n" for source, _ in sentences(300, seed=5)))
    return path


@pytest.mark.slow
def test_a_killed_translation_resumes(
    tiny: Path, call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed three times from outside at any point; the scores are equal to the last digit."""
    monkeypatch.setattr("qkv.api.translator.CHUNK", 20)
    form = ["--json", "--n-best", "2"]
    assert call("translate", tiny, text, *form, "-o", tmp_path / "expected").code == 0
    out = tmp_path / "out"
    arguments = ["translate", str(tiny), str(text), "-o", str(out), *form]
    monkeypatch.setenv("HELD", "3")
    for kills in range(3):
        with subprocess.Popen([sys.executable, "-c", SLOW, "0.2", *arguments], stderr=subprocess.PIPE) as process:
            wait_for(Path(f"{out}.part"), Path(f"{out}.part").stat().st_size if kills else 0, process)
            process.kill()
    monkeypatch.delenv("HELD")
    done = subprocess.run([sys.executable, "-c", SLOW, "0", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r".*out: resuming, [1-9]\d+ lines are done\n", done.stderr)
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()
    assert [json.loads(line)["line"] for line in out.read_text().splitlines()] == list(range(1, 301))


@pytest.mark.slow
def test_torchrun(tiny: Path, call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of two processes is killed, the other ends; restarted, they write the same file as one process."""
    monkeypatch.setattr("qkv.api.translator.CHUNK", 20)
    assert call("translate", tiny, text, "--json", "-o", tmp_path / "expected").code == 0
    out, script = tmp_path / "out", tmp_path / "slow.py"
    script.write_text(SLOW)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = ["translate", str(tiny), str(text), "--json", "-o", str(out)]
    monkeypatch.setenv("FATAL", "7")
    done = subprocess.run([*torchrun, "0.5", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert not out.exists()
    monkeypatch.delenv("FATAL")
    done = subprocess.run([*torchrun, "0", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"out: resuming, [1-9]\d+ lines are done, process 2 of 2\n", done.stderr)
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["expected", "out", "slow.py", "text"]


def wait_for(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has grown."""
    wait_until(lambda: (path.exists() and path.stat().st_size > size) or process.poll() is not None)
    assert process.poll() is None


def test_unsafe_inputs_and_outputs_are_refused(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "in.txt"
    text.write_text("One cat.\n", encoding="utf-8")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("One cat.\tUn gatto.\n", encoding="utf-8")
    for arguments, message in (
        ([str(text), "-o", str(tmp_path / "out.gz")], "without .gz"),
        ([str(pairs)], "holds pairs"),
    ):
        with pytest.raises(UsageError, match=message):
            cli.app(["translate", str(tiny), *arguments], standalone_mode=False)
    assert text.read_text(encoding="utf-8") == "One cat.\n"
