"""Adam and the learning rate over time (paper, section 5.3), and the schedule: rate and end of training."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import nn

from qkv.core.batches import UpdateStream
from qkv.core.config import TrainConfig

WSD_DECAY = 0.3  # schedule = "wsd": share of the steps at the end, during which the rate falls to zero


def learning_rate(step: int, options: TrainConfig, d_model: int, last_step: int = 0) -> float:
    """Return the learning rate of update number `step`, counted from 1; training ends after `last_step`.

    All schedules rise linearly over `warmup` steps. Then the paper's (equation 3) and inverse_sqrt fall with 1/√step,
    cosine and linear reach zero at the last step, constant stays, and wsd (warm-up, stable, decay) stays until the last
    30 % of the steps, where it falls to zero as 1 − √x (Hägele et al., 2024). `learning_rate` is the peak; for the
    paper's schedule it is a factor, because d_model and warmup decide the peak.
    """
    last_step = last_step or options.steps
    warmup = max(1, options.warmup)
    if options.schedule == "paper":
        rate: float = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        return options.learning_rate * rate
    if step < warmup:
        return options.learning_rate * step / warmup
    left = max(0.0, (last_step - step) / max(1, last_step - warmup))
    fall = {
        "inverse_sqrt": math.sqrt(warmup / step),
        "cosine": 0.5 - 0.5 * math.cos(math.pi * left),
        "linear": left,
        "constant": 1.0,
        "wsd": 1 - math.sqrt(1 - min(1.0, max(0, last_step - step) / (WSD_DECAY * last_step))),
    }
    return options.learning_rate * fall[options.schedule]


def build_optimizer(model: nn.Module, options: TrainConfig) -> torch.optim.Optimizer:
    """Return Adam as in the paper; the trainer sets `lr` before each step."""
    betas = options.beta1, options.beta2
    return torch.optim.Adam(list(model.parameters()), lr=0.0, betas=betas, eps=options.eps, fused=True)


class Plan(NamedTuple):
    """Decision of a schedule for one update; the state records it, so that a replayed run is bit-identical."""

    rate: float  # learning rate
    last_step: int  # training ends after this update


class Schedule(Protocol):
    """Learning rate and end of training; consulted before each update. All ranks must get the same plan."""

    def plan(self, step: int, elapsed: float) -> Plan:
        """Plan update number `step`; `elapsed` is the age of the run in seconds, as of the last log line."""


class ConfigSchedule:
    """The schedule of a config: `train.schedule` until train.steps or train.epochs, whichever comes first."""

    def __init__(self, options: TrainConfig, d_model: int, updates: UpdateStream) -> None:
        self.options, self.d_model, self.updates = options, d_model, updates
        self.last_steps: dict[int, int] = {}  # by micro_tokens: a resumed run counts in the plan of its state

    def plan(self, step: int, elapsed: float = 0.0) -> Plan:
        options, updates, micro_tokens = self.options, self.updates, self.updates.micro_tokens
        if micro_tokens not in self.last_steps:
            last_first = reversed(range(math.ceil(options.epochs)))  # so the plans of the first two passes stay cached
            # Half a pass is half the updates of it; the parts of passes are not exact: 10.3 − 10 is more than 0.3.
            parts = (len(updates.plan(n)) * min(1, options.epochs - n) for n in last_first)
            count = max(1, sum(math.ceil(part - 1e-6) for part in parts)) if options.epochs else options.steps
            self.last_steps[micro_tokens] = min(options.steps, count)
        last_step = self.last_steps[micro_tokens]
        return Plan(learning_rate(step, options, self.d_model, last_step), last_step)
