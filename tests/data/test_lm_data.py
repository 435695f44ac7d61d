"""Language models and encoders: running text keeps every character, the context slides, gaps are filled."""

from __future__ import annotations

import json
import math
import random
import unicodedata
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from batch_streams import CPU
from conftest import Call, sentences, tiny_config
from qkv.api.completer import Continuation
from qkv.assembly import build_model
from qkv.core.batches import Position
from qkv.core.dataset import PreparedText, TokenStore
from qkv.core.device import ALONE, World
from qkv.core.errors import UsageError
from qkv.core.tokenizer import Tokenizer, TokenizerPair
from qkv.data.lm_data import BlockBatches, MaskedBatches, mask_tokens, text_blocks
from qkv.data.subwords import decode_text, encode_text, learn, newline_of
from qkv.data.text_preparation import filter_table, prepare_text
from qkv.decoding.logits_processors import Sampling, generate
from qkv.models.variants import DecoderOnly
from qkv.options import (
    Config,
    CorpusConfig,
    DataConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    TokenizerConfig,
)

LINES = [source for source, _ in sentences(400, seed=5)]
CHARACTERS = learn((), LINES, TokenizerConfig(kind="char")).tgt
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"))


def running_text(folder: Path, text: str, *, name: str = "text.txt", **data: Any) -> PreparedText:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    spec = DataConfig(train=(CorpusConfig(text=str(folder / name)),), **data)
    return prepare_text(spec, TokenizerConfig(kind="char"), folder / "store", running_text=True)


# ---- text ↔ ids ------------------------------------------------------------------------------------------------------


@given(texts)
def test_running_text_round_trip(text: str) -> None:
    assert decode_text(CHARACTERS, encode_text(CHARACTERS, text)) == unicodedata.normalize("NFC", text)


@given(texts, st.integers(0, 30))
def test_a_text_is_decoded_as_it_comes(text: str, cut: int) -> None:
    """After any prompt the streamed parts are whole characters, and together the rest of the text."""
    text = unicodedata.normalize("NFC", text)
    ids = encode_text(CHARACTERS, text)
    cut = min(cut, len(ids))
    prompt = decode_text(CHARACTERS, ids[:cut])
    if encode_text(CHARACTERS, prompt) != ids[:cut]:
        return  # a character cut in two is no text
    row = Continuation(CHARACTERS, prompt, [])
    pieces = [row.add(token, last=number == len(ids)) for number, token in enumerate(ids[cut:], cut + 1)]
    assert prompt + "".join(pieces) == text


class Letters:
    """A tokenizer whose tokens are characters."""

    def bytes_of(self, token: int) -> bytes:
        return chr(token).encode()


