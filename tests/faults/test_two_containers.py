"""Engine and tierd in two pid namespaces, as in two containers: only locks prove liveness."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import (
    WAIT_SECONDS,
    StubEngineProcess,
    TierdOptions,
    TierdTestbed,
    wait_for,
)
from kvtier.tierd.daemon import DaemonOptions, TierDaemon

CONTAINER = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
AT_ONCE_SECONDS = 40.0
"""Less than the minute that a process without a lock is waited for."""


def _namespaces_can_be_made() -> bool:
    try:
        return (
            subprocess.run(
                [*CONTAINER, "true"], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


pytestmark = pytest.mark.skipif(
    not _namespaces_can_be_made(), reason="no right to make a pid namespace"
)


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[TierdTestbed]:
    made = TierdTestbed(tmp_path, TierdOptions(memory_bytes=8 << 20))
    yield made
    made.close()


def engine_in_a_container(testbed: TierdTestbed, *arguments: str) -> StubEngineProcess:
    return testbed.engine_process(*arguments, prefix=CONTAINER)


def first_process(engine: StubEngineProcess) -> int:
    """Process id of the engine in this namespace (``engine.pid`` is that of ``unshare``)."""
    return int(Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()[0])


def nothing_is_held(testbed: TierdTestbed) -> bool:
    return (
        testbed.pool("granted")
        == testbed.pool("reserved")
        == testbed.pool("quarantined")
        == testbed.pool("pinned")
        == 0
    )


def test_slots_of_a_killed_engine_are_freed_and_its_objects_are_hits(
    testbed: TierdTestbed,
) -> None:
    testbed.start_tierd()
    engine = engine_in_a_container(testbed, "--keys", "20")
    engine.wait_more("loaded", 20)
    wait_for(
        lambda: [each["pid"] for each in testbed.status()["sessions"]][:1] == [1],
        "its process is the first one of its container",
    )
    os.kill(first_process(engine), signal.SIGKILL)
    wait_for(lambda: not testbed.status()["sessions"], "the sessions end")
    wait_for(lambda: nothing_is_held(testbed), "its slots come back", AT_ONCE_SECONDS)
    again = engine_in_a_container(testbed, "--keys", "20")
    wait_for(lambda: again.seen().get("usable"), "it is attached again")
    looking = testbed.engine()
    assert looking.wait("usable", WAIT_SECONDS)
    assert looking.wait_for(
        lambda: any(looking.holds(number) for number in range(20)), WAIT_SECONDS
    )
    again.wait_more("loaded", 20)
    assert again.number("wrong") == 0
    assert (
        testbed.counter("sessions_vanished", "proven")
        + testbed.counter("sessions_vanished", "unproven")
        > 0
    )


def test_slots_of_a_sleeping_engine_stay_quarantined(
    testbed: TierdTestbed,
) -> None:
    # A process that cannot be seen would be given up after a second here.
    daemon = TierDaemon(DaemonOptions(testbed.topology_directory, unverifiable_timeout_seconds=1.0))
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: testbed.status().get("started"), "tierd serves")
        engine = engine_in_a_container(testbed, "--keys", "20")
        engine.wait_more("loaded", 5)
        inner = first_process(engine)
        os.kill(inner, signal.SIGSTOP)
        wait_for(lambda: not testbed.status()["sessions"], "its silence is noticed")
        held = testbed.pool("quarantined")
        assert held > 0
        time.sleep(3.0)
        assert testbed.pool("quarantined") == held
        os.kill(inner, signal.SIGKILL)
        wait_for(lambda: nothing_is_held(testbed), "its slots come back", AT_ONCE_SECONDS)
    finally:
        daemon.stop()
        thread.join(WAIT_SECONDS)


def test_a_tierd_started_after_the_engine_exited_is_not_fenced(testbed: TierdTestbed) -> None:
    testbed.start_tierd()
    engine = engine_in_a_container(testbed, "--keys", "20")
    engine.wait_more("loaded", 5)
    testbed.kill_tierd()
    os.kill(first_process(engine), signal.SIGKILL)
    engine.process.wait(WAIT_SECONDS)
    start = time.monotonic()
    testbed.start_tierd()
    wait_for(lambda: not testbed.status()["fenced"], "the fence opens")
    assert time.monotonic() - start < AT_ONCE_SECONDS
    assert not list((testbed.run_directory / "sessions").iterdir())
