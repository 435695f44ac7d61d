"""Training with the core alone, for tests: a config, a prepared text, a trainer and whole runs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qkv.core.config import Config, CorpusConfig, DataConfig, TokenizerConfig
from qkv.core.corpus import find_corpus
from qkv.core.dataset import PreparedText, StoreFolder
from qkv.core.device import ALONE, World
from qkv.core.loss import SmoothedObjective
from qkv.core.optimizer import ConfigSchedule, build_optimizer
from qkv.core.preparation import Filter, Sentences, length_filters, prepare
from qkv.core.run import LogSink, Run
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.trainer import PlainTrainStep, StepHook, Trainer
from qkv.core.transformer import Transformer
from qkv.core.validation import TranslationTask

CPU = torch.device("cpu")


@cache
def byte_tokenizers() -> TokenizerPair:
    """Tokenizers that know the 256 bytes only, so that a text has one token for each of its bytes and one more."""
    both = Tokenizer("char", [])
    return TokenizerPair(both, both)


def settings(files: tuple[str, str], model: dict[str, Any] | None = None, **train: object) -> Config:
    """Config of a small model: for tests of the training loop, not of learning."""
    sizes = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    values = {
        "steps": 8,
        "tokens_per_step": 256,
        "schedule": "cosine",
        "learning_rate": 5e-3,
        "warmup": 20,
        "clip": 1.0,
        "validate_every": 2,
        "metric": "loss",
        "average": 2,
        "log_every": 1,
        "device": "cpu",
    }
    data = {"train": [{"src": files[0], "tgt": files[1]}], "max_length": 32}
    return Config.from_dict({"data": data, "model": sizes | (model or {}), "train": values | train})


def prepare_text(
    data: DataConfig,
    folder: Path,
    *,
    tokenizers: TokenizerPair | None = None,
    learn: bool = False,
    filters: Sequence[Filter] = (),
    **options: Any,
) -> PreparedText:
    """Prepare the text of a config, with tokenizers that know only bytes unless some are given or learned."""
    train, valid = ([find_corpus(corpus, data) for corpus in part] for part in (data.train, data.valid))
    known = None if learn else tokenizers or byte_tokenizers()
    store = StoreFolder(folder, options.pop("say", lambda line: None))
    text, tokenizer = Sentences(data, [*length_filters(data), *filters]), options.pop("tokenizer", TokenizerConfig())
    return prepare(train, valid, text, tokenizer, store, tokenizers=known, **options)


def trainer_for(
    config: Config,
    text: PreparedText,
    *,
    hooks: Sequence[StepHook] = (),
    task: TranslationTask | None = None,
    world: World = ALONE,
) -> Trainer:
    """The core's trainer of a config, before its first step."""
    tokenizers, task = text.tokenizers, task or TranslationTask()
    torch.manual_seed(config.train.seed)
    model = Transformer(config.model, tokenizers.src.size, tokenizers.tgt.size)  # type: ignore[arg-type]
    updates = task.updates(text, config, CPU, world)
    objective = SmoothedObjective(config.train.label_smoothing, tokenizers.tgt.pad)
    optimizer = build_optimizer(model, config.train)
    step = PlainTrainStep(model, optimizer, config.train, objective, hooks=hooks, world=world)
    schedule = ConfigSchedule(config.train, config.model.d_model, updates)
    return Trainer(config, text, step, task, updates, schedule)


def train(
    config: Config, folder: Path, sinks: Sequence[LogSink] = (), signals: Sequence[int] = (), **parts: Any
) -> Run:
    """Train in a run folder with the core alone, or go on with the training there."""
    text = prepare_text(config.data, folder / "store", learn=True, tokenizer=config.tokenizer)
    run = Run(folder)
    if run.exists():
        run.write_config(config)
    else:
        run = Run.create(folder, config, text.tokenizers)
    trainer_for(config, text, **parts).fit(run, sinks, signals)
    return Run.open(folder)


def entries(run: Path, event: str) -> list[dict[str, Any]]:
    """The lines of one kind in the log of a run."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == event]


WORDS = "cat dog house tree sleeps sees likes the a big small café naïve never always".split()


def distinct_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Different random sentences, and the same words in capitals in the opposite order."""
    chance = random.Random(seed)
    made: dict[tuple[str, str], None] = {}
    while len(made) < count:
        words = chance.choices(WORDS, k=chance.randint(3, 9))
        made[" ".join(words) + ".", " ".join(reversed(words)).upper() + " !"] = None
    return list(made)


def write_corpus(folder: Path, pairs: list[tuple[str, str]], name: str = "train") -> CorpusConfig:
    """Two parallel files, name.en and name.de."""
    for side, lang in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{name}.{lang}").write_bytes(text.encode())
    return CorpusConfig(src=str(folder / f"{name}.en"), tgt=str(folder / f"{name}.de"))


def texts(prepared: PreparedText, part: str) -> list[tuple[str, str]]:
    """The pairs of a prepared text, decoded."""
    kept, both = getattr(prepared, part), prepared.tokenizers
    return [(both.src.decode(kept.row("src", i)), both.tgt.decode(kept.row("tgt", i))) for i in range(len(kept))]


def content(folder: Path) -> dict[str, bytes]:
    """The files of a prepared text without its manifest."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
