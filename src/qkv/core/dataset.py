"""Prepared text: token ids in memory-mapped files with checksums, made once and reused while the input is unchanged.

A folder holds, for `train` and `valid` and for each side, the ids of all sentences one after another and their lengths;
further columns, such as alignments, in the same way; the raw text of the validation pairs; the tokenizers; and
`manifest.json`, which records how it was made. A folder is built under another name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair

VERSION = 1  # of the format
TOKENIZERS_FILE = "tokenizers.json"
DRAFT = f".preparing-{platform.node()}"  # first part of the name of a folder that is not complete


class Rows(NamedTuple):
    """Many sentences, one after another."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


class TokenStore:
    """Sentences as ids, without <s> and </s>; where a corpus has a language tag, its sources begin with it."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        manifest = read_manifest(folder)
        self.weights: tuple[float, ...] = tuple(manifest[part]["weights"])  # one for each corpus
        pairs: list[int] = manifest[part]["pairs"]
        self.corpus = np.repeat(np.arange(len(pairs), dtype=np.uint16), pairs)  # the number of the corpus of each pair
        self.sides: list[str] = manifest["sides"]
        self.columns = [*self.sides, *(name for name in manifest["dtypes"] if name not in ("src", "tgt"))]
        self.ids, self._lengths, self._ends = {}, {}, {}  # of each column: the ids of all sentences, as one array
        for name in self.columns:
            self.ids[name] = _map(folder / f"{part}.{name}.ids", manifest["dtypes"][name])
            self._lengths[name] = _map(folder / f"{part}.{name}.lengths", "<u4")
            self._ends[name] = np.cumsum(self._lengths[name], dtype=np.int64)
            if len(self._lengths[name]) != len(self) or len(self.ids[name]) != self._ends[name][-1]:
                raise QkvError(f"{folder}/{part}.{name}.ids: cut off or damaged: delete {folder} and prepare again")
        self.plans: dict[tuple[Any, ...], Any] = {}  # of epochs, shared by all streams over this store

    def __len__(self) -> int:
        return len(self.corpus)

    def row(self, column: str, i: int) -> NDArray[Any]:
        """Return the ids of one sentence; a line of text without a source is a target."""
        length, end = int(self.lengths(column)[i]), int(self._ends[column][i])
        return self.ids[column][end - length : end]

    def rows(self, column: str, indices: NDArray[np.int64]) -> Rows:
        lengths = self.lengths(column)[indices].astype(np.int64)
        shift = self._ends[column][indices] - np.cumsum(lengths)  # from the place in the result to that in the store
        return Rows(self.ids[column][np.arange(int(lengths.sum())) + np.repeat(shift, lengths)], lengths)

    def lengths(self, column: str) -> NDArray[np.uint32]:
        """Return the number of ids of every sentence."""
        if column not in self.columns:
            remedy = "train a model without a source on it"
            raise UsageError(f"{self.folder}: plain text, which has no {column} side: {remedy}")
        return self._lengths[column]


def _map(path: Path, dtype: str) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, dtype)
    except (OSError, ValueError):
        raise QkvError(f"{path}: missing or cut off: delete {path.parent} and prepare again") from None


@dataclass(frozen=True)
class PreparedText:
    """Everything that training reads: tokenizers, training and validation sentences, and the filter report."""

    folder: Path
    tokenizers: TokenizerPair
    train: TokenStore
    valid: TokenStore
    report: tuple[dict[str, Any], ...]  # of each corpus: pairs read, kept, held out, dropped for which reason

    @property
    def valid_text(self) -> tuple[Path, Path]:
        """Files with the raw lines of the validation pairs, in the order of `valid`; plain text has the second only."""
        return self.folder / "valid.src.txt", self.folder / "valid.tgt.txt"

    @classmethod
    def open(cls, folder: Path) -> PreparedText:
        """Open a prepared text and compare its files with their checksums."""
        manifest = read_manifest(folder)
        for name, digest in manifest.get("checksums", {}).items():  # a store of an older version has none
            whole = (folder / name).is_file() and files.content_hash(folder / name) == digest
            if not whole:
                fault = "damaged, its checksum is wrong" if (folder / name).exists() else "missing"
                raise QkvError(f"{folder / name}: {fault}: delete {folder} and prepare again")
        tokenizers = TokenizerPair.load(folder / TOKENIZERS_FILE)
        if tokenizers.fingerprint != manifest["tokenizer"]:
            raise QkvError(f"{folder}: the text was prepared with other tokenizers: delete it and prepare again")
        train, valid = TokenStore(folder, "train"), TokenStore(folder, "valid")
        return cls(folder, tokenizers, train, valid, tuple(manifest["report"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read how the prepared text in a folder was made."""
    if not (path := folder / "manifest.json").exists():
        raise UsageError(f"{folder}: no prepared text here: prepare it first")
    return files.read_json(path, "store", VERSION, f"delete {folder} and prepare again")


