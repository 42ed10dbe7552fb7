"""RAM objects survive tierd and engines in a pod. The stub engine checks every byte it loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import leftover_pool

from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, environment, wait_for
from kvtier.store.types import MEMORY_BIT, UNVERIFIED_BIT

OBJECT_BYTES = 64 << 10
WAIT_SECONDS = 60.0
KEYS = list(range(8))

MakeTestbed = Callable[..., TierdTestbed]


@pytest.fixture
def make_testbed(tmp_path: Path) -> Iterator[MakeTestbed]:
    """A testbed in RAM alone, closed at the end."""
    cases: list[TierdTestbed] = []

    def make(**options: Any) -> TierdTestbed:
        cases.append(TierdTestbed(tmp_path, TierdOptions(**options)))
        return cases[-1]

    yield make
    for testbed in cases:
        testbed.close()


def filled(testbed: TierdTestbed, engine: StubEngine | None = None) -> StubEngine:
    """An engine that has stored ``KEYS``, all of them checksummed."""
    testbed.start_tierd()
    engine = engine or testbed.engine()
    for number in KEYS:
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(number)
    assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
    wait_for(lambda: testbed.counter("objects_checksummed") >= len(KEYS), "everything is sealed")
    return engine


def attached_again(engine: StubEngine) -> None:
    """Credits come after the fence has opened, hence after the worker has drained."""
    assert engine.wait_for(lambda: engine.seen.attached == 2, WAIT_SECONDS)
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait("usable", WAIT_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_new_tierd_serves_checksummed_objects_from_ram(
    make_testbed: MakeTestbed, number: int
) -> None:
    testbed = make_testbed()
    engine = filled(testbed)
    pool = os.stat(testbed.run_directory / "pool")
    testbed.kill_tierd(number)
    testbed.start_tierd()
    attached_again(engine)
    assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
    assert engine.holds(0) == UNVERIFIED_BIT
    assert engine.load(KEYS) == len(KEYS)
    assert (engine.seen.wrong, engine.seen.misses, engine.seen.promoted) == (0, 0, len(KEYS))
    wait_for(
        lambda: testbed.counter("recovered_objects_verified") == len(KEYS), "each is verified once"
    )
    assert engine.wait_for(lambda: engine.holds(0) == MEMORY_BIT, WAIT_SECONDS)
    assert engine.load(KEYS) == len(KEYS)
    assert testbed.counter("recovered_objects_verified") == len(KEYS)
    # The pool is one file for as long as the pod lives.
    again = os.stat(testbed.run_directory / "pool")
    assert (again.st_ino, again.st_size) == (pool.st_ino, pool.st_size)


def test_a_byte_flipped_between_two_tierds_is_a_miss(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed()
    engine = filled(testbed)
    testbed.kill_tierd()
    flipped = leftover_pool.records(testbed.run_directory)[5]
    leftover_pool.flip(testbed.run_directory, flipped, OBJECT_BYTES - 1)
    testbed.start_tierd()
    attached_again(engine)
    assert engine.wait_for(lambda: all(engine.holds(number) for number in KEYS), WAIT_SECONDS)
    found = [engine.load([number]) for number in KEYS]
    assert (sum(found), engine.seen.wrong) == (len(KEYS) - 1, 0)
    wait_for(lambda: testbed.counter("recovered_objects_dropped", "corrupt") == 1, "it is counted")
    assert engine.wait_for(lambda: not engine.holds(found.index(0)), WAIT_SECONDS)
    # The key can be stored again.
    assert engine.store(found.index(0))
    assert engine.wait_for(lambda: engine.holds(found.index(0)) == MEMORY_BIT, WAIT_SECONDS)


def test_with_persistence_process_no_object_is_recovered(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(persistence="Process")
    engine = filled(testbed)
    assert not (testbed.run_directory / "slots").exists()
    testbed.kill_tierd()
    testbed.start_tierd()
    attached_again(engine)
    assert not any(engine.holds(number) for number in KEYS)
    assert testbed.counter("objects_recovered") == 0


def test_objects_of_another_topology_are_not_recovered_and_are_counted(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    engine = filled(testbed)
    testbed.kill_tierd()
    testbed.change(content_hash="another")
    testbed.start_tierd()
    attached_again(engine)
    assert not any(engine.holds(number) for number in KEYS)
    wait_for(
        lambda: testbed.counter("recovered_objects_rejected", "topology") == len(KEYS),
        "it is counted",
    )


def test_objects_are_not_recovered_after_a_tierd_without_persistence(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    engine = filled(testbed)
    memory = testbed.topology.structural.tiers[0]
    for number, persistence in ((2, "Process"), (3, "Pod")):
        testbed.kill_tierd()
        testbed.change(tiers=[memory.model_copy(update={"persistence": persistence})])
        testbed.start_tierd()
        assert engine.wait_for(lambda n=number: engine.seen.attached == n, WAIT_SECONDS)  # type: ignore[misc]
        assert engine.wait("can_store", WAIT_SECONDS)
        assert not any(engine.holds(number) for number in KEYS)


def test_an_engine_with_another_layout_loads_no_recovered_object(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed()
    filled(testbed).close()
    # If tierd were killed before it noticed the end of the engine, the next one would wait for the
    # engine's process, which is this one.
    wait_for(lambda: not testbed.status()["sessions"], "tierd knows that the engine is gone")
    testbed.kill_tierd()
    testbed.start_tierd()
    other = testbed.engine(object_bytes=2 * OBJECT_BYTES)
    assert other.wait("can_store", WAIT_SECONDS)
    assert other.load(KEYS) == 0
    assert other.seen.wrong == 0


def test_ram_serves_the_next_engine_whether_or_not_tierd_was_killed(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    first = testbed.engine_process("--keys", "6")
    wait_for(lambda: first.number("loaded") >= 20, "everything is stored and loaded")
    wait_for(lambda: testbed.counter("objects_checksummed") >= 6, "everything is sealed")
    first.kill()
    second = testbed.engine_process("--keys", "6", "--seed", "1")
    wait_for(lambda: second.number("loaded") >= 20, "the next engine loads")
    assert second.number("stored") <= 1  # a chunk that was not delivered when the first one died
    second.kill()
    testbed.kill_tierd()
    testbed.start_tierd()
    third = testbed.engine_process("--keys", "6", "--seed", "2")
    wait_for(lambda: third.number("loaded") >= 20, "the engine after that loads")
    wait_for(lambda: testbed.counter("recovered_objects_verified") == 6, "each was verified")
    seen = third.stop()
    assert (seen["stored"], seen["wrong"]) == (0, 0)


def test_killing_tierd_with_a_full_pool_recovers_no_wrong_byte(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(memory_bytes=40 * OBJECT_BYTES)
    testbed.start_tierd()
    engine = testbed.engine_process("--keys", "80", "--copy-seconds", "0.002")
    for number in range(1, 4):
        wait_for(
            lambda n=number: engine.number("attached") >= n and engine.seen()["usable"],
            "it is attached",
        )  # type: ignore[misc]
        engine.wait_more("loaded", 40)
        if number > 1:
            wait_for(
                lambda: testbed.counter("recovered_objects_verified") > 0,
                "objects of the tierd before are loaded",
            )
        testbed.kill_tierd()
        testbed.start_tierd()
    wait_for(lambda: engine.number("attached") >= 4 and engine.seen()["usable"], "it is attached")
    engine.wait_more("loaded", 20)
    assert testbed.counter("recovered_objects_dropped", "corrupt") == 0
    assert engine.stop()["wrong"] == 0


def test_ram_survives_restarts_of_tierd_and_of_the_sidecar_container(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    log = (testbed.directory / "sidecar.log").open("ab")
    sidecars: list[subprocess.Popen[bytes]] = []

    def start(other_than: int = 0) -> None:
        """As the kubelet does; waits until a tierd serves."""
        if not sidecars or sidecars[-1].poll() is not None:
            command = [
                "run",
                "--topology",
                str(testbed.topology_directory),
                "--run-directory",
                str(testbed.run_directory),
            ]
            sidecars.append(
                subprocess.Popen(
                    [sys.executable, "-m", "kvtier.tierd.sidecar", *command],
                    env=environment(),
                    stderr=log,
                    start_new_session=True,
                )
            )
        wait_for(
            lambda: testbed.tierd_pid() not in (0, other_than) and testbed.status().get("started"),
            "a tierd serves",
        )

    try:
        start()
        engine = testbed.engine()
        for number in KEYS:
            assert engine.wait("can_store", WAIT_SECONDS)
            assert engine.store(number)
        wait_for(
            lambda: testbed.counter("objects_checksummed") >= len(KEYS), "everything is sealed"
        )
        for life in (2, 3):
            pid = testbed.tierd_pid()
            if life == 3:
                os.killpg(sidecars[-1].pid, signal.SIGKILL)
                sidecars[-1].wait(WAIT_SECONDS)
            else:
                os.kill(pid, signal.SIGKILL)
            start(other_than=pid)
            assert engine.wait_for(lambda n=life: engine.seen.attached >= n, WAIT_SECONDS)  # type: ignore[misc]
            assert engine.wait("can_store", WAIT_SECONDS)
            assert engine.wait_for(
                lambda: all(engine.holds(number) == UNVERIFIED_BIT for number in KEYS), WAIT_SECONDS
            )
            assert engine.load(KEYS) == len(KEYS)
        assert engine.seen.wrong == 0
    finally:
        for sidecar in sidecars:
            if sidecar.poll() is None:
                sidecar.terminate()
                sidecar.wait(WAIT_SECONDS)
        log.close()
