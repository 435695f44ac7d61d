"""Resume: stopped at any moment and continued, a run ends with the same bits as one that was never stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from conftest import Call, sentences, tiny_config, write_pairs
from qkv.api import run_training
from qkv.assembly import Run
from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.data.text_preparation import prepare_text
from qkv.options import Config

STEPS, EVERY = 16, 4

# Forks children from a process that has loaded everything and trained nothing, so that each costs only its training.
# A child runs the command line and sends itself a signal at the n-th call of one function.
FORKER = """
import json, os, signal, sys
from pathlib import Path
from qkv import cli
from qkv.core import files
from qkv.api import run_training
from qkv.assembly import Run
from qkv.core.run import JsonlLog
from qkv.core.trainer import Trainer
from qkv.core.preparation import Scan

PLACES = {
    "sync": (files, "sync"),
    "step": (Trainer, "start"),
    "log": (JsonlLog, "event"),
    "learn": (Scan, "learn_tokenizers"),
    "create": (Run, "create"),
}

def sabotage(place, at, number):
    owner, name = PLACES[place]
    real, calls = getattr(owner, name), []

    def wrapped(*arguments, **options):
        if place == "sync" and ".preparing-" in str(arguments[0]):
            return real(*arguments, **options)  # the text's own files: data/test_text_preparation.py
        calls.append(0)
        if len(calls) == at:
            if place == "sync" and arguments[0].is_file():
                os.truncate(arguments[0], arguments[0].stat().st_size // 2)
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    setattr(owner, name, wrapped)

def run(job):
    os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = ["qkv", *job["argv"]]
    sabotage(job["place"], job["at"], job["signal"])
    try:
        cli.main()
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Stop = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def stop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stop]:
    """Run a command that gets a signal on the way: `stop(argv, place, at, signal)` → exit code, standard error."""
    stderr = tmp_path_factory.mktemp("stop") / "stderr"
    with subprocess.Popen([sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forker:
        assert forker.stdin
        assert forker.stdout
        to, back = forker.stdin, forker.stdout

        def job(argv: list[object], place: str, at: int, number: int) -> tuple[int, str]:
            work = {"argv": [str(each) for each in argv], "place": place, "at": at, "signal": number}
            to.write(json.dumps({**work, "stderr": str(stderr)}).encode() + b"\n")
            to.flush()
            return int(back.readline()), stderr.read_text(encoding="utf-8")

        yield job


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with all randomness and state: dropout, BPE-dropout, accumulation, EMA, average."""
    folder = tmp_path_factory.mktemp("recipe")
    src, tgt = write_pairs(folder, sentences(150))
    settings = tiny_config(
        src,
        tgt,
        steps=STEPS,
        validate_every=EVERY,
        log_every=2,
        tokens_per_step=256,
        micro_tokens=128,
        ema=0.9,
        schedule="constant",
        metric="loss",
    ).replace(
        tokenizer={"dropout": 0.2},
        model={"d_model": 16, "d_ff": 32, "dropout": 0.2, "attention_dropout": 0.1},
    )
    path = folder / "recipe.toml"
    path.write_text(settings.dumps(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def unbroken(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All files of an uninterrupted run."""
    return contents(qkv.train(Config.load(recipe), tmp_path_factory.mktemp("unbroken") / "run").path)


def contents(run: Path) -> dict[str, Any]:
    """Everything in a run folder that training decides, times aside, by path."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_dir() or name.startswith("store") or name in ("run.json", "card.md"):
            continue
        if path.suffix == ".safetensors":
            found[name] = files.read_tensors(path)
        elif path.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text(encoding="utf-8")))
        else:
            found[name] = path.read_text(encoding="utf-8")
    return found


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    times = ("seconds", "training_seconds", "tokens_per_second", "stalled")
    return {key: value for key, value in entry.items() if key not in times}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        if name.endswith(".safetensors"):
            assert list(value) == list(theirs[name]), name
            for tensor in value:
                assert torch.equal(value[tensor], theirs[name][tensor]), f"{name}: {tensor}"
        else:
            assert value == theirs[name], name


def test_an_uninterrupted_run_has_all_compared_files(unbroken: dict[str, Any]) -> None:
    steps = [f"weights/step-{STEPS - EVERY:07d}.safetensors", f"weights/step-{STEPS:07d}.safetensors"]
    state = [f"state/step-{STEPS:07d}/{name}.safetensors" for name in ("ema", "optimizer", "weights")]
    assert {*steps, *state, "weights/best.safetensors", "weights/average.safetensors"} <= set(unbroken)
    assert {"scores.json", "log.jsonl", "config.toml", "tokenizer.json"} <= set(unbroken)
    last = unbroken[f"state/step-{STEPS:07d}/ema.safetensors"]
    assert any(not torch.equal(last[name], unbroken[state[-1]][name]) for name in last)
    assert len([line for line in unbroken["log.jsonl"] if line["event"] == "train"]) == STEPS // 2


def test_the_same_again_is_the_same(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    assert_same(contents(qkv.train(Config.load(recipe), tmp_path / "run").path), unbroken)


# `sync` flushes every file, and after its renaming the folder. A kill in the first call truncates a file. In order:
# the folder of the store, the run's tokenizers, config and run.json (1 to 7), then at each validation a state of
# weights, optimiser, EMA and progress (two each, and one more for the state as a whole), the weights of the step, the
# best ones, the scores, and the progress after the validation.
MOMENTS = {
    "half of a state's weights": 8,
    "half of an optimiser": 10,
    "a state but for its name": 15,
    "half of the first weights": 17,
    "best without scores": 20,
    "scores without progress": 23,
    "two whole states": 33,
    "somewhere": random.Random(7).randrange(34, 70),
}


@pytest.mark.parametrize("at", MOMENTS.values(), ids=MOMENTS.keys())
def test_killed_while_writing(stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path, at: int) -> None:
    run = tmp_path / "run"
    code, _ = stop(["train", recipe, "--run", run], "sync", at, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)


@pytest.mark.parametrize("at", [1, EVERY, 2 * EVERY + 3])
def test_killed_between_checkpoints(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path, at: int
) -> None:
    run = tmp_path / "run"
    code, _ = stop(["train", recipe, "--run", run], "step", at, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)


@pytest.mark.parametrize(
    ("number", "code", "at"),
    [(signal.SIGINT, 130, 6), (signal.SIGTERM, 143, EVERY), (signal.SIGINT, 130, STEPS), (signal.SIGTERM, 143, 1)],
)
def test_a_signal_saves_the_state_and_stops(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path, number: int, code: int, at: int
) -> None:
    """At a middle, validated, last or first step: the state is saved, and a message gives the command to resume."""
    run = tmp_path / "run"
    ended, err = stop(["train", recipe, "--run", run], "step", at, number)
    assert ended == code
    assert "Traceback" not in err
    *_, last = err.splitlines()
    assert last == f"qkv: stopped at step {at} and saved: go on with `qkv train --resume --run {run}`"
    assert [path.name for path in (run / "state").iterdir()] == [f"step-{at:07d}"]
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)


@pytest.mark.slow
def test_stopped_again_and_again(stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop(["train", recipe, "--run", run], "step", 3, signal.SIGINT)
    for place, at, number in [
        ("log", 2, signal.SIGTERM),
        ("sync", 4, signal.SIGKILL),
        ("step", 3, signal.SIGKILL),
    ]:
        code, _ = stop(["train", "--resume", "--run", run], place, at, number)
        assert code
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)


@pytest.mark.slow
def test_killed_from_outside_at_a_random_moment(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "qkv", "train", str(recipe), "--run", str(run)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (run / "log.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.random() / 4)
        process.kill()
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)


def test_a_half_written_state_is_ignored_and_cleared_away(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stop(["train", recipe, "--run", run], "step", EVERY + 2, signal.SIGKILL)
    half = run / "state" / f".step-{2 * EVERY:07d}.tmp"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    (run / "weights" / ".best.safetensors.1.tmp").write_bytes(b"half")
    with (run / "log.jsonl").open("a") as log:
        log.write('{"event": "train", "step": 6, "lo')  # and a line of the log cut
    assert_same(contents(qkv.train(run=run, resume=True).path), unbroken)
    assert not list(run.rglob("*.tmp"))


def test_a_run_resumes_without_its_text_files(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    src, tgt = write_pairs(tmp_path, sentences(150))
    changed = Config.load(recipe).replace(data={"train": [{"src": src, "tgt": tgt}]})
    own = tmp_path / "own.toml"
    own.write_text(changed.dumps(), encoding="utf-8")
    run = tmp_path / "run"
    stop(["train", own, "--run", run], "step", EVERY + 2, signal.SIGKILL)
    Path(src).unlink()
    Path(tgt).write_text("another text\n")
    ours = contents(qkv.train(run=run, resume=True).path)
    assert_same({**ours, "config.toml": unbroken["config.toml"]}, unbroken)


def test_another_text_is_refused(stop: Stop, recipe: Path, call: Call, tmp_path: Path) -> None:
    src, tgt = write_pairs(tmp_path, sentences(150))
    own = tmp_path / "own.toml"
    store = tmp_path / "store"
    changed = Config.load(recipe).replace(data={"train": [{"src": src, "tgt": tgt}], "store": str(store)})
    own.write_text(changed.dumps(), encoding="utf-8")
    run = tmp_path / "run"
    stop(["train", own, "--run", run], "step", EVERY + 2, signal.SIGKILL)
    write_pairs(tmp_path, [(s + " indeed", t + " davvero") for s, t in sentences(150, seed=9)])
    shutil.rmtree(store)
    done = call("train", "--resume", "--run", run)
    assert (done.code, "has changed since the run began" in done.error) == (1, True)


# ---- what a resumed run may change -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halfway(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of half the steps."""
    half = Config.load(recipe).replace(train={"steps": STEPS // 2})
    return qkv.train(half, tmp_path_factory.mktemp("halfway") / "run").path


def copy(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to / "copy"))


def stamps(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_more_steps_go_on_from_a_finished_run(halfway: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    run = qkv.train(run=copy(halfway, tmp_path), resume=True, settings=[f"train.steps={STEPS}"])
    assert_same(contents(run.path), unbroken)


def test_resuming_a_finished_run_changes_nothing(halfway: Path, call: Call) -> None:
    before = stamps(halfway)
    done = call("train", "--resume", "--run", halfway)
    assert done.code == 0
    assert f"is finished, at step {STEPS // 2}" in done.err
    assert stamps(halfway) == before


def test_a_run_that_lacks_only_its_end_gets_it(halfway: Path, tmp_path: Path) -> None:
    run = copy(halfway, tmp_path)
    whole = contents(run)
    (run / "weights" / "average.safetensors").unlink()
    best = {key: value for key, value in Run(run).scores.items() if key in ("best", "metric")}
    Run(run).write_scores({**best, "chosen": "best"})  # as it was before the average was made
    assert_same(contents(qkv.train(run=run, resume=True).path), whole)


def test_a_card_that_was_not_written_is_written(halfway: Path, tmp_path: Path) -> None:
    run = copy(halfway, tmp_path)
    (run / "card.md").unlink()
    qkv.train(run=run, resume=True)
    assert (run / "card.md").read_text(encoding="utf-8") == (halfway / "card.md").read_text(encoding="utf-8")


def test_an_incomplete_run_folder_is_not_overwritten(halfway: Path, tmp_path: Path, recipe: Path) -> None:
    run = copy(halfway, tmp_path)
    (run / "run.json").unlink()
    with pytest.raises(UsageError, match="holds an incomplete run"):
        qkv.train(Config.load(recipe), run)


@pytest.mark.parametrize(
    "setting",
    [
        "model.d_ff=64",
        "model.dropout=0",
        "tokenizer.vocab=300",
        "data.max_length=16",
        "train.seed=2",
        "train.metric=bleu",
    ],
)
def test_options_that_change_the_weights_are_refused(halfway: Path, call: Call, setting: str) -> None:
    before = stamps(halfway)
    done = call("train", "--resume", "--run", halfway, "--set", "train.steps=40", "--set", setting)
    assert done.code == 2
    assert f"cannot change {setting.partition('=')[0]}:" in done.error
    assert stamps(halfway) == before


def test_an_average_may_begin_with_a_resume(recipe: Path, tmp_path: Path) -> None:
    plain = Config.load(recipe).replace(train={"ema": 0.0, "steps": EVERY})
    run = qkv.train(plain, tmp_path / "run")
    weights = files.read_tensors(run.path / f"state/step-{EVERY:07d}/weights.safetensors")
    qkv.train(run=run.path, resume=True, settings=["train.ema=0.999999", f"train.steps={EVERY + 1}"])
    ema = files.read_tensors(run.path / f"state/step-{EVERY + 1:07d}/ema.safetensors")
    new = files.read_tensors(run.path / f"state/step-{EVERY + 1:07d}/weights.safetensors")
    for name, weight in weights.items():
        # A young average moves fast: by 1 − (1 + step) / (10 + step) of the way to the new weights.
        torch.testing.assert_close(ema[name], weight + (new[name] - weight) * (1 - (EVERY + 2) / (EVERY + 11)))


def test_a_killed_validation_is_repeated_whatever_the_options_say(stop: Stop, recipe: Path, tmp_path: Path) -> None:
    """Killed with the weights of a step that is not validated, and continued with validations at other steps."""
    run = tmp_path / "run"
    stop(["train", recipe, "--run", run], "sync", 36, signal.SIGKILL)
    assert [path.stem for path in Run(run).checkpoints()] == [f"step-{EVERY:07d}", f"step-{2 * EVERY:07d}"]
    qkv.train(run=run, resume=True, settings=["train.validate_every=3", "train.steps=9"])
    assert [path.stem for path in Run(run).checkpoints()] == [f"step-{2 * EVERY:07d}", "step-0000009"]
    assert Run(run).scores["average"]["of"] == [f"step-{2 * EVERY:07d}", "step-0000009"]


def test_fewer_steps_than_are_done_end_it_well(stop: Stop, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stop(["train", recipe, "--run", run], "step", 3, signal.SIGINT)  # before anything was validated
    qkv.train(run=run, resume=True, settings=["train.steps=2"])
    assert Run.open(run).scores["best"]["step"] == 3
    assert len(qkv.load(run).translate("One.").pieces) == 1


# ---- before there is anything to resume ------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_preparing(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], call: Call, tmp_path: Path, number: int, code: int
) -> None:
    run = tmp_path / "run"
    ended, err = stop(["train", recipe, "--run", run], "learn", 1, number)
    assert (ended, "Traceback" in err) == (code, False)
    if number == signal.SIGINT:
        assert err.splitlines()[-1].startswith("qkv: interrupted while preparing the text")
    assert not run.exists()
    assert call("train", "--resume", "--run", run).code == 2
    assert call("train", recipe, "--run", run).code == 0
    assert_same(contents(run), unbroken)


@pytest.mark.parametrize("place", ["learn", "create"])
def test_killed_before_the_recipe_was_settled(
    stop: Stop, recipe: Path, unbroken: dict[str, Any], call: Call, tmp_path: Path, place: str
) -> None:
    run = tmp_path / "run"
    code, _ = stop(["train", recipe, "--run", run], place, 1, signal.SIGKILL)
    assert code == -signal.SIGKILL
    again = call("train", "--resume", "--run", run)
    assert (again.code, "give the whole command again, without --resume" in again.error) == (2, True)
    assert call("train", recipe, "--run", run).code == 0
    assert_same(contents(run), unbroken)
    assert not list(run.glob(".preparing*"))


def test_an_automatic_recipe_is_settled_once(stop: Stop, corpus: tuple[str, str], call: Call, tmp_path: Path) -> None:
    src, tgt = corpus
    run = tmp_path / "run"
    options = ["--set", "train.device=cpu", "--set", "model.d_model=16", "--set", "model.d_ff=16"]
    stop(["train", "--src", src, "--tgt", tgt, "--run", run, *options], "log", 1, signal.SIGKILL)
    settled = Run.open(run).config
    assert (settled.train.schedule, settled.model.norm, settled.model.d_model) == ("wsd", "pre", 16)
    done = call("train", "--resume", "--run", run, "--set", "train.steps=2")
    assert (done.code, "auto:" in done.err) == (0, False)
    assert settled.difference(Run.open(run).config) == [("train.steps", settled.train.steps, 2)]


def test_resume_needs_a_run(call: Call, tmp_path: Path, recipe: Path) -> None:
    for arguments, words in [
        (["--resume"], "--resume needs --run"),
        (["--resume", "--run", tmp_path / "none"], "no such run folder"),
        ([recipe, "--resume", "--run", tmp_path], "takes text and config from the run folder"),
        (["--resume", "--run", tmp_path, "--minutes", "3"], "takes text and config from the run folder"),
    ]:
        done = call("train", *arguments)
        assert (done.code, words in done.error) == (2, True)


def test_an_existing_run_is_not_overwritten(halfway: Path, recipe: Path, call: Call) -> None:
    before = stamps(halfway)
    done = call("train", recipe, "--run", halfway)
    assert (done.code, "holds a run already: add --resume" in done.error) == (2, True)
    assert stamps(halfway) == before


def test_a_shared_store_is_found_from_another_working_directory(
    corpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `data.store`, a run goes on without the text files and from another working directory."""
    monkeypatch.chdir(tmp_path)
    copies = [shutil.copy(side, tmp_path) for side in corpus]
    config = tiny_config(*copies, steps=4, validate_every=2).replace(data={"store": "shared"})
    run = qkv.train(config, "run").path.resolve()
    assert not (run / "store").exists()
    for copy in copies:
        Path(copy).unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    qkv.train(run=run, resume=True, settings=["train.steps=6"])
    assert Run.open(run).scores["finished"] == 6


def test_two_processes_do_not_train_in_one_folder(corpus: tuple[str, str], tmp_path: Path) -> None:
    run = qkv.train(tiny_config(*corpus, steps=2, validate_every=2), tmp_path / "run")
    with run.lock(), pytest.raises(UsageError, match="another process is training here"):
        qkv.train(run=run.path, resume=True, settings=["train.steps=4"])
    assert Run.open(run.path).config.train.steps == 2, "what is refused changes nothing"
    qkv.train(run=run.path, resume=True, settings=["train.steps=4"])


def test_two_processes_do_not_begin_one_run(
    corpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused while the first prepares its text, when there is no run yet."""
    settings, folder = tiny_config(*corpus, steps=2, validate_every=2), tmp_path / "run"

    def meanwhile(*given: Any, **options: Any) -> Any:
        with pytest.raises(UsageError, match="another process is training here"):
            qkv.train(settings.replace(train={"steps": 1}), folder)
        monkeypatch.undo()
        return prepare_text(*given, **options)

    monkeypatch.setattr(run_training, "prepare_text", meanwhile)
    assert qkv.train(settings, folder).config.train.steps == 2


def test_a_run_that_failed_before_its_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(QkvError):
        qkv.train(tiny_config("nowhere.en", "nowhere.it"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
