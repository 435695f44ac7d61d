"""Text files as blocks of lines: parallel files, .tsv, .jsonl or plain text, compressed or not, or standard input.

A line ends at a newline byte and nowhere else; a carriage return before it and a byte order mark at the start of a file
are dropped. Files are unpacked once, then cut into blocks that any process can read by itself.
"""

from __future__ import annotations

import bz2
import difflib
import gzip
import hashlib
import importlib
import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, cast

from qkv.core.errors import QkvError, UsageError
from qkv.data import links
from qkv.options import CorpusConfig, DataConfig

BLOCK = 1 << 20  # bytes of text, both sides together, after which a block is closed
PIECE = 1 << 20  # bytes moved at once
PACKED = (".gz", ".xz", ".bz2", ".zst")
BOM = b"\xef\xbb\xbf"
DEMO = Path(__file__).with_name("demo")  # the built-in corpus, compressed; benchmarks/demo_corpus generates it


@dataclass(frozen=True)
class Corpus:
    """A corpus whose files are known to exist: `names` are as the user wrote them, `paths` where they are.

    The file of alignments, if there is one, is the last.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    form: str  # lines, tsv or jsonl
    sides: int  # 2 for pairs, 1 for plain text
    langs: tuple[str, str]
    weight: float
    tag: str
    words: str = ""  # what the alignments count as a word, a rule of `qkv.data.links`; empty: there are none

    def __str__(self) -> str:
        return " ".join(self.names)


@dataclass(frozen=True)
class Block:
    """A run of consecutive lines: where its bytes are in each file of the corpus."""

    corpus: Corpus
    first: int  # number of lines of this corpus before the block
    count: int
    files: tuple[Path, ...]
    spans: tuple[tuple[int, int], ...]  # (first byte, number of bytes)


def resolve(corpora: Iterable[CorpusConfig], data: DataConfig) -> list[Corpus]:
    """Check what the config says about each corpus, and find its files."""
    found = [_resolve(corpus, data) for corpus in corpora]
    if len({corpus.sides for corpus in found}) > 1:
        raise UsageError("some corpora are pairs and some plain text: give one kind only")
    return found


def _resolve(corpus: CorpusConfig, data: DataConfig) -> Corpus:
    names = tuple(name for name in (corpus.src, corpus.tgt, corpus.text) if name)
    if corpus.text and len(names) > 1:
        raise UsageError(f"corpus {' '.join(names)}: give src and tgt, or text, not both")
    if corpus.tgt and not corpus.src:
        raise UsageError(f"corpus {corpus.tgt}: give src too, or text for a model without a source")
    if not names:
        raise UsageError("a corpus names no file: give src and tgt, or text")
    forms = [form_of(name) for name in names]
    if corpus.tgt and forms != ["lines", "lines"]:
        raise UsageError(f"corpus {' '.join(names)}: a .tsv or .jsonl file holds both sides: leave tgt out")
    if corpus.text and forms[0] == "tsv":
        raise UsageError(f"corpus {corpus.text}: plain text cannot be .tsv: give it as src")
    if corpus.src == "-" and not corpus.tgt:
        forms[0] = "tsv"
    elif corpus.src and not corpus.tgt and forms[0] == "lines":
        raise UsageError(f"corpus {corpus.src}: give tgt too, or one .tsv or .jsonl file that holds both sides")
    if corpus.text and corpus.tag:
        raise UsageError(f'corpus {corpus.text}: tag "{corpus.tag}" stands before a source, and plain text has none')
    words = ""
    if corpus.align:
        if corpus.text:
            raise UsageError(f"corpus {corpus.text}: {corpus.align} aligns two sides, and plain text has one")
        # Aligners cut at spaces; the built-in corpus knows its words, and its gold counts punctuation marks too.
        words = "marks" if corpus.align.startswith("demo:") else "spaces"
        names = (*names, corpus.align)
    if names.count("-") > 1:
        raise UsageError("standard input (-) can be only one file")
    return Corpus(
        names=names,
        paths=tuple(find(name, data.root) for name in names),
        form=forms[0],
        sides=1 if corpus.text else 2,
        langs=(data.src_lang, data.tgt_lang),
        weight=corpus.weight,
        tag=corpus.tag,
        words=words,
    )


def form_of(name: str) -> str:
    """How a file is laid out, by its name: lines, tsv or jsonl."""
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    return suffix[1:] if suffix in (".tsv", ".jsonl") else "lines"


def find(name: str, root: str) -> Path:
    """Where a named file is: `-` is standard input, `demo:NAME` a file of the built-in corpus.

    A file that is there only packed, `train.en.xz` for `train.en`, is found too.
    """
    if name == "-":
        return Path("-")
    if name.startswith("demo:"):
        shipped = {file.stem: file for file in sorted(DEMO.glob("*.xz"))}
        if (file := shipped.get(name.removeprefix("demo:"))) is None:
            raise UsageError(f"{name}: no such file: the built-in corpus has {', '.join(shipped)}")
        return file
    path = Path(root, name)
    if path.is_dir():
        raise UsageError(f"{path}: is a folder: give a text file")
    if path.exists():
        return path
    packed = [path.with_name(path.name + suffix) for suffix in PACKED]
    found = [each for each in packed if each.exists()]
    if len(found) > 1:
        raise UsageError(f"{path}: no such file, but {' and '.join(each.name for each in found)}: name one of them")
    if not found:
        near = _nearest(path)
        raise UsageError(f"{path}: no such file{f': did you mean {near}?' if near else ''}")
    return found[0]


def _nearest(path: Path) -> Path | None:
    """The file beside this one whose name is most like its own, if any is."""
    with suppress(OSError):  # no such folder either, or one that may not be read
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
        return next((path.with_name(name) for name in difflib.get_close_matches(path.name, names, n=1)), None)
    return None


# ---- unpacking -------------------------------------------------------------------------------------------------------


def unpack(path: Path, copy: Path) -> tuple[Path, str]:
    """A file of plain text with the content of path (path itself, or `copy`), and a hash of that content."""
    digest = hashlib.blake2b(digest_size=16)
    plain = path.suffix not in PACKED and not is_stream(path)
    with ExitStack() as stack:
        out = None if plain else stack.enter_context(open(copy, "wb"))
        for piece in pieces(path):
            digest.update(piece)
            if out:
                out.write(piece)
    return path if plain else copy, digest.hexdigest()


def is_stream(path: Path) -> bool:
    """Whether a file can be read only once: standard input or a pipe."""
    return path == Path("-") or not path.is_file()


def pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, compressed or not, or of standard input, a piece at a time."""
    try:
        if path == Path("-"):
            stdin = cast(BufferedReader, sys.stdin.buffer)
            yield from iter(lambda: stdin.read1(PIECE), b"")  # what has come, and not what is still to come
        elif path.suffix == ".zst":
            yield from _zstd(path)
        else:
            opener: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
            with cast(IO[bytes], opener(path, "rb")) as file:
                yield from iter(lambda: file.read(PIECE), b"")
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise QkvError(f"{path}: broken {path.suffix} file ({error}): copy or compress it again") from None
    except OSError as error:
        if path.suffix == ".bz2" and error.errno is None:  # how bz2 says that the data is no bzip2 stream
            raise QkvError(f"{path}: broken .bz2 file ({error}): copy or compress it again") from None
        raise QkvError(f"{path}: cannot be read: {error.strerror}") from None


