"""Parity with independent implementations on the same weights: Hugging Face's Marian and GPT-2."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.assembly import build_model
from qkv.core.search import Hypothesis, SearchOptions, search
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import Transformer
from qkv.decoding.logits_processors import Sampling, generate
from qkv.models.variants import DecoderOnly
from qkv.options import DecoderOnlyConfig, TransformerConfig

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, MarianMTModel

os.environ["HF_HUB_OFFLINE"] = "1"  # set before the import of transformers: no network requests


Weights = dict[str, Tensor]
PAD, BOS, EOS = 0, 1, 2
VOCAB = 40
EXTRA = 1  # maximum output length minus source length, in tokens


def assert_close(ours: Tensor, theirs: Tensor, name: str = "", *, of_largest: bool = False) -> None:
    """Equal to 1e-5; `of_largest`: to 1e-5 times the largest entry, for sums that may be of any size."""
    tolerance = 1e-5 * (float(theirs.abs().max()) if of_largest else 1.0)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0, msg=lambda message: f"{name} {message}")


def assert_same_gradients(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], name, of_largest=True)


def shake(model: nn.Module, std: float, seed: int) -> None:
    """Large random weights, as after training: no bias is zero, no gain one, and outputs differ."""
    torch.manual_seed(seed)
    norms = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        nn.init.normal_(p, mean=1.0 if id(p) in norms else 0.0, std=std)


def gradients(model: nn.Module) -> Weights:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def torch_attention(theirs: Weights) -> Weights:
    """The weights of torch.nn.MultiheadAttention, or their gradients, under our names."""
    return {name.replace("in_proj_", "qkv.").replace("out_proj", "output"): tensor for name, tensor in theirs.items()}


# ---- encoder-decoder: Marian -----------------------------------------------------------------------------------------


def marian_layer(theirs: Weights, there: str, order: Tensor) -> Weights:
    """One layer of Marian's weights, or their gradients, under our names.

    `order` is our order of the d_model axis: the columns of matrices that read the residual stream, and the rows of
    matrices that write it.
    """
    ours: Weights = {}

    def put(name: str, *modules: str, reads: bool = False) -> None:
        for part in ("weight", "bias"):
            whole = torch.cat([theirs[f"{there}.{module}.{part}"] for module in modules])
            if not reads:
                whole = whole[order]
            elif part == "weight":
                whole = whole[:, order]
            ours[f"{name}.{part}"] = whole

    cross = f"{there}.encoder_attn.q_proj.weight" in theirs
    attentions = {"self_attn": "attention"} | ({"encoder_attn": "cross_attention"} if cross else {})
    for attention, name in attentions.items():
        put(f"{name}.qkv", *(f"{attention}.{part}_proj" for part in "qkv"), reads=True)
        put(f"{name}.output", f"{attention}.out_proj")
    put("feed_forward.inner", "fc1", reads=True)
    put("feed_forward.outer", "fc2")
    for i, norm in enumerate([*attentions, "final"]):
        put(f"residuals.{i}.norm", f"{norm}_layer_norm")
    return ours


def marian_layers(theirs: Weights, hf: Any, order: Tensor) -> Weights:
    return {
        f"{stack}.{i}.{name}": tensor
        for stack, layers in (("encoder", hf.encoder_layers), ("decoder", hf.decoder_layers))
        for i in range(layers)
        for name, tensor in marian_layer(theirs, f"model.{stack}.layers.{i}", order).items()
    }


def marian_order(d_model: int, positions: str) -> Tensor:
    """Marian has the sines in the first half of d_model and the cosines in the second; ours take turns."""
    order = torch.arange(d_model)
    return order.view(2, -1).T.flatten() if positions == "sinusoidal" else order


def from_marian(marian: MarianMTModel, positions: str) -> Transformer:
    """Our model of Marian's weights: with its table of positions as learned ones, or with our own sinusoids.

    Where Marian does not scale the embedding by √d_model, ours is smaller by as much and no longer the output's.
    """
    hf, theirs = marian.config, marian.state_dict()
    spec = TransformerConfig(
        d_model=hf.d_model,
        d_ff=hf.encoder_ffn_dim,
        heads=hf.encoder_attention_heads,
        encoder_layers=hf.encoder_layers,
        decoder_layers=hf.decoder_layers,
        activation=hf.activation_function,
        positions=positions,
        max_positions=hf.max_position_embeddings,
        bias=True,
        tie="all" if hf.scale_embedding else "none",
        dropout=0.0,
    )
    order = marian_order(hf.d_model, positions)
    ours = marian_layers(theirs, hf, order)
    ours["output.weight"] = theirs["lm_head.weight"][:, order]
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        embedding = theirs[f"model.{stack}.embed_tokens.weight"][:, order]
        ours[f"{side}.tokens.weight"] = embedding if hf.scale_embedding else embedding / math.sqrt(hf.d_model)
        if positions == "learned":
            ours[f"{side}.positions.table"] = theirs[f"model.{stack}.embed_positions.weight"]
    model = build_model(spec, hf.vocab_size, hf.vocab_size).eval()
    model.load_state_dict(ours)
    return model


def new_marian(*, scale_embedding: bool) -> MarianMTModel:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(1)
    hf = MarianConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        activation_function="relu",
        max_position_embeddings=64,
        scale_embedding=scale_embedding,
        init_std=0.1,
        pad_token_id=PAD,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=None,
    )
    return MarianMTModel(hf).eval()


@cache
def taught_marian() -> MarianMTModel:
    """Marian half trained to copy: its outputs vary and mostly end in </s>, unlike those of random weights."""
    marian = new_marian(scale_embedding=True)
    optimizer = torch.optim.Adam(marian.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for step in range(80):
        ids, _ = some_sentences(32, seed=1000 + step)
        loss = marian(ids, attention_mask=(ids != PAD).long(), labels=ids.masked_fill(ids == PAD, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return marian


def some_sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random ids of one to twelve words, each row ending in </s> and padding; and their lengths."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 14, (count,), generator=draws)
    ids = torch.randint(3, VOCAB, (count, int(lengths.max())), generator=draws)
    place = torch.arange(ids.shape[1])
    ids[place == lengths[:, None] - 1] = EOS
    return ids.masked_fill_(place >= lengths[:, None], PAD), lengths


both_positions = pytest.mark.parametrize("positions", ["learned", "sinusoidal"])


@both_positions
@pytest.mark.parametrize("scale_embedding", [True, False], ids=["scaled", "unscaled"])
def test_logits_and_gradients_are_marians(scale_embedding: bool, positions: str) -> None:
    theirs = new_marian(scale_embedding=scale_embedding)
    shake(theirs, std=0.25, seed=2)
    ours = from_marian(theirs, positions)
    source, lengths = some_sentences(16, seed=2)
    target = F.pad(some_sentences(16, seed=3)[0], (1, 0), value=BOS)

    found = ours(source, lengths, target)
    expected = theirs(input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target).logits
    assert_close(found, expected)

    for logits in (found, expected):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD).backward()
    layers = {name: grad for name, grad in gradients(ours).items() if name.startswith(("encoder.", "decoder."))}
    order = marian_order(theirs.config.d_model, positions)
    assert_same_gradients(layers, marian_layers(gradients(theirs), theirs.config, order))


def marian_search(
    marian: MarianMTModel, source: Tensor, longest: Tensor, beam: int, **options: Any
) -> tuple[list[list[list[int]]], Tensor]:
    """Hugging Face's search with our two rules: never <pad> or <s>, and only </s> after `longest` tokens.

    The n best of each sentence, without <s> and </s>, and their scores (sentences, n).
    """
    words = list(range(EOS, VOCAB))
    found = marian.generate(
        source,
        attention_mask=(source != PAD).long(),
        num_beams=beam,
        num_return_sequences=beam,
        do_sample=False,
        max_new_tokens=int(longest.max()) + 1,
        prefix_allowed_tokens_fn=lambda sentence, ids: [EOS] if len(ids) > longest[sentence] else words,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = [row[1 : row.index(EOS)] for row in found.sequences.tolist()]
    grouped = [texts[i : i + beam] for i in range(0, len(texts), beam)]
    return grouped, found.sequences_scores.view(-1, beam) if beam > 1 else torch.empty(0)


def our_search(
    model: Transformer, source: Tensor, lengths: Tensor, n_best: int, **decode: Any
) -> list[list[Hypothesis]]:
    options = SearchOptions(extra_length=EXTRA, n_best=n_best, **decode)
    return search(model, source, lengths, options, Tokenizer("char", []))


def texts_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


@both_positions
def test_greedy_text_is_marians(positions: str) -> None:
    theirs = taught_marian()
    source, lengths = some_sentences(32, seed=4)
    expected, _ = marian_search(theirs, source, lengths - 1 + EXTRA, beam=1)
    found = our_search(from_marian(theirs, positions), source, lengths, n_best=1, beam=1)
    assert texts_of(found) == expected
    # The test is not trivial: the texts differ, and most end in </s>.
    assert len({tuple(text) for [text] in expected}) > 16
    assert sum(hypothesis.truncated for [hypothesis] in found) < 16


@pytest.mark.parametrize(("penalty", "alpha"), [("none", 0.0), ("average", 1.0)], ids=["none", "average"])
def test_beams_are_marians(penalty: str, alpha: float) -> None:
    """All four hypotheses and their scores agree, not only the best.

    Hugging Face divides by length**alpha, </s> counted: alpha 0 is our `none`, alpha 1 our `average`; it has no `gnmt`.
    With early_stopping="never" it goes on, as ours does, for as long as the longest length allowed could still bring a
    better one; its other settings may stop before that.
    """
    theirs = taught_marian()
    ours = from_marian(theirs, "sinusoidal")
    source, lengths = some_sentences(32, seed=5)
    expected, scores = marian_search(
        theirs, source, lengths - 1 + EXTRA, beam=4, length_penalty=alpha, early_stopping="never"
    )
    found = our_search(ours, source, lengths, n_best=4, beam=4, length_penalty=penalty)
    assert texts_of(found) == expected
    our_scores = torch.tensor([[hypothesis.score for hypothesis in hypotheses] for hypotheses in found])
    assert_close(our_scores, scores, of_largest=True)
    assert any(hypothesis.truncated for hypotheses in found for hypothesis in hypotheses)
    # SearchRequest for one, ours stops sooner, and finds the same.
    best = our_search(ours, source, lengths, n_best=1, beam=4, length_penalty=penalty)
    assert texts_of(best) == [hypotheses[:1] for hypotheses in expected]


# ---- decoder-only: GPT-2 ---------------------------------------------------------------------------------------------


def gpt2_layers(theirs: Weights, layers: int) -> Weights:
    """GPT-2's layers, or their gradients, under our names: its linear layers are kept transposed."""
    linear = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "feed_forward.inner",
        "mlp.c_proj": "feed_forward.outer",
    }
    norms = {"ln_1": "residuals.0.norm", "ln_2": "residuals.1.norm"}
    ours: Weights = {}
    for i in range(layers):
        for module, name in (linear | norms).items():
            weight, bias = (theirs[f"transformer.h.{i}.{module}.{part}"] for part in ("weight", "bias"))
            ours[f"decoder.{i}.{name}.weight"] = weight.T if module in linear else weight
            ours[f"decoder.{i}.{name}.bias"] = bias
    for part in ("weight", "bias"):
        ours[f"decoder_norm.{part}"] = theirs[f"transformer.ln_f.{part}"]
    return ours


