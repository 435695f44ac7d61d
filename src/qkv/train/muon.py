"""Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal, is the step that it takes.

All directions in which a matrix can change are then learned at one speed. torch.optim.Muon takes one matrix at a time,
reads the learning rate on the host and sees the parameter of W^Q, W^K and W^V as one matrix; this one does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.train.matrices import Group, MatrixOptimizer, by_shape, lying

MOMENTUM = 0.95
RMS = 0.2  # about that of Adam's steps, so that one learning rate serves both (Liu et al., 2025)

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
    """The orthogonal matrices nearest to x (…, rows, columns), no higher than wide: x = UΣVᵀ gives about UVᵀ.

    A Newton–Schulz iteration, which is products of matrices alone: in bf16 on a GPU, where that is all they need.
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
        ahead = lying(torch._foreach_lerp(grads, momenta, MOMENTUM), rows)
        self.decay(parameters, group)
        places = lying([p.detach() for p in parameters], rows)
        for stack in by_shape(ahead):
            steps = orthogonal(torch.stack([ahead[i] for i in stack]))  # (matrices, rows, columns)
            steps = steps * (self.rate(group) * RMS * math.sqrt(steps.shape[-1]))
            torch._foreach_sub_([places[i] for i in stack], list(steps.to(places[stack[0]].dtype).unbind()))
