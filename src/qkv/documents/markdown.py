"""Markdown as segments: markdown-it finds the blocks; their markup is kept.

Each paragraph, heading or table cell is a segment; a hard line break ends one. Links, emphasis and HTML tags inside a
segment are marks; inline code, images, URLs and footnote references are kept as standalone marks. Front matter, code
blocks and HTML blocks are not translated.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from qkv.core.errors import UsageError
from qkv.documents import Document, html_text, read_utf8
from qkv.documents.segments import (
    Segment,
    TextFormat,
    Token,
    make_segment,
    split_lines,
    too_many_marks,
    unmatched_tags,
)

FRONT_MATTER = re.compile(r"---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
LEAD = re.compile(r"(?:\[[ xX]\]|\[\^[^\[\]\s]{1,100}\]:)\s+")  # a task's checkbox or a footnote's label
HARD_BREAK = re.compile(r"(?: {2,}|\\)$")
# The bounds on lengths keep the time linear for input such as brackets or backticks only.
INLINE = re.compile(
    r"""
      \\(?P<escaped>[!-/:-@\[-`{-~])
    | (?P<code>(?P<ticks>`+)(?!`).{1,1000}?(?<!`)(?P=ticks)(?!`))
    | (?P<standalone>!\[[^\[\]]{0,500}\](?:\([^()\s]{0,1000}(?:\s[^()]{0,200})?\)|\[[^\[\]]{0,200}\])
        | \[\^[^\[\]\s]{1,100}\]
        | <(?:https?://|mailto:)[^<>\s]{1,1000}> | <[^<>\s@]{1,100}@[^<>\s@]{1,100}>
        | https?://(?:[^\s<>()\[\]\\]|\\(?![<>()\[\]])){1,1000}(?<![.,;:!?\\]))
    | (?P<link>\[(?P<label>(?:[^\[\]\\]|\\.|!\[[^\[\]]{0,200}\]\([^()]{0,200}\)){0,500})\]
        (?P<target>\([^()\s]{0,1000}(?:\([^()]{0,200}\)[^()\s]{0,200})?(?:\s[^()]{0,200})?\)|\[[^\[\]]{0,200}\]|))
    | (?P<emphasis>\*{1,3}|_{1,3}|~~)
    | (?P<tag></?[A-Za-z][^<>]{0,500}>|<!--.{0,500}?-->)
    """,
    re.VERBOSE | re.DOTALL,
)
SPECIAL = re.compile(r"[\\`*\[\]<]|(?<!\w)_|_(?!\w)|~(?=~)|&(?=#\d|#?\w+;)")
BLOCK_START = re.compile(r"(?:#{1,6}(?=\s|$)|[-+](?=\s|$)|>|=+$|-{3,}|~~~)|(?P<number>\d{1,9})(?=[.)](?:\s|$))")


def read(name: str, data: bytes) -> Document:
    return read_utf8(name, data, "text/markdown", read_markdown)


def read_markdown(text: str) -> list[str | Segment]:
    """Split a Markdown document into kept source and segments."""
    front = FRONT_MATTER.match(text)
    begin = front.end() if front else 0
    lines = split_lines(text[begin:])
    starts = [*accumulate(map(len, lines), initial=begin)]
    references: set[str] = set()
    parts: list[str | Segment] = []
    done = 0
    for block in _text_blocks(text[begin:], lines, references):
        first, last = block.begin, block.end
        place, end = starts[first[0]] + first[1], starts[last[0]] + last[1]
        parts.append(text[done:place])
        parts.append(_read_block(text[place:end], block, references))
        done = end
    return [*parts, text[done:]]


Place = tuple[int, int]  # line, column


class TextBlock(NamedTuple):
    """The text of a paragraph, heading or table cell, without the block's markup (`>`, `-`, indentation)."""

    begin: Place
    end: Place
    lines: list[str]
    in_table: bool = False


def _text_blocks(text: str, lines: list[str], references: set[str]) -> Iterator[TextBlock]:
    """Find the texts of all blocks, and add the document's link references to `references`."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UsageError("Markdown needs markdown-it-py: pip install 'qkv[serve]'") from None
    environment: dict[str, dict[str, object]] = {}
    blocks = MarkdownIt("commonmark").enable("table").disable("inline").parse(text, environment)
    references.update(environment.get("references", {}))
    row: int | None = None
    column = 0
    for block in blocks:
        if block.type == "tr_open" and block.map:
            row, column = block.map[0], 0
        elif block.type in ("tr_close", "table_close"):
            row = None
        elif block.type == "inline" and block.content:
            if row is not None:
                source = block.content.replace("|", "\\|")
                begin = lines[row].find(source, column)
                if begin >= 0:
                    column = begin + len(source)
                    yield TextBlock((row, begin), (row, column), [block.content], in_table=True)
            elif block.map:
                yield from _split_paragraph(block.content.split("\n"), block.map[0], lines)


def _split_paragraph(texts: list[str], first: int, lines: list[str]) -> Iterator[TextBlock]:
    """Split a paragraph at its hard line breaks."""
    begin: Place | None = None
    block: list[str] = []
    for number, text in enumerate(texts, first):
        hard_break = HARD_BREAK.search(text) if number + 1 < first + len(texts) else None
        bare = (text[: hard_break.start()] if hard_break else text).strip()
        lead = LEAD.match(bare) if number == first else None
        bare = bare[lead.end() :] if lead else bare
        column = lines[number].rfind(bare or text.strip())
        if column < 0:  # the source differs from the parsed text: keep it
            return
        begin = begin or (number, column)
        block.append(bare)
        if hard_break or number + 1 == first + len(texts):
            yield TextBlock(begin, (number, column + len(bare)), block)
            begin, block = None, []


def _read_block(raw: str, block: TextBlock, references: set[str]) -> str | Segment:
    """Make a segment of a block; in quotes and lists, where every line has a prefix, its translation is one line."""
    text = "\n".join(block.lines)
    tokens = _pair_emphasis(list(_inline_tokens(text, references)))
    if too_many_marks(tokens):
        tokens = [Token("text", raw, text)]
    escape = partial(_escape, in_table=block.in_table)
    format = TextFormat(escape, lay_out=str if block.in_table else _escape_block_start)
    return make_segment(tokens, format, raw) or raw


# ---- inline markup ---------------------------------------------------------------------------------------------------


def _inline_tokens(text: str, references: set[str]) -> Iterator[Token]:
    """Yield text and marks in order; emphasis is not paired yet."""
    done = 0
    for match in INLINE.finditer(text):
        tokens = list(_mark_tokens(match, text, references))
        if tokens:
            yield from _text_token(text[done : match.start()])
            yield from tokens
            done = match.end()
    yield from _text_token(text[done:])


def _text_token(text: str) -> Iterator[Token]:
    if text:
        yield Token("text", text, html.unescape(text))


def _mark_tokens(match: re.Match[str], text: str, references: set[str]) -> Iterator[Token]:
    raw = match[0]
    if match["escaped"]:
        yield Token("text", raw, match["escaped"])
    elif match["code"] or match["standalone"]:
        yield Token("standalone", raw)
    elif match["emphasis"]:
        # Emphasis opens before and closes after a letter; "_" only at the edge of a word.
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        opens = bool(after.strip()) and not (raw[0] == "_" and before.isalnum())
        closes = bool(before.strip()) and not (raw[0] == "_" and after.isalnum())
        if opens or closes:
            yield Token("either" if opens and closes else "open" if opens else "close", raw, raw, name=raw)
    elif match["tag"]:
        yield from (Token("standalone", raw) if t.kind == "boundary" else t for t in html_text.tokenize(raw))
    elif match["link"]:
        target, label = match["target"], " ".join(match["label"].split()).upper()
        if target or label in references:
            yield Token("open", "[", name="link")
            yield from _inline_tokens(match["label"], references)
            # A shortcut reference [label] becomes [translation][label].
            yield Token("close", f"]{target}" if target and target != "[]" else f"][{match['label']}]", name="link")


def _pair_emphasis(tokens: list[Token]) -> list[Token]:
    """Decide which emphasis marks open and which close; unpaired ones become text."""
    opened: list[str] = []
    paired: list[Token] = []
    for token in tokens:
        if token.kind in ("either", "close") and token.name == "***" and sorted(opened[-2:]) == ["*", "**"]:
            paired += [Token("close", name, name, name=name) for name in opened[:-3:-1]]  # closes both * and **
            del opened[-2:]
            continue
        if token.kind == "either":
            kind = "close" if token.name in opened else "open"
            token = Token(kind, token.raw, token.raw, name=token.name)
        if token.kind == "open":
            opened.append(token.name)
        elif token.kind == "close" and token.name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(token.name) :]
        paired.append(token)
    unmatched = unmatched_tags(paired)
    if any(paired[place].name == "link" for place in unmatched):  # emphasis crosses a link: all emphasis becomes text
        unmatched |= {
            place for place, token in enumerate(paired) if token.kind in ("open", "close") and token.name != "link"
        }
    return [Token("text", t.raw, t.text or t.raw) if place in unmatched else t for place, t in enumerate(paired)]


def _escape(text: str, in_table: bool) -> str:
    escaped = SPECIAL.sub(lambda match: "\\" + match[0], text)
    return escaped.replace("|", "\\|") if in_table else escaped


def _escape_block_start(text: str) -> str:
    """Escape a text that would otherwise become a heading, list or quote."""
    match = BLOCK_START.match(text)
    if not match:
        return text
    return f"{match['number']}\\{text[match.end() :]}" if match["number"] else "\\" + text
