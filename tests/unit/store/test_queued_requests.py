"""What requests of a queue are going to use is evicted when nothing else can be."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import NAMESPACE, StoreFixture, block_hash

from kvtier.store import queued_requests
from kvtier.store.allocator import RESERVE_SHARE, URGENT_CREDITS
from kvtier.store.queued_requests import QUEUED_SECONDS
from kvtier.store.types import ChunkId, CreditsGranted, KeysEvicting

RESERVE_OF_64 = 64 // RESERVE_SHARE
"""Slots of 64 that stay free for reads."""
CONVERSATIONS, ROUNDS, TURN = 24, 6, 4
"""Turn: how many chunks a conversation grows by in each round."""
CREDITS, RESERVE = 64, 16
"""Slots that the allocator keeps free."""


class QueueOfConversations:
    """Conversations that come back in rounds, all at once. Each request of a round loads what is in
    RAM of its prefix, and stores the rest and the chunks of its turn."""

    def __init__(self, held_percent: int, policy: str, known: bool) -> None:
        """``held_percent``: the part of all chunks of the last round that RAM holds. ``known``:
        the store is told of the requests that wait."""
        chunks = CONVERSATIONS * ROUNDS * TURN
        slots = chunks * held_percent // 100 + CREDITS + RESERVE
        self.fixture = StoreFixture(slots=slots, tiers=(), eviction_policy=policy)  # type: ignore[arg-type]
        self.known = known
        self.credits: list[int] = []
        self.fixture.engine()
        for event in self.fixture.events:
            self.credits += event.slots if isinstance(event, CreditsGranted) else ()

    def pump(self) -> None:
        """Takes what the store does at once: checksums, evictions, credits."""
        fixture = self.fixture
        events = fixture.pump()
        while events or fixture.io.pending:
            for event in events:
                if isinstance(event, CreditsGranted):
                    self.credits += event.slots
                elif isinstance(event, KeysEvicting):
                    fixture.store.acknowledge_eviction(event.token)
            fixture.io.run_all("")
            events = fixture.pump()

    def prompt(self, conversation: int, number: int) -> range:
        first = conversation * ROUNDS * TURN
        return range(first, first + number * TURN)

    def round(self, number: int) -> float:
        """The part of all chunks that was loaded."""
        store, prompts = self.fixture.store, []
        for conversation in range(CONVERSATIONS):
            prompt, request = self.prompt(conversation, number), self.fixture.number()
            prompts.append((prompt, request))
            usable = self.fixture.usable(*prompt)
            if self.known and usable:
                store.queue("e", request, [(0, block_hash(prompt[usable - 1]))])
        loaded = 0
        for prompt, request in prompts:
            usable = self.fixture.usable(*prompt)
            ready = self.fixture.load(*prompt[:usable])
            if self.known:
                store.cancel("e", request)
            self.pump()
            store.release_load("e", ready.load)
            loaded += usable
            for chunk in prompt[usable:]:
                self.put(chunk, first=chunk == prompt[0])
        return loaded / (CONVERSATIONS * number * TURN)

    def put(self, chunk: int, first: bool) -> None:
        store, number = self.fixture.store, self.fixture.number()
        previous = b"" if first else block_hash(chunk - 1)
        slot = self.credits.pop(0)
        store.reserve("e", number, ChunkId(0, block_hash(chunk), previous), slot)
        store.deliver("e", 0, number)
        self.pump()


def hits(held_percent: int, policy: str, known: bool) -> list[float]:
    queue = QueueOfConversations(held_percent, policy, known)
    # At last they come back as they were.
    shares = [queue.round(number) for number in (*range(1, ROUNDS + 1), ROUNDS, ROUNDS)]
    queue.fixture.check_accounts()
    assert len(queue.fixture.store._queued) == 0
    return shares


@pytest.mark.parametrize("policy", ["LRU", "ARC"])
@pytest.mark.parametrize(("percent", "expected"), [(96, 0.95), (60, 0.59)])
def test_conversations_that_come_back_in_rounds_are_hit_as_far_as_ram_has_room(
    policy: str, percent: int, expected: float
) -> None:
    known, unknown = (hits(percent, policy, known=known)[-1] for known in (True, False))
    assert known >= expected
    assert unknown <= 0.13
    assert expected > 0.98 * percent / 100


def queue(fixture: StoreFixture, *chunks: int, engine: str = "e") -> int:
    number = fixture.number()
    fixture.store.queue(engine, number, [(0, block_hash(chunk)) for chunk in chunks])
    return number


def held(fixture: StoreFixture, *chunks: int) -> list[int]:
    return [chunk for chunk in chunks if fixture.bits(chunk) & 1]


def with_prompts(*, slots: int = 64, tiers: tuple[str, ...] = ()) -> StoreFixture:
    """RAM is full: the prompts 0 to 9, 10 to 19 and 20 to 29, and room for no fourth one."""
    fixture = StoreFixture(slots=slots, tiers=tiers)
    fixture.engine()
    for first in (0, 10, 20):
        fixture.put_prompt(*range(first, first + 10))
    return fixture


def test_the_prefix_of_a_queued_request_stays_and_another_one_goes() -> None:
    fixture = with_prompts()
    queue(fixture, 9)
    fixture.put_prompt(*range(100, 130))
    assert held(fixture, *range(10)) == list(range(10))
    assert len(held(fixture, *range(10, 30))) < 5
    assert fixture.counted("awaited_evictions") == 0


def test_the_last_request_of_the_queue_loses_its_prefix_first() -> None:
    fixture = with_prompts()
    for last in (9, 29, *range(100, 140), 19):
        queue(fixture, last)
    for chunk in range(100, 136):
        fixture.put_prompt(chunk)
    assert held(fixture, *range(10)) == list(range(10))
    assert held(fixture, *range(20, 30)) == list(range(20, 30))
    # So many are needed at once, as the engine had no credit left.
    assert fixture.counted("evictions") == URGENT_CREDITS
    assert held(fixture, *range(10, 20)) == []
    assert held(fixture, *range(100, 127)) == list(range(100, 127))
    # Of the prompt, only the last chunk was awaited itself.
    assert fixture.counted("awaited_evictions") == URGENT_CREDITS - 9


@pytest.mark.parametrize("end", ["cancelled", "expired", "closed", "reset"])
def test_what_ends_protects_nothing_any_longer(end: str) -> None:
    fixture = with_prompts()
    fixture.engine("other")
    number = queue(fixture, 9, engine="other")
    if end == "cancelled":
        fixture.store.cancel("other", number)
    elif end == "expired":
        fixture.advance(QUEUED_SECONDS - 1)
        assert len(fixture.store._queued) == 1
        fixture.advance(2)
        assert fixture.counted("queued_requests_expired") == 1
    elif end == "closed":
        fixture.store.close_engine("other", True)
    else:
        fixture.store.reset_engine("other", "b" * 32, True)
    assert len(fixture.store._queued) == len(fixture.store._resident._rank_of.__self__) == 0  # type: ignore[attr-defined]
    fixture.put_prompt(*range(100, 120))
    assert len(held(fixture, *range(10))) < 10


def test_of_two_requests_that_use_one_object_each_protects_it() -> None:
    fixture = with_prompts()
    fixture.engine("other")
    numbers = [queue(fixture, 9), queue(fixture, 9, engine="other"), queue(fixture, 9)]
    fixture.store.cancel("e", numbers[0])
    fixture.store.close_engine("other", True)
    fixture.put_prompt(*range(100, 130))
    assert held(fixture, *range(10)) == list(range(10))
    fixture.store.cancel("e", numbers[2])
    fixture.put_prompt(*range(200, 240))
    assert held(fixture, *range(10)) == []


def test_an_object_that_comes_later_is_protected_and_one_that_leaves_is_forgotten() -> None:
    fixture = StoreFixture(slots=64, tiers=())
    fixture.engine()
    number = queue(fixture, 9)
    fixture.put_prompt(*range(10))
    fixture.put_prompt(*range(100, 150))
    assert held(fixture, *range(10)) == list(range(10))
    fixture.store.cancel("e", number)
    fixture.put_prompt(*range(200, 250))
    assert held(fixture, *range(10)) == []
    queue(fixture, 9)
    fixture.store.close_engine("e", True)
    assert all(not order._tree._awaited for _, order in fixture.store._resident.orders())  # type: ignore[attr-defined]


def test_an_eviction_that_is_cancelled_leaves_the_object_protected() -> None:
    fixture = with_prompts()
    entry = fixture.store._resident.get(NAMESPACE, b"\0" + block_hash(9))
    assert entry is not None
    queue(fixture, 9)
    fixture.store._allocator.expire(entry)
    fixture.promote(9)
    assert not entry.evicting
    (order,) = [order for _, order in fixture.store._resident.orders()]
    assert len(order._tree._awaited) == 1  # type: ignore[attr-defined]


def test_what_a_prefetch_brings_is_protected_as_far_as_it_has_arrived() -> None:
    fixture = StoreFixture(slots=64, read_threads=8)
    fixture.engine()
    fixture.put_in_tier(*range(6))
    number, prefetch = queue(fixture), fixture.number()
    keys = [(0, block_hash(chunk)) for chunk in range(6)]
    fixture.store.prefetch("e", prefetch, keys, queued=number)
    fixture.pump()
    queued = fixture.store._queued._requests["e", number]
    first, second = fixture.calls("read:")[:2]
    fixture.io.run(second)
    fixture.pump()
    assert queued.keys == {}
    fixture.io.run(first)
    fixture.pump()
    assert queued.keys == {0: b"\0" + block_hash(1)}
    fixture.settle()
    assert queued.keys == {0: b"\0" + block_hash(5)}
    # vLLM looks the request up: the prefetch ends, the protection does not.
    fixture.store.cancel("e", prefetch)
    fixture.tier.objects.clear()
    for chunk in range(6):
        fixture.tier._on_change(NAMESPACE, b"\0" + block_hash(chunk), False)
    fixture.put_prompt(*range(100, 160))
    assert held(fixture, *range(6)) == list(range(6))
    fixture.store.cancel("e", number)
    assert fixture.counted("late_cancels") == 0


def test_the_number_of_requests_is_bounded_and_groups_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queued_requests, "MAX_QUEUED_REQUESTS", 3)
    fixture = with_prompts()
    fixture.engine("other")
    for chunk in range(5):
        queue(fixture, chunk)
    queue(fixture, 5, engine="other")
    assert len(fixture.store._queued) == 4
    assert fixture.counted("queued_requests_rejected", "", "too_many") == 2
    fixture.store.queue("other", fixture.number(), [(7, block_hash(0))])
    assert fixture.counted("protocol_violations", "", "unknown_group") == 1
    fixture.store.queue("unknown", 1, [(0, block_hash(0))])
    assert len(fixture.store._queued) == 4


def test_a_request_that_is_named_again_protects_what_it_was_named_with_last() -> None:
    fixture = with_prompts()
    number = fixture.number()
    for chunk in (3, 9, 9, 4):
        fixture.store.queue("e", number, [(0, block_hash(chunk))])
    assert len(fixture.store._queued) == 1
    fixture.put_prompt(*range(100, 140))
    assert held(fixture, *range(10)) == list(range(5))


@pytest.mark.parametrize("last", [True, False])
def test_a_prefetch_evicts_no_prefix_of_requests_before_it(last: bool) -> None:
    """RAM is full of what two requests wait for. A prefetch takes the room of later ones only."""
    fixture = StoreFixture(slots=64, read_threads=8)
    fixture.engine()
    fixture.put_in_tier(*range(6))
    for first in (100, 200):
        fixture.put_prompt(*range(first, first + 22))
    before = held(fixture, *range(100, 122), *range(200, 222))
    number = 0 if last else queue(fixture)
    queue(fixture, max(before))
    queue(fixture, max(chunk for chunk in before if chunk < 200))
    while len(fixture.credits()) > 2:
        chunk = 1_000 + fixture.number()
        queue(fixture, chunk)
        fixture.put(chunk)
        fixture.settle()
        fixture.advance(0.11)
    if last:
        number = queue(fixture)
    prefetch = fixture.number()
    keys = [(0, block_hash(chunk)) for chunk in range(6)]
    fixture.store.prefetch("e", prefetch, keys, queued=number)
    for _ in range(6):
        fixture.settle("read:")
        fixture.advance(0.11)
    # What is free it may have.
    free = RESERVE_OF_64
    assert held(fixture, *range(6)) == list(range(free if last else 6))
    assert held(fixture, *before) == before
