"""HTML as tokens and segments: tags kept to the byte, scripts, styles and code untouched."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from qkv.documents.inline_markup import ALONE, TAG
from qkv.documents.segments import Segment, Token, Writing, segments

# Elements within a sentence. All others, and those in neither list, stand around sentences.
INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike strong sub sup time "
    "tt u".split()
)
VOID_ELEMENTS = frozenset("img wbr input".split())  # within a sentence, never closed
WHOLE = frozenset("code kbd samp var svg math button select".split())  # within a sentence, content not translated
# Content that is no text; the first ones end at their own closing tag, whatever stands in them.
RAW = frozenset("script style textarea xmp iframe noembed noframes plaintext".split())
KEPT = RAW | frozenset("pre template object canvas audio video".split())

ELEMENT_TAG = re.compile(r"""<(?P<close>/?)(?P<name>[A-Za-z][^\s/>]*+)(?:[^>"']|"[^"]*"|'[^']*')*+>""")
MARKUP = re.compile(r"<[A-Za-z/!?]")
NOT_TRANSLATED = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*["'][^"']*\bnotranslate\b""", re.IGNORECASE)
VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())


def read(text: str) -> list[str | Segment]:
    """An HTML document, or a part of one, as what is kept and what is translated."""
    return list(segments(tokens(text), Writing(partial(html.escape, quote=False))))


def tokens(text: str) -> Iterator[Token]:
    """Tags, comments and text in order. What never ends, ends with the document, and is kept as it is."""
    place = 0
    while place < len(text):
        found = MARKUP.search(text, place)
        begin = found.start() if found else len(text)
        if begin > place:
            yield Token("text", text[place:begin], html.unescape(text[place:begin]))
        if not found:
            return
        token, place = _markup(text, begin)
        yield token


def _markup(text: str, begin: int) -> tuple[Token, int]:
    """The tag, comment or element with no text in it that begins there, and where it ends."""
    if text.startswith("<!--", begin):
        end = _behind(text, "-->", begin + 4)
        return Token("alone", text[begin:end]), end
    tag = ELEMENT_TAG.match(text, begin)
    if tag is None:
        end = len(text) if text[begin + 1 : begin + 3].strip("/")[:1].isalpha() else _behind(text, ">", begin)
        return Token("boundary", text[begin:end]), end
    name, end = tag["name"].lower(), tag.end()
    if not tag["close"] and name not in VOID and not tag[0].endswith("/>"):
        untouched = NOT_TRANSLATED.search(tag[0]) is not None
        if name in KEPT or name in WHOLE or untouched:
            end = _element_end(text, name, end)
            return Token("alone" if name in WHOLE | INLINE else "boundary", text[begin:end]), end
    if name in VOID_ELEMENTS or (name in INLINE and tag[0].endswith("/>")):
        return Token("alone", tag[0]), end
    if name in INLINE:
        return Token("close" if tag["close"] else "open", tag[0], name=name), end
    return Token("boundary", tag[0]), end


def _element_end(text: str, name: str, place: int) -> int:
    """Where the element ends that was opened before that place; elements of the same name may stand in it."""
    edges, depth = re.compile(rf"<(/?){re.escape(name)}(?=[\s/>])", re.IGNORECASE), 1
    for edge in edges.finditer(text, place):
        depth += -1 if edge[1] else 0 if name in RAW else 1
        if depth == 0:
            return _behind(text, ">", edge.end())
    return len(text)


def _behind(text: str, end: str, place: int) -> int:
    found = text.find(end, place)
    return len(text) if found < 0 else found + len(end)


# ---- Text beside tags: characters that could be taken for one are written as others, which Unicode keeps  ------------


MARKS = {"<": "\ufdd0", ">": "\ufdd1", "&": "\ufdd2"}
AWAY = {ord(usual): other for usual, other in MARKS.items()}
BACK = {ord(other): usual for usual, other in MARKS.items()}


def swap(text: str) -> str:
    """The text with other characters in place of <, > and &."""
    return text.translate(AWAY)


def swap_back(text: str) -> str:
    """The text with its <, > and & again."""
    return text.translate(BACK)


# ---- HTML in parts: runs of text with their inline tags, each translated as one, and everything between k ------------


# What stands inside a sentence; every other tag ends one.
INLINE_TAGS = frozenset(
    "a abbr b bdi bdo big cite code data del dfn em font i ins kbd mark q s samp small span strike strong sub sup time"
    " tt u var wbr img".split()
)
SKIPPED = re.compile(r"<!--.*?(?:-->|$)|<!\[CDATA\[.*?(?:\]\]>|$)|<![^>]*>|<\?[^>]*>", re.DOTALL)
RAW_ELEMENT = re.compile(
    r"<(script|style|textarea|title|pre|template|noscript)\b[^>]*>.*?(?:</\1\s*>|$)", re.DOTALL | re.I
)


@dataclass(frozen=True)
class Part:
    """A stretch of the source: kept as it is, or a run to translate, with the white space around it apart."""

    text: str
    kept: bool = False
    before: str = ""
    after: str = ""

    @property
    def tagged(self) -> bool:
        """Whether there are tags in it, to be set around the words of the translation."""
        return TAG.search(self.text) is not None

    def torn(self) -> list[Part]:
        """The run cut at its tags, for one whose tags cannot be set: they do not match, or it is too long."""
        texts, tags = TAG.sub("\0", self.text).split("\0"), [tag[0] for tag in TAG.finditer(self.text)]
        cut = [Part(self.before, kept=True), _spaced(texts[0])]
        for tag, text in zip(tags, texts[1:], strict=True):
            cut += [Part(tag, kept=True), _spaced(text)]
        return [part for part in [*cut, Part(self.after, kept=True)] if part.text or part.before]

    @property
    def matched(self) -> bool:
        """Whether every tag that is opened is closed, in the right order."""
        open_tags: list[str] = []
        for tag in TAG.finditer(self.text):
            if tag["close"] and (not open_tags or open_tags.pop() != tag["name"]):
                return False
            if not (tag["close"] or tag["alone"] or tag["name"].lower() in ALONE):
                open_tags.append(tag["name"])
        return not open_tags


def _spaced(text: str) -> Part:
    """Text without tags, the white space around it apart."""
    inner = text.strip()
    if not inner:
        return Part(text, kept=True)
    at = text.index(inner)
    return Part(inner, before=text[:at], after=text[at + len(inner) :])


def parts(source: str) -> list[Part]:
    """The source in parts, in order; together, with nothing translated, they are the source."""
    found: list[Part] = []
    run = ""
    for piece, kept in _pieces(source):
        if not kept:
            run += piece
            continue
        found += [_run(run), Part(piece, kept=True)]
        run = ""
    return [part for part in [*found, _run(run)] if part.text or part.before or part.after]


def _pieces(source: str) -> list[tuple[str, bool]]:
    """Text and inline tags, and what is kept."""
    found: list[tuple[str, bool]] = []
    done = 0
    while done < len(source):
        begin = source.find("<", done)
        if begin < 0:
            break
        tag = RAW_ELEMENT.match(source, begin) or SKIPPED.match(source, begin) or TAG.match(source, begin)
        end = tag.end() if tag else begin + 1
        inline = tag is None or (tag.re is TAG and tag["name"].lower() in INLINE_TAGS)
        found += [(source[done:begin], False), (source[begin:end], not inline)]
        done = end
    return [*found, (source[done:], False)]


def _run(text: str) -> Part:
    """Text with the entities read, and what could be taken for tags spelled otherwise; blank runs are kept."""
    if not TAG.sub("", text).strip():
        return Part(text, kept=True)
    inner = text.strip()
    at = text.index(inner)
    tags = [*TAG.finditer(inner)]
    ends = [0, *(tag.end() for tag in tags)]
    begins = [*(tag.start() for tag in tags), len(inner)]
    texts = [swap(html.unescape(inner[a:b])) for a, b in zip(ends, begins, strict=True)]
    out = texts[0] + "".join(tag[0] + after for tag, after in zip(tags, texts[1:], strict=True))
    return Part(out, before=text[:at], after=text[at + len(inner) :])


def written(text: str) -> str:
    """A translated run as HTML: the characters that were spelled otherwise become entities."""
    for character, entity in (("<", "&lt;"), (">", "&gt;"), ("&", "&amp;")):
        text = text.replace(swap(character), entity)
    return text
