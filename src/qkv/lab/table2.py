"""Table 2 at small scale: RNN, ConvS2S and Transformer on the same text with the same number of parameters.

The training budget is equal in floating-point operations, in time or in updates. The learning rate of each model is
tuned on the first seed. The table tests the paper's claim of better BLEU at a fraction of the training cost: at what
cost does the Transformer reach the final loss of each competitor?
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.api import auto_recipe
from qkv.assembly import parameters, shape
from qkv.console import say
from qkv.core.dataset import PreparedText
from qkv.core.device import choose_device
from qkv.core.errors import UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.lab import result_tables, trials
from qkv.lab.trials import Result, Trial
from qkv.options import Config, ConvS2SConfig, ModelConfig, RnnConfig, TransformerConfig, TranslationConfig
from qkv.presets import demo

OURS = "Transformer"
EQUAL = ("flops", "time", "steps")
MAX_LENGTH = 128  # tokens per sentence
STEPS, TOKENS = (1200, 2000), (1024, 8192)  # on a CPU, on an accelerator

# The paper's own, English to German on newstest2014: BLEU and training cost in floating-point operations.
PAPER: dict[str, tuple[float, float | None]] = {
    "ByteNet": (23.75, None),
    "GNMT + RL": (24.6, 2.3e19),
    "ConvS2S": (25.16, 9.6e18),
    "MoE": (26.03, 2.0e19),
    "Transformer (base model)": (27.3, 3.3e18),
    "Transformer (big)": (28.4, 2.3e19),
}


def measure(
    *,
    out: str | Path,
    src: str = "",
    tgt: str = "",
    valid_src: str = "",
    valid_tgt: str = "",
    test_src: str = "",
    test_tgt: str = "",
    equal: str = "flops",
    steps: int = 0,
    tokens: int = 0,
    seeds: int = 3,
    rates: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    norm: str = "post",
    jobs: int = 0,
    device: str = "auto",
    output: Sequence[str] = (),
    command: str = "",
) -> dict[str, Any]:
    """Train the three models with all seeds, print the table and the verdict, and write them to `output`.

    `steps` is the Transformer's number of updates; the other models get the number with the same cost. `rates` are
    factors on the standard learning rate; `norm` (post, as in the paper, or pre) is the Transformer's. The device sets
    options that are 0; without files the text is the demo corpus. `out` is the working directory: the same directory
    resumes an interrupted table, or prints a finished one again.
    """
    result_tables.check_outputs(output)
    if equal not in EQUAL:
        raise UsageError(f"--equal {equal}: choose one of {', '.join(EQUAL)}")
    if norm not in ("post", "pre"):
        raise UsageError(f"--norm {norm}: choose post or pre")
    if bool(test_src) != bool(test_tgt):
        raise UsageError(f"{test_src or test_tgt}: a test set needs two files: give --test-src and --test-tgt")
    fast = choose_device(device).type != "cpu"
    folder, steps, tokens = Path(out), steps or STEPS[fast], tokens or TOKENS[fast]
    base = trials.text_config(src, tgt, valid_src, valid_tgt, max_length=MAX_LENGTH)
    prepared = trials.prepare_text(base, folder)
    models = matched_models(base, prepared, norm)
    table = EqualCostTraining(base, prepared, folder, models, tokens=tokens, device=device)
    table.set_updates(equal, steps)
    jobs = 1 if equal == "time" else jobs or trials.default_jobs(device)  # parallel trainings disturb each other's time
    results = table.run(seeds, rates, jobs, (test_src, test_tgt) if test_src else None)
    remarks = [*table.remarks(rates, jobs), *verdict(results)]
    result = {
        **result_tables.provenance(device, command),
        "text": trials.describe_text(base, prepared),
        "equal": equal,
        "norm": norm,
        "learning_rates": table.rates,
        "remarks": remarks,
        "trials": [each.to_dict() for each in table.results.values()],
    }
    title = f"RNN, ConvS2S and Transformer at equal parameters and equal {equal}, {seeds} seeds; {result['text']}"
    result_tables.publish(result, [_result_table(title, results), _paper()], remarks, output)
    return result


# ---- equal parameters ------------------------------------------------------------------------------------------------


def matched_models(base: Config, prepared: PreparedText, norm: str = "post") -> dict[str, ModelConfig]:
    """Return the Transformer for a text of this size, and an RNN and a ConvS2S with as many parameters.

    The RNN is Bahdanau's with input feeding, which scores higher on small texts than two layers of LSTM.
    """
    ours: ModelConfig = base.model
    if base.data.train != demo().data.train:
        ours = next(size.model for size in auto_recipe.PAIRS if len(prepared.train) <= size.limit)
    assert isinstance(ours, TransformerConfig)
    ours = dataclasses.replace(ours, norm=norm)
    longest = base.data.max_length + base.decode.extra_length + 2
    layers = (
        2 * ours.encoder_layers
    )  # two convolution layers have about the parameters of one Transformer layer of equal width
    conv = ConvS2SConfig(encoder_layers=layers, decoder_layers=layers, max_positions=longest, dropout=ours.dropout)
    rnn = RnnConfig(dropout=ours.dropout)
    target = parameters(ours, prepared.tokenizers)
    return {
        "RNN": match_parameters(rnn, target, prepared.tokenizers),
        "ConvS2S": match_parameters(conv, target, prepared.tokenizers),
        OURS: ours,
    }


def match_parameters(model: TranslationConfig, target: int, tokenizers: TokenizerPair) -> TranslationConfig:
    """Return the model with the even d_model whose number of parameters is closest to `target`."""

    def with_width(half: int) -> TranslationConfig:
        return dataclasses.replace(model, d_model=2 * half)

    low, high = 1, 2
    while parameters(with_width(high), tokenizers) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if parameters(with_width(middle), tokenizers) < target else (low, middle)
    return min(with_width(low), with_width(high), key=lambda sized: abs(parameters(sized, tokenizers) - target))


# ---- equal cost ------------------------------------------------------------------------------------------------------


class EqualCostTraining:
    """Models trained on one text at equal cost: updates, learning rate and results of each."""

    def __init__(
        self,
        base: Config,
        prepared: PreparedText,
        folder: Path,
        models: Mapping[str, ModelConfig],
        *,
        tokens: int,
        device: str,
    ) -> None:
        self.base, self.prepared, self.folder, self.models = base, prepared, folder, models
        self.tokens, self.device = tokens, device
        self.steps = dict.fromkeys(models, 1)
        self.rates = dict.fromkeys(models, 1.0)
        self.shapes: list[str] = []
        self.results: dict[str, Result] = {}  # all trials, including other learning rates

    def config(self, name: str, rate: float = 1.0, seed: int = 1) -> Config:
        model = self.models[name]
        peak = round(rate * 1e-3 * math.sqrt(512 / model.d_model), 6)
        train = trials.recipe(steps=self.steps[name], tokens=self.tokens, rate=peak, device=self.device, seed=seed)
        return dataclasses.replace(self.base, model=model).replace(train={**train, "name": name})

    def set_updates(self, equal: str, steps: int) -> None:
        """Set the updates of each model so that the cost equals the Transformer's with `steps` updates."""
        self.steps = dict.fromkeys(self.models, steps)  # costs are stored by config, so measure all with the same steps
        costs = {name: self._cost(name, equal) for name in self.models}
        self.steps = {name: max(1, round(steps * costs[OURS] / cost)) for name, cost in costs.items()}
        for name, model in self.models.items():
            size = parameters(model, self.prepared.tokenizers)
            self.shapes.append(f"{name}: {shape(model)}, {size:,} parameters, {self.steps[name]:,} updates")
            say(self.shapes[-1])

    def _cost(self, name: str, equal: str) -> float:
        """Return the cost of one update in FLOPs, seconds or updates."""
        if equal == "flops":
            return trials.flops_per_token(self.config(name), self.prepared)
        if equal == "time":
            trial = Trial(name, self.config(name), self.prepared)
            return trials.cached_seconds(trial, self.folder, auto_recipe.seconds_a_pass)
        return 1.0

    def run(
        self, seeds: int, rates: Sequence[float], jobs: int, test: trials.FilePair | None
    ) -> dict[str, list[Result]]:
        """Return the results of all seeds, each model with the rate of lowest loss on the first seed."""
        tried = [(name, rate) for name in self.models for rate in rates]
        first = self._run([Trial(name, self.config(name, rate), self.prepared) for name, rate in tried], jobs)
        losses = {pair: math.inf if result.error else result.loss for pair, result in zip(tried, first, strict=True)}
        self.rates = {name: min(rates, key=lambda rate: losses[name, rate]) for name in self.models}
        chosen = [
            Trial(name, self.config(name, self.rates[name], seed), self.prepared)
            for seed in range(1, seeds + 1)
            for name in self.models
        ]
        results = self._run(chosen, jobs, test)
        return {name: [result for result in results if result.name == name] for name in self.models}

    def _run(self, planned: list[Trial], jobs: int, test: trials.FilePair | None = None) -> list[Result]:
        results = trials.run_all(planned, self.folder, jobs=jobs, test=test)
        self.results |= {result.key: result for result in results}
        return results

    def remarks(self, rates: Sequence[float], jobs: int) -> list[str]:
        edges = {min(rates), max(rates)} if len(rates) > 1 else set()
        chosen = ", ".join(
            f"{name} × {rate:g}{' (at the edge of the search)' if rate in edges else ''}"
            for name, rate in self.rates.items()
        )
        together = f"; seconds with {jobs} trainings in parallel" if jobs > 1 else ""
        return [*self.shapes, f"best learning rates: {chosen} of 1e-3 · √(512 / d_model){together}"]


