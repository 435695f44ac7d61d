"""Speed measurements: both sides run and compute the same, and the table and the JSON have the figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import sentences
from qkv.assembly import build_model
from qkv.core.batches import Batch
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import BOS, EOS, PAD
from qkv.lab import contenders, decoding_speed, doctor, training_speed
from qkv.options import TrainConfig, TransformerConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no network access

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default --peers is relative to the working directory."""
    monkeypatch.chdir(FOLDER.parents[1])


def peer(name: str) -> ModuleType:
    return next(module for module in contenders._load_modules(FOLDER) if Path(str(module.__file__)).stem == name)


def training(device: str) -> list[contenders.Setting]:
    return contenders.training_settings(torch.device(device), contenders.find_peers(FOLDER, "training"))


def decoding(device: str, threads: int = 0) -> list[contenders.Setting]:
    return contenders.decoding_settings(torch.device(device), contenders.find_peers(FOLDER, "decoding"), threads)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and rounds that take no time."""
    model = TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=2)
    monkeypatch.setattr(training_speed, "SIZES", {"small": (model, 300)})
    monkeypatch.setattr(training_speed, "PEAK", {"cpu": (64, torch.float32)})
    monkeypatch.setattr(training_speed, "ROUND", 0.0)


EAGER = ["qkv", "eager"]


def test_training_speed_table(little: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [str(tmp_path / "speed.json"), str(tmp_path / "speed.md")]
    options: dict[str, Any] = {
        "seconds": 0.0,
        "device": "cpu",
        "tokens": 100,
        "only": EAGER,
        "command": "qkv lab speed",
    }
    result = decoding_speed.measure_speed("train", outputs=outputs, **options)["train"]
    assert json.loads((tmp_path / "speed.json").read_text(encoding="utf-8")) == result
    assert {"machine", "torch", "qkv", "command", "model", "batch", "pad_share", "peak_flops"} <= result.keys()
    rows = {row["contender"]: row for row in result["rows"]}
    known = {each.name for each in training("cpu") if "compiled" not in each.name}
    assert rows.keys() | result["missing"].keys() == known
    assert {"qkv plain", "transformers MarianMT eager", "torch.nn.Transformer eager"} <= rows.keys()
    for row in rows.values():
        assert row["rounds"] >= 3
        assert 0 < row["low"] <= row["tokens_per_second"] <= row["high"]
        assert 0 <= row["stall_share"] < 1
        assert row["peak_share"] == pytest.approx(
            row["tokens_per_second"] * result["flops_per_token"] / result["peak_flops"]
        )
    for ratio in result["ratios"]:
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    shown = capsys.readouterr().out
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    for name in rows:
        assert name in shown
        assert name in page


def test_contenders_with_other_logits_are_refused(little: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_layers = peer("torch_layers")
    monkeypatch.setattr(torch_layers, "TorchTransformer", another(torch_layers.TorchTransformer))
    with pytest.raises(QkvError, match="the speeds are not comparable"):
        training_speed.measure_training(seconds=0.0, device="cpu", tokens=100, only=["torch.nn.Transformer eager"])


def another(real: Callable[..., Any]) -> Callable[..., torch.nn.Module]:
    """A peer that computes something else."""

    def other(ours: torch.nn.Module) -> torch.nn.Module:
        peer: torch.nn.Module = real(ours)
        with torch.no_grad():
            next(peer.decoder.parameters()).add_(1.0)  # type: ignore[operator, union-attr]
        return peer

    return other


def subject_of(spec: TransformerConfig, vocab: int) -> contenders.TrainingSetup:
    torch.manual_seed(1)
    return contenders.TrainingSetup(
        build_model(spec, vocab, vocab), torch.device("cpu"), training_speed.LONGEST, TrainConfig()
    )


def test_contenders_with_equal_weights_learn_equal_logits() -> None:
    """Without dropout all contenders with the same weights reach the same logits (with biases, as the others have)."""
    spec = TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0, bias=True)
    subject = subject_of(spec, 50)
    batch = training_speed.random_batches(50, 100, count=1)[0]
    real = batch.labels != PAD
    before = [p.clone() for p in subject.model.parameters()]
    start = subject.model(*batch.inputs)[real].detach()
    found = {}
    for setting in training("cuda"):  # all: a CPU can run their steps too
        if setting.exact and "compiled" not in setting.name:
            loop = setting.open(subject)
            collated = loop.collate(batch)
            for _ in range(20):
                assert loop.step(collated) == batch.tokens
            found[setting.name] = loop.logits(batch)[real]
    assert len(found) == 4
    moved = float((found["qkv plain"] - start).abs().max())
    for name, logits in found.items():
        assert (logits - found["qkv plain"]).abs().max() < 0.02 * moved, name
    assert all(torch.equal(p, q) for p, q in zip(subject.model.parameters(), before, strict=True))


def test_dropout_is_on_while_training_is_timed() -> None:
    subject = subject_of(TransformerConfig(d_model=16, d_ff=24, heads=2, dropout=0.5), 50)
    batch = training_speed.random_batches(50, 100, count=1)[0]
    for setting in training("cuda"):  # all: a CPU can run their steps too
        if (
            setting.exact
            and "compiled" not in setting.name
            and isinstance(loop := setting.open(subject), contenders.PlainQkv)
        ):
            assert torch.equal(loop.logits(batch), loop.logits(batch))
            losses = {loop.loss(batch.inputs, batch.labels).item() for _ in range(3)}
            assert len(losses) == 3, setting.name


def test_random_batches_have_one_shape_and_true_lengths() -> None:
    batches = training_speed.random_batches(50, 1000, count=3)
    assert len({batch.source.shape for batch in batches}) == 1
    for batch in batches:
        reach = (batch.labels != PAD).sum(1)
        assert batch.tokens == reach.sum()
        assert 900 < batch.tokens < 1100
        for ids, lengths in ((batch.source, batch.lengths), (batch.labels, reach)):
            assert lengths.min() >= training_speed.SHORTEST
            assert lengths.max() <= training_speed.LONGEST
            assert ids.gather(1, lengths[:, None] - 1).eq(EOS).all()
            assert ids.eq(PAD).sum() == ids.numel() - lengths.sum()
            assert ids.eq(EOS).sum() == len(ids)
        assert torch.equal(batch.target[:, 0], torch.full_like(reach, BOS))
        real = batch.labels[:, 1:] != PAD
        assert torch.equal(batch.target[:, 1:][real], batch.labels[:, :-1][real])
    assert training_speed.pad_share(batches) == pytest.approx(1 - 28 / 32, abs=0.02)


def test_training_operations_equal_counted_flops() -> None:
    """Equal to torch's count on sentences without padding, except that torch counts causal attention in full."""
    spec, vocab = TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=2, decoder_layers=3, d_k=5), 50
    subject = subject_of(spec, vocab)
    source, target = torch.randint(3, 50, (4, 7)), torch.randint(3, 50, (4, 9))
    batch = Batch((source, torch.full((4,), 7), target), target, 36)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        subject.model(*batch.inputs).sum().backward()
    causal = 6 * spec.heads * (spec.key_width + spec.value_width) * spec.decoder_layers * 4 * 9 * 9
    assert training_speed.training_operations(spec, vocab, batch) + causal / 2 == counter.get_total_flops()


