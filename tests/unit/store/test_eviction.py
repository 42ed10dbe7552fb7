"""Which object goes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store.store_world import World

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
    def test_lets_the_oldest_of_what_was_used_alike_go_first(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        assert [evict(policy) for _ in range(4)] == [1, 2, 3, None]

    def test_lets_what_was_used_again_go_later_held_meanwhile_or_not(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        use(policy, 1)
        policy.hit(2)
        assert [evict(policy) for _ in range(3)] == [3, 1, 2]

    def test_never_lets_go_what_is_held(self, make) -> None:  # type: ignore[no-untyped-def]
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
    def test_knows_at_any_time_exactly_what_is_not_held(
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
    def test_a_scan_does_not_push_out_what_is_used_often(self) -> None:
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

    def test_what_comes_back_soon_after_it_went_counts_as_used_often(self) -> None:
        policy = arc()
        admit(policy, 1, 2, 3)
        assert evict(policy) == 1
        admit(policy, 1)
        assert policy.target_recent >= 1
        assert evict(policy) == 2

    def test_remembers_no_more_of_what_went_than_is_resident(self) -> None:
        policy = arc()
        admit(policy, 1, 2, 3)
        for item in range(10, 1000):
            evict(policy)
            admit(policy, item)
        assert len(policy._recent_ghosts) + len(policy._often_ghosts) <= 3


@pytest.mark.parametrize(("name", "survives"), [("LRU", False), ("ARC", True)])
def test_the_policy_of_the_document_is_followed(name, survives: bool) -> None:  # type: ignore[no-untyped-def]
    world = World(slots=16, eviction_policy=name)
    world.engine()
    for chunk in range(3):
        world.put(chunk)
        world.settle()
    for _ in range(2):
        ready = world.load(0, 1, 2)
        world.store.release_load("e", 0, ready.load)
    for chunk in range(100, 130):
        world.put(chunk)
        world.settle()
        world.advance(0.11)
    assert all(world.bits(chunk) & 1 == survives for chunk in range(3))
