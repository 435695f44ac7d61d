"""All options: those of the paper (`qkv.core.config`), the options of the rings, and the other kinds of model.

`docs/options.md`, `--set section.key=value` and the error messages are generated from these declarations. A new option
is declared here once; every engine refuses it until its `AllowList` has it.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from qkv.core import config
from qkv.core.config import DecodeConfig as DecodeConfig  # public here, beside the rings' own
from qkv.core.config import ModelConfig as ModelConfig
from qkv.core.config import option
from qkv.core.errors import UsageError


@dataclass(frozen=True)
class CorpusConfig(config.CorpusConfig):
    """One source of text: two parallel files, one .tsv or .jsonl file with both sides, or plain text."""

    src: str = option("", "source side: a text file, or a .tsv/.jsonl file with both sides; - is standard input")
    text: str = option("", "plain text, for models without a source")
    align: str = option("", "word alignments of src and tgt, split at spaces: 0-0 1-2; for train.guided_alignment")


@dataclass(frozen=True)
class DataConfig(config.DataConfig):
    """Options of the training and validation text, and of its filters."""

    train: tuple[CorpusConfig, ...] = option((), "training corpora")
    valid: tuple[CorpusConfig, ...] = option((), "validation corpora; without one, a part of train is held out")
    store: str = option("", "folder for tokenised text shared between runs; empty: inside the run folder")
    src_lang: str = option("", "source language code, e.g. en; empty: from the file names")
    tgt_lang: str = option("", "target language code, e.g. de; empty: from the file names")
    workers: int = option(0, "processes that tokenise; 0: one for each core", low=0)

    @property
    def visited(self) -> tuple[CorpusConfig, ...]:
        """The training corpora that are read: those of a weight above 0."""
        return tuple(corpus for corpus in self.train if corpus.weight)


@dataclass(frozen=True)
class TokenizerConfig(config.TokenizerConfig):
    """Options of the tokenizer: text to ids."""

    kind: str = option("bpe", "subword algorithm", choices=("bpe", "unigram", "word", "char"))
    dropout: float = option(0.0, "BPE-dropout: probability of skipping a merge in training", low=0.0, high=1.0)


# ---- models ----------------------------------------------------------------------------------------------------------


def check_learned_positions(model: Any, longest: int) -> None:
    """Refuse a table of learned positions that is too short."""
    if model.positions == "learned" and model.max_positions < longest:
        raise UsageError(
            f"model.max_positions = {model.max_positions}: data.max_length + decode.extra_length need {longest} "
            f"learned positions: raise the first or lower one of these"
        )


@dataclass(frozen=True)
class AttentionModelConfig(config.AttentionModelConfig):
    """Options of all stacks of attention layers: the paper's, and variants of its parts."""

    attention: str = option(
        "scaled",
        "attention score: dot product / √d_k (paper), dot product, additive (Bahdanau), general (Luong)",
        choices=("scaled", "dot", "additive", "general"),
    )
    window: int = option(0, "self-attention within this many positions to each side (section 4); 0: all", low=0)
    norm: str = option("post", "norm after the residual sum (paper) or before the sub-layer", choices=("post", "pre"))
    rms_norm: bool = option(False, "RMSNorm (no mean, no bias) instead of LayerNorm")
    activation: str = option(
        "relu", "activation of the feed-forward layers; swiglu has a gate", choices=("relu", "gelu", "swiglu")
    )
    positions: str = option("sinusoidal", "position encoding", choices=("sinusoidal", "learned", "rotary", "none"))
    max_positions: int = option(1024, "number of learned positions", low=1)
    bias: bool = option(False, "bias in the attention projections (the paper has none)")
    attention_dropout: float = option(0.0, "dropout on attention weights", low=0.0, high=0.99)
    activation_dropout: float = option(0.0, "dropout inside the feed-forward layers", low=0.0, high=0.99)
    token_dropout: float = option(
        0.0, "token cutoff: probability of replacing a token's embedding by zeros in training", low=0.0, high=0.99
    )

    def check(self, longest: int) -> None:
        super().check(longest)
        check_learned_positions(self, longest)
        if self.positions == "rotary" and self.key_width % 2:
            raise UsageError(f"model.d_k = {self.key_width}: rotary positions rotate pairs and need an even width")
        if self.positions == "rotary" and self.attention == "additive":
            raise UsageError(
                'model.positions = "rotary" needs an attention with a dot product, not model.attention = '
                '"additive": set another attention or other positions'
            )


