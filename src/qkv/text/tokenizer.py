"""Text to ids and exactly back: `decode(encode(x)) == NFC(x)` for every Unicode string.

A vocabulary is `<pad>` `<s>` `</s>`, then language tags, then the 256 bytes, then learned pieces; whatever no piece
covers is spelled in bytes, so there is no unknown token. Text is cut at U+0020 into chunks, and every chunk is encoded
as a space and the chunk: a space belongs to the word after it, and the one implied at the start is taken off by
`decode`. Chunks do not touch each other, so encoding is a dictionary lookup with the subword model behind it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import struct
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers

from qkv.core import files
from qkv.core.errors import QkvError, UsageError

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<s>", "</s>")
FORMAT, VERSION = "qkv-tokenizer", 1

# Letters with their marks, digits, and everything else do not share a piece; each may have one space before it.
PIECES = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^ \p{L}\p{M}\p{N}]+| "
NEVER = -1e6  # the score of a piece that no text is cut into
CACHED = 1 << 17  # chunks remembered, and as many again that were remembered before
CACHED_LENGTH = 64  # longer chunks are rare and not worth remembering

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def _printable_bytes() -> tuple[str, ...]:
    # The library learns on characters, so each byte needs one that is visible: itself, or the next after U+00FF.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in visible else next(spare)) for byte in range(256))


PRINTABLE = _printable_bytes()
BYTE = {character: byte for byte, character in enumerate(PRINTABLE)}


def spell(text: str) -> str:
    """The UTF-8 bytes of text, each as its printable character: how pieces are written in the tokenizer file."""
    return "".join(map(PRINTABLE.__getitem__, text.encode()))


def pre_tokenizer(pieces: str = PIECES) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The library's form of our rule: cut into pieces, then spell them in printable bytes."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated")
    spelled = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, spelled])


class Cache(dict[Key, Value]):
    """A dictionary that computes what it lacks and holds a bounded number of entries.

    A full one is emptied, but its last content stays at hand: what is still in use comes back from there.
    """

    def __init__(self, compute: Callable[[Key], Value], keep: Callable[[Key], bool], size: int) -> None:
        self.compute, self.keep, self.size = compute, keep, size
        self.last: dict[Key, Value] = {}

    def __missing__(self, key: Key) -> Value:
        last = self.last
        value = last[key] if key in last else self.compute(key)
        if self.keep(key):
            if len(self) >= self.size:
                self.last = dict(self)
                self.clear()
            self[key] = value
        return value


class Tokenizer:
    """One side's vocabulary and the rule that cuts text into its tokens.

    `pieces` are the learned tokens in printable bytes, in the order of their ids. What decides among them: for bpe the
    order of `merges`; for unigram `scores`, 256 for the bytes and one for each piece; for word and char nothing.
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
        self._pieces, self._merges, self._scores = tuple(pieces), tuple(merges), tuple(scores)
        self.offset = len(SPECIALS) + len(self.tags)  # the id of byte 0; the library's own ids begin there
        self._names = (*SPECIALS, *(f"<2{tag}>" for tag in self.tags))
        spelled = (*PRINTABLE, *self._pieces)
        self._bytes = (*(b"" for _ in self._names), *(bytes(map(BYTE.__getitem__, piece)) for piece in spelled))
        self._index = {piece: number for number, piece in enumerate(spelled)}
        if len(self._index) != len(spelled):
            raise ValueError("a piece occurs twice")
        self.size = len(self._bytes)
        self.max_token_bytes = max(map(len, self._bytes))
        self.dtype: np.dtype[Any] = np.dtype("<u2" if self.size <= 1 << 16 else "<u4")
        self.library = self._library()
        self._segment = {"word": self._words, "char": self._characters}.get(kind, self._subwords)
        self._packed = Cache(self._pack, lambda chunk: len(chunk) <= CACHED_LENGTH, CACHED)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without <s> and </s>; a lone surrogate, which no file can hold, is refused."""
        ids: list[int] = np.frombuffer(self.pack(text), self.dtype).tolist()
        return ids

    def pack(self, text: str) -> bytes:
        """`encode` as the bytes of an array of `dtype`: what the store writes."""
        if not text:
            return b""
        return b"".join(map(self._packed.__getitem__, unicodedata.normalize("NFC", text).split(" ")))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens and tags have none, and bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes.__getitem__, ids)).removeprefix(b" ").decode("utf-8", "replace")

    @property
    def newline(self) -> int:
        """The id that ends a line in running text: that of its byte."""
        return self.offset + ord("\n")

    def pack_text(self, text: str) -> bytes:
        """Running text as the bytes of an array: every line encoded by itself, and a newline behind each."""
        newline = np.array([self.newline], self.dtype).tobytes()
        return b"".join(self.pack(line) + newline for line in text.split("\n"))

    def encode_text(self, text: str) -> list[int]:
        """The ids of running text of any number of lines; nothing is put behind the last."""
        ids: list[int] = np.frombuffer(self.pack_text(text), self.dtype).tolist()
        return ids[:-1]

    def decode_text(self, ids: Iterable[int]) -> str:
        """The running text of ids: `encode_text` gave every line that is not empty a space before it."""
        joined = b"".join(map(self._bytes.__getitem__, ids))
        return joined.replace(b"\n ", b"\n").removeprefix(b" ").decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """What one token writes."""
        return self._bytes[token]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each token as a reader sees it: "▁" for a space before it, <0xE2> for a byte that is no character alone."""
        return [self._names[i] if i < len(self._names) else _readable(self._bytes[i]) for i in ids]

    def tag(self, name: str) -> int:
        """The id of a language tag."""
        if name not in self.tags:
            known = ", ".join(self.tags) or "none"
            raise UsageError(f'language tag "{name}" is not in the vocabulary; known tags: {known}')
        return len(SPECIALS) + self.tags.index(name)

    @property
    def ranks(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The pairs of ids that merge: how early that was learned, and the id that they become."""
        ids = {piece: self.offset + number for piece, number in self._index.items()}
        return {(ids[a], ids[b]): (rank, ids[a + b]) for rank, (a, b) in enumerate(self._merges)}

    @property
    def names(self) -> list[str]:
        """A name for each token that no other has: that of a special token, or its bytes as printable characters."""
        pieces = (f"{piece} " if piece in self._names else piece for piece in self._index)  # a text may say <s> too
        return [*self._names, *pieces]

    def to_library(self, tag: str = "") -> tokenizers.Tokenizer:
        """The same rule in the form that the library keeps in a file, for those who have it and not this project.

        It gives the same ids, with a language tag before them if one is named and </s> behind them, and the same text.
        """
        model: tokenizers.models.Model
        if self.kind == "unigram":
            never = [(name, NEVER) for name in self._names]
            model = tokenizers.models.Unigram([*never, *zip(self._index, self._scores, strict=True)])
        else:  # where there are no merges, what is no piece as a whole is spelled in bytes
            ids = {name: number for number, name in enumerate(self.names)}
            model = tokenizers.models.BPE(ids, list(self._merges), ignore_merges=self.kind != "bpe")
        library = tokenizers.Tokenizer(model)
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.NFC(), tokenizers.normalizers.Prepend(" ")]
        )
        library.pre_tokenizer = pre_tokenizer(r"[\s\S]" if self.kind == "char" else PIECES)
        library.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)]
        )
        before = [self._names[self.tag(tag)]] if tag else []
        around = [(name, self._names.index(name)) for name in (*before, SPECIALS[EOS])]
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=" ".join([*before, "$A", SPECIALS[EOS]]), special_tokens=around
        )
        return library

    def pieces(self, text: str) -> list[str]:
        """The parts of a text that no token crosses, spelled."""
        return [piece for piece, _ in self.library.pre_tokenizer.pre_tokenize_str(text)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into the same tokenizer."""
        plain: dict[str, Any] = {"kind": self.kind, "tags": list(self.tags), "pieces": list(self._pieces)}
        if self.kind == "bpe":
            plain["merges"] = [f"{a} {b}" for a, b in self._merges]
        if self.kind == "unigram":
            plain["scores"] = list(self._scores)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Tokenizer:
        """A tokenizer from `to_dict`'s values; anything else raises ValueError, KeyError or TypeError."""
        if plain["kind"] not in ("bpe", "unigram", "word", "char"):
            raise ValueError(f"unknown kind {plain['kind']!r}")
        merges = [tuple(merge.split(" ")) for merge in plain.get("merges", ())]
        return cls(plain["kind"], plain["pieces"], plain["tags"], merges=merges, scores=plain.get("scores", ()))

    def _library(self) -> tokenizers.Tokenizer:
        model: tokenizers.models.Model
        if self.kind == "unigram":
            model = tokenizers.models.Unigram(list(zip(self._index, self._scores, strict=True)))
        else:
            model = tokenizers.models.BPE(self._index, list(self._merges))
        library = tokenizers.Tokenizer(model)
        library.pre_tokenizer = pre_tokenizer()
        return library

    def _pack(self, chunk: str) -> bytes:
        try:
            chunk.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(chunk[error.start]):04X}"
            raise UsageError(f"the text holds {half}, half of a character: repair or remove it") from None
        numbers = self._segment(" " + chunk)
        return struct.pack(f"<{len(numbers)}{self.dtype.char}", *[number + self.offset for number in numbers])

    def _subwords(self, text: str) -> list[int]:
        return self.library.encode(text).ids

    def _words(self, text: str) -> list[int]:
        return [number for piece in self.pieces(text) for number in self._look_up(piece)]

    def _characters(self, text: str) -> list[int]:
        return [number for character in text for number in self._look_up(spell(character))]

    def _look_up(self, spelled: str) -> list[int]:
        number = self._index.get(spelled)
        return [number] if number is not None else [BYTE[character] for character in spelled]


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of both sides: one object twice where the vocabulary is shared."""

    src: Tokenizer
    tgt: Tokenizer

    @property
    def shared(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.src is self.tgt

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids."""
        return hashlib.blake2b(self._dumps().encode(), digest_size=16).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write both to one JSON file, which is there whole or not at all."""
        files.write_text(Path(path), self._dumps())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizers:
        """Read what `save` wrote."""
        try:
            plain = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: cannot read the tokenizer: {error.strerror}") from None
        except ValueError:
            raise QkvError(
                f"{path}: not a tokenizer, or cut off: it is not JSON; make it again or copy it anew"
            ) from None
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise QkvError(f"{path}: not a qkv tokenizer: expected a JSON file that says format {FORMAT}")
        if plain.get("version") != VERSION:
            version = plain.get("version")
            raise QkvError(
                f"{path}: tokenizer format version {version!r}, this qkv reads {VERSION}: use the qkv that made it"
            )
        try:
            sides = [Tokenizer.from_dict(side) for side in plain["sides"]]
            src, tgt = sides if len(sides) == 2 else sides * 2
        except Exception as error:  # the library raises bare Exception for a vocabulary it cannot use
            raise QkvError(f"{path}: a damaged tokenizer ({type(error).__name__}: {error}): make it again") from None
        return cls(src, tgt)

    def _dumps(self) -> str:
        sides = [self.src] if self.shared else [self.src, self.tgt]
        plain = {"format": FORMAT, "version": VERSION, "sides": [side.to_dict() for side in sides]}
        return json.dumps(plain, ensure_ascii=False, indent=0)


def _readable(piece: bytes) -> str:
    text = piece.decode("utf-8", "qkv.hex")
    return "".join("▁" if c == " " else c if c.isprintable() else _hex(c.encode()) for c in text)


def _hex(piece: bytes) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in piece)


def _hex_errors(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _hex(error.object[error.start : error.end]), error.end


codecs.register_error("qkv.hex", _hex_errors)
