"""The paper's tables: presets and peers, trials that resume, operations counted, verdicts that follow the figures."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from conftest import sentences, tiny_config, write_pairs
from qkv import presets
from qkv.assembly import build_model, parameter_count, updates_for
from qkv.core.batches import Position
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.trainer import Interrupted
from qkv.lab import result_tables, table2, table3, trials
from qkv.lab.trials import Point, Result, Trial
from qkv.options import Config, ConvS2SConfig, ModelConfig, RnnConfig, TransformerConfig, TranslationConfig

# ---- presets ---------------------------------------------------------------------------------------------------------


def size(spec: ModelConfig, vocab: int) -> int:
    with torch.device("meta"):  # shapes without numbers
        return parameter_count(build_model(spec, vocab, vocab))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_complete(name: str) -> None:
    preset = presets.PRESETS[name]
    made = preset()
    assert made.train.name == name
    assert getattr(qkv.presets, name)() == made
    assert size(made.model, 1000) > 0
    if made.data.train:
        wanted = "built-in" if made.data.train[0].src.startswith("demo:") else "data.root"
    else:
        wanted = "--src" if isinstance(made.model, TranslationConfig) else "--text"
    assert preset.__doc__
    assert wanted in preset.__doc__


@pytest.mark.parametrize(
    ("peer", "base", "vocab"),
    [
        ("paper_rnn", "paper_base", 37_000),
        ("paper_conv", "paper_base", 37_000),
        ("demo_rnn", "demo", 2000),
        ("demo_conv", "demo", 2000),
    ],
)
def test_peers_have_as_many_parameters(peer: str, base: str, vocab: int) -> None:
    theirs, ours = presets.PRESETS[peer](), presets.PRESETS[base]()
    assert size(theirs.model, vocab) == pytest.approx(size(ours.model, vocab), rel=0.02)
    assert (theirs.data, theirs.tokenizer) == (ours.data, ours.tokenizer)
    assert (theirs.train.steps, theirs.train.tokens_per_step) == (ours.train.steps, ours.train.tokens_per_step)


def test_the_language_model_has_the_size_of_nanogpts() -> None:
    assert size(presets.char_lm().model, 65) == pytest.approx(10.7e6, rel=0.01)


def test_no_such_preset() -> None:
    with pytest.raises(AttributeError, match="table4"):
        presets.table4  # noqa: B018


# ---- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", table3.ROWS)
def test_scaled_rows_keep_the_papers_proportions(name: str) -> None:
    full, text = presets.PRESETS[name](), presets.demo()
    scale = table3.Scale(width=1 / 4, depth=1 / 2, steps=100, tokens=1024)
    small = table3.scaled_config(name, scale, text, "cpu")
    assert isinstance(full.model, TransformerConfig)
    assert isinstance(small.model, TransformerConfig)
    for what in ("d_model", "d_ff", "key_width", "value_width"):
        assert 4 * getattr(small.model, what) == getattr(full.model, what)
    for what in ("encoder_layers", "decoder_layers"):
        assert 2 * getattr(small.model, what) == getattr(full.model, what)
    for what in ("heads", "dropout", "positions", "norm"):
        assert getattr(small.model, what) == getattr(full.model, what)
    assert small.train.label_smoothing == full.train.label_smoothing
    assert small.train.steps == full.train.steps // 1000
    assert small.data == text.data


def test_an_odd_scale_is_refused() -> None:
    scale = table3.Scale(width=1 / 512, depth=1, steps=1, tokens=1024)
    with pytest.raises(UsageError, match="heads = 8 does not divide"):
        table3.scaled_config("paper_base", scale, presets.demo(), "cpu")


# ---- a text for trials -----------------------------------------------------------------------------------------------

EVEN = [f"{a} {b} {c}" for a in ("the", "a") for b in ("cat", "dog", "cow") for c in ("sees", "runs")]  # words: tokens


def small_config(src: str, tgt: str, **train: Any) -> Config:
    recipe = trials.recipe(steps=3, tokens=256, rate=1e-3, device="cpu")
    model = {"d_model": 16, "d_ff": 24, "norm": "post"}
    made = tiny_config(src, tgt).replace(model=model, train=recipe | train)
    return made.replace(data={"max_length": 16}, decode={"extra_length": 2})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pairs(tmp_path_factory.mktemp("small"), sentences(300))


@pytest.fixture(autouse=True)
def count_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small batch is enough for the operations of every trial."""
    monkeypatch.setattr(trials, "COUNTED_UPDATES", 1)
    monkeypatch.setattr(trials, "COUNTED_TOKENS", 128)


