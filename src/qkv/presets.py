"""Ready-made configs, by name: `qkv train NAME`, or `qkv.presets.NAME()` from Python."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkv.core.errors import UsageError
from qkv.options import (
    Config,
    ConvS2SConfig,
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TokenizerConfig,
    TrainConfig,
    TransformerConfig,
)

# ---- the paper -------------------------------------------------------------------------------------------------------


def paper_base() -> Config:
    """The base model of the paper, trained as in its section 5 (Table 3, first row); needs --src and --tgt."""
    return Config(
        tokenizer=TokenizerConfig(vocab=37_000),
        model=TransformerConfig(),
        train=TrainConfig(steps=100_000, warmup=4000, tokens_per_step=25_000, average=5, name="paper_base"),
    )


def paper_big() -> Config:
    """The big model of the paper (Table 3, last row); for English-French the paper lowers dropout to 0.1.

    Needs --src and --tgt.
    """
    return Config(
        tokenizer=TokenizerConfig(vocab=37_000),
        model=TransformerConfig(d_model=1024, d_ff=4096, heads=16, dropout=0.3),
        train=TrainConfig(steps=300_000, warmup=4000, tokens_per_step=25_000, average=20, name="paper_big"),
    )


# Table 3, rows (A) to (E): options that differ from the base model. By default d_k and d_v are d_model / heads.
TABLE_3: dict[str, dict[str, dict[str, Any]]] = {
    "table3_a_1_head": {"model": {"heads": 1}},
    "table3_a_4_heads": {"model": {"heads": 4}},
    "table3_a_16_heads": {"model": {"heads": 16}},
    "table3_a_32_heads": {"model": {"heads": 32}},
    "table3_b_d_k_16": {"model": {"d_k": 16}},
    "table3_b_d_k_32": {"model": {"d_k": 32}},
    "table3_c_2_layers": {"model": {"encoder_layers": 2, "decoder_layers": 2}},
    "table3_c_4_layers": {"model": {"encoder_layers": 4, "decoder_layers": 4}},
    "table3_c_8_layers": {"model": {"encoder_layers": 8, "decoder_layers": 8}},
    "table3_c_d_model_256": {"model": {"d_model": 256}},
    "table3_c_d_model_1024": {"model": {"d_model": 1024}},
    "table3_c_d_ff_1024": {"model": {"d_ff": 1024}},
    "table3_c_d_ff_4096": {"model": {"d_ff": 4096}},
    "table3_d_dropout_0": {"model": {"dropout": 0.0}},
    "table3_d_dropout_0_2": {"model": {"dropout": 0.2}},
    "table3_d_label_smoothing_0": {"train": {"label_smoothing": 0.0}},
    "table3_d_label_smoothing_0_2": {"train": {"label_smoothing": 0.2}},
    "table3_e_learned": {"model": {"positions": "learned"}},
}


def _row(name: str) -> Callable[[], Config]:
    def preset() -> Config:
        return _named(paper_base().replace(**TABLE_3[name]), name)

    change = ", ".join(f"{key} = {value}" for part in TABLE_3[name].values() for key, value in part.items())
    preset.__doc__ = f"A row of the paper's Table 3, the base model with {change}; needs --src and --tgt."
    return preset


def local() -> Config:
    """The base model with self-attention restricted to 16 positions on each side (section 4); needs --src and --tgt."""
    return _named(paper_base().replace(model={"window": 16}), "local")


# ---- baselines of the same size --------------------------------------------------------------------------------------


def paper_rnn() -> Config:
    """A recurrent network with attention, the same size as the base model; needs --src and --tgt."""
    model = RnnConfig(cell="lstm", d_model=872, encoder_layers=2, decoder_layers=2)
    return _with(paper_base(), model, "paper_rnn", clip=1.0)


def paper_conv() -> Config:
    """ConvS2S, the same size as the base model; needs --src and --tgt."""
    model = ConvS2SConfig(d_model=512, encoder_layers=13, decoder_layers=12)
    return _with(paper_base(), model, "paper_conv", clip=1.0)


# ---- the built-in corpus ---------------------------------------------------------------------------------------------


def demo() -> Config:
    """The paper's architecture, small, on the built-in English-Italian corpus: a few minutes on two cores."""
    return Config(
        data=DataConfig(
            train=(CorpusConfig(src="demo:train.en", tgt="demo:train.it"),),
            valid=(CorpusConfig(src="demo:valid.en", tgt="demo:valid.it"),),
            src_lang="en",
            tgt_lang="it",
        ),
        tokenizer=TokenizerConfig(vocab=2000),
        # Few sentences are seen three times: the model does not overfit, and dropout would slow down learning.
        model=TransformerConfig(d_model=128, d_ff=512, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0),
        # Small batches learn more from the same number of tokens (benchmarks/NOTES.md).
        train=TrainConfig(
            steps=2800,
            tokens_per_step=1024,
            schedule="wsd",
            learning_rate=2e-3,
            warmup=200,
            clip=1.0,
            average=0,
            validate_every=700,
            name="demo",
        ),
    )


def demo_rnn() -> Config:
    """A recurrent network with as many parameters as `demo`, on the same built-in corpus."""
    # RNN and ConvS2S learn faster with a higher rate, which is too high for the post-norm Transformer.
    return _with(demo(), RnnConfig(d_model=204, dropout=0.0), "demo_rnn", learning_rate=4e-3)


def demo_conv() -> Config:
    """ConvS2S with as many parameters as `demo`, on the same built-in corpus."""
    model = ConvS2SConfig(d_model=124, encoder_layers=4, decoder_layers=4, max_positions=512, dropout=0.0)
    return _with(demo(), model, "demo_conv", learning_rate=4e-3)


