"""From text files to a prepared text: scan, choose, learn the vocabulary, tokenise, store.

Every pair gets a disposition: training, validation, or dropped for one reason. The scan hashes every pair; duplicates
and the held-out part are chosen from the hashes (on disk, a bounded part in memory); then the rest is tokenised. Work
on blocks of text goes through `parallel_map`, so that a pool of processes can do it; the result is the same.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.core import dataset
from qkv.core.config import DataConfig, TokenizerConfig
from qkv.core.corpus import Corpus, LineFormat, ParallelMap, Progress, TextBlock, file_state, split_into_blocks
from qkv.core.dataset import PreparedText, StoreFolder
from qkv.core.errors import QkvError, UsageError
from qkv.core.files import content_hash
from qkv.core.tokenizer import Learner, Tokenizer, TokenizerPair, learn_bpe, learn_tokenizers, one_line

Hashes = NDArray[np.uint64]
Dispositions = NDArray[np.uint8]
Unpack = Callable[[Sequence[Corpus], Path, ParallelMap, Progress], tuple[Sequence[Corpus], list[str]]]

ROW = np.dtype([("source", "<u8"), ("pair", "<u8"), ("disposition", "u1")])  # of a pair: two hashes, and its fate
HASHES_AT_ONCE = 1 << 24  # 128 MB
SHORT = 4  # for the length ratio, a shorter side counts as this many tokens
VALIDATION_OPTIONS = "--valid-src and --valid-tgt, or --valid-text (data.valid)"


class Disposition(IntEnum):
    """The fate of a pair in the order of the checks; the first that applies counts. Filters follow in their order."""

    TRAIN = 0
    VALID = 1
    ENCODING = 2
    EMPTY = 3
    DUPLICATE = 4
    FILTERED = 5


class Filter(NamedTuple):
    """A rule that keeps or drops pairs: by their texts, before duplicates are counted, or by their token counts."""

    name: str  # in the report
    keep: Callable[[Sequence[Any]], bool]  # of the texts of a pair, or of the token counts of its sides
    stage: Literal["text", "tokens"]
    key: str  # with the rule's options: part of the key of a prepared text
    on_validation: bool = False  # whether a given validation set is filtered too


def length_filters(data: DataConfig) -> list[Filter]:
    """Return the filters of the config: data.max_length and data.max_ratio."""
    return [
        Filter("too_long", partial(fits, limit=data.max_length), "tokens", f"<= {data.max_length}", on_validation=True),
        Filter("ratio", partial(is_even, ratio=data.max_ratio), "tokens", f"<= {data.max_ratio}"),
    ]


def fits(lengths: Sequence[int], *, limit: int) -> bool:
    """Whether no side has more tokens than the limit."""
    return max(lengths) <= limit


def is_even(lengths: Sequence[int], *, ratio: float) -> bool:
    """Whether the longer side has at most `ratio` times the tokens of the shorter one; 0: no limit."""
    return not ratio or max(lengths) <= ratio * max(min(lengths), SHORT)


# ---- the work on one block, in any process ---------------------------------------------------------------------------

load_tokenizers = lru_cache(maxsize=1)(TokenizerPair.load)  # once in each process


class Sentences:
    """Text in sentences: repeated, empty and filtered ones are dropped, some are held out for validation.

    `data.lm_data.RunningText` reads text in another way. Objects are sent to other processes.
    """

    name = "stripped sentences"
    strips = True  # white space around a text, as translation does

    def __init__(self, data: DataConfig, filters: Sequence[Filter]) -> None:
        self.data, self.filters = data, filters
        self.reasons = [each.name.lower() for each in Disposition if each < Disposition.FILTERED]
        self.reasons += [each.name for each in self.filters]

    def blocks(self, corpora: Sequence[Corpus], scratch: Path, parallel_map: ParallelMap) -> list[list[TextBlock]]:
        return list(parallel_map(split_into_blocks, ((corpus,) for corpus in corpora)))

    def first_filter(self, stage: str, values: Sequence[Any], given: bool) -> int:
        """Return the disposition of the first filter that drops a pair, or TRAIN."""
        for number, rule in enumerate(self.filters):
            if rule.stage == stage and (rule.on_validation or not given) and not rule.keep(values):
                return Disposition.FILTERED + number
        return Disposition.TRAIN

    def scan(self, block: TextBlock) -> bytes:
        """Return a ROW for every pair, as bytes: the hashes of its source and of the pair, and its disposition so far.

        Spaces around a text and its Unicode form do not change the hashes.
        """
        rows, tag = bytearray(), block.corpus.tag.encode()
        for pair in block.texts(self.data.on_bad):
            texts = [unicodedata.normalize("NFC", text).strip().encode() for text in pair or ()]
            source = hashlib.blake2b(texts[0] if texts else b"", digest_size=8).digest()
            rows += source + hashlib.blake2b(b"\n".join([source + tag, *texts[1:]]), digest_size=8).digest()
            if pair is None:
                rows.append(Disposition.ENCODING)
            else:
                rows.append(self.first_filter("text", pair, block.corpus.given) if all(texts) else Disposition.EMPTY)
        return bytes(rows)

    def choose(self, scan: Scan) -> None:
        """Mark duplicates, and choose the pairs for validation; this needs all blocks and runs in one process."""
        train, given = scan.rows[: scan.trained], scan.dispositions[scan.trained :]
        if self.data.dedupe:
            mark_duplicates(train["pair"], train["disposition"])
        if len(given):
            given[given == Disposition.TRAIN] = Disposition.VALID
        else:
            hold_out(train["source"], train["disposition"], self.data.valid_size, self.data.seed)

    def sample(self, block: TextBlock, dispositions: bytes, side: int, share: float, seed: Sequence[int]) -> list[str]:
        """Return a uniform share of one side of the block's training lines, to learn the vocabulary from."""
        rows = np.flatnonzero(np.frombuffer(dispositions, np.uint8) == Disposition.TRAIN)
        random = np.random.default_rng(seed)
        size = int(share * len(rows) + random.random())
        chosen = np.sort(random.permutation(rows)[:size]).tolist()
        pairs = block.texts(self.data.on_bad) if chosen else []
        return [pair[side] for row in chosen if (pair := pairs[row])]

    def encode(
        self, block: TextBlock, dispositions: bytes, dtypes: dict[str, np.dtype[Any]], path: Path
    ) -> tuple[dict[str, bytes], list[int]]:
        """Tokenise a block; return the bytes to append to each file, and the number of pairs per disposition."""
        tokenizers, corpus = load_tokenizers(path), block.corpus
        sides = [tokenizers.src, tokenizers.tgt][-corpus.sides :]
        tag = np.array([sides[0].tag(corpus.tag)] if corpus.tag else [], sides[0].dtype).tobytes()
        column = corpus.column and corpus.column.read(block, tokenizers)
        none = [b""] * (len(dtypes) - len(sides))  # of a column that other corpora have
        train, valid = Disposition.TRAIN, Disposition.VALID
        kept: dict[int, list[list[bytes]]] = {part: [[] for _ in dtypes] for part in (train, valid)}  # of each column
        raw, counts = [list[str]() for _ in sides], [0] * len(self.reasons)
        for row, (texts, disposition) in enumerate(zip(block.texts(self.data.on_bad), dispositions, strict=True)):
            if texts is not None and disposition in kept:
                white = " \t\r\n" if column else None  # other white space may be a word, which alignments number
                read = tuple(text.strip(white) for text in texts) if self.strips else texts
                ids = [self.pack(text, side, corpus.format) for text, side in zip(read, sides, strict=True)]
                lengths = [len(packed) // side.dtype.itemsize for packed, side in zip(ids, sides, strict=True)]
                disposition = self.first_filter("tokens", lengths, corpus.given) or disposition
                if disposition in kept:
                    ids[0] = tag + ids[0]
                    ids += [column(row, read, ids)] if column else none
                    for rows, packed in zip(kept[disposition], ids, strict=True):
                        rows.append(packed)
                if disposition == valid:
                    for lines, text in zip(raw, texts, strict=True):
                        lines.append(self.raw(text, corpus.format))
            counts[disposition] += 1
        encoded = {f"valid.{name}.txt": "".join(lines).encode() for name, lines in zip(dtypes, raw, strict=False)}
        for part in (train, valid):
            for (name, dtype), rows in zip(dtypes.items(), kept[part], strict=True):
                widths = np.array([len(row) for row in rows], "<u4") // dtype.itemsize
                file = f"{part.name.lower()}.{name}"
                encoded |= {f"{file}.ids": b"".join(rows), f"{file}.lengths": widths.tobytes()}
        return encoded, counts

    def pack(self, text: str, side: Tokenizer, layout: LineFormat) -> bytes:
        """Return the ids of a text as bytes; zeros for one with more characters than max_length tokens can hold."""
        most = self.data.max_length * side.max_token_bytes
        if len(text) > most and len(unicodedata.normalize("NFC", text)) > most:
            return bytes((self.data.max_length + 1) * side.dtype.itemsize)
        return side.pack(text)

    def raw(self, text: str, layout: LineFormat) -> str:
        """Return a validation text as one line, for scores: JSON text may hold line breaks."""
        return one_line(text) + "\n"


# ---- the whole -------------------------------------------------------------------------------------------------------


def hash_files(
    corpora: Sequence[Corpus], scratch: Path, parallel_map: ParallelMap, progress: Progress
) -> tuple[Sequence[Corpus], list[str]]:
    """Return corpora of plain files, here the given ones, and a hash of each file."""
    return corpora, [content_hash(path) for corpus in corpora for path in corpus.paths]


def prepare(
    train: Sequence[Corpus],
    valid: Sequence[Corpus],
    text: Sentences,
    tokenizer: TokenizerConfig,
    store: StoreFolder,
    *,
    tokenizers: TokenizerPair | None = None,
    learner: Learner = learn_bpe,
    unpack: Unpack = hash_files,
    parallel_map: ParallelMap = starmap,
    progress: Progress = lambda stage, done, total: None,
) -> PreparedText:
    """Read, filter, learn the vocabulary unless one is given, tokenise and store; or reuse an equal earlier result.

    `text` is the unit of text: sentences, or running text (`data.lm_data`).
    """
    if not (train := [corpus for corpus in train if corpus.weight]):
        raise UsageError("no training text: give data.train, with a weight above 0")
    corpora = [*train, *(replace(corpus, given=True) for corpus in valid)]
    paths = [path for corpus in corpora for path in corpus.paths]
    inputs = [file_state(path) for path in paths]
    learned = [learner.__name__, tokenizer.vocab, tokenizer.shared, tokenizer.sample]
    described = [[c.format.key, c.sides, c.weight, c.tag, c.column and [c.column.name, c.column.key]] for c in corpora]
    settings = {  # everything but the text itself that decides the result, as plain values
        "text": text.name,
        "data": {name: getattr(text.data, name) for name in ("valid_size", "dedupe", "on_bad", "seed")},
        "filters": [[each.name, each.stage, each.key, each.on_validation] for each in text.filters],
        "tokenizer": tokenizers.fingerprint if tokenizers else learned,
        "train": described[: len(train)],
        "valid": described[len(train) :],
    }
    if reused := store.find(settings, inputs):
        return reused
    try:
        with store.draft() as draft, store.draft() as scratch:
            plain, digests = unpack(corpora, scratch, parallel_map, progress)
            if reused := store.find(settings, [{"hash": digest} for digest in digests]):
                return reused
            scan = Scan(text, plain, scratch, parallel_map, progress)
            text.choose(scan)
            tokenizers = tokenizers or scan.learn_tokenizers(tokenizer, learner)
            tokenizers.save(draft / dataset.TOKENIZERS_FILE)
            manifest = scan.tokenise(draft, tokenizers)
            if changed := [path for path, about in zip(paths, inputs, strict=True) if file_state(path) != about]:
                raise QkvError(f"{changed[0]}: the file changed while it was being read: start again")
            hashed = [{**about, "hash": digest} for about, digest in zip(inputs, digests, strict=True)]
            return store.publish(draft, {**manifest, "settings": settings, "inputs": hashed})
    except OSError as error:
        raise QkvError(f"{error.filename or store.folder}: preparing the text failed: {error.strerror}") from None


@dataclass
class Scan:
    """All pairs of the text: their blocks, and in a file their hashes and dispositions."""

    text: Sentences
    corpora: Sequence[Corpus]
    scratch: Path
    parallel_map: ParallelMap
    progress: Progress

    def __post_init__(self) -> None:
        self.notes: list[dict[str, Any]] = [{} for _ in self.corpora]  # more numbers for the report, set by `choose`
        divided = self.text.blocks(self.corpora, self.scratch, self.parallel_map)
        self.counts = [sum(block.count for block in blocks) for blocks in divided]  # pairs of each corpus
        self.trained = sum(n for n, corpus in zip(self.counts, self.corpora, strict=True) if not corpus.given)
        self.blocks = [(number, block) for number, blocks in enumerate(divided) for block in blocks]
        self.stops = np.cumsum([block.count for _, block in self.blocks]).tolist()
        path = self.scratch / "rows"
        with path.open("wb") as file:  # all of it now: a hole in a map is a bus error once the disk is full
            for _, block in self.blocks:
                file.write(bytes(ROW.itemsize * block.count))
        self.rows = np.memmap(path, ROW, "r+", shape=(self.stops[-1],))
        self.dispositions = self.rows["disposition"]
        found = self.parallel_map(self.text.scan, ((block,) for _, block in self.blocks))
        for (_, block), stop, rows in zip(self.blocks, self.stops, found, strict=True):
            self.rows[stop - block.count : stop] = np.frombuffer(rows, ROW)
            self.progress("scan", stop, self.stops[-1])

    def tasks(self) -> Iterator[tuple[TextBlock, bytes]]:
        """Yield every block with the dispositions of its pairs."""
        for (_, block), stop in zip(self.blocks, self.stops, strict=True):
            yield block, self.dispositions[stop - block.count : stop].tobytes()

    def learn_tokenizers(self, options: TokenizerConfig, learner: Learner) -> TokenizerPair:
        """Learn the vocabulary from a uniform sample of the training pairs."""
        self.progress("learn", 0, None)
        kept = int(np.count_nonzero(self.dispositions == Disposition.TRAIN))
        if not kept:
            raise QkvError(f"{self.corpora[0]}: no pair is left to train on: all are empty, repeated or not UTF-8")
        share, seed = min(1.0, options.sample / kept), self.text.data.seed
        tags = tuple(dict.fromkeys(corpus.tag for corpus in self.corpora if corpus.tag))

        def lines(side: int) -> Iterator[str]:
            tasks = ((*task, side, share, (seed, number)) for number, task in enumerate(self.tasks()))
            return chain.from_iterable(self.parallel_map(self.text.sample, tasks))

        sides = [lines(side) for side in range(self.corpora[0].sides)]
        return learn_tokenizers(sides, options, tags, pairs=kept, learner=learner)

    def tokenise(self, draft: Path, tokenizers: TokenizerPair) -> dict[str, Any]:
        """Write ids, lengths and validation text of all kept pairs; return the manifest."""
        dtypes = {"src": tokenizers.src.dtype, "tgt": tokenizers.tgt.dtype}
        sides = list(dtypes)[-self.corpora[0].sides :]
        more = {corpus.column.name: corpus.column.dtype for corpus in self.corpora if corpus.column}
        columns = {side: dtypes[side] for side in sides} | more
        reasons, counts = self.text.reasons, np.zeros((len(self.corpora), len(self.text.reasons)), np.int64)
        tasks = ((*task, columns, draft / dataset.TOKENIZERS_FILE) for task in self.tasks())
        results = self.parallel_map(self.text.encode, tasks)
        for (number, _), stop, (encoded, found) in zip(self.blocks, self.stops, results, strict=True):
            counts[number] += found
            for name, content in encoded.items():
                with (draft / name).open("ab") as file:
                    file.write(content)
            self.progress("tokenise", stop, self.stops[-1])
        report = []
        for corpus, fates, note in zip(self.corpora, counts.tolist(), self.notes, strict=True):
            numbers = dict(zip(["read", *reasons], [sum(fates), *fates], strict=True))
            report.append({"name": str(corpus), "part": "valid" if corpus.given else "train", **numbers, **note})
        manifest: dict[str, Any] = {
            "sides": sides,
            "dtypes": {name: dtype.str for name, dtype in (dtypes | more).items()},
            "tokenizer": tokenizers.fingerprint,
            "report": report,
        }
        train = sum(not corpus.given for corpus in self.corpora)  # their number: they come first
        valid = slice(train, None) if train < len(self.corpora) else slice(train)  # a set of its own, or from all
        for part, corpora in ((Disposition.TRAIN, slice(train)), (Disposition.VALID, valid)):
            name, pairs = part.name.lower(), counts[corpora, part].tolist()
            if not sum(pairs):
                totals = {"read": counts.sum()} | dict(zip(reasons[2:], counts.sum(axis=0)[2:], strict=True))
                listed = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in totals.items() if n)
                raise QkvError(f"nothing is left for {name} after filtering: {listed}")
            manifest[name] = {"pairs": pairs, "weights": [corpus.weight for corpus in self.corpora[corpora]]}
        return manifest


