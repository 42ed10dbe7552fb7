"""The faults of the scorecard, in the order in which they run.

Each fault is a function that injects it into a testbed, runs loads and stores during it, and
removes it. It records what it measures in its ``Measurements``. ``means`` says how the fault is
made.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.files import replace_file
from kvtier.processes import ProcessIdentity, main_thread_exited, pid_namespace, process_start
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.testbed import FaultTestbed, Measurements
from kvtier.scorecard.tier_faults import TierWrapper

DAY_SECONDS = 86_400
STOPPED_SECONDS = 4.0
EXIT_SECONDS = 5.0
HUGE_NUMBER = f"1{'0' * 400}"


@dataclass(frozen=True, slots=True)
class FaultContext:
    """What a fault can use. ``mount``: injects storage faults; a wrapper of the tier if no FUSE
    mount can be made. ``seconds``: how long a fault lasts. ``hang_seconds``: how long a hang lasts.
    """

    testbed: FaultTestbed
    mount: FaultyMount | TierWrapper
    seconds: float
    hang_seconds: float


FaultFunction = Callable[[FaultContext, Measurements], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the scorecard. ``means``: "FUSE", "files", "process", "clock", "live
    configuration".
    """

    name: str
    means: str
    run: FaultFunction


def by_mount(
    seconds_of: Callable[[FaultContext], float], **faults: dict[str, Any]
) -> FaultFunction:
    """A fault of the mount."""

    def run(context: FaultContext, measurements: Measurements) -> None:
        mount = context.mount
        mount.set(**faults)
        try:
            context.testbed.stream(seconds_of(context), measurements)
        finally:
            mount.set()

    return run


def endless_hang(context: FaultContext, measurements: Measurements) -> None:
    """No call returns while the daemon runs. It is terminated during the hang, and another one
    starts.
    """
    mount, testbed = context.mount, context.testbed
    mount.set(every={"hang": True})
    try:
        testbed.stream(context.seconds, measurements)
        process = ProcessIdentity(testbed.pid, process_start(testbed.pid), pid_namespace())
        started = time.monotonic()
        os.kill(testbed.pid, signal.SIGTERM)
        # The kernel keeps threads that wait for the mount, and the process entry with them,
        # although no instruction of the program runs.
        while not main_thread_exited(process) and time.monotonic() - started < 30:
            time.sleep(0.02)
        ended = time.monotonic() - started
        measurements.notes.append(f"the daemon exited {ended:.1f} s after SIGTERM")
        if ended > EXIT_SECONDS:
            measurements.crashes += 1
        testbed.start_daemon()
        testbed.stream(context.seconds, measurements)
    finally:
        mount.set()


def _errno(name: str, *calls: str) -> FaultFunction:
    return by_mount(lambda context: context.seconds, **{call: {"errno": name} for call in calls})


WRITES = ("create", "write", "mkdir", "rename", "unlink", "truncate", "utimens")


def by_files(damage: Callable[[FaultTestbed, list[Path]], None]) -> FaultFunction:
    """A fault of the files themselves, unknown to the daemon."""

    def run(context: FaultContext, measurements: Measurements) -> None:
        files = sorted(context.testbed.below.rglob("*.kv"))
        damage(context.testbed, files)
        context.testbed.stream(context.seconds, measurements)

    return run


def _each(change: Callable[[Path], None]) -> Callable[[FaultTestbed, list[Path]], None]:
    def damage(_: FaultTestbed, files: list[Path]) -> None:
        for path in files:
            try:
                change(path)
            except FileNotFoundError:
                continue  # evicted in the meantime

    return damage


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x10]))

    return change


def _wrong_key(_: FaultTestbed, files: list[Path]) -> None:
    """Each file under the name of its neighbour."""
    contents = [path.read_bytes() for path in files if path.exists()]
    for path, content in zip(files, contents[1:] + contents[:1], strict=False):
        path.write_bytes(content)


def _wrong_namespace(_: FaultTestbed, files: list[Path]) -> None:
    """Valid files of another namespace, as after copying a directory to a wrong place."""
    for path in files:
        if not path.exists():
            continue
        namespace = path.parents[2].name
        other = ("f" if namespace[0] != "f" else "e") + namespace[1:]
        data = path.read_bytes()
        header, rest = data[:4096], data[4096:]
        changed = header.replace(bytes.fromhex(namespace), bytes.fromhex(other)).replace(
            namespace.encode(), other.encode()
        )
        if changed == header:
            raise LookupError("the header of a file does not contain its namespace")
        path.write_bytes(changed + rest)


def directory_removed(context: FaultContext, measurements: Measurements) -> None:
    """The directory of the namespace is removed while it is in use."""
    for path in context.testbed.below.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    context.testbed.stream(context.seconds, measurements)


def clock_jump(context: FaultContext, measurements: Measurements) -> None:
    """The wall clock jumps one day ahead, then two days back."""
    skew = context.testbed.tierd.skew_file
    try:
        for seconds in (DAY_SECONDS, -DAY_SECONDS):
            skew.write_text(str(seconds))
            context.testbed.stream(context.seconds / 2, measurements)
    finally:
        skew.unlink(missing_ok=True)


