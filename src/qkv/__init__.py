"""qkv: the Transformer of "Attention Is All You Need", from raw text files to a model that translates.

The public names. They are looked up when first used, so that `import qkv` and `qkv --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from qkv import models as models
    from qkv import options as options
    from qkv import presets as presets
    from qkv.api import compare as compare
    from qkv.api import evaluate as evaluate
    from qkv.api import load as load
    from qkv.api.augmentation import augment as augment
    from qkv.api.completer import LanguageModel as LanguageModel
    from qkv.api.run_training import train as train
    from qkv.api.text_encoder import Encoder as Encoder
    from qkv.api.translation import Translation as Translation
    from qkv.api.translator import Translator as Translator
    from qkv.assembly import Run as Run
    from qkv.assembly import build_model as build_model
    from qkv.core.errors import QkvError as QkvError
    from qkv.core.errors import UsageError as UsageError
    from qkv.interop import export as export
    from qkv.options import Config as Config

__version__ = "0.1.0"

_HOME = {
    "Config": "qkv.options",
    "Encoder": "qkv.api.text_encoder",
    "LanguageModel": "qkv.api.completer",
    "QkvError": "qkv.core.errors",
    "Run": "qkv.assembly",
    "Translation": "qkv.api.translator",
    "Translator": "qkv.api.translator",
    "UsageError": "qkv.core.errors",
    "augment": "qkv.api.augmentation",
    "build_model": "qkv.assembly",
    "compare": "qkv.api",
    "evaluate": "qkv.api",
    "export": "qkv.interop",
    "load": "qkv.api",
    "train": "qkv.api.run_training",
}
__all__ = [*_HOME, "models", "options", "presets"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    if name not in _HOME:
        return importlib.import_module(f"qkv.{name}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
