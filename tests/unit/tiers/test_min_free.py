"""``minFree``: room that stays free on the file system of a file tier, whatever uses it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.simulated_disk import SimulatedDisk

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierMinFreeError, TierNoSpaceError
from kvtier.testing.objects import make_object
from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.free_space import MAX_AGE_SECONDS

MIB = 1 << 20
GIB = 1 << 30
SHARDS = (256 * 1024,)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A file tier on a simulated disk of 64 MiB, whose maintenance runs when a test says so."""

    def __init__(self, root: Path, limits: TierLimits, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.disk = SimulatedDisk(root, 64 * MIB, monkeypatch)
        document = FileSystemTierDocument(name="disk", path=str(root), sharing="Pod")
        self.tier = FileSystemTier(document, limits, clock=self.clock)
        monkeypatch.setattr(self.tier.maintenance, "start_loop", lambda: None)
        self.tier.open(lambda *_: None)

    def store(self, number: int) -> bool:
        """Stores an object of 256 KiB; False if there is no room."""
        ref, payload, meta = make_object(number, SHARDS)
        try:
            self.tier.write(ref, payload, meta)
        except TierNoSpaceError:
            return False
        return True

    def maintain(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self.tier.maintain()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    found = World(tmp_path, TierLimits(GIB, min_free_percent=25), monkeypatch)
    yield found
    found.tier.close()


def test_a_capacity_above_the_disk_leaves_min_free(world: World) -> None:
    least = world.disk.free
    for number in range(400):
        world.store(number)
        least = min(least, world.disk.free)
        if number % 16 == 15:
            world.maintain(0.25)
    assert least >= 16 * MIB - 64 * 1024  # records and directories are not objects
    assert world.tier.usage().objects > 100
    assert world.store(1000), "it stores on, in place of older objects"


def test_what_others_write_is_obeyed_within_two_rounds(world: World) -> None:
    for number in range(120):
        assert world.store(number)
    world.disk.others = 30 * MIB
    assert world.disk.free < 16 * MIB
    world.clock.now += MAX_AGE_SECONDS
    assert not world.store(500), "the writer notices without its leader"
    world.maintain()
    world.maintain()
    assert world.disk.free >= 16 * MIB
    assert world.tier.usage().objects > 10
    assert world.store(501)


def test_a_disk_that_others_fill_leaves_nothing(world: World) -> None:
    for number in range(60):
        assert world.store(number)
    world.disk.others = 60 * MIB
    for _ in range(3):
        world.maintain()
    assert world.tier.usage().objects == 0
    ref, payload, meta = make_object(700, SHARDS)
    with pytest.raises(TierMinFreeError, match="minFree keeps"):
        world.tier.write(ref, payload, meta)
    world.disk.others = 0
    world.maintain(2.0)
    assert world.store(700), "stores resume when others leave room"


def test_others_that_fill_a_disk_cause_no_continuous_counting(world: World) -> None:
    world.store(1)
    world.disk.others = 64 * MIB
    world.maintain()
    janitor = world.tier.maintenance.janitor
    assert janitor is not None
    before = janitor.ledger.generation
    for _ in range(30):
        world.maintain()
    assert janitor.ledger.generation - before <= 2 * 4


def test_min_free_is_live(world: World) -> None:
    for number in range(180):
        world.store(number)
    world.tier.configure(TierLimits(GIB, min_free_bytes=40 * MIB))
    world.maintain()
    world.maintain()
    assert world.disk.free >= 40 * MIB
    world.tier.configure(TierLimits(GIB))
    world.maintain()
    for number in range(300, 400):
        assert world.store(number)
    assert world.disk.free < 40 * MIB


def test_the_larger_of_size_and_percentage_counts() -> None:
    assert TierLimits(1, min_free_bytes=30, min_free_percent=10).min_free(200) == 30
    assert TierLimits(1, min_free_bytes=30, min_free_percent=10).min_free(1000) == 100
    assert not TierLimits(1).keeps_free


def test_the_free_space_is_read_once_a_second_not_once_an_object(world: World) -> None:
    assert world.store(0)
    world.clock.now += 0.01
    calls = world.disk.calls
    for number in range(1, 40):
        assert world.store(number)
    assert world.disk.calls == calls


def test_without_min_free_it_is_not_read_for_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, TierLimits(GIB), monkeypatch)
    calls = world.disk.calls
    assert world.store(1)
    assert world.disk.calls == calls
    world.tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSYS, errno.ESTALE])
def test_a_free_space_that_cannot_be_read_ends_stores_not_maintenance(
    world: World, code: int
) -> None:
    assert world.store(1)
    world.disk.error = OSError(code, os.strerror(code))
    world.clock.now += MAX_AGE_SECONDS
    ref, payload, meta = make_object(2, SHARDS)
    with pytest.raises(TierMinFreeError, match="cannot keep minFree"):
        world.tier.write(ref, payload, meta)
    world.tier.maintenance.run_once()
    assert world.tier.usage().objects == 1
    world.disk.error = None
    assert world.store(2)


def test_a_file_system_without_a_size_is_refused(world: World) -> None:
    world.disk.size = 0
    world.clock.now += MAX_AGE_SECONDS
    ref, payload, meta = make_object(2, SHARDS)
    with pytest.raises(TierMinFreeError, match="does not report its size"):
        world.tier.write(ref, payload, meta)


def test_files_that_are_being_written_count(world: World) -> None:
    # 48 MiB may be used: three writers of 20 MiB at a time are one too many.
    space = world.tier._free_space
    with (
        space.admit(20 * MIB),
        space.admit(20 * MIB),
        pytest.raises(TierMinFreeError),
        space.admit(20 * MIB),
    ):
        pass
    world.clock.now += MAX_AGE_SECONDS
    with space.admit(20 * MIB):
        pass
