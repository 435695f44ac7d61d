"""Export a trained run for other toolkits: a folder with weights, tokenizers and a README.md, usable without qkv.

With separate source and target vocabularies, the target's tokenizer is in the subfolder `target`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from qkv.assembly import Run
from qkv.console import say
from qkv.core import files
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import TokenizerPair
from qkv.core.transformer import Transformer
from qkv.decoding.search_request import tag_before
from qkv.interop.conversion import length_penalty_exponent
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.huggingface import library_tokenizer, to_huggingface, write_huggingface, write_tokenizer
from qkv.options import Config

__all__ = ["export", "to_ctranslate2", "to_huggingface"]

CTRANSLATE2_PROGRAM = """\
import ctranslate2
import tokenizers

folder = "."  # the folder of this file
source = tokenizers.Tokenizer.from_file(f"{{folder}}/tokenizer.json")
target = {target}
translator = ctranslate2.Translator(folder)  # compute_type="int8" is faster on a CPU and slightly less exact
texts = [source.encode(text).tokens for text in ("First sentence.", "And another.")]
search = {{"beam_size": {beam}, "length_penalty": {penalty}, "max_decoding_length": {longest}}}
for result in translator.translate_batch(texts, **search):
    print(target.decode([target.token_to_id(token) for token in result.hypotheses[0]]))
"""

HUGGINGFACE_PROGRAM = """\
import transformers

folder = "."  # the folder of this file
source = transformers.AutoTokenizer.from_pretrained(folder)
target = {target}
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
texts = source(["First sentence.", "And another."], return_tensors="pt", padding=True)
print(*target.batch_decode(model.generate(**texts), skip_special_tokens=True), sep="\\n")
"""


def export(run: str | Path | Run, *, to: str, output: str | Path, weights: str = "", tag: str = "") -> Path:
    """Export an encoder-decoder Transformer to a new folder for `ctranslate2` or `huggingface`; return the folder.

    tokenizer.json and README.md make the folder usable without qkv. A model trained with language tags is exported for
    one direction, that of `tag`. The folder appears only when it is complete; an existing one must be empty.
    """
    opened, folder = run if isinstance(run, Run) else Run.open(run), Path(output)
    if to not in WRITERS:
        raise UsageError(f'unknown export format "{to}": choose {" or ".join(WRITERS)}')
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty: name another folder")
    config, tokenizers = opened.config, opened.tokenizers
    tag_before(tag, tokenizers, config)
    model = opened.model(torch.device("cpu"), weights)
    if not isinstance(model, Transformer):
        raise UsageError(
            f'{opened.path}: cannot export a model of kind "{config.model.kind}": only Transformers that translate'
        )
    target = folder.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        program = WRITERS[to](model, tokenizers, config, draft, tag)
        readme = draft / "README.md"
        files.write_text(readme, _readme(opened, opened.weights(weights).stem, to, program))
        for path in draft.rglob("*"):  # safetensors makes its files readable by their owner only
            if path.is_file():
                path.chmod(readme.stat().st_mode)
        draft.replace(target)
    except (OSError, SafetensorError) as error:
        raise QkvError(f"{folder}: cannot be written: {files.reason(error)}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_ctranslate2(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers; return the program for the README."""
    to_ctranslate2(model, tokenizers, folder)
    files.write_text(folder / "tokenizer.json", library_tokenizer(tokenizers.src, tag).to_str())
    target = "source"
    if not tokenizers.shared:
        files.write_text(folder / "target" / "tokenizer.json", library_tokenizer(tokenizers.tgt).to_str())
        target = 'tokenizers.Tokenizer.from_file(f"{folder}/target/tokenizer.json")'
    penalty = length_penalty_exponent(config.decode)
    return CTRANSLATE2_PROGRAM.format(
        target=target, beam=config.decode.beam, penalty=penalty, longest=_max_output_length(config)
    )


def _write_huggingface(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers; return the program for the README."""
    write_huggingface(model, folder, config.decode, _max_output_length(config))
    write_tokenizer(tokenizers.src, folder, _max_output_length(config), tag)
    target = "source"
    if not tokenizers.shared:
        write_tokenizer(tokenizers.tgt, folder / "target", _max_output_length(config))
        target = 'transformers.AutoTokenizer.from_pretrained(folder, subfolder="target")'
    return HUGGINGFACE_PROGRAM.format(target=target)


WRITERS: dict[str, Callable[[Transformer, TokenizerPair, Config, Path, str], str]] = {
    "ctranslate2": _write_ctranslate2,
    "huggingface": _write_huggingface,
}
# Packages that the exported folder needs; the first is the hub's name for the format.
REQUIREMENTS = {"ctranslate2": "ctranslate2 tokenizers", "huggingface": "transformers torch"}


def _max_output_length(config: Config) -> int:
    """Return the largest number of tokens of any translation: the other toolkits have one limit for all sources."""
    return config.data.max_length + config.decode.extra_length


def _readme(run: Run, weights: str, to: str, program: str) -> str:
    """Return the README.md: a model hub's header, how to use the folder, and the run's model card."""
    data, card = run.config.data, run.path / "card.md"
    if run.in_training():
        say(f"{run.path} is in training: exporting its current {weights} weights")
    languages = [language for language in (data.src_lang, data.tgt_lang) if language]
    header = ["---"]
    if languages:
        header.append(f"language: {json.dumps(languages)}")  # quoted: YAML reads a bare `no` as false
    header += ["pipeline_tag: translation", f"library_name: {REQUIREMENTS[to].split()[0]}", "---"]
    title = f"# {run.path.resolve().name}: {data.src_lang or 'source'} → {data.tgt_lang or 'target'}"
    use = f"`pip install {REQUIREMENTS[to]}`, then:\n\n```python\n{program}```\n"
    about = card.read_text(encoding="utf-8").partition("\n")[2] if card.exists() else ""  # none yet while in training
    return "\n".join([*header, f"{title}\n\n{use}\nWeights: {weights}.\n{about}"])
