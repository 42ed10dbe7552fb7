"""The host pool is registered while tierd fills it."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.engines.common.early_registration import (
    Device,
    EarlyRegistration,
    Span,
    filled_end,
)
from kvtier.engines.common.worker_pool import HostPoolMapper, PoolReady
from kvtier.errors import KVTierError
from kvtier.store.generations import generation_bytes
from kvtier.tierd.host_pool import _populate
from kvtier.tierd.wire import GENERATIONS_NAME
from kvtier.transfer import driver_calls
from kvtier.transfer.driver_calls import DriverHangsError
from kvtier.transfer.host_pool import HostPool

WAIT_SECONDS = 60.0
PAGE = 4096
PIECE = 4 * PAGE
SIZE = 3 * PIECE


class FakeDevice:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.registered: set[tuple[int, Span]] = set()
        self.calls: list[Span] = []
        self.fail_at = -1
        self.hang_at = -1
        self.hangs_undoing = False
        self.release = threading.Event()
        """Until then the calls that hang do so."""
        self.called = threading.Condition()

    def ranges(self, nbytes: int) -> tuple[Span, ...]:
        return tuple((at, min(at + PIECE, nbytes)) for at in range(0, nbytes, PIECE))

    def register(self, pool: HostPool, span: Span) -> None:
        with self.called:
            self.calls.append(span)
            if span[0] == self.fail_at:
                raise KVTierError("locked memory is limited")
            self.called.notify_all()
        if span[0] == self.hang_at:
            self.release.wait()
        with self.called:
            self.registered.add((pool.identity[1], span))
            self.called.notify_all()

    def unregister(self, pool: HostPool, begins: tuple[int, ...]) -> None:
        if self.hangs_undoing:
            self.release.wait()
        for begin in begins:
            span = next(each for each in self.ranges(pool.nbytes) if each[0] == begin)
            self.registered.remove((pool.identity[1], span))

    @property
    def device(self) -> Device:
        return Device(self.ranges, self.register, self.unregister)


class Filled:
    """How far the file is filled."""

    def __init__(self) -> None:
        self.end = 0

    def __call__(self, _path: Path, _begin: int) -> int:
        return self.end


def make_file(path: Path, size: int = SIZE) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


Made = tuple[EarlyRegistration, FakeDevice, Filled, Path]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    device, filled = FakeDevice(), Filled()
    path = tmp_path / "pool"
    early = EarlyRegistration(path, device.device, filled)
    yield early, device, filled, path
    device.release.set()
    early.abandon()


def settle(early: EarlyRegistration, device: FakeDevice, calls: int) -> None:
    early.look()
    with device.called:
        assert device.called.wait_for(lambda: len(device.calls) >= calls, WAIT_SECONDS)
    early.look()


def test_only_what_is_filled_is_registered_and_the_rest_when_the_pool_is_published(
    made: Made,
) -> None:
    early, device, filled, path = made
    early.look()
    assert not device.calls  # there is no file yet
    make_file(path)
    filled.end = PIECE + PAGE
    settle(early, device, 1)
    assert device.calls == [(0, PIECE)]
    filled.end = 2 * PIECE
    settle(early, device, 2)
    assert device.calls == [(0, PIECE), (PIECE, 2 * PIECE)]
    taken = early.take(path, SIZE)
    assert taken is not None
    pool, begins = taken
    assert sorted(device.calls) == list(device.ranges(SIZE))
    assert begins == (0, PIECE, 2 * PIECE)
    assert pool.boundaries == (PIECE, 2 * PIECE)
    assert pool.nbytes == SIZE
    early.abandon()
    assert len(device.registered) == 3  # they belong to the caller now


HALF = SIZE // 2 // PAGE * PAGE


@pytest.mark.parametrize("named", ["expected", "other", "whole"])
def test_only_the_expected_part_is_registered_and_undone_if_tierd_names_another(
    tmp_path: Path, named: str
) -> None:
    device, filled, path = FakeDevice(), Filled(), tmp_path / "pool"
    part = (HALF, 2 * HALF)
    early = EarlyRegistration(path, device.device, filled, lambda _: part)
    make_file(path)
    filled.end = HALF + PAGE
    early.look()
    assert not device.calls, "its part is not filled yet"
    filled.end = SIZE
    count = len(device.ranges(HALF))
    settle(early, device, count)
    assert sorted(device.calls) == list(device.ranges(HALF)), "relative to its begin"
    span = {"expected": part, "other": (0, HALF), "whole": (0, SIZE)}[named]
    taken = early.take(path, SIZE, span)
    if named == "expected":
        assert taken is not None
        assert taken[0].span == part
        assert len(device.registered) == count
    else:
        assert taken is None
        assert not device.registered
    early.abandon()


@pytest.mark.parametrize("change", ["replaced", "larger", "removed"])
def test_another_file_is_not_taken_for_the_registered_one(made: Made, change: str) -> None:
    early, device, filled, path = made
    make_file(path)
    filled.end = SIZE
    settle(early, device, 3)
    if change == "replaced":
        other = path.with_name("other")
        make_file(other)
        os.replace(other, path)
    elif change == "larger":
        make_file(path, SIZE + PIECE)
    else:
        path.unlink()
    assert early.take(path, SIZE) is None
    assert not device.registered


def test_a_file_that_grows_while_it_is_filled_is_registered_anew(made: Made) -> None:
    early, device, filled, path = made
    make_file(path)
    filled.end = PIECE
    settle(early, device, 1)
    with open(path, "r+b") as file:
        file.truncate(SIZE + PIECE)
    filled.end = SIZE + PIECE
    settle(early, device, 5)
    with device.called:
        # A range is registered when its call returns.
        assert device.called.wait_for(lambda: len(device.registered) == 4, WAIT_SECONDS)
    assert {span for _, span in device.registered} == set(device.ranges(SIZE + PIECE))


def test_a_failure_is_left_to_the_connector(made: Made) -> None:
    early, device, filled, path = made
    make_file(path)
    device.fail_at, filled.end = PIECE, SIZE
    settle(early, device, 3)
    early.look()
    assert early.take(path, SIZE) is None
    assert not device.registered


def test_a_failure_that_is_found_when_it_is_taken_undoes_the_rest(made: Made) -> None:
    early, device, filled, path = made
    make_file(path)
    device.fail_at, filled.end = 2 * PIECE, 2 * PIECE
    settle(early, device, 2)
    assert early.take(path, SIZE) is None
    assert not device.registered


def test_the_thread_registers_and_ends(made: Made) -> None:
    early, device, filled, path = made
    early.start()
    make_file(path)
    filled.end = SIZE
    with device.called:
        assert device.called.wait_for(lambda: len(device.calls) == 3, WAIT_SECONDS)
    early.abandon()
    assert not device.registered


def test_holes_of_a_file_in_memory_are_found() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    directory = Path(f"/dev/shm/kvtier-test-{uuid.uuid4().hex}")
    directory.mkdir(mode=0o700)
    try:
        path = directory / "pool"
        make_file(path)
        assert filled_end(path, 0) == 0
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), SIZE)
        populate = _populate(mapping, SIZE)
        if populate is None or not populate(0, PIECE):
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert filled_end(path, 0) == PIECE
        assert populate(PIECE + PAGE, PAGE)
        assert filled_end(path, 0) == PIECE
        assert populate(0, SIZE)
        assert filled_end(path, PIECE) == SIZE
    finally:
        shutil.rmtree(directory)


def map_pool(mapper: HostPoolMapper, path: Path) -> PoolReady:
    found: list[PoolReady] = []
    ready = threading.Event()

    def on_ready(result: PoolReady) -> None:
        found.append(result)
        ready.set()

    mapper.map(path, SIZE, (0, SIZE), on_ready)
    assert ready.wait(WAIT_SECONDS)
    return found[0]


@pytest.mark.parametrize("replaced", [False, True])
def test_the_mapper_registers_only_what_was_not_registered_early(
    made: Made, replaced: bool
) -> None:
    early, device, filled, path = made
    make_file(path)
    words = path.with_name(GENERATIONS_NAME)
    make_file(words, generation_bytes(SIZE))
    filled.end = SIZE
    settle(early, device, 3)
    if replaced:
        other = path.with_name("other")
        make_file(other)
        os.replace(other, path)
    late: list[Path] = []

    def register(pool: HostPool, cancelled: Callable[[], bool]) -> tuple[HostPool, tuple[int, ...]]:
        late.append(path)
        return pool, (0,)

    unregistered: list[tuple[int, ...]] = []
    mapper = HostPoolMapper(register, lambda pool, begins: unregistered.append(begins), early)
    assert map_pool(mapper, path).problem == ""
    assert len(late) == int(replaced)
    mapped = mapper.get(path, SIZE, (0, SIZE))
    assert mapped is not None
    assert mapped.pool.boundaries == (() if replaced else (PIECE, 2 * PIECE))
    mapper.close()
    assert unregistered == [(0,) if replaced else (0, PIECE, 2 * PIECE)]


def test_a_mapper_that_closes_before_its_first_mapping_undoes_the_registration(
    made: Made,
) -> None:
    early, device, filled, path = made
    make_file(path)
    filled.end = SIZE
    settle(early, device, 3)
    mapper = HostPoolMapper(lambda pool, cancelled: (pool, ()), lambda pool, begins: None, early)
    mapper.close()
    assert not device.registered


# A driver that hangs.


@pytest.fixture
def hanging(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The second of three ranges is never registered."""
    early, device, filled, path = made
    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    make_file(path)
    make_file(path.with_name(GENERATIONS_NAME), generation_bytes(SIZE))
    device.hang_at, filled.end = PIECE, SIZE
    settle(early, device, 3)
    with device.called:
        assert device.called.wait_for(lambda: len(device.registered) == 2, WAIT_SECONDS)
    return made


