"""Word alignments: words, the tokens they consist of, and links between two sentences in Pharaoh format, `0-0 1-2`.

Alignments number words, models see tokens. A token belongs to every word that shares a byte with it; a space alone, a
language tag, <s> and </s> belong to none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qkv.core.corpus import Column, TextBlock, Texts
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair

if TYPE_CHECKING:
    from torch import Tensor

    from qkv.core.dataset import TokenStore

Link = tuple[int, int]  # (source, target), both counted from 0
ALIGNMENT, ALIGNMENT_DTYPE = "links", np.dtype("<u2")  # the store's column: positions of tokens

# Rules for what a word is. Aligners split at spaces. For readers, and in the built-in corpus, punctuation marks are
# words too: an apostrophe ends the word before it (l'amico); 's and o'clock are words.
RULES = {"spaces": "a word ends at a space", "marks": "punctuation marks are words"}
LINK = re.compile(r"([0-9]+)-([0-9]+)")


@cache
def word_pattern(rule: str) -> re.Pattern[str]:
    """Return the pattern of a word; combining signs, such as separate accents, belong to the word of their letter."""
    if rule == "spaces":
        return re.compile(r"\S+", re.ASCII)
    signs = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code))[0] == "M")
    return re.compile(rf"o'clock|'s\b|[\w{signs}]+(?:-[\w{signs}]+)*(?:'(?!s\b))?|[^\w\s{signs}][{signs}]*")


def word_spans(text: str, rule: str = "marks") -> list[tuple[int, int]]:
    """Return the start and end of each word of the text."""
    if rule not in RULES:
        raise UsageError(f'"{rule}" is not a rule for words: choose one of {", ".join(RULES)}')
    return [match.span() for match in word_pattern(rule).finditer(text)]


def words(text: str, rule: str = "marks") -> list[str]:
    """Return the words of a text, as alignments number them."""
    return [text[begin:end] for begin, end in word_spans(text, rule)]


def tokens_of_words(tokenizer: Tokenizer, ids: Sequence[int], text: str, rule: str = "marks") -> list[list[int]]:
    """Return the positions in `ids` of each word's tokens; a language tag may come before them."""
    text = unicodedata.normalize("NFC", text)
    sizes = [0, *accumulate(len(character.encode()) for character in text)]
    ends = list(accumulate(len(tokenizer.bytes_of(token)) for token in ids))
    starts = [0, *ends[:-1]]
    positions, first = [], 0
    for begin, end in word_spans(text, rule):
        begin, end = sizes[begin] + 1, sizes[end] + 1  # in bytes; one space is implied before the text
        while ends[first] <= begin:
            first += 1
        last = first
        while last + 1 < len(ids) and starts[last + 1] < end:
            last += 1
        positions.append(list(range(first, last + 1)))
    return positions


def parse_pharaoh(text: str) -> list[Link]:
    """Return the links of a line in Pharaoh format; anything else raises ValueError."""
    links = []
    for part in text.split():
        match = LINK.fullmatch(part)
        if match is None:
            raise ValueError(f'"{part}" is not a link: write source-target, e.g. 0-0 1-2')
        links.append((int(match[1]), int(match[2])))
    return links


def to_pharaoh(links: Iterable[Link]) -> str:
    """Return links as a line in Pharaoh format, in order."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))


# ---- in the store and in batches -------------------------------------------------------------------------------------


def alignment_column(rule: str) -> Column:
    """Return the column of the store that holds the links between the tokens of a pair: source, target, source …"""
    return Column(ALIGNMENT, rule, ALIGNMENT_DTYPE, partial(_read_alignments, rule=rule))


def _read_alignments(
    block: TextBlock, both: TokenizerPair, *, rule: str
) -> Callable[[int, Texts, Sequence[bytes]], bytes]:
    """Return a function that turns a line of the alignment file into links between tokens, ordered by target token."""
    lines = block.lines(-1)

    def encode(row: int, pair: Texts, packed: Sequence[bytes]) -> bytes:
        try:
            links = parse_pharaoh(lines[row] or "")
        except ValueError as error:
            raise QkvError(f"{block.where(row, -1)}: {error}") from None
        groups = [
            tokens_of_words(side, np.frombuffer(ids, side.dtype).tolist(), text, rule)
            for side, ids, text in zip((both.src, both.tgt), packed, pair, strict=True)
        ]
        for link in links:
            for name, word, count in zip(("source", "target"), link, map(len, groups), strict=True):
                if word >= count:
                    raise QkvError(
                        f"{block.where(row, -1)}: {link[0]}-{link[1]} names {name} word {word}, counted from 0, of a "
                        f"sentence of {count} words ({RULES[rule]}): align exactly this text"
                    )
        source, target = groups
        joined = {(s, t) for i, j in links for s in source[i] for t in target[j]}
        return np.array(sorted(joined, key=lambda link: link[::-1]), ALIGNMENT_DTYPE).tobytes()

    return encode


def batch_alignment(store: TokenStore, indices: NDArray[np.int64]) -> Tensor:
    """Return the links of some pairs as (links, 3): row in the batch, position in the source, and in the target."""
    import torch

    if ALIGNMENT not in store.columns:
        raise UsageError(f"{store.folder}: prepared without alignments: name their file as align in [[data.train]]")
    flat, lengths = store.rows(ALIGNMENT, indices)
    rows = np.repeat(np.arange(len(indices)), lengths // 2)[:, None]
    return torch.from_numpy(np.concatenate([rows, flat.reshape(-1, 2)], axis=1, dtype=np.int64))


def join_alignments(
    source: str,
    target: str,
    sources: Sequence[str],
    targets: Sequence[str],
    links: Sequence[Sequence[Sequence[int]] | None],
    rule: str = "marks",
) -> list[Link] | None:
    """Join the word alignments of the sentences of a text; None if a sentence has none.

    Also None if joining without spaces merged two words into one: the word numbers would be wrong.
    """
    joined: list[Link] = []
    source_words, target_words = 0, 0  # in the sentences so far
    for source_part, target_part, part_links in zip(sources, targets, links, strict=True):
        if part_links is None:
            return None
        joined += [(source_words + i, target_words + j) for i, j in part_links]
        source_words += len(word_spans(source_part, rule))
        target_words += len(word_spans(target_part, rule))
    whole = len(word_spans(source, rule)), len(word_spans(target, rule))
    return joined if (source_words, target_words) == whole else None
