"""BPE-dropout (Provilkov et al., 2020): stored ids cut anew, each possible merge left out with a probability.

Tokens are exactly invertible, so the ids of a text are enough. A chunk, that is a word with the space before it, has 64
such segmentations, each a pure function of chunk, number and probability. They are remembered: to merge anew every time
takes Python longer than a GPU takes for the tokens.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.core.errors import UsageError
from qkv.text.tokenizer import BYTE, CACHED_LENGTH, Cache, Tokenizer

VARIANTS = 64  # segmentations that dropout may give one chunk
WORDS = 1 << 16  # chunks remembered, and as many again: at most about 200 MB if all their segmentations are used
SPAN = 128  # longer runs of letters are taken in parts: the cost grows with the square of the length


class Chunk:
    """A word in bytes, and the segmentations of it that were asked for so far."""

    __slots__ = ("cuts", "distinct", "parts", "seed")

    def __init__(self, tokenizer: Tokenizer, data: bytes) -> None:
        text = b"".join(map(tokenizer.bytes_of, np.frombuffer(data, tokenizer.dtype).tolist())).decode()
        self.seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.cuts: list[bytes | None] = [None] * VARIANTS
        self.distinct: dict[bytes, bytes] = {}  # most of them are alike, and kept once
        self.parts: list[list[int]] = []  # bytes as ids; what is in two parts cannot merge
        for piece in tokenizer.pieces(text):
            letters = [tokenizer.offset + BYTE[character] for character in piece]
            self.parts += [letters[start : start + SPAN] for start in range(0, len(letters), SPAN)]


class Dropout:
    """A tokenizer's dropout, with what it remembers."""

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        if tokenizer.kind != "bpe":
            raise UsageError(f'tokenizer.dropout needs a tokenizer of kind "bpe", not "{tokenizer.kind}"')
        self.tokenizer, self.probability = tokenizer, probability
        self._ranks = tokenizer.ranks
        first = [tokenizer.bytes_of(token)[:1] for token in range(tokenizer.size)]
        self._begins = np.array([each in (b" ", b"") for each in first])  # a tag has no bytes and stands alone
        longest = CACHED_LENGTH * tokenizer.dtype.itemsize
        self._chunks: Cache[bytes, Chunk] = Cache(
            lambda data: Chunk(tokenizer, data), lambda data: len(data) <= longest, WORDS
        )

    def cut(
        self, ids: NDArray[Any], lengths: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Sentences end to end, and their lengths, cut anew: what is random in each follows from its seed."""
        begins = self._begins[ids]
        begins[(np.cumsum(lengths) - lengths)[lengths > 0]] = True  # a sentence is its own, whatever it begins with
        starts = np.flatnonzero(begins)
        row = np.searchsorted(np.cumsum(lengths), starts, side="right")
        place = np.arange(len(starts)) - np.searchsorted(row, row)  # of the chunk in its sentence
        variants = (_mix(seeds[row] + place.astype(np.uint64)) % np.uint64(VARIANTS)).tolist()
        dtype = self.tokenizer.dtype
        data = ids.astype(dtype, copy=False).tobytes()
        edges = [*(starts * dtype.itemsize).tolist(), len(data)]
        chunks, found = self._chunks, []
        for (start, end), variant in zip(pairwise(edges), variants, strict=True):
            chunk = chunks[data[start:end]]
            cut = chunk.cuts[variant]
            if cut is None:
                cut = self._segment(chunk, variant) or data[start:end]
                cut = chunk.cuts[variant] = chunk.distinct.setdefault(cut, cut)
            found.append(cut)
        sizes = np.fromiter(map(len, found), np.int64, len(found)) // dtype.itemsize
        made = np.bincount(row, weights=sizes, minlength=len(lengths)).astype(np.int64)
        return np.frombuffer(b"".join(found), dtype).astype(ids.dtype, copy=False), made

    def _segment(self, chunk: Chunk, variant: int) -> bytes:
        """One segmentation of a chunk; nothing, if it is a tag."""
        chance = random.Random(chunk.seed + variant).random  # this call's own: threads may share the object
        ids = [token for part in chunk.parts for token in self._merge(part.copy(), chance)]
        return struct.pack(f"<{len(ids)}{self.tokenizer.dtype.char}", *ids)

    def _merge(self, ids: list[int], chance: Callable[[], float]) -> list[int]:
        # The first-learned merge that survives is applied, leftmost, until none does; only one that would win draws.
        ranks, probability = self._ranks, self.probability
        while True:
            best, place, merged = len(ranks), -1, -1
            for i, pair in enumerate(pairwise(ids)):
                rank, result = ranks.get(pair, (best, -1))
                if rank < best and chance() >= probability:
                    best, place, merged = rank, i, result
            if place < 0:
                return ids
            ids[place : place + 2] = [merged]


def seeds_of(rows: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A seed for each row, whatever other rows are asked for with it."""
    return _mix(rows.astype(np.uint64) + np.uint64(seed))


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, from numbers in sequence (the finaliser of SplitMix64; Steele et al., 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
