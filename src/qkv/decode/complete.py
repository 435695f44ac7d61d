"""Going on with a text: one token after another from a language model, for as long as anybody asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qkv.core.errors import QkvError, UsageError
from qkv.decode.sampling import Sampling, draw
from qkv.models.language_models import DecoderOnly


@dataclass(frozen=True)
class Drawn:
    """One token for each row, and the model's own log-probability of it, whatever it was drawn with."""

    tokens: list[int]
    logprobs: list[float]


@torch.inference_mode()
def generate(
    model: DecoderOnly,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    context: int,
    rows: int = 1,
    forbidden: Sequence[int] = (),
    device: torch.device | None = None,
) -> Iterator[Drawn]:
    """Go on with a prompt, without end, in `rows` independent ways.

    The model sees at most `context` tokens. When that many are cached, the older half is forgotten and the rest read
    again from position 0 on: a token's own place in the cache is part of what was computed for it.
    """
    if not prompt:
        raise UsageError("a prompt needs at least one token: give the newline that text begins with")
    draws = torch.Generator()  # its own, so that nobody else's random numbers change
    draws.seed() if sampling.seed is None else draws.manual_seed(sampling.seed)
    history = torch.tensor([list(prompt[-context:])] * rows, device=device)  # (rows, tokens)
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=device)
    logits, state = model.step(history, model.start(beam=rows))
    while True:
        log_probs = logits[:, -1].float().log_softmax(-1)
        last = log_probs.index_fill(-1, banned, -math.inf)
        if not bool(torch.isfinite(last.max(-1).values).all()):
            raise QkvError("the model's probabilities are not numbers: its weights are damaged; use another step's")
        token = draw(last, sampling, torch.rand(rows, generator=draws, dtype=torch.float64).to(last.device))
        logprobs = log_probs.gather(-1, token[:, None]).squeeze(-1)
        yield Drawn(token.tolist(), logprobs.tolist())
        history = torch.cat([history, token[:, None]], dim=1)[:, -context:]
        if state.position >= context:
            logits, state = model.step(history[:, -max(1, context // 2) :], model.start(beam=rows))
        else:
            logits, state = model.step(token[:, None], state)
