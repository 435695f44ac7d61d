"""Translation of files: chunk by chunk, in order, in bounded memory, resumable after a kill.

Finished chunks are in FILE.part (`qkv.api.output_journal`); repeating the command resumes from there. With several
processes, started by torchrun, each translates every n-th chunk, and the first joins their parts at the end. They
communicate through the folder only: a running process holds the lock of its journal, so the others notice its death.
The output file appears when it is complete.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkv.api.output_journal import End, Entry, Journal, PartialFile, journal_path, part_path
from qkv.assembly import Run
from qkv.console import Advance, say, writer
from qkv.core.corpus import is_stream
from qkv.core.errors import QkvError, UsageError
from qkv.core.files import sync
from qkv.data.formats import COMPRESSED, layout_of, open_text, read_any_file
from qkv.engines.cpu.native_search import worker_count

CHARACTERS = 1 << 20  # limit of a chunk besides its number of lines: bounds the memory
BYTES_PER_TOKEN = 4  # roughly, in European languages
ZIPPED = (".docx", ".pptx", ".xlsx", ".odt", ".epub")  # names that promise something else than text
POLL = 0.5  # seconds between checks of the other processes


@dataclass(frozen=True)
class Chunk:
    """Lines that are translated together."""

    number: int
    first: int  # number of lines before it
    lines: list[str]

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()


# Translates a chunk: returns complete lines of output, and counts that are summed over the file.
Work = Callable[[Chunk], tuple[str, Mapping[str, int]]]


@dataclass(frozen=True)
class ProcessGroup:
    """The number of processes that share a file, and the rank of this one."""

    rank: int = 0
    world: int = 1
    local: int = 0  # rank on this machine: the number of the GPU

    @classmethod
    def from_environment(cls) -> ProcessGroup:
        """Read the environment variables that torchrun sets."""
        rank, world, local = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank, max(world, 1), local)

    def device(self, name: str) -> str:
        """Return the device of this process: with several, each uses its own GPU unless one is named."""
        if self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local % torch.cuda.device_count()}"
        return name


SINGLE = ProcessGroup()


def chunks(lines: Iterable[str], size: int, more: Callable[[], bool] = lambda: True) -> Iterator[Chunk]:
    """Group lines into chunks of at most `size` lines, fewer if they are long; a pure function of the lines.

    A chunk also ends when `more` returns False: no further line is available yet (interactive input).
    """
    number = first = characters = 0
    chunk: list[str] = []
    for line in lines:
        chunk.append(line)
        characters += len(line)
        if len(chunk) == size or characters >= CHARACTERS or not more():
            yield Chunk(number, first, chunk)
            number, first, characters, chunk = number + 1, first + len(chunk), 0, []
    if chunk:
        yield Chunk(number, first, chunk)


def joined_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of each paragraph as one text; a blank line ends a paragraph and is a text by itself."""
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
            continue
        if paragraph:
            yield "\n".join(paragraph)
        paragraph = []
        yield line
    if paragraph:
        yield "\n".join(paragraph)


def is_stream_output(output: str) -> bool:
    """Return whether the output is a terminal, pipe or device, which cannot be resumed."""
    return output == "-" or (Path(output).exists() and not Path(output).is_file() and not Path(output).is_dir())


def check_files(inputs: Sequence[str], output: str, group: ProcessGroup) -> None:
    """Refuse names of input and output files that cannot work."""
    if Path(output).suffix in COMPRESSED:
        raise UsageError(f"{output}: compressed output is not supported: name it without {Path(output).suffix}")
    if (suffix := Path(output).suffix.lower()) in ZIPPED:
        plain = Path(output).with_suffix(".txt")
        raise UsageError(f"{output}: lines are written as plain text, which is no {suffix} file: name it {plain}")
    for name in inputs:
        if (form := layout_of(name)) != "lines":
            raise UsageError(f"{name}: a .{form} file holds pairs: give a file with one segment per line")
    streams = [name for name in inputs if is_stream(open_text(name))]
    if streams.count("-") > 1:
        raise UsageError("only one file can be standard input (-): give a file for the others")
    if group.world > 1 and (is_stream_output(output) or streams):
        raise UsageError("several processes cannot share standard input or output: give files for both")


