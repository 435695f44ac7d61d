"""From a config to a trained run folder: prepare the text, choose the recipe, train, write the card."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv.api.run_limits import measure_run
from qkv.assembly import Run, parameters, shape, stored_at, trainer_for, unit, updates_for, vocabulary
from qkv.console import TrainingBar, bars, describe_device, say
from qkv.core import files
from qkv.core.checkpoint import average_checkpoints, latest_state, start_from
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World, choose_device
from qkv.core.errors import Interrupted, QkvError, UsageError
from qkv.core.run import LogSink
from qkv.core.trainer import Trainer
from qkv.core.validation import Task, Validation
from qkv.data.formats import infer_languages
from qkv.data.text_preparation import filter_table, prepare_text
from qkv.options import DROPOUTS, Config, ConvS2SConfig, DecoderOnlyConfig, TranslationConfig
from qkv.segmentation.text_cutter import LONG, LineStatistics
from qkv.training.distributed import joined

# What completes a config once the text is known, for so many ranks, and why so.
Recipe = Callable[[Config, PreparedText, int], tuple[Config, list[str]]]

# What the weights, the text, its order or the best score depend on, and what a resumed run may change of it.
SETTLED = tuple(
    """
    data. tokenizer. model. train.seed train.optimizer train.metric train.tokens_per_step train.micro_tokens
    """.split()
)
FREE = ("data.workers", "data.src_lang", "data.tgt_lang")

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets in each process
SAMPLE = 2000  # source lines, spread evenly over the training text, whose sentences are counted


def train(
    config: Config | None = None,
    run: str | Path | None = None,
    *,
    resume: bool = False,
    recipe: Recipe | None = None,
    settings: list[str] | None = None,
    start: str | Path | Run | None = None,
    command: str = "",
) -> Run:
    """Train a model and return its run folder; by default `runs/NAME` with the config's `train.name`.

    `recipe` completes the config once the text is known (see `qkv.api.auto_recipe`); `settings` are
    `section.key=value` strings that are applied last. Training begins with the weights of the run `start`, if given,
    and with its model, subwords and languages, whatever the config says of these. With `resume`, training goes on from
    the newest state in the folder, from the beginning if there is none yet; config and text are then the folder's own.
    """
    ended = False
    several = all(name in os.environ for name in TORCHRUN) and os.environ["WORLD_SIZE"] != "1"
    with joined() if several else nullcontext(ALONE) as world, ExitStack() as held:
        if world.first:
            folder = _folder(config, run, resume=resume)
            held.callback(_leave, [each for each in (folder, *folder.parents) if not each.exists()])
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(Run(folder).lock())
            if config is None:
                opened, prepared = _reopen(folder, settings or [])
            else:
                source = start if isinstance(start, Run) or start is None else Run.open(start)
                opened, prepared = _begin(folder, config, recipe, settings or [], command, world.size, source)
            world.broadcast(str(opened.path.resolve()))
            say(_headline(opened.config, prepared, world))
        else:
            opened, prepared = _follow(Path(world.broadcast()))
        page = opened.path / "card.md"
        if (fit(opened, prepared, world) or not page.exists()) and world.first:
            files.write_text(page, card(opened, prepared))
            ended = True
    if ended:
        measure_run(opened, prepared)
    return opened


def fit(run: Run, text: PreparedText, world: World = ALONE) -> bool:
    """Train a run on its text, with a progress bar and TensorBoard; False if its training has ended before."""
    trainer = trainer_for(run.config, text, world)
    trainer.task = MeasuredTask(trainer.task)
    _start_as_given(run, trainer)
    with ExitStack() as held:
        sinks: list[LogSink] = [BadBatchFile(run.path / "bad-batch.json", trainer)]
        if world.first:
            sinks.append(held.enter_context(closing(TrainingBar())))
            if run.config.train.tensorboard:
                sinks.append(held.enter_context(closing(TensorBoardLog(run.path / "tensorboard"))))
        return trainer.fit(run, sinks, held.enter_context(stop_signals(impatient=world.size == 1)))


@contextmanager
def stop_signals(impatient: bool = True) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying; if impatient, a second one stops at once.

    torchrun passes on signals that every process may have received already, and limits the time itself.
    """
    received: list[int] = []

    def remember(number: int, _frame: object) -> None:
        if received and impatient:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()  # Python refuses handlers in other threads
    before = {number: signal.signal(number, remember) for number in numbers if in_main}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_as_given(run: Run, trainer: Trainer) -> None:
    """Load the weights that the run starts from, and log their validation; a resumed run keeps its own weights."""
    world = trainer.world
    if not run.start.exists() or world.broadcast(str(latest_state(run) or "")):
        return
    start_from(run.start, trainer.train_step)
    with trainer.train_step.evaluated_model() as model:
        if world.first:
            result = trainer.task.validate(model, trainer.text, trainer.config, trainer.device)
            say(f"before training, weights of {run.about['start']}: {result}")