def test_contenders_out_of_memory_run_in_a_separate_group(little: None) -> None:
    """Two contenders that exceed the memory together run in separate groups; one that never fits is reported."""
    subject = subject_of(*training_speed.SIZES["small"])
    open_now: WeakSet[contenders.PlainQkv] = WeakSet()

    def greedy(how: str, most: int) -> contenders.Setting:
        def open_loop(setup: contenders.TrainingSetup) -> contenders.PlainQkv:
            loop = contenders.PlainQkv(setup)
            if len(open_now) >= most:
                raise torch.OutOfMemoryError
            open_now.add(loop)
            return loop

        return contenders.Setting(contenders.OURS, how, open_loop, exact=True)

    entered = [greedy("first", 1), greedy("second", 1), greedy("never", 0)]
    rows, missing = training_speed._measure_all(entered, subject, training_speed.random_batches(300, 64, count=1), 0.0)
    assert [row.setting.how for row in rows] == ["first", "second"]
    assert missing == {"qkv never": "out of memory: lower --tokens"}
    assert not open_now


def test_contenders_that_cannot_be_prepared_are_reported(little: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: contenders.TrainingSetup) -> torch.nn.Module:
        raise RuntimeError("no compiler\nis here")

    plain = contenders.Setting(contenders.OURS, "plain", contenders.PlainQkv, exact=True)
    entered = [contenders.Setting("other", "eager", broken), plain]
    monkeypatch.setattr(contenders, "training_settings", lambda device, modules: entered)
    result = training_speed.measure_training(seconds=0.0, device="cpu", tokens=64)
    assert result["missing"] == {"other eager": "no compiler"}
    assert [row["contender"] for row in result["rows"]] == ["qkv plain"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_contenders_run(little: None) -> None:
    result = training_speed.measure_training(seconds=0.0, device="cpu", tokens=64, only=["compiled"])
    assert [row["contender"] for row in result["rows"]] == [
        "transformers MarianMT compiled",
        "torch.nn.Transformer compiled",
    ]
    assert not result["ratios"]


@pytest.mark.parametrize(
    ("what", "wrong", "message"),
    [
        ("everything", {}, "choose one of train, decode, all"),
        ("all", {"outputs": ["both.json"]}, "one file per table"),
        ("train", {"beams": [4]}, "--beam belongs to lab speed decode"),
        ("decode", {"tokens": 64}, "--tokens belongs to lab speed train"),
        ("train", {"model": "huge"}, "choose one of tiny, small, base, big"),
        ("train", {"tokens": 7}, "the length of one sentence"),
        ("train", {"only": ["fairseq"]}, "no contender has such a name"),
        ("train", {"outputs": ["speed.txt"]}, "write to a .json file"),
    ],
)
def test_wrong_speed_calls_are_refused(what: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decoding_speed.measure_speed(what, **wrong)


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformerConfig(d_model=32, d_ff=64, heads=2, encoder_layers=1, decoder_layers=2)
    monkeypatch.setattr(training_speed, "SIZES", {"small": (model, 400)})
    monkeypatch.setattr(decoding_speed, "DRAWN", {"cpu": (12, 7)})


def test_every_engine_decodes_the_same_tokens(tiny_sizes: None, tmp_path: Path) -> None:
    """All contenders in fp32, with several threads or processes, write the same tokens, and as many as required."""
    run = decoding_speed.make_random_run(*training_speed.SIZES["small"], tmp_path / "run")
    subject = contenders.DecodingSetup(run, torch.device("cpu"), tmp_path)
    sources = decoding_speed.random_sentences(run, 12, 7)
    exact = [setting for setting in decoding("cpu", threads=2) if setting.exact]
    # The steps captured on a GPU also run one by one on a CPU.
    exact += [each for each in decoding("cuda") if each.name == "qkv fp32, captured"]
    assert len({setting.name for setting in exact}) == 8
    assert {setting.engine for setting in exact} == {
        contenders.OURS,
        "CTranslate2",
        "transformers",
        "torch.nn.Transformer",
    }
    expected: dict[int, list[set[tuple[int, ...]]]] = {}
    for setting in exact:
        threads = torch.get_num_threads()
        decode = setting.open(subject)
        assert torch.get_num_threads() == threads
        for beam, batch in ((1, 1), (1, 5), (4, 12), (4, 5)):
            found = decode(sources, contenders.DecodingTask(beam, batch, extra=0, n_best=beam))
            written = [{tuple(token for token in tokens if token != EOS) for tokens in each} for each in found]
            assert written == expected.setdefault(beam, written), (setting.name, beam, batch)
            assert {len(each) for each in written} == {beam}
            assert {len(tokens) for each in written for tokens in each} == {7}
    # The model is not trivial: most texts differ.
    assert len({tokens for [tokens] in expected[1]}) > 6


def test_decoding_speed_table(tiny_sizes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [str(tmp_path / "speed.json"), str(tmp_path / "speed.md")]
    result = decoding_speed.measure_decoding(
        batches=[1, 4], seconds=0.0, device="cpu", outputs=outputs, command="qkv lab speed"
    )
    assert json.loads((tmp_path / "speed.json").read_text(encoding="utf-8")) == result
    assert {"machine", "torch", "qkv", "command", "cores", "threads", "model", "text", "compared"} <= result.keys()
    assert set(result["versions"]) == {"transformers", "ctranslate2"}

    rows = {(row["setting"], row["beam"], row["batch"]): row for row in result["rows"]}
    names = {setting.name for setting in decoding("cpu")} - result["missing"].keys()
    assert rows.keys() == {(name, beam, batch) for name in names for beam in (1, 4) for batch in (1, 4)}
    for row in result["rows"]:
        assert row["rounds"] >= 3
        assert 0 < row["low"] <= row["tokens_per_second"] <= row["high"]
        assert row["same"] == 1.0 or not row["fp32"]
        assert row["tokens"] == 7 * row["sentences"]  # whether it writes </s> or stops at the limit
        assert (row["ms_per_token"] is not None) == (row["batch"] == 1)

    compared = {ratio["peer"] for ratio in result["ratios"]}
    assert compared == {"CTranslate2", "transformers", "torch.nn.Transformer"}
    assert len(result["ratios"]) == 2 * 3 * 2 * len(compared)  # beams, batches and any, precisions
    for ratio in result["ratios"]:
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    shown = capsys.readouterr().out
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    for name in names:
        assert name in shown
        assert name in page


def test_ratios_are_of_the_fastest_settings_round_by_round() -> None:
    def row(engine: str, how: str, batch: int, *speeds: float) -> decoding_speed.Measurement:
        setting = contenders.Setting(engine, how, lambda subject: nothing, exact=how == "fp32")
        task, cpu = contenders.DecodingTask(1, batch, 0), torch.device("cpu")
        return decoding_speed.Measurement(setting, task, [], nothing, cpu, speeds=[*speeds])

    def nothing(sources: contenders.Sources, task: contenders.DecodingTask) -> contenders.Outputs:
        return []

    rows = [
        row(contenders.OURS, "fp32", 1, 10, 20, 60),
        row(contenders.OURS, "int8", 1, 30, 30, 30),
        row("CTranslate2", "fp32", 1, 5, 4, 20),
        row(contenders.OURS, "fp32", 8, 70, 80, 90),
        row("CTranslate2", "fp32", 8, 1, 2, 3),
        row("CTranslate2", "int8", 8, 10, 20, 30),
    ]
    found = {(each["batch"], each["fp32"]): each for each in decoding_speed._ratios(rows)}
    assert {key: (each["ratio"], each["low"], each["high"]) for key, each in found.items()} == {
        (1, True): (3.0, 2.0, 5.0),
        (1, False): (6.0, 1.5, 7.5),
        (8, True): (40.0, 30.0, 70.0),
        (8, False): (4.0, 3.0, 7.0),
        (None, True): (14.0, 4.5, 20.0),
        (None, False): (4.0, 3.0, 7.0),
    }
    assert found[None, True]["ours"] == "qkv fp32, batch 8"
    assert found[None, True]["theirs"] == "CTranslate2 fp32, batch 1"


def test_engines_with_other_tokens_are_refused(tiny_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_layers = peer("torch_layers")
    monkeypatch.setattr(torch_layers, "TorchTransformer", another(torch_layers.TorchTransformer))
    with pytest.raises(QkvError, match=r"torch.nn.Transformer .* the speeds are not comparable"):
        decoding_speed.measure_decoding(only=["nn"], batches=[4], seconds=0.0, device="cpu")


def test_a_trained_run_is_decoded_on_its_text(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.src"
    text.write_text("".join(f"{source}\n" for source, _ in sentences(12, seed=7)) + "\n", encoding="utf-8")
    result = decoding_speed.measure_decoding(
        run=str(tiny), src=str(text), beams=[4], batches=[5], only=["qkv", "CTranslate2", "transformers"], seconds=0.0
    )
    assert result["text"] == f"{text}, 12 lines"
    assert {row["engine"] for row in result["rows"]} == {
        contenders.OURS,
        "CTranslate2",
        "transformers",
    }
    for row in result["rows"]:
        assert row["sentences"] == 12
        assert row["same"] == 1.0 or not row["fp32"]


def test_missing_packages_are_reported(tiny_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise UsageError(f"{name} is not installed: pip install {name}")

    monkeypatch.setattr(peer("ctranslate2_engine"), "import_optional", nothing)
    options: dict[str, Any] = {"beams": [1], "batches": [4], "seconds": 0.0, "device": "cpu"}
    result = decoding_speed.measure_decoding(only=["CTranslate2", "nn"], **options)
    assert result["missing"]
    assert all("pip install ctranslate2" in reason for reason in result["missing"].values())
    assert [row["engine"] for row in result["rows"]] == ["torch.nn.Transformer"]
    assert result["ratios"] == []  # nothing of ours was measured
    with pytest.raises(UsageError, match="pip install ctranslate2"):
        decoding_speed.measure_decoding(only=["CTranslate2"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "somewhere"}, "give --run and --src together"),
        ({"run": "somewhere", "src": "text", "model": "base"}, "give --run and --src together"),
        ({"model": "huge"}, "choose one of small"),
        ({"only": ["fairseq"]}, "no setting has such a name"),
        ({"beams": [0]}, "numbers of at least 1"),
        ({"outputs": ["speed.txt"]}, "write to a .json file"),
    ],
)
def test_wrong_calls_are_refused(tiny_sizes: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decoding_speed.measure_decoding(device="cpu", seconds=0.0, **options)


def test_without_the_folder_of_peers_qkv_is_measured_alone(
    little: None, tiny_sizes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so; a module of that name elsewhere is not loaded, and a wrong --only names what there is."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"seconds": 0.0, "device": "cpu"}
    results = decoding_speed.measure_speed("train", tokens=100, **options)
    results |= decoding_speed.measure_speed("decode", beams=[1], batches=[4], **options)
    for result in results.values():
        assert {row["engine"] for row in result["rows"]} == {"qkv"}
        assert result["ratios"] == []
        assert result["versions"] == {}
    assert capsys.readouterr().err.count("benchmarks/peers: no such folder, so qkv is measured alone") == 2
    with pytest.raises(UsageError, match=r"choose among qkv plain$"):
        training_speed.measure_training(only=["Marian"], tokens=100, **options)


def test_another_folder_adds_another_peer(tiny_sizes: None, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from qkv.lab.contenders import Setting, search_with\n"
        "def decoding(device, threads):\n"
        "    return [Setting('mine', 'alone', lambda subject: search_with(subject.model, subject), exact=True)]\n"
    )
    result = decoding_speed.measure_decoding(beams=[1], batches=[4], seconds=0.0, device="cpu", folder=tmp_path)
    assert {row["engine"] for row in result["rows"]} == {"qkv", "mine"}
    assert {ratio["peer"] for ratio in result["ratios"]} == {"mine"}


def test_doctor_notices_a_broken_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
    monkeypatch.setattr(doctor, "score_all", lambda *arguments, **options: [[0.0]] * 5)
    assert not all(passed for _, passed, _ in doctor.self_test(torch.device("cpu")))
