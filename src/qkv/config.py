"""The configuration: a few frozen dataclasses, read from and written to TOML.

Every option is declared once, here, with its default, its meaning and its bounds; `docs/options.md`, the command line's
`--set section.key=value` and all error messages are made from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from qkv.core.errors import UsageError
from qkv.kinds import (
    MODEL_KINDS,
    AttentionModelConfig,
    ConvS2SConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TransformerConfig,
    TranslationConfig,
    option,
)

__all__ = [
    "MODEL_KINDS",
    "AttentionModelConfig",
    "Config",
    "ConvS2SConfig",
    "CorpusConfig",
    "DataConfig",
    "DecodeConfig",
    "DecoderOnlyConfig",
    "EncoderOnlyConfig",
    "ModelConfig",
    "RnnConfig",
    "TokenizerConfig",
    "TrainConfig",
    "TransformerConfig",
    "TranslationConfig",
]

T = TypeVar("T")


@dataclass(frozen=True)
class CorpusConfig:
    """One source of text: two parallel files, one .tsv or .jsonl file with both sides, or plain text."""

    src: str = option("", "source side: a text file, or a .tsv/.jsonl file that holds both sides; - is standard input")
    tgt: str = option("", "target side, parallel to src line by line")
    text: str = option("", "plain text, for models that have no source")
    weight: float = option(1.0, "how often an epoch visits this corpus: 2 is twice, 0.5 a random half", low=0.0)
    tag: str = option("", "language tag put before every source sentence, e.g. de")
    align: str = option("", "links of words in src and tgt, cut at spaces: 0-0 1-2; for train.guided_alignment")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and which of it is kept."""

    train: tuple[CorpusConfig, ...] = option((), "training corpora")
    valid: tuple[CorpusConfig, ...] = option((), "validation corpora; when none is given, a part of train is held out")
    root: str = option("", "folder that relative corpus paths start from")
    store: str = option("", "folder for tokenised text shared between runs; empty: inside the run folder")
    src_lang: str = option("", "source language code, e.g. en; empty: as the names of the files tell")
    tgt_lang: str = option("", "target language code, e.g. de; empty: as the names of the files tell")
    valid_size: int = option(0, "pairs to hold out when no validation set is given; 0: chosen by corpus size", low=0)
    max_length: int = option(256, "longest sentence kept for training, in tokens; a language model's context", low=1)
    max_ratio: float = option(5.0, "largest ratio of token counts between the two sides; 0: no limit", low=0.0)
    dedupe: bool = option(True, "drop repeated sentence pairs")
    on_bad: str = option("error", "what to do with a line that is not UTF-8", choices=("error", "skip"))
    workers: int = option(0, "processes that tokenise; 0: one for each core", low=0)
    seed: int = option(1, "decides the held-out pairs and the sample that the vocabulary is learned from", low=0)


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes ids."""

    kind: str = option("bpe", "subword algorithm", choices=("bpe", "unigram", "word", "char"))
    vocab: int = option(0, "number of tokens, special and byte tokens included; 0: chosen by corpus size", low=0)
    shared: bool = option(True, "one vocabulary for both sides (the paper's choice) or one for each")
    dropout: float = option(0.0, "BPE-dropout: chance that a merge is left out while training", low=0.0, high=1.0)
    sample: int = option(200_000, "lines a side the vocabulary is learned from", low=1)


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: how long, how large a step, what is kept."""

    steps: int = option(100_000, "optimiser updates", low=1)
    epochs: float = option(0.0, "stop after this many passes over the data; 0: no limit", low=0.0)
    tokens_per_step: int = option(25_000, "padded tokens a side in one update, over all devices", low=1)
    micro_tokens: int = option(0, "padded tokens a side in one pass; 0: as many as leave under 5 % padding", low=0)
    checkpointing: bool = option(False, "compute activations again in the backward pass: less memory, more time")
    parallel: str = option(
        "data", "what processes of torchrun divide: the data, or weights and optimiser too", choices=("data", "sharded")
    )
    optimizer: str = option(
        "adam",
        "adam; adamw: with decoupled weight decay; muon, soap: these for the layers' matrices, adamw for the rest",
        choices=("adam", "adamw", "muon", "soap"),
    )
    beta1: float = option(0.9, "Adam's decay of the first moment", low=0.0, high=1.0)
    beta2: float = option(0.98, "Adam's decay of the second moment", low=0.0, high=1.0)
    eps: float = option(1e-9, "Adam's epsilon", low=0.0)
    weight_decay: float = option(0.0, "weight decay, for all but adam", low=0.0)
    schedule: str = option(
        "paper",
        "learning rate over time; all begin with a linear warm-up; wsd stays, then falls in the last 30 % of the steps",
        choices=("paper", "inverse_sqrt", "cosine", "linear", "constant", "wsd"),
    )
    learning_rate: float = option(1.0, "peak learning rate; for the paper's schedule, a factor on it", low=0.0)
    warmup: int = option(4000, "steps of linear warm-up", low=0)
    clip: float = option(0.0, "largest gradient norm; 0: no clipping (the paper)", low=0.0)
    label_smoothing: float = option(0.1, "probability mass given to all tokens alike", low=0.0, high=1.0)
    r_drop: float = option(
        0.0, "R-Drop: every batch passes twice under other dropout, and this weight draws the two together", low=0.0
    )
    guided_alignment: float = option(
        0.0, "weight of the objective that one head's attention follows the corpora's align; 0: none", low=0.0
    )
    ema: float = option(0.0, "decay of an exponential moving average of the weights; 0: none", low=0.0, high=1.0)
    average: int = option(5, "checkpoints averaged at the end (the paper's 5 or 20); 0: none", low=0)
    precision: str = option("auto", "auto: bf16 on a GPU that has it, fp32 elsewhere", choices=("auto", "fp32", "bf16"))
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps …")
    validate_every: int = option(1000, "steps between validations and checkpoints", low=1)
    metric: str = option(
        "bleu",
        "what decides the best checkpoint; with loss no BLEU is computed, without a source there is none",
        choices=("bleu", "loss"),
    )
    patience: int = option(0, "stop after this many validations without a better metric; 0: never", low=0)
    log_every: int = option(50, "steps between lines of the log", low=1)
    tensorboard: bool = option(True, "also write TensorBoard events")
    seed: int = option(1, "everything random in training follows from it; the text has data.seed", low=0, high=10**9)
    name: str = option("model", "the run folder is runs/NAME unless another is given")


