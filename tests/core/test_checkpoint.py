"""The state that training continues from, and the mean of checkpoints."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import step_of
from qkv.core import checkpoint, files
from qkv.core.checkpoint import (
    Progress,
    average_checkpoints,
    clear_away,
    latest_state,
    restore_state,
    save_state,
    start_from,
)
from qkv.core.device import World
from qkv.core.errors import QkvError
from qkv.core.run import Run

PROGRESS = Progress(
    step=8,
    epoch=2,
    update=3,
    micro_tokens=512,
    tokens=999,
    seconds=1.5,
    training_seconds=1.25,
    skipped=4,
    skipped_in_a_row=1,
    validated=6,
    best=-0.1,
    best_step=5,
    worse=2,
    learning_rate=1e-3,
    last_step=100,
)


class Average:
    """A moving average of the weights of a model: other numbers than the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: parameter.detach() + 100 for name, parameter in model.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        return self.weights


def begun(seed: int = 0, updates: int = 0, average: bool = False, width: int = 3) -> Any:
    """A training step after some updates with random gradients."""
    torch.manual_seed(seed)
    model = nn.Linear(2, width)
    step = step_of(model, torch.optim.Adam(model.parameters(), lr=0.1))
    step.average = Average(model) if average else None
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step.optimizer.step()
    return step


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def moments(step: Any) -> dict[str, Tensor]:
    """The tensors of the optimizer's state, by parameter and name."""
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {f"{names[p]}/{slot}": value for p, state in step.optimizer.state.items() for slot, value in state.items()}


def saved(folder: Path, step: Any, progress: Progress = PROGRESS) -> Path:
    save_state(Run(folder), progress, step)
    state = latest_state(Run(folder))
    assert state is not None
    return state


# ---- a state ---------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    """Weights, moments, average and progress, into a training that had made other updates."""
    step, other = begun(updates=3, average=True), begun(seed=1, updates=5, average=True)
    folder = saved(tmp_path, step)
    assert folder == tmp_path / "state" / "step-0000008"
    assert restore_state(folder, other) == PROGRESS
    assert same(dict(other.model.named_parameters()), dict(step.model.named_parameters()))
    assert same(moments(other), moments(step))
    assert same(other.average.tensors(), step.average.tensors())
    for each in (step, other):
        for parameter in each.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.optimizer.step()
    assert same(dict(other.model.named_parameters()), dict(step.model.named_parameters()))


def test_progress_knows_its_position_in_the_text() -> None:
    assert PROGRESS.position == (2, 3)
    assert Progress().position == (0, 0)


def test_moments_of_before_are_forgotten(tmp_path: Path) -> None:
    folder, other = saved(tmp_path, begun(updates=0)), begun(seed=1, updates=2)
    restore_state(folder, other)
    assert moments(other) == {}


def test_an_average_that_a_resume_adds_begins_at_the_weights(tmp_path: Path) -> None:
    step, other = begun(updates=2), begun(seed=1, average=True)
    folder = saved(tmp_path, step)
    restore_state(folder, other)
    assert same(other.average.tensors(), dict(step.model.named_parameters()))


def test_an_average_that_a_resume_gives_up_is_not_read(tmp_path: Path) -> None:
    step, other = begun(updates=2, average=True), begun(seed=1)
    folder = saved(tmp_path, step)
    restore_state(folder, other)
    assert same(dict(other.model.named_parameters()), dict(step.model.named_parameters()))


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, begun(updates=1))
    with pytest.raises(QkvError, match=r"weights\.safetensors: weights of another model: weight is \(3, 2\) in the"):
        restore_state(folder, begun(width=4))
    moved = files.read_tensors(folder / "optimizer.safetensors")
    files.write_tensors(folder / "optimizer.safetensors", {f"old.{name}": tensor for name, tensor in moved.items()})
    with pytest.raises(QkvError, match=r"step-0000008: the optimizer state is of another model: it has old\."):
        restore_state(folder, begun())


