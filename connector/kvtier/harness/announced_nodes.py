"""Processes that store into one shared directory and read what they learn of from each other.

``python -m kvtier.harness.announced_nodes ROOT CONTROL CAPACITY WRITERS READERS PACE`` forks
one process for each writer and reader, each with a file tier over ROOT. A writer stores an object
every ``STORE_SECONDS`` until the file ``stop`` is in CONTROL. Every process reads each object that
its tier announces and compares it with what was stored, and keeps its counts in ``CONTROL/node-N``,
until the file ``end`` is there. It looks for new ones every ``REST_SECONDS``. PACE multiplies these
and all pauses of the tiers, for emulated machines, which are slower.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierError, TierMissError
from kvtier.files import replace_file
from kvtier.harness.file_writers import NAMESPACE, PAYLOAD_BYTES, make
from kvtier.testing.objects import buffer
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier

SEEDS_PER_NODE = 1_000_000
STORE_SECONDS = 0.2
REST_SECONDS = 0.01
STATUS_RESTS = 25
"""Between two reports of a node."""


@dataclass(slots=True)
class NodeCounts:
    """What one node reports. ``known``: objects that its index holds. ``lost``: announcements that
    it has lost or not accepted, by reason. ``delays``: seconds from the end of a store, by the
    file's time, until this node learned of the object."""

    stored: int = 0
    dropped: int = 0
    known: int = 0
    read: int = 0
    missed: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    delays: list[float] = field(default_factory=list)


class AnnouncedNode:
    """One process of the directory."""

    def __init__(self, root: Path, capacity_bytes: int, number: int, pace: float) -> None:
        self.status = NodeCounts()
        self._number = number
        self._learned: deque[tuple[bytes, float]] = deque()
        self._into = buffer(PAYLOAD_BYTES)
        document = FileSystemTierDocument(
            name="shared", path=str(root), sharing="Cluster", direct_io="Never"
        )
        self.tier = FileSystemTier(
            document,
            TierLimits(capacity_bytes),
            clock=lambda: time.monotonic() / pace,
            pace=pace,
        )
        self.tier.open(self._changed)

    def _changed(self, _namespace: str, key: bytes, present: bool) -> None:
        if present:
            self._learned.append((key, time.time()))

    def store(self) -> None:
        """Stores the next object."""
        seed = self._number * SEEDS_PER_NODE + self.status.stored
        try:
            self.tier.write(*make(seed))
            self.status.stored += 1
        except TierError as error:
            self.status.dropped += 1
            self.status.errors[:] = [str(error)[:200]]

    def read_learned(self) -> None:
        """Reads what the tier has announced, and compares it."""
        while self._learned:
            key, at = self._learned.popleft()
            ref, seed = ObjectRef(NAMESPACE, key), int.from_bytes(key[3:], "big")
            expected_ref, payload, _ = make(seed)
            try:
                self.tier.read(ref, self._into)
            except TierMissError:
                self.status.missed += 1
                continue
            except TierError as error:
                self.status.wrong += 1
                self.status.errors[:] = [str(error)[:200]]
                continue
            self.status.read += 1
            self.status.wrong += self._into != payload or ref != expected_ref
            if seed // SEEDS_PER_NODE != self._number:
                try:
                    stored_at = os.stat(self.tier._path(ref)).st_mtime
                except OSError:
                    continue
                self.status.delays.append(round(max(at - stored_at, 0.0), 3))

    def report(self, path: Path) -> None:
        """Writes the counts."""
        lost: Counter[str] = Counter()
        for (name, reason), count in self.tier.counts().items():
            if name == "tier_announcements_lost":
                lost[reason] += count
        self.status.known, self.status.lost = self.tier.usage().objects, dict(lost)
        replace_file(path, json.dumps(asdict(self.status)).encode())


def run_node(node: AnnouncedNode, control: Path, number: int, *, writes: bool, pace: float) -> None:
    """Runs one node until it is told to end."""
    report, store_at, report_at = control / f"node-{number}", 0.0, 0.0
    rest = REST_SECONDS * pace
    while not (control / "end").exists():
        now = time.monotonic()
        if writes and now >= store_at and not (control / "stop").exists():
            store_at = now + STORE_SECONDS * pace
            node.store()
        node.read_learned()
        if now >= report_at:
            report_at = now + STATUS_RESTS * rest
            node.report(report)
        time.sleep(rest)
    node.read_learned()
    node.report(report)
    node.tier.close()


def read_status(control: Path) -> dict[int, NodeCounts]:
    """The latest counts of each node."""
    found = {}
    for path in control.glob("node-*"):
        number = path.name.removeprefix("node-")
        if number.isdigit():
            found[int(number)] = NodeCounts(**json.loads(path.read_text()))
    return found


def main(arguments: Sequence[str]) -> int:
    """Forks the nodes and waits for them. 1 if one failed."""
    root, control = Path(arguments[0]), Path(arguments[1])
    capacity, writers, readers = (int(each) for each in arguments[2:5])
    pace = float(arguments[5])
    children = []
    for number in range(writers + readers):
        child = os.fork()
        if not child:
            status = 1
            try:
                node = AnnouncedNode(root, capacity, number, pace)
                run_node(node, control, number, writes=number < writers, pace=pace)
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
