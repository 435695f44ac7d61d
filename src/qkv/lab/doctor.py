"""`qkv doctor`: versions, devices, and a self-test in which a tiny model must learn and translate."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable

import numpy as np
import torch

from qkv import __version__
from qkv.assembly import build_model
from qkv.console import describe_device
from qkv.core.batches import collate
from qkv.core.device import choose_device, choose_precision
from qkv.core.optimizer import build_optimizer
from qkv.core.search import SearchOptions
from qkv.core.translate import search_all
from qkv.data.subwords import learn
from qkv.decoding.search_request import score_all
from qkv.options import TokenizerConfig, TrainConfig, TransformerConfig
from qkv.training.unpadded import loss_in_parts

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "sacrebleu", "rich", "typer", "tensorboard")


def examine(say: Callable[[str], object]) -> bool:
    """Print versions, devices and the results of the self-test; return whether everything passed."""
    say(f"qkv {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        try:
            say(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            say(f"  {name} is missing: pip install {name}")
            return False
    device = choose_device()
    say(f"device: {describe_device(device)}, training precision {choose_precision('auto', device)}")
    well = True
    for name, passed, detail in self_test(device):
        say(f"  {'ok  ' if passed else 'FAIL'} {name}: {detail}")
        well &= passed
    say("all is well" if well else "a check failed: please report the lines above")
    return well


def self_test(device: torch.device) -> list[tuple[str, bool, str]]:
    """Run the checks; return (name, passed, detail) of each. Takes a few seconds."""
    text = ["ein kleiner Test — è così 🙂", "one two three", "  spaces  ", "two three one", "three one two"]
    tokenizers = learn(text, text, TokenizerConfig(vocab=280), ())
    back = [tokenizers.src.decode(tokenizers.src.encode(line)) for line in text]
    results = [("tokenizer is lossless", back == text, f"{len(text)} lines")]

    torch.manual_seed(0)
    spec = TransformerConfig(d_model=32, d_ff=64, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0, norm="pre")
    model = build_model(spec, tokenizers.src.size, tokenizers.tgt.size).to(device)
    rows = [np.asarray(tokenizers.src.encode(line)) for line in text]
    batch = collate(rows, rows, tokenizers).to(device)
    optimizer = build_optimizer(model, TrainConfig())
    optimizer.param_groups[0]["lr"] = 5e-3
    losses = []
    for _ in range(150):
        hidden = model.hidden(batch.source, batch.lengths, batch.target)
        loss, _ = loss_in_parts(hidden, model.output.weight, batch.labels, smoothing=0.0, pad=0)
        losses.append(loss.item() / batch.tokens)
        (loss / batch.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    results.append(("a tiny model learns", losses[-1] < 0.1 * losses[0], f"loss {losses[0]:.2f} → {losses[-1]:.3f}"))

    model.eval()
    sources = [row.tolist() for row in rows]
    hypotheses = [h[0] for h in search_all(model, sources, SearchOptions(beam=2), tokenizers, device=device)]
    copied = [tokenizers.tgt.decode(h.tokens) for h in hypotheses]
    results.append(("it decodes what it learned", copied == text, f"{sum(map(str.__eq__, copied, text))} lines"))
    forced = score_all(model, sources, [h.tokens for h in hypotheses], tokenizers, device=device)
    gap = max(abs(sum(row) - h.logprob) for row, h in zip(forced, hypotheses, strict=True))
    results.append(("forced decoding gives the same scores", gap < 1e-3, f"largest difference {gap:.1e}"))
    return results
