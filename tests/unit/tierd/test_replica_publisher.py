"""The messages that schedulers receive about the store, and their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tierd.replication import (
    MAX_DEFERRED_KEYS,
    PIECES_PER_CALL,
    SNAPSHOT_KEYS,
    Replica,
    ReplicaPublisher,
)
from kvtier.tierd.wire import Delta, EvictionAck, EvictionNotice, Message, Usable


def location(bits: int) -> int:
    """Where a key with these bits is."""
    return 1 << 32 if bits & 1 else 0


@dataclass
class PublisherTestbed:
    """A store's presence, publisher, and a replica for each scheduler."""

    present: dict[bytes, int] = field(default_factory=dict)
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    usable: int = 3

    def __post_init__(self) -> None:
        self.publisher = ReplicaPublisher(
            lambda route, message: self.sent.append((route, message)),
            lambda _: [(key, bits, location(bits)) for key, bits in self.present.items()],
            self.left.append,
            lambda: self.usable,
        )

    def set(self, key: bytes, bits: int) -> None:
        self.present[key] = self.present.get(key, 0) | bits
        self.publisher.presence_changed("ns", key, bits, True, location(bits))

    def clear(self, key: bytes, bits: int) -> None:
        self.present[key] = self.present.get(key, 0) & ~bits
        self.publisher.presence_changed("ns", key, bits, False)

    def replica(self, route: bytes = b"r") -> Replica:
        found = Replica()
        for to, message in self.sent:
            if to == route and isinstance(message, Delta | EvictionNotice | Usable):
                found.apply(message)
        return found


def test_an_empty_store_still_gives_a_snapshot() -> None:
    testbed = PublisherTestbed()
    testbed.publisher.start(b"r", "ns")
    testbed.publisher.publish(0.0)
    assert testbed.sent == [(b"r", Usable(bits=3)), (b"r", Delta(sequence=1, snapshot=True))]


def test_changes_of_one_turn_are_joined_per_key() -> None:
    testbed = PublisherTestbed()
    testbed.publisher.start(b"r", "ns")
    testbed.publisher.publish(0.0)
    testbed.sent.clear()
    testbed.set(b"a", 1)
    testbed.clear(b"a", 1)
    testbed.set(b"a", 1)
    testbed.set(b"b", 2)
    testbed.publisher.publish(0.0)
    assert testbed.sent == [(b"r", Delta(sequence=2, added=((b"a", 1, 1 << 32), (b"b", 2, 0))))]


def test_a_change_before_an_announcement_is_sent_before_it() -> None:
    testbed = PublisherTestbed()
    testbed.publisher.start(b"r", "ns")
    testbed.publisher.publish(0.0)
    testbed.set(b"a", 1)
    testbed.publisher.evicting("ns", 5, (b"a",), 0.0)
    kinds = [type(message) for _, message in testbed.sent]
    assert kinds == [Usable, Delta, Delta, EvictionNotice]
    assert testbed.replica().get(b"a") == 0


def test_a_key_is_evicted_once_every_scheduler_of_the_namespace_has_acknowledged() -> None:
    testbed = PublisherTestbed()
    for route in (b"r", b"s"):
        testbed.publisher.start(route, "ns")
    testbed.publisher.start(b"other", "elsewhere")
    testbed.publisher.publish(0.0)
    testbed.publisher.evicting("ns", 5, (b"a",), 0.0)
    testbed.publisher.acknowledge(b"r", 5)
    testbed.publisher.acknowledge(b"other", 5)
    assert testbed.left == []
    testbed.publisher.acknowledge(b"s", 5)
    assert testbed.left == [5]


def test_a_scheduler_that_has_left_is_not_waited_for() -> None:
    testbed = PublisherTestbed()
    testbed.publisher.start(b"r", "ns")
    testbed.publisher.publish(0.0)
    testbed.publisher.evicting("ns", 5, (b"a",), 0.0)
    testbed.publisher.stop(b"r")
    testbed.publisher.evicting("ns", 6, (b"b",), 0.0)
    assert testbed.left == [5, 6]


