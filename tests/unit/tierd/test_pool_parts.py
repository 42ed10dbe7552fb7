"""Which part of the pool tierd tells each rank to use."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.unit.store.store_fixture import (
    PAGE,
    StoreFixture,
    block_hash,
    object_bytes,
    shard_content,
)
from tests.unit.tierd.test_sessions import SessionTestbed, hello

from kvtier.store.pool_layout import pool_layout
from kvtier.store.slot_table import SlotLocation
from kvtier.tierd.dispatcher import Dispatcher
from kvtier.tierd.fencing import _pack_place, _unpack_place
from kvtier.tierd.sessions import EngineSessions
from kvtier.tierd.shard_layout import part_numbers, slot_layouts
from kvtier.tierd.wire import WHOLE_POOL, Credits, Deliver, Message, Ready, Reserve

NAMESPACE = "ab" * 16
SIZES = (5000, 100)
POOL = 64 * PAGE


@dataclass
class DispatchTestbed(SessionTestbed):
    """Sessions, dispatcher and store, without sockets."""

    fixture: StoreFixture = field(default_factory=lambda: StoreFixture(POOL // PAGE))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dispatcher = Dispatcher(
            self.fixture.store, POOL, self.send, self.fixture.counters, lambda *_: None
        )

    def engine_opened(self, engine: EngineSessions) -> None:
        super().engine_opened(engine)
        self.dispatcher.open(engine, self.now)

    def attach(
        self,
        engine: str,
        sizes: list[tuple[int, ...]],
        writers: tuple[tuple[int, ...], ...] = (),
    ) -> list[Ready]:
        """Attaches an engine with these shards by rank and group; returns what its ranks are
        told."""
        ranks = len(sizes)
        scheduler = hello("scheduler", engine, ranks=ranks, shard_writers=writers)
        self.hello(engine.encode(), scheduler)
        routes = [f"{engine}-{rank}".encode() for rank in range(ranks)]
        for rank, route in enumerate(routes):
            self.hello(route, hello("worker", engine, rank, 20 + rank, shard_bytes=sizes[rank]))
        return [next(m for m in self.to(route) if isinstance(m, Ready)) for route in routes]

    def say(self, route: bytes, message: Message) -> None:
        session = self.sessions.get(route)
        assert session is not None
        engine = self.sessions.engine_of(session)
        assert engine is not None
        self.dispatcher.handle(session, engine, message, self.now)  # type: ignore[arg-type]

    def settle(self) -> None:
        self.dispatcher.run_once(self.now)
        while self.fixture.io.run_all(""):
            self.dispatcher.run_once(self.now)

    def credits(self, engine: str, group: int) -> list[int]:
        messages = self.to(engine.encode())
        granted = [m for m in messages if isinstance(m, Credits) and m.group == group]
        return [slot for message in granted for slot in message.slots]

    def store(self, engine: str, told: list[Ready], chunk: int, group: int) -> int:
        """All ranks of an engine store a chunk where tierd has told them; returns its slot."""
        slot, key = self.credits(engine, group)[0], bytes((group,)) + block_hash(chunk)
        items = ((100 * group + chunk, group, block_hash(chunk), slot, b""),)
        self.say(engine.encode(), Reserve(items=items))
        for rank, ready in enumerate(told):
            offset, size, writes = ready.shards[group]
            assert writes
            begin, end = ready.span
            where = slot + offset
            assert begin <= where <= end - size, "outside the part of the rank"
            content = shard_content(NAMESPACE, key, rank, size)
            self.fixture.pool[where : where + size] = content
            self.say(f"{engine}-{rank}".encode(), Deliver(reservations=(100 * group + chunk,)))
        self.settle()
        return slot


@pytest.fixture
def testbed(tmp_path: Path) -> DispatchTestbed:
    return DispatchTestbed(tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_of_all_engines_register_the_pool_once_per_engine(
    testbed: DispatchTestbed, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines (data parallel) of several ranks (tensor parallel) share a pool."""
    with caplog.at_level(logging.INFO):
        told = {name: testbed.attach(name, [SIZES] * ranks) for name in ("d0", "d1")}
    testbed.settle()
    layout = pool_layout(POOL, ranks)
    for ready in told.values():
        assert [each.span for each in ready] == [layout.span(part) for part in range(ranks)]
        assert sum(end - begin for begin, end in (each.span for each in ready)) == POOL
    assert f"has {ranks} parts; each rank registers {POOL // ranks} bytes" in caplog.text
    names = {"d0": 0, "d1": 1}
    for name, chunk in names.items():
        for group in range(2):
            testbed.store(name, told[name], chunk, group)
    assert testbed.fixture.counted("protocol_violations") == 0
    found = testbed.fixture.tier.objects
    assert len(found) == 4
    for ref, (stored, _) in found.items():
        sizes = (SIZES[ref.key[0]],) * ranks
        # In rank order, whatever the part: other layouts read the same files.
        assert stored == object_bytes(NAMESPACE, ref.key, sizes)


