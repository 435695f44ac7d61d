"""Signals during a training are collected, and stop it in good order."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from qkv.api.run_training import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_collected_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as received:
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number]
    assert signal.getsignal(number) is before


def test_a_second_signal_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_patient_code_collects_every_signal() -> None:
    with stop_signals(impatient=False) as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_other_threads_have_no_handlers() -> None:
    before, received = signal.getsignal(signal.SIGINT), list[object]()

    def work() -> None:
        with stop_signals() as collected:
            received.append((collected, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [([], before)]
