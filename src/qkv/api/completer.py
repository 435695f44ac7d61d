"""Completer: a language model that goes on with a text."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.api.loading import Loaded
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.core.validation import total_loss
from qkv.data.subwords import encode_text, newline_of
from qkv.decoding.logits_processors import GeneratedToken, Sampling, generate
from qkv.evaluation.metrics import TextLoss
from qkv.models.language_models import DecoderOnly
from qkv.training.lm_tasks import running_text

TOKENS = 200  # how much a completion adds unless told


@dataclass(frozen=True)
class Completion:
    """Text that a model added to a prompt, and how likely the model itself found it.

    A stop text is cut off the text, but the tokens that wrote it are still among the tokens.
    """

    text: str
    logprob: float
    tokens: list[str]
    token_logprobs: list[float]
    finish_reason: str  # length: as many tokens as asked for; stop: a stop text came

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.text


class Draws(TypedDict, total=False):
    """How the next token is drawn (`qkv.decoding.logits_processors.Sampling`)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


class Completer(Loaded[DecoderOnly]):
    """A trained language model, ready to go on with any text.

    It sees the last `context` tokens; what slides out of them is forgotten, so a text may grow without end.
    """

    model_class = DecoderOnly

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.tgt

    @property
    def context(self) -> int:
        return self.config.data.max_length

    def stream(self, prompt: str = "", *, max_tokens: int | None = None, **draws: Unpack[Draws]) -> Iterator[str]:
        """The text that follows the prompt, piece by piece as it is written; without `max_tokens` it never ends."""
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens = {max_tokens}: must be at least 1, or None for a text without end")
        decoder = TextDecoder(self.tokenizer, prompt)
        for number, drawn in enumerate(self._drawn(prompt, Sampling(**draws), 1), 1):
            if piece := decoder.feed(drawn.tokens[0]):
                yield piece
            if number == max_tokens:
                break
        if rest := decoder.close():
            yield rest

    def complete(
        self,
        prompt: str = "",
        *,
        max_tokens: int = TOKENS,
        n: int = 1,
        stop: Sequence[str] = (),
        **draws: Unpack[Draws],
    ) -> list[Completion]:
        """`n` independent continuations of the prompt, each at most `max_tokens` long or up to a stop text."""
        if isinstance(stop, str):
            raise UsageError("stop takes a list of texts: put the text in brackets")
        if n < 1 or max_tokens < 1:
            raise UsageError(f"n = {n}, max_tokens = {max_tokens}: both must be at least 1")
        growing = [_Growing(self.tokenizer, prompt, tuple(stop)) for _ in range(n)]
        for number, drawn in enumerate(self._drawn(prompt, Sampling(**draws), n), 1):
            for each, token, logprob in zip(growing, drawn.tokens, drawn.logprobs, strict=True):
                each.add(token, logprob)
            if number == max_tokens or all(each.stopped for each in growing):
                break
        return [each.completion(self.tokenizer) for each in growing]

    @torch.inference_mode()
    def evaluate(self, text: str) -> TextLoss:
        """How well the model foresees a text: perplexity, nats per character, bits per byte.

        The text is read in blocks of the model's context, each token once; at the start of a block there is little to
        foresee it from, so this is an upper bound.
        """
        if not text:
            raise UsageError("an empty text cannot be foreseen: give some")
        ids = np.asarray(encode_text(self.tokenizer, text), np.int64)
        return self._foresee(ids, text)

    @torch.inference_mode()
    def evaluate_held_out(self) -> TextLoss:
        """The same for the text that training held out, as validation measured it."""
        prepared = PreparedText.open(self.run.store)
        raw = prepared.valid_text[1].read_text(encoding="utf-8")
        return self._foresee(np.asarray(prepared.valid.stream), raw)

    def _foresee(self, ids: NDArray[Any], text: str) -> TextLoss:
        given = running_text(ids, self.config, self.tokenizer)
        nats, tokens = total_loss(self.model, given, self.tokenizer.pad, self.device)
        return TextLoss(nats, tokens, len(text), len(text.encode()))

    @torch.inference_mode()
    def next_tokens(self, prompt: str = "", n: int = 10) -> list[tuple[str, float]]:
        """The likeliest next tokens and their probabilities."""
        ids = self._ids(prompt)[-self.context :]
        logits, _ = self.model.step(torch.tensor([ids], device=self.device), self.model.start())
        likeliest = logits[0, -1].float().softmax(-1).topk(min(n, self.tokenizer.size))
        names = self.tokenizer.tokens(likeliest.indices.tolist())
        return list(zip(names, likeliest.values.tolist(), strict=True))

    def _ids(self, prompt: str) -> list[int]:
        """The prompt behind a newline, as every line of the training text is."""
        return [newline_of(self.tokenizer), *encode_text(self.tokenizer, prompt)]

    def _drawn(self, prompt: str, sampling: Sampling, rows: int) -> Iterator[GeneratedToken]:
        never = (self.tokenizer.pad, self.tokenizer.bos, self.tokenizer.eos)
        return generate(
            self.model,
            self._ids(prompt),
            sampling,
            context=self.context,
            rows=rows,
            forbidden=never,
            device=self.device,
        )


class TextDecoder:
    """Running text from tokens one at a time: a character comes out when all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        # There, a space before the first word belongs to the tokens and not to the text.
        self.line_begins = not prompt or prompt.endswith("\n")

    def feed(self, token: int) -> str:
        written = self.tokenizer.bytes_of(token)
        if not written:
            return ""
        shown = written.removeprefix(b" ") if self.line_begins else written
        self.line_begins = written.endswith(b"\n")
        return self.characters.decode(shown)

    def close(self) -> str:
        return self.characters.decode(b"", True)


class _Growing:
    """One continuation in the making; past its stop text nothing is added."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, stop: tuple[str, ...]) -> None:
        self.decoder = TextDecoder(tokenizer, prompt)
        self.stop = stop
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False

    def add(self, token: int, logprob: float) -> None:
        if self.stopped:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.text += self.decoder.feed(token)
        found = [place for place in (self.text.find(word) for word in self.stop if word) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def completion(self, tokenizer: Tokenizer) -> Completion:
        text = self.text if self.stopped else self.text + self.decoder.close()
        reason = "stop" if self.stopped else "length"
        return Completion(text, sum(self.logprobs), tokenizer.tokens(self.ids), self.logprobs, reason)
