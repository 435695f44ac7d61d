"""The configuration: a few frozen dataclasses, read from and written to TOML.

Every option is declared once with its default, its meaning and its bounds. Here are the options of the paper (sections
3 to 6); `qkv.options` extends these classes by inheritance with what the rings add.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from qkv.core.errors import UsageError

T = TypeVar("T")
type_hints = cache(typing.get_type_hints)  # every request makes a config


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """Declare an option: a dataclass field with its meaning and the values it may take."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


# ---- the sections ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusConfig:
    """A parallel corpus: two text files, line N of one the translation of line N of the other."""

    src: str = option("", "source side: a text file")
    tgt: str = option("", "target side, parallel to src line by line")
    weight: float = option(
        1.0, "how often an epoch visits this corpus: 2: twice, 0.5: a random half, 0: never", low=0.0
    )
    tag: str = option("", "language tag put before every source sentence, e.g. de")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and which lines are kept."""

    train: tuple[CorpusConfig, ...] = option((), "training corpora")
    valid: tuple[CorpusConfig, ...] = option((), "validation corpora; without one, a part of train is held out")
    root: str = option("", "folder that relative corpus paths start from")
    valid_size: int = option(0, "pairs to hold out without a validation set; 0: chosen by corpus size", low=0)
    max_length: int = option(256, "longest sentence kept for training, in tokens; a language model's context", low=1)
    max_ratio: float = option(5.0, "largest ratio of token counts between the two sides; 0: no limit", low=0.0)
    dedupe: bool = option(True, "drop repeated sentence pairs")
    on_bad: str = option("error", "what to do with a line that is not UTF-8", choices=("error", "skip"))
    seed: int = option(1, "decides the held-out pairs and the sample the vocabulary is learned from", low=0, high=10**9)


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes ids."""

    vocab: int = option(0, "number of tokens, special and byte tokens included; 0: chosen by corpus size", low=0)
    shared: bool = option(True, "one vocabulary for both sides (the paper's choice) or one for each")
    sample: int = option(200_000, "lines a side the vocabulary is learned from", low=1)


@dataclass(frozen=True)
class ModelConfig:
    """A kind of model: the fields that training and search need of every kind."""

    kind: str = option("", "kind of model")
    d_model: int = option(512, "width of the residual stream", low=1)
    dropout: float = option(0.1, "dropout on sub-layer outputs and embeddings (section 5.4)", low=0.0, high=0.99)

    def check(self, longest: int) -> None:
        """Refuse sizes that do not fit together; `longest` is the longest possible sequence in tokens."""


