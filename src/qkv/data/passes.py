"""The work on one block of text, and the decisions that need all of it: repeated pairs and the held-out part.

Every pair has a fate: kept for training, held out for validation, or dropped for one reason. The first pass hashes,
the decisions are made on the hashes (on disk, a bounded part in memory), the second pass tokenises what is left.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data import links
from qkv.data.corpus import Block, read, read_alignments, where

Hashes = NDArray[np.uint64]
Fates = NDArray[np.uint8]

IN_MEMORY = 1 << 24  # hashes looked at together
SHORT = 4  # for the length ratio, a shorter side counts as this many tokens


class Fate(IntEnum):
    """What becomes of a pair; the first reason that holds is the one counted."""

    TRAIN = 0
    VALID = 1
    ENCODING = 2
    EMPTY = 3
    DUPLICATE = 4
    TOO_LONG = 5
    RATIO = 6


def scan(block: Block, on_bad: str) -> tuple[bytes, bytes, bytes]:
    """For every pair: hash of its source, hash of the pair, and fate so far, as the bytes of arrays.

    Spaces around a line and the Unicode form it was typed in make no difference to the hashes.
    """
    sources, pairs, fates = bytearray(), bytearray(), bytearray()
    tag = block.corpus.tag.encode()
    for pair in read(block, on_bad):
        lines = [unicodedata.normalize("NFC", line).strip().encode() for line in pair or ()]
        source = hashlib.blake2b(lines[0] if lines else b"", digest_size=8).digest()
        whole = hashlib.blake2b(source + tag, digest_size=8)
        for line in lines[1:]:
            whole.update(b"\n" + line)
        sources += source
        pairs += whole.digest()
        fates.append(Fate.ENCODING if pair is None else Fate.TRAIN if all(lines) else Fate.EMPTY)
    return bytes(sources), bytes(pairs), bytes(fates)


def mark_duplicates(pairs: Hashes, fates: Fates) -> None:
    """Keep the first of equal pairs."""
    parts = np.uint64(len(pairs) // IN_MEMORY + 1)
    for part in range(int(parts)):
        found = [
            start + np.flatnonzero((pairs[start:stop] % parts == part) & (fates[start:stop] == Fate.TRAIN))
            for start, stop in _slices(len(pairs))
        ]
        rows = np.concatenate(found)
        values = pairs[rows]
        order = np.argsort(values, kind="stable")
        repeated = values[order][1:] == values[order][:-1]
        fates[rows[order[1:][repeated]]] = Fate.DUPLICATE


# How a validation set is given: on the command line, or in a config.
GIVEN = "--valid-src and --valid-tgt, or --valid-text (data.valid)"


def hold_out(sources: Hashes, fates: Fates, wanted: int, seed: int) -> None:
    """Turn about `wanted` pairs (0: 2 %, at least 50, at most 2000) to validation, all pairs of a source together.

    Sources are taken in the order of their hash; never more than a tenth of the pairs.
    """
    usable = sum(int(np.count_nonzero(fates[start:stop] == Fate.TRAIN)) for start, stop in _slices(len(fates)))
    most = usable // 10
    if wanted > most > 0:
        raise UsageError(
            f"data.valid_size = {wanted}: at most a tenth of the {usable} usable pairs can be held out: "
            f"set it to {most} or less, or give a validation set: {GIVEN}"
        )
    goal = min(wanted or min(2000, max(50, usable // 50)), most)
    share = min(1.0, 8 * goal / max(usable, 1))
    chosen = _choose(sources, fates, goal, most, share, seed)
    if not len(chosen):
        raise UsageError(
            f"{usable} usable pairs are too few to hold some out for validation, which takes at least 10 different "
            f"sources: give a validation set: {GIVEN}"
        )
    for start, stop in _slices(len(fates)):
        part = fates[start:stop]
        part[np.isin(sources[start:stop], chosen) & (part == Fate.TRAIN)] = Fate.VALID


def _choose(sources: Hashes, fates: Fates, goal: int, most: int, share: float, seed: int) -> Hashes:
    counts: Counter[int] = Counter()
    for start, stop in _slices(len(sources)):
        usable = sources[start:stop][fates[start:stop] == Fate.TRAIN]
        values, repeats = np.unique(usable[_mix(usable, seed) <= share * (2.0**64 - 1)], return_counts=True)
        counts.update(dict(zip(values.tolist(), repeats.tolist(), strict=True)))
    candidates = np.array(list(counts), dtype=np.uint64)
    chosen: list[int] = []
    total = 0
    for source in candidates[np.argsort(_mix(candidates, seed))].tolist():
        if total < goal and total + counts[source] <= most:
            chosen.append(source)
            total += counts[source]
    if total < goal and share < 1:
        return _choose(sources, fates, goal, most, min(1.0, 8 * share), seed)
    return np.array(chosen, dtype=np.uint64)


def _mix(values: Hashes, seed: int) -> Hashes:
    # Another order of the same hashes for every seed.
    values = (values ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    return (values ^ (values >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)


def _slices(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + IN_MEMORY, length)) for start in range(0, length, IN_MEMORY))


def pick(block: Block, fates: bytes, side: int, share: float, seed: tuple[int, ...], on_bad: str) -> list[str]:
    """A uniform share of one side of the block's training lines."""
    rows = np.flatnonzero(np.frombuffer(fates, np.uint8) == Fate.TRAIN)
    random = np.random.default_rng(seed)
    size = int(share * len(rows) + random.random())
    chosen = np.sort(random.permutation(rows)[:size]).tolist()
    pairs = read(block, on_bad) if chosen else []
    return [pair[side] for row in chosen if (pair := pairs[row])]


