"""Opening a run folder for use: the model on a device, refused with a hint if it is of another kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch

from qkv.assembly import Run
from qkv.console import say
from qkv.core.device import choose_device, choose_precision
from qkv.core.errors import UsageError
from qkv.core.transformer import Model, StepModel, TranslationModel
from qkv.engines.cpu import DTYPES, pack
from qkv.options import DecoderOnlyConfig, EncoderOnlyConfig

M = TypeVar("M", bound=Model)

USES = {
    DecoderOnlyConfig: ("a language model", "qkv complete, or qkv.LanguageModel"),
    EncoderOnlyConfig: ("an encoder", "qkv fill, or qkv.Encoder"),
}
TRANSLATES = ("a translation model", "qkv translate, or qkv.Translator")


class LoadedRun(Generic[M]):
    """A trained run on a device; `weights` is best, average, last or a step number, by default the chosen ones."""

    model_class: type[M]

    def __init__(self, run: str | Path | Run, *, weights: str = "", device: str = "auto") -> None:
        self.run = run if isinstance(run, Run) else Run.open(run)
        self.config = self.run.config
        self.tokenizers = self.run.tokenizers
        self.device = choose_device(device)
        about: dict[str, str] = {}
        name = self.run.weights(weights).stem
        model = self.run.model(self.device, name, about)
        if self.run.in_training():  # a later call may find better weights under the same name
            step = int(about.get("step", 0))
            say(f"{self.run.path} is in training: using {name} weights of step {step:,}")
        if not isinstance(model, self.model_class):
            kind, use = USES.get(type(self.config.model), TRANSLATES)
            raise UsageError(f"{self.run.path} is {kind}, which cannot do this: use {use}")
        self.model: M = model


def check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse a dtype that the device cannot compute in."""
    if dtype not in DTYPES:
        raise UsageError(f'dtype = "{dtype}": must be one of {", ".join(DTYPES)}')
    if dtype == "int8" and device.type != "cpu":
        raise UsageError(f'dtype = "int8" is for a CPU, and this is {device}: use bf16 or fp32, or another device')


def fast_engine(model: TranslationModel, dtype: str, device: torch.device) -> StepModel:
    """Return the fastest form of the model for a device and dtype; the model itself is not changed."""
    if device.type == "cpu":
        return cast("StepModel", pack(model, dtype))
    return model if choose_precision(dtype, device) == torch.float else copy.deepcopy(model).to(torch.bfloat16)
