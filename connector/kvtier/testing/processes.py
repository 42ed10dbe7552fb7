"""How tests start processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile heed a signal that this one was told to ignore: tests may run under nohup, or in the background of
    a shell. Main thread.
    """
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)
