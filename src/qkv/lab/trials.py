"""Trials: many small trainings in parallel, all measured in the same way; Tables 2 and 3 and ablations use them.

A trial is a named config. Its run folder is in a working directory, and its result is one line of `results.jsonl`
there: an interrupted table resumes, and a finished trial is not repeated.
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
from collections.abc import Callable, Generator, Iterator, Sequence
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
from qkv.core.errors import Interrupted, QkvError, UsageError
from qkv.data import text_preparation
from qkv.data.formats import read_lines
from qkv.evaluation.metrics import quick_bleu
from qkv.models.rnn import Layer
from qkv.options import Config, CorpusConfig, DataConfig, TransformerConfig
from qkv.presets import demo
from qkv.training.memory_limits import loss_in_parts
from qkv.worker_pool import cpu_count, exit_with_parent

RESULTS = "results.jsonl"
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


def text_config(src: str, tgt: str, valid_src: str, valid_tgt: str, *, max_length: int) -> Config:
    """Return a config with the given files, or the demo corpus; without validation files a part is held out."""
    if not src:
        if tgt or valid_src or valid_tgt:
            raise UsageError(f"{tgt or valid_src or valid_tgt}: give --src too, or no file for the demo corpus")
        return demo().replace(data={"max_length": max_length})
    valid = (CorpusConfig(src=valid_src, tgt=valid_tgt),) if valid_src else ()
    data = DataConfig(train=(CorpusConfig(src=src, tgt=tgt),), valid=valid, max_length=max_length)
    return Config(data=data)


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


def recipe(*, steps: int, tokens: int, rate: float, device: str, seed: int) -> dict[str, Any]:
    """Return the training options shared by all rows of a table: a cosine schedule to zero, fp32, no averaging.

    The last weights are measured. Checkpoints are not averaged, as in the paper's Table 3; BLEU is computed only at the
    end; fp32 keeps rounding out of the comparison.
    """
    return {
        "steps": steps,
        "tokens_per_step": tokens,
        "schedule": "cosine",
        "learning_rate": rate,
        "warmup": max(1, steps // 10),
        "clip": 1.0,
        "average": 0,
        "metric": "loss",
        "validate_every": max(1, steps // VALIDATIONS),
        "precision": "fp32",
        "tensorboard": False,
        "device": device,
        "seed": seed,
    }


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
    results = read_results(folder)
    keys = [key_of(trial) for trial in trials]
    waiting = [
        (trial, key)
        for trial, key in zip(trials, keys, strict=True)
        if key not in results or results[key].error or (test and results[key].test != list(test))
    ]
    say(f"{folder}: {len(trials)} trials, {len(trials) - len(waiting)} already done")
    runs = (_open(trial, key, folder) for trial, key in waiting)
    started = time.monotonic()
    with closing(_run_parallel(runs, jobs, test) if jobs > 1 else _run_sequential(runs, test)) as finished:
        for number, result in enumerate(finished, 1):
            results[result.key] = result
            _append(folder / RESULTS, result)
            seconds = (time.monotonic() - started) / number * (len(waiting) - number)
            left = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
            say(f"{number}/{len(waiting)}  {result}; about {left} left")
    return [results[key] for key in keys]


def _append(path: Path, result: Result) -> None:
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        truncated = file.read(1) not in (b"", b"\n")  # end an unfinished line before this one
        file.write(f"{chr(10) if truncated else ''}{json.dumps(result.to_dict())}\n".encode())


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results in this folder by key; the last result of a repeated trial wins."""
    path = folder / RESULTS
    results = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            result = Result.from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue  # truncated by a crash: the trial is measured again
        results[result.key] = result
    return results


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


OpenTrial = tuple[str, str, Run]  # name, key, run folder


