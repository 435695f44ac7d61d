"""Train transformers' MarianMT with a usual training loop for a fixed time: the baseline of the recipes.

    python benchmarks/peer_loop.py train.en train.de valid.en valid.de --seconds 110 --every 30 -o peer.json
        [--test test.en test.de …] [--d-model 256] [--layers 3] [--tokens 8192] [--vocab 10000] [--lines 3000]
        [--store DIR]

The subwords are those of qkv, so that the scores are comparable. Everything else is usual: shuffled padded batches of
similar length; AdamW; warm-up and a cosine over the given time; bf16 autocast on a GPU; label smoothing; `generate`
with beam 4 on the first `--lines` of the validation set every `--every` seconds, which counts as training time.
The clock starts after the preparation of the text, which `--store` keeps for further runs. `benchmarks/curves.py` plots
the output next to runs of qkv.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sacrebleu import corpus_bleu, corpus_chrf
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from qkv.core.tokenizer import TokenizerPair
from qkv.data.formats import read_lines
from qkv.data.text_preparation import prepare_text
from qkv.options import CorpusConfig, DataConfig, TokenizerConfig

Pair = tuple[list[int], list[int]]


def learn(files: list[str], vocab: int, store: str = "") -> tuple[TokenizerPair, list[Pair]]:
    """Learn subwords; return the tokenizers and the training pairs as ids."""
    train, valid = CorpusConfig(src=files[0], tgt=files[1]), CorpusConfig(src=files[2], tgt=files[3])
    with tempfile.TemporaryDirectory() as folder:
        data = DataConfig(train=(train,), valid=(valid,), store=store)
        prepared = prepare_text(data, TokenizerConfig(vocab=vocab), Path(folder))
        pairs = prepared.train
        return prepared.tokenizers, [
            (pairs.row("src", i).tolist(), pairs.row("tgt", i).tolist()) for i in range(len(pairs))
        ]


def build(size: argparse.Namespace, tokenizers: TokenizerPair) -> MarianMTModel:
    tokens = tokenizers.tgt
    layers = {"encoder_layers": size.layers, "decoder_layers": size.layers}
    heads = {"encoder_attention_heads": size.heads, "decoder_attention_heads": size.heads}
    widths = {"encoder_ffn_dim": size.d_ff, "decoder_ffn_dim": size.d_ff, "d_model": size.d_model}
    special = {"pad_token_id": tokens.pad, "eos_token_id": tokens.eos, "decoder_start_token_id": tokens.bos}
    shared = {"scale_embedding": True, "share_encoder_decoder_embeddings": True, "activation_function": "relu"}
    drop = {"dropout": size.dropout, "attention_dropout": 0.0, "activation_dropout": 0.0}
    output = {"vocab_size": tokens.size, "max_position_embeddings": 512, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**layers, **heads, **widths, **special, **shared, **drop, **output))


def padded(rows: list[list[int]], pad: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def batches(pairs: list[Pair], tokens: int, draw: random.Random) -> Iterator[list[Pair]]:
    """Yield one epoch: pairs of similar length, about `tokens` padded tokens per batch, batches shuffled."""
    noise = np.random.default_rng(draw.getrandbits(32)).random(len(pairs))
    order = np.argsort(np.array([len(target) for _, target in pairs]) + noise)
    epoch, longest = [], 0
    batch: list[Pair] = []
    for pair in map(pairs.__getitem__, order.tolist()):
        longest = max(longest, *map(len, pair))
        if batch and (len(batch) + 1) * longest > tokens:
            epoch.append(batch)
            batch, longest = [], max(map(len, pair))
        batch.append(pair)
    epoch.append(batch)
    draw.shuffle(epoch)
    yield from epoch


@torch.no_grad()
def translate(model: MarianMTModel, tokenizers: TokenizerPair, lines: list[str], device: torch.device) -> list[str]:
    model.eval()
    src, tgt, texts = tokenizers.src, tokenizers.tgt, {}
    order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
    for first in range(0, len(order), 128):
        some = order[first : first + 128]
        source = padded([[*src.encode(lines[i]), src.eos] for i in some], src.pad).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model.generate(
                source, attention_mask=source != src.pad, num_beams=4, max_new_tokens=source.shape[1] + 50
            )
        for i, row in zip(some, out.tolist(), strict=True):
            texts[i] = tgt.decode([token for token in row if token not in (tgt.pad, tgt.bos, tgt.eos)])
    model.train()
    return [texts[i] for i in range(len(lines))]


class Peer:
    """The model, its training text and its clock."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(given.seed)
        self.given, self.draw = given, random.Random(given.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # As in qkv: cuDNN's attention, PyTorch's default on recent GPUs, builds a new plan for every shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.tokenizers, self.pairs = learn(given.files, given.vocab, given.store)
        self.valid, self.reference = (list(read_lines(name))[: given.lines] for name in given.files[2:])
        self.began = time.monotonic()
        self.model = build(given, self.tokenizers).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=given.rate, betas=(0.9, 0.98), weight_decay=0.01)
        self.step = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def update(self, batch: list[Pair]) -> Tensor:
        given, src, tgt = self.given, self.tokenizers.src, self.tokenizers.tgt
        self.step += 1
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, self.seconds / given.seconds)))
        for group in self.optimizer.param_groups:
            group["lr"] = given.rate * min(self.step / given.warmup, falling)
        source = padded([[*a, src.eos] for a, _ in batch], src.pad).to(self.device)
        target = padded([[tgt.bos, *b] for _, b in batch], tgt.pad).to(self.device)
        labels = padded([[*b, tgt.eos] for _, b in batch], tgt.pad).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(input_ids=source, attention_mask=source != src.pad, decoder_input_ids=target).logits
        smoothed = {"ignore_index": tgt.pad, "label_smoothing": 0.1}
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **smoothed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self) -> list[dict[str, float]]:
        """Train until the time is up; return the curve of validation BLEU.

        The last validation runs after the end; no other validation starts that could overlap it.
        """
        curve: list[dict[str, float]] = []
        due, took = self.given.every, 0.0
        while True:
            for batch in batches(self.pairs, self.given.tokens, self.draw):
                loss = self.update(batch)
                now = self.seconds
                if now < self.given.seconds and (now < due or now + 2 * took >= self.given.seconds):
                    continue
                texts = translate(self.model, self.tokenizers, self.valid, self.device)
                bleu = corpus_bleu(texts, [self.reference]).score
                curve.append({"seconds": self.seconds, "step": self.step, "loss": loss.item(), "bleu": bleu})
                print(curve[-1], flush=True)
                if now >= self.given.seconds:
                    return curve
                took = self.seconds - now
                due = self.seconds + self.given.every


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=4)
    parser.add_argument("--test", nargs="+", default=[])
    parser.add_argument("--store", default="")
    parser.add_argument("-o", "--output", required=True)
    sizes = {"d_model": 256, "d_ff": 1024, "heads": 4, "layers": 3, "tokens": 8192, "vocab": 10_000}
    clock = {"seconds": 110.0, "every": 30.0, "warmup": 500, "seed": 1, "lines": 3000}
    for name, value in {**sizes, **clock, "dropout": 0.3, "rate": 1e-3}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args()
    if len(given.test) % 2:
        parser.error("--test: give a source and a reference for each set")
    peer = Peer(given)
    report: dict[str, Any] = {"curve": peer.train(), "steps": peer.step, "settings": vars(given), "test": {}}
    output = Path(given.output)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for files in zip(given.test[::2], given.test[1::2], strict=True):
        source, reference = (list(read_lines(name)) for name in files)
        texts = translate(peer.model, peer.tokenizers, source, peer.device)
        scores = {name: corpus_bleu(texts, [reference], lowercase=name != "bleu").score for name in ("bleu", "lower")}
        report["test"][files[0]] = scores | {"chrf": corpus_chrf(texts, [reference]).score}
        print(files[0], report["test"][files[0]], flush=True)
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
