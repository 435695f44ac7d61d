"""Trials: many small trainings, side by side, each measured alike; Tables 2 and 3 are made of them.

A trial is a config with a name. Its run folder lies in a working directory, and what was measured is a line of
`results.jsonl` there: a table that was interrupted goes on where it was, and a trial that is finished is not repeated.
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

from qkv.api import Translator
from qkv.api.run_training import fit
from qkv.assembly import Run, updates_for
from qkv.console import bars, say
from qkv.core import files
from qkv.core.device import choose_device, describe
from qkv.core.errors import Interrupted, QkvError, UsageError
from qkv.core.loss import label_smoothed_loss
from qkv.core.validation import corpus_bleu
from qkv.data.lines import read_lines
from qkv.data.loader import Position
from qkv.data.store import Prepared, prepare
from qkv.explain.model_card import parameters, vocabulary
from qkv.models.build import build
from qkv.models.rnn import Layer
from qkv.options import Config, CorpusConfig, DataConfig, TransformerConfig
from qkv.presets import demo
from qkv.worker_pool import cpu_count, exit_with_parent

RESULTS = "results.jsonl"
TIMINGS = "seconds.json"
VALIDATIONS = 20  # validations in the course of a training
COUNTED_UPDATES = 4  # updates in which floating-point operations are counted
COUNTED_TOKENS = 1024  # tokens in each of them

FilePair = tuple[str, str]  # source and target


@dataclass(frozen=True)
class Trial:
    """A config to be trained on a text and measured; trials of one name differ in train.seed."""

    name: str
    config: Config
    text: Prepared


@dataclass(frozen=True)
class Point:
    """Where a training stood when it was validated: target tokens read, seconds of training, loss."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Result:
    """What a trial came to, by its averaged weights or else its last ones; with `error`, nothing but why it failed."""

    name: str
    seed: int
    key: str  # of config and text
    error: str = ""
    steps: int = 0
    parameters: int = 0
    flops_per_token: float = 0.0  # of training, for each target token
    loss: float = 0.0  # on the validation text, for each token, of the last weights
    bleu: float = 0.0  # on the validation text
    test_bleu: float | None = None
    test: list[str] | None = None  # the files that it was measured on
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
        """Floating-point operations of the whole training."""
        return self.flops_per_token * self.tokens

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        return cls(**values | {"curve": tuple(Point(**point) for point in values["curve"])})

    def __str__(self) -> str:
        found = (
            self.error or f"perplexity {self.perplexity:.2f}, BLEU {self.bleu:.2f}, {self.seconds:.0f} s of training"
        )
        return f"{self.name}, seed {self.seed}: {found}"


# ---- a trial's config ------------------------------------------------------------------------------------------------


def text_config(src: str, tgt: str, valid_src: str, valid_tgt: str, *, max_length: int) -> Config:
    """The text of a table: files, of which a part is held out unless validation files are given, or the demo corpus."""
    if not src:
        if tgt or valid_src or valid_tgt:
            raise UsageError(f"{tgt or valid_src or valid_tgt}: give --src too, or no file at all for the demo corpus")
        return demo().replace(data={"max_length": max_length})
    valid = (CorpusConfig(src=valid_src, tgt=valid_tgt),) if valid_src else ()
    data = DataConfig(train=(CorpusConfig(src=src, tgt=tgt),), valid=valid, max_length=max_length)
    return Config(data=data)


def describe_text(config: Config, prepared: Prepared) -> str:
    """The text in words."""
    names = Path(config.data.train[0].src).name, Path(config.data.train[0].tgt).name
    return (
        f"{len(prepared.train):,} pairs of {' and '.join(filter(None, names))}, "
        f"{len(prepared.valid):,} for validation, vocabulary {vocabulary(prepared.tokenizers)}"
    )


def prepare_text(config: Config, folder: Path) -> Prepared:
    """The tokenised text that all trials in the folder share, whatever their seeds."""
    data = dataclasses.replace(config.data, store=str(folder / "store"))
    with bars() as report:
        return prepare(data, config.tokenizer, folder, progress=report, seed=1)


