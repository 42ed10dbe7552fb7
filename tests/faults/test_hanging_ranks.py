"""A rank hangs or dies in the middle of a load: the load fails in order, what it holds is given
back, and other engines of the same tierd are served meanwhile.

One test after the other on one engine, because each rank is a process that imports vLLM.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.process_world import LIMIT_SECONDS, ProcessWorld
from tests.support.rank_process import CHUNK

from kvtier.harness.stub_engine import StubEngine
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.tierd.wire import SESSION_TIMEOUT_SECONDS

CHUNKS = 4
ENDS = {"limit", "lost"}
"""How the load of a rank ends: at its time limit, or with the session."""


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierdTestbed]:
    found = TierdTestbed(tmp_path_factory.mktemp("tierd"), TierdOptions(memory_bytes=16 << 20))
    try:
        found.start_tierd()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def world(testbed: TierdTestbed) -> Iterator[ProcessWorld]:
    found = ProcessWorld(testbed.directory, testbed.run_directory)
    try:
        yield found
    finally:
        if found.other.process.poll() is None:
            os.kill(found.other.pid, signal.SIGCONT)
        found.close()


@pytest.fixture(scope="module")
def neighbour(testbed: TierdTestbed) -> StubEngine:
    """Another engine of this tierd."""
    found = testbed.engine()
    assert found.wait("can_store", LIMIT_SECONDS)
    return found


def _serves(neighbour: StubEngine, number: int) -> None:
    assert neighbour.wait("can_store", LIMIT_SECONDS)
    assert neighbour.store(number, LIMIT_SECONDS)
    assert neighbour.wait_for(lambda: neighbour.holds(number), LIMIT_SECONDS)
    assert neighbour.load([number], LIMIT_SECONDS) == 1
    assert neighbour.seen.lost == 0


def _begin_load(world: ProcessWorld, name: str, base: int) -> None:
    """Stores a prompt, and begins to load it again: one of its objects waits on each rank."""
    tokens = list(range(base, base + CHUNKS * CHUNK + 9))
    world.until(lambda: world.attached, "attached")
    world.add(f"{name} stores", tokens, 1)
    kvtier = world.kvtier
    before = len(kvtier.session.replica)
    world.until(lambda: len(kvtier.session.replica) == before + CHUNKS, "stored")
    world.until(lambda: world.nothing_held, "given back")
    assert world.scheduler.reset_prefix_cache()
    world.until(lambda: world.attached, "attached after the reset")
    world.first.hold()
    world.other.call("hold")
    world.add(name, tokens, 1)
    world.until(lambda: world.first.held() and world.other.call("held"), "loading")
    assert len(kvtier.loads.in_flight) == 1
    assert not world.nothing_held
    world.reasons.clear()


def _finish(world: ProcessWorld, name: str) -> None:
    """The request ends, computed, and nothing is left of its load."""
    world.until(lambda: name in world.finished, "finished")
    world.until(lambda: world.nothing_held, "given back")


def _reloads(world: ProcessWorld, name: str, base: int) -> None:
    """The engine has attached again, and loads."""
    loads = world.kvtier.loads.in_flight
    _begin_load(world, name, base)
    world.first.move()
    world.other.call("move")
    before = sum(loads.loaded_tokens.values())
    _finish(world, name)
    assert sum(loads.loaded_tokens.values()) == before + CHUNKS * CHUNK


def test_a_load_ends_although_the_session_of_a_rank_stops_answering(
    world: ProcessWorld, testbed: TierdTestbed, neighbour: StubEngine
) -> None:
    """The engine's thread of the rank goes on."""
    _begin_load(world, "stalled", 1_000)
    started = time.monotonic()
    world.other.call("stall")
    wait_for(lambda: not world.kvtier.session.replica_ready, "tierd closes the engine")
    assert time.monotonic() - started > SESSION_TIMEOUT_SECONDS / 2, "it closed for another reason"
    _serves(neighbour, 1)
    world.other.call("move")
    _finish(world, "stalled")
    assert world.reasons
    assert set(world.reasons) <= ENDS
    _serves(neighbour, 2)
    world.other.call("resume")
    world.first.move()
    _reloads(world, "after the stall", 2_000)


def test_a_load_ends_in_order_once_a_rank_that_hung_goes_on(
    world: ProcessWorld, testbed: TierdTestbed, neighbour: StubEngine
) -> None:
    """vLLM waits for all of its ranks; tierd, the other rank and other engines do not."""
    _begin_load(world, "hung", 3_000)
    os.kill(world.other.pid, signal.SIGSTOP)
    world.begin()
    assert not world.other.answers(0.2)
    wait_for(lambda: not world.kvtier.session.replica_ready, "tierd closes the engine")
    wait_for(lambda: not world.first.held(), "the first rank has drained", LIMIT_SECONDS)
    _serves(neighbour, 3)
    assert not world.other.answers(0)
    os.kill(world.other.pid, signal.SIGCONT)
    world.end()
    _finish(world, "hung")
    assert world.reasons
    assert set(world.reasons) <= ENDS
    world.first.move()
    world.other.call("move")
    _serves(neighbour, 4)
    _reloads(world, "after the hang", 4_000)


def test_a_load_ends_when_a_rank_dies_and_its_slots_are_free_at_once(
    world: ProcessWorld, testbed: TierdTestbed, neighbour: StubEngine
) -> None:
    """vLLM ends the engine."""
    _begin_load(world, "dead", 5_000)
    world.other.process.kill()
    world.other.process.wait(LIMIT_SECONDS)
    wait_for(lambda: not world.kvtier.session.replica_ready, "tierd closes the engine")
    thread = world.first.worker._thread
    assert thread is not None
    wait_for(lambda: not len(thread._loads), "the first rank has ended its load", LIMIT_SECONDS)
    _serves(neighbour, 5)
