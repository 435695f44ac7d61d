"""Decoding speed of qkv in each setting and of other engines, on the same weights and sentences.

First the outputs are compared: every fp32 setting must give the same tokens. Then all settings run in turn, round after
round, so that disturbances by other programs affect all equally.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qkv.assembly import Run, parameter_count
from qkv.console import say
from qkv.core import files
from qkv.core.device import choose_device
from qkv.core.errors import QkvError, UsageError
from qkv.core.tokenizer import BOS, EOS, PAD, PRINTABLE, SPECIALS, Tokenizer, TokenizerPair
from qkv.core.transformer import Transformer
from qkv.data.formats import LineReader
from qkv.lab import contenders, training_speed
from qkv.lab.contenders import DecodeFunction, DecodingSetup, DecodingTask, Setting, Sources, Timed
from qkv.lab.result_tables import ResultTable, check_outputs, publish
from qkv.lab.training_speed import choose_size
from qkv.options import Config, TransformerConfig

BEAMS, BATCHES = (1, 4), (1, 64, 512)
SAME = 0.99  # share of sentences that must have equal tokens in fp32; the others are ties decided by rounding
PAUSE = 0.02  # seconds until the threads of the previous engine are idle
ONE_BY_ONE = 8  # sentences per round with batch 1
DRAWN = {"cpu": (256, 40), "gpu": (512, 30)}  # random sentences, tokens per sentence
EXTRA = 50  # maximum length of a translation beyond its source, as in the paper
FIXED = "all hypotheses of the beam, in any order; random weights exaggerate the effect of lower precision"


@dataclass(frozen=True)
class Text:
    """The sentences to decode, and how their outputs are compared."""

    name: str
    sources: Sources
    extra: int
    fixed: bool  # all outputs have the same length

    def of(self, setting: Setting, batch: int) -> Sources:
        """Return the sentences of one round: all, or every k-th for slow settings."""
        most = ONE_BY_ONE if batch == 1 else len(self.sources)
        if self.fixed and setting.one_batch:
            most = min(most, max(batch, ONE_BY_ONE))
        most = min(most, setting.most or most)
        return self.sources[:: max(1, len(self.sources) // most)][:most]


@dataclass
class Measurement(Timed):
    """One setting with one beam and batch size: its outputs and its speed in each round."""

    task: DecodingTask
    sources: Sources
    decode: DecodeFunction
    device: torch.device
    same: float = 0.0
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.setting.name}, batch {self.task.batch}"

    def run(self) -> None:
        time.sleep(PAUSE)
        contenders.synchronize(self.device)
        start = time.perf_counter()
        outputs = self.decode(self.sources, self.task)
        contenders.synchronize(self.device)
        seconds = time.perf_counter() - start
        # Some engines return </s>, some do not.
        self.tokens = sum(token != EOS for hypotheses in outputs for token in hypotheses[0])
        self.speeds.append(self.tokens / seconds)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "setting": self.setting.name,
            "fp32": self.setting.exact,
            "beam": self.task.beam,
            "batch": self.task.batch,
            "sentences": len(self.sources),
            "tokens": self.tokens,
            "ms_per_token": 1000 / statistics.median(self.speeds) if self.task.batch == 1 else None,
            "same": self.same,
        }


def measure_decoding(
    *,
    model: str = "",
    run: str = "",
    src: str = "",
    beams: Sequence[int] = (),
    batches: Sequence[int] = (),
    only: Sequence[str] = (),
    seconds: float = 10.0,
    device: str = "auto",
    outputs: Sequence[str] = (),
    command: str = "",
    folder: Path = contenders.PEERS,
) -> dict[str, Any]:
    """Measure decoding speed with random weights of a size or a trained run; print tables, write .json or .md files.

    `only` selects settings by words in their names; `folder` has the other software. In the result, `rows` has every
    setting with each beam and batch size; `ratios` has the fastest of qkv against the fastest of each other engine, by
    batch size (None: any), in fp32 and in any precision; `missing` has the reasons for settings that did not run.
    """
    check_outputs(outputs)
    beams, batches = beams or BEAMS, batches or BATCHES
    if bool(run) != bool(src) or (run and model):
        raise UsageError("give --run and --src together, or --model alone")
    if min(*beams, *batches, 1) < 1:
        raise UsageError("--beam and --batch: give numbers of at least 1")
    chosen, modules = choose_device(device), contenders.find_peers(folder, "decoding")
    with tempfile.TemporaryDirectory(prefix="qkv-") as temporary:
        size, spec, vocab = choose_size(model, chosen)
        opened = Run.open(run) if run else make_random_run(spec, vocab, Path(temporary) / "run")
        subject = DecodingSetup(opened, chosen, Path(temporary))
        text = _read_text(opened, src) if src else _random_text(opened, chosen, max(batches))
        available = contenders.decoding_settings(chosen, modules)
        decoders, missing = _open(subject, contenders.select(available, only, "setting"))
        reference = available[0].open(subject)
        rows = []
        for beam in beams:
            group = [
                Measurement(setting, DecodingTask(beam, batch, text.extra), text.of(setting, batch), decode, chosen)
                for batch in batches
                for setting, decode in decoders.items()
                if not setting.most or batch <= setting.most
            ]
            if not group:
                raise UsageError("--batch: these settings support batches of up to 64: give a smaller one")
            _compare(group, reference, text.fixed)
            say(f"beam {beam}: outputs compared, timing {len(group)} rows")
            contenders.run_in_turns(group, seconds, f"beam {beam}: ")
            rows += group
        result = contenders.surroundings(modules) | {
            "model": f"{run or size}, {parameter_count(subject.model):,} parameters",
            "text": text.name,
            "compared": FIXED if text.fixed else "the best hypothesis",
            "length_penalty": "none",
            "rows": [row.to_dict() for row in rows],
            "missing": missing,
            "ratios": _ratios(rows),
        }
    remarks = [
        f"{result['model']}; {result['text']}",
        f"same tokens: {result['compared']}",
        *contenders.remarks_on(result),
    ]
    return publish(result, _result_tables(result), remarks, device=device, command=command, outputs=outputs)


def _read_text(run: Run, src: str) -> Text:
    lines = [line for line in LineReader(src) if line]
    if not lines:
        raise UsageError(f"{src}: the file contains no text")
    sources = [run.tokenizers.src.encode(line) for line in lines]
    return Text(f"{src}, {len(sources):,} lines", sources, EXTRA, fixed=False)


def _random_text(run: Run, device: torch.device, batch: int) -> Text:
    count, length = DRAWN["cpu" if device.type == "cpu" else "gpu"]
    count = max(count, batch) if batch > 1 else ONE_BY_ONE
    sources = random_sentences(run, count, length)
    return Text(f"{count} sentences of {length} random tokens, outputs of {length} tokens", sources, 0, fixed=True)


def _open(subject: DecodingSetup, selected: Sequence[Setting]) -> tuple[dict[Setting, DecodeFunction], dict[str, str]]:
    """Open the selected settings; return them, and the reasons why others cannot run."""
    decoders, missing = {}, {}
    for setting in selected:
        try:
            decoders[setting] = setting.open(subject)
        except UsageError as reason:
            missing[setting.name] = str(reason)
    if not decoders:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return decoders, missing


# ---- random weights --------------------------------------------------------------------------------------------------


def make_random_run(spec: TransformerConfig, vocab: int, folder: Path) -> Run:
    """Create a run folder with random weights."""
    # With a random embedding tied to the output, each word would be followed by itself.
    settings = Config(model=spec).replace(model={"tie": "none", "dropout": 0.0})
    assert isinstance(settings.model, TransformerConfig)
    tokenizer = Tokenizer("word", [f"{i:06d}" for i in range(vocab - len(SPECIALS) - len(PRINTABLE))])
    torch.manual_seed(0)
    model = Transformer(settings.model, vocab, vocab)
    suppress_end_token(model)
    run = Run.create(folder, settings, TokenizerPair(tokenizer, tokenizer))
    files.write_tensors(folder / "weights" / "best.safetensors", dict(model.named_parameters()))
    return run


def suppress_end_token(model: Transformer) -> None:
    """Make <pad>, <s> and </s> practically impossible: their logits are always -32.

    The last norm gives a constant 4 in one of its d_model outputs, where alone these tokens have a weight, -8.
    """
    last = model.decoder_norm if model.config.norm == "pre" else model.decoder[-1].residuals[-1].norm
    assert isinstance(last, nn.LayerNorm)
    with torch.no_grad():
        last.weight[0], last.bias[0] = 0.0, 4.0
        for token in (PAD, BOS, EOS):
            model.output.weight[token] = 0.0
            model.output.weight[token, 0] = -8.0


def random_sentences(run: Run, count: int, length: int) -> list[list[int]]:
    """Return `count` random sources of exactly `length` tokens."""
    draws = torch.Generator().manual_seed(0)
    drawn: list[list[int]] = torch.randint(EOS + 1, run.tokenizers.src.size, (count, length), generator=draws).tolist()
    return drawn


# ---- comparing -------------------------------------------------------------------------------------------------------


def _compare(rows: Sequence[Measurement], reference: DecodeFunction, fixed: bool) -> None:
    """Set the share of sentences on which each row equals the reference; refuse fp32 rows below `SAME`.

    Where all outputs end at the same length, engines rank them with or without the score of </s>, so all hypotheses of
    the beam are compared, in any order.
    """
    expected: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for row in rows:
        task = replace(row.task, n_best=row.task.beam if fixed else 1)
        missing = [source for source in row.sources if tuple(source) not in expected]
        if missing:
            batch = replace(task, batch=64)
            expected |= zip(map(tuple, missing), map(_token_sets, reference(missing, batch)), strict=True)
        outputs = map(_token_sets, row.decode(row.sources, task))
        if task != row.task:
            row.decode(row.sources, row.task)  # warm-up with the timed options
        equal = [output == expected[tuple(source)] for source, output in zip(row.sources, outputs, strict=True)]
        row.same = sum(equal) / len(equal)
        if row.setting.exact and row.same < SAME:
            raise QkvError(
                f"{row.setting.name}, beam {task.beam}, batch {task.batch}: only {row.same:.1%} of the sentences have "
                f"the tokens of the plain model: the speeds are not comparable"
            )


def _token_sets(hypotheses: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """Return the hypotheses of one sentence as a set of token tuples, without </s>."""
    return {tuple(token for token in tokens if token != EOS) for tokens in hypotheses}


# ---- results ---------------------------------------------------------------------------------------------------------


def _ratios(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Compare the fastest settings of qkv and of each other engine, by batch size and precision."""
    ratios = []
    for beam in dict.fromkeys(row.task.beam for row in rows):
        same_beam = [row for row in rows if row.task.beam == beam]
        batches = [*dict.fromkeys(row.task.batch for row in same_beam)]
        for batch in [*batches, None] if len(batches) > 1 else batches:
            for exact in (True, False):
                chosen = [
                    row
                    for row in same_beam
                    if (batch is None or row.task.batch == batch) and (row.setting.exact or not exact)
                ]
                ratios += [{"beam": beam, "batch": batch, "fp32": exact} | ratio for ratio in contenders.ratios(chosen)]
    return ratios


