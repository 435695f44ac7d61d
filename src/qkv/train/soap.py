"""SOAP (Vyas et al., 2024): Adam in the eigenbases of Shampoo's covariances of a gradient's rows and columns.

The bases follow the covariances slowly: every few steps, by one step of an orthogonal iteration. That needs a
decomposition which is slow on a GPU and cannot be captured, so it has a method of its own, `refresh`: `step` calls it
when it is due; who replays a captured step calls it in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.train.matrices import Group, MatrixOptimizer, by_shape, lying, zero

EVERY = 10  # steps between two refreshments of the bases
LARGEST = 2048  # a side longer than this keeps its own basis: the decomposition would take too long


@dataclass(frozen=True)
class Matrix:
    """One matrix: views of its weight, gradient and moments, and its own slots in the state of the parameter."""

    weight: Tensor
    grad: Tensor
    average: Tensor
    square: Tensor  # in the eigenbases
    state: dict[str, Tensor]
    number: int  # in the parameter

    def slot(self, name: str) -> Tensor | None:
        return self.state.get(f"{name}.{self.number}")

    def covariance(self, side: str, like: Tensor) -> Tensor:
        """That of a side, made with its basis where there is none."""
        if self.slot(side) is None:
            self.state[f"{side}.{self.number}"] = torch.zeros_like(like)
            self.state[f"{side}_basis.{self.number}"] = torch.eye(len(like), device=like.device, dtype=like.dtype)
        return self.state[f"{side}.{self.number}"]


class Soap(MatrixOptimizer):
    """SOAP for the matrices inside the layers, AdamW for the rest. `every` = 0 leaves the bases alone: this is Adam.

    Moments are kept where Adam keeps them; matrix number i of a parameter has the slots `left.i` and `right.i`, its
    covariances, and `left_basis.i` and `right_basis.i`.
    """

    def __init__(self, *arguments: Any, every: int = EVERY, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.every = every
        self._calls = -1  # of `step`; the first one looks into the state, which may be that of a resumed run

    def update(self, parameters: list[Tensor], grads: list[Tensor], rows: list[list[int]], group: Group) -> None:
        averages, squares = (self.slots(parameters, name, torch.zeros_like) for name in ("exp_avg", "exp_avg_sq"))
        calls = self.slots(parameters, "calls", zero)
        if self._calls < 0:
            self._calls = int(calls[0])
        self.count(self.slots(parameters, "step", zero))
        grads = self.unless_skipped(grads, averages)
        torch._foreach_lerp_(averages, grads, 1 - group["betas"][0])
        owners = [(self.state[p], i) for p, each in zip(parameters, rows, strict=True) for i in range(len(each))]
        views = (lying(tensors, rows) for tensors in ([p.detach() for p in parameters], grads, averages, squares))
        found = [Matrix(*four, *owner) for *four, owner in zip(*views, owners, strict=True)]
        stacks = [[found[i] for i in places] for places in by_shape([matrix.weight for matrix in found])]
        for stack in stacks:
            self._observe(stack, group)
        if self.every and self._calls % self.every == 0:
            self.refresh(first=self._calls == 0)
        torch._foreach_add_(calls, 1)
        self._calls += 1
        self.decay(parameters, group)
        for stack in stacks:
            self._descend(stack, group)

    def _observe(self, stack: list[Matrix], group: Group) -> None:
        """Average GGᵀ and GᵀG over the steps, for matrices of one shape."""
        grad = torch.stack([matrix.grad for matrix in stack])  # (matrices, rows, columns)
        for side, size in zip(("left", "right"), grad.shape[1:], strict=True):
            if size <= LARGEST:
                new = list((grad @ grad.mT if side == "left" else grad.mT @ grad).unbind())
                old = [matrix.covariance(side, new[0]) for matrix in stack]
                torch._foreach_lerp_(old, self.unless_skipped(new, old), 1 - group["betas"][1])

    def _descend(self, stack: list[Matrix], group: Group) -> None:
        """Adam's step in the eigenbases, for matrices of one shape."""
        beta1, beta2 = group["betas"]
        left, right = (_stacked([matrix.slot(f"{side}_basis") for matrix in stack]) for side in ("left", "right"))
        step = torch.stack([matrix.state["step"] for matrix in stack])[:, None, None]
        grad = _turned(torch.stack([matrix.grad for matrix in stack]), left, right)  # (matrices, rows, columns)
        squares = [matrix.square for matrix in stack]
        torch._foreach_lerp_(squares, self.unless_skipped(list(grad.square().unbind()), squares), 1 - beta2)
        scale = (torch.stack(squares) / (1 - beta2**step)).sqrt_().add_(group["eps"])
        average = _turned(torch.stack([matrix.average for matrix in stack]), left, right) / (1 - beta1**step)
        back = _turned(average / scale, None if left is None else left.mT, None if right is None else right.mT)
        torch._foreach_sub_([matrix.weight for matrix in stack], list((back * self.rate(group)).unbind()))

    @torch.no_grad()
    def refresh(self, *, first: bool = False) -> None:
        """Turn the bases towards the eigenvectors of the covariances, or into them the `first` time.

        They stay in order of their eigenvalues, and the second moments follow, so that both keep belonging together.
        """
        group = self.param_groups[0]
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            state = self.state[parameter]
            squares = lying([state["exp_avg_sq"]], [rows]) if "exp_avg_sq" in state else []
            for number, square in enumerate(squares):
                for dim, side in enumerate(("left", "right")):
                    if f"{side}.{number}" not in state:
                        continue
                    covariance, basis = state[f"{side}.{number}"], state[f"{side}_basis.{number}"]
                    if first:
                        basis.copy_(torch.linalg.eigh(covariance).eigenvectors.flip(-1))
                        continue
                    seen = covariance @ basis
                    order = (basis * seen).sum(0).argsort(descending=True, stable=True)
                    basis.copy_(torch.linalg.qr(seen[:, order]).Q)
                    square.copy_(square.index_select(dim, order))


def _turned(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """LᵀxR: x (matrices, rows, columns) as its bases see it."""
    if left is not None:
        x = left.mT @ x
    return x if right is None else x @ right


def _stacked(bases: list[Tensor | None]) -> Tensor | None:
    known = [basis for basis in bases if basis is not None]
    return torch.stack(known) if known else None
