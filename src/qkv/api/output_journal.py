"""An unfinished output file that survives a kill: FILE.part, and a journal of its chunks.

The journal, FILE.part.json, has one JSON object per line: first the task, then one entry for each chunk in the part,
then the end. The output of a chunk is flushed to disk before its entry is written, so after a kill or a power cut
everything without an entry is truncated and translated again.
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
from typing import IO, Any, Self

from qkv.core.errors import QkvError, UsageError
from qkv.core.files import sync

INTERVAL = 1.0  # seconds between flushes to disk; a flush takes as long as the translation of 100 lines on a GPU
PATIENCE = 2.0  # seconds to wait for the lock: another process may be reading the journal


@dataclass(frozen=True)
class Entry:
    """A finished chunk: its number, number of lines, digest of the input, size and checksum of the output."""

    chunk: int
    lines: int
    source: str  # digest of the lines
    size: int  # bytes of output
    crc: int  # of the output
    counts: dict[str, int]  # reported at the end, e.g. the number of truncated translations


@dataclass(frozen=True)
class End:
    """End of the input: its number of chunks and lines."""

    chunks: int
    lines: int


@dataclass
class Journal:
    """The complete lines of a journal; `offsets` are the positions in the file after the task and each entry."""

    task: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    end: End | None = None
    offsets: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a journal up to the first incomplete or damaged line."""
        journal, position = cls(), 0
        for line in data.splitlines(keepends=True):
            try:
                values: Any = json.loads(line) if line.endswith(b"\n") else None  # without newline: cut while written
                if not journal.task:
                    journal.task = values["task"]
                elif "chunks" in values:
                    journal.end = End(**values)
                    break
                else:
                    journal.entries.append(Entry(**values))
            except (ValueError, TypeError, KeyError):
                break
            position += len(line)
            journal.offsets.append(position)
        return journal


def part_path(output: Path, rank: int = 0, world: int = 1) -> Path:
    """Return the path of an unfinished output; each of several processes has its own part."""
    return output.with_name(f"{output.name}.part" + (f"-{rank + 1}of{world}" if world > 1 else ""))


def journal_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


class PartialFile:
    """An unfinished output, locked by one process; the chunks of an earlier attempt at the same task are kept."""

    def __init__(
        self, output: Path, task: Mapping[str, Any], about: Mapping[str, Any], *, rank: int = 0, world: int = 1
    ) -> None:
        """Open or create it; `task` is everything that determines the output, `about` is information for users."""
        self.output, self.path = output, part_path(output, rank, world)
        self.journal = journal_path(self.path)
        self.single = world == 1
        self.entries: list[Entry] = []
        self.pending: list[Entry | End] = []  # written, but not yet flushed to disk
        self.flushed = time.monotonic()
        with ExitStack() as files:
            self.log = files.enter_context(self._open_locked())
            self.out = files.enter_context(self._open(self.path))
            self._resume(json.loads(json.dumps(task)), about)
            self.files = files.pop_all()

    def _open(self, path: Path) -> IO[bytes]:
        try:
            return path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"{self.output}: cannot be written: {error.strerror}") from None

    def _open_locked(self) -> IO[bytes]:
        """Open the journal with an exclusive lock, which the system releases when this process ends."""
        deadline = time.monotonic() + PATIENCE
        while True:
            log = self._open(self.journal)
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(log.fileno()), self.journal.stat()):  # still the file at this path
                    return log
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError as error:  # a file system without locks, as on some clusters
                if self.single:
                    return log
                log.close()
                raise UsageError(
                    f"{self.output}: cannot be locked ({error.strerror}), as several processes need: use one process"
                ) from None
            log.close()
            if time.monotonic() > deadline:
                raise UsageError(f"{self.output}: another process is writing it: wait for it, or stop it")
            time.sleep(0.05)

    def _resume(self, task: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Keep the chunks with intact output and truncate the rest; without any, start a new journal."""
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
                f"repeat that command to resume, or delete {self.path} and {self.journal.name} to start again"
            )
        with self._write_errors():
            self.out.truncate(sum(entry.size for entry in self.entries))
            if self.entries:
                self.log.truncate(before.offsets[len(self.entries)])
            else:
                self.log.truncate(0)
                _write(self.log, json.dumps({"task": task, "about": dict(about)}).encode() + b"\n")
            self.flush()
            sync(self.path.parent)

    def add(self, entry: Entry, data: bytes) -> None:
        """Append the output of a chunk."""
        with self._write_errors():
            _write(self.out, data)
            self.pending.append(entry)
            if time.monotonic() - self.flushed >= INTERVAL:
                self.flush()

    def finish(self, end: End) -> None:
        """Append the entry that marks the end of the input, and flush."""
        self.pending.append(end)
        with self._write_errors():
            self.flush()

    def flush(self) -> None:
        """Flush to disk: first the output, then its entries in the journal."""
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
        return sum(entry.lines for entry in self.entries)

    @property
    def counts(self) -> Counter[str]:
        """Return the sum of the counts of all chunks."""
        return sum((Counter(entry.counts) for entry in self.entries), Counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files; after a failure, keep the finished chunks, or remove the files if there are none.

        With several processes the files stay: an unlocked journal shows that this process has ended.
        """
        if kind is not None:
            with suppress(OSError):  # the failure may be a full disk
                self.flush()
            if self.single and not self.entries:
                self.path.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
        self.files.close()

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QkvError(
                f"{self.output}: cannot be written: {error.strerror}: {self.lines:,} lines are kept: "
                f"fix this and repeat the command to resume"
            ) from None


def _write(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a full disk may accept a part of the data first
        rest = rest[file.write(rest) :]


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the differences between two tasks as text."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    old, new = ([json.dumps(task[name]) if name in task else "not given" for name in names] for task in (before, now))
    return ", ".join(f"{name} was {a} and is {b}" for name, a, b in zip(names, old, new, strict=True))
