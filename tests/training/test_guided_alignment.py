"""Guided alignment: the loss equals its definition and trains one head alone; alignments in the store."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import begun, sentences, tiny_config, updates, weights, write_pairs
from qkv.api.run_training import _begin
from qkv.assembly import trainer_for
from qkv.core import checkpoint
from qkv.core.batches import Batch, Update
from qkv.core.dataset import PreparedText, TokenStore
from qkv.core.errors import QkvError, UsageError
from qkv.core.trainer import Trainer
from qkv.data import alignments, text_preparation
from qkv.data.alignments import batch_alignment
from qkv.data.pair_updates import AlignedBatch
from qkv.data.text_preparation import prepare_text
from qkv.models.variants import record_attention
from qkv.options import Config, CorpusConfig, DataConfig, TokenizerConfig
from qkv.training.regularization import GuidedAlignment, guided_layer, guided_loss

# ---- the objective ---------------------------------------------------------------------------------------------------


def test_the_guided_loss_is_the_cross_entropy_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), size=(2, 4))  # (batch, target, source)
    pairs = [(0, 0, 0), (0, 3, 1), (0, 4, 1), (0, 1, 1), (1, 2, 3)]  # row, source, target
    expected = 0.0
    for row in range(2):
        for target in range(4):
            linked = [s for r, s, t in pairs if (r, t) == (row, target)]
            expected -= sum(np.log(weights[row, target, s]) / len(linked) for s in linked)
    log_weights = torch.from_numpy(np.log(weights)).requires_grad_()
    loss = guided_loss(log_weights, torch.tensor(pairs))
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    assert log_weights.grad is not None
    linked_tokens = {(r, t) for r, _, t in pairs}
    for row in range(2):
        for target in range(4):
            assert float(log_weights.grad[row, target].sum()) == pytest.approx(
                -1.0 if (row, target) in linked_tokens else 0
            )
    assert float(guided_loss(log_weights, torch.zeros(0, 3, dtype=torch.long)).detach()) == 0


def words_links(pairs: list[tuple[str, str]]) -> list[str]:
    """Gold alignments of the small language, over words separated by spaces."""
    return [" ".join(f"{i}-{i}" for i in range(len(source.split()))) for source, _ in pairs]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """300 pairs of the small language and their alignments, in three files."""
    folder, pairs = tmp_path_factory.mktemp("aligned"), sentences(300)
    (folder / "text.align").write_text("".join(f"{line}\n" for line in words_links(pairs)), encoding="utf-8")
    return *write_pairs(folder, pairs), str(folder / "text.align")


def test_white_space_around_a_text_does_not_move_its_alignment(tmp_path: Path) -> None:
    """Only white space that separates words is removed: a no-break space may be a word that alignments number."""
    pairs = [
        ("the cat sees", "il gatto vede"),
        ("  the cat sees ", " il gatto vede"),
        ("\u3000 the cat", "\u3000 il gatto"),
    ]
    pairs += sentences(100)
    lines = ["0-0 1-1 2-2", "0-0 1-1 2-2", "0-0 1-1 2-2", *words_links(pairs[3:])]
    (tmp_path / "text.align").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = *write_pairs(tmp_path, pairs), str(tmp_path / "text.align")
    spec = settings(files).replace(data={"dedupe": False, "valid": [{"src": files[0], "tgt": files[1]}]})
    _, text = begun(tmp_path, spec)
    rows = [text.train.row("src", i).tolist() for i in range(3)]
    assert rows[0] == rows[1]
    links = batch_alignment(text.train, np.arange(3)).tolist()
    ours, theirs, other = ({(s, t) for row, s, t in links if row == number} for number in range(3))
    assert ours == theirs
    last = text.tokenizers.src.bytes_of(rows[2][max(s for s, _ in other)]).decode()
    assert last.strip() in "cat", "the third word, after the one that is U+3000"


def settings(files: tuple[str, str, str], align: bool = True, **train: object) -> Config:
    spec = tiny_config(*files[:2], tokens_per_step=256, metric="loss", steps=8, validate_every=100)
    values = {"guided_alignment": 0.5 if align else 0.0, **train}
    corpus = {"src": files[0], "tgt": files[1], "align": files[2] if align else ""}
    model = {"d_model": 16, "d_ff": 32, "decoder_layers": 3}
    return spec.replace(data={"train": [corpus]}, tokenizer={"vocab": 280}, model=model, train=values)


@pytest.fixture
def trainer(aligned: tuple[str, str, str], tmp_path: Path) -> Callable[..., Trainer]:
    def make(align: bool = True, **train: object) -> Trainer:
        return trainer_for(*begun(tmp_path, settings(aligned, align, **train)))

    return make


def test_guided_alignment_uses_the_weights_of_the_forward_pass(trainer: Callable[..., Trainer]) -> None:
    made = trainer()
    batch = updates(made, 1)[0].micro_batches[0]
    guide = made.train_step.objective
    assert isinstance(guide, GuidedAlignment)
    assert [guided_layer(layers) for layers in (1, 2, 3, 6)] == [0, 0, 1, 4]
    made.model.eval()
    with guide.recording() as seen, record_attention() as recording:
        plain = made.model.hidden(*batch.inputs)
    (used,) = recording["decoder.1.cross"]
    torch.testing.assert_close(guide.log_weights(*seen).exp(), used[:, 0])
    kept = seen[0].data_ptr()
    torch.testing.assert_close(made.model.hidden(*batch.inputs), plain)
    assert seen[0].data_ptr() == kept  # outside the block nothing is recorded


def mass(trainer: Trainer, batch: Batch) -> float:
    """The mean weight of the guided head on linked tokens."""
    guide = GuidedAlignment(trainer.model, weight=1.0, smoothing=0.0, pad=0)
    assert isinstance(batch, AlignedBatch)
    with torch.no_grad(), guide.recording() as seen:
        trainer.model.hidden(*batch.inputs)
        row, source, target = batch.alignment.unbind(1)
        found = guide.log_weights(*seen).exp()[row, target, source]
    return float(found.sum() / len(torch.unique(batch.alignment[:, [0, 2]], dim=0)))


def test_a_few_steps_bring_the_mass_to_the_links(trainer: Callable[..., Trainer]) -> None:
    guided, free = (trainer(guided_alignment=w, schedule="constant", warmup=0) for w in (1.0, 0.0))
    (step,) = updates(guided, 1)
    batch = step.micro_batches[0]
    found = [mass(guided, batch)]
    assert found[0] == pytest.approx(mass(free, batch))
    for _ in range(5):
        for _ in range(10):
            guided.step(step)
            free.step(step)
        found.append(mass(guided, batch))
    assert found == sorted(found)
    assert found[-1] > max(2 * found[0], 1.5 * mass(free, batch))


def test_without_the_weight_alignments_change_nothing(trainer: Callable[..., Trainer]) -> None:
    """Bit for bit what a corpus without alignments gives; and a batch then holds none."""
    plain, given_ = trainer(align=False), trainer(guided_alignment=0.0)
    for ours, theirs in zip(updates(plain, 6), updates(given_, 6), strict=True):
        assert all(type(batch) is Batch for batch in (*ours.micro_batches, *theirs.micro_batches))
        assert plain.step(ours) == given_.step(theirs)
    after = weights(given_)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(plain).items())


def test_micro_batches_do_not_change_the_guided_step(trainer: Callable[..., Trainer]) -> None:
    whole, parts = trainer(), trainer()
    update = updates(whole, 1)[0]
    batch = update.micro_batches[0]
    pieces = [_rows(batch, 0, 1), _rows(batch, 1, 3), _rows(batch, 3, len(batch.source))]
    together = whole.step(Update([batch], update.after))
    assert together == pytest.approx(parts.step(Update(pieces, update.after)), rel=1e-5)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weight, weights(parts)[name], rtol=1e-4, atol=1e-6)
    # The objective is part of the loss: twice the weight adds twice as much.
    double = trainer(guided_alignment=1.0).step(Update([batch], update.after))
    none = trainer(guided_alignment=0.0).step(Update([batch], update.after))
    assert double.loss - none.loss == pytest.approx(2 * (together.loss - none.loss), rel=1e-4)
    assert together.nll == pytest.approx(none.nll)


def _rows(batch: Batch, first: int, stop: int) -> Batch:
    assert isinstance(batch, AlignedBatch)
    own = batch.alignment[(batch.alignment[:, 0] >= first) & (batch.alignment[:, 0] < stop)]
    labels = batch.labels[first:stop]
    inputs = tuple(each[first:stop] for each in batch.inputs)
    return AlignedBatch(inputs, labels, int((labels != 0).sum()), own - torch.tensor([first, 0, 0]))


def test_a_guided_run_resumes_to_the_same_bits(aligned: tuple[str, str, str], tmp_path: Path) -> None:
    spec = settings(aligned)
    run, prepared = _begin(tmp_path / "run", spec, None, [], "", 1, None)
    unbroken, broken, resumed = (trainer_for(run.config, prepared) for _ in range(3))
    for step in updates(unbroken, 8):
        unbroken.step(step)
    for step in updates(broken, 4):
        broken.step(step)
    checkpoint.save_state(run, broken.progress, broken.train_step)
    state = checkpoint.latest_state(run)
    assert state is not None
    resumed.go_on_from(checkpoint.restore_state(state, resumed.train_step))
    for step in updates(resumed, 4):
        resumed.step(step)
    after = weights(resumed)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(unbroken).items())


# ---- the store -------------------------------------------------------------------------------------------------------


def links_of(store: TokenStore, i: int) -> Any:
    return store.row("links", i).reshape(-1, 2)


def expected_links(prepared: PreparedText, part: str, gold: dict[str, str], tag: int = 0) -> list[list[list[int]]]:
    """The links of each pair of a part, from its text."""
    kept, both = getattr(prepared, part), prepared.tokenizers
    found = []
    for n in range(len(kept)):
        source, target = kept.row("src", n).tolist()[tag:], kept.row("tgt", n).tolist()
        text = both.src.decode(source)
        groups = [
            alignments.tokens_of_words(side, ids, side.decode(ids), "spaces")
            for side, ids in ((both.src, source), (both.tgt, target))
        ]
        pairs = {
            (s + tag, t) for i, j in alignments.parse_pharaoh(gold[text]) for s in groups[0][i] for t in groups[1][j]
        }
        found.append(sorted(map(list, pairs), key=lambda link: link[::-1]))
    return found


@pytest.mark.parametrize("form", ["lines", "tsv", "packed"])
def test_the_store_keeps_links_between_tokens(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(dict.fromkeys(sentences(120)))
    gold = {source: line for (source, _), line in zip(pairs, words_links(pairs), strict=True)}
    gold[pairs[5][0]] = ""  # an empty line: no alignment
    gold[pairs[6][0]] = "0-0 0-0"
    (tmp_path / "a.align").write_text("".join(f"{gold[source]}\n" for source, _ in pairs), encoding="utf-8")
    src, tgt = write_pairs(tmp_path, pairs)
    corpus = CorpusConfig(src, tgt, align="a.align", tag="it")
    if form == "tsv":
        (tmp_path / "a.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs), encoding="utf-8")
        corpus = CorpusConfig(src="a.tsv", align="a.align", tag="it")
    if form == "packed":  # and read by two processes
        (tmp_path / "a.align.gz").write_bytes(gzip.compress((tmp_path / "a.align").read_bytes()))
        corpus = CorpusConfig(src, tgt, align="a.align.gz", tag="it")
        monkeypatch.setattr(text_preparation, "SMALL_TEXT", 0)
    data = DataConfig(train=(corpus,), root=str(tmp_path), workers=2)
    prepared = prepare_text(data, TokenizerConfig(vocab=290), tmp_path / "store")
    for part in ("train", "valid"):  # some are held out
        kept = getattr(prepared, part)
        expected = expected_links(prepared, part, gold, tag=1)
        assert [links_of(kept, n).tolist() for n in range(len(kept))] == expected
        assert sum(map(len, expected)) > len(kept)
    assert (tmp_path / "store" / "train.links.ids").stat().st_size == 4 * sum(
        len(links_of(prepared.train, n)) for n in range(len(prepared.train))
    )


def test_a_corpus_without_alignments_has_no_links(tmp_path: Path) -> None:
    first, second = sentences(60, seed=1), sentences(60, seed=2)
    one, two = write_pairs(tmp_path, first, "one"), write_pairs(tmp_path, second, "two")
    (tmp_path / "one.align").write_text("0-0\n" * 60, encoding="utf-8")
    plain, given_ = CorpusConfig(*two), CorpusConfig(*one, align=str(tmp_path / "one.align"))
    data = DataConfig(train=(given_, plain), valid=(plain,))
    prepared = prepare_text(data, TokenizerConfig(vocab=290), tmp_path / "store")
    counts = [len(links_of(prepared.train, n)) > 0 for n in range(len(prepared.train))]
    assert counts == (prepared.train.corpus == 0).tolist()
    assert not any(len(links_of(prepared.valid, n)) for n in range(len(prepared.valid)))
    # Other alignments make another store, and none another again.
    (tmp_path / "one.align").write_text("0-0 0-0\n" * 60, encoding="utf-8")
    assert len(links_of(prepare_text(data, TokenizerConfig(vocab=290), tmp_path / "store").train, 0))
    bare = prepare_text(
        DataConfig(train=(CorpusConfig(*one), plain), valid=(plain,)),
        TokenizerConfig(vocab=290),
        tmp_path / "b",
    )
    assert not list((tmp_path / "b").glob("*links*"))
    with pytest.raises(UsageError, match="prepared without alignments"):
        batch_alignment(bare.train, np.array([0]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0-0 9-0", r"bad\.align, line 3: 9-0 names source word 9, counted from 0, of a sentence of \d words"),
        ("0-0 0-8", r"bad\.align, line 3: 0-8 names target word 8"),
        ("0-0 0:1", r'bad\.align, line 3: "0:1" is not a link'),
        ("0-0\n0-0", r"text\.tgt has 30 lines but .*bad\.align has 31 lines: line N of each must belong together"),
    ],
)
def test_bad_alignments_are_named_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    pairs = list(dict.fromkeys(sentences(60)))[:30]
    lines = words_links(pairs)
    lines[2] = line
    (tmp_path / "bad.align").write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    data = DataConfig(train=(CorpusConfig(*write_pairs(tmp_path, pairs), align=str(tmp_path / "bad.align")),))
    with pytest.raises(QkvError, match=message):
        prepare_text(data, TokenizerConfig(vocab=280), tmp_path / "store")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": {"train": [{"src": "a", "tgt": "b"}]}}, "train.guided_alignment needs alignments"),
        ({"tokenizer": {"dropout": 0.1}}, r"but tokenizer\.dropout changes them"),
        ({"model": {"kind": "rnn"}}, 'of model.kind = "transformer", not of "rnn"'),
        ({"data": {"valid": [{"src": "a", "tgt": "b", "align": "c"}]}}, r"data\.valid\[0\]\.align has no effect"),
        ({"data": {"max_length": 70_000}, "train": {"tokens_per_step": 90_000}}, "with align, at most 65535"),
        ({"train": {"guided_alignment": 1.0, "r_drop": 1.0}}, "guides one pass, but train.r_drop has two"),
        ({"train": {"guided_alignment": -1.0}}, "guided_alignment = -1.0: must be at least 0"),
    ],
)
def test_guided_alignment_refuses_unsupported_configs(changed: dict[str, Any], message: str) -> None:
    tree: dict[str, Any] = {
        "data": {"train": [{"src": "a", "tgt": "b", "align": "c"}]},
        "train": {"guided_alignment": 0.5},
    }
    assert Config.from_dict(tree).train.guided_alignment == 0.5
    with pytest.raises(UsageError, match=message):
        Config.from_dict({**tree, **{name: {**tree.get(name, {}), **values} for name, values in changed.items()}})


def test_plain_text_has_no_alignment(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 30, encoding="utf-8")
    data = DataConfig(train=(CorpusConfig(text=str(tmp_path / "a.txt"), align="a.align"),))
    with pytest.raises(UsageError, match="aligns two sides, and plain text has one"):
        prepare_text(data, TokenizerConfig(), tmp_path / "store")
