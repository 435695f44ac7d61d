"""A trained run for those who have another engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from qkv.api.asking import tag_before
from qkv.errors import UsageError
from qkv.export.folder import write_folder
from qkv.run import Run


def export(run: str | Path | Run, *, to: str, output: str | Path, weights: str = "", tag: str = "") -> Path:
    """Write a Transformer that translates as a folder of another engine: ctranslate2 or huggingface.

    Its tokenizer.json and README.md make it usable without qkv. A model trained with language tags becomes one for the
    `tag` that is named. The folder appears when it is whole; one that has something in it is refused.
    """
    opened, folder = run if isinstance(run, Run) else Run.open(run), Path(output)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder}: is there already: name another folder, or remove it")
    config, tokenizers = opened.config, opened.tokenizers
    tag_before(tag, tokenizers, config)
    model = opened.model(torch.device("cpu"), weights)
    card = opened.path / "card.md"
    about = card.read_text(encoding="utf-8") if card.exists() else f"# {config.train.name}\n"
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        write_folder(to, model, tokenizers, config, draft, tag=tag, card=about)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
