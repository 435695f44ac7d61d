"""The parts that a config or a device asks for."""

from __future__ import annotations

from typing import Any

import torch

from qkv.core.search import StartSearch
from qkv.core.tokenizer import TokenizerPair
from qkv.core.translate import DecodingEngine
from qkv.engines.cpu.native_search import OpenedRun, ProcessDecoding, start_native
from qkv.engines.cuda_decoding.continuous_batching import SlotDecoding
from qkv.engines.cuda_decoding.search_kernels import start_triton
from qkv.worker_pool import ProcessWorkers


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
