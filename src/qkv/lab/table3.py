"""Table 3 at small scale: every variation of the base model, compared with the paper's figures and conclusions.

The paper trained each row once, for 100,000 updates on 4.5 million pairs. Here widths and depths are scaled by one
factor each, the text is small and every row has several seeds. Each of the paper's conclusions is tested against the
noise between seeds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkv.core.device import choose_device
from qkv.core.errors import UsageError
from qkv.lab import result_tables, trials
from qkv.lab.trials import Result
from qkv.options import Config, TransformerConfig
from qkv.presets import PRESETS, TABLE_3

BASE, BIG = "paper_base", "paper_big"
ROWS = (BASE, *TABLE_3, BIG)
MAX_LENGTH = 128  # tokens per sentence

# The paper's own figures: perplexity per subword and BLEU on newstest2013, millions of parameters (if not the base's).
PAPER: dict[str, tuple[float, float, int]] = {
    BASE: (4.92, 25.8, 65),
    "table3_a_1_head": (5.29, 24.9, 65),
    "table3_a_4_heads": (5.00, 25.5, 65),
    "table3_a_16_heads": (4.91, 25.8, 65),
    "table3_a_32_heads": (5.01, 25.4, 65),
    "table3_b_d_k_16": (5.16, 25.1, 58),
    "table3_b_d_k_32": (5.01, 25.4, 60),
    "table3_c_2_layers": (6.11, 23.7, 36),
    "table3_c_4_layers": (5.19, 25.3, 50),
    "table3_c_8_layers": (4.88, 25.5, 80),
    "table3_c_d_model_256": (5.75, 24.5, 28),
    "table3_c_d_model_1024": (4.66, 26.0, 168),
    "table3_c_d_ff_1024": (5.12, 25.4, 53),
    "table3_c_d_ff_4096": (4.75, 26.2, 90),
    "table3_d_dropout_0": (5.77, 24.6, 65),
    "table3_d_dropout_0_2": (4.95, 25.5, 65),
    "table3_d_label_smoothing_0": (4.67, 25.3, 65),
    "table3_d_label_smoothing_0_2": (5.47, 25.7, 65),
    "table3_e_learned": (4.92, 25.7, 65),
    BIG: (4.33, 26.4, 213),
}


@dataclass(frozen=True)
class Scale:
    """Scale relative to the paper: factors of width and depth, updates, tokens per update."""

    width: float
    depth: float
    steps: int
    tokens: int


# Half the depth: in a short training six post-norm layers per side do not get past the unigram plateau.
CPU = Scale(width=1 / 8, depth=1 / 2, steps=2400, tokens=256)  # a little over a minute per trial and core
GPU = Scale(width=1 / 4, depth=1 / 2, steps=1000, tokens=8192)


def measure(*, rows: Sequence[str] = (), width: float = 0.0, depth: float = 0.0, **shared: Any) -> dict[str, Any]:
    """Train all rows, or the named ones, with all seeds; print table and conclusions and write them to the outputs.

    The device sets `width` and `depth` that are 0; `shared` has the options of an `Experiment`.
    """
    experiment = result_tables.Experiment(**shared)
    if unknown := set(rows) - set(ROWS):
        raise UsageError(f"--row {', '.join(sorted(unknown))}: choose among {', '.join(ROWS)}")
    device = experiment.device
    usual = CPU if choose_device(device).type == "cpu" else GPU
    scale = Scale(
        width or usual.width, depth or usual.depth, experiment.steps or usual.steps, experiment.tokens or usual.tokens
    )
    base = experiment.text_config(max_length=MAX_LENGTH)
    configs = {name: scaled_config(name, scale, base, device) for name in ROWS if name in (rows or ROWS)}
    prepared = trials.prepare_text(base, experiment.folder)
    by_name = experiment.run(configs, dict.fromkeys(configs, prepared))
    conclusions = [judge(claim, by_name) for claim in CLAIMS]
    text = trials.describe_text(base, prepared)
    figures = {
        "scale": dataclasses.asdict(scale),
        "text": text,
        "conclusions": [dataclasses.asdict(conclusion) for conclusion in conclusions],
    }
    title = (
        f"Table 3 at width × {scale.width:g}, depth × {scale.depth:g}, {scale.steps:,} updates of {scale.tokens:,} "
        f"tokens, {experiment.seeds} seeds; {text}"
    )
    table = result_tables.result_table(title, COLUMNS, by_name, _cells, label=_label)
    return experiment.publish(figures, by_name, [table], [str(each) for each in conclusions])


def scaled_config(name: str, scale: Scale, base: Config, device: str) -> Config:
    """Return a row's config: the paper's model scaled down, one recipe for all; the big model trains longer."""
    preset = PRESETS[name]()
    assert isinstance(preset.model, TransformerConfig)
    model = trials.scaled(preset.model, scale.width, scale.depth)
    if model.positions == "learned":  # as many as the longest translation needs
        longest = base.data.max_length + base.decode.extra_length + 2
        model = dataclasses.replace(model, max_positions=longest)
    longer = preset.train.steps / PRESETS[BASE]().train.steps
    rate = peak_rate(model.d_model)
    train = trials.recipe(steps=round(scale.steps * longer), tokens=scale.tokens, rate=rate, device=device)
    train |= {"label_smoothing": preset.train.label_smoothing, "name": name}
    return dataclasses.replace(base, model=model).replace(train=train)


def peak_rate(d_model: int) -> float:
    """Return the paper's peak rate, 7e-4 at d_model 512, scaled by 1/√d_model; deep post-norm diverges above it."""
    return round(7e-4 * math.sqrt(512 / d_model), 6)


