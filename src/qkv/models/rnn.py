"""RNN: a recurrent encoder-decoder with attention (Bahdanau et al., Luong et al., both 2015), GRU or LSTM.

Two implementations compute the same recurrence from the same weights. `gru` and `lstm` are the equations as printed;
`fused` calls the kernels of PyTorch, and runs unless `Layer.written_out` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.core.attention import EncoderOutput, attend, kept_sentences, padding_mask
from qkv.core.transformer import Embedding, TranslationModel
from qkv.models.variants import ScoredAttention
from qkv.options import RnnConfig

Cell = tuple[Tensor, ...]  # state of a layer, each (rows, width): h of a GRU, h and c of an LSTM


# ---- one layer -------------------------------------------------------------------------------------------------------


def gru(x: Tensor, state: Cell, W_ih: Tensor, W_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Cell:
    """h' = (1 − z) ⊙ n + z ⊙ h (Cho et al., 2014), with update gate z, reset gate r and candidate state n."""
    (h,) = state
    r_x, z_x, n_x = F.linear(x, W_ih, b_ih).chunk(3, dim=-1)  # (rows, width) each
    r_h, z_h, n_h = F.linear(h, W_hh, b_hh).chunk(3, dim=-1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return ((1 - z) * n + z * h,)


def lstm(x: Tensor, state: Cell, W_ih: Tensor, W_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Cell:
    """c' = f ⊙ c + i ⊙ g and h' = o ⊙ tanh(c') (Hochreiter & Schmidhuber, 1997; f by Gers et al., 2000)."""
    h, c = state
    i, f, g, o = (F.linear(x, W_ih, b_ih) + F.linear(h, W_hh, b_hh)).chunk(4, dim=-1)  # (rows, width) each
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def fused(x: Tensor, state: Cell, weights: tuple[Tensor, ...]) -> tuple[Tensor, Cell]:
    """GRU or LSTM over x (rows, n, inputs) by the kernels of PyTorch: outputs (rows, n, width) and the last state."""
    is_lstm = len(state) == 2
    if x.shape[1] == 1:
        state = torch.lstm_cell(x[:, 0], state, *weights) if is_lstm else (torch.gru_cell(x[:, 0], *state, *weights),)
        return state[0][:, None], state
    biases, layers, dropout, bidirectional, rows_first = True, 1, 0.0, False, True
    train = torch.is_grad_enabled()  # cuDNN then saves values for the backward pass
    options = (biases, layers, dropout, train, bidirectional, rows_first)
    first = [part[None] for part in state]
    output, *last = torch.lstm(x, first, weights, *options) if is_lstm else torch.gru(x, first[0], weights, *options)
    return output, tuple(part[0] for part in last)


class Layer(nn.Module):
    """One recurrent layer over x (rows, n, inputs): outputs (rows, n, width) and the last state."""

    written_out = False  # True: run `gru` or `lstm`, the equations as printed

    def __init__(self, cell: str, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.is_lstm = cell == "lstm"
        # Only the weights of this module are used; it stores them in one block of memory, as cuDNN needs.
        self.cell = (nn.LSTM if self.is_lstm else nn.GRU)(inputs, width, batch_first=True)
        W_ih, W_hh, b_ih, b_hh = self.cell.all_weights[0]
        with torch.no_grad():
            for x_gate, h_gate in zip(W_ih.split(width), W_hh.split(width), strict=True):
                nn.init.xavier_uniform_(x_gate)
                nn.init.orthogonal_(h_gate)
            nn.init.zeros_(b_ih)
            nn.init.zeros_(b_hh)
            if self.is_lstm:
                b_ih[width : 2 * width] = 1.0  # bias of the forget gate: remember at first

    def forward(self, x: Tensor, state: Cell) -> tuple[Tensor, Cell]:
        weights = tuple(self.cell.all_weights[0])
        if not self.written_out:
            return fused(x, state, weights)
        outputs = []
        for now in x.unbind(1):
            state = (lstm if self.is_lstm else gru)(now, state, *weights)
            outputs.append(state[0])
        return torch.stack(outputs, dim=1), state

    def zeros(self, x: Tensor) -> Cell:
        """Return the initial state, zeros."""
        h = x.new_zeros(len(x), self.width)
        return (h, h) if self.is_lstm else (h,)


# ---- encoder ---------------------------------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    """Recurrent encoder layer over x (batch, source, d_model), optionally bidirectional with half the width each."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        width = config.d_model // 2 if config.bidirectional else config.d_model
        self.ahead = Layer(config.cell, config.d_model, width)
        self.back = Layer(config.cell, config.d_model, width) if config.bidirectional else None

    def forward(self, x: Tensor, reversed_positions: Tensor) -> Tensor:
        output: Tensor = self.ahead(x, self.ahead.zeros(x))[0]
        if self.back is None:
            return output
        reverse = self.back(_reorder(x, reversed_positions), self.back.zeros(x))[0]
        return torch.cat([output, _reorder(reverse, reversed_positions)], dim=-1)


def _reversed_positions(lengths: Tensor, width: int) -> Tensor:
    """Return the positions of each row in reverse order, the padding still at the end: (batch, width).

    Both directions read the tokens before the padding, so the padding does not affect the annotations.
    """
    position = torch.arange(width, device=lengths.device)
    mirrored = lengths[:, None] - 1 - position
    return torch.where(mirrored >= 0, mirrored, position)


def _reorder(x: Tensor, positions: Tensor) -> Tensor:
    """Gather the positions of each row of x (batch, source, width)."""
    return x.gather(1, positions[:, :, None].expand_as(x))


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass
class RnnState:
    """Decoder state: recurrent states of each row, and the encoder output of each sentence, shared by its beams."""

    cells: list[Cell]  # for each layer (rows, d_model)
    fed: Tensor  # the last attentional state (rows, 1, d_model)
    keys: Tensor  # (sentences, 1, source, d_model)
    annotations: Tensor  # encoder outputs (sentences, 1, source, d_model)
    mask: Tensor  # (sentences, 1, 1, source)
    beam: int

    def select(self, rows: Tensor) -> RnnState:
        if (kept := kept_sentences(rows, self.beam, len(self.mask))) is not None:
            self.keys, self.annotations, self.mask = (
                tensor.index_select(0, kept) for tensor in (self.keys, self.annotations, self.mask)
            )
        self.cells = [tuple(part.index_select(0, rows) for part in cell) for cell in self.cells]
        self.fed = self.fed.index_select(0, rows)
        return self


class Rnn(TranslationModel):
    """Source ids (batch, source) and target ids (batch, target) to logits (batch, target, vocab).

    All attention scores use Luong's order: the recurrence computes a state s, attention to the encoder outputs (the
    annotations) a context c, and the attentional state is s̃ = tanh(W_c [c; s]). It predicts the next token and, with
    input feeding, is part of the next input.

    The initial decoder state is tanh(W_s h), where h is the last layer's output at the last token, and for the backward
    half at the first token. The cells of an LSTM are initialised in the same way.
    """

    def __init__(self, config: RnnConfig, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.config: RnnConfig = config
        d_model, additive = config.d_model, config.attention == "additive"
        self.add_embeddings(lambda vocab: Embedding(vocab, d_model, None, config.dropout), src_vocab, tgt_vocab)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.decoder: Sequence[Layer] = nn.ModuleList(  # type: ignore[assignment]
            Layer(config.cell, 2 * d_model if config.input_feeding and i == 0 else d_model, d_model)
            for i in range(config.decoder_layers)
        )
        self.parts = 2 if config.cell == "lstm" else 1  # tensors in the state of a layer
        self.first = _linear(d_model, config.decoder_layers * self.parts * d_model)  # W_s
        # Additive: wᵀtanh(W_a s + U_a h). General: sᵀ(W_a h); W_a, like U_a, is applied once per source.
        self.query = _linear(d_model, d_model) if additive else nn.Identity()
        self.key = nn.Identity() if config.attention == "dot" else _linear(d_model, d_model)
        self.score_weight = nn.Parameter(torch.empty(1, d_model).normal_(std=d_model**-0.5)) if additive else None
        self.combine = _linear(2 * d_model, d_model)  # W_c
        self.dropout = nn.Dropout(config.dropout)
        self.add_output(tgt_vocab, self.target)

    def hidden(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the attentional states (batch, target, d_model), given the source and the target up to each."""
        return self._decode(target, self.start(self.encode(source, lengths)))

    def encode(self, source: Tensor, lengths: Tensor) -> EncoderOutput:
        """Encode source ids (batch, source), each row `lengths[i]` tokens and then padding, to annotations."""
        reversed_positions = _reversed_positions(lengths, source.shape[1])
        x = self.source(source)
        for i, layer in enumerate(self.encoder):
            x = layer(self.dropout(x) if i else x, reversed_positions)
        return EncoderOutput(x, padding_mask(source.shape[1], lengths))

    def start(self, encoded: EncoderOutput, beam: int = 1) -> RnnState:
        """Return the decoder state before the first token, with `beam` rows for each sentence."""
        annotations = encoded.values  # (sentences, source, d_model)
        last = encoded.mask.sum(dim=(1, 2, 3)) - 1
        summary = annotations[torch.arange(len(last), device=last.device), last]  # (sentences, d_model)
        if self.config.bidirectional:
            half = self.config.d_model // 2
            summary = torch.cat([summary[:, :half], annotations[:, 0, half:]], dim=-1)
        first = self.first(summary).tanh().repeat_interleave(beam, dim=0)
        first = first.unflatten(-1, (self.config.decoder_layers, self.parts, -1))
        cells = first.permute(1, 2, 0, 3).contiguous()  # (layers, parts, rows, d_model)
        return RnnState(
            cells=[layer.unbind() for layer in cells],
            fed=annotations.new_zeros(len(annotations) * beam, 1, self.config.d_model),
            keys=self.key(annotations)[:, None],
            annotations=annotations[:, None],
            mask=encoded.mask,
            beam=beam,
        )

    def step(self, tokens: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """Decode n tokens of each row (rows, n); return logits (rows, n, vocab) and the new state."""
        return self.project(self._decode(tokens, state)), state

    def _decode(self, tokens: Tensor, state: RnnState) -> Tensor:
        """Return the attentional states of the next n positions (rows, n, d_model), and update the state."""
        x = self.target(tokens).to(state.fed.dtype)  # cast once, not at every position
        if self.config.input_feeding:  # each position needs the attention of the previous one
            attentional = []
            for now in x.split(1, dim=1):
                state.fed = self._attend(self._recur(torch.cat([now, state.fed], dim=-1), state), state)
                attentional.append(state.fed)
            x = torch.cat(attentional, dim=1)
        else:
            x = self._attend(self._recur(x, state), state)
        return self.dropout(x)

    def _recur(self, x: Tensor, state: RnnState) -> Tensor:
        """Run the decoder layers over n inputs (rows, n, …); return states (rows, n, d_model)."""
        for i, layer in enumerate(self.decoder):
            x, state.cells[i] = layer(self.dropout(x) if i else x, state.cells[i])
        return x

    def _attend(self, s: Tensor, state: RnnState) -> Tensor:
        """Return tanh(W_c [c; s]) for states s (rows, n, d_model) and their contexts c."""
        # The beams of a sentence share its keys: they are queries of one attention, and the source is not copied.
        score = "dot" if self.score_weight is None else "additive"
        attention = ScoredAttention(score, self.score_weight, f"decoder.{len(self.decoder) - 1}.cross")
        query = self.query(s).reshape(len(state.mask), 1, -1, s.shape[-1])  # (sentences, 1, beam · n, d_model)
        context = attend(attention, query, state.keys, state.annotations, state.mask)
        return self.combine(torch.cat([context.reshape(s.shape), s], dim=-1)).tanh()


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias, Xavier initialised."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(linear.weight)
    return linear
