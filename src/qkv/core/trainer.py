"""Training (paper, section 5): one update of the weights, and the loop that repeats it until the schedule ends.

`PlainTrainStep` is the update. `Trainer` counts updates. `fit` is the loop: it logs, validates, keeps the best weights,
saves the state, and stops in good order on a signal.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.core import files
from qkv.core.batches import Batch, Update, UpdateStream
from qkv.core.checkpoint import (
    Clock,
    Progress,
    WeightAverage,
    average_checkpoints,
    clear_away,
    latest_state,
    restore_state,
    save_state,
    start_from,
)
from qkv.core.config import Config, TrainConfig
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World, choose_precision
from qkv.core.errors import Interrupted, QkvError, stop_signals
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
StepHook = Callable[[int, nn.Module], None]  # called after each update with its number; may be a WeightAverage too


# ---- one update ------------------------------------------------------------------------------------------------------


class PlainTrainStep:
    """The update of the paper: teacher forcing, the gradient of the mean loss of a token, Adam.

    Subclasses replay CUDA graphs, divide the weights among ranks, or cut batches that do not fit into memory.
    """

    max_in_flight = 0  # updates that may be started before the outcome of the first one is read

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        options: TrainConfig,
        objective: Objective,
        *,
        hooks: Sequence[StepHook] = (),
        world: World = ALONE,
    ) -> None:
        self.model, self.optimizer, self.options, self.objective = model, optimizer, options, objective
        self.hooks, self.world = hooks, world
        averages: list[Any] = [hook for hook in hooks if isinstance(hook, WeightAverage)]
        self.average: WeightAverage | None = averages[0] if averages else None
        self.device = next(model.parameters()).device
        self.precision = choose_precision(options.precision, self.device)

    def start(self, update: Update, number: int, rate: float) -> Callable[[], Outcome]:
        """Change the weights, unless the loss is not finite; the returned function waits for the outcome.

        The loss is a sum over tokens, divided once by the token count of the whole update, so neither micro-batches nor
        ranks change it, and every rank has the same outcome. Dropout is seeded by step number and rank, so a resumed
        run draws what an uninterrupted one would have drawn.
        """
        torch.manual_seed(self.seed(number))
        sums = self.gradients(update)  # loss, −log p and tokens
        gradients = self.sum_over_ranks(sums)
        tokens = sums[2]
        norm = self.norm(gradients) / tokens
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

    def sum_over_ranks(self, sums: Tensor) -> list[Tensor]:
        """Sum the gradients and `sums` over all ranks, in place; return the gradients."""
        if self.world.size > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:  # this rank had no rows
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.world.sum([*gradients, sums])
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.as_tensor(torch.nn.utils.get_total_norm(gradients))

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def probe(self) -> None:
        """Try the largest micro-batch before the first update, so that a lack of memory shows at once."""

    def padded(self, update: Update) -> list[Batch]:
        """Return the update as padded batches, to be written to a file."""
        return update.micro_batches

    @contextmanager
    def evaluated_model(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[Model]:
        """Give the model with these weights, by default those that are validated; complete on rank 0 only.

        They are the average of the weights, if there is one; its own weights come back afterwards.
        """
        if weights is None and self.average is not None:
            weights = self.average.tensors()
        if weights is None or not self.world.first:
            yield self.model
            return
        own = dict(self.model.named_parameters())
        kept = {name: weight.detach().clone() for name, weight in own.items()}
        load_weights(own, weights, Path("weights"))
        try:
            yield self.model
        finally:
            load_weights(own, kept, Path("weights"))


class Trainer:
    """A model in training: the parts of the training, and the progress that a state records."""

    def __init__(
        self,
        config: Config,
        text: PreparedText,
        step: PlainTrainStep,
        task: Task,
        updates: UpdateStream,
        *,
        schedule: Schedule,
    ) -> None:
        self.config, self.text, self.train_step, self.task, self.updates = config, text, step, task, updates
        self.schedule, self.world, self.model, self.device = schedule, step.world, step.model, step.device
        self.go_on_from(Progress(micro_tokens=updates.micro_tokens))

    def go_on_from(self, progress: Progress) -> None:
        """Continue reading the text at this position, with the micro-batches that the position counts."""
        self.progress = progress
        self.updates.micro_tokens = progress.micro_tokens or self.updates.micro_tokens
        self.planned: dict[int, Plan] = {}  # by the number of the next update

    def restore(self, state: Path) -> None:
        self.go_on_from(restore_state(state, self.train_step))

    def save(self, run: Run) -> None:
        save_state(run, self.progress, self.train_step)

    def plan(self) -> Plan:
        """Return the schedule's plan of the next update."""
        number = self.progress.step + 1
        if number not in self.planned:
            self.planned = {number: self.schedule.plan(number, self.progress.seconds)}
        return self.planned[number]

    def done(self) -> bool:
        return self.progress.step >= self.plan().last_step or 0 < self.config.train.patience <= self.progress.worse

    def start(self, update: Update) -> Callable[[], Outcome]:
        """Start the next update; the returned function waits for its outcome and counts it. Call them in order."""
        progress, plan = self.progress, self.plan()
        progress.step += 1
        progress.learning_rate, progress.last_step = plan
        read = self.train_step.start(update, progress.step, plan.rate)
        progress.epoch, progress.update = update.after

        def count() -> Outcome:
            outcome = read()
            progress.skipped += not outcome.finite
            progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1
            progress.tokens += outcome.tokens
            return outcome

        return count

    def step(self, update: Update) -> Outcome:
        """Make one update and wait for its outcome."""
        return self.start(update)()


