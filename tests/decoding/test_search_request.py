"""The options of a translation, from text to text: each has its effect, and scores can be recomputed."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from conftest import Call, sentences
from qkv.api.translation import OtherWord, Translation
from qkv.api.translator import Translator
from qkv.core.batches import collate
from qkv.core.dataset import PreparedText
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.core.transformer import TranslationModel
from qkv.data.subwords import readable_tokens
from qkv.decoding.constraints import find
from qkv.decoding.search_request import SearchRequest, token_logprobs
from qkv.decoding.shortlist import Shortlist, Shortlisted, translation_table
from qkv.engines.cpu.native_transformer import NativeState, NativeTransformer
from qkv.segmentation.sentences import split
from search_tables import PAD, label_logprobs, sources, transformer

TEXTS = [text for text, _ in sentences(14, seed=41)]


def assert_own_logprob(translator: Translator, source: str, found: Translation) -> None:
    """Forced decoding of these tokens, which may differ from the tokenizer's for the same text."""
    tgt = translator.tokenizers.tgt
    names = {name: token for token, name in reversed(list(enumerate(readable_tokens(tgt, range(tgt.size)))))}
    ids = torch.tensor([[*translator.tokenizers.src.encode(source), 2]])
    written = [names[token] for token in found.tokens]
    memory = translator.model.encode(ids, torch.tensor([ids.shape[1]]))
    with torch.inference_mode():
        logits, _ = translator.model.step(torch.tensor([[1, *written]]), translator.model.start(memory))
    rows = logits[0].log_softmax(-1)
    total = sum(float(rows[i, token]) for i, token in enumerate([*written, 2]))
    assert found.logprob == pytest.approx(total, abs=1e-4)


EVERY: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"beam": 1},
    "lengths": {"min_length": 9, "max_length": 12},
    "coverage": {"coverage": 0.3},
    "repetition": {"repetition_penalty": 1.4, "no_repeat_ngram": 2},
    "diverse": {"beam": 4, "groups": 2, "diversity": 3.0, "n_best": 2},
    "samples": {"sample": True, "temperature": 1.3, "top_k": 9, "seed": 3, "n_best": 2},
    "prefix": {"prefix": "Il buono"},
    "phrases": {"must_include": ["casa rosso", "e"], "ordered": True},
    "avoid": {"avoid": ["gatto", "cane", "e", "il"]},
    "both": {"must_include": ["gatto"], "avoid": ["cane", "il"], "prefix": "Uno"},
    "chrf": {"rerank": "chrf", "candidates": 6, "n_best": 2},
    "bleu of samples": {"rerank": "bleu", "sample": True, "seed": 1},
}


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_every_option_keeps_its_word_and_the_models_own_score(translator: Translator, options: dict[str, Any]) -> None:
    found = translator.translate(TEXTS, **options)
    assert len(found) == len(TEXTS)
    for source, each in zip(TEXTS, found, strict=True):
        assert_own_logprob(translator, source, each)
        texts = [each.text, *(other.text for other in each.alternatives)]
        assert len(texts) <= options.get("n_best", 1)
        assert each.finish_reason == ("length" if each.truncated else "stop")
        assert each.length_ratio == len(each.tokens) / len(translator.tokenizers.src.encode(source))
        assert options.get("min_length", 0) <= len(each.tokens) <= options.get("max_length", 99)
        for text in texts:
            assert text.startswith(options.get("prefix", ""))
            end = 0
            for phrase in options.get("must_include", ()):
                assert (end := find(phrase, text, start=end)) >= 0
            assert not any(find(phrase, text) >= 0 for phrase in options.get("avoid", ()))
        if n := options.get("no_repeat_ngram"):
            grams = [tuple(each.tokens[i : i + n]) for i in range(len(each.tokens) - n + 1)]
            assert len(set(grams)) == len(grams)
        if options.get("groups"):
            assert len(set(texts)) == len(texts) == 2


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_text_alone_and_among_others(translator: Translator, options: dict[str, Any]) -> None:
    together = translator.translate(TEXTS, **options)
    for place in (0, 5, 13):
        (alone,) = translator.translate([TEXTS[place]], **options, first=place)
        assert (alone.text, alone.tokens) == (together[place].text, together[place].tokens)
        assert alone.logprob == pytest.approx(together[place].logprob, abs=1e-4)
    streamed = translator.stream(TEXTS, chunk=5, **options)
    assert [each.text for each in streamed] == [each.text for each in together]


