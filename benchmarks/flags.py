"""Measure hit rate and false alarms of the hallucination flag of `qkv evaluate`.

    python benchmarks/flags.py NAME=SRC,REF …          # at most the first 2,000 lines of each

The test outputs are: references of other sentences (shuffled), references with 3 words in 10 replaced by random words
of the set, the references, and the sources.
"""

from __future__ import annotations

import random
import sys
from itertools import islice

from qkv.data.formats import read_lines
from qkv.evaluation.diagnosis import diagnose

LINES, REPLACED = 2000, 0.3


def replace_words(lines: list[str], draw: random.Random) -> list[str]:
    words = [word for line in lines for word in line.split()]
    return [" ".join(draw.choice(words) if draw.random() < REPLACED else w for w in line.split()) for line in lines]


def main() -> None:
    print("| test set | chance level | of other sentences (`short`) | words replaced | references | sources: `copy` |")
    print("|---|---|---|---|---|---|")
    for given in sys.argv[1:]:
        draw = random.Random(1)
        name, _, files = given.partition("=")
        sources, references = (list(islice(read_lines(file), LINES)) for file in files.split(","))
        outputs = {
            "other": draw.sample(references, len(references)),
            "replaced": replace_words(references, draw),
            "right": references,
            "source": sources,
        }
        diagnoses = {kind: diagnose(sources, texts, references) for kind, texts in outputs.items()}
        flagged = sum(bool(each.flags) for each in diagnoses["right"].sentences)
        print(
            f"| {name}, {len(sources):,} lines | {diagnoses['other'].chance:.1f} "
            f"| {diagnoses['other'].rate('hallucination'):.0%} ({diagnoses['other'].rate('short'):.0%}) "
            f"| {diagnoses['replaced'].rate('hallucination'):.1%} | {flagged} flagged "
            f"| {diagnoses['source'].rate('copy'):.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
