"""The usual training loop over the modules of other software, without and with torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.tokenizer import PAD
from qkv.lab.contenders import PlainQkv, Setting, TrainingSetup


class StandardLoop(PlainQkv):
    """The loop over a module from (source, lengths, target) to logits, with torch's cross-entropy.

    With `compiled`, torch compiles model and loss for the single batch shape.
    """

    def __init__(self, setup: TrainingSetup, model: nn.Module, *, compiled: bool = False) -> None:
        super().__init__(setup, model)
        if compiled:
            self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]

    def loss(self, batch: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        logits = self.model(*batch).flatten(0, 1)  # (batch × target, vocab)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=PAD, label_smoothing=self.smoothing)


def eager_and_compiled(engine: str, make: Callable[[TrainingSetup], nn.Module]) -> list[Setting]:
    """Return the loop over a module with the weights of qkv's model, without and with torch's compiler."""

    def open_loop(setup: TrainingSetup, compiled: bool) -> StandardLoop:
        return StandardLoop(setup, make(setup), compiled=compiled)

    ways = {"eager": False, "compiled": True}
    return [Setting(engine, how, partial(open_loop, compiled=way), exact=True) for how, way in ways.items()]
