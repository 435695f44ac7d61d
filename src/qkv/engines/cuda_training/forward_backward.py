"""Hand-written training pass of a Transformer: forward, loss, and the gradients of all weights.

All parameters are views of one tensor of fp32 master weights, with one tensor of gradients and one of copies in bf16,
so that gradient norm, moving average and rounding are one operation each. The sublayers are those of
`qkv.core.transformer`, for unpadded tokens (tokens, d_model); each returns its result and a backward function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import MultiHeadAttention
from qkv.core.transformer import Embedding, FeedForward, Residual, SinusoidalPositions, Transformer
from qkv.engines.cuda_training.attention_kernels import attend, attend_backward
from qkv.engines.cuda_training.elementwise_kernels import (
    DropoutHash,
    Heads,
    Rows,
    gelu,
    relu_dropout,
    relu_dropout_backward,
    rotate_heads,
    swiglu,
    swiglu_backward,
)
from qkv.engines.cuda_training.norm_kernels import Scale, Sums, add_norm, add_norm_backward
from qkv.engines.cuda_training.packed_batch import LONGEST, PackedBatch
from qkv.engines.cuda_training.vocabulary_kernels import (
    Tokens,
    embed,
    embed_backward,
    loss_and_gradient,
    r_drop_loss_and_gradients,
)
from qkv.models.variants import LearnedPositions, VariantFeedForward, rotary_of, score_of

# ---- parameters ------------------------------------------------------------------------------------------------------

ALIGNED = 128  # every parameter starts at a multiple of this many numbers


class Weight(NamedTuple):
    """A parameter: fp32 master, copy in the precision of the products, and fp32 sum of its gradients."""

    master: Tensor
    value: Tensor
    grad: Tensor

    def split(self, rows: int) -> tuple[Weight, Weight]:
        """Split a matrix after `rows` rows."""
        return Weight(*(part[:rows] for part in self)), Weight(*(part[rows:] for part in self))


class FlatWeights:
    """The weights of a model as flat tensors on its device; products are computed in `dtype`."""

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
        flat_tensors = self.masters, self.values, self.grads
        for parameter, master, value, grad in zip(parameters, *map(self.views, flat_tensors), strict=True):
            master.copy_(parameter.detach())
            parameter.data, parameter.grad = master, grad
            self._of[parameter] = Weight(master, value, grad)
        self.refresh()

    def __getitem__(self, parameter: Tensor) -> Weight:
        return self._of[parameter]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of each parameter in a flat tensor with the layout of the masters."""
        return [
            flat[start : start + shape.numel()].view(shape)
            for start, shape in zip(self._starts, self._shapes, strict=True)
        ]

    def refresh(self) -> None:
        """Round the masters to the working copies; call it after every change of the masters."""
        if self.values is not self.masters:
            self.values.copy_(self.masters)


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the precision of the total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


# ---- forward and backward --------------------------------------------------------------------------------------------

LOGITS = 2**30  # maximum logits in memory


class Sublayer(NamedTuple):
    """Result of a sub-layer without its last bias, and its backward function.

    `back` takes the gradient of `result` and optionally a tensor; it returns the gradient of the input plus the tensor.
    """

    result: Tensor
    bias: nn.Parameter | None
    back: Callable[[Tensor, Tensor | None], Tensor]


AnyFeedForward = FeedForward | VariantFeedForward
Step = tuple[nn.Module, Callable[[Tensor], Sublayer]]  # a residual connection and its sub-layer