def from_gpt2(gpt2: GPT2LMHeadModel) -> DecoderOnly:
    """Our model of GPT-2's weights; it does not scale the embedding by √d_model, so ours is smaller by as much."""
    hf, theirs = gpt2.config, gpt2.state_dict()
    spec = DecoderOnlyConfig(
        d_model=hf.n_embd,
        d_ff=hf.n_inner or 4 * hf.n_embd,
        heads=hf.n_head,
        layers=hf.n_layer,
        norm="pre",
        activation=hf.activation_function,
        positions="learned",
        max_positions=hf.n_positions,
        bias=True,
        tie="none",
        dropout=0.0,
    )
    ours = gpt2_layers(theirs, hf.n_layer)
    ours["target.tokens.weight"] = theirs["transformer.wte.weight"] / math.sqrt(hf.n_embd)
    ours["target.positions.table"] = theirs["transformer.wpe.weight"]
    ours["output.weight"] = theirs["lm_head.weight"]
    model = build_model(spec, hf.vocab_size, hf.vocab_size).eval()
    model.load_state_dict(ours)
    return model


@cache
def gpt2() -> GPT2LMHeadModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=32,
        n_layer=3,
        n_head=4,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(hf).eval()
    shake(model, std=0.25, seed=6)
    return model


def test_logits_and_gradients_are_gpt2s() -> None:
    theirs, ours = gpt2(), from_gpt2(gpt2())
    text = torch.randint(VOCAB, (8, 24), generator=torch.Generator().manual_seed(7))
    found, expected = ours(text), theirs(text).logits
    assert_close(found, expected)

    theirs.zero_grad()
    for logits in (found, expected):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    layers = {name: grad for name, grad in gradients(ours).items() if name.startswith("decoder")}
    assert_same_gradients(layers, gpt2_layers(gradients(theirs), theirs.config.n_layer))
    # Its one matrix of embeddings has the gradients of our two.
    of_input, of_output = ours.target.tokens.weight.grad, ours.output.weight.grad
    assert_close(of_input / ours.target.scale + of_output, theirs.lm_head.weight.grad, of_largest=True)
    assert_close(ours.target.positions.table.grad, theirs.transformer.wpe.weight.grad, of_largest=True)


