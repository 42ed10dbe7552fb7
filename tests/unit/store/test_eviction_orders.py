"""Eviction orders: LRU and ARC, which evict the ends of prefixes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store.store_fixture import NAMESPACE, StoreFixture, block_hash

from kvtier.prefix_order import KEPT_SHARE, KEPT_TURNS
from kvtier.store.arc_policy import ArcPolicy, TriedArcPolicy
from kvtier.store.memory_tier import EvictionOrder, LruPolicy

Previous = Callable[[int], int | None]


def lru(previous: Previous = lambda _: None) -> LruPolicy[int, int]:
    return LruPolicy(lambda item: item, previous)


def arc(previous: Previous = lambda _: None) -> ArcPolicy[int, int]:
    return ArcPolicy(lambda item: item, previous)


def admit(policy: EvictionOrder[int], *items: int) -> None:
    for item in items:
        policy.admit(item)


def admitted(policy: EvictionOrder[int], *items: int) -> tuple[int, ...]:
    admit(policy, *items)
    return items


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


def evict_all(policy: EvictionOrder[int]) -> list[int]:
    victims = []
    while (victim := evict(policy)) is not None:
        victims.append(victim)
    return victims


def before(item: int) -> int | None:
    """Prompts of ten: 0 to 9, 10 to 19, ..."""
    return item - 1 if item % 10 else None


def binary(item: int) -> int | None:
    """A tree in which each chunk is followed by two."""
    return (item - 1) // 2 if item else None


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

    def test_being_offered_again_is_no_use(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        policy.park(1)
        policy.offer(1)
        assert evict_all(policy) == [1, 2, 3]

    def test_prompts_shrink_from_their_ends_the_least_recently_used_first(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 2, 10, 11, 20, 21)
        use(policy, 0, 1, 2)
        assert evict_all(policy) == [11, 10, 21, 20, 2, 1, 0]

    def test_what_two_prompts_share_is_as_recent_as_the_later_one(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make({1: 0, 2: 0, 3: 1}.get)
        admit(policy, 0, 1, 3, 100, 2)
        assert evict_all(policy) == [3, 1, 100, 2, 0]

    def test_chunks_that_arrive_in_reverse_are_evicted_from_the_end(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 3, 2, 1, 0)
        assert evict_all(policy) == [3, 2, 1, 0]

    def test_a_chunk_without_its_predecessor_is_evicted_first(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 20, 0, 1, 2, 5, 6)
        assert evict_all(policy) == [6, 5, 20, 2, 1, 0]

    def test_a_chunk_whose_predecessor_arrives_later_is_as_recent_as_that(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 1, 2, 20, 0, 30)
        assert evict_all(policy) == [20, 2, 1, 0, 30]

    def test_a_chunk_used_without_its_predecessor_is_as_recent_as_that_use(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 5)
        policy.park(1)
        policy.forget(0)
        policy.hit(1)
        policy.offer(1)
        use(policy, 5, 1)
        use(policy, *admitted(policy, 20))
        assert evict_all(policy) == [5, 1, 20]

    def test_a_chunk_whose_predecessor_went_after_its_last_use_is_evicted_first(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        use(policy, *admitted(policy, 20, 0, 1))
        policy.park(1)
        policy.forget(0)
        policy.offer(1)
        assert evict_all(policy) == [1, 20]

    def test_without_a_free_end_the_last_that_only_objects_in_use_follow_goes(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 2, 3)
        policy.park(3)
        policy.park(2)
        assert policy.victim(urgent=False) is None
        assert [evict(policy) for _ in range(3)] == [1, 0, None]
        policy.offer(2)
        policy.offer(3)
        assert evict_all(policy) == [3, 2]

    def test_an_eviction_that_is_cancelled_protects_the_prefix_again(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 2)
        assert policy.victim() == 2
        policy.offer(2)
        assert evict_all(policy) == [2, 1, 0]

    def test_a_predecessor_that_becomes_known_later_counts(self, make) -> None:  # type: ignore[no-untyped-def]
        known: dict[int, int] = {}
        policy = make(known.get)
        admit(policy, 1, 2, 3)
        known[2], known[3] = 1, 2
        policy.follow(2)
        policy.follow(3)
        assert evict_all(policy) == [3, 2, 1]

    def test_chunks_that_claim_to_follow_each_other_are_evicted_all_the_same(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(lambda item: item ^ 1)
        admit(policy, 0, 1, 2, 3)
        assert sorted(evict_all(policy)) == [0, 1, 2, 3]
        assert policy._nodes == {}

    def test_what_queued_requests_use_is_evicted_last_and_the_last_of_the_queue_first(
        self, make
    ) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 2, 10, 11, 20, 21, 30, 31)
        policy.await_item(2, 1)
        policy.await_item(11, 2)
        policy.await_item(21, 3)
        # Of the request that loses its prefix nothing is left before another one loses anything.
        assert evict_all(policy) == [31, 30, 21, 20, 11, 10, 2, 1, 0]

    def test_what_no_queued_request_uses_any_longer_has_its_place_in_the_order_of_use(
        self, make
    ) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, *range(0, 200, 10))
        policy.await_item(50, 1)
        policy.await_item(150, 2)
        assert [evict(policy) for _ in range(10)] == [0, 10, 20, 30, 40, 60, 70, 80, 90, 100]
        policy.await_item(50, 0)
        policy.await_item(150, 0)
        assert evict_all(policy) == [50, *range(110, 200, 10)]

    def test_of_requests_that_use_one_object_the_first_one_counts(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3)
        policy.await_item(1, 7)
        policy.await_item(2, 5)
        policy.await_item(3, 6)
        policy.await_item(1, 4)
        assert evict_all(policy) == [3, 2, 1]

    def test_an_awaited_object_is_not_evicted_while_it_is_parked_or_followed(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make(before)
        admit(policy, 0, 1, 10, 20)
        for rank, item in enumerate((10, 0, 20), start=1):
            policy.await_item(item, rank)
        policy.park(20)
        assert [evict(policy), evict(policy), evict(policy)] == [1, 0, 10]
        assert evict(policy) is None
        policy.offer(20)
        assert evict(policy) == 20
        assert policy._tree._awaited._ranks == {}

    def test_an_awaited_object_that_is_admitted_again_is_as_any_other(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2)
        policy.await_item(1, 1)
        policy.forget(1)
        policy.await_item(1, 1)
        admit(policy, 1)
        use(policy, 2)
        assert evict_all(policy) == [1, 2]

    def test_what_is_retained_is_evicted_before_what_is_awaited(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = make()
        admit(policy, 1, 2, 3, 4)
        policy.await_item(1, 1)
        policy.retain(2, True)
        assert evict_all(policy) == [3, 4, 2, 1]

    def test_a_tenant_above_its_share_loses_what_is_awaited_last(self, make) -> None:  # type: ignore[no-untyped-def]
        policy = type(make())(
            lambda item: item, before, tenant=lambda item: b"ab"[item // 30 :][:1]
        )
        admit(policy, 0, 10, 20, 30, 40, 50)
        policy.await_item(0, 1)
        policy.await_item(10, 2)
        policy.await_item(40, 3)
        victims = []
        while (victim := policy.next_of(b"a")) is not None:
            victims.append(victim)
            policy.forget(victim)
        assert victims == [20, 10, 0]
        assert evict_all(policy) == [30, 50, 40]

    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(
                    ("admit", "park", "offer", "hit", "victim", "stay", "leave", "await", "end")
                ),
                st.integers(0, 11),
            ),
            max_size=80,
        ),
        shape=st.sampled_from((binary, before, lambda _: None)),
    )
    def test_victims_are_ends_that_are_not_parked(
        self, make, steps: list[tuple[str, int]], shape: Previous
    ) -> None:  # type: ignore[no-untyped-def]
        policy = make(shape)
        offered: set[int] = set()
        held: set[int] = set()
        awaited: dict[int, int] = {}
        for rank, (what, item) in enumerate(steps, start=1):
            awaited = {each: awaited[each] for each in awaited if each in offered | held}
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
            elif what == "await" and item in offered | held:
                awaited[item] = min(rank, awaited.get(item, rank))
                policy.await_item(item, awaited[item])
            elif what == "end":
                awaited.pop(item, None)
                policy.await_item(item, 0)
            elif what == "leave" and item in offered:
                policy.leave(item)
                policy.forget(item)
                offered.remove(item)
            elif what in ("victim", "stay"):
                followed = {shape(each) for each in offered | held}
                ends = offered - followed
                assert ends - awaited.keys() or policy.victim(urgent=False) is None
                victim = policy.victim()
                assert (victim in (ends or offered)) if offered else victim is None
                if victim in awaited:
                    assert all(awaited.get(end, 0) >= 1 for end in ends)
                    assert awaited[victim] == max(awaited[end] for end in ends)
                if victim is not None and not ends:
                    assert victim not in {shape(each) for each in offered}
                if victim is not None and what == "victim":
                    policy.forget(victim)
                    offered.remove(victim)
                elif victim is not None:
                    policy.offer(victim)
                    policy.await_item(victim, awaited.get(victim, 0))
            assert len(policy) == len(offered)
        for item in held:
            policy.offer(item)
        assert sorted(evict_all(policy)) == sorted(offered | held)
        assert policy._nodes == {}, "nodes of objects that are gone are left"


@dataclass
class WholeSuffixes:
    """Evicts whole suffixes by LRU, and keeps some that were used again, by reading everything:
    what ``LruPolicy`` should equal."""

    previous: Previous
    used_at: dict[int, int] = field(default_factory=dict)
    often: set[int] = field(default_factory=set)
    awaited: dict[int, int] = field(default_factory=dict)
    now: int = 0

    def use(self, item: int) -> None:
        self.now += 1
        if item in self.used_at:
            self.often.add(item)
        self.used_at[item] = self.now

    def evict(self) -> int:
        ends = set(self.used_at) - {self.previous(item) for item in self.used_at}
        if ends <= self.awaited.keys():
            ends = {max(ends, key=self.awaited.__getitem__)}
        else:
            ends -= self.awaited.keys()
        victim = min(ends, key=self.used_at.__getitem__)
        others = ends - self.often
        if (
            victim in self.often
            and others
            and len(self.often) * KEPT_SHARE <= len(self.used_at)
            and self.now - self.used_at[victim] <= KEPT_TURNS * len(self.used_at)
        ):
            victim = min(others, key=self.used_at.__getitem__)
        self.awaited.pop(victim, None)
        used_at, above = self.used_at.pop(victim), self.previous(victim)
        if above in self.used_at:
            if victim in self.often:
                self.often.add(above)
            self.used_at[above] = max(self.used_at[above], used_at)
        self.often.discard(victim)
        return victim


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(-31, 60)), max_size=60
    ),
    shape=st.sampled_from((binary, before)),
    size=st.sampled_from((10, 20)),
)
def test_the_order_is_exactly_that_of_whole_suffixes(
    prompts: list[tuple[int, int, int]], shape: Previous, size: int
) -> None:
    """The third number of each step: what is awaited from then on, or negative, no longer."""
    policy, model = lru(shape), WholeSuffixes(shape)
    for rank, (end, room, queued) in enumerate(prompts, start=1):
        if queued in model.used_at:
            policy.await_item(queued, rank)
            model.awaited[queued] = rank
        elif -1 - queued in model.awaited:
            policy.await_item(-1 - queued, 0)
            del model.awaited[-1 - queued]
        path = [end]
        while (above := shape(path[0])) is not None:
            path.insert(0, above)
        for item in path:
            if item in model.used_at:
                policy.hit(item)
            else:
                policy.admit(item)
            model.use(item)
        while len(model.used_at) > size + room:
            assert evict(policy) == model.evict()
    while model.used_at:
        assert evict(policy) == model.evict()


class TestArc:
    def test_a_scan_does_not_evict_objects_that_are_used_often(self) -> None:
        policy = arc()
        admit(policy, *range(10))
        use(policy, *range(5))
        for item in range(100, 200):
            evict(policy)
            admit(policy, item)
        assert set(evict_all(policy)) >= set(range(5))

    def test_a_scan_of_prompts_does_not_evict_a_prompt_that_is_used_often(self) -> None:
        policy = arc(before)
        admit(policy, *range(10), *range(20, 30))
        use(policy, *range(10))
        for item in range(100, 200):
            evict(policy)
            admit(policy, item)
        assert set(evict_all(policy)) >= set(range(10))

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


class TestTriedArc:
    """A prompt that comes back after every scan, in a room that a scan fills."""

    @staticmethod
    def replay(policy: LruPolicy[int, int], room: int, scans: int, scan: int) -> int:
        """How many of the prompt's chunks are held each time, in all."""
        held: set[int] = set()
        hits = 0
        fresh = iter(range(1_000, 1_000_000))
        for _ in range(scans):
            prompts = [list(range(5)), list(range(5))]
            prompts += [[next(fresh)] for _ in range(scan)]
            for number, prompt in enumerate(prompts):
                for chunk in prompt:
                    if chunk in held:
                        hits += not number
                        policy.hit(chunk)
                        continue
                    if len(held) >= room and (victim := evict(policy)) is not None:
                        held.discard(victim)
                    held.add(chunk)
                    policy.admit(chunk)
        return hits

    def test_arc_is_used_from_when_it_is_ahead(self) -> None:
        tried = TriedArcPolicy[int, int](lambda item: item, before)
        assert not tried.arc_leads
        hits = [self.replay(policy, 20, 10, 200) for policy in (lru(before), arc(before), tried)]
        assert hits[0] == 0, "the scan is longer than what LRU keeps"
        assert hits[1] == 45
        assert tried.arc_leads
        assert hits[2] >= 40, "one scan decides"

    @pytest.mark.parametrize(("room", "gap"), [(20, 9), (40, 21), (40, 31)])
    def test_lru_is_used_while_it_is_not_behind(self, room: int, gap: int) -> None:
        """What was used often is used no more: later, each chunk comes back once, soon."""

        def back(policy: LruPolicy[int, int]) -> int:
            hot = [chunk for _ in range(20) for chunk in range(room - 4)]
            later = [1_000 + step - gap * (step % 2) for step in range(4_000)]
            held: set[int] = set()
            hits = 0
            for chunk in hot + later:
                if chunk in held:
                    hits += 1
                    policy.hit(chunk)
                    continue
                if len(held) >= room and (victim := evict(policy)) is not None:
                    held.discard(victim)
                held.add(chunk)
                policy.admit(chunk)
            return hits

        tried = TriedArcPolicy[int, int](lambda item: item, lambda _: None)
        assert back(arc()) < back(lru()) <= back(tried)

    def test_what_it_remembers_is_bounded_by_what_is_resident(self) -> None:
        policy = TriedArcPolicy[int, int](lambda item: item, before)
        admit(policy, *range(100))
        for item in range(1_000, 5_000):
            evict(policy)
            admit(policy, item)
        for trial in (policy._lru_trial, policy._arc_trial):
            assert len(trial) <= 100
        while len(policy) > 10:
            evict(policy)
        for item in range(10_000, 10_050):
            evict(policy)
            admit(policy, item)
        for trial in (policy._lru_trial, policy._arc_trial):
            assert len(trial) <= 10

    def test_a_predecessor_that_becomes_known_later_is_followed(self) -> None:
        known: dict[int, int] = {}
        policy = TriedArcPolicy[int, int](lambda item: item, known.get)
        admit(policy, 1, 2)
        known[1] = 2
        policy.follow(1)
        assert evict_all(policy) == [1, 2]
        for trial in (policy._lru_trial, policy._arc_trial):
            assert trial._order._previous(trial._held[1]) == 2


