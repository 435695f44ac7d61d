"""The training loop: one step after another, logged, validated, saved, until the config's limit."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

from qkv.console import say
from qkv.core import files
from qkv.core.batches import Update
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError
from qkv.engines.cuda_training.cuda_trainer import make_trainer
from qkv.models.base import Model
from qkv.run import Run, load_weights
from qkv.train import checkpoint
from qkv.train.average import average
from qkv.train.checkpoint import Progress
from qkv.train.log import Log
from qkv.train.trainer import Outcome, Trainer
from qkv.train.validate import Validation, validate
from qkv.training.distributed import ALONE, World

MOST_SKIPPED = 10  # updates in a row without a finite loss before training gives up


class Interrupted(Exception):
    """Work was asked to stop by a signal, and has stopped in good order."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def fit(run: Run, prepared: PreparedText, world: World = ALONE) -> bool:
    """Train to the config's limit, from the newest state in the run folder; False if it was reached long ago."""
    trainer = make_trainer(run.config, prepared, world)
    state = world.tell(str(checkpoint.latest(run) or ""))
    if state:
        trainer.go_on_from(checkpoint.restore(Path(state), trainer.model, trainer.optimizer, trainer.ema))
    elif run.start.exists():
        checkpoint.begin_with(run.start, trainer.model, trainer.ema)
    progress = trainer.progress
    if world.tell("finished" if trainer.done() and run.scores.get("finished") == progress.step else ""):
        if world.first:
            how = "raise its limit with --set (train.steps, train.epochs or train.patience)"
            say(f"{run.path} is finished, at step {progress.step:,}: to train on, {how}")
        return False
    if world.first:
        checkpoint.clear_away(run, progress)
    with _logging(run, trainer) as log, _stop_signals(impatient=world.size == 1) as asked_to_stop:
        if log is not None:
            log.say(trainer.updates.describe(progress.epoch))
            if state:
                log.say(f"going on from step {progress.step:,}")
        if not state and run.start.exists():
            with trainer.averaged() as model:
                if log is not None:
                    result = validate(model, prepared, trainer.config, trainer.device)
                    log.say(f"as it comes from {run.about['start']}: {result}")
        if trainer.device.type == "cuda" and not trainer.sharded:
            trainer.probe()
        _loop(run, trainer, log, asked_to_stop)
        if log is not None:
            finish(run, trainer, log)
        world.tell()
    return True


def _logging(run: Run, trainer: Trainer) -> AbstractContextManager[Log | None]:
    """The log, which rank 0 alone writes and says."""
    spec = trainer.spec
    if not trainer.world.first:
        return nullcontext()
    return Log(run.log, steps=spec.steps, after=trainer.progress, tensorboard=spec.tensorboard)


def _loop(run: Run, trainer: Trainer, log: Log | None, asked_to_stop: list[int]) -> None:
    """The loop itself: step, log, validate, save; all ranks stop at the same step if one of them is asked to."""
    progress, spec = trainer.progress, trainer.spec
    meter, under_way = _Meter(progress), _UnderWay(run, trainer, log)
    with closing(trainer.updates.starting(progress.position)) as steps:
        while True:
            if number := trainer.world.most(asked_to_stop[0] if asked_to_stop else 0):
                under_way.settle()
                meter.trained(progress)
                save_state(run, trainer)
                command = f"qkv train --resume --run {run.path}"
                words = f"stopped at step {progress.step} and saved: go on with `{command}`"
                raise Interrupted(number, words if log is not None else "")
            due = progress.step % spec.validate_every == 0 or trainer.done()
            if due and progress.validated < progress.step:
                under_way.settle()
                meter.trained(progress)
                _validation(run, trainer, log, meter)
            if trainer.done():
                return
            update = meter.wait_for(steps)
            under_way.add(update, trainer.start(update))
            logged = log is not None and progress.step % spec.log_every == 0
            outcome = under_way.settle(but=0 if logged else trainer.lag)
            if log is not None:
                log.advance(progress.step)
                if logged and outcome is not None:
                    _log_step(trainer, log, outcome, meter)


