"""Exports: other toolkits compute the same numbers and write the same text; unsupported options are refused."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv
from conftest import Call, sentences, tiny_config, write_pairs
from qkv.assembly import Run, build_model
from qkv.core.batches import pad
from qkv.core.errors import UsageError
from qkv.core.search import SearchOptions
from qkv.core.tokenizer import BOS, EOS, PAD, Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.core.translate import search_all
from qkv.data.subwords import unique_names
from qkv.decoding.search_request import score_all
from qkv.interop.ctranslate2 import to_ctranslate2
from qkv.interop.huggingface import to_huggingface
from qkv.options import TransformerConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no network access

CPU = torch.device("cpu")
WORDS = 40  # learned tokens; the vocabulary has the bytes too
EXTRA = 30  # extra tokens of a translation, more than the trained models usually need
TOKENIZER = Tokenizer("word", [f"w{i}" for i in range(WORDS)], tags=("it",))
TOKENIZERS = TokenizerPair(TOKENIZER, TOKENIZER)
NAMES = unique_names(TOKENIZER)
SMALL: dict[str, Any] = {
    "d_model": 32,
    "d_ff": 48,
    "heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "dropout": 0.0,
    "max_positions": 32,
}


def some_model(**options: Any) -> Transformer:
    """Large random weights: no bias is zero, no gain one."""
    torch.manual_seed(1)
    model = build_model(TransformerConfig(**SMALL | options), TOKENIZER.size, TOKENIZER.size).eval()
    gains = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    for p in model.parameters():
        nn.init.normal_(p, mean=1.0 if id(p) in gains else 0.0, std=0.2)
    return model


def some_ids(count: int, seed: int) -> list[list[int]]:
    """Sentences of one to twelve words."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=draws).tolist()
    return [torch.randint(TOKENIZER.size - WORDS, TOKENIZER.size, (n,), generator=draws).tolist() for n in lengths]


