"""A trained run for those who have another engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from qkv.api.asking import tag_before
from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.export.folder import FORMATS, write_folder
from qkv.models.transformer import Transformer
from qkv.run import Run
from qkv.terminal import say


def export(run: str | Path | Run, *, to: str, output: str | Path, weights: str = "", tag: str = "") -> Path:
    """Write a Transformer that translates as a folder of another engine: ctranslate2 or huggingface.

    Its tokenizer.json and README.md make it usable without qkv. A model trained with language tags becomes one for the
    `tag` that is named. The folder appears when it is whole; one that has something in it is refused.
    """
    opened, folder = run if isinstance(run, Run) else Run.open(run), Path(output)
    if to not in FORMATS:
        raise UsageError(f'"{to}" is no format to export to: choose {" or ".join(FORMATS)}')
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: there is something in it: name another folder")
    tag_before(tag, opened.tokenizers, opened.config)
    model = opened.model(torch.device("cpu"), weights)
    if not isinstance(model, Transformer):
        kind = opened.config.model.kind
        raise UsageError(
            f'{opened.path}: its model is of the kind "{kind}": only Transformers that translate are exported'
        )
    place = folder.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        about = _about(opened, opened.weights(weights).stem)
        write_folder(to, model, opened.tokenizers, opened.config, draft, tag=tag, about=about)
        _readable(draft)
        draft.replace(place)
    except (OSError, SafetensorError) as error:
        raise QkvError(f"{folder}: cannot be written: {files.reason(error)}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _about(run: Run, weights: str) -> str:
    """The run's card under a title of its own, and which weights these are; a run in training has no card yet."""
    data, card = run.config.data, run.path / "card.md"
    if run.in_training():
        say(f"{run.path} is in training: these are its {weights} weights so far")
    title = f"# {run.path.resolve().name}: {data.src_lang or 'source'} → {data.tgt_lang or 'target'}"
    told = card.read_text(encoding="utf-8").partition("\n")[2] if card.exists() else ""
    return f"{title}\n\nWeights: {weights}.\n{told}"


def _readable(folder: Path) -> None:
    """Let everybody read everything whom a new file lets: safetensors keeps its own to its owner."""
    mode = (folder / "README.md").stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
