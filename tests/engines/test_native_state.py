"""The state of the native decoder with unusual selections of sentences."""

from __future__ import annotations

import torch
from test_native_transformer import native
from test_packed_linear import KINDS, LENGTHS, VOCAB, draw, made


@torch.inference_mode()
def test_sentences_are_chosen_before_the_first_token() -> None:
    plain = made(KINDS["transformer"])
    rows, tokens = torch.tensor([4, 5, 0, 1, 4, 5]), draw(6, 3)
    a, b = (m.step(tokens, m.start(m.encode(draw(5, 9), LENGTHS), 2).select(rows))[0] for m in (native(plain), plain))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_an_empty_batch_is_decoded() -> None:
    ours = native(made(KINDS["transformer"]))
    for state in (
        ours.start(ours.encode(draw(5, 9)[:0], LENGTHS[:0]), 2),
        ours.start(ours.encode(draw(5, 9), LENGTHS), 2).select(torch.empty(0, dtype=torch.long)),
        ours.step(draw(10, 1), ours.start(ours.encode(draw(5, 9), LENGTHS), 2))[1].select(LENGTHS[:0]),
    ):
        assert ours.step(torch.empty(0, 1, dtype=torch.long), state)[0].shape == (0, 1, VOCAB)


def test_positions_grow_while_another_thread_reads_them() -> None:
    """A table returned by one call stays valid and unchanged after another call grew it."""
    table = native(made(KINDS["transformer"])).target
    before = table.at_least(10)
    assert before is not None
    place, copied = before.data_ptr(), before.clone()
    del before
    longer = table.at_least(2000)
    assert longer is not None
    assert len(longer) >= 2000
    assert any(kept.data_ptr() == place and torch.equal(kept, copied) for kept in table.tables)
