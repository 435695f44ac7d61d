"""Fixtures of all tests: a small language learned in seconds, one model of it, and the command line in-process."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    import qkv
    from qkv.core.batches import Update
    from qkv.core.config import DataConfig
    from qkv.core.dataset import PreparedText
    from qkv.core.trainer import Trainer
    from qkv.options import Config

# For torch, which is imported later, and for subprocesses. One thread: the models are tiny, the tests many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parent
PATHS = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))

# No deadline: a test never asserts a time. "fixed" draws the same examples everywhere, so that a failure repeats;
# HYPOTHESIS_PROFILE=random draws new ones in each run and prints how to repeat a failure.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

PATIENCE = 300.0  # seconds before a test gives up waiting; no test asserts how long anything takes


def wait_until(true: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.01)


def pytest_configure() -> None:
    """Deliver SIGINT to the tests and the processes they start, also where the tests run in the background of a shell.

    A shell without job control starts `make test &` with SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


WORDS = dict(
    pair.split(":")
    for pair in """
        one:uno two:due three:tre the:il cat:gatto dog:cane red:rosso sees:vede and:e big:grande small:piccolo
        house:casa runs:corre good:buono day:giorno
    """.split()
)


def sentences(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """Sentences of one to seven words and their translations, word by word."""
    pick = random.Random(seed)
    drawn = [pick.choices(list(WORDS), k=pick.randint(1, 7)) for _ in range(count)]
    return [(_sentence(words), _sentence(WORDS[word] for word in words)) for words in drawn]


def _sentence(words: Iterable[str]) -> str:
    return " ".join(words).capitalize() + "."


def write_pairs(folder: Path, pairs: Iterable[tuple[str, str]], name: str = "text") -> tuple[str, str]:
    """Two parallel files, name.src and name.tgt; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.src", folder / f"{name}.tgt"
    for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return str(paths[0]), str(paths[1])


def tiny_config(src: str, tgt: str, **train: object) -> Config:
    """Config of a model that learns the small language almost perfectly in its 200 steps."""
    from qkv.options import Config

    values = {
        "steps": 200,
        "tokens_per_step": 1024,
        "schedule": "cosine",
        "learning_rate": 5e-3,
        "warmup": 20,
        "clip": 1.0,
        "validate_every": 100,
        "average": 2,
        "log_every": 20,
        "device": "cpu",
        "tensorboard": False,
    }
    return Config().replace(
        data={"train": [{"src": src, "tgt": tgt}], "max_length": 32, "src_lang": "en", "tgt_lang": "it"},
        model={
            "d_model": 64,
            "d_ff": 128,
            "heads": 2,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "norm": "pre",
            "dropout": 0.0,
        },
        train=values | train,
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """1500 pairs of the small language, in two files."""
    return write_pairs(tmp_path_factory.mktemp("corpus"), sentences(1500))


@pytest.fixture(scope="session")
def tiny(corpus: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model trained once for all tests, which must not change it."""
    import qkv

    return qkv.train(tiny_config(*corpus, tensorboard=True), tmp_path_factory.mktemp("runs") / "tiny").path


@pytest.fixture(scope="module")
def translator(tiny: Path) -> qkv.Translator:
    """The model of the small language, loaded once for each file of tests."""
    import qkv

    return qkv.Translator(tiny, device="cpu")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small language model."""
    from serving import train_language_model

    return train_language_model(tmp_path_factory.mktemp("writer"))


@pytest.fixture
def split(tmp_path: Path) -> DataConfig:
    """The config of 300 training and 20 validation pairs in files."""
    from core_runs import distinct_pairs, write_corpus
    from qkv.core.config import DataConfig

    train = write_corpus(tmp_path, distinct_pairs(300))
    return DataConfig(train=(train,), valid=(write_corpus(tmp_path, distinct_pairs(20, seed=1), "valid"),))


def begun(folder: Path, spec: Config) -> tuple[Config, PreparedText]:
    """The resolved config and the prepared text of a new run inside the folder."""
    from qkv.api.run_training import _begin

    run, prepared = _begin(folder / f"run-{len(list(folder.iterdir()))}", spec, None, [], "", 1, None)
    return run.config, prepared


def updates(trainer: Trainer, count: int) -> list[Update]:
    """The next updates that a trainer would be given."""
    steps = trainer.updates.starting(trainer.progress.position)
    found = [next(steps) for _ in range(count)]
    steps.close()
    return found


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of them, by their names."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def leaves(**embeddings: nn.Module) -> dict[str, Tensor]:
    """What these modules give in the next run of their model, to differentiate by: filled in by that run."""
    given: dict[str, Tensor] = {}

    def leaf(name: str, _module: object, _arguments: object, output: Tensor) -> Tensor:
        given[name] = output.detach().requires_grad_()
        return given[name]

    for name, module in embeddings.items():
        module.register_forward_hook(partial(leaf, name))
    return given


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line on stderr: the error message; all lines before it are progress."""
        assert self.code, self.err
        assert "Traceback" not in self.err
        *_, last = self.err.splitlines()
        assert last.startswith("qkv: ")
        assert self.err.count("qkv: ") == 1, self.err
        return last


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line in this process: `call("translate", run, input=b"…")`."""

    def run(*arguments: object, input: bytes = b"") -> Done:
        from qkv.cli import main

        stdin, stdout, stderr = (io.TextIOWrapper(io.BytesIO(data)) for data in (input, b"", b""))
        before = signal.getsignal(signal.SIGTERM)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["qkv", *map(str, arguments)])
            patch.setattr(sys, "stdin", stdin)
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            with pytest.raises(SystemExit) as end:
                main()
        signal.signal(signal.SIGTERM, before)
        return Done(int(end.value.code or 0), _written(stdout), _written(stderr))

    return run


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def step_of(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return what a state saves of a training step: the model and the optimizer, in one process, without an average."""
    from qkv.core.device import ALONE

    return SimpleNamespace(model=model, optimizer=optimizer, average=None, world=ALONE)


def resume(folder: Path, broken: Trainer, resumed: Trainer) -> None:
    """Resume a trainer from the state that another one saved in the files of a run."""
    from qkv.assembly import Run
    from qkv.core.checkpoint import latest_state, restore_state, save_state

    run = Run.create(folder, broken.config, broken.text.tokenizers)
    save_state(run, broken.progress, broken.train_step)
    state = latest_state(run)
    assert state is not None
    resumed.go_on_from(restore_state(state, resumed.train_step))
