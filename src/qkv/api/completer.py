"""LanguageModel: continues a text, scores it, lists the next tokens."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.api.loading import LoadedRun
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.core.validation import total_loss
from qkv.data.subwords import encode_text, newline_of, readable_tokens
from qkv.decoding.logits_processors import GeneratedToken, Sampling, generate
from qkv.evaluation.metrics import TextLoss
from qkv.models.language_models import DecoderOnly
from qkv.training.lm_tasks import running_text
from qkv.training.memory_limits import loss_in_parts

TOKENS = 200  # default length of a completion


@dataclass(frozen=True)
class Completion:
    """A continuation of a prompt and its log-probability.

    `text` ends before a stop text, `tokens` includes the tokens of the stop text.
    """

    text: str
    logprob: float
    tokens: list[str]
    token_logprobs: list[float]
    finish_reason: str  # length: max_tokens was reached; stop: a stop text was generated

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.text


class SamplingOptions(TypedDict, total=False):
    """Options of sampling (`qkv.decoding.logits_processors.Sampling`)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


class LanguageModel(LoadedRun[DecoderOnly]):
    """A trained language model that continues text; it reads the last `context` tokens, so a text can be endless."""

    model_class = DecoderOnly

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.tgt

    @property
    def context(self) -> int:
        return self.config.data.max_length

    def stream(
        self, prompt: str = "", *, max_tokens: int | None = None, **sampling: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """Yield the continuation of the prompt as it is generated; without `max_tokens` it is endless."""
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens = {max_tokens}: must be at least 1, or None for no limit")
        decoder = TextDecoder(self.tokenizer, prompt)
        for number, generated in enumerate(self._generate(prompt, Sampling(**sampling), 1), 1):
            if piece := decoder.feed(generated.tokens[0]):
                yield piece
            if number == max_tokens:
                break
        if piece := decoder.close():
            yield piece

    def complete(
        self,
        prompt: str = "",
        *,
        max_tokens: int = TOKENS,
        n: int = 1,
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Return `n` independent continuations of the prompt, each of up to `max_tokens` tokens or to a stop text."""
        if isinstance(stop, str):
            raise UsageError("stop takes a list of texts: put the text in brackets")
        if n < 1 or max_tokens < 1:
            raise UsageError(f"n = {n}, max_tokens = {max_tokens}: both must be at least 1")
        continuations = [_Continuation(self.tokenizer, prompt, tuple(stop)) for _ in range(n)]
        for number, generated in enumerate(self._generate(prompt, Sampling(**sampling), n), 1):
            for each, token, logprob in zip(continuations, generated.tokens, generated.logprobs, strict=True):
                each.add(token, logprob)
            if number == max_tokens or all(each.stopped for each in continuations):
                break
        return [each.completion(self.tokenizer) for each in continuations]

    @torch.inference_mode()
    def evaluate(self, text: str) -> TextLoss:
        """Return the loss of a text: perplexity, nats per character, bits per byte.

        The text is read in blocks of the model's context, each token once. The first tokens of a block have little
        context, so the result is an upper bound.
        """
        if not text:
            raise UsageError("an empty text has no loss: give some text")
        ids = np.asarray(encode_text(self.tokenizer, text), np.int64)
        return self._loss(ids, text)

    @torch.inference_mode()
    def evaluate_held_out(self) -> TextLoss:
        """Return the loss of the held-out text, as validation measured it."""
        prepared = PreparedText.open(self.run.store)
        raw = prepared.valid_text[1].read_text(encoding="utf-8")
        return self._loss(np.asarray(prepared.valid.stream), raw)

    def _loss(self, ids: NDArray[Any], text: str) -> TextLoss:
        batches = running_text(ids, self.config, self.tokenizer)
        nats, tokens = total_loss(self.model, batches, self.tokenizer.pad, self.device, loss_in_parts)
        return TextLoss.of(nats, tokens, text)

    @torch.inference_mode()
    def next_tokens(self, prompt: str = "", n: int = 10) -> list[tuple[str, float]]:
        """Return the n most probable next tokens and their probabilities."""
        ids = self._ids(prompt)[-self.context :]
        logits, _ = self.model.step(torch.tensor([ids], device=self.device), self.model.start())
        likeliest = logits[0, -1].float().softmax(-1).topk(min(n, self.tokenizer.size))
        names = readable_tokens(self.tokenizer, likeliest.indices.tolist())
        return list(zip(names, likeliest.values.tolist(), strict=True))

    def _ids(self, prompt: str) -> list[int]:
        """Return a newline and the prompt: in training every line follows a newline."""
        return [newline_of(self.tokenizer), *encode_text(self.tokenizer, prompt)]

    def _generate(self, prompt: str, sampling: Sampling, rows: int) -> Iterator[GeneratedToken]:
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
    """Incremental decoder of tokens to text: returns a character as soon as all its bytes are known."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        # At the start of a line the tokens have a space before the first word that the text does not have.
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


class _Continuation:
    """An unfinished continuation; tokens after its stop text are ignored."""

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
        stops = [place for place in (self.text.find(word) for word in self.stop if word) if place >= 0]
        if stops:
            self.text, self.stopped = self.text[: min(stops)], True

    def completion(self, tokenizer: Tokenizer) -> Completion:
        text = self.text if self.stopped else self.text + self.decoder.close()
        reason = "stop" if self.stopped else "length"
        return Completion(text, sum(self.logprobs), readable_tokens(tokenizer, self.ids), self.logprobs, reason)
