"""``minFree`` on a real file system, with a real tierd: a capacity of 1 GiB on a disk of 64 MiB."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.scorecard.small_disks import DiskUnavailableError, mounted

MIB = 1 << 20
MIN_FREE_PERCENT = 25


def free_percent(path: Path) -> float:
    found = os.statvfs(path)
    return 100 * found.f_bavail / found.f_blocks


def test_a_capacity_above_the_disk_is_said_and_room_stays_for_others(tmp_path: Path) -> None:
    try:
        with mounted(tmp_path, "ext4", 64 * MIB) as disk:
            _check(disk.path, tmp_path)
    except DiskUnavailableError as error:
        pytest.skip(str(error))


def _check(disk: Path, directory: Path) -> None:
    options = TierdOptions(memory_bytes=16 * MIB, file_bytes=1 << 30, files=disk / "tier")
    testbed = TierdTestbed(directory / "testbed", options)
    files = testbed.live.tiers["disk"].model_copy(update={"min_free_percent": MIN_FREE_PERCENT})
    live = testbed.live.model_copy(
        update={"generation": 2, "tiers": {**testbed.live.tiers, "disk": files}}
    )
    testbed.retune(live)
    try:
        testbed.start_tierd()
        engine = testbed.engine_process("--keys", "4000", "--identity", "filler")
        wait_for(
            lambda: testbed.counter("tier_writes") * 64 * 1024 > 64 * MIB,
            f"more than the disk is written: {testbed.status()}",
        )
        # As much as the disk has was written: without ``minFree`` nothing would be free, or become
        # free. How far eviction is behind depends on the machine.
        wait_for(lambda: free_percent(disk) >= MIN_FREE_PERCENT - 1, "room for others")
        others = disk / "others"
        others.write_bytes(os.urandom(12 * MIB))
        wait_for(lambda: free_percent(disk) >= MIN_FREE_PERCENT - 1, "room for others again")
        before = testbed.counter("tier_writes")
        wait_for(lambda: testbed.counter("tier_writes") > before, "stores go on")
        wait_for(lambda: "CapacityExceedsDisk" in conditions(testbed), "the condition")
        message = conditions(testbed)["CapacityExceedsDisk"]
        assert "tier disk: capacity 1.00 GiB exceeds its file system" in message
        engine.kill()
    finally:
        testbed.close()


def conditions(testbed: TierdTestbed) -> dict[str, str]:
    return {each["type"]: each["message"] for each in testbed.status().get("conditions", [])}