class _UnderWay:
    """Steps that have been started, and what is to be done about what they come to."""

    def __init__(self, run: Run, trainer: Trainer, log: Log | None) -> None:
        self.run, self.trainer, self.log = run, trainer, log
        self.steps: deque[tuple[int, Update, Callable[[], Outcome]]] = deque()

    def add(self, update: Update, read: Callable[[], Outcome]) -> None:
        self.steps.append((self.trainer.progress.step, update, read))

    def settle(self, but: int = 0) -> Outcome | None:
        """Wait for all steps but the last few; what the last of these came to."""
        outcome = None
        while len(self.steps) > but:
            number, update, read = self.steps.popleft()
            outcome = read()
            if not outcome.finite:
                _skipped(self.run, self.trainer, self.log, update, number)
        return outcome


def _validation(run: Run, trainer: Trainer, log: Log | None, meter: _Meter) -> None:
    """Validate and save; rank 0 does both, and the others learn what it found."""
    progress = trainer.progress
    if trainer.world.size > 1:  # torchrun may kill us rather than wait for the end of a validation
        save_state(run, trainer)
    result = validate_and_keep(run, trainer)
    meter.restart(progress)
    if log is not None and result is not None:
        better = "  best" if progress.best_step == progress.step else ""
        log.say(f"step {progress.step:>7,}  {result}  {meter.clock(progress)}{better}")
        log.write(
            "valid",
            progress.step,
            **result.to_dict(),
            sample=result.sample,
            attention_entropy=result.attention_entropy,
            tokens=progress.tokens,
            seconds=progress.seconds,
            training_seconds=progress.training_seconds,
        )
    save_state(run, trainer)
    meter.restart(progress)  # nor does saving count as training


def _log_step(trainer: Trainer, log: Log, outcome: Outcome, meter: _Meter) -> None:
    progress = trainer.progress
    speed, stalled = meter.read(progress)
    log.write(
        "train",
        progress.step,
        epoch=progress.epoch,
        **outcome._asdict(),
        learning_rate=trainer.learning_rate(),
        tokens=progress.tokens,
        skipped=progress.skipped,
        tokens_per_second=speed,
        stalled=stalled,
        seconds=progress.seconds,
    )


def keep_weights(run: Run, name: str, model: Model, step: int) -> None:
    """Write a model's weights, as they are, under a name."""
    about = {"format": "pt", "step": str(step), "made by": "qkv"}
    files.write_tensors(run.path / "weights" / f"{name}.safetensors", dict(model.named_parameters()), about)


def validate_and_keep(run: Run, trainer: Trainer) -> Validation | None:
    """Validate, keep these weights among the last ones, and as the best if they are; rank 0 alone has the result."""
    progress, spec, result = trainer.progress, trainer.spec, None
    with trainer.averaged() as model:
        if trainer.world.first:
            result = validate(model, trainer.prepared, trainer.config, trainer.device)
            keep_weights(run, f"step-{progress.step:07d}", model, progress.step)
            for old in run.checkpoints()[: -max(1, spec.average)]:
                old.unlink()
            value = result.value(spec.metric)
            if progress.best is None or value > progress.best:
                progress.best, progress.best_step, progress.worse = value, progress.step, 0
                keep_weights(run, "best", model, progress.step)
                best = {"step": progress.step, **result.to_dict()}
                run.write_scores({"best": best, "chosen": "best", "metric": spec.metric})
            else:
                progress.worse += 1
    progress.validated = progress.step
    progress.worse = int(trainer.world.tell(str(progress.worse)))  # which decides when training is done
    return result


def save_state(run: Run, trainer: Trainer) -> None:
    checkpoint.save(run, trainer.progress, trainer.model, trainer.optimizer, trainer.ema, trainer.world)


