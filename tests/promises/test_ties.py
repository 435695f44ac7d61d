"""Tie order of the search: every path chooses as a textbook beam search does among exactly equal totals.

Order of continuations: higher total first, then lower row, then lower token id. Order of finished hypotheses: higher
score first, then the one that finished earlier.

The logits are small integers, and <pad>, which may never follow, has nearly all of the probability. The log of the sum
is therefore exactly 0, all totals are integers, and totals that are equal on paper are equal to the last bit, whatever
way a path sums. Random logits almost never tie; here most continuations do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.search import SearchOptions, StartSearch, length_penalty, search, start_search, top_k
from qkv.core.tokenizer import Tokenizer
from qkv.engines.cpu.native_library import library
from qkv.engines.cpu.native_search import start_native
from qkv.engines.cuda_decoding import search_kernels

PAD, BOS, EOS, FIRST_WORD = 0, 1, 2, 3
SENTENCES = 2
Tokens = tuple[int, ...]
Found = list[list[tuple[list[int], float, float, bool]]]  # of each sentence: tokens, log-probability, score, truncated


@dataclasses.dataclass(frozen=True)
class Fixture:
    """One search among ties: how its logits are made, and its options."""

    logits: str  # coarse: a few values; uneven: lower in some rows; repeated: the same in all rows; level: all alike
    vocab: int
    beam: int
    n_best: int = 1
    penalty: str = "none"
    longest: int = 6
    prefix: Tokens = ()
    shortest: int = 0
    seed: int = 0

    def row(self, sentence: int, written: Tokens) -> np.ndarray[Any, Any]:
        """The logits behind some tokens."""
        place = (len(written),) if self.logits == "repeated" else (len(written), *written)
        random = np.random.default_rng((self.seed, sentence, *place))
        values = random.integers(0, 1 if self.logits == "level" else 4, self.vocab)
        values[EOS] = random.integers(-1, 5)  # some hypotheses end early, some at the limit
        if self.logits == "uneven":
            values -= random.integers(0, 4)
        values[PAD] = 60
        return (values - 60).astype(np.float32)


class TableModel:
    """Model that reads its logits from a fixture; a source is one token, the number of the sentence."""

    def __init__(self, fixture: Fixture) -> None:
        self.fixture = fixture

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> list[int]:
        return source[:, 0].tolist()  # type: ignore[no-any-return]

    def start(self, encoded: list[int], beam: int = 1) -> TableState:
        return TableState([sentence for sentence in encoded for _ in range(beam)], [()] * (len(encoded) * beam))

    def step(self, tokens: torch.Tensor, state: TableState) -> tuple[torch.Tensor, TableState]:
        state.written = [(*before, new) for before, new in zip(state.written, tokens[:, 0].tolist(), strict=True)]
        pairs = zip(state.sentences, state.written, strict=True)
        return torch.from_numpy(np.stack([self.fixture.row(s, written[1:]) for s, written in pairs]))[:, None], state


@dataclasses.dataclass
class TableState:
    """Decoder state of a table: the sentence of each row and the tokens written so far, <s> first."""

    sentences: list[int]
    written: list[Tokens]

    def select(self, rows: torch.Tensor) -> TableState:
        return TableState([self.sentences[r] for r in rows], [self.written[r] for r in rows])


# ---- the textbook ----------------------------------------------------------------------------------------------------


def allowed(fixture: Fixture, length: int) -> list[int]:
    """The tokens that may follow at a length, in the order of their ids."""
    if length < len(fixture.prefix):
        return [fixture.prefix[length]]
    if length >= fixture.longest:
        return [EOS]
    return [t for t in range(fixture.vocab) if t >= FIRST_WORD or (t == EOS and length >= fixture.shortest)]


def textbook_beam(fixture: Fixture, sentence: int, penalty: Callable[[int], float]) -> Found:
    """Beam search for one sentence; rows are numbered by their rank, so the order of continuations is total."""
    living: list[tuple[Tokens, np.float32]] = [((), np.float32(0))]
    finished: list[tuple[list[int], float, float, bool]] = []
    for length in range(fixture.longest + 1):
        ranked = []
        for row, (written, logprob) in enumerate(living):
            logits = fixture.row(sentence, written)
            ranked += [(logits[token] + logprob, row, token) for token in allowed(fixture, length)]
        ranked = sorted(ranked, key=lambda each: (-each[0], each[1], each[2]))[: 2 * fixture.beam]
        for total, row, token in ranked[: fixture.beam]:
            if token == EOS:
                score = float(np.float32(total) / np.float32(penalty(length)))
                finished.append((list(living[row][0]), float(total), score, length == fixture.longest))
        finished = sorted(finished, key=lambda each: -each[2])[: fixture.n_best]  # stable: of equals the earlier first
        going_on = [each for each in ranked if each[2] != EOS][: fixture.beam]
        living = [((*living[row][0], token), np.float32(total)) for total, row, token in going_on]
        worst = finished[-1][2] if len(finished) == fixture.n_best else -math.inf
        if not living or np.float32(living[0][1]) / np.float32(penalty(fixture.longest)) <= worst:
            break
    return [finished]


def textbook_greedy(fixture: Fixture, sentence: int, penalty: Callable[[int], float]) -> Found:
    """Greedy search for one sentence: of equally likely tokens the one with the lowest id."""
    written: Tokens = ()
    total = np.float32(0)
    while True:
        logits, length = fixture.row(sentence, written), len(written)
        token = max(allowed(fixture, length), key=lambda t: (logits[t], -t))
        total = total + logits[token]
        if token == EOS:
            score = float(total / np.float32(penalty(length)))
            return [[(list(written), float(total), score, length == fixture.longest)]]
        written = (*written, token)


def expected(fixture: Fixture) -> Found:
    """The answer of the textbook to a fixture."""
    spec = SearchOptions(beam=fixture.beam, length_penalty=fixture.penalty)
    penalties = torch.ones(fixture.longest + 2) * length_penalty(torch.arange(1, fixture.longest + 3).float(), spec)
    kind = textbook_greedy if fixture.beam == 1 else textbook_beam
    return [kind(fixture, sentence, lambda length: float(penalties[length]))[0] for sentence in range(SENTENCES)]


# ---- the paths -------------------------------------------------------------------------------------------------------


class Nothing:
    """A logits processor that changes nothing: the search takes the path with processors."""

    capturable = True

    def __init__(self, changes_score: bool) -> None:
        self.changes_score = changes_score

    def __call__(self, log_probs: torch.Tensor, state: object) -> None:
        pass


STARTS: dict[str, StartSearch] = {
    "pytorch": start_search,
    "processors": start_search,
    "c": start_native,
    "triton": search_kernels.start_triton,
}
PATHS = tuple(STARTS)


def found(name: str, fixture: Fixture) -> Found:
    """The answer of a path to a fixture."""
    hypotheses = search(
        TableModel(fixture),
        torch.arange(SENTENCES)[:, None],
        torch.full((SENTENCES,), fixture.longest + 1),
        SearchOptions(
            extra_length=0,
            beam=fixture.beam,
            length_penalty=fixture.penalty,
            n_best=fixture.n_best,
            min_length=fixture.shortest,
            processors=(Nothing(True), Nothing(False)) if name == "processors" else (),
        ),
        Tokenizer("char", []),
        prefix=torch.tensor([fixture.prefix] * SENTENCES, dtype=torch.long).view(SENTENCES, -1),
        start=STARTS[name],
    )
    return [[(h.tokens, h.logprob, h.score, h.truncated) for h in each] for each in hypotheses]


# ---- fixtures --------------------------------------------------------------------------------------------------------

FIXTURES: dict[str, list[Fixture]] = {
    "greedy": [
        Fixture(logits, vocab, 1, penalty=penalty, seed=seed)
        for seed, penalty in enumerate(("none", "gnmt", "average"))
        for logits in ("coarse", "repeated", "level")
        for vocab in (6, 64, 70, 200)
    ],
    "greedy, prefix and lengths": [Fixture("coarse", 70, 1, prefix=(5, 69, 5), shortest=5, seed=s) for s in range(4)],
    "beam, coarse, one chunk": [
        Fixture("coarse", vocab, beam, n_best, penalty, seed=seed)
        for seed, (beam, n_best, penalty) in enumerate([(2, 1, "none"), (4, 2, "gnmt"), (5, 5, "average")])
        for vocab in (6, 30, 64)
    ],
    "beam, coarse, several chunks": [
        Fixture("coarse", vocab, beam, n_best, penalty, seed=seed)
        for seed, (beam, n_best, penalty) in enumerate([(2, 1, "none"), (4, 2, "gnmt"), (5, 5, "average")])
        for vocab in (70, 200, 700)
    ],
    "beam, uneven rows": [
        Fixture("uneven", vocab, beam, n_best, "none", seed=seed)
        for seed, (beam, n_best) in enumerate([(3, 1), (4, 4), (5, 2)])
        for vocab in (6, 64, 130)
    ],
    "beam, repeated rows": [
        Fixture("repeated", vocab, beam, n_best, "gnmt", seed=seed)
        for seed, (beam, n_best) in enumerate([(2, 2), (4, 1), (8, 4)])
        for vocab in (6, 64, 130)
    ],
    "beam, all tokens alike": [
        Fixture("level", vocab, beam, 2, penalty)
        for beam, penalty in ((2, "none"), (4, "average"), (16, "gnmt"))
        for vocab in (6, 40, 130)
    ],
    "beam, prefix and lengths": [
        Fixture("coarse", vocab, 4, 3, "average", prefix=(5, 3), shortest=4, seed=s)
        for s in range(3)
        for vocab in (6, 130)
    ],
}

# Triton's interpreter takes a second for a beam search: of each kind the smaller ones, and not to the full length.
KERNEL_FIXTURES = {
    kind: [dataclasses.replace(each, longest=4) for each in some if each.beam <= 5 and each.vocab <= 200][::2][:4]
    for kind, some in FIXTURES.items()
}


@pytest.fixture(scope="module")
def by_kernels() -> dict[str, list[Found]]:
    """The answers of the Triton kernels, which Triton's interpreter runs in another process."""
    pytest.importorskip("triton", reason="Triton is not on this platform")
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    answers: dict[str, list[Found]] = json.loads(run.stdout.splitlines()[-1])
    return answers


