"""The text that a command line names, as corpora of a config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.core.errors import UsageError

if TYPE_CHECKING:
    from qkv.config import Config, CorpusConfig


def with_pairs(
    config: Config | None, src: list[str], tgt: list[str], valid_src: str | None, valid_tgt: str | None
) -> Config:
    """The config with the pairs that the command line names."""
    from qkv import config as configs

    if config is None and not src:
        raise UsageError("nothing to train on: give a preset, a config file, --src and --tgt, or --text")
    if tgt and len(tgt) != len(src):
        raise UsageError(f"{len(src)} --src but {len(tgt)} --tgt: give one for each")
    if valid_tgt and not valid_src:
        raise UsageError(f"--valid-tgt {valid_tgt}: give --valid-src too")
    config = config or configs.Config()
    data = config.data
    if src:
        corpora = tuple(configs.CorpusConfig(src=s, tgt=t) for s, t in zip(src, tgt or [""] * len(src), strict=True))
        data = dataclasses.replace(data, train=corpora, valid=(), root="")
    if valid_src:
        data = dataclasses.replace(data, valid=(configs.CorpusConfig(src=valid_src, tgt=valid_tgt or ""),))
    return dataclasses.replace(config, data=data)


def with_more(config: Config, also: list[str]) -> Config:
    """The config with more corpora beside those that it has."""
    if also and not config.data.valid:
        # What is held out is a part of everything: the best checkpoint would be the one most like a machine's text.
        raise UsageError(
            f"--also {also[0]}: what was made by a model is no text to validate on: give --valid-src and --valid-tgt"
        )
    more = tuple(_corpus(each, config.data.root) for each in also)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(*config.data.train, *more)))


def _corpus(given: str, root: str) -> CorpusConfig:
    """A corpus as --also has it: FILE, FILE:WEIGHT or FILE:WEIGHT:TAG."""
    from qkv import config as configs

    # A name may hold colons of its own: the longest that is a file is one.
    ends = [*(i for i, letter in enumerate(given) if letter == ":"), len(given)]
    end = next((end for end in reversed(ends) if Path(given[:end]).exists()), ends[0])
    name, (weight, _, tag) = given[:end], given[end + 1 :].partition(":")
    try:
        value = float(weight or "1")
    except ValueError:
        raise UsageError(f'--also {given}: "{weight}" is no weight: write FILE:WEIGHT, e.g. {name}:0.5') from None
    # On the command line a path starts from here, in a config from its root.
    path = str(Path(name).absolute()) if root and name != "-" else name
    return configs.CorpusConfig(src=path, weight=value, tag=tag)


def with_text(config: Config | None, text: list[str], valid_text: str | None) -> Config:
    """The config with the plain text that the command line names; without any, it is of a language model."""
    from qkv import config as configs

    if config is None and not text:
        raise UsageError(f"--valid-text {valid_text}: give --text too")
    config = config or configs.Config(model=configs.DecoderOnlyConfig())
    data = config.data
    if text:
        data = dataclasses.replace(data, train=tuple(configs.CorpusConfig(text=t) for t in text), valid=(), root="")
    if valid_text:
        data = dataclasses.replace(data, valid=(configs.CorpusConfig(text=valid_text),))
    return dataclasses.replace(config, data=data)
