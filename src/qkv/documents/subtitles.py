"""Subtitles, SubRip (.srt) and WebVTT (.vtt): the lines of a cue are one segment for each speaker.

A line of times begins a cue; the cue extends to the next one, also across blank lines. Numbers, times, settings, notes
and styles are kept to the byte. A translation gets as many lines as its source, with the longest as short as possible.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import PurePath

from qkv.core.errors import UsageError
from qkv.documents import BOM, Document, read_utf8
from qkv.documents.inline_markup import split_at
from qkv.documents.plain_text import WIDE, join_lines
from qkv.documents.segments import WHITE_SPACE, Segment, TextFormat, Token, split_lines, split_segments

HEADER = re.compile(rb"WEBVTT(?:\s|$)")
TIME = r"(?:[0-9]++:)?[0-9]++:[0-9][0-9](?:[,.:][0-9]{1,3})?"  # hours are optional in WebVTT
TIMES = re.compile(rf"\s*+{TIME}\s*+-->\s*+{TIME}(?![0-9])")
NUMBER = re.compile(r"\s*[0-9]+\s*")
KEPT_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)(?:\s|$)")  # of WebVTT, after a blank line

# In a cue: tags, positions such as {\an8} and, in WebVTT, ruby annotations, which are readings of the source's script.
TAG = r"<(?P<close>/?)(?P<name>[A-Za-z]*)[^<>]*>"
STYLE = r"\{\\[^{}]*\}"
SUBRIP_MARK = re.compile(rf"{TAG}|{STYLE}")
WEBVTT_MARK = re.compile(rf"(?P<ruby><rt(?:[\s.][^<>]*)?>[^<]*(?:</rt>)?)|{TAG}|{STYLE}")
PAIRED = frozenset("b c em font i lang ruby s span strong u".split())
VOICE = "v"  # <v Speaker>
# A dash marks a change of speaker; without a space after it only before a letter, because "-5" is a number.
SPEAKER = re.compile(rf"\s*+(?:(?:<[^<>]*>|{STYLE})\s*+)*+(?:[-–—]\s+|[-–](?=[^\W\d_]))")

# Scripts without spaces: a line may end between two of their characters, but not before or after some marks.
NOT_FIRST = "、。，．・：；！？）」』】〉》〕ー々…ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
NOT_LAST = "（「『【〈《〔"
BREAK = re.compile(rf"(?P<mark><[^<>]*>|{STYLE})| +|(?<=[{WIDE}])(?<![{NOT_LAST}])(?=[{WIDE}])(?![{NOT_FIRST}])")


def read(name: str, data: bytes) -> Document:
    """Read SubRip or WebVTT, which the first line distinguishes."""
    is_vtt = HEADER.match(data.removeprefix(BOM)) is not None
    if not is_vtt and PurePath(name).suffix.lower() == ".vtt":
        raise UsageError(f"{name}: the first line is not WEBVTT: add it, or name the file .srt if it is SubRip")
    skipped: Counter[str] = Counter()

    def cut(text: str) -> list[str | Segment]:
        parts = cut_cues(text, is_vtt, skipped)
        if not is_vtt and text.strip() and len(parts) == 1:
            raise UsageError(f"{name}: no times such as 00:00:01,000 --> 00:00:02,000: give a .srt or .vtt file")
        return parts

    return read_utf8(name, data, "text/vtt" if is_vtt else "application/x-subrip", cut, skipped)


def cut_cues(text: str, is_vtt: bool, skipped: Counter[str]) -> list[str | Segment]:
    """Split into kept source and segments; what precedes the first cue is kept, and notes are counted."""
    lines = split_lines(text)
    starts = [place for place, line in enumerate(lines) if TIMES.match(line)]
    labels = [place - _has_label(lines, place, is_vtt) for place in starts] + [len(lines)]
    header = lines[: labels[0]]
    if notes := is_vtt and sum(line.startswith("NOTE") and not before.strip() for before, line in pairwise(header)):
        skipped["note"] += notes
    parts: list[str | Segment] = ["".join(header)]
    for start, (label, next_label) in zip(starts, pairwise(labels), strict=True):
        parts.append("".join(lines[label : start + 1]))
        parts += _cue_parts(lines[start + 1 : next_label], is_vtt, skipped)
    return parts


def _has_label(lines: list[str], place: int, is_vtt: bool) -> bool:
    """Whether the line before the times is the cue's number or, in WebVTT, its identifier after a blank line."""
    if place == 0 or not lines[place - 1].strip():
        return False
    after_blank = place > 1 and not lines[place - 2].strip()
    return NUMBER.fullmatch(lines[place - 1]) is not None or (is_vtt and after_blank)


