"""The store: tokenised text as memory-mapped ids, made once and used again as long as its inputs stay the same.

A store folder holds, for `train` and `valid` and for each side, the ids of all sentences end to end and their lengths;
beside them, where a corpus has alignments, the links between tokens; the raw text of the validation pairs; the
tokenizers; and `manifest.json`, which says how it was made. It is built under another name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.data.corpus import PACKED, Corpus, is_stream, resolve
from qkv.data.job import Job, Progress
from qkv.data.passes import LINKS, Fate
from qkv.options import DataConfig, TokenizerConfig
from qkv.worker_pool import WorkerPool, cpu_count

FORMAT, VERSION = "qkv-store", 1
SMALL = 16 << 20  # bytes of text that are not worth starting processes for


class Store:
    """Sentences as ids, without <s> and </s>; a tagged corpus's sources begin with the tag."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        manifest = _manifest(folder)
        about = manifest[part]
        self.sides: list[str] = manifest["sides"]
        self.weights: tuple[float, ...] = tuple(about["weights"])
        self._counts: list[int] = about["pairs"]
        columns = [*self.sides, *(["links"] if "links" in manifest["dtypes"] else [])]
        self.aligned = "links" in columns
        self._ids = {side: _map(self._path(side, "ids"), manifest["dtypes"][side]) for side in columns}
        self._lengths = {side: _map(self._path(side, "lengths"), "<u4") for side in columns}
        self._ends = {side: np.cumsum(lengths, dtype=np.int64) for side, lengths in self._lengths.items()}
        for side in columns:
            if len(self._lengths[side]) != len(self) or len(self._ids[side]) != self._ends[side][-1]:
                raise QkvError(f"{self._path(side, 'ids')}: cut off or damaged: delete {folder} and prepare again")

    def __len__(self) -> int:
        return sum(self._counts)

    def src(self, i: int) -> NDArray[Any]:
        """The source sentence i."""
        return self._row("src", i)

    def tgt(self, i: int) -> NDArray[Any]:
        """The target sentence i, or the line i of plain text."""
        return self._row("tgt", i)

    def flat(self, side: str, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Many sentences of a side at once: their ids end to end, and their lengths."""
        lengths = self._side(side, self._lengths)[indices].astype(np.int64)
        shift = self._ends[side][indices] - np.cumsum(lengths)  # from its place here to that in the store
        return self._ids[side][np.arange(int(lengths.sum())) + np.repeat(shift, lengths)], lengths

    def links(self, i: int) -> NDArray[Any]:
        """The links between tokens of the pair i: (links, 2), positions in the source and in the target."""
        if not self.aligned:
            raise UsageError(f"{self.folder}: prepared without alignments: name their file as align in [[data.train]]")
        return self._row("links", i).reshape(-1, 2)

    @property
    def src_lengths(self) -> NDArray[np.uint32]:
        """Tokens of every source sentence."""
        return self._side("src", self._lengths)

    @property
    def tgt_lengths(self) -> NDArray[np.uint32]:
        """Tokens of every target sentence."""
        return self._side("tgt", self._lengths)

    @cached_property
    def corpus(self) -> NDArray[np.uint16]:
        """The number of the corpus that each pair comes from; `weights` has one weight for each."""
        return np.repeat(np.arange(len(self._counts), dtype=np.uint16), self._counts)

    @property
    def stream(self) -> NDArray[Any]:
        """The ids of plain text end to end."""
        return self._ids["tgt"]

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Where in the stream the text of each corpus begins and ends."""
        ends = [int(self._ends["tgt"][stop - 1]) if stop else 0 for stop in np.cumsum(self._counts).tolist()]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def _row(self, side: str, i: int) -> NDArray[Any]:
        end = int(self._side(side, self._ends)[i])
        return self._ids[side][end - int(self._lengths[side][i]) : end]

    def _side(self, side: str, table: dict[str, NDArray[Any]]) -> NDArray[Any]:
        if side not in table:
            raise UsageError(
                f"{self.folder}: plain text, which has no {side} side: train a model without a source on it"
            )
        return table[side]

    def _path(self, side: str, what: str) -> Path:
        return self.folder / f"{self.part}.{side}.{what}"


@dataclass(frozen=True)
class Report:
    """How many pairs of each corpus were read, kept, held out, and dropped for which reason."""

    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        columns = ["corpus", "read", "kept", "held out", "not UTF-8", "empty", "duplicate", "too long", "ratio"]
        table = [columns]
        for row in self.rows:
            given = row["part"] == "valid"
            kept, held_out = (row["valid"], 0) if given else (row["train"], row["valid"])
            numbers = [row["read"], kept, held_out, *(row[fate.name.lower()] for fate in Fate if fate > Fate.VALID)]
            table.append([row["name"] + (" (valid)" if given else ""), *(f"{number:,}" for number in numbers)])
        # A reason for which nothing was dropped needs no column.
        shown = [i for i, column in enumerate(zip(*table, strict=True)) if i < 3 or set(column[1:]) != {"0"}]
        table = [[row[i] for i in shown] for row in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = [
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in table
        ]
        return "\n".join("  ".join(cells) for cells in aligned)


@dataclass(frozen=True)
class Prepared:
    """Everything training needs to know about the text."""

    folder: Path
    tokenizers: TokenizerPair
    train: Store
    valid: Store
    report: Report

    @property
    def valid_text(self) -> tuple[Path, Path]:
        """Files with the raw lines of the validation pairs, in the order of `valid`; plain text has the second only."""
        return self.folder / "valid.src.txt", self.folder / "valid.tgt.txt"

    @classmethod
    def open(cls, folder: str | Path) -> Prepared:
        """The store that `prepare` left in a folder."""
        folder = Path(folder)
        manifest = _manifest(folder)
        tokenizers = TokenizerPair.load(folder / "tokenizers.json")
        if tokenizers.fingerprint != manifest["tokenizer"]:
            raise QkvError(
                f"{folder}: the tokenizers are not those the text was prepared with: delete it and prepare again"
            )
        report = Report(tuple(manifest["report"]))
        return cls(folder, tokenizers, Store(folder, "train"), Store(folder, "valid"), report)


def _silent(stage: str, done: int, total: int | None) -> None:
    """No progress shown."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    folder: Path,
    *,
    tokenizers: TokenizerPair | None = None,
    progress: Progress = _silent,
    seed: int = 0,
    stream: bool = False,
) -> Prepared:
    """Read, filter, learn the vocabulary (unless one is given), tokenise and store; or find that it is done already.

    Pairs and lines of plain text are sentences: repeated, empty and too long ones are dropped, some are held out. With
    `stream`, plain text is running text: nothing is dropped, newlines are tokens, and its end is held out.

    The store is `folder` itself, or, with `data.store`, a folder in there that any run with the same text can use.
    """
    if not data.train:
        raise UsageError("no training text: give data.train")
    train, valid = resolve(data.train, data), resolve(data.valid, data)
    if {corpus.sides for corpus in (*train, *valid)} == {1, 2}:
        raise UsageError("training text and validation text must both be pairs, or both plain text")
    corpora = [*train, *valid]
    paths = [path for corpus in corpora for path in corpus.paths]
    if paths.count(Path("-")) > 1:
        raise UsageError("standard input (-) can be only one file")
    if tokenizers:
        for tag in {corpus.tag for corpus in corpora if corpus.tag}:
            tokenizers.src.tag(tag)  # refuses one that it does not know
    if stream and corpora[0].sides == 2:
        raise UsageError(f"corpus {corpora[0]}: a language model learns from running text: give text, not pairs")
    settings = _settings(data, tokenizer, tokenizers, train, valid, seed, stream)
    inputs = [_stat(path) for path in paths]
    if found := _reuse(data, folder, settings, inputs, ("path", "size", "mtime")):
        return found
    if not data.store:
        _check_free(folder)
    try:
        with (
            _draft(Path(data.store) if data.store else folder.parent) as draft,
            WorkerPool(_workers(data, inputs)) as pool,
        ):
            job = Job(data, train, valid, draft, pool, progress, seed, stream=stream)
            hashed = [{**about, "hash": digest} for about, digest in zip(inputs, job.unpack(), strict=True)]
            if found := _reuse(data, folder, settings, hashed, ("hash",)):
                return found
            job.scan()
            tokenizers = tokenizers or job.learn(tokenizer)
            tokenizers.save(job.tokenizers)
            manifest = job.tokenise()
            _check_unchanged(paths, inputs)
            job.finish()
            place = draft.parent / _key(settings, hashed) if data.store else folder
            _finish(draft, place, tokenizers, {**manifest, "settings": settings, "inputs": hashed})
    except OSError as error:
        raise QkvError(f"{error.filename or folder}: preparing the text failed: {error.strerror}") from None
    return Prepared.open(place)


def _settings(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    given: TokenizerPair | None,
    train: list[Corpus],
    valid: list[Corpus],
    seed: int,
    stream: bool,
) -> dict[str, Any]:
    """Everything but the text itself that decides what a store holds."""
    kept = ("src_lang", "tgt_lang", "valid_size", "max_length", "max_ratio", "dedupe", "on_bad")
    vocabulary = ("kind", "vocab", "shared", "sample")
    settings = {
        "data": {name: getattr(data, name) for name in kept},
        "tokenizer": given.fingerprint if given else {name: getattr(tokenizer, name) for name in vocabulary},
        "train": [_kind(corpus) for corpus in train],
        "valid": [_kind(corpus) for corpus in valid],
        "seed": seed,
        **({"stream": True} if stream else {}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _kind(corpus: Corpus) -> list[Any]:
    aligned = [corpus.words] if corpus.words else []
    return [corpus.form, corpus.sides, corpus.weight, corpus.tag, *aligned]


def _key(settings: dict[str, Any], inputs: list[dict[str, Any]]) -> str:
    whole = json.dumps([settings, [about["hash"] for about in inputs]], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=10).hexdigest()


def _stat(path: Path) -> dict[str, Any]:
    if is_stream(path):
        return {"path": str(path), "size": None, "mtime": None}
    stat = path.stat()
    return {"path": str(path.absolute()), "size": stat.st_size, "mtime": stat.st_mtime_ns}


def _check_unchanged(paths: list[Path], before: list[dict[str, Any]]) -> None:
    for path, about in zip(paths, before, strict=True):
        if _stat(path) != about:
            raise QkvError(f"{path}: the file changed while it was being read: start again")


def _workers(data: DataConfig, inputs: list[dict[str, Any]]) -> int:
    """How many processes: one for small text; the size of standard input is unknown and counts as large."""
    sizes = [
        about["size"] * (4 if about["path"].endswith(PACKED) else 1) for about in inputs if about["size"] is not None
    ]
    if len(sizes) == len(inputs) and sum(sizes) < SMALL:
        return 1
    return data.workers or cpu_count()


def _reuse(
    data: DataConfig, folder: Path, settings: dict[str, Any], inputs: list[dict[str, Any]], keys: tuple[str, ...]
) -> Prepared | None:
    """A store made with these settings from inputs that agree in these respects."""
    wanted = [[about[key] for key in keys] for about in inputs]
    if any(None in about for about in wanted):
        return None
    for place in sorted(Path(data.store).glob("*/")) if data.store else [folder]:
        try:
            manifest = _manifest(place)
            had = [[about[key] for key in keys] for about in manifest["inputs"]]
            if manifest["settings"] == settings and had == wanted:
                return Prepared.open(place)
        except (QkvError, KeyError, TypeError):
            continue  # not a store, or a damaged one: it is made again
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{folder}: no prepared text here: prepare it first") from None
    except ValueError:
        raise QkvError(f"{path}: not JSON: delete {folder} and prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise QkvError(f"{path}: not the manifest of a qkv store")
    if manifest.get("version") != VERSION:
        raise QkvError(
            f"{path}: store version {manifest.get('version')!r}, this qkv reads {VERSION}: prepare the text again"
        )
    return manifest


def _map(path: Path, dtype: str) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, dtype)
    except (OSError, ValueError):
        raise QkvError(f"{path}: missing or cut off: delete {path.parent} and prepare again") from None


# ---- whole or not at all ---------------------------------------------------------------------------------------------


@contextmanager
def _draft(parent: Path) -> Iterator[Path]:
    """A folder to build in, beside where the result will be; removed unless it was renamed."""
    parent.mkdir(parents=True, exist_ok=True)
    mine = f".preparing-{platform.node()}"
    for left in parent.glob(".preparing-*"):
        made = re.fullmatch(rf"{re.escape(mine)}-(\d+)-[0-9a-f]+", left.name)  # another machine's are its own affair
        if made and not _alive(int(made[1])):
            shutil.rmtree(left, ignore_errors=True)
    draft = parent / f"{mine}-{os.getpid()}-{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _check_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / "manifest.json").exists())):
        raise UsageError(f"{place}: exists and is no store of prepared text: choose another folder, or move it away")


def _total(report: list[dict[str, Any]]) -> str:
    dropped = {fate.name.lower(): sum(row[fate.name.lower()] for row in report) for fate in Fate if fate > Fate.VALID}
    told = [f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items() if count]
    return ", ".join([f"{sum(row['read'] for row in report)} read", *told])


def _finish(draft: Path, place: Path, tokenizers: TokenizerPair, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the draft its name, in place of an older store."""
    manifest["sides"] = ["src", "tgt"] if (draft / "train.src.ids").exists() else ["tgt"]
    manifest["dtypes"] = {"src": tokenizers.src.dtype.str, "tgt": tokenizers.tgt.dtype.str}
    if (draft / "train.links.ids").exists():
        manifest["dtypes"]["links"] = LINKS.str
    manifest |= {"format": FORMAT, "version": VERSION, "tokenizer": tokenizers.fingerprint}
    for part in ("train", "valid"):
        if not sum(manifest[part]["pairs"]):
            raise QkvError(f"nothing is left for {part} after filtering: {_total(manifest['report'])}")
    (draft / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    if place.exists():
        old = draft / "old"
        os.rename(place, old)
        os.rename(draft, place)
        shutil.rmtree(place / "old")
    else:
        os.rename(draft, place)
