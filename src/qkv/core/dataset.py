"""Prepared text: token ids in memory-mapped files with checksums, made once and reused while the input is unchanged.

A folder holds, for `train` and `valid` and for each side, the ids of all sentences one after another and their lengths;
further columns, such as alignments, in the same way; the raw text of the validation pairs; the tokenizers; and
`manifest.json`, which records how it was made. A folder is built under another name and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.core import files
from qkv.core.corpus import Corpus
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair

FORMAT, VERSION = "qkv-store", 1
TOKENIZERS_FILE = "tokenizers.json"
DRAFT = ".preparing"  # first part of the name of a folder that is not complete


class Rows(NamedTuple):
    """Many sentences, one after another."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


class TokenStore:
    """Sentences as ids, without <s> and </s>; where a corpus has a language tag, its sources begin with it."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        manifest = read_manifest(folder)
        self.weights: tuple[float, ...] = tuple(manifest[part]["weights"])  # one for each corpus
        self._counts: list[int] = manifest[part]["pairs"]
        self.sides: list[str] = manifest["sides"]
        self.columns = [*self.sides, *(name for name in manifest["dtypes"] if name not in ("src", "tgt"))]
        self._ids = {name: _map(self._path(name, "ids"), manifest["dtypes"][name]) for name in self.columns}
        self._lengths = {name: _map(self._path(name, "lengths"), "<u4") for name in self.columns}
        self._ends = {name: np.cumsum(lengths, dtype=np.int64) for name, lengths in self._lengths.items()}
        self.plans: dict[tuple[Any, ...], Any] = {}  # of epochs, shared by all streams over this store
        self.micro_tokens: dict[int, int] = {}  # size of micro-batches for updates of so many tokens
        for name in self.columns:
            if len(self._lengths[name]) != len(self) or len(self._ids[name]) != self._ends[name][-1]:
                raise QkvError(f"{self._path(name, 'ids')}: cut off or damaged: delete {folder} and prepare again")

    def __len__(self) -> int:
        return sum(self._counts)

    def row(self, column: str, i: int) -> NDArray[Any]:
        """Return the ids of sentence i."""
        self._check(column)
        end = int(self._ends[column][i])
        return self._ids[column][end - int(self._lengths[column][i]) : end]

    def src(self, i: int) -> NDArray[Any]:
        """Return the source sentence i."""
        return self.row("src", i)

    def tgt(self, i: int) -> NDArray[Any]:
        """Return the target sentence i, or line i of text without a source."""
        return self.row("tgt", i)

    def rows(self, column: str, indices: NDArray[np.int64]) -> Rows:
        """Return many sentences at once."""
        lengths = self.lengths(column)[indices].astype(np.int64)
        shift = self._ends[column][indices] - np.cumsum(lengths)  # from the place in the result to that in the store
        return Rows(self._ids[column][np.arange(int(lengths.sum())) + np.repeat(shift, lengths)], lengths)

    def lengths(self, column: str) -> NDArray[np.uint32]:
        """Return the number of ids of every sentence."""
        self._check(column)
        return self._lengths[column]

    @cached_property
    def corpus(self) -> NDArray[np.uint16]:
        """The number of the corpus of each pair; `weights` has one weight for each corpus."""
        return np.repeat(np.arange(len(self._counts), dtype=np.uint16), self._counts)

    @property
    def stream(self) -> NDArray[Any]:
        """All ids of text without a source, as one array."""
        return self._ids["tgt"]

    def _check(self, column: str) -> None:
        if column not in self.columns:
            raise UsageError(
                f"{self.folder}: plain text, which has no {column} side: train a model without a source on it"
            )

    def _path(self, column: str, what: str) -> Path:
        return self.folder / f"{self.part}.{column}.{what}"


def _map(path: Path, dtype: str) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, dtype)
    except (OSError, ValueError):
        raise QkvError(f"{path}: missing or cut off: delete {path.parent} and prepare again") from None


@dataclass(frozen=True)
class FilterReport:
    """How many pairs of each corpus were read, kept, held out, and dropped for which reason."""

    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        reasons = [name for name in self.rows[0] if name not in ("name", "part", "read", "train", "valid")]
        titles = {"encoding": "not UTF-8"}
        table = [
            ["corpus", "read", "kept", "held out", *(titles.get(name, name.replace("_", " ")) for name in reasons)]
        ]
        for row in self.rows:
            given = row["part"] == "valid"
            kept, held_out = (row["valid"], 0) if given else (row["train"], row["valid"])
            numbers = [row["read"], kept, held_out, *(row[name] for name in reasons)]
            table.append([row["name"] + (" (valid)" if given else ""), *(f"{number:,}" for number in numbers)])
        # Columns of zeros are omitted.
        shown = [i for i, column in enumerate(zip(*table, strict=True)) if i < 3 or set(column[1:]) != {"0"}]
        table = [[row[i] for i in shown] for row in table]
        name, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(name), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))])
            for row in table
        )


@dataclass(frozen=True)
class PreparedText:
    """Everything that training reads: tokenizers, training and validation sentences, and the filter report."""

    folder: Path
    tokenizers: TokenizerPair
    train: TokenStore
    valid: TokenStore
    report: FilterReport

    @property
    def valid_text(self) -> tuple[Path, Path]:
        """Files with the raw lines of the validation pairs, in the order of `valid`; plain text has the second only."""
        return self.folder / "valid.src.txt", self.folder / "valid.tgt.txt"

    @classmethod
    def open(cls, folder: str | Path) -> PreparedText:
        """Open a prepared text and compare its files with their checksums."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, digest in manifest.get("checksums", {}).items():  # a store of an older version has none
            if _checksum(folder / name) != digest:
                raise QkvError(f"{folder / name}: damaged, its checksum is wrong: delete {folder} and prepare again")
        tokenizers = TokenizerPair.load(folder / TOKENIZERS_FILE)
        if tokenizers.fingerprint != manifest["tokenizer"]:
            raise QkvError(f"{folder}: the text was prepared with other tokenizers: delete it and prepare again")
        report = FilterReport(tuple(manifest["report"]))
        return cls(folder, tokenizers, TokenStore(folder, "train"), TokenStore(folder, "valid"), report)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read how the prepared text in a folder was made."""
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
        found = manifest.get("version")
        raise QkvError(f"{path}: store version {found!r}, this qkv reads {VERSION}: prepare the text again")
    return manifest


# ---- writing ---------------------------------------------------------------------------------------------------------

Encoded = list[tuple[bytes, bytes, bytes]]  # of each column: ids, lengths, raw text


def join_rows(kept: list[tuple[list[bytes], tuple[str, ...]]], dtypes: list[np.dtype[Any]]) -> Encoded:
    """Concatenate the rows of all columns: ids, lengths, and for the sides of a pair the raw text in lines."""
    joined = []
    for number, dtype in enumerate(dtypes):
        rows = [packed[number] for packed, _ in kept]
        lengths = (np.array([len(row) for row in rows], "<u4") // dtype.itemsize).astype("<u4")
        # JSON text may hold line breaks; scores are computed on one line for each sentence.
        raw = [texts[number].replace("\n", " ").replace("\r", " ") for _, texts in kept if number < len(texts)]
        joined.append((b"".join(rows), lengths.tobytes(), "".join(text + "\n" for text in raw).encode()))
    return joined


@lru_cache(maxsize=1)
def load_tokenizers(path: Path) -> TokenizerPair:
    """Read the tokenizers once in each process."""
    return TokenizerPair.load(path)


class TokenWriter(ExitStack):
    """Writes ids, lengths and validation text of all columns to the files of a prepared text."""

    def __init__(self, folder: Path, columns: Sequence[str], sides: Sequence[str]) -> None:
        super().__init__()
        self.columns = columns
        self.out = {
            (part, column, what): self.enter_context((folder / f"{part}.{column}.{what}").open("wb"))
            for part in ("train", "valid")
            for column in columns
            for what in ("ids", "lengths", *(["txt"] if part == "valid" and column in sides else []))
        }

    def write(self, part: str, encoded: Encoded) -> None:
        """Append the rows of one block to one part."""
        for column, contents in zip(self.columns, encoded, strict=True):
            for what, content in zip(("ids", "lengths", "txt"), contents, strict=True):
                if (part, column, what) in self.out:
                    self.out[part, column, what].write(content)


def count_pairs(
    corpora: Sequence[Corpus], train: int, reasons: list[str], counts: NDArray[np.int64], in_training: list[int]
) -> dict[str, Any]:
    """Return the part of the manifest that counts pairs: the report, and the size of each part."""
    report = [
        {"name": str(corpus), "part": "train" if number < train else "valid", "read": sum(counts[number].tolist())}
        | dict(zip(reasons, counts[number].tolist(), strict=True))
        | {"in_training": in_training[number]}
        for number, corpus in enumerate(corpora)
    ]
    sizes = {}
    for part, column, first, stop in (("train", 0, 0, train), ("valid", 1, train % len(corpora), len(corpora))):
        pairs = counts[first:stop, column].tolist()  # without a validation set, valid has the held-out pairs of all
        sizes[part] = {"pairs": pairs, "weights": [corpus.weight for corpus in corpora[first:stop]]}
        if not sum(pairs):
            totals = {reason: sum(row[reason] for row in report) for reason in ("read", *reasons[2:])}
            listed = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in totals.items() if count)
            raise QkvError(f"nothing is left for {part} after filtering: {listed}")
    return {"report": report, **sizes}


# ---- reuse -----------------------------------------------------------------------------------------------------------


def find_prepared(
    stores: Path | None,
    folder: Path,
    settings: dict[str, Any],
    inputs: Sequence[dict[str, Any]],
    keys: tuple[str, ...],
    say: Callable[[str], None] = lambda line: None,
) -> PreparedText | None:
    """Return an earlier result with the same settings from inputs that are equal in these respects."""
    wanted = [[about[key] for key in keys] for about in inputs]
    if any(None in about for about in wanted):
        return None
    candidates = [folder] if stores is None else [p for p in sorted(stores.glob("*/")) if not p.name.startswith(DRAFT)]
    for place in candidates:
        try:
            manifest = read_manifest(place)
            if manifest["settings"] == settings and [[a[key] for key in keys] for a in manifest["inputs"]] == wanted:
                return PreparedText.open(place)
            if stores is None:
                say(f"{place}: made from other text, with other options or by an older version: preparing again")
        except UsageError:
            continue  # nothing there
        except (QkvError, KeyError, TypeError) as error:
            say(f"{place}: cannot be reused ({error}): preparing again")
    return None


def store_key(settings: dict[str, Any], digests: list[str]) -> str:
    """Return the folder name of a shared prepared text: a hash of its settings and inputs."""
    whole = json.dumps([settings, digests], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=10).hexdigest()


def check_free(place: Path) -> None:
    """Refuse to replace a file, or a folder with something else in it."""
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / "manifest.json").exists())):
        raise UsageError(f"{place}: exists and is no store of prepared text: choose another folder, or move it away")


# ---- complete or absent ----------------------------------------------------------------------------------------------


@contextmanager
def draft_folder(parent: Path) -> Iterator[Path]:
    """Make a folder to build a prepared text in, beside its final place; remove it unless it is published."""
    parent.mkdir(parents=True, exist_ok=True)
    mine = f"{DRAFT}-{platform.node()}"
    for other in parent.glob(f"{DRAFT}-*"):
        match = re.fullmatch(rf"{re.escape(mine)}-(\d+)-[0-9a-f]+", other.name)
        if match and not _is_alive(int(match[1])):  # drafts of other machines are kept
            shutil.rmtree(other, ignore_errors=True)
    draft = parent / f"{mine}-{os.getpid()}-{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):  # a process of another user
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def publish(draft: Path, place: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, flush all files and rename the draft, in place of an older prepared text.

    If another process has published the same text meanwhile, its result stays and the draft is dropped.
    """
    paths = sorted(path for path in draft.iterdir() if path.is_file())
    checksums = {path.name: _checksum(path) for path in paths}
    manifest = manifest | {"format": FORMAT, "version": VERSION, "checksums": checksums}
    files.write_text(draft / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False))
    for path in (*paths, draft):
        files.sync(path)
    while True:
        try:
            os.rename(draft, place)
            break
        except OSError:
            if not place.exists():
                raise
        with suppress(QkvError):
            PreparedText.open(place)  # not damaged
            if all(read_manifest(place).get(key) == manifest[key] for key in ("settings", "checksums")):
                return
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(place, draft / f"old-{secrets.token_hex(4)}")
    files.sync(place.parent)
    for old in place.glob("old-*"):
        shutil.rmtree(old)


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        raise QkvError(f"{path}: missing or cut off: delete {path.parent} and prepare again") from None
