"""The loop detector: an output that says the same again and again, more often than its source does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIMES = 4  # a phrase that stands so often in a row …
TOKENS = 8  # … and covers so many tokens is a loop, …
SPARE = 1  # … unless the source repeats something as often, but for this many times
LONGEST = 32  # tokens of the longest phrase that is looked for


@dataclass(frozen=True)
class Loop:
    """`length` tokens that stand `times` times in a row, from `start` on."""

    start: int
    length: int
    times: int


def find_loop(output: Sequence[int], source: Sequence[int] = ()) -> Loop | None:
    """The loop that covers most of an output, if it has one.

    A phrase of 1 to 32 tokens that stands at least 4 times in a row and covers at least 8 tokens, wherever it does; but
    a source that repeats a phrase of its own ("ha ha ha ha ha") allows for as many repetitions and one more.
    """
    if len(set(output)) > len(output) - TOKENS * (TIMES - 1) // TIMES:
        return None  # of the tokens of a loop, all but those of its first round have come before
    allowed = max((loop.times for loop in repetitions(source)), default=1) + SPARE
    loops = [
        loop
        for loop in repetitions(output)
        if loop.times >= TIMES and loop.times * loop.length >= TOKENS and loop.times > allowed
    ]
    return max(loops, key=lambda loop: loop.times * loop.length, default=None)


def repetitions(tokens: Sequence[int]) -> list[Loop]:
    """Every phrase that stands at least twice in a row, with as many repetitions as there are."""
    found = []
    for length in range(1, min(LONGEST, len(tokens) // 2) + 1):
        alike = 0  # tokens in a row that equal the one `length` before them
        for i in range(length, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - length]:
                alike += 1
                continue
            if alike >= length:
                found.append(Loop(i - alike - length, length, alike // length + 1))
            alike = 0
    return found


def breaking(loop: Loop, blocked: int = 0) -> int:
    """The length of n-grams to block so that a loop cannot come again: it is left after at most that many tokens more.

    At least 4 tokens, because shorter runs come twice in good text; `blocked` is what was blocked already.
    """
    n = max(TIMES, loop.length)
    return min(n, blocked) if blocked else n
