"""Which device and precision to compute on."""

from __future__ import annotations

import torch

from qkv.core.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """The named device, or the best there is; one that is not there is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f'device "{name}" cannot be used ({reason}): use auto or cpu') from None
    if device.type == "cuda" and device.index is not None:  # kernels and graphs are launched on the current one
        torch.cuda.set_device(device)
    # cuDNN's attention plans anew for every shape it meets, which takes longer than the attention of a whole epoch.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """bf16 where asked for, or where a GPU computes in it; fp32 elsewhere."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def describe(device: torch.device) -> str:
    """The device in words, e.g. `cpu, threads: 2`."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, threads: {torch.get_num_threads()}"
    return str(device)
