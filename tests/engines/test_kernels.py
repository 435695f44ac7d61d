"""Every kernel equals its plain twin; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = """
import torch
from torch import nn
from qkv.engines.cuda_decoding import inference_kernels as kernels, search_kernels

torch.manual_seed(0)
inf = float("inf")

def close(a, b, tolerance=2e-5):
    assert torch.equal(a.isinf(), b.isinf())
    assert float((a - b).nan_to_num(0, 0, 0).abs().max()) < tolerance, float((a - b).abs().max())

# lookup: rows of several lengths, keys in other rows, a window, a new key and value to be stored
for window in (0, 5):
    for fresh in (False, True):
        q, keys, values = torch.randn(6, 2, 24), torch.randn(6, 40, 2, 24), torch.randn(6, 40, 2, 16)
        origin, length = torch.randint(0, 6, (6, 40)).int(), torch.tensor([1, 2, 32, 33, 39, 7])
        new = (torch.randn(6, 2, 24), torch.randn(6, 2, 16)) if fresh else None
        if fresh:
            origin.scatter_(1, length[:, None], torch.arange(6)[:, None].int())
        twins = keys.clone(), values.clone()
        plain = kernels.lookup(q, kernels.RowCache(*twins, origin, length), scale=0.3, window=window, new=new)
        cache = kernels.RowCache(keys, values, origin, length)
        close(kernels.lookup_kernel(q, cache, scale=0.3, window=window, new=new), plain)
        assert torch.equal(keys, twins[0])
        assert torch.equal(values, twins[1])

