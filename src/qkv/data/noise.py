"""Noise on the words of a sentence: some are dropped, some blanked, and the rest stands a little out of order.

A source that a machine wrote is more regular than one that people write; disturbed, it teaches more (Edunov et al.,
2018, for back-translation; He et al., 2020, for self-training). What is drawn follows from the seed and the number of
the line alone, so it is the same in any batch, in any process, and after a kill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkv.core.errors import UsageError

BLANK = "_"  # stands for a word; one letter, so that it is one token of any vocabulary


@dataclass(frozen=True)
class Noise:
    """How much of it: shares of words dropped and blanked, and how many places a word may move."""

    drop: float = 0.0
    blank: float = 0.0
    shuffle: int = 0

    def __post_init__(self) -> None:
        for name, value in (("drop", self.drop), ("blank", self.blank)):
            if not 0 <= value < 1:
                raise UsageError(f"{name} = {value}: a share of the words, from 0 to below 1")
        if self.shuffle < 0:
            raise UsageError(f"shuffle = {self.shuffle}: places that a word may move, 0 or more")

    def __bool__(self) -> bool:
        return self != Noise()

    def words(self, words: Sequence[str], random: np.random.Generator) -> list[str]:
        """The words with noise; of one or more, one is left at least."""
        kept = [word for word, drawn in zip(words, random.random(len(words)), strict=True) if drawn >= self.drop]
        if not kept and words:
            kept = [words[int(random.integers(len(words)))]]
        blanked = random.random(len(kept)) < self.blank
        # A word overtakes another only if that is less than shuffle + 1 places ahead, so none moves further.
        order = np.argsort(np.arange(len(kept)) + random.random(len(kept)) * (self.shuffle + 1), kind="stable")
        return [BLANK if blanked[place] else kept[place] for place in order.tolist()]

    def text(self, text: str, number: int, seed: int, *, spaces: bool = True) -> str:
        """A line with noise; `number` is its place in the input. Without spaces between words, letters are words."""
        if not self:
            return text
        random = np.random.default_rng((seed % 2**64, number))
        return " ".join(self.words(text.split(), random)) if spaces else "".join(self.words(list(text), random))


EDUNOV = Noise(drop=0.1, blank=0.1, shuffle=3)  # as published
