"""The work that compare_commits.py gives to both trees: corpora, configs and command lines, as tables.

Placeholders: `{own}` is the folder of the tree's results, `{old}` the one of the old tree, `{text}` holds the corpora
and `{config}` the configs. The old tree has written every option of the configs, so both trees read the same values.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

Settings = dict[str, dict[str, Any]]
PRESETS = (
    "demo demo_rnn demo_conv multi30k multi30k_fr europarl paper_base paper_big paper_rnn "
    "paper_conv local char_lm masked_lm "
    "table3_a_1_head table3_b_d_k_16 table3_c_8_layers table3_d_dropout_0 table3_e_learned"
).split()

# ---- corpora ---------------------------------------------------------------------------------------------------------

SYLLABLES = "ba ce di fo gu la me ni po ru sa te vi zo ché più är ño ßi œu 中 ло".split()
TAGGED = ("xx", "yy")


def write_corpora(folder: Path) -> None:
    """Write the parallel, running, damaged and aligned text of all jobs; the same bytes at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "written").exists():
        return
    draw = random.Random(20)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(300)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    swapped = dict(zip(words, draw.sample(words, len(words)), strict=True))

    def pair(longest: int = 12) -> tuple[str, str, str]:
        source = draw.choices(words, weights, k=draw.randint(2, longest))
        order = list(range(len(source)))
        for i in range(0, len(order) - 1, 3):
            order[i : i + 2] = reversed(order[i : i + 2])
        links = " ".join(f"{i}-{place}" for place, i in enumerate(order))
        end = draw.choice([" .", " !", " 42 .", ""])
        return " ".join(source) + end, " ".join(swapped[source[i]] for i in order) + end, links

    pairs = [pair() for _ in range(2000)]
    for side, name in enumerate(("src", "tgt", "align")):
        (folder / f"clean.{name}").write_text("".join(f"{each[side]}\n" for each in pairs), encoding="utf-8")
    messy = [(s, t) for s, t, _ in (pair(30) for _ in range(1500))]
    messy += messy[:200] + [("", "a"), ("a", ""), ("", ""), ("ba " * 80, "ce " * 80), ("ba", "ce " * 30)] * 5
    messy += [("  ba\u0301  ce ", "e\u0301\u00a0x"), ("\u200bba", "\U0001f600 ce"), ("<s> </s> <pad>", "▁x ##y @@")] * 2
    # Pairs around every limit of length and ratio.
    messy += [(" ".join(words[:a]), " ".join(words[-b:])) for a in (1, 2, 3, 5, 9, 30) for b in range(1, 40)]
    draw.shuffle(messy)
    (folder / "messy.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in messy), encoding="utf-8")
    broken = [f"{s}\r\n".encode() for s, _ in messy]
    broken[7], broken[70] = b"\xff\xfe broken\n", b"\xc3\n"
    (folder / "broken.src.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf" + b"".join(broken)))
    (folder / "broken.tgt").write_text("".join(f"{t}\n" for _, t in messy), encoding="utf-8")
    for tag in TAGGED:
        rows = [pair() for _ in range(600)]
        data = "".join(json.dumps({"src": s, "tgt": t}, ensure_ascii=tag == "xx") + "\n" for s, t, _ in rows).encode()
        (folder / f"{tag}.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))
    (folder / "running.txt").write_text(
        "".join(draw.choice(["", "  "]) + s + draw.choice(["\n", "\n\n"]) for s, _, _ in pairs), encoding="utf-8"
    )
    many = [pair() for _ in range(200_000)]  # above 16 MiB several processes prepare
    for side, name in enumerate(("src", "tgt")):
        (folder / f"large.{name}").write_text("".join(f"{each[side]}\n" for each in many), encoding="utf-8")
    (folder / "few.txt").write_text("".join(f"{s}\n" for s, _, _ in pairs[:4]), encoding="utf-8")
    (folder / "written").touch()


CHARACTERS = {"kind": "char", "vocab": 0}

# ---- configs ---------------------------------------------------------------------------------------------------------

CLEAN = {"src": "{text}/clean.src", "tgt": "{text}/clean.tgt"}
TRAIN: dict[str, Any] = {
    "steps": 16,
    "tokens_per_step": 512,
    "warmup": 8,
    "learning_rate": 1.0,
    "clip": 1.0,
    "average": 0,
    "validate_every": 16,
    "log_every": 1,
    "tensorboard": False,
    "device": "cpu",
    "precision": "fp32",
    "seed": 7,
}
ATTENTION: dict[str, Any] = {"d_model": 32, "d_ff": 48, "heads": 4, "dropout": 0.1}
SMALL: dict[str, Any] = {"kind": "transformer", "encoder_layers": 2, "decoder_layers": 2, **ATTENTION}
DATA: dict[str, Any] = {"train": [CLEAN], "valid_size": 24, "max_length": 64, "src_lang": "en", "tgt_lang": "it"}
RUNNING = {"train": [{"text": "{text}/running.txt"}], "max_length": 48}
RNN: dict[str, Any] = {"kind": "rnn", "d_model": 32}
CONV: dict[str, Any] = {"kind": "conv", "d_model": 24, "encoder_layers": 2, "decoder_layers": 2}


def variant(
    model: Settings | dict[str, Any] | None = None, data: Any = None, tokenizer: Any = None, **train: Any
) -> Settings:
    """A config of a few updates on the small corpus; a model without `kind` is the small Transformer with changes."""
    given = model or {}
    return {
        "data": {**DATA, **(data or {})},
        "tokenizer": {"kind": "bpe", "vocab": 500, **(tokenizer or {})},
        "model": given if "kind" in given else {**SMALL, **given},
        "train": {**TRAIN, **train},
    }


MODERN = {"positions": "rotary", "activation": "swiglu", "norm": "pre"}
LEARNED = {"positions": "learned", "max_positions": 512, "bias": True, "activation": "gelu", "tie": "none"}
ALIGNED = {"train": [{**CLEAN, "align": "{text}/clean.align"}]}
MIXED = {
    "train": [
        {"src": "{text}/xx.jsonl.gz", "weight": 2.0, "tag": "xx"},
        {"src": "{text}/yy.jsonl.gz", "weight": 0.5, "tag": "yy"},
    ]
}
TWO = {"shared": False, "vocab": 400}

# Gate 1: a few updates of every kind of training; weights must be bit-identical.
VARIANTS: dict[str, Settings] = {
    "paper": variant(schedule="paper"),
    "modern": variant(MODERN),
    "rms_norm": variant({"rms_norm": True, "norm": "pre"}),
    "learned": variant(LEARNED),
    "window": variant({"window": 3}),
    "additive": variant({"attention": "additive"}),
    "general": variant({"attention": "general", "window": 4, "positions": "rotary"}),
    "widths": variant({"d_k": 6, "d_v": 10, "positions": "none", "heads": 3}),
    "dropouts": variant({"attention_dropout": 0.1, "activation_dropout": 0.1, "token_dropout": 0.1}),
    "decoder": variant({"kind": "decoder", "layers": 2, **ATTENTION}, RUNNING),
    "decoder modern": variant(
        {"kind": "decoder", "layers": 2, **ATTENTION, **MODERN}, RUNNING, {"kind": "char", "vocab": 0}
    ),
    "encoder": variant({"kind": "encoder", "layers": 2, **ATTENTION}, RUNNING, metric="loss"),
    "rnn": variant(RNN),
    "lstm": variant({**RNN, "cell": "lstm", "attention": "dot", "input_feeding": False, "encoder_layers": 2}),
    "rnn one way": variant({**RNN, "bidirectional": False, "attention": "general"}),
    "conv": variant(CONV),
    "conv dilated": variant({**CONV, "convolution": "dilated", "positions": "sinusoidal"}),
    "conv separable": variant({**CONV, "convolution": "separable"}),
    "r_drop": variant(r_drop=3.0),
    "r_drop modern": variant(MODERN, r_drop=3.0),
    "guided": variant({}, ALIGNED, guided_alignment=0.5),
    "guided modern": variant(MODERN, ALIGNED, guided_alignment=0.5),
    "adamw": variant(optimizer="adamw", weight_decay=0.1, schedule="cosine", learning_rate=2e-3),
    "muon": variant(MODERN, optimizer="muon", weight_decay=0.1, schedule="wsd", learning_rate=4e-3),
    "soap": variant(optimizer="soap", schedule="linear", learning_rate=2e-3),
    "ema": variant(ema=0.9, validate_every=8),
    "average": variant(average=3, validate_every=4),
    "smoothing": variant(label_smoothing=0.0, schedule="constant", learning_rate=1e-3, metric="loss"),
    "micro": variant(micro_tokens=128),
    "recomputed": variant(checkpointing=True),
    "bpe dropout": variant(tokenizer={"dropout": 0.1}),
    "two vocabularies": variant({"tie": "output"}, tokenizer=TWO),
    "corpora": variant(data=MIXED),
    "epochs": variant(data={"train": [{"src": "{text}/xx.jsonl.gz"}]}, steps=60, epochs=2.5, log_every=5),
}

# Gate 4: prepared text; one update of a tiny model, for there is no verb that only prepares.
TINY = {"d_model": 8, "d_ff": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1}


def store(data: Any = None, tokenizer: Any = None, model: Any = None) -> Settings:
    """A config of one update of a tiny model."""
    return variant({**TINY, "tie": "output", **(model or {})}, data, tokenizer, steps=1, metric="loss")


ONE_SIDE = {"layers": 1, "d_model": 8, "d_ff": 8, "heads": 1}
STORES: dict[str, Settings] = {
    "tsv": store({"train": [{"src": "{text}/messy.tsv"}]}),
    "tsv, own valid": store(
        {"train": [{"src": "{text}/messy.tsv"}], "valid": [{"src": "{text}/xx.jsonl.gz"}], "dedupe": False}
    ),
    "jsonl, tags, weights": store(MIXED),
    "alignments": store(ALIGNED),
    "alignments, own valid": store({**ALIGNED, "valid": [{"src": "{text}/messy.tsv"}], "max_length": 9}),
    "running text": variant({"kind": "decoder", **ONE_SIDE}, RUNNING, steps=1),
    "lines of text": variant({"kind": "encoder", **ONE_SIDE}, RUNNING, steps=1, metric="loss"),
    "two vocabularies": store(tokenizer=TWO),
    "unigram": store(tokenizer={"kind": "unigram", "vocab": 450}),
    "word": store({"train": [{"src": "{text}/messy.tsv"}]}, {"kind": "word"}),
    "char": store({"train": [{"src": "{text}/messy.tsv"}]}, CHARACTERS),
    "char of running text": variant({"kind": "decoder", **ONE_SIDE}, RUNNING, CHARACTERS, steps=1),
    "not UTF-8, xz, BOM, CRLF": store(
        {"train": [{"src": "{text}/broken.src.xz", "tgt": "{text}/broken.tgt"}], "on_bad": "skip", "max_ratio": 0.0}
    ),
    "automatic sizes": store({"valid_size": 0}, {"vocab": 0, "sample": 900}),
    "two processes": store({"train": [{"src": "{text}/large.src", "tgt": "{text}/large.tgt"}], "workers": 2}),
}

# The demo and the run folders that gate 2 decodes with, trained once by the old tree on the demo.
DEMO: Settings = {
    "data": {
        "train": [{"src": "demo:train.en", "tgt": "demo:train.it"}],
        "valid": [{"src": "demo:valid.en", "tgt": "demo:valid.it"}],
        "src_lang": "en",
        "tgt_lang": "it",
    },
    "tokenizer": {"vocab": 2000},
    "model": {
        "kind": "transformer",
        "d_model": 128,
        "d_ff": 512,
        "heads": 4,
        "dropout": 0.0,
        "encoder_layers": 2,
        "decoder_layers": 2,
    },
    "train": {
        **TRAIN,
        "steps": 200,
        "tokens_per_step": 1024,
        "schedule": "wsd",
        "learning_rate": 2e-3,
        "warmup": 50,
        "metric": "loss",
        "validate_every": 200,
        "log_every": 10,
        "seed": 1,
    },
}
BASE = {"kind": "transformer", "encoder_layers": 1, "decoder_layers": 2, "d_model": 64, "d_ff": 128, "heads": 4}


def fixed(model: dict[str, Any], steps: int = 150, **train: Any) -> Settings:
    """A small model of the demo, trained until it translates with mistakes of many kinds."""
    learning = {"learning_rate": 6e-3, "steps": steps, "validate_every": steps, **train}
    return {**DEMO, "model": {"dropout": 0.0, **model}, "train": {**DEMO["train"], **learning}}


RUNS: dict[str, Settings] = {
    "a": fixed({**BASE, "norm": "pre"}),
    "b": fixed({**BASE, "norm": "pre"}, 120, seed=2),
    "modern": fixed({**BASE, **MODERN}, 120),
    "learned": fixed({**BASE, **LEARNED, "norm": "pre"}, 120),
    "window": fixed({**BASE, "norm": "pre", "window": 5, "rms_norm": True}, 120),
    "additive": fixed({**BASE, "norm": "pre", "attention": "additive"}, 60),
    "rnn": fixed({"kind": "rnn", "d_model": 64}, 120),
    "lstm": fixed({"kind": "rnn", "cell": "lstm", "attention": "dot", "d_model": 64, "input_feeding": False}, 80),
    "conv": fixed({"kind": "conv", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2}, 120),
}
TEXT = {"data": {"train": [{"text": "demo:train.en"}], "max_length": 64, "valid_size": 200}}
ONE = {"d_model": 64, "d_ff": 128, "heads": 4, "layers": 2, "dropout": 0.0, "norm": "pre"}
RUNS["lm"] = {**fixed({"kind": "decoder", "positions": "rotary", **ONE}, 80), **TEXT}
RUNS["masked"] = {**fixed({"kind": "encoder", **ONE}, 60), **TEXT}

CONFIGS: dict[str, Settings] = {
    "demo": DEMO,
    **{f"G1/{name}": spec for name, spec in VARIANTS.items()},
    **{f"G4/{name}": spec for name, spec in STORES.items()},
    **{f"runs/{name}": spec for name, spec in RUNS.items()},
}


def toml(config: Settings) -> str:
    """Nested tables of a config as TOML: JSON's scalars are TOML's."""
    lines = []
    for section, values in config.items():
        tables = {key: value for key, value in values.items() if isinstance(value, list)}
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
        for key, items in tables.items():
            for item in items:
                lines += [f"[[{section}.{key}]]", *(f"{k} = {json.dumps(v)}" for k, v in item.items())]
    return "\n".join(lines) + "\n"


# ---- command lines ---------------------------------------------------------------------------------------------------

Job = dict[str, Any]
STOP = 100  # update after which the interrupted run is stopped


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def train(name: str, folder: str, *more: str) -> Job:
    argv = ["train", f"{{config}}/{file_name(name)}.toml", "--run", folder, *more]
    return {"id": f"train {folder}", "argv": argv, "fresh": folder}


def training_jobs(gate: str) -> list[Job]:
    """What gate 1 or gate 4 trains, in either tree."""
    shared = ["--set", "data.store={own}/store"]
    if gate == "G4":
        return [train(f"G4/{name}", f"{{own}}/G4/{file_name(name)}") for name in STORES]
    stopped = {
        **train("demo", "{own}/G1/stopped", *shared),
        "interrupt": {"log": "{own}/G1/stopped/log.jsonl", "step": STOP},
    }
    return [
        *({"id": f"config {name}", "argv": ["config", name]} for name in PRESETS),
        *(train(f"G1/{name}", f"{{own}}/G1/{file_name(name)}") for name in VARIANTS),
        train("G1/paper", "{own}/G1/adapted", "--from", "{own}/G1/ema"),
        train("demo", "{own}/demo", *shared),
        stopped,
    ]


def fixed_run_jobs() -> list[Job]:
    """What the old tree alone trains: the run folders of gate 2, and the shortlist of one of them."""
    shared = ["--set", "data.store={own}/store"]
    return [
        *(train(f"runs/{name}", f"{{own}}/runs/{name}", *shared) for name in RUNS),
        {"id": "learn shortlist", "argv": ["translate", "{own}/runs/a", "{text}/few.txt", "--shortlist"]},
    ]


def resume_jobs() -> list[Job]:
    """Go on with the run that was stopped: the tree's own, and a copy of the old tree's."""
    names = ("stopped", "stopped_by_old")
    return [{"id": f"resume {n}", "argv": ["train", "--resume", "--run", f"{{own}}/G1/{n}"]} for n in names]


def translate(run: str, *options: str) -> list[str]:
    return ["translate", f"{{old}}/{run}", "{lines}", "--json", "--device", "cpu", *options]


BEAM, GREEDY = ("--beam", "4"), ("--beam", "1")
OPTIONS: dict[str, tuple[str, ...]] = {
    "greedy": GREEDY,
    "beam 4": BEAM,
    "beam 7": ("--beam", "7"),
    "int8 greedy": (*GREEDY, "--dtype", "int8"),
    "int8 beam 4": (*BEAM, "--dtype", "int8"),
    "n-best": (*BEAM, "--n-best", "4"),
    "n-best 2 of 5": ("--beam", "5", "--n-best", "2"),
    "prefix": (*BEAM, "--prefix", "Il"),
    "prefix greedy": (*GREEDY, "--prefix", "Non"),
    "shortest and longest": (*BEAM, "--min-length", "9", "--max-length", "11"),
    "shortest greedy": (*GREEDY, "--min-length", "12", "--max-length", "14"),
    "average penalty": (*BEAM, "--length-penalty", "average"),
    "no penalty": (*BEAM, "--length-penalty", "none", "--n-best", "2"),
    "alpha": (*BEAM, "--alpha", "1.7"),
}
RULES: dict[str, tuple[str, ...]] = {
    "must include": (*BEAM, "--must-include", "casa"),
    "must include, ordered": (*BEAM, "--must-include", "casa", "--must-include", "ieri", "--ordered", "--n-best", "2"),
    "avoid": (*BEAM, "--avoid", "il", "--avoid", "la casa"),
    "avoid greedy": (*GREEDY, "--avoid", "il"),
    "groups": ("--beam", "6", "--groups", "3", "--diversity", "0.7", "--n-best", "3"),
    "coverage": (*BEAM, "--coverage", "0.3"),
    "no repeat": (*BEAM, "--no-repeat-ngram", "2"),
    "no repeat greedy": (*GREEDY, "--no-repeat-ngram", "2"),
    "repetition penalty": (*BEAM, "--repetition-penalty", "1.4"),
    "sample": ("--sample", "--seed", "5"),
    "sample, n-best": ("--sample", "--seed", "6", "--n-best", "3", "--temperature", "0.7"),
    "sample, limits": ("--sample", "--seed", "7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"),
    "shortlist": (*BEAM, "--shortlist"),
    "shortlist greedy": (*GREEDY, "--shortlist"),
    "rerank": (*BEAM, "--rerank", "chrf", "--candidates", "4"),
    "ensemble": (*BEAM, "--with", "{old}/runs/b"),
    "ensemble greedy": (*GREEDY, "--with", "{old}/runs/b"),
    "ensemble int8": (*BEAM, "--with", "{old}/runs/b", "--dtype", "int8"),
    "ensemble of kinds": (*BEAM, "--with", "{old}/runs/rnn", "--with", "{old}/runs/conv"),
    "ensemble, shortlist": (*BEAM, "--with", "{old}/runs/b", "--shortlist"),
    "two processes": (*BEAM, "--workers", "2"),
}
EACH = ("greedy", "beam 4", "int8 beam 4", "n-best")  # of every kind of model


def decoding_jobs(native: bool) -> list[Job]:
    """All decoding of gate 2: with the engine in C, or without a compiler."""
    where = "C" if native else "without C"

    def job(name: str, argv: list[str]) -> Job:
        return {"id": f"{where}: {name}", "argv": argv}

    rules = {k: v for k, v in RULES.items() if native or not k.startswith(("ensemble", "two"))}
    jobs = [job(f"a, {name}", translate("runs/a", *options)) for name, options in {**OPTIONS, **rules}.items()]
    others = [name for name in RUNS if name not in ("a", "b", "lm", "masked")]
    for run in ("demo", *(f"runs/{name}" for name in others)):
        jobs += [job(f"{Path(run).name}, {name}", translate(run, *OPTIONS[name])) for name in EACH]
    if not native:
        return jobs
    lm, masked, a, lines, page = "{old}/runs/lm", "{old}/runs/masked", "{old}/runs/a", "{lines}", "{own}/explain.json"
    return [
        *jobs,
        job("a, shortlist learned", ["translate", "{own}/copy/a", lines, "--json", "--shortlist", *BEAM]),
        *(job(f"{n}, score", ["score", f"{{old}}/runs/{n}", lines, "{refs}", "--json"]) for n in ("a", "rnn", "conv")),
        job("a, evaluate", ["evaluate", "{own}/copy/a", lines, "{refs}", "--json", *BEAM]),
        job("a, align", ["align", a, lines, "{refs}"]),
        job("a, heads", ["heads", a, lines, "{refs}", "--json", "--pairs", "20"]),
        {**job("a, explain", ["explain", a, "The cat sleeps.", "-o", page]), "file": page},
        job("lm, greedy", ["complete", lm, "The", "--tokens", "90", "--temperature", "0", "--json"]),
        job("lm, sample", ["complete", lm, "My cat", "--tokens", "90", "--seed", "3", "-n", "4", "--json"]),
        job("lm, limits", ["complete", lm, "--top-k", "9", "--top-p", "0.9", "--seed", "4", "--json"]),
        job("lm, evaluate", ["evaluate", lm, lines, "--json"]),
        job("masked, fill", ["fill", masked, "The <mask> is a <mask> cat.", "--json"]),
        job("masked, evaluate", ["evaluate", masked, "--json"]),
    ]  # fmt: skip


# What one timing does: 60 updates of the demo, then greedy and beam search of the demo's model.
SPEED: dict[str, Any] = {
    "run": "{own}/speed",
    "train": [
        *("train", "{config}/demo.toml", "--run", "{own}/speed", "--set", "data.store={own}/store"),
        *("--set", "train.steps=60", "--set", "train.validate_every=60"),
    ],
    "model": "{old}/demo",
    "lines": "{lines}",
    "repeat": 3,
}