@pytest.fixture
def prepared(text: tuple[str, str], tmp_path: Path) -> PreparedText:
    return trials.prepare_text(small_config(*text), tmp_path / "work")


# ---- floating-point operations ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, PreparedText, int, int]:
    """Pairs of one length, so that nothing is padded; source and target tokens of each, </s> included."""
    folder = tmp_path_factory.mktemp("even")
    src, tgt = write_pairs(folder, [(f"{a} {a}", b) for a in EVEN for b in EVEN])
    made = small_config(src, tgt).replace(data={"valid_size": 10}, tokenizer={"kind": "word"})
    prepared = trials.prepare_text(made, folder / "work")
    lengths = {
        (int(s), int(t)) for s, t in zip(prepared.train.lengths("src"), prepared.train.lengths("tgt"), strict=True)
    }
    ((source, target),) = lengths
    return made, prepared, source + 1, target + 1


@pytest.mark.parametrize(("d_k", "d_v"), [(8, 8), (4, 6)])  # fused kernels want them equal
def test_operations_of_a_transformer(even: tuple[Config, PreparedText, int, int], d_k: int, d_v: int) -> None:
    made, prepared, S, T = even
    spec = TransformerConfig(d_model=16, d_ff=24, heads=2, d_k=d_k, d_v=d_v, encoder_layers=2, decoder_layers=3)
    d, ff, h, vocab = 16, 24, 2, prepared.tokenizers.tgt.size

    def products(queries: int, keys: int) -> int:
        """Multiplications of an attention: Q and O for its queries, K and V for its keys, then QKᵀ and AV."""
        projected = queries * d * h * (d_k + d_v) + keys * d * h * (d_k + d_v)
        return projected + queries * keys * h * (d_k + d_v)

    encoder = 2 * (products(S, S) + 2 * S * d * ff)
    decoder = 3 * (products(T, T) + products(T, S) + 2 * T * d * ff)
    forward = encoder + decoder + T * d * vocab
    # Two operations each; the backward pass has two products for each of the forward pass.
    counted = trials.flops_per_token(dataclasses.replace(made, model=spec), prepared)
    assert counted == pytest.approx(2 * 3 * forward / T, rel=1e-9)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_operations_of_a_recurrent_network(even: tuple[Config, PreparedText, int, int], cell: str) -> None:
    made, prepared, S, T = even
    d, gates, vocab = 16, {"gru": 3, "lstm": 4}[cell], prepared.tokenizers.tgt.size
    spec = RnnConfig(cell=cell, d_model=d)
    encoder = S * 2 * gates * (d // 2) * (d + d // 2)
    decoder = T * gates * d * (2 * d + d)  # the token, the fed attention vector, and the state
    attention = S * d * d + T * (d * d + S * d + S * d + 2 * d * d)
    forward = encoder + decoder + attention + (2 if cell == "lstm" else 1) * d * d + T * d * vocab
    counted = trials.flops_per_token(dataclasses.replace(made, model=spec), prepared)
    # A little less: there is no gradient of the zeros that a recurrence begins with.
    assert counted == pytest.approx(2 * 3 * forward / T, rel=0.03)


# ---- equal parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        RnnConfig(cell="lstm", encoder_layers=2, decoder_layers=2),
        ConvS2SConfig(encoder_layers=4, decoder_layers=4),
        TransformerConfig(heads=1),
    ],
)
def test_the_search_finds_the_nearest_width(spec: TranslationConfig, prepared: PreparedText) -> None:
    vocab = prepared.tokenizers.tgt.size
    planted = size(dataclasses.replace(spec, d_model=74), vocab)
    for target in (planted, planted + planted // 300, planted - planted // 300):
        assert table2.match_parameters(spec, target, prepared.tokenizers).d_model == 74
    assert table2.match_parameters(spec, 123_457, prepared.tokenizers).d_model % 2 == 0


def test_matched_models_are_the_presets_on_the_demo_corpus(tmp_path: Path, prepared: PreparedText) -> None:
    found = table2.matched_models(presets.demo(), prepared)
    assert found[table2.OURS] == presets.demo().model
    sizes = {name: size(model, prepared.tokenizers.tgt.size) for name, model in found.items()}
    assert [sizes[name] / sizes[table2.OURS] for name in sizes] == pytest.approx([1, 1, 1], rel=0.02)


# ---- trials ----------------------------------------------------------------------------------------------------------


def named(text: tuple[str, str], prepared: PreparedText, *names: str, seeds: Sequence[int] = (1,)) -> list[Trial]:
    return [Trial(name, small_config(*text, seed=seed), prepared) for seed in seeds for name in names]


def test_finished_trials_are_not_repeated_and_failed_ones_are(
    text: tuple[str, str], prepared: PreparedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, int]] = []
    broken = True

    def fake(run: qkv.Run, test: object) -> dict[str, Any]:
        name = run.path.name.partition("-")[0]
        called.append((name, run.config.train.seed))
        if name == "bad" and broken:
            raise RuntimeError("out of luck")
        return {"loss": 1.5, "curve": (Point(3, 9, 0.5, 1.5),)}

    monkeypatch.setattr(trials, "_measure", fake)
    folder, wanted = tmp_path / "work", named(text, prepared, "good", "bad", seeds=(1, 2))
    first = trials.run_all(wanted, folder)
    assert called == [("good", 1), ("bad", 1), ("good", 2), ("bad", 2)]
    assert [result.error for result in first] == ["", "out of luck", "", "out of luck"]
    called.clear()
    broken = False
    second = trials.run_all(wanted, folder)
    assert called == [("bad", 1), ("bad", 2)]
    assert [(result.name, result.error) for result in second] == [("good", ""), ("bad", "")] * 2
    called.clear()
    assert trials.run_all(wanted, folder) == second
    assert not called
    # Another recipe is another trial; a damaged result is measured again.
    longer = [dataclasses.replace(trial, config=trial.config.replace(train={"steps": 4})) for trial in wanted[:1]]
    trials.run_all(longer, folder)
    assert called == [("good", 1)]
    stored = sorted((folder / "runs").glob(f"*/{trials.RESULT}"))
    assert len(stored) == 5
    damaged = stored[0].read_text(encoding="utf-8")
    stored[0].write_text(damaged[:-20], encoding="utf-8")
    called.clear()
    assert trials.run_all(wanted, folder) == second
    trials.run_all(longer, folder)
    assert len(called) == 1
    assert stored[0].read_text(encoding="utf-8") == damaged


