"""The model card: how a run was made and how well it does, for people."""

from __future__ import annotations

from typing import Any

import torch

from qkv import config as configs
from qkv.data.store import Prepared
from qkv.models.transformer import build, parameter_count
from qkv.run import Run
from qkv.text import Tokenizers


def card(run: Run, prepared: Prepared) -> str:
    """Markdown from what the run folder knows; nothing in it is typed by hand."""
    config, scores, made = run.config, run.scores, run.about
    size = parameters(config.model, prepared.tokenizers)
    languages = f"{config.data.src_lang or 'source'} → {config.data.tgt_lang or 'target'}"
    lines = [
        f"# {config.train.name}: {languages}",
        "",
        f"- model: {config.model.kind}, {size:,} parameters, d_model {config.model.d_model}, "
        f"{config.model.encoder_layers} + {config.model.decoder_layers} layers, {config.model.heads} heads",
        f"- vocabulary: {vocabulary(prepared.tokenizers)} ({config.tokenizer.kind})",
        f"- training text: {len(prepared.train):,} pairs; validation: {len(prepared.valid):,} pairs",
        f"- begun: {made['begun']}, with qkv {made['qkv']}, torch {made['torch']}, Python {made['python']}",
    ]
    if made["command"]:
        lines.append(f"- command: `{made['command']}`")
    lines += ["", "| weights | validation loss | BLEU (greedy) |", "|---|---|---|"]
    lines += [_row(name, scores[name], scores.get("chosen") == name) for name in ("best", "average") if name in scores]
    lines += ["", "## Text", "", "```", str(prepared.report), "```", ""]
    return "\n".join(lines)


def parameters(spec: configs.Model, tokenizers: Tokenizers) -> int:
    """How many parameters a model has, counted without making it."""
    with torch.device("meta"):
        return parameter_count(build(spec, tokenizers.src.size, tokenizers.tgt.size))


def vocabulary(tokenizers: Tokenizers) -> str:
    """The size of one shared vocabulary, or of both."""
    src, tgt = f"{tokenizers.src.size:,}", f"{tokenizers.tgt.size:,}"
    return f"{tgt} tokens" if tokenizers.shared else f"{src} + {tgt} tokens"


def _row(name: str, score: dict[str, Any], chosen: bool) -> str:
    loss = "" if score["loss"] is None else f"{score['loss']:.4f}"
    bleu = "" if score["bleu"] is None else f"{score['bleu']:.2f}"
    return f"| {name}{' (used by default)' if chosen else ''} | {loss} | {bleu} |"