def finish(run: Run, trainer: Trainer, log: Log) -> None:
    """Average the last checkpoints, choose between average and best on the validation set."""
    spec = trainer.spec
    scores = {**run.scores, "chosen": "best", "finished": trainer.progress.step}
    kept = run.checkpoints()[-spec.average :] if spec.average else []
    if len(kept) > 1:
        model = trainer.plain()
        load_weights(model, average(kept), kept[-1])
        keep_weights(run, "average", model, trainer.progress.step)
        result = validate(model, trainer.prepared, trainer.config, trainer.device)
        scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
        if trainer.progress.best is None or result.value(spec.metric) > trainer.progress.best:
            scores["chosen"] = "average"
        log.say(f"average of {len(kept)}  {result}")
    run.write_scores(scores)
    log.say(f"using {scores['chosen']} weights by default: {run.path}")


def _skipped(run: Run, trainer: Trainer, log: Log | None, update: Update, step: int) -> None:
    """Tell of an update that was left out; after too many in a row save the batch, as ids and as text, and give up."""
    progress, path = trainer.progress, run.path / "bad-batch.json"
    if log is not None:
        log.say(f"step {step}: the loss is not finite, update skipped ({progress.skipped} in all)")
    if progress.skipped_in_a_row < MOST_SKIPPED:
        return
    if log is not None:
        _write_bad_batch(path, trainer, update, step)
    raise QkvError(
        f"the loss was not finite in {MOST_SKIPPED} updates in a row, up to step {step}: look at {path}; "
        f"a lower train.learning_rate, a longer train.warmup, train.clip=1 or train.precision=fp32 may help"
    )


def _write_bad_batch(path: Path, trainer: Trainer, update: Update, step: int) -> None:
    src, tgt = trainer.prepared.tokenizers.src, trainer.prepared.tokenizers.tgt
    rows = [
        {"given": src.decode(s), "predicted": tgt.decode(t), "given_ids": s, "predicted_ids": t}
        for batch in trainer.padded(update)
        for s, t in zip(batch.inputs[0].tolist(), batch.labels.tolist(), strict=True)
    ]
    bad = {"step": step, "rows": rows}
    files.write_text(path, json.dumps(bad, ensure_ascii=False, indent=1) + "\n")


class _Meter:
    """Seconds spent, on training and in all, tokens a second and the share of time without data since it last began.

    Validation and saving do not count as training.
    """

    def __init__(self, progress: Progress) -> None:
        self.since, self.tokens, self.stalled = time.perf_counter(), progress.tokens, 0.0

    def wait_for(self, steps: Iterator[Update]) -> Update:
        """The next update; how long it took to come is remembered."""
        before = time.perf_counter()
        update = next(steps)
        self.stalled += time.perf_counter() - before
        return update

    def read(self, progress: Progress) -> tuple[float, float]:
        """Tokens a second, and the share of time without data."""
        tokens, stalled = self.tokens, self.stalled
        seconds = max(1e-9, self.trained(progress))
        return (progress.tokens - tokens) / seconds, stalled / seconds

    def trained(self, progress: Progress) -> float:
        """Begin anew; the seconds until now were spent on training."""
        seconds = self.restart(progress)
        progress.training_seconds += seconds
        return seconds

    def restart(self, progress: Progress) -> float:
        """Begin anew; the seconds until now were spent."""
        now = time.perf_counter()
        seconds = now - self.since
        progress.seconds += seconds
        self.since, self.tokens, self.stalled = now, progress.tokens, 0.0
        return seconds

    def clock(self, progress: Progress) -> str:
        minutes, seconds = divmod(int(progress.seconds), 60)
        return f"{minutes}:{seconds:02d}"


@contextmanager
def _stop_signals(impatient: bool = True) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one is obeyed at once, if impatient.

    torchrun passes on what every process may have heard already, and limits the time itself.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def remember(number: int, _frame: object) -> None:
        if received and impatient:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
