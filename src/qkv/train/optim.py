"""The optimiser, the learning rate over time (paper, section 5.3), and a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qkv import config


def learning_rate(step: int, spec: config.Train, d_model: int) -> float:
    """The learning rate of update number `step`, counted from 1.

    All schedules rise linearly over `warmup` steps. Then the paper's (equation 3) and inverse_sqrt fall with 1/√step,
    cosine and linear reach zero at the last step, constant stays. `learning_rate` is the peak; for the paper's
    schedule, whose peak follows from d_model and warmup, it is a factor.
    """
    warmup = max(1, spec.warmup)
    if spec.schedule == "paper":
        rate: float = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        return spec.learning_rate * rate
    if step < warmup:
        return spec.learning_rate * step / warmup
    left = max(0.0, (spec.steps - step) / max(1, spec.steps - warmup))
    fall = {
        "inverse_sqrt": math.sqrt(warmup / step),
        "cosine": 0.5 - 0.5 * math.cos(math.pi * left),
        "linear": left,
        "constant": 1.0,
    }
    return spec.learning_rate * fall[spec.schedule]


def build(model: nn.Module, spec: config.Train) -> torch.optim.Optimizer:
    """Adam as in the paper, or with decoupled weight decay on the matrices (norms and biases are left alone)."""
    parameters = list(model.parameters())
    settings = {"lr": 0.0, "betas": (spec.beta1, spec.beta2), "eps": spec.eps, "fused": True}
    if spec.optimizer == "adam":
        return torch.optim.Adam(parameters, **settings)  # type: ignore[arg-type]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings)  # type: ignore[arg-type]


class Ema:
    """An exponential moving average of the weights; young averages forget faster, so that the start does not linger."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.weights, [p.detach() for p in model.parameters()], 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.tensors().items():
            weight.copy_(tensors[name])
