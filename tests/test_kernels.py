"""Every kernel equals its plain twin; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = """
import torch
from torch import nn
from qkv.models import kernels

torch.manual_seed(0)
inf = float("inf")

def close(a, b, tolerance=2e-5):
    assert torch.equal(a.isinf(), b.isinf())
    assert float((a - b).nan_to_num(0, 0, 0).abs().max()) < tolerance, float((a - b).abs().max())

# lookup: rows of several lengths, keys in other rows, a window, a new key and value to be stored
for window in (0, 5):
    for fresh in (False, True):
        q, keys, values = torch.randn(6, 2, 24), torch.randn(6, 40, 2, 24), torch.randn(6, 40, 2, 16)
        origin, length = torch.randint(0, 6, (6, 40)).int(), torch.tensor([1, 2, 32, 33, 39, 7])
        new = (torch.randn(6, 2, 24), torch.randn(6, 2, 16)) if fresh else None
        if fresh:
            origin.scatter_(1, length[:, None], torch.arange(6)[:, None].int())
        twins = keys.clone(), values.clone()
        plain = kernels.lookup_plain(q, *twins, origin, length, scale=0.3, window=window, new=new)
        close(kernels.lookup_kernel(q, keys, values, origin, length, scale=0.3, window=window, new=new), plain)
        assert torch.equal(keys, twins[0])
        assert torch.equal(values, twins[1])

norm = nn.LayerNorm(24)
norm.weight.data.normal_()
norm.bias.data.normal_()
x, y = torch.randn(3, 5, 24), torch.randn(3, 5, 24)
with torch.no_grad():
    close(kernels.add_norm_kernel(x, y, norm), norm(x + y))

for vocab in (70, 4096 + 37):
    for early in (None, torch.tensor([True, False, True, False, False])):
        logits = torch.randn(5, vocab) * 3
        logits[4, 3:] = -inf
        twin = logits.clone()
        plain = kernels.scan_plain(twin, torch.tensor([0, 1]), early, 2)
        found = kernels.scan_kernel(logits, torch.tensor([0, 1]), early, 2)
        close(found[0], plain[0])
        close(found[1], plain[1])
        assert torch.equal(logits, twin)

for count, k in ((5, 1), (5, 4), (37, 8), (600, 8)):
    values = torch.randn(7, count)
    values[:, ::3] = values[:, :1]  # equals
    values[2], values[3, 2:] = -inf, -inf
    best, places = values.sort(dim=1, descending=True, stable=True)
    found = kernels.top_kernel(values, k)
    assert torch.equal(found[0], best[:, :k])
    assert torch.equal(found[1], places[:, :k])
values = torch.full((2, 100), float("nan"))  # what broken weights give
values[1, 40] = 1.0
best, places = kernels.top_kernel(values, 4)
assert int(places.max()) < 100
assert best[0].tolist() == [-inf] * 4
assert (best[1, 0], places[1, 0]) == (1.0, 40)
print("equal")
"""


def test_kernels_equal_their_plain_twins() -> None:
    pytest.importorskip("triton", reason="Triton is not on this platform")
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", CHECKS], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("equal"), run.stderr
