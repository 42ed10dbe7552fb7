"""Live values change under a running engine as the kubelet changes them (``..data``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.tier_files import bytes_below, files_below

from kvtier.config.models import Live, LiveTier, Selection, StorePolicy
from kvtier.config.writer import document_text
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed, wait_for
from kvtier.tierd.live_config import POLL_SECONDS

MIB = 1 << 20


@dataclass
class Mount:
    """A ConfigMap volume: ``live.json -> ..data/live.json``, ``..data -> ..<version>``."""

    directory: Path
    version: int = 0
    versions: list[Path] = field(default_factory=list)

    def write(self, text: str) -> None:
        """As the kubelet: a new directory, one rename of the link, removal of the old directory."""
        self.version += 1
        fresh = self.directory / f"..version-{self.version}"
        fresh.mkdir()
        (fresh / "live.json").write_text(text)
        link = self.directory / "..data_tmp"
        link.symlink_to(fresh.name)
        os.replace(link, self.directory / "..data")
        path = self.directory / "live.json"
        if not path.is_symlink():
            path.unlink(missing_ok=True)
            path.symlink_to("..data/live.json")
        for old in self.versions:
            (old / "live.json").unlink()
            old.rmdir()
        self.versions = [fresh]


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[TierdTestbed]:
    made = TierdTestbed(tmp_path, TierdOptions(file_bytes=64 * MIB, memory_bytes=8 * MIB))
    yield made
    made.close()


def live(generation: int, capacity: int, **changes: object) -> Live:
    tier = {"capacity_bytes": capacity, **changes}
    return Live(
        generation=generation,
        min_load_tokens=0,
        tiers={"ram": LiveTier(), "disk": LiveTier(**tier)},
    )  # type: ignore[arg-type]


def used(testbed: TierdTestbed) -> int:
    return bytes_below(testbed.files, ".kv")


def held(testbed: TierdTestbed, within: int) -> Callable[[], bool]:
    def check() -> bool:
        try:
            return used(testbed) <= within
        except FileNotFoundError:  # evicted while it was looked at
            return False

    return check


def test_live_values_change_under_load_and_an_invalid_document_is_ignored(
    testbed: TierdTestbed,
) -> None:
    mount = Mount(testbed.topology_directory)
    mount.write(document_text(testbed.live))
    testbed.start_tierd()
    engine = testbed.engine_process("--keys", "400")
    engine.wait_more("loaded", 10)
    wait_for(lambda: used(testbed) > 12 * MIB, "the file tier holds more than it may hold later")

    # A smaller capacity, another selection and another weight take effect under load.
    changed = live(2, 8 * MIB, load_weight=7, load_timeout_seconds=2).model_copy(
        update={"selection": Selection.COST}
    )
    mount.write(document_text(changed))
    wait_for(lambda: testbed.status().get("appliedGeneration") == 2, "the new values are in force")
    wait_for(held(testbed, 8 * MIB), "the directory is within its new capacity")
    engine.wait_more("loaded", 10)
    disk = next(tier for tier in testbed.status()["tiers"] if tier["name"] == "disk")
    assert disk["capacityBytes"] == 8 * MIB

    # A document that is none, then one with a bad value beside good ones.
    mount.write("{ not json")
    wait_for(
        lambda: testbed.status()["liveRefusedTotal"] == 1, "the document is refused and counted"
    )
    assert testbed.status()["appliedGeneration"] == 2
    text = document_text(live(3, 8 * MIB, store_policy=StorePolicy.NONE)).replace(
        '"loadWeight": 100', '"loadWeight": 0'
    )
    mount.write(text)
    wait_for(lambda: testbed.status().get("appliedGeneration") == 3, "the good values are in force")
    assert testbed.status()["liveRefusedTotal"] > 1
    assert any("loadWeight" in refusal for refusal in testbed.status()["liveRefusals"])

    # Nothing more is written, and the engine notices nothing.
    wait_for(lambda: testbed.status()["pendingStores"] == 0, "what was to be written is")
    names = {path.name for path in files_below(testbed.files, ".kv")}
    engine.wait_more("stored", 20)
    assert {path.name for path in files_below(testbed.files, ".kv")} <= names
    assert engine.stop()["wrong"] == 0


def test_a_live_change_takes_effect_within_five_seconds() -> None:
    assert 0 < POLL_SECONDS <= 2.0
