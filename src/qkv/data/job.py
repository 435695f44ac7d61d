"""One preparation from beginning to end: unpack, look at every line, learn the vocabulary, tokenise, write."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from qkv.core.errors import QkvError
from qkv.core.tokenizer import TokenizerPair, learn_tokenizers
from qkv.data import passes
from qkv.data.corpus import Block, Corpus, blocks, is_stream, unpack
from qkv.data.passes import Fate, Limits, Part
from qkv.data.subwords import learner_for
from qkv.options import DataConfig, TokenizerConfig
from qkv.worker_pool import WorkerPool

Progress = Callable[[str, int, int | None], None]  # (what is being done, how much is done, of how much)


class Job:
    """Works in the folder `draft`, whose subfolder `scratch` is gone in the end."""

    def __init__(
        self,
        data: DataConfig,
        train: list[Corpus],
        valid: list[Corpus],
        draft: Path,
        pool: WorkerPool,
        progress: Progress,
        seed: int,
        *,
        stream: bool = False,
    ) -> None:
        self.data, self.corpora, self.trained = data, [*train, *valid], len(train)
        self.draft, self.pool, self.progress, self.seed = draft, pool, progress, seed
        self.stream = stream  # running text: all of it, in its order
        self.aligned = any(corpus.words for corpus in self.corpora)
        self.scratch = draft / "scratch"
        self.scratch.mkdir()
        self.tokenizers = draft / "tokenizers.json"

    def unpack(self) -> list[str]:
        """Make all files plain text; the hash of each."""
        paths = [path for corpus in self.corpora for path in corpus.paths]
        tasks = [(path, self.scratch / f"{number}.txt") for number, path in enumerate(paths)]
        # A worker has no standard input of its own: this process reads what can be read only once.
        piped = {task: unpack(*task) for task in tasks if is_stream(task[0])}
        others = self.pool.map(unpack, [task for task in tasks if task not in piped])
        plain = []
        for number, task in enumerate(tasks):
            self.progress("unpack", number, len(tasks))
            plain.append(piped[task] if task in piped else next(others))
        self.progress("unpack", len(tasks), len(tasks))
        files = iter(path for path, _ in plain)
        self.files = [tuple(next(files) for _ in corpus.paths) for corpus in self.corpora]
        return [digest for _, digest in plain]

    def scan(self) -> None:
        """Look at every line once, and decide which pairs are repeated or held out."""
        cut = list(self.pool.map(blocks, zip(self.corpora, self.files, strict=True)))
        self.blocks: list[tuple[int, Block]] = [(number, block) for number, part in enumerate(cut) for block in part]
        self.starts = np.cumsum([0, *(block.count for _, block in self.blocks)]).tolist()
        total = self.starts[-1]
        sources, pairs = (
            np.memmap(self.scratch / name, "<u8", "w+", shape=(total,)) for name in ("sources.hashes", "pairs.hashes")
        )
        self.fates = np.memmap(self.scratch / "fates", np.uint8, "w+", shape=(total,))
        found = self.pool.map(passes.scan, ((block, self.data.on_bad) for _, block in self.blocks))
        for start, (source, pair, fate) in zip(self.starts, found, strict=False):
            stop = start + len(fate)
            sources[start:stop] = np.frombuffer(source, "<u8")
            pairs[start:stop] = np.frombuffer(pair, "<u8")
            self.fates[start:stop] = np.frombuffer(fate, np.uint8)
            self.progress("scan", stop, total)
        size = sum(block.count for number, block in self.blocks if number < self.trained)
        train, valid = self.fates[:size], self.fates[size:]
        if self.stream:
            self.fates[self.fates == Fate.EMPTY] = Fate.TRAIN
        elif self.data.dedupe:
            passes.mark_duplicates(pairs[:size], train)
        if len(valid):
            valid[valid == Fate.TRAIN] = Fate.VALID
        elif self.stream:
            counts = [sum(block.count for of, block in self.blocks if of == number) for number in range(self.trained)]
            passes.hold_out_ends(counts, train, self.data.valid_size)
        else:
            passes.hold_out(sources[:size], train, self.data.valid_size, self.seed)

    def learn(self, spec: TokenizerConfig) -> TokenizerPair:
        """A vocabulary from a uniform sample of the training pairs."""
        self.progress("learn", 0, None)
        kept = int(np.count_nonzero(self.fates == Fate.TRAIN))
        if not kept:
            raise QkvError(f"{self.corpora[0]}: no pair is left to train on: all are empty, repeated or not UTF-8")
        share = min(1.0, spec.sample / kept)
        learner = learner_for(spec.kind)
        tags = tuple(dict.fromkeys(corpus.tag for corpus in self.corpora if corpus.tag))
        if self.corpora[0].sides == 1:
            return learn_tokenizers(
                (), self._lines(0, share), dataclasses.replace(spec, shared=True), tags, pairs=kept, learner=learner
            )
        return learn_tokenizers(self._lines(0, share), self._lines(1, share), spec, tags, pairs=kept, learner=learner)

    def _lines(self, side: int, share: float) -> Iterator[str]:
        tasks = (
            (block, self._fates(place), side, share, (self.seed, place), self.data.on_bad)
            for place, (_, block) in enumerate(self.blocks)
        )
        for lines in self.pool.map(passes.pick, tasks):
            yield from (part for line in lines for part in line.split("\n")) if self.stream else lines

    def tokenise(self) -> dict[str, Any]:
        """Write ids, lengths and validation text; what the manifest says about them."""
        counts = np.zeros((len(self.corpora), len(Fate)), np.int64)
        with ExitStack() as stack:
            parts = [
                _Writer(stack, self.draft, part, self.corpora[0].sides, self.aligned) for part in ("train", "valid")
            ]
            for place, (train, valid, fates) in enumerate(self._tokenised()):
                counts[self.blocks[place][0]] += fates
                for writer, part in zip(parts, (train, valid), strict=True):
                    writer.write(part)
                self.progress("tokenise", self.starts[place + 1], self.starts[-1])
        return self._manifest(counts)

    def _tokenised(self) -> Iterator[tuple[Part, Part, list[int]]]:
        on_bad, limits = self.data.on_bad, Limits(self.data.max_length, self.data.max_ratio)
        given = dataclasses.replace(limits, max_ratio=0.0)  # a validation set is taken as it is, where memory allows
        if self.stream:
            blocks = ((block, self._fates(i), self.tokenizers, on_bad) for i, (_, block) in enumerate(self.blocks))
            return self.pool.map(passes.tokenise_stream, blocks)
        tasks = (
            (
                block,
                self._fates(place),
                limits if number < self.trained else given,
                self.tokenizers,
                on_bad,
                self.aligned,
            )
            for place, (number, block) in enumerate(self.blocks)
        )
        return self.pool.map(passes.tokenise, tasks)

    def finish(self) -> None:
        """Leave only what belongs to the store."""
        del self.fates
        shutil.rmtree(self.scratch)

    def _fates(self, place: int) -> bytes:
        return self.fates[self.starts[place] : self.starts[place + 1]].tobytes()

    def _manifest(self, counts: Any) -> dict[str, Any]:
        report = [
            {
                "name": str(corpus),
                "part": "train" if number < self.trained else "valid",
                "read": int(counts[number].sum()),
                **{fate.name.lower(): int(counts[number, fate]) for fate in Fate},
            }
            for number, corpus in enumerate(self.corpora)
        ]
        manifest: dict[str, Any] = {"report": report}
        held_out = self.trained == len(self.corpora)
        members = {"train": slice(0, self.trained), "valid": slice(0 if held_out else self.trained, None)}
        for part, fate in (("train", Fate.TRAIN), ("valid", Fate.VALID)):
            weights = [corpus.weight for corpus in self.corpora[members[part]]]
            manifest[part] = {"pairs": counts[members[part], fate].tolist(), "weights": weights}
        return manifest


class _Writer:
    """Appends to the files of one part of the store."""

    def __init__(self, stack: ExitStack, folder: Path, part: str, sides: int, aligned: bool) -> None:
        texts = ("src", "tgt")[-sides:]
        self.columns = (*texts, "links") if aligned else texts
        self.files = {
            (column, what): stack.enter_context((folder / f"{part}.{column}.{what}").open("wb"))
            for column in self.columns
            for what in ("ids", "lengths", *(["txt"] if part == "valid" and column in texts else []))
        }

    def write(self, part: Part) -> None:
        for number, side in enumerate(self.columns):
            self.files[side, "ids"].write(part.ids[number])
            self.files[side, "lengths"].write(part.lengths[number])
            if number < len(part.texts):
                # JSON text may hold line breaks; one line for each sentence is what scores are computed on.
                lines = (line.replace("\n", " ").replace("\r", " ") + "\n" for line in part.texts[number])
                self.files[side, "txt"].write("".join(lines).encode())