def as_lists(answer: Found) -> Any:
    return json.loads(json.dumps(answer))


@pytest.mark.parametrize("kind", FIXTURES)
@pytest.mark.parametrize("name", PATHS)
def test_ties_are_broken_as_in_the_textbook(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    if name == "c" and isinstance(library(), str):
        pytest.skip(f"not native: {library()}")
    if name == "triton":
        fixtures, answers = KERNEL_FIXTURES[kind], request.getfixturevalue("by_kernels")[kind]
    else:
        fixtures, answers = FIXTURES[kind], [found(name, fixture) for fixture in FIXTURES[kind]]
    wrong = [f for f, answer in zip(fixtures, answers, strict=True) if as_lists(answer) != as_lists(expected(f))]
    assert not wrong, f"{len(wrong)} of {len(fixtures)} fixtures, first {wrong[0]}"


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.sampled_from([1, 5, 64, 129, 700, 9000]), st.integers(1, 20), st.booleans())
def test_top_k_is_a_stable_sort(seed: int, n: int, k: int, coarse: bool) -> None:
    draws = torch.Generator().manual_seed(seed)
    values = torch.randn(3, n, generator=draws)
    if coarse:
        values = values.round()
        values[torch.rand(3, n, generator=draws) < 0.2] = -math.inf
        values[torch.rand(3, n, generator=draws) < 0.1] = math.nan
    best, places = top_k(values.clone(), min(k, n))
    for row, ours, numbers in zip(values.tolist(), places.tolist(), best.tolist(), strict=True):
        known = [-math.inf if math.isnan(value) else value for value in row]
        expected = sorted(range(n), key=lambda i: -known[i])[: min(k, n)]
        assert ours == expected
        assert numbers == [known[i] for i in expected]


def test_the_textbook_meets_many_ties() -> None:
    """The fixtures test what they are for: most totals that the search ranks are equal to others."""
    for fixture in FIXTURES["beam, coarse, several chunks"]:
        logits = fixture.row(0, ())[FIRST_WORD:]
        assert len(set(logits.tolist())) <= 4 < len(logits) / 10
        assert fixture.row(0, ())[PAD] == 0
    assert torch.from_numpy(FIXTURES["beam, coarse, one chunk"][0].row(0, ())).logsumexp(0) == 0


if __name__ == "__main__":
    search_kernels.refused = lambda *_: None  # run in the interpreter, without a GPU
    print(json.dumps({kind: [found("triton", fixture) for fixture in some] for kind, some in KERNEL_FIXTURES.items()}))
