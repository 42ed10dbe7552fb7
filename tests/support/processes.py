"""How tests start processes, and look at them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """Child processes do not inherit an ignored signal: tests may run under nohup or in a shell's
    background. Call it in the main thread.
    """
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


_STUCK_IMPORT = """
import importlib.abc, sys, time
class Stuck(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[2]:
            print("importing", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Stuck())
importlib.import_module(sys.argv[1]).main(["--version"])
"""


def ended_while_importing(entry: str, command: str, timeout_seconds: float = 60) -> int:
    """Exit status of module ``entry``, whose ``main`` imports module ``command``, which receives
    SIGTERM during that import. Raises ``subprocess.TimeoutExpired`` if it does not exit.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _STUCK_IMPORT, entry, command], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "importing\n":
                raise RuntimeError(f"{entry} does not import {command}")
            process.send_signal(signal.SIGTERM)
            return process.wait(timeout_seconds)
        finally:
            process.kill()


def held_by_the_kernel(pid: int) -> bool:
    """Whether the process still exists with a thread in uninterruptible sleep (state D)."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        # A thread may go while it is looked at.
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