def test_a_hanging_call_is_not_waited_for_and_nothing_else_is_done(hanging: Made) -> None:
    early, device, _, path = hanging
    with pytest.raises(DriverHangsError, match="of 3 calls have not ended"):
        early.take(path, SIZE)
    assert len(device.registered) == 2, "nothing is undone beside a call that may still succeed"
    early.look()
    early.abandon()
    assert len(device.calls) == 3
    with pytest.raises(DriverHangsError):
        early.take(path, SIZE)


def test_an_engine_that_stays_off_does_not_wait_for_a_hanging_call(hanging: Made) -> None:
    early, device, _, _ = hanging
    early.abandon()
    early.abandon()
    assert len(device.registered) == 2


def test_a_call_that_hangs_when_it_is_undone_is_not_waited_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, device, filled, path = made
    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    make_file(path)
    filled.end = SIZE
    settle(early, device, 3)
    make_file(path, SIZE + PIECE)
    device.hangs_undoing = True
    with pytest.raises(DriverHangsError):
        early.take(path, SIZE + PIECE)


def test_the_mapper_says_once_that_the_driver_hangs_and_maps_nothing_again(hanging: Made) -> None:
    early, _, _, path = hanging
    registered: list[Path] = []

    def register(pool: HostPool, cancelled: Callable[[], bool]) -> tuple[HostPool, tuple[int, ...]]:
        registered.append(path)
        return pool, (0,)

    mapper = HostPoolMapper(register, lambda pool, begins: None, early)
    ready = map_pool(mapper, path)
    assert "the device's driver hangs" in ready.problem
    assert mapper.hangs == ready.problem
    mapper.map(path, SIZE, (0, SIZE), lambda result: pytest.fail("it answers once"))
    assert mapper.get(path, SIZE, (0, SIZE)) is None
    mapper.close()
    assert registered == []


def test_the_mapper_does_not_wait_for_a_pool_that_cannot_be_unregistered(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device, _, path = made
    monkeypatch.setattr(driver_calls, "STALL_SECONDS", 0.2)
    make_file(path)
    make_file(path.with_name(GENERATIONS_NAME), generation_bytes(SIZE))
    registered: list[Path] = []

    def register(pool: HostPool, cancelled: Callable[[], bool]) -> tuple[HostPool, tuple[int, ...]]:
        registered.append(path)
        return pool, (0, PIECE)

    def unregister(pool: HostPool, begins: tuple[int, ...]) -> None:
        device.release.wait()

    mapper = HostPoolMapper(register, unregister)
    assert map_pool(mapper, path).problem == ""
    assert "the device's driver hangs: 2 of 2 calls" in map_pool(mapper, path).problem
    assert len(registered) == 1
