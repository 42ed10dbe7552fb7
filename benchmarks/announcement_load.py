"""How soon nodes find each other's objects in a shared directory, and what that costs its server.

Each node is a process with a file tier over the same directory. First all nodes idle, then each
stores one object of 4 KiB at a time, at the given rate. Printed are, for each number of nodes:
calls of the operating system per second and node that follow announcements and that maintain the
directory (leases, grants and scans; those of the janitor are shown apart); with an NFS server on
this machine, the calls that it answered; and the time from the end of a store to the moment when
another node knows of the object.

``--directory`` may be given several times, for mounts of one export: nodes alternate between them.
In a virtual machine with NFS: ``tests/nfs/in_vm python benchmarks/announcement_load.py
--directory '$NFS_MOUNT' --directory '$NFS_MOUNT_2'``.

An emulated machine cannot do what many nodes do. ``--pace N`` makes all pauses of the tiers, and
those between stores, N times as long; give ``--seconds`` accordingly. What is printed is as of a
machine that is N times as fast: calls are per N seconds, and times are divided by N.

The ratio is that of calls per node with the fewest nodes to calls per node with the most, the
janitor's included; 1 means that the load of a node does not grow with their number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierError
from kvtier.testing.objects import make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier

sys.path.insert(0, str(Path(__file__).parent))
from common import options, report

COUNTED = (
    "open", "close", "read", "pread", "preadv", "write", "pwrite", "pwritev", "stat", "lstat",
    "fstat", "unlink", "rename", "mkdir", "rmdir", "listdir", "scandir", "utime",
)  # fmt: skip
FOLLOWING, MAINTAINING = "kvtier-announcements", "kvtier-file-tier"
CAPACITY_BYTES = 1 << 30
NAMESPACE = "ab" * 16
NODE_BYTES = 4
SETTLE_SECONDS = 15.0
LAST_SECONDS = 10.0
"""After the last store, for the last announcements."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--directory", type=Path, action="append", help="where the tier is")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seconds", type=float, default=10.0, help="of idling, and of storing")
    parser.add_argument("--rate", type=float, default=2.0, help="stores a second and node")
    parser.add_argument("--pace", type=float, default=1.0, help="what pauses are multiplied by")


class CallCounter:
    """Counts calls of the operating system by thread."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def install(self) -> None:
        """Replaces the functions of ``os`` in this process."""
        for name in COUNTED:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            self.calls[threading.current_thread().name] += 1
            return call(*arguments, **more)

        return counted


def server_calls() -> int | None:
    """Calls that the NFS server of this machine has answered; None without one."""
    try:
        for line in Path("/proc/net/rpc/nfsd").read_text().splitlines():
            if line.startswith("rpc "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def key_of(node: int, number: int) -> ObjectRef:
    """The object that this node stores as its ``number``-th."""
    spread = bytes([0, number * 37 % 8, number * 11 % 8])
    return ObjectRef(
        NAMESPACE, spread + node.to_bytes(NODE_BYTES, "big") + number.to_bytes(4, "big")
    )


def run_node(node: int, root: Path, chosen: argparse.Namespace, results: Path) -> None:
    """One node. Waits for files named like the phases, which the parent creates."""
    counter = CallCounter()
    counter.install()
    found: dict[bytes, float] = {}
    document = FileSystemTierDocument(name="disk", path=str(root), sharing="Cluster")
    tier = FileSystemTier(
        document,
        TierLimits(CAPACITY_BYTES),
        clock=lambda: time.monotonic() / chosen.pace,
        pace=chosen.pace,
    )
    tier.open(lambda _, key, present: found.setdefault(key, time.monotonic()) if present else None)
    (results / f"open-{node}").touch()
    phases: dict[str, dict[str, float]] = {}
    stored: dict[str, float] = {}
    for phase in ("idle", "store"):
        _wait_for(results / phase, chosen.pace)
        before, start = Counter(counter.calls), time.monotonic()
        number = 0
        while (now := time.monotonic()) < start + chosen.seconds:
            if phase == "store" and now >= start + (number + node / 64) * chosen.pace / chosen.rate:
                ref = key_of(node, number)
                _, payload, meta = make_object(number, (4096,))
                with contextlib.suppress(TierError):
                    tier.write(ref, payload, meta)
                    stored[ref.key.hex()] = time.monotonic()
                number += 1
            time.sleep(0.02 * chosen.pace)
        took = time.monotonic() - start
        spent = counter.calls - before
        phases[phase] = {
            name: chosen.pace * spent[name] / took for name in (FOLLOWING, MAINTAINING)
        }
    _wait_for(results / "end", chosen.pace)
    (results / f"node-{node}").write_text(
        json.dumps(
            {
                "phases": phases,
                "stored": stored,
                "found": {key.hex(): at for key, at in found.items()},
                "leads": tier.maintenance.janitor is not None,
                "lost": {
                    reason: count
                    for (name, reason), count in tier.counts().items()
                    if name == "tier_announcements_lost"
                },
            }
        )
    )
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(path: Path, pace: float = 1.0) -> None:
    while not path.exists():
        time.sleep(0.05 * pace)


@contextlib.contextmanager
def _nodes(
    count: int, roots: list[Path], chosen: argparse.Namespace, results: Path
) -> Iterator[None]:
    children = []
    for node in range(count):
        child = os.fork()
        if not child:
            try:
                run_node(node, roots[node % len(roots)], chosen, results)
            finally:
                os._exit(1)
        children.append(child)
        if not node:
            _wait_for(results / "open-0")
    try:
        yield
    finally:
        (results / "end").touch()
        for child in children:
            os.waitpid(child, 0)


def measure(count: int, roots: list[Path], chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs so many nodes."""
    results = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
    served: dict[str, float] = {}
    try:
        with _nodes(count, roots, chosen, results):
            for node in range(count):
                _wait_for(results / f"open-{node}")
            time.sleep(SETTLE_SECONDS * chosen.pace)
            for phase in ("idle", "store"):
                before, start = server_calls(), time.monotonic()
                (results / phase).touch()
                time.sleep(chosen.seconds)
                after = server_calls()
                if before is not None and after is not None:
                    took = (time.monotonic() - start) / chosen.pace
                    served[phase] = (after - before) / took
            time.sleep(LAST_SECONDS * chosen.pace)
        found = [json.loads((results / f"node-{node}").read_text()) for node in range(count)]
    finally:
        shutil.rmtree(results, ignore_errors=True)
    stored = {key: at for node in found for key, at in node["stored"].items()}
    delays = [
        (node["found"][key] - at) / chosen.pace
        for node in found
        for key, at in stored.items()
        if key not in node["stored"] and key in node["found"]
    ]
    wanted = len(stored) * (count - 1)
    return {"nodes": found, "served": served, "delays": sorted(delays), "wanted": wanted}


