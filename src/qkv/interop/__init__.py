"""Our weights in the formats of other engines, which compute the same from them or refuse by name what they cannot."""

from __future__ import annotations

from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.huggingface import to_huggingface

__all__ = ["to_ctranslate2", "to_huggingface"]
