"""KV events for routers: what they rebuild from them is what the tiers hold."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import (
    BLOCK,
    CHUNK,
    DISK,
    NFS,
    RAM,
    FakeRequest,
    SchedulerTestbed,
    topology,
)
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.engines.common import tierd_session
from kvtier.engines.vllm import kv_events
from kvtier.engines.vllm.kv_events import (
    MAX_COMPARED_PER_STEP,
    MAX_DESCRIBED_PER_STEP,
    EventGroupSpec,
    KVEvents,
    event_types,
    places_of,
    specs_of,
)
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.store.types import UNVERIFIED_BIT
from kvtier.tierd.wire import Usable

PER_CHUNK = CHUNK // BLOCK
Held = dict[tuple[str, str | None], set[Any]]


class Router:
    """A cache-aware router: which blocks are where, by the events alone."""

    def __init__(self) -> None:
        self.held: Held = {}

    def take(self, events: list[Any]) -> list[Any]:
        for event in events:
            blocks = self.held.setdefault((event.medium, event.ownership), set())
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                assert blocks.issuperset(event.block_hashes)
                blocks.difference_update(event.block_hashes)
        return events

    def blocks(self, medium: str, owner: str | None = None) -> set[Any]:
        return self.held.get((medium, owner), set())


def publishing(testbed: SchedulerTestbed) -> KVEvents:
    scheduler = testbed.scheduler
    scheduler.events = KVEvents(
        scheduler._planner,
        scheduler.session,
        places_of(topology()),
        (EventGroupSpec("full_attention"),),
        event_types(),
    )
    return scheduler.events


@pytest.fixture
def testbed() -> SchedulerTestbed:
    testbed = SchedulerTestbed(attach=False)
    publishing(testbed)
    testbed.client.welcome()
    testbed.client.ready()
    testbed.build()
    return testbed


@pytest.fixture
def router() -> Router:
    return Router()


def run(testbed: SchedulerTestbed, tokens: int = 300, name: str = "r", seed: int = 0) -> Any:
    """A request that is computed, so that its chunks are known."""
    request = testbed.request(tokens, name, seed, cache_salt=None)
    testbed.ask(request)
    testbed.run({name: tokens})
    return request


def take(testbed: SchedulerTestbed, router: Router) -> list[Any]:
    events: list[Any] = []
    while testbed.scheduler.events is not None and testbed.scheduler.events.pending:
        events += router.take(testbed.scheduler.take_events())
    return events


def names(request: FakeRequest, first: int, count: int) -> list[Any]:
    """The blocks of some chunks, as vLLM names them in events."""
    hashes = request.block_hashes[first * PER_CHUNK : (first + count) * PER_CHUNK]
    return [maybe_convert_block_hash(BlockHash(each)) for each in hashes]


def blocks(request: FakeRequest, first: int, count: int) -> set[Any]:
    return set(names(request, first, count))


def test_a_stored_chunk_is_announced_with_all_of_its_blocks(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    assert take(testbed, router) == []
    testbed.hold([request.key(1)])
    (event,) = take(testbed, router)
    assert event.block_hashes == names(request, 1, 1)
    assert event.parent_block_hash == names(request, 0, 1)[-1]
    assert event.token_ids == request.all_tokens[CHUNK : 2 * CHUNK]
    assert event.block_size == BLOCK
    assert (event.medium, event.ownership, event.locality) == ("CPU", None, "LOCAL")
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
    testbed.hold([request.key(0)])
    (first,) = take(testbed, router)
    assert first.parent_block_hash is None


def test_each_tier_is_announced_with_its_medium_and_name(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold([request.key(0)], RAM | DISK | NFS)
    assert [(each.medium, each.ownership, each.locality) for each in take(testbed, router)] == [
        ("CPU", None, "LOCAL"),
        ("STORAGE", "disk", "LOCAL"),
        ("STORAGE", "nfs", "REMOTE"),
    ]
    testbed.client.delta(removed={request.key(0): RAM | NFS})
    removed = take(testbed, router)
    assert [type(each) for each in removed] == [BlockRemoved, BlockRemoved]
    assert router.blocks("STORAGE", "disk") == blocks(request, 0, 1)
    assert not router.blocks("CPU")
    assert not router.blocks("STORAGE", "nfs")


def test_an_eviction_notice_removes_blocks_from_memory(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold(request.keys(0, 4), RAM)
    take(testbed, router)
    testbed.client.leaving(request.keys(2, 2))
    (event,) = take(testbed, router)
    assert set(event.block_hashes) == blocks(request, 2, 2)
    assert router.blocks("CPU") == blocks(request, 0, 2)


def test_a_chunk_that_is_verified_is_not_announced_twice(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold([request.key(0)], UNVERIFIED_BIT)
    assert len(take(testbed, router)) == 1
    testbed.client.delta(added={request.key(0): RAM}, removed={request.key(0): UNVERIFIED_BIT})
    assert take(testbed, router) == []


def test_what_comes_and_goes_between_two_steps_is_not_announced(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold([request.key(0)])
    testbed.client.leaving([request.key(0)])
    assert take(testbed, router) == []


def test_what_tiers_held_before_is_announced_once_a_request_knows_it(
    testbed: SchedulerTestbed, router: Router
) -> None:
    later = testbed.request(300, "later", 5)
    testbed.hold(later.keys(0, 4), DISK)
    assert take(testbed, router) == []
    run(testbed, 300, "r", 5)
    assert len(take(testbed, router)) == 4
    assert router.blocks("STORAGE", "disk") == blocks(later, 0, 4)


def test_a_lost_tierd_holds_nothing_and_announces_again_when_it_is_back(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold(request.keys(0, 4), RAM | DISK)
    take(testbed, router)
    testbed.client.lose()
    take(testbed, router)
    assert not router.blocks("CPU")
    assert not router.blocks("STORAGE", "disk")
    testbed.client.welcome(epoch=2)
    testbed.client.ready()
    testbed.hold(request.keys(0, 3), DISK)
    take(testbed, router)
    assert router.blocks("STORAGE", "disk") == blocks(request, 0, 3)


def test_blocks_of_a_tier_that_may_not_be_used_are_removed(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold(request.keys(0, 4), RAM | DISK)
    take(testbed, router)
    testbed.client.sink(Usable(bits=RAM))
    take(testbed, router)
    assert not router.blocks("STORAGE", "disk")
    assert router.blocks("CPU") == blocks(request, 0, 4)
    testbed.client.sink(Usable(bits=RAM | DISK | NFS))
    take(testbed, router)
    assert router.blocks("STORAGE", "disk") == blocks(request, 0, 4)


def test_after_vllm_has_told_that_all_blocks_are_gone_the_tiers_are_announced_again(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = run(testbed)
    testbed.hold(request.keys(0, 4), DISK)
    take(testbed, router)
    testbed.pool.reset_prefix_cache()
    router.held.clear()
    testbed.build()
    take(testbed, router)
    assert router.blocks("STORAGE", "disk") == blocks(request, 0, 4)


def test_a_full_queue_of_changes_loses_nothing(
    testbed: SchedulerTestbed, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = run(testbed)
    take(testbed, router)
    monkeypatch.setattr(tierd_session, "MAX_PRESENCE_CHANGES", 2)
    testbed.hold(request.keys(0, 4), RAM)
    testbed.client.leaving(request.keys(3, 1))
    take(testbed, router)
    assert router.blocks("CPU") == blocks(request, 0, 3)


def test_what_leaves_the_table_is_announced_as_removed_and_counted(
    testbed: SchedulerTestbed, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(testbed)
    testbed.hold(first.keys(0, 4), RAM)
    take(testbed, router)
    events = testbed.scheduler.events
    assert events is not None
    monkeypatch.setattr(kv_events, "MAX_DESCRIPTION_BYTES", events._bytes)
    for number in range(1, 6):
        other = run(testbed, 300, f"r{number}", number)
        testbed.hold(other.keys(0, 4), RAM)
        take(testbed, router)
        assert events._bytes <= kv_events.MAX_DESCRIPTION_BYTES
    known = router.blocks("CPU")
    assert len(known) == 4 * PER_CHUNK
    assert known == blocks(other, 0, 4)
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    assert stats.data["dropped_kv_events"] == {"table_full": 5 * 4}
    assert stats.data["kv_events"] == {"stored": 6 * 4, "removed": 5 * 4}


def test_a_long_prompt_is_described_over_several_steps(
    testbed: SchedulerTestbed, router: Router
) -> None:
    chunks = MAX_DESCRIBED_PER_STEP + 10
    request = run(testbed, chunks * CHUNK)
    testbed.hold(request.keys(0, chunks), RAM)
    assert len(take(testbed, router)) == MAX_DESCRIBED_PER_STEP
    testbed.run({"r": 1})
    assert len(take(testbed, router)) == 10


def test_one_call_compares_a_bounded_number_of_chunks(testbed: SchedulerTestbed) -> None:
    events = testbed.scheduler.events
    assert events is not None
    for number in range(MAX_COMPARED_PER_STEP // 60 + 2):
        request = run(testbed, 60 * CHUNK, f"r{number}", number)
        testbed.hold(request.keys(0, 60), RAM)
    found = [len(events.take())]
    assert events.pending
    while events.pending:
        found.append(len(events.take()))
    assert max(found) <= MAX_COMPARED_PER_STEP
    assert sum(found) == 60 * (MAX_COMPARED_PER_STEP // 60 + 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_events_rebuild_what_the_tiers_hold(
    testbed: SchedulerTestbed, router: Router, seed: int
) -> None:
    chance = random.Random(seed)
    requests = [run(testbed, 300, f"r{number}", number) for number in range(4)]
    keys = [(request, chunk) for request in requests for chunk in range(4)]
    held: dict[bytes, int] = {}
    for _ in range(200):
        request, chunk = chance.choice(keys)
        key, bits = request.key(chunk), chance.choice([RAM, DISK, NFS, RAM | DISK])
        action = chance.random()
        if action < 0.5:
            testbed.client.delta(added={key: bits})
            held[key] = held.get(key, 0) | bits
        elif action < 0.8:
            testbed.client.delta(removed={key: bits})
            held[key] = held.get(key, 0) & ~bits
        elif action < 0.85:
            testbed.client.leaving([key])
            held[key] = held.get(key, 0) & ~RAM
        elif action < 0.87:
            testbed.client.lose()
            testbed.client.welcome()
            testbed.client.ready()
            held.clear()
        else:
            router.take(testbed.scheduler.take_events())
    take(testbed, router)
    for bit, place in (
        (RAM, ("CPU", None)),
        (DISK, ("STORAGE", "disk")),
        (NFS, ("STORAGE", "nfs")),
    ):
        expected: set[Any] = set()
        for request, chunk in keys:
            if held.get(request.key(chunk), 0) & bit:
                expected |= blocks(request, chunk, 1)
        assert router.blocks(*place) == expected


def test_events_of_an_older_vllm_have_the_fields_that_it_knows(
    testbed: SchedulerTestbed,
) -> None:
    events = testbed.scheduler.events
    assert events is not None
    old = event_types()._replace(
        stored=SimpleNamespace,
        removed=SimpleNamespace,
        stored_fields=frozenset({"block_hashes", "medium", "lora_id"}),
        removed_fields=frozenset({"block_hashes", "medium"}),
    )
    events._types, events._named_owners = old, False
    request = run(testbed)
    testbed.hold([request.key(0)], RAM | DISK | NFS)
    found = events.take()
    assert [vars(each) for each in found] == [
        {"block_hashes": names(request, 0, 1), "lora_id": None, "medium": medium}
        for medium in ("CPU", "STORAGE")
    ]
    # As long as one tier has it, it is in storage.
    testbed.client.delta(removed={request.key(0): DISK})
    assert events.take() == []
    testbed.client.delta(removed={request.key(0): NFS})
    assert [each.medium for each in events.take()] == ["STORAGE"]


def test_the_salt_of_a_request_is_part_of_its_first_block(
    testbed: SchedulerTestbed, router: Router
) -> None:
    request = testbed.request(300, cache_salt="tenant", mm_features=[])
    testbed.ask(request)
    testbed.run({"r": 300})
    testbed.hold(request.keys(0, 2))
    first, second = take(testbed, router)
    assert first.extra_keys == [("tenant",), None]
    assert second.extra_keys is None


def test_an_idle_engine_makes_steps_until_its_last_events_are_published(
    testbed: SchedulerTestbed, router: Router
) -> None:
    testbed.client.credit(8)
    request = run(testbed)
    testbed.finish(request)
    stores = testbed.build().stores
    testbed.report(done={job.reservation: 1 for job in stores})
    take(testbed, router)
    assert testbed.scheduler.has_pending_work(), "tierd has not announced the stores"
    testbed.hold(request.keys(0, 4))
    assert testbed.scheduler.has_pending_work()
    take(testbed, router)
    assert not testbed.scheduler.has_pending_work()
    assert router.blocks("CPU") == blocks(request, 0, 4)


def test_the_wait_for_an_announcement_ends() -> None:
    testbed = SchedulerTestbed(attach=False)
    events = publishing(testbed)
    testbed.client.welcome()
    testbed.client.ready()
    testbed.build()
    testbed.client.credit(8)
    testbed.finish(run(testbed))
    stores = testbed.build().stores
    testbed.report(done={job.reservation: 1 for job in stores})
    while events.pending:
        events.take()
    assert testbed.scheduler.has_pending_work()
    testbed.now += 1
    assert not testbed.scheduler.has_pending_work()


def test_without_kv_events_nothing_is_followed() -> None:
    plain = SchedulerTestbed()
    request = plain.request(300)
    plain.ask(request)
    plain.run({"r": 300})
    plain.hold(request.keys(0, 4))
    assert plain.scheduler.take_events() == []
    assert plain.scheduler.session._presence_changes is None


def test_events_name_the_type_of_a_group() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert specs_of(config) == (EventGroupSpec("full_attention", None),)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["describe", "take"])
def test_an_error_ends_the_events_and_nothing_else(
    testbed: SchedulerTestbed, router: Router, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("of another vLLM")

    events = testbed.scheduler.events
    assert events is not None
    types = event_types()
    replaced = types._replace(stored=fail) if where == "take" else types._replace(extra_keys=fail)
    events._types = replaced
    request = testbed.request(300, cache_salt="tenant")
    testbed.ask(request)
    testbed.run({"r": 300})
    testbed.hold(request.keys(0, 4))
    assert testbed.scheduler.take_events() == []
    assert events.unannounced["error"] == 1
    assert testbed.ask(testbed.request(300, "again", cache_salt="tenant")) == 4 * CHUNK
    testbed.run({"r": 1})
    testbed.client.lose()
    testbed.build()
    assert testbed.scheduler.take_events() == []
    assert not events.pending
    assert events.unannounced["error"] == 1
    # The I/O thread was about to note a change when the events ended.
    events._changes.keys.append(request.key(0))
    assert not events.pending
    assert not testbed.scheduler.has_pending_work()
