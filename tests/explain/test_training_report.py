"""The training report shows the values of the log for every kind of run; entropies and pictures are right."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.api.run_training import MeasuredTask
from qkv.assembly import Run, build_model, task_for
from qkv.core.batches import collate
from qkv.core.dataset import PreparedText
from qkv.core.errors import UsageError
from qkv.core.run import JsonlLog
from qkv.core.tokenizer import TokenizerPair
from qkv.data.lm_data import block_batch, mask_tokens
from qkv.data.subwords import learn
from qkv.explain import attention_heads
from qkv.explain.training_report import read_history, report_html, write_training_report
from qkv.models.variants import record_attention
from qkv.options import Config, TokenizerConfig, TransformerConfig

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = ["the cat sees the dog", "the dog sees the big cat and the small dog", "one cat", "two dogs see the cat"]
VOID = {"meta", "input", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """The elements of a page; all of them must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.data: dict[str, Any] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if dict(self.seen[-1][1]).get("id") == "data":
                self.data = json.loads(data)
            return
        if self.open and self.open[-1] != "style":
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data


@pytest.fixture(scope="module")
def tokenizers() -> TokenizerPair:
    return learn(TEXT, TEXT, TokenizerConfig(vocab=280), ())


def a_run(folder: Path, tokenizers: TokenizerPair, lines: list[dict[str, Any]] | None, **sections: Any) -> Run:
    """Return a run folder without training: only the log is written, unless `lines` is None."""
    run = Run.create(folder, Config.from_dict(sections), tokenizers, command="qkv train --run <b>&")
    if lines is not None:
        log = JsonlLog(run.log)
        for line in lines:
            values = dict(line)
            log.event(values.pop("event"), values.pop("step"), values)
    return run


def train_line(step: int, **values: Any) -> dict[str, Any]:
    line = {"loss": 8.0 / step, "nll": 7.0 / step, "norm": 1.5, "learning_rate": step * 1e-4, "tokens": 100 * step}
    return {"event": "train", "step": step, "epoch": 0} | line | {
        "skipped": 0, "tokens_per_second": 50.0, "seconds": 2.0 * step, **values
    }  # fmt: skip


def valid_line(step: int, **values: Any) -> dict[str, Any]:
    line = {
        "loss": 6.0 / step,
        "perplexity": math.exp(6.0 / step),
        "bleu": None,
        "sample": "",
        "tokens": 100 * step,
        "seconds": 2.0 * step + 1,
    }
    return {"event": "valid", "step": step} | line | values


def checked(runs: list[Run]) -> Page:
    """Return the report, checked: well-formed, without other files or servers, without undefined values."""
    text = report_html(runs)
    parsed = Page(text)
    assert not re.search(r"undefined|NaN|Infinity|None|null", parsed.text)
    assert "NaN" not in json.dumps(parsed.data)
    carried = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(carried) == parsed.data
    assert "<" not in carried  # nothing that a browser could take for markup
    assert not [attrs for tag, attrs in parsed.seen if tag in ("link", "img", "iframe") or {"src", "href"} & set(attrs)]
    rest = text.replace("http://www.w3.org/2000/svg", "")  # a name, not a request
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", rest)
    ids = [attrs["id"] for _, attrs in parsed.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in parsed.seen if tag == "th")
    return parsed


def lines_of(parsed: Page) -> dict[tuple[str, int, str], list[Any]]:
    """The values of every line of every chart, by title, run and label."""
    return {
        (chart["title"], line["run"], line["label"]): parsed.data["runs"][line["run"]][line["table"]][line["column"]]
        for chart in parsed.data["charts"]
        for line in chart["lines"]
    }


