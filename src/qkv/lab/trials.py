"""Trials: many small trainings in parallel, all measured in the same way; Tables 2 and 3 and ablations use them.

A trial is a named config. Its run folder is in a working directory and keeps its result, `result.json`: an
interrupted table resumes, and a finished trial is not repeated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, redirect_stderr, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qkv.api.run_training import fit
from qkv.api.translator import Translator
from qkv.assembly import Run, build_model, parameters, stored_at, updates_for, vocabulary
from qkv.console import bars, describe_device, say
from qkv.core import files
from qkv.core.batches import Position
from qkv.core.dataset import PreparedText
from qkv.core.device import choose_device
from qkv.core.errors import Interrupted, QkvError
from qkv.core.validation import corpus_bleu
from qkv.data import text_preparation
from qkv.data.formats import read_lines
from qkv.evaluation.metrics import bleu_tokenizer
from qkv.models.rnn import Layer
from qkv.options import Config, TransformerConfig
from qkv.training.unpadded import loss_in_parts
from qkv.worker_pool import cpu_count, exit_with_parent

RESULT = "result.json"
TIMINGS = "seconds.json"
VALIDATIONS = 20  # per training
COUNTED_UPDATES = 4  # updates in which FLOPs are counted
COUNTED_TOKENS = 1024  # tokens of each counted update

FilePair = tuple[str, str]  # source and target


@dataclass(frozen=True)
class Trial:
    """A config to train on a text and measure; trials with the same name differ in train.seed."""

    name: str
    config: Config
    text: PreparedText


@dataclass(frozen=True)
class Point:
    """One validation: step, target tokens read, seconds of training, loss."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Result:
    """Result of a trial, measured on averaged weights if the recipe averages, else on the last; or its `error`."""

    name: str
    seed: int
    key: str  # of config and text
    error: str = ""
    steps: int = 0
    parameters: int = 0
    flops_per_token: float = 0.0  # forward and backward, per target token
    loss: float = 0.0  # validation loss per token, of the last weights
    bleu: float = 0.0  # on the validation text
    test_bleu: float | None = None
    test: list[str] | None = None  # files of the test set
    curve: tuple[Point, ...] = ()

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 50.0))

    @property
    def tokens(self) -> int:
        return self.curve[-1].tokens

    @property
    def seconds(self) -> float:
        return self.curve[-1].seconds

    @property
    def flops(self) -> float:
        """Floating-point operations of the training."""
        return self.flops_per_token * self.tokens

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        return cls(**values | {"curve": tuple(Point(**point) for point in values["curve"])})

    def __str__(self) -> str:
        scores = f"perplexity {self.perplexity:.2f}, BLEU {self.bleu:.2f}" if not self.error else self.error
        return f"{self.name}, seed {self.seed}: {scores}" + (f", {self.seconds:.0f} s" if not self.error else "")


# ---- a trial's config ------------------------------------------------------------------------------------------------


def describe_text(config: Config, prepared: PreparedText) -> str:
    """Describe the text in a phrase: pairs, files, vocabulary."""
    names = Path(config.data.train[0].src).name, Path(config.data.train[0].tgt).name
    return (
        f"{len(prepared.train):,} pairs of {' and '.join(filter(None, names))}, "
        f"{len(prepared.valid):,} for validation, vocabulary {vocabulary(prepared.tokenizers)}"
    )


def prepare_text(config: Config, folder: Path) -> PreparedText:
    """Prepare the tokenised text, which trials of all seeds in the folder share."""
    data = dataclasses.replace(config.data, store=str(folder / "store"))
    with bars() as report:
        return text_preparation.prepare_text(data, config.tokenizer, folder, progress=report)


def recipe(*, steps: int, tokens: int, rate: float, device: str) -> dict[str, Any]:
    """Return the training options shared by all rows of a table: a cosine schedule to zero, fp32, no averaging.

    The last weights are measured. Checkpoints are not averaged, as in the paper's Table 3; BLEU is computed only at the
    end; fp32 keeps rounding out of the comparison.
    """
    return length(steps) | {
        "tokens_per_step": tokens,
        "schedule": "cosine",
        "learning_rate": rate,
        "clip": 1.0,
        "average": 0,
        "metric": "loss",
        "precision": "fp32",
        "tensorboard": False,
        "device": device,
    }


