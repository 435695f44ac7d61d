"""The model card: how a run was made and how well it does, for people."""

from __future__ import annotations

import json
from typing import Any

from qkv.data.store import Prepared
from qkv.models.transformer import build, parameter_count
from qkv.run import Run


def card(run: Run, prepared: Prepared) -> str:
    """Markdown from what the run folder knows; nothing in it is typed by hand."""
    config, scores = run.config, run.scores
    made = json.loads(run.marker.read_text(encoding="utf-8"))
    size = parameter_count(build(config.model, prepared.tokenizers.src.size, prepared.tokenizers.tgt.size))
    languages = f"{config.data.src_lang or 'source'} → {config.data.tgt_lang or 'target'}"
    lines = [
        f"# {config.train.name}: {languages}",
        "",
        f"- model: {config.model.kind}, {size:,} parameters, d_model {config.model.d_model}, "
        f"{config.model.encoder_layers} + {config.model.decoder_layers} layers, {config.model.heads} heads",
        f"- vocabulary: {prepared.tokenizers.tgt.size:,} tokens ({config.tokenizer.kind})",
        f"- training text: {len(prepared.train):,} pairs; validation: {len(prepared.valid):,} pairs",
        f"- made with: qkv {made['qkv']}, torch {made['torch']}, Python {made['python']}",
    ]
    if made["command"]:
        lines.append(f"- command: `{made['command']}`")
    lines += ["", "| weights | validation loss | BLEU (greedy) |", "|---|---|---|"]
    lines += [_row(name, scores[name], scores.get("chosen") == name) for name in ("best", "average") if name in scores]
    lines += ["", "## Text", "", "```", str(prepared.report), "```", ""]
    return "\n".join(lines)


def _row(name: str, score: dict[str, Any], chosen: bool) -> str:
    bleu = "" if score["bleu"] is None else f"{score['bleu']:.2f}"
    return f"| {name}{' (used by default)' if chosen else ''} | {score['loss']:.4f} | {bleu} |"
