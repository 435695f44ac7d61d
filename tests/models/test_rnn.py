"""The recurrent model: its equations, equal kernels, causality, and the same results stepped and whole."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkv.core.errors import UsageError
from qkv.core.search import SearchOptions, search
from qkv.core.tokenizer import Tokenizer
from qkv.models.rnn import Layer, Rnn, gru, lstm
from qkv.models.variants import attention_scores, record_attention
from qkv.options import RnnConfig

VOCAB = 20
TIES = ("all", "output", "none")
CELLS, SCORES, BOTH = ("gru", "lstm"), ("additive", "general", "dot"), (True, False)
OPTIONS = list(product(CELLS, SCORES, BOTH, BOTH, (1, 2)))  # cell, score, input feeding, both ways, layers
LABELS = [
    f"{cell}-{score}-{'fed' if fed else 'unfed'}-{'both' if both else 'ahead'}-{n}"
    for cell, score, fed, both, n in OPTIONS
]
every = pytest.mark.parametrize("options", OPTIONS, ids=LABELS)
cells = pytest.mark.parametrize("cell", CELLS)
close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


@cache
def model_of(options: tuple[str, str, bool, bool, int], tie: str = "") -> Rnn:
    """A model with random values in all weights, biases too, so that all outputs differ."""
    cell, score, fed, both, layers = options
    spec = RnnConfig(
        cell=cell,
        attention=score,
        input_feeding=fed,
        bidirectional=both,
        encoder_layers=layers,
        decoder_layers=3 - layers if score == "dot" else layers,  # the two need not be equal
        tie=tie or TIES[OPTIONS.index(options) % 3],
        d_model=6,
        dropout=0.0,
    )
    torch.manual_seed(OPTIONS.index(options))
    model = Rnn(spec, VOCAB, VOCAB)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.eval()


def batch(seed: int = 0, target: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Three sentences, and a column that is padding in all."""
    draw = torch.Generator().manual_seed(seed)
    source = torch.randint(3, VOCAB, (3, 6), generator=draw)
    return source, torch.tensor([4, 5, 1]), torch.randint(3, VOCAB, (3, target), generator=draw)


