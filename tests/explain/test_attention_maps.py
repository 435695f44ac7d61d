"""Attention maps: recorded weights are those of the model, measures follow their definitions, files are complete."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.assembly import build_model
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.data.subwords import learn
from qkv.explain import attention_maps
from qkv.explain.attention_maps import AttentionMap, attention_map, measure_head, rare_tokens, words
from qkv.models.variants import record_attention
from qkv.options import ConvS2SConfig, RnnConfig, TokenizerConfig, TransformerConfig

TEXT = ["the cat sees the dog", "the dog sees <!--<script> </script> {text} /*data*/ the cat"]


@pytest.fixture(scope="module")
def tokenizers() -> TokenizerPair:
    return learn(TEXT, TEXT, TokenizerConfig(vocab=270), ())


def map_of(tokenizers: TokenizerPair, spec: Any) -> AttentionMap:
    torch.manual_seed(0)
    model = build_model(spec, tokenizers.src.size, tokenizers.tgt.size).eval()
    source, target = (tokenizers.src.encode(text) for text in TEXT)
    return attention_map(model, tokenizers, TEXT[0], source, target, torch.device("cpu"))


@pytest.fixture(scope="module")
def example(tokenizers: TokenizerPair) -> AttentionMap:
    return map_of(tokenizers, TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=2, decoder_layers=1))


# ---- recording -------------------------------------------------------------------------------------------------------


def test_every_layer_and_head_is_there_and_sums_to_one(example: AttentionMap) -> None:
    assert set(example.weights) == {"encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"}
    for name, weights in example.weights.items():
        rows, columns = example.labels(name)
        assert weights.shape == (2, len(rows), len(columns))
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    assert np.triu(example.weights["decoder.0.self"][0], 1).max() == 0.0
    assert example.fed[0] == "<s>"
    assert example.written[-1] == example.source[-1] == "</s>"
    assert example.fed[1:] == example.written[:-1]
    assert example.translation == TEXT[1]


def test_the_weights_are_exactly_those_the_model_used(tokenizers: TokenizerPair) -> None:
    """The recorder receives the model's tensors; the map holds the same numbers, bit for bit."""
    spec = TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1)
    with record_attention() as recorded:
        example = map_of(tokenizers, spec)
    assert set(recorded) == set(example.weights)
    for name, (weights,) in recorded.items():
        assert np.array_equal(weights[0].numpy(), example.weights[name])


@pytest.mark.parametrize(
    "spec",
    [
        RnnConfig(d_model=16, encoder_layers=1, decoder_layers=1),
        ConvS2SConfig(d_model=16, encoder_layers=2, decoder_layers=2),
    ],
    ids=lambda spec: spec.kind,
)
def test_other_kinds_of_model_show_their_cross_attention(spec: Any, tokenizers: TokenizerPair, tmp_path: Path) -> None:
    example = map_of(tokenizers, spec)
    assert example.weights
    for name, weights in example.weights.items():
        assert name.endswith("cross")
        assert weights.shape == (1, len(example.written), len(example.source))
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert example.heads[name][0].offset is None
    example.save(tmp_path / "map.html")
    assert (tmp_path / "map.html").stat().st_size > 10_000


def test_tokens_are_merged_to_words() -> None:
    tokens = ["<2it>", "▁The", "▁p", "ur", "ring", "▁don", "'", "t", "▁", "«", "x", "»", ".", "</s>"]
    assert ["".join(tokens[a:b]) for a, b in words(tokens)] == [
        "<2it>", "▁The", "▁purring", "▁don't", "▁«x", "».", "</s>",
    ]  # fmt: skip
    assert words(["<s>", "a", "<0xE2>", "<0x80>", "b"]) == [(0, 1), (1, 5)]
    assert words([]) == []
    assert words(["...", "</s>"]) == [(0, 1), (1, 2)]


# ---- measures and roles ----------------------------------------------------------------------------------------------


def shifted(n: int, offset: int, sharp: float = 0.9) -> np.ndarray:
    """Each query gives `sharp` to the key at an offset and the rest to the others; equal shares if there is none."""
    weights = np.full((n, n), (1 - sharp) / (n - 1))
    for i in range(n):
        weights[i] = 1 / n if not 0 <= i + offset < n else np.where(np.arange(n) == i + offset, sharp, weights[i])
    return weights


@pytest.mark.parametrize(
    ("offset", "role"), [(-1, "previous token"), (1, "next token"), (0, "positional"), (-3, "positional")]
)
def test_a_head_that_attends_to_one_offset_is_named_after_it(offset: int, role: str) -> None:
    head = measure_head(shifted(10, offset), cross=False)
    assert (head.offset, head.roles) == (offset, [role])
    assert head.mass == pytest.approx(0.9)
    assert measure_head(shifted(10, offset, sharp=0.45), cross=False).roles == []
    assert measure_head(shifted(3, -1), cross=False).roles == []  # too few queries


def test_a_fixed_offset_is_one_that_most_queries_have() -> None:
    to_first = np.eye(8)[np.zeros(8, int)]  # all weight on key 0: offset −7 has one query, with weight 1
    head = measure_head(to_first, cross=False)
    assert head.roles == []
    assert head.mass is not None
    assert head.mass <= 0.25


