"""Preparation with everything that the rings add to core's: more file formats, alignments, subwords, processes.

Prepared texts of many runs may share one folder (data.store), and the filter report is printed as a table.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qkv.console import say
from qkv.core.corpus import Progress
from qkv.core.dataset import DRAFT, PreparedText, StoreFolder
from qkv.core.errors import UsageError
from qkv.core.preparation import Disposition, Filter, Scan, Sentences, length_filters, prepare, slices
from qkv.core.tokenizer import TokenizerPair
from qkv.data.formats import COMPRESSED, find_text, unpack
from qkv.data.subwords import learner_for
from qkv.options import DataConfig, TokenizerConfig
from qkv.worker_pool import WorkerPool, cpu_count

SMALL_TEXT = 16 << 20  # bytes; starting processes for less takes longer than the work


def prepare_text(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    folder: Path,
    *,
    tokenizers: TokenizerPair | None = None,
    running_text: bool = False,
    filters: Sequence[Filter] = (),
    progress: Progress = lambda stage, done, total: None,
    say: Callable[[str], None] = say,
) -> PreparedText:
    """Find the files of a config and prepare their text, in several processes if it is large.

    The result is in `folder`, or with `data.store` in a folder there which all runs with the same text share.
    With `running_text`, plain text is read on across lines: nothing is dropped, newlines are tokens, and its end is
    held out for validation.
    """
    text: Sentences = ReportedSentences(data, [*length_filters(data), *filters])
    if running_text:
        from qkv.data.lm_data import RunningText  # which loads torch

        text = RunningText(data, ())
    train, valid = find_text(data.train, data), find_text(data.valid, data)
    if {corpus.sides for corpus in train} ^ {corpus.sides for corpus in valid or train}:
        raise UsageError("training text and validation text must both be pairs, or both plain text")
    if sum(path == Path("-") for corpus in (*train, *valid) for path in corpus.paths) > 1:
        raise UsageError("standard input (-) can be only one file")
    if tokenizers:
        for tag in {corpus.tag for corpus in (*train, *valid) if corpus.tag}:
            tokenizers.src.tag(tag)  # refuses an unknown tag
    store = SharedStores(Path(data.store), say) if data.store else StoreFolder(folder, say)
    remove_dead_drafts(store.parent)
    # The size of standard input is unknown and counts as large.
    sizes = [
        path.stat().st_size * (4 if path.suffix in COMPRESSED else 1) if path.is_file() else SMALL_TEXT
        for corpus in (*train, *valid)
        for path in corpus.paths
    ]
    options: dict[str, Any] = {
        "tokenizers": tokenizers,
        "unpack": unpack,
        "progress": progress,
        "learner": learner_for(tokenizer.kind),
    }
    run = partial(prepare, train, valid, text, tokenizer, store, **options)
    workers = 1 if sum(sizes) < SMALL_TEXT else data.workers or cpu_count()
    if workers == 1:
        return run()
    with WorkerPool(workers) as pool:
        return run(parallel_map=pool.map)


class ReportedSentences(Sentences):
    """Sentences; the report also has the number of validation pairs that occur in the training text."""

    def choose(self, scan: Scan) -> None:
        super().choose(scan)
        repeated = count_repeated(scan) if len(scan.rows) > scan.trained else [0] * len(scan.corpora)
        scan.notes = [{"in_training": count} for count in repeated]


def count_repeated(scan: Scan) -> list[int]:
    """Return for each corpus how many of its validation pairs occur in the training text (0 for training corpora)."""
    usable = scan.dispositions[scan.trained :] == Disposition.VALID
    pairs, valid = scan.rows["pair"], scan.rows["pair"][scan.trained :]
    wanted = np.unique(valid[usable])
    common = [wanted[np.isin(wanted, pairs[rows])] for rows in slices(scan.trained)]
    repeated = usable & np.isin(valid, np.concatenate(common))
    sizes = [count if corpus.given else 0 for corpus, count in zip(scan.corpora, scan.counts, strict=True)]
    return [int(part.sum()) for part in np.split(repeated, np.cumsum(sizes)[:-1])]


class SharedStores(StoreFolder):
    """A folder that holds a prepared text for each content, under a hash of its settings and inputs."""

    def __init__(self, stores: Path, say: Callable[[str], None]) -> None:
        self.folder = self.parent = stores
        self.say = say

    def candidates(self) -> list[Path]:
        return [folder for folder in sorted(self.folder.glob("*/")) if not folder.name.startswith(".preparing")]

    def place(self, settings: dict[str, Any], digests: list[str]) -> Path:
        whole = json.dumps([settings, digests], sort_keys=True)
        return self.folder / hashlib.blake2b(whole.encode(), digest_size=10).hexdigest()


def remove_dead_drafts(parent: Path) -> None:
    """Remove the drafts of killed processes; drafts of other machines are kept."""
    for draft in parent.glob(f"{DRAFT}-*"):
        if match := re.fullmatch(rf"{re.escape(DRAFT)}-(\d+)-[0-9a-f]+", draft.name):
            try:
                os.kill(int(match[1]), 0)
            except PermissionError:  # a process of another user
                pass
            except ProcessLookupError:
                shutil.rmtree(draft, ignore_errors=True)


def filter_table(report: Sequence[dict[str, Any]]) -> str:
    """Return a filter report as a table: pairs of each corpus that were read, kept, held out, and dropped by reason."""
    reasons = [name for name in report[0] if name not in ("name", "part", "read", "train", "valid")]
    titles = {"encoding": "not UTF-8"}
    table = [["corpus", "read", "kept", "held out", *(titles.get(name, name.replace("_", " ")) for name in reasons)]]
    for row in report:
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