def recipe(*, steps: int, tokens: int, rate: float, device: str, seed: int) -> dict[str, Any]:
    """One way to train for all rows of a table: a cosine to zero, so that the last weights are the ones to measure.

    No checkpoints are averaged (as in the paper's Table 3), BLEU waits for the end, and everything is fp32, so that
    rows differ in the model and not in rounding.
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
    """The same model, smaller: d_model, d_ff, d_k and d_v times one factor, layers times another; heads stay."""
    widths = {name: round(width * getattr(model, name)) for name in ("d_model", "d_ff", "d_k", "d_v")}
    layers = {name: max(1, round(depth * getattr(model, name))) for name in ("encoder_layers", "decoder_layers")}
    return dataclasses.replace(model, **widths, **layers)


# ---- many of them ----------------------------------------------------------------------------------------------------


def run_all(trials: Sequence[Trial], folder: Path, *, jobs: int = 1, test: FilePair | None = None) -> list[Result]:
    """Train and measure what is not in the folder's results yet; all results, in the order of the trials.

    With `jobs` > 1 each trial is a process, so many at a time. One that fails is told of, and tried again next time.
    """
    known = read_results(folder)
    keys = [key_of(trial) for trial in trials]
    waiting = [
        (trial, key)
        for trial, key in zip(trials, keys, strict=True)
        if key not in known or known[key].error or (test and known[key].test != list(test))
    ]
    say(f"{folder}: {len(trials)} trials, {len(trials) - len(waiting)} of them done before")
    runs = (_open(trial, key, folder) for trial, key in waiting)
    begun = time.monotonic()
    with closing(_run_parallel(runs, jobs, test) if jobs > 1 else _run_sequential(runs, test)) as results:
        for number, result in enumerate(results, 1):
            known[result.key] = result
            _append(folder / RESULTS, result)
            say(f"{number}/{len(waiting)}  {result}; {_time_left(begun, number, len(waiting) - number)}")
    return [known[key] for key in keys]


def _time_left(begun: float, done: int, left: int) -> str:
    seconds = (time.monotonic() - begun) / done * left
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _append(path: Path, result: Result) -> None:
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        cut = file.read(1) not in (b"", b"\n")  # a line that was not finished stays alone
        file.write(f"{chr(10) if cut else ''}{json.dumps(result.to_dict())}\n".encode())


def read_results(folder: Path) -> dict[str, Result]:
    """What was measured in this folder, by key; of a trial that was tried again, the last."""
    path = folder / RESULTS
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            result = Result.from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue  # cut off when the machine went down: that trial is measured again
        found[result.key] = result
    return found


def key_of(trial: Trial) -> str:
    """What decides a result: the text by its content, and every option but where the text lies."""
    tree = trial.config.to_dict()
    for place in ("train", "valid", "root", "store", "workers"):
        del tree["data"][place]
    whole = json.dumps([trial.name, trial.text.folder.name, tree], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def cached_seconds(trial: Trial, folder: Path, seconds: Callable[[Config, Prepared], float]) -> float:
    """How long a trial's training takes on this device, for a pass or an update.

    The folder keeps it: measured again it would differ, and a table could not go on with the same updates.
    """
    path = folder / TIMINGS
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    place = describe(choose_device(trial.config.train.device))  # "auto" is another device on another machine
    key = f"{trial.name} on {place}, {key_of(trial)}"
    if key not in known:
        known[key] = seconds(trial.config, trial.text)
        files.write_text(path, json.dumps(known, indent=1) + "\n")
    return known[key]


OpenTrial = tuple[str, str, Run]  # name and key of a trial, and its run folder


def _open(trial: Trial, key: str, folder: Path) -> OpenTrial:
    slug = re.sub(r"[^\w.]+", "_", trial.name)
    run = Run(folder / "runs" / f"{slug}-{trial.config.train.seed}-{key}")
    if not run.exists():
        Run.create(run.path, trial.config, trial.text.tokenizers, trial.text.folder)
    return trial.name, key, run


def _run_sequential(runs: Iterator[OpenTrial], test: FilePair | None) -> Generator[Result, None, None]:
    for name, key, run in runs:
        try:
            yield _attempt(name, key, run, test)
        except Interrupted as stop:
            raise Interrupted(stop.exit_code - 128, f"stopped in {name}: go on with the same command") from None


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
        raise Interrupted(signal.SIGINT, "stopped: go on with the same command") from None
    finally:
        for process, _ in running.values():
            process.terminate()  # training saves its state first
        for process, _ in running.values():
            process.join()


def _run_in_process(name: str, key: str, folder: str, test: FilePair | None, threads: int) -> None:
    """A trial in its own process: the result is left in the run folder."""
    os.setsid()  # Ctrl-C is for the parent, which then asks each to stop, once
    exit_with_parent()
    torch.set_num_threads(threads)
    run = Run.open(folder)
    path = run.path / "result.json"
    path.unlink(missing_ok=True)  # of an attempt before this one
    with suppress(Interrupted):
        files.write_text(path, json.dumps(_attempt(name, key, run, test).to_dict()) + "\n")


def _outcome(name: str, key: str, run: Run, code: int) -> Result:
    path = run.path / "result.json"
    if not code and path.exists():
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return Result(name, run.config.train.seed, key, error=f"its process ended with code {code}: look into {run.path}")


def default_jobs(device: str) -> int:
    """How many trials at a time: one for each core, or as many small models as a GPU and two cores each can feed."""
    return cpu_count() if choose_device(device).type == "cpu" else min(8, max(1, cpu_count() // 2))


# ---- one of them -----------------------------------------------------------------------------------------------------


def _attempt(name: str, key: str, run: Run, test: FilePair | None) -> Result:
    """Train and measure; what training says goes to a file, and a failure becomes the result."""
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
    spec, prepared = run.config.train, Prepared.open(run.store)
    if run.scores.get("finished") != spec.steps:
        with run.lock():
            fit(run, prepared)
        shutil.rmtree(run.path / "state")  # the table needs the weights only
    curve = _validation_curve(run.log)
    averaged = (run.path / "weights" / "average.safetensors").exists()
    translator = Translator(run, weights="average" if averaged else "last", device=spec.device)

    def bleu(sources: list[str], references: list[str]) -> float:
        texts = [each.text for each in translator.translate(sources)]
        return corpus_bleu(texts, references, tgt_lang=run.config.data.tgt_lang)

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
    """The validations of a run, with tokens and seconds of training, in which validations do not count."""
    with log.open(encoding="utf-8") as lines:
        valid = [entry for entry in map(json.loads, lines) if entry["event"] == "valid"]
    for entry in valid:
        if entry["loss"] is None:
            raise QkvError(f"the validation loss is not finite at step {entry['step']}: lower the learning rate")
    return tuple(Point(entry["step"], entry["tokens"], entry["training_seconds"], entry["loss"]) for entry in valid)


def flops_per_token(config: Config, prepared: Prepared) -> float:
    """Floating-point operations of forward and backward pass for each target token, counted on some real batches.

    Those of matrix products, that is, a multiplication and an addition as two. It is done on the CPU by written-out
    recurrence and attention, because fused kernels hide theirs from the counter.
    """
    small = {"tokens_per_step": max(COUNTED_TOKENS, config.data.max_length + 1), "micro_tokens": 0, "seed": 1}
    updates = updates_for(config.replace(train=small), prepared)
    tokenizers = prepared.tokenizers
    model = build(config.model, tokenizers.src.size, tokenizers.tgt.size)
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
            for batch in update.micros:
                hidden = model.hidden(*batch.inputs)
                loss, _ = label_smoothed_loss(
                    hidden, model.output.weight, batch.labels, smoothing=0.1, pad=tokenizers.tgt.pad
                )
                loss.backward()
            tokens += update.tokens
    passes = 2 if config.train.r_drop else 1
    return float(passes * counter.get_total_flops() / tokens)
