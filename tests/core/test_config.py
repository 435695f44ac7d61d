"""The core's configuration: TOML and back, and every mistake is named with its remedy."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core import config as module
from qkv.core.config import (
    Config,
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TokenizerConfig,
    TrainConfig,
    TransformerConfig,
)
from qkv.core.errors import UsageError

# The paper's base model and training (sections 5.1 to 6.1), and no limit or bound that is not asked for.
DEFAULTS = {
    "data": """train=() valid=() root='' valid_size=0 max_length=256 max_ratio=5.0
        dedupe=True on_bad='error' seed=1""",
    "tokenizer": "vocab=0 shared=True sample=200000",
    "model": """kind='transformer' d_model=512 dropout=0.1 d_ff=2048 heads=8 d_k=0 d_v=0 positions='sinusoidal'
        encoder_layers=6 decoder_layers=6 tie='all'""",
    "train": """steps=100000 epochs=0.0 tokens_per_step=25000 micro_tokens=0 beta1=0.9 beta2=0.98 eps=1e-09
        schedule='paper' learning_rate=1.0 warmup=4000 clip=0.0 label_smoothing=0.1 average=5 precision='auto'
        device='auto' validate_every=1000 metric='bleu' patience=0 log_every=50 seed=1""",
    "decode": "beam=4 length_penalty='gnmt' alpha=0.6 extra_length=50 batch_tokens=0",
}
# Every bound: the smallest and the largest value that is allowed.
BOUNDS = {
    "data.valid_size": (0, None), "data.max_length": (1, None), "data.max_ratio": (0.0, None), "data.seed": (0, 10**9),
    "tokenizer.vocab": (0, None), "tokenizer.sample": (1, None),
    "model.d_model": (1, None), "model.dropout": (0.0, 0.99), "model.d_ff": (1, None), "model.heads": (1, None),
    "model.d_k": (0, None), "model.d_v": (0, None),
    "model.encoder_layers": (1, None), "model.decoder_layers": (1, None),
    "train.steps": (1, None), "train.epochs": (0.0, None), "train.tokens_per_step": (1, None),
    "train.micro_tokens": (0, None), "train.beta1": (0.0, 1.0), "train.beta2": (0.0, 1.0), "train.eps": (0.0, None),
    "train.learning_rate": (0.0, None), "train.warmup": (0, None), "train.clip": (0.0, None),
    "train.label_smoothing": (0.0, 1.0), "train.average": (0, None), "train.validate_every": (1, None),
    "train.patience": (0, None), "train.log_every": (1, None), "train.seed": (0, 10**9),
    "decode.beam": (1, None), "decode.alpha": (0.0, None), "decode.extra_length": (0, None),
    "decode.batch_tokens": (0, None),
}  # fmt: skip


def replaced(**sections: dict[str, Any]) -> Config:
    return Config.from_dict(sections)


def message(**sections: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Config.from_dict(sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_papers() -> None:
    found = {
        section: [f"{name}={value!r}" for name, value in vars(options).items()]
        for section, options in vars(Config()).items()
    }
    assert found == {section: text.split() for section, text in DEFAULTS.items()}
    assert Config.from_dict({}) == Config()


def declared() -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every option: its path, its declaration and its default."""
    for section, options in vars(Config()).items():
        yield from ((f"{section}.{spec.name}", spec, vars(options)[spec.name]) for spec in dataclasses.fields(options))


def test_bounds_are_these() -> None:
    specs = {path: spec.metadata for path, spec, _ in declared()}
    found = {path: (m["low"], m["high"]) for path, m in specs.items() if (m["low"], m["high"]) != (None, None)}
    assert found == BOUNDS
    corpus = {spec.name: spec.metadata["low"] for spec in dataclasses.fields(CorpusConfig)}
    assert corpus == {"src": None, "tgt": None, "weight": 0.0, "tag": None}


def test_every_option_has_a_meaning_and_a_type() -> None:
    for path, spec, value in declared():
        assert len(spec.metadata["help"]) > 5, path
        assert spec.metadata["choices"] == () or value in spec.metadata["choices"], path


# ---- there and back --------------------------------------------------------------------------------------------------


