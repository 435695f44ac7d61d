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

PAPER_TITLE, PAPER_COLUMNS = "The paper's Table 2, English to German", ("model", "BLEU", "training FLOPs")
PAPER = (  # newstest2014
    ("ByteNet", "23.75", "–"),
    ("GNMT + RL", "24.6", "2.3e+19"),
    ("ConvS2S", "25.16", "9.6e+18"),
    ("MoE", "26.03", "2.0e+19"),
    ("Transformer (base model)", "27.3", "3.3e+18"),
    ("Transformer (big)", "28.4", "2.3e+19"),
)


def measure(
    *,
    test_src: str = "",
    test_tgt: str = "",
    equal: str = "flops",
    rates: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    norm: str = "post",
    **shared: Any,
) -> dict[str, Any]:
    """Train the three models with all seeds, print the table and the verdict, and write them to the outputs.

    The steps are the Transformer's number of updates; the other models get the number with the same cost. `rates` are
    factors on the standard learning rate; `norm` (post, as in the paper, or pre) is the Transformer's. `shared` has the
    options of an `Experiment`.
    """
    experiment = result_tables.Experiment(**shared)
    if equal not in EQUAL:
        raise UsageError(f"--equal {equal}: choose one of {', '.join(EQUAL)}")
    if norm not in ("post", "pre"):
        raise UsageError(f"--norm {norm}: choose post or pre")
    if bool(test_src) != bool(test_tgt):
        raise UsageError(f"{test_src or test_tgt}: a test set needs two files: give --test-src and --test-tgt")
    device, folder = experiment.device, experiment.folder
    fast = choose_device(device).type != "cpu"
    base = experiment.text_config(max_length=MAX_LENGTH)
    prepared = trials.prepare_text(base, folder)
    recipe = trials.recipe(
        steps=experiment.steps or STEPS[fast], tokens=experiment.tokens or TOKENS[fast], rate=1e-3, device=device
    )
    configs = {
        name: dataclasses.replace(base, model=model).replace(train={**recipe, "name": name})
        for name, model in matched_models(base, prepared, norm).items()
    }
    configs = with_equal_cost(configs, prepared, folder, equal)
    remarks = [
        f"{name}: {shape(config.model)}, {parameters(config.model, prepared.tokenizers):,} parameters, "
        f"{config.train.steps:,} updates"
        for name, config in configs.items()
    ]
    say("\n".join(remarks))
    # Parallel trainings disturb each other's time.
    jobs = 1 if equal == "time" else experiment.jobs or trials.default_jobs(device)

    # The rate of lowest loss on the first seed.
    tried = [(name, rate) for name in configs for rate in rates]
    planned = [Trial(name, with_rate(configs[name], rate), prepared) for name, rate in tried]
    first = trials.run_all(planned, folder, jobs=jobs)
    losses: dict[str, dict[float, float]] = {name: {} for name in configs}
    for (name, rate), result in zip(tried, first, strict=True):
        losses[name][rate] = math.inf if result.error else result.loss
    chosen = {name: min(of_rates, key=of_rates.__getitem__) for name, of_rates in losses.items()}

    configs = {name: with_rate(config, chosen[name]) for name, config in configs.items()}
    test = (test_src, test_tgt) if test_src else None
    by_name = experiment.run(configs, dict.fromkeys(configs, prepared), jobs=jobs, test=test)
    remarks += [_rates_remark(chosen, rates, jobs), *verdict(by_name)]
    text = trials.describe_text(base, prepared)
    figures = {"text": text, "equal": equal, "norm": norm, "learning_rates": chosen, "remarks": remarks}
    title = f"RNN, ConvS2S and Transformer at equal parameters and equal {equal}, {experiment.seeds} seeds; {text}"
    table = result_tables.result_table(title, COLUMNS, by_name, _cells)
    papers = result_tables.ResultTable(PAPER_TITLE, PAPER_COLUMNS, PAPER)
    return experiment.publish(figures, {"tried": first} | by_name, [table, papers], remarks)


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
    # Two convolution layers have about the parameters of one Transformer layer of equal width.
    layers = 2 * ours.encoder_layers
    conv = ConvS2SConfig(encoder_layers=layers, decoder_layers=layers, max_positions=longest, dropout=ours.dropout)
    target = parameters(ours, prepared.tokenizers)
    rivals: dict[str, TranslationConfig] = {"RNN": RnnConfig(dropout=ours.dropout), "ConvS2S": conv}
    matched = {name: match_parameters(model, target, prepared.tokenizers) for name, model in rivals.items()}
    return {**matched, OURS: ours}


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


def with_equal_cost(
    configs: Mapping[str, Config], prepared: PreparedText, folder: Path, equal: str
) -> dict[str, Config]:
    """Return the configs, all of the Transformer's updates, with as many updates as cost as much as these."""

    def cost(name: str, config: Config) -> float:
        """Return the cost of one update in FLOPs, seconds or updates."""
        if equal == "flops":
            return trials.flops_per_token(config, prepared)
        if equal == "time":
            return trials.cached_seconds(Trial(name, config, prepared), folder, auto_recipe.seconds_a_pass)
        return 1.0

    costs = {name: cost(name, with_rate(config, 1.0)) for name, config in configs.items()}
    return {
        name: config.replace(train=trials.length(max(1, round(config.train.steps * costs[OURS] / costs[name]))))
        for name, config in configs.items()
    }


def with_rate(config: Config, rate: float) -> Config:
    """Return the config with `rate` times the standard peak learning rate for its width."""
    return config.replace(train={"learning_rate": round(rate * 1e-3 * math.sqrt(512 / config.model.d_model), 6)})


def _rates_remark(chosen: Mapping[str, float], rates: Sequence[float], jobs: int) -> str:
    edges = {min(rates), max(rates)} if len(rates) > 1 else set()
    named = ", ".join(
        f"{name} × {rate:g}{' (at the edge of the search)' if rate in edges else ''}" for name, rate in chosen.items()
    )
    together = f"; seconds with {jobs} trainings in parallel" if jobs > 1 else ""
    return f"best learning rates: {named} of 1e-3 · √(512 / d_model){together}"


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
    good = result_tables.successful(by_name)
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


COLUMNS = ("model", "BLEU", "test BLEU", "loss", "params", "FLOPs", "seconds", "tokens/s", "updates")


def _cells(name: str, good: list[Result]) -> Sequence[str]:
    if not good:
        return ["–"] * (len(COLUMNS) - 1)
    seconds = statistics.fmean(result.seconds for result in good)
    return (
        result_tables.mean_and_deviation([result.bleu for result in good]),
        result_tables.mean_and_deviation([result.test_bleu for result in good if result.test_bleu is not None]),
        result_tables.mean_and_deviation([result.loss for result in good], 4),
        f"{good[0].parameters / 1e6:.2f} M",
        f"{statistics.fmean(result.flops for result in good):.2e}",
        f"{seconds:,.0f}",
        f"{statistics.fmean(result.tokens for result in good) / seconds:,.0f}",
        f"{good[0].steps:,}",
    )
