"""Many sentences in, many out: batches by length, the order of the input, lines and their pieces."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from core_runs import CPU, byte_tokenizers
from qkv.core import translate
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis, SearchOptions, search
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.translate import batches_by_length, by_length, search_all, translate_lines
from search_tables import EOS, SPECIAL, sources, transformer


def ids(count: int) -> list[list[int]]:
    source, lengths = sources(count)
    return [row[: length - 1].tolist() for row, length in zip(source, lengths.tolist(), strict=True)]


@pytest.mark.parametrize("beam", [1, 3])
def test_sentences_in_batches_are_those_one_by_one(beam: int) -> None:
    wanted, done = ids(9), list[int]()
    options = SearchOptions(beam=beam, extra_length=7, batch_tokens=24)
    found = search_all(
        transformer(), wanted, options, byte_tokenizers(), device=CPU, progress=lambda places: done.extend(places)
    )
    assert sorted(done) == list(range(9))
    assert done != list(range(9)), "the longest come first"
    for sentence, hypotheses in zip(wanted, found, strict=True):
        (alone,) = search(
            transformer(), torch.tensor([[*sentence, EOS]]), torch.tensor([len(sentence) + 1]), options, SPECIAL
        )
        assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone], abs=1e-5)
    assert search_all(transformer(), [], options, byte_tokenizers(), device=CPU) == []


@pytest.mark.parametrize("numbers", [None, [10, 11, 12, 13, 14]])
def test_every_sentence_has_its_own_number_and_prefix(
    numbers: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **options: Any) -> list[list[Hypothesis]]:
        calls.append(options)
        return [[] for _ in options["numbers"]]

    monkeypatch.setattr(translate, "search", recorded)
    wanted, options = ids(5), SearchOptions(beam=1, batch_tokens=10_000)
    (order,) = batches_by_length(wanted, options, CPU)
    prefixes: list[list[int]] = [[], [4, 5], [6], [], []]
    start: Any = object()
    more: dict[str, Any] = {"device": CPU, "numbers": numbers, "start": start}
    search_all(transformer(), wanted, options, byte_tokenizers(), prefixes=prefixes, **more)
    (call,) = calls
    assert call["numbers"] == [i + (10 if numbers else 0) for i in order]
    assert call["start"] is start
    rows = {i: row.tolist() for i, row in zip(order, call["prefix"], strict=True)}
    assert rows == {0: [-1, -1], 1: [4, 5], 2: [6, -1], 3: [-1, -1], 4: [-1, -1]}
    search_all(transformer(), wanted, options, byte_tokenizers(), prefixes=[[]] * 5, **more)
    assert calls[1]["prefix"].shape == (5, 0)


def test_outputs_begin_with_their_prefixes() -> None:
    found = search_all(
        transformer(), ids(4), SearchOptions(beam=2, extra_length=7), byte_tokenizers(), device=CPU,
        prefixes=[[4, 5], [], [6], []],
    )  # fmt: skip
    assert found[0][0].tokens[:2] == [4, 5]
    assert found[2][0].tokens[:1] == [6]


def test_batches_are_longest_first_and_within_the_budget() -> None:
    lengths = [3, 9, 1, 9, 5, 2]
    assert by_length(lengths, 18) == [[1, 3], [4, 0, 5], [2]]
    assert by_length(lengths, 1) == [[1], [3], [4], [0], [5], [2]]
    texts = [[7] * (length - 1) for length in lengths]
    assert batches_by_length(texts, SearchOptions(beam=1, batch_tokens=18), CPU) == by_length(lengths, 18)
    assert batches_by_length(texts, SearchOptions(beam=2, batch_tokens=36), CPU) == by_length(lengths, 18)
    options = SearchOptions(beam=1, n_best=3, batch_tokens=54)
    assert batches_by_length(texts, options, CPU) == by_length(lengths, 18)
    many = [[7] * 15] * 10_000  # 16 with </s>
    assert len(batches_by_length(many, SearchOptions(beam=1), CPU)[0]) == 4096 // 16
    gpu = torch.device("cuda")
    assert len(batches_by_length(many, SearchOptions(beam=1), gpu)[0]) == 131_072 // 16


# ---- lines -----------------------------------------------------------------------------------------------------------


def upper(tokenizers: TokenizerPair, n_best: int = 1) -> Any:
    """A search that writes the source in capitals; worse hypotheses have one more exclamation mark each."""

    def translate(wanted: list[list[int]], lines: list[int]) -> list[list[Hypothesis]]:
        assert len(wanted) == len(lines)
        texts = [tokenizers.src.decode(source).upper() for source in wanted]
        made = [[tokenizers.tgt.encode(text + "!" * rank) for rank in range(n_best)] for text in texts]
        return [[Hypothesis(tokens, -1.0, -1.0, False) for tokens in ranks] for ranks in made]

    return translate


def test_a_line_without_text_stays_empty_and_every_line_has_its_result() -> None:
    both = byte_tokenizers()
    found = translate_lines(["one cat", "", "  ", " two \u2028dogs "], both, upper(both, 2), max_length=20)
    assert [line.texts[:1] for line in found] == [["ONE CAT"], [], [], ["TWO \u2028DOGS"]]
    assert found[0].texts == ["ONE CAT", "ONE CAT!"]
    assert [len(line.hypotheses) for line in found] == [2, 0, 0, 2]
    assert [line.source_tokens for line in found] == [8, 0, 0, len(both.src.encode("two \u2028dogs"))]


def test_line_breaks_in_a_translation_become_spaces() -> None:
    both = byte_tokenizers()

    def broken(wanted: list[list[int]], lines: list[int]) -> list[list[Hypothesis]]:
        return [[Hypothesis(both.tgt.encode(" a\nb\r\nc "), -1.0, -1.0, False)] for _ in wanted]

    assert translate_lines(["x"], both, broken, max_length=5)[0].texts == ["a b  c"]


def test_a_line_that_is_too_long_is_refused_where_nothing_splits_it() -> None:
    both = byte_tokenizers()
    assert translate_lines(["abc"], both, upper(both), max_length=4)[0].texts == ["ABC"]
    with pytest.raises(UsageError, match="line 2: 5 tokens, at most 4: split the line"):
        translate_lines(["a", "abcd"], both, upper(both), max_length=4)


def test_a_tag_is_put_before_every_source() -> None:
    side = Tokenizer("char", [], ["de"])
    both, seen = TokenizerPair(side, side), list[list[int]]()

    def recorded(wanted: list[list[int]], lines: list[int]) -> list[list[Hypothesis]]:
        seen.extend(wanted)
        return upper(both)(wanted, lines)

    found = translate_lines(["a"], both, recorded, max_length=3, tag=[side.tag("de")])
    assert seen == [[side.tag("de"), *side.encode("a")]]
    assert found[0].source_tokens == 3
    limited = partial(translate_lines, tokenizers=both, search=recorded, max_length=2, tag=[side.tag("de")])
    assert limited(["a"])[0].texts == ["A"], "the tag does not count in the length"
    with pytest.raises(UsageError, match="line 1: 3 tokens, at most 2: split the line"):
        limited(["ab"])