@given(
    st.text(st.characters(codec="utf-8")),
    st.text(st.sampled_from("\"'\\\n\r\t\0\x01\x1f\x7f\x80\u2028#=[]é𝄞")),
    st.floats(0, allow_nan=False, allow_infinity=False),
    st.booleans(),
)
def test_any_values_survive_a_file(name: str, awkward: str, number: float, flag: bool) -> None:
    original = Config(
        DataConfig((CorpusConfig(name, awkward, weight=number), CorpusConfig()), root=awkward, dedupe=flag),
        train=TrainConfig(learning_rate=number, device=name),
    )
    assert Config.from_dict(tomllib.loads(original.dumps())) == original


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    original = Config(train=TrainConfig(eps=1e-300, learning_rate=7e22), data=DataConfig((CorpusConfig("a\n", "ü"),)))
    path = tmp_path / "config.toml"
    path.write_text(original.dumps(), encoding="utf-8")
    assert Config.load(path) == original
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Config.load(str(path)) == original


def test_the_file_is_made_of_tables() -> None:
    text = Config(DataConfig((CorpusConfig("a", "b"), CorpusConfig("c", "d")))).dumps()
    assert text.startswith('[data]\nroot = ""\n')
    assert text.count("\n[[data.train]]\n") == 2
    assert [line for line in text.splitlines() if line.startswith("[") and "." not in line] == [
        f"[{section}]" for section in DEFAULTS
    ]


def test_values_that_are_built_already_are_taken_as_they_are() -> None:
    corpus, train = CorpusConfig("a", "b"), TrainConfig(steps=3)
    made = Config.from_dict({"train": train, "data": {"train": corpus}})
    assert made.train is train
    assert made.data.train == (corpus,)
    assert Config.from_dict({"model": TransformerConfig(heads=4)}).model == TransformerConfig(heads=4)
    assert replaced(train={"epochs": 3}).train.epochs == 3.0
    assert type(replaced(train={"epochs": 3}).train.epochs) is float
    assert replaced(data={"train": [{"src": "a"}, {"src": "b"}]}).data.train == (CorpusConfig("a"), CorpusConfig("b"))


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"trian": {}}, "unknown section trian: did you mean train?"),
        ({"zzzz": {}}, "unknown section zzzz: known: data, tokenizer, model, train, decode"),
        ({"train": {"step": 1}}, "unknown option train.step: did you mean train.steps?"),
        ({"decode": {"zzzz": 1}}, "known: beam, length_penalty, alpha, extra_length, batch_tokens"),
        ({"data": {"train": [{}, {"scr": "a"}]}}, "unknown option data.train[1].scr: did you mean data.train[1].src?"),
        ({"train": 3}, "train: expected a table of options, got 3"),
        ({"data": {"train": ["a.en"]}}, "data.train[0]: expected a table of options, got 'a.en'"),
        ({"train": {"steps": "10"}}, "train.steps = '10': expected a whole number"),
        ({"train": {"steps": 10.0}}, "train.steps = 10.0: expected a whole number"),
        ({"train": {"steps": True}}, "train.steps = True: expected a whole number"),
        ({"train": {"clip": "x"}}, "train.clip = 'x': expected a number"),
        ({"train": {"clip": True}}, "train.clip = True: expected a number"),
        ({"data": {"dedupe": 1}}, "data.dedupe = 1: expected true or false"),
        ({"data": {"root": 1}}, "data.root = 1: expected a string"),
        ({"data": {"root": "\udcff"}}, "data.root = '\\udcff': not valid Unicode, so it cannot be written to a file"),
        ({"train": {"steps": 0}}, "train.steps = 0: must be at least 1"),
        ({"train": {"beta1": 1.5}}, "train.beta1 = 1.5: must be at most 1"),
        ({"train": {"clip": float("nan")}}, "train.clip = nan: expected a finite number"),
        ({"train": {"clip": float("inf")}}, "train.clip = inf: expected a finite number"),
        ({"data": {"train": [{"src": "a", "weight": -1}]}}, "data.train[0].weight = -1.0: must be at least 0"),
        ({"train": {"metric": "bleeu"}}, 'train.metric = "bleeu": choose one of bleu, loss (nearest: bleu)'),
        ({"model": {"kind": "rnn"}}, 'model.kind = "rnn": choose one of transformer'),
        ({"model": {"kind": ["x"]}}, "model.kind = ['x']: expected a string"),
        ({"model": 3}, "model: expected a table of options, got 3"),
        (
            {"model": {"heads": 7}},
            "model.heads = 7 does not divide model.d_model = 512: choose heads that divide it, or",
        ),
        ({"model": {"heads": 7, "d_k": 8}}, "does not divide"),
        ({"model": {"heads": 7, "d_v": 8}}, "does not divide"),
        ({"model": {"d_model": 9, "heads": 3}}, "model.d_model = 9: sinusoidal positions need an even width"),
        ({"tokenizer": {"shared": False}}, 'model.tie = "all" needs tokenizer.shared = true: set model.tie = "output"'),
        ({"train": {"seed": 10**10}}, "train.seed = 10000000000: must be at most 1e+09"),
        ({"train": {"micro_tokens": 30_000}}, "train.micro_tokens = 30000 is more than train.tokens_per_step = 25000"),
        (
            {"train": {"tokens_per_step": 256}},
            "data.max_length = 256 leaves no room for such a sentence in a batch of 256",
        ),
        (
            {"train": {"micro_tokens": 256}},
            "in a batch of 256 tokens: raise train.tokens_per_step and train.micro_tokens",
        ),
        ({"train": {"eps": 0.0}}, "train.eps = 0: Adam divides by zero where a gradient is zero: set it above 0"),
        ({"train": {"beta1": 1.0}}, "train.beta1 and train.beta2 must be below 1: with 1 the moment never changes"),
        ({"train": {"beta2": 1}}, "train.beta1 and train.beta2 must be below 1"),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], expected: str) -> None:
    assert expected in message(**tables)


