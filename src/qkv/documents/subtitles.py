"""SubRip subtitles: the lines of a cue are one segment for each speaker; numbers and times are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from qkv.documents import Document, html_text, read_utf8
from qkv.documents.segments import Segment, TextFormat, Token, split_lines, split_segments

TIMES = re.compile(r"\s*\d+:\d\d:\d\d[,.]\d{1,3}\s*-->\s*\d+:\d\d:\d\d[,.]\d{1,3}")
SPEAKER = re.compile(r"\s*[-–—]\s")  # a dash marks a change of speaker
STYLE = re.compile(r"(\{\\[^}]*\})")  # position and style, for example {\an8}
SPACES_OUTSIDE_TAGS = re.compile(r" (?![^<>]*>)")


def read(name: str, data: bytes) -> Document:
    return read_utf8(name, data, "application/x-subrip", cut)


def cut(text: str) -> list[str | Segment]:
    """Keep numbers and times; the lines of a cue are one segment for each speaker."""
    parts: list[str | Segment] = []
    cue: list[str] | None = None  # lines of text after the times of a cue
    for line in split_lines(text):
        if cue is None or not line.strip():
            parts += _cue_parts(cue or [])
            parts.append(line)
            cue = [] if TIMES.match(line) else None
        else:
            cue.append(line)
    return parts + _cue_parts(cue or [])


def _cue_parts(lines: list[str]) -> list[str | Segment]:
    """Split a cue by speaker; a translation gets as many lines as the source had."""
    speeches: list[list[str]] = []
    for line in lines:
        if speeches and not SPEAKER.match(line):
            speeches[-1].append(line)
        else:
            speeches.append([line])
    parts: list[str | Segment] = []
    for speech in speeches:
        text = "".join(speech)
        body = text.rstrip("\r\n")
        dash = SPEAKER.match(body)
        begin = dash.end() if dash else 0
        newline = "\r\n" if "\r\n" in body else "\n"
        wrap = partial(_wrap_lines, lines=len(speech), newline=newline)
        parts += [body[:begin], *split_segments(_subtitle_tokens(body[begin:]), TextFormat(lay_out=wrap))]
        parts.append(text[len(body) :])
    return parts


def _subtitle_tokens(text: str) -> Iterator[Token]:
    """Subtitles use a few HTML tags but no entities."""
    for part in STYLE.split(text):
        if STYLE.fullmatch(part):
            yield Token("standalone", part)
            continue
        for token in html_text.tokenize(part):
            yield Token("text", token.raw, token.raw) if token.kind in ("text", "boundary") else token


def _wrap_lines(text: str, lines: int, newline: str) -> str:
    """Break the text into lines of about equal length, or into fewer lines if it has too few spaces."""
    spaces = [space.start() for space in SPACES_OUTSIDE_TAGS.finditer(text)]
    if lines > 1 and spaces:
        cut = min(spaces, key=lambda place: abs(place - len(text) // lines))
        return text[:cut] + newline + _wrap_lines(text[cut + 1 :], lines - 1, newline)
    return text
