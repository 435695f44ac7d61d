"""From a config to a model of its kind."""

from __future__ import annotations

from typing import overload

from qkv.models.base import Model, TranslationModel
from qkv.models.convs2s import Convolutional
from qkv.models.rnn import Recurrent
from qkv.models.transformer import DecoderOnly, EncoderOnly, Transformer
from qkv.options import (
    ConvS2SConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TransformerConfig,
    TranslationConfig,
)


@overload
def build(spec: TranslationConfig, src_vocab: int, tgt_vocab: int) -> TranslationModel: ...


@overload
def build(spec: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model: ...


def build(spec: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model:
    """The model that a config describes, freshly initialised from torch's random state."""
    match spec:
        case TransformerConfig():
            return Transformer(spec, src_vocab, tgt_vocab)
        case DecoderOnlyConfig():
            return DecoderOnly(spec, tgt_vocab)
        case EncoderOnlyConfig():
            return EncoderOnly(spec, tgt_vocab)
        case RnnConfig():
            return Recurrent(spec, src_vocab, tgt_vocab)
        case ConvS2SConfig():
            return Convolutional(spec, src_vocab, tgt_vocab)
    raise TypeError(f"no model for {type(spec).__name__}")
