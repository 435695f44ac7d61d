"""Training pass of a Transformer over sentences packed without padding: few kernels, hand-written gradients.

Each operation is a plain PyTorch function; on a GPU it calls the Triton kernel in the same file, whose results are
equal, dropout included.
"""

from __future__ import annotations

import torch

from qkv.engines.cuda_training.packed_batch import PADDING
from qkv.options import FLAG, SIZES, AllowList, ModelConfig, TransformerConfig

MODEL = AllowList(
    "model",
    TransformerConfig,
    **SIZES,
    norm=("post", "pre"),
    rms_norm=FLAG,
    activation=("relu", "gelu", "swiglu"),
    positions=("sinusoidal", "learned", "rotary", "none"),
    bias=FLAG,
    kind=("transformer",),
    attention=("scaled", "dot"),
    window=(0,),
)


def refused_model(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return None if the training pass supports this model and precision, else the reason why not."""
    if (reason := MODEL.refusal(config)) is not None:
        return reason
    assert isinstance(config, TransformerConfig)
    if config.positions == "learned" and config.max_positions < PADDING:  # rows of padding need positions, too
        return f"model.max_positions = {config.max_positions} is less than {PADDING}"
    if max(config.key_width, config.value_width) * dtype.itemsize > 256:
        return "a head is too wide for the shared memory of a GPU core"
    return None
