"""Lines of raw text, one after another, from any file that can be named: plain, compressed, `-`, or `demo:`."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator

from qkv.data.corpus import decode_line, find, pieces


class Lines:
    """The lines of a file as they come; with on_bad = "skip", one that is not UTF-8 comes as an empty line.

    `bad` counts those, so that the caller can tell of them.
    """

    def __init__(self, name: str, on_bad: str = "error") -> None:
        self.name, self.on_bad = name, on_bad
        self.number = self.bad = 0

    def __iter__(self) -> Iterator[str]:
        rest = b""
        for position, piece in enumerate(pieces(find(self.name, ""))):
            *whole, rest = (rest + (piece if position else piece.removeprefix(BOM_UTF8))).split(b"\n")
            yield from map(self.decode, whole)
        if rest:
            yield self.decode(rest)

    def decode(self, line: bytes) -> str:
        """The next line as text."""
        self.number += 1
        text = decode_line(line, f"{self.name}, line {self.number}", self.on_bad)
        self.bad += text is None
        return text or ""


def read_lines(name: str) -> list[str]:
    """All lines of a file; one that is not UTF-8 is an error."""
    return list(Lines(name, on_bad=""))