# ---- the claim -------------------------------------------------------------------------------------------------------


def cost_to_reach(result: Result, loss: float) -> tuple[float, float]:
    """Return FLOPs and seconds until the validation loss first reached `loss`; infinite if it never did.

    An upper bound: during a long schedule the loss is higher than at the end of a shorter training.
    """
    for point in result.curve:
        if point.loss <= loss:
            return point.tokens * result.flops_per_token, point.seconds
    return math.inf, math.inf


def verdict(by_name: Mapping[str, Sequence[Result]]) -> list[str]:
    """Judge "better BLEU at a fraction of the training cost" against each competitor and overall, with figures."""
    good = {name: [result for result in results if not result.error] for name, results in by_name.items()}
    if missing := [name for name, results in good.items() if not results]:
        return [f"better BLEU at a fraction of the training cost: NOT MEASURED ({', '.join(missing)} failed)"]
    spread = result_tables.pooled_deviation([[result.bleu for result in results] for results in good.values()])
    lines, signs = [], []
    for name in good:
        if name == OURS:
            continue
        gap = result_tables.difference([r.bleu for r in good[OURS]], [r.bleu for r in good[name]], spread)
        cost = _cost_of_reaching(good[OURS], good[name])
        back = _cost_of_reaching(good[name], good[OURS])
        lines.append(
            f"{OURS} against {name}: BLEU {gap}; {OURS} reaches {name}'s final loss {_share(cost, name)}; "
            f"{name} reaches {OURS}'s {_share(back, OURS)}"
        )
        signs.append(
            0 if not gap.significant and cost[0] < 1 else 1 if gap.significant and gap.value > 0 and cost[0] < 1 else -1
        )
    holds = "HOLDS" if min(signs) > 0 else "DOES NOT HOLD" if min(signs) < 0 else "WITHIN THE NOISE in BLEU"
    return [*lines, f"better BLEU at a fraction of the training cost, at this scale: {holds}"]


