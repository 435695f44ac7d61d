"""The training loop: one step after another, logged, validated, saved, until the config's limit."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from qkv import files
from qkv.data.loader import Step
from qkv.data.store import Prepared
from qkv.errors import QkvError
from qkv.run import Run, load_weights
from qkv.terminal import say
from qkv.train import checkpoint
from qkv.train.average import average
from qkv.train.checkpoint import Progress
from qkv.train.log import Log
from qkv.train.trainer import Outcome, Trainer
from qkv.train.validate import Validation, validate

MOST_SKIPPED = 10  # updates in a row without a finite loss before training gives up


class Interrupted(Exception):
    """Work was asked to stop by a signal, and has stopped in good order."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def fit(run: Run, prepared: Prepared) -> bool:
    """Train to the config's limit, from the newest state in the run folder; False if it was reached long ago."""
    trainer = Trainer(run.config, prepared)
    state = checkpoint.latest(run)
    if state is not None:
        trainer.progress = checkpoint.restore(state, trainer.model, trainer.optimizer, trainer.ema)
    progress, spec = trainer.progress, trainer.spec
    if trainer.done() and run.scores.get("finished") == progress.step:
        limits = "train.steps, train.epochs or train.patience"
        say(f"{run.path} is finished, at step {progress.step:,}: to train on, raise its limit with --set ({limits})")
        return False
    checkpoint.clear_away(run, progress)
    with (
        Log(run.log, steps=spec.steps, after=progress, tensorboard=spec.tensorboard) as log,
        _stop_signals() as asked_to_stop,
    ):
        log.say(trainer.updates.describe(progress.epoch))
        if state is not None:
            log.say(f"going on from step {progress.step:,}")
        _loop(run, trainer, log, asked_to_stop)
        finish(run, trainer, log)
    return True


def _loop(run: Run, trainer: Trainer, log: Log, asked_to_stop: list[int]) -> None:
    """The loop itself: step, log, validate, save."""
    progress, spec = trainer.progress, trainer.spec
    meter = _Meter(progress)
    with closing(trainer.updates.starting(progress.position)) as steps:
        while True:
            if asked_to_stop:
                meter.restart(progress)
                save_state(run, trainer)
                command = f"qkv train --resume --run {run.path}"
                raise Interrupted(
                    asked_to_stop[0], f"stopped at step {progress.step} and saved: go on with `{command}`"
                )
            due = progress.step % spec.validate_every == 0 or trainer.done()
            if due and progress.validated < progress.step:
                result = validate_and_keep(run, trainer)
                meter.restart(progress)
                better = "  best" if progress.best_step == progress.step else ""
                log.say(f"step {progress.step:>7,}  {result}  {meter.clock(progress)}{better}")
                log.write(
                    "valid",
                    progress.step,
                    **result.to_dict(),
                    sample=result.sample,
                    attention_entropy=result.attention_entropy,
                    seconds=progress.seconds,
                )
                save_state(run, trainer)
                meter.restart(progress)  # nor does saving count as training speed
            if trainer.done():
                return
            update = next(steps)
            outcome = trainer.step(update)
            log.advance(progress.step)
            if not outcome.finite:
                _skipped(run, trainer, log, update)
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


def keep_weights(run: Run, name: str, trainer: Trainer) -> None:
    """Write the model's weights, as they are, under a name."""
    about = {"format": "pt", "step": str(trainer.progress.step), "made by": "qkv"}
    files.write_tensors(run.path / "weights" / f"{name}.safetensors", dict(trainer.model.named_parameters()), about)


def validate_and_keep(run: Run, trainer: Trainer) -> Validation:
    """Validate, keep these weights among the last ones, and as the best if they are."""
    progress, spec = trainer.progress, trainer.spec
    with trainer.averaged() as model:
        result = validate(model, trainer.prepared, trainer.config, trainer.device)
        keep_weights(run, f"step-{progress.step:07d}", trainer)
        for old in run.checkpoints()[: -max(1, spec.average)]:
            old.unlink()
        value = result.value(spec.metric)
        if progress.best is None or value > progress.best:
            progress.best, progress.best_step, progress.worse = value, progress.step, 0
            keep_weights(run, "best", trainer)
            best = {"step": progress.step, **result.to_dict()}
            run.write_scores({"best": best, "chosen": "best", "metric": spec.metric})
        else:
            progress.worse += 1
    progress.validated = progress.step
    return result


def save_state(run: Run, trainer: Trainer) -> None:
    checkpoint.save(run, trainer.progress, trainer.model, trainer.optimizer, trainer.ema)


def finish(run: Run, trainer: Trainer, log: Log) -> None:
    """Average the last checkpoints, choose between average and best on the validation set."""
    spec = trainer.spec
    scores = {**run.scores, "chosen": "best", "finished": trainer.progress.step}
    kept = run.checkpoints()[-spec.average :] if spec.average else []
    if len(kept) > 1:
        load_weights(trainer.model, average(kept), kept[-1])
        keep_weights(run, "average", trainer)
        result = validate(trainer.model, trainer.prepared, trainer.config, trainer.device)
        scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
        if trainer.progress.best is None or result.value(spec.metric) > trainer.progress.best:
            scores["chosen"] = "average"
        log.say(f"average of {len(kept)}  {result}")
    run.write_scores(scores)
    log.say(f"using {scores['chosen']} weights by default: {run.path}")


def _skipped(run: Run, trainer: Trainer, log: Log, update: Step) -> None:
    """Tell of an update that was left out; after too many in a row save the batch, as ids and as text, and give up."""
    progress, path = trainer.progress, run.path / "bad-batch.json"
    log.say(f"step {progress.step}: the loss is not finite, update skipped ({progress.skipped} in all)")
    if progress.skipped_in_a_row < MOST_SKIPPED:
        return
    src, tgt = trainer.prepared.tokenizers.src, trainer.prepared.tokenizers.tgt
    rows = [
        {"given": src.decode(s), "predicted": tgt.decode(t), "given_ids": s, "predicted_ids": t}
        for batch in update.micros
        for s, t in zip(batch.inputs[0].tolist(), batch.labels.tolist(), strict=True)
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
