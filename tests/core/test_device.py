"""Device and precision: what `auto` chooses."""

from __future__ import annotations

import pytest
import torch

from qkv.core.device import ALONE, choose_precision


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
