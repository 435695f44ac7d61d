"""The pictures of the documentation show the numbers that the code computes."""

from __future__ import annotations

import importlib
import re
import struct
import zlib
from base64 import b64decode
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

import qkv
from qkv.core.transformer import sinusoids


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "docs")
        return importlib.import_module("make_pictures")


def parsed(drawn: str) -> ElementTree.Element:
    assert len(drawn.encode()) < 200_000
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert [e.text for e in root if e.tag.endswith("title")] != [None]
    values = [value for e in root.iter() for name, value in e.attrib.items() if name != "href"]
    assert not re.search(r"\b(nan|inf|None)\b", " ".join(values))
    return root


def test_the_picture_of_positions_is_the_table(pictures: ModuleType) -> None:
    drawn = pictures.position_encodings(length=10, d_model=16)
    parsed(drawn)
    data = b64decode(re.search(r"base64,([^\"]+)", drawn)[1])  # type: ignore[index]
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks[data[at + 4 : at + 8]] = data[at + 8 : at + 8 + size]
        at += size + 12
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (16, 10)
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(10, 17)[:, 1:]
    np.testing.assert_allclose(pixels / 127.5 - 1, sinusoids(10, 16).numpy(), atol=0.5 / 127.5 + 1e-6)


def test_the_picture_of_the_learning_rate_is_equation_3(pictures: ModuleType) -> None:
    root = parsed(pictures.learning_rates())
    paths = [e.get("d", "") for e in root.iter() if e.tag.endswith("path") and e.get("stroke-width") == "2"]
    assert len(paths) == len(pictures.SCHEDULES)
    for path, (d_model, warmup, _) in zip(paths, pictures.SCHEDULES, strict=True):
        x, y = np.array([[float(v) for v in pair.split()] for pair in path[1:].split("L")]).T
        step, rate = (x - 70) * 20_000 / 620, (36 + 260 - y) * 0.0012 / 260
        expected = d_model**-0.5 * np.minimum(np.maximum(step, 1) ** -0.5, step * warmup**-1.5)
        np.testing.assert_allclose(rate, expected, atol=3e-6)
        assert step[rate.argmax()] == pytest.approx(warmup, abs=2)


def test_the_pictures_of_attention_hold_the_weights(
    pictures: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "SENTENCE", "The cat sees the dog.")
    monkeypatch.setattr(pictures, "PRONOUN", ("The cat sees the dog.", "sees", "dog"))
    monkeypatch.setattr(pictures, "AGREEMENT", ("The cat sees the dog.", "cane", "cat"))
    translator = qkv.load(tiny)
    found = translator.attention("The cat sees the dog.")
    root = parsed(pictures.picture(translator))
    shown = [float(e.get("fill-opacity", "")) for e in root.iter() if e.get("class") == "heat"]
    np.testing.assert_allclose(shown, np.asarray(found.weights["decoder.0.cross"]).ravel(), atol=5.1e-4)
    parsed(pictures.dependency(translator))
    looked = pictures.word_attention(translator, "The cat sees the dog.", "cane")
    assert (looked.name, looked.source) == ("decoder.0.cross", ["The", "cat", "sees", "the", "dog", ".", "</s>"])
    assert looked.rows[looked.query] == "cane"
    np.testing.assert_allclose(looked.weights.sum(-1), 1.0, atol=1e-2)
    assert pictures.split_words(["▁p", "ur", "ring", "▁it", ".", "</s>"]) == [
        ("purring", [0, 1, 2]), ("it", [3]), (".", [4]), ("</s>", [5])
    ]  # fmt: skip
