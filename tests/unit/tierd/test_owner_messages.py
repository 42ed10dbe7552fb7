"""tierd passes on whom objects belong to, and trusts no engine's word about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.store.store_fixture import PAGE, StoreFixture, block_hash

from kvtier.store.types import MAX_LIFE_SECONDS, NO_OWNER, Owner, checked_owner
from kvtier.tenants import OTHERS
from kvtier.tierd.dispatcher import Dispatcher
from kvtier.tierd.wire import Keep, Load, LoadPinned, Reserve, decode_from_engine, encode

A, B = b"a" * 8, b"b" * 8


class Tierd:
    """A store behind a dispatcher, without sockets."""

    def __init__(self) -> None:
        self.fixture = StoreFixture(40)
        self.fixture.engine()
        self.sent: list[tuple[bytes, Any]] = []
        self.dispatcher = Dispatcher(
            self.fixture.store,
            len(self.fixture.pool),
            lambda route, message: self.sent.append((route, message)),
            self.fixture.counters,
            lambda *_: None,
        )

    def send(self, message: Any) -> None:
        decoded = decode_from_engine(encode(message))
        session: Any = SimpleNamespace(is_scheduler=True, route=b"r")
        workers = {rank: SimpleNamespace(route=b"%d" % rank) for rank in range(2)}
        engine: Any = SimpleNamespace(name="e", open=True, workers=workers)
        self.dispatcher.handle(session, engine, decoded, 0.0)

    def reserve(self, chunks: range, *owners: tuple[int, Owner]) -> None:
        slots = self.fixture.credits()
        items = tuple(
            (chunk, 0, block_hash(chunk), slot, b"")
            for chunk, slot in zip(chunks, slots, strict=False)
        )
        self.send(Reserve(items=items, owners=owners))

    def violations(self) -> int:
        return self.fixture.counters.values.get(("protocol_violations", "", "owner"), 0)


def test_each_item_has_the_owner_of_its_run() -> None:
    tierd = Tierd()
    tierd.reserve(range(5), (2, Owner(A)), (1, NO_OWNER), (1, Owner(B)))
    assert tierd.fixture.store.tenants() == {A: 2 * PAGE, B: PAGE}


@pytest.mark.parametrize("count", [-3, 0, 10**12])
def test_runs_of_impossible_lengths_name_the_items_that_there_are(count: int) -> None:
    tierd = Tierd()
    tierd.reserve(range(3), (count, Owner(A)))
    assert tierd.fixture.store.tenants().get(A, 0) == (3 * PAGE if count > 0 else 0)


@pytest.mark.parametrize("tenant", [b"short", b"x" * 9, bytes(8), OTHERS])
def test_an_impossible_tenant_is_no_tenant_and_counted(tenant: bytes) -> None:
    tierd = Tierd()
    tierd.reserve(range(2), (2, Owner(tenant)))
    assert tierd.fixture.store.tenants() == {}
    assert tierd.violations() == 1


def test_impossible_times_are_brought_within_bounds() -> None:
    found = checked_owner(Owner(A, -5, True, 10**18, -1))
    assert found == Owner(A, 0, True, MAX_LIFE_SECONDS, 1)


@pytest.mark.parametrize(
    ("tiers", "kept"), [(0, 0), (1, 1), (6, 6), (-1, 1), (-(1 << 16), 1), (1 << 40, 1)]
)
def test_tiers_that_cannot_be_limit_an_object_to_ram_at_least(tiers: int, kept: int) -> None:
    found = checked_owner(Owner(tiers=tiers))
    assert found is not None
    assert found.tiers == kept
    tierd = Tierd()
    tierd.reserve(range(2), (2, Owner(b"short", tiers=tiers)))
    for chunk in range(2):
        tierd.fixture.store.deliver("e", 0, chunk)
    tierd.fixture.settle()
    assert tierd.violations() == 1
    assert len(tierd.fixture.tier.objects) == (0 if tiers else 2)


def test_a_keep_message_pins_what_is_in_ram_and_ignores_the_rest() -> None:
    tierd = Tierd()
    tierd.fixture.put_prompt(0, 1)
    keys = tuple((0, block_hash(chunk)) for chunk in (0, 1, 77))
    tierd.send(Keep(keys=(*keys, (9, b"x")), owner=Owner(pin=True)))
    assert tierd.fixture.store.pinned_by_requests == 2 * PAGE
    tierd.send(Load(load=5, promotion=0, keys=keys[:2], owner=Owner(retain_seconds=5)))
    assert tierd.fixture.store.pinned_bytes == 2 * PAGE
    pinned = LoadPinned(load=5, keys=2)
    assert tierd.sent == [(b"0", pinned), (b"1", pinned)], "every rank is told"
