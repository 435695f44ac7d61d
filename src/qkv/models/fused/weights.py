"""The parameters of a model as one tensor each of masters, gradients and working copies.

Every parameter becomes a view into the masters, so the optimiser, validation and checkpoints know nothing of it; what
concerns all of them (the norm of the gradient, a moving average, rounding to bf16) is one operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNED = 128  # numbers: every parameter begins at a multiple


class Weight(NamedTuple):
    """A parameter: in fp32, as the products use it, and the sum of its gradients in fp32."""

    master: Tensor
    value: Tensor
    grad: Tensor

    def split(self, rows: int) -> tuple[Weight, Weight]:
        """The first rows of a matrix, and the others."""
        return Weight(*(part[:rows] for part in self)), Weight(*(part[rows:] for part in self))


class Weights:
    """The weights of a model on its device; products are computed in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        parameters = list(model.parameters())
        starts, total = [], 0
        for parameter in parameters:
            starts.append(total)
            total += -(-parameter.numel() // ALIGNED) * ALIGNED
        self.masters = parameters[0].new_zeros(total)
        self.grads = torch.zeros_like(self.masters)
        self.values = self.masters if dtype == torch.float32 else torch.zeros_like(self.masters, dtype=dtype)
        self._starts = starts
        self._shapes = [parameter.shape for parameter in parameters]
        self._of: dict[Tensor, Weight] = {}
        wholes = self.masters, self.values, self.grads
        for parameter, master, value, grad in zip(parameters, *map(self.views, wholes), strict=True):
            master.copy_(parameter.detach())
            parameter.data, parameter.grad = master, grad
            self._of[parameter] = Weight(master, value, grad)
        self.refresh()

    def __getitem__(self, parameter: Tensor) -> Weight:
        return self._of[parameter]

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parts of a tensor like the masters that belong to each parameter."""
        return [
            whole[start : start + shape.numel()].view(shape)
            for start, shape in zip(self._starts, self._shapes, strict=True)
        ]

    def refresh(self) -> None:
        """Round the masters to the working copies: after every change of them."""
        if self.values is not self.masters:
            self.values.copy_(self.masters)


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the precision of the total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
