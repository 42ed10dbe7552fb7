"""Following live.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Structural,
)
from kvtier.tierd.live_config import LiveConfigWatcher

TIERS = {"ram": LiveTier(), "disk": LiveTier(capacity_bytes=1000)}


def make(directory: Path) -> LiveConfigWatcher:
    structural = Structural(
        policy=PolicyIdentity(namespace="n", name="p"),
        content_hash="h",
        run_directory="/dev/shm/kvtier-never",
        tiers=[
            MemoryTierDocument(name="ram", capacity_bytes=1 << 20),
            FileSystemTierDocument(name="disk", path="/nowhere", sharing="Pod"),
        ],
        live=Live(generation=1, tiers=TIERS),
    )
    return LiveConfigWatcher(directory, structural)


def swap(directory: Path, version: str, document: Any) -> None:
    """As the kubelet does: a new directory, then the symlink ``..data`` is replaced."""
    data = directory / f"..{version}"
    data.mkdir()
    (data / "live.json").write_text(document if isinstance(document, str) else json.dumps(document))
    link = directory / "..data.new"
    link.symlink_to(data.name)
    os.replace(link, directory / "..data")
    if not (directory / "live.json").is_symlink():
        (directory / "live.json").symlink_to("..data/live.json")


def test_without_a_file_the_values_of_attaching_hold(tmp_path: Path) -> None:
    follower = make(tmp_path)
    assert not follower.poll()
    assert follower.live.generation == 1


def test_a_swapped_symlink_is_noticed(tmp_path: Path) -> None:
    follower = make(tmp_path)
    swap(tmp_path, "1", {"generation": 2, "tiers": {"disk": {"loadWeight": 50}}})
    assert follower.poll()
    assert (follower.live.generation, follower.live.tiers["disk"].load_weight) == (2, 50)
    assert not follower.poll()
    swap(tmp_path, "2", {"generation": 3})
    assert follower.poll()
    assert (follower.live.generation, follower.live.tiers["disk"].load_weight) == (3, 50)


def test_a_malformed_value_is_rejected_alone_and_counted_once(tmp_path: Path) -> None:
    follower = make(tmp_path)
    swap(
        tmp_path,
        "1",
        {
            "generation": 2,
            "minLoadTokens": "many",
            "tiers": {"disk": {"loadWeight": 0, "syncData": True}},
        },
    )
    follower.poll()
    follower.poll()
    disk = follower.live.tiers["disk"]
    assert (follower.live.generation, disk.load_weight, disk.sync_data) == (2, 100, True)
    assert follower.live.min_load_tokens == 512
    assert follower.refused_total == 2
    assert len(follower.refusals) == 2
    swap(tmp_path, "2", {"generation": 3, "minLoadTokens": 10})
    follower.poll()
    assert (follower.refused_total, follower.refusals) == (2, ())


def test_a_file_with_invalid_json_changes_nothing(tmp_path: Path) -> None:
    follower = make(tmp_path)
    swap(tmp_path, "1", {"generation": 2})
    follower.poll()
    swap(tmp_path, "2", "{")
    assert not follower.poll()
    assert not follower.poll()
    assert follower.live.generation == 2
    assert follower.refused_total == 1
    swap(tmp_path, "3", "[")
    follower.poll()
    assert follower.refused_total == 2


def test_a_removed_file_changes_nothing(tmp_path: Path) -> None:
    follower = make(tmp_path)
    swap(tmp_path, "1", {"generation": 2})
    follower.poll()
    (tmp_path / "live.json").unlink()
    assert not follower.poll()
    assert follower.live.generation == 2
    assert follower.refused_total == 0


@pytest.mark.parametrize(
    "around",
    [
        '{"generation": %s}',
        '{"unknown": %s}',
        '{"tiers": %s}',
        '{"tiers": {"disk": {"loadWeight": %s}}}',
    ],
)
def test_deep_nesting_does_not_end_the_updates(tmp_path: Path, around: str) -> None:
    follower = make(tmp_path)
    live = follower.live
    path = tmp_path / "live.json"
    # From what can be read to what cannot: at the border reading succeeds and the next step may
    # not.
    for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit()):
        path.write_text(around % ("[" * depth + "]" * depth))
        assert not follower.poll()
        assert follower.live is live or follower.live == live
    assert follower.refused_total >= 100
    path.write_text('{"generation": 2}')
    assert follower.poll()
