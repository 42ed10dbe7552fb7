"""The longest call on tierd's loop with a large file tier, compared with 5 ms.

No call may take more than that. The index of a file tier is filled without files. Then an engine
attaches: the store lists the tier, the schedulers of four more engines get snapshots, hits are
touched, other processes' changes arrive, and the engines detach. Every call that tierd's loop makes
is timed, with the garbage collector as tierd sets it. Seconds of the processor count, because
pauses of a busy machine are not the code's; seconds of the clock are printed beside them. Of each
call the median over the runs of the longest one counts, and of these the worst.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Structural,
    Topology,
)
from kvtier.store.context import StoreRuntime
from kvtier.store.executor import ThreadExecutor
from kvtier.store.store import TierStore, executor_lanes
from kvtier.store.types import EngineInfo, PresenceChanged
from kvtier.tierd.garbage import BoundedCollections
from kvtier.tierd.replication import ReplicaPublisher
from kvtier.tierd.wire import Message, encode
from kvtier.tiers.base import ObjectRef, OnChange, TierLimits
from kvtier.tiers.filesystem import FileSystemTier

sys.path.insert(0, str(Path(__file__).parent))
from common import options, progress, report

NAMESPACE = "d" * 32
SIZE = 2 << 20
ALLOWED_SECONDS = 0.005
MORE_ENGINES = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--objects", type=int, default=1_000_000, help="in the file tier")
    parser.add_argument("--repeat", type=int, default=3, help="runs")


class IndexOnlyTier(FileSystemTier):
    """A file tier whose index was filled by hand: it does not look for the files."""

    def open(self, on_change: OnChange) -> None:
        """Keeps the index as it is."""
        self._on_change = on_change

    def maintain(self) -> None:
        """Does nothing."""


class Loop:
    """What tierd's loop does for one store, with the time of each call."""

    def __init__(self, tier: FileSystemTier, directory: Path) -> None:
        live = Live(tiers={"ram": LiveTier(), "disk": LiveTier(capacity_bytes=1 << 60)})
        document = FileSystemTierDocument(name="disk", path=str(directory), sharing="Pod")
        structural = Structural(
            policy=PolicyIdentity(namespace="default", name="bench"),
            content_hash="0",
            run_directory="/run/kvtier",
            tiers=[MemoryTierDocument(name="ram", capacity_bytes=64 << 20), document],
            live=live,
        )
        topology = Topology(structural=structural, live=live)
        self.io = ThreadExecutor(executor_lanes(topology), lambda: None)
        runtime = StoreRuntime(self.io, time.monotonic)
        self.seconds: dict[str, tuple[float, float]] = {}
        """Of each call the longest: seconds of the processor, and of the clock."""
        self.sent = 0
        self.store = TierStore(64 << 20, None, [tier], topology, runtime)
        self.publisher = ReplicaPublisher(
            self._send, self.store.presence, lambda _: None, lambda: self.store.usable_bits
        )

    def _send(self, _route: bytes, message: Message) -> None:
        self.sent += len(encode(message))

    def call(self, name: str, call: Callable[[], object]) -> None:
        """Makes a call and notes its times, if they are the longest of this name."""
        started, cpu = time.perf_counter(), time.thread_time()
        call()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - started
        before = self.seconds.get(name, (0.0, 0.0))
        self.seconds[name] = max(before[0], cpu), max(before[1], wall)

    def round(self, what: str) -> bool:
        """One iteration of the loop; whether another one is due at once."""
        store, publisher = self.store, self.publisher
        busy = False

        def publish() -> None:
            nonlocal busy
            for event in store.take_events():
                if isinstance(event, PresenceChanged):
                    publisher.presence_changed(
                        event.namespace, event.key, event.bits, event.present, event.location
                    )
            busy = publisher.publish(time.monotonic())

        self.call(f"{what}: pump", store.pump)
        self.call(f"{what}: publish", publish)
        wake = store.next_wake()
        return busy or (wake is not None and wake <= time.monotonic())

    def settle(self, what: str) -> float:
        """Iterates until nothing is due; returns the seconds that took."""
        started = time.thread_time()
        while self.round(what):
            pass
        return time.thread_time() - started


