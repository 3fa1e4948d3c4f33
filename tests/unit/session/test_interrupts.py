"""SIGINT is counted while a run is waited for, and the handler before is back afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from air_nb.session.interrupts import InterruptCounter


def test_interrupts_are_counted_and_the_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    woken = []
    with InterruptCounter(lambda: woken.append(1)) as interrupts:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.count == len(woken) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_is_restored_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), InterruptCounter(lambda: None):
        1 / 0  # noqa: B018 - for its error
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_leaves_the_handler_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def wait() -> None:
        with InterruptCounter(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [before]
