"""Text files as blocks of lines, the first stage of the path.

A line ends at a newline byte and nowhere else; a carriage return before it and a byte order mark at the start of a file
are removed. Files are divided into blocks that any process can read by itself.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from qkv.core.config import CorpusConfig, DataConfig
from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from qkv.core.tokenizer import TokenizerPair

BLOCK_BYTES = 1 << 20  # a block is closed when both sides together have so many

Texts = tuple[str, ...]  # source and target, or one line of text without a source
Progress = Callable[[str, int, int | None], None]  # (stage, how much is done, of how much)
ParallelMap = Callable[[Callable[..., Any], Iterable[tuple[Any, ...]]], Iterator[Any]]  # results in the tasks' order


@dataclass(frozen=True)
class LineFormat:
    """Layout of text in lines: every file holds one side. `data.formats` adds files that hold both."""

    key: str  # part of the key of a prepared text

    def texts(self, block: TextBlock, on_bad: str) -> list[Texts | None]:
        """Return the texts of each pair of a block, or None for a pair that on_bad = "skip" leaves out."""
        sides = [block.lines(file, on_bad) for file in range(block.corpus.sides)]
        return [None if None in texts else cast(Texts, texts) for texts in zip(*sides, strict=True)]


@dataclass(frozen=True)
class Column:
    """One more array for each pair, made from the lines of one more file, the last of a corpus: alignments."""

    name: str  # of its files in the store
    key: str  # part of the key of a prepared text
    dtype: np.dtype[Any]
    read: Callable[[TextBlock, TokenizerPair], Callable[[int, Texts, list[bytes]], bytes]]  # (row, texts, ids) → array


LINES = LineFormat("lines")


@dataclass(frozen=True)
class Corpus:
    """A corpus and its files: `names` as in the config, `paths` to read; the file of `column` is the last."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    sides: int  # 2 for pairs, 1 for text without a source
    weight: float = 1.0
    tag: str = ""
    format: LineFormat = LINES
    column: Column | None = None
    given: bool = False  # a validation set

    def __str__(self) -> str:
        return " ".join(self.names)


@dataclass(frozen=True)
class TextBlock:
    """Consecutive lines of a corpus: the byte range of the block in each file."""

    corpus: Corpus
    first: int  # number of lines of this corpus before the block
    count: int
    spans: tuple[tuple[int, int], ...]  # of each file: (first byte, byte after the last)

    def where(self, row: int, file: int = 0) -> str:
        """Return the file name and line number of a row, for messages."""
        return f"{self.corpus.names[file]}, line {self.first + row + 1}"

    def texts(self, on_bad: str = "") -> list[Texts | None]:
        return self.corpus.format.texts(self, on_bad)

    def lines(self, file: int, on_bad: str = "") -> list[str | None]:
        """Read the lines of one file; with on_bad = "skip", None for a line that is not UTF-8."""
        corpus, (start, stop) = self.corpus, self.spans[file]
        with open(corpus.paths[file], "rb") as stream:
            stream.seek(start)
            data = stream.read(stop - start)
        whole, data = len(data) == stop - start, data.removesuffix(b"\n")
        if not whole or data.count(b"\n") != self.count - 1:
            raise QkvError(f"{corpus.names[file]}: the file changed while it was being read: start again")
        try:
            return [line.removesuffix("\r") for line in data.decode().split("\n")]
        except UnicodeDecodeError:
            return [decode_line(line, self.where(row, file), on_bad) for row, line in enumerate(data.split(b"\n"))]


# ---- finding files ---------------------------------------------------------------------------------------------------


def find_file(name: str, root: str) -> Path:
    if not (path := Path(root, name)).is_file():
        raise UsageError(f"{path}: no such file")
    return path


def find_corpus(corpus: CorpusConfig, data: DataConfig, find: Callable[[str, str], Path] = find_file) -> Corpus:
    """Check the config of a corpus of two parallel files and find them."""
    names = tuple(name for name in (corpus.src, corpus.tgt) if name)
    if not corpus.src:
        raise UsageError(f"corpus {corpus.tgt}: give src too" if names else "a corpus names no file: give src and tgt")
    if not corpus.tgt:
        raise UsageError(f"corpus {corpus.src}: give tgt too, or one .tsv or .jsonl file that holds both sides")
    return Corpus(names, tuple(find(name, data.root) for name in names), 2, corpus.weight, corpus.tag)


def is_stream(path: Path) -> bool:
    """Whether a file can be read only once: standard input or a pipe."""
    return path == Path("-") or not path.is_file()


def file_state(path: Path) -> dict[str, Any]:
    """Return path, size and time of a file, which are equal as long as it is not changed."""
    if is_stream(path):
        return {"path": str(path), "size": None, "mtime": None}
    stat = path.stat()
    return {"path": str(path.absolute()), "size": stat.st_size, "mtime": stat.st_mtime_ns}


# ---- blocks ----------------------------------------------------------------------------------------------------------


def split_into_blocks(corpus: Corpus) -> list[TextBlock]:
    """Divide a corpus into blocks of whole lines; its files must have the same number of lines, at least one."""
    blocks: list[TextBlock] = []
    with ExitStack() as stack:
        streams = [stack.enter_context(open(path, "rb")) for path in corpus.paths]
        starts = [stream.seek(len(BOM_UTF8) if stream.read(len(BOM_UTF8)) == BOM_UTF8 else 0) for stream in streams]
        ends, first, count = starts, 0, 0
        for lines in zip_longest(*streams):
            if None in lines:
                read = first + count
                counts = [read + (line is not None) + sum(1 for _ in s) for s, line in zip(streams, lines, strict=True)]
                if 0 in counts:
                    raise QkvError(f"{corpus.names[counts.index(0)]}: the file is empty")
                sizes = " but ".join(f"{name} has {n} lines" for name, n in zip(corpus.names, counts, strict=True))
                together = "each must belong together" if corpus.column else "one must translate line N of the other"
                raise QkvError(f"{sizes}: line N of {together}")
            ends = [end + len(line) for end, line in zip(ends, lines, strict=True)]
            count += 1
            if sum(ends) - sum(starts) >= BLOCK_BYTES:
                blocks.append(TextBlock(corpus, first, count, tuple(zip(starts, ends, strict=True))))
                starts, first, count = ends, first + count, 0
        if count:
            blocks.append(TextBlock(corpus, first, count, tuple(zip(starts, ends, strict=True))))
    if not blocks:
        raise QkvError(f"{corpus}: the file is empty")
    return blocks


def decode_line(line: bytes, where: str, on_bad: str) -> str | None:
    """Return a line as text, or None if it is not UTF-8 and on_bad = "skip"; with "", no such choice is offered."""
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        if on_bad == "skip":
            return None
        choice = ', or leave such lines out with --on-bad skip (data.on_bad = "skip")' if on_bad else ""
        place = f"byte 0x{line[error.start]:02X} at position {error.start + 1}"
        raise QkvError(f"{where}: not UTF-8 ({place}): convert the file{choice}") from None
