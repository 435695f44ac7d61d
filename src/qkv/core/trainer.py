"""Training (paper, section 5): one update of the weights, and the loop that repeats it until the schedule ends.

`PlainTrainStep` is the update. `Trainer.fit` is the loop: it logs, validates, keeps the best weights, saves the state,
and stops in good order on a signal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qkv.core.batches import Batch, Update, UpdateStream
from qkv.core.checkpoint import Progress, average_checkpoints, clear_away, latest_state, restore_state, save_state
from qkv.core.config import Config, TrainConfig
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World, choose_precision
from qkv.core.errors import Interrupted, QkvError
from qkv.core.optimizer import Plan, Schedule
from qkv.core.run import JsonlLog, LogSink, Run, load_weights
from qkv.core.transformer import Model
from qkv.core.validation import Task

MAX_SKIPPED = 10  # updates in a row without a finite loss before training gives up
RANK_SEED = 0x9E3779B1  # 2³² over the golden ratio: far apart in the 32 bits that a CPU's generator uses


class Outcome(NamedTuple):
    """Result of one update: loss and −log p for each token, gradient norm before clipping, number of tokens."""

    loss: float
    nll: float
    gradient_norm: float
    tokens: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


Objective = Callable[[Any, Batch], tuple[Tensor, Tensor]]  # model, batch → loss and −log p, both summed over tokens
StepHook = Callable[[int, nn.Module], None]  # called after each update with its number


@runtime_checkable
class WeightAverage(Protocol):
    """A StepHook with weights that are validated and kept in place of the trained ones, e.g. their moving average."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the average itself, by parameter name; a state is loaded by copying into these tensors."""


