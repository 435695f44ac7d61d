"""Muon and SOAP for the matrices inside the layers, with AdamW for all other parameters.

A step consists of tensor operations and never waits for the device, so a CUDA graph can capture it; the learning rate
may be a tensor. As in torch's fused Adam, the attribute `found_inf` = 1 skips a step on the device, and gradients are
divided by the attribute `grad_scale`. The training step sets both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qkv.core.attention import MultiHeadAttention
from qkv.core.transformer import Model
from qkv.options import TrainConfig

Group = dict[str, Any]


def matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """Return the weights of the linear maps inside the layers, and the number of rows of each matrix in them.

    W^Q, W^K and W^V are three matrices in one parameter, the gates of a recurrent cell three or four. Embeddings,
    positions and the output are tables of vectors, not linear maps between spaces, so they are left to AdamW.
    """
    found: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.setdefault(module.weight, [len(module.weight)])
        elif isinstance(module, MultiHeadAttention):
            found[module.qkv.weight] = [module.heads * width for width in (module.d_k, module.d_k, module.d_v)]
        elif isinstance(module, nn.RNNBase):
            for weight in module.parameters():
                if weight.dim() == 2:
                    found[weight] = [module.hidden_size] * (len(weight) // module.hidden_size)
    if isinstance(model, Model):
        found.pop(model.output.weight)
    return found


def as_wide_matrices(tensors: Iterable[Tensor], rows: Iterable[list[int]]) -> list[Tensor]:
    """Return views of the matrices in these tensors, tall ones transposed, so that equal shapes can be batched."""
    parts = (part for tensor, each in zip(tensors, rows, strict=True) for part in tensor.split(each))
    return [part if part.shape[0] <= part.shape[1] else part.mT for part in parts]


def by_shape(pieces: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of the pieces by shape, so that each group can be computed as one stack."""
    places: dict[torch.Size, list[int]] = {}
    for place, piece in enumerate(pieces):
        places.setdefault(piece.shape, []).append(place)
    return list(places.values())


def decay_groups(parameters: Sequence[Tensor], weight_decay: float) -> list[Group]:
    """Divide parameters into those with weight decay, and norms and biases without."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def build_adamw(model: nn.Module, options: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW: Adam with decoupled weight decay, without decay of norms and biases."""
    groups = decay_groups(list(model.parameters()), options.weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """Base class: the first group holds the matrices, the other groups are updated by AdamW."""

    _step_supports_amp_scaling = True  # torch's GradScaler then does not apply these two itself
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, model: nn.Module, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-9, weight_decay: float = 0
    ) -> None:
        inside = matrices(model)
        groups: list[Group] = [
            {"params": list(inside), "rows": list(inside.values()), "weight_decay": weight_decay},
            *decay_groups([p for p in model.parameters() if p not in inside], weight_decay),
        ]
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})

    @abstractmethod
    def update(self, parameters: list[Tensor], grads: list[Tensor], rows: list[list[int]], group: Group) -> None:
        """Update the matrices in these parameters; `unless_skipped` and `rate` make a skipped step change nothing."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        inside, *rest = self.param_groups
        for group in rest:
            self._adamw(group)
        learned = [(p, rows) for p, rows in zip(inside["params"], inside["rows"], strict=True) if p.grad is not None]
        if learned:
            parameters = [p for p, _ in learned]
            grads = [p.grad for p in parameters]
            if self.grad_scale is not None:
                grads = [grad / self.grad_scale for grad in grads]
            self.update(parameters, grads, [rows for _, rows in learned], inside)

    def rate(self, group: Group) -> Tensor | float:
        """Return the learning rate: zero in a skipped step."""
        rate: Tensor | float = group["lr"]
        return rate if self.found_inf is None else rate * (1 - self.found_inf)

    def unless_skipped(self, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
        """Return the new tensors, or the old ones in a skipped step, so that averages of the two do not change."""
        if self.found_inf is None:
            return new
        return [torch.where(self.found_inf > 0, before, now) for now, before in zip(new, old, strict=True)]

    def slots(self, parameters: Iterable[Tensor], name: str, make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the state under this name; create missing state."""
        found = []
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = make(parameter)
            found.append(state[name])
        return found

    def decay(self, parameters: list[Tensor], group: Group) -> None:
        """Decoupled weight decay."""
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - self.rate(group) * group["weight_decay"])

    def _adamw(self, group: Group) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],
            self.slots(parameters, "exp_avg", torch.zeros_like),
            self.slots(parameters, "exp_avg_sq", torch.zeros_like),
            [],
            self.slots(parameters, "step", zero),
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def zero(parameter: Tensor) -> Tensor:
    """Return a counter on the parameter's device."""
    return torch.zeros((), device=parameter.device)


# ---- Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal, is the step that it takes ----------------


MOMENTUM = 0.95
RMS = 0.2  # about that of Adam's steps, so that both can have one learning rate (Liu et al., 2025)