def test_a_large_snapshot_takes_several_rounds_and_later_changes_follow_it() -> None:
    count = SNAPSHOT_KEYS * PIECES_PER_CALL + 10
    testbed = PublisherTestbed({number.to_bytes(4, "big"): 1 for number in range(count)})
    testbed.publisher.start(b"r", "ns")
    assert testbed.publisher.publish(0.0)
    first, last = (0).to_bytes(4, "big"), (count - 1).to_bytes(4, "big")
    testbed.clear(first, 1)
    testbed.set(last, 2)
    testbed.publisher.evicting("ns", 1, (last,), 0.0)
    while testbed.publisher.publish(0.0):
        pass
    replica = testbed.replica()
    assert not replica.stale
    assert len(replica) == count - 1
    assert (replica.get(first), replica.get(last)) == (0, 2)
    assert sum(isinstance(message, Delta) and message.snapshot for _, message in testbed.sent) == 1


def test_too_many_changes_during_a_snapshot_start_another_one() -> None:
    count = SNAPSHOT_KEYS * PIECES_PER_CALL * 3
    testbed = PublisherTestbed({number.to_bytes(4, "big"): 1 for number in range(count)})
    testbed.publisher.start(b"r", "ns")
    testbed.publisher.publish(0.0)
    for number in range(MAX_DEFERRED_KEYS + 1):
        testbed.set(b"new" + number.to_bytes(4, "big"), 1)
        testbed.publisher.flush()
    while testbed.publisher.publish(0.0):
        pass
    replica = testbed.replica()
    assert not replica.stale
    assert len(replica) == count + MAX_DEFERRED_KEYS + 1
    assert EvictionAck(token=1) not in testbed.sent


def test_changes_behind_a_snapshot_are_sent_in_parts_and_in_order() -> None:
    testbed = PublisherTestbed({number.to_bytes(4, "big"): 1 for number in range(10)})
    testbed.publisher.start(b"r", "ns")
    count = 3 * SNAPSHOT_KEYS * PIECES_PER_CALL
    for number in range(count):
        testbed.set(b"new" + number.to_bytes(4, "big"), 1)
    testbed.publisher.flush()
    testbed.sent.clear()
    rounds = 0
    while True:
        before = len(testbed.sent)
        more = testbed.publisher.publish(0.0)
        if rounds == 0:
            testbed.clear(b"new" + (count - 1).to_bytes(4, "big"), 1)
        rounds += 1
        sent = [message for _, message in testbed.sent[before:] if isinstance(message, Delta)]
        assert sum(len(each.added) for each in sent) <= SNAPSHOT_KEYS * (PIECES_PER_CALL + 1)
        if not more:
            break
    assert rounds >= 3
    testbed.publisher.publish(0.0)
    assert len(testbed.replica()) == 10 + count - 1


def test_withdrawing_a_tier_costs_one_message_for_any_number_of_keys() -> None:
    testbed = PublisherTestbed({number.to_bytes(4, "big"): 2 for number in range(10_000)})
    for route in (b"r", b"s"):
        testbed.publisher.start(route, "ns")
    while testbed.publisher.publish(0.0):
        pass
    testbed.sent.clear()
    testbed.usable = 1
    testbed.publisher.usable_tiers_changed()
    testbed.publisher.publish(0.0)
    assert testbed.sent == [(b"r", Usable(bits=1)), (b"s", Usable(bits=1))]


def test_snapshots_of_many_schedulers_share_what_one_round_may_send() -> None:
    count = 3 * SNAPSHOT_KEYS
    routes = [bytes([number]) for number in range(8)]
    testbed = PublisherTestbed({number.to_bytes(4, "big"): 1 for number in range(count)})
    for route in routes:
        testbed.publisher.start(route, "ns")
    served: list[set[bytes]] = []
    while True:
        before = len(testbed.sent)
        more = testbed.publisher.publish(0.0)
        sent = [(to, each) for to, each in testbed.sent[before:] if isinstance(each, Delta)]
        assert sum(len(each.added) for _, each in sent) <= SNAPSHOT_KEYS * PIECES_PER_CALL
        served.append({to for to, _ in sent})
        if not more:
            break
    assert set.union(*served[:4]) == set(routes), "each one has its turn"
    for route in routes:
        replica = testbed.replica(route)
        assert (len(replica), replica.stale) == (count, False)
