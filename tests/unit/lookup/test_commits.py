"""A chunk can be loaded once every rank has stored it, and only then."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvtier.lookup.index import CommitIndex, IndexLimits

A, B, C, D = (b"\0" + bytes([number]) * 32 for number in range(4))


@dataclass
class Storage:
    """Markers in memory, and shards of the process that answers."""

    markers: dict[bytes, int] = field(default_factory=dict)
    shards: set[bytes] = field(default_factory=lambda: {A, B, C, D})
    full: bool = False
    broken: bool = False
    reads: list[bytes] = field(default_factory=list)

    def write(self, key: bytes, store: int) -> bool:
        self._check()
        if not self.full:
            self.markers[key] = store
        return not self.full

    def read(self, key: bytes) -> int:
        self._check()
        self.reads.append(key)
        return self.markers.get(key, 0)

    def remove(self, key: bytes) -> None:
        self._check()
        self.markers.pop(key, None)

    def holds(self, key: bytes) -> bool:
        self._check()
        return key in self.shards

    def _check(self) -> None:
        if self.broken:
            raise OSError("the storage is gone")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Case:
    storage: Storage
    clock: Clock
    index: CommitIndex

    def find(self, *keys: bytes) -> tuple[int, ...]:
        return self.index.look_up(keys, self.clock.now + 1)


def case(ranks: int = 2, limits: IndexLimits | None = None, storage: Storage | None = None) -> Case:
    storage, clock = storage or Storage(), Clock()
    return Case(storage, clock, CommitIndex(ranks, storage, limits, clock))


def test_the_marker_is_written_after_the_last_rank_and_only_then_the_chunk_exists() -> None:
    this = case(ranks=3)
    for rank in (2, 0):
        assert not this.index.stored(rank, A, 5)
        assert this.storage.markers == {}
        assert this.find(A) == (0,)
    assert this.index.stored(1, A, 5)
    assert this.storage.markers == {A: 5}
    assert this.find(A) == (5,)


def test_the_answer_is_no_minimum_over_the_ranks() -> None:
    # Both ranks say "two chunks". A minimum would answer two; only the second one is whole.
    this = case()
    for rank, key in ((0, A), (0, B), (1, B), (1, C)):
        this.index.stored(rank, key, 9)
    assert this.find(A, B, C) == (0, 9, 0)


def test_a_rank_that_reports_twice_is_not_two_ranks() -> None:
    this = case()
    this.index.stored(0, A, 5)
    this.index.stored(0, A, 5)
    assert this.find(A) == (0,)


def test_shards_of_two_stores_are_not_combined() -> None:
    this = case()
    this.index.stored(0, A, 5)
    this.index.stored(1, A, 6)
    assert this.find(A) == (0,)
    this.index.stored(0, A, 6)
    assert this.find(A) == (6,)


def test_after_a_restart_the_markers_answer_and_what_was_pending_is_gone() -> None:
    before = case()
    for rank, key in ((0, A), (1, A), (0, B)):
        before.index.stored(rank, key, 7)
    after = case(storage=before.storage)
    assert after.find(A, B) == (7, 0)
    after.index.stored(1, B, 7)
    assert after.find(B) == (0,), "the first rank's report was lost with the process"


def test_a_chunk_that_a_rank_has_lost_exists_for_none() -> None:
    this = case()
    for rank in (0, 1):
        this.index.stored(rank, A, 5)
    this.index.lost(A, 5)
    assert this.find(A) == (0,)
    assert this.storage.markers == {}
    assert case(storage=this.storage).find(A) == (0,)


def test_a_late_loss_does_not_remove_what_was_stored_again() -> None:
    this = case()
    for store in (5, 6):
        for rank in (0, 1):
            this.index.stored(rank, A, store)
    this.index.lost(A, 5)
    assert this.find(A) == (6,)
    assert this.storage.markers == {A: 6}


def test_what_the_answering_process_has_evicted_is_not_found() -> None:
    this = case()
    for rank in (0, 1):
        this.index.stored(rank, A, 5)
    this.storage.shards.discard(A)
    assert this.find(A) == (0,)
    assert this.storage.markers == {}


def test_without_room_for_the_marker_the_chunk_does_not_exist() -> None:
    this = case(ranks=1)
    this.storage.full = True
    assert not this.index.stored(0, A, 5)
    assert this.find(A) == (0,)
    assert this.index.counts["markers_failed"] == 1


def test_a_storage_that_fails_costs_misses() -> None:
    this = case(ranks=1)
    this.index.stored(0, A, 5)
    this.storage.broken = True
    assert not this.index.stored(0, B, 5)
    assert this.find(A, B) == (0, 0)
    this.index.lost(A, 5)
    assert this.index.counts["storage_failed"] >= 1


def test_the_storage_is_asked_up_to_the_first_miss() -> None:
    this = case(storage=Storage(markers={A: 1, C: 1}))
    assert this.find(A, B, C, D) == (1, 0, 0, 0)
    assert this.storage.reads == [A, B]


def test_a_lookup_ends_at_its_deadline() -> None:
    this = case(ranks=1)
    this.index.stored(0, A, 5)
    assert this.index.look_up((A, A, A), this.clock.now) == ()
    assert this.index.counts["out_of_time"] == 1


def test_chunks_that_a_rank_never_stores_are_given_up() -> None:
    this = case(limits=IndexLimits(max_pending=2, pending_seconds=10))
    for key in (A, B, C, D):
        this.index.stored(0, key, 5)
    assert this.index.pending <= 3
    this.clock.now += 11
    this.index.stored(0, A, 6)
    assert this.index.pending == 1
    assert this.index.counts["given_up"] == 4


@pytest.mark.parametrize("keys", [1, 2])
def test_no_more_chunks_are_remembered_than_the_limit(keys: int) -> None:
    this = case(ranks=1, limits=IndexLimits(max_keys=keys))
    for key in (A, B, C):
        this.index.stored(0, key, 5)
    assert len(this.index) == keys
    assert this.find(A) == (5,), "its marker is still there"
