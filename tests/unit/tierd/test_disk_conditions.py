"""Conditions of tierd about the file systems of its tiers."""

import pytest

from kvtier.config.models import BreakerSettings, Live, LiveTier
from kvtier.store.tier_group import StoreTierState
from kvtier.tierd.reporting import disk_conditions

GIB = 1 << 30


def found(capacity: int, size: int, available: int, **settings: int) -> dict[str, str]:
    state = StoreTierState(
        "nvme", "Healthy", 0, capacity * GIB, 0, 0,
        volume_bytes=size * GIB, volume_available_bytes=available * GIB,
    )  # fmt: skip
    tier = LiveTier(capacity_bytes=capacity * GIB, **settings)
    live = Live(breaker=BreakerSettings(), tiers={"nvme": tier})
    return {each.type: each.message for each in disk_conditions([state], live)}


def test_a_capacity_above_the_disk_is_a_condition_with_the_numbers() -> None:
    message = found(1000, 64, 60, min_free_percent=15)["CapacityExceedsDisk"]
    assert message == (
        "tier nvme: capacity 1000.00 GiB exceeds its file system of 64.00 GiB, of which minFree "
        "keeps 9.60 GiB free"
    )
    assert "CapacityExceedsDisk" in found(1000, 64, 60), "without minFree too"


@pytest.mark.parametrize(("capacity", "percent", "exceeds"), [
    (50, 15, False), (60, 15, False), (61, 15, True), (64, 0, False), (71, 0, False), (72, 0, True),
])  # fmt: skip
def test_what_counts_is_the_high_watermark_and_min_free(
    capacity: int, percent: int, exceeds: bool
) -> None:
    # A claim of the tier's capacity has a somewhat smaller file system, and is right.
    assert ("CapacityExceedsDisk" in found(capacity, 64, 60, min_free_percent=percent)) is exceeds


def test_a_disk_that_others_fill_is_a_condition() -> None:
    assert set(found(40, 64, 9, min_free_percent=15)) == {"MinFreeReached"}
    assert found(40, 64, 10, min_free_percent=15) == {}
    assert found(40, 64, 0) == {}, "without minFree the disk may be full"


def test_an_unknown_disk_is_no_condition() -> None:
    assert found(40, 0, 0, min_free_percent=15) == {}