# ---- cells -----------------------------------------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def numpy_cell(x: Any, state: list[Any], weights: list[Any]) -> list[Any]:
    """One step, gate by gate: Cho et al. (2014) for three gates, Hochreiter & Schmidhuber (1997) for four."""
    W_ih, W_hh, b_ih, b_hh = weights
    width = W_hh.shape[1]
    gates = range(len(W_ih) // width)
    of_x = [W_ih[i * width : (i + 1) * width] @ x + b_ih[i * width : (i + 1) * width] for i in gates]
    of_h = [W_hh[i * width : (i + 1) * width] @ state[0] + b_hh[i * width : (i + 1) * width] for i in gates]
    if len(gates) == 3:
        r, z = sigmoid(of_x[0] + of_h[0]), sigmoid(of_x[1] + of_h[1])
        return [(1 - z) * np.tanh(of_x[2] + r * of_h[2]) + z * state[0]]
    i, f, g, o = (a + b for a, b in zip(of_x, of_h, strict=True))
    c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    return [sigmoid(o) * np.tanh(c), c]


def layer_of(cell: str) -> tuple[Layer, Tensor, tuple[Tensor, ...]]:
    """A layer with weights as after training, inputs for it (3 rows of 7), and a state to begin at."""
    torch.manual_seed(5)
    layer = Layer(cell, 4, 5)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    state = tuple(torch.randn(3, 5, requires_grad=True) for _ in range(1 if cell == "gru" else 2))
    return layer, torch.randn(3, 7, 4, requires_grad=True), state


@cells
def test_a_cell_is_its_equations(cell: str) -> None:
    layer, x, state = layer_of(cell)
    weights = [p.detach().double().numpy() for p in layer.parameters()]
    with torch.no_grad():
        ours = (gru if cell == "gru" else lstm)(x[:, 0], state, *layer.parameters())
        for row in range(3):
            plain = numpy_cell(x[row, 0].numpy(), [part[row].numpy() for part in state], weights)
            for part, expected in zip(ours, plain, strict=True):
                np.testing.assert_allclose(part[row].numpy(), expected, atol=1e-6)


@cells
@pytest.mark.parametrize("way", ["module", "fused", "fused, step by step"])
def test_equations_and_kernels_agree_in_value_and_gradient(cell: str, way: str) -> None:
    """Also with torch's own modules, which hold the weights."""
    layer, x, state = layer_of(cell)

    def outcome(written_out: bool) -> list[Tensor]:
        layer.written_out = written_out
        if written_out or way == "fused":
            output, last = layer(x, state)
        elif way == "module":
            first = tuple(part[None] for part in state)
            output, after = layer.cell(x, first[0] if cell == "gru" else first)
            last = [part[0] for part in ([after] if cell == "gru" else after)]
        else:
            outputs, last = [], state
            for now in x.split(1, dim=1):
                output, last = layer(now, last)
                outputs.append(output)
            output = torch.cat(outputs, dim=1)
        assert output.shape == (3, 7, 5)
        torch.manual_seed(1)
        loss = sum((part * torch.randn(part.shape)).sum() for part in (output, *last))
        return [output, *last, *torch.autograd.grad(loss, [x, *state, *layer.parameters()])]

    for plain, fast in zip(outcome(True), outcome(False), strict=True):
        torch.testing.assert_close(plain, fast, atol=1e-6, rtol=1e-5)


@cells
def test_first_weights(cell: str) -> None:
    """Rnn matrices keep lengths, so that gradients neither vanish nor explode; an LSTM begins by remembering."""
    layer = Layer(cell, 6, 8)
    _, W_hh, b_ih, b_hh = layer.cell.all_weights[0]
    for gate in W_hh.detach().split(8):
        torch.testing.assert_close(gate @ gate.T, torch.eye(8))
    expected = torch.zeros_like(b_ih)
    if cell == "lstm":
        expected[8:16] = 1
    assert torch.equal(b_ih + b_hh, expected)


@every
def test_the_model_is_the_same_by_equations_and_by_kernels(options: tuple[str, str, bool, bool, int]) -> None:
    model = model_of(options)
    layers = [module for module in model.modules() if isinstance(module, Layer)]

    def outcome(written_out: bool) -> list[Tensor]:
        for layer in layers:
            layer.written_out = written_out
        logits = model(*batch())
        return [logits, *torch.autograd.grad(logits.tanh().sum(), list(model.parameters()))]

    for plain, fast in zip(outcome(True), outcome(False), strict=True):
        torch.testing.assert_close(plain, fast, **close)


# ---- the model in numpy ----------------------------------------------------------------------------------------------


def numpy_model(model: Rnn, source: list[int], target: list[int]) -> Any:
    """Logits (target, vocab) of one sentence, word by word as the papers describe it."""
    spec, d = model.config, model.config.d_model
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters(remove_duplicate=False)}

    def read(name: str, inputs: list[Any], width: int) -> list[Any]:
        state, outputs = [np.zeros(width) for _ in range(model.parts)], []
        for x in inputs:
            state = numpy_cell(x, state, cell_weights(name))
            outputs.append(state[0])
        return outputs

    def cell_weights(name: str) -> list[Any]:
        return [weights[f"{name}.cell.{part}_l0"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    h = [weights["source.tokens.weight"][token] * np.sqrt(d) for token in source]
    for i in range(spec.encoder_layers):
        if spec.bidirectional:
            ahead, back = read(f"encoder.{i}.ahead", h, d // 2), read(f"encoder.{i}.back", h[::-1], d // 2)[::-1]
            h = [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]
            whole = np.concatenate([ahead[-1], back[0]])
        else:
            h = read(f"encoder.{i}.ahead", h, d)
            whole = h[-1]

    first = np.tanh(weights["first.weight"] @ whole).reshape(spec.decoder_layers, model.parts, d)
    states, fed, logits = [list(parts) for parts in first], np.zeros(d), []
    for token in target:
        x = weights["target.tokens.weight"][token] * np.sqrt(d)
        s = np.concatenate([x, fed]) if spec.input_feeding else x
        for i in range(spec.decoder_layers):
            states[i] = numpy_cell(s, states[i], cell_weights(f"decoder.{i}"))
            s = states[i][0]
        if spec.attention == "additive":
            W, U, w = weights["query.weight"], weights["key.weight"], weights["score_weight"][0]
            scores = np.array([w @ np.tanh(W @ s + U @ each) for each in h])
        elif spec.attention == "general":
            scores = np.array([s @ weights["key.weight"] @ each for each in h])
        else:
            scores = np.array([s @ each for each in h])
        alpha = np.exp(scores) / np.exp(scores).sum()
        fed = np.tanh(weights["combine.weight"] @ np.concatenate([alpha @ np.array(h), s]))
        logits.append(weights["output.weight"] @ fed)
    return np.array(logits)


@every
def test_the_model_is_its_equations(options: tuple[str, str, bool, bool, int]) -> None:
    model, (source, lengths, target) = model_of(options), batch(3)
    logits = model(source, lengths, target).detach().numpy()
    for row, length in enumerate(lengths.tolist()):
        expected = numpy_model(model, source[row, :length].tolist(), target[row].tolist())
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)


def test_general_attention_is_that_of_the_module_for_attention() -> None:
    """sᵀ(W h), with W applied to the source, is what `attention_scores` computes from (sᵀW) h."""
    model = model_of(("gru", "general", False, True, 1))
    s, h = torch.randn(1, 1, 3, 6), torch.randn(1, 1, 4, 6)
    ours = attention_scores(s, model.key(h), "dot").softmax(-1)
    torch.testing.assert_close(ours, attention_scores(s, h, "general", model.key.weight[None]).softmax(-1))


# ---- no peeking ------------------------------------------------------------------------------------------------------


@every
def test_outputs_see_the_source_and_the_target_before_them(options: tuple[str, str, bool, bool, int]) -> None:
    model, (source, lengths, target) = model_of(options), batch(1)
    x, y = (part.detach().requires_grad_() for part in (model.source(source), model.target(target)))
    handles = [
        part.register_forward_hook(lambda _module, _inputs, _output, leaf=leaf: leaf)
        for part, leaf in ((model.source, x), (model.target, y))
    ]
    logits = model(source, lengths, target) @ torch.randn(VOCAB)  # (batch, target)
    for handle in handles:
        handle.remove()
    real = torch.arange(source.shape[1]) < lengths[:, None]
    for i in range(target.shape[1]):
        by_source, by_target = torch.autograd.grad(logits[:, i].sum(), [x, y], retain_graph=True)
        assert torch.equal(by_source.abs().sum(-1) > 0, real)
        assert torch.equal(by_target.abs().sum(-1) > 0, (torch.arange(target.shape[1]) <= i).expand(target.shape))


@every
def test_the_content_of_padding_changes_nothing(options: tuple[str, str, bool, bool, int]) -> None:
    model, (source, lengths, target) = model_of(options), batch(2)
    other = source.where(torch.arange(source.shape[1]) < lengths[:, None], 0)
    assert not torch.equal(source, other)
    assert torch.equal(model(source, lengths, target), model(other, lengths, target))


# ---- same answer -----------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("tie", TIES)
def test_stepped_in_any_chunks_is_the_whole(options: tuple[str, str, bool, bool, int], tie: str) -> None:
    model, (source, lengths, target) = model_of(options, tie), batch(4, target=6)
    with torch.inference_mode():
        whole = model(source, lengths, target)
        for chunks in ([1, 1, 1, 1, 1, 1], [6], [2, 1, 3]):
            state, parts = model.start(model.encode(source, lengths)), []
            for chunk in target.split(chunks, dim=1):
                logits, state = model.step(chunk, state)
                parts.append(logits)
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, **close)


@every
def test_logits_do_not_depend_on_batch_and_padding(options: tuple[str, str, bool, bool, int]) -> None:
    model, (source, lengths, target) = model_of(options), batch(5)
    with torch.inference_mode():
        together = model(source, lengths, target)
        for order in ([2, 0, 1], [1, 1], [0]):
            torch.testing.assert_close(model(source[order], lengths[order], target[order]), together[order], **close)
        for row, length in enumerate(lengths.tolist()):
            alone = model(source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1])
            torch.testing.assert_close(alone, together[row : row + 1], **close)


