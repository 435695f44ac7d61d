"""HTML in parts: runs of text with their inline tags, each translated as one, and everything between kept as it is."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from qkv.explain.markup import ALONE, TAG
from qkv.serve.marks import swap

# What stands inside a sentence; every other tag ends one.
INLINE = frozenset(
    "a abbr b bdi bdo big cite code data del dfn em font i ins kbd mark q s samp small span strike strong sub sup time"
    " tt u var wbr img".split()
)
SKIPPED = re.compile(r"<!--.*?(?:-->|$)|<!\[CDATA\[.*?(?:\]\]>|$)|<![^>]*>|<\?[^>]*>", re.DOTALL)
RAW = re.compile(r"<(script|style|textarea|title|pre|template|noscript)\b[^>]*>.*?(?:</\1\s*>|$)", re.DOTALL | re.I)


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
        tag = RAW.match(source, begin) or SKIPPED.match(source, begin) or TAG.match(source, begin)
        end = tag.end() if tag else begin + 1
        inline = tag is None or (tag.re is TAG and tag["name"].lower() in INLINE)
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
