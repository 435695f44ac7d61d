"""The run folder, the unit of everything after training.

```
run.json          format, versions, when and how it was made
config.toml       every option, resolved
tokenizer.json    text ↔ ids
weights/          best, average and step-N .safetensors; start, of a run that began with another's
state/step-N/     what training continues from
log.jsonl         one line for each logged step and each validation
tensorboard/      the same as TensorBoard events
scores.json       validation scores of the weights, and which are used by default
card.md           the same for people
store/            the tokenised training text
alignment.json    the heads that align words best, once they were looked for
shortlist.safetensors   the target tokens that each source token can need, once they were learned
```
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.options import Config
from qkv.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qkv.models.base import Model

FORMAT = 1
STEP = re.compile(r"step-(\d+)")
SEVERAL = 0.1  # from this share of training lines with several sentences on, a text is translated as a whole


@dataclass(frozen=True)
class Run:
    """A run folder on disk; nothing is read before it is asked for."""

    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        tokenizers: TokenizerPair,
        store: Path | None = None,
        command: str = "",
        start: Run | None = None,
        several_sentences: float = 0.0,
    ) -> Run:
        """A new run folder, in which what will be trained is settled; `run.json` comes last and makes it one.

        `several_sentences` is the share of source lines with several sentences. `store` is where the tokenised text
        lies, if not in the folder itself; `start` is a run whose weights it begins with, which are copied: that run may
        go its own way.
        """
        import torch

        from qkv import __version__

        run = cls(path)
        made = {
            "format": FORMAT,
            "qkv": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "store": "store" if store is None or store == path / "store" else str(store.resolve()),
            "several_sentences": several_sentences,
        }
        path.mkdir(parents=True, exist_ok=True)
        tokenizers.save(path / "tokenizer.json")
        run.write_config(config)
        if start is not None:
            made["start"] = str(start.path.resolve())
            run.start.parent.mkdir(exist_ok=True)
            shutil.copyfile(start.weights(), run.start)
        files.write_text(run.marker, json.dumps(made, indent=2) + "\n")
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """An existing run folder; anything else is refused with the reason."""
        run = cls(Path(path))
        if not run.path.exists():
            raise UsageError(f"{path}: no such run folder: train one with `qkv train … --run {path}`")
        if not run.exists():
            raise UsageError(f"{path}: not a run folder (no run.json in it): give the folder that --run named")
        found = run.about.get("format")
        if found != FORMAT:
            raise QkvError(
                f"{path}: run folder of format {found}, but this qkv reads format {FORMAT}: "
                f"use the qkv version named in {run.marker}"
            )
        return run

    @property
    def marker(self) -> Path:
        return self.path / "run.json"

    def exists(self) -> bool:
        return self.marker.is_file()

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says: format, versions, when and by which command it was made."""
        return _read_json(self.marker)

    @property
    def by_sentence(self) -> bool:
        """Whether texts are translated sentence by sentence: the training text had mostly one sentence in a line.

        An older run folder has no record of that, and its texts are translated sentence by sentence.
        """
        return bool(self.about.get("several_sentences", 0.0) < SEVERAL)

    @property
    def store(self) -> Path:
        """The tokenised text: in the run folder, or where several runs share it."""
        return self.path / (self.about.get("store", "store") if self.exists() else "store")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training in this folder at the same time; the folder itself is what is locked."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(folder)
            raise UsageError(f"{self.path}: another process is training here: wait for it, or stop it") from None
        try:
            yield
        finally:
            os.close(folder)

    def in_training(self) -> bool:
        """Whether a process is training in this folder now."""
        try:
            with self.lock():
                return False
        except UsageError:
            return True

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @cached_property
    def config(self) -> Config:
        return Config.load(self.path / "config.toml")

    def write_config(self, config: Config) -> None:
        files.write_text(self.path / "config.toml", config.dumps())
        self.__dict__.pop("config", None)

    @cached_property
    def tokenizers(self) -> TokenizerPair:
        return TokenizerPair.load(self.path / "tokenizer.json")

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Validation scores by name of the weights, and `chosen`: the name used by default."""
        path = self.path / "scores.json"
        return _read_json(path) if path.exists() else {}

    def write_scores(self, scores: dict[str, Any]) -> None:
        files.write_text(self.path / "scores.json", json.dumps(scores, indent=2) + "\n")
        self.__dict__.pop("scores", None)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @property
    def start(self) -> Path:
        """The weights that training begins with, where it does not begin with random ones."""
        return self.path / "weights" / "start.safetensors"

    def checkpoints(self) -> list[Path]:
        """The weights kept from single steps, oldest first."""
        return by_step((self.path / "weights").glob("step-*.safetensors"))

    def weights(self, name: str = "") -> Path:
        """The file of the named weights: best, average, last, a step number, or the chosen ones by default."""
        name = name or self.scores.get("chosen", "best")
        if name == "last":
            kept = self.checkpoints()
            name = kept[-1].stem if kept else name
        elif name.isdigit():
            name = f"step-{int(name):07d}"
        path = self.path / "weights" / f"{name}.safetensors"
        if not path.exists():
            there = ", ".join(sorted(each.stem for each in path.parent.glob("*.safetensors")))
            raise UsageError(f"{self.path}: {f'no weights named {name}: there are {there}' if there else self._none()}")
        return path

    def _none(self) -> str:
        """Why there are no weights at all, and what to do."""
        if self.scores:  # so there were some
            return "no weights: restore them from a copy, or train again"
        spec = self.config.train
        first = min(spec.validate_every, spec.steps)
        remedy = "wait for it" if self.in_training() else f"go on with `qkv train --resume --run {self.path}`"
        return f"no weights yet: the first come with the first validation, at step {first:,}: {remedy}"

    def model(self, device: torch.device, weights: str = "") -> Model:
        """The trained model, ready for use."""
        from qkv.models.build import build

        model = build(self.config.model, self.tokenizers.src.size, self.tokenizers.tgt.size)
        path = self.weights(weights)
        load_weights(model, files.read_tensors(path), path)
        return model.to(device).eval()


def find_config(name: str) -> Config:
    """A config by what a user calls it: a preset, a run folder, or a TOML file."""
    if name in PRESETS:
        return PRESETS[name]()
    if Path(name).is_dir():
        return Run.open(name).config
    if Path(name).exists():
        if Path(name).suffix != ".toml":
            raise UsageError(f"{name}: not a .toml file: a config is one, and text is given with --src and --tgt")
        return Config.load(name)
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(PRESETS)}"
    raise UsageError(f"{name}: no such preset, config file or run folder: {hint}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise QkvError(f"{path}: damaged: restore it from a copy, or train again")
    return values


def step_of(path: Path) -> int:
    """N of a path named step-N…, or -1."""
    found = STEP.match(path.name)
    return int(found[1]) if found else -1


def by_step(paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that are named step-N…, in order of N."""
    return sorted((path for path in paths if step_of(path) >= 0), key=step_of)


def load_weights(model: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a model; names or shapes that do not fit are refused, naming the first that differs."""
    import torch

    parameters = dict(model.named_parameters())
    for name in [*parameters, *tensors]:
        ours = tuple(parameters[name].shape) if name in parameters else "nothing"
        theirs = tuple(tensors[name].shape) if name in tensors else "nothing"
        if ours != theirs:
            raise QkvError(f"{path}: weights of another model: {name} is {theirs} in the file and {ours} in the config")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