@dataclass(frozen=True)
class Limits:
    """The filters on token counts."""

    max_length: int
    max_ratio: float  # 0: no limit

    def uneven(self, lengths: list[int]) -> bool:
        """Whether one side is too long for the other: longer > max_ratio × max(shorter, 4)."""
        return self.max_ratio > 0 and max(lengths) > self.max_ratio * max(min(lengths), SHORT)


@dataclass(frozen=True)
class Part:
    """What a block contributes to one part of the store, for each side: ids and lengths as bytes, raw text if valid.

    Where a corpus has alignments, links between tokens follow as if they were a third side: source, target, source …
    """

    ids: list[bytes]
    lengths: list[bytes]
    texts: list[list[str]]


LINKS = np.dtype("<u2")  # of positions of tokens in a sentence


def hold_out_ends(counts: list[int], fates: Fates, wanted: int) -> None:
    """Turn the last lines of running text to validation, of each corpus its share: a tenth of all, at most 5000."""
    total = sum(counts)
    goal, most = wanted or min(total // 10, 5000), total // 2
    if not 0 < goal <= most:
        fewer = f"set data.valid_size={most}, or " if most else ""
        raise UsageError(
            f"{total} lines of running text, {goal} of them held out for validation: it must be one at least and half "
            f"of them at most: {fewer}give validation text: --valid-text (data.valid)"
        )
    for count, stop in zip(counts, np.cumsum(counts).tolist(), strict=True):
        last = fates[stop - min(count - 1, -(-goal * count // total)) : stop]  # something is left to train on
        last[last == Fate.TRAIN] = Fate.VALID


def tokenise_stream(block: Block, fates: bytes, path: Path, on_bad: str) -> tuple[Part, Part, list[int]]:
    """`tokenise` for running text: every line is kept as it is and ends in a newline, a JSON document in </s>."""
    side = _load(path).tgt
    end = np.array([side.eos], side.dtype).tobytes() if block.corpus.form == "jsonl" else b""
    kept: tuple[list[Any], list[Any]] = ([], [])
    counts = [0] * len(Fate)
    for text, fate in zip(read(block, on_bad), fates, strict=True):
        if text is not None:
            kept[fate].append(([side.pack_text(text[0]) + end], text))
        counts[fate] += 1
    return _part(kept[0], [side.dtype], b"", 0), _part(kept[1], [side.dtype], b"", 1), counts


def tokenise(
    block: Block, fates: bytes, limits: Limits, path: Path, on_bad: str, aligned: bool = False
) -> tuple[Part, Part, list[int]]:
    """The training and the validation part of a block, and how many of its pairs met each fate."""
    tokenizers = _load(path)
    sides = [tokenizers.src, tokenizers.tgt][-block.corpus.sides :]
    kept: tuple[list[Any], list[Any]] = ([], [])
    counts = [0] * len(Fate)
    given = read_alignments(block)
    for row, (pair, fate) in enumerate(zip(read(block, on_bad), fates, strict=True)):
        if pair is not None and fate <= Fate.VALID:
            packed = [_pack(line, side, limits.max_length) for line, side in zip(pair, sides, strict=True)]
            lengths = [len(ids) // side.dtype.itemsize for ids, side in zip(packed, sides, strict=True)]
            if max(lengths) > limits.max_length:
                fate = Fate.TOO_LONG
            elif limits.uneven(lengths):
                fate = Fate.RATIO
            else:
                joined = [_link(block, row, found, pair, packed, tokenizers)] if (found := given[row]) else [b""]
                kept[fate].append((packed + joined if aligned else packed, pair))
        counts[fate] += 1
    tag = b""
    if block.corpus.tag:
        tag = np.array([sides[0].tag(block.corpus.tag)], sides[0].dtype).tobytes()
    dtypes = [*(side.dtype for side in sides), *([LINKS] if aligned else [])]
    return _part(kept[0], dtypes, tag, 0), _part(kept[1], dtypes, tag, len(sides)), counts


def _link(
    block: Block, row: int, found: list[links.Link], pair: tuple[str, ...], packed: list[bytes], both: TokenizerPair
) -> bytes:
    """The links of a pair between its tokens; one with a word that is not there is an error."""
    groups = [
        links.tokens_of_words(side, np.frombuffer(ids, side.dtype).tolist(), text, block.corpus.words)
        for side, ids, text in zip((both.src, both.tgt), packed, pair, strict=True)
    ]
    for link in found:
        for side, word, words in zip(("source", "target"), link, map(len, groups), strict=True):
            if word >= words:
                raise QkvError(
                    f"{where(block, row, -1)}: {link[0]}-{link[1]} names {side} word {word}, counted from 0, "
                    f"of a sentence of {words} words ({_COUNTED[block.corpus.words]}): align this very text"
                )
    tag = bool(block.corpus.tag)  # stands before the source's tokens
    joined = [(s + tag, t) for s, t in links.token_links(found, *groups)]
    return np.array(joined, LINKS).tobytes()


_COUNTED = {"spaces": "a word ends at a space", "marks": "punctuation marks are words"}


def _pack(line: str, side: Tokenizer, max_length: int) -> bytes:
    # A line with more characters than max_length tokens can hold is not worth cutting up: any length above will do.
    most = max_length * side.max_token_bytes
    if len(line) > most and len(unicodedata.normalize("NFC", line)) > most:
        return bytes((max_length + 1) * side.dtype.itemsize)
    return side.pack(line)


def _part(kept: list[tuple[list[bytes], tuple[str, ...]]], dtypes: list[np.dtype[Any]], tag: bytes, texts: int) -> Part:
    """The rows of all columns end to end; the first `texts` sides keep their text."""
    ids, lengths = [], []
    for number, dtype in enumerate(dtypes):
        before = b"" if number else tag
        rows = [before + packed[number] for packed, _ in kept]
        ids.append(b"".join(rows))
        lengths.append((np.array([len(row) for row in rows], "<u4") // dtype.itemsize).astype("<u4").tobytes())
    lines = [[pair[number] for _, pair in kept] for number in range(texts)]
    return Part(ids, lengths, lines)


@lru_cache(maxsize=1)
def _load(path: Path) -> TokenizerPair:
    return TokenizerPair.load(path)
