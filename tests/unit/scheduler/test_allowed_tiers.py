"""The tiers that requests let their chunks be stored in, of which tierd is told."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.scheduler_testbed import (
    DISK,
    NFS,
    RAM,
    SchedulerTestbed,
    computed,
    hinted,
)

from kvtier.engines.common.allowed_tiers import AllowedTiers
from kvtier.engines.common.hints import NO_HINTS, RequestHints
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.scheduler_stores import RECENTLY_COMMITTED_SECONDS
from kvtier.store.types import NO_OWNER, Owner
from kvtier.tierd.wire import Keep, Load, Reserve

KEYS = [b"\0" + bytes([number]) * 32 for number in range(8)]
BITS = {"ram": RAM, "disk": DISK, "nfs": NFS}


@pytest.fixture
def testbed() -> SchedulerTestbed:
    """Attached, as an engine that has made a step."""
    testbed = SchedulerTestbed()
    testbed.build()
    return testbed


def state(testbed: SchedulerTestbed, *tiers: str, **hints: Any) -> RequestState:
    """A request with a limit, or with other hints; without both, one without hints."""
    if tiers:
        hints["tiers"] = frozenset(tiers)
    request: Any = testbed.request(100)
    return RequestState(request, RequestHints(**hints) if hints else NO_HINTS)


def sent(testbed: SchedulerTestbed) -> list[tuple[Owner, tuple[tuple[int, bytes], ...]]]:
    return [(each.owner, each.keys) for each in testbed.client.take(Keep)]


class TestLimits:
    """Of chunks that are stored, and of requests that come later."""

    def test_a_request_without_a_limit_leaves_nothing_to_remember(
        self, testbed: SchedulerTestbed
    ) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        allowed.on_store(state(testbed), KEYS[0])
        allowed.on_store(state(testbed, pin=True), KEYS[1])
        allowed.on_store(state(testbed, "ram", "disk", "nfs"), KEYS[2])
        assert len(allowed) == 0
        assert not allowed.widen(Owner(tiers=RAM), 0, KEYS[0])
        allowed.send()
        assert sent(testbed) == []

    def test_a_further_request_adds_its_tiers_once(self, testbed: SchedulerTestbed) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        allowed.on_store(state(testbed, "ram"), KEYS[0])
        assert not allowed.widen(Owner(tiers=RAM), 0, KEYS[0])
        assert allowed.widen(Owner(tiers=DISK), 0, KEYS[0])
        assert not allowed.widen(Owner(tiers=RAM | DISK), 0, KEYS[0])
        allowed.send()
        assert sent(testbed) == [(Owner(tiers=DISK), ((0, KEYS[0][1:]),))]
        allowed.send()
        assert sent(testbed) == [], "sent again"

    def test_after_a_request_without_a_limit_nothing_can_be_added(
        self, testbed: SchedulerTestbed
    ) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        allowed.on_store(state(testbed, "ram"), KEYS[0])
        assert allowed.widen(NO_OWNER, 0, KEYS[0])
        assert not allowed.widen(Owner(tiers=DISK), 0, KEYS[0])
        limited = state(testbed, "disk")
        assert allowed.owners([(limited, KEYS[0])]) == (), "it may be stored in all tiers"

    def test_a_chunk_that_is_stored_anew_has_its_new_limit(self, testbed: SchedulerTestbed) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        allowed.on_store(state(testbed, "ram"), KEYS[0])
        allowed.on_store(state(testbed, "nfs"), KEYS[0])
        assert allowed.owners([(state(testbed, "ram"), KEYS[0])]) == ((1, Owner(tiers=NFS)),)
        # Hints without a limit take it away.
        allowed.on_store(state(testbed, pin=True), KEYS[0])
        assert len(allowed) == 0

    def test_of_too_many_chunks_the_oldest_limit_is_forgotten(
        self, testbed: SchedulerTestbed
    ) -> None:
        allowed = AllowedTiers(testbed.scheduler.session, max_keys=3)
        for key in KEYS[:4]:
            allowed.on_store(state(testbed, "ram"), key)
        # Stored once more, so that the next one to be forgotten is another.
        allowed.on_store(state(testbed, "ram"), KEYS[1])
        allowed.on_store(state(testbed, "ram"), KEYS[4])
        assert len(allowed) == 3
        widened = [key for key in KEYS[:5] if allowed.widen(Owner(tiers=DISK), 0, key)]
        assert widened == [KEYS[1], KEYS[3], KEYS[4]]
        # The limit of one that is forgotten is that of its request.
        owners = allowed.owners([(state(testbed, "ram"), key) for key in (KEYS[0], KEYS[1])])
        assert owners == ((1, Owner(tiers=RAM)), (1, Owner(tiers=RAM | DISK)))


def union(limits: list[int]) -> int:
    """The tiers of all; 0: every tier."""
    return functools.reduce(operator.or_, limits) if all(limits) else 0


@functools.cache
def shared_testbed() -> SchedulerTestbed:
    """For all examples: none changes it."""
    return SchedulerTestbed()


SUBSETS = st.sets(st.sampled_from(sorted(BITS)), min_size=1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), SUBSETS), max_size=30))
def test_a_chunk_may_be_stored_in_the_tiers_of_every_request_since_it_was_stored(
    steps: list[tuple[bool, int, set[str]]],
) -> None:
    testbed = shared_testbed()
    session = testbed.scheduler.session
    allowed = AllowedTiers(session)
    since: dict[bytes, list[int]] = {}
    """By chunk that was stored with a limit: it, and those of the requests that followed."""
    for stores, number, names in steps:
        key, request = KEYS[number], state(testbed, *names)
        bits = sum(BITS[name] for name in names) % sum(BITS.values())
        if stores:
            allowed.on_store(request, key)
            since.pop(key, None)
            if bits:
                since[key] = [bits]
        else:
            before = list(since.get(key, [0]))
            since.get(key, []).append(bits)
            added = union(before) != union([*before, bits])
            assert allowed.widen(session.owner(request), 0, key) == added
    limited = state(testbed, "ram")
    for key in KEYS[:3]:
        tiers = union(since.get(key, [RAM]))
        assert allowed.owners([(limited, key)]) == (((1, Owner(tiers=tiers)),) if tiers else ())


class TestMessages:
    def test_each_owner_has_one_message(self, testbed: SchedulerTestbed) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        pinned, retained = Owner(pin=True), Owner(retain_seconds=60)
        allowed.keep(pinned, 0, KEYS[0])
        allowed.keep(retained, 1, b"\1" + KEYS[1][1:])
        allowed.keep(pinned, 0, KEYS[2])
        allowed.send()
        assert sent(testbed) == [
            (pinned, ((0, KEYS[0][1:]), (0, KEYS[2][1:]))),
            (retained, ((1, KEYS[1][1:]),)),
        ]

    def test_without_a_namespace_nothing_is_sent_then_or_later(
        self, testbed: SchedulerTestbed
    ) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        allowed.keep(Owner(pin=True), 0, KEYS[0])
        testbed.client.lose()
        testbed.build()
        allowed.send()
        testbed.client.welcome(epoch=2)
        testbed.client.ready()
        testbed.build()
        allowed.send()
        assert sent(testbed) == []

    def test_stores_in_a_row_name_their_owner_once(self, testbed: SchedulerTestbed) -> None:
        allowed = AllowedTiers(testbed.scheduler.session)
        plain, pinned, limited = state(testbed), state(testbed, pin=True), state(testbed, "disk")
        stores = [(plain, KEYS[0]), (pinned, KEYS[1]), (pinned, KEYS[2]), (limited, KEYS[3])]
        assert allowed.owners(stores) == (
            (1, NO_OWNER),
            (2, Owner(pin=True)),
            (1, Owner(tiers=DISK)),
        )
        assert allowed.owners([*stores[:3], (plain, KEYS[4])]) == (
            (1, NO_OWNER),
            (2, Owner(pin=True)),
        )
        assert allowed.owners([(plain, KEYS[0])]) == ()


class TestUnionOfLimits:
    """Of two requests with the same chunks, each lets them be stored in its own tiers."""

    def keeps(self, testbed: SchedulerTestbed) -> list[tuple[int, int]]:
        """How many keys were named to tierd, and the tiers, for each message."""
        return [(len(each.keys), each.owner.tiers) for each in testbed.client.take(Keep)]

    def test_tierd_learns_of_a_request_that_finds_its_chunks_stored(
        self, testbed: SchedulerTestbed
    ) -> None:
        testbed.client.credit(16)
        first = computed(testbed, "first", 0, tiers=["ram"])
        testbed.build()
        testbed.hold(first.keys(0, 4), RAM)
        assert self.keeps(testbed) == []
        # In GPU memory, so nothing of it is loaded.
        computed(testbed, "second", 0, tiers=["ram"], skip_load=True)
        testbed.build()
        assert self.keeps(testbed) == []
        computed(testbed, "third", 0, tiers=["nfs"], skip_load=True)
        testbed.build()
        assert self.keeps(testbed) == [(4, NFS)]
        computed(testbed, "fourth", 0, skip_load=True)
        testbed.build()
        assert self.keeps(testbed) == [(4, 0)]
        computed(testbed, "fifth", 0, skip_load=True)
        testbed.build()
        assert self.keeps(testbed) == [], "sent again"
        assert len(testbed.client.take(Reserve)) == 1

    def test_of_chunks_whose_store_has_not_started(self, testbed: SchedulerTestbed) -> None:
        computed(testbed, "first", 0, tiers=["ram"])
        computed(testbed, "second", 0, tiers=["disk"])
        testbed.client.credit(8)
        testbed.build()
        testbed.build()
        (reserve,) = testbed.client.take(Reserve)
        assert len(reserve.items) == 4
        assert reserve.owners == ((4, Owner(tiers=RAM | DISK)),)

    def test_a_chunk_that_is_stored_anew_has_the_limit_of_its_new_request(
        self, testbed: SchedulerTestbed
    ) -> None:
        testbed.client.credit(16)
        first = computed(testbed, "first", 0, tiers=["ram"])
        testbed.build()
        testbed.hold(first.keys(0, 4), RAM)
        computed(testbed, "second", 0, skip_load=True)
        testbed.build()
        assert self.keeps(testbed) == [(4, 0)]
        testbed.client.take(Reserve)
        testbed.client.delta(removed=dict.fromkeys(first.keys(0, 4), RAM))
        testbed.report(done={1: 1, 2: 1, 3: 1, 4: 1})
        testbed.now += RECENTLY_COMMITTED_SECONDS
        computed(testbed, "third", 0, tiers=["ram"])
        testbed.build()
        (reserve,) = testbed.client.take(Reserve)
        assert reserve.owners == ((4, Owner(tiers=RAM)),)

    def test_a_request_that_stores_nothing_adds_no_tier(self, testbed: SchedulerTestbed) -> None:
        testbed.client.credit(16)
        first = computed(testbed, "first", 0, tiers=["ram"])
        testbed.build()
        testbed.hold(first.keys(0, 4), RAM)
        computed(testbed, "second", 0, skip_load=True, skip_store=True)
        testbed.build()
        assert self.keeps(testbed) == []
        third = hinted(testbed, "third", 0, skip_store=True)
        loaded = testbed.ask(third)
        assert loaded
        testbed.admit(third, 0, loaded)
        assert testbed.client.take(Load)[0].owner == Owner(tiers=RAM)
