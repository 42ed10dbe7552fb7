"""Events about data in hostPath directories and NFS exports of a deleted policy."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import file_tier
from tests.unit.controller.test_plan import cached_policy

from kvtier_operator.controller.children.gc import orphaned_data_events
from kvtier_operator.settings import Settings

LIVE = {"liveGeneration": 1}
TIERS = (
    file_tier("export", {"nfs": {"server": "nas", "path": "/kv/a"}}),
    file_tier("local", {"hostPath": {"path": "/mnt/kv"}}, sharing="Node"),
    file_tier("claimed", {"claimTemplate": {"storageClassName": "fast"}}),
)


def allowed(**entry: Any) -> Settings:
    export = {"namespaces": ["n"], "nfs": {"server": "nas", "exportPrefix": "/kv"}, **entry}
    return controllers.settings(allowedVolumes=[export, {"namespaces": ["n"], "hostPath": "/mnt"}])


def test_each_directory_that_stays_is_reported_with_volume_and_path() -> None:
    events = orphaned_data_events(
        cached_policy(tiers=TIERS, status=LIVE), allowed().allowed_volumes
    )
    hint = "with its data; delete it once no pod uses it"
    assert [each.message for each in events] == [
        f"tier export: directory n/u-1 stays in nas:/kv/a {hint}",
        f"tier local: directory n/u-1 stays in /mnt/kv on each node where its pods ran {hint}",
    ]
    assert {(each.type, each.reason, each.involved[3:]) for each in events} == {
        ("Normal", "DataLeft", ("chat", "u-1"))
    }


def test_deleting_a_shared_directory_is_not_suggested() -> None:
    events = orphaned_data_events(
        cached_policy(tiers=TIERS[:1], status=LIVE), allowed(shared=True).allowed_volumes
    )
    assert [each.message for each in events] == [
        "tier export: its data stays in nas:/kv/a until it is evicted, "
        "because other policies share the directory"
    ]


@pytest.mark.parametrize(
    ("tiers", "status"),
    [(TIERS, None), (TIERS, {"conditions": []}), (TIERS[2:], LIVE), ((), LIVE)],
    ids=["never reconciled", "never applied", "a claim is deleted with its policy", "memory only"],
)
def test_a_policy_without_directories_gets_no_event(
    tiers: Any, status: dict[str, Any] | None
) -> None:
    assert (
        orphaned_data_events(cached_policy(tiers=tiers, status=status), allowed().allowed_volumes)
        == []
    )
