"""The faults of the scorecard, in the order in which they are played.

Each is a function that plays one fault on a stage: it makes the fault, lets the stream run beside it, takes it away. What it measured goes into the
``Measurements`` that it is given. ``means`` says by what the fault is made.
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

from kvtier.processes import ProcessIdentity, main_thread_exited, pid_namespace, process_start
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.testbed import FaultTestbed, Measurements
from kvtier.scorecard.tier_faults import TierWrapper

DAY_SECONDS = 86_400
STOPPED_SECONDS = 4.0
EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FaultContext:
    """What a fault can use. ``mount``: what makes storage misbehave, a wrapper where FUSE cannot be had. ``seconds``: how long a fault lasts; ``hang_seconds``: a hang that ends."""

    stage: FaultTestbed
    mount: FaultyMount | TierWrapper
    seconds: float
    hang_seconds: float


Play = Callable[[FaultContext, Measurements], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the scorecard. ``means``: "FUSE", "files", "process", "clock", "live configuration"."""

    name: str
    means: str
    play: Play
    note: str = ""


def by_mount(seconds_of: Callable[[FaultContext], float], **faults: dict[str, Any]) -> Play:
    """A fault that the mount makes."""

    def play(scene: FaultContext, measured: Measurements) -> None:
        mount = scene.mount
        mount.set(**faults)
        try:
            scene.stage.stream(seconds_of(scene), measured)
        finally:
            mount.set()

    return play


def hang_for_ever(scene: FaultContext, measured: Measurements) -> None:
    """Nothing comes back as long as the daemon lives: it is told to end beside the hang, and another one starts."""
    mount, stage = scene.mount, scene.stage
    mount.set(every={"hang": True})
    try:
        stage.stream(scene.seconds, measured)
        process = ProcessIdentity(stage.pid, process_start(stage.pid), pid_namespace())
        begun = time.monotonic()
        os.kill(stage.pid, signal.SIGTERM)
        # The kernel keeps threads that wait for the mount, and the process's entry with them; no line of the program runs any more.
        while not main_thread_exited(process) and time.monotonic() - begun < 30:
            time.sleep(0.02)
        ended = time.monotonic() - begun
        measured.notes.append(f"the daemon ended {ended:.1f} s after it was told to")
        if ended > EXIT_SECONDS:
            measured.crashes += 1
        stage.pid = stage.case.start_tierd(tiers=False)
        stage.stream(scene.seconds, measured)
    finally:
        mount.set()


def _errno(name: str, *calls: str) -> Play:
    return by_mount(lambda scene: scene.seconds, **{call: {"errno": name} for call in calls})


READS = ("open", "read")
WRITES = ("create", "write", "mkdir", "rename", "unlink", "truncate", "utimens")


def by_files(damage: Callable[[FaultTestbed, list[Path]], None]) -> Play:
    """A fault that is done to the files themselves, behind the daemon's back."""

    def play(scene: FaultContext, measured: Measurements) -> None:
        files = sorted(scene.stage.below.rglob("*.kv"))
        damage(scene.stage, files)
        scene.stage.stream(scene.seconds, measured)

    return play


def _each(change: Callable[[Path], None]) -> Callable[[FaultTestbed, list[Path]], None]:
    def damage(_: FaultTestbed, files: list[Path]) -> None:
        for path in files:
            try:
                change(path)
            except FileNotFoundError:
                continue  # evicted meanwhile

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
    """Files that say that they are of another namespace, otherwise in order: what a directory copied to a wrong place holds."""
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
            raise LookupError("the header of a file does not hold its namespace")
        path.write_bytes(changed + rest)


def directory_removed(scene: FaultContext, measured: Measurements) -> None:
    """The directory of the namespace, with everything in it, goes while it is used."""
    for path in scene.stage.below.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    scene.stage.stream(scene.seconds, measured)


