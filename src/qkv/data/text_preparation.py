"""Preparation with everything that the rings add to core's: more file formats, alignments, subwords, processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from qkv.console import say
from qkv.core.corpus import COMPRESSED, Progress
from qkv.core.dataset import PreparedText
from qkv.core.preparation import Filter, Sentences, prepare
from qkv.core.tokenizer import TokenizerPair
from qkv.data.formats import find_text
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

    With `running_text`, plain text is read on across lines: nothing is dropped, newlines are tokens, and its end is
    held out for validation.
    """
    kind: type[Sentences] = Sentences
    if running_text:
        from qkv.data.lm_data import RunningText  # which loads torch

        kind = RunningText
    train, valid = find_text(data.train, data), find_text(data.valid, data)
    # The size of standard input is unknown and counts as large.
    sizes = [
        path.stat().st_size * (4 if path.suffix in COMPRESSED else 1) if path.is_file() else SMALL_TEXT
        for corpus in (*train, *valid)
        for path in corpus.paths
    ]
    with WorkerPool(1 if sum(sizes) < SMALL_TEXT else data.workers or cpu_count()) as pool:
        return prepare(
            train,
            valid,
            data,
            tokenizer,
            folder,
            tokenizers=tokenizers,
            learner=learner_for(tokenizer.kind),
            kind=kind,
            filters=filters,
            parallel_map=pool.map,
            progress=progress,
            say=say,
        )