@dataclass(frozen=True)
class TransformerConfig(AttentionModelConfig, config.TransformerConfig):
    """The paper's encoder-decoder."""

    kind: str = option("transformer", "kind of model", choices=("transformer",))


@dataclass(frozen=True)
class DecoderOnlyConfig(AttentionModelConfig):
    """Language model: the paper's decoder without a source, trained on plain text; data.max_length is its context."""

    kind: str = option("decoder", "kind of model", choices=("decoder",))
    layers: int = option(6, "layers of the stack", low=1)
    tie: str = option("output", config.TIE, choices=("output", "none"))


@dataclass(frozen=True)
class EncoderOnlyConfig(AttentionModelConfig):
    """Masked language model: the paper's encoder alone, trained on plain text to fill in masked tokens."""

    kind: str = option("encoder", "kind of model", choices=("encoder",))
    layers: int = option(6, "layers of the stack", low=1)
    tie: str = option("output", config.TIE, choices=("output", "none"))
    masked: float = option(0.15, "share of tokens that are masked", low=0.001, high=0.999)


@dataclass(frozen=True)
class RnnConfig(ModelConfig):
    """Recurrent encoder-decoder with attention (Bahdanau et al., Luong et al.), the Transformer's predecessor."""

    kind: str = option("rnn", "kind of model", choices=("rnn",))
    cell: str = option("gru", "recurrent unit", choices=("gru", "lstm"))
    d_model: int = option(512, "width of embeddings, states and annotations", low=1)
    encoder_layers: int = option(1, "layers of the encoder", low=1)
    decoder_layers: int = option(1, "layers of the decoder", low=1)
    bidirectional: bool = option(True, "encoder in both directions, half of its width for each")
    attention: str = option(
        "additive",
        "attention score between decoder state and annotations: additive (Bahdanau), general or dot product (Luong)",
        choices=("additive", "general", "dot"),
    )
    input_feeding: bool = option(True, "the last attentional state is part of the next input (Luong)")
    tie: str = option("all", config.TIE, choices=("all", "output", "none"))
    dropout: float = option(0.1, "dropout on embeddings, between layers and before the output", low=0.0, high=0.99)

    def check(self, longest: int) -> None:
        if self.bidirectional and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: a bidirectional encoder needs an even width")


@dataclass(frozen=True)
class ConvS2SConfig(ModelConfig):
    """ConvS2S (Gehring et al., 2017): gated convolutions with attention in every decoder layer."""

    kind: str = option("conv", "kind of model", choices=("conv",))
    d_model: int = option(512, "width of embeddings and convolutions", low=1)
    encoder_layers: int = option(6, "layers of the encoder", low=1)
    decoder_layers: int = option(6, "layers of the decoder", low=1)
    kernel: int = option(3, "kernel width of a convolution; odd", low=1)
    convolution: str = option(
        "contiguous",
        "contiguous; dilated: layer i has steps of kernelⁱ, up to 1024; separable: depthwise, then pointwise",
        choices=("contiguous", "dilated", "separable"),
    )
    positions: str = option("learned", "position encoding", choices=("learned", "sinusoidal", "none"))
    max_positions: int = option(1024, "number of learned positions", low=1)
    tie: str = option("all", config.TIE, choices=("all", "output", "none"))
    dropout: float = option(0.1, "dropout on embeddings, convolutions and before the output", low=0.0, high=0.99)

    def check(self, longest: int) -> None:
        if self.kernel % 2 == 0:
            raise UsageError(f"model.kernel = {self.kernel}: a kernel is centred on a position, so it must be odd")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: sinusoidal positions need an even width")
        check_learned_positions(self, longest)