# a, b and c of x ← ax + bx³ + cx⁵, one line a step: together the best polynomial of their kind for singular values
# between 0.001 and 1 (Amsel et al., 2025: Polar Express). They allow for a norm 2 % above the true one.
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonal(x: Tensor) -> Tensor:
    """Return the orthogonal matrices nearest to x (…, rows, columns), rows ≤ columns: about UVᵀ for x = UΣVᵀ.

    A Newton–Schulz iteration uses matrix products only; on a GPU, bf16 is precise enough for it.
    """
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)  # no singular value above 1
    for a, b, c in POLAR:
        square = x @ x.mT  # (…, rows, rows)
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon(MatrixOptimizer):
    """Muon with Nesterov's momentum for the matrices inside the layers, AdamW for the rest."""

    def update(self, parameters: list[Tensor], grads: list[Tensor], rows: list[list[int]], group: Group) -> None:
        momenta = self.slots(parameters, "momentum_buffer", torch.zeros_like)
        grads = self.unless_skipped(grads, momenta)
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        ahead = as_wide_matrices(torch._foreach_lerp(grads, momenta, MOMENTUM), rows)
        self.decay(parameters, group)
        places = as_wide_matrices([p.detach() for p in parameters], rows)
        for stack in by_shape(ahead):
            steps = orthogonal(torch.stack([ahead[i] for i in stack]))  # (matrices, rows, columns)
            steps = steps * (self.rate(group) * RMS * math.sqrt(steps.shape[-1]))
            torch._foreach_sub_([places[i] for i in stack], list(steps.to(places[stack[0]].dtype).unbind()))


# ---- SOAP (Vyas et al., 2024): Adam in the eigenbases of Shampoo's covariances of a gradient's rows and c ------------


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
        """Return the running covariance of the gradients on one side; create it and its basis if they are missing."""
        if self.slot(side) is None:
            self.state[f"{side}.{self.number}"] = torch.zeros_like(like)
            self.state[f"{side}_basis.{self.number}"] = torch.eye(len(like), device=like.device, dtype=like.dtype)
        return self.state[f"{side}.{self.number}"]


class Soap(MatrixOptimizer):
    """SOAP for the matrices inside the layers, AdamW for the rest; with `every` = 0 it is Adam.

    Moments are kept where Adam keeps them; matrix number i of a parameter has the slots `left.i` and `right.i`, its
    covariances, and `left_basis.i` and `right_basis.i`.
    """

    def __init__(self, *arguments: Any, every: int = EVERY, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.every = every
        self._calls = -1  # of `step`; the first call reads it from the state of a resumed run

    def update(self, parameters: list[Tensor], grads: list[Tensor], rows: list[list[int]], group: Group) -> None:
        averages, squares = (self.slots(parameters, name, torch.zeros_like) for name in ("exp_avg", "exp_avg_sq"))
        calls = self.slots(parameters, "calls", zero)
        if self._calls < 0:
            self._calls = int(calls[0])
        steps = self.slots(parameters, "step", zero)
        counted = torch.ones_like(steps[0]) if self.found_inf is None else 1 - self.found_inf.reshape(())
        torch._foreach_add_(steps, [counted] * len(steps))
        grads = self.unless_skipped(grads, averages)
        torch._foreach_lerp_(averages, grads, 1 - group["betas"][0])
        owners = [(self.state[p], i) for p, each in zip(parameters, rows, strict=True) for i in range(len(each))]
        views = (
            as_wide_matrices(tensors, rows) for tensors in ([p.detach() for p in parameters], grads, averages, squares)
        )
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
        """Update the averages of GGᵀ and GᵀG, for matrices of one shape."""
        grad = torch.stack([matrix.grad for matrix in stack])  # (matrices, rows, columns)
        for side, size in zip(("left", "right"), grad.shape[1:], strict=True):
            if size <= LARGEST:
                new = list((grad @ grad.mT if side == "left" else grad.mT @ grad).unbind())
                old = [matrix.covariance(side, new[0]) for matrix in stack]
                torch._foreach_lerp_(old, self.unless_skipped(new, old), 1 - group["betas"][1])

    def _descend(self, stack: list[Matrix], group: Group) -> None:
        """Take Adam's step in the eigenbases, for matrices of one shape."""
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
        """Rotate the bases towards the eigenvectors of the covariances; the `first` time, compute these.

        The bases stay sorted by eigenvalue; the second moments are permuted in the same way.
        """
        group = self.param_groups[0]
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            state = self.state[parameter]
            squares = as_wide_matrices([state["exp_avg_sq"]], [rows]) if "exp_avg_sq" in state else []
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
    """Return LᵀxR: x (matrices, rows, columns) in the eigenbases."""
    if left is not None:
        x = left.mT @ x
    return x if right is None else x @ right


def _stacked(bases: list[Tensor | None]) -> Tensor | None:
    known = [basis for basis in bases if basis is not None]
    return torch.stack(known) if known else None
