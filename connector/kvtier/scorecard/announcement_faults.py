"""Faults of the logs of announcements in a shared directory, and many processes that follow them.

Four processes store and read what they learn of, while every log is deleted, cut or overwritten
again and again. No wrong byte may be read, no process may fail, the losses are counted, and in the
end every process knows every object: recovery is by a scan. ``readers-32``: one process stores, and
32 others find all of it.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvtier.harness.announced_nodes import NodeCounts, read_status
from kvtier.harness.file_writers import bytes_at_once
from kvtier.harness.tierd_testbed import environment
from kvtier.scorecard.testbed import Measurements
from kvtier.tiers.filesystem.layout import ANNOUNCEMENTS, CONTROL

MEANS = "files"
CAPACITY_BYTES = 64 << 20
READERS_CAPACITY_BYTES = 1 << 30
"""A smaller directory has no room for the logs of so many."""
NODES = 4
READERS = 32
START_SECONDS = 120.0
RECOVERY_SECONDS = 120.0
DAMAGE_SECONDS = 0.2
MAX_WAIT_SECONDS = 600.0
"""For one condition, however slow the machine is."""

Damage = Callable[[Path], None]


def _delete(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _corrupt(path: Path) -> None:
    generator = random.Random()
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, 4096):
            file.seek(start + generator.randrange(100))
            file.write(generator.randbytes(64))


DAMAGES: dict[str, Damage] = {
    "announcements-lost": _delete,
    "announcements-truncated": _truncate,
    "announcements-corrupt": _corrupt,
}
READERS_NAME = f"readers-{READERS}"
NAMES = (*DAMAGES, READERS_NAME)


class AnnouncedNodes:
    """The processes of one fault."""

    def __init__(
        self, root: Path, home: Path, writers: int, readers: int, pace: float = 1.0
    ) -> None:
        self.root = root
        self.capacity_bytes = READERS_CAPACITY_BYTES if readers else CAPACITY_BYTES
        self.count = writers + readers
        self._control = home
        home.mkdir(parents=True)
        root.mkdir(parents=True)
        command = [sys.executable, "-m", "kvtier.harness.announced_nodes", str(root), str(home)]
        numbers = (self.capacity_bytes, writers, readers, pace)
        self._log = home / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *map(str, numbers)], env=environment(), stdout=log, stderr=log
            )

    def status(self) -> dict[int, NodeCounts]:
        """The latest counts."""
        return read_status(self._control)

    def wait(self, seconds: float, condition: Callable[[dict[int, NodeCounts]], bool]) -> bool:
        """Waits until every node has reported and the condition holds for the reports."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            found = self.status()
            if len(found) == self.count and condition(found):
                return True
            time.sleep(0.1)
        return False

    def stop_storing(self) -> None:
        """Ends the stores of all nodes."""
        (self._control / "stop").touch()

    def end(self) -> tuple[dict[int, NodeCounts], str]:
        """Ends the nodes: their last counts, and what failed."""
        (self._control / "end").touch()
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self.status(), "the processes did not end"
        text = self._log.read_text(errors="replace").strip()
        failed = status != 0 or "Traceback" in text
        return self.status(), text.splitlines()[-1][:200] if failed and text else ""


def _logs(root: Path) -> list[Path]:
    return list((root / CONTROL).glob(f"*/{ANNOUNCEMENTS}")) + list(
        (root / CONTROL).glob(f"*/*/{ANNOUNCEMENTS}")
    )


def _all_known(found: dict[int, NodeCounts]) -> bool:
    stored = sum(status.stored for status in found.values())
    return stored > 0 and all(status.known == stored for status in found.values())


def run(
    name: str,
    root: Path,
    home: Path,
    seconds: float,
    slack_seconds: float = 0.0,
    patience: float = 1.0,
) -> Measurements:
    """Runs one fault on a new directory ``root``; logs and counts are in ``home``.
    ``slack_seconds``: what a slow machine may add to a wait. ``patience``: what waits are
    multiplied by, and for the many readers all pauses of the processes as well: their polls and
    heartbeats alone are more than an emulated machine can do."""
    damage = DAMAGES.get(name)
    measurements = Measurements()
    writers, readers = (NODES, 0) if damage is not None else (1, READERS)
    nodes = AnnouncedNodes(root, home, writers, readers, patience if readers else 1.0)
    start_seconds, recovery_seconds = (
        min(patience * each + slack_seconds, MAX_WAIT_SECONDS)
        for each in (START_SECONDS, RECOVERY_SECONDS)
    )
    damaged = 0
    try:
        if not nodes.wait(start_seconds, lambda found: bool(_logs(root))):
            raise TimeoutError("the processes did not start to announce")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for path in _logs(root) if damage is not None else ():
                try:
                    (damage or _delete)(path)
                    damaged += 1
                except OSError:
                    continue  # it is gone, or is being replaced
            over = bytes_at_once(root) - nodes.capacity_bytes
            measurements.over_budget_bytes = max(measurements.over_budget_bytes, over)
            time.sleep(DAMAGE_SECONDS)
        nodes.stop_storing()
        stopped = time.monotonic()
        if nodes.wait(recovery_seconds, _all_known):
            measurements.recovery_seconds = time.monotonic() - stopped
    finally:
        found, problem = nodes.end()
    _note(measurements, found, problem, damaged)
    return measurements


def _note(
    measurements: Measurements, found: dict[int, NodeCounts], problem: str, damaged: int
) -> None:
    lost: Counter[str] = Counter()
    delays: list[float] = []
    for status in found.values():
        measurements.loads += status.read + status.missed + status.wrong
        measurements.loaded += status.read
        measurements.wrong += status.wrong
        lost.update(status.lost)
        delays += status.delays
    stored = sum(status.stored for status in found.values())
    measurements.notes.append(f"{stored} objects stored")
    if delays:
        delays.sort()
        measurements.notes.append(
            f"found after {statistics.median(delays):.2f} s (median), "
            f"{delays[int(0.99 * len(delays))]:.2f} s (99 %)"
        )
    if lost:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
        measurements.notes.append(f"losses counted: {reasons}")
    if damaged and not lost:
        measurements.crashes += 1
        measurements.notes.append(f"{damaged} logs were damaged and no loss was counted")
    if problem:
        measurements.crashes += 1
        measurements.notes.append(problem)