# reorder: sentences of several lengths, rows that go on from themselves or one another
for beam, capacity in ((1, 8), (3, 8), (4, 150)):
    sentences = 5
    origin = torch.randint(0, sentences * beam, (sentences * beam, capacity)).int()
    first = torch.arange(sentences)[:, None] * beam
    rows = (first + torch.randint(0, beam, (sentences, beam))).flatten()
    length = torch.tensor([1, 4, 7, capacity - 1, capacity // 2]).repeat_interleave(beam)
    twin = origin.clone()
    kernels.reorder(twin, rows, length, beam)
    kernels.reorder_kernel(origin, rows, length, beam)
    known = torch.arange(capacity) <= length[:, None]
    assert torch.equal(origin[known], twin[known])

norm = nn.LayerNorm(24)
norm.weight.data.normal_()
norm.bias.data.normal_()
x, y = torch.randn(3, 5, 24), torch.randn(3, 5, 24)
with torch.no_grad():
    close(kernels.add_norm_kernel(x, y, norm), norm(x + y))

for vocab in (70, 4096 + 37):
    for early in (None, torch.tensor([True, False, True, False, False])):
        logits = torch.randn(5, vocab) * 3
        logits[4, 3:] = -inf
        twin = logits.clone()
        plain = search_kernels.scan(twin, torch.tensor([0, 1]), early, 2)
        found = kernels.scan_kernel(logits, torch.tensor([0, 1]), early, 2)
        close(found[0], plain[0])
        close(found[1], plain[1])
        assert torch.equal(logits, twin)
print("equal")
"""

# A step from random search states, and a whole search, by the Triton kernels and by PyTorch.
SEARCHES = """
import copy, random
import torch
from qkv.core.search import BeamSearch, GreedySearch, SearchOptions, SearchState
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.engines.cuda_decoding import continuous_batching, search_kernels
from qkv.engines.cuda_decoding.continuous_batching import SlotDecoding
from qkv.engines.cuda_decoding.inference_kernels import reorder, reorder_kernel
from qkv.engines.cuda_decoding.search_kernels import TritonBeamSearch, TritonGreedySearch
from qkv.assembly import build_model
from qkv.options import TransformerConfig

PAD, BOS, EOS = 0, 1, 2
CPU, inf, nan = torch.device("cpu"), float("inf"), float("nan")

def random_state(sentences, rows, n, capacity, vocab):
    # Sentences at any point: some have forced tokens, some are at their limit or the capacity, some are done.
    board = SearchState(sentences, rows, n, capacity, CPU)
    board.length.random_(capacity)
    board.length[0], board.length[1] = capacity - 1, 0
    real = torch.arange(capacity) <= board.length[:, None, None]
    board.tokens.copy_(torch.randint(3, vocab, board.tokens.shape) * real)
    board.newest.copy_(board.tokens.gather(2, board.length[:, None, None].expand(-1, rows, 1)).squeeze(2))
    board.logprob.copy_(-torch.randint(0, 6, (sentences, rows)))  # with equals
    board.logprob[torch.rand(sentences, rows) < 0.2] = -inf
    board.longest.random_(capacity - 1)
    board.forced[torch.rand(sentences, capacity) < 0.3] = random.randrange(3, vocab)
    board.longest[1], board.forced[1] = capacity - 2, -1  # one that is free
    board.done.copy_(torch.rand(sentences) < 0.2)
    board.logprob[board.done] = -inf
    board.finished_tokens.random_(vocab)
    scores = -torch.randint(0, 6, (sentences, n)).float()
    scores[torch.rand(sentences, n) < 0.4] = -inf
    board.finished_scores.random_(5)
    board.finished_scores[:, :, 0] = scores.sort(dim=1, descending=True)[0]
    return board

def some_logits(rows, vocab, dtype):
    logits = torch.randint(-4, 4, (rows, vocab)).to(dtype)  # with equals
    logits[torch.rand(rows) < 0.5, EOS] += 6
    logits[torch.rand(rows) < 0.1] = -inf
    logits[torch.rand(rows) < 0.1, random.randrange(vocab)] = nan
    logits[torch.rand(rows) < 0.05] = nan
    return logits

def same(ours, theirs, where):
    assert torch.equal(ours[where].nan_to_num(), theirs[where].nan_to_num()), (ours, theirs)
    assert torch.equal(ours[where].isnan(), theirs[where].isnan()), (ours, theirs)

search_kernels.refused = lambda *_: None  # run in the interpreter, without a GPU
SENTENCES = 3
for rows, n, capacity, vocab, penalty in (
    (1, 1, 3, 5, "gnmt"),
    (1, 1, 70, 200, "average"),
    (2, 1, 9, 70, "none"),
    (3, 3, 70, 64, "average"),
    (4, 1, 9, 700, "gnmt"),
    (5, 2, 130, 130, "gnmt"),
    (8, 4, 9, 5, "none"),
    (16, 1, 9, 200, "gnmt"),
):
    for seed, greedy in ((0, False), (1, False), (2, True), (3, True)):
        if greedy and rows > 1:
            continue
        torch.manual_seed(seed)
        random.seed(seed)
        board = random_state(SENTENCES, rows, n, capacity, vocab)
        twin = copy.deepcopy(board)
        options = SearchOptions(beam=rows, n_best=n, length_penalty=penalty, min_length=2 * (seed // 2))
        kernel, plain = (TritonGreedySearch, GreedySearch) if greedy else (TritonBeamSearch, BeamSearch)
        sizes = {"lengths": torch.ones(SENTENCES), "capacity": capacity}
        ours, theirs = (kind(None, options, Tokenizer("char", []), **sizes) for kind in (kernel, plain))
        ours.state, theirs.state = board, twin
        theirs.eager = False  # as on a GPU
        logits = some_logits(SENTENCES * rows, vocab, (torch.float, torch.bfloat16)[seed % 2])
        if seed % 2:
            logits[rows : 2 * rows] = nan  # all of a sentence: what broken weights give
        expected, found = theirs.extend(logits.clone()), ours.extend(logits)
        everything = torch.ones(SENTENCES, dtype=torch.bool)
        for name in ("length", "longest", "forced", "done"):
            same(getattr(board, name), getattr(twin, name), everything)
        same(board.logprob, twin.logprob, everything)
        alive = twin.logprob != -inf  # a row without a hypothesis may hold anything
        for name in ("tokens", "newest"):
            same(getattr(board, name), getattr(twin, name), alive)
        same(board.finished_scores[:, :, 0], twin.finished_scores[:, :, 0], everything)
        real = twin.finished_scores[:, :, 0] != -inf
        for name in ("finished_scores", "finished_tokens"):
            same(getattr(board, name), getattr(twin, name), real)
        if expected is not None:
            same(found, expected, alive.flatten())

torch.manual_seed(3)
both = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
spec = TransformerConfig(d_model=16, heads=2, d_ff=32, encoder_layers=1, decoder_layers=2, dropout=0.0)
model = build_model(spec, both.src.size, both.tgt.size).eval()
for parameter in model.parameters():
    parameter.data.mul_(1.5)
lines = [torch.randint(5, both.src.size, (length,)).tolist() for length in (3, 1, 4, 2, 3)]
prefixes = [(), lines[1], (), lines[3][:1], ()]
for beam, n_best in ((1, 1), (3, 2)):
    answers = []
    for refused, implementation in ((lambda *_: "plain", reorder), (lambda *_: None, reorder_kernel)):
        search_kernels.refused = refused
        continuous_batching.reorder = implementation
        options = SearchOptions(beam=beam, n_best=n_best, max_length=5)
        answers.append(SlotDecoding(model, both).search_all(lines, options, prefixes=prefixes))
    assert answers[0] == answers[1]  # to the last bit
    assert len({tuple(hypothesis.tokens) for found in answers[0] for hypothesis in found}) > beam
print("equal")
"""


# Greedy search with plain and with fused modules; Triton's interpreter runs the kernels.
MODULES = """
import copy
import torch
from qkv.assembly import build_model
from qkv.options import TransformerConfig
from qkv.engines.cuda_decoding import fused_modules
from qkv.engines.cuda_decoding.continuous_batching import SlotCache
from qkv.engines.cuda_decoding.fused_modules import FUSED, use_fused_modules
from qkv.engines.cuda_training import vocabulary_kernels

fused_modules.runs_fused = lambda x: not torch.is_grad_enabled()  # here it is the interpreter that runs them
fused_modules.embed = vocabulary_kernels.embed_kernel
SIZE = dict(d_model=16, heads=2, d_ff=32, encoder_layers=2, decoder_layers=2, dropout=0.1)
seen = set()
for options in (
    {},
    {"positions": "learned", "max_positions": 20, "tie": "none", "token_dropout": 0.2},
    {"positions": "none", "activation_dropout": 0.1},
    {"positions": "rotary", "norm": "pre", "activation": "swiglu"},
    {"rms_norm": True, "activation": "gelu"},
):
    torch.manual_seed(2)
    model = build_model(TransformerConfig(**SIZE, **options), 30, 30).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    fused = use_fused_modules(copy.deepcopy(model))
    assert use_fused_modules(fused) is fused
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in model.named_parameters()]
    seen |= {type(module) for module in fused.modules()} & set(FUSED.values())
    source, lengths = torch.randint(3, 30, (3, 6)), torch.tensor([6, 2, 4])
    target = torch.randint(3, 30, (3, 5))
    with torch.inference_mode():
        encoded = [each.encode(source, lengths) for each in (model, fused)]
        torch.testing.assert_close(encoded[1].values, encoded[0].values, rtol=1e-5, atol=1e-5)
        states = [model.start(encoded[0]), fused.start(encoded[1]), SlotCache(fused, 3, 1, 8, 6)]
        states[2].admit(torch.arange(3), encoded[1])
        for tokens in target.split(1, dim=1):
            logits = [each.step(tokens, state)[0] for each, state in zip((model, fused, fused), states)]
            torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(logits[2], logits[0], rtol=1e-5, atol=1e-5)
    torch.manual_seed(3)
    plain = model.train()(source, lengths, target)
    torch.manual_seed(3)
    assert torch.equal(fused.train()(source, lengths, target), plain)  # training is the plain modules'
assert seen == set(FUSED.values()), seen
print("equal")
"""


@pytest.mark.parametrize("checks", [CHECKS, SEARCHES, MODULES], ids=["models", "searches", "modules"])
def test_kernels_equal_their_plain_twins(checks: str) -> None:
    pytest.importorskip("triton", reason="Triton is not on this platform")
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "QKV_NATIVE": "0",
        "PYTHONPATH": paths,
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = subprocess.run([sys.executable, "-c", checks], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("equal"), run.stderr