@pytest.mark.parametrize(("name", "survives"), [("LRU", False), ("ARC", True)])
def test_the_policy_of_the_document_is_followed(name, survives: bool) -> None:  # type: ignore[no-untyped-def]
    fixture = StoreFixture(slots=16, eviction_policy=name)
    fixture.engine()
    scanned = iter(range(100, 1_000))
    # ARC is used from the first scan on after which it would have had more hits.
    for _ in range(2):
        fixture.fill(3)
        for _ in range(2):
            ready = fixture.load(0, 1, 2)
            fixture.store.release_load("e", ready.load)
        for _ in range(30):
            fixture.put(next(scanned))
            fixture.settle()
            fixture.advance(0.11)
    assert all(fixture.bits(chunk) & 1 for chunk in range(3)) == survives


@pytest.mark.parametrize("policy", ["LRU", "ARC"])
class TestPromptsInTheStore:
    def test_a_prompt_loses_its_end_and_its_beginning_stays_usable(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=64, tiers=(), eviction_policy=policy)
        fixture.engine()
        prompt, other = range(40), range(100, 112)
        fixture.put_prompt(*prompt)
        fixture.put_prompt(*other)
        held = sum(fixture.bits(chunk) & 1 for chunk in prompt)
        assert 0 < held < 40
        assert fixture.usable(*prompt) == held
        assert fixture.usable(*other) == 12

    def test_of_a_prompt_larger_than_the_pool_the_beginning_stays(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=32, tiers=(), eviction_policy=policy)
        fixture.engine()
        fixture.put_prompt(*range(60))
        held = sum(fixture.bits(chunk) & 1 for chunk in range(60))
        assert fixture.usable(*range(60)) >= held - 2

    def test_the_order_survives_a_restart_of_tierd(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=64, tiers=(), eviction_policy=policy)
        fixture.engine()
        fixture.put_prompt(*range(40))
        fixture.restart()
        fixture.engine()
        fixture.put_prompt(*range(100, 112))
        held = [bool(fixture.bits(chunk)) for chunk in range(40)]
        assert 0 < sum(held) < 40
        assert held == sorted(held, reverse=True)

    def test_writing_an_object_is_no_use_of_it(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=16, eviction_policy=policy)
        fixture.engine()
        fixture.put(0)
        fixture.settle("hash")
        for chunk in range(1, 11):
            fixture.put(chunk)
            fixture.settle("hash")
        fixture.settle()
        fixture.put(100)
        fixture.settle()
        assert [e.keys for e in fixture.eviction_notices()] == [(b"\0" + block_hash(0),)]

    def test_a_predecessor_in_a_secondary_tier_is_as_good_as_one_in_ram(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=16, eviction_policy=policy)
        fixture.engine()
        fixture.put_in_tier(0)
        for chunk in range(20, 30):
            fixture.put(chunk)
        fixture.put(1, previous=0)
        fixture.settle()
        fixture.put(100)
        fixture.settle()
        assert [e.keys for e in fixture.eviction_notices()] == [(b"\0" + block_hash(20),)]

    def test_a_prompt_read_from_a_tier_is_evicted_from_its_end(self, policy) -> None:  # type: ignore[no-untyped-def]
        fixture = StoreFixture(slots=16, eviction_policy=policy)
        fixture.engine()
        fixture.put_in_tier(*range(8))
        promotion = fixture.promote(*range(8))
        # The reads end in the reverse order.
        for call in reversed(fixture.calls("read:")):
            fixture.io.run(call)
            fixture.pump()
        ready = fixture.load(*range(8), promotion=promotion)
        fixture.store.release_load("e", ready.load)
        fixture.tier.objects.clear()
        for chunk in range(8):
            fixture.tier._on_change(NAMESPACE, b"\0" + block_hash(chunk), False)
        fixture.put_prompt(*range(100, 106))
        assert 0 < sum(fixture.bits(chunk) & 1 for chunk in range(8)) == fixture.usable(*range(8))