@every
def test_selected_rows_continue_like_new_rows(options: tuple[str, str, bool, bool, int]) -> None:
    """Beams repeated, dropped and reordered; sentences removed, reordered and repeated."""
    model, (source, lengths, _) = model_of(options), batch(6)
    torch.manual_seed(7)
    owner, written = torch.arange(3).repeat_interleave(2), torch.empty(6, 0).long()
    with torch.inference_mode():
        state = model.start(model.encode(source, lengths), beam=2)
        for n, rows in (
            (1, [1, 0, 2, 2, 4, 5]),
            (2, [5, 4, 1, 1, 2, 3]),
            (1, [2, 3, 1, 0]),
            (1, [3, 3, 2, 3, 0, 1]),
            (3, []),
        ):
            new = torch.randint(3, VOCAB, (len(owner), n))
            written = torch.cat([written, new], dim=1)
            logits, state = model.step(new, state)
            assert (
                len(state.annotations) == len(state.keys) == len(state.mask) == len(owner) // 2
            )  # once for a sentence
            torch.testing.assert_close(logits, model(source[owner], lengths[owner], written)[:, -n:], **close)
            if rows:
                state, owner, written = state.select(torch.tensor(rows)), owner[rows], written[rows]


@pytest.mark.parametrize("options", OPTIONS[::7], ids=LABELS[::7])
@pytest.mark.parametrize("beam", [1, 3])
def test_search_does_not_depend_on_the_batch(options: tuple[str, str, bool, bool, int], beam: int) -> None:
    model, (source, lengths, _) = model_of(options, "none"), batch(8)
    options, special = SearchOptions(beam=beam, extra_length=6, n_best=beam), Tokenizer("char", [])
    together = search(model, source, lengths, options, special)
    for row, length in enumerate(lengths.tolist()):
        (alone,) = search(model, source[row : row + 1, :length], lengths[row : row + 1], options, special)
        assert [found.tokens for found in alone] == [found.tokens for found in together[row]]
        assert [found.logprob for found in alone] == pytest.approx([found.logprob for found in together[row]], abs=1e-4)


