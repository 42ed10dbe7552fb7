"""A hanging mount: no process waits for the threads in it, and their slots are not reused.

The kernel keeps a thread that waits for the mount, even after SIGKILL, and with it the entry of its
process. The rest of the process ends at once and executes no further instruction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import held_by_the_kernel

from kvtier.config.models import Daemon
from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, environment, wait_for
from kvtier.processes import ProcessIdentity, main_thread_exited, pid_namespace, process_start
from kvtier.scorecard.mount import FaultyMount, faulty_mount, unavailable

OBJECT_BYTES = 64 << 10
WAIT_SECONDS = 60.0
EXIT_SECONDS = 20.0
"""It takes two or three seconds, and what a busy machine adds. A call that hangs does not end."""
KEYS = list(range(6))

MakeTestbed = Callable[..., TierdTestbed]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    if unavailable():
        pytest.skip(unavailable())
    try:
        with faulty_mount(tmp_path / "fuse") as mount:
            yield mount
    except OSError as error:
        pytest.skip(f"no FUSE mount can be made here: {error}")


@pytest.fixture
def make_testbed(tmp_path: Path, mount: FaultyMount) -> Iterator[MakeTestbed]:
    cases: list[TierdTestbed] = []

    def make(**options: Any) -> TierdTestbed:
        cases.append(
            TierdTestbed(
                tmp_path, TierdOptions(file_bytes=64 << 20, files=mount.path / "tier", **options)
            )
        )
        return cases[-1]

    yield make
    mount.release()
    for testbed in cases:
        testbed.close()


def on_disk_alone(testbed: TierdTestbed) -> StubEngine:
    """An engine whose keys are in files and in no RAM."""
    testbed.start_tierd()
    engine = testbed.engine()
    for number in KEYS:
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(number)
    wait_for(lambda: len(list(testbed.files.rglob("*.kv"))) == len(KEYS), "the objects are written")
    testbed.kill_tierd()
    testbed.start_tierd()
    assert engine.wait_for(lambda: engine.seen.attached == 2, WAIT_SECONDS)
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
    return engine


def ended(pid: int, number: int) -> float:
    """Sends a signal. Returns the seconds until the process executes no instruction."""
    process = ProcessIdentity(pid, process_start(pid), pid_namespace())
    began = time.monotonic()
    os.kill(pid, number)
    while not main_thread_exited(process):
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_tierd_exits_during_a_hanging_read_and_its_slot_stays_quarantined(
    make_testbed: MakeTestbed, mount: FaultyMount, number: int
) -> None:
    testbed = make_testbed(persistence="Process", memory_bytes=16 * OBJECT_BYTES)
    engine = on_disk_alone(testbed)
    mount.hang("read", "write")
    assert engine.load(KEYS, budget_seconds=0.5) == 0
    wait_for(lambda: testbed.pool("reading") >= OBJECT_BYTES and mount.holds("read"), "reads hang")
    pid = testbed.tierd_pid()
    seconds = ended(pid, number)
    print(f"\n{signal.Signals(number).name}: nothing of tierd runs after {seconds:.2f} s")
    assert seconds < EXIT_SECONDS
    wait_for(lambda: held_by_the_kernel(pid), "a thread is held by the kernel")

    testbed.start_tierd(tiers=False)
    assert engine.wait_for(lambda: engine.seen.attached == 3, WAIT_SECONDS)
    assert engine.wait("can_store", WAIT_SECONDS)
    # One slot for each hung thread. The next tierd and its engine use the others.
    wait_for(lambda: testbed.pool("quarantined") > 0, "slots are quarantined")
    quarantined = testbed.pool("quarantined")
    assert quarantined <= len(KEYS) * OBJECT_BYTES
    for chunk in range(100, 120):
        engine.store(chunk, timeout_seconds=1.0)
        engine.wait("can_store", 1.0)
    assert testbed.pool("quarantined") == quarantined

    # The mount responds: the old threads write into their old slots, which are then free.
    mount.release()
    wait_for(lambda: not held_by_the_kernel(pid), "the threads come back")
    wait_for(lambda: testbed.pool("quarantined") == 0, "the slots come back")
    for chunk in range(100, 120):
        engine.load([chunk])
    assert engine.seen.wrong == 0


def test_tierd_exits_during_a_hanging_write(make_testbed: MakeTestbed, mount: FaultyMount) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    engine = testbed.engine()
    mount.hang("write")
    for number in KEYS:
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(number)
    wait_for(
        lambda: testbed.status()["pendingStores"] >= len(KEYS) and mount.holds("write"),
        "writes hang",
    )
    pid = testbed.tierd_pid()
    seconds = ended(pid, signal.SIGTERM)
    print(f"\nSIGTERM with {len(KEYS)} writes pending: nothing of tierd runs after {seconds:.2f} s")
    assert seconds < EXIT_SECONDS
    # RAM is taken over all the same.
    testbed.start_tierd(tiers=False)
    assert engine.wait_for(lambda: engine.seen.attached == 2, WAIT_SECONDS)
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
    assert engine.load(KEYS) == len(KEYS)
    assert engine.seen.wrong == 0


def test_an_engine_that_started_tierd_exits_with_a_hanging_mount(
    make_testbed: MakeTestbed, mount: FaultyMount
) -> None:
    testbed = make_testbed(daemon=Daemon.ENGINE)
    engine = testbed.engine_process("--keys", "40")
    engine.wait_more("loaded", 10)
    mount.hang("read", "write")
    pid = testbed.tierd_pid()
    began = time.monotonic()
    engine.signal(signal.SIGTERM)
    engine.process.wait(WAIT_SECONDS)
    seconds = time.monotonic() - began
    print(f"\nthe engine has ended after {seconds:.2f} s")
    assert seconds < EXIT_SECONDS
    process = ProcessIdentity(pid, process_start(pid), pid_namespace())
    wait_for(lambda: main_thread_exited(process), "tierd ends", EXIT_SECONDS)


def test_the_sidecar_restarts_a_tierd_that_the_kernel_cannot_kill(
    make_testbed: MakeTestbed, mount: FaultyMount
) -> None:
    testbed = make_testbed(persistence="Process")
    engine = on_disk_alone(testbed)
    testbed.kill_tierd()
    with (testbed.directory / "sidecar.log").open("ab") as log:
        command = [
            "run",
            "--topology",
            str(testbed.topology_directory),
            "--run-directory",
            str(testbed.run_directory),
        ]
        sidecar = subprocess.Popen(
            [sys.executable, "-m", "kvtier.tierd.sidecar", *command],
            env=environment(),
            stderr=log,
            start_new_session=True,
        )
    try:
        assert engine.wait_for(lambda: engine.seen.attached == 3, WAIT_SECONDS)
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
        mount.hang("read", "write")
        assert engine.load(KEYS, budget_seconds=0.5) == 0
        wait_for(
            lambda: testbed.pool("reading") >= OBJECT_BYTES and mount.holds("read"), "reads hang"
        )
        pid = testbed.tierd_pid()
        ended(pid, signal.SIGKILL)
        wait_for(
            lambda: testbed.tierd_pid() not in (0, pid) and testbed.status().get("started"),
            "another tierd serves",
        )
        wait_for(lambda: held_by_the_kernel(pid), "a thread is held by the kernel")
        assert engine.wait_for(lambda: engine.seen.attached == 4, WAIT_SECONDS)
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(100)
        mount.release()
        # The first process of the container reaps what the kernel has let go.
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the old process is reaped")
    finally:
        mount.release()
        sidecar.terminate()
        sidecar.wait(WAIT_SECONDS)
    assert engine.seen.wrong == 0
