"""Compare the preparation of a corpus with the batch encoding of the subword library on the same lines.

    python benchmarks/prepare.py train.en.xz train.de.xz [--vocab 32000] [--rounds 1]

The first figure is all of `prepare`: decompression, filtering, learning the vocabulary, tokenising, writing the store.
The second is the time inside `encode_batch` alone, with the learned vocabulary and the lines in memory. Seconds are
elapsed time and, in brackets, processor time, which is more reliable on a shared machine. Memory is the peak of all
processes together, with shared pages counted once and, in brackets, per process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import tokenizers

from qkv.core.dataset import PreparedText
from qkv.data.formats import read_any_file
from qkv.data.text_preparation import prepare_text
from qkv.options import CorpusConfig, DataConfig, TokenizerConfig

Seconds = tuple[float, float]  # elapsed time, processor time
BATCH = 20_000  # lines per call of the library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src")
    parser.add_argument("tgt")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=1, help="measure both this many times, in turn")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, tokenizers {tokenizers.__version__}")
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store")
            ours, peak, resident = _measure(_prepare, given.src, given.tgt, store, given.vocab)
            theirs, _, _ = _measure(_encode_batch, given.src, given.tgt, store)
        print(f"prepare {ours[0]:.1f} s ({ours[1]:.1f} s), peak memory {peak:.2f} GB ({resident:.2f} GB)")
        print(f"encode_batch {theirs[0]:.1f} s ({theirs[1]:.1f} s)")
        print(f"ratio {ours[0] / theirs[0]:.2f} ({ours[1] / theirs[1]:.2f})", flush=True)


def _prepare(results: Queue[Seconds], src: str, tgt: str, store: Path, vocab: int) -> None:
    stages: dict[str, float] = {}
    data = DataConfig(train=(CorpusConfig(src=src, tgt=tgt),))
    start = time.perf_counter()
    prepared = prepare_text(
        data,
        TokenizerConfig(vocab=vocab),
        store,
        progress=lambda stage, done, total: stages.__setitem__(stage, stages.get(stage, time.perf_counter())),
    )
    end = time.perf_counter()
    print(prepared.report)
    bounds = [*stages.values(), end]
    print("; ".join(f"{stage} {bounds[i + 1] - bounds[i]:.1f} s" for i, stage in enumerate(stages)))
    results.put((end - start, _processor()))


def _encode_batch(results: Queue[Seconds], src: str, tgt: str, store: Path) -> None:
    ours = PreparedText.open(store).tokenizers
    spent = busy = 0.0
    for name, side in ((src, ours.src), (tgt, ours.tgt)):
        library = side.library
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.NFC(), tokenizers.normalizers.Prepend(" ")]
        )
        for lines in _batches(name):
            start, before = time.perf_counter(), _processor()
            library.encode_batch(lines)
            spent += time.perf_counter() - start
            busy += _processor() - before
    results.put((spent, busy))


def _batches(name: str) -> Iterator[list[str]]:
    lines: list[str] = []
    rest = b""
    for piece in read_any_file(Path(name)):
        *whole, rest = (rest + piece).split(b"\n")
        lines += [line.decode() for line in whole]
        if len(lines) >= BATCH:
            yield lines
            lines = []
    yield lines + ([rest.decode()] if rest else [])


def _processor() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _measure(function: Callable[..., None], *arguments: Any) -> tuple[Seconds, float, float]:
    """Run a function in a new process; return its seconds and the peak memory of all its processes."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Seconds] = context.Queue()
    process = context.Process(target=function, args=(results, *arguments))
    process.start()
    assert process.pid
    shared = resident = 0
    while process.is_alive():
        held = [_memory(pid) for pid in _family(process.pid)]
        shared, resident = max(shared, sum(p for p, _ in held)), max(resident, sum(r for _, r in held))
        process.join(0.2)
    if process.exitcode:
        raise SystemExit(process.exitcode)
    return results.get(), shared / 1e9, resident / 1e9


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in _family(int(child)))]


def _memory(pid: int) -> tuple[int, int]:
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    except OSError:
        return 0, 0
    held = {row[0]: int(row[1]) * 1024 for row in rows}
    return held.get("Pss:", 0), held.get("Rss:", 0)


if __name__ == "__main__":
    main()