class ForwardBackward:
    """Forward and backward passes of one model; they add to the gradients in `weights`."""

    def __init__(
        self, model: Transformer, weights: FlatWeights, *, smoothing: float, pad: int, r_drop: float = 0.0
    ) -> None:
        self.model, self.config, self.weights = model, model.config, weights
        self.smoothing, self.pad, self.r_drop = smoothing, pad, r_drop
        self.seed = torch.zeros(2, dtype=torch.int32, device=weights.masters.device)
        # Own copies: longer sentences in a validation replace the tables, but a captured graph uses fixed addresses.
        self.sinusoids: dict[nn.Module | None, Tensor] = {
            part: part(0, LONGEST) for part in model.modules() if isinstance(part, SinusoidalPositions)
        }
        self.sites = {module: site for site, module in enumerate(model.modules())}
        self.first_site = 0

    def run(self, batch: PackedBatch, most: tuple[int, ...] = ()) -> Tensor:
        """Run one pass: return loss and −log p, (2,), summed over the tokens, and add to the gradients.

        `most` is the number of rows of each tile to launch kernels for, by default that of the batch. R-Drop runs two
        passes with different dropout.
        """
        passes = [self._forward(batch, most or batch.counts, number) for number in range(2 if self.r_drop else 1)]
        sums, gradients = self._loss([hidden for hidden, _ in passes], batch.labels)
        for (_, back), gradient in zip(passes, gradients, strict=True):
            back(gradient)
        return sums

    def _forward(
        self, batch: PackedBatch, most: tuple[int, ...], number: int
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the decoder output of each target token, and the backward function to all weights."""
        model, source, target = self.model, batch.source, batch.target
        self.first_site = number * len(self.sites)
        source_rows = Rows(source.starts, source.starts, batch.first, most)
        cross_rows = Rows(target.starts, source.starts, batch.first, most)
        target_rows = Rows(target.starts, target.starts, batch.first, most)
        encoder: list[Step] = []
        for layer in model.encoder:
            encoder.append((layer.residuals[0], self._self_attention(layer.attention, source_rows, source.positions)))
            encoder.append((layer.residuals[1], self._feed_forward(layer.feed_forward)))
        x, back_to_source = self._embed(model.source, source.ids, source.positions)
        memory, back_through_encoder = self._stack(x, encoder, model.encoder_norm)
        encoder_output = _Memory(memory)
        decoder: list[Step] = []
        for block in model.decoder:
            cross = block.cross_attention
            assert isinstance(cross, MultiHeadAttention)
            decoder.append(
                (block.residuals[0], self._self_attention(block.attention, target_rows, target.positions, causal=True))
            )
            decoder.append((block.residuals[1], self._cross_attention(cross, cross_rows, encoder_output)))
            decoder.append((block.residuals[2], self._feed_forward(block.feed_forward)))
        x, back_to_target = self._embed(model.target, target.ids, target.positions)
        hidden, back_through_decoder = self._stack(x, decoder, model.decoder_norm)

        def back(gradient: Tensor) -> None:
            back_to_target(back_through_decoder(gradient))
            assert encoder_output.gradient is not None
            back_to_source(back_through_encoder(encoder_output.gradient))

        return hidden, back

    def _dropout(self, module: nn.Module, rate: float) -> DropoutHash:
        return DropoutHash(rate if self.model.training else 0.0, self.seed, self.first_site + self.sites[module])

    def _scale(self, norm: nn.Module) -> Scale:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        bias = norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None
        assert norm.eps is not None
        return Scale(norm.weight.detach(), bias, norm.eps)

    def _stack(self, x: Tensor, steps: Sequence[Step], last: nn.Module) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run sublayers inside their residual connections; return the result and its backward function.

        Two tensors pass from sublayer to sublayer: the residual sum and its norm. Post-norm, both are the norm;
        pre-norm, each sum is normalised for the next sublayer.
        """
        pre = self.model.config.norm == "pre"
        norms: list[Any] = [residual.norm for residual, _ in steps]
        backward_functions: list[Callable[[Tensor | None, Tensor], tuple[Tensor | None, Tensor]]] = []
        normed = x
        if pre:
            normed, first = self._first_norm(x, norms[0])
            norms = [*norms[1:], last]
            backward_functions.append(first)
        for (residual, sublayer), norm in zip(steps, norms, strict=True):
            x, normed, way = self._residual(x, sublayer(normed), norm, residual, pre)
            backward_functions.append(way)

        def back(gradient: Tensor) -> Tensor:
            d_x: Tensor | None = None
            while backward_functions:  # popping a backward function frees its saved tensors
                d_x, gradient = backward_functions.pop()(d_x, gradient)
            return gradient

        return normed, back

    def _first_norm(self, x: Tensor, norm: nn.Module) -> tuple[Tensor, Callable[[Tensor | None, Tensor], Any]]:
        scale, no_dropout = self._scale(norm), self._dropout(norm, 0.0)
        _, normed = add_norm(x, None, None, scale, no_dropout)

        def back(d_x: Tensor | None, d_normed: Tensor) -> tuple[None, Tensor]:
            return None, add_norm_backward(d_x, d_normed, x, scale, no_dropout, self._sums(norm, None))[0]

        return normed, back

    def _residual(
        self, x: Tensor, output: Sublayer, norm: nn.Module, residual: nn.Module, pre: bool
    ) -> tuple[Tensor, Tensor, Callable[[Tensor | None, Tensor], tuple[Tensor | None, Tensor]]]:
        assert isinstance(residual, Residual)
        scale, dropout = self._scale(norm), self._dropout(residual, residual.dropout.p)
        bias = None if output.bias is None else self.weights[output.bias].master
        z, after = add_norm(x, output.result, bias, scale, dropout)

        def back(d_z: Tensor | None, d_after: Tensor) -> tuple[Tensor | None, Tensor]:
            d_x, d_y = add_norm_backward(d_z, d_after, z, scale, dropout, self._sums(norm, output.bias))
            return (d_x, output.back(d_y, None)) if pre else (None, output.back(d_y, d_x))

        return (z, after, back) if pre else (after, after, back)

    def _sums(self, norm: nn.Module, bias: nn.Parameter | None) -> Sums:
        parameters: tuple[Any, ...] = (norm.weight, getattr(norm, "bias", None), bias)
        weight, shift, other = (None if p is None else self.weights[p].grad for p in parameters)
        assert weight is not None
        return Sums(weight, shift, other)

    def _embed(self, embedding: Embedding, ids: Tensor, places: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        table = self.weights[embedding.tokens.weight]
        dropout = self._dropout(embedding, embedding.dropout.p)
        unseen = self._dropout(embedding.tokens, self.config.token_dropout)
        learned = embedding.positions if isinstance(embedding.positions, LearnedPositions) else None
        positions = self.sinusoids.get(embedding.positions) if learned is None else learned.table.detach()
        tokens = Tokens(ids, places, embedding.scale, dropout, unseen)
        x = embed(tokens, table.value, positions)

        def back(d_x: Tensor) -> None:
            d_positions = None if learned is None else self.weights[learned.table].grad
            embed_backward(d_x, tokens, table.grad, d_positions)

        return x, back

    def _self_attention(
        self, part: MultiHeadAttention, rows: Rows, places: Tensor, *, causal: bool = False
    ) -> Callable[[Tensor], Sublayer]:
        rotated = 2 * part.heads * part.d_k  # columns of queries and keys
        table = self.sinusoids.get(rotary_of(part))

        def forward(x: Tensor) -> Sublayer:
            weight, bias = self._qkv(part)
            qkv = F.linear(x, weight.value, None if bias is None else bias.value)
            if table is not None:
                rotate_heads(qkv[:, :rotated], places, table)
            heads, dropout = _heads(part, causal), self._dropout(part, self.config.attention_dropout)
            parts = qkv.split(_widths(part), dim=1)
            mixed = attend(parts, rows, heads, dropout)

            def back(gradient: Tensor, into: Tensor | None) -> Tensor:
                d_mixed = _linear_back(self.weights[part.output.weight], mixed, gradient, None)
                d_qkv = torch.empty_like(qkv)
                attend_backward(d_mixed, parts, d_qkv.split(_widths(part), dim=1), rows, heads, dropout)
                if table is not None:
                    rotate_heads(d_qkv[:, :rotated], places, table, back=True)
                if bias is not None:
                    bias.grad.add_(d_qkv.sum(0, dtype=torch.float))
                return _linear_back(weight, x, d_qkv, into)

            return Sublayer(F.linear(mixed, self.weights[part.output.weight].value), part.output.bias, back)

        return forward

    def _cross_attention(self, part: MultiHeadAttention, rows: Rows, memory: _Memory) -> Callable[[Tensor], Sublayer]:
        def forward(x: Tensor) -> Sublayer:
            widths = _widths(part)
            weight, bias = self._qkv(part)
            for_q, for_kv = weight.split(widths[0])
            q, kv = F.linear(x, for_q.value), F.linear(memory.values, for_kv.value)
            if bias is not None:
                q, kv = q + bias.value[: widths[0]], kv + bias.value[widths[0] :]
            heads, dropout = _heads(part, causal=False), self._dropout(part, self.config.attention_dropout)
            parts = (q, *kv.split(widths[1:], dim=1))
            mixed = attend(parts, rows, heads, dropout)

            def back(gradient: Tensor, into: Tensor | None) -> Tensor:
                d_mixed = _linear_back(self.weights[part.output.weight], mixed, gradient, None)
                d_q, d_kv = torch.empty_like(q), torch.empty_like(kv)
                attend_backward(d_mixed, parts, (d_q, *d_kv.split(widths[1:], dim=1)), rows, heads, dropout)
                if bias is not None:
                    bias.grad.add_(torch.cat([d_q.sum(0, dtype=torch.float), d_kv.sum(0, dtype=torch.float)]))
                memory.gradient = _linear_back(for_kv, memory.values, d_kv, memory.gradient)
                return _linear_back(for_q, x, d_q, into)

            return Sublayer(F.linear(mixed, self.weights[part.output.weight].value), part.output.bias, back)

        return forward

    def _qkv(self, part: MultiHeadAttention) -> tuple[Weight, Weight | None]:
        return self.weights[part.qkv.weight], None if part.qkv.bias is None else self.weights[part.qkv.bias]

    def _feed_forward(self, part: AnyFeedForward) -> Callable[[Tensor], Sublayer]:
        if isinstance(part, VariantFeedForward) and part.gate is not None:
            return self._gated_feed_forward(part, part.gate)
        if self.config.activation not in ("relu", "gelu"):
            raise NotImplementedError(f"the training pass has no kernels of {self.config.activation}")

        def forward(x: Tensor) -> Sublayer:
            inner, outer = self.weights[part.inner.weight], self.weights[part.outer.weight]
            bias, dropout = self.weights[part.inner.bias], self._dropout(part, self.config.activation_dropout)
            gelu_back: Callable[[Tensor], Tensor] | None = None
            if self.config.activation == "gelu":
                hidden, gelu_back = gelu(F.linear(x, inner.value, bias.value), dropout)
            elif x.is_cuda and not dropout.rate:  # ReLU fused into the product
                hidden = torch._addmm_activation(bias.value, x, inner.value.T)
            else:
                hidden = relu_dropout(F.linear(x, inner.value, bias.value), dropout)

            def back(gradient: Tensor, into: Tensor | None) -> Tensor:
                d_hidden = _linear_back(outer, hidden, gradient, None)
                if gelu_back is None:
                    relu_dropout_backward(d_hidden, hidden, dropout, bias.grad)
                else:
                    d_hidden = gelu_back(d_hidden)
                    bias.grad.add_(d_hidden.sum(0, dtype=torch.float))
                return _linear_back(inner, x, d_hidden, into)

            return Sublayer(F.linear(hidden, outer.value), part.outer.bias, back)

        return forward

    def _gated_feed_forward(self, part: VariantFeedForward, gate: nn.Linear) -> Callable[[Tensor], Sublayer]:
        """SwiGLU feed-forward, with a third matrix and without biases."""

        def forward(x: Tensor) -> Sublayer:
            inner, gate_weight, outer = (self.weights[linear.weight] for linear in (part.inner, gate, part.outer))
            a, b = F.linear(x, inner.value), F.linear(x, gate_weight.value)
            dropout = self._dropout(part, self.config.activation_dropout)
            hidden = swiglu(a, b, dropout)

            def back(gradient: Tensor, into: Tensor | None) -> Tensor:
                swiglu_backward(_linear_back(outer, hidden, gradient, None), a, b, dropout)
                return _linear_back(gate_weight, x, b, _linear_back(inner, x, a, into))

            return Sublayer(F.linear(hidden, outer.value), None, back)

        return forward

    def _loss(self, hidden: list[Tensor], labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the sums of loss and −log p, and the gradient of each `hidden`, computed in blocks of rows."""
        weight = self.weights[self.model.output.weight]
        rows = max(1, LOGITS // len(hidden) // len(weight.value))
        sums, gradients = [], [torch.empty_like(each) for each in hidden]
        for begin in range(0, len(labels), rows):
            part = slice(begin, begin + rows)
            logits = [F.linear(each[part], weight.value) for each in hidden]  # (rows, vocab)
            if self.r_drop:
                first, second = logits
                losses = r_drop_loss_and_gradients(first, second, labels[part], self.smoothing, self.r_drop, self.pad)
            else:
                losses = loss_and_gradient(logits[0], labels[part], self.smoothing, self.pad)
            sums.append(torch.stack(losses).sum(1))
            for each, states, gradient in zip(logits, hidden, gradients, strict=True):
                torch.mm(each, weight.value, out=gradient[part])
                accumulate(weight.grad, each.T, states[part])
        return torch.stack(sums).sum(0), gradients


@dataclass
class _Memory:
    """Encoder output, and the sum of its gradients so far."""

    values: Tensor
    gradient: Tensor | None = None


def _linear_back(weight: Weight, x: Tensor, gradient: Tensor, into: Tensor | None) -> Tensor:
    """Add the gradient of the matrix to its sum; return the gradient of x, added to `into` if given."""
    accumulate(weight.grad, gradient.T, x)
    return gradient @ weight.value if into is None else into.addmm_(gradient, weight.value)


def _heads(part: MultiHeadAttention, causal: bool) -> Heads:
    return Heads(part.heads, part.d_k, part.d_v, part.d_k**-0.5 if score_of(part)[0] == "scaled" else 1.0, causal)


def _widths(part: MultiHeadAttention) -> list[int]:
    return [part.heads * part.d_k, part.heads * part.d_k, part.heads * part.d_v]