def entries(run: Path, event: str) -> list[dict[str, Any]]:
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in logged if line["event"] == event]


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_every_chart_has_the_numbers_of_the_log(tiny: Path) -> None:
    parsed = checked([Run.open(tiny)])
    lines = lines_of(parsed)
    train, valid = entries(tiny, "train"), entries(tiny, "valid")
    expected = {
        ("Loss", "training"): [line["nll"] for line in train],
        ("Loss", "validation"): [line["loss"] for line in valid],
        ("BLEU", "BLEU"): [line["bleu"] for line in valid],
        ("Learning rate", "learning rate"): [line["learning_rate"] for line in train],
        ("Gradient norm", "norm"): [line["norm"] for line in train],
        ("Tokens a second", "tokens/s"): [line["tokens_per_second"] for line in train],
        ("Objective", "as logged"): [line["loss"] for line in train],
    }
    for (title, label), values in expected.items():
        assert len(values) >= 2
        assert lines[title, 0, label] == values
    (run,) = parsed.data["runs"]
    for axis in ("step", "seconds", "tokens"):
        assert run["train"][axis] == [line[axis] for line in train]
    assert run["valid"]["step"] == [100, 200]
    assert run["valid"]["seconds"] == [line["seconds"] for line in valid]
    at = {line["step"]: line["tokens"] for line in train}
    assert run["valid"]["tokens"] == [at[100], at[200]]
    card = (tiny / "card.md").read_text(encoding="utf-8")
    facts = {row[0]: row[1] for row in parsed.cells if len(row) == 2}
    for name in ("model", "vocabulary", "training text", "begun"):
        assert f"- {name}: {facts[name]}\n" in card
    assert facts["steps"] == "200 (finished)"
    assert facts["skipped updates"] == "0"
    assert f"BLEU {Run.open(tiny).scores['best']['bleu']:.2f}" in facts["best weights"]
    assert [line["sample"] for line in valid][-1] in parsed.text
    source = (tiny / "store" / "valid.src.txt").read_text(encoding="utf-8").split("\n")[0]
    assert facts["source"] == source


def test_smoothing_is_the_mean_around_each_value(tmp_path: Path, tokenizers: TokenizerPair) -> None:
    values = np.random.default_rng(0).uniform(1, 2, 200)
    run = a_run(tmp_path / "run", tokenizers, [train_line(i + 1, nll=float(v)) for i, v in enumerate(values)])
    given, means = (np.array(read_history(run).train[name], float) for name in ("nll", "nll_smoothed"))
    reach = 200 // 40
    middle = np.convolve(given, np.ones(2 * reach + 1) / (2 * reach + 1), mode="valid")
    np.testing.assert_allclose(means[reach:-reach], middle, rtol=1e-5)
    assert (means[0], means[-1]) == (given[0], given[-1])
    assert means[1] == pytest.approx(given[:3].mean(), rel=1e-5)


def test_a_nan_in_the_log_leaves_a_gap(tmp_path: Path, tokenizers: TokenizerPair) -> None:
    lines = [
        train_line(1),
        train_line(2, loss=math.nan, nll=math.nan, norm=math.inf, skipped=1),
        train_line(3, skipped=1),
    ]
    parsed = checked([a_run(tmp_path / "run", tokenizers, [*lines, valid_line(3, loss=None, perplexity=None)])])
    lines_found = lines_of(parsed)
    assert lines_found["Loss", 0, "training"] == [7.0, None, pytest.approx(7 / 3, rel=1e-5)]
    assert lines_found["Gradient norm", 0, "norm"] == [1.5, None, 1.5]
    assert lines_found["Skipped updates", 0, "skipped"] == [0, 1, 1]
    plain = checked([a_run(tmp_path / "plain", tokenizers, [train_line(1, loss=7.0), train_line(2, loss=3.5)])])
    assert {title for title, _, _ in lines_of(plain)} == {"Loss", "Learning rate", "Gradient norm", "Tokens a second"}
    assert ("Loss", 0, "validation") not in lines_found