class BadBatchFile:
    """Log sink that writes the last update of a training that gives up, as ids and as text."""

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self.path, self.trainer = path, trainer

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind != "given_up":
            return
        train_step, update = self.trainer.train_step, values["update"]
        src, tgt = self.trainer.text.tokenizers.src, self.trainer.text.tokenizers.tgt
        padded = train_step.padded(update) if hasattr(train_step, "padded") else update.micro_batches
        rows = [
            {"given": src.decode(s), "predicted": tgt.decode(t), "given_ids": s, "predicted_ids": t}
            for batch in padded
            for s, t in zip(batch.inputs[0].tolist(), batch.labels.tolist(), strict=True)
        ]
        record = {"step": values["number"], "rows": rows}
        files.write_text(self.path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        say(f"the last batch is written to {self.path}")


class MeasuredTask:
    """Training task whose validations also measure the entropy of each attention, for the log."""

    def __init__(self, task: Task) -> None:
        self.task, self.updates = task, task.updates

    def validate(self, model: Any, text: PreparedText, config: Any, device: torch.device) -> Validation:
        from qkv.explain.attention_heads import attention_entropies

        result = self.task.validate(model, text, config, device)
        entropies = attention_entropies(model, text, config, device)
        return dataclasses.replace(result, details=result.details | {"attention_entropy": entropies})


class TensorBoardLog:
    """Log sink that writes the numbers of `train` and `valid` events for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "start":
            from torch.utils.tensorboard import SummaryWriter

            # Events from `purge_step` on, that one included, are dropped: a resumed run writes them again.
            self.writer = SummaryWriter(self.folder, purge_step=step + 1 if step else None)
        elif kind in ("train", "valid") and self.writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _folder(config: Config | None, run: str | Path | None, *, resume: bool) -> Path:
    """Return the folder of a new run, or of the run to resume."""
    if resume:
        if config is not None:
            raise UsageError("resume takes the config of the run folder: omit config, and change it with settings")
        if run is None:
            raise UsageError("--resume needs --run, the folder to go on with")
        if Path(run).is_dir() and not Run(Path(run)).exists():
            raise UsageError(
                f"{run}: nothing to resume: a run begins when its text is prepared; "
                f"give the whole command again, without --resume"
            )
        return Run.open(run).path
    if config is None or not config.data.train:
        raise UsageError("nothing to train on: name the text with --src and --tgt, or as data.train in a config")
    return Path(run) if run is not None else Path("runs") / config.train.name


def _leave(made: list[Path]) -> None:
    """Remove the folders made for a run, innermost first, until one contains files."""
    with suppress(OSError):  # one is not empty
        for folder in made:
            folder.rmdir()


def _follow(folder: Path) -> tuple[Run, PreparedText]:
    """Open the run of rank 0 on another rank."""
    run = Run(folder)
    if not run.exists() or not run.store.is_dir():
        raise QkvError(
            f"{run.path if not run.exists() else run.store}: not found on this machine, although rank 0 made it: put "
            f"the run folder and the prepared text on a disk that all machines share"
        )
    return run, PreparedText.open(run.store)


def _begin(
    folder: Path,
    config: Config,
    recipe: Recipe | None,
    settings: list[str],
    command: str,
    ranks: int,
    start: Run | None,
) -> tuple[Run, PreparedText]:
    """Start a new run; `run.json` marks it as complete once the text is prepared and the config is final."""
    if Run(folder).exists():
        raise UsageError(
            f"{folder} holds a run already: add --resume to go on with it, or name another folder with --run"
        )
    if (folder / "state").exists():
        raise UsageError(f"{folder} holds an incomplete run (state, but no run.json): name another folder with --run")
    names = {path.name for path in folder.glob("*") if not path.name.startswith(".")}
    begun = {"store", "weights", "tokenizer.json"}  # by a command that was killed before it wrote run.json
    if foreign := sorted(names - begun - ({"config.toml"} if "tokenizer.json" in names else set())):
        raise UsageError(f"{folder} is no run and holds {foreign[0]}: name a new or an empty folder with --run")
    config = config.assign(settings) if start is None else _as_in(start, config, settings)
    config = dataclasses.replace(config, data=infer_languages(config.data))
    choose_device(config.train.device)  # refuses one that is not there before any work is done
    _check_new(config)
    prepared = _prepare(folder, config, start)
    say(filter_table(prepared.report))
    if recipe is not None:
        config, reasons = recipe(config, prepared, ranks)
        config = config.assign(settings)
        for reason in [*reasons, *(f"auto: {setting}, as you say" for setting in settings)]:
            say(reason)
    updates_for(config, prepared)  # refuses text that this model cannot be trained on before there is a run
    record: dict[str, Any] = {"command": command, "store": stored_at(folder, prepared.folder)}
    if isinstance(config.model, TranslationConfig) and (lines := line_statistics(prepared, config.data.src_lang)):
        record["lines"] = lines.to_dict()
    if start is not None:
        record["start"] = str(start.path.resolve())
        given = Run(folder).start
        given.parent.mkdir(exist_ok=True)
        shutil.copyfile(start.weights(), given)
    return Run.create(folder, config, prepared.tokenizers, **record), prepared


def line_statistics(prepared: PreparedText, language: str) -> LineStatistics | None:
    """Return what the source lines were like; None if sentencex, which counts their sentences, is not installed."""
    src, count = prepared.tokenizers.src, min(len(prepared.train), SAMPLE)
    rows = [prepared.train.row("src", i * len(prepared.train) // count).tolist() for i in range(count)]
    lengths = np.asarray(prepared.train.lengths("src"))
    long = int(np.quantile(lengths, LONG, method="higher"))
    try:
        return LineStatistics.of(map(src.decode, rows), long, language)
    except UsageError:
        return None


def _as_in(start: Run, config: Config, settings: list[str]) -> Config:
    """Return the config with the settings applied; options that the weights of `start` depend on come from there."""
    there = start.config
    start.weights()  # refuses a run that has none yet
    named = {key: getattr(config.data, key) or getattr(there.data, key) for key in ("src_lang", "tgt_lang")}
    data = dataclasses.replace(config.data, **named)
    config = dataclasses.replace(config, data=data, tokenizer=there.tokenizer, model=there.model)
    changed = config.assign(settings)
    own = [path for path, _, _ in config.difference(changed) if path.startswith(("model.", "tokenizer."))]
    if settled := [path for path in own if path not in (*DROPOUTS, "tokenizer.dropout")]:
        raise UsageError(f"{start.path}: its weights depend on {', '.join(settled)}: keep the values of that run")
    return changed


def _reopen(folder: Path, settings: list[str]) -> tuple[Run, PreparedText]:
    """Open a run to resume, with the text as it was prepared when the run began."""
    run = Run.open(folder)
    changed = run.config.assign(settings)
    paths = [path for path, _, _ in run.config.difference(changed)]
    if settled := [path for path in paths if path.startswith(SETTLED) and path not in FREE]:
        raise UsageError(
            f"--resume cannot change {', '.join(settled)}: the training depends on it; begin a new run instead, "
            f"with --from {folder} if it is to go on from these weights"
        )
    choose_device(changed.train.device)
    if (run.store / "manifest.json").exists():
        prepared = PreparedText.open(run.store)
    else:
        prepared = _prepare(run.path, changed, run if run.start.exists() else None)
    if prepared.tokenizers.fingerprint != run.tokenizers.fingerprint:
        raise QkvError(f"{folder}: the training text has changed since the run began: restore it, or begin a new run")
    if paths:
        run.write_config(changed)
    return run, prepared


def _check_new(config: Config) -> None:
    """Refuse text of another kind than the model reads, and options without an effect that an older run may have."""
    for i, corpus in enumerate(config.data.valid):
        if corpus.weight != 1:
            raise UsageError(f"data.valid[{i}].weight has no effect: weights are for data.train: omit it")
    if config.train.optimizer in ("muon", "soap") and isinstance(config.model, ConvS2SConfig):  # normalised weights
        raise UsageError(
            f'train.optimizer = "{config.train.optimizer}" finds no matrices in ConvS2S: use adam or adamw'
        )
    plain, kind = any(corpus.text for corpus in config.data.train), config.model.kind
    if isinstance(config.model, TranslationConfig):
        if plain:
            raise UsageError(
                f"model.kind = {kind} translates: give pairs (--src, --tgt), or set model.kind=decoder or encoder"
            )
    elif not plain:
        raise UsageError(f"model.kind = {kind} learns from plain text: give it with --text, as text in data.train")


def _prepare(folder: Path, config: Config, start: Run | None = None) -> PreparedText:
    """Prepare the text; the vocabulary is learned from it, or comes from the run `start`."""
    running_text = isinstance(config.model, DecoderOnlyConfig)  # a language model reads on where a line ends
    try:
        with bars() as report:
            return prepare_text(
                config.data,
                config.tokenizer,
                Run(folder).store,
                tokenizers=None if start is None else start.tokenizers,
                progress=report,
                running_text=running_text,
            )
    except KeyboardInterrupt:
        raise Interrupted(
            signal.SIGINT, "interrupted while preparing the text: to train, give the same command again"
        ) from None


def _headline(config: Config, prepared: PreparedText, world: World) -> str:
    """Describe model, text and device in one line."""
    together = f", with {world.size - 1} more, {config.train.parallel} parallel" if world.size > 1 else ""
    return (
        f"{config.model.kind}, {parameters(config.model, prepared.tokenizers) / 1e6:.1f} million parameters, "
        f"vocabulary {vocabulary(prepared.tokenizers)}, {len(prepared.train):,} {unit(config)}, "
        f"on {describe_device(choose_device(config.train.device))}{together}"
    )


# ---- model card ------------------------------------------------------------------------------------------------------


def card(run: Run, prepared: PreparedText) -> str:
    """Return the model card as Markdown, generated from the files of the run folder."""
    config, scores, about = run.config, run.scores, run.about
    size = parameters(config.model, prepared.tokenizers)
    translates = isinstance(config.model, TranslationConfig)
    languages = f"{config.data.src_lang or 'source'} → {config.data.tgt_lang or 'target'}"
    title = languages if translates else config.data.tgt_lang or "plain text"
    lines = [
        f"# {config.train.name}: {title}",
        "",
        f"- model: {config.model.kind}, {size:,} parameters, {shape(config.model)}",
        f"- vocabulary: {vocabulary(prepared.tokenizers)} ({config.tokenizer.kind})",
        f"- training text: {len(prepared.train):,} {unit(config)}; validation: {len(prepared.valid):,} {unit(config)}",
        f"- begun: {about['begun']}, with qkv {about['qkv']}, torch {about['torch']}, Python {about['python']}",
    ]
    if about["command"]:
        lines.append(f"- command: `{about['command']}`")
    figure = "bits per byte" if isinstance(config.model, DecoderOnlyConfig) else "BLEU (greedy)"
    lines += ["", f"| weights | validation loss | {figure} |", "|---|---|---|"]
    lines += [_row(name, scores[name], scores.get("chosen") == name) for name in ("best", "average") if name in scores]
    lines += ["", "## Text", "", "```", filter_table(prepared.report), "```", ""]
    return "\n".join(lines)


def _row(name: str, score: dict[str, Any], chosen: bool) -> str:
    loss = "" if score["loss"] is None else f"{score['loss']:.4f}"
    figure = "" if score["bleu"] is None else f"{score['bleu']:.2f}"
    if "bits_per_byte" in score:
        figure = f"{score['bits_per_byte']:.4f}"
    return f"| {name}{' (used by default)' if chosen else ''} | {loss} | {figure} |"


# ---- averages --------------------------------------------------------------------------------------------------------

TRAINED = ("best", "last", "average")  # names of weights that training writes itself


def average_last(folder: str | Path, last: int = 0, name: str = "") -> tuple[Path, list[Path]]:
    """Write the mean of the last checkpoints kept in a run (0: all); return the new file and the averaged ones.

    The name is average_N by default. The names that training writes are refused, because scores.json describes those.
    """
    if last < 0 or last == 1:
        raise UsageError(f"--last {last}: an average takes at least 2 checkpoints")
    run = Run.open(folder)
    kept = run.checkpoints()
    if len(kept) < max(2, last):
        raise UsageError(
            f"{folder} keeps {len(kept)} checkpoints, {max(2, last)} are needed: train with a larger train.average"
        )
    chosen = kept[-last:]
    name = name or f"average_{len(chosen)}"
    if not name.isidentifier() or name in TRAINED:
        raise UsageError(
            f'"{name}" cannot name an average: use letters, digits and _, but none of {", ".join(TRAINED)}'
        )
    path = run.path / "weights" / f"{name}.safetensors"
    files.write_tensors(path, average_checkpoints(chosen))
    return path, chosen