def test_the_namespace_does_not_depend_on_the_layout_of_the_pool(testbed: DispatchTestbed) -> None:
    testbed.attach("a", [(4096,)])
    assert testbed.fixture.store.layout.parts == 1
    assert testbed.attach("b", [SIZES] * 2)[0].span == WHOLE_POOL
    one_range = testbed.derived_from
    directory = testbed.directory / "other"
    directory.mkdir()
    other = DispatchTestbed(directory)
    assert other.attach("b", [SIZES] * 2)[0].span != WHOLE_POOL
    assert other.derived_from == one_range


@pytest.mark.parametrize(
    ("sizes", "writers", "why"),
    [
        ([(31 * 4096,), (30 * 4096,)], (), "must have one size"),
        ([(4096, 4096), (4096, 0)], (), "different numbers of shards by group"),
        ([(4096, 0), (0, 4096)], (), "objects have one shard"),
        ([(4096,)] * 2, ((0, 0),), "objects have one shard"),
        ([(4096, 4096)] * 2, ((0, 1), (0, 0)), "different numbers of shards by group"),
        ([(4096, 4096)] * 4, ((0, 0, 2, 2), (0, 1, 0, 1)), "read different shards by group"),
    ],
)
def test_an_engine_without_equal_shards_uses_one_range(
    testbed: DispatchTestbed,
    caplog: pytest.LogCaptureFixture,
    sizes: list[tuple[int, ...]],
    writers: tuple[tuple[int, ...], ...],
    why: str,
) -> None:
    with caplog.at_level(logging.INFO):
        told = testbed.attach("e", sizes, writers)
    assert {each.span for each in told} == {WHOLE_POOL}
    groups = slot_layouts(sizes, writers)
    for rank, ready in enumerate(told):
        assert [(offset, size) for offset, size, _ in ready.shards] == [
            (group.ranges[rank].offset, group.ranges[rank].size_bytes) for group in groups
        ]
    assert f"each rank registers the whole host pool: {why}" in caplog.text or why in caplog.text
    assert testbed.fixture.store.layout.parts == 1


def test_ranks_with_the_same_bytes_share_a_part() -> None:
    groups = slot_layouts([(4096,)] * 4, ((0, 0, 2, 2),))
    assert part_numbers(groups) == ((0, 0, 1, 1), "")


def test_the_log_of_reads_keeps_the_layout() -> None:
    for place in (
        SlotLocation(4096, 8192, 0, 1 << 40),
        SlotLocation(4096, 8192, 0, 700, pool_layout(64 << 30, 8)),
        SlotLocation(0, 64 * 4096, 4096, 1, pool_layout(1 << 44, 64)),
    ):
        numbers = [
            int.from_bytes(_pack_place(place)[at : at + 8], "little") for at in (0, 8, 16, 24)
        ]
        assert _unpack_place((numbers[0], numbers[1], numbers[2], numbers[3])) == place
