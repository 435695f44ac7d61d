"""Training, from a config to a run folder: teacher forcing, one optimiser step after another (paper, section 5)."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch

from qkv import files
from qkv.data.loader import Position, Step, Updates
from qkv.data.store import Prepared
from qkv.device import choose_device, choose_precision
from qkv.errors import QkvError
from qkv.models.transformer import Transformer, build
from qkv.run import Run, load_weights
from qkv.train import checkpoint, optim
from qkv.train.average import average
from qkv.train.checkpoint import Progress
from qkv.train.log import Log
from qkv.train.loss import smoothed_loss
from qkv.train.progress import say
from qkv.train.validate import Validation, validate

MOST_SKIPPED = 10  # updates in a row without a finite loss before training gives up


class Interrupted(Exception):
    """Work was asked to stop by a signal, and has stopped in good order."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Outcome(NamedTuple):
    """What one step came to: loss and −log p for each token, and the norm of the gradient before clipping."""

    loss: float
    nll: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Trainer:
    """A model in training: everything that a step changes, and nothing else."""

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self.run, self.prepared = run, prepared
        self.config = run.config
        self.spec = spec = run.config.train
        self.device = choose_device(spec.device)
        self.precision = choose_precision(spec.precision, self.device)
        torch.manual_seed(spec.seed)
        tokenizers = prepared.tokenizers
        self.model: Transformer = build(self.config.model, tokenizers.src.size, tokenizers.tgt.size).to(self.device)
        self.optimizer = optim.build(self.model, spec)
        self.ema = optim.Ema(self.model, spec.ema) if spec.ema else None
        self.progress = Progress()
        self.updates = Updates(
            prepared.train,
            tokenizers,
            tokens=spec.tokens_per_step,
            micro_tokens=spec.micro_tokens,
            dropout=self.config.tokenizer.dropout,
            seed=spec.seed,
            device=self.device,
        )
        self.last = self._last_position()

    def _last_position(self) -> Position | None:
        """Where `train.epochs` ends; half a pass is half the updates of it."""
        whole, part = divmod(self.spec.epochs, 1)
        update = math.ceil(part * len(self.updates.plan(int(whole)))) if part else 0
        return Position(int(whole), update) if self.spec.epochs else None

    def done(self) -> bool:
        progress, spec = self.progress, self.spec
        return (
            progress.step >= spec.steps
            or (self.last is not None and progress.position >= self.last)
            or 0 < spec.patience <= progress.worse
        )

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, update: Step) -> Outcome:
        """One update of the weights, left out when the loss is not finite.

        The loss is a sum over tokens, divided once by the count of the whole update; micro-batches cannot change it.
        Dropout is seeded by the step number, so a resumed run draws what an unbroken one would have drawn.
        """
        progress = self.progress
        progress.step += 1
        torch.manual_seed(self.spec.seed * 1_000_003 + progress.step)
        outcome = self._backward(update)
        if outcome.finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.model, progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        progress.skipped += not outcome.finite
        progress.skipped_in_a_row = 0 if outcome.finite else progress.skipped_in_a_row + 1
        progress.epoch, progress.update = update.after
        progress.tokens += update.tokens
        return outcome

    def learning_rate(self) -> float:
        return optim.learning_rate(self.progress.step, self.spec, self.config.model.d_model)

    def _backward(self, update: Step) -> Outcome:
        """The gradient of the mean loss over all tokens of the update, clipped if the config says so."""
        self.model.train()
        loss = nll = torch.zeros((), device=self.device)
        for batch in update.micros:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                hidden = self.model.hidden(batch.source, batch.lengths, batch.target)
                part, part_nll = smoothed_loss(
                    hidden,
                    self.model.output.weight,
                    batch.labels,
                    smoothing=self.spec.label_smoothing,
                    pad=self.prepared.tokenizers.tgt.pad,
                )
            (part / update.tokens).backward()
            loss, nll = loss + part.detach(), nll + part_nll
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip or math.inf)
        return Outcome(float(loss) / update.tokens, float(nll) / update.tokens, float(norm))

    # ---- saving ------------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[Transformer]:
        """The model as it will be used: with the moving average of the weights, where there is one."""
        if self.ema is None:
            yield self.model
            return
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        load_weights(self.model, self.ema.tensors(), Path("ema"))
        try:
            yield self.model
        finally:
            load_weights(self.model, own, Path("weights"))

    def keep_weights(self, name: str, model: torch.nn.Module) -> None:
        about = {"format": "pt", "step": str(self.progress.step), "made by": "qkv"}
        files.write_tensors(self.run.path / "weights" / f"{name}.safetensors", dict(model.named_parameters()), about)

    def save_state(self) -> None:
        checkpoint.save(self.run, self.progress, self.model, self.optimizer, self.ema)

    def validate(self) -> Validation:
        """Validate, keep these weights among the last ones, and as the best if they are."""
        progress = self.progress
        with self.averaged() as model:
            result = validate(model, self.prepared, self.config, self.device)
            self.keep_weights(f"step-{progress.step:07d}", model)
            for old in self.run.checkpoints()[: -max(1, self.spec.average)]:
                old.unlink()
            value = result.value(self.spec.metric)
            if progress.best is None or value > progress.best:
                progress.best, progress.best_step, progress.worse = value, progress.step, 0
                self.keep_weights("best", model)
                best = {"step": progress.step, **result.to_dict()}
                self.run.write_scores({"best": best, "chosen": "best", "metric": self.spec.metric})
            else:
                progress.worse += 1
        progress.validated = progress.step
        return result


