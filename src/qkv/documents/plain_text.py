"""Plain text: a line is a segment, and so are the lines of a hard-wrapped paragraph; white space is kept.

A line continues on the next one if it does not end a sentence, and is long or had no room for the next word; short
lines also have to end a sentence together. Lists and headings stay lines; tabs and wide gaps separate cells. A
translation of several lines is wrapped at the width of its paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

from qkv.documents import Document, decode_utf8, read_utf8
from qkv.documents.segments import WHITE_SPACE, Segment, TextFormat, Token, make_segment, split_lines

BLOCK_BYTES = 1 << 20
LONG_LINE = 40  # characters; a paragraph of shorter lines is joined only if it ends a sentence
TERMINAL = tuple(".!?…:。！？｡؟۔।")
CLOSERS = "\"'”’“»›)]}」』）》*_"
ITEM = re.compile(r"[-+*•–—>|#]|[0-9]+[.)]\s|[A-Za-z][.)]\s")  # begins an item of a list or a quoted line
COLUMN = re.compile(r"([ \t]*\t[ \t]*| {3,})")  # between the cells of a table
SPACES = re.compile(f"[{WHITE_SPACE}]+")

# Scripts without spaces: lines are joined without one.
WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60"
WIDE_NEWLINE = re.compile(rf"(?<=[{WIDE}])[ \t]*(?:\r\n|\r|\n)[ \t]*(?=[{WIDE}])")


def read(name: str, data: bytes) -> Document:
    return read_utf8(name, data, "text/plain", cut)


def read_blocks(name: str, parts: Iterable[bytes], size: int = BLOCK_BYTES) -> Iterator[Document]:
    """Read a text of any length as documents of about `size` bytes, which end with a paragraph or else with a line."""
    pending: list[bytes] = []
    pending_bytes = lines = 0
    for part in parts:
        blank = part.rfind(b"\n\n") + 2, part.rfind(b"\n\r\n") + 3
        end = max(blank) if max(blank) > 2 else part.rfind(b"\n") + 1
        if not end or pending_bytes + end < size:
            pending.append(part)
            pending_bytes += len(part)
            continue
        block = b"".join([*pending, part[:end]])
        decode_utf8(name, block, lines)  # names the line of the whole text
        lines += block.count(b"\n")
        yield read(name, block)
        pending, pending_bytes = [part[end:]], len(part) - end
    block = b"".join(pending)
    decode_utf8(name, block, lines)
    yield read(name, block)


def cut(text: str) -> list[str | Segment]:
    """Split into kept white space and segments."""
    parts: list[str | Segment] = []
    for is_blank, group in groupby(split_lines(text), key=lambda line: not line.strip()):
        if is_blank:
            parts += group
        else:
            parts += _paragraph_parts(list(group))
    return parts


def _paragraph_parts(lines: list[str]) -> Iterator[str | Segment]:
    """Yield the segments of the lines between two blank lines."""
    width = max(map(_width, lines))
    run: list[str] = []
    runs = [run]
    for line in lines:
        if run and not _continues(run, line, width):
            runs.append(run := [])
        run.append(line)
    for run in runs:
        if len(run) > 1 and not (width >= LONG_LINE or _ends_sentence(run[-1])):
            for line in run:
                yield from _run_parts([line], width)
        else:
            yield from _run_parts(run, width)


def _run_parts(run: list[str], width: int) -> Iterator[str | Segment]:
    """Yield the segment of one line or of several that are joined, and the white space around it."""
    text = "".join(run)
    inner = text.strip()
    begin = text.index(inner)
    yield text[:begin]
    if len(run) > 1:
        line_end = run[0][len(run[0].rstrip("\r\n")) :]
        wrap = partial(_wrap, width=width, first=len(_indent(run[0])), newline=line_end + _indent(run[1]))
        yield make_segment([*join_lines(inner)], TextFormat(lay_out=wrap)) or inner
    else:
        for cell in COLUMN.split(inner):
            yield make_segment([Token("text", cell, cell)], TextFormat()) or cell
    yield text[begin + len(inner) :]


def _continues(run: list[str], line: str, width: int) -> bool:
    """Whether a line continues the sentence of the lines before it."""
    before, text = run[-1], line.strip()
    if _ends_sentence(before) or ITEM.match(text) or COLUMN.search(before.strip()) or COLUMN.search(text):
        return False
    if len(run) > 1 and _indent(line) != _indent(before):
        return False
    used = _width(before)
    return used >= LONG_LINE or used + 1 + len(SPACES.split(text, maxsplit=1)[0]) > width


def _ends_sentence(line: str) -> bool:
    return line.rstrip().rstrip(CLOSERS).endswith(TERMINAL)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _width(line: str) -> int:
    """The length of a line with its indent, single spaces and no line end."""
    return len(_indent(line)) + len(SPACES.sub(" ", line.strip()))


def _wrap(text: str, width: int, first: int, newline: str) -> str:
    """Fill lines up to the width; `first` characters precede the first one, `newline` contains the others' indent."""
    lines: list[list[str]] = [[]]
    used, indent = first, len(newline.lstrip("\r\n"))
    for word in text.split(" "):
        if lines[-1] and used + 1 + len(word) > width:
            lines.append([])
            used = indent
        used += len(word) + bool(lines[-1])
        lines[-1].append(word)
    return newline.join(map(" ".join, lines))


def join_lines(text: str, decode: Callable[[str], str] = str) -> Iterator[Token]:
    """Yield the text as tokens in which a line end between two wide characters reads as nothing."""
    done = 0
    for newline in WIDE_NEWLINE.finditer(text):
        raw = text[done : newline.start()]
        yield Token("text", raw, decode(raw))
        yield Token("text", newline[0], "")
        done = newline.end()
    yield Token("text", text[done:], decode(text[done:]))
