"""Directories with more objects than the index holds: what is served, and the capacity."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierNoSpaceError
from kvtier.testing.objects import NAMESPACE, buffer, make_object
from kvtier.tiers.base import ALIGNMENT_BYTES, ObjectMeta, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS, Index
from kvtier.tiers.filesystem.quota import limit_bytes
from kvtier.tiers.filesystem.walker import object_path

DAY = 86_400.0
ROOMY = TierLimits(1 << 30)


class Daemon:
    """A tier whose clock the test controls, and the changes it announced."""

    def __init__(
        self,
        root: Path,
        max_objects: int = MAX_INDEXED_OBJECTS,
        limits: TierLimits = ROOMY,
        sharing: str = "Pod",
    ) -> None:
        self.now = 1_000.0
        self.present: set[tuple[str, bytes]] = set()
        self.root = root
        document = FileSystemTierDocument(
            name="disk", path=str(root), sharing=sharing, direct_io="Never"
        )
        self.tier = FileSystemTier(
            document, limits, clock=lambda: self.now, max_objects=max_objects
        )
        self.tier.maintenance.start_loop = lambda: None  # type: ignore[method-assign]
        self.tier.announcement_log.start = lambda: None  # type: ignore[method-assign]
        self.tier.open(self._changed)

    def _changed(self, namespace: str, key: bytes, present: bool) -> None:
        (self.present.add if present else self.present.discard)((namespace, key))

    def write(self, *seeds: int) -> None:
        for seed in seeds:
            self.tier.write(*make_object(seed))

    def holds(self, *seeds: int) -> list[bool]:
        found = [self.tier.contains(make_object(seed)[0]) for seed in seeds]
        assert found == [(NAMESPACE, make_object(seed)[0].key) in self.present for seed in seeds]
        return found

    def a_pass(self) -> None:
        """Time for one that is due, and its pace."""
        for _ in range(4):
            self.now += 3_601.0
            self.tier.maintenance.run_once()

    def leave(self) -> None:
        self.tier.maintenance.release()


def files(root: Path) -> int:
    return sum(1 for _ in root.rglob("*.kv"))


def size_of(root: Path) -> int:
    """Everything below the root: files in whole blocks, and directories."""
    size = 0
    for directory, names, plain in os.walk(root):
        size += ALIGNMENT_BYTES * len(names)
        size += sum(-(-os.lstat(f"{directory}/{name}").st_size // 4096) * 4096 for name in plain)
    return size


def fill(root: Path, count: int) -> None:
    daemon = Daemon(root)
    daemon.write(*range(count))
    daemon.leave()


def path_of(root: Path, seed: int) -> Path:
    ref = make_object(seed)[0]
    return Path(object_path(str(root), ref.namespace, ref.key))


# What is served.


def test_a_directory_with_too_many_objects_serves_as_many_as_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, 12)
    with caplog.at_level(logging.WARNING, "kvtier.tiers.filesystem"):
        daemon = Daemon(tmp_path, 5)
        daemon.a_pass()
        daemon.tier.maintain()
    served = [seed for seed in range(12) if daemon.holds(seed) == [True]]
    assert len(served) == len(daemon.present) == daemon.tier.usage().objects == 5
    for seed in served:
        ref, payload, meta = make_object(seed)
        assert daemon.tier.read(ref, buffer(payload.nbytes)) == meta
    assert files(tmp_path) == 12
    assert daemon.tier.usage().unindexed_total == 7
    assert (
        sum("more objects than the index holds (5)" in message for message in caplog.messages) == 1
    )


def test_as_many_objects_as_the_bound_are_all_indexed_and_nothing_is_counted(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 5)
    daemon = Daemon(tmp_path, 5)
    assert daemon.holds(*range(5)) == [True] * 5
    daemon.write(*range(5))
    daemon.a_pass()
    assert daemon.tier.usage().unindexed_total == 0


def test_a_stored_object_displaces_the_least_recently_used_whose_file_stays(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path, 3)
    daemon.write(0, 1, 2)
    daemon.tier.touch(make_object(0)[0])
    daemon.write(3)
    assert daemon.holds(0, 1, 2, 3) == [True, False, True, True]
    assert files(tmp_path) == 4
    assert daemon.tier.usage().unindexed_total == 1


def test_an_existing_object_is_indexed_instead_of_written_again(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, 3)
    daemon.write(0, 1, 2, 3)
    before = path_of(tmp_path, 0).stat().st_ino
    daemon.write(0)
    assert daemon.holds(0, 1, 2, 3) == [True, False, True, True]
    assert path_of(tmp_path, 0).stat().st_ino == before


def test_scans_do_not_displace_indexed_objects(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path, 3)
    daemon.write(*range(9))
    daemon.a_pass()
    assert daemon.holds(6, 7, 8) == [True] * 3
    assert daemon.tier.usage().unindexed_total == 6


def test_new_objects_of_another_process_are_found_with_a_full_index(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 6)
    old = time.time() - DAY
    for seed in range(6):
        os.utime(path_of(tmp_path, seed), (old, old))
    daemon = Daemon(tmp_path, 3, sharing="Node")
    assert daemon.tier.usage().objects == 3
    fresh = time.time() + 5
    other = path_of(tmp_path, 7)
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(path_of(tmp_path, 0).read_bytes())
    os.utime(other, (fresh, fresh))
    daemon.now += 60.0
    for _ in range(3):
        daemon.now += 1.0
        daemon.tier.maintenance.run_once()
    assert daemon.holds(7) == [True]
    assert daemon.tier.usage().objects == 3


# What is left out comes back.


def test_removed_objects_are_replaced_in_the_index_by_an_early_scan(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 9)
    daemon = Daemon(tmp_path, 4)
    for seed in range(9):
        if daemon.holds(seed) == [True]:
            daemon.tier.delete(make_object(seed)[0])
    assert daemon.tier.usage().objects == 0
    # An hour would be the time between two passes of a directory of one's own.
    for _ in range(4):
        daemon.now += 15.0
        daemon.tier.maintenance.run_once()
    assert daemon.tier.usage().objects == 4
    assert len(daemon.present) == 4
    assert daemon.tier.usage().unindexed_total == 5


def test_objects_indexed_again_are_evicted_first_until_they_are_used() -> None:
    index = Index(1 << 30, 2)
    keys = [bytes([number]) for number in range(4)]
    for key in keys:
        index.begin_scan()
        index.add(NAMESPACE, key, 4096)
    assert index.unindexed == 2
    index.remove(NAMESPACE, keys[2])
    index.begin_scan()
    assert index.mark_seen(NAMESPACE, keys[3])
    assert index.add_discovered(NAMESPACE, keys[0], 4096)
    assert not index.add_discovered(NAMESPACE, keys[1], 4096)
    index.end_scan()
    assert index.unindexed == 1
    assert index.oldest() == (NAMESPACE, keys[0])
    index.touch(NAMESPACE, keys[0])
    assert index.oldest() == (NAMESPACE, keys[3])


def evict_all(index: Index) -> list[bytes]:
    keys = []
    while (oldest := index.oldest()) is not None:
        index.remove(*oldest)
        keys.append(oldest[1])
    return keys


def test_objects_used_again_are_evicted_later() -> None:
    index = Index(1 << 30)
    keys = [bytes([number]) for number in range(6)]
    for key in keys:
        index.add(NAMESPACE, key, 4096)
    index.touch(NAMESPACE, keys[0])
    assert evict_all(index) == [*keys[1:], keys[0]]


def test_prompts_are_evicted_from_their_ends_in_whatever_order_they_were_written() -> None:
    index = Index(1 << 30)
    for prompt, order in ((b"a", (3, 1, 0, 2)), (b"b", (0, 1, 2, 3))):
        for number in order:
            index.reserve(4096)
            before = prompt + bytes([number - 1]) if number else b""
            index.publish(NAMESPACE, prompt + bytes([number]), 4096, before)
    assert evict_all(index) == [b"%c%c" % (prompt, n) for prompt in b"ab" for n in (3, 2, 1, 0)]
    assert index.usage().used_bytes == 0
    assert len(index._table) == 0
    assert index._namespaces == {}


def test_what_precedes_a_discovered_object_becomes_known_when_it_is_used() -> None:
    index = Index(1 << 30)
    keys = [bytes([number]) for number in range(4)]
    for key in keys:
        index.add_discovered(NAMESPACE, key, 4096)
    assert index.previous(NAMESPACE, keys[2]) == b""
    for previous, key in zip((b"", *keys), keys, strict=False):
        index.touch(NAMESPACE, key, previous)
    assert index.previous(NAMESPACE, keys[2]) == keys[1]
    assert evict_all(index) == keys[::-1]


def test_predecessors_that_are_not_indexed_are_bounded() -> None:
    index = Index(1 << 30, 40)
    for number in range(400):
        index.reserve(4096)
        index.publish(NAMESPACE, b"k%d" % number, 4096, b"p%d" % number)
    assert index.usage().objects == 40
    assert len(index._table) <= 40 + 40 // 4 + 1


def test_the_end_of_a_prompt_is_displaced_before_its_beginning() -> None:
    gone: list[bytes] = []
    index = Index(1 << 30, 8, lambda _, key: gone.append(key))
    for number in range(8):
        index.reserve(4096)
        index.publish(NAMESPACE, b"a%d" % number, 4096, b"a%d" % (number - 1) if number else b"")
    for number in range(3):
        index.add(NAMESPACE, b"b%d" % number, 4096)
    assert gone == [b"a7", b"a6", b"a5"]


# The budget.


def test_the_capacity_holds_regardless_of_what_is_indexed(tmp_path: Path) -> None:
    _, payload, _ = make_object(0)
    capacity = 40 * (payload.nbytes + 4096 + 2 * ALIGNMENT_BYTES)
    limits = TierLimits(capacity)
    daemon = Daemon(tmp_path, 4, limits)
    for seed in range(150):
        try:
            daemon.write(seed)
        except TierNoSpaceError:
            pytest.fail(f"object {seed} found no room, though {files(tmp_path)} files could go")
        assert size_of(tmp_path) <= capacity
        daemon.now += 0.1
        assert daemon.tier.usage().objects <= 4
    assert daemon.holds(149) == [True]


def test_eviction_finds_room_with_few_indexed_objects(tmp_path: Path) -> None:
    _, payload, _ = make_object(0)
    size = payload.nbytes + 4096
    daemon = Daemon(tmp_path, 1, TierLimits(60 * size))
    daemon.write(*range(100))
    large = buffer(20 * payload.nbytes)
    ref, _, meta = make_object(200)
    meta = ObjectMeta((large.nbytes,), meta.checksum_kind, meta.checksums[:1])
    daemon.tier.write(ref, large, meta)
    assert daemon.tier.contains(ref)
    assert size_of(tmp_path) <= 60 * size


def test_a_lowered_capacity_is_reached_with_few_indexed_objects(tmp_path: Path) -> None:
    fill(tmp_path, 60)
    before = size_of(tmp_path)
    daemon = Daemon(tmp_path, 4)
    lowered = before // 3
    daemon.tier.configure(TierLimits(lowered))
    daemon.tier.maintain()
    assert size_of(tmp_path) <= lowered
    janitor = daemon.tier.maintenance.janitor
    assert janitor is not None
    assert (janitor.ledger.charge_bytes or 0) <= limit_bytes(lowered, 1)


def test_a_directory_over_its_capacity_is_reduced_when_opened(tmp_path: Path) -> None:
    fill(tmp_path, 60)
    capacity = size_of(tmp_path) // 2
    daemon = Daemon(tmp_path, 4, TierLimits(capacity))
    daemon.tier.maintain()
    assert size_of(tmp_path) <= capacity
    daemon.write(100)
    assert daemon.holds(100) == [True]
    assert size_of(tmp_path) <= capacity


def test_an_expired_namespace_is_removed_even_if_partly_indexed(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 9)
    (tmp_path / NAMESPACE / "identity.json").write_text("{}")
    old = time.time() - 30 * DAY
    for path in (tmp_path / NAMESPACE).rglob("*.*"):
        os.utime(path, (old, old))
    daemon = Daemon(tmp_path, 4)
    for _ in range(4):
        daemon.a_pass()
    assert not (tmp_path / NAMESPACE).exists()
    assert daemon.tier.usage().objects == 0
    assert daemon.present == set()


# Concurrent use.


def test_the_bound_holds_when_several_threads_store() -> None:
    gone: list[bytes] = []
    index = Index(1 << 30, 40, lambda _, key: gone.append(key))

    def store(thread: int) -> None:
        for number in range(200):
            index.reserve(4096)
            assert index.publish(NAMESPACE, bytes([thread, number]), 4096)
            assert index.usage().objects <= 40

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, range(8)))
    usage = index.usage()
    assert usage.objects + len(gone) == 1_600
    assert usage.unindexed_total == len(gone)
    assert usage.used_bytes == usage.objects * 4096
    assert all(not index.contains(NAMESPACE, key) for key in gone)
