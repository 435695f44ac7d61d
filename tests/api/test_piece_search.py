"""Pieces are searched again where a translation loses protected text or leaves something out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from qkv.api.omission import Checks, OmissionCheck
from qkv.api.piece_search import MOST_REQUIRED, PieceSearch, SourcePiece
from qkv.api.translation import PieceOutput, Translation
from qkv.core.errors import QkvError
from qkv.core.search import Hypothesis
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.decoding.beam_variants import DecodingOptions
from qkv.decoding.search_request import SearchInput, SearchRequest, SearchRunner
from qkv.segmentation.protected_text import Protected, find_protected
from qkv.segmentation.text_cutter import TextCutter

Answer = Callable[[str, Sequence[str]], "str | tuple[str, float] | list[tuple[str, float]]"]


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Request(SearchRequest):
    def required(self, phrases: Sequence[str], prefix: str, tokenizer: Any) -> Any:
        return tuple(phrases) or None


@dataclass
class Model:
    """Answers a source, and the phrases required of it, with texts and their log-probability per token."""

    answer: Answer
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def run(self, work: SearchInput, request: SearchRequest, progress: Any = None) -> list[list[Hypothesis]]:
        if progress:
            progress(range(len(work.sources)))
        sources = [(Letters().decode(ids), cast(tuple[str, ...], own or ())) for ids, own in _rows(work)]
        self.asked += sources
        return [self._hypotheses(self.answer(*each)) for each in sources]

    def _hypotheses(self, answer: str | tuple[str, float] | list[tuple[str, float]]) -> list[Hypothesis]:
        ranks = [(answer, -0.1)] if isinstance(answer, str) else [answer] if isinstance(answer, tuple) else answer
        return [Hypothesis(Letters().encode(t), logprob * (len(t) + 1), logprob, False) for t, logprob in ranks]


def _rows(work: SearchInput) -> list[tuple[list[int], Any]]:
    return list(zip(work.sources, work.required, strict=True))


def search(model: Model, *texts: str, n_best: int = 1, whole_words: bool = True, **given: Any) -> list[PieceOutput]:
    """Search texts of one piece each."""
    pieces = [
        SourcePiece(number, 0, text, Protected(text, tuple(spans)) if (spans := find_protected(text)) else None)
        for number, text in enumerate(texts)
    ]
    letters = cast(Tokenizer, Letters())
    settings: dict[str, Any] = {
        "prefixes": [[] for _ in texts],
        "required": [()] * len(texts),
        "stand_ins": ["Tom", "Paris"],
        "progress": lambda done: None,
    }
    options = DecodingOptions()
    call = PieceSearch(
        cast(SearchRunner, model),
        TokenizerPair(letters, letters),
        Request(options, n_best, n_best, None, None, whole_words=whole_words, ordered=False, shortlist=False),
        1000,
        [],
        first=0,
        check_positions=lambda longest: None,
        **settings | given,
    )
    return call(pieces, len(texts))


def says(**answers: str | tuple[str, float]) -> Model:
    """A model that answers a source with a word of these as it is said there, and otherwise `other`."""
    return Model(lambda source, phrases: next((a for word, a in answers.items() if word in source), answers["other"]))


# ---- protected text --------------------------------------------------------------------------------------------------


def test_the_likelier_output_with_the_protected_text_is_taken() -> None:
    for plain, substituted, expected in [(-0.1, -0.2, "Ciao %s."), (-0.3, -0.2, "Salve %s.")]:
        model = says(Tom=("Salve Tom.", substituted), other=("Ciao %s.", plain))
        (output,) = search(model, "Hi %s.")
        assert (output.texts, output.flags) == ([expected], ())
        assert [source for source, _ in model.asked] == ["Hi %s.", "Hi Tom."]


def test_a_lost_text_comes_back_by_a_stand_in() -> None:
    (output,) = search(says(Tom="Salve Tom, Paris!", other="Ciao!"), "Hi {a}, %s!")
    assert (output.texts, output.flags) == (["Salve {a}, %s!"], ())


def test_a_text_that_no_stand_in_brings_back_is_required() -> None:
    model = Model(lambda source, phrases: " ".join(["Ciao", *phrases]))
    outputs = search(model, "Hi %s.", "Hi {a} and {a}.")
    assert (outputs[0].texts, outputs[0].flags) == (["Ciao %s"], ())
    assert ("Hi %s.", ("%s",)) in model.asked
    assert outputs[1].texts[0].count("{a}") == 2
    assert outputs[1].flags == ("protected",)


@pytest.mark.parametrize("constrained", [("Ciao %s", -5.0), ("Ciao", -0.1)])
def test_what_is_still_missing_is_inserted_and_flagged(constrained: tuple[str, float]) -> None:
    (output,) = search(Model(lambda source, phrases: constrained if phrases else "Ciao a te."), "Hi you %s.")
    assert output.texts == ["Ciao a %s te."]
    assert output.flags == ("protected",)


def test_one_refused_constraint_leaves_those_of_the_others() -> None:
    def answer(source: str, phrases: Sequence[str]) -> str:
        if "{no}" in phrases:
            raise QkvError("forbidden")
        return " ".join(["Ciao", *phrases])

    outputs = search(Model(answer), "Hi %s.", "Hi {no}.", "Hi {b}.")
    assert [output.texts[0] for output in outputs] == ["Ciao %s", "{no} Ciao", "Ciao {b}"]
    assert [output.flags for output in outputs] == [(), ("protected",), ()]


def test_more_texts_than_stand_ins_and_than_phrases_are_inserted() -> None:
    names = [f"{{n{i}}}" for i in range(MOST_REQUIRED + 1)]
    model = says(other="Ciao.")
    (output,) = search(model, f"Hi {' '.join(names)}.")
    assert [output.texts[0].count(name) for name in names] == [1] * len(names)
    assert output.flags == ("protected",)
    assert len(model.asked) == 1


def test_every_alternative_has_the_protected_text() -> None:
    model = Model(lambda source, phrases: [("Ciao %s.", -0.1), ("Salve.", -0.2)])
    (output,) = search(model, "Hi %s.", n_best=2, stand_ins=())
    assert [text.count("%s") for text in output.texts] == [1, 1]


@pytest.mark.parametrize("text", ["%s", "{a} - `b c`!", "... !!!", "\u200b"])
def test_text_without_words_is_copied_unread(text: str) -> None:
    model, done = says(other="Che?"), list[int]()
    (output,) = search(model, text, progress=done.append)
    assert (output.texts, output.flags, model.asked) == ([text], (), [])
    assert sum(done) == 1


def test_a_prefix_is_kept_where_there_are_no_words() -> None:
    (output,) = search(says(other="Si %s"), "%s", prefixes=[Letters().encode("Si")])
    assert output.texts == ["Si %s"]


# ---- omissions -------------------------------------------------------------------------------------------------------

CHECK = OmissionCheck(Checks(1.0, 1.0, 1.0, 1.0, 100, "best"))
LONG = "the cats run and the dogs sleep"


def halved(source: str, phrases: Sequence[str]) -> str:
    return "i gatti" if len(source) > 20 else source.upper()


def test_an_omission_is_searched_in_parts() -> None:
    model = Model(halved)
    (output,) = search(model, LONG, omission=CHECK)
    assert (output.texts, output.flags) == ([LONG.upper()], ())
    assert " ".join(source for source, _ in model.asked[1:]) == LONG
    assert search(Model(halved), LONG, omission=None)[0].texts == ["i gatti"]


def test_unlikely_parts_are_not_taken() -> None:
    """A whole sentence that is rightly short: its halves give more words, but unlikely ones."""
    model = Model(lambda source, phrases: "i gatti" if len(source) > 20 else (source.upper(), -0.5))
    (output,) = search(model, LONG, omission=CHECK)
    assert (output.texts, output.flags) == (["i gatti"], ("omission",))


def test_an_omission_that_stays_is_flagged_after_two_more_searches() -> None:
    model = says(other="i")
    (output,) = search(model, LONG, omission=CHECK)
    assert (output.texts, output.flags) == (["i"], ("omission",))
    assert " ".join(source for source, _ in model.asked[1:]) == f"{LONG} {LONG}"


def test_parts_keep_alternatives_and_special_spaces() -> None:
    model = Model(lambda s, phrases: [("i gatti" if len(s) > 20 else s, -0.1), (s[:1], -0.2)])
    (output,) = search(model, "it is 10\u00a0km to the old house", n_best=3, omission=CHECK, stand_ins=())
    assert output.texts[0] == "it is 10\u00a0km to the old house"
    assert len(output.texts) == len(output.hypotheses) == 3


def test_parts_of_a_language_without_spaces_are_joined_without() -> None:
    assert " " not in search(says(other="猫" * 16), LONG, omission=CHECK, whole_words=False)[0].texts[0]


def test_parts_that_lose_a_protected_text_are_not_taken() -> None:
    text = "the cats run and %s and the dogs"
    model = Model(lambda source, phrases: "i %s" if len(source) > 20 else source.replace("%s", "xx"))
    (output,) = search(model, text, omission=CHECK, stand_ins=())
    assert (output.texts, output.flags) == (["i %s"], ("omission",))


def test_alternatives_of_parts_have_the_protected_text_too() -> None:
    def answer(source: str, phrases: Sequence[str]) -> str | list[tuple[str, float]]:
        return "i %s" if len(source) > 20 else [(source, -0.1), (source.replace("%s", "xx"), -0.2)]

    (output,) = search(Model(answer), "the cats run and %s and the dogs", n_best=3, omission=CHECK, stand_ins=())
    assert len(output.texts) == 3
    assert [text.count("%s") for text in output.texts] == [1, 1, 1]


def test_one_text_with_a_prefix_leaves_the_check_of_the_others() -> None:
    outputs = search(Model(halved), LONG, LONG, omission=CHECK, prefixes=[[105], []])
    assert [output.texts[0] for output in outputs] == ["i gatti", LONG.upper()]


def test_flags_reach_the_result() -> None:
    text = "the cats run and the dogs sleep with %s"
    cut = TextCutter(Letters().encode, 1000, "en").cut(text)
    outputs = search(says(other=("i", -0.1)), text, omission=CHECK)
    joined = Translation.of(cut, outputs, cast(Tokenizer, _Readable()))
    assert joined.flags == ("protected", "omission")
    assert joined.to_dict()["pieces"][0]["flags"] == ["protected", "omission"]


class _Readable(Letters):
    special_names: Sequence[str] = ()

    def piece(self, token: int) -> bytes:
        return chr(token).encode()

    bytes_of = piece
