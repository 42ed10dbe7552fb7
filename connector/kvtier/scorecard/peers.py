"""The storage faults of the scorecard, applied to the file tiers of other projects.

A peer runs in its own process over its own mount, and is called as its own engine calls it. For
each fault, objects are stored; the fault starts; requests with one and two hits are loaded and new
objects are stored while it lasts; the fault ends; and new objects are stored and loaded until that
succeeds. Loaded bytes are compared with what was stored under the key. Wrong bytes, crashes and a
missing recovery fail a peer, as they fail KVTier. The wait of its loads is only reported, because
no peer promises a limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.harness.file_writers import bytes_at_once
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.peer_process import PeerProcess, Reply
from kvtier.scorecard.peer_protocol import OBJECT_BYTES
from kvtier.scorecard.runner import FAIL, PASS, SKIPPED, ScorecardOptions
from kvtier.scorecard.testbed import BUDGET_SECONDS

OBJECTS = 36
PAUSE_SECONDS = 0.02
STORE_PAUSE_SECONDS = 0.1
START_SECONDS = 180.0
FILL_SECONDS = 60.0
SLOW_SECONDS = 20.0
"""How long to wait for a slow load before the fault ends."""
RECOVERY_SECONDS = 30.0
TRY_SECONDS = 2.0
STORES_END_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    """The result of one fault for one peer. ``wrong_bytes``: loads that succeeded with wrong bytes.
    ``bytes_over_budget``: None if the peer has no capacity. ``recovery_seconds``: None if it did
    not recover.
    """

    peer: str
    version: str
    fault: str
    verdict: str
    reason: str = ""
    wrong_bytes: int | None = None
    crashes: int | None = None
    longest_wait_seconds: float | None = None
    bytes_over_budget: int | None = None
    recovery_seconds: float | None = None
    loads: int = 0
    loaded: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """``module``: the module of its process. ``capacity_bytes``: its configured capacity."""

    name: str
    module: str
    capacity_bytes: int | None = None


PEERS = (
    Peer("vLLM fs tier", "kvtier.scorecard.peer_vllm"),
    Peer("LMCache local disk", "kvtier.scorecard.peer_lmcache", 24 << 20),
)


def _objects(directory: Path) -> list[Path]:
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size == OBJECT_BYTES
    )


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + 1234)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def _each(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for path in _objects(directory):
            change(path)

    return damage


def _swap_contents(directory: Path) -> None:
    """Gives each file the content of its neighbour."""
    files = _objects(directory)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def _remove(directory: Path) -> None:
    """Removes everything in the directory."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _errno(name: str, *calls: str) -> dict[str, dict[str, Any]]:
    return {call: {"errno": name} for call in calls}