@pytest.mark.parametrize("lines", [None, []], ids=["no log", "an empty log"])
def test_a_run_that_has_just_begun(lines: list[Any] | None, tmp_path: Path, tokenizers: TokenizerPair) -> None:
    parsed = checked([a_run(tmp_path / "run", tokenizers, lines)])
    assert parsed.data["charts"] == []
    assert "Nothing is logged yet" in parsed.text
    facts = {row[0]: row[1] for row in parsed.cells}
    assert facts["steps"] == "none logged yet"
    assert facts["command"] == "qkv train --run <b>&"
    assert re.fullmatch(r"transformer, [\d,]+ parameters, d_model 512, 6 \+ 6 layers, 8 heads", facts["model"])


def test_a_run_that_is_going_on(tmp_path: Path, tokenizers: TokenizerPair) -> None:
    run = a_run(tmp_path / "run", tokenizers, [train_line(10), train_line(20)], train={"steps": 1000})
    with run.log.open("a", encoding="utf-8") as file:
        file.write('{"event": "train", "step": 30, "lo')
    parsed = checked([run])
    assert parsed.data["runs"][0]["train"]["step"] == [10, 20]
    assert ["steps", "20 (not finished, of at most 1,000)"] in parsed.cells


def test_a_run_that_was_resumed_counts_each_step_once(tmp_path: Path, tokenizers: TokenizerPair) -> None:
    logged = [train_line(1), train_line(2), train_line(3), train_line(2, nll=0.5), train_line(3), train_line(4)]
    run = a_run(tmp_path / "run", tokenizers, logged)
    run.write_scores({"finished": 2, "chosen": "best"})  # and then went on
    parsed = checked([run])
    assert parsed.data["runs"][0]["train"]["step"] == [1, 2, 3, 4]
    assert lines_of(parsed)["Loss", 0, "training"][1] == 0.5
    assert any(row[0] == "steps" and row[1].startswith("4 (not finished") for row in parsed.cells)


def test_a_single_validation_and_no_training_line(tmp_path: Path, tokenizers: TokenizerPair) -> None:
    parsed = checked(
        [a_run(tmp_path / "<!--<script>", tokenizers, [valid_line(5, bleu=12.5, sample="</script><b>uno & due")])]
    )
    assert lines_of(parsed) == {("Loss", 0, "validation"): [1.2], ("BLEU", 0, "BLEU"): [12.5]}
    assert parsed.data["runs"][0]["valid"]["tokens"] == [500]
    assert "</script><b>uno & due" in parsed.text  # as text


@pytest.mark.parametrize("kind", ["decoder", "encoder", "rnn", "conv"])
def test_every_kind_of_model_has_a_report(kind: str, tmp_path: Path, tokenizers: TokenizerPair) -> None:
    bits = {"nats_per_character": 1.4, "bits_per_byte": 2.02} if kind == "decoder" else {}
    name = {"decoder": "decoder.0.self", "encoder": "encoder.0.self"}.get(kind, "decoder.0.cross")
    lines = [train_line(1), train_line(2), valid_line(2, **bits, sample="one\ntwo", attention_entropy={name: 1.25})]
    run = a_run(tmp_path / "run", tokenizers, lines, model={"kind": kind})
    run.write_scores({"best": {"step": 2, "loss": 3.0, "bleu": None, **bits}, "chosen": "best", "finished": 2})
    parsed = checked([run])
    lines_found = lines_of(parsed)
    assert ("Objective", 0, "as logged") in lines_found
    assert ("Bits per byte", 0, "bits per byte") in lines_found or kind != "decoder"
    assert not any(title == "BLEU" for title, _, _ in lines_found)
    (entropy,) = [values for (title, _, _), values in lines_found.items() if title.startswith("Entropy")]
    assert entropy == [1.25]
    words = "2.0200 bits per byte, loss 3.0000, at step 2 (used)" if bits else "loss 3.0000, at step 2 (used)"
    assert ["best weights", words] in parsed.cells
    assert ["step 2", "one\ntwo"] in parsed.cells


# ---- two runs --------------------------------------------------------------------------------------------------------