# ---- the loop --------------------------------------------------------------------------------------------------------


def fit(run: Run, trainer: Trainer, sinks: Sequence[LogSink] = ()) -> bool:
    """Train from the newest state in the run folder until the schedule ends; False if it has ended before."""
    world = trainer.world
    loop = Loop(run, trainer, [JsonlLog(run.log), *sinks] if world.first else [])
    state = world.broadcast(str(latest_state(run) or ""))
    if state:
        trainer.restore(Path(state))
    elif run.start.exists():
        start_from(run.start, trainer.train_step)
    progress = trainer.progress
    if world.broadcast("finished" if trainer.done() and run.scores.get("finished") == progress.step else ""):
        remedy = "raise its limit with --set (train.steps, train.epochs or train.patience)"
        loop.say(f"{run.path} is finished, at step {progress.step:,}: to train on, {remedy}")
        return False
    if world.first:
        clear_away(run, progress)
    loop.log("start", last_step=trainer.plan().last_step, validated=progress.validated)
    with stop_signals(impatient=world.size == 1) as received:
        loop.say(trainer.updates.describe(progress.epoch))
        if state:
            loop.say(f"going on from step {progress.step:,}")
        elif run.start.exists():
            with trainer.train_step.evaluated_model() as model:
                if world.first:
                    result = trainer.task.validate(model, trainer.text, trainer.config, trainer.device)
                    loop.say(f"as it comes from {run.about['start']}: {result}")
        trainer.train_step.probe()
        loop.run_to_the_end(received)
        if world.first:
            loop.finish()
        world.broadcast()
    return True


