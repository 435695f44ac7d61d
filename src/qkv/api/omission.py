"""What a trained run leaves out: limits measured on held-out text, and the check of a translation against them.

Two signals say that something may be missing in a translation. It is shorter than that of nearly every held-out source
of its length; or more source words have no counterpart, by the word alignment, which is computed only for translations
that are rather short. A limit is passed by a share `RARE` of the held-out text (`qkv.api.run_limits`). The limits, and
the words that the model copies (stand-ins for protected text), are in `checks.json` of the run folder; an older run
folder has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from qkv.core import files
from qkv.core.run import read_record
from qkv.data.alignments import Link, word_spans
from qkv.segmentation.special_spaces import plain

FILE = "checks.json"
RARE = 0.004  # share of the held-out text that passes a limit
RATHER_SHORT = 0.01  # share of the held-out text whose alignment is looked at
LEAST_WORDS = 5  # of a source for which uncovered words say something

Align = Callable[[list[str], list[str]], Sequence[Iterable[Link]]]


@dataclass(frozen=True)
class Checks:
    """The limits of a run. Lengths are in tokens; a shortfall is (ratio · source − output) / √source."""

    ratio: float  # tokens of an output for each of its source, on average
    short: float  # largest usual shortfall
    rather_short: float  # shortfall from which the alignment is looked at
    uncovered: float  # largest usual share of source words without a counterpart; 1: not known
    lines: int  # held-out lines
    weights: str  # name of the weights that were measured
    copied: tuple[str, ...] = ()  # words that the model copies

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the checks of a run folder; None if it has none."""
        path = folder / FILE
        if not path.exists():
            return None
        return read_record(path, lambda **plain: cls(**{**plain, "copied": tuple(plain.get("copied", ()))}))

    def write(self, folder: Path) -> None:
        files.write_text(folder / FILE, json.dumps(asdict(self), ensure_ascii=False, indent=2) + "\n")

    def shortfall(self, source: int, output: int) -> float:
        return (self.ratio * source - output) / math.sqrt(max(1, source))


@dataclass(frozen=True)
class OmissionCheck:
    """Finds translations that may leave something out."""

    checks: Checks
    align: Align | None = None  # None: the model has no alignment

    def suspects(self, pairs: Sequence[tuple[str, str]], lengths: Sequence[tuple[int, int]]) -> list[int]:
        """Return the places of the pairs that pass a limit; `lengths` are those of source and output, in tokens."""
        shortfalls = [self.checks.shortfall(*pair) for pair in lengths]
        found = {i for i, shortfall in enumerate(shortfalls) if shortfall > self.checks.short}
        looked_at = [
            i
            for i, shortfall in enumerate(shortfalls)
            if self.checks.rather_short < shortfall <= self.checks.short and pairs[i][1]
        ]
        if self.align is not None and looked_at and self.checks.uncovered < 1:
            shares = uncovered([(plain(pairs[i][0])[0], pairs[i][1]) for i in looked_at], self.align)
            found |= {i for i, share in zip(looked_at, shares, strict=True) if share > self.checks.uncovered}
        return sorted(found)


def uncovered(pairs: Sequence[tuple[str, str]], align: Align) -> list[float]:
    """Return the share of the source words of each pair that no target word is linked with; 0 for a short source."""
    links = align([source for source, _ in pairs], [output for _, output in pairs])
    shares = []
    for (source, _), found in zip(pairs, links, strict=True):
        words = len(word_spans(source))
        shares.append(1 - len({i for i, _ in found}) / words if words >= LEAST_WORDS else 0.0)
    return shares
