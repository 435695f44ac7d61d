"""Attention maps: the recorded weights are the ones used, and the page holds them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from qkv import config
from qkv.errors import UsageError
from qkv.explain.record import AttentionMap, attention_map
from qkv.models import build
from qkv.text import Tokenizers, learn

TEXT = ["the cat sees the dog", "the dog sees <!--<script> </script> the cat"]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return learn(TEXT, TEXT, config.Tokenizer(vocab=270), ())


@pytest.fixture(scope="module")
def found(tokenizers: Tokenizers) -> AttentionMap:
    torch.manual_seed(0)
    spec = config.Transformer(d_model=16, d_ff=32, heads=2, encoder_layers=2, decoder_layers=1)
    model = build(spec, tokenizers.src.size, tokenizers.tgt.size).eval()
    source, target = (tokenizers.src.encode(text) for text in TEXT)
    return attention_map(model, tokenizers, TEXT[0], source, target, torch.device("cpu"))


def test_every_layer_and_head_is_there_and_sums_to_one(found: AttentionMap) -> None:
    assert set(found.weights) == {"encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"}
    source, target = len(found.source), len(found.written)
    shapes = {
        "encoder": (2, source, source),
        "decoder.0.self": (2, target, target),
        "decoder.0.cross": (2, target, source),
    }
    for name, weights in found.weights.items():
        array = np.asarray(weights)
        assert array.shape == shapes.get(name, shapes["encoder"])
        np.testing.assert_allclose(array.sum(-1), 1.0, atol=5e-4 * source)
    assert np.triu(np.asarray(found.weights["decoder.0.self"])[0], 1).max() == 0.0
    assert found.fed[0] == "<s>"
    assert found.written[-1] == found.source[-1] == "</s>"
    assert found.fed[1:] == found.written[:-1]
    assert found.translation == TEXT[1]


def test_the_page_holds_the_data_and_asks_nobody_else(found: AttentionMap, tmp_path: Path) -> None:
    found.save(tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == found.to_dict()
    assert "<" not in data[1]  # nothing that a browser could take for markup
    assert not re.search(r"https?://|src=|@import|url\(", page.replace(data[1], ""))
    found.save(tmp_path / "map.json")
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8")) == found.to_dict()
    with pytest.raises(UsageError, match=r"map\.txt.*\.html or \.json"):
        found.save(tmp_path / "map.txt")