def test_an_interrupted_table_keeps_what_is_done(
    text: tuple[str, str], prepared: PreparedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(run: qkv.Run, test: object) -> dict[str, Any]:
        if run.path.name.startswith("second"):
            raise Interrupted(signal.SIGTERM, "stopped at step 2")
        return {"curve": (Point(3, 9, 0.5, 1.5),)}

    monkeypatch.setattr(trials, "_measure", fake)
    with pytest.raises(Interrupted, match="same command") as stopped:
        trials.run_all(named(text, prepared, "first", "second", "third"), tmp_path / "work")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    (stored,) = (tmp_path / "work" / "runs").glob(f"*/{trials.RESULT}")
    assert stored.parent.name.startswith("first-1-")


def test_a_trial_records_training_and_scores(text: tuple[str, str], prepared: PreparedText, tmp_path: Path) -> None:
    trial = Trial("small", small_config(*text, log_every=2), prepared)
    (result,) = trials.run_all([trial], tmp_path / "work")
    assert not result.error
    (run,) = (qkv.Run(path) for path in (tmp_path / "work" / "runs").iterdir())
    log = [json.loads(line) for line in run.log.read_text(encoding="utf-8").splitlines()]
    last = log[-1]
    assert (last["event"], last["step"], last["loss"]) == ("valid", 3, result.loss)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert [point.step for point in result.curve] == [1, 2, 3]
    assert len([entry for entry in log if entry["event"] == "train"]) == 1, "of the last step there is none"
    with closing(updates_for(trial.config, prepared).starting(Position(0, 0))) as updates:
        read = list(accumulate(update.tokens for update in islice(updates, 3)))
    assert [point.tokens for point in result.curve] == read
    assert 0 < result.curve[0].seconds < result.curve[1].seconds < result.seconds < last["seconds"]
    assert result.parameters == size(trial.config.model, prepared.tokenizers.tgt.size)
    assert result.flops == result.tokens * trials.flops_per_token(trial.config, prepared)
    assert result.test_bleu is None
    # A test set added later is translated without new training; the validation text as test set gives equal BLEU.
    valid = str(prepared.valid_text[0]), str(prepared.valid_text[1])
    (run.path / "weights" / "best.safetensors").unlink()  # the last weights are used
    (again,) = trials.run_all([trial], tmp_path / "work", test=valid)
    assert again == dataclasses.replace(result, test_bleu=result.bleu, test=list(valid))
    assert [json.loads(line) for line in run.log.read_text(encoding="utf-8").splitlines()] == log


@pytest.mark.slow
def test_parallel_trials(text: tuple[str, str], prepared: PreparedText, tmp_path: Path) -> None:
    steep = Trial("steep", small_config(*text, steps=14, learning_rate=1e30, clip=0.0), prepared)
    killed = Trial("killed", small_config(*text, name="killed"), prepared)
    wanted = [steep, *named(text, prepared, "small")]
    results = trials.run_all(wanted, tmp_path / "work", jobs=2)
    assert "finite" in results[0].error
    alone = trials.run_all(named(text, prepared, "small"), tmp_path / "alone")
    assert (results[1].loss, results[1].bleu) == (alone[0].loss, alone[0].bleu)
    assert "code -9" in trials._attempt(killed, tmp_path / "work", None).outcome(-9).error


# ---- verdicts --------------------------------------------------------------------------------------------------------


def made_up(name: str, losses: Sequence[float], bleus: Sequence[float]) -> list[Result]:
    return [
        Result(name, i, f"{name}{i}", loss=loss, bleu=bleu)
        for i, (loss, bleu) in enumerate(zip(losses, bleus, strict=True), 1)
    ]


CLAIM = table3.Claim("b is better", ("b", "also b"), "w")


@pytest.mark.parametrize(
    ("losses", "bleus", "verdict"),
    [
        ([1.5, 1.51, 1.49], [30, 30.1, 29.9], table3.HOLDS),  # better by both
        ([1.5, 1.51, 1.49], [25, 25.1, 24.9], table3.HOLDS),  # better by one, without a difference in the other
        ([2.0, 2.01, 1.99], [25.05, 25.1, 25.0], table3.NOISE),
        ([2.5, 2.51, 2.49], [25, 25.1, 24.9], table3.FAILS),  # worse by one
        ([1.5, 1.51, 1.49], [20, 20.1, 19.9], table3.FAILS),  # better by one and worse by the other
    ],
)
def test_conclusions_follow_the_figures(losses: list[float], bleus: list[float], verdict: str) -> None:
    worse = made_up("w", [2.0, 2.01, 1.99], [25.0, 25.1, 24.9])
    rows = {"b": made_up("b", losses, bleus), "w": worse}
    assert table3.judge(CLAIM, rows).verdict == verdict
    alike = dataclasses.replace(CLAIM, alike=True)
    assert table3.judge(alike, rows).verdict == (table3.HOLDS if verdict == table3.NOISE else table3.FAILS)


def test_conclusions_take_the_best_and_need_figures() -> None:
    rows = {
        "b": made_up("b", [2.0, 2.02], [25, 26]),
        "also b": made_up("also b", [1.0, 1.02], [35, 36]),
        "w": made_up("w", [2.0, 2.02], [25, 26]),
    }
    found = table3.judge(CLAIM, rows)
    assert found.verdict == table3.HOLDS
    assert "also b against w" in found.figures
    assert "perplexity 2.75 against 7.46" in found.figures  # means of e^1.00 and e^1.02, of e^2.00 and e^2.02
    one = {name: results[:1] for name, results in rows.items()}
    assert table3.judge(CLAIM, one).verdict == table3.NOISE
    assert "noise unknown" in table3.judge(CLAIM, one).figures
    failed = rows | {"w": [Result("w", 1, "k", error="out of memory")]}
    assert table3.judge(CLAIM, failed).verdict == table3.UNKNOWN
    assert {name for claim in table3.CLAIMS for name in (*claim.better, claim.worse)} <= set(table3.ROWS)


def test_the_noise_of_a_difference() -> None:
    groups = [[1.0, 3.0], [10.0, 14.0], [7.0]]
    pooled = math.sqrt((2.0 + 8.0) / 2)  # variances 2 and 8, each with one degree of freedom; one value has none
    assert result_tables.pooled_deviation(groups) == pytest.approx(pooled)
    gap = result_tables.difference(groups[1], groups[2], pooled)
    assert (gap.value, gap.noise) == pytest.approx((5.0, 2 * pooled * math.sqrt(1 / 2 + 1)))
    assert not gap.significant
    gap = result_tables.difference(groups[1], groups[0], pooled)
    assert gap.significant
    assert not result_tables.difference(groups[1], groups[0], math.nan).significant
    assert result_tables.mean_and_deviation([1.0, 3.0]) == "2.00 ± 1.41"
    assert result_tables.mean_and_deviation([1.0]) == "1.00"


def trained(name: str, losses: Sequence[float], bleu: float, *, flops: float = 10.0, pace: float = 1.0) -> list[Result]:
    """Return results of two seeds, validated every 100 tokens."""
    curve = tuple(Point(i, 100 * i, pace * i, loss) for i, loss in enumerate(losses, 1))
    one = Result(name, 1, name, flops_per_token=flops, loss=losses[-1], bleu=bleu, curve=curve, parameters=5, steps=4)
    return [one, dataclasses.replace(one, seed=2, bleu=bleu + 0.2)]


def test_the_cost_of_reaching_a_loss() -> None:
    ours, theirs = trained("T", [4, 2.9, 2.5, 2], 30), trained("R", [5, 4, 3.5, 3], 20, flops=20, pace=4.0)
    assert table2.cost_to_reach(ours[0], 3.0) == (200 * 10.0, 2.0)
    assert table2.cost_to_reach(theirs[0], 2.0) == (math.inf, math.inf)
    # Two of four validations at half the operations a token; 2 seconds of 16.
    assert table2._cost_of_reaching(ours, theirs) == pytest.approx((0.25, 0.125))


@pytest.mark.parametrize(
    ("losses", "bleu", "expected"),
    [
        ([4, 2.9, 2.5, 2], 30, "HOLDS"),
        ([4, 2.9, 2.5, 2], 20, "WITHIN THE NOISE"),
        ([4, 2.9, 2.5, 2], 10, "DOES NOT HOLD"),
        ([4, 3.9, 3.8, 3.7], 30, "DOES NOT HOLD"),  # the rival's loss is never reached
    ],
)
def test_the_verdict_of_table_2(losses: list[float], bleu: float, expected: str) -> None:
    rival = trained("RNN", [5, 4, 3.5, 3], 20)
    *lines, last = table2.verdict({"RNN": rival, table2.OURS: trained(table2.OURS, losses, bleu)})
    assert last.endswith(expected) or f"{expected} in BLEU" in last
    assert ("never" if losses[-1] > 3 else "after 50% of RNN's") in lines[0]
    assert "NOT MEASURED" in table2.verdict({"RNN": rival, table2.OURS: []})[0]


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_table_3_from_text_to_page(
    text: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [str(tmp_path / "table.json"), str(tmp_path / "table.md")]
    options: dict[str, Any] = {"src": text[0], "tgt": text[1], "rows": ["paper_base", "table3_a_1_head"], "seeds": 2}
    options |= {"width": 1 / 32, "depth": 1 / 6, "steps": 3, "tokens": 256, "jobs": 1, "device": "cpu"}
    result = table3.measure(out=tmp_path / "work", **options, output=outputs, command="qkv lab table3")
    assert [trial["error"] for trial in result["trials"]] == [""] * 4
    assert [trial["seed"] for trial in result["trials"]] == [1, 2, 1, 2]
    assert json.loads(Path(outputs[0]).read_text(encoding="utf-8")) == json.loads(json.dumps(result))
    page = Path(outputs[1]).read_text(encoding="utf-8")
    assert "| a_1_head |" in page
    assert "5.29  24.9" in page
    assert "`qkv lab table3`" in page
    assert len(result["conclusions"]) == len(table3.CLAIMS)
    monkeypatch.setattr(trials, "_measure", lambda *arguments: pytest.fail("measured again"))
    assert table3.measure(out=tmp_path / "work", **options)["trials"] == result["trials"]
    assert "a single head is worse" in capsys.readouterr().out


SMALL = TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=1)


def test_table_2_from_text_to_page(text: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2.auto_recipe, "PAIRS", [table2.auto_recipe.Size(math.inf, SMALL, 1)])
    options: dict[str, Any] = {"src": text[0], "tgt": text[1], "steps": 4, "tokens": 256, "jobs": 1, "device": "cpu"}
    page = tmp_path / "table.md"
    result = table2.measure(out=tmp_path / "work", **options, seeds=1, rates=(0.5, 1.0), output=[str(page)])
    found = [Result.from_dict(trial) for trial in result["trials"]]
    assert [trial.error for trial in found] == [""] * 6
    sizes = [trial.parameters for trial in found]
    assert sizes == pytest.approx([sizes[-1]] * 6, rel=0.1)  # at a width of 16, the next even one is far
    for name, rate in result["learning_rates"].items():
        slow, fast = (trial.loss for trial in found if trial.name == name)
        assert rate == (0.5 if slow < fast else 1.0)
    assert "| GNMT + RL | 24.6 | 2.3e+19 |" in page.read_text(encoding="utf-8")
    assert "better BLEU at a fraction" in result["remarks"][-1]


@pytest.mark.parametrize("equal", table2.EQUAL)
def test_costs_are_equal(
    text: tuple[str, str], prepared: PreparedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: str
) -> None:
    base = small_config(*text)
    models = {"RNN": RnnConfig(d_model=16), "ConvS2S": ConvS2SConfig(d_model=24), table2.OURS: SMALL}
    pace = {"rnn": 4.0, "conv": 0.5, "transformer": 1.0}
    monkeypatch.setattr(table2.auto_recipe, "seconds_a_pass", lambda spec, prepared: pace[spec.model.kind])
    recipe = trials.recipe(steps=1000, tokens=256, rate=1e-3, device="auto")
    configs = {name: dataclasses.replace(base, model=model).replace(train=recipe) for name, model in models.items()}

    def steps() -> dict[str, int]:
        found = table2.with_equal_cost(configs, prepared, tmp_path, equal)
        return {name: config.train.steps for name, config in found.items()}

    if equal == "steps":
        assert set(steps().values()) == {1000}
    elif equal == "time":
        assert steps() == {"RNN": 250, "ConvS2S": 2000, table2.OURS: 1000}
        pace["rnn"] = 8.0  # a resumed table keeps the first measurement
        assert steps()["RNN"] == 250
        monkeypatch.setattr(trials, "describe_device", lambda device: "another machine")
        assert steps()["RNN"] == 125
    else:
        costs = [count * trials.flops_per_token(configs[name], prepared) for name, count in steps().items()]
        assert costs == pytest.approx([costs[-1]] * 3, rel=5e-3)


def test_wrong_table_calls_are_refused(tmp_path: Path) -> None:
    for wrong, match in [
        ({"output": ["table.txt"]}, "a .json file"),
        ({"rows": ["table3_f"]}, "choose among paper_base"),
        ({"valid_src": "x.en"}, "give --src too"),
    ]:
        with pytest.raises(UsageError, match=match):
            table3.measure(out=tmp_path, device="cpu", **wrong)  # type: ignore[arg-type]
    for other, match in [({"equal": "luck"}, "flops, time, steps"), ({"test_src": "x.en"}, "--test-tgt")]:
        with pytest.raises(UsageError, match=match):
            table2.measure(out=tmp_path, device="cpu", **other)  # type: ignore[arg-type]
