"""A folder that somebody can use who has the other engine and not this project: weights, tokenizers, and a README.md.

Where the two sides have vocabularies of their own, the target's tokenizer is in the folder `target` inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from qkv import config as configs
from qkv.core import files
from qkv.export.ctranslate2 import to_ctranslate2
from qkv.export.huggingface import write_huggingface, write_tokenizer
from qkv.export.parts import penalty
from qkv.models.transformer import Transformer
from qkv.text import Tokenizers

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

Writer = Callable[[Transformer, Tokenizers, configs.Config, Path, str], str]


def for_ctranslate2(model: Transformer, tokenizers: Tokenizers, config: configs.Config, folder: Path, tag: str) -> str:
    """Write model and tokenizers; returns the program that uses them."""
    to_ctranslate2(model, tokenizers, folder)
    files.write_text(folder / "tokenizer.json", tokenizers.src.to_library(tag).to_str())
    target = "source"
    if not tokenizers.shared:
        files.write_text(folder / "target" / "tokenizer.json", tokenizers.tgt.to_library().to_str())
        target = 'tokenizers.Tokenizer.from_file(f"{folder}/target/tokenizer.json")'
    search = config.decode
    return CTRANSLATE2.format(target=target, beam=search.beam, penalty=penalty(search), longest=_longest(config))


def for_huggingface(model: Transformer, tokenizers: Tokenizers, config: configs.Config, folder: Path, tag: str) -> str:
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
    to: str, model: Transformer, tokenizers: Tokenizers, config: configs.Config, folder: Path, *, tag: str, about: str
) -> None:
    """Write all of it; `about` is what there is to say of the model, with a title."""
    program = FORMATS[to](model, tokenizers, config, folder, tag)
    title, _, rest = about.partition("\n")
    use = f"`pip install {NEEDED[to]}`, then:\n\n```python\n{program}```\n"
    files.write_text(folder / "README.md", f"{_matter(to, config)}{title}\n\n{use}{rest}")


def _matter(to: str, config: configs.Config) -> str:
    """What a hub of models reads at the top of a README.md."""
    languages = [language for language in (config.data.src_lang, config.data.tgt_lang) if language]
    lines = [f"language: {json.dumps(languages)}"] if languages else []  # quoted: "no" would be false in YAML
    lines += ["pipeline_tag: translation", f"library_name: {NEEDED[to].split()[0]}"]
    return "\n".join(["---", *lines, "---", ""])


def _longest(config: configs.Config) -> int:
    """The most tokens of a translation: for every source the other engines have one limit alone."""
    return config.data.max_length + config.decode.extra_length
