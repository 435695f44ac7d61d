"""Encoder: fills gaps in a sentence, and embeds sentences as vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.api.loading import LoadedRun
from qkv.core.batches import pad
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import Tokenizer
from qkv.core.translate import by_length
from qkv.data.lm_data import mask_tokens
from qkv.data.subwords import readable_tokens
from qkv.models.variants import EncoderOnly

GAP = "<mask>"
STAND_IN = "\ue000"  # a private-use character whose bytes mark a gap in the encoded text
TOKENS = 4096  # in a batch


@dataclass(frozen=True)
class Filling:
    """A token for one gap of a text, its probability, and the text with it."""

    gap: int
    token: str
    probability: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class GapScores:
    """Loss and accuracy on masked tokens."""

    loss: float
    accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, self.loss))

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "perplexity": self.perplexity}

    def __str__(self) -> str:
        right = f"{self.accuracy:.2%} of {self.tokens:,} masked tokens filled in correctly"
        return f"{right}, perplexity {self.perplexity:.3f}"


class Encoder(LoadedRun[EncoderOnly]):
    """A trained encoder that fills gaps and embeds texts."""

    model_class = EncoderOnly

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers.tgt

    @torch.inference_mode()
    def fill(self, text: str, n: int = 5) -> list[list[Filling]]:
        """Return the `n` most probable tokens for each `<mask>` in the text, with all other gaps left open."""
        ids = self._with_gaps(text)
        hidden = self._hidden([np.asarray(ids, np.int64)])
        fillings = []
        for number, place in enumerate([i for i, token in enumerate(ids) if token == self.tokenizer.bos], 1):
            logits = self.model.project(hidden[0, place]).float()
            logits[: self.tokenizer.offset] = -math.inf  # special tokens are not text
            likeliest = logits.softmax(-1).topk(min(n, self.tokenizer.size - self.tokenizer.offset))
            options = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            fillings.append([self._filling(number, token, p, ids, place) for token, p in options])
        return fillings

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, normalise: bool = True) -> NDArray[np.float32]:
        """Return a vector for each text, (texts, d_model): the mean of the encoder's output over its tokens.

        Vectors are normalised to length 1, so that their dot product is the cosine. An empty text has the zero vector.
        """
        if isinstance(texts, str):
            raise UsageError("embed takes a list of texts: put the text in brackets")
        rows = self._rows(texts)
        vectors = torch.zeros(len(rows), self.config.model.d_model)
        for indices in by_length([len(row) + 1 for row in rows], TOKENS):
            hidden = self._hidden([rows[i] for i in indices])
            lengths = torch.tensor([len(rows[i]) for i in indices], device=hidden.device)
            inside = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
            mean = (hidden * inside[:, :, None]).sum(1) / lengths.clamp(min=1)[:, None]
            vectors[torch.tensor(indices)] = mean.float().cpu()
        if normalise:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.numpy()

    @torch.inference_mode()
    def evaluate(self, texts: Sequence[str]) -> GapScores:
        """Mask the same share of tokens as in training, with fixed seeds, and score the predictions."""
        rows = self._rows([text for text in texts if text.strip()])
        if not rows:
            raise UsageError("no text to mask tokens in: give some lines")
        loss, right, tokens = 0.0, 0, 0
        for indices in by_length([len(row) + 1 for row in rows], TOKENS):
            random = [np.random.default_rng((int(i), 5)) for i in indices]
            batch = mask_tokens([rows[i] for i in indices], self.tokenizer, self.model.config.masked, random)
            batch = batch.to(self.device)
            wanted = batch.labels != self.tokenizer.pad
            log_probs = self.model.project(self.model.hidden(*batch.inputs)[wanted]).float().log_softmax(-1)
            labels = batch.labels[wanted]
            loss -= float(log_probs.gather(-1, labels[:, None]).sum())
            right += int((log_probs.argmax(-1) == labels).sum())
            tokens += batch.tokens
        return GapScores(loss / tokens, right / tokens, tokens)

    def _hidden(self, rows: list[NDArray[np.int64]]) -> Tensor:
        source = pad(rows, self.tokenizer.pad, last=self.tokenizer.eos).to(self.device)
        lengths = torch.tensor([len(row) + 1 for row in rows], device=self.device)
        hidden: Tensor = self.model.hidden(source, lengths)
        return hidden

    def _filling(self, gap: int, token: int, probability: float, ids: list[int], place: int) -> Filling:
        open_gap = self.tokenizer.encode(STAND_IN)
        filled = [token if i == place else each for i, each in enumerate(ids)]
        spelled = [part for each in filled for part in (open_gap if each == self.tokenizer.bos else [each])]
        text = self.tokenizer.decode(spelled).replace(STAND_IN, GAP)
        (name,) = readable_tokens(self.tokenizer, [token])
        return Filling(gap, name, probability, text)

    def _with_gaps(self, text: str) -> list[int]:
        """Return the ids of a text with `<s>` for each gap; a gap includes the space before it, as a token does."""
        if GAP not in text:
            raise UsageError(f"nothing to fill in: write {GAP} where a token is missing")
        if STAND_IN in text:
            raise UsageError("the text contains U+E000, a private-use character that marks gaps: remove it")
        ids = self.tokenizer.encode(text.strip().replace(GAP, STAND_IN))
        inside = [self.tokenizer.offset + byte for byte in STAND_IN.encode()]
        space = self.tokenizer.offset + ord(" ")
        masked: list[int] = []
        while ids:
            if ids[: len(inside)] == inside:
                if masked and masked[-1] == space and self.tokenizer.kind != "char":
                    masked.pop()
                masked.append(self.tokenizer.bos)
                ids = ids[len(inside) :]
            else:
                masked.append(ids.pop(0))
        if masked.count(self.tokenizer.bos) != text.count(GAP):
            raise QkvError(f"a gap is part of a token of the text around it: put spaces around {GAP}")
        return self._checked(masked)

    def _rows(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(self._checked(self.tokenizer.encode(text.strip())), np.int64) for text in texts]

    def _checked(self, ids: list[int]) -> list[int]:
        limit = self.config.data.max_length
        if len(ids) > limit:
            raise UsageError(f"a text of {len(ids)} tokens: the model was trained on at most {limit}: split it")
        return ids