def test_weights_of_another_training_come_without_its_moments(tmp_path: Path) -> None:
    step, other = begun(updates=2), begun(seed=1, updates=1, average=True)
    own = {name: tensor.clone() for name, tensor in moments(other).items()}
    start_from(saved(tmp_path, step) / "weights.safetensors", other)
    assert same(dict(other.model.named_parameters()), dict(step.model.named_parameters()))
    assert same(other.average.tensors(), dict(step.model.named_parameters()))
    assert same(moments(other), own)
    plain = begun(seed=2)
    start_from(latest_state(Run(tmp_path)) / "weights.safetensors", plain)  # type: ignore[operator]
    assert same(dict(plain.model.named_parameters()), dict(step.model.named_parameters()))


def test_the_newest_complete_state_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert latest_state(run) is None
    for name in ("step-9999999", "step-10000000", ".step-10000001.tmp"):
        (tmp_path / "state" / name).mkdir(parents=True)
    assert latest_state(run) == tmp_path / "state" / "step-10000000"


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_state_is_on_disk_before_the_older_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = begun(updates=1), list[tuple[str, list[str]]]()
    saved(tmp_path, step, Progress(step=1))
    folder, sync = tmp_path / "state", files.sync

    def watched(path: Path) -> None:
        if path == folder:
            seen.append(("flushed", sorted(each.name for each in folder.iterdir())))
        sync(path)

    monkeypatch.setattr(files, "sync", watched)
    saved(tmp_path, step, Progress(step=2))
    assert seen == [("flushed", ["step-0000001", "step-0000002"])]
    assert [path.name for path in folder.iterdir()] == ["step-0000002"]


def test_a_state_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = begun(updates=1)
    saved(tmp_path, step, Progress(step=1))

    def full(path: Path, text: str) -> None:
        raise QkvError(f"{path}: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_text", full)
        with pytest.raises(QkvError, match="No space left"):
            save_state(Run(tmp_path), Progress(step=2), step)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-0000001"], "half a state is removed"
    assert saved(tmp_path, step, Progress(step=2)).name == "step-0000002"


def test_an_unfinished_state_is_begun_anew(tmp_path: Path) -> None:
    """A killed process left a file that the new state does not have."""
    left = tmp_path / "state" / ".step-0000008.tmp"
    left.mkdir(parents=True)
    (left / "ema.safetensors").write_text("cut off")
    folder = saved(tmp_path, begun(updates=1))
    assert {path.name for path in folder.iterdir()} == {
        *("weights.safetensors", "optimizer.safetensors", "progress.json")
    }
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-0000008"]


def test_a_second_stop_at_a_step_renews_the_progress_alone(tmp_path: Path) -> None:
    step = begun(updates=1)
    folder = saved(tmp_path, step)
    inode = (folder / "weights.safetensors").stat().st_ino
    later = Progress(**{**vars(PROGRESS), "seconds": 77.0})
    assert saved(tmp_path, step, later) == folder
    assert (folder / "weights.safetensors").stat().st_ino == inode
    assert restore_state(folder, begun()) == later
    assert (folder / "progress.json").read_text().startswith('{\n  "step": 8,\n'), "one entry a line, for people"