@dataclass(frozen=True)
class AttentionModelConfig(ModelConfig):
    """Sizes shared by all stacks of attention layers (paper, sections 3.2 to 3.5)."""

    d_ff: int = option(2048, "inner width of the feed-forward layers", low=1)
    heads: int = option(8, "attention heads", low=1)
    d_k: int = option(0, "width of a query or key in one head; 0: d_model / heads", low=0)
    d_v: int = option(0, "width of a value in one head; 0: d_model / heads", low=0)
    positions: str = option("sinusoidal", "position encoding", choices=("sinusoidal",))

    @property
    def key_width(self) -> int:
        return self.d_k or self.d_model // self.heads

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_model // self.heads

    def check(self, longest: int) -> None:
        if self.d_model % self.heads and not (self.d_k and self.d_v):
            raise UsageError(
                f"model.heads = {self.heads} does not divide model.d_model = {self.d_model}: "
                f"choose heads that divide it, or set model.d_k and model.d_v"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: sinusoidal positions need an even width")


TIE = "which of the embeddings and the output projection share one matrix"


@dataclass(frozen=True)
class TransformerConfig(AttentionModelConfig):
    """The paper's encoder-decoder."""

    kind: str = option("transformer", "kind of model", choices=("transformer",))
    encoder_layers: int = option(6, "layers of the encoder stack", low=1)
    decoder_layers: int = option(6, "layers of the decoder stack", low=1)
    tie: str = option("all", TIE, choices=("all", "output", "none"))


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: batch size, schedule, validation."""

    steps: int = option(100_000, "optimizer updates", low=1)
    epochs: float = option(0.0, "stop after this many passes over the data; 0: no limit", low=0.0)
    tokens_per_step: int = option(25_000, "padded tokens a side in one update, over all devices", low=1)
    micro_tokens: int = option(0, "padded tokens a side in one micro-batch; 0: tokens_per_step", low=0)
    beta1: float = option(0.9, "Adam's decay of the first moment", low=0.0, high=1.0)
    beta2: float = option(0.98, "Adam's decay of the second moment", low=0.0, high=1.0)
    eps: float = option(1e-9, "Adam's epsilon", low=0.0)
    schedule: str = option(
        "paper",
        "learning rate over time; all begin with a linear warm-up; wsd stays, then falls in the last 30 % of the steps",
        choices=("paper", "inverse_sqrt", "cosine", "linear", "constant", "wsd"),
    )
    learning_rate: float = option(1.0, "peak learning rate; for the paper's schedule, a factor on it", low=0.0)
    warmup: int = option(4000, "steps of linear warm-up", low=0)
    clip: float = option(0.0, "largest gradient norm; 0: no clipping (the paper)", low=0.0)
    label_smoothing: float = option(0.1, "probability mass spread evenly over all tokens", low=0.0, high=1.0)
    average: int = option(5, "checkpoints averaged at the end (the paper's 5 or 20); 0: none", low=0)
    precision: str = option("auto", "auto: bf16 on a GPU that has it, fp32 elsewhere", choices=("auto", "fp32", "bf16"))
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps …")
    validate_every: int = option(1000, "steps between validations and checkpoints", low=1)
    metric: str = option(
        "bleu",
        "metric of the best checkpoint; loss computes no BLEU; models without a source always use loss",
        choices=("bleu", "loss"),
    )
    patience: int = option(0, "stop after this many validations without a better metric; 0: never", low=0)
    log_every: int = option(50, "steps between lines of the log", low=1)
    seed: int = option(1, "seed of weights, order of batches and dropout", low=0, high=10**9)


@dataclass(frozen=True)
class DecodeConfig:
    """Search for a translation."""

    beam: int = option(4, "hypotheses kept at each step; 1 is greedy", low=1)
    length_penalty: str = option("gnmt", "how scores of different lengths compare", choices=("gnmt", "average", "none"))
    alpha: float = option(0.6, "strength of the gnmt penalty", low=0.0)
    extra_length: int = option(50, "longest output: input length + this many tokens", low=0)
    batch_tokens: int = option(0, "padded source tokens decoded at once, over all beams; 0: chosen by device", low=0)


# ---- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that cannot work; the message names the option and the remedy."""
        for name, section in vars(self).items():
            _check_values(section, name)
        self.model.check(self.longest())
        if getattr(self.model, "tie", "") == "all" and not self.tokenizer.shared:
            remedy = 'set model.tie = "output" for two vocabularies'
            raise UsageError(f'model.tie = "all" needs tokenizer.shared = true: {remedy}')
        train = self.train
        if train.micro_tokens > train.tokens_per_step:
            raise UsageError(
                f"train.micro_tokens = {train.micro_tokens} is more than train.tokens_per_step = "
                f"{train.tokens_per_step}, which it divides: lower the first or raise the second"
            )
        if self.data.max_length >= (batch := train.micro_tokens or train.tokens_per_step):
            raise UsageError(
                f"data.max_length = {self.data.max_length} leaves no room for such a sentence in a batch of {batch} "
                f"tokens: raise train.tokens_per_step and train.micro_tokens above it, or lower data.max_length"
            )
        if 1.0 in (train.beta1, train.beta2):
            raise UsageError("train.beta1 and train.beta2 must be below 1: with 1 the moment never changes")
        if train.eps == 0:
            raise UsageError("train.eps = 0: Adam divides by zero where a gradient is zero: set it above 0, e.g. 1e-9")

    def longest(self) -> int:
        """Return the longest sequence in tokens: source + extra_length, with a tag or <s>, and </s>."""
        return self.data.max_length + self.decode.extra_length + 2

    # ---- TOML --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a config file; an unknown key, a wrong type or a bad value is an error that names it."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
            return cls.from_dict(tomllib.loads(text))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}: give a config file, a preset or a run folder") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path}: not a text file: a config file is TOML in UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: not valid TOML: {error}") from None
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from nested tables; missing options get their defaults."""
        return cls._build(cls, values, "")

    def dumps(self) -> str:
        """Write the config as TOML, every option included; `load` returns an equal config."""
        lines: list[str] = []
        for section, values in vars(self).items():
            tables = {name: value for name, value in vars(values).items() if isinstance(value, tuple)}
            lines.append(f"[{section}]")
            lines += [f"{name} = {_toml(value)}" for name, value in vars(values).items() if name not in tables]
            for name, item in ((name, item) for name, items in tables.items() for item in items):
                lines.append(f"\n[[{section}.{name}]]")
                lines += [f"{key} = {_toml(value)}" for key, value in vars(item).items()]
            lines.append("")
        return "\n".join(lines)

    @classmethod
    def _build(cls, section: type[T], values: Any, path: str) -> T:
        """Build a dataclass from a table: nested tables become dataclasses, lists of tables tuples of them."""
        if isinstance(values, section):
            return values
        if not isinstance(values, Mapping):
            raise UsageError(f"{path or 'the config'}: expected a table of options, got {values!r}")
        hints = type_hints(typing.cast(Any, section))
        known = [spec.name for spec in dataclasses.fields(section)]  # type: ignore[arg-type]
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise UsageError(unknown_key("option" if path else "section", key, known, path))
            where = f"{path}.{key}" if path else key
            hint = cls.model_class(value) if where == "model" else hints[key]
            if dataclasses.is_dataclass(hint):
                arguments[key] = cls._build(typing.cast(type[Any], hint), value, where)
            elif typing.get_origin(hint) is tuple:
                items = value if isinstance(value, list | tuple) else [value]
                item = typing.get_args(hint)[0]
                arguments[key] = tuple(cls._build(item, v, f"{where}[{i}]") for i, v in enumerate(items))
            else:
                arguments[key] = float(value) if hint is float and type(value) is int else value
        return section(**arguments)

    @classmethod
    def model_class(cls, values: Any) -> type[ModelConfig]:
        """Return the class of the model section with these values."""
        return TransformerConfig


def _check_values(section: Any, path: str) -> None:
    """Refuse a value of another type or out of its bounds, and one that is not among the choices."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", tuple: "a tuple"}
    for spec in dataclasses.fields(section):
        name, value, kind = f"{path}.{spec.name}", getattr(section, spec.name), type(spec.default)
        choices, low, high = spec.metadata["choices"], spec.metadata["low"], spec.metadata["high"]
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise UsageError(f"{name} = {value!r}: expected {names[kind]}")
        if kind is float and not math.isfinite(value):
            raise UsageError(f"{name} = {value}: expected a finite number")
        if kind is str and value.encode("utf-8", "replace").decode() != value:
            raise UsageError(f"{name} = {value!r}: not valid Unicode, so it cannot be written to a file")
        if choices and value not in choices:
            nearest = difflib.get_close_matches(value, choices, n=1, cutoff=0.0)
            raise UsageError(f'{name} = "{value}": choose one of {", ".join(choices)} (nearest: {nearest[0]})')
        if low is not None and value < low:
            raise UsageError(f"{name} = {value}: must be at least {low:g}")
        if high is not None and value > high:
            raise UsageError(f"{name} = {value}: must be at most {high:g}")
        for i, corpus in enumerate(value if kind is tuple else ()):
            _check_values(corpus, f"{name}[{i}]")


def _toml(value: Any) -> str:
    # JSON's strings, finite numbers and booleans are TOML's too, except that TOML escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def unknown_key(what: str, key: str, known: list[str], path: str) -> str:
    """Return the message about an unknown key, with the nearest known one."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {path + '.' if path else ''}{nearest[0]}?" if nearest else f"known: {', '.join(known)}"
    return f"unknown {what} {path + '.' if path else ''}{key}: {hint}"
