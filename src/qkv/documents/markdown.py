"""Markdown as segments: markdown-it finds the blocks and the inline markup; all markup is kept.

Each paragraph, heading, table cell or admonition title is one segment or, with hard line breaks, several. Links and
emphasis are marks; inline code, formulas and autolinks are protected. Front matter, code blocks, formulas and HTML
blocks are not translated.

markdown-it's inline tokens have no positions, so each of its inline rules is wrapped to record the part of the text
that it read. Text between these parts is literal. A block that cannot be found in the source is kept and counted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from qkv.core.errors import UsageError
from qkv.documents import Document, html_text, read_utf8
from qkv.documents.segments import Segment, TextFormat, Token, split_lines, split_segments

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token as MarkdownToken

# A task's checkbox, or the first line of a GitHub alert: [!NOTE]
LEAD = re.compile(r"(?:\[[ xX]\]|\[![A-Za-z]{1,30}\][+-]?)(?:[ \t]+|\n[ \t]*)")
SPECIAL = re.compile(r"[\\`*\[\]<]|(?<![^\W_])_|_(?![^\W_])|~(?=~)|&(?=#\d|#?\w+;)|\$(?=\$|[^\s$][^$]*\$)|(?<=\$)\$")
BLOCK_START = re.compile(
    r"(?:#{1,6}(?=\s|$)|[-+](?=\s|$)|>|=+$|-{3,}|~~~|!!!|\?\?\?)|(?P<number>\d{1,9})(?=[.)](?:\s|$))"
)
SKIPPED = {"front_matter": "front matter", "html_block": "HTML block"}
PAIRED = {"em": 1, "strong": 2, "s": 2}  # tokens NAME_open and NAME_close, and the length of their marks


def read(name: str, data: bytes) -> Document:
    try:
        _parser()
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    skipped: Counter[str] = Counter()
    document = read_utf8(name, data, "text/markdown", partial(read_markdown, skipped=skipped))
    document.skipped.update(skipped)
    return document


def read_markdown(text: str, skipped: Counter[str]) -> list[str | Segment]:
    """Split a Markdown document into kept source and segments; count what is left out in `skipped`."""
    parts: list[str | Segment] = []
    done = 0
    for block in _text_blocks(text, skipped):
        tokens = None if block.begin < done else block.tokens(skipped)
        if tokens is None or "".join(token.raw for token in tokens) != text[block.begin : block.end]:
            skipped["text not found in the source"] += 1
            continue
        format = TextFormat(partial(_escape, in_table=block.kind == "cell"), LAY_OUTS[block.kind])
        parts.append(text[done : block.begin])
        parts += split_segments(tokens, format)
        done = block.end
    return [*parts, text[done:]]


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextBlock:
    """The text of a block as markdown-it reads it, without prefixes such as `>`, and its places in the source."""

    kind: str  # text, cell or title
    source: str
    content: str
    places: list[tuple[int, int]]  # (in the content, in the source), from each of which both go on alike
    inline: Sequence[MarkdownToken]

    def at(self, offset: int) -> int:
        """The place in the source of an offset in the content."""
        own, place = self.places[bisect_right(self.places, offset, key=lambda pair: pair[0]) - 1]
        return place + offset - own

    @property
    def begin(self) -> int:
        return self.at(0)

    @property
    def end(self) -> int:
        return self.at(len(self.content))

    def raw(self, begin: int, end: int) -> str:
        return self.source[self.at(begin) : self.at(end)]

    def tokens(self, skipped: Counter[str]) -> list[Token] | None:
        """Return the tokens of the block, or None if one of them has no place."""
        items = sorted(_spans(self.inline), key=lambda item: item[0])
        lead = LEAD.match(self.content) if self.kind == "text" else None
        done = (
            lead.end() if lead and not any(token.type == "link_open" for span, token in items[:1] if not span[0]) else 0
        )
        tokens = [Token("boundary", self.raw(0, done))] if done else []
        titled = self.content.startswith("[!") and done > 0 and "\n" not in self.content[:done]
        labels: list[int] = []  # where the labels of open links begin
        for (begin, end), token in items:
            if end <= done:
                continue
            if begin < done:
                return None
            if begin > done:
                tokens.append(Token("text", self.raw(done, begin), self.content[done:begin]))
            if token.type == "link_open":
                labels.append(end)
            label = labels.pop() if token.type == "link_close" and labels else 0
            tokens.append(self._token(token, begin, end, label, skipped))
            if titled and token.type == "softbreak":
                tokens[-1], titled = Token("boundary", tokens[-1].raw), False
            done = end
        if done < len(self.content):
            tokens.append(Token("text", self.raw(done, len(self.content)), self.content[done:]))
        return _protect_elements(tokens)

    def _token(self, token: MarkdownToken, begin: int, end: int, label: int, skipped: Counter[str]) -> Token:
        raw, content = self.raw(begin, end), self.content[begin:end]
        name, _, side = token.type.rpartition("_")
        if token.type == "text_special" or token.type == "softbreak":
            return Token("text", raw, token.content or "\n")
        if token.type == "code_inline":
            return Token("protected", raw, token.content)
        if token.type == "link_open" and token.info == "auto":
            return Token("protected", raw, content[1:-1])
        if token.type.startswith("math_inline"):
            return Token("protected", raw, content)
        if token.type == "hardbreak":
            return Token("boundary", raw)
        if token.type == "html_inline":
            return _tag_token(raw)
        if token.type == "link_close" and content in ("]", "][]"):
            # A shortcut reference [label] becomes [translation][label].
            own = self.raw(label, begin)
            own = self.content[label:begin].replace("\n", " ") if "\n" in own else own
            return Token("close", raw, name="link", written=f"][{own}]")
        if name in PAIRED or name == "link":
            return Token(side, raw, name=name)
        if token.type == "image" and any(character.isalnum() for character in token.content):
            skipped["image text"] += 1
        elif token.type == "footnote_ref" and content.startswith("^"):
            skipped["inline footnote"] += 1
        return Token("standalone", raw)


def _text_blocks(text: str, skipped: Counter[str]) -> Iterator[TextBlock]:
    """Find the texts of all blocks."""
    lines = split_lines(text)
    starts = [*accumulate(map(len, lines), initial=0)]
    lines = [line.rstrip("\r\n").replace("\0", "\ufffd") for line in lines]
    row, column, before = 0, 0, ""  # the place in a table, and the type of the last token
    for token in _parser().parse(text):
        if token.type in SKIPPED and not token.content.startswith("<!--"):
            skipped[SKIPPED[token.type]] += 1
        elif token.type == "tr_open" and token.map:
            row, column = token.map[0], 0
        elif token.type == "inline" and token.content and before in ("th_open", "td_open"):
            escaped = token.content.replace("|", "\\|")
            begin = lines[row].find(escaped, column) if column >= 0 else -1
            column = begin + len(escaped) if begin >= 0 else -1  # after a lost cell the next ones are not known
            if begin >= 0:
                pipes = [match.start() for match in re.finditer(r"\|", token.content)]
                at = starts[row] + begin
                places = [(0, at), *((pipe + 1, at + pipe + number + 2) for number, pipe in enumerate(pipes))]
                yield TextBlock("cell", text, token.content, places, token.children or [])
            else:
                skipped["text not found in the source"] += 1
        elif token.type == "inline" and token.content and token.map:
            kind = "title" if before == "admonition_title_open" else "text"
            first, texts = token.map[0], token.content.split("\n")
            columns = _columns(texts, lines[first : first + len(texts)], kind, before == "heading_open")
            if columns is not None:
                offsets = accumulate((len(line) + 1 for line in texts), initial=0)
                places = [
                    (own, starts[first + n] + at) for n, (own, at) in enumerate(zip(offsets, columns, strict=False))
                ]
                yield TextBlock(kind, text, token.content, places, token.children or [])
            elif kind == "text":  # a title that is not found was made from the type: !!! note
                skipped["text not found in the source"] += 1
        before = token.type


def _columns(texts: Sequence[str], lines: Sequence[str], kind: str, is_heading: bool) -> list[int] | None:
    """Find the column of each line of a block, or None if one is not found."""
    columns: list[int] = []
    for number, (text, line) in enumerate(zip(texts, lines, strict=False), 1):
        column = -1
        if kind == "title":
            column = line.find(f'"{text}"') + 1 or -1
        elif is_heading and len(texts) == 1 and "#" in line.replace(text, "", 1):
            mark = line.index("#")
            column = line.find(text, mark + len(line[mark:]) - len(line[mark:].lstrip("#")))
        if column < 0 and kind != "title":
            bare = line.rstrip() if number == len(texts) else line
            column = len(bare) - len(text) if bare.endswith(text) else -1
        if column < 0:
            return None
        columns.append(column)
    return columns if len(columns) == len(texts) else None


# ---- inline markup ---------------------------------------------------------------------------------------------------


@cache
def _parser() -> MarkdownIt:
    try:
        from markdown_it import MarkdownIt
        from mdit_py_plugins.admon import admon_plugin
        from mdit_py_plugins.dollarmath import dollarmath_plugin
        from mdit_py_plugins.footnote import footnote_plugin
        from mdit_py_plugins.front_matter import front_matter_plugin
    except ImportError:
        packages = "markdown-it-py and mdit-py-plugins"
        raise UsageError(f"Markdown needs {packages}: pip install 'qkv[documents]'") from None
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parser.use(front_matter_plugin).use(footnote_plugin).use(admon_plugin)
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False)
    # Footnotes stay where they are; fragments of text are not joined, so that each keeps its place.
    parser.disable(["footnote_tail", "fragments_join", "text_join"])
    rules = parser.inline.ruler
    for name, rule in zip(rules.get_active_rules(), rules.getRules(""), strict=True):
        rules.at(name, _with_span(rule))
    return parser


def _with_span(rule: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """Wrap an inline rule so that the `meta` of its tokens has the span of the text that it read."""

    def run(state: Any, silent: bool) -> bool:
        begin, count = state.pos, len(state.tokens)
        if not rule(state, silent):
            return False
        if silent:
            return True
        tokens, end = state.tokens[count:], state.pos
        if tokens and tokens[-1].type == "text":  # marks of emphasis, one token each
            for token in reversed(tokens):
                if end > begin:
                    token.meta["span"] = (end - len(token.content), end)
                    end -= len(token.content)
            return True
        for token in tokens:
            token.meta.setdefault("span", (begin, end))
        if tokens and tokens[-1].type == "link_close" and not tokens[-1].info:
            label_end = state.md.helpers.parseLinkLabel(state, begin, True)
            opening = next(token for token in tokens if token.type == "link_open")
            opening.meta["span"], tokens[-1].meta["span"] = (begin, begin + 1), (label_end, end)
        return True

    return run


def _spans(tokens: Sequence[MarkdownToken]) -> Iterator[tuple[tuple[int, int], MarkdownToken]]:
    """Yield all tokens but text with their spans; strong emphasis is on the inner one of two marks."""
    for token in tokens:
        if token.type != "text":
            begin, end = token.meta.get("span", (-1, -1))
            if token.type == "strong_open":
                begin -= 1
            elif token.type == "strong_close":
                end += 1
            yield (begin, end), token


def _tag_token(raw: str) -> Token:
    """Return the token of an HTML tag; its kind is "protect" where text begins that must not change."""
    piece = html_text.scan(raw)[0]
    kind = html_text.ELEMENTS.get(piece.name, "block")
    if piece.kind == "end" and kind in ("inline", "protected"):
        return Token("close", raw, name=piece.name)
    if piece.kind != "start" or piece.empty or kind not in ("inline", "protected"):
        return Token("standalone", raw)
    protects = kind == "protected" or html_text.is_untranslated(piece.attributes)
    return Token("protect" if protects else "open", raw, name=piece.name)


def _protect_elements(tokens: list[Token]) -> list[Token]:
    """Make one protected token of each HTML element whose text must not change."""
    boundaries = [*accumulate((token.kind == "boundary" for token in tokens), initial=0)]
    closing: dict[str, list[int]] = {}  # positions of the closing tags, last one first
    for place in range(len(tokens) - 1, -1, -1):
        if tokens[place].kind == "close":
            closing.setdefault(tokens[place].name, []).append(place)
    result: list[Token] = []
    done = 0
    for place, token in enumerate(tokens):
        if place < done:
            continue
        ends = closing.get(token.name, [])
        while token.kind == "protect" and ends and ends[-1] < place:
            ends.pop()
        if token.kind == "protect" and ends and boundaries[ends[-1]] == boundaries[place]:
            done = ends[-1] + 1
            inner = tokens[place:done]
            text = "".join(each.text for each in inner if each.kind in ("text", "protected"))
            token = Token("protected", "".join(each.raw for each in inner), text)
        result.append(Token("standalone", token.raw) if token.kind == "protect" else token)
    return result


def _escape(text: str, in_table: bool) -> str:
    # A backslash does not keep a backtick from closing code that a backtick elsewhere in the block opens.
    escaped = SPECIAL.sub(lambda match: "&#96;" if match[0] == "`" else "\\" + match[0], text)
    return escaped.replace("|", "\\|") if in_table else escaped


def _escape_block_start(text: str) -> str:
    """Escape a text that would otherwise become a heading, list or quote."""
    match = BLOCK_START.match(text)
    if not match:
        return text
    return f"{match['number']}\\{text[match.end() :]}" if match["number"] else "\\" + text


def _quoted(text: str) -> str:
    """Write a text that stands between quotation marks."""
    return text.replace('"', "&quot;")


LAY_OUTS: dict[str, Callable[[str], str]] = {"text": _escape_block_start, "cell": str, "title": _quoted}