def _cue_parts(lines: list[str], is_vtt: bool, skipped: Counter[str]) -> list[str | Segment]:
    """Split the lines after the times of a cue at blank lines and by speaker."""
    parts: list[str | Segment] = []
    for is_blank, group in groupby(lines, key=lambda line: not line.strip()):
        block = list(group)
        if is_blank or (is_vtt and parts and KEPT_BLOCK.match(block[0])):  # a note begins after a blank line
            skipped.update(["note"] if block[0].startswith("NOTE") else [])
            parts.append("".join(block))
            continue
        speeches: list[list[str]] = []
        for line in block:
            if speeches and not SPEAKER.match(line):
                speeches[-1].append(line)
            else:
                speeches.append([line])
        for speech in speeches:
            parts += _speech_parts("".join(speech), is_vtt, skipped)
    return parts


def _speech_parts(text: str, is_vtt: bool, skipped: Counter[str]) -> Iterator[str | Segment]:
    """Keep the dash and the line end; a translation gets as many lines as its segment."""
    dash = SPEAKER.match(text)
    begin = dash.end() if dash else 0
    yield text[:begin]
    format = TextFormat(partial(html.escape, quote=False)) if is_vtt else TextFormat()
    for part in split_segments(_tokens(text[begin:], is_vtt, skipped), format):
        if isinstance(part, Segment):
            raw = part.raw.strip(WHITE_SPACE)
            newline = next((each for each in ("\r\n", "\n", "\r") if each in raw), "\n")
            wrap = partial(wrap_lines, lines=1 + raw.count(newline), newline=newline)
            yield replace(part, format=replace(format, lay_out=wrap))
        else:
            yield part


def _tokens(text: str, is_vtt: bool, skipped: Counter[str]) -> Iterator[Token]:
    """Only WebVTT has entities; an unknown tag is text in SubRip."""
    for stretch, mark in split_at(WEBVTT_MARK if is_vtt else SUBRIP_MARK, text):
        yield from join_lines(stretch, html.unescape if is_vtt else str)
        if mark is None:
            return
        raw, name = mark[0], (mark["name"] or "").lower()
        if is_vtt and mark["ruby"]:
            skipped["ruby annotation"] += 1
            yield Token("standalone", raw)
        elif name in PAIRED and not raw.endswith("/>"):
            yield Token("close" if mark["close"] else "open", raw, name=name)
        elif name == VOICE and is_vtt:
            yield Token("boundary", raw)
        elif is_vtt or raw.startswith("{"):
            yield Token("standalone", raw)
        else:
            yield Token("text", raw, raw)


# ---- lines -----------------------------------------------------------------------------------------------------------


def wrap_lines(text: str, lines: int, newline: str) -> str:
    """Break the text into lines, the longest as short as possible, or into fewer lines if it has too few spaces.

    Tags have no width. Linear in the length of the text, but for a logarithm.
    """
    if lines < 2:
        return _not_times(text)
    units, edges = _units(text)
    written = [_not_times(text[units[a][0] : units[b - 1][1]]) for a, b in pairwise(_line_starts(edges, lines))]
    return newline.join(written)


def _not_times(line: str) -> str:
    """Change the arrow of a line that would begin a cue."""
    return line.replace("-->", "→") if TIMES.match(line) else line


def _units(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The stretches that stay in one line: their positions in the text, and in the text without tags."""
    units, edges = [], []
    begin = hidden = hidden_before = 0  # characters of tags, so far and before the current unit
    for match in [*BREAK.finditer(text), None]:
        if match and match["mark"]:
            hidden += len(match[0])
            continue
        stop, resume = match.span() if match else (len(text), len(text))
        if stop > begin:
            units.append((begin, stop))
            edges.append((begin - hidden_before, stop - hidden))
        begin, hidden_before = resume, hidden
    return units or [(0, 0)], edges or [(0, 0)]


def _line_starts(edges: list[tuple[int, int]], lines: int) -> list[int]:
    """The number of the first unit of each line, and the number of units: the longest line is as short as possible.

    Among the layouts with this longest line, each line is close to an equal share of what remains.
    """
    count = len(edges)
    lines = min(lines, count)
    begins, ends = [begin for begin, _ in edges], [end for _, end in edges]

    def next_start(first: int, width: int) -> int:
        return max(first + 1, bisect_right(ends, begins[first] + width, lo=first))

    def fits(width: int) -> bool:
        first = 0
        for _ in range(lines):
            first = next_start(first, width)
            if first == count:
                return True
        return False

    shortest = max(end - begin for begin, end in edges)
    width = shortest + bisect_left(range(ends[-1]), True, key=lambda more: fits(shortest + more))
    needed = [0] * (count + 1)  # lines from each unit on
    for first in reversed(range(count)):
        needed[first] = 1 + needed[next_start(first, width)]
    starts = [0]
    for left in range(lines - 1, 0, -1):
        first = starts[-1]
        low = max(first + 1, bisect_left(range(count), True, key=lambda unit: needed[unit] <= left))
        high = min(next_start(first, width), count - left)
        share = begins[first] + (ends[-1] - begins[first]) / (left + 1)  # where this line would end
        best = bisect_left(ends, share, lo=first) + 1
        if best > low and share - ends[best - 2] < ends[min(best, count) - 1] - share:
            best -= 1
        starts.append(min(max(best, low), high))
    return [*starts, count]