def daemon_killed(context: FaultContext, measurements: Measurements) -> None:
    """SIGKILL during loads and stores; then a new daemon, as a supervisor starts it."""
    context.testbed.stream(context.seconds / 3, measurements)
    context.testbed.tierd.kill_tierd(signal.SIGKILL)
    context.testbed.stream(context.seconds / 3, measurements)
    context.testbed.start_daemon()
    context.testbed.stream(context.seconds / 3, measurements)


def daemon_stopped(context: FaultContext, measurements: Measurements) -> None:
    """SIGSTOP for longer than a daemon may be silent, then SIGCONT."""
    pid = context.testbed.tierd.tierd_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        context.testbed.stream(STOPPED_SECONDS, measurements)
    finally:
        os.kill(pid, signal.SIGCONT)


def dead_peer(context: FaultContext, measurements: Measurements) -> None:
    """Another engine of the same daemon is killed during its copies; its slots are freed."""
    peer = context.testbed.tierd.engine_process(
        "--keys", "40", "--copy-seconds", "0.05", "--identity", "peer"
    )
    try:
        peer.wait_more("loaded", 2)
    except TimeoutError:
        measurements.notes.append("the other engine did not start a load")
    peer.kill()
    context.testbed.stream(context.seconds, measurements)
    if not context.testbed.wait(
        lambda: context.testbed.tierd.pool("quarantined") == 0,
        "the slots of the killed engine are freed",
        90,
    ):
        measurements.notes.append("slots of the killed engine are still in quarantine")
        measurements.crashes += 1


def bad_live_configuration(context: FaultContext, measurements: Measurements) -> None:
    """Documents that cannot be parsed or whose values are out of range: they are rejected and
    counted, and the last valid values stay in force.
    """
    testbed = context.testbed
    before = testbed.tierd.status()
    path = testbed.tierd.topology_directory / "live.json"
    good = path.read_text()
    try:
        for text in (
            "{",
            '{"generation": 99, "tiers": {"disk": {"loadWeight": -1, "capacityBytes": "many"}}}',
            f'{{"breaker": {{"periodSeconds": {HUGE_NUMBER}}}, '
            f'"tiers": {{"disk": {{"capacityBytes": {HUGE_NUMBER}}}}}}}',
        ):
            replace_file(path, text.encode())
            testbed.stream(max(context.seconds / 3, 2.5), measurements)
    finally:
        path.write_text(good)
    after = testbed.tierd.status()
    if after.get("liveRefusedTotal", 0) <= before.get("liveRefusedTotal", 0):
        measurements.notes.append("no rejected document was counted")
        measurements.crashes += 1
    capacity = [tier["capacityBytes"] for tier in after.get("tiers", ()) if tier["name"] == "disk"]
    if capacity != [
        tier["capacityBytes"] for tier in before.get("tiers", ()) if tier["name"] == "disk"
    ]:
        measurements.notes.append(f"the capacity is {capacity} after invalid documents")
        measurements.crashes += 1


def _for_seconds(context: FaultContext) -> float:
    return context.seconds


FAULTS: tuple[Fault, ...] = (
    Fault("latency-50ms", "FUSE", by_mount(_for_seconds, every={"delay_seconds": 0.05})),
    Fault("latency-1s", "FUSE", by_mount(_for_seconds, every={"delay_seconds": 1.0})),
    Fault(
        "hang-60s",
        "FUSE",
        by_mount(lambda context: context.hang_seconds, read={"hang": True}, write={"hang": True}),
    ),
    Fault("hang-for-ever", "FUSE", endless_hang),
    Fault("EIO", "FUSE", _errno("EIO", "read", "write")),
    Fault("EACCES", "FUSE", _errno("EACCES", "open", "create", "mkdir")),
    Fault("EROFS", "FUSE", _errno("EROFS", *WRITES)),
    Fault("ESTALE", "FUSE", _errno("ESTALE", "every")),
    Fault("ENOSPC", "FUSE", _errno("ENOSPC", "create", "write", "mkdir")),
    Fault("EDQUOT", "FUSE", _errno("EDQUOT", "create", "write", "mkdir")),
    Fault("short-reads", "FUSE", by_mount(_for_seconds, read={"half": True})),
    Fault("flips-in-flight", "FUSE", by_mount(_for_seconds, read={"flip": "payload"})),
    Fault("truncation", "files", by_files(_each(_truncate))),
    Fault("bit-flip-header", "files", by_files(_each(_flip(16)))),
    Fault("bit-flip-payload", "files", by_files(_each(_flip(4096 + 1234)))),
    Fault("wrong-namespace", "files", by_files(_wrong_namespace)),
    Fault("wrong-key", "files", by_files(_wrong_key)),
    Fault("zero-length", "files", by_files(_each(_empty))),
    Fault("directory-removed", "files", directory_removed),
    Fault("clock-jump", "clock", clock_jump),
    Fault("tierd-SIGKILL", "process", daemon_killed),
    Fault("tierd-SIGSTOP", "process", daemon_stopped),
    Fault("dead-peer", "process", dead_peer),
    Fault("bad-live-configuration", "live configuration", bad_live_configuration),
)