def length(steps: int) -> dict[str, int]:
    """Return the training options that follow from the number of updates."""
    return {"steps": steps, "warmup": max(1, steps // 10), "validate_every": max(1, steps // VALIDATIONS)}


def scaled(model: TransformerConfig, width: float, depth: float) -> TransformerConfig:
    """Return a smaller model: d_model, d_ff, d_k, d_v times `width`, layers times `depth`, the same heads."""
    widths = {name: round(width * getattr(model, name)) for name in ("d_model", "d_ff", "d_k", "d_v")}
    layers = {name: max(1, round(depth * getattr(model, name))) for name in ("encoder_layers", "decoder_layers")}
    return dataclasses.replace(model, **widths, **layers)


# ---- running trials --------------------------------------------------------------------------------------------------


def run_all(trials: Sequence[Trial], folder: Path, *, jobs: int = 1, test: FilePair | None = None) -> list[Result]:
    """Train and measure all trials without a result in the folder; return all results in the order of the trials.

    With `jobs` > 1 each trial runs in its own process, `jobs` at a time. A failed trial is reported, and repeated by
    the next call.
    """
    attempts = [_attempt(trial, folder, test) for trial in trials]
    results = {attempt.named.key: result for attempt in attempts if (result := attempt.stored())}

    def is_done(attempt: Attempt) -> bool:
        result = results.get(attempt.named.key)
        return result is not None and not result.error and (test is None or result.test == list(test))

    waiting = [attempt for attempt in attempts if not is_done(attempt)]
    say(f"{folder}: {len(trials)} trials, {len(trials) - len(waiting)} already done")
    started = time.monotonic()
    with closing(_run_parallel(iter(waiting), jobs) if jobs > 1 else _run_sequential(waiting)) as finished:
        for number, result in enumerate(finished, 1):
            results[result.key] = result
            seconds = (time.monotonic() - started) / number * (len(waiting) - number)
            left = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
            say(f"{number}/{len(waiting)}  {result}; about {left} left")
    return [results[attempt.named.key] for attempt in attempts]


def key_of(trial: Trial) -> str:
    """Hash everything that decides a result: the content of the text and all options except paths."""
    tree = trial.config.to_dict()
    for place in ("train", "valid", "root", "store", "workers"):
        del tree["data"][place]
    whole = json.dumps([trial.name, trial.text.folder.name, tree], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def cached_seconds(trial: Trial, folder: Path, seconds: Callable[[Config, PreparedText], float]) -> float:
    """Return `seconds(config, text)` of a trial on this device, measured once per folder.

    The folder stores the value: a new measurement would differ, and an interrupted table would change its updates.
    """
    path = folder / TIMINGS
    timings: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    place = describe_device(choose_device(trial.config.train.device))  # "auto" may be another device on another machine
    key = f"{trial.name} on {place}, {key_of(trial)}"
    if key not in timings:
        timings[key] = seconds(trial.config, trial.text)
        files.write_text(path, json.dumps(timings, indent=1) + "\n")
    return timings[key]


def _attempt(trial: Trial, folder: Path, test: FilePair | None) -> Attempt:
    """Return a trial with its run folder, which is created if it does not exist."""
    named = Result(trial.name, trial.config.train.seed, key_of(trial))
    slug = re.sub(r"[^\w.]+", "_", trial.name)
    run = Run(folder / "runs" / f"{slug}-{named.seed}-{named.key}")
    if not run.exists():
        Run.create(run.path, trial.config, trial.text.tokenizers, store=stored_at(run.path, trial.text.folder))
    return Attempt(named, run.path, test)


def _run_sequential(attempts: Iterable[Attempt]) -> Generator[Result, None, None]:
    for attempt in attempts:
        try:
            yield attempt.run()
        except Interrupted as stop:
            reason = f"stopped in {attempt.named.name}: repeat the same command to resume"
            raise Interrupted(stop.exit_code - 128, reason) from None


def _run_parallel(attempts: Iterator[Attempt], jobs: int) -> Generator[Result, None, None]:
    context = multiprocessing.get_context("spawn")
    threads = max(1, cpu_count() // jobs)
    running: dict[Any, tuple[Any, Attempt]] = {}
    try:
        while True:
            for attempt in islice(attempts, jobs - len(running)):
                process = context.Process(target=attempt.run_in_process, args=(threads,))
                process.start()
                running[process.sentinel] = process, attempt
            if not running:
                return
            for ended in connection.wait(list(running)):
                process, attempt = running.pop(ended)
                process.join()
                yield attempt.outcome(process.exitcode)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "stopped: repeat the same command to resume") from None
    finally:
        for process, _ in running.values():
            process.terminate()  # training saves its state first
        for process, _ in running.values():
            process.join()


def default_jobs(device: str) -> int:
    """Return the default number of parallel trials: one per core; on a GPU one per two cores, at most 8."""
    return cpu_count() if choose_device(device).type == "cpu" else min(8, max(1, cpu_count() // 2))


# ---- a single trial --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """A trial with its run folder, to be trained here or in another process."""

    named: Result  # without figures
    folder: Path
    test: FilePair | None

    def stored(self) -> Result | None:
        """Return the result in the run folder, if there is a readable one."""
        try:
            return Result.from_dict(json.loads((self.folder / RESULT).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def run(self) -> Result:
        """Train and measure; messages go to output.txt, and an exception becomes a result with `error`."""
        (self.folder / RESULT).unlink(missing_ok=True)  # of an earlier attempt
        with (self.folder / "output.txt").open("a", encoding="utf-8") as output, redirect_stderr(output):
            try:
                result = dataclasses.replace(self.named, **_measure(Run.open(self.folder), self.test))
            except Interrupted:
                raise
            except Exception as error:
                traceback.print_exc(file=output)
                reason = " ".join(str(error).split()) or type(error).__name__
                result = dataclasses.replace(self.named, error=reason)
        files.write_text(self.folder / RESULT, json.dumps(result.to_dict()) + "\n")
        return result

    def run_in_process(self, threads: int) -> None:
        os.setsid()  # Ctrl-C reaches only the parent, which then terminates each child once
        exit_with_parent()
        torch.set_num_threads(threads)
        with suppress(Interrupted):
            self.run()

    def outcome(self, code: int) -> Result:
        """Return the result of the process that ended with `code`."""
        reason = f"the process ended with code {code}: see {self.folder}"
        return (None if code else self.stored()) or dataclasses.replace(self.named, error=reason)


def _measure(run: Run, test: FilePair | None) -> dict[str, Any]:
    """Train, unless that is done, and return the figures of a `Result`."""
    spec, prepared = run.config.train, PreparedText.open(run.store)
    if run.scores.get("finished") != spec.steps:
        with run.lock():
            fit(run, prepared)
        shutil.rmtree(run.path / "state")  # only the weights are needed
    curve = _validation_curve(run.log)
    averaged = (run.path / "weights" / "average.safetensors").exists()
    translator = Translator(run, weights="average" if averaged else "last", device=spec.device)

    def bleu(sources: list[str], references: list[str]) -> float:
        texts = [each.text for each in translator.translate(sources)]
        return corpus_bleu(texts, references, bleu_tokenizer(run.config.data.tgt_lang))

    valid = [path.read_text(encoding="utf-8").split("\n")[: len(prepared.valid)] for path in prepared.valid_text]
    return {
        "steps": curve[-1].step,
        "parameters": parameters(run.config.model, prepared.tokenizers),
        "flops_per_token": flops_per_token(run.config, prepared),
        "loss": curve[-1].loss,
        "bleu": bleu(*valid),
        "test_bleu": bleu(*map(read_lines, test)) if test else None,
        "test": list(test) if test else None,
        "curve": curve,
    }


def _validation_curve(log: Path) -> tuple[Point, ...]:
    """Return the validations of a run; `seconds` counts training without validation."""
    with log.open(encoding="utf-8") as lines:
        valid = [entry for entry in map(json.loads, lines) if entry["event"] == "valid"]
    for entry in valid:
        if entry["loss"] is None:
            raise QkvError(f"the validation loss is not finite at step {entry['step']}: lower the learning rate")
    return tuple(Point(entry["step"], entry["tokens"], entry["training_seconds"], entry["loss"]) for entry in valid)


def flops_per_token(config: Config, prepared: PreparedText) -> float:
    """Count the FLOPs of forward and backward pass per target token on a few real batches.

    Only matrix products count; a multiplication and an addition are two operations. The count runs on the CPU with
    unfused recurrence and attention, because the counter cannot see inside fused kernels.
    """
    small = {"tokens_per_step": max(COUNTED_TOKENS, config.data.max_length + 1), "micro_tokens": 0, "seed": 1}
    updates = updates_for(config.replace(train=small), prepared)
    tokenizers = prepared.tokenizers
    model = build_model(config.model, tokenizers.src.size, tokenizers.tgt.size)
    for part in model.modules():
        if isinstance(part, Layer):
            part.written_out = True
    tokens = 0
    with (
        closing(updates.starting(Position(0, 0))) as steps,
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        for update in islice(steps, COUNTED_UPDATES):
            for batch in update.micro_batches:
                hidden = model.hidden(*batch.inputs)
                loss, _ = loss_in_parts(
                    hidden, model.output.weight, batch.labels, smoothing=0.1, pad=tokenizers.tgt.pad
                )
                loss.backward()
            tokens += update.tokens
    passes = 2 if config.train.r_drop else 1
    return float(passes * counter.get_total_flops() / tokens)