COLUMNS = ("row", "perplexity", "BLEU", "params", "updates", "paper: perplexity, BLEU, params")


def _label(name: str) -> str:
    return name.removeprefix("table3_").removeprefix("paper_")


def _cells(name: str, good: list[Result]) -> Sequence[str]:
    ppl, bleu, millions = PAPER[name]
    return (
        result_tables.mean_and_deviation([result.perplexity for result in good]),
        result_tables.mean_and_deviation([result.bleu for result in good]),
        *((f"{good[0].parameters / 1e6:.2f} M", f"{good[0].steps:,}") if good else ("–", "–")),
        f"{ppl:.2f}  {bleu:.1f}  {millions:>3} M",
    )


# ---- conclusions -----------------------------------------------------------------------------------------------------

HOLDS, FAILS, NOISE, UNKNOWN = "holds", "does not hold", "within the noise", "not measured"
PERPLEXITY, BLEU = "perplexity", "BLEU"
HEADS = ("table3_a_4_heads", BASE, "table3_a_16_heads", "table3_a_32_heads")


@dataclass(frozen=True)
class Claim:
    """A conclusion of the paper: one row is better than another by some measures, or both are equal (`alike`).

    Of several candidates for the better row, the one with the lowest perplexity is compared.
    """

    text: str
    better: tuple[str, ...]
    worse: str
    by: tuple[str, ...] = (PERPLEXITY, BLEU)
    alike: bool = False


CLAIMS = (
    Claim("(A) a single head is worse than the best number of heads", HEADS, "table3_a_1_head"),
    Claim("(A) too many heads (32) are worse than the best number", HEADS, "table3_a_32_heads"),
    Claim("(B) a smaller d_k hurts", (BASE,), "table3_b_d_k_16"),
    Claim("(C) more layers are better", ("table3_c_8_layers",), "table3_c_2_layers"),
    Claim("(C) a larger d_model is better", ("table3_c_d_model_1024",), "table3_c_d_model_256"),
    Claim("(C) a larger d_ff is better", ("table3_c_d_ff_4096",), "table3_c_d_ff_1024"),
    Claim("(C) the big model is better than the base", (BIG,), BASE),
    Claim("(D) dropout helps", (BASE,), "table3_d_dropout_0"),
    Claim("(D) label smoothing hurts perplexity", ("table3_d_label_smoothing_0",), BASE, by=(PERPLEXITY,)),
    Claim("(D) label smoothing helps BLEU", (BASE,), "table3_d_label_smoothing_0", by=(BLEU,)),
    Claim("(E) learned positions do as well as sinusoids", (BASE,), "table3_e_learned", alike=True),
)


@dataclass(frozen=True)
class Conclusion:
    """A claim, its verdict and the figures behind it."""

    claim: str
    verdict: str
    figures: str

    def __str__(self) -> str:
        return f"{self.claim}: {self.verdict.upper()} ({self.figures})"


def judge(claim: Claim, by_name: Mapping[str, Sequence[Result]]) -> Conclusion:
    """Test a claim: at least one measure must differ by more than the noise, and none in the opposite direction.

    The noise is two standard errors, from the deviation between seeds pooled over all rows. With one seed the verdict
    is always "within the noise".
    """
    good = result_tables.successful(by_name)
    candidates = [name for name in claim.better if name != claim.worse and good.get(name)]
    if not candidates or not good.get(claim.worse):
        return Conclusion(claim.text, UNKNOWN, "rows are missing or failed")
    best = min(candidates, key=lambda name: _mean(good[name], "loss"))
    pair = good[best], good[claim.worse]
    gains, words = [], []
    for measure in claim.by:
        # Perplexities are compared as losses, because the noise of a perplexity grows with its value.
        what = "loss" if measure == PERPLEXITY else "bleu"
        values = {name: [getattr(result, what) for result in results] for name, results in good.items()}
        gap = result_tables.difference(
            values[best], values[claim.worse], result_tables.pooled_deviation(values.values())
        )
        gains.append(gap if what == "bleu" else dataclasses.replace(gap, value=-gap.value))
        means = " against ".join(f"{_mean(results, measure.lower()):.2f}" for results in pair)
        words.append(f"{measure} {means} ({'loss ' if what == 'loss' else ''}{gap})")
    directions = [gain.value > 0 for gain in gains if gain.significant]
    if any(math.isnan(gain.noise) for gain in gains):
        verdict = NOISE
    elif claim.alike:
        verdict = FAILS if directions else HOLDS
    else:
        verdict = NOISE if not directions else HOLDS if all(directions) else FAILS
    return Conclusion(claim.text, verdict, f"{best} against {claim.worse}: {'; '.join(words)}")


def _mean(results: Sequence[Result], what: str) -> float:
    return statistics.fmean(getattr(result, what) for result in results)
