"""The configuration: TOML round trip, and every mistake is reported with its remedy."""

from __future__ import annotations

import dataclasses
import datetime
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.core.errors import UsageError
from qkv.options import (
    MODEL_KINDS,
    AttentionModelConfig,
    Config,
    ConvS2SConfig,
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    RnnConfig,
    TokenizerConfig,
    TrainConfig,
    TransformerConfig,
    TranslationConfig,
)

MOST = 73  # options of one kind of model: adding one is a decision, and raises this limit
# Every option there is.
OPTIONS = {
    "data": "train valid root store src_lang tgt_lang valid_size max_length max_ratio dedupe on_bad seed workers",
    "tokenizer": "kind vocab shared dropout sample",
    "model": "",
    "train": """steps epochs tokens_per_step micro_tokens checkpointing parallel optimizer beta1 beta2 eps weight_decay
        schedule learning_rate warmup clip label_smoothing r_drop guided_alignment ema average precision device
        validate_every metric patience log_every tensorboard seed name""",
    "decode": "beam length_penalty alpha extra_length batch_tokens",
}
ATTENTIVE = """kind d_model d_ff heads d_k d_v attention window norm rms_norm activation positions max_positions bias
    dropout attention_dropout activation_dropout token_dropout"""
KINDS = {
    "transformer": f"{ATTENTIVE} encoder_layers decoder_layers tie",
    "decoder": f"{ATTENTIVE} layers tie",
    "encoder": f"{ATTENTIVE} layers tie masked",
    "rnn": "kind cell d_model encoder_layers decoder_layers bidirectional attention input_feeding tie dropout",
    "conv": "kind d_model encoder_layers decoder_layers kernel convolution positions max_positions tie dropout",
}
CORPUS = "src tgt text weight tag align"


