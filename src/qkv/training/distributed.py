"""Training by several processes that torchrun started: sums over them, sharded weights, and a common end.

Words pass through torchrun's store: rank 0 prepares, validates and writes, and the other ranks wait for its word, for
as long as it takes. Tensors are summed by gloo on a CPU and by NCCL on a GPU.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from qkv.core.batches import Batch, Update, UpdateStream
from qkv.core.device import World
from qkv.core.errors import QkvError, UsageError
from qkv.core.run import load_weights
from qkv.core.trainer import PlainTrainStep
from qkv.core.transformer import Model
from qkv.training import memory_limits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET = 1 << 24  # numbers summed at once: few messages, and little memory beside the gradients
POLL = 0.02  # seconds between two queries for rank 0's word
GRACE = 20  # seconds to stop in good order after a signal; torchrun kills 10 seconds later
_worlds = itertools.count()


class TorchrunWorld(World):
    """The processes of torchrun that train one model together."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)
        self.store = store  # torchrun's, for words
        self.words = 0  # of rank 0 so far

    def broadcast(self, word: str = "") -> str:
        """Return rank 0's word on every rank; the other ranks wait for it and react to signals meanwhile."""
        key = f"word {self.words}"
        self.words += 1
        if self.first:
            self.store.set(key, word)
            return word
        while not self.store.check([key]):
            time.sleep(POLL)
        return str(self.store.get(key), "utf-8")

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place."""
        for bucket in _buckets(tensors):
            if len(bucket) == 1:
                dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        maximum = torch.tensor(number)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on rank 0, nothing on the other ranks; sharded ones need the call on all ranks."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            full = tensor.full_tensor().cpu() if is_sharded(tensor) else tensor
            if self.first:
                gathered[name] = full
        return gathered

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a tensor; counts and scalars of an optimizer are the same on all ranks."""
        tensor = tensor.to(like.device)
        if not is_sharded(like) or tensor.shape != like.shape:
            return tensor
        from torch.distributed.tensor import distribute_tensor

        # Each rank cuts its part from the whole tensor: nothing is sent.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def check_device(device: torch.device) -> None:
    """Refuse a device that the processes of a training would have to share: each takes a GPU of its own."""
    if device.type == "cpu":
        return
    if str(device) != "cuda":
        raise UsageError(f"train.device = {device}: each of several processes takes its own GPU: use auto, cuda or cpu")
    if (local := _local_rank()) >= torch.cuda.device_count():
        raise UsageError(
            f"process {local} of this machine, but it has {torch.cuda.device_count()} GPUs: "
            f"start one for each with --nproc-per-node, or set train.device=cpu"
        )


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to every rank, in place."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


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
    """Join the processes that torchrun started; the message of a failure inside names its rank."""
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if gpus and _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())
    store, rank, size = next(iter(rendezvous("env://")))
    store = dist.PrefixStore(f"qkv {next(_worlds)}", store)  # type: ignore[attr-defined]  # a new prefix hides the words of earlier trainings
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=size)
    world = TorchrunWorld(rank, size, store)
    with _limited_patience():
        try:
            yield world
        except Exception as error:  # without farewell: the others should learn of it from torchrun first
            _blame(world, error)
            raise
        dist.destroy_process_group()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _blame(world: TorchrunWorld, error: Exception) -> None:
    """Say which rank failed, in its message and to torchrun; one that only lost another says which and why."""
    own = f"rank {world.rank} of {world.size}"
    if hasattr(error, "exit_code") and not isinstance(error, QkvError):
        return  # stopped by a signal, in good order
    if world.store.check(["failed"]):
        earlier = str(world.store.get("failed"), "utf-8")
        raise QkvError(f"{own} stops because another failed: {earlier}") from None
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        raise QkvError(
            f"{own} stops because another ended without an error message: see the output of torchrun"
        ) from error
    world.store.set("failed", f"rank {world.rank}: {type(error).__name__}: {error}")
    if isinstance(error, QkvError):
        error.args = (f"{own}: {error}",)
    else:
        error.add_note(f"This was {own}.")
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)  # for the summary of torchrun


@contextmanager
def _limited_patience() -> Iterator[None]:
    """End the process `GRACE` seconds after a signal, even if it waits in a collective for a rank that has ended.

    Python runs signal handlers between bytecode instructions, so never inside a collective that does not return. The
    interpreter also writes each signal to a socket: a thread reads it and starts a timer that runs outside Python.
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


# ---- weights, gradients and optimizer state divided among the ranks (FSDP2) ------------------------------------------


class ShardedTrainStep(PlainTrainStep):
    """Plain training step on sharded weights; their gradients arrive summed over the ranks."""

    def __init__(self, *arguments: Any, updates: UpdateStream, build: Callable[[], Model], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.updates, self.build = updates, build

    def gradients(self, update: Update) -> Tensor:
        """Accumulate gradients; a rank with fewer micro-batches adds empty ones, since every pass needs all ranks."""
        micros = update.micro_batches
        if missing := self.world.largest(len(micros)) - len(micros):
            micros = micros + [memory_limits.idle(micros[0] if micros else self._one_row)] * missing
        return super().gradients(dataclasses.replace(update, micro_batches=micros))

    @cached_property
    def _one_row(self) -> Batch:
        """A batch of one row, for a rank that has none of its own."""
        return self.updates.batch(self.updates.plan(0)[0][0][:1], (0, 0, 0)).to(self.device)

    def sum_over_ranks(self, sums: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sum `sums`; return this rank's parts of the gradients, and the norm of all of them."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        gradients = [grad.to_local() if is_sharded(grad) else grad for grad in grads]
        square = torch.as_tensor(torch.nn.utils.get_total_norm(gradients)).square()
        self.world.sum([sums])
        self.world.sum([square])
        return gradients, square.sqrt()

    @contextmanager
    def evaluated_model(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[Model]:
        """Give a model with whole weights on rank 0; the other ranks send their parts and get no usable model."""
        if weights is None:
            own = dict(self.model.named_parameters())
            weights = self.world.gather(own if self.average is None else self.average.tensors())
        if not self.world.first:
            yield self.model
            return
        model = self.build()
        load_weights(dict(model.named_parameters()), weights, Path("weights"))
        yield model.eval()


def shard(model: nn.Module, device: torch.device, world: World) -> None:
    """Divide a model among the ranks, layer by layer; its gradients are then sums over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world.size,))
    for module in [*memory_limits.layers(model), model]:
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    if isinstance(model, Model) and type(model).hidden_at is not Model.hidden_at:  # else it calls `hidden`
        register_fsdp_forward_method(model, "hidden_at")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a sum; FSDP's default is the mean
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "full_tensor")  # isinstance would need an import that takes over a second
