"""Markdown as segments: a parser finds the blocks, so code, tables, lists and quotes stay what they are.

Each paragraph, heading or cell of a table is a segment, up to a line break that was meant. Links, emphasis and tags of
HTML within it are marks; code, images, addresses and footnotes are kept whole. Front matter, code and blocks of HTML
are not translated.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from qkv.core.errors import UsageError
from qkv.documents import html_text
from qkv.documents.plain_text import lines_of
from qkv.documents.segments import Segment, Token, Writing, crowded, segment, unmatched

if TYPE_CHECKING:
    from markdown_it.token import Token as Block

FRONT = re.compile(r"---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
LEAD = re.compile(r"(?:\[[ xX]\]|\[\^[^\[\]\s]{1,100}\]:)\s+")  # the box of a task, the name of a footnote
BREAK = re.compile(r"(?: {2,}|\\)$")
# The lengths are bounds: a text of brackets or backticks alone would take for ever without them.
INLINE = re.compile(
    r"""
      \\(?P<escaped>[!-/:-@\[-`{-~])
    | (?P<code>(?P<ticks>`+)(?!`).{1,1000}?(?<!`)(?P=ticks)(?!`))
    | (?P<whole>!\[[^\[\]]{0,500}\](?:\([^()\s]{0,1000}(?:\s[^()]{0,200})?\)|\[[^\[\]]{0,200}\])
        | \[\^[^\[\]\s]{1,100}\]
        | <(?:https?://|mailto:)[^<>\s]{1,1000}> | <[^<>\s@]{1,100}@[^<>\s@]{1,100}> | https?://[^\s<>()\[\]]{1,1000}[^\s<>()\[\].,;:!?])
    | (?P<link>\[(?P<shown>(?:[^\[\]\\]|\\.|!\[[^\[\]]{0,200}\]\([^()]{0,200}\)){1,500})\]
        (?P<to>\([^()\s]{0,1000}(?:\([^()]{0,200}\)[^()\s]{0,200})?(?:\s[^()]{0,200})?\)|\[[^\[\]]{0,200}\]|))
    | (?P<stress>\*{1,3}|_{1,3}|~~)
    | (?P<tag></?[A-Za-z][^<>]{0,500}>|<!--.{0,500}?-->)
    """,
    re.VERBOSE | re.DOTALL,
)
SPECIAL = re.compile(r"[\\`*\[\]<]|(?<!\w)_|_(?!\w)|~(?=~)|&(?=#?\w+;)")
LIKE_A_BLOCK = re.compile(r"(?:#{1,6}(?=\s|$)|[-+](?=\s|$)|>|=+$|-{3,}|~~~)|(?P<number>\d{1,9})(?=[.)](?:\s|$))")


def read(text: str) -> list[str | Segment]:
    """A Markdown document as what is kept and what is translated."""
    front = FRONT.match(text)
    begin = front.end() if front else 0
    lines = lines_of(text[begin:])
    starts = [*accumulate(map(len, lines), initial=begin)]
    references: set[str] = set()
    parts: list[str | Segment] = []
    done = 0
    for first, last, found in _found(text[begin:], lines, references):
        place, end = starts[first[0]] + first[1], starts[last[0]] + last[1]
        parts.append(text[done:place])
        parts.append(_segment(text[place:end], *found, references))
        done = end
    return [*parts, text[done:]]


Place = tuple[int, int]  # line, column


def _blocks(text: str, references: set[str]) -> list[Block]:
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise UsageError("Markdown needs markdown-it-py: pip install 'qkv[serve]'") from None
    environment: dict[str, dict[str, object]] = {}
    parser = MarkdownIt("commonmark").enable("table").disable("inline")
    blocks = parser.parse(text, environment)
    references.update(environment.get("references", {}))
    return blocks


def _found(text: str, lines: list[str], references: set[str]) -> Iterator[tuple[Place, Place, tuple[list[str], bool]]]:
    """Where the texts of paragraphs, headings and cells stand, line by line as they read, and whether in a table."""
    row: int | None = None
    column = 0
    for block in _blocks(text, references):
        if block.type == "tr_open" and block.map:
            row, column = block.map[0], 0
        elif block.type in ("tr_close", "table_close"):
            row = None
        elif block.type == "inline" and block.content:
            if row is not None:
                written = block.content.replace("|", "\\|")
                begin = lines[row].find(written, column)
                if begin >= 0:
                    column = begin + len(written)
                    yield (row, begin), (row, column), ([block.content], True)
            elif block.map:
                yield from _paragraph(block.content.split("\n"), block.map[0], lines)


def _paragraph(texts: list[str], first: int, lines: list[str]) -> Iterator[tuple[Place, Place, tuple[list[str], bool]]]:
    """The lines between two line breaks that were meant."""
    begin: Place | None = None
    held: list[str] = []
    for number, text in enumerate(texts, first):
        broken = BREAK.search(text) if number + 1 < first + len(texts) else None
        bare = (text[: broken.start()] if broken else text).strip()
        lead = LEAD.match(bare) if number == first else None
        bare = bare[lead.end() :] if lead else bare
        column = lines[number].rfind(bare)
        if column < 0:  # written otherwise than it reads: kept
            return
        begin = begin or (number, column)
        held.append(bare)
        if broken or number + 1 == first + len(texts):
            yield begin, (number, column + len(bare)), (held, False)
            begin, held = None, []


def _segment(raw: str, texts: list[str], in_table: bool, references: set[str]) -> str | Segment:
    """In a quote or a list every line has marks before it; the lines of a translation become one."""
    tokens = _paired(list(_inline("\n".join(texts), references)))
    if crowded(tokens):
        tokens = [Token("text", raw, "\n".join(texts))]
    writing = Writing(partial(_spell, in_table=in_table), lay_out=str if in_table else _not_a_block)
    return segment(tokens, writing, raw) or raw


# ---- within a line ---------------------------------------------------------------------------------------------------


def _inline(text: str, references: set[str]) -> Iterator[Token]:
    """Text and marks in order; emphasis may still lack its counterpart."""
    done = 0
    for found in INLINE.finditer(text):
        tokens = list(_mark(found, text, references))
        if tokens:
            yield from _text(text[done : found.start()])
            yield from tokens
            done = found.end()
    yield from _text(text[done:])


def _text(text: str) -> Iterator[Token]:
    if text:
        yield Token("text", text, html.unescape(text))


def _mark(found: re.Match[str], text: str, references: set[str]) -> Iterator[Token]:
    raw = found[0]
    if found["escaped"]:
        yield Token("text", raw, found["escaped"])
    elif found["code"] or found["whole"]:
        yield Token("alone", raw)
    elif found["stress"]:
        yield from _stress(raw, text[: found.start()][-1:], text[found.end() :][:1])
    elif found["tag"]:
        yield from (Token("alone", raw) if t.kind == "boundary" else t for t in html_text.tokens(raw))
    elif found["link"]:
        to, label = found["to"], " ".join(found["shown"].split()).upper()
        if to or label in references:
            yield Token("open", "[", name="link")
            yield from _inline(found["shown"], references)
            # A link named by its own words keeps its name when they are translated.
            yield Token("close", f"]{to}" if to and to != "[]" else f"][{found['shown']}]", name="link")


def _stress(raw: str, before: str, after: str) -> Iterator[Token]:
    """Emphasis opens before a letter and closes behind one; _ does so only at the edge of a word."""
    opens = bool(after.strip()) and not (raw[0] == "_" and before.isalnum())
    closes = bool(before.strip()) and not (raw[0] == "_" and after.isalnum())
    if opens or closes:
        yield Token("either" if opens and closes else "open" if opens else "close", raw, raw, name=raw)


def _paired(tokens: list[Token]) -> list[Token]:
    """Emphasis with its counterpart; without, it is text."""
    opened: list[str] = []
    sided: list[Token] = []
    for token in tokens:
        if token.kind in ("either", "close") and token.name == "***" and sorted(opened[-2:]) == ["*", "**"]:
            sided += [Token("close", name, name, name=name) for name in opened[:-3:-1]]  # two ends that touch
            del opened[-2:]
            continue
        if token.kind == "either":
            kind = "close" if token.name in opened else "open"
            token = Token(kind, token.raw, token.raw, name=token.name)
        if token.kind == "open":
            opened.append(token.name)
        elif token.kind == "close" and token.name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(token.name) :]
        sided.append(token)
    stray = unmatched(sided)
    if any(sided[place].name == "link" for place in stray):  # emphasis crosses a link: all of it is text
        stray |= {
            place for place, token in enumerate(sided) if token.kind in ("open", "close") and token.name != "link"
        }
    return [Token("text", t.raw, t.text or t.raw) if place in stray else t for place, t in enumerate(sided)]


def _spell(text: str, in_table: bool) -> str:
    spelt = SPECIAL.sub(lambda found: "\\" + found[0], text)
    return spelt.replace("|", "\\|") if in_table else spelt


def _not_a_block(text: str) -> str:
    """A text that begins like a heading or a list is written so that it does not become one."""
    found = LIKE_A_BLOCK.match(text)
    if not found:
        return text
    return f"{found['number']}\\{text[found.end() :]}" if found["number"] else "\\" + text
