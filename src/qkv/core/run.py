"""The run folder: the results of one training, and its log. Rings add files of their own.

```
run.json          format, versions, date and command of its creation
config.toml       every option, resolved
tokenizer.json    text ↔ ids
weights/          best, average and step-N .safetensors
state/step-N/     the state that a resumed training continues from
log.jsonl         one line for each logged step and each validation
scores.json       validation scores of the weights, and the default weights
store/            the tokenised training text
```
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from qkv.core import files
from qkv.core.config import Config, TransformerConfig
from qkv.core.device import ALONE, World
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Model, Transformer

Record = TypeVar("Record")
FORMAT = 1
STEP = re.compile(r"step-(\d+)(\.safetensors)?")


@dataclass(frozen=True)
class Run:
    """A run folder on disk; each file is read when it is first needed."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, tokenizers: TokenizerPair, **more: Any) -> Self:
        """Write a new run folder, ready for training; `run.json`, with more entries, is last and marks it complete."""
        from qkv import __version__

        run = cls(path)
        versions = {"qkv": __version__, "torch": torch.__version__, "python": platform.python_version()}
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"format": FORMAT, **versions, "begun": begun, "command": "", **more}
        tokenizers.save(path / "tokenizer.json")
        run.write_config(config)
        files.write_text(path / "run.json", json.dumps(about, indent=2) + "\n")
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run folder; refuse anything else with the reason."""
        run = cls(Path(path))
        if not run.path.exists():
            raise UsageError(f"{path}: no such run folder: train one with `qkv train … --run {path}`")
        if not run.exists():
            raise UsageError(f"{path}: not a run folder (no run.json in it): give the folder that --run named")
        if (version := run.about.get("format")) != FORMAT:
            problem = f"run folder of format {version}, but this qkv reads format {FORMAT}"
            raise QkvError(f"{path}: {problem}: use the qkv version named in {run.path / 'run.json'}")
        return run

    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    @cached_property
    def about(self) -> dict[str, Any]:
        """The content of run.json: format, versions, date and command of the creation."""
        return read_record(self.path / "run.json", dict)

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

    @property
    def scores(self) -> dict[str, Any]:
        """Validation scores by name of the weights; `chosen` is the name used by default."""
        path = self.path / "scores.json"
        return read_record(path, dict) if path.exists() else {}

    def write_scores(self, scores: dict[str, Any]) -> None:
        files.write_text(self.path / "scores.json", json.dumps(scores, indent=2) + "\n")

    # ---- weights -----------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Return the weights kept at the last validations, oldest first."""
        return list(by_step(self.path / "weights").values())

    def weights(self, name: str = "") -> Path:
        """Return the file of the named weights: best, average or step-N; by default the chosen ones."""
        name = name or self.scores.get("chosen", "best")
        path = self.path / "weights" / f"{name}.safetensors"
        if not path.exists():
            names = ", ".join(sorted(each.stem for each in path.parent.glob("*.safetensors")))
            problem = f"no weights named {name}: there are {names}" if names else self.no_weights()
            raise UsageError(f"{self.path}: {problem}")
        return path

    def no_weights(self) -> str:
        """Explain why there are no weights at all, and what to do."""
        return "no weights: the first come with the first validation of a training"

    def build_model(self) -> Model:
        """Return a model of the run's config, not yet trained."""
        assert isinstance(self.config.model, TransformerConfig)
        return Transformer(self.config.model, self.tokenizers.src.size, self.tokenizers.tgt.size)

    def model(self, device: torch.device, weights: str = "", about: dict[str, str] | None = None) -> Model:
        """Return the trained model, ready for use; the metadata of its weights, e.g. their step, go into `about`."""
        model, path = self.build_model(), self.weights(weights)
        load_weights(dict(model.named_parameters()), files.read_tensors(path, about), path)
        return model.to(device).eval()

    def keep_weights(self, name: str, model: nn.Module, step: int) -> None:
        """Write the weights that a model has at this step under a name."""
        about = {"format": "pt", "step": str(step), "made by": "qkv"}
        files.write_tensors(self.path / "weights" / f"{name}.safetensors", dict(model.named_parameters()), about)


def read_record(path: Path, kind: Callable[..., Record]) -> Record:
    """Return the object in a JSON file of a run, as a dict or another class; refuse a damaged file."""
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise QkvError(f"{path}: damaged: restore it from a copy, or train again") from None


def by_step(folder: Path) -> dict[int, Path]:
    """Return the paths in a folder that are named step-N…, by N in ascending order."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def load_weights(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path, world: World = ALONE) -> None:
    """Copy tensors into parameters; refuse other names or shapes, naming the first tensor that differs."""
    for name in [*into, *tensors]:
        ours, theirs = (tuple(each[name].shape) if name in each else "nothing" for each in (into, tensors))
        if ours != theirs:
            raise QkvError(f"{path}: weights of another model: {name} is {theirs} in the file and {ours} in the config")
    with torch.no_grad():
        for name, parameter in into.items():
            parameter.copy_(world.part(tensors[name], parameter))


# ---- the log ---------------------------------------------------------------------------------------------------------


class LogSink(Protocol):
    """Receives the events of a training, on rank 0 only.

    Kinds: `start` (last_step, validated), `message` (text), `progress` (after every update), `train` (a logged update),
    `valid` (a validation) and `given_up` (number, update: the last of too many without a finite loss).
    """

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class JsonlLog:
    """Log sink that appends `train` and `valid` events to log.jsonl, one line of JSON each."""

    path: Path

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append an event; at the start of a resumed run, drop the lines of steps that will come again."""
        if kind == "start":
            self.path.touch()
            content, kept = self.path.read_bytes(), b""
            for line in content.split(b"\n"):
                with suppress(ValueError, KeyError, TypeError):  # a killed run may have cut its last line
                    entry = json.loads(line)
                    last = values["validated"] if entry["event"] == "valid" else step
                    kept += line + b"\n" if entry["step"] <= last else b""
            if kept != content:
                files.write_text(self.path, kept.decode())
        elif kind in ("train", "valid"):
            entry = {"event": kind, "step": step, **values}
            for name, value in values.items():
                if isinstance(value, float):  # six digits; JSON has no infinity and no NaN
                    entry[name] = float(f"{value:.6g}") if math.isfinite(value) else None
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