TranslationConfig = TransformerConfig | RnnConfig | ConvS2SConfig  # models of a target given a source
MODEL_KINDS: dict[str, type[ModelConfig]] = {
    "transformer": TransformerConfig,
    "decoder": DecoderOnlyConfig,
    "encoder": EncoderOnlyConfig,
    "rnn": RnnConfig,
    "conv": ConvS2SConfig,
}


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig(config.TrainConfig):
    """The optimisation: batch size, schedule, regularisation, devices, validation."""

    micro_tokens: int = option(0, "padded tokens a side in one micro-batch; 0: chosen for under 5 % padding", low=0)
    checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    parallel: str = option(
        "data",
        "what the processes of torchrun divide: the data, or weights and optimizer state too",
        choices=("data", "sharded"),
    )
    optimizer: str = option(
        "adam",
        "adam; adamw: with decoupled weight decay; muon, soap: for the layers' matrices, adamw for the rest",
        choices=("adam", "adamw", "muon", "soap"),
    )
    weight_decay: float = option(0.0, "weight decay, for all but adam", low=0.0)
    r_drop: float = option(
        0.0, "R-Drop: weight of the KL divergence between two passes of a batch with different dropout", low=0.0
    )
    guided_alignment: float = option(
        0.0, "weight of the loss that trains one attention head to match the corpora's align; 0: none", low=0.0
    )
    ema: float = option(0.0, "decay of an exponential moving average of the weights; 0: none", low=0.0, high=1.0)
    tensorboard: bool = option(True, "also write TensorBoard events")
    name: str = option("model", "name of the run: its folder is runs/NAME unless --run is given")


DROPOUTS = ("model.dropout", "model.attention_dropout", "model.activation_dropout", "model.token_dropout")


@dataclass(frozen=True)
class Config(config.Config):
    """All options of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    @classmethod
    def model_class(cls, values: Any) -> type[ModelConfig]:
        """Choose the class of the model section by its `kind`."""
        if isinstance(values, ModelConfig):
            return type(values)
        kind = values.get("kind", "transformer") if isinstance(values, Mapping) else "transformer"
        if not isinstance(kind, str) or kind not in MODEL_KINDS:
            raise UsageError(f'model.kind = "{kind}": choose one of {", ".join(MODEL_KINDS)}')
        return MODEL_KINDS[kind]

    def longest(self) -> int:
        if isinstance(self.model, TranslationConfig):
            return super().longest()
        return self.data.max_length + isinstance(self.model, EncoderOnlyConfig)  # an encoder reads </s> too

    def options(self) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
        """Yield every option as (dotted path, declaration, value); a list of corpora is one option."""
        for section, values in vars(self).items():
            for spec in dataclasses.fields(values):
                yield f"{section}.{spec.name}", spec, getattr(values, spec.name)

    def replace(self, **sections: Mapping[str, Any]) -> Self:
        """Return this config with some options changed: `config.replace(train={"steps": 10})`."""
        tree = {name: dict(vars(section)) for name, section in vars(self).items()}
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        return self.from_dict(tree)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain tables, lists and values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def assign(self, settings: Sequence[str]) -> Self:
        """Apply `section.key=value` settings, as `--set` gives them; the value is TOML or a bare string."""
        tree = self.to_dict()
        # A model of another kind has other options: its defaults come first.
        for setting in sorted(settings, key=lambda setting: option_path(setting) != "model.kind"):
            path, equals, text = setting.partition("=")
            section, dot, key = path.strip().partition(".")
            if not (equals and dot and key):
                raise UsageError(f"--set {setting}: write section.key=value, e.g. train.steps=1000")
            try:
                value = tomllib.loads(f"value = {text.strip()}")["value"]
            except tomllib.TOMLDecodeError:
                value = text.strip()
            if section not in tree:
                raise UsageError(config.unknown_key("section", section, list(tree), ""))
            if isinstance(tree[section].get(key), str) and not isinstance(value, str):
                value = text.strip()  # data.store=2026 is a name, not a number
            if path.strip() == "model.kind" and value != tree["model"]["kind"]:
                tree["model"] = dataclasses.asdict(self.model_class({"kind": value})())
            tree[section][key] = value
        return self.from_dict(tree)

    def difference(self, other: Config) -> list[tuple[str, Any, Any]]:
        """List the options that differ between two configs: (path, value here, value in other)."""
        left = {path: value for path, _, value in self.options()}
        right = {path: value for path, _, value in other.options()}
        paths = list(dict.fromkeys([*left, *right]))
        return [(p, left.get(p), right.get(p)) for p in paths if left.get(p) != right.get(p)]

    def check(self) -> None:
        super().check()
        tokenizer, train, translates = self.tokenizer, self.train, isinstance(self.model, TranslationConfig)
        if tokenizer.dropout and not translates:
            raise UsageError(
                f'tokenizer.dropout is for models that translate, not for model.kind = "{self.model.kind}"'
            )
        if tokenizer.dropout and tokenizer.kind != "bpe":
            raise UsageError(f'tokenizer.dropout needs tokenizer.kind = "bpe", not "{tokenizer.kind}"')
        if train.r_drop and not any(value for path, _, value in self.options() if path in DROPOUTS):
            raise UsageError(f"train.r_drop compares passes with different dropout: set {DROPOUTS[0]} above 0")
        if train.weight_decay and train.optimizer == "adam":
            raise UsageError(
                'train.weight_decay is for train.optimizer = "adamw", "muon" or "soap": set one, or omit it'
            )
        self._check_layers()
        self._check_alignment()

    def _check_layers(self) -> None:
        """Refuse recomputation and sharding for models and optimizers that do not support them."""
        train, model = self.train, self.model
        sharded = train.parallel == "sharded"
        if not isinstance(model, AttentionModelConfig):
            if train.checkpointing or sharded:
                setting = "checkpointing = true" if train.checkpointing else 'parallel = "sharded"'
                raise UsageError(f"train.{setting} is for layers of attention, not for {model.kind}: omit it")
        elif sharded and train.optimizer in ("muon", "soap"):
            raise UsageError(
                f'train.optimizer = "{train.optimizer}" needs whole matrices, which train.parallel = "sharded" '
                f'divides: set optimizer = "adamw" or parallel = "data"'
            )
        elif sharded and train.guided_alignment and model.attention in ("additive", "general"):
            raise UsageError(
                f'train.guided_alignment reads the weights of model.attention = "{model.attention}", '
                f'which train.parallel = "sharded" divides: set parallel = "data"'
            )

    def _check_alignment(self) -> None:
        """Refuse word alignments and guided alignment where they have no effect."""
        for i, corpus in enumerate(self.data.valid):
            if corpus.align:
                raise UsageError(f"data.valid[{i}].align has no effect: alignments are for data.train: omit it")
        if any(corpus.align for corpus in self.data.visited) and self.data.max_length >= 1 << 16:
            raise UsageError(f"data.max_length = {self.data.max_length}: with align, at most {(1 << 16) - 1}")
        if not self.train.guided_alignment:
            return
        if self.train.r_drop:
            raise UsageError("train.guided_alignment guides one pass, but train.r_drop has two: set one to 0")
        if self.data.train and not any(corpus.align for corpus in self.data.visited):
            raise UsageError("train.guided_alignment needs alignments: name their file as align in [[data.train]]")
        if not isinstance(self.model, TransformerConfig):
            raise UsageError(
                f'train.guided_alignment guides a head of model.kind = "transformer", not of "{self.model.kind}"'
            )
        if self.tokenizer.dropout:
            raise UsageError(
                "train.guided_alignment needs the tokens that were aligned, but tokenizer.dropout changes them in "
                "every pass: set one to 0"
            )


def option_path(setting: str) -> str:
    """Return the path of a setting: `section.key` of `section.key=value`."""
    return setting.partition("=")[0].strip()


# ---- support of options ----------------------------------------------------------------------------------------------

Allowed = Collection[Any] | Callable[[Any], bool]

FLAG = (False, True)


def number(value: Any) -> bool:
    """Allow every number: the engine implements all, or the field does not change the mathematics."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def text(value: Any) -> bool:
    """Allow every string: a name or a device."""
    return isinstance(value, str)


