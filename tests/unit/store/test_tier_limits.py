"""A request says into which tiers its objects may be stored.

Every way into a tier is tried: the write after a store, writes that waited or failed, the writes
when a tier comes back, those after a promotion and after a restart, and reuse.
"""

from __future__ import annotations

import pytest
from tests.unit.store.kept_objects import A
from tests.unit.store.store_fixture import (
    NAMESPACE,
    PAGE,
    StoreFixture,
    block_hash,
    live,
)

from kvtier.config.models import LiveTier, StorePolicy
from kvtier.store.types import NO_OWNER, Owner, wider
from kvtier.tiers.base import ObjectRef

RAM, DISK, NFS = 1, 2, 4
RAM_ONLY, RAM_AND_DISK, DISK_ONLY = Owner(tiers=RAM), Owner(tiers=RAM | DISK), Owner(tiers=DISK)


def store(slots: int = 12, **values: LiveTier) -> StoreFixture:
    tiers = {name: LiveTier(capacity_bytes=1 << 30) for name in ("disk", "nfs")}
    fixture = StoreFixture(slots, ("disk", "nfs"), live(threshold=1, **{**tiers, **values}))
    fixture.engine()
    return fixture


def holders(fixture: StoreFixture, chunk: int) -> int:
    """Bits of the tiers that have the chunk, from what they hold themselves."""
    ref = ObjectRef(NAMESPACE, b"\0" + block_hash(chunk))
    files = sum(
        bit for bit, tier in zip((DISK, NFS), fixture.tiers, strict=True) if ref in tier.objects
    )
    return files | fixture.bits(chunk) & RAM


def push_out(fixture: StoreFixture) -> None:
    """Fills RAM with what is never used again."""
    for chunk in range(1_000, 1_040):
        fixture.put_prompt(chunk)


def load(fixture: StoreFixture, *chunks: int, owner: Owner = NO_OWNER, promotion: int = 0) -> int:
    """A load of a request of ``owner``, until its end; returns how much was pinned."""
    number = fixture.number()
    keys = [(0, block_hash(chunk)) for chunk in chunks]
    pinned = fixture.store.load("e", number, promotion, keys, owner)
    fixture.settle()
    fixture.store.release_load("e", number)
    fixture.settle()
    return pinned


def reload(fixture: StoreFixture, *chunks: int, owner: Owner = NO_OWNER) -> int:
    """A promotion and a load of a request of ``owner``; returns how much was pinned."""
    promotion = fixture.promote(*chunks, owner=owner)
    # Room for it has to be made.
    fixture.advance(0.2)
    fixture.settle()
    return load(fixture, *chunks, owner=owner, promotion=promotion)


@pytest.mark.parametrize("tiers", range(8))
def test_objects_are_in_the_named_tiers_only(tiers: int) -> None:
    fixture = store()
    fixture.put_prompt(0, 1, owner=Owner(tiers=tiers))
    assert [holders(fixture, chunk) for chunk in (0, 1)] == [tiers or RAM | DISK | NFS] * 2
    fixture.check_accounts()


def test_no_policy_writes_more_than_the_request_lets() -> None:
    for policy in StorePolicy:
        fixture = store(disk=LiveTier(capacity_bytes=1 << 30, store_policy=policy))
        fixture.put_prompt(0, owner=RAM_ONLY)
        for _ in range(3):
            fixture.put_prompt(0, owner=RAM_ONLY)
            load(fixture, 0, owner=RAM_ONLY)
        assert holders(fixture, 0) == RAM, policy


def test_a_tier_that_comes_back_is_not_given_what_was_kept_from_it() -> None:
    fixture = store()
    for tier in fixture.tiers:
        tier.fail = lambda: OSError("no")
    fixture.put_prompt(0, owner=RAM_ONLY)
    fixture.put_prompt(1, owner=RAM_AND_DISK)
    fixture.put_prompt(2)
    for tier in fixture.tiers:
        tier.fail = None
    fixture.advance(200.0)
    fixture.settle()
    fixture.advance(200.0)
    fixture.settle()
    found = [holders(fixture, chunk) for chunk in (0, 1, 2)]
    assert found == [RAM, RAM | DISK, RAM | DISK | NFS]


def test_new_settings_write_no_more_than_before() -> None:
    fixture = store(disk=LiveTier(capacity_bytes=1 << 30, store_policy=StorePolicy.NONE))
    fixture.put_prompt(0, owner=RAM_ONLY)
    fixture.put_prompt(1)
    tiers = {name: LiveTier(capacity_bytes=1 << 30) for name in ("disk", "nfs")}
    fixture.store.configure(live(**tiers))
    while fixture.store._writes.busy:
        fixture.settle()
    assert holders(fixture, 0) == RAM
    assert holders(fixture, 1) == RAM | DISK | NFS


def test_what_is_evicted_from_ram_is_gone() -> None:
    fixture = store()
    fixture.put_prompt(0, owner=RAM_ONLY)
    push_out(fixture)
    assert holders(fixture, 0) == 0
    assert reload(fixture, 0) == 0


