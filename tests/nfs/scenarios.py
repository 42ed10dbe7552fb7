"""The scenarios of ``test_nfs.py``, run inside its virtual machine: two tier daemons, each on its
own mount of one NFS export.

    scenarios.py DIRECTORY      (a directory that no other process uses)

Prints one line ``SCENARIO {json}`` for each; ``test_nfs.py`` checks them. Daemons, mounts, the
server and its failures are real. Stub engines check every byte they load.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed
from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.tiers.filesystem.format import HEADER_BYTES

MIB = 1 << 20
WAIT = 60.0
"""The machine is emulated: what takes a second elsewhere takes ten here."""
START_SECONDS = 240.0
"""Importing takes most of it, longer where other tests use the cores as well."""
BUDGET_SECONDS = 2.0
FILE_BIT = 2


def control(*words: str) -> None:
    """Does something to the server or to the network between it and its clients."""
    subprocess.run(["nfs-control", *words], check=True, timeout=60)


class Client:
    """A daemon whose file tier is on one of the mounts, and an engine."""

    def __init__(self, directory: Path, mount: str) -> None:
        directory.mkdir(parents=True)
        # The tier's root is the mount itself, as in a pod.
        (directory / "tier").symlink_to(mount)
        self.testbed = TierdTestbed(
            directory, TierdOptions(file_bytes=64 * MIB, memory_bytes=2 * MIB)
        )
        self.testbed.start_tierd(seconds=START_SECONDS)
        self.engine: StubEngine = self.testbed.engine()
        self.wait(lambda: self.engine.can_store, "attached")

    def wait(self, condition: Callable[[], object], what: str, seconds: float = WAIT) -> bool:
        """Steps the engine until ``condition``."""
        if self.engine.wait_for(condition, seconds):
            return True
        print(f"not within {seconds:g} s: {what}; {self.testbed.status().get('tiers')}", flush=True)
        return False

    def store(self, numbers: range) -> int:
        """Stores chunks; how many went through."""
        done = 0
        for number in numbers:
            self.wait(lambda: self.engine.can_store, "a free slot", 20)
            done += self.engine.store(number, 20)
        return done

    def load(
        self, numbers: Sequence[int], budget_seconds: float = BUDGET_SECONDS
    ) -> dict[str, Any]:
        """Loads one by one; how many came, how long the longest took."""
        longest, came = 0.0, 0
        for number in numbers:
            start = time.monotonic()
            came += self.engine.load([number], budget_seconds)
            longest = max(longest, time.monotonic() - start)
        return {"loaded": came, "longest_seconds": round(longest, 3)}

    def wait_written(self, numbers: Sequence[int]) -> list[int]:
        """Waits for writes. Returns those of ``numbers`` that are in files. Stores may be dropped
        if no slot is free, so the wait ends after ten seconds without a new file.
        """
        end, there = time.monotonic() + WAIT, 0
        while there < len(numbers) and time.monotonic() < end:
            before = there
            self.engine.wait_for(lambda: self._count(numbers) > before, 10)  # noqa: B023
            there = self._count(numbers)
            if there and there == before:
                break
        return [number for number in numbers if self.engine.holds(number) & FILE_BIT]

    def _count(self, numbers: Sequence[int]) -> int:
        return sum(bool(self.engine.holds(number) & FILE_BIT) for number in numbers)

    def in_files(self, numbers: Sequence[int]) -> bool:
        """Whether the engine knows of all of these in the file tier."""
        return all(self.engine.holds(number) & FILE_BIT for number in numbers)

    def state(self) -> str:
        """State of the file tier."""
        return next(
            (
                tier["state"]
                for tier in self.testbed.status().get("tiers", [])
                if tier["name"] == "disk"
            ),
            "",
        )


def found_by_another(a: Client, b: Client) -> dict[str, Any]:
    """Objects of one client are found by the other at once or after its next scan; until then they
    are misses.
    """
    a.store(range(12))
    numbers = a.wait_written(range(12))
    at_once = b.load(numbers)
    seen = b.wait(lambda: b.in_files(numbers), "the other client has found them")
    return {"filed": len(numbers), "at_once": at_once, "seen": seen, "later": b.load(numbers, WAIT)}


def never_half_written(a: Client, b: Client) -> dict[str, Any]:
    """The other mount shows only complete objects under an object's name."""
    stop, looked, partial = threading.Event(), 0, []
    root = Path(os.environ["NFS_MOUNT_2"])
    worker = threading.Thread(target=lambda: a.store(range(100, 120)))
    worker.start()
    expected = HEADER_BYTES + -(-(64 << 10) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    while worker.is_alive() and not stop.is_set():
        for path in root.rglob("*.kv"):
            try:
                data = path.read_bytes()
            except OSError:
                continue
            looked += 1
            # A header that is there before its payload is would show as zeros.
            if len(data) != expected or not any(data[:64]) or not any(data[-4096:]):
                partial.append(path.name)
    worker.join(WAIT)
    numbers = a.wait_written(range(100, 120))
    b.wait(lambda: b.in_files(numbers), "the other client has found them")
    return {
        "filed": len(numbers),
        "looked": looked,
        "partial": partial[:4],
        "later": b.load(numbers, WAIT),
    }


def unreachable(
    how: tuple[str, ...], back: tuple[str, ...]
) -> Callable[[Client, Client], dict[str, Any]]:
    """The server is unresponsive: misses within the deadline; afterwards every object is found."""

    def run(a: Client, b: Client) -> dict[str, Any]:
        first = 200 if how == ("stop",) else 300
        a.store(range(first, first + 3))
        numbers = a.wait_written(range(first, first + 3))
        b.wait(lambda: b.in_files(numbers), "the other client has found them")
        control(*how)
        try:
            during = b.load(numbers)
            # RAM continues to serve its objects and to accept new ones.
            start = time.monotonic()
            ram = b.store(range(first + 50, first + 52))
            ram_loaded = b.engine.load([first + 50], BUDGET_SECONDS)
            ram_seconds = time.monotonic() - start
        finally:
            control(*back)

        def again() -> bool:
            return b.engine.load(numbers[:1], BUDGET_SECONDS) == 1

        start = time.monotonic()
        recovered = b.wait(again, "the tier serves again", 180)
        return {
            "filed": len(numbers),
            "during": during,
            "ram": [ram, ram_loaded, round(ram_seconds, 3)],
            "recovered": recovered,
            "recovery_seconds": round(time.monotonic() - start, 1),
            "later": b.load(numbers, WAIT),
        }

    return run


def replaced(a: Client, _: Client) -> dict[str, Any]:
    """The exported directory is replaced: stale handles cause misses, then the tier recovers."""
    numbers = range(12)  # stored so long ago that RAM holds none of them
    held = sum(bool(a.engine.holds(number) & FILE_BIT) for number in numbers)
    control("stale")
    during = a.load(numbers)
    start = time.monotonic()

    def stores_again() -> bool:
        number = 500 + int(time.monotonic() * 10) % 100_000
        return a.store(range(number, number + 1)) == 1 and a.wait(
            lambda: a.in_files(range(number, number + 1)), "it is in a file", 5
        )

    recovered = a.wait(stores_again, "the tier takes objects again", 30)
    return {
        "held": held,
        "during": during,
        "recovered": recovered,
        "recovery_seconds": round(time.monotonic() - start, 1),
        "state": a.state(),
    }


def ends_beside_a_hang(a: Client, b: Client) -> dict[str, Any]:
    """A daemon with hanging reads exits on SIGTERM."""
    a.store(range(700, 703))
    numbers = a.wait_written(range(700, 703))
    b.wait(lambda: b.in_files(numbers), "the other client has found them", 10)
    control("partition")
    try:
        b.load(numbers)
        pid = b.testbed.tierd_pid()
        start = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        while Path(f"/proc/{pid}").exists() and time.monotonic() - start < 60:
            for process in b.testbed._processes:
                process.poll()
            time.sleep(0.05)
        return {"exit_seconds": round(time.monotonic() - start, 2)}
    finally:
        control("heal")


SCENARIOS: dict[str, Callable[[Client, Client], dict[str, Any]]] = {
    "found by another client": found_by_another,
    "never half written": never_half_written,
    "server stopped": unreachable(("stop",), ("start",)),
    "partition": unreachable(("partition",), ("heal",)),
    "end beside a hang": ends_beside_a_hang,
    "directory replaced": replaced,
}


LAST = ("end beside a hang", "directory replaced")


def main() -> int:
    """Runs all scenarios, even if one fails."""
    directory = Path(sys.argv[1])
    clients = [
        Client(directory / "a", os.environ["NFS_MOUNT"]),
        Client(directory / "b", os.environ["NFS_MOUNT_2"]),
    ]
    for name, scenario in SCENARIOS.items():
        pids = [client.testbed.tierd_pid() for client in clients]
        start = time.monotonic()
        try:
            result = scenario(*clients)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        result["wrong"] = sum(client.engine.seen.wrong for client in clients)
        result["seconds"] = round(time.monotonic() - start, 1)
        # The last two are about a daemon that ends, and go on without it.
        serving = clients if name not in LAST else clients[:1]
        result["daemons_live"] = [client.testbed.tierd_pid() for client in serving] == pids[
            : len(serving)
        ] and all(client.testbed.status() for client in serving)
        print(f"SCENARIO {json.dumps({'name': name, **result})}", flush=True)
    for client in clients:
        print(client.testbed.log.read_text(errors="replace")[-3000:], flush=True)
    # Threads may hang in a mount; do not wait for them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