# ---- writing ---------------------------------------------------------------------------------------------------------


class StoreFolder:
    """The place of one prepared text, which is complete or absent; an earlier result there is reused if it is equal.

    `data.text_preparation.SharedStores` finds and makes a folder for each content instead.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> None:
        self.folder, self.parent, self.say = folder, folder.parent, say
        foreign = not folder.is_dir() or (any(folder.iterdir()) and not (folder / "manifest.json").exists())
        if folder.exists() and foreign:
            raise UsageError(
                f"{folder}: exists and is no store of prepared text: choose another folder, or move it away"
            )

    def candidates(self) -> list[Path]:
        """Return the folders that may hold an earlier result."""
        return [self.folder]

    def place(self, settings: dict[str, Any], digests: list[str]) -> Path:
        """Return the folder for a text made with these settings from inputs with these hashes."""
        return self.folder

    def find(self, settings: dict[str, Any], inputs: Sequence[dict[str, Any]]) -> PreparedText | None:
        """Return an earlier result with the same settings from inputs that are equal in these respects."""
        say = self.say if "hash" in inputs[0] else lambda line: None  # the last respect that is compared
        for folder in [] if any(None in about.values() for about in inputs) else self.candidates():
            try:
                manifest = read_manifest(folder)
                equal = [about.items() <= old.items() for about, old in zip(inputs, manifest["inputs"], strict=False)]
                if manifest["settings"] == settings and all(equal):
                    return PreparedText.open(folder)
                if folder == self.folder:
                    say(f"{folder}: made from other text, with other options or by an older version: preparing again")
            except UsageError:
                continue  # nothing there
            except (QkvError, KeyError, TypeError) as error:
                say(f"{folder}: cannot be reused ({error}): preparing again")
        return None

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Make a folder to build a prepared text in, beside its final place; remove it unless it is published."""
        self.parent.mkdir(parents=True, exist_ok=True)
        draft = self.parent / f"{DRAFT}-{os.getpid()}-{secrets.token_hex(4)}"
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def publish(self, draft: Path, manifest: dict[str, Any]) -> PreparedText:
        """Write the manifest, flush all files and rename the draft, in place of an older prepared text."""
        place = self.place(manifest["settings"], [about["hash"] for about in manifest["inputs"]])
        paths = sorted(draft.iterdir())
        checksums = {path.name: files.content_hash(path) for path in paths}
        manifest = manifest | {"format": "qkv-store", "version": VERSION, "checksums": checksums}
        files.write_text(draft / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False))
        for path in (*paths, draft):
            files.sync(path)

        def published() -> PreparedText | None:
            with suppress(QkvError):  # nothing is there, or it is damaged
                other = read_manifest(place)
                if (other.get("settings"), other.get("checksums")) == (manifest["settings"], checksums):
                    return PreparedText.open(place)  # another process was faster
            return None

        if ready := published():
            return ready
        try:
            if place.exists():
                os.rename(place, draft / "old")
            os.rename(draft, place)
            files.sync(place.parent)
            shutil.rmtree(place / "old", ignore_errors=True)
        except OSError:
            if not published():  # at this moment
                raise
        return PreparedText.open(place)