def default_workers(name: str, group: ProcessGroup) -> int | None:
    """Return one process per core for a large file, and no extra process for a small one or a stream."""
    if group.world > 1:
        return None
    return worker_count(Path(name).stat().st_size // BYTES_PER_TOKEN if Path(name).is_file() else 0)


def count_lines(name: str) -> int | None:
    """Return the number of lines of a file; None for streams and compressed files, which would take too long."""
    path = open_text(name)
    if is_stream(path) or path.suffix in COMPRESSED:
        return None
    count, last = 0, b"\n"
    for piece in read_any_file(path):
        count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last != b"\n")


def fingerprint(run: Run, weights: str = "") -> str:
    """Return a digest of a run's config, tokenizer and weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (run.path / "config.toml", run.path / "tokenizer.json", run.weights(weights)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def translate_text(
    lines: Iterable[str],
    output: str,
    work: Work,
    task: Callable[[], Mapping[str, Any]],
    *,
    size: int,
    more: Callable[[], bool] = lambda: True,
    **options: Any,
) -> Counter[str]:
    """Translate lines to a file with `translate_file`, or as they arrive to a pipe or terminal; return the counts."""
    if not is_stream_output(output):
        return translate_file(lines, Path(output), work, size=size, task=task(), **options)
    counts: Counter[str] = Counter()
    with writer(output) as write:
        for chunk in chunks(lines, size, more):
            text, chunk_counts = work(chunk)
            if text:
                write(text.removesuffix("\n"))
            counts.update(chunk_counts)
    return counts


def translate_file(
    lines: Iterable[str],
    output: Path,
    work: Work,
    *,
    size: int,
    task: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
    group: ProcessGroup = SINGLE,
    progress: Advance = lambda count: None,
) -> Counter[str]:
    """Translate lines to a file, which appears when it is complete; return the counts.

    `size` is the number of lines in a chunk, `task` everything else that determines the output: an unfinished file is
    resumed only for the same task. `progress` is called with the number of lines that need no work here, because an
    earlier attempt finished them or another process translates them.
    """
    if output.is_dir():
        raise UsageError(f"{output}: is a folder: give a file")
    for path in output.parent.glob(f"{glob.escape(output.name)}.part*.json"):
        numbers = re.search(r"of(\d+)\.json$", path.name)
        world = int(numbers[1]) if numbers else 1
        if world != group.world and Journal.read(path.read_bytes()).entries:
            raise UsageError(
                f"{output}.part was begun by another command (number of processes was {world} and is {group.world}): "
                f"start {world} to resume, or delete {output}.part* to start again"
            )
    task = {**task, "chunk": size}
    watch = _watched(output, group) if group.world > 1 else nullcontext()
    with PartialFile(output, task, about or {}, rank=group.rank, world=group.world) as part, watch:
        if part.lines:
            share = f", process {group.rank + 1} of {group.world}" if group.world > 1 else ""
            say(f"{output}: resuming, {part.lines:,} lines are done{share}")
        try:
            part.finish(_translate_chunks(chunks(lines, size), part, work, group, progress))
        except BaseException as error:
            if (part.entries or part.pending) and not isinstance(error, UsageError):
                say(f"{output}: unfinished: finished lines are kept, repeat the command to resume")
            raise
        if group.world > 1:
            return _finish_group(part, group)
        part.path.replace(output)
        sync(output.parent)
        part.journal.unlink()
        return part.counts


def _translate_chunks(
    all_chunks: Iterable[Chunk], part: PartialFile, work: Work, group: ProcessGroup, progress: Advance
) -> End:
    """Translate this process's unfinished chunks; refuse the input if a finished chunk had other lines."""

    def other_input(difference: str) -> UsageError:
        return UsageError(
            f"{part.path} was begun with another input ({difference}): "
            f"give that input to resume, or delete {part.path} and {part.journal.name} to start again"
        )

    done = {entry.chunk: entry for entry in part.entries}
    number = lines = skipped = 0
    for chunk in all_chunks:
        number, lines = number + 1, lines + len(chunk.lines)
        if before := done.pop(chunk.number, None):
            if (before.lines, before.source) != (len(chunk.lines), chunk.digest):
                raise other_input(f"lines {chunk.first + 1:,} to {lines:,} have changed")
        elif chunk.number % group.world == group.rank:
            progress(skipped)
            skipped = 0
            text, counts = work(chunk)
            data = text.encode()
            entry = Entry(chunk.number, len(chunk.lines), chunk.digest, len(data), zlib.crc32(data), dict(counts))
            part.add(entry, data)
            continue
        skipped += len(chunk.lines)
    progress(skipped)
    if done:
        raise other_input(f"it ends after {lines:,} lines")
    return End(number, lines)


