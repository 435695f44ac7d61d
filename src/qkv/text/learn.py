"""Learning a vocabulary from sampled lines: the same lines give the same vocabulary."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import tokenizers

from qkv.core.errors import UsageError
from qkv.options import TokenizerConfig
from qkv.text.tokenizer import BYTE, PRINTABLE, SPECIALS, Tokenizer, Tokenizers, pre_tokenizer, spell

# With tokenizer.vocab = 0: this many tokens for corpora of at least so many pairs, or as many as the text supports.
SIZES = ((1_000_000, 32_000), (150_000, 16_000), (20_000, 8_000), (5_000, 4_000), (0, 2_000))
ENDLESS = re.compile(r"([^ ]{256})[^ ]+")  # learning takes time that grows with the square of a chunk's length
SEEDS = 3  # candidates for each piece of a unigram vocabulary


def learn(
    src_lines: Iterable[str],
    tgt_lines: Iterable[str],
    spec: TokenizerConfig,
    tags: Sequence[str] = (),
    *,
    pairs: int = 0,
) -> Tokenizers:
    """Vocabularies for both sides; `pairs` is the size of the corpus the lines stand for (0: they are all of it).

    Text with one side only has no source lines and one vocabulary.
    """
    if not pairs:
        src_lines, tgt_lines = list(src_lines), list(tgt_lines)
        pairs = max(len(src_lines), len(tgt_lines))
    if spec.shared:
        one = _learn(chain(src_lines, tgt_lines), spec, tags, pairs)
        return Tokenizers(one, one)
    return Tokenizers(_learn(src_lines, spec, tags, pairs), _learn(tgt_lines, spec, tags, pairs))


def default_size(pairs: int) -> int:
    """The vocabulary size for a corpus of so many pairs where none is asked for."""
    return next(size for least, size in SIZES if pairs >= least)


def _learn(lines: Iterable[str], spec: TokenizerConfig, tags: Sequence[str], pairs: int) -> Tokenizer:
    base = len(SPECIALS) + len(tags) + len(PRINTABLE)
    if spec.vocab and spec.vocab < base:
        raise UsageError(
            f"tokenizer.vocab = {spec.vocab}: the special tokens, tags and bytes alone are {base}: "
            f"set tokenizer.vocab to at least {base}, or to 0"
        )
    room = (spec.vocab or default_size(pairs)) - base
    learner = {"bpe": _bpe, "unigram": _unigram, "word": _word, "char": _char}[spec.kind]
    tokenizer = learner(_prepared(lines), room, tags)
    if tokenizer.size < spec.vocab:
        raise UsageError(
            f"tokenizer.vocab = {spec.vocab}: the text supports only {tokenizer.size} tokens: "
            f"set tokenizer.vocab to at most {tokenizer.size}, or to 0 to have it chosen"
        )
    return tokenizer


def _prepared(lines: Iterable[str]) -> Iterator[str]:
    """Lines as the learners want them; of an endless chunk only the beginning teaches anything about words."""
    return (ENDLESS.sub(r"\1", " " + unicodedata.normalize("NFC", line)) for line in lines if line)


def _bpe(lines: Iterable[str], room: int, tags: Sequence[str]) -> Tokenizer:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=room + len(PRINTABLE), min_frequency=2, initial_alphabet=list(PRINTABLE), show_progress=False
    )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = pre_tokenizer()
    library.train_from_iterator(lines, trainer)
    merges = [(a, b) for a, b in json.loads(library.to_str())["model"]["merges"]]
    return Tokenizer("bpe", list(dict.fromkeys(a + b for a, b in merges)), tags, merges=merges)


def _unigram(lines: Iterable[str], room: int, tags: Sequence[str]) -> Tokenizer:
    # The library's own trainer adds up in an order that changes from run to run, and its vocabulary with it. So: begin
    # with too many pieces (those of BPE), cut the text as well as they can, count what was used, drop the least, again.
    chunks: Counter[str] = Counter()
    pieces = list(_bpe(_counting(lines, chunks), SEEDS * room, tags).to_dict()["pieces"])
    words = _pieces(chunks)
    scores = dict.fromkeys((*PRINTABLE, *pieces), -1.0)  # all alike at first: the fewest pieces win
    while True:
        used = _usage(words, scores)
        total = sum(used.values()) + len(scores)
        scores = {piece: math.log((used[piece] + 1) / total) for piece in (*PRINTABLE, *pieces)}
        if len(pieces) <= room:
            return Tokenizer("unigram", pieces, tags, scores=list(scores.values()))
        pieces = _frequent({piece: used[piece] for piece in pieces}, max(room, len(pieces) * 3 // 4))
        scores = {piece: scores[piece] for piece in (*PRINTABLE, *pieces)}


def _usage(words: Counter[str], scores: dict[str, float]) -> Counter[str]:
    """How often each piece stands in the most probable segmentation of the words."""
    model = tokenizers.models.Unigram(list(scores.items()))
    used: Counter[str] = Counter()
    for word, count in words.items():
        for token in model.tokenize(word):
            used[token.value] += count
    return used


def _counting(lines: Iterable[str], chunks: Counter[str]) -> Iterator[str]:
    for line in lines:
        chunks.update(line[1:].split(" "))
        yield line


def _pieces(chunks: Counter[str]) -> Counter[str]:
    cut = pre_tokenizer().pre_tokenize_str
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for piece, _ in cut(" " + chunk):
            counts[piece] += count
    return counts


def _word(lines: Iterable[str], room: int, tags: Sequence[str]) -> Tokenizer:
    chunks = Counter(chunk for line in lines for chunk in line[1:].split(" "))
    return Tokenizer("word", _frequent(_pieces(chunks), room), tags)


def _char(lines: Iterable[str], room: int, tags: Sequence[str]) -> Tokenizer:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    return Tokenizer("char", _frequent({spell(character): count for character, count in counts.items()}, room), tags)


def _frequent(counts: dict[str, int], room: int) -> list[str]:
    # A single byte is a token already; ties go by spelling, so that the order of lines does not matter.
    ranked = sorted((piece for piece in counts if piece not in BYTE), key=lambda piece: (-counts[piece], piece))
    return ranked[:room]
