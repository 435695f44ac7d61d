"""From a config to a model of its kind."""

from __future__ import annotations

from typing import overload

from qkv import config
from qkv.models.base import Model, TranslationModel
from qkv.models.conv import Convolutional
from qkv.models.rnn import Recurrent
from qkv.models.transformer import DecoderOnly, EncoderOnly, Transformer


@overload
def build(spec: config.Translating, src_vocab: int, tgt_vocab: int) -> TranslationModel: ...


@overload
def build(spec: config.Model, src_vocab: int, tgt_vocab: int) -> Model: ...


def build(spec: config.Model, src_vocab: int, tgt_vocab: int) -> Model:
    """The model that a config describes, freshly initialised from torch's random state."""
    match spec:
        case config.Transformer():
            return Transformer(spec, src_vocab, tgt_vocab)
        case config.DecoderOnly():
            return DecoderOnly(spec, tgt_vocab)
        case config.EncoderOnly():
            return EncoderOnly(spec, tgt_vocab)
        case config.Recurrent():
            return Recurrent(spec, src_vocab, tgt_vocab)
        case config.Convolutional():
            return Convolutional(spec, src_vocab, tgt_vocab)
