"""The Python API: text in, text out, nothing lost; scores that can be recomputed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import sacrebleu

import qkv
from conftest import WORDS, sentences, tiny_config, write_pairs
from qkv.api.run_training import _begin
from qkv.api.translation import PieceOutput, Translation, best_combinations
from qkv.api.translator import CHUNK, Translator
from qkv.assembly import Run
from qkv.core.errors import UsageError
from qkv.core.search import Hypothesis
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.translate import translate_lines
from qkv.decoding.search_request import tag_before
from qkv.explain.word_alignment import AlignmentHead
from qkv.options import CorpusConfig
from qkv.segmentation.sentences import split
from qkv.segmentation.text_cutter import TextCutter


def test_public_names_are_unchanged() -> None:
    """`qkv.train` and `qkv.evaluate` are functions, though there are folders of these names."""
    code = (
        "import qkv.training.distributed, qkv.evaluation.metrics, qkv; print(qkv.train.__name__, qkv.evaluate.__name__)"
    )
    again = "import qkv; qkv.train; qkv.load; assert callable(qkv.train) and callable(qkv.evaluate)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "train evaluate\n", done.stderr
    assert subprocess.run([sys.executable, "-c", again], check=False).returncode == 0


def test_importing_waits_for_nothing() -> None:
    code = """
import sys, qkv
assert "torch" not in sys.modules and "tokenizers" not in sys.modules
qkv.presets.demo(); qkv.Config(); qkv.QkvError
assert "torch" not in sys.modules and "tokenizers" not in sys.modules
try:
    qkv.trian
except AttributeError as error:
    assert "trian" in str(error)
else:
    sys.exit("a name that is not there")
assert set(qkv.__all__) == set(dir(qkv))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- translate -------------------------------------------------------------------------------------------------------


def test_a_text_or_several(translator: Translator) -> None:
    one = translator.translate("The big cat sees one dog.")
    assert isinstance(one, Translation)
    assert (str(one), len(one.pieces), one.truncated, one.alternatives) == (
        "Il grande gatto vede uno cane.",
        1,
        False,
        [],
    )
    several = translator.translate(["Good day.", "", "The big cat sees one dog.", " \t\u3000 "])
    assert [each.text for each in several] == ["Buono giorno.", "", "Il grande gatto vede uno cane.", " \t\u3000 "]
    assert [len(each.pieces) for each in several] == [1, 0, 1, 1]
    assert several[3].flags == ("blank",)
    assert several[2].logprob == pytest.approx(one.logprob, abs=1e-4)
    assert translator.translate([]) == []
    assert translator.translate(("One.",))[0].text == "Uno."


def test_fields_of_a_translation(translator: Translator) -> None:
    found = translator.translate("One small house.", beam=3, n_best=3)
    assert "".join(found.tokens).replace("▁", " ").strip() == found.text == "Uno piccolo casa."
    assert len(found.alternatives) == 2
    assert found.score >= found.alternatives[0].score >= found.alternatives[1].score
    penalty = ((5 + len(found.tokens) + 1) / 6) ** 0.6
    assert found.score == pytest.approx(found.logprob / penalty)
    assert len({found.text, *(each.text for each in found.alternatives)}) >= 2
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    known = "text score logprob tokens alternatives truncated pieces finish_reason length_ratio looped dropped".split()
    assert sorted(plain) == sorted(known)


def test_results_of_empty_text_are_not_shared(translator: Translator) -> None:
    translator.translate("").tokens.append("mine")
    assert translator.translate("").tokens == []


def test_options_reach_the_search(translator: Translator) -> None:
    text = "The red dog runs and sees three big cat."
    greedy, plain = translator.translate(text, beam=1), translator.translate(text, length_penalty="none")
    assert plain.score == plain.logprob
    assert greedy.text == translator.translate(text, beam=1, alpha=0.0).text
    assert translator.translate(text, alpha=0.0).score == translator.translate(text, alpha=0.0).logprob
    for wrong in ({"beam": 0}, {"n_best": 0}, {"length_penalty": "long"}, {"alpha": -1.0}):
        with pytest.raises(UsageError):
            translator.translate(text, **wrong)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="bean"):
        translator.translate(text, bean=3)  # type: ignore[call-overload]


