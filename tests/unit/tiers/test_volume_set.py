"""``VolumeSet``: placement, and one order of eviction over several directories."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.dict_tier import DictTier

from kvtier.config.models import FileSystemTierDocument
from kvtier.testing.objects import NAMESPACE, make_object
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import FileSystemTier
from kvtier.tiers.volume_set import MAX_REMEMBERED, VolumeSet

PLACEMENT = "90ae7d22de7a7470"
"""Other keys would be stored twice after an upgrade."""
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(6_000)]


def placed(*volumes: tuple[str, int]) -> dict[bytes, str]:
    tier = VolumeSet("nvme", [DictTier(name, capacity) for name, capacity in volumes])
    return {key: tier.volumes[tier.place(ObjectRef(NAMESPACE, key))].name for key in KEYS}


def test_equal_volumes_get_equal_shares() -> None:
    shares = Counter(placed(("a", 1 << 30), ("b", 1 << 30), ("c", 1 << 30)).values())
    assert all(1_850 < share < 2_150 for share in shares.values())


def test_shares_follow_capacities() -> None:
    shares = Counter(placed(("a", 3 << 30), ("b", 1 << 30)).values())
    assert 4_350 < shares["a"] < 4_650


def test_an_added_volume_takes_its_share_and_nothing_else_moves() -> None:
    before = placed(("a", 1 << 30), ("b", 1 << 30), ("c", 1 << 30))
    after = placed(("d", 1 << 30), ("a", 1 << 30), ("b", 1 << 30), ("c", 1 << 30))
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"d"}
    assert 1_350 < len(moved) < 1_650


def test_a_removed_volume_leaves_the_rest_where_it_is() -> None:
    before = placed(("a", 1 << 30), ("b", 1 << 30), ("c", 1 << 30))
    after = placed(("c", 1 << 30), ("a", 1 << 30))
    assert all(after[key] == before[key] for key in KEYS if before[key] != "b")


def test_placement_does_not_change_between_releases() -> None:
    digest = hashlib.sha256(
        "".join(placed(("nvme0", 1 << 30), ("nvme1", 2 << 30)).values()).encode()
    ).hexdigest()
    assert digest.startswith(PLACEMENT), digest


def make(root: Path, names: tuple[str, ...], capacity: int) -> VolumeSet:
    return VolumeSet(
        "nvme",
        [
            FileSystemTier(
                FileSystemTierDocument(name=name, path=str(root / name), sharing="Pod"),
                TierLimits(capacity, 90, 88),
            )
            for name in names
        ],
    )


def prompt(start: int, length: int) -> list[ObjectRef]:
    keys = [
        b"\0" + hashlib.sha256(b"%d" % number).digest() for number in range(start, start + length)
    ]
    return [ObjectRef(NAMESPACE, key) for key in keys]


def store(tier: VolumeSet, chunks: list[ObjectRef]) -> None:
    previous = b""
    for ref in chunks:
        _, payload, meta = make_object(1, (4_096,))
        tier.write(ref, payload, replace(meta, previous=previous))
        previous = ref.key


def usable(tier: VolumeSet, chunks: list[ObjectRef]) -> int:
    return next((i for i, ref in enumerate(chunks) if not tier.contains(ref)), len(chunks))


@pytest.mark.parametrize("names", [("one",), ("one", "two"), ("one", "two", "three")])
def test_the_end_of_the_oldest_prompt_is_evicted_first_over_all_volumes(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    tier = make(tmp_path, names, (8 << 20) // len(names))
    tier.open(lambda *_: None)
    first, second = prompt(0, 400), prompt(1000, 300)
    store(tier, first)
    store(tier, second)
    tier.maintain()
    assert usable(tier, second) == 300
    left = sum(tier.contains(ref) for ref in first)
    assert 50 < left < 350
    assert usable(tier, first) > 0
    # Volumes evict by themselves, so how far one is ahead of another depends on their threads. Each
    # keeps the first ones of its own.
    for volume in tier.volumes:
        own = [ref for ref in first if tier.volumes[tier.place(ref)] is volume]
        kept = [volume.contains(ref) for ref in own]
        assert kept == sorted(kept, reverse=True), volume.name
    tier.close()


def test_restart_finds_everything_and_a_removed_volume_leaves_the_rest(tmp_path: Path) -> None:
    tier = make(tmp_path, ("one", "two"), 64 << 20)
    tier.open(lambda *_: None)
    chunks = prompt(0, 60)
    store(tier, chunks)
    by_volume = [{ref for ref in chunks if volume.contains(ref)} for volume in tier.volumes]
    tier.close()
    both = make(tmp_path, ("two", "three", "one"), 64 << 20)
    both.open(lambda *_: None)
    assert usable(both, chunks) == 60, "the order of volumes does not matter"
    both.close()
    rest = make(tmp_path, ("two",), 64 << 20)
    rest.open(lambda *_: None)
    assert {ref for ref in chunks if rest.contains(ref)} == by_volume[1]
    rest.close()


def test_predecessors_are_bounded() -> None:
    tier = VolumeSet("nvme", [DictTier("a"), DictTier("b")])
    predecessors = tier.volumes[0]._predecessors
    previous = b""
    for number in range(MAX_REMEMBERED + 100):
        key = number.to_bytes(4, "big")
        predecessors.note(ObjectRef(NAMESPACE, key), number % 2, previous)
        previous = key
    assert len(predecessors._nearest) == MAX_REMEMBERED
    ref = ObjectRef(NAMESPACE, b"next")
    assert predecessors.note(ref, 0, previous) == (MAX_REMEMBERED + 98).to_bytes(4, "big")
