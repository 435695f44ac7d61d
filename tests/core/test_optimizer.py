"""Adam, the learning rate (paper, section 5.3) and the end of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.config import TrainConfig
from qkv.core.optimizer import ConfigSchedule, build_optimizer, learning_rate


@given(st.integers(1, 100_000), st.integers(1, 8000), st.sampled_from([256, 512, 1024]), st.floats(0.1, 3))
def test_equation_3(step: int, warmup: int, d_model: int, factor: float) -> None:
    spec = TrainConfig(schedule="paper", warmup=warmup, learning_rate=factor)
    expected = factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert learning_rate(step, spec, d_model) == pytest.approx(expected, rel=1e-12)
    peak = factor / math.sqrt(d_model * warmup)
    assert learning_rate(warmup, spec, d_model) == pytest.approx(peak, rel=1e-12)
    if step != warmup:
        assert learning_rate(step, spec, d_model) < peak


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_other_schedules_rise_to_the_rate_given(schedule: str) -> None:
    spec = TrainConfig(schedule=schedule, warmup=100, steps=1000, learning_rate=2e-3)
    rates = [learning_rate(step, spec, 512) for step in range(1, 1001)]
    np.testing.assert_allclose(rates[:100], [2e-3 * step / 100 for step in range(1, 101)])
    assert rates[99:] == sorted(rates[99:], reverse=True)
    last = {"inverse_sqrt": 2e-3 * math.sqrt(0.1), "cosine": 0.0, "linear": 0.0, "constant": 2e-3}
    assert rates[-1] == pytest.approx(last[schedule], abs=1e-12)
    half = {"inverse_sqrt": 2e-3 * math.sqrt(100 / 550), "cosine": 1e-3, "linear": 1e-3, "constant": 2e-3}
    assert rates[549] == pytest.approx(half[schedule], abs=1e-12)


def test_wsd_rises_stays_and_falls_to_zero() -> None:
    spec = TrainConfig(schedule="wsd", warmup=100, steps=1000, learning_rate=2e-3)
    rates = [learning_rate(step, spec, 512) for step in range(1, 1001)]
    assert rates[:100] == pytest.approx([2e-3 * step / 100 for step in range(1, 101)])
    assert rates[99:700] == pytest.approx([2e-3] * 601)
    assert rates[699:] == sorted(rates[699:], reverse=True)
    assert rates[774] == pytest.approx(2e-3 * (1 - math.sqrt(75 / 300)))  # a quarter of the way down in time
    assert rates[-1] == 0
    assert learning_rate(1001, spec, 512) == 0  # beyond the end, as after train.steps was lowered


def test_wsd_with_a_long_warm_up_never_rises_after_it() -> None:
    spec = TrainConfig(schedule="wsd", warmup=90, steps=100, learning_rate=1.0)
    rates = [learning_rate(step, spec, 512) for step in range(90, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0


def test_a_schedule_ends_where_training_does_not_where_the_config_does() -> None:
    """`last_step` replaces train.steps; rates reach zero there, and stay zero beyond it."""
    for name in ("cosine", "linear"):
        spec = TrainConfig(schedule=name, warmup=10, steps=1000, learning_rate=1.0)
        assert learning_rate(60, spec, 512, last_step=110) == pytest.approx(0.5)
        assert learning_rate(110, spec, 512, last_step=110) == pytest.approx(0, abs=1e-12)
        assert learning_rate(120, spec, 512, last_step=110) == pytest.approx(0, abs=1e-12)
    spec = TrainConfig(schedule="linear", warmup=100, steps=100, learning_rate=1.0)  # nothing is left after the warm-up
    assert (learning_rate(99, spec, 512), learning_rate(100, spec, 512)) == (0.99, 0.0)
    assert learning_rate(1, TrainConfig(schedule="constant", warmup=0), 512) == 1.0
    assert learning_rate(1, TrainConfig(warmup=0), 512) == 512**-0.5


def test_adam_has_the_numbers_of_the_config() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, TrainConfig(beta1=0.8, beta2=0.7, eps=1e-5))
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"], group["lr"]) == ((0.8, 0.7), 1e-5, 0, 0.0)
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model.parameters()]
    paper = build_optimizer(model, TrainConfig()).param_groups[0]
    assert (paper["betas"], paper["eps"]) == ((0.9, 0.98), 1e-9)


@dataclass
class Epochs:
    """A stream of updates whose epochs have 10, 11, 12 … updates, and half as many with large micro-batches."""

    micro_tokens: int = 100
    planned: list[int] = field(default_factory=list)

    def plan(self, epoch: int) -> list[None]:
        self.planned.append(epoch)
        return [None] * ((10 + epoch) * 100 // self.micro_tokens)


@pytest.mark.parametrize(
    ("epochs", "steps", "last", "halved"),
    [
        *[
            (0.0, 50, 50, 50),
            (1.0, 50, 10, 20),
            (2.0, 50, 21, 42),
            (2.5, 50, 27, 50),
            (0.25, 50, 3, 5),
            (1.1, 50, 12, 23),
        ],
        *[(10.3, 500, 151, 302), (3.0, 20, 20, 20), (1.0, 10, 10, 10)],
    ],
)
def test_training_ends_with_the_steps_or_the_passes(epochs: float, steps: int, last: int, halved: int) -> None:
    stream: Any = Epochs()
    schedule = ConfigSchedule(TrainConfig(epochs=epochs, steps=steps, schedule="linear", warmup=1), 512, stream)
    assert schedule.plan(1).last_step == last
    assert schedule.plan(last) == (0.0, last)
    assert schedule.plan(2, 100.0).rate == pytest.approx(1 - 1 / (last - 1))
    assert stream.planned == [*reversed(range(math.ceil(epochs)))], "counted once, the first last: it stays cached"
    stream.micro_tokens = 50  # a resumed run with other micro-batches has more updates
    assert schedule.plan(1).last_step == halved


def test_a_small_part_of_a_pass_is_one_update() -> None:
    stream: Any = Epochs()
    schedule = ConfigSchedule(TrainConfig(epochs=1e-9, steps=50, schedule="constant", warmup=1), 512, stream)
    assert schedule.plan(1).last_step == 1