def test_long_text_is_translated_in_pieces_and_nothing_is_cut(translator: Translator) -> None:
    """Training sentences, together ten times as long as the model's limit."""
    pairs = sentences(60, seed=5)
    source = " ".join(text for text, _ in pairs)
    longest = translator.config.data.max_length
    assert len(translator.tokenizers.src.encode(source)) > 5 * longest
    found = translator.translate(source, split=False)
    pieces = split(source, lambda piece: len(translator.tokenizers.src.encode(piece)) <= longest)
    assert len(found.pieces) == len(pieces) > 5
    alone = translator.translate(list(pieces), split=False)
    assert found.text == " ".join(each.text for each in alone)
    assert found.tokens == [token for each in alone for token in each.tokens]
    assert found.logprob == pytest.approx(sum(each.logprob for each in alone), abs=1e-3)
    weights = [len(translator.tokenizers.src.encode(piece)) + 1 for piece in pieces]
    mean = sum(w * each.score for w, each in zip(weights, alone, strict=True)) / sum(weights)
    assert found.score == pytest.approx(mean, abs=1e-3)


TEXT, SENTENCES = "One cat. Two dog?  Three house!", ["One cat.", "Two dog?", "Three house!"]


def test_a_text_is_translated_sentence_by_sentence(translator: Translator) -> None:
    """White space between sentences is kept; long texts are cut into sentences, and alternatives are joined."""
    alone = translator.translate(SENTENCES)
    found = translator.translate(TEXT)
    assert (found.text, len(found.pieces)) == ("{} {}  {}".format(*map(str, alone)), 3)
    assert [TEXT[slice(*piece.source)] for piece in found.pieces] == ["One cat. ", "Two dog?  ", "Three house!"]
    assert "".join(found.text[slice(*piece.target)] for piece in found.pieces) == found.text
    assert found.logprob == pytest.approx(sum(each.logprob for each in alone), abs=1e-4)
    assert [each.text for each in translator.stream([TEXT, "One cat."])] == [found.text, alone[0].text]
    several = translator.translate(TEXT, n_best=2)
    assert several.text == found.text
    choices = translator.translate(SENTENCES, n_best=2)
    rank = [[each.text, each.alternatives[0].text] for each in choices]
    others = {"{} {}  {}".format(*(rank[i][i == k] for i in range(3))) for k in range(3)}
    assert several.alternatives[0].text in others  # in one sentence the second best, not in all at once
    assert several.score >= several.alternatives[0].score
    pairs = sentences(60, seed=5)
    assert len(translator.translate(" ".join(text for text, _ in pairs)).pieces) == len(pairs)


def test_a_text_may_be_translated_as_a_whole(translator: Translator) -> None:
    """A text is not cut if split is false, or with a prefix or phrases for the text as a whole."""
    assert len(translator.translate(TEXT, split=False).pieces) == 1
    assert len(translator.translate(TEXT, prefix="Uno").pieces) == 1
    found = translator.translate([TEXT, TEXT], must_include=[["rosso"], []])
    assert [len(each.pieces) for each in found] == [1, 3]
    assert "rosso" in found[0].text


def test_another_word_is_for_its_sentence(translator: Translator) -> None:
    source, written = "One cat. Two dog.  Three house.", "Uno gatto. Due cane.  Tre casa."
    alone = translator.alternatives("Three house.", "Tre casa.", 1, n=2)
    found = translator.alternatives(source, written, 7, n=2)  # punctuation marks are words too
    assert [each.word for each in found] == [each.word for each in alone]
    assert [each.text for each in found] == [f"Uno gatto. Due cane.  {each.text}" for each in alone]
    last = translator.alternatives(source, written, 9, n=1)  # text after the last word
    assert last[0].text.startswith("Uno gatto. Due cane.  Tre casa")


@pytest.mark.parametrize(
    ("sentences", "pieces"),
    [
        (None, 3),
        ({"1": 1.0}, 3),
        ({"1": 0.91, "2": 0.09}, 3),
        ({"1": 0.8, "2": 0.2}, 2),
        ({"2": 0.5, "5": 0.5}, 1),
    ],
)
def test_training_text_decides_whether_a_text_is_cut(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sentences: dict[str, float] | None,
    pieces: int,
) -> None:
    """Older run folders without the record are treated as trained on single sentences, and say so once."""
    run = tmp_path / "run"
    shutil.copytree(tiny, run, ignore=shutil.ignore_patterns("state", "store"))
    about = json.loads((run / "run.json").read_text())
    assert about.pop("lines")["sentences"] == {"1": 1.0}
    record = {} if sentences is None else {"lines": {"sentences": sentences, "tokens": 50, "lines": 1000}}
    (run / "run.json").write_text(json.dumps(about | record))
    translator = qkv.load(run)
    assert [len(translator.translate(TEXT).pieces) for _ in range(2)] == [pieces, pieces]
    assert capsys.readouterr().err.count("no record of how many sentences") == (sentences is None)


