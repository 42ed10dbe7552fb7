"""What the hints of a request change on the scheduler side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.scheduler.scheduler_testbed import (
    CHUNK,
    DISK,
    NFS,
    RAM,
    FakeRequest,
    SchedulerTestbed,
    computed,
    hinted,
)

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.queued_prefixes import KEPT_SECONDS, MAX_KEPT
from kvtier.store.types import UNVERIFIED_BIT, Owner
from kvtier.tierd.wire import Cancel, Prefetch, Promote, Reserve, Usable


@pytest.fixture
def testbed() -> SchedulerTestbed:
    """Attached, as an engine that has made a step."""
    testbed = SchedulerTestbed()
    testbed.build()
    return testbed


def test_skip_load_loads_nothing_and_still_stores(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, skip_load=True)
    testbed.client.credit(8)
    testbed.hold(request.keys(0, 2))
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    testbed.build()
    assert testbed.ask(request) == 0
    testbed.run({"r": 300})
    testbed.run({"r": 1})
    (reserve,) = testbed.client.take(Reserve)
    assert [b"\0" + item[2] for item in reserve.items] == request.keys(2, 2)
    assert not testbed.client.take(Promote)
    assert not testbed.client.take(Prefetch)


def test_skip_store_stores_nothing_and_still_loads(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, skip_store=True)
    testbed.client.credit(8)
    testbed.hold(request.keys(0, 2))
    assert testbed.ask(request) == 2 * CHUNK
    testbed.run({"r": 300})
    testbed.run({"r": 1})
    testbed.finish(request)
    assert testbed.build().stores == []
    assert testbed.scheduler.stores.dropped == {"skip_store": 2}
    assert testbed.pool.referenced() == []


@pytest.mark.parametrize(
    ("most", "loaded"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 1), (3 * CHUNK - 1, 2), (1 << 20, 4)]
)
def test_max_load_tokens_limits_what_is_loaded_from_ram(
    testbed: SchedulerTestbed, most: int, loaded: int
) -> None:
    request = hinted(testbed, max_load_tokens=most)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request) == loaded * CHUNK


def test_max_load_tokens_counts_from_the_end_of_the_local_hit(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, max_load_tokens=CHUNK)
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request, CHUNK) == CHUNK
    # From the middle of a chunk, only the rest of it is within the limit.
    assert testbed.ask(request, CHUNK + CHUNK // 2) == 0


def test_max_load_tokens_limits_promotions(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, max_load_tokens=2 * CHUNK)
    testbed.hold(request.keys(0, 4), DISK)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    assert len(promote.keys) == 2
    testbed.client.promoted(promote.promotion, 2)
    assert testbed.ask(request) == 2 * CHUNK


@pytest.mark.parametrize(
    ("bits", "tiers", "found"),
    [
        (RAM, ["ram"], True),
        (RAM, ["disk"], False),
        (DISK, ["ram"], False),
        (DISK, ["disk"], True),
        (NFS, ["ram", "disk"], False),
        (NFS, ["nfs"], True),
        # tierd reads from the first tier, so another one that is named does not count.
        (DISK | NFS, ["nfs"], False),
        (DISK | NFS, ["disk"], True),
        # What is in RAM as well needs no other tier.
        (RAM | NFS, ["nfs"], True),
        (UNVERIFIED_BIT, ["ram"], True),
        (UNVERIFIED_BIT, ["nfs"], False),
    ],
)
def test_only_objects_of_the_named_tiers_are_found(
    testbed: SchedulerTestbed, bits: int, tiers: list[str], found: bool
) -> None:
    request = hinted(testbed, tiers=tiers)
    testbed.hold(request.keys(0, 4), bits)
    answer = testbed.ask(request)
    if not found:
        assert answer == 0
        assert not testbed.client.take(Promote)
    elif bits & RAM:
        assert answer == 4 * CHUNK
    else:
        assert answer is None
        assert len(testbed.client.take(Promote)) == 1


def test_a_prefix_ends_where_another_tier_would_be_needed(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, tiers=["ram", "disk"])
    testbed.hold(request.keys(0, 2), RAM)
    testbed.hold(request.keys(2, 2), NFS)
    assert testbed.ask(request) == 2 * CHUNK
    other = hinted(testbed, "other")
    assert testbed.ask(other) is None


def test_keys_that_no_index_has_are_looked_up_in_named_tiers_only(
    testbed: SchedulerTestbed,
) -> None:
    testbed.client.sink(Usable(bits=7, asked_bits=NFS))
    assert testbed.ask(hinted(testbed, "ram", 1, tiers=["ram", "disk"])) == 0
    assert not testbed.client.take(Promote)
    assert testbed.ask(hinted(testbed, "nfs", 1, tiers=["ram", "nfs"])) is None
    assert testbed.client.take(Promote)[0].look_up


@pytest.mark.parametrize(
    ("tiers", "bits"),
    [
        (["ram"], RAM),
        (["disk"], DISK),
        (["disk", "ram"], RAM | DISK),
        (["nfs", "nfs"], NFS),
        (["nfs", "ram", "disk"], 0),
    ],
)
def test_stores_name_the_tiers_that_the_request_allows(
    testbed: SchedulerTestbed, tiers: list[str], bits: int
) -> None:
    testbed.client.credit(8)
    computed(testbed, "r", 0, tiers=tiers)
    testbed.build()
    (reserve,) = testbed.client.take(Reserve)
    assert len(reserve.items) == 4
    assert reserve.owners == (((4, Owner(tiers=bits)),) if bits else ())
    assert testbed.scheduler.stores.dropped == {}


def test_a_store_that_no_named_tier_takes_is_refused(testbed: SchedulerTestbed) -> None:
    testbed.client.credit(8)
    tiers = {"disk": LiveTier(store_policy=StorePolicy.NONE), "nfs": LiveTier()}
    live = testbed.scheduler.session.live.model_copy(update={"tiers": tiers})
    testbed.scheduler.session.live = live
    computed(testbed, "r", 0, tiers=["disk"])
    assert testbed.build().stores == []
    assert testbed.scheduler.stores.dropped == {"tiers": 4}
    computed(testbed, "second", 1, tiers=["disk", "nfs"])
    testbed.build()
    assert testbed.client.take(Reserve)[0].owners == ((4, Owner(tiers=DISK | NFS)),)
    # An engine without an identity that lasts uses no secondary tier.
    ready = testbed.scheduler.session.ready
    assert ready is not None
    testbed.scheduler.session.ready = msgspec.structs.replace(ready, persistent=False)
    computed(testbed, "third", 2, tiers=["nfs"])
    assert testbed.build().stores == []
    assert testbed.scheduler.stores.dropped == {"tiers": 8}


@pytest.mark.parametrize(
    "hints",
    [
        {"tiers": ["tape"]},
        {"tiers": ["ram", "tape"]},
        {"tiers": "ram"},
        {"tiers": []},
        {"tiers": ["ram"], "retain": -1},
        {"skip_store": "yes"},
        {"skip_store": True, "no_such_hint": 1},
    ],
)
def test_nothing_is_stored_under_a_limit_that_could_not_be_read(
    testbed: SchedulerTestbed, hints: dict[str, Any]
) -> None:
    testbed.client.credit(8)
    request = hinted(testbed, **hints)
    testbed.hold(request.keys(0, 2))
    assert testbed.ask(request) == 2 * CHUNK, "it is served as one without hints"
    testbed.run({"r": 300})
    testbed.run({"r": 1})
    testbed.finish(request)
    assert testbed.build().stores == []
    assert testbed.scheduler.stores.dropped == {"invalid_hints": 2}
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    assert sum(stats.data["rejected_hints"].values()) == 1
    assert stats.data["dropped_stores"] == {"invalid_hints": 2}


def test_the_queue_prefetches_what_the_hints_leave(testbed: SchedulerTestbed) -> None:
    first = hinted(testbed, "limited", 1, max_load_tokens=2 * CHUNK)
    second = hinted(testbed, "tiers", 2, tiers=["ram", "disk"])
    for request in (first, second):
        testbed.hold(request.keys(0, 3), DISK)
        testbed.hold(request.keys(3, 1), NFS)
        testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    testbed.build()
    assert [len(message.keys) for message in testbed.client.take(Prefetch)] == [2, 3]


# Prefetch of a prefix before the request that needs it.


def prefetching(testbed: SchedulerTestbed, name: str = "p", seed: int = 1) -> FakeRequest:
    request = hinted(testbed, name, seed, prefetch=True)
    testbed.hold(request.keys(0, 4), DISK)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    return request


def test_a_prefetch_goes_on_after_its_request_was_aborted(testbed: SchedulerTestbed) -> None:
    request = prefetching(testbed)
    (message,) = testbed.client.take(Prefetch)
    assert [b"\0" + key for _, key in message.keys] == request.keys(0, 4)
    testbed.finish(request, "FINISHED_ABORTED")
    testbed.build()
    assert not testbed.client.take(Cancel)
    testbed.now += KEPT_SECONDS
    testbed.build()
    assert [each.promotion for each in testbed.client.take(Cancel)] == [message.promotion]
    testbed.build()
    assert not testbed.client.take(Cancel)
    assert testbed.scheduler.queue.outcomes == {"started": 1}


def test_a_prefetch_whose_request_is_served_is_sent_once(testbed: SchedulerTestbed) -> None:
    request = prefetching(testbed)
    testbed.build()
    assert testbed.ask(request) is None
    assert len(testbed.client.take(Prefetch)) == 1
    assert not testbed.client.take(Cancel)


def test_an_engine_without_queue_hook_prefetches_at_the_first_lookup(
    testbed: SchedulerTestbed,
) -> None:
    request = hinted(testbed, "p", 1, prefetch=True)
    testbed.hold(request.keys(0, 4), DISK)
    testbed.ask(request)
    assert len(testbed.client.take(Prefetch)) == 1


def test_the_prefetches_of_hints_are_bounded(testbed: SchedulerTestbed) -> None:
    for number in range(MAX_KEPT + 3):
        prefetching(testbed, f"p{number}", number)
    assert len(testbed.client.take(Prefetch)) == MAX_KEPT
    assert testbed.scheduler.queue.outcomes == {"started": MAX_KEPT, "too_many": 3}
    testbed.now += KEPT_SECONDS
    testbed.build()
    assert len(testbed.client.take(Cancel)) == MAX_KEPT
    prefetching(testbed, "later", 99)
    assert len(testbed.client.take(Prefetch)) == 1


def test_nothing_is_prefetched_that_is_in_ram(testbed: SchedulerTestbed) -> None:
    request = hinted(testbed, "p", 1, prefetch=True)
    testbed.hold(request.keys(0, 4), RAM)
    testbed.scheduler.on_new_request(request)  # type: ignore[arg-type]
    assert not testbed.client.take(Prefetch)
    assert testbed.scheduler.queue.outcomes == {"nothing_missing": 1}


def test_a_prefetch_that_the_client_has_no_room_for_is_sent_in_a_later_step(
    testbed: SchedulerTestbed,
) -> None:
    testbed.client.accepts = False
    prefetching(testbed)
    testbed.build()
    assert testbed.scheduler.queue.outcomes == {}
    testbed.client.accepts = True
    testbed.build()
    testbed.build()
    assert len(testbed.client.take(Prefetch)) == 1
    assert testbed.scheduler.queue.outcomes == {"started": 1}


def test_a_prefetch_that_tierd_does_not_take_in_its_time_is_not_counted_as_needless(
    testbed: SchedulerTestbed,
) -> None:
    testbed.client.accepts = False
    prefetching(testbed)
    testbed.now += KEPT_SECONDS
    testbed.build()
    assert testbed.scheduler.queue.outcomes == {"not_ready": 1}
    testbed.client.accepts = True
    testbed.build()
    assert testbed.client.take(Prefetch) == []


def test_a_prefetch_waits_for_tierd_for_a_bounded_time() -> None:
    testbed = SchedulerTestbed(attach=False)
    early = hinted(testbed, "early", 1, prefetch=True)
    testbed.scheduler.on_new_request(early)  # type: ignore[arg-type]
    testbed.finish(early, "FINISHED_ABORTED")
    testbed.build()
    testbed.now += KEPT_SECONDS - 1
    late = hinted(testbed, "late", 2, prefetch=True)
    testbed.scheduler.on_new_request(late)  # type: ignore[arg-type]
    testbed.now += 1
    testbed.client.welcome()
    testbed.client.ready()
    testbed.hold([*early.keys(0, 4), *late.keys(0, 4)], DISK)
    testbed.build()
    (message,) = testbed.client.take(Prefetch)
    assert b"\0" + message.keys[0][1] == late.key(0)
    assert testbed.scheduler.queue.outcomes == {"not_ready": 1, "started": 1}


def test_a_lost_tierd_ends_the_prefetches_of_hints(testbed: SchedulerTestbed) -> None:
    prefetching(testbed)
    testbed.client.lose()
    testbed.build()
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.now += KEPT_SECONDS
    testbed.build()
    assert not testbed.client.take(Cancel)
