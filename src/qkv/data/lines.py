"""Lines of raw text, one after another, from any file that can be named: plain, compressed, `-`, or `demo:`."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator

from qkv.data.corpus import decode_line, find, pieces


def read_lines(name: str, on_bad: str = "error") -> Iterator[str]:
    """The lines of a file as they come; with on_bad = "skip", one that is not UTF-8 comes as an empty line."""
    rest = b""
    number = 0
    for position, piece in enumerate(pieces(find(name, ""))):
        *whole, rest = (rest + (piece if position else piece.removeprefix(BOM_UTF8))).split(b"\n")
        for line in whole:
            number += 1
            yield decode_line(line, f"{name}, line {number}", on_bad) or ""
    if rest:
        yield decode_line(rest, f"{name}, line {number + 1}", on_bad) or ""
