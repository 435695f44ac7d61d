"""Training by several processes, started by torchrun: who they are, sums over them, and how they end together.

Words pass through torchrun's store: rank 0 prepares, validates and writes, and the others wait for its word, for as
long as it takes. Tensors are summed by gloo on a CPU and by NCCL on a GPU. A process alone is a world of one, which
sums and waits for nothing.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from qkv.core.errors import QkvError, UsageError
from qkv.core.transformer import Model
from qkv.training.memory_limits import layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun says to each process
BUCKET = 1 << 24  # numbers summed at once: few messages, and little memory beside the gradients
POLL = 0.02  # seconds between two looks for rank 0's word
GRACE = 20  # seconds to stop in good order after a signal; torchrun kills 10 seconds later
_worlds = itertools.count()


@dataclass
class World:
    """The processes that train one model together, as one of them sees them."""

    rank: int = 0
    size: int = 1
    store: Any = None  # torchrun's, for words
    words: int = 0  # said by rank 0 so far

    @property
    def first(self) -> bool:
        """Whether this one prepares the text, validates, writes and speaks."""
        return self.rank == 0

    def tell(self, word: str = "") -> str:
        """What rank 0 says, on every rank; the others wait for it, for as long as it takes, and heed signals."""
        if self.store is None:
            return word
        key = f"word {self.words}"
        self.words += 1
        if self.first:
            self.store.set(key, word)
            return word
        while not self.store.check([key]):
            time.sleep(POLL)
        return str(self.store.get(key), "utf-8")

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the tensors of rank 0, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place."""
        if self.size > 1:
            for bucket in _buckets(tensors):
                if len(bucket) == 1:
                    dist.all_reduce(bucket[0])
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def check(self, device: torch.device) -> None:
        """Refuse a device that is not this process's own."""
        if self.size == 1 or device.type == "cpu":
            return
        if str(device) != "cuda":
            raise UsageError(f"train.device = {device}: every process of several takes its own: use auto, cuda or cpu")
        if (local := _local_rank()) >= torch.cuda.device_count():
            raise UsageError(
                f"process {local} of this machine, but it has {torch.cuda.device_count()} GPUs: "
                f"start one for each with --nproc-per-node, or set train.device=cpu"
            )


ALONE = World()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in groups of one type and of about `BUCKET` numbers."""
    for _, alike in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        for tensor in alike:
            bucket.append(tensor)
            if sum(each.numel() for each in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


@contextmanager
def joined() -> Iterator[World]:
    """This process among those that torchrun started, or alone; a failure inside is told with its rank."""
    if not all(name in os.environ for name in ENVIRONMENT) or os.environ["WORLD_SIZE"] == "1":
        yield World()
        return
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if gpus and _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())
    store, rank, size = next(iter(rendezvous("env://")))
    store = dist.PrefixStore(f"qkv {next(_worlds)}", store)  # type: ignore[attr-defined]  # what was said before is past
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=size)
    world = World(rank, size, store)
    with _limited_patience():
        try:
            yield world
        except Exception as error:  # without farewell: the others should learn of it from torchrun first
            _blame(world, error)
            raise
        dist.destroy_process_group()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _blame(world: World, error: Exception) -> None:
    """Say which rank failed, in its message and to torchrun; one that only lost another says which and why."""
    own = f"rank {world.rank} of {world.size}"
    if hasattr(error, "exit_code") and not isinstance(error, QkvError):
        return  # stopped by a signal, in good order
    if world.store.check(["failed"]):
        earlier = str(world.store.get("failed"), "utf-8")
        raise QkvError(f"{own} stops because another failed: {earlier}") from None
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        raise QkvError(f"{own} stops because another is gone without a word: see what torchrun says of it") from error
    world.store.set("failed", f"rank {world.rank}: {type(error).__name__}: {error}")
    if isinstance(error, QkvError):
        error.args = (f"{own}: {error}",)
    else:
        error.add_note(f"This was {own}.")
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)  # for the summary with which torchrun ends


@contextmanager
def _limited_patience() -> Iterator[None]:
    """End the process some time after a signal, whatever it does: it may wait for a rank that is no more.

    Python's own handlers run between two instructions of Python, and a collective that never returns has none. So a
    thread hears of signals from the interpreter, and sets a clock that needs neither.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hear, tell = socket.socketpair()
    tell.setblocking(False)

    def listen() -> None:
        while heard := hear.recv(1):
            if heard[0] in (signal.SIGTERM, signal.SIGINT):
                faulthandler.dump_traceback_later(GRACE, exit=True, file=sys.__stderr__ or sys.stderr)

    before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
        faulthandler.cancel_dump_traceback_later()
    finally:
        signal.set_wakeup_fd(before)
        tell.close()
        thread.join()
        hear.close()


# ---- Weights, gradients and optimiser state divided among the ranks (FSDP2), and put together to be kept -------------


def shard(model: nn.Module, device: torch.device, world: World) -> None:
    """Divide a model among the ranks, layer by layer; its gradients are then sums over all ranks by themselves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world.size,))
    for module in [*layers(model), model]:
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    if isinstance(model, Model) and type(model).hidden_at is not Model.hidden_at:  # else it calls `hidden`
        register_fsdp_forward_method(model, "hidden_at")
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