class AllowList:
    """The values of every field of some dataclasses that an engine supports.

    A value is allowed if it is in the collection of its field, or if the predicate of its field is true for it. A field
    or a value that the list does not name is refused, so a new option is never silently ignored by a fast path.
    """

    def __init__(self, section: str, classes: type | tuple[type, ...], **fields: Allowed) -> None:
        self.section, self.classes, self.fields = section, classes, fields

    def refusal(self, options: Any) -> str | None:
        """Return why these options are not supported, or None if all of them are."""
        if not isinstance(options, self.classes):
            return f"{self.section}.kind = {getattr(options, 'kind', type(options).__name__)!r} is not supported"
        for spec in dataclasses.fields(options):  # type: ignore[arg-type]
            value = getattr(options, spec.name)
            if spec.name not in self.fields:
                return f"{self.section}.{spec.name} is not on the list of supported options"
            allowed = self.fields[spec.name]
            if not (allowed(value) if callable(allowed) else value in allowed):
                return f"{self.section}.{spec.name} = {value!r} is not supported"
        return None


SIZES: dict[str, Allowed] = {  # fields of a stack of attention layers that are sizes or probabilities
    **dict.fromkeys(("d_model", "d_ff", "heads", "d_k", "d_v", "max_positions"), number),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "layers"), number),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "token_dropout"), number),
    "tie": ("all", "output", "none"),
}
