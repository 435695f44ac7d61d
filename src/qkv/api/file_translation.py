"""A whole file through a translator: chunk by chunk, in order, in bounded memory, and safe from being killed.

What is done stands in FILE.part (`qkv.api.output_journal`), and the same command started again goes on from there. Of
several processes, as torchrun starts them, each takes every n-th chunk, and the first joins their parts when all are
done. They share nothing but the folder: one that lives holds the lock of its journal, so the others see it die. The
file appears under its name when it is whole.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkv.api.output_journal import End, Entry, Journal, Part, journal_of, part_of
from qkv.assembly import Run
from qkv.console import say
from qkv.core.corpus import COMPRESSED, is_stream
from qkv.core.errors import QkvError, UsageError
from qkv.core.files import sync
from qkv.data.formats import open_text, read_any_file

CHARACTERS = 1 << 20  # of text in a chunk, however few lines that is: memory is bounded by it
POLL = 0.5  # seconds between two looks at the other processes


@dataclass(frozen=True)
class Chunk:
    """Some lines that are translated together."""

    number: int
    first: int  # number of lines before it
    lines: list[str]

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()


# What comes of a chunk: its output, whole lines of text, and what was counted on the way.
Work = Callable[[Chunk], tuple[str, Mapping[str, int]]]


@dataclass(frozen=True)
class Crew:
    """The processes that share a file, and which of them this is."""

    rank: int = 0
    world: int = 1
    local: int = 0  # which of those on this machine, so which GPU

    @classmethod
    def here(cls) -> Crew:
        """As torchrun tells it."""
        rank, world, local = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank, max(world, 1), local)

    def device(self, name: str) -> str:
        """Of several processes on a machine each has a GPU of its own, unless one is named."""
        if self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local % torch.cuda.device_count()}"
        return name

    @property
    def name(self) -> str:
        return f"process {self.rank + 1} of {self.world}"


ALONE = Crew()


def chunks(lines: Iterable[str], size: int, more: Callable[[], bool] = lambda: True) -> Iterator[Chunk]:
    """Lines as chunks of at most `size`, or fewer long ones; which lines go together depends on nothing but them.

    Unless `more` says that no other line is there yet, which ends a chunk too.
    """
    number = first = characters = 0
    some: list[str] = []
    for line in lines:
        some.append(line)
        characters += len(line)
        if len(some) == size or characters >= CHARACTERS or not more():
            yield Chunk(number, first, some)
            number, first, characters, some = number + 1, first + len(some), 0, []
    if some:
        yield Chunk(number, first, some)


def count_lines(name: str) -> int | None:
    """How many lines a file has, if that is quickly found out."""
    path = open_text(name, "")
    if is_stream(path) or path.suffix in COMPRESSED:
        return None
    count, last = 0, b"\n"
    for piece in read_any_file(path):
        count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last != b"\n")


def fingerprint(run: Run, weights: str = "") -> str:
    """What a run translates with: a digest of its config, tokenizer and weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (run.path / "config.toml", run.path / "tokenizer.json", run.weights(weights)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def translate_lines(
    lines: Iterable[str],
    write: Callable[[str], object],
    work: Work,
    *,
    size: int,
    more: Callable[[], bool] = lambda: True,
) -> Counter[str]:
    """Translate lines as they come, to where they cannot be taken back: a pipe or a terminal."""
    counts: Counter[str] = Counter()
    for chunk in chunks(lines, size, more):
        text, found = work(chunk)
        write(text)
        counts.update(found)
    return counts


def translate_file(
    lines: Iterable[str],
    output: Path,
    work: Work,
    *,
    size: int,
    task: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
    crew: Crew = ALONE,
    progress: Callable[[int], None] = lambda count: None,
) -> Counter[str]:
    """Translate lines to a file, which appears when it is whole; returns what was counted.

    `size` is how many lines make a chunk, `task` everything else that decides what is written: an unfinished file is
    only gone on with if it was begun with the same. `progress` hears of lines that need no work: those of an earlier
    attempt, and those of other processes.
    """
    _only_ours(output, crew.world)
    task = {**task, "chunk": size}
    watch = _watched(output, crew) if crew.world > 1 else nullcontext()
    with Part(output, task, about or {}, rank=crew.rank, world=crew.world) as part, watch:
        if part.lines:
            share = f", {crew.name}" if crew.world > 1 else ""
            say(f"{output}: going on, {part.lines:,} lines are done{share}")
        try:
            part.finish(_work_through(chunks(lines, size), part, work, crew, progress))
        except BaseException as error:
            if (part.entries or part.pending) and not isinstance(error, UsageError):
                say(f"{output}: unfinished: what is done is kept, start the same command again to go on")
            raise
        if crew.world > 1:
            return _together(part, crew)
        part.path.replace(output)
        sync(output.parent)
        part.journal.unlink()
        return part.counts


def _work_through(parts: Iterable[Chunk], part: Part, work: Work, crew: Crew, progress: Callable[[int], None]) -> End:
    """Do the chunks that fall to this process and are not done; those that are must be of the same lines as then."""
    done = {entry.chunk: entry for entry in part.entries}
    seen = lines = passed = 0
    for chunk in parts:
        seen, lines = seen + 1, lines + len(chunk.lines)
        if before := done.pop(chunk.number, None):
            if (before.lines, before.source) != (len(chunk.lines), chunk.digest):
                raise _other_input(part, f"lines {chunk.first + 1:,} to {lines:,} are not what they were")
        elif chunk.number % crew.world == crew.rank:
            progress(passed)
            passed = 0
            text, counts = work(chunk)
            data = text.encode()
            entry = Entry(chunk.number, len(chunk.lines), chunk.digest, len(data), zlib.crc32(data), dict(counts))
            part.add(entry, data)
            continue
        passed += len(chunk.lines)
    progress(passed)
    if done:
        raise _other_input(part, f"it ends after {lines:,} lines")
    return End(seen, lines)


def _other_input(part: Part, what: str) -> UsageError:
    return UsageError(
        f"{part.path} was begun with another input ({what}): "
        f"give that one to go on, or delete {part.path} and {part.journal.name} to begin anew"
    )


def _only_ours(output: Path, world: int) -> None:
    """Refuse to begin beside what another number of processes has left unfinished."""
    if output.is_dir():
        raise UsageError(f"{output}: is a folder: give a file")
    for found in output.parent.glob(f"{glob.escape(output.name)}.part*.json"):
        several = re.search(r"of(\d+)\.json$", found.name)
        count = int(several[1]) if several else 1
        if count != world and Journal.read(found.read_bytes()).entries:
            raise UsageError(
                f"{output}.part was begun by another command (number of processes was {count} and is {world}): "
                f"start {count} to go on, or delete {output}.part* to begin anew"
            )


# ---- several processes -----------------------------------------------------------------------------------------------


def _held(journal: Path) -> bool | None:
    """Whether a process lives that keeps this journal: it holds the lock. None if there is no journal."""
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return None
    return False


@contextmanager
def _watched(output: Path, crew: Crew) -> Iterator[None]:
    """End this process if another one dies before the file is whole, since nobody would do its share."""
    over, reason = threading.Event(), ""

    def watch() -> None:
        nonlocal reason
        seen: set[int] = set()
        while not over.wait(POLL):
            for rank in set(range(crew.world)) - {crew.rank}:
                held = _held(journal_of(part_of(output, rank, crew.world)))
                if held:
                    seen.add(rank)
                elif held is False and rank in seen and not over.is_set():
                    reason = f"process {rank + 1} of {crew.world} has ended before its work was done"
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except SystemExit:
        if reason:
            raise QkvError(f"{output}: {reason}: start the same command again to go on") from None
        raise
    finally:
        over.set()
        thread.join()


def _together(part: Part, crew: Crew) -> Counter[str]:
    """Wait until all are done; the first then makes one file of the parts, and the others see theirs vanish."""
    if crew.rank:
        while part.journal.exists():
            time.sleep(POLL)
        return Counter()
    paths = [part_of(part.output, rank, crew.world) for rank in range(crew.world)]
    while True:
        journals = [Journal.read(journal_of(path).read_bytes()) for path in paths if _held(journal_of(path))]
        if len(journals) == crew.world and all(journal.end for journal in journals):
            break
        time.sleep(POLL)
    _join(paths, journals, part.output)
    for path in reversed(paths):  # ours last: who finds it without its lock takes us for dead
        path.unlink()
        journal_of(path).unlink()
    return sum((Counter(entry.counts) for journal in journals for entry in journal.entries), Counter())


def _join(paths: list[Path], journals: list[Journal], output: Path) -> None:
    """Make one file of the parts, chunk by chunk in the order of the input."""
    whole = part_of(output)
    entries = [(entry, rank) for rank, each in enumerate(journals) for entry in each.entries]
    entries.sort(key=lambda each: each[0].chunk)
    ends = {each.end for each in journals}
    if len(ends) > 1 or [entry.chunk for entry, _ in entries] != list(range(len(entries))):
        raise QkvError(f"{output}: the processes have not read the same input: delete {whole}* and begin anew")
    try:
        with ExitStack() as stack, whole.open("wb") as out:
            streams = [stack.enter_context(path.open("rb")) for path in paths]
            for entry, rank in entries:
                data = streams[rank].read(entry.size)
                if zlib.crc32(data) != entry.crc:
                    raise QkvError(f"{paths[rank]}: changed by someone else: delete {whole}* and begin anew")
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        whole.replace(output)
        sync(output.parent)
    except OSError as error:
        raise QkvError(f"{output}: cannot be written: {error.strerror}: start the same command again") from None
