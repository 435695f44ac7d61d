"""The kinds of model and their options, each declared once with its default, its meaning and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qkv.core.errors import UsageError


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field that knows its meaning and the values it may take."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class AttentionModelConfig:
    """What all models built from attention share (paper, sections 3.2 to 3.5)."""

    kind: str = option("", "which model this is")
    d_model: int = option(512, "width of the residual stream", low=1)
    d_ff: int = option(2048, "inner width of the feed-forward layers", low=1)
    heads: int = option(8, "attention heads", low=1)
    d_k: int = option(0, "width of a query or key in one head; 0: d_model / heads", low=0)
    d_v: int = option(0, "width of a value in one head; 0: d_model / heads", low=0)
    attention: str = option(
        "scaled",
        "how a query meets a key: dot product / √d_k (paper), bare dot product, additive (Bahdanau), general (Luong)",
        choices=("scaled", "dot", "additive", "general"),
    )
    window: int = option(0, "self-attention reaches so many positions to each side (section 4); 0: all", low=0)
    norm: str = option("post", "norm after the residual sum (paper) or before the sub-layer", choices=("post", "pre"))
    rms_norm: bool = option(False, "RMSNorm, which leaves the mean alone, in place of LayerNorm")
    activation: str = option(
        "relu", "of the feed-forward layers; swiglu has a gate", choices=("relu", "gelu", "swiglu")
    )
    positions: str = option("sinusoidal", "how order is known", choices=("sinusoidal", "learned", "rotary", "none"))
    max_positions: int = option(1024, "number of learned positions", low=1)
    bias: bool = option(False, "bias in the attention projections (the paper has none)")
    dropout: float = option(0.1, "dropout on sub-layer outputs and embeddings (section 5.4)", low=0.0, high=0.99)
    attention_dropout: float = option(0.0, "dropout on attention weights", low=0.0, high=0.99)
    activation_dropout: float = option(0.0, "dropout inside the feed-forward layers", low=0.0, high=0.99)
    token_dropout: float = option(0.0, "chance that training sees only the place of a token", low=0.0, high=0.99)

    @property
    def key_width(self) -> int:
        return self.d_k or self.d_model // self.heads

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_model // self.heads

    def check(self, longest: int) -> None:
        """Refuse widths and positions that do not go together; `longest` is the longest sequence there may be."""
        if self.d_model % self.heads and not (self.d_k and self.d_v):
            raise UsageError(
                f"model.heads = {self.heads} does not divide model.d_model = {self.d_model}: "
                f"choose heads that divide it, or set model.d_k and model.d_v"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: sinusoidal positions need an even width")
        if self.positions == "rotary" and self.key_width % 2:
            raise UsageError(f"model.d_k = {self.key_width}: rotary positions turn pairs and need an even width")
        if self.positions == "learned":
            check_learned(self.max_positions, longest)


def check_learned(positions: int, longest: int) -> None:
    if positions < longest:
        raise UsageError(
            f"model.max_positions = {positions}: data.max_length + decode.extra_length need {longest} "
            f"learned positions: raise the first or lower one of these"
        )


TIE = "embeddings and output weights that are one matrix"


@dataclass(frozen=True)
class TransformerConfig(AttentionModelConfig):
    """The paper's encoder-decoder."""

    kind: str = option("transformer", "which model this is", choices=("transformer",))
    encoder_layers: int = option(6, "layers of the encoder stack", low=1)
    decoder_layers: int = option(6, "layers of the decoder stack", low=1)
    tie: str = option("all", TIE, choices=("all", "output", "none"))


@dataclass(frozen=True)
class DecoderOnlyConfig(AttentionModelConfig):
    """A language model: the paper's decoder without a source, trained on plain text. Its context is data.max_length."""

    kind: str = option("decoder", "which model this is", choices=("decoder",))
    layers: int = option(6, "layers of the stack", low=1)
    tie: str = option("output", TIE, choices=("output", "none"))


@dataclass(frozen=True)
class EncoderOnlyConfig(AttentionModelConfig):
    """The paper's encoder alone, trained on plain text to fill in tokens that are hidden from it."""

    kind: str = option("encoder", "which model this is", choices=("encoder",))
    layers: int = option(6, "layers of the stack", low=1)
    tie: str = option("output", TIE, choices=("output", "none"))
    masked: float = option(0.15, "share of the tokens to be filled in", low=0.001, high=0.999)


@dataclass(frozen=True)
class RnnConfig:
    """What the Transformer replaced: a recurrent encoder-decoder with attention (Bahdanau et al., Luong et al.)."""

    kind: str = option("rnn", "which model this is", choices=("rnn",))
    cell: str = option("gru", "recurrent unit", choices=("gru", "lstm"))
    d_model: int = option(512, "width of embeddings, states and annotations", low=1)
    encoder_layers: int = option(1, "layers of the encoder", low=1)
    decoder_layers: int = option(1, "layers of the decoder", low=1)
    bidirectional: bool = option(True, "the encoder reads both ways, half of its width for each")
    attention: str = option(
        "additive",
        "how the decoder's state meets an annotation: additive (Bahdanau), general or dot product (Luong)",
        choices=("additive", "general", "dot"),
    )
    input_feeding: bool = option(True, "the last attentional state is part of the next input (Luong)")
    tie: str = option("all", TIE, choices=("all", "output", "none"))
    dropout: float = option(0.1, "dropout on embeddings, between layers and before the output", low=0.0, high=0.99)

    def check(self, longest: int) -> None:
        if self.bidirectional and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: half of it reads each way, so it must be even")


@dataclass(frozen=True)
class ConvS2SConfig:
    """The other rival: ConvS2S (Gehring et al., 2017), gated convolutions with an attention in every decoder layer."""

    kind: str = option("conv", "which model this is", choices=("conv",))
    d_model: int = option(512, "width of embeddings and convolutions", low=1)
    encoder_layers: int = option(6, "layers of the encoder", low=1)
    decoder_layers: int = option(6, "layers of the decoder", low=1)
    kernel: int = option(3, "positions that one convolution sees; odd", low=1)
    convolution: str = option(
        "contiguous",
        "dilated: layer i steps by kernelⁱ, up to 1024; separable: each channel by itself, then a mixture of them",
        choices=("contiguous", "dilated", "separable"),
    )
    positions: str = option("learned", "how order is known", choices=("learned", "sinusoidal", "none"))
    max_positions: int = option(1024, "number of learned positions", low=1)
    tie: str = option("all", TIE, choices=("all", "output", "none"))
    dropout: float = option(0.1, "dropout on embeddings, convolutions and before the output", low=0.0, high=0.99)

    def check(self, longest: int) -> None:
        if self.kernel % 2 == 0:
            raise UsageError(f"model.kernel = {self.kernel}: it is centred on a position, so it must be odd")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UsageError(f"model.d_model = {self.d_model}: sinusoidal positions need an even width")
        if self.positions == "learned":
            check_learned(self.max_positions, longest)


ModelConfig = TransformerConfig | DecoderOnlyConfig | EncoderOnlyConfig | RnnConfig | ConvS2SConfig
TranslationConfig = TransformerConfig | RnnConfig | ConvS2SConfig  # models of a target given a source
MODEL_KINDS: dict[str, type[ModelConfig]] = {
    "transformer": TransformerConfig,
    "decoder": DecoderOnlyConfig,
    "encoder": EncoderOnlyConfig,
    "rnn": RnnConfig,
    "conv": ConvS2SConfig,
}
