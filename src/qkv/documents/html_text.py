"""HTML: documents as segments, and text with inline tags for the translation API.

Two readers share the tables of elements. `read_html` is for documents: it honours `translate="no"` and keeps `<code>`
and similar elements untouched. `split_html` is for the API's `format=html`: each run of text with its inline tags is
translated as one sentence. Both keep tags, scripts, styles and comments byte for byte.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from qkv.core.errors import UsageError
from qkv.data.alignments import Link
from qkv.documents import Document, read_utf8
from qkv.documents.inline_markup import TAG, UNPAIRED, parse_markup, place_markup, split_at, strip_markup
from qkv.documents.segments import MAX_MARKS, Segment, TextFormat, Token, split_segments
from qkv.segmentation.sentences import split

# Inline elements occur within a sentence; every other element is a boundary between sentences.
INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike strong sub sup time "
    "tt u".split()
)
INLINE_VOID = frozenset("img wbr input".split())
INLINE_UNTRANSLATED = frozenset("code kbd samp var svg math button select".split())
RAW_TEXT = frozenset("script style textarea xmp iframe noembed noframes plaintext".split())  # may contain "<"
UNTRANSLATED = RAW_TEXT | frozenset("pre template object canvas audio video".split())
VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())

ELEMENT_TAG = re.compile(r"""<(?P<close>/?)(?P<name>[A-Za-z][^\s/>]*+)(?:[^>"']|"[^"]*"|'[^']*')*+>""")
MARKUP = re.compile(r"<[A-Za-z/!?]")
NOT_TRANSLATED = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*["'][^"']*\bnotranslate\b""", re.IGNORECASE)


def read(name: str, data: bytes) -> Document:
    return read_utf8(name, data, "text/html", read_html)


def read_html(text: str) -> list[str | Segment]:
    """Split an HTML document or fragment into kept source and segments."""
    return list(split_segments(tokenize(text), TextFormat(partial(html.escape, quote=False))))


def tokenize(text: str) -> Iterator[Token]:
    """Yield tags, comments and text in order; an unfinished tag or comment extends to the end."""
    place = 0
    while place < len(text):
        match = MARKUP.search(text, place)
        begin = match.start() if match else len(text)
        if begin > place:
            yield Token("text", text[place:begin], html.unescape(text[place:begin]))
        if not match:
            return
        token, place = _read_markup(text, begin)
        yield token


def _read_markup(text: str, begin: int) -> tuple[Token, int]:
    """Read the tag, the comment or the untranslated element at `begin`; returns its token and its end."""
    if text.startswith("<!--", begin):
        end = _end_after(text, "-->", begin + 4)
        return Token("standalone", text[begin:end]), end
    tag = ELEMENT_TAG.match(text, begin)
    if tag is None:
        end = len(text) if text[begin + 1 : begin + 3].strip("/")[:1].isalpha() else _end_after(text, ">", begin)
        return Token("boundary", text[begin:end]), end
    name, end = tag["name"].lower(), tag.end()
    if not tag["close"] and name not in VOID and not tag[0].endswith("/>"):
        marked_untranslated = NOT_TRANSLATED.search(tag[0]) is not None
        if name in UNTRANSLATED or name in INLINE_UNTRANSLATED or marked_untranslated:
            end = _element_end(text, name, end)
            kind = "standalone" if name in INLINE_UNTRANSLATED | INLINE else "boundary"
            return Token(kind, text[begin:end]), end
    if name in INLINE_VOID or (name in INLINE and tag[0].endswith("/>")):
        return Token("standalone", tag[0]), end
    if name in INLINE:
        return Token("close" if tag["close"] else "open", tag[0], name=name), end
    return Token("boundary", tag[0]), end


def _element_end(text: str, name: str, place: int) -> int:
    """Find the end of an element with content from `place`; elements of the same name may be nested in it."""
    edges, depth = re.compile(rf"<(/?){re.escape(name)}(?=[\s/>])", re.IGNORECASE), 1
    for edge in edges.finditer(text, place):
        depth += -1 if edge[1] else 0 if name in RAW_TEXT else 1
        if depth == 0:
            return _end_after(text, ">", edge.end())
    return len(text)


def _end_after(text: str, end: str, place: int) -> int:
    position = text.find(end, place)
    return len(text) if position < 0 else position + len(end)


# ---- HTML for the translation API: runs of text with inline tags, and the kept source between them -------------------

# <, > and & of the text become noncharacters, which tokenizers keep, so that every "<" in a run begins a tag.
NONCHARACTERS = {"<": "\ufdd0", ">": "\ufdd1", "&": "\ufdd2"}
ESCAPES = str.maketrans(NONCHARACTERS)
UNESCAPES = str.maketrans({escaped: character for character, escaped in NONCHARACTERS.items()})
ENTITIES = str.maketrans({escaped: html.escape(character) for character, escaped in NONCHARACTERS.items()})
RUN_TAGS = (INLINE - {"acronym", "label"}) | {"code", "kbd", "samp", "var", "wbr", "img"}
SKIPPED = re.compile(r"<!--.*?(?:-->|$)|<!\[CDATA\[.*?(?:\]\]>|$)|<![^>]*>|<\?[^>]*>", re.DOTALL)
SKIPPED_ELEMENT = re.compile(
    r"<(script|style|textarea|title|pre|template|noscript)\b[^>]*>.*?(?:</\1\s*>|$)", re.DOTALL | re.I
)


@dataclass(frozen=True)
class HtmlPart:
    """A stretch of HTML: kept source, or a run to translate with the white space `before` and `after` it."""

    text: str
    kept: bool = False
    before: str = ""
    after: str = ""

    @property
    def has_tags(self) -> bool:
        return not self.kept and TAG.search(self.text) is not None

    @property
    def plain(self) -> str:
        """The text to translate, without tags."""
        return strip_markup(self.text).translate(UNESCAPES)

    def build(self, translation: str, links: Iterable[Link] | None) -> str:
        """Write a translation in place of the text; tags enclose the words aligned with theirs."""
        written = translation.translate(ESCAPES)
        if self.has_tags:
            written = place_markup(self.text, written, links)
        return f"{self.before}{written.translate(ENTITIES)}{self.after}"

    def split_sentences(self) -> list[HtmlPart]:
        """Split the run at sentence ends outside of all tags, so that tags stay with the words of their sentence."""
        if not self.has_tags:
            return [self]
        parts: list[HtmlPart] = []
        tags = [*TAG.finditer(self.text)]
        plain = TAG.sub("", self.text)
        sentences = split(plain, lambda piece: True, sentences=True)
        begin = 0  # of the current part, in the text with tags
        next_tag = tag_characters = open_tags = 0  # number of the next tag; length of the earlier ones; nesting depth
        end = len(sentences.separators[0])  # of the current sentence, in the text without tags
        for sentence, gap in zip(sentences, sentences.separators[1:], strict=True):
            end += len(sentence)
            while next_tag < len(tags) and tags[next_tag].start() - tag_characters <= end:
                tag = tags[next_tag]
                if tag.start() - tag_characters == end and not tag["close"]:
                    break  # it belongs to the next sentence
                unpaired = tag["empty"] or tag["name"].lower() in UNPAIRED
                open_tags += 0 if unpaired else -1 if tag["close"] else 1
                tag_characters, next_tag = tag_characters + len(tag[0]), next_tag + 1
            following = end + len(gap)
            tag_in_gap = next_tag < len(tags) and tags[next_tag].start() - tag_characters < following
            if open_tags == 0 and gap and not tag_in_gap and following < len(plain):
                parts += [_text_part(self.text[begin : end + tag_characters]), HtmlPart(gap, kept=True)]
                begin = following + tag_characters
            end = following
        if not parts:
            return [self]
        before, after = HtmlPart(self.before, kept=True), HtmlPart(self.after, kept=True)
        return [before, *parts, _text_part(self.text[begin:]), after]

    @property
    def is_balanced(self) -> bool:
        """Whether the tags can be placed: every opened tag is closed in the right order, and they are not too many."""
        try:
            parse_markup(self.text)
        except UsageError:
            return False
        return len(TAG.findall(self.text)) <= MAX_MARKS

    def split_at_tags(self) -> list[HtmlPart]:
        """Split into text and kept tags, for a run that is too long or unbalanced to place its tags."""
        parts = [HtmlPart(self.before, kept=True)]
        for text, tag in split_at(TAG, self.text):
            parts += [_text_part(text), HtmlPart(tag[0] if tag else "", kept=True)]
        return [part for part in [*parts, HtmlPart(self.after, kept=True)] if part.text or part.before]


def _text_part(text: str) -> HtmlPart:
    """A part of text without tags; blank text is kept."""
    inner = text.strip()
    if not inner:
        return HtmlPart(text, kept=True)
    at = text.index(inner)
    return HtmlPart(inner, before=text[:at], after=text[at + len(inner) :])


def split_html(source: str) -> list[HtmlPart]:
    """Split HTML into kept source and runs to translate; joined unchanged, the parts give the source."""
    parts: list[HtmlPart] = []
    run, done = "", 0
    while done < len(source):
        begin = source.find("<", done)
        if begin < 0:
            break
        tag = SKIPPED_ELEMENT.match(source, begin) or SKIPPED.match(source, begin) or TAG.match(source, begin)
        end = tag.end() if tag else begin + 1
        run += source[done:begin]
        if tag is None or (tag.re is TAG and tag["name"].lower() in RUN_TAGS):
            run += source[begin:end]
        else:
            parts += [_run_part(run), HtmlPart(source[begin:end], kept=True)]
            run = ""
        done = end
    parts.append(_run_part(run + source[done:]))
    return [part for part in parts if part.text or part.before or part.after]


def _run_part(text: str) -> HtmlPart:
    """A part with decoded entities and escaped <, > and & between its tags; a run without text is kept."""
    if not TAG.sub("", text).strip():
        return HtmlPart(text, kept=True)
    part = _text_part(text)
    stretches = [
        html.unescape(stretch).translate(ESCAPES) + (tag[0] if tag else "") for stretch, tag in split_at(TAG, part.text)
    ]
    return replace(part, text="".join(stretches))
