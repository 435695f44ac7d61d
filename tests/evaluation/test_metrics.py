"""Scores and intervals equal sacreBLEU's; the significance test finds real differences and no others."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import sacrebleu

from qkv.core.errors import QkvError
from qkv.core.validation import corpus_bleu
from qkv.evaluation import metrics

SRC = Path(__file__).parents[2] / "src"
VOCABULARY = (
    "the a cat Dog house tree Red blue big small runs sleeps sees loves and or but with under Peter , never".split()
)


def corpus(lines: int, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(VOCABULARY, k=dice.randint(4, 15))).capitalize() + "." for _ in range(lines)]


def noisy(lines: list[str], share: float, seed: int) -> list[str]:
    dice = random.Random(seed)
    return [
        " ".join(dice.choice(VOCABULARY) if dice.random() < share else word for word in line.split()) for line in lines
    ]


REFERENCES = corpus(200)
HYPOTHESES = noisy(REFERENCES, 0.3, seed=1)


def test_the_scores_are_sacrebleus_own() -> None:
    scores = metrics.score(HYPOTHESES, REFERENCES, bootstrap=200)
    theirs = [sacrebleu.BLEU(), sacrebleu.BLEU(lowercase=True), sacrebleu.CHRF(), sacrebleu.TER()]
    assert [score.name for score in scores] == ["BLEU", "BLEU lower-case, 13a", "chrF2", "TER"]
    for ours, metric in zip(scores, theirs, strict=True):
        expected = metric.corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=200)
        assert ours.value == pytest.approx(expected.score, abs=1e-9)
        assert ours.signature == str(metric.get_signature())
        assert "bs:200|seed:12345" in ours.signature
        # The same resamples, so the same interval: sacreBLEU sums in float32, hence the tolerance.
        assert ours.low is not None
        assert ours.high is not None
        assert (ours.high - ours.low) / 2 == pytest.approx(expected._ci, abs=1e-3)
        assert ours.low <= ours.value <= ours.high
    assert scores.bleu_lower.value > scores.bleu.value  # capitalised words were misplaced


def test_the_seed_decides_the_interval_and_nothing_else() -> None:
    first, again = (metrics.score(HYPOTHESES, REFERENCES, bootstrap=50, ter=False) for _ in range(2))
    other = metrics.score(HYPOTHESES, REFERENCES, bootstrap=50, seed=7, ter=False)
    assert first == again
    assert other.bleu.value == first.bleu.value
    assert (other.bleu.low, other.bleu.high) != (first.bleu.low, first.bleu.high)
    assert "seed:7" in other.bleu.signature


def test_identical_text_is_perfect_without_doubt() -> None:
    for score in metrics.score(REFERENCES, REFERENCES, bootstrap=50):
        best = 0.0 if score.name == "TER" else 100.0
        assert (score.value, score.low, score.high) == pytest.approx((best, best, best))


def test_text_with_nothing_in_common_scores_zero() -> None:
    scores = metrics.score(["zzz qqq yyy"] * 5, ["a b c"] * 5, bootstrap=20)
    assert (scores.bleu.value, scores.chrf.value) == (0.0, 0.0)
    assert scores.ter is not None
    assert scores.ter.value == pytest.approx(100.0)


def test_the_order_of_sentences_does_not_matter() -> None:
    order = random.Random(5).sample(range(len(REFERENCES)), len(REFERENCES))
    moved = metrics.score([HYPOTHESES[i] for i in order], [REFERENCES[i] for i in order], bootstrap=0)
    assert list(moved) == list(metrics.score(HYPOTHESES, REFERENCES, bootstrap=0))


def test_optional_scores_can_be_skipped() -> None:
    scores = metrics.score(HYPOTHESES, REFERENCES, bootstrap=0, ter=False)
    assert scores.ter is None
    assert [(score.low, score.high) for score in scores] == [(None, None)] * 3
    assert all("bs:" not in score.signature for score in scores)


def test_the_bleu_of_validation_is_bleu() -> None:
    bleu = metrics.score(HYPOTHESES, REFERENCES, bootstrap=0, ter=False).bleu.value
    assert corpus_bleu(HYPOTHESES, REFERENCES) == bleu


def test_empty_lines_are_scored_not_dropped() -> None:
    half = ["" if i % 2 else line for i, line in enumerate(REFERENCES)]
    scores = metrics.score(half, REFERENCES, bootstrap=0)
    assert scores.bleu.value < 60
    assert scores.lines == len(REFERENCES)
    assert all(score.value in (0.0, 100.0) for score in metrics.score(["", "b"], ["", "b"], bootstrap=0))


def test_the_references_are_left_alone() -> None:
    references = ["  Der  Hund\u00a0schläft . ", "Cafe\u0301"]
    kept = list(references)
    metrics.score(["Der Hund", "Café"], references, bootstrap=5)
    assert references == kept


def test_unicode_forms_do_not_change_a_score() -> None:
    texts = ["Ha perché così più città è già lì, signore.", "Chi è là? È Gesù, il caffè è già giù."]
    forms = {form: [unicodedata.normalize(form, text) for text in texts] for form in ("NFC", "NFD")}
    assert forms["NFC"] != forms["NFD"]
    expected = metrics.score(forms["NFC"], forms["NFC"], bootstrap=20)
    assert expected.bleu.value == pytest.approx(100)
    for hypotheses, references in itertools.product(forms.values(), repeat=2):
        assert metrics.score(hypotheses, references, bootstrap=20) == expected
        assert corpus_bleu(hypotheses, references) == pytest.approx(100)
        comparison = metrics.compare(hypotheses, forms["NFC"], references, bootstrap=20)
        assert [difference.p for difference in comparison] == [1.0, 1.0]


def test_characters_and_bytes_of_a_text_are_counted_in_nfc() -> None:
    nfd = unicodedata.normalize("NFD", "Perché così?")
    assert metrics.TextLoss.of(8.0, 4, nfd) == metrics.TextLoss(8.0, 4, 12, 14)


@pytest.mark.parametrize(
    ("p", "verdict"),
    [(0.0001, "significant"), (0.0499, "significant"), (0.05, "not significant"), (1, "not significant")],
)
def test_a_difference_is_significant_below_five_percent(p: float, verdict: str) -> None:
    a, b = metrics.Score("BLEU", 20.0, "x"), metrics.Score("BLEU", 21.5, "y")
    first = str(metrics.Difference("BLEU", a, b, p)).splitlines()[0]
    assert first == f"BLEU: b - a = +1.50, p = {p:.4f} ({verdict})"


def test_refusals_name_the_counts() -> None:
    with pytest.raises(QkvError, match="2 hypotheses but 3 references"):
        metrics.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(QkvError, match="3 hypotheses b but 2 references"):
        metrics.compare(["a", "b"], ["a", "b", "c"], ["a", "b"])
    with pytest.raises(QkvError, match="0 hypotheses but 0 references"):
        corpus_bleu([], [])
    with pytest.raises(QkvError, match="needs resamples"):
        metrics.compare(["a"], ["a"], ["a"], bootstrap=0)


def test_a_system_does_not_differ_from_itself() -> None:
    comparison = metrics.compare(HYPOTHESES, HYPOTHESES, REFERENCES, bootstrap=100)
    assert [difference.p for difference in comparison] == [1.0, 1.0]
    assert comparison.bleu.a == comparison.bleu.b


def test_a_clearly_better_system_is_significantly_better() -> None:
    better = noisy(REFERENCES, 0.1, seed=2)
    comparison = metrics.compare(HYPOTHESES, better, REFERENCES, bootstrap=200)
    assert all(difference.p < 0.05 and difference.b.value > difference.a.value for difference in comparison)
    swapped = metrics.compare(better, HYPOTHESES, REFERENCES, bootstrap=200)
    assert [d.p for d in swapped] == [d.p for d in comparison]
    assert swapped.bleu.a == comparison.bleu.b
    assert comparison.bleu.a == metrics.score(HYPOTHESES, REFERENCES, bootstrap=200, ter=False).bleu


def test_equally_good_systems_are_seldom_called_different() -> None:
    # Under the null hypothesis p < 0.05 happens once in twenty; eight or more in thirty is a chance of 1 in 5000.
    references = corpus(60)
    pairs = [(noisy(references, 0.3, seed), noisy(references, 0.3, seed + 1000)) for seed in range(30)]
    significant = [metrics.compare(a, b, references, bootstrap=100).bleu.p < 0.05 for a, b in pairs]
    assert sum(significant) < 8


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [("", "13a"), ("de", "13a"), ("zh", "zh"), ("zh-CN", "zh"), ("zho_Hans", "zh"), ("th", "char"), ("en_US", "13a")],
)
def test_the_tokenizer_follows_the_target_language(language: str, tokenizer: str) -> None:
    assert metrics.bleu_tokenizer(language) == tokenizer
    scores = metrics.score(["今天 hello"], ["今天 hello"], tgt_lang=language, bootstrap=0, ter=False)
    assert f"tok:{tokenizer}|" in scores.bleu.signature
    assert scores.bleu_lower.name == f"BLEU lower-case, {tokenizer}"


def test_japanese_is_scored_with_or_without_mecab() -> None:
    scores = metrics.score(["今日は良い天気です。"], ["今日は良い天気でした。"], tgt_lang="ja", bootstrap=0)
    assert 0 < scores.bleu.value < 100
    assert scores.ter is not None
    assert 0 < scores.ter.value < 100  # by characters: the whole line is not one wrong word


def test_results_are_json() -> None:
    scores = metrics.score(HYPOTHESES[:5], REFERENCES[:5], bootstrap=10)
    comparison = metrics.compare(HYPOTHESES[:5], REFERENCES[:5], REFERENCES[:5], bootstrap=10)
    assert json.loads(json.dumps(scores.to_dict()))["bleu"]["value"] == scores.bleu.value
    assert json.loads(json.dumps(comparison.to_dict()))["chrf"]["p"] == comparison.chrf.p


def test_a_printed_score_has_name_value_interval_and_signature() -> None:
    score = metrics.Score("BLEU", 27.345, "nrefs:1|case:mixed", 26.0, 28.5)
    assert str(score) == "BLEU = 27.34 [26.00, 28.50]  nrefs:1|case:mixed"


def test_sacrebleu_is_imported_only_when_a_score_is_computed() -> None:
    code = "import sys, qkv.evaluation.metrics; sys.exit('sacrebleu' in sys.modules or 'lxml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, check=False).returncode == 0
