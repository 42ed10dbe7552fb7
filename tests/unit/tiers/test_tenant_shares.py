"""What a tenant holds in a directory is bounded, and what has expired is removed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiers.test_file_tier import path_of

from kvtier.config.models import FileSystemTierDocument
from kvtier.errors import TierExpiredError, TierForeignError, TierMissError, TierQuotaError
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ObjectFacts, ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier, index_saver
from kvtier.tiers.filesystem import format as file_format
from kvtier.tiers.filesystem.format import HEADER_BYTES, facts_of
from kvtier.tiers.filesystem.seal import Sealing
from kvtier.tiers.isolation_keys import KeySet, make_key

A, B = b"a" * 8, b"b" * 8
SIZE = HEADER_BYTES + 8_192
ONE = make_key("one", bytes(range(32)))


class Wall:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@contextmanager
def opened(
    root: Path, objects: int = 0, wall: Wall | None = None, sealing: Sealing | None = None
) -> Iterator[FileSystemTier]:
    """A tier in which one tenant may hold so many objects; 0: no limit."""
    capacity = 100 * SIZE
    limits = TierLimits(capacity, 100, 90, tenant_percent=objects or 100)
    document = FileSystemTierDocument(name="disk", path=str(root), sharing="Pod")
    tier = FileSystemTier(document, limits, wall=wall or time.time, sealing=sealing)
    tier.open(lambda *_: None)
    try:
        yield tier
    finally:
        tier.close()


def put(tier: FileSystemTier, seeds: range, tenant: bytes, expires_at: int = 0) -> list[ObjectRef]:
    """Stores the objects of one prompt."""
    previous, refs = b"", []
    for seed in seeds:
        ref, payload, meta = make_object(seed)
        meta = replace(meta, previous=previous, tenant=tenant, expires_at=expires_at)
        tier.write(ref, payload, meta)
        previous = ref.key
        refs.append(ref)
    return refs


def held(tier: FileSystemTier, seeds: range) -> list[int]:
    return [seed for seed in seeds if tier.contains(make_object(seed)[0])]


def on_disk(root: Path) -> int:
    return len(list(root.glob("*/*/*/*.kv")))


def test_a_write_beyond_the_share_removes_the_ends_of_the_tenants_oldest_prompts(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 6) as tier:
        put(tier, range(100, 104), B)
        put(tier, range(4), A)
        put(tier, range(10, 13), A)
        assert held(tier, range(200)) == [0, 1, 2, 10, 11, 12, 100, 101, 102, 103]
        assert tier.tenants() == {A: 6 * SIZE, B: 4 * SIZE}
        assert tier.counts()["tier_tenant_evictions", ""] == 1
        assert on_disk(tmp_path) == 10


def test_what_follows_all_that_the_tenant_holds_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, 3) as tier:
        put(tier, range(3), A)
        ref, payload, meta = make_object(3)
        with pytest.raises(TierQuotaError):
            tier.write(ref, payload, replace(meta, tenant=A, previous=make_object(2)[0].key))
        assert held(tier, range(10)) == [0, 1, 2]
        assert tier.tenants() == {A: 3 * SIZE}
        tier.write(ref, payload, replace(meta, tenant=B))
        assert held(tier, range(10)) == [0, 1, 2, 3]


def test_a_file_counts_once_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 3) as tier:
        publish, counted = tier._index.publish, []

        def then_maintain(*arguments: Any) -> bool:
            found = publish(*arguments)
            counted.append(tier.tenants()[A])
            tier.maintain()
            return found

        monkeypatch.setattr(tier._index, "publish", then_maintain)
        put(tier, range(3), A)
        assert counted == [SIZE, 2 * SIZE, 3 * SIZE]
        assert held(tier, range(3)) == [0, 1, 2], "an object within the share was removed"


def test_a_file_that_a_scan_finds_before_it_is_published_counts_for_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 3) as tier:
        publish = tier._index.publish

        def found_by_a_scan(namespace: str, key: bytes, size: int, *arguments: Any) -> bool:
            tier._index.add_discovered(namespace, key, size)
            return publish(namespace, key, size, *arguments)

        monkeypatch.setattr(tier._index, "publish", found_by_a_scan)
        put(tier, range(2), A)
        assert tier.tenants() == {A: 2 * SIZE}
        assert tier._index.unknown == 0
        put(tier, range(10, 13), A)
        assert on_disk(tmp_path) == 3


def test_the_tenants_are_known_after_a_restart_and_a_lowered_share_is_reached(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as tier:
        put(tier, range(5), A)
        put(tier, range(10, 12), B)
        put(tier, range(20, 22), b"")
    with opened(tmp_path, 2) as tier:
        assert tier.tenants() == {}
        tier.maintain()
        assert tier.tenants() == {A: 2 * SIZE, B: 2 * SIZE}
        assert held(tier, range(30)) == [*held(tier, range(5)), 10, 11, 20, 21]
        assert len(held(tier, range(5))) == 2
        assert on_disk(tmp_path) == 6


def test_a_saved_index_knows_tenants_and_expiry_without_reading_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_saver, "MIN_OBJECTS", 1)
    monkeypatch.setattr(index_saver, "_CAPACITY_FRACTION", 1)
    later = int(time.time()) + 1_000
    with opened(tmp_path) as tier:
        put(tier, range(3), A)
        put(tier, range(10, 12), B, later)
        put(tier, range(20, 22), b"")
        tier.maintain()
        assert tier.saver.saves == 1
    with opened(tmp_path) as tier:
        assert tier._index.unknown == 0
        assert tier.tenants() == {A: 3 * SIZE, B: 2 * SIZE}
        assert len(tier._index.expired(later + 1, 10)) == 2


@pytest.mark.parametrize("encrypt", [None, False, True])
def test_an_expired_object_is_never_read_and_is_removed(
    tmp_path: Path, encrypt: bool | None
) -> None:
    keys = KeySet(ONE, {"one": ONE})
    sealing = None if encrypt is None else Sealing(lambda: keys, encrypt)
    wall = Wall()
    with opened(tmp_path, wall=wall, sealing=sealing) as tier:
        soon, late = int(wall.now) + 50, int(wall.now) + 500
        (first,) = put(tier, range(1), A, soon)
        (second,) = put(tier, range(1, 2), A, soon)
        (third,) = put(tier, range(2, 3), A, late)
        meta = tier.read(first, buffer(8_192))
        assert (meta.tenant, meta.expires_at) == (A, soon)
        assert facts_of(path_of(tmp_path, first).read_bytes()[:HEADER_BYTES]) == ObjectFacts(
            A, soon
        )
        wall.now += 60
        with pytest.raises(TierExpiredError):
            tier.read(first, buffer(8_192))
        assert not path_of(tmp_path, first).exists()
        assert path_of(tmp_path, second).exists()
        tier.maintain()
        assert not path_of(tmp_path, second).exists()
        assert not tier.contains(second)
        assert tier.counts()["tier_expired", ""] == 1
        assert tier.read(third, buffer(8_192)).shard_bytes == (8_192,)


def test_what_expired_while_no_tierd_ran_is_not_served_and_goes(tmp_path: Path) -> None:
    wall = Wall()
    with opened(tmp_path, wall=wall) as tier:
        put(tier, range(4), A, int(wall.now) + 50)
    wall.now += 100
    with opened(tmp_path, wall=wall) as tier:
        with pytest.raises(TierMissError):
            tier.read(make_object(0)[0], buffer(8_192))
        tier.maintain()
        assert on_disk(tmp_path) == 0
        assert tier.tenants() == {}


def test_a_release_that_does_not_know_expiry_takes_the_object_for_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        (ref,) = put(tier, range(1), A, int(time.time()) + 50)
        monkeypatch.setattr(file_format, "VERSIONS", (1, 2))
        with pytest.raises(TierForeignError):
            tier.read(ref, buffer(8_192))
        assert path_of(tmp_path, ref).exists()


@pytest.mark.parametrize("encrypt", [None, False, True])
def test_a_limited_object_says_so_in_its_file(
    tmp_path: Path, encrypt: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeySet(ONE, {"one": ONE})
    sealing = None if encrypt is None else Sealing(lambda: keys, encrypt)
    with opened(tmp_path, sealing=sealing) as tier:
        ref, payload, meta = make_object(0)
        tier.write(ref, payload, replace(meta, limited=True))
        other, payload, meta = make_object(1)
        tier.write(other, payload, meta)
        assert tier.read(ref, buffer(8_192)).limited
        assert not tier.read(other, buffer(8_192)).limited
        # Releases that would write it to other tiers take it for an object of a later one.
        monkeypatch.setattr(file_format, "VERSIONS", (1, 2, 3, 4))
        with pytest.raises(TierForeignError):
            tier.read(ref, buffer(8_192))
        assert path_of(tmp_path, ref).exists()


def test_damaged_and_planted_headers_belong_to_no_tenant_and_stop_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        refs = put(tier, range(4), A)
    damaged = path_of(tmp_path, refs[0])
    data = bytearray(damaged.read_bytes())
    data[220] ^= 1
    damaged.write_bytes(data)
    path_of(tmp_path, refs[1]).unlink()
    os.symlink("/etc/hostname", path_of(tmp_path, refs[1]))
    with opened(tmp_path, 2) as tier:
        tier.maintain()
        assert tier._index.unknown == 0
        assert tier.tenants()[A] == 2 * SIZE


def test_the_capacity_holds_with_tenants_and_no_other_pays_for_one(tmp_path: Path) -> None:
    with opened(tmp_path, 40) as tier:
        put(tier, range(1_000, 1_020), B)
        for start in range(0, 120, 4):
            put(tier, range(start, start + 4), A)
        assert held(tier, range(1_000, 1_020)) == list(range(1_000, 1_020))
        assert tier.tenants() == {A: 40 * SIZE, B: 20 * SIZE}
        assert tier.usage().used_bytes <= 100 * SIZE
