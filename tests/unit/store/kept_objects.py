"""What must always hold in a store about tenants, pins and objects that expire."""

from __future__ import annotations

from collections import Counter

from kvtier.store.lifetimes import RETRY_SECONDS
from kvtier.store.store import TierStore
from kvtier.store.types import MEMORY_BIT, NO_OWNER, Owner
from kvtier.tenants import UNLIMITED

A, B, C = (letter * 8 for letter in (b"a", b"b", b"c"))
OWNERS = (
    NO_OWNER,
    Owner(A),
    Owner(A),
    Owner(B),
    Owner(B, retain_seconds=30),
    Owner(C, pin=True),
    Owner(A, pin=True, ttl_seconds=20),
    Owner(retain_seconds=600, pin=True),
    Owner(C, ttl_seconds=3),
    Owner(tiers=1),
    Owner(B, tiers=2),
)
LATE_SECONDS = 1.2
"""An object that has expired is gone at the latest after that, if nothing uses it."""


def check_kept_objects(store: TierStore, now: float) -> None:
    """Checks a store after ``pump``."""
    check_accounts(store)
    check_shares(store)
    check_pins(store)
    check_limits(store)
    for entry in store._resident.entries():
        late = entry.expires_at and entry.expires_at + LATE_SECONDS < now
        if late and not store._context.fenced:
            # A load that ended just now used it until then. Its removal is due within a second.
            retry = entry.due_at and entry.due_at <= store._context.clock() + RETRY_SECONDS
            assert entry.pins or entry.evicting or retry, "an expired object is still in RAM"


def check_limits(store: TierStore) -> None:
    """Nothing is being written to a tier that no request lets it be stored in."""
    for entry in store._resident.entries():
        written_to = entry.busy & ~MEMORY_BIT
        assert not entry.tiers or not written_to & ~entry.tiers, "written to another tier"


def check_accounts(store: TierStore) -> None:
    """Each tenant's account is what it has in RAM, and on the way there."""
    held: Counter[bytes] = Counter()
    for entry in store._resident.entries():
        if not entry.evicting:
            held[entry.account] += entry.slot_bytes
    for reservation in store._reservations._open.values():
        held[reservation.account] += reservation.slot.segment.kind.slot_bytes
    for read in store._promotions._reads._reads.values():
        held[read.account] += read.geometry.kind.slot_bytes
    held.pop(b"", None)
    accounts = store._resident.accounts
    assert accounts.held == dict(held)
    assert set(accounts.over) == {t for t, size in held.items() if size > accounts.limit_bytes}


def check_shares(store: TierStore) -> None:
    """A tenant above its share has nothing that could be evicted."""
    if store._context.fenced or store._allocator.busy:
        return
    for tenant in store._resident.accounts.over:
        assert store._allocator._next_of(tenant) is None, "a tenant is above its share"


def check_pins(store: TierStore) -> None:
    """Requests have pinned no more than allowed, and what they have pinned is in RAM."""
    lifetimes, accounts = store._lifetimes, store._resident.accounts
    pinned: Counter[bytes] = Counter()
    for entry in store._resident.entries():
        if entry.pinned_until:
            assert not entry.evicting, "a pinned object is being evicted"
            assert entry.due_at, "a pin never ends"
            pinned[entry.account] += entry.slot_bytes
    assert lifetimes.pinned_by == dict(pinned)
    percent = lifetimes._max_pinned_percent
    assert sum(pinned.values()) <= store._pool_bytes * percent // 100
    if accounts.limit_bytes != UNLIMITED:
        for tenant, size in pinned.items():
            assert not tenant or size <= accounts.limit_bytes * percent // 100