@cache
def taught_model(norm: str) -> Transformer:
    """A model half trained to copy: its outputs vary and mostly end in </s>, unlike those of random weights."""
    torch.manual_seed(2)
    spec = TransformerConfig(**SMALL | {"norm": norm, "decoder_layers": 2})
    model = build_model(spec, TOKENIZER.size, TOKENIZER.size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(120):
        ids = as_rows(some_ids(32, seed=100 + step))
        logits = model(ids, (ids != PAD).sum(1), F.pad(ids[:, :-1], (1, 0), value=BOS))
        F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=PAD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def as_rows(sentences: list[list[int]]) -> Tensor:
    """(batch, width): each with </s> behind it, and padding."""
    return pad([torch.tensor(ids).numpy() for ids in sentences], PAD, last=EOS)


def as_names(sentences: list[list[int]], *last: int) -> list[list[str]]:
    return [[NAMES[i] for i in (*ids, *last)] for ids in sentences]


# ---- the same numbers ------------------------------------------------------------------------------------------------

SHARED_OPTIONS = [
    {},
    {"norm": "pre"},
    {"activation": "gelu"},
    {"bias": True},
    {"attention": "dot"},
    {"attention": "general", "bias": True},
]
UNTIED = [{"tie": "output"}, {"tie": "none"}]
CTRANSLATE2_OPTIONS: list[dict[str, Any]] = [
    {"norm": "pre", "tie": "none"},
    {"rms_norm": True},
    {"rms_norm": True, "norm": "pre"},
    {"activation": "swiglu"},
    {"positions": "learned"},
    {"positions": "none"},
    {"positions": "rotary"},
    {"positions": "rotary", "attention": "dot"},
    {"d_k": 12, "d_v": 12},
]


def words(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items()) or "paper"


@pytest.mark.parametrize("options", [*SHARED_OPTIONS, *UNTIED, *CTRANSLATE2_OPTIONS], ids=words)
def test_ctranslate2_scores_as_we_do(options: dict[str, Any], tmp_path: Path) -> None:
    model = some_model(**options)
    sources, targets = some_ids(12, seed=3), some_ids(12, seed=4)
    ours = score_all(model, sources, targets, TOKENIZERS, device=CPU)
    theirs = translator(model, tmp_path).score_batch(as_names(sources, EOS), as_names(targets))
    for mine, scored in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(scored.log_probs, abs=1e-4)


@pytest.mark.parametrize("options", [*SHARED_OPTIONS, *UNTIED], ids=words)
def test_transformers_logits_are_ours(options: dict[str, Any], tmp_path: Path) -> None:
    model = some_model(**options)
    source = as_rows(some_ids(12, seed=3))
    target = F.pad(as_rows(some_ids(12, seed=4)), (1, 0), value=BOS)
    inputs = {"input_ids": source, "attention_mask": (source != PAD).long(), "decoder_input_ids": target}
    theirs = to_huggingface(model)
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        ours = model(source, (source != PAD).sum(1), target)
        for each in (theirs, type(theirs).from_pretrained(tmp_path).eval()):
            torch.testing.assert_close(each(**inputs).logits, ours, atol=1e-4, rtol=0)


def translator(model: Transformer, folder: Path) -> Any:
    to_ctranslate2(model, TOKENIZERS, folder)
    return importlib.import_module("ctranslate2").Translator(str(folder), compute_type="float32")


# ---- the same text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_text_and_scores_are_the_same(norm: str, beam: int, tmp_path: Path) -> None:
    """Without a length penalty: the others divide by length**alpha, the paper by ((5 + length) / 6)**alpha."""
    model, sources = taught_model(norm), some_ids(40, seed=5)
    spec = SearchOptions(beam=beam, length_penalty="none", extra_length=EXTRA)
    best = [hypotheses[0] for hypotheses in search_all(model, sources, spec, TOKENIZERS, device=CPU)]
    ended = [i for i, hypothesis in enumerate(best) if not hypothesis.truncated]
    assert len(ended) > 20
    assert len({tuple(hypothesis.tokens) for hypothesis in best}) > 20

    named = translator(model, tmp_path).translate_batch(
        as_names(sources, EOS),
        beam_size=beam,
        length_penalty=0.0,
        return_scores=True,
        min_decoding_length=0,  # otherwise </s> is excluded from the first step, and the rest is renormalised
        max_decoding_length=12 + EXTRA,
    )
    rows = to_huggingface(model).generate(
        as_rows(sources),
        attention_mask=(as_rows(sources) != PAD).long(),
        num_beams=beam,
        do_sample=False,
        max_new_tokens=12 + EXTRA + 1,
        return_dict_in_generate=True,
        output_scores=True,
        **({"length_penalty": 0.0} if beam > 1 else {}),
    )
    for i in ended:  # the others have one limit for all sentences
        tokens = best[i].tokens
        assert named[i].hypotheses[0] == as_names([tokens])[0]
        assert named[i].scores[0] == pytest.approx(best[i].logprob, abs=1e-4)
        assert rows.sequences[i, 1 : len(tokens) + 2].tolist() == [*tokens, EOS]
        if beam > 1:
            assert float(rows.sequences_scores[i]) == pytest.approx(best[i].logprob, abs=1e-4)


# ---- a folder that is usable without qkv -----------------------------------------------------------------------------


TEXTS = ["Two cat runs and the dog sees.", "One."]


def output_of_readme(folder: Path) -> list[str]:
    """Run the program in the README.md on other texts, with qkv blocked, and return the lines it prints."""
    program = (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    program = program.replace('"First sentence.", "And another."', ", ".join(map(repr, TEXTS)))
    block = "import sys; sys.modules['qkv'] = None\n"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block + program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("to", ["ctranslate2", "huggingface"])
def test_the_readme_of_an_exported_run_translates(tiny: Path, to: str, tmp_path: Path, call: Call) -> None:
    done = call("export", tiny, "--to", to, "-o", tmp_path / "new" / to)
    assert (done.code, done.err) == (0, "")
    assert str(tmp_path / "new" / to / "README.md") in done.out
    assert output_of_readme(tmp_path / "new" / to) == [
        translation.text for translation in qkv.load(tiny).translate(TEXTS)
    ]
    card = (tmp_path / "new" / to / "README.md").read_text(encoding="utf-8")
    for part in ('language: ["en", "it"]', "# tiny: en → it", f"pip install {to[:4]}", "Weights: ", "d_model 64"):
        assert part.replace("hugg", "transformers") in card
    assert not [path for path in (tmp_path / "new").iterdir() if path.name != to]
    assert len({path.stat().st_mode for path in (tmp_path / "new" / to).iterdir()}) == 1  # others may read all of it


@pytest.mark.parametrize("to", ["ctranslate2", "huggingface"])
def test_tags_and_two_vocabularies_are_exported(to: str, tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path, sentences(1500))
    spec = tiny_config(source, target, metric="loss", average=0).replace(
        data={"train": [{"src": source, "tgt": target, "tag": "it"}]},
        tokenizer={"shared": False},
        model={"tie": "output", "norm": "post"},
        decode={"beam": 1},
    )
    run = qkv.train(spec, tmp_path / "run")
    with pytest.raises(UsageError, match="one of them as tag"):
        qkv.export(run, to=to, output=tmp_path / "out")
    qkv.export(run, to=to, output=tmp_path / "out", tag="it")
    assert output_of_readme(tmp_path / "out") == [
        translation.text for translation in qkv.load(run).translate(TEXTS, tag="it")
    ]
    assert (tmp_path / "out" / "target" / "tokenizer.json").exists()


def test_a_link_to_an_empty_folder_is_accepted(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    qkv.export(tiny, to="ctranslate2", output=tmp_path / "link")
    assert (tmp_path / "empty" / "model.bin").exists()


def test_a_run_in_training_is_exported_as_it_is(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.open(tiny).lock():
        qkv.export(tiny, to="ctranslate2", output=tmp_path / "out")
    assert f"{tiny} is in training: exporting its current" in capsys.readouterr().err