def fit(run: Run, prepared: Prepared) -> bool:
    """Train to the config's limit, from the newest state in the run folder; False if it was reached long ago."""
    trainer = Trainer(run, prepared)
    state = checkpoint.latest(run)
    if state is not None:
        trainer.progress = checkpoint.restore(state, trainer.model, trainer.optimizer, trainer.ema)
    progress, spec = trainer.progress, trainer.spec
    if trainer.done() and run.scores.get("finished") == progress.step:
        say(f"{run.path} is finished, at step {progress.step:,}: to train on, raise its limit (--set train.steps=…)")
        return False
    checkpoint.clear_away(run, progress)
    with (
        Log(run.log, steps=spec.steps, after=progress, tensorboard=spec.tensorboard) as log,
        _stop_signals() as asked_to_stop,
    ):
        if state is not None:
            log.say(f"going on from step {progress.step:,}")
        _loop(trainer, log, asked_to_stop)
        finish(trainer, log)
    return True


def _loop(trainer: Trainer, log: Log, asked_to_stop: list[int]) -> None:
    """The loop itself: step, log, validate, save."""
    progress, spec = trainer.progress, trainer.spec
    meter = _Meter(progress)
    ahead = cast(Generator[Step, None, None], trainer.updates.starting(progress.position))
    with closing(ahead) as steps:
        while True:
            if asked_to_stop:
                meter.restart(progress)
                trainer.save_state()
                command = f"qkv train --resume --run {trainer.run.path}"
                raise Interrupted(
                    asked_to_stop[0], f"stopped at step {progress.step} and saved: go on with `{command}`"
                )
            due = progress.step % spec.validate_every == 0 or trainer.done()
            if due and progress.validated < progress.step:
                result = trainer.validate()
                meter.restart(progress)
                better = "  best" if progress.best_step == progress.step else ""
                log.say(f"step {progress.step:>7,}  {result}  {meter.clock(progress)}{better}")
                log.write("valid", progress.step, **result.to_dict(), sample=result.sample, seconds=progress.seconds)
                trainer.save_state()
            if trainer.done():
                return
            update = next(steps)
            outcome = trainer.step(update)
            log.advance(progress.step)
            if not outcome.finite:
                _skipped(trainer, log, update)
            if progress.step % spec.log_every == 0:
                _log_step(trainer, log, outcome, meter.read(progress))


def _log_step(trainer: Trainer, log: Log, outcome: Outcome, speed: float) -> None:
    progress = trainer.progress
    log.write(
        "train",
        progress.step,
        epoch=progress.epoch,
        **outcome._asdict(),
        learning_rate=trainer.learning_rate(),
        tokens=progress.tokens,
        skipped=progress.skipped,
        tokens_per_second=speed,
        seconds=progress.seconds,
    )


def finish(trainer: Trainer, log: Log) -> None:
    """Average the last checkpoints, choose between average and best on the validation set."""
    run, spec = trainer.run, trainer.spec
    scores = {**run.scores, "chosen": "best", "finished": trainer.progress.step}
    kept = run.checkpoints()[-spec.average :] if spec.average else []
    if len(kept) > 1:
        load_weights(trainer.model, average(kept), kept[-1])
        trainer.keep_weights("average", trainer.model)
        result = validate(trainer.model, trainer.prepared, trainer.config, trainer.device)
        scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
        if trainer.progress.best is None or result.value(spec.metric) > trainer.progress.best:
            scores["chosen"] = "average"
        log.say(f"average of {len(kept)}  {result}")
    run.write_scores(scores)
    log.say(f"using {scores['chosen']} weights by default: {run.path}")


def _skipped(trainer: Trainer, log: Log, update: Step) -> None:
    """Tell of an update that was left out; after too many in a row save the batch, as ids and as text, and give up."""
    progress, path = trainer.progress, trainer.run.path / "bad-batch.json"
    log.say(f"step {progress.step}: the loss is not finite, update skipped ({progress.skipped} in all)")
    if progress.skipped_in_a_row < MOST_SKIPPED:
        return
    src, tgt = trainer.prepared.tokenizers.src, trainer.prepared.tokenizers.tgt
    rows = [
        {"source": src.decode(s), "target": tgt.decode(t), "source_ids": s, "target_ids": t}
        for batch in update.micros
        for s, t in zip(batch.source.tolist(), batch.labels.tolist(), strict=True)
    ]
    bad = {"step": progress.step, "rows": rows}
    files.write_text(path, json.dumps(bad, ensure_ascii=False, indent=1) + "\n")
    raise QkvError(
        f"the loss was not finite in {MOST_SKIPPED} updates in a row, up to step {progress.step}: look at {path}; "
        f"a lower train.learning_rate, a longer train.warmup, train.clip=1 or train.precision=fp32 may help"
    )


class _Meter:
    """Seconds spent, and tokens a second since the last reading; validation does not count as training speed."""

    def __init__(self, progress: Progress) -> None:
        self.since, self.tokens = time.perf_counter(), progress.tokens

    def read(self, progress: Progress) -> float:
        tokens, since = self.tokens, self.since
        self.restart(progress)
        return (progress.tokens - tokens) / max(1e-9, self.since - since)

    def restart(self, progress: Progress) -> None:
        now = time.perf_counter()
        progress.seconds += now - self.since
        self.since, self.tokens = now, progress.tokens

    def clock(self, progress: Progress) -> str:
        minutes, seconds = divmod(int(progress.seconds), 60)
        return f"{minutes}:{seconds:02d}"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one is obeyed at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def remember(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