def _zstd(path: Path) -> Iterator[bytes]:
    new, errors = _zstd_library(path)
    with open(path, "rb") as file:
        decompressor, complete = new(), True
        try:
            for packed in iter(lambda: file.read(PIECE >> 3), b""):
                while packed:
                    if decompressor.eof:
                        decompressor = new()
                    yield decompressor.decompress(packed)
                    packed, complete = decompressor.unused_data, decompressor.eof
        except errors as error:
            raise QkvError(f"{path}: broken .zst file ({error}): copy or compress it again") from None
    if not complete:
        raise EOFError("it ends too early")


def _zstd_library(path: Path) -> tuple[Any, Any]:
    try:
        zstd: Any = importlib.import_module("compression.zstd")  # Python 3.14 and later
        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UsageError(f"{path}: reading .zst needs the zstandard package: pip install zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


# ---- blocks ----------------------------------------------------------------------------------------------------------


def blocks(corpus: Corpus, files: tuple[Path, ...]) -> list[Block]:
    """Cut a corpus into blocks of whole lines; its files must have equally many, and some."""
    found: list[Block] = []
    with ExitStack() as stack:
        streams = [stack.enter_context(open(file, "rb")) for file in files]
        starts = [len(BOM) if stream.read(len(BOM)) == BOM else 0 for stream in streams]
        for stream, start in zip(streams, starts, strict=True):
            stream.seek(start)
        ends, first, count = list(starts), 0, 0
        for lines in zip_longest(*streams):
            if None in lines:
                raise _uneven(corpus, streams, lines, first + count)
            for side, line in enumerate(lines):
                ends[side] += len(line)
            count += 1
            if sum(ends) - sum(starts) >= BLOCK:
                found.append(_block(corpus, first, count, files, starts, ends))
                starts, first, count = list(ends), first + count, 0
        if count:
            found.append(_block(corpus, first, count, files, starts, ends))
    if not found:
        raise QkvError(f"{corpus}: the file is empty")
    return found


def _block(
    corpus: Corpus, first: int, count: int, files: tuple[Path, ...], starts: list[int], ends: list[int]
) -> Block:
    spans = tuple((start, end - start) for start, end in zip(starts, ends, strict=True))
    return Block(corpus, first, count, files, spans)


def _uneven(corpus: Corpus, streams: list[Any], lines: tuple[bytes | None, ...], before: int) -> QkvError:
    counts = [before + (line is not None) + sum(1 for _ in stream) for stream, line in zip(streams, lines, strict=True)]
    for name, count in zip(corpus.names, counts, strict=True):
        if not count:
            return QkvError(f"{name}: the file is empty")
    told = " but ".join(f"{name} has {count} lines" for name, count in zip(corpus.names, counts, strict=True))
    belongs = (
        "line N of each must belong together" if corpus.words else "line N of one must translate line N of the other"
    )
    return QkvError(f"{told}: {belongs}")


# ---- lines -----------------------------------------------------------------------------------------------------------


def read(block: Block, on_bad: str = "error") -> list[tuple[str, ...] | None]:
    """The block's pairs (or single lines), as raw text; with on_bad = "skip", None for one that is not UTF-8."""
    texts = len(block.files) - bool(block.corpus.words)
    columns = [
        _lines(file, span, name, block.first, on_bad)
        for file, span, name in list(zip(block.files, block.spans, block.corpus.names, strict=True))[:texts]
    ]
    if block.corpus.form == "lines":
        return [None if None in pair else cast(tuple[str, ...], pair) for pair in zip(*columns, strict=True)]
    parse = {"tsv": _tsv, "jsonl": _jsonl}[block.corpus.form]
    pairs = [None if line is None else parse(line, block, row) for row, line in enumerate(columns[0])]
    return [None if pair is None else _encodable(pair, block, row, on_bad) for row, pair in enumerate(pairs)]


def read_alignments(block: Block) -> list[list[links.Link] | None]:
    """The links between the words of each of the block's pairs; None where the corpus has none."""
    if not block.corpus.words:
        return [None] * block.count
    lines = _lines(block.files[-1], block.spans[-1], block.corpus.names[-1], block.first, "")
    found: list[list[links.Link] | None] = []
    for row, line in enumerate(lines):
        try:
            found.append(links.parse(line or ""))
        except ValueError as error:
            raise QkvError(
                f'{where(block, row, -1)}: "{error}" is no link: write source-target, e.g. 0-0 1-2'
            ) from None
    return found


def _lines(file: Path, span: tuple[int, int], name: str, first: int, on_bad: str) -> list[str | None]:
    with open(file, "rb") as stream:
        stream.seek(span[0])
        data = stream.read(span[1])
    if len(data) != span[1]:
        raise QkvError(f"{name}: the file changed while it was being read: start again")
    data = data.removesuffix(b"\n")
    try:
        return [line.removesuffix("\r") for line in data.decode().split("\n")]
    except UnicodeDecodeError:
        return [
            decode_line(line, f"{name}, line {first + row + 1}", on_bad) for row, line in enumerate(data.split(b"\n"))
        ]


def decode_line(line: bytes, where: str, on_bad: str) -> str | None:
    """A line as text, without its carriage return; one that is not UTF-8 is an error, or None with on_bad = "skip".

    With on_bad = "" the user has no such choice, and the error offers none.
    """
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        if on_bad == "skip":
            return None
        choice = ', or leave such lines out with --on-bad skip (data.on_bad = "skip")' if on_bad else ""
        raise QkvError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02X} at position {error.start + 1}): "
            f"convert the file{choice}"
        ) from None