def test_two_runs_share_their_axes_and_show_where_they_differ(
    tmp_path: Path, tiny: Path, tokenizers: TokenizerPair
) -> None:
    other = a_run(
        tmp_path / "other",
        tokenizers,
        [train_line(step) for step in (10, 20)] + [valid_line(20, bleu=50.0, sample="uno")],
        model={"kind": "rnn"},
        train={"steps": 20},
    )
    runs = [Run.open(tiny), other]
    parsed = checked(runs)
    assert [run["name"] for run in parsed.data["runs"]] == ["tiny", "other"]
    lines = lines_of(parsed)
    assert lines["Loss", 1, "training"] == [0.7, 0.35]
    assert lines["BLEU", 1, "BLEU"] == [50.0]
    assert lines["BLEU", 0, "BLEU"] == [line["bleu"] for line in entries(tiny, "valid")]
    assert len({chart["title"] for chart in parsed.data["charts"]}) == len(parsed.data["charts"])
    differences = runs[0].config.difference(other.config)
    shown = {row[0]: row[1:] for row in parsed.cells if row[0] in dict.fromkeys(path for path, _, _ in differences)}
    assert len(shown) == len(differences) > 10
    assert shown["train.steps"] == ["200", "20"]
    assert shown["model.heads"] == ["2", "–"]
    assert shown["model.cell"] == ["–", '"gru"' if other.config.model.cell == "gru" else '"lstm"']
    assert shown["data.train"][1] == "none"
    same = checked([runs[0], runs[0]])
    assert "Both runs have the same config." in same.text
    assert [run["name"] for run in same.data["runs"]] == [str(tiny)] * 2