def _open(trial: Trial, key: str, folder: Path) -> OpenTrial:
    slug = re.sub(r"[^\w.]+", "_", trial.name)
    run = Run(folder / "runs" / f"{slug}-{trial.config.train.seed}-{key}")
    if not run.exists():
        store = stored_at(run.path, trial.text.folder)
        Run.create(run.path, trial.config, trial.text.tokenizers, store=store)
    return trial.name, key, run


def _run_sequential(runs: Iterator[OpenTrial], test: FilePair | None) -> Generator[Result, None, None]:
    for name, key, run in runs:
        try:
            yield _attempt(name, key, run, test)
        except Interrupted as stop:
            raise Interrupted(stop.exit_code - 128, f"stopped in {name}: repeat the same command to resume") from None


def _run_parallel(runs: Iterator[OpenTrial], jobs: int, test: FilePair | None) -> Generator[Result, None, None]:
    context = multiprocessing.get_context("spawn")
    threads = max(1, cpu_count() // jobs)
    running: dict[Any, tuple[Any, OpenTrial]] = {}
    try:
        while True:
            for name, key, run in islice(runs, jobs - len(running)):
                process = context.Process(target=_run_in_process, args=(name, key, str(run.path), test, threads))
                process.start()
                running[process.sentinel] = process, (name, key, run)
            if not running:
                return
            for ended in connection.wait(list(running)):
                process, named = running.pop(ended)
                process.join()
                yield _outcome(*named, process.exitcode)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "stopped: repeat the same command to resume") from None
    finally:
        for process, _ in running.values():
            process.terminate()  # training saves its state first
        for process, _ in running.values():
            process.join()


def _run_in_process(name: str, key: str, folder: str, test: FilePair | None, threads: int) -> None:
    """Run a trial in its own process; the result goes to a file in the run folder."""
    os.setsid()  # Ctrl-C reaches only the parent, which then terminates each child once
    exit_with_parent()
    torch.set_num_threads(threads)
    run = Run.open(folder)
    path = run.path / "result.json"
    path.unlink(missing_ok=True)  # of an earlier attempt
    with suppress(Interrupted):
        files.write_text(path, json.dumps(_attempt(name, key, run, test).to_dict()) + "\n")


def _outcome(name: str, key: str, run: Run, code: int) -> Result:
    path = run.path / "result.json"
    if not code and path.exists():
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return Result(name, run.config.train.seed, key, error=f"the process ended with code {code}: see {run.path}")


def default_jobs(device: str) -> int:
    """Return the default number of parallel trials: one per core; on a GPU one per two cores, at most 8."""
    return cpu_count() if choose_device(device).type == "cpu" else min(8, max(1, cpu_count() // 2))


# ---- a single trial --------------------------------------------------------------------------------------------------


def _attempt(name: str, key: str, run: Run, test: FilePair | None) -> Result:
    """Train and measure; messages go to output.txt, and an exception becomes a result with `error`."""
    with (run.path / "output.txt").open("a", encoding="utf-8") as output, redirect_stderr(output):
        try:
            return _measure(name, key, run, test)
        except Interrupted:
            raise
        except Exception as error:
            traceback.print_exc(file=output)
            reason = " ".join(str(error).split()) or type(error).__name__
            return Result(name, run.config.train.seed, key, error=reason)


def _measure(name: str, key: str, run: Run, test: FilePair | None) -> Result:
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
        return quick_bleu(texts, references, tgt_lang=run.config.data.tgt_lang)

    valid = [path.read_text(encoding="utf-8").split("\n")[: len(prepared.valid)] for path in prepared.valid_text]
    return Result(
        name=name,
        seed=spec.seed,
        key=key,
        steps=curve[-1].step,
        parameters=parameters(run.config.model, prepared.tokenizers),
        flops_per_token=flops_per_token(run.config, prepared),
        loss=curve[-1].loss,
        bleu=bleu(*valid),
        test_bleu=bleu(*map(read_lines, test)) if test else None,
        test=list(test) if test else None,
        curve=curve,
    )


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