# ---- recording -------------------------------------------------------------------------------------------------------


@every
def test_recording_changes_nothing_and_explains_the_context(options: tuple[str, str, bool, bool, int]) -> None:
    model, (source, lengths, target) = model_of(options), batch(9)
    contexts: list[Tensor] = []
    handle = model.combine.register_forward_pre_hook(lambda _module, x: contexts.append(x[0][..., :6]))
    with torch.inference_mode(), record_attention() as recording:
        recorded = model(source, lengths, target)
    handle.remove()
    with torch.inference_mode():
        torch.testing.assert_close(recorded, model(source, lengths, target), **close)
        annotations = model.encode(source, lengths).values
    (parts,) = recording.values()
    assert list(recording) == [f"decoder.{model.config.decoder_layers - 1}.cross"]
    weights = torch.cat(parts, dim=2)  # (batch, 1, target, source)
    assert weights.shape == (3, 1, 5, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 5))
    padding = torch.arange(6) >= lengths[:, None]
    assert not weights[:, 0].transpose(1, 2)[padding].any()
    torch.testing.assert_close(weights[:, 0] @ annotations, torch.cat(contexts, dim=1), **close)


# ---- training --------------------------------------------------------------------------------------------------------


@every
def test_half_precision_is_near(options: tuple[str, str, bool, bool, int]) -> None:
    """Under autocast: loss and gradients as in full precision but for rounding, whole and stepped."""
    model, (source, lengths, target) = model_of(options), batch(10)

    def outcome(enabled: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden = model.hidden(source, lengths, target).float()
        gradients = torch.autograd.grad(hidden.square().sum(), list(model.parameters()), allow_unused=True)
        return hidden.detach(), torch.cat([g.flatten() for g in gradients if g is not None])

    (exact, slope), (rounded, rounded_slope) = outcome(False), outcome(True)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0)
    assert torch.cosine_similarity(slope, rounded_slope, dim=0) > 0.99
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        state = model.start(model.encode(source, lengths), beam=2)
        for now in target.repeat_interleave(2, dim=0).split([1, 3, 1], dim=1):
            logits, state = model.step(now, state)
            state = state.select(torch.tensor([1, 0, 3, 2, 5, 4]))
    torch.testing.assert_close(logits[::2].float(), model.project(exact)[:, -1:].detach(), atol=0.3, rtol=0)


def test_dropout_is_on_embeddings_between_layers_and_before_the_output() -> None:
    model = Rnn(RnnConfig(d_model=6, encoder_layers=2, decoder_layers=2, dropout=0.5), VOCAB, VOCAB)
    source, lengths, target = batch(11)
    shares: list[float] = []
    for part in (model.source.dropout, model.target.dropout, model.dropout):
        part.register_forward_hook(lambda _module, _x, y: shares.append(float((y == 0).float().mean())))
    model(source, lengths, target)
    # Two embeddings, between the layers of the encoder, of the decoder at each position, and before the output.
    assert len(shares) == 2 + 1 + target.shape[1] + 1
    assert all(0.1 < share < 0.9 for share in shares)


def test_one_matrix_of_two_vocabularies_is_refused() -> None:
    with pytest.raises(UsageError, match="share the vocabulary"):
        Rnn(RnnConfig(d_model=4), 20, 21)
    assert Rnn(RnnConfig(d_model=4, tie="output"), 20, 21).output.weight.shape == (21, 4)
