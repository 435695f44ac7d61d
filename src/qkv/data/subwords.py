"""More subword algorithms: unigram, whole words and characters, and BPE-dropout for training.

A learner takes lines, the number of pieces and the language tags, and returns a tokenizer, as `learn_bpe` does. BPE
comes from the tokenizers library and is deterministic; its unigram trainer is not, so unigram is learned here.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from qkv.core.dataset import Rows
from qkv.core.errors import UsageError
from qkv.core.tokenizer import (
    BYTE,
    CACHED_LENGTH,
    PRINTABLE,
    Learner,
    Tokenizer,
    TokenizerPair,
    learn_bpe,
    learn_tokenizers,
    pre_tokenizer,
)
from qkv.options import TokenizerConfig

CANDIDATES = 3  # BPE pieces that unigram starts with, for each piece of its vocabulary
VARIANTS = 64  # segmentations that BPE-dropout may give one chunk
CACHED_CHUNKS = 1 << 17  # at most about 200 MB when all segmentations are used
SPAN = 128  # longer runs of letters are merged in parts: the cost grows with the square of the length


def learner_for(kind: str) -> Learner:
    """Return the function that learns a vocabulary of this kind."""
    return {"bpe": learn_bpe, "unigram": learn_unigram, "word": learn_words, "char": learn_characters}[kind]


def learn(
    src_lines: Iterable[str], tgt_lines: Iterable[str], options: TokenizerConfig, tags: Sequence[str] = ()
) -> TokenizerPair:
    """Learn the vocabularies of a whole corpus, of the kind in the options; running text has target lines only."""
    src_lines, tgt_lines = list(src_lines), list(tgt_lines)
    pairs = max(len(src_lines), len(tgt_lines))
    return learn_tokenizers([src_lines, tgt_lines], options, tags, pairs=pairs, learner=learner_for(options.kind))


def learn_unigram(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
    """Learn a unigram vocabulary (Kudo, 2018) by pruning the pieces of a larger BPE vocabulary.

    The library's own trainer adds numbers in an order that differs between runs, and so does its vocabulary. Here each
    round splits the text with the current scores, counts the pieces and removes up to a quarter of them.
    """
    chunks: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for line in lines:
            chunks.update(line[1:].split(" "))
            yield line

    pieces = list(learn_bpe(counted(), CANDIDATES * size, tags).pieces)
    words = _count_pieces(chunks)
    scores = dict.fromkeys((*PRINTABLE, *pieces), -1.0)  # equal at first: the segmentation with fewest pieces wins
    while True:
        model = tokenizers.models.Unigram(list(scores.items()))
        used: Counter[str] = Counter()
        for word, count in words.items():
            for token in model.tokenize(word):
                used[token.value] += count
        total = sum(used.values()) + len(scores)
        scores = {piece: math.log((used[piece] + 1) / total) for piece in (*PRINTABLE, *pieces)}
        if len(pieces) <= size:
            return Tokenizer("unigram", pieces, tags, scores=list(scores.values()))
        pieces = _most_frequent({piece: used[piece] for piece in pieces}, max(size, len(pieces) * 3 // 4))
        scores = {piece: scores[piece] for piece in (*PRINTABLE, *pieces)}


def learn_words(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
    """Learn the most frequent words."""
    chunks = Counter(chunk for line in lines for chunk in line[1:].split(" "))
    return Tokenizer("word", _most_frequent(_count_pieces(chunks), size), tags)


def learn_characters(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
    """Learn the most frequent characters."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    spelled = {to_printable(character): count for character, count in counts.items()}
    return Tokenizer("char", _most_frequent(spelled, size), tags)


def to_printable(text: str) -> str:
    """Write the UTF-8 bytes of text as printable characters, the spelling of pieces in the tokenizer file."""
    return "".join(map(PRINTABLE.__getitem__, text.encode()))


def _count_pieces(chunks: Counter[str]) -> Counter[str]:
    split = pre_tokenizer().pre_tokenize_str
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for piece, _ in split(" " + chunk):
            counts[piece] += count
    return counts


def _most_frequent(counts: dict[str, int], size: int) -> list[str]:
    # Single bytes are tokens already. Ties are broken by spelling, so that the order of lines does not matter.
    ranked = sorted((piece for piece in counts if piece not in BYTE), key=lambda piece: (-counts[piece], piece))
    return ranked[:size]


