"""tierd with a tier of two volumes: descriptions, status, restart, and a volume that is removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import FileSystemTierDocument, TierVolumeDocument
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for

MIB = 1 << 20
KEYS = 40
WAIT_SECONDS = 60.0


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[TierdTestbed]:
    volumes = tuple(tmp_path / name for name in ("d0", "d1"))
    found = TierdTestbed(
        tmp_path / "testbed",
        TierdOptions(
            memory_bytes=8 * MIB, file_bytes=64 * MIB, persistence="Process", volumes=volumes
        ),
    )
    yield found
    found.close()


def objects(directory: Path) -> int:
    return len(list(directory.rglob("*.kv")))


def store(testbed: TierdTestbed, tmp_path: Path) -> None:
    engine = testbed.engine(strict=True)
    assert engine.wait("can_store", WAIT_SECONDS)
    for number in range(KEYS):
        assert engine.wait("can_store", WAIT_SECONDS)
        assert engine.store(number, WAIT_SECONDS)
    assert engine.wait_for(
        lambda: objects(tmp_path / "d0") + objects(tmp_path / "d1") == KEYS, WAIT_SECONDS
    )
    engine.close(2.0)


def volumes(testbed: TierdTestbed) -> dict[str, dict[str, object]]:
    tier = next(tier for tier in testbed.status()["tiers"] if tier["name"] == "disk")
    return {each["name"]: each for each in tier["volumes"]}


def test_a_restart_serves_what_is_on_the_volumes_that_are_left(
    testbed: TierdTestbed, tmp_path: Path
) -> None:
    testbed.start_tierd()
    store(testbed, tmp_path)
    counts = {name: objects(tmp_path / name) for name in ("d0", "d1")}
    assert min(counts.values()) > 5
    for name in counts:
        assert list((tmp_path / name).glob("*/identity.json")), "every volume says what it holds"
    wait_for(lambda: volumes(testbed)["d0"]["objects"] == counts["d0"], "status counts objects")

    # The disk d1 is replaced by an empty one, which a pod without the volume does not mount.
    testbed.kill_tierd()
    shutil.rmtree(tmp_path / "d1")
    tier = testbed.topology.structural.tiers[1]
    assert isinstance(tier, FileSystemTierDocument)
    rest = tier.model_copy(
        update={"volumes": (TierVolumeDocument(name="d0", path=str(tmp_path / "d0")),)}
    )
    testbed.change(tiers=[testbed.topology.structural.tiers[0], rest])
    testbed.start_tierd()
    engine = testbed.engine(strict=True)
    assert engine.wait("can_store", WAIT_SECONDS)
    assert engine.wait_for(
        lambda: sum(map(bool, map(engine.holds, range(KEYS)))) == counts["d0"], WAIT_SECONDS
    )
    served = sum(engine.load([number], WAIT_SECONDS) for number in range(KEYS))
    assert served == counts["d0"]
    assert engine.seen.wrong == 0
    for number in range(KEYS):
        assert engine.wait("can_store", WAIT_SECONDS)
        if not engine.holds(number):
            assert engine.store(number, WAIT_SECONDS)
    assert engine.wait_for(lambda: objects(tmp_path / "d0") == KEYS, WAIT_SECONDS), (
        "and takes the rest"
    )