# ---- public benchmark corpora ----------------------------------------------------------------------------------------


# Options shared by these presets; benchmarks/NOTES.md has the comparison with other options.
SHARED_MODEL: dict[str, Any] = {"norm": "pre", "positions": "rotary"}
SHARED_TRAIN: dict[str, Any] = {"optimizer": "muon", "schedule": "wsd", "clip": 1.0, "average": 0}


def multi30k() -> Config:
    """Multi30k, English to German: train.en, train.de, valid.en and valid.de in the folder data.root."""
    return Config(
        data=_parallel("de"),
        tokenizer=TokenizerConfig(vocab=10_000),
        # 29,000 captions overfit quickly; R-Drop reduces this more than a higher dropout (benchmarks/NOTES.md).
        model=TransformerConfig(
            d_model=256, d_ff=1024, heads=4, encoder_layers=4, decoder_layers=4, dropout=0.2, **SHARED_MODEL
        ),
        train=TrainConfig(
            steps=4000,
            tokens_per_step=4096,
            learning_rate=4e-3,
            warmup=400,
            r_drop=5.0,
            validate_every=1000,
            metric="loss",
            name="multi30k",
            **SHARED_TRAIN,
        ),
        decode=DecodeConfig(beam=5, alpha=1.0),
    )


def multi30k_fr() -> Config:
    """Multi30k, English to French, with the options of `multi30k`: files *.en and *.fr in the folder data.root."""
    return _named(dataclasses.replace(multi30k(), data=_parallel("fr")), "multi30k_fr")


def europarl() -> Config:
    """Europarl, English to German: a model of the paper's base size in ten minutes of one H200.

    The files are train.en, train.de, valid.en and valid.de, in the folder that data.root names.
    """
    return Config(
        data=_parallel("de"),
        tokenizer=TokenizerConfig(vocab=32_000),
        # SwiGLU with d_ff 1344 has as many parameters as the paper's feed-forward layer with 2048.
        model=TransformerConfig(activation="swiglu", d_ff=1344, dropout=0.05, **SHARED_MODEL),
        train=TrainConfig(
            steps=17_500, learning_rate=2.8e-3, warmup=1000, validate_every=3500, name="europarl", **SHARED_TRAIN
        ),
    )


def _parallel(target: str) -> DataConfig:
    """Return the data options for files train.*, valid.* in the folder data.root."""
    return DataConfig(
        train=(CorpusConfig(src="train.en", tgt=f"train.{target}"),),
        valid=(CorpusConfig(src="valid.en", tgt=f"valid.{target}"),),
        src_lang="en",
        tgt_lang=target,
    )


# ---- plain text ------------------------------------------------------------------------------------------------------


def char_lm() -> Config:
    """A character language model the size of nanoGPT's of Shakespeare, about 10.7 million parameters; needs --text."""
    return Config(
        data=DataConfig(max_length=256),
        tokenizer=TokenizerConfig(kind="char"),
        model=DecoderOnlyConfig(
            d_model=384,
            d_ff=1536,
            heads=6,
            layers=6,
            norm="pre",
            activation="gelu",
            positions="rotary",
            # One megabyte overfits quickly: without attention dropout after 25 epochs.
            dropout=0.2,
            attention_dropout=0.2,
        ),
        train=TrainConfig(
            steps=3000,
            tokens_per_step=64 * 256,
            optimizer="adamw",
            weight_decay=0.1,
            beta2=0.99,
            eps=1e-8,
            schedule="cosine",
            learning_rate=1e-3,
            warmup=100,
            clip=1.0,
            label_smoothing=0.0,
            ema=0.995,
            average=0,
            validate_every=500,
            metric="loss",
            name="char_lm",
        ),
    )


def masked_lm() -> Config:
    """Masked language model with the encoder of the base model; needs --text."""
    return Config(
        model=EncoderOnlyConfig(norm="pre", activation="gelu"),
        train=TrainConfig(
            steps=50_000,
            optimizer="adamw",
            weight_decay=0.01,
            schedule="cosine",
            learning_rate=7e-4,
            warmup=2000,
            clip=1.0,
            label_smoothing=0.0,
            metric="loss",
            name="masked_lm",
        ),
    )


# ---- by name ---------------------------------------------------------------------------------------------------------


def _named(config: Config, name: str) -> Config:
    return config.replace(train={"name": name})


def _with(config: Config, model: ModelConfig, name: str, **train: Any) -> Config:
    """Return a copy of a config with another model, other data files or training options."""
    return _named(dataclasses.replace(config, model=model).replace(train=train), name)


PRESETS: dict[str, Callable[[], Config]] = {
    preset.__name__: preset
    for preset in (
        demo,
        demo_rnn,
        demo_conv,
        multi30k,
        multi30k_fr,
        europarl,
        paper_base,
        paper_big,
        paper_rnn,
        paper_conv,
        local,
        char_lm,
        masked_lm,
    )
} | {name: _row(name) for name in TABLE_3}


def __getattr__(name: str) -> Callable[[], Config]:
    """Return a function for a row of Table 3, so that these presets are attributes of the module."""
    if name in PRESETS:
        return PRESETS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_config(name: str) -> Config:
    """Return a config by the name of a preset, the path of a run folder, or the path of a TOML file."""
    if name in PRESETS:
        return PRESETS[name]()
    if Path(name).is_dir():
        from qkv.core.run import Run

        return Config.load(Run.open(name).path / "config.toml")
    if Path(name).exists():
        if Path(name).suffix != ".toml":
            raise UsageError(f"{name}: not a .toml file: a config is one, and text is given with --src and --tgt")
        return Config.load(name)
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(PRESETS)}"
    raise UsageError(f"{name}: no such preset, config file or run folder: {hint}")
