"""Several models as one: each computes every step, and their probabilities are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.core.errors import UsageError
from qkv.core.transformer import StepModel

AVERAGES = ("probabilities", "logprobs")


@dataclass
class EnsembleState:
    """The states of all members."""

    members: list[Any]

    def select(self, rows: Tensor) -> EnsembleState:
        return EnsembleState([state.select(rows) for state in self.members])


class Ensemble:
    """A StepModel over several that read and write the same ids, of whatever kinds they are.

    Its probability of a token is the mean of theirs; with average = "logprobs" it is the geometric mean, normalised,
    which all members must agree to.
    """

    def __init__(self, models: Sequence[StepModel], average: str = "probabilities") -> None:
        if not models:
            raise UsageError("an ensemble needs at least one model")
        if average not in AVERAGES:
            raise UsageError(f'average = "{average}": must be one of {", ".join(AVERAGES)}')
        self.models, self.average = list(models), average

    def encode(self, source: Tensor, lengths: Tensor) -> list[Any]:
        return [model.encode(source, lengths) for model in self.models]

    def start(self, memory: list[Any], beam: int = 1) -> EnsembleState:
        return EnsembleState([model.start(own, beam) for model, own in zip(self.models, memory, strict=True)])

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """Logits (rows, n, vocab) that are log-probabilities already."""
        answers = [model.step(tokens, own) for model, own in zip(self.models, state.members, strict=True)]
        logits = [answer for answer, _ in answers]
        after = EnsembleState([own for _, own in answers])
        if len(logits) == 1:
            return logits[0], after
        sizes = {each.shape[-1] for each in logits}
        if len(sizes) > 1:
            raise UsageError(f"vocabularies of {sorted(sizes)} tokens: an ensemble needs models with one vocabulary")
        log_probs = torch.stack([each.log_softmax(-1, dtype=torch.float) for each in logits])
        if self.average == "logprobs":
            return log_probs.mean(0).log_softmax(-1), after
        return log_probs.logsumexp(0) - math.log(len(logits)), after