def test_every_text_may_have_its_own(translator: Translator) -> None:
    texts = ["One cat.", "", "Two dog.", "Three house."]
    phrases: list[list[str]] = [["rosso"], ["x"], [], ["grande", "gatto"]]
    found = translator.translate(texts, must_include=phrases, prefix=["Il", "", "", "Uno"])
    assert find("rosso", found[0].text) >= 0
    assert found[0].text.startswith("Il")
    assert (found[1].text, found[1].finish_reason) == ("", "blank")
    plain = translator.translate("Two dog.")
    assert dataclasses.replace(found[2], logprob=0.0, score=0.0) == dataclasses.replace(plain, logprob=0.0, score=0.0)
    assert found[3].text.startswith("Uno")
    assert all(find(word, found[3].text) >= 0 for word in ("grande", "gatto"))


def test_seeds_decide_and_nothing_else(translator: Translator) -> None:
    def drawn(**options: Any) -> list[str]:
        return [each.text for each in translator.translate(TEXTS, sample=True, temperature=3.0, **options)]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert drawn(seed=1, first=14) != drawn(seed=1)
    assert drawn() != drawn()
    again = ["One cat."] * 8
    assert len({each.text for each in translator.translate(again, sample=True, temperature=3.0, seed=1)}) > 1


def test_contradictory_options_are_refused(translator: Translator) -> None:
    long = " ".join(TEXTS)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("must be at least 1", {"n_best": 0}),
        ("exclude each other", {"sample": True, "beam": 2}),
        ("for samples only", {"temperature": 0.5}),
        ("for samples only", {"seed": 1}),
        ("one beam", {"sample": True, "must_include": ["x"]}),
        ("one beam", {"groups": 2, "must_include": ["x"]}),
        ("must be one of chrf, bleu", {"rerank": "ter"}),
        ("need a metric", {"candidates": 4}),
        ("at least n_best", {"candidates": 4, "n_best": 5, "rerank": "chrf"}),
        ("groups of one width", {"groups": 3, "beam": 4}),
        ("brackets", {"must_include": "cat"}),
        ("brackets", {"avoid": "cat"}),
        ("blank phrase", {"avoid": ["  "]}),
        ("2 prefixes for 1 texts", {"prefix": ["a", "b"]}),
        ("2 lists for 1 texts", {"must_include": [["a"], ["b"]]}),
        ("in it is forbidden", {"must_include": ["il gatto"], "avoid": ["gatto"]}),
        ("in it is forbidden", {"prefix": "Il gatto e", "avoid": ["gatto"]}),
        ("raise max_length", {"must_include": ["il gatto vede"], "max_length": 2}),
        ("no such weights", {"shortlist": True}),
        ("omit the shortlist", {"shortlist": True, "prefix": "Il"}),
        ("omit the shortlist", {"shortlist": True, "avoid": ["gatto"]}),
        ("omit one", {"shortlist": True, "coverage": 0.5}),
        ("groups of beams only", {"diversity": 0.3}),
        ("gnmt penalty only", {"alpha": 1.0, "length_penalty": "none"}),
        ("required phrases only", {"ordered": True}),
        ("larger beam", {"beam": 1, "coverage": 0.5}),
    ]
    for message, options in refused:
        with pytest.raises(QkvError, match=message):
            translator.translate(["One cat."], **options)
    for options in ({"prefix": "Il"}, {"must_include": ["gatto"]}):
        with pytest.raises(UsageError, match=r"text 2 is translated in \d+ pieces"):
            translator.translate(["One cat.", long], **options)  # type: ignore[arg-type]
    assert find("gatto", translator.translate(long, avoid=["gatto"]).text) < 0
    with pytest.raises(TypeError, match="bean"):
        translator.translate("One.", bean=1)  # type: ignore[call-overload]


def test_learned_positions_end(tiny: Path) -> None:
    translator = Translator(tiny)
    translator.config = translator.config.replace(model={"positions": "learned", "max_positions": 100})
    assert translator.translate("One cat.", max_length=98).text == "Uno gatto."
    for options in ({"max_length": 99}, {"prefix": "e " * 99}):
        with pytest.raises(UsageError, match="learned 100 positions"):
            translator.translate("One cat.", **options)  # type: ignore[arg-type]


