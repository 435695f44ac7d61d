"""Lines of raw text, one after another, from any file that can be named: plain, compressed, `-`, or `demo:`."""

from __future__ import annotations

import io
import select
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator

from qkv.data.corpus import decode_line, find, pieces

SOON = 0.01  # seconds


class Lines:
    """The lines of a file as they come; with on_bad = "skip", one that is not UTF-8 comes as an empty line.

    `bad` counts those, so that the caller can tell of them. `more` is false while nothing has followed the last line
    yet: whoever types or sends it may be waiting for an answer.
    """

    def __init__(self, name: str, on_bad: str = "error") -> None:
        self.name, self.on_bad = name, on_bad
        self.number = self.bad = 0
        self.more = True

    def __iter__(self) -> Iterator[str]:
        rest = b""
        for piece in pieces(find(self.name, "")):
            *whole, rest = (rest + piece).split(b"\n")
            for count, line in enumerate(whole, 1):
                self.more = count < len(whole) or self.name != "-" or _comes_soon()
                yield self.decode(line)
        if rest:
            yield self.decode(rest)

    def decode(self, line: bytes) -> str:
        """The next line as text."""
        line = line if self.number else line.removeprefix(BOM_UTF8)
        self.number += 1
        text = decode_line(line, f"{self.name}, line {self.number}", self.on_bad)
        self.bad += text is None
        return text or ""


def _comes_soon() -> bool:
    """Whether standard input has more to read, or has ended."""
    try:
        return bool(select.select([sys.stdin.buffer], [], [], SOON)[0])
    except io.UnsupportedOperation:  # no file at all
        return True


def read_lines(name: str) -> list[str]:
    """All lines of a file; one that is not UTF-8 is an error."""
    return list(Lines(name, on_bad=""))