# ---- several processes -----------------------------------------------------------------------------------------------


def _is_locked(journal: Path) -> bool | None:
    """Return whether a running process holds the lock of this journal; None if the journal does not exist."""
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return None
    return False


@contextmanager
def _watched(output: Path, group: ProcessGroup) -> Iterator[None]:
    """End this process if another one dies before the file is complete, because its chunks would be missing."""
    finished, reason = threading.Event(), ""

    def watch() -> None:
        nonlocal reason
        running: set[int] = set()
        while not finished.wait(POLL):
            for rank in set(range(group.world)) - {group.rank}:
                locked = _is_locked(journal_path(part_path(output, rank, group.world)))
                if locked:
                    running.add(rank)
                elif locked is False and rank in running and not finished.is_set():
                    reason = f"process {rank + 1} of {group.world} has ended before its work was done"
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except SystemExit:
        if reason:
            raise QkvError(f"{output}: {reason}: repeat the command to resume") from None
        raise
    finally:
        finished.set()
        thread.join()


def _finish_group(part: PartialFile, group: ProcessGroup) -> Counter[str]:
    """Wait for all processes; the first joins the parts and deletes them, the others wait for that."""
    if group.rank:
        while part.journal.exists():
            time.sleep(POLL)
        return Counter()
    paths = [part_path(part.output, rank, group.world) for rank in range(group.world)]
    while True:
        journals = [Journal.read(journal_path(path).read_bytes()) for path in paths if _is_locked(journal_path(path))]
        if len(journals) == group.world and all(journal.end for journal in journals):
            break
        time.sleep(POLL)
    output, joined = part.output, part_path(part.output)
    entries = [(entry, rank) for rank, journal in enumerate(journals) for entry in journal.entries]
    entries.sort(key=lambda each: each[0].chunk)  # the order of the input
    if len({journal.end for journal in journals}) > 1 or [entry.chunk for entry, _ in entries] != list(
        range(len(entries))
    ):
        raise QkvError(f"{output}: the processes have read different inputs: delete {joined}* and start again")
    try:
        with ExitStack() as stack, joined.open("wb") as out:
            streams = [stack.enter_context(path.open("rb")) for path in paths]
            for entry, rank in entries:
                data = streams[rank].read(entry.size)
                if zlib.crc32(data) != entry.crc:
                    raise QkvError(f"{paths[rank]}: was changed by another program: delete {joined}* and start again")
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        joined.replace(output)
        sync(output.parent)
    except OSError as error:
        raise QkvError(f"{output}: cannot be written: {error.strerror}: fix this and repeat the command") from None
    for path in reversed(paths):  # the own part last: without its lock the others would take this process for dead
        path.unlink()
        journal_path(path).unlink()
    return sum((Counter(entry.counts) for entry, _ in entries), Counter())
