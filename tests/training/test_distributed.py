"""Several processes: two ranks train the same weights as one, resume its runs, and end together."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from conftest import PATIENCE, sentences, tiny_config, wait_until, write_pairs
from qkv import assembly
from qkv.assembly import Run, trainer_for, updates_for
from qkv.core import batches, files
from qkv.core.dataset import PreparedText
from qkv.core.device import ALONE, World
from qkv.engines.cuda_training.cuda_trainer import CudaTrainStep
from qkv.options import Config, RnnConfig
from qkv.training import distributed

HALF, STEPS = 6, 12

# Every process of torchrun trains the jobs of a file, one after another, and logs losses in full precision. A job may
# include a fault: rank `on` fails at step `at`.
WORK = """
import json, os, signal, sys
from pathlib import Path
import qkv
from qkv import assembly
from qkv import options as config
from qkv.cli import _report_failure
from qkv.core.trainer import Trainer
from qkv.engines.cuda_training.cuda_trainer import CudaTrainStep

usual = assembly.train_step_for
work = json.loads(Path(sys.argv[1]).read_text())
start_step = Trainer.start

def sabotaged(trainer, update):
    if trainer.progress.step == work["at"] and trainer.world.rank == work["on"]:
        Path(work["mark"]).touch()
        if work["by"] == "raise":
            raise ValueError("sabotage")
        if work["by"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return start_step(trainer, update)

Trainer.start = sabotaged
try:
    for job in work["jobs"]:
        assembly.train_step_for = (lambda *_: CudaTrainStep) if Path(job["run"]).name == "fast" else usual
        start = {"resume": True} if job["resume"] else {"config": config.Config.load(job["config"])}
        qkv.train(run=job["run"], settings=job["settings"], **start)
except Exception as error:
    sys.exit(_report_failure(error, False))
"""


def job(run: Path, recipe: Path | None = None, **settings: object) -> dict[str, Any]:
    """Arguments that train a recipe in a folder, or resume the run in it."""
    given = [f"train.{key}={json.dumps(value)}" for key, value in settings.items()]
    return {"run": str(run), "resume": recipe is None, "config": str(recipe or ""), "settings": given}


@contextmanager
def ranks(
    folder: Path, *jobs: dict[str, Any], by: str = "", at: int = -1, on: int = 1
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start two processes of torchrun with these jobs; the second result is a file that appears on a fault."""
    folder.mkdir(exist_ok=True)
    script, work, mark = folder / "work.py", folder / "work.json", folder / "mark"
    script.write_text(WORK, encoding="utf-8")
    work.write_text(json.dumps({"jobs": jobs, "by": by, "at": at, "on": on, "mark": str(mark)}), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*command, str(script), str(work)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield started, mark
    finally:
        started.terminate()  # torchrun ends its processes, which would outlive it if it were killed
        started.communicate(timeout=PATIENCE)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None)
    assert path.exists(), process.communicate()[1]


def tensors(run: Path, name: str = "") -> dict[str, torch.Tensor]:
    return files.read_tensors(Run.open(run).weights(name))


def entries(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def assert_same(run: Path, other: Path) -> None:
    """The same curve to the six digits of the log, and the same weights, average and optimiser at its end, to 1e-6."""
    for event, keys in (("train", ("step", "loss", "nll", "norm", "tokens")), ("valid", ("step", "loss"))):
        ours, theirs = ([[each[key] for key in keys] for each in entries(path, event)] for path in (run, other))
        assert [each[0] for each in ours] == [each[0] for each in theirs]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    for name in ("weights", "optimizer", "ema"):
        ours_too, theirs_too = (
            files.read_tensors(path / "state" / f"step-{STEPS:07d}" / f"{name}.safetensors") for path in (run, other)
        )
        torch.testing.assert_close(ours_too, theirs_too, rtol=0, atol=1e-6)
    torch.testing.assert_close(tensors(run, "best"), tensors(other, "best"), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with updates so small that some have a single row, and the second rank gets none."""
    folder = tmp_path_factory.mktemp("recipe")
    short = sentences(60)
    long = [
        (f"{a} {b}", f"{c} {d}") for (a, c), (b, d) in zip(sentences(60, seed=2), sentences(60, seed=3), strict=True)
    ]
    settings = tiny_config(
        *write_pairs(folder, [*short, *long]),
        steps=STEPS,
        validate_every=HALF,
        log_every=1,
        ema=0.9,
        schedule="constant",
        learning_rate=1e-3,
        metric="loss",
    ).replace(
        data={"max_length": 20},
        tokenizer={"dropout": 0.1},
        model={"d_model": 18, "d_ff": 30, "d_k": 5, "d_v": 7},
        train={"tokens_per_step": 30, "micro_tokens": 24},
    )
    path = folder / "recipe.toml"
    path.write_text(settings.dumps(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders named by how they were trained: two letters, of the first half of the steps and of the second.

    a is one process alone, d two that divide the data, s two that divide the weights.
    """
    folder = tmp_path_factory.mktemp("runs")
    qkv.train(Config.load(recipe), folder / "aa")
    qkv.train(Config.load(recipe), folder / "ad", settings=[f"train.steps={HALF}"])
    shutil.copytree(folder / "ad", folder / "as")
    twice = folder / "twice.toml"  # with R-Drop, and so little dropout that nothing is dropped
    passes = Config.load(recipe).replace(model={"dropout": 1e-12}).replace(train={"r_drop": 2.0})
    twice.write_text(passes.dumps(), encoding="utf-8")
    qkv.train(passes, folder / "alone")
    with pytest.MonkeyPatch.context() as other:
        other.setattr(assembly, "train_step_for", lambda *_: CudaTrainStep)
        qkv.train(Config.load(recipe), folder / "fast-alone")
    jobs = [
        job(folder / "fast", recipe),
        job(folder / "data", twice),
        job(folder / "sharded", twice, parallel="sharded"),
        job(folder / "dd", recipe),
        job(folder / "ss", recipe, parallel="sharded"),
        job(folder / "da", recipe, steps=HALF, checkpointing=True),
        job(folder / "sa", recipe, steps=HALF, parallel="sharded"),
        job(folder / "sd", recipe, steps=HALF, parallel="sharded"),
        job(folder / "ad", steps=STEPS),
        job(folder / "as", steps=STEPS, parallel="sharded", checkpointing=True),
        job(folder / "sd", steps=STEPS, parallel="data"),
    ]
    with ranks(folder / "work", *jobs) as (started, _):
        _, err = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0, err
    for name in ("da", "sa"):
        qkv.train(run=folder / name, resume=True, settings=[f"train.steps={STEPS}"])
    return folder


def test_some_updates_leave_a_rank_without_rows(runs: Path, recipe: Path) -> None:
    """The recipe has such updates, so the tests below cover them."""
    prepared = PreparedText.open(runs / "aa" / "store")
    first = updates_for(Config.load(recipe), prepared).plan(0)[:STEPS]
    shares = [batches.share(update, 1, 2) for update in first]
    assert any(not share for share in shares)
    assert any(share and len(share) < len(update) for share, update in zip(shares, first, strict=True))


@pytest.mark.parametrize("how", ["dd", "ss"])
def test_two_processes_train_the_same_weights_as_one(runs: Path, how: str) -> None:
    assert_same(runs / how, runs / "aa")
    assert len(entries(runs / how, "train")) == STEPS  # one of them logs


def test_two_processes_take_the_fast_way_as_one_does(runs: Path) -> None:
    assert_same(runs / "fast", runs / "fast-alone")


@pytest.mark.parametrize("how", ["data", "sharded"])
def test_two_processes_pass_twice_as_one_does(runs: Path, how: str) -> None:
    assert_same(runs / how, runs / "alone")


@pytest.mark.parametrize("how", ["ad", "as", "da", "sa", "sd"])
def test_a_run_goes_on_with_another_number_of_processes(runs: Path, how: str) -> None:
    assert_same(runs / how, runs / "aa")


def test_the_folder_of_a_sharded_run_is_like_any_other(runs: Path) -> None:
    ours, theirs = (
        {str(path.relative_to(run)) for path in run.rglob("*") if "store" not in path.parts}
        for run in (runs / "ss", runs / "aa")
    )
    assert ours == theirs
    assert qkv.load(runs / "ss").translate("One two.").text is not None


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("by", "parallel"), [("raise", "data"), ("kill", "data"), ("raise", "sharded")])
def test_a_rank_that_dies_takes_the_others_along(recipe: Path, tmp_path: Path, by: str, parallel: str) -> None:
    endless = job(tmp_path / "run", recipe, steps=10**6, validate_every=10**6, parallel=parallel)
    with ranks(tmp_path, endless, by=by, at=3) as (started, mark):
        wait_for(mark, started)
        _, err = started.communicate(timeout=PATIENCE)
    assert started.returncode
    if by == "raise":
        assert "ValueError: sabotage\n" in err
        assert "This was rank 1 of 2." in err
        # Rank 0 reports it, unless torchrun ends the process first.
        own_words = "qkv: rank 0 of 2 stops because another failed: rank 1: ValueError: sabotage" in err
        assert own_words or "closing signal SIGTERM" in err
    else:
        own_words = "qkv: rank 0 of 2 stops because another ended without an error message" in err
        assert own_words or "closing signal SIGTERM" in err
        assert "Signal 9 (SIGKILL)" in err


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["data", "sharded"])
def test_a_signal_stops_all_ranks_at_one_step(runs: Path, recipe: Path, tmp_path: Path, parallel: str) -> None:
    endless = job(tmp_path / "run", recipe, steps=10**6, validate_every=10**6, parallel=parallel)
    with ranks(tmp_path, endless, by="mark", at=3) as (started, mark):
        wait_for(mark, started)
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate(timeout=PATIENCE)
    (state,) = (tmp_path / "run" / "state").iterdir()
    step = int(state.name.removeprefix("step-"))
    assert step >= 3
    assert err.count("qkv: ") == 1, err
    assert f"qkv: stopped at step {step} and saved: go on with" in err
    assert [entry["step"] for entry in entries(tmp_path / "run", "train")] == list(range(1, step + 1))
    # Until then its losses are those of one process.
    logged, alone = entries(tmp_path / "run", "train"), entries(runs / "aa", "train")
    known = min(step, STEPS)
    ours, theirs = ([each["loss"] for each in lines[:known]] for lines in (logged, alone))
    assert ours == pytest.approx(theirs, rel=1e-5)  # the log has six digits


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_reported_once(runs: Path, recipe: Path, tmp_path: Path) -> None:
    with ranks(tmp_path, job(runs / "aa", recipe)) as (started, _):
        _, err = started.communicate(timeout=PATIENCE)
    assert started.returncode
    assert err.count("qkv: ") == 1
    assert f"qkv: rank 0 of 2: {runs / 'aa'} holds a run already" in err


STUCK = """
import signal, sys, torch.distributed as dist
from datetime import timedelta
from qkv.training import distributed
distributed.GRACE = 1
signal.signal(signal.SIGTERM, lambda number, frame: None)
with distributed._limited_patience():
    print("ready", flush=True)
    dist.HashStore().wait(["never"], timedelta(seconds=1000))
"""


def test_a_process_that_waits_for_ever_ends_after_a_signal() -> None:
    """A collective that never returns blocks Python's signal handlers; the watchdog timer runs without Python."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=-1, stderr=-1, text=True) as stuck:
        assert stuck.stdout
        assert stuck.stdout.readline() == "ready\n"
        stuck.send_signal(signal.SIGTERM)
        _, err = stuck.communicate(timeout=PATIENCE)
    assert stuck.returncode == 1
    assert "Timeout" in err
    assert "most recent call first" in err  # and it names the step


# ---- the pieces ------------------------------------------------------------------------------------------------------


def test_a_world_of_one_process_changes_nothing() -> None:
    world = ALONE
    numbers = torch.arange(3.0)
    world.sum([numbers])
    assert numbers.tolist() == [0, 1, 2]
    assert (world.first, world.broadcast("word"), world.largest(7)) == (True, "word", 7)


def test_buckets_hold_every_tensor_once_and_one_type_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "BUCKET", 10)
    given = [torch.zeros(size, dtype=kind) for size, kind in [(4, torch.float32), (4, torch.float32)] * 4]
    given += [torch.zeros(25), torch.zeros(3, dtype=torch.float64), torch.zeros(())]
    made = list(distributed._buckets(given))
    assert [id(tensor) for bucket in made for tensor in bucket] == [id(tensor) for tensor in given]
    assert all(len({tensor.dtype for tensor in bucket}) == 1 for bucket in made)
    assert all(sum(tensor.numel() for tensor in bucket[:-1]) < 10 for bucket in made)
    assert len(made) < len(given)


def test_every_rank_has_its_own_dropout(runs: Path, recipe: Path) -> None:
    settings = Config.load(recipe).replace(model={"dropout": 0.5})
    prepared = PreparedText.open(runs / "aa" / "store")
    first, again, second = (trainer_for(settings, prepared, World(rank)) for rank in (0, 0, 1))
    with closing(first.updates.starting(first.progress.position)) as steps:
        update = next(steps)
    outcome = first.step(update)
    assert again.step(update) == outcome
    assert second.step(update).loss != pytest.approx(outcome.loss, rel=1e-4)


def test_unsupported_sharding_is_refused() -> None:
    base = Config()
    sharded = dataclasses.replace(base.train, parallel="sharded")
    assert dataclasses.replace(base, train=sharded).train.parallel == "sharded"
    with pytest.raises(qkv.UsageError, match="is for layers of attention"):
        dataclasses.replace(base, train=sharded, model=RnnConfig())
    with pytest.raises(qkv.UsageError, match="needs whole matrices"):
        dataclasses.replace(base, train=dataclasses.replace(sharded, optimizer="muon"))