@given(st.text("ab", min_size=1, max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stream_never_contains_its_stop_text(text: str, stops: list[str]) -> None:
    row = Continuation(Letters(), "a", stops)  # type: ignore[arg-type]
    shown = ""
    for number, letter in enumerate(text, 1):
        shown += row.add(ord(letter), last=number == len(text))
        if row.finish:
            break
    # The first complete stop text ends the stream; it may have begun after one that is still incomplete.
    ended = [text[: i + 1] for i in range(len(text)) if any(text[: i + 1].endswith(stop) for stop in stops)]
    if ended:
        assert row.finish == "stop"
        assert shown == ended[0][: min(p for p in map(ended[0].find, stops) if p >= 0)]
    else:
        assert (row.finish, shown) == ("length", text)


# ---- preparing -------------------------------------------------------------------------------------------------------

POEM = "One line\n\nOne line\n  indented, and  spaced  \n" * 10 + "the end"


def test_nothing_of_running_text_is_dropped(tmp_path: Path) -> None:
    prepared = running_text(tmp_path, POEM, max_length=4)  # repeated, empty and long lines are all there
    tgt = prepared.tokenizers.tgt
    train, valid = (decode_text(tgt, store.ids["tgt"].tolist()) for store in (prepared.train, prepared.valid))
    assert train + valid == POEM + "\n"
    assert valid == "\nOne line\n  indented, and  spaced  \nthe end\n"  # the end of it, a tenth of the lines or so
    assert prepared.valid_text[1].read_text(encoding="utf-8") == valid
    assert "read" in filter_table(prepared.report)


@pytest.mark.parametrize(("lines", "wanted", "remedy"), [(3, 0, 1), (1, 0, 0), (10, 6, 5)])
def test_too_little_running_text_to_hold_some_out(tmp_path: Path, lines: int, wanted: int, remedy: int) -> None:
    with pytest.raises(UsageError, match=rf"^{lines} lines.* --valid-text \(data\.valid\)$") as told:
        running_text(tmp_path, "a line\n" * lines, valid_size=wanted)
    assert (f"set data.valid_size={remedy}," in str(told.value)) == (remedy > 0)
    if remedy:
        running_text(tmp_path, "a line\n" * lines, valid_size=remedy)


@pytest.mark.parametrize("lines", [1, 3])
def test_long_lines_of_running_text_are_held_out_in_part(tmp_path: Path, lines: int) -> None:
    line = "  ".join(f"word{n} \u0301and\r more" for n in range(2000))
    text = "\ufeff" * 0 + (line + "\n") * lines
    prepared = running_text(tmp_path, text, max_length=16)
    tgt = prepared.tokenizers.tgt
    ids = [*prepared.train.ids["tgt"].tolist(), *prepared.valid.ids["tgt"].tolist()]
    assert ids == encode_text(tgt, text), "the tokens of the whole lines, and newlines where the text has them"
    valid = decode_text(tgt, prepared.valid.ids["tgt"].tolist())
    assert 0.05 < len(valid) / len(text) < 0.2
    raw = prepared.valid_text[1].read_text(encoding="utf-8")
    assert unicodedata.normalize("NFC", raw) == valid.replace("\r", " ")


def test_documents_end(tmp_path: Path) -> None:
    documents = ["first\nof two lines", "second", "third"] * 5
    text = "".join(json.dumps({"text": each}) + "\n" for each in documents)
    prepared = running_text(tmp_path, text, name="text.jsonl", valid_size=3)
    tgt = prepared.tokenizers.tgt
    ids = [*prepared.train.ids["tgt"].tolist(), *prepared.valid.ids["tgt"].tolist()]
    ends = [i for i, token in enumerate(ids) if token == tgt.eos]
    assert len(ends) == len(documents)
    found = [decode_text(tgt, ids[a + 1 : b]) for a, b in pairwise([-1, *ends])]
    assert found == [each + "\n" for each in documents]


def test_pairs_are_no_running_text(tmp_path: Path, corpus: tuple[str, str]) -> None:
    spec = DataConfig(train=(CorpusConfig(src=corpus[0], tgt=corpus[1]),))
    with pytest.raises(UsageError, match="learns from running text: give text, not pairs"):
        prepare_text(spec, TokenizerConfig(), tmp_path / "store", running_text=True)
    lines = "".join(line + "\n" for line in LINES)
    (tmp_path / "long.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "short.txt").write_text(lines.replace("\n", " "), encoding="utf-8")
    both = tuple(CorpusConfig(text=str(tmp_path / name)) for name in ("long.txt", "short.txt"))
    kept = prepare_text(DataConfig(train=both), TokenizerConfig(kind="char"), tmp_path / "both", running_text=True)
    sizes = np.bincount(kept.train.corpus, kept.train.lengths("tgt"), 2)
    assert min(sizes) > 100  # a text of one line is not held out whole
    with pytest.raises(UsageError, match="1 lines of running text"):
        running_text(tmp_path / "one", "only one line")


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("blocks")
    return running_text(folder, "".join(line + "\n" for line in LINES)).train


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_blocks_cover_the_text_once_and_are_cut_anew(length: int, rows: int, epoch: int, seed: int) -> None:
    text = running_text_store()
    blocks = BlockBatches(text, length=length, tokens=rows * length, seed=seed, world=ALONE, device=CPU)
    plan = blocks.plan(epoch)
    starts = np.concatenate([micro for update in plan for micro in update])
    covered = np.sort(starts)[:, None] + np.arange(length)
    assert (np.diff(covered.ravel()) == 1).all()  # end to end, without overlap
    assert covered[0, 0] < length
    assert covered[-1, -1] >= len(text.ids["tgt"]) - 1 - length
    assert all(sum(map(len, update)) == rows for update in plan[:-1])
    batch = blocks.batch(plan[0][0], (0,))
    (given_ids,) = batch.inputs
    for row, start in enumerate(plan[0][0]):
        assert given_ids[row].tolist() == text.ids["tgt"][start : start + length].tolist()
        assert batch.labels[row].tolist() == text.ids["tgt"][start + 1 : start + length + 1].tolist()
    assert batch.tokens == batch.labels.numel()


_store: list[TokenStore] = []


def running_text_store() -> TokenStore:
    return _store[0]


@pytest.fixture(autouse=True)
def _share_the_store(store: TokenStore) -> None:
    _store[:] = [store]


def test_blocks_split_among_micro_batches_and_ranks(store: TokenStore) -> None:
    options: dict[str, Any] = {"length": 8, "tokens": 80, "seed": 1, "device": CPU}
    whole = BlockBatches(store, world=ALONE, **options)
    parts = [BlockBatches(store, micro_tokens=24, world=World(rank, 2), **options) for rank in range(2)]
    for (first, second), step in zip(
        zip(*(part.starting(Position(0, 0)) for part in parts), strict=False),
        islice(whole.starting(Position(0, 0)), 5),
        strict=False,
    ):
        rows = torch.cat([batch.inputs[0] for batch in (*first.micro_batches, *second.micro_batches)])
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, step.micro_batches[0].inputs[0].tolist()))
        assert first.after == second.after == step.after


def test_a_text_shorter_than_the_context_is_refused(store: TokenStore) -> None:
    with pytest.raises(UsageError, match=r"holds no block of data\.max_length"):
        BlockBatches(store, length=len(store.ids["tgt"]), tokens=10**6, seed=1, world=ALONE, device=CPU)


@given(st.lists(st.integers(3, 90), min_size=1, max_size=50), st.integers(1, 20))
def test_validation_predicts_every_token_once(ids: list[int], length: int) -> None:
    rows = text_blocks(np.array(ids), CHARACTERS, length)
    labels = rows[:, 1:].ravel()
    assert labels[labels != CHARACTERS.pad].tolist() == ids
    assert rows[0, 0] == newline_of(CHARACTERS)
    assert (rows[1:, 0] == rows[:-1, -1]).all()


# ---- drawing ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-16, 16).map(lambda half: half / 2), min_size=2, max_size=12, unique=True),
    st.floats(0.1, 3),
    st.integers(0, 12),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_sampling_keeps_the_allowed_tokens(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p)
    found = sampling.probabilities(torch.tensor([logits]))[0].double().numpy()
    scores = np.array(logits, np.float32).astype(float) / temperature
    plain = np.exp(scores - scores.max())
    plain /= plain.sum()
    ranked = np.argsort(-plain, kind="stable")
    before = np.cumsum(plain[ranked]) - plain[ranked]
    margin = 1e-5  # a limit that falls on a token exactly may be rounded either way
    kept = [
        i
        for rank, i in enumerate(ranked)
        if (not top_k or rank < top_k) and before[rank] < top_p - margin and plain[i] >= min_p * plain.max() + margin
    ]
    assert all(found[i] > 0 for i in kept)
    assert found[ranked[0]] > 0
    assert found.sum() == pytest.approx(1, abs=1e-5)
    drawn = np.flatnonzero(found)
    np.testing.assert_allclose(found[drawn], plain[drawn] / plain[drawn].sum(), rtol=1e-3, atol=1e-6)
    assert not top_k or len(drawn) <= top_k


def test_temperature_zero_is_the_likeliest() -> None:
    assert Sampling(0.0).probabilities(torch.tensor([[0.1, 3.0, 2.9]])).tolist() == [[0.0, 1.0, 0.0]]
    cold = Sampling(1e-6).probabilities(torch.tensor([[0.1, 3.0, 2.9]]))
    assert cold.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: must be at least 0"),
        ({"top_p": 1.5}, "top_p = 1.5: must be between 0 and 1"),
        ({"min_p": math.nan}, "min_p = nan"),
        ({"top_k": -1}, "top_k = -1"),
    ],
)
def test_impossible_draws_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