@dataclass(frozen=True)
class DecodeConfig:
    """How a translation is searched for."""

    beam: int = option(4, "hypotheses kept at each step; 1 is greedy", low=1)
    length_penalty: str = option("gnmt", "how scores of different lengths compare", choices=("gnmt", "average", "none"))
    alpha: float = option(0.6, "strength of the gnmt penalty", low=0.0)
    extra_length: int = option(50, "longest output: input length + this many tokens", low=0)
    batch_tokens: int = option(0, "padded source tokens decoded at once, over all beams; 0: chosen by device", low=0)


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        check(self)

    def replace(self, **sections: Mapping[str, Any]) -> Config:
        """The same config with some options changed: `config.replace(train={"steps": 10})`."""
        tree: dict[str, dict[str, Any]] = {s.name: dict(vars(getattr(self, s.name))) for s in dataclasses.fields(self)}
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        return from_dict(tree)


DROPPING = ("model.dropout", "model.attention_dropout", "model.activation_dropout", "model.token_dropout")


def check(config: Config) -> None:
    """Refuse values that cannot work, naming the option and the remedy."""
    for path, spec, value in options(config):
        if isinstance(value, tuple):
            for i, corpus in enumerate(value):
                for part in dataclasses.fields(corpus):
                    _check_value(f"{path}[{i}].{part.name}", part, getattr(corpus, part.name))
        else:
            _check_value(path, spec, value)
    _check_model(config)
    _check_train(config)
    _check_layers(config)
    _check_alignment(config)
    if config.tokenizer.dropout and config.tokenizer.kind != "bpe":
        raise UsageError(f'tokenizer.dropout needs tokenizer.kind = "bpe", not "{config.tokenizer.kind}"')


def _check_model(config: Config) -> None:
    model, data = config.model, config.data
    # A translation may grow past its source, with a tag or <s>, and </s>; a language model's context never grows.
    longest = data.max_length + config.decode.extra_length + 2
    if not isinstance(model, TranslationConfig):
        longest = data.max_length + isinstance(model, EncoderOnlyConfig)  # which reads </s> too
    model.check(longest)
    if isinstance(model, TranslationConfig) and model.tie == "all" and not config.tokenizer.shared:
        raise UsageError(
            'model.tie = "all" needs tokenizer.shared = true: set model.tie = "output" for two vocabularies'
        )
    if config.tokenizer.dropout and not isinstance(model, TranslationConfig):
        raise UsageError(f'tokenizer.dropout is for models that translate, not for model.kind = "{model.kind}"')


