"""A folder that somebody can use who has the other engine and not this project: weights, tokenizers, and a README.md.

Where the two sides have vocabularies of their own, the target's tokenizer is in the folder `target` inside.
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
from qkv.decoding.search_request import tag_before
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.exported_weights import penalty
from qkv.interop.huggingface import library_tokenizer, write_huggingface, write_tokenizer
from qkv.models.transformer import Transformer
from qkv.options import Config

CTRANSLATE2 = """\
import ctranslate2
import tokenizers

folder = "."  # where this file is
source = tokenizers.Tokenizer.from_file(f"{{folder}}/tokenizer.json")
target = {target}
translator = ctranslate2.Translator(folder)  # compute_type="int8" is faster on a CPU, and a little less exact
texts = [source.encode(text).tokens for text in ("First sentence.", "And another.")]
search = {{"beam_size": {beam}, "length_penalty": {penalty}, "max_decoding_length": {longest}}}
for found in translator.translate_batch(texts, **search):
    print(target.decode([target.token_to_id(token) for token in found.hypotheses[0]]))
"""

HUGGINGFACE = """\
import transformers

folder = "."  # where this file is
source = transformers.AutoTokenizer.from_pretrained(folder)
target = {target}
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
texts = source(["First sentence.", "And another."], return_tensors="pt", padding=True)
print(*target.batch_decode(model.generate(**texts), skip_special_tokens=True), sep="\\n")
"""

Writer = Callable[[Transformer, TokenizerPair, Config, Path, str], str]


def for_ctranslate2(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers; returns the program that uses them."""
    to_ctranslate2(model, tokenizers, folder)
    files.write_text(folder / "tokenizer.json", library_tokenizer(tokenizers.src, tag).to_str())
    target = "source"
    if not tokenizers.shared:
        files.write_text(folder / "target" / "tokenizer.json", library_tokenizer(tokenizers.tgt).to_str())
        target = 'tokenizers.Tokenizer.from_file(f"{folder}/target/tokenizer.json")'
    search = config.decode
    return CTRANSLATE2.format(target=target, beam=search.beam, penalty=penalty(search), longest=_longest(config))


def for_huggingface(model: Transformer, tokenizers: TokenizerPair, config: Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers; returns the program that uses them."""
    write_huggingface(model, folder, config.decode, _longest(config))
    write_tokenizer(tokenizers.src, folder, _longest(config), tag)
    target = "source"
    if not tokenizers.shared:
        write_tokenizer(tokenizers.tgt, folder / "target", _longest(config))
        target = 'transformers.AutoTokenizer.from_pretrained(folder, subfolder="target")'
    return HUGGINGFACE.format(target=target)


FORMATS: dict[str, Writer] = {"ctranslate2": for_ctranslate2, "huggingface": for_huggingface}
NEEDED = {"ctranslate2": "ctranslate2 tokenizers", "huggingface": "transformers torch"}  # the first reads the folder


def write_folder(
    to: str,
    model: Transformer,
    tokenizers: TokenizerPair,
    config: Config,
    folder: Path,
    *,
    tag: str,
    about: str,
) -> None:
    """Write all of it; `about` is what there is to say of the model, with a title."""
    program = FORMATS[to](model, tokenizers, config, folder, tag)
    title, _, rest = about.partition("\n")
    use = f"`pip install {NEEDED[to]}`, then:\n\n```python\n{program}```\n"
    files.write_text(folder / "README.md", f"{_matter(to, config)}{title}\n\n{use}{rest}")


def _matter(to: str, config: Config) -> str:
    """What a hub of models reads at the top of a README.md."""
    languages = [language for language in (config.data.src_lang, config.data.tgt_lang) if language]
    lines = [f"language: {json.dumps(languages)}"] if languages else []  # quoted: "no" would be false in YAML
    lines += ["pipeline_tag: translation", f"library_name: {NEEDED[to].split()[0]}"]
    return "\n".join(["---", *lines, "---", ""])


def _longest(config: Config) -> int:
    """The most tokens of a translation: for every source the other engines have one limit alone."""
    return config.data.max_length + config.decode.extra_length


# ---- A trained run for those who have another engine -----------------------------------------------------------------


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