# ---- running text ----------------------------------------------------------------------------------------------------


def newline_of(tokenizer: Tokenizer) -> int:
    """Return the id of the newline byte, which ends a line of running text."""
    return tokenizer.offset + ord("\n")


def pack_text(tokenizer: Tokenizer, text: str) -> bytes:
    """Return the packed ids of running text: each line encoded by itself, with a newline after each."""
    newline = newline_of(tokenizer).to_bytes(tokenizer.dtype.itemsize, "little")
    return newline.join(map(tokenizer.pack, text.split("\n"))) + newline


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of running text of any number of lines, without a newline after the last."""
    ids: list[int] = np.frombuffer(pack_text(tokenizer, text), tokenizer.dtype).tolist()
    return ids[:-1]


def decode_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the running text of ids, without the space that `encode_text` adds before each line."""
    joined = b"".join(map(tokenizer.bytes_of, ids))
    return joined.replace(b"\n ", b"\n").removeprefix(b" ").decode("utf-8", "replace")


# ---- names of tokens -------------------------------------------------------------------------------------------------


def readable_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return each token for display: "▁" for a space before it, <0xE2> for part of a character."""
    names = tokenizer.special_names
    return [names[i] if i < len(names) else _readable(tokenizer.bytes_of(i)) for i in ids]


def unique_names(tokenizer: Tokenizer) -> list[str]:
    """Return a unique name for each token: that of the special token, or its bytes as printable characters."""
    special = tokenizer.special_names
    return [*special, *(f"{piece} " if piece in special else piece for piece in tokenizer.index)]  # text may hold <s>


@lru_cache(1 << 16)  # a tenth of greedy decoding of short sentences otherwise
def _readable(piece: bytes) -> str:
    # Bytes that are no text decode to lone surrogates, which do not print either.
    text, errors = piece.decode("utf-8", "surrogateescape"), "surrogateescape"
    shown = {c: "".join(f"<0x{byte:02X}>" for byte in c.encode("utf-8", errors)) for c in text if not c.isprintable()}
    return "".join(shown.get(c, c) for c in text).replace(" ", "▁")


# ---- BPE-dropout -----------------------------------------------------------------------------------------------------


class _Chunk:
    """One chunk as byte ids, and the segmentations of it computed so far."""

    __slots__ = ("distinct", "parts", "seed", "variants")

    def __init__(self, tokenizer: Tokenizer, data: bytes) -> None:
        text = b"".join(map(tokenizer.bytes_of, np.frombuffer(data, tokenizer.dtype).tolist())).decode()
        self.seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.variants: list[bytes | None] = [None] * VARIANTS
        self.distinct: dict[bytes, bytes] = {}  # equal segmentations share one object
        self.parts: list[list[int]] = []  # merges never cross parts
        for piece, _ in tokenizer.library.pre_tokenizer.pre_tokenize_str(text):
            letters = [tokenizer.offset + BYTE[character] for character in piece]
            self.parts += [letters[start : start + SPAN] for start in range(0, len(letters), SPAN)]


class BpeDropout:
    """BPE-dropout (Provilkov et al., 2020): segment stored ids again, skipping each merge with a probability.

    Tokens are exactly invertible, so the stored ids are enough. A chunk (a word with the space before it) has 64
    segmentations, each a pure function of chunk, number and probability, and they are cached: merging in Python takes
    longer than a GPU needs to train on the tokens. A sentence that would get more than `max_length` tokens keeps its
    stored segmentation.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float, max_length: int = 0) -> None:
        if tokenizer.kind != "bpe":
            raise UsageError(f'tokenizer.dropout needs a tokenizer of kind "bpe", not "{tokenizer.kind}"')
        self.tokenizer, self.probability, self.max_length = tokenizer, probability, max_length
        ids = {piece: tokenizer.offset + number for piece, number in tokenizer.index.items()}
        # Mergeable pairs of ids: rank of the merge, and the id of the result.
        self._merges = {(ids[a], ids[b]): (rank, ids[a + b]) for rank, (a, b) in enumerate(tokenizer.merges)}
        first_bytes = [tokenizer.bytes_of(token)[:1] for token in range(tokenizer.size)]
        self._starts_chunk = np.array([byte in (b" ", b"") for byte in first_bytes])  # a tag has no bytes
        self._cached = lru_cache(CACHED_CHUNKS)(partial(_Chunk, tokenizer))

    def segment(
        self, ids: NDArray[Any], lengths: NDArray[np.int64], seeds: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Segment concatenated sentences again; the randomness of each follows from its seed alone."""
        starts_chunk = self._starts_chunk[ids]
        starts_chunk[(np.cumsum(lengths) - lengths)[lengths > 0]] = True  # chunks never cross sentences
        starts = np.flatnonzero(starts_chunk)
        row = np.searchsorted(np.cumsum(lengths), starts, side="right")
        place = np.arange(len(starts)) - np.searchsorted(row, row)  # number of the chunk in its sentence
        variants = (_mix(seeds[row] + place.astype(np.uint64)) % np.uint64(VARIANTS)).tolist()
        dtype = self.tokenizer.dtype
        data = ids.astype(dtype, copy=False).tobytes()
        edges = [*(starts * dtype.itemsize).tolist(), len(data)]
        longest, segments = CACHED_LENGTH * dtype.itemsize, []
        for (start, end), variant in zip(pairwise(edges), variants, strict=True):
            chunk = (self._cached if end - start <= longest else self._cached.__wrapped__)(data[start:end])
            segment = chunk.variants[variant]
            if segment is None:
                segment = self._merge_chunk(chunk, variant) or data[start:end]
                segment = chunk.variants[variant] = chunk.distinct.setdefault(segment, segment)
            segments.append(segment)
        sizes = np.fromiter(map(len, segments), np.int64, len(segments)) // dtype.itemsize
        new_lengths = np.bincount(row, weights=sizes, minlength=len(lengths)).astype(np.int64)
        if self.max_length:
            too_long = new_lengths > np.maximum(lengths, self.max_length)
            for number in np.flatnonzero(too_long[row]).tolist():
                segments[number] = data[edges[number] : edges[number + 1]]
            new_lengths = np.where(too_long, lengths, new_lengths)
        return np.frombuffer(b"".join(segments), dtype).astype(ids.dtype, copy=False), new_lengths

    def _merge_chunk(self, chunk: _Chunk, variant: int) -> bytes:
        """Compute one segmentation of a chunk: empty for a tag."""
        draw = random.Random(chunk.seed + variant).random  # a local generator: threads may share this object
        ids = [token for part in chunk.parts for token in self._merge(part.copy(), draw)]
        return struct.pack(f"<{len(ids)}{self.tokenizer.dtype.char}", *ids)

    def _merge(self, ids: list[int], draw: Callable[[], float]) -> list[int]:
        """Apply the first-learned merge that is not dropped, leftmost first, until none is left."""
        merges, probability = self._merges, self.probability
        while True:
            best, place, merged = len(merges), -1, -1
            for i, pair in enumerate(pairwise(ids)):
                rank, result = merges.get(pair, (best, -1))
                if rank < best and draw() >= probability:  # only a merge that would win draws
                    best, place, merged = rank, i, result
            if place < 0:
                return ids
            ids[place : place + 2] = [merged]


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map consecutive numbers to random-looking ones (the finaliser of SplitMix64; Steele et al., 2014)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def pair_dropout(tokenizers: TokenizerPair, probability: float, max_length: int = 0) -> Callable[..., list[Rows]]:
    """Return a function that segments both sides of a batch again, by its indices and seed."""
    src = BpeDropout(tokenizers.src, probability, max_length)
    both = (src, src if tokenizers.shared else BpeDropout(tokenizers.tgt, probability, max_length))

    def cut(rows: list[Rows], indices: NDArray[np.int64], seed: tuple[int, ...]) -> list[Rows]:
        # Each sentence has its own seed, so batches and ranks do not change its segmentation.
        numbers = np.random.SeedSequence((*seed, 3)).generate_state(2, np.uint64)
        return [
            Rows(*dropout.segment(*side, _mix(indices.astype(np.uint64) + number)))
            for dropout, side, number in zip(both, rows, numbers, strict=True)
        ]

    return cut