def _result_tables(result: dict[str, Any]) -> list[ResultTable]:
    sheets = []
    for beam in dict.fromkeys(row["beam"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["beam"] == beam]
        batches = [*dict.fromkeys(row["batch"] for row in rows)]
        lines = []
        for name in dict.fromkeys(row["setting"] for row in rows):
            own = {row["batch"]: row for row in rows if row["setting"] == name}
            same = min(row["same"] for row in own.values())
            lines.append((name, f"{same:.1%}", *(_cell(own.get(batch)) for batch in batches)))
        title = f"{'greedy' if beam == 1 else f'beam {beam}'}: tokens per second, median (range)"
        sheets.append(ResultTable(title, ("", "same tokens", *(f"batch {batch}" for batch in batches)), tuple(lines)))
    lines = [
        (
            f"beam {ratio['beam']}, {'any batch' if ratio['batch'] is None else 'batch ' + str(ratio['batch'])}",
            "fp32" if ratio["fp32"] else "any",
            ratio["peer"],
            contenders.median_and_range(ratio),
            ratio["ours"],
            ratio["theirs"],
        )
        for ratio in result["ratios"]
    ]
    columns = ("", "precision", "peer", "ours / peer", "ours", "theirs")
    return [*sheets, *contenders.ratio_table(columns, lines)]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    latency = f", {row['ms_per_token']:.2f} ms per token" if row["ms_per_token"] and row["beam"] == 1 else ""
    return contenders.median_and_range(row) + latency


# ---- qkv lab speed ---------------------------------------------------------------------------------------------------

DECODING = {"run": "--run", "src": "--src", "beams": "--beam", "batches": "--batch"}  # options without use in training


def measure_speed(what: str, *, outputs: Sequence[str] = (), tokens: int = 0, **options: Any) -> dict[str, Any]:
    """Measure the speed of training, decoding or both; options are those of the measuring functions."""
    if what not in ("train", "decode", "all"):
        raise UsageError(f"lab speed {what}: choose one of train, decode, all")
    if what == "all" and outputs:
        raise UsageError("--output: one file per table: measure train and decode separately")
    if what == "decode" and tokens:
        raise UsageError("--tokens belongs to lab speed train: use --batch for decode")
    given = {name: value for name, value in options.items() if name in DECODING and value}
    if what == "train" and given:
        raise UsageError(f"{DECODING[next(iter(given))]} belongs to lab speed decode: omit it")
    results = {}
    if what != "decode":
        shared = {name: value for name, value in options.items() if name not in DECODING}
        results["train"] = training_speed.measure_training(outputs=outputs, tokens=tokens, **shared)
    if what != "train":
        results["decode"] = measure_decoding(outputs=outputs, **options)
    return results
