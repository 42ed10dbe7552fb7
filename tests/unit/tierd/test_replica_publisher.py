"""What schedulers are told of the store, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tierd.replication import (
    MAX_DEFERRED,
    PIECES_PER_CALL,
    SNAPSHOT_KEYS,
    Replica,
    ReplicaPublisher,
)
from kvtier.tierd.wire import Delta, EvictionAck, EvictionNotice, Message, Usable


@dataclass
class World:
    """A store's presence, publisher, and a replica for each scheduler."""

    present: dict[bytes, int] = field(default_factory=dict)
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    usable: int = 3

    def __post_init__(self) -> None:
        self.publisher = ReplicaPublisher(
            lambda route, message: self.sent.append((route, message)),
            lambda _: list(self.present.items()),
            self.left.append,
            lambda: self.usable,
        )

    def set(self, key: bytes, bits: int) -> None:
        self.present[key] = self.present.get(key, 0) | bits
        self.publisher.presence_changed("ns", key, bits, True)

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
    world = World()
    world.publisher.start(b"r", "ns")
    world.publisher.publish(0.0)
    assert world.sent == [(b"r", Usable(bits=3)), (b"r", Delta(sequence=1, snapshot=True))]


def test_changes_of_one_turn_are_joined_per_key() -> None:
    world = World()
    world.publisher.start(b"r", "ns")
    world.publisher.publish(0.0)
    world.sent.clear()
    world.set(b"a", 1)
    world.clear(b"a", 1)
    world.set(b"a", 1)
    world.set(b"b", 2)
    world.publisher.publish(0.0)
    assert world.sent == [(b"r", Delta(sequence=2, added=((b"a", 1), (b"b", 2))))]


def test_a_change_before_an_announcement_is_sent_before_it() -> None:
    world = World()
    world.publisher.start(b"r", "ns")
    world.publisher.publish(0.0)
    world.set(b"a", 1)
    world.publisher.evicting("ns", 5, (b"a",), 0.0)
    kinds = [type(message) for _, message in world.sent]
    assert kinds == [Usable, Delta, Delta, EvictionNotice]
    assert world.replica().get(b"a") == 0


def test_a_key_has_left_when_every_scheduler_of_the_namespace_said_so() -> None:
    world = World()
    for route in (b"r", b"s"):
        world.publisher.start(route, "ns")
    world.publisher.start(b"other", "elsewhere")
    world.publisher.publish(0.0)
    world.publisher.evicting("ns", 5, (b"a",), 0.0)
    world.publisher.acknowledge(b"r", 5)
    world.publisher.acknowledge(b"other", 5)
    assert world.left == []
    world.publisher.acknowledge(b"s", 5)
    assert world.left == [5]


def test_a_scheduler_that_went_is_not_waited_for() -> None:
    world = World()
    world.publisher.start(b"r", "ns")
    world.publisher.publish(0.0)
    world.publisher.evicting("ns", 5, (b"a",), 0.0)
    world.publisher.stop(b"r")
    world.publisher.evicting("ns", 6, (b"b",), 0.0)
    assert world.left == [5, 6]


def test_a_large_snapshot_takes_several_turns_and_changes_wait_behind_it() -> None:
    count = SNAPSHOT_KEYS * PIECES_PER_CALL + 10
    world = World({number.to_bytes(4, "big"): 1 for number in range(count)})
    world.publisher.start(b"r", "ns")
    assert world.publisher.publish(0.0)
    first, last = (0).to_bytes(4, "big"), (count - 1).to_bytes(4, "big")
    world.clear(first, 1)
    world.set(last, 2)
    world.publisher.evicting("ns", 1, (last,), 0.0)
    while world.publisher.publish(0.0):
        pass
    replica = world.replica()
    assert not replica.stale
    assert len(replica) == count - 1
    assert (replica.get(first), replica.get(last)) == (0, 2)
    assert sum(isinstance(message, Delta) and message.snapshot for _, message in world.sent) == 1


def test_too_many_changes_behind_a_snapshot_begin_another_one() -> None:
    count = SNAPSHOT_KEYS * PIECES_PER_CALL * 3
    world = World({number.to_bytes(4, "big"): 1 for number in range(count)})
    world.publisher.start(b"r", "ns")
    world.publisher.publish(0.0)
    for number in range(MAX_DEFERRED + 1):
        world.set(b"new" + number.to_bytes(4, "big"), 1)
        world.publisher.flush()
    while world.publisher.publish(0.0):
        pass
    replica = world.replica()
    assert not replica.stale
    assert len(replica) == count + MAX_DEFERRED + 1
    assert EvictionAck(token=1) not in world.sent


def test_a_tier_that_is_given_up_costs_one_message_however_many_keys_it_has() -> None:
    world = World({number.to_bytes(4, "big"): 2 for number in range(10_000)})
    for route in (b"r", b"s"):
        world.publisher.start(route, "ns")
    while world.publisher.publish(0.0):
        pass
    world.sent.clear()
    world.usable = 1
    world.publisher.usable_tiers_changed()
    world.publisher.publish(0.0)
    assert world.sent == [(b"r", Usable(bits=1)), (b"s", Usable(bits=1))]
