"""From a config to a model of its kind."""

from __future__ import annotations

from typing import overload

from qkv import config
from qkv.models.base import Model, TranslationModel
from qkv.models.convs2s import Convolutional
from qkv.models.rnn import Recurrent
from qkv.models.transformer import DecoderOnly, EncoderOnly, Transformer


@overload
def build(spec: config.TranslationConfig, src_vocab: int, tgt_vocab: int) -> TranslationModel: ...


@overload
def build(spec: config.ModelConfig, src_vocab: int, tgt_vocab: int) -> Model: ...


def build(spec: config.ModelConfig, src_vocab: int, tgt_vocab: int) -> Model:
    """The model that a config describes, freshly initialised from torch's random state."""
    match spec:
        case config.TransformerConfig():
            return Transformer(spec, src_vocab, tgt_vocab)
        case config.DecoderOnlyConfig():
            return DecoderOnly(spec, tgt_vocab)
        case config.EncoderOnlyConfig():
            return EncoderOnly(spec, tgt_vocab)
        case config.RnnConfig():
            return Recurrent(spec, src_vocab, tgt_vocab)
        case config.ConvS2SConfig():
            return Convolutional(spec, src_vocab, tgt_vocab)
