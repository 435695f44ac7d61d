"""Text ↔ ids: normalise, cut into subwords, and exactly back."""

from qkv.text.learn import learn
from qkv.text.tokenizer import Tokenizer, Tokenizers

__all__ = ["Tokenizer", "Tokenizers", "learn"]
