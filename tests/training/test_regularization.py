"""Regularisation beyond dropout: R-Drop, and token dropout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import begun, resume, sentences, tiny_config, updates, write_pairs
from qkv.assembly import build_model, trainer_for
from qkv.core.trainer import Trainer
from qkv.models.variants import TokenDropoutEmbedding
from qkv.options import (
    ConvS2SConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    RnnConfig,
    TransformerConfig,
    TranslationConfig,
)

KINDS: list[ModelConfig] = [
    TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.3, norm="pre"),
    RnnConfig(d_model=16, dropout=0.3),
    ConvS2SConfig(d_model=16, encoder_layers=2, decoder_layers=2, max_positions=512, dropout=0.3),
    DecoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=1, dropout=0.3, norm="pre"),
    EncoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=1, dropout=0.3, norm="pre"),
]


def trainer(folder: Path, model: ModelConfig, **train: Any) -> Trainer:
    src, tgt = write_pairs(folder, sentences(150))
    made = dataclasses.replace(tiny_config(src, tgt), model=model).replace(train={"metric": "loss"} | train)
    if not isinstance(model, TranslationConfig):
        made = made.replace(data={"train": [{"text": tgt}]})
    return trainer_for(*begun(folder, made))


def divergence(trained: Trainer) -> float:
    """Mean divergence KL(p‖q) + KL(q‖p) between the predictions of two passes with different dropout."""
    batch = updates(trained, 1)[0].micro_batches[0]
    trained.model.train()
    torch.manual_seed(5)
    with torch.no_grad():
        hidden = [trained.model.hidden_at(batch.labels != 0, *batch.inputs) for _ in range(2)]
        log_p, log_q = (trained.model.project(each).log_softmax(-1) for each in hidden)
    return float(((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.kind)
def test_passes_agree_more_when_they_are_drawn_together(model: ModelConfig, tmp_path: Path) -> None:
    free, drawn = trainer(tmp_path, model), trainer(tmp_path, model, r_drop=10.0)
    for each in (free, drawn):
        outcomes = [each.step(update) for update in updates(each, 60)]
        assert outcomes[-1].nll < outcomes[0].nll
    assert divergence(drawn) < 0.7 * divergence(free)


def test_a_resumed_run_draws_the_same_random_numbers(tmp_path: Path) -> None:
    unbroken, broken, resumed = (trainer(tmp_path, KINDS[0], r_drop=2.0) for _ in range(3))
    steps = unbroken.updates.starting(unbroken.progress.position)
    updates = [next(steps) for _ in range(4)]
    steps.close()
    for update in updates[:2]:
        broken.step(update)
    resume(tmp_path / "saved", broken, resumed)
    outcomes = [unbroken.step(update) for update in updates]
    assert [resumed.step(update) for update in updates[2:]] == outcomes[2:]


def test_unseen_tokens_leave_their_places() -> None:
    torch.manual_seed(0)
    positions = torch.nn.Module()
    positions.forward = lambda start, length: torch.arange(length)[:, None].expand(length, 8).float()  # type: ignore
    embedding = TokenDropoutEmbedding(20, 8, positions, dropout=0.0, rate=0.25)
    ids = torch.randint(0, 20, (50, 40))
    places = torch.arange(40)[:, None].float()
    tokens = embedding.tokens(ids) * embedding.scale
    embedding.train()
    left = embedding(ids) - places  # (batch, length, d_model)
    unseen = (left.abs() < 1e-5).all(-1)
    assert unseen.float().mean() == pytest.approx(0.25, abs=0.04)
    torch.testing.assert_close(left[~unseen], tokens[~unseen], atol=1e-5, rtol=1e-5)
    embedding.eval()
    torch.testing.assert_close(embedding(ids) - places, tokens, atol=1e-5, rtol=1e-5)


def test_the_option_reaches_both_sides() -> None:
    spec = TransformerConfig(d_model=16, d_ff=16, heads=2, encoder_layers=1, decoder_layers=1, token_dropout=0.3)
    model = build_model(spec, 20, 20)
    assert [part.rate for part in (model.source, model.target) if isinstance(part, TokenDropoutEmbedding)] == [0.3, 0.3]