def _tsv(line: str, block: Block, row: int) -> tuple[str, ...]:
    columns = tuple(line.split("\t"))
    if len(columns) != 2:
        raise QkvError(f"{where(block, row)}: expected 2 columns separated by a tab, found {len(columns)}")
    return columns


def _jsonl(line: str, block: Block, row: int) -> tuple[str, ...]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise QkvError(f"{where(block, row)}: not JSON: {error}") from None
    texts = _fields(values, block.corpus) if isinstance(values, dict) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        langs = " and ".join(f'"{lang}"' for lang in block.corpus.langs if lang) or "data.src_lang and data.tgt_lang"
        pair = f'"src" and "tgt", "source" and "target", or "translation" with {langs}'
        wanted = pair if block.corpus.sides == 2 else 'a string "text"'
        raise QkvError(f"{where(block, row)}: expected {wanted}")
    return texts


def _fields(values: dict[str, Any], corpus: Corpus) -> tuple[Any, ...]:
    if corpus.sides == 1:
        return (values.get("text"),)
    for src, tgt in (("src", "tgt"), ("source", "target")):
        if src in values and tgt in values:
            return values[src], values[tgt]
    translation = values.get("translation")
    return tuple(map(translation.get, corpus.langs)) if isinstance(translation, dict) else ()


def _encodable(pair: tuple[str, ...], block: Block, row: int, on_bad: str) -> tuple[str, ...] | None:
    # JSON can spell half of a character ("\\ud800"), which no UTF-8 file can hold.
    try:
        "".join(pair).encode()
    except UnicodeEncodeError as error:
        if on_bad == "skip":
            return None
        half = f"U+{ord(error.object[error.start]):04X}"
        raise QkvError(
            f'{where(block, row)}: {half} is half of a character: repair it, or set data.on_bad = "skip"'
        ) from None
    return pair


def where(block: Block, row: int, file: int = 0) -> str:
    """The line of a row of the block, for messages."""
    return f"{block.corpus.names[file]}, line {block.first + row + 1}"
