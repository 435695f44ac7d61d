"""The evaluation page holds the numbers of `--json`, escapes every text and works offline; its filter filters."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from test_training_report import Page

from browsing import launched, needs_chromium
from conftest import Call, sentences, write_pairs
from qkv.core.errors import UsageError
from qkv.evaluation import diagnosis, metrics
from qkv.evaluation.diagnosis import diagnose
from qkv.explain.evaluation_page import (
    FLAGGED,
    LISTED,
    System,
    chrf_histogram,
    marked,
    page_html,
    ratio_histogram,
    sentence_lists,
    write_evaluation_page,
)

EVIL = "</script><script>alert('x')</script> & \"quoted\" <!-- {{title}} <b>bold</b>"
SOURCES, REFERENCES = [list(side) for side in zip(*sentences(80, seed=3), strict=True)]


def spoilt(seed: int) -> list[str]:
    """Some outputs empty, copied, looping, invented; some with another word; the rest right."""
    dice = random.Random(seed)
    outputs = []
    for source, reference in zip(SOURCES, REFERENCES, strict=True):
        words = reference.split()
        words[dice.randrange(len(words))] = "boh"
        others = ["", source, "il gatto " * 9, "Qualcuno compra quattro biciclette.", " ".join(words)]
        outputs.append(dice.choice([*others, reference, reference]))
    return outputs


def system(name: str, hypotheses: list[str], sources: list[str], references: list[str]) -> System:
    scores = metrics.score(hypotheses, references, bootstrap=20)
    return System(name, scores, diagnose(sources, hypotheses, references))


ONE = system("runs/one", spoilt(1), SOURCES, REFERENCES)
TWO = system("runs/two", spoilt(2), SOURCES, REFERENCES)
COMPARISON = metrics.compare(spoilt(1), spoilt(2), REFERENCES, bootstrap=20)


def checked(systems: list[System], comparison: metrics.Comparison | None = None) -> Page:
    """Return the page, checked: well-formed, and without references to other files or servers."""
    text = page_html(systems, comparison)
    parsed = Page(text)
    assert not re.search(r"undefined|NaN|Infinity|None|null", parsed.text)
    assert [tag for tag, _ in parsed.seen].count("script") == 1
    assert not [attrs for tag, attrs in parsed.seen if tag in ("link", "img", "iframe") or {"src", "href"} & set(attrs)]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in parsed.seen if tag == "th")
    return parsed


def test_the_tables_have_the_measured_numbers() -> None:
    parsed = checked([ONE, TWO], COMPARISON)
    rows = {row[0]: row[1:] for row in reversed(parsed.cells) if len(row) == 4}
    for a, b in zip(ONE.scores, TWO.scores, strict=True):
        assert rows[a.name][:2] == [f"{s.value:.2f} [{s.low:.2f}, {s.high:.2f}]" for s in (a, b)]
        assert a.signature in parsed.text
    gain = f"{TWO.scores.bleu.value - ONE.scores.bleu.value:+.2f}".replace("-", "−")
    assert rows["BLEU"][2] == f"{gain}, p = {COMPARISON.bleu.p:.4f}"
    values = [each.diagnosis.to_dict() for each in (ONE, TWO)]
    for flag, meaning in values[0]["definitions"].items():
        shown = [f"{each['counts'][flag]} ({100 * each['rates'][flag]:.2f} %)" for each in values]
        assert rows[flag] == [*shown, meaning]
    assert rows["length ratio"][:2] == [f"{each['length_ratio']:.3f}" for each in values]
    for a, b in zip(*(each["by_length"] for each in values), strict=True):
        name = str(a["low"]) if a["low"] == a["high"] else f"{a['low']}–{a['high']}"
        numbers = [row[1:] for row in parsed.cells if row[0] == name and len(row) == 4]
        assert numbers == [[str(a["sentences"]), f"{a[m]:.2f}", f"{b[m]:.2f}"] for m in ("bleu", "chrf")]


def test_histograms_count_every_sentence_in_its_bin() -> None:
    columns = ONE.diagnosis.to_dict()["sentences"]
    by_score, by_ratio = chrf_histogram(ONE.diagnosis), ratio_histogram(ONE.diagnosis)
    assert sum(by_score) == sum(by_ratio) == len(ONE.diagnosis.sentences) == 80
    assert by_score[-1] == sum(value >= 95 for value in columns["chrf"])
    assert by_score[0] == sum(value < 5 for value in columns["chrf"])
    assert by_ratio[10] == sum(0.95 <= value < 1.05 for value in columns["length_ratio"])
    assert by_ratio[-1] == sum(value >= 1.95 for value in columns["length_ratio"])


def test_every_text_is_escaped() -> None:
    texts = [EVIL, *SOURCES[:5]], [EVIL * 2, *SOURCES[:5]], [f"no {EVIL}", *SOURCES[:5]]
    parsed = checked([system(EVIL, texts[1], texts[0], texts[2])])
    assert EVIL in parsed.text
    assert not {"b", "!--"} & {tag for tag, _ in parsed.seen}


def test_differing_words_are_marked() -> None:
    assert marked("Il gatto nero dorme.", ["Il gatto dorme."]) == "Il gatto <mark>nero</mark> dorme."
    assert marked("a b c d", ["d c"]) == "<mark>a b</mark> c <mark>d</mark>"  # in order: not both
    assert marked("a <b>", ["a"], ' class="missed"') == 'a <mark class="missed">&lt;b&gt;</mark>'
    assert marked("a b c", ["a b", "b c"]) == "<mark>a</mark> b <mark>c</mark>"  # what one of them lacks
    assert marked("我喜欢猫", ["我喜欢狗"]) == "我喜欢<mark>猫</mark>"
    assert marked("  same  text ", ["same text"]) == "  same  text "
    assert marked("", ["same"]) == ""


def test_the_lists_hold_the_right_sentences() -> None:
    lists = {each.key: each for each in sentence_lists([ONE])}
    assert list(lists)[:2] == ["worst", "random"]
    assert [pair[0] for pair in lists["worst"].pairs] == ONE.diagnosis.ranked[:LISTED]
    assert len({pair[0].line for pair in lists["random"].pairs}) == LISTED
    for flag, count in ONE.diagnosis.counts.items():
        assert (flag in lists) == bool(count)
        assert not count or [pair[0] for pair in lists[flag].pairs] == ONE.diagnosis.flagged(flag)
    compared = {each.key: each for each in sentence_lists([ONE, TWO])}
    apart = [abs(a.chrf - b.chrf) for a, b in compared["differ"].pairs]
    assert apart == sorted(apart, reverse=True)
    differing = [s.chrf - t.chrf for s, t in zip(ONE.diagnosis.sentences, TWO.diagnosis.sentences, strict=True)]
    assert apart[0] == max(map(abs, differing))
    for a, b in compared["differ"].pairs:
        assert a.line == b.line
        assert a.hypothesis != b.hypothesis
    assert compared["empty"].total == sum(not a or not b for a, b in zip(spoilt(1), spoilt(2), strict=True))


def test_cut_lists_say_how_many_they_contain() -> None:
    repeated = system("repeated", [""] * 300, [*SOURCES * 4][:300], [*REFERENCES * 4][:300])
    parsed = checked([repeated])
    assert f"{LISTED} of 300." in parsed.text
    assert f"{FLAGGED} of 300." in parsed.text
    assert [tag for tag, _ in parsed.seen].count("article") == 2 * LISTED + FLAGGED


def test_nothing_to_judge_is_a_page_too() -> None:
    parsed = checked([system("blank", ["", ""], ["", " "], ["", ""])])
    assert "nothing to plot" in parsed.text
    assert "Blank sources: 2; blank translations of them: 2." in parsed.text


def test_wrong_calls_are_refused(tmp_path: Path, call: Call) -> None:
    with pytest.raises(UsageError, match=r"report\.pdf.*\.html"):
        write_evaluation_page([ONE], tmp_path / "report.pdf")
    with pytest.raises(UsageError, match="one system or two"):
        page_html([])
    done = call("evaluate", tmp_path / "no run", "--report", "report.pdf")  # refused before anything is loaded
    assert (done.code, "written as .html" in done.error) == (2, True)


DOCS = Path(__file__).parents[2] / "docs" / "evaluating.md"


def test_the_documentation_defines_every_flag() -> None:
    text = DOCS.read_text(encoding="utf-8")
    (table,) = re.findall(r"\| flag \|.*?\n\n", text, re.DOTALL)
    named = [flag for row in table.strip().splitlines()[2:] for flag in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == list(ONE.diagnosis.definitions)
    for number in (
        diagnosis.MIN_WORDS,
        diagnosis.MAX_CHANCE,
        diagnosis.MIN_REFERENCES,
        diagnosis.TIMES,
        diagnosis.TOKENS,
        LISTED,
        FLAGGED,
    ):
        assert re.search(rf"\b{number:.0f}\b", text)


def test_the_python_of_the_documentation_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCS.read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"sources": SOURCES[:4], "references": REFERENCES[:4], "hypotheses": spoilt(1)[:4]}
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile(code, str(DOCS), "exec"), names)
    assert names["diagnosis"].lines == names["other"].lines == 4
    # Dotted names belong in the block, which is executed; a name in a sentence is not checked.
    assert not re.findall(r"`qkv\.[^`]*`", text)


# ---- in a browser ----------------------------------------------------------------------------------------------------


COLOURS = """['body', 'mark', '.bar'].map(name => {
    const { color, backgroundColor, fill } = getComputedStyle(document.querySelector(name));
    return [color, backgroundColor, fill];
})"""


@needs_chromium
def test_the_filter(tmp_path: Path) -> None:
    write_evaluation_page([ONE, TWO], tmp_path / "two.html", COMPARISON)
    wrong: list[str] = []
    with launched() as browser:
        opened = browser.new_page(viewport={"width": 400, "height": 800})
        watch(opened, wrong)
        opened.goto((tmp_path / "two.html").as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        colours = []
        for scheme in ("light", "dark"):
            opened.emulate_media(color_scheme=scheme)
            colours.append(opened.evaluate(COLOURS))
        assert all(light != dark for light, dark in zip(*colours, strict=True))
        lists = {each.key: each for each in sentence_lists([ONE, TWO])}
        shown = opened.locator("article:visible")
        assert shown.count() == len(lists["differ"].pairs)
        opened.locator("input[name=list]").first.focus()
        for group in [*lists.values()][1:]:
            opened.keyboard.press("ArrowRight")  # as any radio buttons
            assert opened.locator("[data-list]:visible").get_attribute("data-list") == group.key
            assert shown.locator("h4").all_inner_texts() == [f"line {pair[0].line}" for pair in group.pairs]
        opened.locator("input[value=worst]").check()
        opened.get_by_label("containing").fill("BICICLETTE")
        some = [p for p in lists["worst"].pairs if any("biciclette" in s.hypothesis for s in p)]
        assert 0 < shown.count() == len(some) < len(lists["worst"].pairs)
        assert opened.locator("output").inner_text() == f"{len(some)} of {len(lists['worst'].pairs)} sentences"
        opened.keyboard.press("Enter")
        assert opened.url.endswith("two.html")
        bar = opened.locator("figure").nth(2).locator(".bar.run-0").last
        assert bar.locator("title").text_content() == f"runs/one, 95: {chrf_histogram(ONE.diagnosis)[-1]} sentences"
    assert wrong == []


def watch(opened: Any, wrong: list[str]) -> None:
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: wrong.append(request.url) if request.url[:5] != "file:" else None)


@needs_chromium
def test_the_page_of_a_model_agrees_with_its_json(tiny: Path, call: Call, tmp_path: Path) -> None:
    pairs = [*sentences(20, seed=9), ("", ""), (EVIL, EVIL)]
    files = write_pairs(tmp_path, pairs)
    done = call("evaluate", tiny, *files, "--against", tiny, "--json", "--report", tmp_path / "page.html")
    values = json.loads(done.out)
    diagnosed = values["diagnosis"]
    assert values["against"]["diagnosis"] == diagnosed
    assert (diagnosed["lines"], diagnosed["blank_sources"], diagnosed["blank_kept"]) == (22, 1, 1)
    wrong: list[str] = []
    with launched() as browser:
        opened = browser.new_page()
        watch(opened, wrong)
        opened.goto((tmp_path / "page.html").as_uri())
        cells = {
            row.split("\t")[0]: row.split("\t")[1] for row in opened.locator("section > .scroll tr").all_inner_texts()
        }
        assert cells["BLEU"].startswith(f"{values['bleu']['value']:.2f} [{values['bleu']['low']:.2f}")
        assert cells["length ratio"] == f"{diagnosed['length_ratio']:.3f}"
        for flag, count in diagnosed["counts"].items():
            assert cells[flag].split()[0] == str(count)
        opened.locator("input[value=worst]").check()
        lines = opened.locator("article:visible h4").all_inner_texts()
        assert lines[:10] == [f"line {each['line']}" for each in diagnosed["worst"]]
        assert EVIL in opened.locator("article:visible dd").all_text_contents()
    assert wrong == []
    assert values["bleu"]["value"] == json.loads(call("evaluate", tiny, *files, "--json").out)["bleu"]["value"]
    printed = call("evaluate", tiny, *files).out
    assert f"length ratio = {diagnosed['length_ratio']:.3f}" in printed
    assert diagnosed["definitions"]["hallucination"] in printed