def _check_train(config: Config) -> None:
    train, longest = config.train, config.data.max_length
    if train.micro_tokens > train.tokens_per_step:
        raise UsageError(
            f"train.micro_tokens = {train.micro_tokens} is more than train.tokens_per_step = {train.tokens_per_step}, "
            f"which it divides: lower the first or raise the second"
        )
    if longest >= (batch := train.micro_tokens or train.tokens_per_step):
        raise UsageError(
            f"data.max_length = {longest} leaves no room for such a sentence in a batch of {batch} tokens: "
            f"raise train.tokens_per_step and train.micro_tokens above it, or lower data.max_length"
        )
    if train.r_drop and not any(value for path, _, value in options(config) if path in DROPPING):
        raise UsageError(f"train.r_drop compares passes under different dropout: set {DROPPING[0]} above 0")
    if 1.0 in (train.beta1, train.beta2):
        raise UsageError("train.beta1 and train.beta2 must be below 1: an average that never changes teaches nothing")
    if train.weight_decay and train.optimizer == "adam":
        raise UsageError(
            'train.weight_decay is for train.optimizer = "adamw", "muon" or "soap": set one, or leave it out'
        )


def _check_layers(config: Config) -> None:
    """What is done layer by layer, and what is not then to be had."""
    train, model = config.train, config.model
    sharded = train.parallel == "sharded"
    if not isinstance(model, AttentionModelConfig):
        if train.checkpointing or sharded:
            chosen = "checkpointing = true" if train.checkpointing else 'parallel = "sharded"'
            raise UsageError(f"train.{chosen} is for layers of attention, not for {model.kind}: leave it out")
    elif sharded and train.optimizer in ("muon", "soap"):
        raise UsageError(
            f'train.optimizer = "{train.optimizer}" needs whole matrices, which train.parallel = "sharded" divides: '
            f'set optimizer = "adamw" or parallel = "data"'
        )
    elif sharded and train.guided_alignment and model.attention in ("additive", "general"):
        raise UsageError(
            f'train.guided_alignment reads the weights of model.attention = "{model.attention}", '
            f'which train.parallel = "sharded" divides: set parallel = "data"'
        )


def _check_alignment(config: Config) -> None:
    for i, corpus in enumerate(config.data.valid):
        if corpus.align:
            raise UsageError(f"data.valid[{i}].align teaches nothing: alignments are for data.train, leave it out")
    if any(corpus.align for corpus in config.data.train) and config.data.max_length >= 1 << 16:
        raise UsageError(f"data.max_length = {config.data.max_length}: with align, at most {(1 << 16) - 1}")
    if not config.train.guided_alignment:
        return
    if config.train.r_drop:
        raise UsageError("train.guided_alignment guides one pass, and train.r_drop takes two: set one to 0")
    if config.data.train and not any(corpus.align for corpus in config.data.train):
        raise UsageError("train.guided_alignment needs alignments: name their file as align in [[data.train]]")
    if not isinstance(config.model, TransformerConfig):
        raise UsageError(
            f'train.guided_alignment guides a head of model.kind = "transformer", not of "{config.model.kind}"'
        )
    if config.tokenizer.dropout:
        raise UsageError(
            "train.guided_alignment links the tokens that tokenizer.dropout cuts otherwise at every pass: set one to 0"
        )


def _check_value(path: str, spec: dataclasses.Field[Any], value: Any) -> None:
    value = _scalar(type(spec.default), value, path)
    choices, low, high = (spec.metadata[k] for k in ("choices", "low", "high"))
    if choices and value not in choices:
        nearest = difflib.get_close_matches(value, choices, n=1, cutoff=0.0)
        raise UsageError(f'{path} = "{value}": choose one of {", ".join(choices)} (nearest: {nearest[0]})')
    if low is not None and value < low:
        raise UsageError(f"{path} = {value}: must be at least {low:g}")
    if high is not None and value > high:
        raise UsageError(f"{path} = {value}: must be at most {high:g}")


def options(config: Config) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every option with its dotted path, declaration and value; corpora count as one option each."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for spec in dataclasses.fields(values):
            yield f"{section.name}.{spec.name}", spec, getattr(values, spec.name)