def of_kind(kind: str) -> Config:
    return Config(model=MODEL_KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_the_options_are_these_and_few(kind: str) -> None:
    names = {**OPTIONS, "model": KINDS[kind]}
    expected = [f"{section}.{name}" for section in OPTIONS for name in names[section].split()]
    assert sorted(path for path, _, _ in of_kind(kind).options()) == sorted(expected)
    assert list(MODEL_KINDS) == list(KINDS)
    assert sorted(spec.name for spec in dataclasses.fields(CorpusConfig)) == sorted(CORPUS.split())
    assert len(expected) <= MOST


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_says_what_it_means(kind: str) -> None:
    for path, spec, _ in of_kind(kind).options():
        assert len(spec.metadata["help"]) > 5, path


# ---- there and back --------------------------------------------------------------------------------------------------


def values(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Random sections: each option has a value within its bounds."""

    def value(spec: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
        low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
        if isinstance(spec.default, tuple):
            return st.lists(values(CorpusConfig), max_size=2).map(tuple)
        if choices:
            return st.sampled_from(choices)
        if isinstance(spec.default, bool):
            return st.booleans()
        if isinstance(spec.default, int):
            return st.integers(low, 1_000_000)
        if isinstance(spec.default, float):
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        return st.text()

    return st.builds(cls, **{spec.name: value(spec) for spec in dataclasses.fields(cls)})


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Valid configs: drawn freely, then made to agree where options depend on each other."""
    kind = MODEL_KINDS[draw(st.sampled_from(list(KINDS)))]
    data, tokenizer, model, train, decode = (
        draw(values(cls)) for cls in (DataConfig, TokenizerConfig, kind, TrainConfig, DecodeConfig)
    )
    heads, width = draw(st.integers(1, 64)), draw(st.integers(1, 100))
    model = dataclasses.replace(model, d_model=2 * heads * width)
    if isinstance(model, AttentionModelConfig):
        model = dataclasses.replace(model, heads=heads, d_k=2 * model.d_k)
        if model.attention == "additive" and model.positions == "rotary":
            model = dataclasses.replace(model, positions="none")
    if isinstance(model, ConvS2SConfig):
        model = dataclasses.replace(model, kernel=2 * model.kernel + 1)
    if hasattr(model, "max_positions"):
        longest = model.max_positions + data.max_length + decode.extra_length + 2
        model = dataclasses.replace(model, max_positions=longest)
    if not tokenizer.shared:
        model = dataclasses.replace(model, tie="output")
    if tokenizer.kind != "bpe" or not isinstance(model, TranslationConfig):
        tokenizer = dataclasses.replace(tokenizer, dropout=0.0)
    train = dataclasses.replace(train, tokens_per_step=train.tokens_per_step + data.max_length, micro_tokens=0)
    train = dataclasses.replace(train, beta1=train.beta1 / 2, beta2=train.beta2 / 2, optimizer="adamw")
    train = dataclasses.replace(train, eps=train.eps or 1e-9)
    if not isinstance(model, AttentionModelConfig):
        train = dataclasses.replace(train, checkpointing=False, parallel="data")
    elif model.attention in ("additive", "general"):
        train = dataclasses.replace(train, parallel="data")
    data = dataclasses.replace(data, valid=tuple(dataclasses.replace(corpus, align="") for corpus in data.valid))
    if data.max_length >= 1 << 16:
        data = dataclasses.replace(data, train=tuple(dataclasses.replace(corpus, align="") for corpus in data.train))
    aligned = isinstance(model, TransformerConfig) and any(corpus.align for corpus in data.train)
    if tokenizer.dropout or not aligned:
        train = dataclasses.replace(train, guided_alignment=0.0)
    if train.guided_alignment or not model.dropout:
        train = dataclasses.replace(train, r_drop=0.0)
    return Config(data, tokenizer, model, train, decode)


@given(configs())
def test_toml_round_trip(original: Config) -> None:
    assert Config.from_dict(tomllib.loads(original.dumps())) == original
    assert Config.from_dict(original.to_dict()) == original


@given(st.text(st.characters(codec="utf-8")), st.text(st.sampled_from("\"'\\\n\r\t\0\x01\x1f\x7f\x80\u2028#=[]é𝄞")))
def test_any_string_survives_a_file(name: str, awkward: str) -> None:
    original = Config().replace(data={"root": awkward, "train": (CorpusConfig(src=name, tgt=awkward),)})
    assert Config.from_dict(tomllib.loads(original.dumps())) == original


def test_a_file_gives_the_same_config(tmp_path: Path) -> None:
    original = Config().replace(
        train={"eps": 1e-300, "learning_rate": 7e22}, data={"train": [CorpusConfig("a\n", "ü")]}
    )
    path = tmp_path / "config.toml"
    path.write_text(original.dumps(), encoding="utf-8")
    assert Config.load(path) == original
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors save it
    assert Config.load(path) == original


def test_missing_options_have_their_defaults() -> None:
    assert Config.from_dict({}) == Config()
    assert Config.from_dict({"train": {"steps": 7}}) == Config().replace(train={"steps": 7})
    assert Config.from_dict({"train": {"epochs": 3}}).train.epochs == 3.0


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trian": {}}, "unknown section trian: did you mean train?"),
        ({"train": {"step": 1}}, "unknown option train.step: did you mean train.steps?"),
        ({"model": {"n_heads": 1}}, "unknown option model.n_heads: did you mean model.heads?"),
        ({"decode": {"zzzz": 1}}, "known: beam, length_penalty, alpha, extra_length, batch_tokens"),
        ({"data": {"train": [{}, {"scr": "a"}]}}, "unknown option data.train[1].scr: did you mean data.train[1].src?"),
        ({"train": 3}, "train: expected a table of options, got 3"),
        ({"data": {"train": ["a.en"]}}, "data.train[0]: expected a table of options, got 'a.en'"),
        ({"train": {"r_drop": 1.0}, "model": {"dropout": 0.0}}, "train.r_drop compares passes with different dropout"),
        ({"train": {"steps": "10"}}, "train.steps = '10': expected a whole number"),
        ({"train": {"steps": 10.0}}, "train.steps = 10.0: expected a whole number"),
        ({"train": {"steps": True}}, "train.steps = True: expected a whole number"),
        ({"train": {"clip": "x"}}, "train.clip = 'x': expected a number"),
        ({"train": {"clip": True}}, "train.clip = True: expected a number"),
        ({"train": {"tensorboard": 1}}, "train.tensorboard = 1: expected true or false"),
        ({"data": {"root": 1}}, "data.root = 1: expected a string"),
        ({"data": {"root": datetime.date(2020, 1, 1)}}, "expected a string"),
        ({"data": {"root": "\udcff"}}, "data.root = '\\udcff': not valid Unicode"),
        ({"train": {"steps": 0}}, "train.steps = 0: must be at least 1"),
        ({"train": {"beta1": 1.5}}, "train.beta1 = 1.5: must be at most 1"),
        ({"train": {"clip": float("nan")}}, "train.clip = nan: expected a finite number"),
        ({"train": {"clip": float("inf")}}, "train.clip = inf: expected a finite number"),
        ({"data": {"train": [{"src": "a", "weight": -1}]}}, "data.train[0].weight = -1.0: must be at least 0"),
        ({"model": {"norm": "pots"}}, 'model.norm = "pots": choose one of post, pre (nearest: post)'),
        ({"model": {"kind": "rmm"}}, 'model.kind = "rmm": choose one of'),
        ({"model": {"kind": ["rnn"]}}, "choose one of"),
        ({"model": {"kind": "rnn", "heads": 4}}, "unknown option model.heads"),
        ({"model": {"kind": "rnn", "d_model": 7}}, "a bidirectional encoder needs an even width"),
        ({"model": {"kind": "conv", "kernel": 4}}, "model.kernel = 4: a kernel is centred on a position"),
        ({"model": {"kind": "decoder", "positions": "learned", "max_positions": 255}}, "model.max_positions = 255: "),
        ({"model": {"positions": "rotary", "d_k": 5, "d_v": 5}}, "rotary positions rotate pairs"),
        ({"model": {"kind": "decoder"}, "tokenizer": {"dropout": 0.1}}, "is for models that translate"),
        ({"model": {"heads": 7}}, "model.heads = 7 does not divide model.d_model = 512"),
        ({"model": {"heads": 7, "d_k": 8}}, "does not divide"),
        (
            {"model": {"positions": "rotary", "attention": "additive"}},
            'a dot product, not model.attention = "additive"',
        ),
        ({"model": {"d_model": 9, "heads": 3}}, "sinusoidal positions need an even width"),
        ({"tokenizer": {"shared": False}}, 'set model.tie = "output"'),
        ({"tokenizer": {"kind": "char", "dropout": 0.1}}, 'tokenizer.dropout needs tokenizer.kind = "bpe"'),
        ({"train": {"seed": 10**10}}, "train.seed = 10000000000: must be at most 1e+09"),
        ({"model": {"positions": "learned", "max_positions": 307}}, "model.max_positions = 307: "),
        ({"data": {"max_length": 30_000}}, "leaves no room for such a sentence in a batch of 25000 tokens"),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config.from_dict(tables)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_need_not_divide_when_their_widths_are_given() -> None:
    model = Config.from_dict({"model": {"heads": 7, "d_k": 64, "d_v": 64}}).model
    assert (model.heads, model.d_k) == (7, 64)


@pytest.mark.parametrize(
    ("section", "key", "value"), [("train", "steps", "10"), ("decode", "beem", 4), ("dekode", "a", 1)]
)
def test_replace_and_the_constructor_check_too(section: str, key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key if section == "decode" else section):
        Config().replace(**{section: {key: value}})
    with pytest.raises(UsageError, match="expected a whole number"):
        Config(train=TrainConfig(steps="10"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory: give a config file, a preset or a run folder"),
        (b"\xff\xfe", "not a text file"),
        (b"[train\nsteps = 1", "not valid TOML"),
        (b"[train]\nstep = 1", "unknown option train.step: did you mean train.steps?"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "my.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Config.load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


# ---- --set -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "path", "expected"),
    [
        ("train.steps=10", "train.steps", 10),
        (" train.steps = 1_000 ", "train.steps", 1000),
        ("train.clip=1", "train.clip", 1.0),
        ("train.eps=1e-6", "train.eps", 1e-6),
        ("data.dedupe=false", "data.dedupe", False),
        ("train.device=cuda:1", "train.device", "cuda:1"),
        ('train.device="cuda:1"', "train.device", "cuda:1"),
        ("data.root=a b = c", "data.root", "a b = c"),
        ("data.root=", "data.root", ""),
        ("data.root=2024", "data.root", "2024"),
        ("data.store=2024-01-01", "data.store", "2024-01-01"),
        ("data.src_lang=true", "data.src_lang", "true"),
        ('data.train=[{src="a", tgt="b"}]', "data.train", (CorpusConfig("a", "b"),)),
    ],
)
def test_assign(setting: str, path: str, expected: Any) -> None:
    changed = Config().assign([setting])
    assert {p: v for p, _, v in changed.options()}[path] == expected
    assert [p for p, _, _ in Config().difference(changed)] == ([path] if expected != "" else [])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=10", "write section.key=value"),
        ("train.steps", "write section.key=value"),
        ("trian.steps=1", "unknown section trian: did you mean train?"),
        ("train.stepz=1", "unknown option train.stepz: did you mean train.steps?"),
        ("train.steps=many", "train.steps = 'many': expected a whole number"),
        ("train.dropout=0.1", "unknown option train.dropout"),
    ],
)
def test_assign_names_the_mistake(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config().assign([setting])
    assert message in str(caught.value)


def test_settings_apply_in_order_and_together() -> None:
    # Each alone would be refused: 6 heads do not divide 512.
    changed = Config().assign(["model.heads=6", "model.d_model=384", "train.steps=1", "train.steps=2"])
    assert (changed.model.heads, changed.model.d_model, changed.train.steps) == (6, 384, 2)


def test_another_kind_of_model_begins_with_its_own_defaults() -> None:
    changed = Config().assign(["model.cell=lstm", "model.kind=rnn"])  # in any order
    assert changed.model == RnnConfig(cell="lstm")
    assert changed.assign(["model.kind=rnn"]) == changed
    with pytest.raises(UsageError, match="choose one of transformer, decoder"):
        Config().assign(["model.kind=cnn"])


def test_difference_lists_both_values() -> None:
    ours, theirs = Config(), Config().replace(train={"steps": 5}, decode={"beam": 1})
    assert ours.difference(theirs) == [("train.steps", 100_000, 5), ("decode.beam", 4, 1)]
    assert ours.difference(ours) == []


# ---- the page of options ---------------------------------------------------------------------------------------------


def test_the_options_page_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "options.md"
    made = runpy.run_path(str(page.with_name("make_options.py")))["page"]()
    assert page.read_text(encoding="utf-8") == made, "run make docs"
    for path, spec, _ in Config().options():
        assert f"| `{path.partition('.')[2]}` |" in made
        assert spec.metadata["help"] in made


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"micro_tokens": 30_000}, r"micro_tokens = 30000 is more than train\.tokens_per_step = 25000"),
        ({"tokens_per_step": 256}, r"max_length = 256 leaves no room .* batch of 256 tokens"),
        ({"eps": 0.0}, r"train\.eps = 0: Adam divides by zero"),
        ({"beta2": 1.0}, r"beta1 and train\.beta2 must be below 1"),
        ({"weight_decay": 0.1}, r'weight_decay is for train\.optimizer = "adamw"'),
    ],
)
def test_training_options_that_do_not_go_together(train: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Config().replace(train=train)