@pytest.mark.parametrize("owner", [RAM_AND_DISK, RAM_ONLY, Owner(tiers=RAM, pin=True)])
def test_a_promoted_object_is_written_to_no_other_tier(owner: Owner) -> None:
    fixture = store()
    fixture.put_prompt(0, 1, owner=RAM_AND_DISK)
    push_out(fixture)
    assert [holders(fixture, chunk) for chunk in (0, 1)] == [DISK, DISK]
    assert reload(fixture, 0, 1, owner=owner) == 2
    assert [holders(fixture, chunk) for chunk in (0, 1)] == [RAM | DISK] * 2


def test_a_file_says_that_its_object_is_limited() -> None:
    fixture = store()
    fixture.put_prompt(0, owner=RAM_AND_DISK)
    fixture.put_prompt(1)
    metas = {ref.key[1:]: meta for ref, (_, meta) in fixture.tiers[0].objects.items()}
    assert metas[block_hash(0)].limited
    assert not metas[block_hash(1)].limited


def test_an_object_without_ram_leaves_it_when_all_its_writes_have_ended() -> None:
    fixture = store()
    fixture.put(0, owner=Owner(tiers=DISK | NFS))
    fixture.settle("hash")
    assert holders(fixture, 0) == RAM
    fixture.settle("write:disk")
    assert holders(fixture, 0) == RAM | DISK, "a write is in progress"
    fixture.settle()
    fixture.advance(0.2)
    assert holders(fixture, 0) == DISK | NFS
    assert fixture.counted("objects_passed_on") == 1
    assert fixture.counted("tier_writes_dropped", "nfs") == 0
    assert reload(fixture, 0, owner=DISK_ONLY) == 1


def test_an_object_whose_tiers_take_nothing_does_not_stay_in_ram() -> None:
    none = LiveTier(capacity_bytes=1 << 30, store_policy=StorePolicy.NONE)
    fixture = store(disk=none)
    fixture.put_prompt(0, owner=DISK_ONLY)
    assert holders(fixture, 0) == 0
    fixture.tiers[1].fail = lambda: OSError("no")
    fixture.put_prompt(1, owner=Owner(tiers=NFS))
    assert holders(fixture, 1) & DISK == 0
    push_out(fixture)
    assert holders(fixture, 1) == 0
    fixture.check_accounts()


def test_what_waits_for_a_write_stays_until_it_is_written() -> None:
    slow = LiveTier(capacity_bytes=1 << 30, max_write_bytes_per_second=PAGE)
    fixture = store(disk=slow)
    for chunk in range(4):
        fixture.put(chunk, owner=DISK_ONLY)
    fixture.settle()
    assert fixture.counted("tier_writes_postponed", "disk") > 0
    for _ in range(8):
        fixture.advance(1.0)
        fixture.settle()
    fixture.advance(1.0)
    assert [holders(fixture, chunk) for chunk in range(4)] == [DISK] * 4


class TestUnion:
    """A limit is that of a request: another one that stores or uses the object adds its tiers."""

    def test_of_tiers(self) -> None:
        assert wider(RAM, DISK) == RAM | DISK
        assert wider(RAM, 0) == wider(0, RAM) == wider(0, 0) == 0

    @pytest.mark.parametrize(
        ("other", "found"),
        [
            (NO_OWNER, RAM | DISK | NFS),
            (RAM_AND_DISK, RAM | DISK),
            (RAM_ONLY, RAM),
            (Owner(A, tiers=RAM | NFS), RAM | NFS),
        ],
    )
    @pytest.mark.parametrize("how", ["store", "load", "keep"])
    def test_with_a_later_request(self, how: str, other: Owner, found: int) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=RAM_ONLY)
        if how == "store":
            fixture.put_prompt(0, owner=other)
        elif how == "load":
            assert load(fixture, 0, owner=other) == 1
        else:
            fixture.store.keep("e", [(0, block_hash(0))], other)
            fixture.settle()
        assert holders(fixture, 0) == found
        # A limit that comes later takes nothing back, and narrows nothing.
        load(fixture, 0, owner=RAM_ONLY)
        fixture.put_prompt(0, owner=RAM_ONLY)
        assert holders(fixture, 0) == found

    @pytest.mark.parametrize("how", ["store", "keep"])
    def test_with_a_request_that_comes_while_the_object_is_stored(self, how: str) -> None:
        fixture = store()
        number, _ = fixture.reserve(0, owner=RAM_ONLY)
        if how == "store":
            second, _ = fixture.reserve(0, owner=RAM_AND_DISK)
            fixture.store.deliver("e", 0, second)
        else:
            fixture.store.keep("e", [(0, block_hash(0))], RAM_AND_DISK)
        fixture.store.deliver("e", 0, number)
        fixture.settle()
        assert holders(fixture, 0) == RAM | DISK

    def test_with_the_request_whose_promotion_was_faster_than_the_store(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=RAM_AND_DISK)
        push_out(fixture)
        number, _ = fixture.reserve(0)
        assert reload(fixture, 0, owner=RAM_ONLY) == 1
        fixture.store.deliver("e", 0, number)
        fixture.settle()
        assert fixture.counted("stores_cancelled", "", "read_meanwhile") == 1
        assert holders(fixture, 0) == RAM | DISK | NFS

    def test_of_a_prefix_reaches_as_far_as_the_request_does(self) -> None:
        fixture = store()
        fixture.put_prompt(0, 1, 2, owner=RAM_ONLY)
        assert load(fixture, 0, 1) == 2
        fixture.put(3, previous=1)
        fixture.settle()
        every = RAM | DISK | NFS
        assert [holders(fixture, chunk) for chunk in range(4)] == [every, every, RAM, every]

    def test_with_a_promotion_that_brings_the_object_back(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=RAM_AND_DISK)
        push_out(fixture)
        assert reload(fixture, 0) == 1
        assert holders(fixture, 0) == RAM | DISK | NFS

    def test_reuse_by_a_limited_request_admits_what_others_may_write(self) -> None:
        reused = LiveTier(capacity_bytes=1 << 30, store_policy=StorePolicy.REUSED)
        fixture = store(disk=reused)
        fixture.put_prompt(0)
        load(fixture, 0, owner=RAM_ONLY)
        assert holders(fixture, 0) == RAM | DISK | NFS
        fixture.put_prompt(1, owner=RAM_ONLY)
        fixture.put(2, previous=1)
        fixture.settle()
        load(fixture, 2)
        assert holders(fixture, 1) == RAM, "the one after it was reused"


