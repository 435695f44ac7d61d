"""Formats made of lines: plain text, and subtitles (SubRip)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from qkv.documents import html_text
from qkv.documents.segments import Segment, Token, Writing, segments

TIMES = re.compile(r"\s*\d+:\d\d:\d\d[,.]\d{1,3}\s*-->\s*\d+:\d\d:\d\d[,.]\d{1,3}")
SPEAKER = re.compile(r"\s*[-–—]\s")  # begins the line of another speaker
STYLE = re.compile(r"(\{\\[^}]*\})")  # position and style, as {\an8}
SPACES = re.compile(r" (?![^<>]*>)")  # those outside of tags
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r|$)")


def lines_of(text: str) -> list[str]:
    """The lines with their ends, which together are the text."""
    return [line for line in LINE.findall(text) if line]


def read_text(text: str) -> list[str | Segment]:
    """Line by line; blank lines and the space around a line are kept."""
    return list(segments(_text_tokens(text), Writing()))


def _text_tokens(text: str) -> Iterator[Token]:
    for line in lines_of(text):
        body = line.rstrip("\r\n")
        inner = body.strip()
        begin = body.index(inner)
        yield Token("boundary", body[:begin])
        yield Token("text", inner, inner)
        yield Token("boundary", body[begin + len(inner) :] + line[len(body) :])


def read_subtitles(text: str) -> list[str | Segment]:
    """Numbers and times are kept. The lines of one cue are one sentence, unless another speaker begins."""
    parts: list[str | Segment] = []
    cue: list[str] | None = None  # the lines of text after the times of a cue
    for line in lines_of(text):
        if cue is None or not line.strip():
            parts += _cue(cue or [])
            parts.append(line)
            cue = [] if TIMES.match(line) else None
        else:
            cue.append(line)
    return parts + _cue(cue or [])


def _cue(lines: list[str]) -> list[str | Segment]:
    speeches: list[list[str]] = []
    for line in lines:
        if speeches and not SPEAKER.match(line):
            speeches[-1].append(line)
        else:
            speeches.append([line])
    return [part for speech in speeches for part in _speech(speech)]


def _speech(lines: list[str]) -> Iterator[str | Segment]:
    text = "".join(lines)
    body = text.rstrip("\r\n")
    dash = SPEAKER.match(body)
    begin = dash.end() if dash else 0
    yield body[:begin]
    newline = "\r\n" if "\r\n" in body else "\n"
    yield from segments(_styled(body[begin:]), Writing(lay_out=partial(wrap, lines=len(lines), newline=newline)))
    yield text[len(body) :]


def _styled(text: str) -> Iterator[Token]:
    """Subtitles have a few of HTML's tags and none of its entities."""
    for part in STYLE.split(text):
        if STYLE.fullmatch(part):
            yield Token("alone", part)
            continue
        for token in html_text.tokens(part):
            yield Token("text", token.raw, token.raw) if token.kind in ("text", "boundary") else token


def wrap(text: str, lines: int, newline: str) -> str:
    """The text on so many lines of about the same length, or on fewer where there are no spaces."""
    spaces = [space.start() for space in SPACES.finditer(text)]
    if lines > 1 and spaces:
        cut = min(spaces, key=lambda place: abs(place - len(text) // lines))
        return text[:cut] + newline + wrap(text[cut + 1 :], lines - 1, newline)
    return text
