"""tierd and engines as real processes that are killed and stopped. Every loaded byte is checked."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.config.models import Daemon
from kvtier.files import replace_file
from kvtier.harness import stub_worker
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.tierd.client import ClientState
from kvtier.tierd.wire import PROTOCOL

OBJECT_BYTES = 64 << 10
WAIT_SECONDS = 60.0

MakeTestbed = Callable[..., TierdTestbed]


@pytest.fixture
def make_testbed(tmp_path: Path) -> Iterator[MakeTestbed]:
    """Makes cases that are closed at the end."""
    cases: list[TierdTestbed] = []

    def make(**options: Any) -> TierdTestbed:
        directory = tmp_path / f"testbed-{len(cases)}"
        directory.mkdir()
        testbed = TierdTestbed(directory, TierdOptions(**options))
        cases.append(testbed)
        return testbed

    yield make
    for testbed in cases:
        testbed.close()


def test_an_engine_survives_kills_of_tierd_and_loads_no_wrong_byte(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(daemon=Daemon.ENGINE, file_bytes=64 << 20)
    engine = testbed.engine_process("--keys", "150", "--copy-seconds", "0.004")
    for round_number in range(1, 4):
        wait_for(
            lambda n=round_number: engine.number("attached") >= n and engine.seen()["usable"],
            "the engine is attached",
        )  # type: ignore[misc]
        engine.wait_more("loaded", 20)
        testbed.kill_tierd()
        wait_for(lambda n=round_number: engine.number("lost") >= n, "the engine notices")  # type: ignore[misc]
    engine.wait_more("loaded", 20)
    seen = engine.stop()
    assert seen["wrong"] == 0
    assert seen["attached"] >= 4
    wait_for(lambda: not testbed.run_directory.exists(), "the run directory is removed")


def test_a_tierd_that_was_stopped_serves_the_engine_again(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(file_bytes=64 << 20)
    pid = testbed.start_tierd()
    engine = testbed.engine_process("--keys", "100")
    engine.wait_more("loaded", 20)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: engine.number("lost") >= 1, "the engine takes it for lost")
    os.kill(pid, signal.SIGCONT)
    wait_for(
        lambda: engine.number("attached") >= 2 and engine.seen()["usable"],
        "the engine attached again",
    )
    engine.wait_more("loaded", 20)
    assert testbed.tierd_pid() == pid
    wait_for(lambda: testbed.pool("quarantined") == 0, "nothing stays quarantined")
    assert engine.stop()["wrong"] == 0


def test_a_tierd_that_hangs_is_killed_by_the_engine_that_started_it_and_replaced(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(daemon=Daemon.ENGINE)
    engine = testbed.engine_process("--keys", "50", "--unresponsive-seconds", "4")
    engine.wait_more("loaded", 5)
    pid = testbed.tierd_pid()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: testbed.tierd_pid() not in (0, pid), "another tierd serves")
    wait_for(lambda: engine.seen()["usable"], "the engine is attached to it")
    engine.wait_more("loaded", 5)
    assert engine.stop()["wrong"] == 0


def test_slots_of_a_killed_engine_are_freed_once_its_process_has_exited(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    engine = testbed.engine_process("--keys", "30")
    engine.wait_more("loaded", 5)
    wait_for(lambda: testbed.pool("granted") > 0, "it is granted slots")
    engine.kill()
    wait_for(lambda: not testbed.status()["sessions"], "the sessions end")
    wait_for(
        lambda: (
            testbed.pool("granted") == testbed.pool("reserved") == testbed.pool("quarantined") == 0
        ),
        "its slots come back",
    )
    wait_for(lambda: testbed.pool("pinned") == 0, "nothing stays pinned")
    wait_for(lambda: not any((testbed.run_directory / "sessions").iterdir()), "no file is left")


def test_a_tierd_without_engines_exits_and_removes_the_run_directory(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(daemon=Daemon.ENGINE)
    engine = testbed.engine_process("--keys", "30")
    engine.wait_more("loaded", 5)
    engine.kill()
    wait_for(lambda: not testbed.run_directory.exists(), "the run directory is removed")


def test_ten_rounds_of_kill_and_start_leave_nothing_in_shared_memory(
    make_testbed: MakeTestbed,
) -> None:
    common = f"kvtier-test-{uuid.uuid4().hex[:8]}"
    cases = [
        make_testbed(daemon=Daemon.ENGINE, run_directory=Path("/dev/shm") / f"{common}-{name}")
        for name in "ab"
    ]
    for round_number in range(10):
        # Two directories: objects left in one are recovered, those in the other are removed.
        testbed = cases[round_number // 2 % 2]
        engine = testbed.engine_process("--keys", "30")
        engine.wait_more("loaded", 3)
        wait_for(
            lambda: len(list(Path("/dev/shm").glob(f"{common}-*"))) == 1, "one directory is left"
        )
        if round_number < 9:
            testbed.kill_tierd()
            engine.kill()
        else:
            assert engine.stop()["wrong"] == 0
    wait_for(lambda: not list(Path("/dev/shm").glob(f"{common}-*")), "nothing is left")


def test_two_engines_share_one_tierd_and_its_objects(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    first, second = testbed.engine(), testbed.engine()
    assert first.wait("usable", WAIT_SECONDS)
    assert second.wait("usable", WAIT_SECONDS)
    assert first.wait("can_store", WAIT_SECONDS)
    assert first.store(1)
    assert second.wait_for(lambda: second.holds(1), WAIT_SECONDS)
    assert second.load([1]) == 1
    first.close()
    assert second.wait("can_store", WAIT_SECONDS)
    assert second.store(2)
    assert second.wait_for(lambda: second.holds(2), WAIT_SECONDS)
    assert second.load([1, 2]) == 2
    assert (second.seen.wrong, second.seen.lost) == (0, 0)


def test_engines_of_different_identity_share_a_tierd_but_no_object(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    first, second = testbed.engine(identity="one"), testbed.engine(identity="two")
    assert first.wait("usable", WAIT_SECONDS)
    assert second.wait("usable", WAIT_SECONDS)
    assert first.wait("can_store", WAIT_SECONDS)
    assert first.store(1)
    assert first.wait_for(lambda: first.holds(1), WAIT_SECONDS)
    second.step()
    assert second.load([1]) == 0


def test_a_connector_of_another_version_is_rejected_with_both_versions(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    other, same = testbed.engine(protocol="0.0.0/1"), testbed.engine()
    assert other.wait_for(lambda: other.client.state is ClientState.REFUSED, WAIT_SECONDS)
    assert PROTOCOL in other.client.refusal
    assert "0.0.0/1" in other.client.refusal
    assert same.wait("usable", WAIT_SECONDS)
    assert other.client.counters["refused"] == 1, "it does not come again at once"


def test_a_worker_that_never_drains_keeps_the_next_tierd_fenced_until_it_exits(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed()
    testbed.start_tierd()
    stubborn = testbed.engine_process("--keys", "30", "--never-drain")
    stubborn.wait_more("loaded", 5)
    testbed.kill_tierd()
    testbed.start_tierd()
    engine = testbed.engine()
    assert engine.wait("usable", WAIT_SECONDS)
    status = testbed.status()
    assert (status["fenced"], status["awaitedWorkers"]) == (True, 1)
    assert not engine.wait("credits", 2.0)
    assert not engine.store(1)
    stubborn.kill()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(1)
    wait_for(lambda: not testbed.status()["fenced"], "the fence opens")


@pytest.mark.parametrize("fencing", [True, False])
def test_a_slow_copy_during_a_restart_of_tierd_corrupts_bytes_only_without_the_fence(
    make_testbed: MakeTestbed, fencing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(stub_worker, "time", SimpleNamespace(sleep=go_on.wait))
    testbed = make_testbed(memory_bytes=16 * OBJECT_BYTES)
    testbed.start_tierd()
    slow = testbed.engine(copy_seconds=64 * WAIT_SECONDS, copy_pieces=64)
    assert slow.wait("usable", WAIT_SECONDS)
    assert slow.wait("can_store", WAIT_SECONDS)
    assert slow.begin_store(1_000) is not None
    wait_for(slow.worker.copying.is_set, "the copy runs")
    testbed.kill_tierd()
    testbed.start_tierd(fencing=fencing)
    quick = testbed.engine()
    assert quick.wait("usable", WAIT_SECONDS)
    if fencing:
        assert not quick.wait("credits", 1.0), "slots are granted while the copy runs"
        go_on.set()
    assert quick.wait("can_store", WAIT_SECONDS)
    # Without a fence the copy still runs; with one it has ended before there were credits.
    assert slow.worker.copying.is_set() is not fencing
    stored = list(range(quick.credits))
    for number in stored:
        assert quick.store(number)
    assert quick.wait_for(lambda: all(quick.holds(number) for number in stored), WAIT_SECONDS)
    go_on.set()
    wait_for(lambda: not slow.worker.copying.is_set(), "the copy has ended")
    for number in stored:
        quick.load([number])
    assert (quick.seen.wrong == 0) is fencing
    assert quick.seen.loaded + quick.seen.wrong == len(stored)


def test_slots_of_a_stopped_engine_stay_quarantined_until_it_has_drained(
    make_testbed: MakeTestbed,
) -> None:
    testbed = make_testbed(memory_bytes=16 * OBJECT_BYTES)
    testbed.start_tierd()
    frozen = testbed.engine_process("--keys", "1000", "--copy-seconds", "1.0")
    wait_for(lambda: frozen.number("stored") >= 1, "the engine stores")
    frozen.signal(signal.SIGSTOP)
    wait_for(lambda: not testbed.status()["sessions"], "its silence is noticed")
    assert testbed.pool("quarantined") > 0
    engine = testbed.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    stored = list(range(2_000, 2_000 + engine.credits))
    for number in stored:
        assert engine.store(number)
    frozen.signal(signal.SIGCONT)
    wait_for(lambda: frozen.number("attached") >= 2, "it attaches again")
    wait_for(lambda: testbed.pool("quarantined") == 0, "its old slots come back")
    engine.step()
    held = [number for number in stored if engine.holds(number)]
    for number in held:
        engine.load([number])
    assert engine.seen.wrong == 0
    assert frozen.stop()["wrong"] == 0


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_pending_store_bytes": 1 << 16}, {"max_write_bytes_per_second": 1 << 20}],
    ids=["unlimited", "backlog", "budget"],
)
def test_sigterm_completes_pending_writes_before_tierd_exits(
    make_testbed: MakeTestbed, limits: dict[str, int]
) -> None:
    testbed = make_testbed(file_bytes=64 << 20)
    disk = testbed.live.tiers["disk"].model_copy(update=limits)
    tiers = {**testbed.live.tiers, "disk": disk}
    testbed.retune(testbed.live.model_copy(update={"generation": 2, "tiers": tiers}))
    testbed.start_tierd()
    wait_for(lambda: testbed.status()["appliedGeneration"] == 2, "the limits are applied")
    engine = testbed.engine()
    assert engine.wait("usable", WAIT_SECONDS)
    stored = 0
    for number in range(20):
        assert engine.wait("can_store", WAIT_SECONDS)
        stored += engine.store(number)
    assert engine.wait_for(
        lambda: all(engine.holds(number) for number in range(stored)), WAIT_SECONDS
    )
    testbed.kill_tierd(signal.SIGTERM)
    assert len(list(testbed.files.rglob("*.kv"))) == stored
    assert list(testbed.files.glob("*/identity.json"))


def test_objects_in_the_file_tier_are_served_by_the_next_tierd(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(file_bytes=64 << 20)
    testbed.start_tierd()
    engine = testbed.engine()
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.store(7)
    wait_for(lambda: len(list(testbed.files.rglob("*.kv"))) == 1, "the object is written")
    testbed.kill_tierd()
    testbed.start_tierd()
    assert engine.wait_for(lambda: engine.seen.attached == 2, WAIT_SECONDS)
    # Credits come after the fence has opened, hence after the worker has drained.
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait("usable", WAIT_SECONDS)
    assert engine.wait_for(lambda: engine.holds(7), WAIT_SECONDS)
    assert engine.load([7]) == 1
    assert engine.seen.promoted == 1


def test_live_values_reach_tierd_and_engines_while_they_run(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(file_bytes=64 << 20)
    testbed.start_tierd()
    tiers = {
        **testbed.live.tiers,
        "disk": testbed.live.tiers["disk"].model_copy(update={"capacity_bytes": 32 << 20}),
    }
    testbed.retune(testbed.live.model_copy(update={"generation": 7, "tiers": tiers}))
    wait_for(lambda: testbed.status()["appliedGeneration"] == 7, "the generation is applied")
    wait_for(
        lambda: testbed.status()["tiers"][1]["capacityBytes"] == 32 << 20, "the capacity is applied"
    )
    text = b'{"generation": 8, "minLoadTokens": "many"}'
    # In one step: half a document would be refused and counted as well.
    replace_file(testbed.topology_directory / "live.json", text, 0o644)
    wait_for(lambda: testbed.status()["appliedGeneration"] == 8, "the good value is taken")
    status = testbed.status()
    assert status["liveRefusedTotal"] == 1
    assert [condition["type"] for condition in status["conditions"]] == ["LiveValuesRefused"]
