"""The model card: origin, text and scores of a run, in Markdown."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qkv.assembly import Run, build_model
from qkv.core.dataset import PreparedText
from qkv.core.tokenizer import TokenizerPair
from qkv.data.text_preparation import filter_table
from qkv.options import AttentionModelConfig, Config, DecoderOnlyConfig, ModelConfig, TranslationConfig


def card(run: Run, prepared: PreparedText) -> str:
    """Return the card as Markdown, generated from the files of the run folder."""
    config, scores, about = run.config, run.scores, run.about
    size = parameters(config.model, prepared.tokenizers)
    translates = isinstance(config.model, TranslationConfig)
    languages = f"{config.data.src_lang or 'source'} → {config.data.tgt_lang or 'target'}"
    title = languages if translates else config.data.tgt_lang or "plain text"
    lines = [
        f"# {config.train.name}: {title}",
        "",
        f"- model: {config.model.kind}, {size:,} parameters, {shape(config.model)}",
        f"- vocabulary: {vocabulary(prepared.tokenizers)} ({config.tokenizer.kind})",
        f"- training text: {len(prepared.train):,} {unit(config)}; validation: {len(prepared.valid):,} {unit(config)}",
        f"- begun: {about['begun']}, with qkv {about['qkv']}, torch {about['torch']}, Python {about['python']}",
    ]
    if about["command"]:
        lines.append(f"- command: `{about['command']}`")
    figure = "bits per byte" if isinstance(config.model, DecoderOnlyConfig) else "BLEU (greedy)"
    lines += ["", f"| weights | validation loss | {figure} |", "|---|---|---|"]
    lines += [_row(name, scores[name], scores.get("chosen") == name) for name in ("best", "average") if name in scores]
    lines += ["", "## Text", "", "```", filter_table(prepared.report), "```", ""]
    return "\n".join(lines)


def parameters(spec: ModelConfig, tokenizers: TokenizerPair) -> int:
    """Return the number of parameters of a model, without allocating them."""
    with torch.device("meta"):
        return parameter_count(build_model(spec, tokenizers.src.size, tokenizers.tgt.size))


def shape(spec: ModelConfig) -> str:
    """Describe the size of a model, and its positions unless they are the paper's."""
    if isinstance(spec, TranslationConfig):
        layers = f"{spec.encoder_layers} + {spec.decoder_layers}"
    else:
        layers = str(getattr(spec, "layers", ""))
    heads = positions = ""
    if isinstance(spec, AttentionModelConfig):
        heads = f", {spec.heads} heads" if spec.heads > 1 else ", 1 head"
        if spec.positions != "sinusoidal":
            positions = f", {'no' if spec.positions == 'none' else spec.positions} positions"
    return f"d_model {spec.d_model}, {layers} layers{heads}{positions}"


def unit(config: Config) -> str:
    """Return the unit of the text: pairs or lines."""
    return "pairs" if isinstance(config.model, TranslationConfig) else "lines"


def vocabulary(tokenizers: TokenizerPair) -> str:
    """Describe the size of the shared vocabulary, or of both."""
    src, tgt = f"{tokenizers.src.size:,}", f"{tokenizers.tgt.size:,}"
    return f"{tgt} tokens" if tokenizers.shared else f"{src} + {tgt} tokens"


def _row(name: str, score: dict[str, Any], chosen: bool) -> str:
    loss = "" if score["loss"] is None else f"{score['loss']:.4f}"
    figure = "" if score["bleu"] is None else f"{score['bleu']:.2f}"
    if "bits_per_byte" in score:
        figure = f"{score['bits_per_byte']:.4f}"
    return f"| {name}{' (used by default)' if chosen else ''} | {loss} | {figure} |"


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
