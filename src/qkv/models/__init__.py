"""The models, as plain torch modules that can be used alone."""

from qkv.models.attention import MultiHeadAttention, attend, attention_mask, attention_weights, record
from qkv.models.transformer import Transformer, build, parameter_count

__all__ = [
    "MultiHeadAttention",
    "Transformer",
    "attend",
    "attention_mask",
    "attention_weights",
    "build",
    "parameter_count",
    "record",
]
