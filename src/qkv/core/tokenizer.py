"""Text to ids and exactly back (paper, section 5.1: byte-pair encoding): `decode(encode(x)) == NFC(x)` for any string.

A vocabulary holds `<pad>` `<s>` `</s>`, then language tags, then the 256 bytes, then the learned pieces. Text that no
piece covers is written in bytes, so there is no unknown token. Text is split at U+0020 into chunks, and each chunk is
encoded with one space before it; `decode` removes the space that this adds at the start. Tokens never cross chunks, so
encoding a known chunk is a dictionary lookup.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from qkv.core import files
from qkv.core.config import TokenizerConfig
from qkv.core.errors import QkvError, UsageError

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<s>", "</s>")
VERSION = 1  # of the file

# Letters with their marks, digits, and everything else do not share a piece; each may have one space before it.
PIECES = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^ \p{L}\p{M}\p{N}]+| "
CACHE_SIZE = 1 << 18  # cached chunks
CACHED_LENGTH = 64  # characters of a cached chunk at most: longer ones are rare

# With tokenizer.vocab = 0: this many tokens for corpora of at least so many pairs, or as many as the text supports.
VOCABULARY_SIZES = ((1_000_000, 32_000), (150_000, 16_000), (20_000, 8_000), (5_000, 4_000), (0, 2_000))
LONG_CHUNK = re.compile(r"([^ ]{256})[^ ]+")  # learning time grows with the square of a chunk's length


def _printable_bytes() -> tuple[str, ...]:
    # The library learns on characters, so each byte needs a visible one: itself, or the next free one after U+00FF.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in visible else next(spare)) for byte in range(256))


PRINTABLE = _printable_bytes()
BYTE = {character: byte for byte, character in enumerate(PRINTABLE)}


def pre_tokenizer(pattern: str = PIECES) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Build the library's pre-tokenizer: split by the pattern, then write each part in printable bytes."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    spelled = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, spelled])


def one_line(text: str) -> str:
    """Return a text with spaces for its line breaks, so that it is one line of a file."""
    return text.replace("\n", " ").replace("\r", " ")


class Tokenizer:
    """One side's vocabulary and the rule that splits text into its tokens.

    `pieces` are the learned tokens in printable bytes, in the order of their ids. Between overlapping pieces, bpe
    decides by the order of `merges`. Of the kinds that `qkv.data.subwords` learns, unigram decides by `scores` (256 for
    the bytes, then one for each piece); word and char look up whole words and single characters.
    """

    pad, bos, eos = PAD, BOS, EOS

    def __init__(
        self,
        kind: str,
        pieces: Sequence[str],
        tags: Iterable[str] = (),
        *,
        merges: Sequence[tuple[str, str]] = (),
        scores: Sequence[float] = (),
    ) -> None:
        self.kind, self.tags = kind, tuple(tags)
        self.pieces, self.merges, self.scores = tuple(pieces), tuple(merges), tuple(scores)
        self.offset = len(SPECIALS) + len(self.tags)  # the id of byte 0; the library's own ids begin there
        self.special_names = (*SPECIALS, *(f"<2{tag}>" for tag in self.tags))
        spelled = (*PRINTABLE, *self.pieces)
        self._bytes = (*(b"" for _ in self.special_names), *(bytes(map(BYTE.__getitem__, piece)) for piece in spelled))
        self.index = {piece: number for number, piece in enumerate(spelled)}
        if len(self.index) != len(spelled):
            raise ValueError("a piece occurs twice")
        self.bytes_of = self._bytes.__getitem__  # of one token; special tokens have none
        self.size = len(self._bytes)
        self.max_token_bytes = max(map(len, self._bytes))
        self.dtype: np.dtype[Any] = np.dtype("<u2" if self.size <= 1 << 16 else "<u4")
        model: tokenizers.models.Model
        if kind == "unigram":
            model = tokenizers.models.Unigram(list(zip(self.index, self.scores, strict=True)))
        else:  # without merges, a part outside the vocabulary becomes its bytes
            model = tokenizers.models.BPE(self.index, list(merges), ignore_merges=kind != "bpe")
        self.library = tokenizers.Tokenizer(model)
        self.library.pre_tokenizer = pre_tokenizer(r"[\s\S]" if kind == "char" else PIECES)
        self._cached = lru_cache(CACHE_SIZE)(self._pack_chunk)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without <s> and </s>; a lone surrogate, which no file can hold, is refused."""
        return np.frombuffer(self.pack(text), self.dtype).tolist()

    def pack(self, text: str) -> bytes:
        """Return `encode(text)` as the bytes of an array of `dtype`, as the store keeps them."""
        if not text:
            return b""
        chunks = unicodedata.normalize("NFC", text).split(" ")
        return b"".join([(self._cached if len(c) <= CACHED_LENGTH else self._pack_chunk)(c) for c in chunks])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens and tags; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).removeprefix(b" ").decode("utf-8", "replace")

    def tag(self, name: str) -> int:
        if name not in self.tags:
            known = ", ".join(self.tags) or "none"
            raise UsageError(f'language tag "{name}" is not in the vocabulary; known tags: {known}')
        return len(SPECIALS) + self.tags.index(name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` turns back into the same tokenizer."""
        plain: dict[str, Any] = {"kind": self.kind, "tags": list(self.tags), "pieces": list(self.pieces)}
        if self.kind == "bpe":
            plain["merges"] = [f"{a} {b}" for a, b in self.merges]
        if self.kind == "unigram":
            plain["scores"] = list(self.scores)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Tokenizer:
        """Build a tokenizer from `to_dict`'s values; anything else raises ValueError, KeyError or TypeError."""
        if plain["kind"] not in ("bpe", "unigram", "word", "char"):
            raise ValueError(f"unknown kind {plain['kind']!r}")
        merges = [tuple(merge.split(" ")) for merge in plain.get("merges", ())]
        return cls(plain["kind"], plain["pieces"], plain["tags"], merges=merges, scores=plain.get("scores", ()))

    def _pack_chunk(self, chunk: str) -> bytes:
        """Split one chunk, with a space before it, into tokens."""
        try:
            chunk.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(chunk[error.start]):04X}"
            raise UsageError(f"the text holds {half}, half of a character: repair or remove it") from None
        numbers = self.library.encode(" " + chunk).ids
        return struct.pack(f"<{len(numbers)}{self.dtype.char}", *[number + self.offset for number in numbers])


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of source and target: one object twice where the vocabulary is shared."""

    src: Tokenizer
    tgt: Tokenizer

    @property
    def shared(self) -> bool:
        return self.src is self.tgt

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids."""
        return hashlib.blake2b(self._to_json().encode(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        files.write_text(path, self._to_json())

    @classmethod
    def load(cls, path: Path) -> TokenizerPair:
        """Read a file written by `save`."""
        plain = files.read_json(path, "tokenizer", VERSION, "copy it anew, or use the qkv that wrote it")
        try:
            sides = [Tokenizer.from_dict(side) for side in plain["sides"]]
            src, tgt = sides if len(sides) == 2 else sides * 2
        except Exception as error:  # the library raises bare Exception for a vocabulary it cannot use
            raise QkvError(f"{path}: damaged tokenizer ({type(error).__name__}: {error}): copy it anew") from None
        return cls(src, tgt)

    def _to_json(self) -> str:
        sides = [side.to_dict() for side in ([self.src] if self.shared else [self.src, self.tgt])]
        return json.dumps({"format": "qkv-tokenizer", "version": VERSION, "sides": sides}, ensure_ascii=False, indent=0)


# ---- learning --------------------------------------------------------------------------------------------------------

Learner = Callable[[Iterable[str], int, Sequence[str]], Tokenizer]  # (lines, number of pieces, tags) -> tokenizer


def learn_bpe(lines: Iterable[str], size: int, tags: Sequence[str]) -> Tokenizer:
    """Learn byte-pair encoding (Sennrich et al., 2016): the same lines give the same vocabulary."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size + len(PRINTABLE), min_frequency=2, initial_alphabet=list(PRINTABLE), show_progress=False
    )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = pre_tokenizer()
    library.train_from_iterator(lines, trainer)
    merges = [(a, b) for a, b in json.loads(library.to_str())["model"]["merges"]]
    return Tokenizer("bpe", list(dict.fromkeys(a + b for a, b in merges)), tags, merges=merges)


def learn_tokenizers(
    sides: Sequence[Iterable[str]], options: TokenizerConfig, tags: Sequence[str], *, pairs: int, learner: Learner
) -> TokenizerPair:
    """Learn one vocabulary for all sides, or one for each, from the lines of a sample of a corpus of so many pairs."""
    base = len(SPECIALS) + len(tags) + len(PRINTABLE)
    if options.vocab and options.vocab < base:
        raise UsageError(
            f"tokenizer.vocab = {options.vocab}: the special tokens, tags and bytes alone are {base}: "
            f"set tokenizer.vocab to at least {base}, or to 0"
        )
    size = options.vocab or next(size for least, size in VOCABULARY_SIZES if pairs >= least)
    learned = []
    for lines in [chain(*sides)] if options.shared else sides:
        cleaned = (LONG_CHUNK.sub(r"\1", " " + unicodedata.normalize("NFC", line)) for line in lines if line)
        learned.append(tokenizer := learner(cleaned, size - base, tags))
        if tokenizer.size < options.vocab:
            raise UsageError(
                f"tokenizer.vocab = {options.vocab}: the text supports only {tokenizer.size} tokens: "
                f"set tokenizer.vocab to at most {tokenizer.size}, or to 0 to have it chosen"
            )
    return TokenizerPair(learned[0], learned[-1])