# ---- one update ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PlainTrainStep:
    """The update of the paper: teacher forcing, the gradient of the mean loss of a token, Adam.

    Subclasses replay CUDA graphs, divide the weights among ranks, or cut batches that do not fit into memory.
    """

    max_in_flight = 0  # updates that may be started before the outcome of the first one is read

    model: Model
    optimizer: torch.optim.Optimizer
    options: TrainConfig
    objective: Objective
    hooks: Sequence[StepHook] = ()
    world: World = ALONE

    def __post_init__(self) -> None:
        hooks: Sequence[Any] = self.hooks
        self.average: WeightAverage | None = next((hook for hook in hooks if isinstance(hook, WeightAverage)), None)
        self.device = next(self.model.parameters()).device
        self.precision = choose_precision(self.options.precision, self.device)

    def start(self, update: Update, number: int, rate: float) -> Callable[[], Outcome]:
        """Change the weights, unless the loss is not finite; the returned function waits for the outcome.

        The loss is a sum over tokens, divided once by the token count of the whole update, so neither micro-batches nor
        ranks change it, and every rank has the same outcome. Dropout is seeded by step number and rank, so a resumed
        run draws what an uninterrupted one would have drawn.
        """
        torch.manual_seed(self.seed(number))
        sums = self.gradients(update)  # loss, −log p and tokens
        gradients, norm = self.sum_over_ranks(sums)
        tokens = sums[2]
        norm /= tokens
        clipped = (self.options.clip / (norm + 1e-6)).clamp(max=1.0) if self.options.clip else torch.ones_like(norm)
        torch._foreach_mul_(gradients, clipped / tokens)
        loss, nll, count, size = torch.cat([sums, norm[None]]).tolist()  # the only wait for the device
        outcome = Outcome(loss / count, nll / count, size, int(count))
        if outcome.finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            for hook in self.hooks:
                hook(number, self.model)
        self.zero_gradients()
        return lambda: outcome

    def seed(self, number: int) -> int:
        """Return the seed of everything random in update `number` on this rank."""
        return self.options.seed * 1_000_003 + number + self.world.rank * RANK_SEED

    def gradients(self, update: Update) -> Tensor:
        """Add the gradient of this rank's micro-batches to `parameter.grad`; return loss, −log p and tokens (3,)."""
        self.model.train()
        sums = torch.zeros(2, device=self.device)
        for batch in update.micro_batches:
            sums += self.forward_backward(batch)
        return torch.cat([sums, sums.new_tensor([update.tokens])])

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of one batch; return loss and −log p (2,), summed over its tokens."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            loss, nll = self.objective(self.model, batch)
        loss.backward()
        return torch.stack([loss.detach(), nll])

    def sum_over_ranks(self, sums: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sum the gradients and `sums` over all ranks, in place; return the gradients and their norm."""
        if self.world.size > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:  # this rank had no rows
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.world.sum([*gradients, sums])
        return gradients, torch.as_tensor(torch.nn.utils.get_total_norm(gradients))

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def evaluated_model(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[Model]:
        """Give the model with these weights, by default those that are validated; complete on rank 0 only.

        They are the average, if there is one. Its own weights come back afterwards, dropout with the next update.
        """
        if weights is None and self.average is not None:
            weights = self.average.tensors()
        own = dict(self.model.named_parameters()) if weights else {}
        kept = {name: weight.detach().clone() for name, weight in own.items()}
        load_weights(own, weights or {}, Path("weights"))
        try:
            yield self.model.eval()
        finally:
            load_weights(own, kept, Path("weights"))


@dataclass
class Trainer:
    """A training: its parts, its progress, and the loop that updates, logs, validates and saves."""

    config: Config
    text: PreparedText
    train_step: PlainTrainStep
    task: Task
    updates: UpdateStream
    schedule: Schedule
    sinks: Sequence[LogSink] = ()  # of rank 0

    def __post_init__(self) -> None:
        self.model, self.device, self.world = self.train_step.model, self.train_step.device, self.train_step.world
        self.in_flight: deque[tuple[int, Update, Callable[[], Outcome]]] = deque()
        self.go_on_from(Progress(micro_tokens=self.updates.micro_tokens))

    def go_on_from(self, progress: Progress) -> None:
        """Resume at this position in the text, with its micro-batch size, which the plan of an epoch depends on."""
        self.progress = progress
        self.updates.micro_tokens = progress.micro_tokens or self.updates.micro_tokens
        self.planned: dict[int, Plan] = {}  # by the number of the next update

    def plan(self) -> Plan:
        """Return the schedule's plan of the next update."""
        number = self.progress.step + 1
        if number not in self.planned:
            self.planned = {number: self.schedule.plan(number, self.progress.seconds)}
        return self.planned[number]

    def done(self) -> bool:
        return self.progress.step >= self.plan().last_step or 0 < self.config.train.patience <= self.progress.worse

    def start(self, update: Update) -> None:
        """Start the next update; `settle` waits for its outcome."""
        progress, plan = self.progress, self.plan()
        progress.step += 1
        progress.learning_rate, progress.last_step = plan
        self.in_flight.append((progress.step, update, self.train_step.start(update, progress.step, plan.rate)))
        progress.epoch, progress.update = update.after

    def settle(self, but: int = 0) -> None:
        """Wait for all updates in flight but the last few, and count them; give up after too many skipped in a row."""
        progress = self.progress
        while len(self.in_flight) > but:
            number, update, read = self.in_flight.popleft()
            self.outcome = outcome = read()  # the last one is logged
            progress.tokens += outcome.tokens
            progress.skipped += not outcome.finite
            progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1
            if not outcome.finite:
                self.say(f"step {number}: the loss is not finite, update skipped ({progress.skipped} in all)")
            if progress.skipped_in_a_row >= MAX_SKIPPED:
                self.log("given_up", number=number, update=update)
                raise QkvError(
                    f"the loss was not finite in {MAX_SKIPPED} updates in a row, up to step {number}: "
                    f"a lower train.learning_rate, a longer train.warmup, train.clip=1 or train.precision=fp32 may help"
                )

    def step(self, update: Update) -> Outcome:
        """Make one update and wait for its outcome."""
        self.start(update)
        self.settle()
        return self.outcome

    def fit(self, run: Run, sinks: Sequence[LogSink] = (), signals: Sequence[int] = ()) -> bool:
        """Train from the newest state in the run folder until the schedule ends; False if it has ended before.

        All ranks save and stop at the same step once `signals` holds one on any of them.
        """
        world, options = self.world, self.config.train
        self.sinks = [JsonlLog(run.log), *sinks] if world.first else []
        state = world.broadcast(str(latest_state(run) or ""))
        if state:
            self.go_on_from(restore_state(Path(state), self.train_step))
        progress = self.progress
        if world.broadcast("finished" if self.done() and run.scores.get("finished") == progress.step else ""):
            remedy = "raise its limit with --set (train.steps, train.epochs or train.patience)"
            self.say(f"{run.path} is finished, at step {progress.step:,}: to train on, {remedy}")
            return False
        if world.first:
            clear_away(run, progress)
        self.log("start", last_step=self.plan().last_step, validated=progress.validated)
        with closing(self.updates.starting(progress.position)) as updates:
            self.say(self.updates.describe(progress.epoch))
            if state:
                self.say(f"going on from step {progress.step:,}")
            self.counted_until, logged, stalled = time.perf_counter(), replace(progress), 0.0
            while True:
                stop = world.largest(signals[0] if signals else 0)
                due = progress.step % options.validate_every == 0 or self.done() or progress.validating
                if stop or due:
                    self.settle()
                    self.count_seconds()
                if stop:
                    save_state(run, progress, self.train_step)
                    command = f"qkv train --resume --run {run.path}"
                    message = f"stopped at step {progress.step} and saved: go on with `{command}`"
                    raise Interrupted(stop, message if world.first else "")
                if due and progress.validated < progress.step:
                    self.validate(run)
                if self.done():
                    break
                waiting = time.perf_counter()
                update = next(updates)
                stalled += time.perf_counter() - waiting
                self.start(update)
                log_due = self.sinks and progress.step % options.log_every == 0
                self.settle(but=0 if log_due else self.train_step.max_in_flight)
                self.log("progress")
                if log_due:
                    self.count_seconds()
                    seconds = max(1e-9, progress.training_seconds - logged.training_seconds)
                    speed, outcome = (progress.tokens - logged.tokens) / seconds, self.outcome
                    found = {"loss": outcome.loss, "nll": outcome.nll, "norm": outcome.gradient_norm}
                    rates = {"learning_rate": progress.learning_rate, "tokens": progress.tokens}
                    times = {"tokens_per_second": speed, "stalled": stalled / seconds, "seconds": progress.seconds}
                    self.log("train", epoch=progress.epoch, **found, **rates, skipped=progress.skipped, **times)
                    logged, stalled = replace(progress), 0.0
            if world.first:
                self.finish(run)
            world.broadcast()
        return True

    def validate(self, run: Run) -> None:
        """Validate, keep the weights among the last ones, and as the best ones if they are; then save the state.

        Rank 0 does it, and the other ranks learn whether training goes on.
        """
        progress, options, result = self.progress, self.config.train, None
        progress.validating = True
        save_state(run, progress, self.train_step)  # after a kill, the same weights are validated again
        with self.train_step.evaluated_model() as model:
            if self.world.first:
                result = self.task.validate(model, self.text, self.config, self.device)
                run.keep_weights(f"step-{progress.step:07d}", model, progress.step)
                for old in run.checkpoints()[: -max(1, options.average)]:
                    old.unlink()
                value = result.value(options.metric)
                progress.worse += 1
                if progress.best is None or value > progress.best:
                    progress.best, progress.best_step, progress.worse = value, progress.step, 0
                    run.keep_weights("best", model, progress.step)
                    best = {"step": progress.step, **result.to_dict()}
                    run.write_scores({"best": best, "chosen": "best", "metric": options.metric})
        progress.validated, progress.validating = progress.step, False
        progress.worse = int(self.world.broadcast(str(progress.worse)))  # decides whether training goes on
        self.count_seconds(training=False)
        if result is not None:
            minutes, seconds = divmod(int(progress.seconds), 60)
            better = "  best" if progress.best_step == progress.step else ""
            self.say(f"step {progress.step:>7,}  {result}  {minutes}:{seconds:02d}{better}")
            measured = {**result.to_dict(), "sample": result.sample, **result.details}
            times = {"seconds": progress.seconds, "training_seconds": progress.training_seconds}
            self.log("valid", **measured, tokens=progress.tokens, **times)
        save_state(run, progress, self.train_step)
        self.count_seconds(training=False)  # saving does not count as training either

    def finish(self, run: Run) -> None:
        """Average the last checkpoints, and use the average by default if it validates better than the best weights."""
        options, progress = self.config.train, self.progress
        scores = {**run.scores, "chosen": "best", "finished": progress.step}
        kept = run.checkpoints()[-options.average :] if options.average else []
        if len(kept) > 1:
            with self.train_step.evaluated_model(average_checkpoints(kept)) as model:
                run.keep_weights("average", model, progress.step)
                result = self.task.validate(model, self.text, self.config, self.device)
            scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
            if progress.best is None or result.value(options.metric) > progress.best:
                scores["chosen"] = "average"
            self.say(f"average of {len(kept)}  {result}")
        run.write_scores(scores)
        self.say(f"using {scores['chosen']} weights by default: {run.path}")

    def count_seconds(self, training: bool = True) -> None:
        """Count the seconds since the last call: as training, or as validating and saving."""
        now = time.perf_counter()
        seconds, self.counted_until = now - self.counted_until, now
        self.progress.seconds += seconds
        self.progress.training_seconds += seconds if training else 0.0

    def log(self, kind: str, **values: Any) -> None:
        for sink in self.sinks:
            sink.event(kind, self.progress.step, values)

    def say(self, text: str) -> None:
        self.log("message", text=text)