def test_values_at_the_limit_are_allowed() -> None:
    for path, (low, high) in BOUNDS.items():
        section, name = path.split(".")
        for bound, step in ((low, -1), (high, 1)):
            if bound is not None:
                assert f"{path} = " in message(**{section: {name: type(bound)(bound + step)}})
    assert replaced(train={"micro_tokens": 25_000}).train.micro_tokens == 25_000
    assert replaced(train={"tokens_per_step": 257}).train.tokens_per_step == 257
    assert replaced(train={"micro_tokens": 257}).train.micro_tokens == 257
    assert replaced(data={"max_length": 256}).longest() == 308
    assert replaced(tokenizer={"shared": False}, model={"tie": "none"}).model.d_model == 512
    assert replaced(train={"beta1": 0.0, "label_smoothing": 1, "seed": 10**9}).train.label_smoothing == 1.0
    assert replaced(model={"dropout": 0.99}).model.dropout == 0.99


def test_the_constructor_checks_too() -> None:
    with pytest.raises(UsageError, match=r"train.steps = '10': expected a whole number"):
        Config(train=TrainConfig(steps="10"))  # type: ignore[arg-type]
    assert Config(train=TrainConfig(clip=1)).train.clip == 1, "a whole number is a number"
    with pytest.raises(UsageError, match=r"data.train = \[\]: expected a tuple"):
        Config(DataConfig(train=[]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"data.valid\[0\].tag = 1: expected a string"):
        Config(DataConfig(valid=(CorpusConfig(tag=1),)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the config: expected a table of options, got \[\]"):
        Config.from_dict([])  # type: ignore[arg-type]


def test_widths_of_heads_follow_the_model_unless_they_are_given() -> None:
    model = TransformerConfig(d_model=96, heads=8)
    assert (model.key_width, model.value_width) == (12, 12)
    model = TransformerConfig(d_model=96, heads=7, d_k=5, d_v=6)
    assert (model.key_width, model.value_width) == (5, 6)
    model.check(10**6)
    ModelConfig().check(10**6)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory: give a config file, a preset or a run folder"),
        (b"\xff\xfe", "not a text file: a config file is TOML in UTF-8"),
        (b"[train\nsteps = 1", "not valid TOML: "),
        (b"[train]\nstep = 1", "unknown option train.step: did you mean train.steps?"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "my.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Config.load(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_the_nearest_key_is_suggested_and_all_are_listed_otherwise() -> None:
    assert module.unknown_key("option", "stps", ["steps", "seed"], "train") == (
        "unknown option train.stps: did you mean train.steps?"
    )
    assert module.unknown_key("section", "xyz", ["data", "train"], "") == "unknown section xyz: known: data, train"


def test_sections_are_the_papers() -> None:
    sections = [type(value) for value in vars(Config()).values()]
    assert sections == [DataConfig, TokenizerConfig, TransformerConfig, TrainConfig, DecodeConfig]