def _calls(nodes: list[dict[str, Any]], phase: str, *threads: str) -> float:
    return sum(node["phases"][phase][name] for node in nodes for name in threads)


def main() -> None:
    """Prints a row for each number of nodes."""
    chosen = options(__doc__ or "", add_options)
    above = [Path(os.path.expandvars(path)) for path in chosen.directory or [Path("/var/tmp")]]
    rows, per_node = [], []
    for count in chosen.nodes:
        name = f"kvtier-bench-{os.getpid()}-{count}"
        roots = [path / name for path in above]
        roots[0].mkdir()
        try:
            result = measure(count, roots, chosen)
        finally:
            shutil.rmtree(roots[0], ignore_errors=True)
        nodes, delays = result["nodes"], result["delays"]
        followers = [node for node in nodes if not node["leads"]]
        leaders = [node for node in nodes if node["leads"]]
        total = _calls(nodes, "store", FOLLOWING, MAINTAINING) / count
        per_node.append(result["served"].get("store", total * count) / count)
        rows.append(
            [
                count,
                f"{_calls(followers, 'idle', FOLLOWING) / len(followers):.0f}",
                f"{_calls(followers, 'store', FOLLOWING) / len(followers):.0f}",
                f"{_calls(followers, 'store', MAINTAINING) / len(followers):.0f}",
                f"{_calls(leaders, 'store', FOLLOWING, MAINTAINING):.0f}",
                f"{total:.0f}",
                f"{result['served'].get('idle', 0) / count:.0f}" if result["served"] else "-",
                f"{result['served'].get('store', 0) / count:.0f}" if result["served"] else "-",
                f"{1e3 * statistics.median(delays):.0f}" if delays else "-",
                f"{1e3 * delays[int(0.99 * len(delays))]:.0f}" if delays else "-",
                f"{len(delays)}/{result['wanted']}",
                sum((Counter(node["lost"]) for node in nodes), Counter()) or 0,
            ]
        )
    report(
        chosen.json,
        "Calls per second to follow announcements, and how soon objects are found",
        [
            "nodes",
            "follow, idle",
            "follow, storing",
            "maintain",
            "janitor",
            "all, per node",
            "NFS idle, per node",
            "NFS storing, per node",
            "found, median ms",
            "found, p99 ms",
            "found",
            "lost",
        ],
        rows,
        per_node[0] / per_node[-1] if per_node[-1] else 0.0,
        "calls per node and second with the fewest nodes / with the most",
    )


if __name__ == "__main__":
    main()
