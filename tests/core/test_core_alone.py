"""The core by itself: with every ring blocked it prepares text, trains, resumes and translates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.core.files import read_tensors

CORE = Path(__file__).parents[2] / "src" / "qkv" / "core"
MODULES = """
    config corpus tokenizer preparation dataset batches attention transformer loss optimizer trainer
    checkpoint run search validation translate errors files device
""".split()
LINES = 4_000

# Trains in a folder; the process can import qkv.core and no other package of qkv. With `stop`, the process kills
# itself before that update; the same command again resumes.
ALONE = """
import importlib.abc, json, os, signal, sys
from pathlib import Path

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("qkv.") and name != "qkv.core" and not name.startswith("qkv.core."):
            raise ImportError(f"{name} is blocked: core imports nothing else of qkv")

sys.meta_path.insert(0, Block())

import torch
from qkv.core.config import Config
from qkv.core.corpus import find_corpus
from qkv.core.loss import SmoothedObjective
from qkv.core.optimizer import ConfigSchedule, build_optimizer
from qkv.core.preparation import Sentences, length_filters, prepare
from qkv.core.dataset import StoreFolder
from qkv.core.run import Run
from qkv.core.search import SearchOptions
from qkv.core.trainer import PlainTrainStep, Trainer
from qkv.core.device import ALONE
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.core.validation import TranslationTask

folder, stop = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
config = Config.from_dict(json.loads((folder / "config.json").read_text()))
corpora = [find_corpus(corpus, config.data) for corpus in config.data.train]
sentences = Sentences(config.data, length_filters(config.data))
text = prepare(corpora, [], sentences, config.tokenizer, StoreFolder(folder / "run" / "store"))
run = Run(folder / "run")
if not run.exists():
    run = Run.create(folder / "run", config, text.tokenizers)

class Messages:
    def event(self, kind, step, values):
        if kind == "message":
            print(values["text"], file=sys.stderr)

class Step(PlainTrainStep):
    def start(self, update, number, rate):
        if number == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(update, number, rate)

pad, cpu = text.tokenizers.tgt.pad, torch.device("cpu")
torch.manual_seed(config.train.seed)
model = Transformer(config.model, text.tokenizers.src.size, text.tokenizers.tgt.size)
task = TranslationTask()
updates = task.updates(text, config, cpu, ALONE)
objective = SmoothedObjective(config.train.label_smoothing, pad)
step = Step(model, build_optimizer(model, config.train), config.train, objective)
schedule = ConfigSchedule(config.train, config.model.d_model, updates)
Trainer(config, text, step, task, updates, schedule).fit(run, [Messages()])

model = Run.open(folder / "run").model(cpu)
src, tgt = text.tokenizers.src, text.tokenizers.tgt
sources = [src.encode(line) for line in (folder / "test.src").read_text().splitlines()]
for beam in (1, 4):
    options = SearchOptions(**vars(config.decode) | {"beam": beam})
    found = search_all(model, sources, options, text.tokenizers, device=cpu)
    print(json.dumps([tgt.decode(hypotheses[0].tokens) for hypotheses in found]))
assert not [name for name in sys.modules if name.startswith("qkv.") and not name.startswith("qkv.core")]
"""

SMALL = {
    "model": {"d_model": 64, "d_ff": 128, "heads": 4, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
    "tokenizer": {"vocab": 0},
    "decode": {"extra_length": 10},
}
TRAIN = {
    "tokens_per_step": 1024, "schedule": "cosine", "learning_rate": 3e-3, "warmup": 30, "clip": 1.0, "average": 2,
    "log_every": 10, "device": "cpu", "metric": "loss", "label_smoothing": 0.0,
}  # fmt: skip


def write(folder: Path, pairs: list[tuple[str, str]], test: list[str], **train: Any) -> Path:
    """Write the text and the config of a training."""
    folder.mkdir(parents=True)
    for side, lines in zip(("src", "tgt"), zip(*pairs, strict=True), strict=True):
        (folder / f"train.{side}").write_text("".join(f"{line}\n" for line in lines))
    (folder / "test.src").write_text("".join(f"{line}\n" for line in test))
    data = {"train": [{"src": f"{folder}/train.src", "tgt": f"{folder}/train.tgt"}], "max_length": 32}
    (folder / "config.json").write_text(json.dumps({**SMALL, "data": data, "train": TRAIN | train}))
    return folder


def start(folder: Path, stop: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, str(folder), str(stop)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def words(count: int, seed: int) -> list[str]:
    pick = random.Random(seed)
    return [" ".join(pick.choices("abcdefgh", k=pick.randint(2, 6))) for _ in range(count)]


@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_core_learns_and_translates_by_itself(task: str, tmp_path: Path) -> None:
    answer = {"copy": lambda line: line, "reverse": lambda line: line[::-1]}[task]
    test = words(40, seed=2)
    pairs = [(line, answer(line)) for line in words(3000, seed=1)]
    done = start(write(tmp_path / "work", pairs, test, steps=400, validate_every=200))
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():  # greedy, then beam search
        right = [ours == answer(source) for ours, source in zip(json.loads(line), test, strict=True)]
        assert sum(right) >= 36
    assert (tmp_path / "work" / "run" / "scores.json").exists()


def test_core_resumes_to_the_same_bits_by_itself(tmp_path: Path) -> None:
    pairs, test = [(line, line.upper()) for line in words(400, seed=3)], words(4, seed=4)
    options: dict[str, Any] = {"steps": 30, "validate_every": 8, "micro_tokens": 512, "metric": "bleu"}
    once, again = (write(tmp_path / name, pairs, test, **options) for name in ("once", "again"))
    whole = start(once)
    assert whole.returncode == 0, whole.stderr
    for stop in (13, 27):
        assert start(again, stop).returncode == -9
    resumed = start(again)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout
    weights = sorted(path.relative_to(once) for path in once.rglob("weights/*.safetensors"))
    assert len(weights) == 4  # the last two, the best and the average
    for path in weights:
        ours, theirs = (read_tensors(folder / path) for folder in (once, again))
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), path


def test_core_has_the_modules_of_the_map() -> None:
    modules = {path.stem for path in CORE.glob("*.py")} - {"__init__"}
    assert modules == set(MODULES)
    assert len(modules) <= 19


def test_core_can_be_read_in_an_afternoon() -> None:
    modules = [path for path in CORE.glob("*.py") if path.name != "__init__.py"]
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert sum(lines.values()) <= LINES, lines
