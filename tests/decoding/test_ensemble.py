"""An ensemble: one member gives the model's result, several of any kind their mean."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from conftest import sentences, tiny_config, write_pairs
from qkv.assembly import build_model
from qkv.core.batches import collate, pad
from qkv.core.errors import UsageError
from qkv.core.search import SearchOptions, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.decoding.ensemble import Ensemble
from qkv.decoding.search_request import token_logprobs
from qkv.options import ConvS2SConfig, RnnConfig, TransformerConfig
from search_tables import EOS, SPECIAL, Prefix, TableModel, assert_same, everything, random_table

VOCAB = 14
KINDS: list[Any] = [
    TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1, tie="none"),
    RnnConfig(d_model=16, tie="none"),
    ConvS2SConfig(d_model=16, tie="none"),
]


@cache
def member(kind: int, seed: int = 0) -> Any:
    torch.manual_seed(10 * kind + seed)
    model = build_model(KINDS[kind], VOCAB, VOCAB).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def sources() -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(3)
    rows = [random.integers(3, VOCAB, n) for n in (1, 4, 7, 2, 5)]
    return rows, pad(rows, 0, last=EOS), torch.tensor([len(row) + 1 for row in rows])


def found_by(model: Any, beam: int = 3) -> Any:
    _, source, lengths = sources()
    return search(model, source, lengths, SearchOptions(beam=beam, extra_length=4, n_best=beam), SPECIAL)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["probabilities", "logprobs"]), st.integers(1, 3))
def test_a_small_world_of_two_is_searched_by_their_mean(seed: int, average: str, n_best: int) -> None:
    """A wide beam over two tables finds the best hypothesis by the mean of both, computed in numpy."""
    one, other = random_table(seed, 3), random_table(seed + 1, 3)

    def mean(sentence: int, prefix: Prefix) -> np.ndarray[Any, Any]:
        p, q = one(sentence, prefix), other(sentence, prefix)
        together = (p + q) / 2 if average == "probabilities" else np.sqrt(p * q)
        return together / together.sum()

    model = Ensemble([TableModel(one), TableModel(other)], average)
    spec = SearchOptions(beam=60, n_best=n_best, max_length=3)
    (found,) = search(model, torch.tensor([[0]]), torch.tensor([1]), spec, SPECIAL)
    assert_same(found, everything(mean, 3, 3, spec)[:n_best])


@pytest.mark.parametrize("kind", range(3))
def test_an_ensemble_of_one_is_the_model(kind: int) -> None:
    assert found_by(Ensemble([member(kind)])) == found_by(member(kind))


@pytest.mark.parametrize("average", ["probabilities", "logprobs"])
@pytest.mark.parametrize("beam", [1, 3])
def test_models_of_all_kinds_together(average: str, beam: int) -> None:
    """Every score recomputed: forced decoding with each member, and the mean for each token."""
    models = [member(0), member(1), member(2), member(0, 1)]
    found = found_by(Ensemble(models, average), beam)
    rows, _, _ = sources()
    either = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
    for row, hypotheses in zip(rows, found, strict=True):
        targets = [np.array(h.tokens, np.int64) for h in hypotheses]
        batch = collate([row] * len(targets), targets, either)
        together = token_logprobs(Ensemble(models, average), batch, 0)
        parts = [token_logprobs(model, batch, 0) for model in models]
        for n, h in enumerate(hypotheses):
            assert h.logprob == pytest.approx(sum(together[n]), abs=1e-4)
            if average == "probabilities":
                by_hand = [math.log(sum(math.exp(part[n][i]) for part in parts) / 4) for i in range(len(together[n]))]
                assert h.logprob == pytest.approx(sum(by_hand), abs=1e-4)
    assert found != found_by(models[0], beam)


@pytest.mark.parametrize("average", ["probabilities", "logprobs"])
def test_its_answers_are_log_probabilities(average: str) -> None:
    model = Ensemble([member(0), member(1)], average)
    _, source, lengths = sources()
    logits, _ = model.step(torch.ones(5, 1).long(), model.start(model.encode(source, lengths)))
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5, 1))


def test_wrong_ensembles_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Ensemble([])
    with pytest.raises(UsageError, match="must be one of probabilities, logprobs"):
        Ensemble([member(0)], "median")
    torch.manual_seed(0)
    larger = build_model(KINDS[1], VOCAB, VOCAB + 1).eval()
    with pytest.raises(UsageError, match="14, 15"):
        found_by(Ensemble([member(0), larger]))


# ---- of runs ---------------------------------------------------------------------------------------------------------


def test_runs_decide_together(tiny: Path, tmp_path: Path) -> None:
    texts = [text for text, _ in sentences(12, seed=21)]
    alone, twice = qkv.load(tiny), qkv.load([tiny, tiny])
    for one, two in zip(alone.translate(texts, n_best=2), twice.translate(texts, n_best=2), strict=True):
        assert (one.text, one.tokens) == (two.text, two.tokens)
        assert two.logprob == pytest.approx(one.logprob, abs=1e-4)
    early = qkv.load(tiny, weights="100")
    for source, target in zip(texts, [each.text for each in alone.translate(texts)], strict=True):
        scored = twice.score(source, target)
        assert scored.logprob == pytest.approx(alone.score(source, target).logprob, abs=1e-4)
        assert early.score(source, target).logprob != pytest.approx(scored.logprob, abs=1e-4)
    spec = tiny_config(*write_pairs(tmp_path, sentences(300, seed=33)), steps=1, metric="loss", average=0)
    foreign = qkv.train(spec, tmp_path / "foreign").path
    with pytest.raises(UsageError, match=f"{tiny.name}.*{foreign.name} have different vocabularies"):
        qkv.load([tiny, foreign])
    with pytest.raises(UsageError, match="at least one"):
        qkv.load([])
