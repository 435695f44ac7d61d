"""From a config or a device to its parts: the only module that maps a kind of model to functions."""

from __future__ import annotations

from typing import Any, overload

import torch

from qkv.core.search import StartSearch
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Model, Transformer, TranslationModel
from qkv.core.translate import DecodingEngine
from qkv.engines.cpu.native_search import OpenedRun, ProcessDecoding, start_native
from qkv.engines.cuda_decoding.continuous_batching import SlotDecoding
from qkv.engines.cuda_decoding.fused_modules import use_fused_modules
from qkv.engines.cuda_decoding.search_kernels import start_triton
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
from qkv.worker_pool import ProcessWorkers


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


def start_search_for(device: torch.device) -> StartSearch:
    """Return how searches are started on a device: with steps in C on a CPU, by kernels on a GPU."""
    return start_native if device.type == "cpu" else start_triton


def search_engines_for(
    model: Any, tokenizers: TokenizerPair, device: torch.device, workers: ProcessWorkers[OpenedRun] | None = None
) -> list[DecodingEngine]:
    """Return the engines that decode with a model faster than `search_all`, for the options that they support."""
    engines: list[DecodingEngine] = []
    if device.type == "cuda":
        engines.append(SlotDecoding(model, tokenizers))
    if workers is not None:
        engines.append(ProcessDecoding(workers))
    return engines
