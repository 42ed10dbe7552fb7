"""Eviction orders: LRU and ARC."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store.store_fixture import StoreFixture

from kvtier.store.memory_tier import ArcPolicy, EvictionOrder, LruPolicy


def lru() -> EvictionOrder[int]:
    return LruPolicy()


def arc() -> ArcPolicy[int]:
    return ArcPolicy(lambda item: item)


def admit(policy: EvictionOrder[int], *items: int) -> None:
    for item in items:
        policy.admit(item)
        policy.offer(item)


def use(policy: EvictionOrder[int], *items: int) -> None:
    for item in items:
        policy.park(item)
        policy.hit(item)
        policy.offer(item)


def evict(policy: EvictionOrder[int]) -> int | None:
    victim = policy.victim()
    if victim is not None:
        policy.forget(victim)
    return victim


@pytest.mark.parametrize("make", [lru, arc])
class TestEveryPolicy:
    def test_of_objects_used_alike_the_oldest_is_evicted_first(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        assert [evict(policy) for _ in range(4)] == [1, 2, 3, None]

    def test_objects_used_again_are_evicted_later_parked_or_not(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        use(policy, 1)
        policy.hit(2)
        assert [evict(policy) for _ in range(3)] == [3, 1, 2]

    def test_a_parked_object_is_never_a_victim(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2)
        policy.park(1)
        assert len(policy) == 1
        assert [evict(policy), evict(policy)] == [2, None]
        policy.offer(1)
        assert evict(policy) == 1

    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(("admit", "park", "offer", "hit", "victim", "stay")),
                st.integers(0, 7),
            ),
            max_size=80,
        )
    )
    def test_the_order_has_exactly_the_objects_that_are_not_parked(
        self, make, steps: list[tuple[str, int]]
    ) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        offered: set[int] = set()
        held: set[int] = set()
        for what, item in steps:
            if what == "admit" and item not in offered | held:
                admit(policy, item)
                offered.add(item)
            elif what == "park" and item in offered:
                policy.park(item)
                offered.remove(item)
                held.add(item)
            elif what == "offer" and item in held:
                policy.offer(item)
                held.remove(item)
                offered.add(item)
            elif what == "hit" and item in offered | held:
                policy.hit(item)
            elif what in ("victim", "stay"):
                victim = policy.victim()
                assert (victim in offered) if offered else victim is None
                if victim is not None and what == "victim":
                    policy.forget(victim)
                    offered.remove(victim)
                elif victim is not None:
                    policy.offer(victim)
            assert len(policy) == len(offered)


class TestArc:
    def test_a_scan_does_not_evict_objects_that_are_used_often(self) -> None:
        policy = arc()
        admit(policy, *range(10))
        use(policy, *range(5))
        for item in range(100, 200):
            evict(policy)
            admit(policy, item)
        left = set()
        while (victim := evict(policy)) is not None:
            left.add(victim)
        assert left >= set(range(5))

    def test_an_object_stored_again_soon_after_its_eviction_counts_as_used_often(self) -> None:
        policy = arc()
        admit(policy, 1, 2, 3)
        assert evict(policy) == 1
        admit(policy, 1)
        assert policy.target_recent >= 1
        assert evict(policy) == 2

    def test_there_are_at_most_as_many_ghosts_as_resident_objects(self) -> None:
        policy = arc()
        admit(policy, 1, 2, 3)
        for item in range(10, 1000):
            evict(policy)
            admit(policy, item)
        assert len(policy._recent_ghosts) + len(policy._often_ghosts) <= 3


@pytest.mark.parametrize(("name", "survives"), [("LRU", False), ("ARC", True)])
def test_the_policy_of_the_document_is_followed(name, survives: bool) -> None:  # type: ignore[no-untyped-def]
    fixture = StoreFixture(slots=16, eviction_policy=name)
    fixture.engine()
    for chunk in range(3):
        fixture.put(chunk)
        fixture.settle()
    for _ in range(2):
        ready = fixture.load(0, 1, 2)
        fixture.store.release_load("e", ready.load)
    for chunk in range(100, 130):
        fixture.put(chunk)
        fixture.settle()
        fixture.advance(0.11)
    assert all(fixture.bits(chunk) & 1 == survives for chunk in range(3))