SPEC = DecoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=2, dropout=0.0, norm="pre", tie="none")


def language_model(**options: Any) -> DecoderOnly:
    torch.manual_seed(1)
    model = build_model(DecoderOnlyConfig(**{**vars(SPEC), "kind": "decoder", **options}), 30, 30).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


KINDS: list[dict[str, Any]] = [
    {},
    {"positions": "learned", "max_positions": 8, "bias": True, "activation": "gelu"},
    {"positions": "rotary", "rms_norm": True},
    {"positions": "none", "window": 3},
    {"norm": "post", "attention": "additive"},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["sinusoidal", "learned", "rotary", "window", "additive"])


@kinds
@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 99))
def test_stepped_in_any_chunks_is_the_whole(kind: dict[str, Any], chunks: list[int], rows: int, seed: int) -> None:
    model = language_model(**{**kind, "max_positions": 30})
    torch.manual_seed(seed)
    tokens = torch.randint(3, 30, (rows, sum(chunks)))
    with torch.inference_mode():
        whole = model(tokens)
        state = model.start(beam=rows)
        parts = []
        for part in tokens.split(chunks, dim=1):
            logits, state = model.step(part, state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
        alone = torch.cat([model(row[None]) for row in tokens])
        torch.testing.assert_close(alone, whole, atol=1e-5, rtol=1e-5)


@kinds
def test_the_context_slides_and_generation_never_ends(kind: dict[str, Any]) -> None:
    """Greedy, past the context several times: each token is the uncached model's for the text in the window."""
    model, context = language_model(**kind), 8
    text = [5, 6, 7]
    seen = 3  # tokens in the window
    for drawn in islice(generate(model, text, Sampling(0.0), context=context, forbidden=[0, 1, 2]), 40):
        with torch.inference_mode():
            logits = model(torch.tensor([text[-seen:]]))[0, -1].clone()
            own = logits.log_softmax(-1)
            logits[:3] = -math.inf
        assert drawn.tokens == [int(logits.argmax())]
        assert drawn.logprobs[0] == pytest.approx(float(own[drawn.tokens[0]]), abs=1e-4)
        text += drawn.tokens
        seen = context // 2 if seen == context else seen + 1
    assert len(text) == 43


def test_a_seed_decides_the_text_and_rows_differ() -> None:
    model = language_model()

    def write(seed: int | None) -> list[list[int]]:
        return [each.tokens for each in islice(generate(model, [4], Sampling(seed=seed), context=8, rows=4), 12)]

    assert write(3) == write(3) != write(4)
    assert write(None) != write(None)
    assert len({tuple(row) for row in zip(*write(3), strict=True)}) == 4


def test_sampling_without_a_seed_keeps_the_global_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(generate(language_model(), [4], Sampling(), context=8))
    torch.manual_seed(0)
    next(generate(model := language_model(), [4], Sampling(), context=8))
    torch.manual_seed(0)
    next(generate(model, [4], Sampling(), context=8))
    assert torch.equal(torch.rand(3), expected)


def test_without_limits_every_token_may_come() -> None:
    torch.manual_seed(0)
    assert bool((Sampling().probabilities(torch.randn(1, 50_000)) > 0).all())


def test_log_probabilities_are_the_models_own() -> None:
    model = language_model()
    drawn = next(generate(model, [4], Sampling(0.0), context=8, forbidden=range(29)))
    with torch.inference_mode():
        own = model(torch.tensor([[4]]))[0, -1].log_softmax(-1)
    assert drawn.tokens == [29]
    assert drawn.logprobs[0] == pytest.approx(float(own[29]), abs=1e-5)


def test_draws_follow_the_probabilities() -> None:
    model = language_model()
    with torch.inference_mode():
        expected = model(torch.tensor([[4]]))[0, -1].softmax(-1)
    drawn = next(generate(model, [4], Sampling(seed=1), context=8, rows=20_000)).tokens
    counts = torch.bincount(torch.tensor(drawn), minlength=30) / 20_000
    torch.testing.assert_close(counts, expected, atol=0.02, rtol=0.0)


# ---- learning --------------------------------------------------------------------------------------------------------


def plain_config(path: Path, model: ModelConfig, **train: object) -> Config:
    spec = tiny_config("", "", **train)
    data = DataConfig(train=(CorpusConfig(text=str(path)),), max_length=32)
    return Config(data, TokenizerConfig(kind="char"), model, spec.train, spec.decode)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a language model that has read some sentences."""
    folder = tmp_path_factory.mktemp("writer")
    (folder / "text.txt").write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    model = DecoderOnlyConfig(d_model=64, d_ff=128, heads=2, layers=2, norm="pre", positions="rotary", dropout=0.0)
    train = {"steps": 150, "validate_every": 75, "label_smoothing": 0.0, "learning_rate": 4e-3}
    return qkv.train(plain_config(folder / "text.txt", model, **train), folder / "run").path


def bigram_loss(train: str, valid: str) -> float:
    """−log p of each character of valid from the one before it, by counts with one added."""
    alphabet = set(train + valid)
    pairs, singles = Counter(pairwise(train)), Counter(train)
    total = sum(math.log((pairs[a, b] + 1) / (singles[a] + len(alphabet))) for a, b in pairwise("\n" + valid))
    return -total / len(valid)


def test_a_character_model_beats_a_bigram_table(writer: Path) -> None:
    prepared = PreparedText.open(writer / "store")
    tgt = prepared.tokenizers.tgt
    train, valid = (decode_text(tgt, store.ids["tgt"].tolist()) for store in (prepared.train, prepared.valid))
    language_model = qkv.LanguageModel(writer)
    found = language_model.evaluate(valid)
    assert found.per_character < bigram_loss(train, valid) - 0.3
    assert found.bits_per_byte == pytest.approx(found.per_character / math.log(2))  # this text is ASCII
    best = json.loads((writer / "scores.json").read_text(encoding="utf-8"))[language_model.run.scores["chosen"]]
    assert found.per_character == pytest.approx(best["nats_per_character"], abs=1e-4)


def test_perplexity_is_that_of_forced_decoding(writer: Path) -> None:
    language_model = qkv.LanguageModel(writer)
    text = "The cat sees the dog."
    ids = [newline_of(language_model.tokenizer), *encode_text(language_model.tokenizer, text)]
    with torch.inference_mode():
        log_probs = language_model.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    nats = -sum(float(log_probs[i, token]) for i, token in enumerate(ids[1:]))
    found = language_model.evaluate(text)
    assert found.nats == pytest.approx(nats, rel=1e-4)
    assert (found.tokens, found.characters, found.bytes) == (len(ids) - 1, len(text), len(text))
    assert found.perplexity == pytest.approx(math.exp(nats / found.tokens), rel=1e-4)


def test_the_unicode_form_of_a_text_does_not_change_its_loss(writer: Path) -> None:
    model = qkv.LanguageModel(writer)
    nfc, nfd = (model.evaluate(unicodedata.normalize(form, "Perché così? È già là.")) for form in ("NFC", "NFD"))
    assert nfc == nfd


def test_documents_are_evaluated_as_they_were_validated(tmp_path: Path, call: Call) -> None:
    rows = [json.dumps({"text": "\n".join(LINES[i : i + 4])}) + "\n" for i in range(0, 400, 4)]
    (tmp_path / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    model = DecoderOnlyConfig(d_model=16, d_ff=16, heads=2, layers=1)
    run = qkv.train(plain_config(tmp_path / "text.jsonl", model, steps=3, validate_every=3), tmp_path / "run")
    found = json.loads(call("evaluate", run.path, "--json").out)
    assert found["bits_per_byte"] == pytest.approx(run.scores["best"]["bits_per_byte"], abs=1e-4)


def test_completions(writer: Path) -> None:
    language_model = qkv.LanguageModel(writer)
    streamed = "".join(language_model.stream("The c", max_tokens=80, temperature=0.5, seed=2))
    (whole,) = language_model.complete("The c", max_tokens=80, temperature=0.5, seed=2)
    assert whole.text == streamed
    assert len(whole.tokens) == len(whole.token_logprobs) == 80  # more than twice the context
    assert whole.logprob == pytest.approx(sum(whole.token_logprobs))
    assert whole.finish_reason == "length"
    (stopped,) = language_model.complete("The c", max_tokens=80, temperature=0.5, seed=2, stop=["\n"])
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text.split("\n")[0]
    many = language_model.complete("", n=3, max_tokens=5, seed=1)
    assert len(many) == 3
    assert str(many[0]) == many[0].text
    words = {word.strip(".").lower() for line in LINES for word in line.split()}
    written = {word.strip(".").lower() for word in streamed.split()[1:-1]}
    assert len(written & words) > 0.5 * len(written)
    likeliest = language_model.next_tokens("The cat see", 3)
    assert likeliest[0][0] == "s"
    assert likeliest[0][1] > 0.5


def test_the_verbs_for_language_models(writer: Path, call: Call, tmp_path: Path) -> None:
    done = call("complete", writer, "The c", "--tokens", 20, "--seed", 1)
    assert done.code == 0
    assert done.out.startswith("The c")
    assert done.out == call("complete", writer, "-", "--tokens", 20, "--seed", 1, input=b"The c").out
    rows = [json.loads(line) for line in call("complete", writer, "--json", "-n", 2, "--tokens", 4).out.splitlines()]
    assert [len(row["tokens"]) for row in rows] == [4, 4]
    assert "add --json" in call("complete", writer, "-n", 2).error
    assert "never ends" in call("complete", writer, "--json", "--tokens", 0).error
    assert "not UTF-8" in call("complete", writer, "-", input=b"ab\xff").error
    with pytest.raises(UsageError, match="max_tokens = 0"):
        next(qkv.LanguageModel(writer).stream("a", max_tokens=0))
    with pytest.raises(UsageError, match="list of texts"):
        qkv.LanguageModel(writer).complete("a", stop="ab")
    found = call("evaluate", writer)
    assert "bits per byte" in found.out
    (tmp_path / "other.txt").write_text("The cat.\n", encoding="utf-8")
    about = json.loads(call("evaluate", writer, tmp_path / "other.txt", "--json").out)
    assert set(about) == {"nats_per_character", "bits_per_byte", "perplexity"}
    assert "is a language model, which cannot do this: use qkv complete" in call("translate", writer).error
    two_files = tmp_path / "other.txt", tmp_path / "other.txt"
    assert "is not a translation model" in call("evaluate", writer, *two_files).error


def test_text_alone_makes_a_language_model(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a.txt").write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    small = ["--set", "train.steps=2", "--set", "data.max_length=16", "--set", "train.tensorboard=false"]
    done = call("train", "--text", tmp_path / "a.txt", "--run", tmp_path / "run", *small)
    assert done.code == 0, done.err
    assert isinstance(qkv.load(tmp_path / "run"), qkv.LanguageModel)
    assert "give one of the two" in call("train", "--text", "a", "--src", "b").error
    assert "give --text too" in call("train", "--valid-text", "a").error
    wrong = call("train", "demo", "--text", tmp_path / "a.txt", "--run", tmp_path / "other")
    assert "translates: give pairs" in wrong.error
    pairs = call("train", "--src", tmp_path / "a.txt", "--tgt", tmp_path / "a.txt", "--set", "model.kind=decoder")
    assert "learns from plain text" in pairs.error


# ---- gaps ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=30), min_size=1, max_size=5), st.integers(0, 99))
def test_hidden_tokens_are_a_share_and_at_least_one(rows: list[list[int]], seed: int) -> None:
    random = [np.random.default_rng((seed, i)) for i in range(len(rows))]
    batch = mask_tokens([np.array(row) for row in rows], CHARACTERS, 0.15, random)
    source, lengths = batch.inputs
    assert lengths.tolist() == [len(row) + 1 for row in rows]
    for row, given_ids, labels in zip(rows, source.tolist(), batch.labels.tolist(), strict=True):
        assert given_ids[len(row)] == CHARACTERS.eos
        asked = [i for i, label in enumerate(labels) if label != CHARACTERS.pad]
        assert asked
        assert [labels[i] for i in asked] == [row[i] for i in asked]
        assert all(given_ids[i] == row[i] for i in range(len(row)) if i not in asked)
    assert batch.tokens == int((batch.labels != CHARACTERS.pad).sum())


def test_eight_in_ten_predicted_tokens_are_masked() -> None:
    rows = [np.full(2000, 50)]
    batch = mask_tokens(rows, CHARACTERS, 0.5, [np.random.default_rng(0)])
    asked = batch.inputs[0][batch.labels != CHARACTERS.pad]
    assert len(asked) == pytest.approx(1000, abs=80)
    assert float((asked == CHARACTERS.bos).float().mean()) == pytest.approx(0.8, abs=0.04)
    assert float((asked == 50).float().mean()) == pytest.approx(0.1, abs=0.03)
    others = asked[(asked != CHARACTERS.bos) & (asked != 50)]
    assert int(others.min()) >= CHARACTERS.offset


def strings(seed: int) -> list[str]:
    """Different strings of four letters, in random order."""
    pick = random.Random(seed)
    found = sorted({" ".join(pick.choices("abcdefgh", k=4)) for _ in range(9000)})
    pick.shuffle(found)
    return found


TASKS = {"copy": lambda words: words, "reverse": lambda words: words[::-1]}
tasks = pytest.mark.parametrize("task", TASKS)
LEARN = {"label_smoothing": 0.0, "learning_rate": 4e-3, "average": 0}


@pytest.mark.slow
@tasks
def test_a_language_model_learns(task: str, tmp_path: Path) -> None:
    """Lines `abc>cba`: after an unseen `abc>` it writes the rest, 99 times in 100."""
    rows = [row.replace(" ", "") for row in strings(4)]
    test, train = rows[:200], rows[200:]
    (tmp_path / "text.txt").write_text("".join(f"{row}>{TASKS[task](row)}\n" for row in train), encoding="utf-8")
    model = DecoderOnlyConfig(d_model=64, d_ff=256, heads=4, layers=2, norm="pre", positions="rotary", dropout=0.0)
    spec = plain_config(tmp_path / "text.txt", model, steps=500, validate_every=500, **LEARN)
    language_model = qkv.LanguageModel(qkv.train(spec, tmp_path / "run"))
    found = [language_model.complete(f"{row}>", max_tokens=6, temperature=0.0, stop=["\n"])[0].text for row in test]
    assert sum(text == TASKS[task](row) for text, row in zip(found, test, strict=True)) >= 198


def train_encoder(folder: Path, task: str) -> Path:
    """The run of an encoder that has seen words twice: `a b c d > d c b a`."""
    lines = [f"{row} > {TASKS[task](row)}\n" for row in strings(4)[300:]]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    model = EncoderOnlyConfig(d_model=64, d_ff=256, heads=4, layers=2, norm="pre", dropout=0.0, masked=0.15)
    spec = plain_config(folder / "text.txt", model, steps=400, validate_every=400, **LEARN)
    return qkv.train(spec.replace(tokenizer={"kind": "word"}), folder / "run").path


@pytest.fixture(scope="module")
def encoder_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_encoder(tmp_path_factory.mktemp("encoder_run"), "copy")


@pytest.mark.slow
@tasks
def test_an_encoder_learns(task: str, encoder_run: Path, tmp_path: Path) -> None:
    """A hidden word that also occurs on the other side is filled in correctly, 99 times in 100, in unseen lines."""
    loaded = qkv.load(encoder_run if task == "copy" else train_encoder(tmp_path, task))
    assert isinstance(loaded, qkv.Encoder)
    right = 0
    for number, row in enumerate(strings(4)[:200]):
        words = TASKS[task](row).split()
        gapped = ["<mask>" if i == number % 4 else word for i, word in enumerate(words)]
        ((best, *_),) = loaded.fill(f"{row} > {' '.join(gapped)}", 1)
        right += best.text == f"{row} > {' '.join(words)}"
    assert right >= 198


@pytest.mark.slow
def test_filling_gaps(encoder_run: Path, call: Call) -> None:
    loaded = qkv.Encoder(encoder_run)
    first, second = loaded.fill("a <mask> c d > a b <mask> d", 3)
    assert [(first[0].gap, first[0].token), (second[0].gap, second[0].token)] == [(1, "▁b"), (2, "▁c")]
    assert first[0].text == "a b c d > a b <mask> d"
    assert len(first) == len(second) == 3
    assert first[0].probability >= first[1].probability
    with pytest.raises(UsageError, match="write <mask>"):
        loaded.fill("a b c")
    done = call("fill", encoder_run, "a <mask> c d > a b c d", "-n", 1)
    assert done.out.split("\t")[2:] == ["▁b", "a b c d > a b c d\n"]
    assert json.loads(call("fill", encoder_run, "a <mask> c d > a b c d", "-n", 1, "--json").out)["token"] == "▁b"
    assert "masked tokens" in call("evaluate", encoder_run).out
    scores = loaded.evaluate(["a b c d > a b c d", "", "d e f g > d e f g"])
    assert 0 <= scores.accuracy <= 1
    assert "use qkv fill" in call("complete", encoder_run).error


@pytest.mark.slow
def test_sentence_vectors(encoder_run: Path) -> None:
    loaded = qkv.Encoder(encoder_run)
    sentences = ["a b c d > a b c d", "", "e f > e f", "h h h h > h h h h"]
    vectors = loaded.embed(sentences)
    assert vectors.shape == (4, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1, 1], atol=1e-5)
    for sentence, vector in zip(sentences, vectors, strict=True):  # the same in any batch
        np.testing.assert_allclose(loaded.embed([sentence])[0], vector, atol=1e-5)
    near, far = vectors[0] @ loaded.embed(["b a c d > b a c d"])[0], vectors[0] @ vectors[3]
    assert near > far
    with pytest.raises(UsageError, match="list of texts"):
        loaded.embed("a b > a b")


def test_a_gap_takes_the_space_before_it() -> None:
    tokenizer = learn((), [*LINES, "cat. dog! the"], TokenizerConfig(vocab=320)).tgt

    class Bare(qkv.Encoder):
        def __init__(self) -> None:
            self.config = Config(model=EncoderOnlyConfig())
            self.tokenizers = TokenizerPair(tokenizer, tokenizer)

    gap = tokenizer.bos
    assert Bare()._with_gaps("The <mask> sees.") == [*tokenizer.encode("The"), gap, *tokenizer.encode("sees.")]
    assert Bare()._with_gaps("<mask> cat <mask>.")[0] == gap
    assert tokenizer.decode([t for t in Bare()._with_gaps("The <mask>.") if t != gap]) == "The."


def test_without_positions_order_is_nothing() -> None:
    """Permuting the input permutes the encoder's output, and with positions it does not (paper, section 3.5)."""
    order = torch.tensor([3, 0, 4, 1, 2])
    tokens, lengths = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([5])
    for positions, permutes in (("none", True), ("sinusoidal", False), ("learned", False), ("rotary", False)):
        torch.manual_seed(2)
        spec = EncoderOnlyConfig(d_model=16, d_ff=32, heads=2, layers=3, dropout=0.0, positions=positions)
        model = build_model(spec, 20, 20).eval()
        with torch.inference_mode():
            moved = model.hidden(tokens[:, order], lengths)
            there = model.hidden(tokens, lengths)[:, order]
        assert torch.allclose(moved, there, atol=1e-5) == permutes, positions


def test_sentences_are_read_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    spec = DataConfig(train=(CorpusConfig(text=str(tmp_path / "text.txt")),))
    prepared = prepare_text(spec, TokenizerConfig(kind="char"), tmp_path / "store")
    updates = MaskedBatches(
        prepared.train, prepared.tokenizers, masked=0.2, tokens=512, seed=1, world=ALONE, device=CPU
    )
    once, again = (islice(updates.starting(Position(0, 0)), 3) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            assert torch.equal(x.inputs[0], y.inputs[0])
            assert torch.equal(x.labels, y.labels)


def test_a_tokenizer_without_letters_still_has_newlines() -> None:
    bare = Tokenizer("char", [])
    assert encode_text(bare, "a\nb") == [*bare.encode("a"), newline_of(bare), *bare.encode("b")]
