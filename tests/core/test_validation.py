"""Validation: loss and BLEU of held-out pairs, and what counts as better."""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
import sacrebleu
import torch

from core_runs import CPU, distinct_pairs, prepare_text, write_corpus
from qkv.core import validation
from qkv.core.batches import PairBatches, collate
from qkv.core.config import Config, DataConfig, DecodeConfig, TrainConfig, TransformerConfig
from qkv.core.dataset import PreparedText
from qkv.core.device import World
from qkv.core.errors import QkvError
from qkv.core.search import SearchOptions, start_search
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.core.validation import TranslationTask, Validation, corpus_bleu, update_options
from search_tables import label_logprobs


def test_a_score_that_is_not_a_number_is_never_the_best() -> None:
    nothing, poor = Validation(math.nan, None, ""), Validation(30.0, None, "")
    assert nothing.value("loss") < poor.value("loss")
    assert nothing.to_dict()["loss"] is None
    assert Validation(1.0, 3.5, "").value("bleu") == 3.5
    assert Validation(1.0, 3.5, "").value("loss") == -1.0


def test_scores_as_text_and_as_json() -> None:
    found = Validation(1.25, 31.456, "a sample", {"entropy": 2.0})
    assert str(found) == f"loss 1.2500  perplexity {math.exp(1.25):.2f}  BLEU 31.46 (greedy)"
    assert str(Validation(1.25, None, "")) == f"loss 1.2500  perplexity {math.exp(1.25):.2f}"
    assert found.to_dict() == {"loss": 1.25, "perplexity": math.exp(1.25), "bleu": 31.456}
    assert Validation(math.inf, 0.0, "").to_dict() == {"loss": None, "perplexity": None, "bleu": 0.0}
    assert Validation(60.0, None, "").perplexity == math.exp(50.0), "no overflow"
    assert found.value("bleu") == 31.456
    assert found.value("loss") == -1.25
    assert Validation(1.25, None, "").value("bleu") == -1.25
    assert Validation(1.0, math.nan, "").value("bleu") == -sys.float_info.max


def test_bleu_is_sacrebleus_in_one_unicode_form() -> None:
    hypotheses = ["The cat sleeps here today.", "A dog runs to the café."]
    references = ["The cat sleeps here now.", "A big dog runs to the cafe\u0301."]
    nfc = [unicodedata.normalize("NFC", text) for text in references]
    expected = sacrebleu.corpus_bleu(hypotheses, [nfc])
    assert corpus_bleu(hypotheses, references) == pytest.approx(expected.score)
    nfd = [unicodedata.normalize("NFD", text) for text in hypotheses]
    assert corpus_bleu(nfd, references) == pytest.approx(expected.score)
    by_character = sacrebleu.corpus_bleu(hypotheses, [nfc], tokenize="char").score
    assert corpus_bleu(hypotheses, references, "char") == pytest.approx(by_character)
    assert by_character != pytest.approx(expected.score)


@pytest.mark.parametrize(("hypotheses", "references"), [(0, 0), (2, 1), (1, 2), (1, 0)])
def test_bleu_needs_one_reference_for_each_hypothesis(hypotheses: int, references: int) -> None:
    with pytest.raises(QkvError, match=f"{hypotheses} hypotheses but {references} references: give one of both"):
        corpus_bleu(["a b"] * hypotheses, ["a b"] * references)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    folder = tmp_path_factory.mktemp("text")
    train, valid = write_corpus(folder, distinct_pairs(40)), write_corpus(folder, distinct_pairs(9, seed=1), "valid")
    return prepare_text(DataConfig(train=(train,), valid=(valid,)), folder / "store", learn=True)


@pytest.fixture
def model(prepared: PreparedText) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.5)
    return Transformer(config, prepared.tokenizers.src.size, prepared.tokenizers.tgt.size)


@pytest.mark.parametrize("tokens", [4096, 40])
def test_the_loss_is_the_mean_of_all_labels(
    tokens: int, prepared: PreparedText, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of any size."""
    monkeypatch.setattr(validation, "TOKENS", tokens)
    config = Config(train=TrainConfig(metric="loss", device="cpu"))
    model.eval()
    found = TranslationTask().validate(model, prepared, config, CPU)
    store, scores = prepared.valid, list[float]()
    for i in range(len(store)):
        batch = collate([store.row("src", i)], [store.row("tgt", i)], prepared.tokenizers)
        scores += label_logprobs(model, batch)[0]
    assert found.loss == pytest.approx(-sum(scores) / len(scores), rel=1e-5)
    assert (found.bleu, found.sample) == (None, "")
    assert not TranslationTask().validate(model, prepared, config, CPU).details


def test_bleu_is_of_greedy_translations_and_raw_references(prepared: PreparedText, model: Transformer) -> None:
    config = Config(train=TrainConfig(device="cpu"), decode=DecodeConfig(beam=4, extra_length=3))
    used: list[SearchOptions] = []

    def start(*arguments: Any, **options: Any) -> Any:
        used.extend(each for each in arguments if isinstance(each, SearchOptions))
        return start_search(*arguments, **options)

    compared: list[tuple[Sequence[str], Sequence[str]]] = []

    def bleu(*texts: Sequence[str]) -> float:
        compared.append((texts[0], texts[1]))
        return 42.0

    found = TranslationTask(start, bleu).validate(model.eval(), prepared, config, CPU)
    assert {(options.beam, options.extra_length) for options in used} == {(1, 3)}
    both, store = prepared.tokenizers, prepared.valid
    sources = [store.row("src", i).tolist() for i in range(len(store))]
    best = search_all(model.eval(), sources, SearchOptions(beam=1, extra_length=3), both, device=CPU)
    texts = [both.tgt.decode(hypotheses[0].tokens).replace("\n", " ") for hypotheses in best]
    references = [target for _, target in distinct_pairs(9, seed=1)]
    assert compared == [(texts, references)]
    assert (found.bleu, found.sample) == (42.0, texts[0])
    assert TranslationTask().bleu is corpus_bleu


def test_weights_that_are_not_numbers_are_measured_without_a_search(prepared: PreparedText, model: Transformer) -> None:
    with torch.no_grad():
        model.output.weight.fill_(math.nan)
    found = TranslationTask().validate(model.eval(), prepared, Config(train=TrainConfig(device="cpu")), CPU)
    assert math.isnan(found.loss)
    assert found.bleu is None
    assert found.value("bleu") == -sys.float_info.max, "never the best"


def test_updates_are_those_of_the_config(prepared: PreparedText) -> None:
    options = {"tokens_per_step": 700, "micro_tokens": 300, "seed": 9, "device": "cpu"}
    config = Config.from_dict({"train": options, "data": {"max_length": 50}})
    world = World(1, 2)
    updates: Any = TranslationTask().updates(prepared, config, CPU, world)
    assert isinstance(updates, PairBatches)
    expected = {"tokens": 700, "micro_tokens": 300, "seed": 9, "world": world, "device": CPU}
    assert update_options(config, CPU, world) == expected
    assert {name: getattr(updates, name) for name in expected} == expected
