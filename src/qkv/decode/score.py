"""Forced decoding: the log-probability a model gives to a target that is already there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.core.batches import Batch
from qkv.models.state import StepModel


@torch.inference_mode()
def token_logprobs(model: StepModel[Any, Any], batch: Batch, pad: int) -> list[list[float]]:
    """log p of each label, </s> last, for each row of the batch; their sum is the log-probability of the target."""
    logits, _ = model.step(batch.target, model.start(model.encode(batch.source, batch.lengths)))
    log_probs = logits.float().log_softmax(-1)  # (batch, target, vocab)
    chosen: Tensor = log_probs.gather(-1, batch.labels[:, :, None]).squeeze(-1)
    real = (batch.labels != pad).sum(1).tolist()
    return [row[:count] for row, count in zip(chosen.tolist(), real, strict=True)]
