"""qkv: the Transformer of "Attention Is All You Need", from raw text files to a model that translates.

The public names. They are looked up when first used, so that `import qkv` and `qkv --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv import models, presets
    from qkv.api import compare, evaluate, load
    from qkv.api.augmentation import augment
    from qkv.api.completer import LanguageModel
    from qkv.api.run_training import train
    from qkv.api.text_encoder import Encoder
    from qkv.api.translator import Translation, Translator
    from qkv.assembly import Run, build_model
    from qkv.core.errors import QkvError, UsageError
    from qkv.interop import export
    from qkv.options import Config

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
    "options": "",
    "evaluate": "qkv.api",
    "export": "qkv.interop",
    "load": "qkv.api",
    "models": "",
    "presets": "",
    "train": "qkv.api.run_training",
}

__all__ = [
    "Config",
    "Encoder",
    "LanguageModel",
    "QkvError",
    "Run",
    "Translation",
    "Translator",
    "UsageError",
    "augment",
    "build_model",
    "compare",
    "evaluate",
    "export",
    "load",
    "models",
    "options",
    "presets",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    if not _HOME[name]:
        return importlib.import_module(f"qkv.{name}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
