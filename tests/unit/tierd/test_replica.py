"""The scheduler's picture of what tierd holds."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.presence_table import hash_many
from kvtier.tierd.replication import Replica
from kvtier.tierd.wire import Delta, EvictionAck, EvictionNotice, Usable

LOCATION = 5 << 32 | 7


def placed(entries: Iterable[tuple[bytes, int]]) -> tuple[tuple[bytes, int, int], ...]:
    """Keys and bits as a delta has them: those in RAM have a location."""
    return tuple((key, bits, LOCATION if bits & 1 else 0) for key, bits in entries)


def keys(count: int) -> list[bytes]:
    return [b"\0" + number.to_bytes(32, "big") for number in range(count)]


def test_deltas_set_and_clear_single_bits() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 1), (b"b", 2)))))
    replica.apply(Delta(sequence=2, added=placed(((b"a", 2),)), removed=((b"b", 2),)))
    assert (replica.get(b"a"), replica.get(b"b"), replica.get(b"c")) == (3, 0, 0)
    assert list(replica.all_bits()) == [3]
    replica.apply(Delta(sequence=3, removed=((b"a", 1),)))
    assert replica.get(b"a") == 2
    assert list(replica.all_bits()) == [2]
    assert len(replica) == 1


def test_a_key_has_the_location_of_its_last_arrival_in_ram() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=((b"a", 3, 11), (b"b", 2, 0))))
    assert (replica.location(b"a"), replica.location(b"b"), replica.location(b"c")) == (11, 0, 0)
    replica.apply(Delta(sequence=2, removed=((b"a", 1),)))
    assert (replica.get(b"a"), replica.location(b"a")) == (2, 0)
    largest = (1 << 64) - 1
    replica.apply(Delta(sequence=3, added=((b"a", 1, largest),)))
    replica.apply(Delta(sequence=4, added=((b"a", 4, 0),)))
    assert (replica.get(b"a"), replica.location(b"a")) == (7, largest)
    replica.apply(EvictionNotice(token=1, keys=(b"a",)))
    assert (replica.get(b"a"), replica.location(b"a")) == (6, 0)


def test_locations_end_at_the_first_key_that_is_not_in_ram() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=((b"a", 1, 11), (b"b", 3, 12))))
    replica.apply(Delta(sequence=2, added=((b"c", 2, 0), (b"d", 1, 14))))
    assert replica.locations([b"a", b"b"]) == [11, 12]
    assert replica.locations([b"a", b"b", b"c", b"d"]) == [11, 12]
    assert replica.locations([b"x", b"a"]) == replica.locations([]) == []


def test_removals_increase_only_when_a_bit_is_cleared() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 1),))))
    assert replica.removals == 0
    replica.apply(Delta(sequence=2, removed=((b"b", 1), (b"a", 2))))
    assert replica.removals == 0
    replica.apply(Delta(sequence=3, removed=((b"a", 1),)))
    assert replica.removals == 1


def test_keys_that_leave_ram_are_not_offered_from_there_before_the_acknowledgement() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 3), (b"b", 1)))))
    assert replica.apply(EvictionNotice(token=9, keys=(b"a", b"b", b"never"))) == EvictionAck(
        token=9
    )
    assert (replica.get(b"a"), replica.get(b"b")) == (2, 0)
    assert replica.removals == 2


def test_a_gap_empties_the_replica_until_the_snapshot_that_it_requests_once() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 1),))))
    assert not replica.needs_resync()
    replica.apply(Delta(sequence=3, added=placed(((b"b", 1),))))
    assert replica.stale
    assert (replica.get(b"a"), replica.get(b"b")) == (0, 0)
    assert replica.needs_resync()
    assert not replica.needs_resync()
    replica.apply(Delta(sequence=4, added=placed(((b"c", 1),))))
    assert replica.get(b"c") == 0
    replica.apply(Delta(sequence=5, snapshot=True, added=placed(((b"d", 1),))))
    replica.apply(Delta(sequence=6, added=placed(((b"e", 1),))))
    assert not replica.stale
    assert (replica.get(b"c"), replica.get(b"d"), replica.get(b"e")) == (0, 1, 1)


def test_a_snapshot_replaces_the_replica_and_arrives_in_several_messages() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"old", 1),))))
    replica.apply(Delta(sequence=2, snapshot=True, added=placed(((b"a", 1),))))
    replica.apply(Delta(sequence=3, added=placed(((b"b", 1),))))
    assert (replica.get(b"old"), replica.get(b"a"), replica.get(b"b")) == (0, 1, 1)


def test_after_clear_the_next_session_counts_from_one() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 1),))))
    replica.clear()
    assert replica.get(b"a") == 0
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"b", 1),))))
    assert not replica.stale
    assert replica.get(b"b") == 1
    assert replica.location(b"b") == LOCATION


def test_many_keys_are_looked_up_at_once() -> None:
    replica = Replica()
    names = keys(600)
    bits = [(0, 1, 2, 3)[number % 4] for number in range(600)]
    added = placed((key, held) for key, held in zip(names, bits, strict=True) if held)
    replica.apply(Delta(sequence=1, snapshot=True, added=added))
    for some in (names, names[1::4], names[::4], [b"short", *names], names[:3], []):
        for group in {key[0] for key in some}:
            each = [key for key in some if key[0] == group]
            found = replica.get_hashed(group, hash_many([key[1:] for key in each]))
            assert found.tolist() == [replica.get(key) for key in each]
    assert [replica.get(key) for key in names] == bits


def test_objects_only_in_unusable_tiers_are_absent_until_the_tiers_are_usable() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 2), (b"b", 3), (b"c", 4)))))
    removals = replica.removals
    assert replica.apply(Usable(bits=5)) is None
    assert [replica.get(key) for key in (b"a", b"b", b"c")] == [0, 1, 4]
    # Earlier answers are outdated.
    assert replica.removals == removals + 1
    replica.apply(Delta(sequence=2, added=placed(((b"d", 2),))))
    assert replica.get(b"d") == 0
    replica.apply(Usable(bits=7))
    assert [replica.get(key) for key in (b"a", b"d")] == [2, 2]
    assert replica.removals == removals + 1


def test_withdrawing_a_tier_does_not_look_at_its_keys() -> None:
    replica = Replica()
    keys = [number.to_bytes(4, "big") for number in range(1000)]
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(tuple((key, 2) for key in keys))))
    replica.apply(Usable(bits=1))
    assert len(replica) == 1000
    assert not any(replica.get(key) for key in keys)


def test_the_next_tierd_announces_again_which_tiers_are_usable() -> None:
    replica = Replica()
    replica.apply(Usable(bits=1))
    replica.clear()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 2),))))
    assert replica.get(b"a") == 2


def test_keys_move_between_ram_and_other_tiers() -> None:
    replica = Replica()
    replica.apply(Delta(sequence=1, snapshot=True, added=placed(((b"a", 2), (b"b", 1)))))
    replica.apply(Delta(sequence=2, added=placed(((b"a", 1), (b"b", 2)))))
    assert [replica.get(key) for key in (b"a", b"b")] == [3, 3]
    assert [replica.location(key) for key in (b"a", b"b")] == [LOCATION, LOCATION]
    assert len(replica) == 2
    replica.apply(EvictionNotice(token=1, keys=(b"a", b"b")))
    assert [replica.get(key) for key in (b"a", b"b")] == [2, 2]
    assert len(replica) == 2
    replica.apply(Delta(sequence=3, removed=((b"a", 2), (b"b", 2))))
    assert (len(replica), replica.get(b"a"), replica.location(b"a")) == (0, 0, 0)


def test_a_large_replica_is_emptied_at_once() -> None:
    replica = Replica()
    names = keys(5_000)
    replica.apply(Delta(sequence=1, snapshot=True, added=tuple((key, 2, 0) for key in names)))
    replica.clear()
    assert (len(replica), replica.get(names[0]), replica.removals) == (0, 0, 1)