def test_entropy_confidence_and_distance() -> None:
    even, sharp = np.full((4, 8), 1 / 8), np.eye(8)
    assert measure_head(even, cross=True).entropy == pytest.approx(3.0)
    assert measure_head(even, cross=True).confidence == pytest.approx(1 / 8)
    assert measure_head(sharp, cross=False).entropy == 0.0
    assert measure_head(sharp, cross=False).confidence == 1.0
    assert measure_head(sharp, cross=False).distance == 0.0
    assert measure_head(shifted(9, 2, sharp=1.0)[:7], cross=False).distance == pytest.approx(2.0)
    stretched = np.eye(9)[::2]  # 5 rows over 9 columns, along the diagonal
    assert measure_head(stretched, cross=True).distance == pytest.approx(0.0)


def test_an_alignment_is_sharp_in_order_and_nearly_one_to_one() -> None:
    assert measure_head(np.eye(8), cross=True).roles == ["alignment"]
    swapped = np.eye(8)[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert measure_head(swapped, cross=True).roles == ["alignment"]
    assert measure_head(np.eye(8)[::-1], cross=True).roles == []  # backwards
    assert measure_head(0.5 * np.eye(8) + 0.5 / 8, cross=True).roles == []  # not sharp
    assert measure_head(np.eye(8)[[0, 0, 0, 0, 7, 7, 7, 7]], cross=True).roles == []  # two keys for all
    assert measure_head(np.eye(8)[[7] * 8], cross=True).order == 0.0
    assert measure_head(np.eye(8), cross=False).roles == ["positional"]  # self-attention aligns nothing


def test_rare_tokens_are_those_learned_last() -> None:
    ids = [300, 5, 900, 310, 320, 330, 340, 350, 800, 360]
    assert rare_tokens(ids, 259).nonzero()[0].tolist() == [2, 8]
    assert rare_tokens([900, 300, 900, 301, 302], 259).nonzero()[0].tolist() == [0, 2]  # one token, twice
    assert not rare_tokens([5, 6, 7], 259).any()  # bytes alone
    rare = rare_tokens(ids, 259)
    weights = np.full((6, 10), 0.2 / 8)
    weights[:, rare] = 0.4
    assert measure_head(weights, cross=True, rare=rare).roles == ["rare token"]
    assert measure_head(weights, cross=True, rare=rare).rare == pytest.approx(0.8)
    assert measure_head(np.full((6, 10), 0.1), cross=True, rare=rare).roles == []
    assert (
        measure_head(np.full((6, 2), 0.5), cross=True, rare=np.array([True, False])).roles == []
    )  # no more than chance


def test_every_role_is_explained() -> None:
    names = {f.name for f in dataclasses.fields(attention_maps.HeadMeasures)} - {"roles", "mass"}
    assert names == set(attention_maps.MEASURES)
    script = (attention_maps.PAGE / "explorer.js").read_text(encoding="utf-8")
    signs = re.search(r"SIGNS = \{(.*?)\}", script)
    assert signs is not None
    assert not [role for role in attention_maps.LEGEND if role not in signs[1]]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_page_holds_the_data_and_loads_nothing(example: AttentionMap, tmp_path: Path) -> None:
    example.save(tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]  # no markup for a browser to interpret
    held = json.loads(data[1])
    assert (held["source"], held["written"], held["translation"]) == (
        example.source,
        example.written,
        example.translation,
    )
    for name, packed in held["weights"].items():
        units = np.frombuffer(base64.b64decode(packed["data"]), "<u2").reshape(packed["shape"])
        assert np.array_equal(units / 10_000, np.round(example.weights[name].astype(np.float64), 4))
    assert not re.search(r"https?://|src=|@import|url\(", page.replace(data[1], ""))
    assert page.count("&lt;script&gt;") == 1  # the sentence appears as text only
    assert not [place for place in attention_maps.PARTS if place in page]


def test_data_pictures_and_unknown_names(example: AttentionMap, tmp_path: Path) -> None:
    example.save(tmp_path / "map.json")
    held = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    assert held == json.loads(json.dumps(example.to_dict()))
    for name, weights in held["weights"].items():
        np.testing.assert_allclose(weights, example.weights[name], atol=5.1e-7)
    with pytest.raises(UsageError, match=r"map\.txt.*\.html or \.json or \.png or \.svg"):
        example.save(tmp_path / "map.txt")


def test_pictures_show_every_cross_attention_head(example: AttentionMap, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example = dataclasses.replace(example, text="costs $5 or $6")  # dollars are no formula
    example.save(tmp_path / "map.svg")
    first = (tmp_path / "map.svg").read_bytes()
    example.save(tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_bytes() == first
    assert first.decode().count("<image") == 2  # one layer, two heads
    example.save(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("tokens", [2, 7, 20])
@pytest.mark.parametrize("across", [1, 3])
def test_nothing_is_cut_at_the_edge_of_a_picture(tmp_path: Path, tokens: int, across: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    label = [f"word{i}" for i in range(tokens)]
    weights = {"decoder.10.cross": np.zeros((across, tokens, tokens))}
    title = " ".join(label * 3)
    attention_maps.plot_attention(weights, {"decoder.10.cross": (label, label)}, tmp_path / "map.png", title=title)
    pixels = image.imread(tmp_path / "map.png")
    assert all(np.all(edge == 1.0) for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


def test_a_picture_with_characters_missing_in_the_font_is_drawn_with_a_note(
    example: AttentionMap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    dataclasses.replace(example, text="\U0001f9ff").save(tmp_path / "map.png")
    assert (tmp_path / "map.png").exists()
    assert "written with a warning" in capsys.readouterr().err