def _cost_of_reaching(ours: Sequence[Result], theirs: Sequence[Result]) -> tuple[float, float]:
    """Return the share of their FLOPs and of their seconds after which ours reach their final loss."""
    costs = [cost_to_reach(result, statistics.fmean(r.loss for r in theirs)) for result in ours]
    operations, seconds = (statistics.fmean(each) for each in zip(*costs, strict=True))
    return (
        operations / statistics.fmean(r.flops for r in theirs),
        seconds / statistics.fmean(r.seconds for r in theirs),
    )


def _share(cost: tuple[float, float], whose: str) -> str:
    operations, seconds = cost
    if math.isinf(operations):
        return "never"
    return f"after {operations:.0%} of {whose}'s operations ({seconds:.0%} of its time)"


def _result_table(title: str, by_name: Mapping[str, Sequence[Result]]) -> result_tables.ResultTable:
    columns = ("model", "BLEU", "test BLEU", "loss", "params", "FLOPs", "seconds", "tokens/s", "updates")
    rows = []
    for name, results in by_name.items():
        good = [result for result in results if not result.error]
        label = name + (f" ({len(results) - len(good)} of {len(results)} failed)" if len(good) < len(results) else "")
        if not good:
            rows.append((label, *["–"] * (len(columns) - 1)))
            continue
        seconds = statistics.fmean(result.seconds for result in good)
        rows.append(
            (
                label,
                result_tables.mean_and_deviation([result.bleu for result in good]),
                result_tables.mean_and_deviation([result.test_bleu for result in good if result.test_bleu is not None]),
                result_tables.mean_and_deviation([result.loss for result in good], 4),
                f"{good[0].parameters / 1e6:.2f} M",
                f"{statistics.fmean(result.flops for result in good):.2e}",
                f"{seconds:,.0f}",
                f"{statistics.fmean(result.tokens for result in good) / seconds:,.0f}",
                f"{good[0].steps:,}",
            )
        )
    return result_tables.ResultTable(title, columns, tuple(rows))


def _paper() -> result_tables.ResultTable:
    rows = [(name, f"{bleu:g}", f"{cost:.1e}" if cost else "–") for name, (bleu, cost) in PAPER.items()]
    return result_tables.ResultTable(
        "The paper's Table 2, English to German", ("model", "BLEU", "training FLOPs"), tuple(rows)
    )
