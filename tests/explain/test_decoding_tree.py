"""Traced searches: the tree replays the search, reasons are true, probabilities are those of the model."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.core.batches import collate
from qkv.core.errors import QkvError, UsageError
from qkv.core.search import Hypothesis, SearchOptions, length_penalty, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data.subwords import readable_tokens
from qkv.decoding.search_request import token_logprobs
from qkv.explain.decoding_tree import CANDIDATES, Decoding, EncodedSource, forced_steps, trace_search
from qkv.options import DecodeConfig
from search_tables import (
    BOS,
    EOS,
    GARDEN_PATH,
    LONG_OR_SHORT,
    PAD,
    SPECIAL,
    Rows,
    Table,
    TableModel,
    assert_same,
    everything,
    random_table,
    sources,
    specs,
    transformer,
)

BYTES = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
CPU = torch.device("cpu")
Node = dict[str, Any]


class PrefixModel(TableModel):
    """A table that may be fed several tokens at once, and counts how often it reads a source."""

    encoded = 0

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> list[int]:
        self.encoded += 1
        return super().encode(source, lengths)

    def step(self, tokens: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        logits = []
        for now in tokens.split(1, dim=1):
            now_logits, state = super().step(now, state)
            logits.append(now_logits)
        return torch.cat(logits, dim=1), state


def tell(table: Table, longest: int, spec: DecodeConfig, **options: Any) -> Decoding:
    """The decoding of a sentence of one token under a limit of `longest` ≥ 1."""
    source = EncodedSource(PrefixModel(table), BYTES, [0], CPU)
    return trace_search(source, dataclasses.replace(spec, extra_length=longest - 1), **options)


def find(table: Table, longest: int, spec: DecodeConfig, **options: Any) -> list[Hypothesis]:
    asked = SearchOptions(**vars(spec), n_best=options.pop("n_best", 1), max_length=longest)
    (found,) = search(PrefixModel(table), torch.tensor([[0]]), torch.tensor([1]), asked, SPECIAL, **options)
    return found


def path(nodes: list[Node], node: Node) -> list[str]:
    """The tokens from <s> to a node, both left out if they write nothing."""
    spelled: list[str] = []
    while node["parent"] is not None:
        spelled.insert(0, node["token"])
        node = nodes[node["parent"]]
    return [token for token in spelled if token != "</s>"]


def numbers(why: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"−?\d+\.\d+", why)]


# ---- the tree --------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    specs,
    st.booleans(),
)
def test_the_tree_replays_the_search(
    seed: int, words: int, longest: int, beam: int, n_best: int, spec: DecodeConfig, sharp: bool
) -> None:
    table, spec = random_table(seed, words, 0.2 if sharp else 1.0), dataclasses.replace(spec, beam=beam)
    told = tell(table, longest, spec, n_best=n_best)
    assert_same(told.hypotheses, find(table, longest, spec, n_best=n_best))  # tracing does not change the search
    nodes, width = told.beam["nodes"], told.beam["width"]
    assert width == max(beam, n_best)
    assert [node["id"] for node in nodes] == list(range(len(nodes)))

    finished = sorted((n for n in nodes if n["score"] is not None), key=lambda n: -n["score"])
    assert {n["fate"] for n in finished} <= {"finished", "winner"}
    assert [n for n in nodes if n["fate"] == "winner"] == finished[:1]
    for node, hypothesis in zip(finished, told.hypotheses, strict=False):
        assert path(nodes, node) == readable_tokens(BYTES.tgt, hypothesis.tokens)
        assert node["logprob"] == hypothesis.logprob
        assert node["score"] == pytest.approx(hypothesis.score, rel=1e-6)
    assert len(finished) >= len(told.hypotheses)
    check_rounds(nodes, width, table, longest)
    check_reasons(nodes, finished, told, longest, spec, n_best)


def check_rounds(nodes: list[Node], width: int, table: Table, longest: int) -> None:
    """Each step from the nodes before it: every log-probability by the table, the survivors by the rule."""
    living = nodes[:1]
    for step in range(1, nodes[-1]["step"] + 1):
        ranked = [n for n in nodes if n["step"] == step]
        assert [n["logprob"] for n in ranked] == sorted((n["logprob"] for n in ranked), reverse=True)
        assert {n["parent"] for n in ranked} <= {n["id"] for n in living}
        every = []
        for parent in living:
            written = tuple(3 + int(token[3:-1], 16) for token in path(nodes, parent))
            allowed = range(2, 8) if step <= longest else [EOS]
            row = table(0, written)
            every += [parent["logprob"] + math.log(row[t]) for t in allowed if t < len(row)]
        best = sorted(every, reverse=True)[: 2 * width]
        assert [n["logprob"] for n in ranked] == pytest.approx(best, abs=1e-5)
        ended = [n for n in ranked[:width] if n["token"] == "</s>"]
        assert [n for n in ranked if n["score"] is not None] == ended
        living = [n for n in ranked if n["token"] != "</s>"][:width]
        if width == 1:
            living = living if ranked[0]["token"] != "</s>" else []
        stayed = [n for n in ranked if n["fate"] == "went on" or n["why"].startswith(("its best", "no longer"))]
        assert stayed == living


def check_reasons(
    nodes: list[Node], finished: list[Node], told: Decoding, longest: int, spec: DecodeConfig, n_best: int
) -> None:
    parents, width = {n["parent"] for n in nodes}, told.beam["width"]
    to_beat = finished[min(n_best, len(finished)) - 1]["score"]
    for node in nodes[1:]:
        why, said, step = node["why"], numbers(node["why"]), node["step"]
        ranked = [n for n in nodes if n["step"] == step]
        place = ranked.index(node)
        assert (node["id"] in parents) == (node["fate"] == "went on"), node
        if why.startswith("ranked"):
            match = re.match(r"ranked (\d+)(st|nd|rd|th) of (\d+) at step (\d+): ", why)
            assert match is not None
            assert (int(match[1]), int(match[3]), int(match[4])) == (place + 1, len(ranked), step)
            assert said[0] == pytest.approx(node["logprob"], abs=0.0051)
        if node["fate"] == "pruned" and why.startswith("ranked"):
            assert said[0] <= said[1]
            stayed = [n for n in ranked if n["token"] != "</s>"][:width]
            last = ranked[width - 1] if width == 1 or node["token"] == "</s>" else stayed[-1]
            assert said[1] == pytest.approx(last["logprob"], abs=0.0051)
        elif why.startswith("its best"):
            following = [n["logprob"] for n in nodes if n["step"] == step + 1]
            assert said[0] <= said[1] == pytest.approx(following[-1], abs=0.0051)
            assert said[0] <= node["logprob"] + 0.0051
        elif why.startswith("no longer"):
            assert step == nodes[-1]["step"]
            attainable = node["logprob"] / length_penalty(longest + 1, spec)
            assert said == pytest.approx([to_beat, attainable], abs=0.0051)
            assert attainable <= to_beat + 1e-6
        elif node["fate"] == "finished":
            best = told.hypotheses[0].score
            assert said[0] == pytest.approx(node["score"], abs=0.0051)
            assert node["score"] <= best
            assert "below" not in why or said[1] == pytest.approx(best, abs=0.0051)
        elif node["fate"] == "winner" and len(finished) > 1:
            assert said == pytest.approx([finished[0]["score"], finished[1]["score"]], abs=0.0051)


def test_a_garden_path_computed_by_hand() -> None:
    """a 0.5, b 0.4, "" 0.1; then a </s> 0.2, b </s> 0.36; the others have at most 0.15 (see test_search)."""
    told = tell(GARDEN_PATH, 5, DecodeConfig(beam=2, length_penalty="none"))
    a, b = readable_tokens(BYTES.tgt, [3, 4])
    rows = [(n["parent"], n["step"], n["token"], n["fate"], n["why"]) for n in told.beam["nodes"]]
    assert rows[:6] == [
        (None, 0, "<s>", "went on", "start of every hypothesis"),
        (0, 1, a, "went on", "ranked 1st of 3 at step 1: −0.69"),
        (0, 1, b, "went on", "ranked 2nd of 3 at step 1: −0.92"),
        (0, 1, "</s>", "pruned", "ranked 3rd of 3 at step 1: −2.30 against −0.92 for the 2nd, the last that may end"),
        (2, 2, "</s>", "winner", "the best of 2 finished hypotheses: score −1.02 against −1.61 for the next"),
        (1, 2, "</s>", "finished", "finished, but its score −1.61 is below the winner's −1.02"),
    ]
    assert [row[3:] for row in rows[6:]] == [("pruned", "no longer able to beat −1.02: −1.90 at best")] * 2
    greedy = tell(GARDEN_PATH, 5, DecodeConfig(beam=1, length_penalty="none")).beam
    fates = [(n["step"], n["token"], n["fate"]) for n in greedy["nodes"]]
    assert greedy["width"] == 1
    assert fates[:3] == [(0, "<s>", "went on"), (1, a, "went on"), (1, b, "pruned")]
    assert fates[3] == (2, "</s>", "winner")
    assert greedy["nodes"][2]["why"] == (
        "ranked 2nd of 2 at step 1: −0.92 against −0.69 for the best, the only one kept"
    )
    assert len(fates) == 5


def test_a_hypothesis_without_continuation_is_marked_pruned() -> None:
    """With "average" the search continues to "b a a"; the continuations of "a" are then not ranked."""
    nodes = tell(LONG_OR_SHORT, 6, DecodeConfig(beam=2, length_penalty="average")).beam["nodes"]
    leaves = [n for n in nodes if n["id"] not in {m["parent"] for m in nodes}]
    assert {n["fate"] for n in leaves} == {"pruned", "finished", "winner"}
    assert all(n["why"] for n in nodes)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_traced_transformer_finds_what_the_plain_search_finds(beam: int) -> None:
    source, lengths = sources(9)
    spec = DecodeConfig(beam=beam, extra_length=4)
    plain = search(transformer(), source, lengths, SearchOptions(**vars(spec), n_best=beam), SPECIAL)
    for row, length, expected in zip(source.tolist(), lengths.tolist(), plain, strict=True):
        told = trace_search(EncodedSource(transformer(), BYTES, row[: length - 1], CPU), spec, n_best=beam)
        assert_same(told.hypotheses, expected)
        nodes = told.beam["nodes"]
        (winner,) = (node for node in nodes if node["fate"] == "winner")
        assert path(nodes, winner) == readable_tokens(BYTES.tgt, expected[0].tokens)


@pytest.mark.parametrize("beam", [1, 2])
def test_broken_weights_are_reported_while_tracing(beam: int) -> None:
    with pytest.raises(QkvError, match="not numbers"):
        tell(lambda *_: np.full(5, math.nan), 3, DecodeConfig(beam=beam))


# ---- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
def test_candidates_have_the_models_probabilities_and_the_encoder_runs_once(beam: int) -> None:
    model = PrefixModel(random_table(3, 20, 0.4))
    encoded = EncodedSource(model, BYTES, [0], CPU)
    told = trace_search(encoded, DecodeConfig(beam=beam, extra_length=6))
    assert model.encoded == 1
    written = told.hypotheses[0].tokens
    assert [s["chosen"] for s in told.steps] == [*readable_tokens(BYTES.tgt, written), "</s>"]
    assert [s["fed"] for s in told.steps] == ["<s>", *readable_tokens(BYTES.tgt, written)]
    for i, (step, token) in enumerate(zip(told.steps, [*written, EOS], strict=True)):
        row = model.table(0, tuple(written[:i]))
        assert step["probability"] == pytest.approx(row[token], abs=1e-6)
        assert step["entropy"] == pytest.approx(-(row * np.log(row)).sum(), abs=1e-5)
        assert [c["probability"] for c in step["candidates"]] == pytest.approx(
            np.sort(row)[::-1][:CANDIDATES], abs=1e-6
        )
        assert [c["id"] for c in step["candidates"]] == np.argsort(-row)[:CANDIDATES].tolist()
        assert [c["token"] for c in step["candidates"]] == readable_tokens(
            BYTES.tgt, [c["id"] for c in step["candidates"]]
        )
    assert math.prod(s["probability"] for s in told.steps) == pytest.approx(
        math.exp(told.hypotheses[0].logprob), rel=1e-4
    )
    assert forced_steps(encoded, written) == told.steps


def test_steps_of_a_transformer_are_its_softmax() -> None:
    model, source, target = transformer(), [5, 7, 4], [6, 3, 9, 9]
    told = forced_steps(EncodedSource(model, BYTES, source, CPU), target)
    state = model.start(model.encode(torch.tensor([[*source, EOS]]), torch.tensor([4])))
    for step, fed in zip(told, [BOS, *target], strict=True):
        with torch.inference_mode():
            logits, state = model.step(torch.tensor([[fed]]), state)
        top = logits[0, 0].softmax(-1).topk(CANDIDATES)
        assert [c["probability"] for c in step["candidates"]] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert [c["id"] for c in step["candidates"]] == top.indices.tolist()


# ---- prefixes --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.lists(st.integers(3, 5), min_size=1, max_size=3), st.integers(0, 2), specs)
def test_a_wide_beam_after_a_prefix_is_exhaustive(seed: int, given_: list[int], more: int, spec: DecodeConfig) -> None:
    table, longest = random_table(seed, 3), len(given_) + more
    every = [h for h in everything(table, 3, longest, spec) if h.tokens[: len(given_)] == given_]
    wide = dataclasses.replace(spec, beam=2 * 3**more + 2)
    for n_best in (1, 4):
        assert_same(find(table, longest, wide, n_best=n_best, prefix=torch.tensor([given_])), every[:n_best])


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 6), specs)
def test_greedy_goes_on_from_its_own_beginning_to_the_same_end(
    seed: int, longest: int, cut: int, spec: DecodeConfig
) -> None:
    table, spec = random_table(seed, 4, 0.3), dataclasses.replace(spec, beam=1)
    whole = find(table, longest, spec)
    begun = torch.tensor([whole[0].tokens[:cut]], dtype=torch.long)
    assert_same(find(table, longest, spec, prefix=begun), whole)


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_the_score_of_a_forced_prefix_is_that_of_forced_decoding(beam: int) -> None:
    source, lengths = sources(8)
    spec, prefix = SearchOptions(beam=beam, extra_length=5, n_best=beam), torch.randint(3, 12, (8, 3))
    found = search(transformer(), source, lengths, spec, SPECIAL, prefix=prefix)
    for row, hypotheses in enumerate(found):
        given_ = source[row, : lengths[row] - 1].numpy()
        batch = collate([given_] * beam, [np.array(h.tokens, np.int64) for h in hypotheses], BYTES)
        for h, logprobs in zip(hypotheses, token_logprobs(transformer(), batch, PAD), strict=True):
            assert h.tokens[:3] == prefix[row].tolist()
            assert h.logprob == pytest.approx(sum(logprobs), abs=1e-4)
            assert h.score == pytest.approx(sum(logprobs) / length_penalty(len(logprobs), spec), abs=1e-4)


def test_a_prefix_is_the_trunk_of_the_tree_and_may_fill_the_limit() -> None:
    table, spec = random_table(1, 3), DecodeConfig(beam=2)
    told = tell(table, 2, spec, prefix=[4, 3, 5])  # longer than allowed: only </s> may follow
    assert told.hypotheses[0].tokens == [4, 3, 5]
    assert told.hypotheses[0].truncated
    trunk = told.beam["nodes"][:4]
    assert [n["parent"] for n in trunk] == [None, 0, 1, 2]
    assert [n["fate"] for n in told.beam["nodes"]] == ["went on"] * 4 + ["winner"]
    steps = [math.log(table(0, tuple([4, 3, 5][:i]))[t]) for i, t in enumerate([4, 3, 5])]
    assert [n["logprob"] for n in trunk] == pytest.approx([0.0, *np.cumsum(steps)], abs=1e-5)
    for broken in (EOS, PAD, BOS):
        with pytest.raises(UsageError, match="prefix cannot hold"):
            find(table, 4, spec, prefix=torch.tensor([[3, broken]]))
