"""Plain text: each line is a segment; blank lines and the white space around a line are kept."""

from __future__ import annotations

from qkv.documents import Document, read_utf8
from qkv.documents.segments import Segment, TextFormat, Token, make_segment, split_lines


def read(name: str, data: bytes) -> Document:
    return read_utf8(name, data, "text/plain", cut)


def cut(text: str) -> list[str | Segment]:
    """One segment per line; blank lines and the white space around a line are kept."""

    parts: list[str | Segment] = []
    for line in split_lines(text):
        inner = line.strip()
        begin = line.index(inner)
        segment = make_segment([Token("text", inner, inner)], TextFormat())
        parts += [line[:begin], segment or inner, line[begin + len(inner) :]]
    return parts
