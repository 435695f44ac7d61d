"""LanguageModel: continues a text, scores it, lists the next tokens."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.api.loading import LoadedRun
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.core.validation import total_loss
from qkv.data.subwords import encode_text, newline_of, readable_tokens
from qkv.decoding.logits_processors import Sampling, generate
from qkv.evaluation.metrics import TextLoss
from qkv.models.variants import DecoderOnly
from qkv.training.lm_tasks import running_text
from qkv.training.unpadded import loss_in_parts

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


class StreamedToken(NamedTuple):
    """A new token of one of several continuations, and the text that became final with it."""

    row: int
    id: int
    text: str  # without characters that are incomplete or may begin a stop text
    logprob: float
    top: list[tuple[str, float]]  # the most probable tokens at this place, and their log-probabilities
    finish: str | None  # as `Completion.finish_reason`, None while the continuation is unfinished


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
        for (token,) in self.stream_tokens(prompt, max_tokens=max_tokens, **sampling):
            if token.text:
                yield token.text

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
        rows: list[list[StreamedToken]] = [[] for _ in range(n)]
        for tokens in self.stream_tokens(prompt, max_tokens=max_tokens, n=n, stop=stop, **sampling):
            for token in tokens:
                rows[token.row].append(token)
        completions = []
        for row in rows:
            text, logprobs = "".join(token.text for token in row), [token.logprob for token in row]
            names = readable_tokens(self.tokenizer, [token.id for token in row])
            completions.append(Completion(text, sum(logprobs), names, logprobs, row[-1].finish or "length"))
        return completions

    @torch.inference_mode()
    def stream_tokens(
        self,
        prompt: str = "",
        *,
        max_tokens: int | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
        top: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[list[StreamedToken]]:
        """Yield for each step the new tokens of the unfinished continuations, with the `top` most probable ones."""
        tokenizer = self.tokenizer
        never = (tokenizer.pad, tokenizer.bos, tokenizer.eos)
        options: dict[str, Any] = {"context": self.context, "rows": n, "forbidden": never, "device": self.device}
        continuations = [Continuation(tokenizer, prompt, stop) for _ in range(n)]
        for number, step in enumerate(generate(self.model, self._ids(prompt), Sampling(**sampling), **options), 1):
            best = step.ranked.topk(min(top, step.ranked.shape[-1] - len(never)))
            new = []
            for row, each in enumerate(continuations):
                if each.finish is None:
                    text = each.add(step.tokens[row], number == max_tokens)
                    likeliest = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
                    names = [(self.token_text(token), logprob) for token, logprob in likeliest]
                    new.append(StreamedToken(row, step.tokens[row], text, step.logprobs[row], names, each.finish))
            yield new
            if all(each.finish for each in continuations):
                return

    def token_text(self, token: int) -> str:
        """Return the text of a single token; incomplete characters are replaced."""
        return self.tokenizer.bytes_of(token).decode("utf-8", "replace")

    def prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        return len(self._ids(prompt)) - 1

    @torch.inference_mode()
    def evaluate(self, text: str) -> TextLoss:
        """Return the loss of a text: perplexity, nats per character, bits per byte.

        The text is read in blocks of the model's context, each token once. The first tokens of a block have little
        context, so the result is an upper bound.
        """
        if not text:
            raise UsageError("an empty text has no loss: give some text")
        return self._loss(np.asarray(encode_text(self.tokenizer, text), np.int64), text)

    @torch.inference_mode()
    def evaluate_held_out(self) -> TextLoss:
        """Return the loss of the held-out text, as validation measured it."""
        prepared = PreparedText.open(self.run.store)
        raw = prepared.valid_text[1].read_text(encoding="utf-8")
        return self._loss(np.asarray(prepared.valid.ids["tgt"]), raw)

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


class Continuation:
    """One continuation as text: only whole characters, and none that may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        # At the start of a line the tokens have a space before the first word that the text does not have.
        self.line_begins = not prompt or prompt.endswith("\n")
        self.held_back = ""
        self.finish: str | None = None

    def add(self, token: int, last: bool) -> str:
        """Add a token and return the text that is now final."""
        if written := self.tokenizer.bytes_of(token):
            shown = written.removeprefix(b" ") if self.line_begins else written
            self.line_begins = written.endswith(b"\n")
            self.held_back += self.characters.decode(shown)
        text = self.held_back
        places = [place for place in map(text.find, self.stop) if place >= 0]
        if places:
            self.finish = "stop"
            return text[: min(places)]
        if last:
            self.finish = "length"
            return text + self.characters.decode(b"", True)
        begun = [n for stop in self.stop for n in range(1, len(stop)) if stop.startswith(text[-n:])]
        final = max(0, len(text) - max(begun, default=0))
        self.held_back = text[final:]
        return text[:final]
