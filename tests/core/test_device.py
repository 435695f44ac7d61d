"""Device and precision: what `auto` chooses."""

from __future__ import annotations

import pytest
import torch

from qkv.core.device import ALONE, World, choose_device, choose_precision
from qkv.core.errors import UsageError


@pytest.mark.parametrize("native", [True, False])
def test_auto_takes_bf16_only_where_the_gpu_computes_in_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ampere, GPUs emulate bf16, which PyTorch also counts as support."""

    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    gpu = torch.device("cuda")
    assert choose_precision("auto", gpu) == (torch.bfloat16 if native else torch.float32)
    assert choose_precision("bf16", gpu) == torch.bfloat16
    assert choose_precision("auto", torch.device("cpu")) == torch.float32


def test_a_process_alone_changes_nothing() -> None:
    tensor = torch.arange(3.0)
    ALONE.sum([tensor])
    assert tensor.tolist() == [0, 1, 2]
    assert (ALONE.first, ALONE.broadcast("word"), ALONE.largest(7)) == (True, "word", 7)
    assert ALONE.gather({"a": tensor})["a"] is not None
    assert torch.equal(ALONE.part(tensor, tensor), tensor)


def test_auto_prefers_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def empty(*_: object, device: torch.device) -> None:
        asked.append(str(device))

    monkeypatch.setattr(torch, "empty", empty)
    for cuda, mps, chosen in [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert str(choose_device()) == chosen
    assert asked == ["cuda", "mps", "cpu"], "a device is tried before it is used"


def test_a_device_with_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    assert str(choose_device("cuda")) == "cuda"
    assert str(choose_device("cuda:1")) == "cuda:1"
    assert current == ["cuda:1"]


@pytest.mark.parametrize("name", ["cuda", "gpu", "cuda:x"])
def test_a_device_that_cannot_be_used_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, device: torch.device) -> None:
        raise AssertionError("Torch not compiled with CUDA\nand more lines")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(UsageError, match=rf'^device "{name}" cannot be used \(.*\): use auto or cpu$'):
        choose_device(name)


def test_cudnn_attention_is_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    choose_device("cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_precisions_by_name() -> None:
    assert choose_precision("fp32", torch.device("cuda")) == torch.float32
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_ranks_after_the_first_write_nothing() -> None:
    second = World(1, 2)
    assert (second.first, second.size, World().first, World().size) == (False, 2, True, 1)
    assert second.gather({"a": torch.ones(1)}) == {}
    gathered = World(0, 2).gather({"a": torch.ones(1, requires_grad=True)})
    assert not gathered["a"].requires_grad