def clock_jump(scene: FaultContext, measured: Measurements) -> None:
    """The wall clock goes a day ahead, then two days back."""
    skew = scene.stage.case.skew_file
    try:
        for seconds in (DAY_SECONDS, -DAY_SECONDS):
            skew.write_text(str(seconds))
            scene.stage.stream(scene.seconds / 2, measured)
    finally:
        skew.unlink(missing_ok=True)


def daemon_killed(scene: FaultContext, measured: Measurements) -> None:
    """SIGKILL in the middle of loads and stores; a new daemon, as a supervisor starts it."""
    scene.stage.stream(scene.seconds / 3, measured)
    scene.stage.case.kill_tierd(signal.SIGKILL)
    scene.stage.stream(scene.seconds / 3, measured)
    scene.stage.pid = scene.stage.case.start_tierd(tiers=False)
    scene.stage.stream(scene.seconds / 3, measured)


def daemon_stopped(scene: FaultContext, measured: Measurements) -> None:
    """SIGSTOP for longer than a daemon may be silent, then SIGCONT."""
    pid = scene.stage.case.tierd_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        scene.stage.stream(STOPPED_SECONDS, measured)
    finally:
        os.kill(pid, signal.SIGCONT)


def dead_peer(scene: FaultContext, measured: Measurements) -> None:
    """Another engine on the same daemon is killed in the middle of its copies; its slots come back."""
    peer = scene.stage.case.engine_process(
        "--keys", "40", "--copy-seconds", "0.05", "--identity", "peer"
    )
    try:
        peer.wait_more("loaded", 2)
    except TimeoutError:
        measured.notes.append("the other engine did not come as far as a load")
    peer.kill()
    scene.stage.stream(scene.seconds, measured)
    if not scene.stage.wait(
        lambda: scene.stage.case.pool("quarantined") == 0, "the dead engine's slots come back", 90
    ):
        measured.notes.append("slots of the dead engine stay quarantined")
        measured.crashes += 1


def bad_live_configuration(scene: FaultContext, measured: Measurements) -> None:
    """A document that is none, and one whose values are out of range: refused, counted, the last good values stay."""
    stage = scene.stage
    before = stage.case.status()
    path = stage.case.topology_directory / "live.json"
    good = path.read_text()
    try:
        for text in (
            "{",
            '{"generation": 99, "tiers": {"disk": {"loadWeight": -1, "capacityBytes": "many"}}}',
            f'{{"breaker": {{"periodSeconds": 1{"0" * 400}}}, "tiers": {{"disk": {{"capacityBytes": 1{"0" * 400}}}}}}}',
        ):
            fresh = path.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(path)
            stage.stream(max(scene.seconds / 3, 2.5), measured)
    finally:
        path.write_text(good)
    after = stage.case.status()
    if after.get("liveRefusedTotal", 0) <= before.get("liveRefusedTotal", 0):
        measured.notes.append("nothing was counted as refused")
        measured.crashes += 1
    capacity = [tier["capacityBytes"] for tier in after.get("tiers", ()) if tier["name"] == "disk"]
    if capacity != [
        tier["capacityBytes"] for tier in before.get("tiers", ()) if tier["name"] == "disk"
    ]:
        measured.notes.append(f"the capacity is {capacity} after bad documents")
        measured.crashes += 1


def _for_seconds(scene: FaultContext) -> float:
    return scene.seconds


FAULTS: tuple[Fault, ...] = (
    Fault("latency-50ms", "FUSE", by_mount(_for_seconds, every={"delay_seconds": 0.05})),
    Fault("latency-1s", "FUSE", by_mount(_for_seconds, every={"delay_seconds": 1.0})),
    Fault(
        "hang-60s",
        "FUSE",
        by_mount(lambda scene: scene.hang_seconds, read={"hang": True}, write={"hang": True}),
    ),
    Fault("hang-for-ever", "FUSE", hang_for_ever),
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
