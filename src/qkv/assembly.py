"""From a config to its parts: the only module that maps a kind of model to functions."""

from __future__ import annotations

from typing import overload

import torch

from qkv.core.transformer import Model, Transformer, TranslationModel
from qkv.engines.cuda_decoding.fused_modules import use_fused_modules
from qkv.engines.unpadded import UnpaddedTransformer
from qkv.models.convs2s import ConvS2S
from qkv.models.language_models import DecoderOnly, EncoderOnly
from qkv.models.rnn import Rnn
from qkv.models.variants import VariantLayers
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
def build_model(config: TransformerConfig, src_vocab: int, tgt_vocab: int) -> Transformer: ...


@overload
def build_model(config: TranslationConfig, src_vocab: int, tgt_vocab: int) -> TranslationModel: ...


@overload
def build_model(config: DecoderOnlyConfig, src_vocab: int, tgt_vocab: int) -> DecoderOnly: ...


@overload
def build_model(config: EncoderOnlyConfig, src_vocab: int, tgt_vocab: int) -> EncoderOnly: ...


@overload
def build_model(config: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model: ...


def build_model(config: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model:
    """The model of a config, freshly initialised from torch's random state."""
    model = _plain_model(config, src_vocab, tgt_vocab)
    return use_fused_modules(model) if torch.cuda.is_available() else model


def _plain_model(config: ModelConfig, src_vocab: int, tgt_vocab: int) -> Model:
    match config:
        case TransformerConfig():
            return UnpaddedTransformer(config, src_vocab, tgt_vocab, VariantLayers(config))
        case DecoderOnlyConfig():
            return DecoderOnly(config, tgt_vocab, VariantLayers(config))
        case EncoderOnlyConfig():
            return EncoderOnly(config, tgt_vocab, VariantLayers(config))
        case RnnConfig():
            return Rnn(config, src_vocab, tgt_vocab)
        case ConvS2SConfig():
            return ConvS2S(config, src_vocab, tgt_vocab)
    raise TypeError(f"no model for {type(config).__name__}")