@pytest.mark.parametrize("sentences_a_line", [1, 2])
def test_a_new_run_records_how_many_sentences_a_line_has(tmp_path: Path, sentences_a_line: int) -> None:
    pairs = [(" ".join([src] * sentences_a_line), tgt) for src, tgt in sentences(80)]
    run, prepared = _begin(tmp_path / "run", tiny_config(*write_pairs(tmp_path, pairs)), None, [], "", 1, None)
    cutter = Run.open(run.path).cutter
    assert cutter.sentences == sentences_a_line
    assert cutter.statistics
    assert cutter.statistics.tokens == max(prepared.train.lengths("src"))


def test_text_is_kept_around_and_between_pieces(translator: Translator) -> None:
    """The spans of pieces tile both texts, with all white space."""
    text = "\n  One cat.\u00a0 Two dog?\t\n\n\tThree house!\n \u200b"
    found = translator.translate(text)
    assert "".join(text[slice(*piece.source)] for piece in found.pieces) == text
    assert "".join(found.text[slice(*piece.target)] for piece in found.pieces) == found.text
    assert found.text.startswith("\n  Uno gatto.\u00a0 Due cane")
    assert found.dropped == 1


def test_hard_wrapped_lines_are_one_sentence(translator: Translator) -> None:
    whole = translator.translate("The big cat sees one dog. One cat.")
    wrapped = "The big cat\nsees one dog. One\ncat."
    assert translator.translate(wrapped).text == whole.text
    assert len(translator.translate(wrapped, newlines="keep").pieces) == 4
    assert len(translator.translate("One cat\nTwo dog\nThree house").pieces) == 3  # a list
    with pytest.raises(UsageError, match='newlines = "lines": must be join or keep'):
        translator.translate(wrapped, newlines="lines")


def test_special_spaces_do_not_reach_the_model(translator: Translator) -> None:
    expected = translator.translate("The big cat sees one dog.").text
    for text in (
        "The\u00a0big cat sees one dog.",
        "The\u2009big\u202fcat sees one dog.",
        "The big c\u00adat sees one\u200b dog.",
    ):
        found = translator.translate(text).text
        assert found.replace("\u00a0", " ").replace("\u202f", " ") == expected


def test_best_combinations_are_those_of_all_choices() -> None:
    scores, weights = [[-1.0, -1.5, -4.0], [-2.0], [-0.5, -0.6], [-1.0, -1.2, -1.31]], [3, 1, 2, 5]
    every = sorted(
        product(*(range(len(each)) for each in scores)),
        key=lambda choice: -sum(w * s[k] for w, s, k in zip(weights, scores, choice, strict=True)),
    )
    assert [tuple(choice) for choice in best_combinations(scores, weights, 100)] == every
    assert best_combinations(scores, weights, 1) == [[0, 0, 0, 0]]
    assert len(best_combinations([[0.0, -1.0]] * 10_000, [1] * 10_000, 5)) == 5


def test_lines_inside_a_text_stay_lines(translator: Translator) -> None:
    found = translator.translate("  Good day.\n\nOne cat.\r\nTwo dog.")
    assert (found.text, len(found.pieces)) == ("  Buono giorno.\n\nUno gatto.\r\nDue cane.", 3)


@pytest.mark.parametrize(
    ("language", "joined"),
    [("it", "α。 β! γ"), ("zh", "α。β!γ"), ("zh-CN", "α。β!γ"), ("ja", "α。β!γ"), ("", "α。 β! γ")],
)
def test_pieces_are_glued_as_the_language_is_written(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, language: str, joined: str
) -> None:
    """A sentence ends in 。 without a space, or in punctuation and a space; some languages have no spaces."""
    translator = qkv.load(tiny)
    translator.config = translator.config.replace(data={"tgt_lang": language})
    cut = translator.cutter.cut("甲。B! C")
    outputs = [PieceOutput([text], [Hypothesis([5], -1.0, -1.0, False)], 1) for text in ("α。", "β!", "γ")]
    assert translator._joined("甲。B! C", cut, outputs, 1).text == joined