WRITES = ("create", "write", "mkdir", "rename", "unlink", "truncate", "utimens")
HANGS = ("hang-60s", "hang-for-ever")
BY_MOUNT: dict[str, dict[str, dict[str, Any]]] = {
    "latency-50ms": {"every": {"delay_seconds": 0.05}},
    "latency-1s": {"every": {"delay_seconds": 1.0}},
    "hang-60s": {"read": {"hang": True}, "write": {"hang": True}},
    "hang-for-ever": {"every": {"hang": True}},
    "EIO": _errno("EIO", "read", "write"),
    "EACCES": _errno("EACCES", "open", "create", "mkdir"),
    "EROFS": _errno("EROFS", *WRITES),
    "ESTALE": _errno("ESTALE", "every"),
    "ENOSPC": _errno("ENOSPC", "create", "write", "mkdir"),
    "EDQUOT": _errno("EDQUOT", "create", "write", "mkdir"),
    "short-reads": {"read": {"half": True}},
    "flips-in-flight": {"read": {"flip": "payload"}},
}
BY_FILES: dict[str, Callable[[Path], None]] = {
    "truncation": _each(lambda path: os.truncate(path, OBJECT_BYTES // 2)),
    "bit-flip-payload": _each(_flip),
    "wrong-key": _swap_contents,
    "zero-length": _each(lambda path: os.truncate(path, 0)),
    "directory-removed": _remove,
}
NAMES = (*BY_MOUNT, *BY_FILES)
"""As in the scorecard. Hangs last as long as the other faults: a peer without a limit waits until
they end."""


@dataclass(slots=True)
class _Seen:
    loads: int = 0
    loaded: int = 0
    wrong: int = 0
    raised: list[str] = field(default_factory=list)
    longest: float = 0.0
    unanswered: bool = False
    over_bytes: int = 0
    pending_stores: list[int] = field(default_factory=list)
    """Stores pending when the fault ended; after recovery, those that are still pending."""


def compare(
    options: ScorecardOptions,
    on_start: Callable[[str], None] = lambda _: None,
    peers: tuple[Peer, ...] = PEERS,
) -> Iterator[PeerRow]:
    """Yields the rows, peer by peer. ``on_start`` is called with each fault before it starts.
    Everything that is created is removed.
    """
    selected = [name for name in NAMES if not options.faults or name in options.faults]
    for peer in peers if selected else ():
        home = Path(tempfile.mkdtemp(prefix="kvtier-peer-", dir=options.directory))
        try:
            yield from _with_mount(peer, selected, home, options, on_start)
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _with_mount(
    peer: Peer,
    selected: list[str],
    home: Path,
    options: ScorecardOptions,
    on_start: Callable[[str], None],
) -> Iterator[PeerRow]:
    below, point = home / "below", home / "mount"
    below.mkdir()
    point.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            mount = FaultyMount(below, point, home / "faults.json", home / "mount.log")
        except OSError as error:
            reason = f"cannot create a FUSE mount: {error.strerror or error}"
            yield from (PeerRow(peer.name, "", fault, SKIPPED, reason) for fault in selected)
            return
        testbed = _PeerTestbed(peer, mount, home, options.seconds)
        # Runs first: a hanging process exits once the mount releases it.
        stack.callback(mount.close)
        stack.callback(testbed.end)
        for fault in selected:
            on_start(f"{peer.name}: {fault}")
            yield testbed.run(fault)


class _PeerTestbed:
    """One peer and its mount. After a fault that the process did not survive intact, a new one
    starts.
    """

    def __init__(self, peer: Peer, mount: FaultyMount, home: Path, seconds: float) -> None:
        self._peer, self._mount, self._home, self._seconds = peer, mount, home, seconds
        self._process: PeerProcess | None = None
        self._count = 0
        self._skip_reason = ""

    def end(self) -> None:
        """Releases the mount and ends the process."""
        self._mount.set()
        if self._process is not None:
            self._process.end()
            self._process = None

    def run(self, fault: str) -> PeerRow:
        """Runs one fault."""
        self._count += 1
        first = self._count * 10_000
        directory = self._mount.path / f"{self._count}"
        if not self._skip_reason:
            self._start()
        if self._skip_reason or self._process is None:
            return PeerRow(self._peer.name, "", fault, SKIPPED, self._skip_reason)
        process, below = self._process, self._mount.source / directory.name
        below.mkdir()
        if (problem := _fill(process, directory, first)) is not None:
            self.end()
            return PeerRow(
                self._peer.name,
                process.version,
                fault,
                SKIPPED,
                f"fails without a fault: {problem}",
            )
        seen = _Seen()
        try:
            if fault in BY_MOUNT:
                self._mount.set(**BY_MOUNT[fault])
            else:
                BY_FILES[fault](below)
            _Stream(process, first, below, self._peer.capacity_bytes, seen).run(
                self._seconds, fault in HANGS
            )
        finally:
            self._mount.set()
        process.late.clear()
        recovery = _recover(process, first + 5_000)
        seen.pending_stores = _still_pending(process, seen.pending_stores)
        row = self._judge(fault, seen, recovery)
        if row.crashes or row.recovery_seconds is None or seen.pending_stores:
            self.end()
        shutil.rmtree(below, ignore_errors=True)
        return row

    def _start(self) -> None:
        if self._process is not None and self._process.alive:
            return
        self._process = PeerProcess(self._peer.module, self._home / "peer.log")
        self._skip_reason = self._process.wait_ready(START_SECONDS)
        if self._skip_reason:
            self.end()

    def _judge(self, fault: str, seen: _Seen, recovery: float | None) -> PeerRow:
        process = self._process
        ended = process is not None and not process.alive
        waits = f"{'at least ' if seen.unanswered else ''}{seen.longest:.2f} s"
        problems = [
            (seen.wrong > 0, f"{seen.wrong} loads returned wrong bytes"),
            (ended, f"its process exited: {process.exit_report() if process is not None else ''}"),
            (
                bool(seen.raised),
                f"raised into its engine {len(seen.raised)} times in {seen.loads} loads: "
                f"{next(iter(seen.raised), '')}",
            ),
            (recovery is None and not ended, "stores and loads did not recover"),
        ]
        remarks = [
            (seen.longest > BUDGET_SECONDS, f"a load waited {waits}"),
            (
                bool(seen.pending_stores) and not ended,
                f"{len(seen.pending_stores)} stores never completed",
            ),
        ]
        found = [text for is_so, text in problems if is_so]
        return PeerRow(
            self._peer.name,
            process.version if process is not None else "",
            fault,
            FAIL if found else PASS,
            "; ".join(found + [text for is_so, text in remarks if is_so]),
            wrong_bytes=seen.wrong,
            crashes=len(seen.raised) + ended,
            longest_wait_seconds=round(seen.longest, 3),
            bytes_over_budget=None if self._peer.capacity_bytes is None else seen.over_bytes,
            recovery_seconds=None if recovery is None else round(recovery, 2),
            loads=seen.loads,
            loaded=seen.loaded,
        )


def _fill(process: PeerProcess, directory: Path, first: int) -> str | None:
    """Opens the directory and stores what will be loaded. Returns an error, None for success."""
    if (reply := process.call("open", FILL_SECONDS, directory=str(directory))).outcome != "opened":
        return f"open: {reply.text()}"
    deadline = time.monotonic() + FILL_SECONDS
    for number in range(first, first + OBJECTS):
        reply = process.call("store", deadline - time.monotonic(), number=number)
        if reply.outcome != "stored":
            return f"store: {reply.text()}"
    reply = process.call("load", deadline - time.monotonic(), numbers=[first, first + 1])
    if reply.outcome != "loaded" or reply.hits != 2 or reply.wrong:
        return f"load: {reply.text()}, {reply.hits} of 2 hits"
    return None


class _Stream:
    """The load on a peer during a fault: one load at a time, and concurrent stores."""

    def __init__(
        self, process: PeerProcess, first: int, below: Path, capacity: int | None, seen: _Seen
    ) -> None:
        self._process, self._first, self._below, self._capacity, self._seen = (
            process,
            first,
            below,
            capacity,
            seen,
        )
        self._next_number = 2
        self._stores: list[int] = []

    def run(self, seconds: float, hangs: bool) -> None:
        """Runs for ``seconds``; waits for a slow load."""
        started = time.monotonic()
        next_store, load, sent = started, None, started
        while self._process.alive:
            now = time.monotonic()
            over = now - started > seconds
            if over and (load is None or hangs or now - started > seconds + SLOW_SECONDS):
                break
            if load is None:
                load, sent = self._load(), now
            if not over and now > next_store and len(self._stores) < 8:
                number = self._first + OBJECTS + len(self._stores) + int((now - started) * 1000)
                self._stores.append(self._process.send("store", number=number))
                next_store = now + STORE_PAUSE_SECONDS
            for reply in self._process.replies(PAUSE_SECONDS):
                self._record(reply)
                if reply.call == load:
                    load = None
                elif reply.call in self._stores:
                    self._stores.remove(reply.call)
            self._sample()
        if load is not None and self._process.alive:
            self._seen.unanswered = True
            self._seen.longest = max(self._seen.longest, time.monotonic() - sent)
        self._seen.pending_stores = self._stores

    def _load(self) -> int:
        """A request with one hit, then one with two."""
        count = 1 + self._seen.loads % 2
        self._seen.loads += 1
        numbers = [self._first + (self._next_number + place) % OBJECTS for place in range(count)]
        self._next_number += count
        return self._process.send("load", numbers=numbers)

    def _record(self, reply: Reply) -> None:
        if reply.outcome == "raised":
            self._seen.raised.append(reply.error)
        if reply.outcome == "loaded":
            self._seen.loaded += bool(reply.hits)
            self._seen.wrong += reply.wrong
            self._seen.longest = max(self._seen.longest, reply.seconds)

    def _sample(self) -> None:
        if self._capacity is not None:
            self._seen.over_bytes = max(
                self._seen.over_bytes, bytes_at_once(self._below) - self._capacity
            )


def _still_pending(process: PeerProcess, stores: list[int]) -> list[int]:
    """The stores without a reply shortly after the fault has ended."""
    deadline = time.monotonic() + STORES_END_SECONDS
    while stores and process.alive and time.monotonic() < deadline:
        process.late.extend(process.replies(PAUSE_SECONDS))
        stores = [call for call in stores if all(reply.call != call for reply in process.late)]
    return stores


def _recover(process: PeerProcess, first: int) -> float | None:
    """Waits until a new object is stored and loaded. Returns the seconds, None for never."""
    started = time.monotonic()
    number = first
    while process.alive and time.monotonic() - started < RECOVERY_SECONDS:
        number += 1
        if process.call("store", TRY_SECONDS, number=number).outcome != "stored":
            continue
        reply = process.call("load", TRY_SECONDS, numbers=[number])
        if reply.outcome == "loaded" and reply.hits == 1 and not reply.wrong:
            return time.monotonic() - started
    return None
