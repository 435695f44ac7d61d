"""Words, the tokens they consist of, and links between the words of two sentences: Pharaoh text, `0-0 1-2`.

Alignments speak of words, models of tokens. A token belongs to every word of which it holds a byte; a space alone, a
language tag, <s> and </s> belong to none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate

from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer

Link = tuple[int, int]  # (source, target), both counted from 0

# What a word is. Files of alignments count what stands between spaces; a reader counts punctuation marks by themselves,
# and so does the built-in corpus: an apostrophe closes the word before it (l'amico), 's and o'clock are words.
# Signs that combine with a letter, as accents written apart or the vowels of many scripts, belong to its word.
SIGNS = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code))[0] == "M")
RULES = {
    "spaces": re.compile(r"\S+", re.ASCII),
    "marks": re.compile(rf"o'clock|'s\b|[\w{SIGNS}]+(?:-[\w{SIGNS}]+)*(?:'(?!s\b))?|[^\w\s{SIGNS}][{SIGNS}]*"),
}
LINK = re.compile(r"([0-9]+)-([0-9]+)")


def word_spans(text: str, rule: str = "marks") -> list[tuple[int, int]]:
    """Where each word begins and ends in the text."""
    if rule not in RULES:
        raise UsageError(f'"{rule}" is no way to count words: choose one of {", ".join(RULES)}')
    return [match.span() for match in RULES[rule].finditer(text)]


def words(text: str, rule: str = "marks") -> list[str]:
    """The words of a text, as alignments number them."""
    return [text[begin:end] for begin, end in word_spans(text, rule)]


def tokens_of_words(tokenizer: Tokenizer, ids: Sequence[int], text: str, rule: str = "marks") -> list[list[int]]:
    """For each word of the text, the positions in `ids` of the tokens that hold it; a tag may stand before them."""
    text = unicodedata.normalize("NFC", text)
    sizes = [0, *accumulate(len(character.encode()) for character in text)]
    ends = list(accumulate(len(tokenizer.bytes_of(token)) for token in ids))
    starts = [0, *ends[:-1]]
    found, first = [], 0
    for begin, end in word_spans(text, rule):
        begin, end = sizes[begin] + 1, sizes[end] + 1  # in bytes; one space is implied before the text
        while ends[first] <= begin:
            first += 1
        last = first
        while last + 1 < len(ids) and starts[last + 1] < end:
            last += 1
        found.append(list(range(first, last + 1)))
    return found


def parse(text: str) -> list[Link]:
    """The links of a line of Pharaoh text; anything else in it raises ValueError with what it is."""
    links = []
    for part in text.split():
        match = LINK.fullmatch(part)
        if match is None:
            raise ValueError(part)
        links.append((int(match[1]), int(match[2])))
    return links


def dumps(links: Iterable[Link]) -> str:
    """Links as a line of Pharaoh text, in order."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))


def token_links(links: Iterable[Link], source: list[list[int]], target: list[list[int]]) -> list[Link]:
    """Links between words as links between all their tokens, ordered by target token, each once."""
    joined = {(s, t) for i, j in links for s in source[i] for t in target[j]}
    return sorted(joined, key=lambda link: link[::-1])