def test_lines_in_lines_out() -> None:
    """The core's part alone, with a search that reverses each source and records its arguments."""
    both = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
    given: list[tuple[str, int]] = []

    def search(sources: list[list[int]], line_of: list[int]) -> list[list[Hypothesis]]:
        given.extend((both.src.decode(ids), line) for ids, line in zip(sources, line_of, strict=True))
        return [
            [Hypothesis(ids[::-1], -2.0, -1.0, len(ids) > 3), Hypothesis(ids, -3.0, -2.0, False)] for ids in sources
        ]

    lines = translate_lines(["ab", " \t", " cde "], both, search, max_length=4)
    assert [line.texts[:1] for line in lines] == [["ba"], [], ["edc"]]
    assert [line.source_tokens for line in lines] == [3, 0, 4]
    assert given == [("ab", 0), ("cde", 2)]
    cut = TextCutter(both.src.encode, 9, "en").cut("ab")
    first = Translation.of(cut, [PieceOutput(*lines[0])], both.tgt, n_best=2)
    assert (str(first), first.score, first.logprob, first.finish_reason) == ("ba", -1.0, -2.0, "stop")
    assert [other.text for other in first.alternatives] == ["ab"]
    with pytest.raises(UsageError, match=r"line 2: 6 tokens, at most 4: split the line"):
        translate_lines(["a", "abcde"], both, search, max_length=4)


def test_any_text_is_answered(translator: Translator) -> None:
    odd = ["🙂 \u200d e\u0301", "\x00", "a" * 500, "\ufeffOne.", "   One.  ", "。" * 40, "\u2028\u2029"]
    found = translator.translate(odd, beam=1)
    assert len(found) == len(odd)
    assert all("\n" not in each.text for each in found)
    assert found[4].text == "   Uno.  "
    with pytest.raises(UsageError, match="half of a character"):
        translator.translate("\ud800")


def test_progress_counts_every_text_once(translator: Translator) -> None:
    told: list[int] = []
    lines = ["One cat.", "", " ".join(text for text, _ in sentences(30, seed=4)), "Two dog."]
    translator.translate(lines, progress=told.append)
    assert sum(told) == len(lines)


def test_stream_reads_no_further_than_it_must(translator: Translator) -> None:
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for text, _ in sentences(9, seed=3):
            taken.append(text)
            yield text

    stream = translator.stream(lines(), chunk=4, beam=1)
    assert next(stream).text
    assert len(taken) == 4
    rest = list(stream)
    assert len(taken) == 9
    assert [each.text for each in rest] == [each.text for each in translator.translate(taken[1:], beam=1)]
    assert CHUNK >= 1000  # enough lines to sort by length


# ---- score -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
def test_forced_decoding_gives_the_reported_logprob(translator: Translator, beam: int) -> None:
    sources = [text for text, _ in sentences(20, seed=6)]
    found = translator.translate(sources, beam=beam)
    scored = translator.score(sources, [each.text for each in found])
    compared = 0
    for ours, theirs in zip(found, scored, strict=True):
        if theirs.tokens == [*ours.tokens, "</s>"]:  # a model may spell a text in other pieces than the tokenizer
            compared += 1
            assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-3)
            assert sum(theirs.token_logprobs) == pytest.approx(theirs.logprob)
            assert theirs.perplexity == pytest.approx(math.exp(-theirs.logprob / len(theirs.tokens)))
    assert compared >= 18


def test_the_likely_scores_above_the_unlikely(translator: Translator) -> None:
    right, wrong = translator.score(["One cat.", "One cat."], ["Uno gatto.", "Rosso casa corre."])
    assert right.logprob > wrong.logprob + 3
    assert translator.score("One cat.", "Uno gatto.").logprob == pytest.approx(right.logprob, abs=1e-4)
    scored: list[int] = []
    translator.score("One cat.", "Uno gatto.", progress=scored.append)
    assert sum(scored) == 1
    assert translator.score("One cat.", "").tokens == ["</s>"]
    assert translator.score([], []) == []
    with pytest.raises(UsageError, match="2 sources but 1 targets"):
        translator.score(["a", "b"], ["c"])
    with pytest.raises(UsageError, match="two texts, or two lists"):
        translator.score("a", ["c"])  # type: ignore[call-overload]


def test_white_space_around_a_sentence_is_never_read(translator: Translator) -> None:
    """Training removed it, so a model that reads it sees something new."""
    plain, padded = translator.score("One cat.", "Uno gatto."), translator.score("  One cat. ", " Uno gatto.\u2028")
    assert (padded.tokens, padded.logprob) == (plain.tokens, plain.logprob)
    ours, theirs = (translator.attention(text, "Uno gatto.") for text in ("One cat.", " One cat.  "))
    assert ours.source == theirs.source
    assert translator.what_if("  One cat. ").before == translator.what_if("One cat.").before
    head = AlignmentHead("decoder.0.cross", 0)
    links = [translator.align([text], ["Uno gatto."], rule="spaces", head=head) for text in ("One cat.", " One cat. ")]
    assert links[0] == links[1]