def test_a_forbidden_phrase_that_two_pieces_make_together_is_refused(translator: Translator) -> None:
    long = " ".join(TEXTS)
    fits = translator.config.data.max_length
    first, second, *_ = split(long, lambda piece: len(translator.tokenizers.src.encode(piece)) <= fits)
    before, after = (each.text for each in translator.translate([first, second]))
    met = f"{before.split()[-1]} {after.split()[0]}"
    assert met in translator.translate(long).text
    with pytest.raises(QkvError, match="arises where translations of two pieces"):
        translator.translate(long, avoid=[met])


def test_a_forbidden_phrase_in_protected_text_is_named(translator: qkv.Translator) -> None:
    with pytest.raises(QkvError, match=r'text 1: "x_y" is forbidden, but is in protected text of the source'):
        translator.translate("The red `x_y` cat.", avoid=["x_y"])


@pytest.mark.slow
def test_several_processes_translate_as_one_does(tiny: Path, translator: Translator) -> None:
    several = Translator(tiny, workers=2)
    for name in ("plain", "samples", "prefix", "phrases", "avoid"):
        ours, theirs = several.translate(TEXTS, **EVERY[name]), translator.translate(TEXTS, **EVERY[name])
        assert [each.text for each in ours] == [each.text for each in theirs]
    assert several.workers is not None
    several.workers.close()


def test_dtype_and_workers_are_checked_when_a_run_is_opened(tiny: Path) -> None:
    with pytest.raises(UsageError, match="fp32"):
        qkv.load(tiny, dtype="fp8")
    with pytest.raises(UsageError, match="one process"):
        Translator(tiny, others=[tiny], workers=2)
    with pytest.raises(UsageError, match="probabilities, logprobs"):
        Translator(tiny, others=[tiny], average="mode")


# ---- loops -----------------------------------------------------------------------------------------------------------


class Stuck(TranslationModel):
    """A model that repeats a token until it is forbidden, then ends."""

    def __init__(self, word: int, vocabulary: int) -> None:
        super().__init__()
        self.logits = torch.full((vocabulary,), -9.0)
        self.logits[word], self.logits[2] = 5.0, 0.0

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.zeros(len(source))

    def start(self, memory: torch.Tensor, beam: int = 1) -> Any:  # type: ignore[override]
        return _Rows()

    def step(self, tokens: torch.Tensor, state: Any) -> Any:  # type: ignore[override]
        return self.logits.repeat(*tokens.shape, 1), state


class _Rows:
    def select(self, rows: torch.Tensor) -> _Rows:
        return self


def test_a_loop_is_detected_broken_and_flagged(tiny: Path) -> None:
    translator = Translator(tiny)
    tgt = translator.tokenizers.tgt
    (word,) = tgt.encode("e")
    stuck = Stuck(word, tgt.size)
    translator.runner = dataclasses.replace(translator.runner, model=stuck)
    found = translator.translate(["One cat.", "e " * 10, ""], beam=1, max_length=10)
    assert [each.looped for each in found] == [True, False, False]  # the second source says it as often
    assert found[0].text == "e e e e"
    assert (found[0].finish_reason, found[0].truncated) == ("stop", False)
    assert found[1].text == "e " * 10
    assert (found[1].finish_reason, found[1].truncated) == ("length", True)
    blocked = translator.translate("One cat.", beam=1, max_length=10, no_repeat_ngram=2)
    assert (blocked.text, blocked.looped) == ("e e", False)
    begun = translator.translate(
        "One cat.", beam=1, max_length=10, prefix="e " * 9
    )  # if the second search is no better
    assert (begun.text, begun.looped) == (" ".join("e" * 10), True)


# ---- alternatives ----------------------------------------------------------------------------------------------------


def test_other_words_at_a_place(translator: Translator) -> None:
    source, target = "The big cat sees one dog.", "Il grande gatto vede uno cane."
    others = translator.alternatives(source, target, 2, n=4)
    assert len(others) == 4
    assert all(isinstance(other, OtherWord) for other in others)
    assert [other.probability for other in others] == sorted((o.probability for o in others), reverse=True)
    assert len({other.word for other in others} | {"gatto"}) == 5
    for other in others:
        assert find(other.word, other.text) >= 0
        assert other.text.startswith(f"Il grande {other.word}")
        assert 0 < other.probability < 1
        assert other.logprob < translator.translate(source).logprob
    beginning = translator.alternatives(source, "Il grande", 2, n=2)  # the word that comes next
    assert beginning[0].word == "gatto"
    assert beginning[0].text == target
    for wrong in (-1, 9):
        with pytest.raises(UsageError, match="give 0 to"):
            translator.alternatives(source, target, wrong)


