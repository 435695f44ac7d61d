"""A file in the making that a kill cannot spoil: FILE.part, and a journal of what is in it.

The journal, FILE.part.json, has one JSON object a line: first the task, then every chunk of the input whose output is
in the part, at last the end. A chunk is flushed to disk before the journal speaks of it, so after a kill or a power cut
whatever the journal does not know of is cut off and done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from qkv.core.errors import QkvError, UsageError
from qkv.core.files import sync

INTERVAL = 1.0  # seconds between two flushes to disk, each of which takes as long as a GPU needs for a hundred lines
PATIENCE = 2.0  # seconds to wait for a journal that somebody else is looking into


@dataclass(frozen=True)
class Entry:
    """A chunk that is done: its number and lines, what the lines were, and what came of them."""

    chunk: int
    lines: int
    source: str  # digest of the lines
    size: int  # bytes of output
    crc: int  # of the output
    counts: dict[str, int]  # what is told at the end, e.g. how many translations were cut short


@dataclass(frozen=True)
class End:
    """Nothing is left to do: how many chunks and lines the input has in all."""

    chunks: int
    lines: int


@dataclass
class Journal:
    """What a journal says, as far as it is whole; `offsets` are where in the file its task and each entry end."""

    task: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    end: End | None = None
    offsets: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """A line that was cut off while it was written does not count, nor does anything after it."""
        found, position = cls(), 0
        for line in data.splitlines(keepends=True):
            try:
                values: Any = json.loads(line) if line.endswith(b"\n") else None
                if not found.task:
                    found.task = values["task"]
                elif "chunks" in values:
                    found.end = End(**values)
                    break
                else:
                    found.entries.append(Entry(**values))
            except (ValueError, TypeError, KeyError):
                break
            position += len(line)
            found.offsets.append(position)
        return found


def part_of(output: Path, rank: int = 0, world: int = 1) -> Path:
    """Where a file is while it is being made; of several processes each makes a part of its own."""
    return output.with_name(f"{output.name}.part" + (f"-{rank + 1}of{world}" if world > 1 else ""))


def journal_of(part: Path) -> Path:
    """Where the journal of a part is."""
    return part.with_name(f"{part.name}.json")


class Part:
    """A file in the making, kept by one process at a time; what an earlier one did for the same task is taken over."""

    def __init__(
        self, output: Path, task: Mapping[str, Any], about: Mapping[str, Any], *, rank: int = 0, world: int = 1
    ) -> None:
        """`task` is everything that decides the output; `about` is for people who look into the journal."""
        self.output, self.path = output, part_of(output, rank, world)
        self.journal = journal_of(self.path)
        self.alone = world == 1
        self.entries: list[Entry] = []
        self.pending: list[Entry | End] = []  # written, but not yet known to be on disk
        self.flushed = time.monotonic()
        with ExitStack() as files:
            self.log = files.enter_context(self._open_locked())
            self.out = files.enter_context(self._open(self.path))
            self._take_over(json.loads(json.dumps(task)), about)
            self.files = files.pop_all()

    def _open(self, path: Path) -> IO[bytes]:
        try:
            return path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"{self.output}: cannot be written: {error.strerror}") from None

    def _open_locked(self) -> IO[bytes]:
        """The journal, kept from others: the lock is gone when this process is, however it ends."""
        deadline = time.monotonic() + PATIENCE
        while True:
            log = self._open(self.journal)
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(log.fileno()), self.journal.stat()):  # not one that was just removed
                    return log
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError as error:  # a file system without locks, as some of clusters are
                if self.alone:
                    return log
                log.close()
                raise UsageError(f"{self.output}: processes that share a file need locks: {error.strerror}") from None
            log.close()
            if time.monotonic() > deadline:
                raise UsageError(f"{self.output}: another process is writing it: wait for it, or stop it")
            time.sleep(0.05)

    def _take_over(self, task: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Keep the chunks whose output is there as it was written, and cut off the rest; if none are, begin anew."""
        self.log.seek(0)
        self.out.seek(0)
        before = Journal.read(self.log.read())
        for entry in before.entries:
            data = self.out.read(entry.size)
            if len(data) < entry.size or zlib.crc32(data) != entry.crc:
                break
            self.entries.append(entry)
        if self.entries and before.task != task:
            raise UsageError(
                f"{self.path} was begun by another command ({_difference(before.task, task)}): "
                f"give that one to go on, or delete {self.path} and {self.journal.name} to begin anew"
            )
        with self._told():
            self.out.truncate(sum(entry.size for entry in self.entries))
            if self.entries:
                self.log.truncate(before.offsets[len(self.entries)])
            else:
                self.log.truncate(0)
                _write(self.log, json.dumps({"task": task, "about": dict(about)}).encode() + b"\n")
            self.flush()
            sync(self.path.parent)

    def add(self, entry: Entry, data: bytes) -> None:
        """Add the output of a chunk."""
        with self._told():
            _write(self.out, data)
            self.pending.append(entry)
            if time.monotonic() - self.flushed >= INTERVAL:
                self.flush()

    def finish(self, end: End) -> None:
        """Write down that everything is done."""
        self.pending.append(end)
        with self._told():
            self.flush()

    def flush(self) -> None:
        """Bring everything to disk: first the output, then the journal that speaks of it."""
        os.fsync(self.out.fileno())
        while self.pending:
            record = self.pending[0]
            _write(self.log, json.dumps(asdict(record)).encode() + b"\n")
            if isinstance(record, Entry):
                self.entries.append(record)
            del self.pending[0]
        os.fsync(self.log.fileno())
        self.flushed = time.monotonic()

    @property
    def lines(self) -> int:
        """How many lines of the input are done."""
        return sum(entry.lines for entry in self.entries)

    @property
    def counts(self) -> Counter[str]:
        """What was counted in all chunks together."""
        return sum((Counter(entry.counts) for entry in self.entries), Counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Let go of the files. A failure keeps what was done; if that is nothing, it leaves nothing behind.

        But of several processes the others must see that this one has gone, by a journal that nobody holds.
        """
        if kind is not None:
            with suppress(OSError):  # perhaps a full disk is why we are here
                self.flush()
            if self.alone and not self.entries:
                self.path.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
        self.files.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QkvError(
                f"{self.output}: cannot be written: {error.strerror}: {self.lines:,} lines are kept: "
                f"make that good and start the same command again"
            ) from None


def _write(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a disk that fills up takes a part of it before it refuses
        rest = rest[file.write(rest) :]


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where two tasks differ, in words."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    was, is_ = ([json.dumps(each[name]) if name in each else "not given" for name in names] for each in (before, now))
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in zip(names, was, is_, strict=True))
