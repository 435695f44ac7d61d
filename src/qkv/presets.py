"""Ready-made configs, by name: `qkv train NAME`, or `qkv.presets.NAME()` from Python."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config import Config, Corpus, Data, Tokenizer, Train, Transformer


def paper_base() -> Config:
    """The base model of the paper, trained as in its section 5 (Table 3, first row); it wants --src and --tgt."""
    return Config(
        tokenizer=Tokenizer(vocab=37_000),
        model=Transformer(),
        train=Train(steps=100_000, warmup=4000, tokens_per_step=25_000, average=5, name="paper_base"),
    )


def paper_big() -> Config:
    """The big model of the paper (Table 3, last row); for English-French the paper lowers dropout to 0.1."""
    return Config(
        tokenizer=Tokenizer(vocab=37_000),
        model=Transformer(d_model=1024, d_ff=4096, heads=16, dropout=0.3),
        train=Train(steps=300_000, warmup=4000, tokens_per_step=25_000, average=20, name="paper_big"),
    )


def demo() -> Config:
    """The paper's architecture, small, on the built-in English-Italian corpus: a few minutes on two cores."""
    return Config(
        data=Data(
            train=(Corpus(src="demo:train.en", tgt="demo:train.it"),),
            valid=(Corpus(src="demo:valid.en", tgt="demo:valid.it"),),
            src_lang="en",
            tgt_lang="it",
        ),
        tokenizer=Tokenizer(vocab=2000),
        # Hardly a sentence is seen three times, so there is nothing to overfit and dropout would only slow learning.
        model=Transformer(d_model=128, d_ff=512, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0),
        # Many small updates learn more from the same tokens than a few large ones (benchmarks/NOTES.md).
        train=Train(
            steps=3400,
            tokens_per_step=1024,
            schedule="cosine",
            learning_rate=2e-3,
            warmup=200,
            clip=1.0,
            average=0,
            validate_every=850,
            name="demo",
        ),
    )


PRESETS: dict[str, Callable[[], Config]] = {"demo": demo, "paper_base": paper_base, "paper_big": paper_big}
