"""What verbs read: files that correspond line by line, and the pairs that a training held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qkv.core.errors import QkvError, UsageError


def held_out(run: Path, source: str | None, reference: str | None) -> tuple[list[str], list[str]]:
    """The lines of both files, or the pairs that the run held out."""
    from qkv.run import Run

    if source and not reference:
        raise UsageError(f"{source}: give REF too, its reference translations")
    if not source or not reference:
        store = Run.open(run).store
        source, reference = str(store / "valid.src.txt"), str(store / "valid.tgt.txt")
        if not Path(source).exists():
            raise UsageError(f"{run} keeps no held-out pairs (no {source}): give SRC and REF")
    sources, references = some_lines(source), some_lines(reference)
    same_length(source, sources, reference, references)
    return sources, references


def some_lines(name: str) -> list[str]:
    """The lines of a file, which must have one at least: there is nothing to measure on none."""
    from qkv.data.lines import read_lines

    lines = read_lines(name)
    if not lines:
        raise QkvError(f"{name}: the file is empty")
    return lines


def same_length(name: str, lines: Sequence[object], other: str, others: Sequence[object]) -> None:
    """Refuse two files that do not correspond line by line."""
    if len(lines) != len(others):
        counts = f"{name} has {len(lines):,} lines but {other} has {len(others):,}"
        raise QkvError(f"{counts}: they must correspond line by line")