def test_a_words_probability_is_that_of_its_tokens_and_of_an_end(translator: Translator) -> None:
    source, tgt = "The big cat sees one dog.", translator.tokenizers.tgt
    words = translator.alternatives(source, "Il grande", 2, n=8)
    assert sum(word.probability for word in words) <= 1 + 1e-5
    ids = torch.tensor([[*translator.tokenizers.src.encode(source), 2]])
    before, written = [1, *tgt.encode("Il grande")], tgt.encode("gatto")
    with torch.inference_mode():
        memory = translator.model.encode(ids, torch.tensor([ids.shape[1]]))
        logits, _ = translator.model.step(torch.tensor([[*before, *written]]), translator.model.start(memory))
    likely = logits[0, len(before) - 1 :].softmax(-1)
    expected = float(torch.stack([likely[i, token] for i, token in enumerate(written)]).prod())
    # Tokens that may follow a word: </s>, a space, punctuation; all that begin with neither letter nor digit.
    ends = [not tgt.bytes_of(token).decode("utf-8", "replace")[:1].isalnum() for token in range(tgt.size)]
    broken = [tgt.bytes_of(token)[:1] >= b"\x80" for token in range(tgt.size)]  # parts of characters, which may be any
    may_end = torch.tensor(ends) & ~torch.tensor(broken)
    may_end[:2] = False  # <pad> and <s> are never written
    assert words[0].word == "gatto"
    assert words[0].probability == pytest.approx(expected * float(likely[len(written), may_end].sum()), rel=1e-4)


# ---- a shortlist -----------------------------------------------------------------------------------------------------


