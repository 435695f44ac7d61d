"""Models whose probabilities are read from a table, and a small random Transformer: for tests of the search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from qkv.core.batches import Batch
from qkv.core.config import DecodeConfig, TransformerConfig
from qkv.core.search import Hypothesis, length_penalty
from qkv.core.tokenizer import Tokenizer
from qkv.core.transformer import Transformer

PAD, BOS, EOS, A, B = 0, 1, 2, 3, 4
SPECIAL = Tokenizer("char", [])  # its special tokens have the ids 0, 1 and 2
Prefix = tuple[int, ...]
Table = Callable[[int, Prefix], "np.ndarray[Any, Any]"]  # (sentence, tokens so far) → probabilities of all tokens


@dataclasses.dataclass
class Rows:
    """The state of a table model: the sentence of each row and its tokens so far."""

    sentences: list[int]
    written: list[Prefix]

    def select(self, rows: torch.Tensor) -> Rows:
        return Rows([self.sentences[r] for r in rows], [self.written[r] for r in rows])


class TableModel:
    """A model with a table of probabilities; a source is one token, the number of the sentence."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.steps = 0

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> list[int]:
        return source[:, 0].tolist()  # type: ignore[no-any-return]

    def start(self, memory: list[int], beam: int = 1) -> Rows:
        return Rows([sentence for sentence in memory for _ in range(beam)], [()] * (len(memory) * beam))

    def step(self, tokens: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        assert tokens.shape == (len(state.sentences), 1)
        self.steps += 1
        state.written = [(*before, new) for before, new in zip(state.written, tokens[:, 0].tolist(), strict=True)]
        rows = [self.table(s, w[1:]) for s, w in zip(state.sentences, state.written, strict=True)]
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.array(rows)))[:, None].float(), state


def by_hand(entries: dict[str, dict[str, float]]) -> Table:
    """A table for the tokens a and b; $ is </s>."""
    order = ["", "", "$", "a", "b"]

    def table(_sentence: int, prefix: Prefix) -> np.ndarray[Any, Any]:
        given_ = entries.get("".join(order[t] for t in prefix), {"$": 1.0})
        return np.array([given_.get(name, 0.0) if name else 0.0 for name in order])

    return table


def random_table(seed: int, words: int, sharpness: float = 0.7) -> Table:
    """Other probabilities after every prefix; <pad> and <s> have some, too."""

    @cache
    def table(sentence: int, prefix: Prefix) -> np.ndarray[Any, Any]:
        random = np.random.default_rng((seed, sentence, len(prefix), *prefix))
        return random.dirichlet([sharpness] * (3 + words)) * 0.99 + 0.01 / (3 + words)

    return table


def ranked(hypotheses: list[tuple[Prefix, float]], longest: int, spec: DecodeConfig) -> list[Hypothesis]:
    found = [Hypothesis(list(w), p, p / length_penalty(len(w) + 1, spec), len(w) == longest) for w, p in hypotheses]
    return sorted(found, key=lambda h: -h.score)


def everything(table: Table, words: int, longest: int, spec: DecodeConfig) -> list[Hypothesis]:
    """Every sequence of words up to the longest, with </s> behind it."""
    hypotheses = []
    for length in range(longest + 1):
        for written in product(range(3, 3 + words), repeat=length):
            followed = [(written[:i], t) for i, t in enumerate((*written, EOS))]
            hypotheses.append((written, sum(math.log(table(0, before)[t]) for before, t in followed)))
    return ranked(hypotheses, longest, spec)


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=1e-5)
    for ours, theirs, following in zip(found, expected, [*expected[1:], None], strict=True):
        if following is None or theirs.score - following.score > 1e-5:  # equal scores may come in either order
            assert (ours.tokens, ours.truncated) == (theirs.tokens, theirs.truncated)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


specs = st.builds(
    DecodeConfig,
    length_penalty=st.sampled_from(["gnmt", "average", "none"]),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.5]),
)

# Greedy takes a (0.5 > 0.4) and then </s> (0.4 > 0.3): 0.5 · 0.4 = 0.20. Beam 2 keeps b as well, and b </s> has
# 0.4 · 0.9 = 0.36. After it the best living one is "a a" or "a b" with 0.5 · 0.3 = 0.15: nothing can overtake.
GARDEN_PATH = by_hand(
    {"": {"a": 0.5, "b": 0.4, "$": 0.1}, "a": {"a": 0.3, "b": 0.3, "$": 0.4}, "b": {"a": 0.05, "b": 0.05, "$": 0.9}}
)

# "a" has 0.5 in 2 tokens (</s> counts), "b a a" has 0.45 · 0.95 · 0.95 = 0.406 in 4.
#   none:             ln 0.5 = -0.693                     > ln 0.406 = -0.901
#   gnmt, alpha 0.6:  -0.693 / (7/6)^0.6 = -0.632         > -0.901 / (9/6)^0.6 = -0.707
#   gnmt, alpha 2:    -0.693 / (7/6)^2   = -0.509         < -0.901 / (9/6)^2   = -0.401
#   average:          -0.693 / 2 = -0.347                 < -0.901 / 4 = -0.225
LONG_OR_SHORT = by_hand(
    {"": {"a": 0.5, "b": 0.45, "$": 0.05}, "b": {"a": 0.95, "$": 0.05}, "ba": {"a": 0.95, "$": 0.05}}
)

VOCAB = 12  # so few that </s> comes often


@cache
def transformer() -> Transformer:
    torch.manual_seed(0)
    spec = TransformerConfig(d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=2, tie="none")
    model = Transformer(spec, VOCAB, VOCAB).eval()
    for name, p in model.named_parameters():  # as after training, so that sentences differ and end
        torch.nn.init.normal_(p, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.5)
    return model


def sources(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    lengths = torch.randint(1, 9, (count,))
    source = torch.randint(3, VOCAB, (count, 9))
    source[torch.arange(9) >= lengths[:, None]] = PAD
    source[torch.arange(count), lengths - 1] = EOS
    return source, lengths


def label_logprobs(model: Transformer, batch: Batch) -> list[list[float]]:
    """Log p of each label of a batch, </s> last, from the logits of the whole target."""
    with torch.inference_mode():
        log_probs = model(*batch.inputs).double().log_softmax(-1)
    chosen = log_probs.gather(-1, batch.labels[:, :, None]).squeeze(-1)
    return [row[labels != PAD].tolist() for row, labels in zip(chosen, batch.labels, strict=True)]
