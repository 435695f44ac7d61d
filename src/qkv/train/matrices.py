"""What Muon and SOAP have in common: a rule of their own for the matrices inside the layers, AdamW for everything else.

A step is made of tensor operations alone and never waits for the device, so it can be captured in a CUDA graph; the
learning rate may be a tensor there. As with torch's fused Adam, a step is left out on the device itself where the
tensor `found_inf` is 1, and gradients are divided by the tensor `grad_scale`. Both are attributes that a caller sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qkv.models.attention import MultiHeadAttention
from qkv.models.base import Model

Group = dict[str, Any]


def matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """The weights of the linear maps inside the layers, and how many rows each matrix that lies in them has.

    W^Q, W^K and W^V are three matrices in one parameter, the gates of a recurrent cell three or four. Embeddings,
    positions and the output are tables of vectors and no maps of a space to another: they are not here.
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


def lying(tensors: Iterable[Tensor], rows: Iterable[list[int]]) -> list[Tensor]:
    """Views of the matrices in these tensors, each at least as wide as high: what is alike then has one shape."""
    parts = (part for tensor, each in zip(tensors, rows, strict=True) for part in tensor.split(each))
    return [part if part.shape[0] <= part.shape[1] else part.mT for part in parts]


def by_shape(pieces: Sequence[Tensor]) -> list[list[int]]:
    """Places of the pieces, those of one shape together, so that they can be worked on as one stack."""
    places: dict[torch.Size, list[int]] = {}
    for place, piece in enumerate(pieces):
        places.setdefault(piece.shape, []).append(place)
    return list(places.values())


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """The frame: the first group holds the matrices, the others what AdamW takes care of."""

    _step_supports_amp_scaling = True  # so torch's GradScaler leaves both of these to the step
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, model: nn.Module, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-9, weight_decay: float = 0
    ) -> None:
        inside = matrices(model)
        rest = [p for p in model.parameters() if p not in inside]
        groups: list[Group] = [
            {"params": list(inside), "rows": list(inside.values()), "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})

    @abstractmethod
    def update(self, parameters: list[Tensor], grads: list[Tensor], rows: list[list[int]], group: Group) -> None:
        """One step of the matrices in these parameters; what `unless_skipped` and `rate` say holds for it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss

    def rate(self, group: Group) -> Tensor | float:
        """The learning rate: zero in a step that is left out."""
        rate: Tensor | float = group["lr"]
        return rate if self.found_inf is None else rate * (1 - self.found_inf)

    def unless_skipped(self, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
        """These tensors, or the ones before them in a step that is left out: what averages both does not change."""
        if self.found_inf is None:
            return new
        return [torch.where(self.found_inf > 0, before, now) for now, before in zip(new, old, strict=True)]

    def count(self, steps: list[Tensor]) -> None:
        """One more step for each, but where it is left out."""
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf.reshape(())] * len(steps))

    def slots(self, parameters: Iterable[Tensor], name: str, make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The state under this name, made where there is none."""
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
    """A counter beside a parameter."""
    return torch.zeros((), device=parameter.device)
