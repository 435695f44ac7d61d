"""HTML as tokens and segments: tags kept to the byte, scripts, styles and code untouched."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import partial

from qkv.serve.documents.segment import Segment, Token, Writing, segments

# Elements within a sentence. All others, and those in neither list, stand around sentences.
INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike strong sub sup time "
    "tt u".split()
)
ALONE = frozenset("img wbr input".split())  # within a sentence, never closed
WHOLE = frozenset("code kbd samp var svg math button select".split())  # within a sentence, content not translated
# Content that is no text; the first ones end at their own closing tag, whatever stands in them.
RAW = frozenset("script style textarea xmp iframe noembed noframes plaintext".split())
KEPT = RAW | frozenset("pre template object canvas audio video".split())

TAG = re.compile(r"""<(?P<close>/?)(?P<name>[A-Za-z][^\s/>]*+)(?:[^>"']|"[^"]*"|'[^']*')*+>""")
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
    tag = TAG.match(text, begin)
    if tag is None:
        end = len(text) if text[begin + 1 : begin + 3].strip("/")[:1].isalpha() else _behind(text, ">", begin)
        return Token("boundary", text[begin:end]), end
    name, end = tag["name"].lower(), tag.end()
    if not tag["close"] and name not in VOID and not tag[0].endswith("/>"):
        untouched = NOT_TRANSLATED.search(tag[0]) is not None
        if name in KEPT or name in WHOLE or untouched:
            end = _element_end(text, name, end)
            return Token("alone" if name in WHOLE | INLINE else "boundary", text[begin:end]), end
    if name in ALONE or (name in INLINE and tag[0].endswith("/>")):
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