class Loop:
    """One training in a run folder: updates in flight, logging, validation, the best weights and the state."""

    def __init__(self, run: Run, trainer: Trainer, sinks: Sequence[LogSink]) -> None:
        self.run, self.trainer, self.sinks = run, trainer, sinks
        self.in_flight: deque[tuple[int, Update, Callable[[], Outcome]]] = deque()

    def log(self, kind: str, **values: Any) -> None:
        for sink in self.sinks:
            sink.event(kind, self.trainer.progress.step, values)

    def say(self, text: str) -> None:
        self.log("message", text=text)

    def run_to_the_end(self, received: list[int]) -> None:
        """Update, log, validate and save; all ranks stop at the same step if one of them receives a signal."""
        trainer, progress, options = self.trainer, self.trainer.progress, self.trainer.config.train
        self.clock = clock = Clock(progress)
        with closing(trainer.updates.starting(progress.position)) as updates:
            while True:
                if number := trainer.world.largest(received[0] if received else 0):
                    self.settle()
                    clock.read()
                    trainer.save(self.run)
                    command = f"qkv train --resume --run {self.run.path}"
                    message = f"stopped at step {progress.step} and saved: go on with `{command}`"
                    raise Interrupted(number, message if trainer.world.first else "")
                due = progress.step % options.validate_every == 0 or trainer.done()
                if due and progress.validated < progress.step:
                    self.settle()
                    clock.read()
                    self.validate()
                if trainer.done():
                    return
                update = clock.wait_for(updates)
                self.in_flight.append((progress.step + 1, update, trainer.start(update)))
                logged = self.sinks and progress.step % options.log_every == 0
                outcome = self.settle(but=0 if logged else trainer.train_step.max_in_flight)
                self.log("progress")
                if logged and outcome is not None:
                    speed, stalled = clock.read()
                    found = {"loss": outcome.loss, "nll": outcome.nll, "norm": outcome.gradient_norm}
                    rates = {"learning_rate": progress.learning_rate, "tokens": progress.tokens}
                    times = {"tokens_per_second": speed, "stalled": stalled, "seconds": progress.seconds}
                    self.log("train", epoch=progress.epoch, **found, **rates, skipped=progress.skipped, **times)

    def settle(self, but: int = 0) -> Outcome | None:
        """Wait for all updates in flight but the last few; return the outcome of the last one waited for.

        Report skipped updates; after too many in a row write the batch, as ids and as text, and give up.
        """
        outcome, progress, path = None, self.trainer.progress, self.run.path / "bad-batch.json"
        while len(self.in_flight) > but:
            number, update, read = self.in_flight.popleft()
            outcome = read()
            if not outcome.finite:
                self.say(f"step {number}: the loss is not finite, update skipped ({progress.skipped} in all)")
            if progress.skipped_in_a_row >= MAX_SKIPPED:
                if self.trainer.world.first:
                    self.write_batch(path, update, number)
                raise QkvError(
                    f"the loss was not finite in {MAX_SKIPPED} updates in a row, up to step {number}: look at {path}; "
                    f"a lower train.learning_rate, a longer train.warmup, train.clip=1 or train.precision=fp32 may help"
                )
        return outcome

    def write_batch(self, path: Path, update: Update, number: int) -> None:
        src, tgt = self.trainer.text.tokenizers.src, self.trainer.text.tokenizers.tgt
        rows = [
            {"given": src.decode(s), "predicted": tgt.decode(t), "given_ids": s, "predicted_ids": t}
            for batch in self.trainer.train_step.padded(update)
            for s, t in zip(batch.inputs[0].tolist(), batch.labels.tolist(), strict=True)
        ]
        files.write_text(path, json.dumps({"step": number, "rows": rows}, ensure_ascii=False, indent=1) + "\n")

    def validate(self) -> None:
        """Validate, keep the weights among the last ones, and as the best ones if they are; then save the state.

        Rank 0 does it, and the other ranks learn whether training goes on.
        """
        trainer, progress, options = self.trainer, self.trainer.progress, self.trainer.config.train
        if trainer.world.size > 1:  # torchrun may kill its processes before a validation ends
            trainer.save(self.run)
        result = None
        with trainer.train_step.evaluated_model() as model:
            if trainer.world.first:
                result = trainer.task.validate(model, trainer.text, trainer.config, trainer.device)
                self.keep_weights(f"step-{progress.step:07d}", model)
                for old in self.run.checkpoints()[: -max(1, options.average)]:
                    old.unlink()
                value = result.value(options.metric)
                if progress.best is None or value > progress.best:
                    progress.best, progress.best_step, progress.worse = value, progress.step, 0
                    self.keep_weights("best", model)
                    best = {"step": progress.step, **result.to_dict()}
                    self.run.write_scores({"best": best, "chosen": "best", "metric": options.metric})
                else:
                    progress.worse += 1
        progress.validated = progress.step
        progress.worse = int(trainer.world.broadcast(str(progress.worse)))  # decides whether training goes on
        self.clock.read(training=False)
        if result is not None:
            minutes, seconds = divmod(int(progress.seconds), 60)
            better = "  best" if progress.best_step == progress.step else ""
            self.say(f"step {progress.step:>7,}  {result}  {minutes}:{seconds:02d}{better}")
            measured = {**result.to_dict(), "sample": result.sample, **result.details}
            times = {"seconds": progress.seconds, "training_seconds": progress.training_seconds}
            self.log("valid", **measured, tokens=progress.tokens, **times)
        trainer.save(self.run)
        self.clock.read(training=False)  # saving does not count as training either

    def keep_weights(self, name: str, model: nn.Module) -> None:
        path, step = self.run.path / "weights" / f"{name}.safetensors", str(self.trainer.progress.step)
        files.write_tensors(path, dict(model.named_parameters()), {"format": "pt", "step": step, "made by": "qkv"})

    def finish(self) -> None:
        """Average the last checkpoints, and use the average by default if it validates better than the best weights."""
        trainer, options = self.trainer, self.trainer.config.train
        scores = {**self.run.scores, "chosen": "best", "finished": trainer.progress.step}
        kept = self.run.checkpoints()[-options.average :] if options.average else []
        if len(kept) > 1:
            with trainer.train_step.evaluated_model(average_checkpoints(kept)) as model:
                self.keep_weights("average", model)
                result = trainer.task.validate(model, trainer.text, trainer.config, trainer.device)
            scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
            if trainer.progress.best is None or result.value(options.metric) > trainer.progress.best:
                scores["chosen"] = "average"
            self.say(f"average of {len(kept)}  {result}")
        self.run.write_scores(scores)
        self.say(f"using {scores['chosen']} weights by default: {self.run.path}")
