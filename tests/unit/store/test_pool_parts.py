"""A pool that is laid out in parts, with one shard of each object in each."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
from tests.unit.store.store_fixture import (
    NAMESPACE,
    PAGE,
    StoreFixture,
    block_hash,
    object_bytes,
    shard_content,
)

from kvtier.hashing import blake3_digest
from kvtier.store.generations import unpack_location
from kvtier.store.pool_layout import PoolLayout, expected_span, pool_layout
from kvtier.store.slot_pool import SlotPool
from kvtier.store.slot_table import DIGEST_BYTES, HEADER_BYTES, SlotTable, TableIdentity
from kvtier.store.state import Slot, SlotState
from kvtier.store.types import CreditsGranted, EngineInfo, PromotionOutcome

POOL = 24 * PAGE
SHARDS = (100, 64)
TWO = PoolLayout(2, POOL // 2)


def engine(parts: int = 2, name: str = "e", namespace: str = NAMESPACE) -> EngineInfo:
    return EngineInfo(name, namespace, (2 * PAGE,), (SHARDS,), ((0, 1),), True, parts)


def single(name: str = "s", pages: int = 2) -> EngineInfo:
    return EngineInfo(name, "b" * 32, (pages * PAGE,), ((pages * PAGE - 50,),))


def opened(fixture: StoreFixture, info: EngineInfo) -> bool:
    """Whether the engine, which opens, has its shards in parts."""
    fixture.store.open_engine(info)
    fixture.pump()
    return fixture.store.is_scattered(info.engine)


def offsets(fixture: StoreFixture, name: str, slot: int) -> list[int]:
    """Where the two shards of a slot are, as the ranks are told."""
    step = fixture.store.layout.part_bytes if fixture.store.is_scattered(name) else PAGE
    return [slot, slot + step]


def put(fixture: StoreFixture, chunk: int, name: str = "e") -> int:
    """Both ranks store their shard of a chunk."""
    number, slot = fixture.reserve(chunk, name)
    for rank, offset in enumerate(offsets(fixture, name, slot)):
        content = shard_content(NAMESPACE, b"\0" + block_hash(chunk), rank, SHARDS[rank])
        fixture.pool[offset : offset + len(content)] = content
        fixture.store.deliver(name, rank, number)
    fixture.settle()
    return slot


def check(fixture: StoreFixture, chunk: int, slot: int, name: str = "e") -> None:
    for rank, offset in enumerate(offsets(fixture, name, slot)):
        content = shard_content(NAMESPACE, b"\0" + block_hash(chunk), rank, SHARDS[rank])
        assert bytes(fixture.pool[offset : offset + len(content)]) == content


def promoted(fixture: StoreFixture, *chunks: int, name: str = "e") -> list[int]:
    """The slots of a promotion of all these chunks."""
    number = fixture.promote(*chunks, engine=name)
    fixture.settle()
    (end,) = fixture.ends(number)
    assert end.outcome is PromotionOutcome.WHOLE
    return [unpack_location(location)[0] for location in end.locations]


def ranges(slot: Slot) -> list[tuple[int, int]]:
    kind = slot.segment.kind
    starts = [slot.offset + piece * kind.part_bytes for piece in range(kind.pieces)]
    return [(start, start + kind.row_bytes) for start in starts]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_slots_never_overlap_and_are_restored_where_they_were(parts: int, seed: int) -> None:
    layout = pool_layout(97 * PAGE, parts)
    pool, choose = SlotPool(97 * PAGE, layout), random.Random(seed)
    kinds = [
        pool.slot_class(parts * PAGE, scattered=True),
        pool.slot_class(parts * PAGE),
        pool.slot_class(2 * parts * PAGE, scattered=True),
        pool.slot_class(3 * PAGE),
    ]
    assert parts == 1 or len({kind.slot_bytes for kind in kinds[:3]}) == 3
    held: list[Slot] = []
    for _ in range(200):
        slot = pool.take(choose.choice(kinds), SlotState.COMMITTED)
        if slot is not None:
            held.append(slot)
        elif held:
            pool.release(held.pop(choose.randrange(len(held))))
        used = sorted(each for slot in held for each in ranges(slot))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used))
        assert not used or used[-1][1] <= parts * layout.part_bytes
        accounts = pool.accounts()
        assert accounts.committed == sum(end - begin for begin, end in used)
        assert accounts.free + accounts.committed + accounts.unusable == pool.pool_bytes
        assert accounts.unusable >= 0
    assert held
    again = SlotPool(97 * PAGE, layout)
    for slot in held:
        restored = again.restore(pool.location(slot))
        assert restored is not None
        assert ranges(restored) == ranges(slot)


def test_the_shards_of_an_engine_lie_in_parts_from_its_first_object_on() -> None:
    fixture = StoreFixture(24)
    assert opened(fixture, engine())
    assert fixture.store.layout == TWO
    slots = [put(fixture, chunk) for chunk in range(4)]
    assert all(slot + PAGE <= POOL // 2 for slot in slots)
    for chunk, slot in enumerate(slots):
        check(fixture, chunk, slot)
        ref = next(ref for ref in fixture.tier.objects if ref.key[1:] == block_hash(chunk))
        stored, _ = fixture.tier.objects[ref]
        # What files hold does not depend on the layout of the pool.
        assert stored == object_bytes(NAMESPACE, ref.key, SHARDS)
    fixture.check_accounts()


@pytest.mark.parametrize("first", [1, 2])
def test_objects_written_under_one_layout_are_read_under_the_other(first: int) -> None:
    fixture = StoreFixture(24)
    assert opened(fixture, engine(first)) == (first == 2)
    for chunk in range(3):
        put(fixture, chunk)
    other = StoreFixture(24)
    other.tier.objects.update(fixture.tier.objects)
    for ref in fixture.tier.objects:
        other.tier._on_change(ref.namespace, ref.key, True)
    assert opened(other, engine(3 - first)) == (first == 1)
    for chunk, slot in enumerate(promoted(other, 0, 1, 2)):
        check(other, chunk, slot)


def test_an_engine_of_another_layout_is_served_in_one_range_beside() -> None:
    fixture = StoreFixture(24)
    assert opened(fixture, engine())
    before = [put(fixture, chunk) for chunk in range(2)]
    assert not opened(fixture, single()), "its objects have one shard"
    assert fixture.store.layout == TWO, "the pool holds objects"
    granted = [
        slot
        for event in fixture.events
        if isinstance(event, CreditsGranted) and event.engine == "s"
        for slot in event.slots
    ]
    assert granted
    for slot in granted:
        assert slot // TWO.part_bytes == (slot + 2 * PAGE - 1) // TWO.part_bytes, "in one part"
        fixture.pool[slot : slot + 2 * PAGE] = b"\xff" * (2 * PAGE)
    for chunk, slot in enumerate(before):
        check(fixture, chunk, slot)
    fixture.check_accounts()


def test_a_pool_that_holds_nothing_is_laid_out_for_the_next_engine() -> None:
    fixture = StoreFixture(24, ())
    assert not opened(fixture, single())
    assert not opened(fixture, engine()), "the other one has credits"
    fixture.store.close_engine("e", True)
    fixture.store.close_engine("s", False)
    assert not opened(fixture, engine()), "the other one may still use its slots"
    fixture.store.close_engine("e", True)
    fixture.store.confirm_engine_dead("s")
    assert opened(fixture, engine())
    assert opened(fixture, engine(name="f")), "engines of one layout share the parts"
    put(fixture, 0, "f")
    assert fixture.store.objects == 1
    fixture.store.close_engine("e", True)
    fixture.store.close_engine("f", True)
    assert not opened(fixture, single()), "there is an object"
    assert fixture.store.layout == TWO


@pytest.mark.parametrize("fenced", [False, True])
def test_objects_in_parts_survive_a_restart(fenced: bool) -> None:
    fixture = StoreFixture(24, ())
    assert opened(fixture, engine())
    slots = [put(fixture, chunk) for chunk in range(3)]
    fixture.restart(fenced)
    assert fixture.store.layout == TWO
    assert opened(fixture, engine())
    if fenced:
        fixture.store.unfence()
        fixture.pump()
    assert promoted(fixture, 0, 1, 2) == slots
    for chunk, slot in enumerate(slots):
        check(fixture, chunk, slot)
    assert fixture.counted("recovered_objects_verified") == 3


def test_a_bit_that_flips_in_any_part_is_found() -> None:
    for part in range(2):
        fixture = StoreFixture(24, ())
        assert opened(fixture, engine())
        slot = put(fixture, 0)
        fixture.restart()
        fixture.flip(TWO.span(part)[0] + slot + 10)
        assert opened(fixture, engine())
        number = fixture.promote(0)
        fixture.settle()
        assert [end.usable for end in fixture.ends(number)] == [0]
        assert fixture.counted("recovered_objects_dropped", "", "corrupt") == 1


def _rewrite_header(path: int, **changes: object) -> None:
    """Writes a valid header with other values."""
    data = os.pread(path, HEADER_BYTES, 0)
    length = int.from_bytes(data[8:12], "little")
    text = json.dumps(json.loads(data[12 : 12 + length]) | changes).encode()
    data = data[:8] + len(text).to_bytes(4, "little") + text
    data += blake3_digest(data, DIGEST_BYTES)
    os.pwrite(path, data.ljust(HEADER_BYTES, b"\0"), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": 1},
        {"parts": 0},
        {"parts": 65},
        {"partBytes": POOL},
        {"partBytes": 0},
        {"partBytes": -PAGE},
        {"partBytes": 100},
        {"parts": "x"},
        {"parts": None},
    ],
)
def test_a_table_of_a_layout_that_the_pool_cannot_have_is_refused(
    changes: dict[str, object],
) -> None:
    fixture = StoreFixture(24, ())
    assert opened(fixture, engine())
    put(fixture, 0)
    _rewrite_header(fixture._table_file, **changes)
    fixture.restart()
    assert fixture.store.layout == pool_layout(POOL)
    assert fixture.store.objects == 0
    assert fixture.counted("recovered_objects_rejected") == 1
    assert opened(fixture, engine()), "and the pool can be laid out again"


def test_records_of_an_earlier_layout_are_void(tmp_path_factory: pytest.TempPathFactory) -> None:
    fixture = StoreFixture(24, ())
    assert opened(fixture, engine())
    put(fixture, 0)
    table = os.pread(fixture._table_file, 1 << 20, 0)
    assert len(fixture.table) == 1
    fixture.table._numbers.clear()
    # As if the record could not be erased.
    assert fixture.table.lay_out(None)
    os.pwrite(fixture._table_file, table[HEADER_BYTES:], HEADER_BYTES)
    found = SlotTable(os.dup(fixture._table_file), TableIdentity(POOL, 1, "topology"))
    assert found.layout is None
    assert found.recovered == []
    assert found.rejected == {"damaged": 1}
    found.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_read_that_hangs_in_pieces_blocks_its_bytes_whatever_the_layout(lost: bool) -> None:
    """With ``lost`` the next tierd does not know the layout that the read belongs to."""
    fixture = StoreFixture(24)
    assert opened(fixture, engine())
    fixture.tier.put(NAMESPACE, b"\0" + block_hash(0), SHARDS)
    fixture.pump()
    fixture.promote(0)
    (read,) = fixture.calls("read:")
    fixture.io.hold(read)
    (place,) = fixture.read_log.places.values()
    assert place.layout == TWO
    used = [place.offset, place.offset + TWO.part_bytes]
    if lost:
        fixture.damage_table(40)
    fixture.restart(hung="1")
    assert fixture.store.layout == (pool_layout(POOL) if lost else TWO)
    assert opened(fixture, engine()) != lost, "a pool in use is not laid out"
    for slot in fixture.credits():
        for begin, end in ((offset, offset + PAGE) for offset in offsets(fixture, "e", slot)):
            assert all(end <= each or each + PAGE <= begin for each in used)
    assert fixture.store.accounts().quarantined >= 2 * PAGE
    fixture.release_orphaned_reads("1")
    assert fixture.store.accounts().quarantined == 0


def test_a_pool_without_room_for_an_object_in_parts_has_one_range() -> None:
    fixture = StoreFixture(7, ())
    sizes = ((3 * PAGE, 3 * PAGE), (4 * PAGE - 1, 3 * PAGE + 1))
    for number, shards in enumerate(sizes):
        size = sum(-(-each // PAGE) * PAGE for each in shards)
        info = EngineInfo("e", NAMESPACE, (size,), (shards,), ((0, 1),), True, 2)
        assert fixture.store.max_object_bytes(info) == (6 * PAGE, 7 * PAGE)[number]
    fits = EngineInfo("e", NAMESPACE, (6 * PAGE,), (sizes[0],), ((0, 1),), True, 2)
    assert opened(fixture, fits)
    tiny = StoreFixture(1, ())
    assert not opened(tiny, engine())
    assert tiny.store.layout.part_bytes == PAGE
    assert expected_span(PAGE, ((0, 1),), 1) == (0, PAGE)


def test_a_rank_expects_what_tierd_will_name() -> None:
    pool, own = 64 << 30, ((0, 1, 2, 3),)
    spans = [expected_span(pool, own, rank) for rank in range(4)]
    assert spans == [pool_layout(pool, 4).span(part) for part in range(4)]
    assert sum(end - begin for begin, end in spans) == pool
    assert expected_span(pool, ((0, 0, 0, 0),), 2) == (0, pool), "one shard for all ranks"
    assert expected_span(pool, ((0, 0, 2, 2),), 3) == pool_layout(pool, 2).span(1)
    assert expected_span(pool, ((0, 1), (0, 0)), 1) == (0, pool), "several parts"
    assert expected_span(pool, (), 0) == (0, pool)
