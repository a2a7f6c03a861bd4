"""Signals that a run handles: the first is kept, and ends nothing until the outermost context does."""

from __future__ import annotations

import os
import signal

from ringtrain.monitor.journal import Journal
from ringtrain.training.stopping import Signals


def test_a_context_within_another_does_not_end_it(capfd) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals(Journal())
    with signals:
        with signals:
            pass
        assert signals.exit_code == 0
        signals.note = "it goes on"
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGUSR1 and signals.exit_code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before
    assert capfd.readouterr().err == "it goes on\n"