# ---- language tags ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """One source language and two targets: the small language, and the source itself in capitals."""
    folder = tmp_path_factory.mktemp("tagged")
    pairs = [(" ".join(text[:-1].lower().split()[:3]), "") for text, _ in sentences(700, seed=8)]
    italian = write_pairs(folder, [(s, " ".join(WORDS[word] for word in s.split())) for s, _ in pairs], "it")
    capital = write_pairs(folder, [(s, s.upper()) for s, _ in pairs], "up")
    corpora = [
        {"src": italian[0], "tgt": italian[1], "tag": "it"},
        {"src": capital[0], "tgt": capital[1], "tag": "up"},
    ]
    spec = tiny_config("", "", metric="loss", average=0, steps=150).replace(data={"train": corpora})
    return qkv.load(qkv.train(spec, folder / "run"))


def test_a_tag_chooses_the_language(tagged: Translator) -> None:
    assert tagged.translate("two dog", tag="it").text == "due cane"
    assert tagged.translate("two dog", tag="up").text == "TWO DOG"
    ours, theirs = (tagged.score("two dog", "due cane", tag=tag).logprob for tag in ("it", "up"))
    assert ours > theirs + 2


def test_a_tag_that_is_missing_or_unknown_is_refused(tagged: Translator, translator: Translator) -> None:
    with pytest.raises(UsageError, match=r"one of them.*it, up"):
        tagged.translate("two dog")
    with pytest.raises(UsageError, match="known tags: it, up"):
        tagged.translate("two dog", tag="de")
    with pytest.raises(UsageError, match="known tags: none"):
        translator.translate("two dog", tag="de")


def test_a_sentence_of_the_greatest_length_is_read_whole_with_its_tag(tagged: Translator) -> None:
    limit, src = tagged.config.data.max_length, tagged.tokenizers.src
    text = "two dog" + " dog" * limit
    while len(src.encode(text)) > limit:
        text = text.rpartition(" ")[0]
    text += "." * (limit - len(src.encode(text)))
    assert len(src.encode(text)) == limit
    assert len(tagged.translate(text, tag="it", split=False).pieces) == 1
    assert tagged.attention(text, "due", tag="it").source


def test_a_corpus_that_is_not_read_says_nothing_about_tags(tagged: Translator) -> None:
    unread = CorpusConfig("a", "b", weight=0.0)
    data = dataclasses.replace(tagged.config.data, train=(*tagged.config.data.train, unread))
    config = dataclasses.replace(tagged.config, data=data)
    with pytest.raises(UsageError, match=r"one of them.*it, up"):
        tag_before("", tagged.tokenizers, config)


# ---- evaluate and load -----------------------------------------------------------------------------------------------


def test_evaluate_is_sacrebleu_of_the_translations(translator: Translator) -> None:
    source, reference = zip(*sentences(30, seed=11), strict=True)
    scores, found = qkv.evaluate(translator, source, reference, beam=1)
    texts = [each.text for each in found]
    assert texts == [each.text for each in translator.translate(source, beam=1)]
    assert scores.bleu.value == pytest.approx(sacrebleu.corpus_bleu(texts, [list(reference)]).score)
    assert scores.lines == 30
    with pytest.raises(UsageError, match="30 source lines but 29"):
        qkv.evaluate(translator, source, reference[1:])


def test_weights_are_chosen_by_name(tiny: Path) -> None:
    logprobs = {
        name: qkv.load(tiny, weights=name).score("One cat.", "Uno gatto.").logprob
        for name in ("", "best", "average", "last", "100", "200")
    }
    assert logprobs["last"] == logprobs["200"] != logprobs["100"] != logprobs["average"]
    assert logprobs[""] == logprobs[qkv.Run.open(tiny).scores["chosen"]]
    with pytest.raises(UsageError, match="there are average, best, step-0000100, step-0000200"):
        qkv.load(tiny, weights="worst")
    with pytest.raises(UsageError, match="cannot be used"):
        qkv.load(tiny, device="abacus")


def test_a_run_can_be_moved(tiny: Path, tmp_path: Path) -> None:
    import shutil

    moved = shutil.copytree(tiny, tmp_path / "moved")
    shutil.rmtree(moved / "store")
    shutil.rmtree(moved / "state")
    assert qkv.load(moved).translate("One cat.").text == "Uno gatto."


def test_links_read_the_lines_that_the_model_read(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(translator, "align", lambda sources, targets, **options: read.extend(sources) or [{(0, 0)}])
    text = "One red\ncat."
    assert translator.links([text], [translator.translate(text)]) == [[(0, 0)]]
    assert read == ["One red cat."]