def run(
    tier: FileSystemTier, keys: list[bytes], directory: Path
) -> tuple[dict[str, tuple[float, float]], float]:
    """The longest time of each kind of call, and how long an attach takes."""
    loop = Loop(tier, directory)
    deadline = time.monotonic() + 60
    while loop.store.tier_states()[1].state != "Healthy" and time.monotonic() < deadline:
        loop.round("start")
        time.sleep(0.01)
    loop.settle("start")
    loop.seconds.clear()
    draw = random.Random(3)
    info = EngineInfo("e0", NAMESPACE, (SIZE,), ((SIZE,),))
    loop.call("attach: open", lambda: loop.store.open_engine(info))
    loop.call("attach: snapshot", lambda: loop.publisher.start(b"r0", NAMESPACE))
    attached = loop.settle("attach")
    more = [(f"e{number}", b"r%d" % number) for number in range(1, 1 + MORE_ENGINES)]
    for name, route in more:
        other = EngineInfo(name, NAMESPACE, (SIZE,), ((SIZE,),))
        loop.call("more engines: open", partial(loop.store.open_engine, other))
        loop.call("more engines: snapshot", partial(loop.publisher.start, route, NAMESPACE))
    loop.settle("more engines")
    for key in draw.choices(keys, k=20_000):
        loop.call("touch", partial(tier.touch, ObjectRef(NAMESPACE, key)))
    for key in draw.sample(keys, 20_000):
        tier._changed(NAMESPACE, key, True)
    loop.settle("changes")
    for name, route in (("e0", b"r0"), *more):
        loop.call("detach", partial(loop.publisher.stop, route))
        loop.call("detach", partial(loop.store.close_engine, name, True))
    loop.settle("detach")
    loop.io.close()
    return loop.seconds, attached


def main() -> None:
    """Fills the index, then attaches and detaches."""
    chosen = options(__doc__ or "", add_options)
    random_bytes = random.Random(2).randbytes
    keys = [b"\0" + random_bytes(32) for _ in range(chosen.objects)]
    runs: list[dict[str, tuple[float, float]]] = []
    attached = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        document = FileSystemTierDocument(name="disk", path=name, sharing="Pod")
        tier = IndexOnlyTier(document, TierLimits(1 << 60), max_objects=chosen.objects)
        previous = b""
        for number, key in enumerate(keys):
            if number % 50_000 == 0:
                progress(f"indexing {number} of {chosen.objects}")
            tier._index.reserve(SIZE)
            tier._index.publish(NAMESPACE, key, SIZE, previous if number % 32 else b"")
            previous = key
        BoundedCollections(time.monotonic())
        for turn in range(chosen.repeat):
            progress(f"run {turn}")
            seconds, took = run(tier, keys, directory)
            runs.append(seconds)
            attached.append(took)
    progress("")
    medians = {
        name: tuple(statistics.median(each[name][kind] for each in runs) for kind in (0, 1))
        for name in runs[0]
    }
    worst = {name: 1000 * max(each[name][0] for each in runs) for name in runs[0]}
    rows = [
        (name, f"{1000 * cpu:.2f}", f"{worst[name]:.2f}", f"{1000 * wall:.2f}")
        for name, (cpu, wall) in medians.items()
    ]
    known = f"{1000 * statistics.median(attached):.0f}"
    rows.append(("all keys known after an attach", known, "", ""))
    report(
        chosen.json,
        f"Longest calls on the loop with {chosen.objects} objects",
        ("call", "CPU ms", "worst run", "clock ms"),
        rows,
        ALLOWED_SECONDS / max(cpu for cpu, _ in medians.values()),
        "5 ms / the longest call, CPU; at least 1 is wanted",
    )


if __name__ == "__main__":
    main()
