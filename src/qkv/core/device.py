"""Device, precision, and the processes that train one model together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qkv.core.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device, or for auto the fastest available one; refuse a device that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f'device "{name}" cannot be used ({reason}): use auto or cpu') from None
    if device.type == "cuda" and device.index is not None:  # kernels and graphs run on the current one
        torch.cuda.set_device(device)
    # cuDNN's attention makes a plan for every new shape, which takes longer than the attention of a whole epoch.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return bf16 where it is chosen, or for auto on a GPU that computes in it; else fp32."""
    if name == "auto":  # GPUs before Ampere only emulate bf16, which is slower than fp32
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bf16" if native else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


class World:
    """The processes that train one model together; this class is one process alone.

    `qkv.training.distributed` has the one that torchrun starts. Rank 0 prepares the text, validates and writes files.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.first = rank == 0  # prepares the text, validates, and writes files and messages

    def broadcast(self, word: str = "") -> str:
        """Return rank 0's word on every rank; the other ranks wait for it."""
        return word

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all ranks, in place."""

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are divided among the ranks as whole ones on rank 0, and nothing on the other ranks."""
        return {name: tensor.detach() for name, tensor in tensors.items()} if self.first else {}

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a tensor: divided like a parameter if it has its shape, and on its device."""
        return tensor.to(like.device)


ALONE = World()