def test_the_report_is_written_and_wrong_calls_are_refused(tiny: Path, tmp_path: Path) -> None:
    run = Run.open(tiny)
    write_training_report([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report_html([run])
    with pytest.raises(UsageError, match=r"report\.pdf.*\.html"):
        write_training_report([run], tmp_path / "report.pdf")
    for runs in ([], [run] * 3):
        with pytest.raises(UsageError, match="one run or two"):
            report_html(runs)


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_page_in_a_browser(tiny: Path, tmp_path: Path, tokenizers: TokenizerPair) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    uncounted = {key: value for key, value in valid_line(20, bleu=50.0, seconds=0.25).items() if key != "tokens"}
    other = a_run(tmp_path / "other", tokenizers, [uncounted])  # as older runs have it
    empty = a_run(tmp_path / "empty", tokenizers, [])
    write_training_report([Run.open(tiny), other], tmp_path / "two.html")
    write_training_report([empty], tmp_path / "empty.html")
    wrong: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 400, "height": 800})
        opened.on("console", lambda message: wrong.append(message.text))
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("request", lambda request: wrong.append(request.url) if request.url[:5] != "file:" else None)
        opened.goto((tmp_path / "empty.html").as_uri())
        assert "Nothing is logged yet" in opened.inner_text("main")
        opened.goto((tmp_path / "two.html").as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        loss, last = opened.locator("figure").first, entries(tiny, "train")[-1]
        loss.locator(".plot").focus()
        for axis in ("steps", "tokens", "time"):
            opened.get_by_label(axis, exact=True).check()
            loss.locator(".plot").focus()
            opened.keyboard.press("End")
            assert str(entries(tiny, "valid")[-1]["loss"]) in loss.locator(".tip").inner_text()
            assert loss.locator(".plot > .mark.run-1").count() == (axis != "tokens")
            assert "undefined" not in opened.content().split("<script")[0]
            assert "NaN" not in opened.content().split("<script")[0]
        loss.locator("summary").click()
        rows = loss.locator("table").first.locator("tbody tr").all_inner_texts()
        assert len(rows) == len(entries(tiny, "train"))
        assert str(last["nll"]) in rows[-1].split("\t")
        browser.close()
    assert wrong == []


# ---- attention entropy -----------------------------------------------------------------------------------------------

KINDS = {
    "transformer": {"d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 1},
    "decoder": {"d_model": 16, "d_ff": 16, "heads": 2, "layers": 2},
    "encoder": {"d_model": 16, "d_ff": 16, "heads": 2, "layers": 2},
    "rnn": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    "conv": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_that_of_every_sentence_alone(kind: str, tokenizers: TokenizerPair) -> None:
    """The padded batch gives the mean of −Σ a log a of the unpadded rows, computed in numpy."""
    torch.manual_seed(0)
    spec = Config.from_dict({"model": {"kind": kind, **KINDS[kind]}}).model
    model = build_model(spec, tokenizers.src.size, tokenizers.tgt.size).eval()
    rows = [np.asarray(tokenizers.src.encode(text), np.int64) for text in TEXT]

    def batch(chosen: list[int]) -> Any:
        picked = [rows[i] for i in chosen]
        if kind == "decoder":
            width = max(map(len, picked))
            return block_batch(
                np.stack([np.pad(row, (0, width - len(row)), constant_values=tokenizers.tgt.pad) for row in picked])
            )
        if kind == "encoder":
            return mask_tokens(picked, tokenizers.tgt, 0.2, [np.random.default_rng(i) for i in chosen])
        return collate([rows[-1 - i] for i in chosen], picked, tokenizers)

    alone: dict[str, list[float]] = {}
    with torch.inference_mode():
        entropies_of_batch = attention_heads.attention_entropy(
            model, batch(list(range(len(rows)))), tokenizers.tgt.pad, torch.device("cpu")
        )
        for i in range(len(rows)):
            with record_attention() as recording:
                model.hidden(*batch([i]).inputs)
            for name, parts in recording.items():
                weights = torch.cat(parts, dim=2)[0].double().numpy()  # (heads, queries, keys)
                entropies = -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0).sum(-1)
                alone.setdefault(name, []).extend(entropies.mean(0).tolist())
    assert entropies_of_batch.keys() == alone.keys() != set()
    for name, values in alone.items():
        assert entropies_of_batch[name] == pytest.approx(np.mean(values), rel=1e-4)
        assert 0 < entropies_of_batch[name] < math.log(max(map(len, rows)) + 1)


def test_validation_logs_the_entropy_of_a_small_batch(tiny: Path) -> None:
    run = Run.open(tiny)
    prepared, model = PreparedText.open(run.store), run.model(torch.device("cpu"))
    task, rows = task_for(run.config), attention_heads.SAMPLE_ROWS
    looked_at = attention_heads.first_rows(prepared, run.config, rows, attention_heads.SAMPLE_TOKENS)
    assert looked_at.source.shape[0] == rows
    first = [prepared.valid.row("tgt", i).tolist() for i in range(rows)]
    pad, eos = prepared.tokenizers.tgt.pad, prepared.tokenizers.tgt.eos
    assert [[t for t in row if t not in (pad, eos)] for row in looked_at.labels.tolist()] == first
    smaller = attention_heads.first_rows(prepared, run.config, rows, 40)
    assert 1 <= smaller.source.shape[0] < rows
    assert max(smaller.source.numel(), smaller.labels.numel()) <= 40
    spec = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, metric="loss"))
    result = MeasuredTask(task).validate(model, prepared, spec, torch.device("cpu"))
    assert set(result.details["attention_entropy"]) == {"encoder.0.self", "decoder.0.self", "decoder.0.cross"}
    assert "attention_entropy" not in result.to_dict()


def test_a_broken_model_has_no_entropy(tokenizers: TokenizerPair) -> None:
    """NaN cannot be written as JSON."""
    model = build_model(TransformerConfig(**KINDS["transformer"]), tokenizers.src.size, tokenizers.tgt.size)  # type: ignore[arg-type]
    with torch.no_grad():
        model.source.tokens.weight.fill_(math.nan)
    row = [np.asarray(tokenizers.src.encode(TEXT[0]), np.int64)]
    batch = collate(row, row, tokenizers)
    entropies_of_batch = attention_heads.attention_entropy(model, batch, tokenizers.tgt.pad, torch.device("cpu"))
    assert entropies_of_batch == {}
