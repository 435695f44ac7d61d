"""A run folder of random weights, so that any size of model can be decoded without training it first.

Every output is exactly as long as its source: </s> is never chosen before the limit, which is a matter of the weights
alone, so that every engine writes the same number of tokens without being told to.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from qkv import config, presets
from qkv.core import files
from qkv.core.errors import UsageError
from qkv.models.transformer import Transformer
from qkv.run import Run
from qkv.text import Tokenizers
from qkv.text.tokenizer import BOS, EOS, PAD, PRINTABLE, SPECIALS, Tokenizer

SIZES: dict[str, tuple[config.ModelConfig, int]] = {  # the model, and its vocabulary
    "small": (config.TransformerConfig(d_model=256, d_ff=1024, heads=4, encoder_layers=3, decoder_layers=3), 8000),
    "base": (presets.paper_base().model, 37_000),
    "demo": (presets.demo().model, 2000),
}


def make_run(size: str, folder: Path, *, seed: int = 0) -> Run:
    """A run of that size, `small`, `base` or `demo`, in the folder."""
    if size not in SIZES:
        raise UsageError(f"--model {size}: choose one of {', '.join(SIZES)}")
    spec, vocab = SIZES[size]
    assert isinstance(spec, config.TransformerConfig)
    # Tied to the output a random embedding would have each word followed by itself.
    settings = config.Config(model=spec).replace(model={"tie": "none", "dropout": 0.0})
    assert isinstance(settings.model, config.TransformerConfig)
    tokenizer = Tokenizer("word", [f"{i:06d}" for i in range(vocab - len(SPECIALS) - len(PRINTABLE))])
    torch.manual_seed(seed)
    model = Transformer(settings.model, vocab, vocab)
    forget_the_end(model)
    run = Run.create(folder, settings, Tokenizers(tokenizer, tokenizer))
    files.write_tensors(folder / "weights" / "best.safetensors", dict(model.named_parameters()))
    return run


def forget_the_end(model: Transformer) -> None:
    """Make <pad>, <s> and </s> as good as impossible: their logits are -32, whatever was read and written.

    The last norm is made to give 4 in one of its d_model outputs, and these tokens read nothing but that.
    """
    last = model.decoder_norm if model.spec.norm == "pre" else model.decoder[-1].residuals[-1].norm
    assert isinstance(last, nn.LayerNorm)
    with torch.no_grad():
        last.weight[0], last.bias[0] = 0.0, 4.0
        for token in (PAD, BOS, EOS):
            model.output.weight[token] = 0.0
            model.output.weight[token, 0] = -8.0


def sentences(run: Run, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Random sources: `count` of exactly `length` tokens."""
    draws = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(EOS + 1, run.tokenizers.src.size, (count, length), generator=draws).tolist()
    return drawn
