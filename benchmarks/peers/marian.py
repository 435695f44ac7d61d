"""MarianMT of Hugging Face's transformers: the same weights, in a usual training loop and in its `generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.core.batches import pad
from qkv.core.tokenizer import EOS, PAD
from qkv.interop.huggingface import to_huggingface
from qkv.lab.contenders import (
    FLOATS,
    DecodeFunction,
    DecodingSetup,
    DecodingTask,
    Outputs,
    Setting,
    Sources,
    TrainingSetup,
    in_batches,
)

from ._standard_loop import eager_and_compiled

PACKAGE = "transformers"


def training() -> list[Setting]:
    """Return the loop without and with torch's compiler."""
    return eager_and_compiled("transformers MarianMT", Marian)


class Marian(nn.Module):
    """MarianMT with the signature of qkv's model and a copy of its weights."""

    def __init__(self, subject: TrainingSetup) -> None:
        super().__init__()
        self.model = to_huggingface(subject.model, max_positions=max(512, subject.width))
        self.model.set_attn_implementation("sdpa")
        self.model.config.attention_dropout = subject.model.config.attention_dropout

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        real = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        output = self.model(
            input_ids=source, attention_mask=real.long(), decoder_input_ids=target, use_cache=False, return_dict=True
        )
        logits: Tensor = output.logits
        return logits


def decoding(device: torch.device, threads: int) -> list[Setting]:
    """Return `generate` in fp32, and on a GPU also in bf16."""
    hows = {f"fp32, {threads} thread{'s' * (threads > 1)}": torch.float32} if device.type == "cpu" else FLOATS
    return [
        Setting("transformers", how, partial(_open, dtype=dtype), exact=dtype == torch.float32, one_batch=True)
        for how, dtype in hows.items()
    ]


def _open(subject: DecodingSetup, dtype: torch.dtype) -> DecodeFunction:
    model = to_huggingface(subject.model).to(subject.device, dtype)

    def decode(sources: Sources, task: DecodingTask) -> Outputs:
        return in_batches(sources, task.batch, lambda batch: generate(batch, task))

    def generate(sources: Sources, task: DecodingTask) -> Outputs:
        source = pad([np.asarray(row) for row in sources], PAD, last=EOS).to(subject.device)
        options: dict[str, Any] = {"num_beams": task.beam, "num_return_sequences": task.n_best}
        if task.beam > 1:
            options["length_penalty"] = 0.0
        rows = model.generate(
            source,
            attention_mask=(source != PAD).long(),
            do_sample=False,
            max_new_tokens=max(map(len, sources)) + task.extra + 1,
            **options,
        ).tolist()
        texts = [row[1 : row.index(EOS) + 1] for row in rows]  # without <s> and padding
        return [texts[i : i + task.n_best] for i in range(0, len(texts), task.n_best)]

    return decode