class Ranks(World):
    """One of two processes, which notes what it is asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)
        self.calls: list[str] = []

    def broadcast(self, word: str = "") -> str:
        self.calls.append("broadcast")
        return word

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.calls.append("gather " + " ".join(sorted(tensors)))
        return super().gather(tensors)


def test_all_ranks_gather_and_the_first_one_writes(tmp_path: Path) -> None:
    calls = []
    for rank in (1, 0):
        step = begun(average=True)
        step.world = Ranks(rank)
        save_state(Run(tmp_path), PROGRESS, step)
        calls.append(step.world.calls)
        assert (tmp_path / "state").exists() == (rank == 0)
    assert calls[0] == calls[1] == ["broadcast", "gather bias weight", "gather ", "gather bias weight", "broadcast"]


def test_other_ranks_do_not_remove_the_files_of_the_first(tmp_path: Path) -> None:
    unfinished = tmp_path / "state" / ".step-0000008.tmp"
    unfinished.mkdir(parents=True)
    step = begun()
    step.world = Ranks(1)
    save_state(Run(tmp_path), PROGRESS, step)
    assert unfinished.exists()

    def interrupted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise KeyboardInterrupt

    step.world.gather = interrupted
    with pytest.raises(KeyboardInterrupt):
        save_state(Run(tmp_path), PROGRESS, step)
    assert unfinished.exists()
    step.world.first = True
    with pytest.raises(KeyboardInterrupt):  # no other error in its place
        save_state(Run(tmp_path), PROGRESS, step)
    assert not unfinished.exists()


def test_a_state_is_saved_though_the_older_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    step = step_of(model, torch.optim.Adam(model.parameters()))
    run = Run(tmp_path)
    checkpoint.save_state(run, checkpoint.Progress(step=1), step)
    remove = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "step-0000001":
            remove(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, "a file in it is open")

    monkeypatch.setattr(shutil, "rmtree", busy)
    checkpoint.save_state(run, checkpoint.Progress(step=2), step)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-0000001", "step-0000002"]
    latest = checkpoint.latest_state(run)
    assert latest is not None
    assert checkpoint.restore_state(latest, step).step == 2
    monkeypatch.setattr(shutil, "rmtree", remove)
    checkpoint.save_state(run, checkpoint.Progress(step=3), step)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-0000003"]


def test_saving_removes_older_states_and_unfinished_ones_but_no_copies(tmp_path: Path) -> None:
    step = begun(updates=1)
    saved(tmp_path, step, Progress(step=1))
    for name in ("step-0000001-backup", ".step-0000002.tmp"):
        (tmp_path / "state" / name).mkdir()
    saved(tmp_path, step, Progress(step=3))
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-0000001-backup", "step-0000003"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    names = ("best", "step-0000004", "step-0000006", "step-0000008")
    for path in [weights / f"{name}.safetensors" for name in names]:
        path.touch()
    for path in (tmp_path / ".log.jsonl.7.tmp", weights / ".best.safetensors.7.tmp", tmp_path / "run.json"):
        path.touch()
    clear_away(Run(tmp_path), PROGRESS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "weights"]
    assert sorted(path.stem for path in weights.iterdir()) == ["best", "step-0000004", "step-0000006"]


def test_a_damaged_progress_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, begun())
    (folder / "progress.json").write_text(json.dumps({"steps": 4}))
    with pytest.raises(QkvError, match=r"progress\.json: damaged: restore it from a copy, or train again"):
        restore_state(folder, begun())


# ---- the mean of checkpoints -----------------------------------------------------------------------------------------


def test_checkpoints_are_averaged_in_float64(tmp_path: Path) -> None:
    """Each tensor keeps its own dtype; small differences between large numbers are not lost on the way."""
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    large, low = [2.0**24, 1.0, 1.0], [1.0, 2.0, 6.0]
    for path, a, b in zip(paths, large, low, strict=True):
        files.write_tensors(path, {"a": torch.tensor([a, 3.0]), "b": torch.tensor([b], dtype=torch.bfloat16)})
    mean = average_checkpoints(paths)
    assert (mean["a"].dtype, mean["b"].dtype) == (torch.float32, torch.bfloat16)
    assert mean["a"].tolist() == [float(torch.tensor((2.0**24 + 2) / 3)), 3.0]
    assert mean["b"].tolist() == [3.0]
    assert same(average_checkpoints(paths[:1]), files.read_tensors(paths[0]))


@pytest.mark.parametrize(
    "other", [{"a": torch.ones(3)}, {"b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}]
)
def test_checkpoints_of_different_models_are_not_averaged(tmp_path: Path, other: dict[str, Tensor]) -> None:
    files.write_tensors(tmp_path / "one", {"a": torch.ones(2)})
    files.write_tensors(tmp_path / "two", other)
    with pytest.raises(QkvError, match=r"two: weights of another model than .*one: they cannot be averaged"):
        average_checkpoints([tmp_path / "one", tmp_path / "two"])