# ---- choosing by hashes ----------------------------------------------------------------------------------------------


def mark_duplicates(pairs: Hashes, dispositions: Dispositions) -> None:
    """Keep the first of equal pairs."""
    parts = np.uint64(len(pairs) // HASHES_AT_ONCE + 1)
    for part in range(int(parts)):
        found = [np.empty(0, np.int64)]
        for rows in slices(len(pairs)):
            usable = dispositions[rows] == Disposition.TRAIN
            found.append(rows.start + np.flatnonzero((pairs[rows] % parts == part) & usable))
        members = np.concatenate(found)
        _, first = np.unique(pairs[members], return_index=True)
        dispositions[np.delete(members, first)] = Disposition.DUPLICATE


def hold_out(sources: Hashes, dispositions: Dispositions, wanted: int, seed: int) -> None:
    """Turn about `wanted` pairs (0: 2 %, at least 50, at most 2000) to validation, all pairs of a source together.

    Sources are taken in the order of a seeded hash; never more than a tenth of the pairs.
    """
    usable = int(np.count_nonzero(dispositions == Disposition.TRAIN))
    most = usable // 10
    if wanted > most > 0:
        raise UsageError(
            f"data.valid_size = {wanted}: at most a tenth of the {usable} usable pairs can be held out: "
            f"set it to {most} or less, or give a validation set: {VALIDATION_OPTIONS}"
        )
    goal = min(wanted or min(2000, max(50, usable // 50)), most)
    share, total, chosen = goal / max(usable, 1), 0, list[int]()
    while total < goal and share < 1:  # among a share of the sources, and a larger share if their pairs are not enough
        share, total, chosen = min(1.0, 8 * share), 0, []
        parts = []
        for rows in slices(len(sources)):
            part = sources[rows][dispositions[rows] == Disposition.TRAIN]
            parts.append(part[_mix(part, seed) <= share * (2.0**64 - 1)])
        candidates, counts = np.unique(np.concatenate(parts), return_counts=True)
        order = np.argsort(_mix(candidates, seed))
        for source, count in zip(candidates[order].tolist(), counts[order].tolist(), strict=True):
            if total < goal and total + count <= most:
                chosen.append(source)
                total += count
    if usable and not chosen:
        raise UsageError(
            f"{usable} usable pairs are too few to hold some out for validation, which takes at least 10 different "
            f"sources: give a validation set: {VALIDATION_OPTIONS}"
        )
    for rows in slices(len(sources)):
        held_out = np.isin(sources[rows], np.array(chosen, np.uint64)) & (dispositions[rows] == Disposition.TRAIN)
        dispositions[rows][held_out] = Disposition.VALID


def _mix(values: Hashes, seed: int) -> Hashes:
    """Hash the hashes again, in another way for every seed."""
    values = (values ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    return (values ^ (values >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)


def slices(length: int) -> Iterator[slice]:
    """Divide so many rows, which may not fit into memory together."""
    return (slice(start, min(start + HASHES_AT_ONCE, length)) for start in range(0, length, HASHES_AT_ONCE))
