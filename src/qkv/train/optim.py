"""The optimiser, the learning rate over time (paper, section 5.3), and a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qkv.options import TrainConfig
from qkv.training.matrix_optimizers import MatrixOptimizer, Muon, Soap

DECAY = 0.3  # the last share of the steps, in which the rate of schedule = "wsd" falls to zero
MATRIX_OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {"muon": Muon, "soap": Soap}


def learning_rate(step: int, spec: TrainConfig, d_model: int) -> float:
    """The learning rate of update number `step`, counted from 1.

    All schedules rise linearly over `warmup` steps. Then the paper's (equation 3) and inverse_sqrt fall with 1/√step,
    cosine and linear reach zero at the last step, constant stays, and wsd (warm-up, stable, decay) stays until the last
    30 % of the steps, where it falls to zero as 1 − √x (Hägele et al., 2024). `learning_rate` is the peak; for the
    paper's schedule, whose peak follows from d_model and warmup, it is a factor.
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
        "wsd": 1 - math.sqrt(1 - min(1.0, max(0, spec.steps - step) / (DECAY * spec.steps))),
    }
    return spec.learning_rate * fall[spec.schedule]


def build(model: nn.Module, spec: TrainConfig) -> torch.optim.Optimizer:
    """Adam as in the paper, or what goes past it; weight decay is decoupled and leaves norms and biases alone.

    All of them keep tensors in `state[parameter]`, take a learning rate that is a number or a tensor, and leave out a
    step on the device where their attribute `found_inf` says so.
    """
    parameters = list(model.parameters())
    settings: dict[str, Any] = {"betas": (spec.beta1, spec.beta2), "eps": spec.eps}
    if spec.optimizer in MATRIX_OPTIMIZERS:
        return MATRIX_OPTIMIZERS[spec.optimizer](model, weight_decay=spec.weight_decay, **settings)
    settings |= {"lr": 0.0, "fused": True}
    if spec.optimizer == "adam":
        return torch.optim.Adam(parameters, **settings)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings)


class Ema:
    """An exponential moving average of the weights; young averages forget faster, so that the start does not linger."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()]

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        torch._foreach_lerp_(self.weights, [p.detach() for p in model.parameters()], 1 - self.decay_at(step))

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.tensors().items():
            weight.copy_(tensors[name])