class TestRestart:
    def test_a_recovered_object_is_written_to_its_tiers_only(self) -> None:
        fixture = store()
        for tier in fixture.tiers:
            tier.fail = lambda: OSError("no")
        fixture.put_prompt(0, owner=RAM_ONLY)
        fixture.put_prompt(1, owner=RAM_AND_DISK)
        fixture.put_prompt(2)
        for tier in fixture.tiers:
            tier.fail = None
        fixture.restart()
        fixture.engine()
        assert fixture.counted("objects_recovered") == 3
        for chunk, owner in ((0, RAM_ONLY), (1, RAM_AND_DISK), (2, NO_OWNER)):
            assert reload(fixture, chunk, owner=owner) == 1
        found = [holders(fixture, chunk) for chunk in (0, 1, 2)]
        assert found == [RAM, RAM | DISK, RAM | DISK | NFS]

    def test_a_file_keeps_its_limit(self) -> None:
        fixture = store()
        fixture.put_prompt(0, owner=RAM_AND_DISK)
        push_out(fixture)
        fixture.restart()
        fixture.engine()
        assert reload(fixture, 0, owner=RAM_ONLY) == 1
        assert holders(fixture, 0) == RAM | DISK


def test_a_tenants_share_counts_what_is_in_ram_only_like_everything_else() -> None:
    tiers = {name: LiveTier(capacity_bytes=1 << 30) for name in ("disk", "nfs")}
    fixture = StoreFixture(20, ("disk", "nfs"), live(shares=(20, 20), **tiers))
    fixture.engine()
    owner = Owner(A, tiers=RAM)
    for chunk in range(10):
        fixture.put_prompt(chunk, owner=owner)
    assert fixture.store.tenants() == {A: 4 * PAGE}
    kept = [chunk for chunk in range(10) if holders(fixture, chunk)]
    assert len(kept) == 4
    assert all(holders(fixture, chunk) == RAM for chunk in kept)
    fixture.put_prompt(100, owner=Owner(A, tiers=DISK))
    assert holders(fixture, 100) == DISK
    assert fixture.store.tenants() == {A: 3 * PAGE}, "it has left the account of RAM"
    fixture.check_accounts()


def test_pinned_and_retained_objects_stay_in_ram_although_it_is_not_named() -> None:
    fixture = store(slots=40)
    fixture.put_prompt(0, owner=Owner(tiers=DISK, pin=True))
    fixture.put_prompt(1, owner=Owner(tiers=DISK, retain_seconds=60))
    assert [holders(fixture, chunk) for chunk in (0, 1)] == [RAM | DISK] * 2


def test_another_volume_of_a_limited_tier_is_the_same_tier() -> None:
    tiers = {name: LiveTier(capacity_bytes=1 << 30) for name in ("disk", "nfs")}
    fixture = StoreFixture(
        12, ("disk", "nfs"), live(threshold=1, **tiers), volumes={"disk": ("a", "b")}
    )
    fixture.engine()
    for chunk in range(6):
        fixture.put_prompt(chunk, owner=RAM_AND_DISK)
    held = [len(part.objects) for part in fixture.parts["disk"]]
    assert sum(held) == 6
    assert all(held)
    assert not fixture.parts["nfs"][0].objects
    metas = [meta for part in fixture.parts["disk"] for _, meta in part.objects.values()]
    assert all(meta.limited for meta in metas)