@pytest.mark.parametrize("chunks", [[1] * 24, [5, 1, 1, 9, 1, 7]], ids=["single", "chunks"])
def test_cached_steps_are_gpt2s(chunks: Sequence[int]) -> None:
    theirs, ours = gpt2(), from_gpt2(gpt2())
    text = torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(8))
    state, past = ours.start(beam=3), None
    with torch.inference_mode():
        for tokens in text.split(list(chunks), dim=1):
            found, state = ours.step(tokens, state)
            expected = theirs(tokens, past_key_values=past, use_cache=True)
            past = expected.past_key_values
            assert_close(found, expected.logits)


@pytest.mark.parametrize("prompt", [[3], [7, 5, 31, 20, 8], [*range(10, 34)]], ids=["short", "some", "full"])
def test_greedy_continuation_is_gpt2s(prompt: list[int]) -> None:
    """Also with a full context, which the test cuts for GPT-2: both continue from the newer half of the text."""
    theirs, ours = gpt2(), from_gpt2(gpt2())
    context, count = theirs.config.n_positions, 60
    drawn = generate(ours, prompt, Sampling(temperature=0), context=context)
    found = [token for step in islice(drawn, count) for token in step.tokens]

    text = seen = prompt
    while len(text) < len(prompt) + count:
        ids = torch.tensor([seen])
        longer = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=context - len(seen) + 1
        )
        text = text + longer[0, len(seen) :].tolist()
        seen = text[-(context // 2) :]
    assert found == text[len(prompt) :][:count]
    assert len(set(found)) > 5
