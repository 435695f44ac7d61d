"""A phrase in both languages at once: words, the links between them, and the content words it is made of."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import NamedTuple

from demo_corpus import english, italian
from demo_corpus.italian import Token

# An apostrophe closes the word before it (l', dov'); the English 's and o'clock are words of their own.
_WORD = re.compile(r"o'clock|'s\b|[^\W_]+(?:-[^\W_]+)*(?:'(?!s\b))?|[^\w\s]")
_counter = itertools.count(1)


class Phrase(NamedTuple):
    """English tokens, Italian tokens, and lemmas; a lemma that begins with ~ is a pronoun, not a content word."""

    en: tuple[Token, ...] = ()
    it: tuple[Token, ...] = ()
    lemmas: tuple[str, ...] = ()


EMPTY = Phrase()


def words(text: str) -> list[str]:
    """The words and punctuation marks of a sentence of the corpus; an elided word such as l' is a word of its own."""
    return _WORD.findall(text)


def link() -> int:
    """A link that no other word has."""
    return next(_counter)


def tokens(text: str, *links: int) -> tuple[Token, ...]:
    """The words of a text, all with the same links."""
    return tuple([(w, links) for w in text.split()])


def unit(en: str, it: str, *lemmas: str) -> Phrase:
    """Words of the two languages, aligned all to all."""
    n = link()
    return Phrase(tokens(en, n), tokens(it, n), lemmas)


@cache
def _parse(template: str) -> tuple[tuple[str, int], ...]:
    """The items of a template: ("", i) inserts part i, (word, n) is a word with local link n, or none if n is 0."""
    out = []
    for item in template.split():
        if item[0] == "$":
            out.append(("", int(item[1:])))
        else:
            text, _, n = item.partition("/")
            out.append((text, int(n or 0)))
    return tuple(out)


def pair(en: str, it: str, *parts: Phrase, lemmas: tuple[str, ...] = ()) -> Phrase:
    """Fill two templates: `$0` is part 0 in that language, and words marked `/1` on both sides are aligned."""
    numbers: dict[int, int] = {}
    sides: list[tuple[Token, ...]] = []
    for side, template in enumerate((en, it)):
        out: list[Token] = []
        for text, n in _parse(template):
            if not text:
                out += parts[n][side]  # type: ignore[arg-type]
            elif n:
                if n not in numbers:
                    numbers[n] = link()
                out.append((text, (numbers[n],)))
            else:
                out.append((text, ()))
        sides.append(tuple(out))
    for part in parts:
        lemmas += part.lemmas
    return Phrase(sides[0], sides[1], lemmas)


def chain(*parts: Phrase) -> Phrase:
    """Phrases one after another, in the same order on both sides."""
    en: tuple[Token, ...] = ()
    it: tuple[Token, ...] = ()
    lemmas: tuple[str, ...] = ()
    for part in parts:
        en += part.en
        it += part.it
        lemmas += part.lemmas
    return Phrase(en, it, lemmas)


def _spell(tokens: list[Token]) -> str:
    text = ""
    glue = True
    for word, _ in tokens:
        if not glue and word not in (".", ",", "?", "!", "'s"):
            text += " "
        text += word
        glue = word[-1] == "'"
    return text[0].upper() + text[1:]


def render(phrase: Phrase) -> tuple[str, str, tuple[tuple[int, int], ...]]:
    """The two sentences and their alignment, by word index."""
    en = english.settle(phrase.en)
    it = italian.settle(phrase.it)
    places: dict[int, list[int]] = {}
    for j, (_, links) in enumerate(it):
        for n in links:
            places.setdefault(n, []).append(j)
    alignment = sorted({(i, j) for i, (_, links) in enumerate(en) for n in links for j in places.get(n, ())})
    return _spell(en), _spell(it), tuple(alignment)
