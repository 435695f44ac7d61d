"""What a run folder is opened as depends on its kind of model; opening it as something else is refused with a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from qkv import config as configs
from qkv.device import choose_device
from qkv.errors import UsageError
from qkv.models.base import Model
from qkv.run import Run

M = TypeVar("M", bound=Model)

USES = {
    configs.DecoderOnly: ("a language model", "qkv complete, or qkv.Completer"),
    configs.EncoderOnly: ("an encoder", "qkv fill, or qkv.Filler"),
}
TRANSLATES = ("a translation model", "qkv translate, or qkv.Translator")


class Loaded(Generic[M]):
    """A trained run on a device: `weights` is best, average, last or a step number; by default the chosen ones."""

    model_class: type[M]

    def __init__(self, run: str | Path | Run, *, weights: str = "", device: str = "auto") -> None:
        self.run = run if isinstance(run, Run) else Run.open(run)
        self.config = self.run.config
        self.tokenizers = self.run.tokenizers
        self.device = choose_device(device)
        model = self.run.model(self.device, weights)
        if not isinstance(model, self.model_class):
            what, use = USES.get(type(self.config.model), TRANSLATES)
            raise UsageError(f"{self.run.path} is {what}, which cannot do this: use {use}")
        self.model: M = model
