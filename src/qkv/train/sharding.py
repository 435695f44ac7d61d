"""Weights, gradients and optimiser state divided among the ranks (FSDP2), and put together to be kept.

A sharded tensor is one of torch's DTensors. Each rank holds a part of it; a layer's weights are gathered while it is
computed. These functions let plain tensors pass as they are, so that callers need not know which they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from qkv.train.distributed import World
from qkv.train.memory import layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(model: nn.Module, device: torch.device, world: World) -> None:
    """Divide a model among the ranks, layer by layer; its gradients are then sums over all ranks by themselves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world.size,))
    for module in [*layers(model), model]:
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a sum, where the mean is usual
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "full_tensor")  # to ask by its name would import it, which takes over a second


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The tensors put together on rank 0, nothing on the others; sharded ones need all ranks to ask at once."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        full = tensor.full_tensor().cpu() if is_sharded(tensor) else tensor
        if world.first:
            gathered[name] = full
    return gathered


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, divided and placed like another one."""
    tensor = tensor.to(like.device)
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every rank has all of it and takes its own: nothing is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def norm(tensors: list[Tensor], world: World) -> Tensor:
    """The norm of all tensors together, each whole, the same on every rank."""
    own: list[Tensor] = [_local(tensor) for tensor in tensors]
    total: Any = torch.nn.utils.get_total_norm(own)
    if not any(is_sharded(tensor) for tensor in tensors):
        return torch.as_tensor(total)
    square = torch.as_tensor(total).square()
    world.sum([square])
    return square.sqrt()


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a number, in place."""
    torch._foreach_mul_([_local(tensor) for tensor in tensors], factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor
