"""Batches packed without padding give the loss, gradients and weights of padded ones; padding is not computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import sentences, tiny_config, write_pairs
from qkv.assembly import build_model, trainer_for
from qkv.core.batches import Batch
from qkv.core.dataset import PreparedText
from qkv.core.transformer import Transformer
from qkv.data.text_preparation import prepare_text
from qkv.explain.attention_heads import head_counts, mute_heads
from qkv.models.variants import record_attention
from qkv.options import Config, EncoderOnlyConfig, TransformerConfig
from qkv.training import memory_limits
from qkv.training.unpadded import ShortDropout, Unpadded, loss_in_parts

SPEC = TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "pre", "rms_norm": True},
    {"positions": "rotary"},
    {"positions": "learned", "tie": "none"},
    {"positions": "none", "activation": "swiglu"},
    {"window": 1},  # in blocks, as rows are longer than two of them
    {"window": 6},
    {"attention": "additive"},
    {"attention": "general", "bias": True},
    {"d_k": 6, "d_v": 10, "attention": "dot"},
]
VOCAB = 30


def batch(source: list[int], target: list[int]) -> Batch:
    """Random sentences of these lengths, both sides padded further than the longest needs."""
    draws = torch.Generator().manual_seed(3)

    def side(lengths: list[int]) -> Tensor:
        ids = torch.randint(3, VOCAB, (len(lengths), max(lengths) + 1), generator=draws)
        return ids.masked_fill(torch.arange(ids.shape[1]) >= torch.tensor(lengths)[:, None], 0)

    labels = side(target)
    given = labels.roll(1, 1).masked_fill(labels == 0, 0)
    given[:, 0] = 1
    return Batch((side(source), torch.tensor(source), given), labels, sum(target))


BATCH = batch([5, 1, 8, 3], [2, 7, 1, 4])


def model_of(**options: Any) -> Transformer:
    torch.manual_seed(1)
    model = build_model(dataclasses.replace(SPEC, **options), VOCAB, VOCAB).train()
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def outcome(model: Transformer, given: Batch, *, laid: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    real = given.labels != 0
    hidden = model.hidden_at(real, *given.inputs) if laid else model.hidden(*given.inputs)
    assert hidden.shape[:-1] == ((given.tokens,) if laid else given.labels.shape)
    model.zero_grad()
    loss, _ = loss_in_parts(hidden, model.output.weight, given.labels, smoothing=0.1, pad=0)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_end_to_end_is_padded_in_loss_and_gradient(options: dict[str, Any]) -> None:
    model = model_of(**options)
    loss, expected = outcome(model, BATCH, laid=False)
    found_loss, found = outcome(model, BATCH, laid=True)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_other_rows_and_the_content_of_padding_change_nothing() -> None:
    model = model_of(window=2)
    real = BATCH.labels != 0
    source, lengths, target = BATCH.inputs
    found = model.hidden_at(real, *BATCH.inputs)
    beyond = torch.arange(source.shape[1]) >= lengths[:, None]
    torch.testing.assert_close(model.hidden_at(real, source.masked_fill(beyond, 9), lengths, target), found)
    torch.testing.assert_close(model.hidden_at(real, source, lengths, target.masked_fill(~real, 9)), found)
    alone = [model.hidden_at(real[i : i + 1], *(part[i : i + 1] for part in BATCH.inputs)) for i in range(4)]
    torch.testing.assert_close(torch.cat(alone), found)


def test_padding_is_not_computed() -> None:
    model = model_of()
    seen: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda _, inputs: seen.update({name: inputs[0].shape[:-1].numel()})

    linears = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.LayerNorm)}
    for name, module in linears.items():
        module.register_forward_pre_hook(count(name))
    model.hidden_at(BATCH.labels != 0, *BATCH.inputs)
    sources = {name for name in seen if name.startswith("encoder")}
    assert {seen[name] for name in sources} == {17}
    assert {seen[name] for name in seen.keys() - sources} == {14}
    assert len(seen) > 20


def test_recorded_and_muted_heads_are_the_same() -> None:
    model = model_of().eval()
    real = BATCH.labels != 0
    read = torch.arange(BATCH.source.shape[1]) < BATCH.lengths[:, None]
    known = head_counts(model, torch.device("cpu"))
    with mute_heads([("decoder.1.cross", 1), "encoder.0.self"], known):
        with record_attention() as padded:
            expected = model.hidden(*BATCH.inputs)[real]
        with record_attention() as laid:
            torch.testing.assert_close(model.hidden_at(real, *BATCH.inputs), expected)
    assert list(laid) == list(padded)
    for name, (weights,) in padded.items():
        rows = read if name.startswith("encoder") else real
        ours, theirs = (w.transpose(1, 2)[rows] for w in (laid[name][0], weights))
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_batch_without_labels_gives_every_weight_a_gradient_of_zero() -> None:
    """A rank without rows can then take part in the sum of gradients."""
    loss, gradients = outcome(model_of(), memory_limits.idle(BATCH), laid=True)
    assert loss == 0
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert not gradient.any(), name


def test_other_kinds_drop_padding_after_the_model() -> None:
    spec = EncoderOnlyConfig(d_model=16, d_ff=24, heads=2, layers=1)
    model = build_model(spec, VOCAB, VOCAB).eval()
    real = BATCH.source > 9
    found = model.hidden_at(real, BATCH.source, BATCH.lengths)
    torch.testing.assert_close(found, model.hidden(BATCH.source, BATCH.lengths)[real])


def test_pad_and_pack_are_each_others_reverse() -> None:
    real = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    rows = Unpadded(real)
    x = torch.randn(1, 2, 6, 5, requires_grad=True)
    padded = rows.pad(x)
    assert padded.shape == (3, 2, 3, 5)
    torch.testing.assert_close(padded.transpose(1, 2)[real], x[0].transpose(0, 1))
    torch.testing.assert_close(rows.pack(padded), x)
    slope = torch.randn(1, 2, 6, 5)
    (gradient,) = torch.autograd.grad(rows.pack(padded), x, slope)
    torch.testing.assert_close(gradient, slope)
    assert rows.pack_ids(torch.arange(9).view(3, 3)).tolist() == [[0, 1, 3, 6, 7, 8]]
    assert rows.positions.tolist() == [[0, 1, 0, 0, 1, 2]]


# ---- in training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, PreparedText]:
    folder = tmp_path_factory.mktemp("text")
    settings = tiny_config(*write_pairs(folder, sentences(200)), tokens_per_step=512, micro_tokens=256)
    return settings, prepare_text(settings.data, settings.tokenizer, folder / "store")


def test_training_computes_no_padding(prepared: tuple[Config, PreparedText]) -> None:
    settings, text = prepared
    trainer = trainer_for(settings.replace(model={"dropout": 0.0}), text)
    model = trainer.model
    assert isinstance(model, Transformer)
    rows: list[int] = []
    model.decoder[0].feed_forward.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    steps = trainer.updates.starting(trainer.progress.position)
    update = next(steps)
    steps.close()
    trainer.train_step.gradients(update)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert sum(rows) == update.tokens < sum(each.labels.numel() for each in update.micro_batches)
    model.zero_grad()
    for each in update.micro_batches:
        hidden = model.hidden(*each.inputs)
        smoothing = trainer.config.train.label_smoothing
        loss, _ = loss_in_parts(hidden, model.output.weight, each.labels, smoothing=smoothing, pad=0)
        loss.backward()  # type: ignore[no-untyped-call]
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_dropout_keeps_its_share_and_the_mean(p: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(301, 333, requires_grad=True)  # no multiple of the four that are drawn at once
    y = ShortDropout(p)(x)
    kept = y.detach() != 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=0.006)
    torch.testing.assert_close(y.detach()[kept], torch.full((int(kept.sum()),), 1 / (1 - p)), rtol=1e-3, atol=0)
    for neighbour in (kept[:, 1:] & kept[:, :-1], kept[1:] & kept[:-1]):  # neighbours are independent
        assert float(neighbour.float().mean()) == pytest.approx((1 - p) ** 2, abs=0.01)
    y.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, y.detach())


def test_dropout_follows_the_seed_and_leaves_others_alone() -> None:
    x = torch.randn(7, 5)
    layer = ShortDropout(0.5)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(layer(x))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer.eval()(x), x)
    assert torch.equal(ShortDropout(0.0)(x), x)
    assert not ShortDropout(1.0)(x).any()
