"""What the native decoder remembers, where sentences come and go in unusual ways."""

from __future__ import annotations

import pytest
import torch

from qkv.models.native.state import PAGE
from test_native import native
from test_packed import KINDS, LENGTHS, VOCAB, draw, made


@torch.inference_mode()
@pytest.mark.parametrize("copies", [1, 2])
def test_a_sentence_goes_on_without_one_that_was_about_to_need_a_page(copies: int) -> None:
    """The pages of the one that left are free, and none is taken; nor by a copy of a sentence that has none yet."""
    ours = native(made(KINDS["transformer"]))
    first, later = (ours.encode(draw(2, 9)[i : i + 1], LENGTHS[:1]) for i in range(2))
    tokens = draw(1, 2 * PAGE)
    _, state = ours.step(tokens[:, :-2], ours.start(first))
    state = state.enter(later)
    if copies == 1:
        _, state = ours.step(tokens[:, :1].expand(2, 1), state)
    state = state.select(torch.tensor([1] * copies))
    stepped = []
    for place in range(2 - copies, PAGE):
        logits, state = ours.step(tokens[:, place : place + 1].expand(copies, 1), state)
        stepped.append(logits)
    whole, _ = ours.step(tokens, ours.start(later))
    assert torch.equal(torch.cat(stepped, dim=1), whole[:, 2 - copies : PAGE].expand(copies, -1, -1))


@torch.inference_mode()
def test_sentences_are_chosen_before_the_first_token() -> None:
    plain = made(KINDS["transformer"])
    rows, tokens = torch.tensor([4, 5, 0, 1, 4, 5]), draw(6, 3)
    a, b = (m.step(tokens, m.start(m.encode(draw(5, 9), LENGTHS), 2).select(rows))[0] for m in (native(plain), plain))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_there_may_be_no_sentences() -> None:
    ours = native(made(KINDS["transformer"]))
    for state in (
        ours.start(ours.encode(draw(5, 9)[:0], LENGTHS[:0]), 2),
        ours.start(ours.encode(draw(5, 9), LENGTHS), 2).select(torch.empty(0, dtype=torch.long)),
        ours.step(draw(10, 1), ours.start(ours.encode(draw(5, 9), LENGTHS), 2))[1].select(LENGTHS[:0]),
    ):
        assert ours.step(torch.empty(0, 1, dtype=torch.long), state)[0].shape == (0, 1, VOCAB)


def test_positions_grow_while_another_thread_reads_them() -> None:
    """What a call was given is still there, and still the same, when another has asked for more."""
    table = native(made(KINDS["transformer"])).target
    before = table.reaching(10)
    assert before is not None
    place, copied = before.data_ptr(), before.clone()
    del before
    longer = table.reaching(2000)
    assert longer is not None
    assert len(longer) >= 2000
    assert any(kept.data_ptr() == place and torch.equal(kept, copied) for kept in table.made)