def test_translation_probabilities_by_hand() -> None:
    """Two pairs: "a b" – "x y" and "a" – "x". Model 1 learns that a writes x, and so b writes y."""
    pairs = [(np.array([0, 1]), np.array([5, 6])), (np.array([0]), np.array([5]))]
    keys, probability = translation_table(pairs, 10)
    table = {(key // 10, key % 10): p for key, p in zip(keys.tolist(), probability.tolist(), strict=True)}
    assert set(table) == {(0, 5), (0, 6), (1, 5), (1, 6)}
    assert table[0, 5] + table[0, 6] == pytest.approx(1)
    assert table[0, 5] > 0.8
    assert table[1, 6] > 0.7
    # The first round: all alike. x is written half by a, half by b in the first pair, and by a in the second.
    assert translation_table([], 10)[0].tolist() == []


def test_a_shortlist_is_learned_kept_and_used(tiny: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny, tmp_path / "run")
    translator = Translator(moved)
    path = translator.learn_shortlist(likeliest=6, frequent=8)
    assert path is not None
    assert path.parent == moved
    plain = translator.translate(TEXTS, n_best=2)
    opened = Translator(moved)
    for short in (translator, opened):
        found = short.translate(TEXTS, shortlist=True, n_best=2)
        same = sum(ours.text == theirs.text for ours, theirs in zip(found, plain, strict=True))
        assert same >= len(TEXTS) - 1
        for source, each in zip(TEXTS, found, strict=True):
            assert_own_logprob(short, source, each)
    alone = [opened.translate(text, shortlist=True).text for text in TEXTS]
    assert alone == [each.text for each in opened.translate(TEXTS, shortlist=True)]


def test_a_shortlist_that_cannot_be_kept_is_used_all_the_same(
    tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", read_only)  # how a file is begun; a folder's mode would not stop root
    done = call("translate", tiny, "--shortlist", input=b"The cat sees one dog.\n")
    assert (done.code, done.out) == (0, "Il gatto vede uno cane.\n")
    assert f"{tiny}/shortlist.safetensors: cannot be written: Read-only file system" in done.err
    assert "in memory only" in done.err
    assert not (tiny / "shortlist.safetensors").exists()


def test_only_words_of_the_shortlist_are_written(translator: Translator) -> None:
    tokenizers = translator.tokenizers
    store = PreparedText.open(translator.run.store).train
    learned = Shortlist.learn(store, tokenizers, likeliest=2, frequent=3)
    source = torch.tensor([[*tokenizers.src.encode("One cat."), 2], [*tokenizers.src.encode("Two dog."), 2]])
    allowed = learned.allowed(source)
    assert allowed[:, 2].all()
    assert int(allowed.sum(1).max()) <= 3 + 3 * source.shape[1]
    assert all(allowed[0, token] for token in source[0].tolist())  # one vocabulary: a word may stay as it is
    tokens = torch.cat([torch.arange(3), allowed.any(0).nonzero().flatten()]).unique()
    plain = translator.model
    model = Shortlisted(plain, plain.output.weight, learned, tokens)
    lengths, first = torch.tensor([source.shape[1]] * 2), torch.ones(4, 1).long()
    with torch.inference_mode():
        logits, state = model.step(first, model.start(model.encode(source, lengths), 2))
        whole, _ = plain.step(first, plain.start(plain.encode(source, lengths), 2))
        chosen, _ = model.step(torch.full((2, 1), 4), state.select(torch.tensor([2, 3])))
        fed = torch.tensor([[1, int(tokens[4])]] * 4)
        second, _ = plain.step(fed, plain.start(plain.encode(source, lengths), 2))
    assert logits.shape == (4, 1, len(tokens))
    rows = allowed[:, tokens].repeat_interleave(2, dim=0)
    assert torch.equal(logits[:, 0] > -np.inf, rows)
    torch.testing.assert_close(logits[:, 0][rows], whole[:, 0][:, tokens][rows])
    assert torch.equal(chosen[:, 0] > -np.inf, rows[2:])
    torch.testing.assert_close(chosen[:, 0][rows[2:]], second[2:, 1][:, tokens][rows[2:]], atol=1e-5, rtol=1e-5)


def test_a_shortlist_of_another_vocabulary_is_refused(translator: Translator, tmp_path: Path) -> None:
    store = PreparedText.open(translator.run.store).train
    learned = Shortlist.learn(store, translator.tokenizers, likeliest=2, frequent=3)
    learned.save(tmp_path / "one.safetensors", translator.tokenizers)
    back = Shortlist.load(tmp_path / "one.safetensors", translator.tokenizers)
    assert torch.equal(back.likeliest, learned.likeliest)
    assert torch.equal(back.frequent, learned.frequent)
    foreign = TokenizerPair(Tokenizer("char", []), Tokenizer("char", []))
    with pytest.raises(QkvError, match="another vocabulary"):
        Shortlist.load(tmp_path / "one.safetensors", foreign)


def test_search_options_default_to_the_config(translator: Translator) -> None:
    asked = SearchRequest.of(translator.config, translator.tokenizers.tgt, beam=7, alpha=0.1)
    assert (asked.options.beam, asked.options.alpha) == (7, 0.1)
    assert asked.options.length_penalty == translator.config.decode.length_penalty
    assert asked.whole_words
    chinese = translator.config.replace(data={"tgt_lang": "zh-CN"})
    assert not SearchRequest.of(chinese, translator.tokenizers.tgt).whole_words


def test_the_engine_reports_its_kernels(tiny: Path) -> None:
    threads = f"threads: {torch.get_num_threads()}"
    assert re.fullmatch(rf"fp32 on .+, {threads}", qkv.load(tiny, device="cpu").engine)
    assert qkv.load(tiny, device="cpu", dtype="int8").engine.startswith(
        ("int8 on ", "fp32 on ")
    )  # or fp32, with the reason
    assert qkv.load(tiny, device="cpu", workers=2).engine.endswith("processes: 2")


def test_log_probabilities_of_the_labels_are_those_of_the_model() -> None:
    given, lengths = sources(3)
    rows = [row[: length - 1].numpy() for row, length in zip(given, lengths.tolist(), strict=True)]
    targets = [np.array(row, np.int64) for row in ([4, 5, 6], [7], [])]
    batch = collate(rows, targets, TokenizerPair(Tokenizer("char", []), Tokenizer("char", [])))
    found = token_logprobs(transformer(), batch, PAD)
    for ours, theirs in zip(found, label_logprobs(transformer(), batch), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_rows_without_a_hypothesis_are_not_computed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for required phrases begins with one hypothesis in eight rows, the coverage with one in four."""
    translator = qkv.Translator(tiny, device="cpu", dtype="fp32")
    if not isinstance(translator.engines[0], NativeTransformer):
        pytest.skip(translator.engine)
    living: list[int] = []
    step = NativeTransformer.step

    def counting(self: NativeTransformer, tokens: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        living.append(len(tokens) if state.alive is None else int(state.alive.sum()))
        return step(self, tokens, state)

    monkeypatch.setattr(NativeTransformer, "step", counting)
    assert "cane" in translator.translate("The cat.", must_include=["cane"]).text
    assert living[0] == 1
    assert max(living) > 1
