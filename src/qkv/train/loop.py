"""Training, from a config to a run folder: teacher forcing, one optimiser step after another (paper, section 5)."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qkv import config as configs
from qkv import files
from qkv.data.loader import Step, Updates
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
from qkv.train.validate import Validation, validate

MOST_SKIPPED = 10  # updates in a row without a finite loss before training gives up


class Interrupted(Exception):
    """Training was asked to stop, and has saved its state."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped at step {step} and saved: go on with --resume")
        self.exit_code = 128 + signal_number


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

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, update: Step) -> tuple[float, float, float]:
        """One update of the weights: loss and −log p for each token, and the gradient's norm.

        The loss is a sum over tokens, divided once by the count of the whole update; micro-batches cannot change it.
        Dropout is seeded by the step number, so a resumed run draws what an unbroken one would have drawn.
        """
        number = self.progress.step + 1
        torch.manual_seed(self.spec.seed * 1_000_003 + number)
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
        norm = self._gradient_norm()
        if math.isfinite(norm):
            rate = optim.learning_rate(number, self.spec, self.config.model.d_model)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.model, number)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = number
        self.progress.epoch, self.progress.update = update.after
        self.progress.tokens += update.tokens
        return float(loss) / update.tokens, float(nll) / update.tokens, norm

    def _gradient_norm(self) -> float:
        """The norm of the gradient, clipped if the config says so."""
        limit = self.spec.clip or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

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

    def validated(self) -> Validation:
        """Validate, keep these weights among the last ones, and among the best if they are."""
        with self.averaged() as model:
            result = validate(model, self.prepared, self.spec, self.device)
            self.keep_weights(f"step-{self.progress.step:07d}", model)
            for old in self.run.checkpoints()[: -max(1, self.spec.average)]:
                old.unlink()
            value = result.value(self.spec.metric)
            if self.progress.best is None or value > self.progress.best:
                self.progress.best, self.progress.best_step, self.progress.worse = value, self.progress.step, 0
                self.keep_weights("best", model)
                best = {"step": self.progress.step, **result.to_dict()}
                self.run.write_scores({"best": best, "chosen": "best", "metric": self.spec.metric})
            else:
                self.progress.worse += 1
        return result


def fit(run: Run, prepared: Prepared) -> Run:
    """Train until the config's limit, from the newest state in the run folder if there is one."""
    trainer = Trainer(run, prepared)
    state = checkpoint.latest(run)
    if state is not None:
        trainer.progress = checkpoint.restore(state, trainer.model, trainer.optimizer, trainer.ema)
    progress, spec = trainer.progress, trainer.spec
    with (
        Log(run.log, steps=spec.steps, step=progress.step, tensorboard=spec.tensorboard) as log,
        _stop_signals() as asked_to_stop,
    ):
        if state is not None:
            log.say(f"going on from step {progress.step:,}")
        _loop(trainer, log, asked_to_stop)
        if progress.step:
            finish(trainer, log)
    return run


def _loop(trainer: Trainer, log: Log, asked_to_stop: list[int]) -> None:
    """The loop itself: step, log, validate, save."""
    progress, spec, run = trainer.progress, trainer.spec, trainer.run
    meter = _Meter(progress)
    steps = trainer.updates.starting(progress.position)
    in_a_row = 0
    while not _done(progress, spec):
        update = next(steps)
        loss, nll, norm = trainer.step(update)
        log.advance(progress.step)
        if math.isfinite(norm):
            in_a_row = 0
        else:
            in_a_row += 1
            progress.skipped += 1
            log.say(f"step {progress.step}: the loss is not finite, update skipped ({progress.skipped} in all)")
            if in_a_row >= MOST_SKIPPED:
                raise QkvError(_give_up(run, trainer.prepared, update, progress.step))
        if progress.step % spec.log_every == 0:
            rate = optim.learning_rate(progress.step, spec, trainer.config.model.d_model)
            speed = meter.read(progress)
            log.write(
                "train",
                progress.step,
                epoch=progress.epoch,
                loss=loss,
                nll=nll,
                learning_rate=rate,
                norm=norm,
                tokens=progress.tokens,
                skipped=progress.skipped,
                tokens_per_second=speed,
                seconds=progress.seconds,
            )
        stop = asked_to_stop[0] if asked_to_stop else 0
        if progress.step % spec.validate_every == 0 or (_done(progress, spec) and not stop):
            result = trainer.validated()
            meter.restart(progress)
            better = "  best" if progress.best_step == progress.step else ""
            log.say(f"step {progress.step:>7,}  {result}  {meter.clock(progress)}{better}")
            log.write("valid", progress.step, **result.to_dict(), sample=result.sample, seconds=progress.seconds)
            trainer.save_state()
        elif stop:
            meter.restart(progress)
            trainer.save_state()
        if stop:
            raise Interrupted(stop, progress.step)


def _done(progress: Progress, spec: configs.Train) -> bool:
    return (
        progress.step >= spec.steps
        or (spec.epochs > 0 and progress.epoch >= spec.epochs)
        or (spec.patience > 0 and progress.worse >= spec.patience)
    )


def finish(trainer: Trainer, log: Log) -> None:
    """Average the last checkpoints, choose between average and best on the validation set."""
    run, spec = trainer.run, trainer.spec
    scores = dict(run.scores)
    kept = run.checkpoints()[-spec.average :] if spec.average else []
    if len(kept) > 1:
        tensors = average([files.read_tensors(path) for path in kept])
        load_weights(trainer.model, tensors, kept[-1])
        trainer.keep_weights("average", trainer.model)
        result = validate(trainer.model, trainer.prepared, spec, trainer.device)
        scores["average"] = {"of": [path.stem for path in kept], **result.to_dict()}
        if result.value(spec.metric) > (trainer.progress.best if trainer.progress.best is not None else -math.inf):
            scores["chosen"] = "average"
        log.say(f"average of {len(kept)}  {result}")
    run.write_scores(scores)
    log.say(f"using {scores['chosen']} weights by default: {run.path}")


def _give_up(run: Run, prepared: Prepared, update: Step, step: int) -> str:
    """Save the batch that cannot be learned from, as ids and as text; returns what to tell the user."""
    src, tgt = prepared.tokenizers.src, prepared.tokenizers.tgt
    rows = [
        {"source": src.decode(s), "target": tgt.decode(t), "source_ids": s, "target_ids": t}
        for batch in update.micros
        for s, t in zip(batch.source.tolist(), batch.labels.tolist(), strict=True)
    ]
    path = run.path / "bad-batch.json"
    files.write_text(path, json.dumps({"step": step, "rows": rows}, ensure_ascii=False, indent=1) + "\n")
    return (
        f"the loss was not finite in {MOST_SKIPPED} updates in a row, up to step {step}: look at {path}; "
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