# ---- TOML ------------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Config:
    """Read a config file; an unknown key, a wrong type or a bad value is an error that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give a config file, a preset or a run folder") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file: a config file is TOML in UTF-8") from None
    try:
        return from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def from_dict(values: Mapping[str, Any]) -> Config:
    """A config from nested tables; what is left out has its default."""
    return _build(Config, values, "")


def dumps(config: Config) -> str:
    """The config as TOML, every option written out: `load` gives it back equal."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        tables: list[str] = []
        lines.append(f"[{section.name}]")
        for spec in dataclasses.fields(values):
            value = getattr(values, spec.name)
            if isinstance(value, tuple):
                for item in value:
                    tables.append(f"\n[[{section.name}.{spec.name}]]")
                    tables += [f"{f.name} = {_toml(getattr(item, f.name))}" for f in dataclasses.fields(item)]
            else:
                lines.append(f"{spec.name} = {_toml(value)}")
        lines += [*tables, ""]
    return "\n".join(lines)


def path_of(setting: str) -> str:
    """The option that a setting, `section.key=value`, is of."""
    return setting.partition("=")[0].strip()


def assign(config: Config, assignments: list[str]) -> Config:
    """Apply `section.key=value` settings, as `--set` gives them; the value is TOML, or a bare string."""
    tree = to_dict(config)
    # A model of another kind has other options: it begins with their defaults.
    for setting in sorted(assignments, key=lambda setting: path_of(setting) != "model.kind"):
        path, equals, text = setting.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (equals and dot and key):
            raise UsageError(f"--set {setting}: write section.key=value, e.g. train.steps=1000")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        if section not in tree:
            raise UsageError(_unknown("section", section, list(tree), ""))
        if isinstance(tree[section].get(key), str) and not isinstance(value, str):
            value = text.strip()  # data.store=2026 is a name here, whatever else it might be
        if path.strip() == "model.kind" and value != tree["model"]["kind"]:
            tree["model"] = dataclasses.asdict(_model_class({"kind": value})())
        tree[section][key] = value
    return from_dict(tree)


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain tables, lists and values."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def difference(ours: Config, theirs: Config) -> list[tuple[str, Any, Any]]:
    """The options in which two configs differ: (path, ours, theirs)."""
    left = {path: value for path, _, value in options(ours)}
    right = {path: value for path, _, value in options(theirs)}
    paths = list(dict.fromkeys([*left, *right]))
    return [(p, left.get(p), right.get(p)) for p in paths if left.get(p) != right.get(p)]


def _toml(value: Any) -> str:
    # JSON's strings, finite numbers and booleans are TOML's too, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _build(cls: type[T], values: Any, path: str) -> T:
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise UsageError(f"{path or 'the config'}: expected a table of options, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = {spec.name: spec for spec in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UsageError(_unknown("option" if path else "section", key, list(known), path))
        where = f"{path}.{key}" if path else key
        hint = hints[key]
        if where == "model":
            arguments[key] = _build(_model_class(value), value, where)
        elif dataclasses.is_dataclass(hint):
            arguments[key] = _build(typing.cast(type[Any], hint), value, where)
        elif typing.get_origin(hint) is tuple:
            items = value if isinstance(value, list | tuple) else [value]
            arguments[key] = tuple(_build(typing.get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(items))
        else:
            arguments[key] = _scalar(hint, value, where)
    return cls(**arguments)


def _model_class(values: Any) -> type[Any]:
    kind = values.get("kind", "transformer") if isinstance(values, Mapping) else "transformer"
    if not isinstance(kind, str) or kind not in MODEL_KINDS:
        raise UsageError(f'model.kind = "{kind}": choose one of {", ".join(MODEL_KINDS)}')
    return MODEL_KINDS[kind]


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", tuple: "a tuple"}
        raise UsageError(f"{path} = {value!r}: expected {names[hint]}")
    if hint is float and not math.isfinite(value):
        raise UsageError(f"{path} = {value}: expected a finite number")
    if hint is str and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise UsageError(f"{path} = {value!r}: not valid Unicode, so it cannot be written to a file")
    return value


def _unknown(what: str, key: str, known: list[str], path: str) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {path + '.' if path else ''}{nearest[0]}?" if nearest else f"known: {', '.join(known)}"
    return f"unknown {what} {path + '.' if path else ''}{key}: {hint}"
