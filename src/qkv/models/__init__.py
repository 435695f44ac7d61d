"""The models, as plain torch modules that can be used alone."""

from qkv.models.attention import MultiHeadAttention, attend, attention_mask, attention_weights, record
from qkv.models.base import Model, TranslationModel, parameter_count
from qkv.models.build import build
from qkv.models.convs2s import Convolutional
from qkv.models.rnn import Recurrent
from qkv.models.transformer import DecoderOnly, EncoderOnly, Transformer

__all__ = [
    "Convolutional",
    "DecoderOnly",
    "EncoderOnly",
    "Model",
    "MultiHeadAttention",
    "Recurrent",
    "Transformer",
    "TranslationModel",
    "attend",
    "attention_mask",
    "attention_weights",
    "build",
    "parameter_count",
    "record",
]
